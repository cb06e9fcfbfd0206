"""Distributed collectors under the names that the field knows, and their arguments."""

from __future__ import annotations

import pytest
import torch
from tests.collectors.workers.envs import VERSION, gain, makers

from rollwright import collectors
from rollwright.collectors import Collector, DistributedCollector, DistributedSyncCollector
from rollwright.weight_update import DistributedWeightSyncScheme


@pytest.fixture
def make():
    made = []

    def build(kind, *args, **options):
        made.append(kind(*args, **{"launcher": "mp", "frames_per_batch": 40, **options}))
        return made[-1]

    yield build
    for collector in made:
        collector.shutdown(raise_on_error=False)


def test_the_names_of_the_field_are_the_same_classes():
    assert collectors.DistributedDataCollector is DistributedCollector
    assert collectors.DistributedSyncDataCollector is DistributedSyncCollector


def test_groups_of_several_workers_with_options_of_their_collectors(make):
    collector = make(
        DistributedCollector,
        makers(2),
        gain(),
        num_workers_per_collector=2,
        collector_class="sync",
        collector_kwargs={"max_frames_per_traj": 5},
        sync=True,
        total_frames=80,
        backend="gloo",
    )
    assert [batch.shape for batch in collector] == [(4, 10)] * 2
    assert collector.options.max_frames_per_traj == 5
    assert collector.own_options.backend == "distributed"


def test_an_option_may_be_said_twice_with_one_value(make):
    kwargs = {"storing_device": "cpu", "max_frames_per_traj": 5}
    collector = make(
        DistributedCollector,
        makers(2),
        gain(),
        collector_kwargs=kwargs,
        storing_device="cpu",
        sync=True,
        total_frames=40,
    )
    assert [batch.shape for batch in collector] == [(2, 20)]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, [0, 0, 0, 0]),
        ({"update_after_each_batch": True}, [1, 2, 3, 4]),
        ({"max_weight_update_interval": 2}, [0, 0, 1, 1]),
    ],
)
def test_weights_are_published_when_they_are_asked_for(make, options, expected):
    collector = make(
        DistributedCollector, makers(1), gain(), sync=True, track_policy_version=True, total_frames=160, **options
    )
    assert [int(batch[VERSION].max()) for batch in collector] == expected


def test_the_synchronous_one_publishes_the_weights_of_the_policy_at_each_batch(make):
    policy = gain(1.0)
    collector = make(DistributedSyncCollector, makers(2), policy, total_frames=120)
    found = []
    for batch in collector:
        found.append(float(batch["action"].flatten()[0]))
        with torch.no_grad():
            for parameter in policy.parameters():
                parameter.add_(1.0)
    assert len(set(found)) == 3


def test_a_policy_without_weights_needs_no_update(make):
    collector = make(DistributedSyncCollector, makers(2), total_frames=80)
    assert [batch.shape for batch in collector] == [(2, 20)] * 2


def test_a_scheme_may_be_named(make):
    scheme = DistributedWeightSyncScheme()
    collector = make(DistributedCollector, makers(1), gain(), sync=True, weight_sync_schemes={"policy": scheme})
    before = collector.next()["action"].clone()
    collector.update_policy_weights_(gain(7.0))
    assert not torch.equal(collector.next()["action"], before)


WRONG = {
    "twice": ({"backend_options": {"launcher": "mp"}}, ValueError, "got 'launcher', which is said by an argument"),
    "num_workers": ({"num_workers": 2}, TypeError, "no option 'num_workers': pass num_collectors="),
    "name": ({"update_at_each_batch": True}, TypeError, "called update_after_each_batch"),
    "unknown": ({"frames_per_bath": 3}, TypeError, "Did you mean 'frames_per_batch'"),
    "class": ({"collector_class": "threads"}, ValueError, "collector_class: expected one of"),
    "kwargs": ({"collector_kwargs": [{}, {}, {}]}, ValueError, "collector_kwargs: expected one dictionary for each"),
    "differs": (
        {"collector_kwargs": {"max_frames_per_traj": 5}, "max_frames_per_traj": 6},
        ValueError,
        "max_frames_per_traj: got 6, and something else in collector_kwargs",
    ),
    "backend": ({"backend": "ucc"}, ValueError, "process_group_backend: expected 'gloo' or 'nccl' or 'mpi', got 'ucc'"),
    "port": ({"tcp_port": 70000}, ValueError, "port: expected a port from 0 to 65535"),
    "both": ({"tcp_port": 7, "backend_options": {"address": "127.0.0.1:0"}}, ValueError, "port=7: address="),
    "groups": ({"num_collectors": 3}, ValueError, "create_env_fn: expected one function for each of the 3"),
    "interval": ({"max_weight_update_interval": -2}, ValueError, "max_weight_update_interval: .*at least -1"),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_wrong_arguments_are_refused(make, wrong):
    options, error, message = WRONG[wrong]
    with pytest.raises(error, match=message):
        make(DistributedCollector, makers(2), gain(), **options)


def test_a_backend_of_torch_that_changes_nothing_says_so_once(make):
    with pytest.warns(UserWarning, match="process_group_backend='nccl' has no effect") as told:
        make(DistributedCollector, makers(1), gain(), total_frames=40, backend="nccl")
    assert len(told) == 1


def test_wrong_arguments_of_the_synchronous_one_are_refused(make):
    with pytest.raises(ValueError, match="update_interval: expected an integer of at least 1, got 0"):
        make(DistributedSyncCollector, makers(2), gain(), update_interval=0)
    with pytest.raises(TypeError, match="no option 'sync': it is True here"):
        make(DistributedSyncCollector, makers(2), gain(), sync=False)


def test_a_factory_without_a_policy_has_no_weights_to_publish(make):
    with pytest.raises(RuntimeError, match="update_after_each_batch: found no module"):
        make(DistributedCollector, makers(1), policy_factory=gain, update_after_each_batch=True)


def test_the_factory_has_the_backend_under_its_name():
    options = {"frames_per_batch": 40, "total_frames": 40, "sync": True, "num_collectors": 2}
    with Collector(makers(2), gain(), backend="distributed", **options) as collector:
        assert [batch.shape for batch in collector] == [(2, 20)]
