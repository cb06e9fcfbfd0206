"""The transports of rollwright pass the conformance suite."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import pytest
import torch
from tensordict import TensorDictBase
from tests.patience import patient
from tests.policy_ways import WAYS, every_way, one_way
from tests.ray_cluster import attached

from rollwright.testing.transports import TransportConformance
from rollwright.testing.transports import frames as of
from rollwright.testing.transports.frames import VERSION, expect
from rollwright.testing.transports.trial import Trial


def weights_every_way(trial: Trial) -> None:
    """Weights reach every module that a policy reads, given or made, in whatever way, and a saved state has them."""
    envs = of.factories(trial.num_workers)
    for made in (True, False):
        policy, learned = every_way(0.0)
        options = {"policy_factory": _made_every_way} if made else {}
        collector = trial.collector(
            "sync", envs, None if made else policy, each=4, track_policy_version=True, **options
        )
        for version in range(3):
            if version:
                published = collector.update_policy_weights_(policy if made or version == 2 else None)
                expect(published == version, "versions count on")
            _expect_values(collector.next(), float(version), version)
            with torch.no_grad():
                for module in learned:
                    module.value.fill_(version + 1.0)
        state = collector.state_dict()
        collector.shutdown()
    restored = trial.collector("sync", envs, every_way(9.0)[0], each=4, track_policy_version=True)
    restored.load_state_dict(state)
    _expect_values(restored.next(), 2.0, 2)


def _made_every_way() -> Any:
    return every_way(0.0)[0]


def _expect_values(batch: TensorDictBase, value: float, version: int) -> None:
    tags = batch[VERSION].unique().tolist()
    expect(tags == [version], f"version {version} acts, and frames are tagged {tags}")
    for way in WAYS:
        found = batch[way].unique().tolist()
        expect(found == [value], f"{way}: expected weights {value} to act, got {found}")


def weights_of_one(trial: Trial) -> None:
    """Weights of the one module that a function reads have the names that they have there."""
    envs, (policy, learned) = of.factories(trial.num_workers), one_way("bound method", 0.0)
    collector = trial.collector("sync", envs, policy, each=4)
    collector.next()
    for version, weights in enumerate((learned, learned.state_dict(), {"value": learned.value}, None), 1):
        with torch.no_grad():
            learned.value.fill_(float(version))
        expect(collector.update_policy_weights_(weights) == version, "versions count on")
        batch = collector.next()
        acted = batch["action"].unique().tolist()
        expect(acted == [float(version)], f"weights {float(version)} were published, and {acted} act")


class Patient(TransportConformance):
    """With limits that grow with the load of the machine, and checks of how workers find what a policy reads."""

    interrupt_s = property(lambda self: patient(1.0))  # type: ignore[assignment]
    failure_s = property(lambda self: patient(5.0))  # type: ignore[assignment]
    limit_s = property(lambda self: patient(60.0))  # type: ignore[assignment]

    @pytest.mark.parametrize("check", [weights_every_way, weights_of_one])
    def test_policy(self, check: Callable[[Trial], None]) -> None:
        with Trial(self.settings()) as trial:
            check(trial)


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
class TestDistributed(Patient):
    backend = "distributed"
    backend_options: ClassVar[dict[str, Any]] = {"num_workers_per_collector": 2}


@pytest.mark.slow
class TestRpc(Patient):
    backend = "rpc"
    backend_options: ClassVar[dict[str, Any]] = {"num_workers_per_collector": 2}


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
