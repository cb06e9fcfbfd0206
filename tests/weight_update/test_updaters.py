"""Updaters: what is asked in which order, and where weights go."""

import pytest
import torch
from tensordict import TensorDict
from torch import nn

from rollwright.weight_update import (
    LocalWeightsUpdaterBase,
    MultiProcessedWeightUpdater,
    RemoteModuleWeightUpdater,
    RemoteWeightsUpdaterBase,
    VanillaWeightUpdater,
    WeightUpdaterBase,
)


class FakeCollector:
    def __init__(self):
        self.pushed = []

    def push_to_workers(self, weights, worker_ids):
        self.pushed.append((weights, worker_ids))
        return len(self.pushed)


class Recording(WeightUpdaterBase):
    def __init__(self):
        self.calls = []

    def _get_server_weights(self):
        self.calls.append("get")
        return 1

    def _maybe_map_weights(self, policy_or_weights):
        self.calls.append("map")
        return policy_or_weights * 10

    def all_worker_ids(self):
        return [0, 1, 2]

    def _skip_update(self, worker_id):
        return worker_id == 1

    def _sync_weights_with_worker(self, *, worker_id=None, server_weights):
        self.calls.append((worker_id, server_weights))


def test_what_is_asked():
    updater = Recording()
    updater.register_post_hook(lambda: updater.calls.append("hook"))
    updater.push_weights()
    assert updater.calls == ["get", "map", (0, 10), (2, 10), "hook"]
    updater.calls.clear()
    updater.push_weights(5, worker_ids=2)
    updater.push_weights(6, worker_ids=[1, 2])
    assert updater.calls == ["map", (2, 50), "hook", "map", (2, 60), "hook"]
    assert len(updater.post_hooks) == 1


def test_weights_for_all_in_one_go_come_without_a_worker():
    class Once(WeightUpdaterBase):
        given = None

        def _sync_weights_with_worker(self, *, server_weights):
            self.given = server_weights

    updater = Once()
    updater.push_weights(3)
    assert updater.given == 3


def test_hooks_are_not_shared():
    one, other = Recording(), Recording()
    one.register_post_hook(print)
    assert other.post_hooks == []


def test_a_policy_in_this_process():
    policy, trained = nn.Linear(2, 1), nn.Linear(2, 1)
    updater = VanillaWeightUpdater(
        weight_getter=lambda: trained.state_dict(), policy_weights=TensorDict.from_module(policy)
    )
    updater.push_weights()
    assert torch.equal(policy.weight, trained.weight)
    for weights in (nn.Linear(2, 1), TensorDict.from_module(nn.Linear(2, 1))):
        updater.push_weights(weights)
        assert torch.equal(policy.bias, weights.bias if isinstance(weights, nn.Module) else weights["bias"])
    assert policy.weight.requires_grad
    with pytest.raises(ValueError, match="no weights were passed"):
        VanillaWeightUpdater.from_policy(policy).push_weights()


@pytest.mark.parametrize(
    "make", [VanillaWeightUpdater, LocalWeightsUpdaterBase, RemoteWeightsUpdaterBase, RemoteModuleWeightUpdater]
)
def test_a_collector_takes_the_weights(make):
    updater, collector = make(), FakeCollector()
    with pytest.raises(RuntimeError, match="weight_updater="):
        updater.push_weights({"weight": torch.zeros(1)})
    updater.register_collector(collector)
    assert updater.collector is collector
    module = nn.Linear(2, 1)
    updater.push_weights(module)
    ((weights, workers),) = collector.pushed
    assert torch.equal(weights["weight"], module.weight)
    assert workers is None
    with pytest.raises(ValueError, match="no weights were passed"):
        updater.push_weights()
    with pytest.raises(RuntimeError, match="another collector"):
        updater.register_collector(FakeCollector())


def test_workers_by_id():
    updater, collector = (
        MultiProcessedWeightUpdater(get_server_weights=lambda: {"weight": torch.ones(2)}),
        FakeCollector(),
    )
    updater.register_collector(collector)
    updater.push_weights()
    updater.push_weights(worker_ids=[0, 2])
    assert [workers for _, workers in collector.pushed] == [None, [0], [2]]


def test_weights_that_follow():
    followers = {torch.device("cpu"): TensorDict({"weight": torch.zeros(2)})}
    updater = MultiProcessedWeightUpdater(policy_weights=followers)
    updater.push_weights(TensorDict({"weight": torch.ones(2)}))
    assert followers[torch.device("cpu")]["weight"].tolist() == [1, 1]
    assert updater.all_worker_ids() == [torch.device("cpu")]


def test_init_takes_anything():
    assert Recording().init(1, key=2) is None
    assert WeightUpdaterBase.from_policy(nn.Linear(1, 1)) is None
