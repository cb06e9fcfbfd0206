"""Weight synchronization schemes: the memory that the weights of one model are sent through."""

from __future__ import annotations

from collections.abc import Mapping
from multiprocessing.context import get_spawning_popen
from typing import Any, ClassVar

from rollwright.weight_update._scheme import WeightSyncScheme
from rollwright.weight_update.forms import Strategy

__all__ = [
    "DistributedWeightSyncScheme",
    "MultiProcessWeightSyncScheme",
    "NoWeightSyncScheme",
    "RPCWeightSyncScheme",
    "RayWeightSyncScheme",
    "SharedMemWeightSyncScheme",
]


class SharedMemWeightSyncScheme(WeightSyncScheme, backends=("shared", "thread")):
    """Workers that get the same weights read them from the same memory: a publication is copied once, for all.

    Args:
        strategy: see :class:`WeightSyncScheme`.
        per_worker_weights: publish to each worker by itself even what is for all.

    Example:
        >>> import copy
        >>> import torch
        >>> from torch import nn
        >>> learner, actor = nn.Linear(2, 1), nn.Linear(2, 1)
        >>> sender = SharedMemWeightSyncScheme()
        >>> sender.init_on_sender(model=learner)
        >>> receiver = copy.copy(sender)  # or what a process gets that is started with it
        >>> receiver.init_on_receiver(model=actor)
        >>> sender.send(), receiver.receive(), receiver.receive()
        (1, 1, None)
        >>> torch.equal(learner.weight, actor.weight)
        True
    """

    def __init__(self, strategy: Strategy = "tensordict", *, per_worker_weights: bool = False) -> None:
        super().__init__(strategy)
        self.per_worker_weights = per_worker_weights

    @property
    def shares(self) -> bool:
        """See :class:`WeightSyncScheme`."""
        return not self.per_worker_weights


class MultiProcessWeightSyncScheme(WeightSyncScheme, backends=("process", "multiprocessing")):
    """Each worker has memory of its own: a publication is copied once for each."""

    @property
    def shares(self) -> bool:
        """See :class:`WeightSyncScheme`."""
        return False


class NoWeightSyncScheme(WeightSyncScheme, backends=("none", "direct")):
    """Nothing travels: workers act with the weights that they began with, or get them elsewhere."""

    sends: ClassVar[bool] = False


class DistributedWeightSyncScheme(WeightSyncScheme, backends=("distributed",)):
    """Weights for groups of workers on other machines: a publication is sent once to each group.

    It is what collectors with ``backend="distributed"`` do without a scheme, too: the collector holds the weights, and
    its connections to the groups bring them there.

    Args:
        strategy: see :class:`WeightSyncScheme`.

    Example:
        >>> WeightSyncScheme.from_backend("distributed")
        DistributedWeightSyncScheme(strategy='tensordict')
    """


class RPCWeightSyncScheme(WeightSyncScheme, backends=("rpc",)):
    """Weights for groups of workers that are members of a group of RPC: a publication is sent once to each group.

    It is what collectors with ``backend="rpc"`` do without a scheme, too.

    Args:
        strategy: see :class:`WeightSyncScheme`.

    Example:
        >>> WeightSyncScheme.from_backend("rpc")
        RPCWeightSyncScheme(strategy='tensordict')
    """


class RayWeightSyncScheme(SharedMemWeightSyncScheme, backends=("ray",)):
    """Weights for workers in actors of Ray: they cross the network once for each actor, whatever workers it has.

    They go by the connection of a collector with ``backend="ray"``, which takes the scheme as
    ``weight_sync_schemes={"policy": RayWeightSyncScheme()}``; it is what such a collector does without one, too.

    Args:
        strategy: see :class:`WeightSyncScheme`.
        backend: a backend of ``torch.distributed``, for programs that name one: none is used.

    Example:
        >>> RayWeightSyncScheme.from_backend("ray")
        RayWeightSyncScheme(strategy='tensordict')
    """

    def __init__(self, strategy: Strategy = "tensordict", backend: str = "gloo") -> None:
        super().__init__(strategy)

    def __getstate__(self) -> Mapping[str, Any]:
        if self._boards is not None and get_spawning_popen() is None:  # memory of this machine
            raise TypeError(
                "RayWeightSyncScheme: a sender cannot be sent to an actor. Pass the scheme to RayCollector as "
                "weight_sync_schemes={'policy': scheme}, which brings the weights there."
            )
        return super().__getstate__()
