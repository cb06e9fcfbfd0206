"""The transports of rollwright pass the conformance suite."""

from __future__ import annotations

from typing import Any, ClassVar

import pytest
from tests.patience import patient

from rollwright.testing.transports import TransportConformance


class Patient(TransportConformance):
    """With limits that grow with the load of the machine."""

    interrupt_s = property(lambda self: patient(1.0))  # type: ignore[assignment]
    failure_s = property(lambda self: patient(5.0))  # type: ignore[assignment]
    limit_s = property(lambda self: patient(60.0))  # type: ignore[assignment]


class TestProcesses(Patient):
    backend = "process"


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
