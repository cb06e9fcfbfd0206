"""Hooks, postproc, and reaching into a collector by path."""

from __future__ import annotations

import re

import pytest
import torch

from rollwright.envs import GymEnv, StepCounter, TransformedEnv
from rollwright.errors import RollwrightError
from rollwright.testing.mocking_classes import CountingEnv

pytestmark = pytest.mark.filterwarnings("ignore:.*split_trajs=True pads")


def test_hooks_are_called_once_a_batch_in_order(make):
    log = []

    class Logged(CountingEnv):
        def _reset(self, tensordict=None, **kwargs):
            log.append("reset")
            return super()._reset(tensordict, **kwargs)

        def _step(self, tensordict):
            log.append("step")
            return super()._step(tensordict)

    collector = make(
        Logged(max_steps=100),
        frames_per_batch=2,
        total_frames=6,
        reset_at_each_iter=True,
        pre_collect_hook=lambda: log.append("pre"),
        post_collect_hook=lambda td: log.append("post"),
        postproc=lambda td: log.append("postproc") or td,
    )
    assert log == []
    list(collector)
    assert log == ["pre", "reset", "step", "step", "postproc", "post"] * 3


def test_the_post_hook_sees_the_very_object_that_is_yielded(make):
    seen = []
    collector = make(
        CountingEnv(),
        frames_per_batch=4,
        total_frames=8,
        split_trajs=True,
        postproc=lambda td: td.set("extra", torch.ones(td.shape)),
        post_collect_hook=seen.append,
    )
    for number, batch in enumerate(collector):
        assert batch is seen[number]
        assert "extra" in batch
        assert ("collector", "mask") in batch.keys(True)


def test_what_the_post_hook_returns_is_ignored(make):
    collector = make(CountingEnv(), frames_per_batch=4, post_collect_hook=lambda td: "nothing")
    assert collector.next().shape == (4,)


def test_hooks_can_be_set_later(make):
    collector = make(CountingEnv(), frames_per_batch=4)
    collector.next()
    log = []
    collector.pre_collect_hook = lambda: log.append("pre")
    collector.post_collect_hook = lambda td: log.append("post")
    collector.next()
    assert log == ["pre", "post"]
    collector.pre_collect_hook = collector.post_collect_hook = None
    collector.next()
    assert log == ["pre", "post"]


class Stop(Exception):
    pass


@pytest.mark.parametrize("where", ["pre_collect_hook", "post_collect_hook", "postproc"])
def test_exceptions_stop_the_collection_and_reach_the_caller(make, where):
    def fail(*args):
        raise Stop("enough")

    collector = make(CountingEnv(), frames_per_batch=4, total_frames=8, **{where: fail})
    with pytest.raises(Stop, match="enough"):
        list(collector)


def test_after_a_hook_failed_the_collector_can_go_on(make, count):
    env = CountingEnv(max_steps=100)
    collector = make(env, count(env), frames_per_batch=3, total_frames=6)
    fail = [True]

    def hook():
        if fail:
            raise Stop(fail.pop())

    collector.pre_collect_hook = hook
    with pytest.raises(Stop):
        collector.next()
    assert collector.next()["observation"].flatten().tolist() == [0, 1, 2]


@pytest.mark.parametrize("where", ["postproc", "post_collect_hook"])
def test_no_trajectory_goes_on_across_a_batch_that_was_lost(make, where):
    """A batch that never reached the caller is a hole, and what follows it is another trajectory."""
    calls = []

    def fails_once(batch):
        calls.append(batch)
        if len(calls) == 2:
            raise Stop
        return batch

    collector = make(CountingEnv(max_steps=1000), frames_per_batch=4, **{where: fails_once})
    before = collector.next()
    with pytest.raises(Stop):
        collector.next()
    after = collector.next()
    assert before["collector", "traj_ids"].tolist() == [0] * 4
    assert after["collector", "traj_ids"].tolist() == [1] * 4
    assert int(after["observation"][0]) == 0


def test_a_trajectory_goes_on_after_the_pre_hook_failed(make):
    """It fails before any step was taken, so nothing is lost."""
    collector = make(CountingEnv(max_steps=1000), frames_per_batch=4)
    before = collector.next()

    def fails():
        raise Stop

    collector.pre_collect_hook = fails
    with pytest.raises(Stop):
        collector.next()
    collector.pre_collect_hook = None
    after = collector.next()
    assert torch.equal(after["collector", "traj_ids"], before["collector", "traj_ids"])
    assert torch.equal(after["observation"][0], before["next", "observation"][-1])


def test_the_result_of_postproc_is_delivered(make):
    collector = make(
        CountingEnv(), frames_per_batch=6, total_frames=12, postproc=lambda td: td[::2].select("observation")
    )
    for batch in collector:
        assert batch.shape == (3,)
        assert list(batch.keys()) == ["observation"]
    assert collector.stats()["frames"] == 12  # frames stepped, whatever postproc makes of them


