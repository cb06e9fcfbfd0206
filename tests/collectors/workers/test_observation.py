"""What can be seen of many workers and done to them: stats, remote calls, hooks, profiles, states."""

from __future__ import annotations

import io
import json
import os
import threading
import time
import warnings
from functools import partial

import pytest
import torch
from tensordict.nn import TensorDictModule
from tests.collectors.workers.envs import IDENT, STEP, Trouble, gain, makers, one_bad, sampling, tallies, tally
from tests.collectors.workers.frames import check, flat
from tests.collectors.workers.processes import wait_until
from tests.variants import in_turn, one_quick

from rollwright._memory import Segment
from rollwright.collectors import Collector
from rollwright.collectors.workers import group
from rollwright.collectors.workers.control import last_episodes
from rollwright.collectors.workers.counters import Count, WorkerCounters, WorkerState
from rollwright.envs import GymEnv
from rollwright.errors import WorkerError
from rollwright.testing.mocking_classes import CountingEnv

KINDS = ["sync", "async"]


class Better(CountingEnv):
    """Its n-th episode lasts one step and returns n."""

    def __init__(self):
        super().__init__(max_steps=1)
        self.number = 0.0

    def _step(self, tensordict):
        self.number += 1
        outcome = super()._step(tensordict)
        done = torch.ones_like(outcome["done"])
        return outcome.update({"reward": torch.full_like(outcome["reward"], self.number), "done": done})


STAGES = {"policy", "env", "write", "wait", "weights"}


# Statistics --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_statistics_in_every_state(make, kind):
    collector = make(kind, makers(), gain(), frames_per_batch=20, total_frames=100)
    before = json.loads(json.dumps(collector.stats(), allow_nan=False))
    assert (before["frames"], before["batches"], before["completed"]) == (0, 0, False)
    assert before["total_frames"] == 100
    for number in range(1, 6):
        collector.next()
        stats = json.loads(json.dumps(collector.stats(), allow_nan=False))
        assert stats["batches"] == number
        if kind == "sync":
            assert stats["frames"] == 20 * number
        assert stats["workers_alive"] == 2
    assert stats["completed"]
    collector.shutdown()
    after = json.loads(json.dumps(collector.stats(), allow_nan=False))
    assert after["frames"] == 100
    assert after["workers_alive"] == 0


@pytest.mark.parametrize("kind", one_quick(KINDS, "async"))
def test_statistics_of_workers(make, kind):
    collector = make(kind, makers(), gain(), frames_per_batch=20, total_frames=200)
    list(collector)
    stats = collector.stats()
    workers = stats["workers"]
    assert [worker["index"] for worker in workers] == [0, 1]
    assert len({worker["pid"] for worker in workers} | {os.getpid()}) == 3
    assert sum(worker["frames"] for worker in workers) == stats["frames"] == 200
    for worker in workers:
        assert worker["alive"] is True
        assert set(worker["seconds"]) >= STAGES
        assert worker["seconds"]["env"] > 0
        assert worker["seconds"]["policy"] > 0
        assert worker["policy_version"] == 0
        assert worker["restarts"] == 0
        assert isinstance(worker["state"], str)
    assert set(stats["seconds"]) >= STAGES
    assert stats["frames_per_second"] > 0
    for name in ("policy_lag", "threads", "leases", "restarts", "episodes", "mean_return", "bytes_held"):
        assert name in stats, name


@pytest.mark.parametrize("kind", one_quick(KINDS, "sync"))
def test_episodes_and_returns(make, kind):
    collector = make(kind, makers(length=5), gain(), frames_per_batch=20, total_frames=200)
    frames = flat(collector)
    stats = collector.stats()
    assert stats["episodes"] == int(frames["next", "done"].sum())
    assert stats["mean_return"] == 15.0
    assert stats["mean_length"] == 5.0


def test_means_are_of_the_episodes_that_ended_last(make):
    """Each worker's n-th episode lasts one step and returns n."""
    collector = make("sync", [Better] * 2, None, frames_per_batch=120, total_frames=240)
    list(collector)
    stats = collector.stats()
    assert stats["episodes"] == 240
    assert stats["mean_return"] == sum(sorted([*range(61, 121)] * 2)[-100:]) / 100  # of 100 of each worker: 70.5


