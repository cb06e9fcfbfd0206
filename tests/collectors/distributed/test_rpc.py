"""RPC collectors under the names that the field knows, and their arguments."""

from __future__ import annotations

import pytest
from tests.collectors.workers.envs import DONE, IDS, STEP, VERSION, gain, makers

from rollwright import collectors
from rollwright.collectors import RPCCollector
from rollwright.weight_update import RPCWeightSyncScheme, WeightSyncScheme


@pytest.fixture
def make():
    made = []

    def build(*args, **options):
        made.append(RPCCollector(*args, **{"launcher": "mp", "frames_per_batch": 40, **options}))
        return made[-1]

    yield build
    for collector in made:
        collector.shutdown(raise_on_error=False)


def test_the_name_of_the_field_is_the_same_class():
    assert collectors.RPCDataCollector is RPCCollector


def test_groups_of_several_workers_whose_weights_are_published(make):
    scheme = RPCWeightSyncScheme()
    collector = make(
        makers(2),
        gain(),
        num_workers_per_collector=2,
        sync=True,
        total_frames=80,
        update_after_each_batch=True,
        track_policy_version=True,
        weight_sync_schemes={"policy": scheme},
    )
    batches = [batch.clone() for batch in collector]
    assert [batch.shape for batch in batches] == [(4, 10)] * 2
    assert [int(batch[VERSION].max()) for batch in batches] == [1, 2]
    assert isinstance(WeightSyncScheme.from_backend("rpc"), RPCWeightSyncScheme)


def test_whole_trajectories_as_of_other_collectors(make):
    collector = make(makers(2), gain(), trajs_per_batch=2, traj_format="cat", total_frames=160)
    for batch in collector:
        for number in batch[IDS].unique():
            row = batch[batch[IDS] == number]
            assert row["observation"][:, STEP].tolist() == list(range(len(row)))
            assert bool(row[DONE][-1])


@pytest.mark.parametrize("given", [{"visible_devices": []}, {"tensorpipe_options": {"num_worker_threads": 3}}])
def test_options_of_torch_that_change_nothing_say_so_once(make, given):
    with pytest.warns(UserWarning, match="tensorpipe_options=.* has no effect") as told:
        make(makers(1), gain(), total_frames=40, **given)
    assert len(told) == 1


WRONG = {
    "twice": (
        {"visible_devices": [], "tensorpipe_options": {"devices": []}},
        ValueError,
        "visible_devices: got it as 'devices'",
    ),
    "name": ({"update_at_each_batch": True}, TypeError, "called update_after_each_batch"),
    "launcher": ({"launcher": "slurm"}, ValueError, "launcher: expected 'mp' or 'submitit'"),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_wrong_arguments_are_refused(make, wrong):
    options, error, message = WRONG[wrong]
    with pytest.raises(error, match=message):
        make(makers(2), gain(), **options)