def test_a_transform_as_postproc(make):
    from rollwright.envs import RewardScaling

    plain = make(lambda: GymEnv("Pendulum-v1"), frames_per_batch=10)
    scaled = make(
        lambda: GymEnv("Pendulum-v1"),
        frames_per_batch=10,
        postproc=RewardScaling(loc=0.0, scale=2.0, in_keys=[("next", "reward")]),
    )
    rewards = []
    for collector in (plain, scaled):
        collector.set_seed(0)
        rewards.append(collector.next()["next", "reward"])
    torch.testing.assert_close(rewards[1], rewards[0] * 2)


# Reaching in.


def test_get_distant_attr_and_map_fn_return_one_value(make):
    env = TransformedEnv(CountingEnv(max_steps=9), StepCounter(max_steps=7))
    collector = make(env, frames_per_batch=4)
    assert collector.get_distant_attr("env.transform.max_steps") == 7
    assert collector.get_distant_attr("env.base_env.max_steps") == 9
    assert collector.map_fn("get_policy_version") == 0
    assert collector.map_fn("set_seed", list_of_args=[(5,)]) == 5


def test_cascade_execute_calls_what_a_path_leads_to(make):
    collector = make(CountingEnv(), frames_per_batch=4)

    class Scheme:
        def configure(self, ref, *, worker_idx):
            return ref, worker_idx

    collector._receiver_schemes = {"policy": Scheme(), 3: [Scheme()]}
    path = "_receiver_schemes['policy'].configure"
    assert collector.cascade_execute(path, "ref", worker_idx=0) == ("ref", 0)
    assert collector.cascade_execute('_receiver_schemes["policy"].configure', "ref", worker_idx=1) == ("ref", 1)
    assert collector.cascade_execute("_receiver_schemes[3][0].configure", "x", worker_idx=2) == ("x", 2)


@pytest.mark.parametrize("path", ["env.nothing", "nothing", "env.action_keys[9]", "_receiver_schemes['actor'].x"])
def test_a_path_that_leads_nowhere_is_named(make, path):
    collector = make(CountingEnv(), frames_per_batch=4)
    with pytest.raises(AttributeError) as error:
        collector.cascade_execute(path)
    assert path in str(error.value)


@pytest.mark.parametrize(
    ("model", "reason"),
    [("env.transform[0]", r"CountingEnv has no '\.transform'"), ("actor[0]", "has no 'actor'")],
)
def test_a_model_that_is_not_there_is_named(make, model, reason):
    with pytest.raises(ValueError, match=rf"model_id: expected 'policy'.* got '{re.escape(model)}'\..*{reason}"):
        make(CountingEnv(), frames_per_batch=4).get_model(model)


def test_what_cannot_be_called_is_named(make):
    collector = make(CountingEnv(), frames_per_batch=4)
    with pytest.raises(TypeError, match=r"env\.max_steps.*int"):
        collector.cascade_execute("env.max_steps")


@pytest.mark.parametrize("path", ["", "env..x", ".env", "env.__import__('os').system('true')", "env[x]"])
def test_a_path_is_never_evaluated(make, path):
    collector = make(CountingEnv(), frames_per_batch=4)
    with pytest.raises((ValueError, AttributeError, TypeError)):
        collector.cascade_execute(path)


def test_worker_idx(make):
    assert make(CountingEnv(), frames_per_batch=4, worker_idx=3).worker_idx == 3
    collector = make(CountingEnv(), frames_per_batch=4)
    with pytest.raises(RuntimeError, match="worker_idx"):
        _ = collector.worker_idx
    collector.worker_idx = 1
    assert collector.worker_idx == 1


def test_init_updater_does_nothing(make):
    assert make(CountingEnv(), frames_per_batch=4).init_updater(1, two=3) is None


def test_pause_is_a_context_that_lets_errors_out(make):
    collector = make(CountingEnv(), frames_per_batch=4)
    with collector.pause():
        pass
    with pytest.raises(Stop), collector.pause():
        raise Stop
    assert collector.next().shape == (4,)


def _stops(*_):
    raise StopIteration("the data is over")


class Stops(CountingEnv):
    """Raises StopIteration at its first step."""

    _step = _stops


@pytest.mark.parametrize("num_collectors", [None, 2])
@pytest.mark.parametrize("who", ["environment", "policy", "pre_collect_hook", "post_collect_hook", "postproc"])
def test_stop_iteration_of_user_code_is_an_error_with_its_text(make, who, num_collectors):
    hooks = {who: _stops} if who not in ("environment", "policy") else {}
    env = Stops if who == "environment" else CountingEnv
    workers = {} if num_collectors is None else {"num_collectors": num_collectors, "sync": True}
    collector = make(env, _stops if who == "policy" else None, frames_per_batch=4, total_frames=8, **hooks, **workers)
    with pytest.raises(RollwrightError, match=r"raised (in step: )?StopIteration: the data is over"):
        list(collector)