def test_episodes_of_workers_are_pooled_in_the_order_of_time_or_of_steps():
    segment = Segment()
    fast, slow = (WorkerCounters(segment, index) for index in range(2))
    fast.episodes[:] = [(1.0, 7, 100 + i, i) for i in range(100)]
    slow.episodes[:3] = [(2.0, 9, 50, 200), (3.0, 9, 150.5, -1), (4.0, 9, 300, 50)]
    latest = last_episodes([fast, slow], in_step=False)
    assert len(latest) == 100
    assert latest[:, 2].tolist() == sorted(latest[:, 2].tolist())
    assert latest[:, 0].tolist() == [1.0] * 49 + [3.0] + [1.0] * 49 + [4.0]
    assert last_episodes([fast, slow], in_step=True)[:, 0].tolist() == [1.0] * 49 + [4.0] + [1.0] * 49 + [2.0]
    assert len(last_episodes([WorkerCounters(Segment(), 0)], in_step=False)) == 0


def test_the_last_return_is_the_last_in_time(make):
    """Worker 1 stops moving in its third rollout, and worker 0 goes on."""
    envs = one_bad(length=5, troubles={"length": 3, "trouble": Trouble("sleep", 50)})
    collector = make("async", envs, gain(), frames_per_batch=20, shutdown_timeout=0.1)
    mine = []
    while mine[-4:] != [0] * 4 or mine.count(1) < 2:
        mine.append(int(collector.next()["observation"][0, IDENT]))
    assert collector.stats()["last_return"] == 15.0


def function(td):
    return td.set("action", td["observation"][..., :1])


@pytest.mark.parametrize("kind", one_quick(KINDS, "async"))
def test_what_shows_when_a_policy_is_compiled_is_passed_on(make, kind):
    linear = TensorDictModule(torch.nn.Linear(3, 1), ["observation"], ["action"])
    collector = make(kind, [partial(GymEnv, "Pendulum-v1")] * 2, linear, frames_per_batch=20, compile_policy=True)
    assert collector.stats()["paths"]["policy"].endswith("to be compiled at the first batch")
    shown = ((collector.next(), collector.stats())[1]["paths"]["policy"] for _ in range(1000))
    assert any("NumPy program" in how for how in shown)  # those of the first worker, whenever it delivers
    collector = make(kind, [partial(GymEnv, "Pendulum-v1")] * 2, function, frames_per_batch=20, compile_policy=True)
    with pytest.warns(UserWarning, match="compile_policy: the policy runs uncompiled") as caught:
        [collector.next() for _ in range(6)]
    assert len(caught) == 1


def test_a_slow_environment_shows_where_the_time_goes(make):
    collector = make("sync", makers(step_s=0.005), gain(), frames_per_batch=40, total_frames=80)
    list(collector)
    for worker in collector.stats()["workers"]:
        assert worker["seconds"]["env"] > 0.2
        assert worker["seconds"]["env"] > 5 * worker["seconds"]["policy"]


# Calls -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", one_quick(KINDS, "sync"))
def test_values_come_in_order_of_workers(make, kind):
    collector = make(kind, makers(3), gain(), frames_per_batch=30)
    collector.next()
    assert collector.get_distant_attr("env.batch_size") == [torch.Size([])] * 3
    assert collector.get_distant_attr("env._env.ident") == [0, 1, 2]
    assert collector.map_fn("get_distant_attr", [("env._env.ident",)] * 3) == [0, 1, 2]
    assert collector.map_fn("set_seed", list_of_args=[(3,), (4,), (5,)]) == [3, 4, 5]
    assert collector.map_fn("get_distant_attr", list_of_kwargs=[{"attr": "worker_idx"}] * 3) == [0, 1, 2]
    with pytest.raises(AttributeError, match="nonsense"):
        collector.get_distant_attr("env.nonsense")
    with pytest.raises(ValueError, match="list_of_args"):
        collector.map_fn("set_seed", [(1,), (2,)])
    assert collector.next() is not None  # an error of a call ends nobody


def test_an_error_of_a_remote_call_names_its_worker(make):
    collector = make("sync", makers(), gain(), frames_per_batch=20)
    with pytest.raises(WorkerError, match="worker 0"):
        collector.map_fn("set_seed", [("nonsense",)] * 2)
    assert collector.next().shape == (2, 10)


def test_cascade_execute_reaches_what_a_path_leads_to(make):
    collector = make("sync", makers(), gain(), frames_per_batch=20)
    assert collector.cascade_execute("stats")["workers_alive"] == 2
    with pytest.raises(AttributeError):
        collector.cascade_execute("nonsense.at_all")


def test_attributes_of_environment_and_policy(make):
    collector = make("sync", makers(), gain(3.0), frames_per_batch=20)
    assert collector.getattr_env("batch_size") == [torch.Size([])] * 2
    values = collector.getattr_policy("module.gain")
    assert [float(value.detach()) for value in values] == [3.0, 3.0]


