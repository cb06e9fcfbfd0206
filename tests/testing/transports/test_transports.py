"""The transports of rollwright pass the conformance suite."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar

import pytest
from tests.patience import patient
from tests.ray_cluster import attached

from rollwright.testing.transports import TransportConformance


class Patient(TransportConformance):
    """With limits that grow with the load of the machine."""

    interrupt_s = property(lambda self: patient(1.0))  # type: ignore[assignment]
    failure_s = property(lambda self: patient(5.0))  # type: ignore[assignment]
    limit_s = property(lambda self: patient(60.0))  # type: ignore[assignment]


class TestProcesses(Patient):
    backend = "process"
    num_workers = 2


@pytest.mark.slow
class TestOneGroup(Patient):
    backend = "tcp"
    backend_options: ClassVar[dict[str, Any]] = {"num_workers_per_collector": 3}


class TestGroupsOfTwo(Patient):
    backend = "tcp"
    backend_options: ClassVar[dict[str, Any]] = {"num_workers_per_collector": 2}


@pytest.mark.slow
class TestGroupsOfOne(Patient):
    backend = "tcp"


@pytest.mark.slow
class TestGlooPairs(Patient):
    backend = "distributed"
    backend_options: ClassVar[dict[str, Any]] = {"num_workers_per_collector": 2, "min_bytes": 0}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:backend='rpc'.*:FutureWarning")
class TestRpc(Patient):
    backend = "rpc"
    one_at_a_time = True
    backend_options: ClassVar[dict[str, Any]] = {"num_workers_per_collector": 2, "min_bytes": 0}


@pytest.fixture(scope="module")
def ray_cluster() -> Iterator[None]:
    pytest.importorskip("ray")
    with attached():
        yield


@pytest.mark.slow
@pytest.mark.ray
@pytest.mark.usefixtures("ray_cluster")
class TestRay(Patient):
    backend = "ray"
    backend_options: ClassVar[dict[str, Any]] = {"num_workers_per_collector": 2}
    limit_s = property(lambda self: patient(120.0))  # type: ignore[assignment]
