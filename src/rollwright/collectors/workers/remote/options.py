"""Options of all backends whose workers run in groups on other machines."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from rollwright._options import check_fields, seconds, whole


@dataclass(frozen=True, kw_only=True)
class RemoteOptions:
    """Options of backends whose workers run in groups, each on some machine.

    Attributes:
        num_workers_per_collector: workers in each group: ``num_collectors`` counts the groups. What a group's workers
            collect crosses the network by one connection, and weights cross it once for all of them.
        host_timeout: seconds without a sign of life after which a group counts as lost, with its workers. A shorter
            silence costs time only.
    """

    num_workers_per_collector: Annotated[int, whole(1)] = 1
    host_timeout: Annotated[float, seconds(positive=True)] = 30.0

    def __post_init__(self) -> None:
        check_fields(self)