# Hooks -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", one_quick(KINDS, "async"))
def test_hooks_run_once_a_batch_in_the_worker_on_what_is_yielded(make, kind, tmp_path):
    def pre():
        with (tmp_path / f"{os.getpid()}").open("a") as log:
            log.write("pre\n")

    def post(batch):
        assert "twice" in batch
        batch.set("seen", torch.full(batch.shape, os.getpid()))
        with (tmp_path / f"{os.getpid()}").open("a") as log:
            log.write(f"post {batch.numel()}\n")

    collector = make(
        kind,
        makers(),
        gain(),
        frames_per_batch=20,
        total_frames=80,
        pre_collect_hook=pre,
        post_collect_hook=post,
        postproc=lambda td: td.set("twice", 2 * td["next", "reward"]),
    )
    batches = list(collector)
    pids = {worker["pid"] for worker in collector.stats()["workers"]}
    collector.shutdown()
    size = 10 if kind == "sync" else 20
    lines = [path.read_text().split("\n")[:-1] for path in tmp_path.iterdir()]
    assert {int(path.name) for path in tmp_path.iterdir()} <= pids
    for log in lines:
        assert log[: len(log) // 2 * 2] == ["pre", f"post {size}"] * (len(log) // 2)
    for batch in batches:
        assert set(batch["seen"].unique().tolist()) <= pids
        assert torch.equal(batch["twice"], 2 * batch["next", "reward"])


def test_hooks_can_be_set_later_and_taken_away(make, tmp_path):
    collector = make("sync", makers(), gain(), frames_per_batch=20)
    collector.next()
    collector.post_collect_hook = lambda batch: (tmp_path / str(os.getpid())).touch()
    collector.next()
    collector.set_post_collect_hook(None)
    pids = {str(worker["pid"]) for worker in collector.stats()["workers"]}
    assert {path.name for path in tmp_path.iterdir()} == pids
    for path in tmp_path.iterdir():
        path.unlink()
    collector.next()
    collector.next()
    assert not list(tmp_path.iterdir())


# Profiles ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", one_quick(KINDS, "sync"))
def test_profiles_of_workers(make, kind, tmp_path):
    collector = make(kind, makers(), gain(), frames_per_batch=20, total_frames=200)
    collector.enable_profile(
        workers=[0, 1], num_rollouts=3, save_path=tmp_path / "{worker_idx}.json", activities=["cpu"], with_stack=False
    )
    assert collector.profile_config.num_rollouts == 3
    list(collector)
    with pytest.raises(RuntimeError, match="before"):
        collector.enable_profile()
    collector.shutdown()
    assert {path.name for path in tmp_path.iterdir()} == {"0.json", "1.json"}
    for path in tmp_path.iterdir():
        assert json.loads(path.read_text())["traceEvents"]


def test_a_profile_of_nothing_is_refused(make):
    collector = make("sync", makers(), gain(), frames_per_batch=20)
    with pytest.raises(ValueError, match="num_rollouts"):
        collector.enable_profile(num_rollouts=1, warmup_rollouts=1)


# States ------------------------------------------------------------------------------------------------------------


def saved(state):
    """A state after a journey through a file."""
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


ENVS = {"one": (tally, sampling), "three": (tallies, sampling), "cartpole": (lambda ident: GymEnv("CartPole-v1"), None)}


@pytest.mark.parametrize(("case", "after"), in_turn(ENVS, [0, 3]))
def test_a_restored_run_goes_on_to_the_bit(make, same, case, after):
    maker, policy = ENVS[case]
    envs = [partial(maker, worker) for worker in range(2)]

    def build():
        return make("sync", envs, policy and policy(), frames_per_batch=30, total_frames=210)

    first = build()
    first.set_seed(3)
    for _ in range(after):
        first.next()
    state = saved(first.state_dict())
    expected = list(first)
    second = build()
    second.load_state_dict(state)
    found = list(second)
    assert len(found) == len(expected) == 7 - after
    for ours, theirs in zip(found, expected, strict=True):
        if case != "cartpole" and not after:
            ours, theirs = (batch.select("action", ("next", "reward"), ("next", "done")) for batch in (ours, theirs))
        same(ours, theirs)


def test_what_a_state_holds(make):
    collector = make("sync", makers(), gain(2.0), frames_per_batch=20, track_policy_version=True)
    collector.next()
    collector.update_policy_weights_()
    state = collector.state_dict()
    assert {"worker0", "worker1", "traj_pool", "frames", "iter", "policy_version"} <= set(state)
    assert (state["frames"], state["iter"], state["policy_version"]) == (20, 1, 1)
    for worker in ("worker0", "worker1"):
        assert float(state[worker]["policy_state_dict"]["module.gain"]) == 2.0
        assert "env_state_dict" in state[worker]


@pytest.mark.parametrize("kind", one_quick(KINDS, "async"))
def test_ids_go_on_above_those_that_were_saved(make, kind):
    first = make(kind, makers(), gain(), frames_per_batch=20)
    batches = [first.next() for _ in range(3)]
    state = saved(first.state_dict())
    first.shutdown()
    second = make(kind, makers(), gain(), frames_per_batch=20)
    second.load_state_dict(state)
    later = [second.next() for _ in range(6)]
    check([*batches, *later])  # what was on its way when the state was saved is delivered, too


def test_a_finished_run_that_is_restored_yields_nothing(make):
    first = make("sync", makers(), gain(), frames_per_batch=20, total_frames=40)
    list(first)
    second = make("sync", makers(), gain(), frames_per_batch=20, total_frames=40)
    second.load_state_dict(saved(first.state_dict()))
    assert list(second) == []
    assert second.stats()["completed"]


def test_the_state_of_other_workers_is_refused(make):
    state = make("sync", makers(3), gain(), frames_per_batch=30).state_dict()
    collector = make("sync", makers(2), gain(), frames_per_batch=20)
    with pytest.raises((KeyError, ValueError), match="worker"):
        collector.load_state_dict(state)


def test_saving_changes_nothing(make, same):
    def run(saving):
        collector = make("sync", makers(), sampling(), frames_per_batch=20, total_frames=100)
        collector.set_seed(1)
        batches = []
        for batch in collector:
            batches.append(batch)
            if saving:
                collector.state_dict()
        return batches

    keys = ["action", ("next", "reward"), ("next", "done")]
    for left, right in zip(run(True), run(False), strict=True):
        same(left.select(*keys), right.select(*keys))


def test_a_state_of_one_worker_equals_that_of_a_single_collector(make):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        many = make("sync", makers(1), gain(), frames_per_batch=20)
        many.set_seed(3)
        many.next()
        state = many.state_dict()["worker0"]
        with Collector(tally, gain(), frames_per_batch=20) as single:
            single.set_seed(3)
            single.next()
            assert set(single.state_dict()) <= set(state)
    assert state["frames"] == 20
    assert bool((many.next()["observation"][..., IDENT] == 0).all())


def test_a_state_in_a_pause_of_a_worker_that_was_told_of_its_next_rollout(make, buffer, monkeypatch, tmp_path):
    """It is paused between two rollouts, and answers."""
    monkeypatch.setattr(group, "_STUCK_S", 5.0)
    calls = []

    def hook(batch):
        calls.append(batch)
        (tmp_path / f"call {len(calls)}").touch()
        while len(calls) == 2 and not (tmp_path / "paused").exists():
            time.sleep(1e-3)

    rb = buffer()
    collector = make("async", makers(1), gain(), frames_per_batch=20, replay_buffer=rb, post_collect_hook=hook)
    [worker] = collector._group.workers
    collector.start()
    assert wait_until((tmp_path / "call 2").exists)
    assert wait_until(lambda: len(worker.runs) == 2)  # the next one was said while the worker is in its hook
    asked = worker.counters.counts[Count.ATTENTION]

    def go_on():
        if wait_until(lambda: worker.counters.counts[Count.ATTENTION] > asked):
            (tmp_path / "paused").touch()

    thread = threading.Thread(target=go_on)
    thread.start()
    with collector.pause():
        count = rb.write_count
        assert "worker0" in collector.state_dict()
        assert collector.get_distant_attr("env.batch_size") == [torch.Size([])]
        assert wait_until(lambda: worker.counters.state is WorkerState.PAUSED)
        assert rb.write_count == count
    thread.join()
    assert wait_until(lambda: rb.write_count > count)


def test_what_is_collected_after_set_seed_stays_when_another_thread_asks_for_something(make, monkeypatch):
    collector = make("async", makers(1, length=1000), gain(), frames_per_batch=10)
    collector.next()
    forget = collector._forget

    def late():
        assert wait_until(lambda: (collector._group.look(), collector._schedule.num_undelivered)[1] == 2)
        thread = threading.Thread(target=collector.map_fn, args=("get_distant_attr", [("env.batch_size",)]))
        thread.start()
        thread.join()
        forget()

    monkeypatch.setattr(collector, "_forget", late)
    collector.set_seed(0)
    assert collector.next()["observation"][:, STEP].tolist() == list(range(10))
