"""Arguments of LLMCollector: defaults, conflicts, and what each method does."""

from __future__ import annotations

import logging
import queue
import threading
import uuid

import pytest
import torch
from tests.collectors.llm.fakes import FakeEnv, FakePolicy
from tests.collectors.workers.processes import wait_until

from rollwright.collectors import Collector
from rollwright.collectors.llm import LLMCollector
from rollwright.data import RaggedStorage, ReplayBuffer
from rollwright.envs import GymEnv
from rollwright.envs.llm import PolicyVersion
from rollwright.errors import RollwrightError


class Uuids:
    """As PolicyVersion: counts in UUIDs."""

    def __init__(self):
        self.version = str(uuid.uuid4())

    def increment_version(self):
        self.version = str(uuid.uuid4())


@pytest.mark.parametrize(
    ("options", "error", "names"),
    [
        ({}, ValueError, "dialog_turns_per_batch: .*yield_completed_trajectories=True"),
        ({"dialog_turns_per_batch": 0}, ValueError, "dialog_turns_per_batch"),
        ({"dialog_turns_per_batch": 1.5}, TypeError, "dialog_turns_per_batch"),
        ({"dialog_turns_per_batch": 1, "total_dialog_turns": 0}, ValueError, "total_dialog_turns"),
        (
            {"yield_only_last_steps": True, "yield_completed_trajectories": False},
            ValueError,
            "yield_only_last_steps=True .*yield_completed_trajectories=False",
        ),
        (
            {"dialog_turns_per_batch": 1, "groups_per_batch": 1, "yield_completed_trajectories": False},
            ValueError,
            "groups_per_batch=1 .*yield_completed_trajectories=False",
        ),
        ({"trajs_per_batch": 1, "groups_per_batch": 1}, ValueError, "trajs_per_batch=1 and groups_per_batch=1"),
        (
            {"dialog_turns_per_batch": 1, "queue": queue.Queue(), "replay_buffer": queue.Queue()},
            ValueError,
            "queue and replay_buffer",
        ),
        ({"dialog_turns_per_batch": 1, "queue": [1]}, TypeError, "queue: expected an object with put"),
        ({"dialog_turns_per_batch": 1, "replay_buffer": []}, TypeError, "replay_buffer"),
        ({"dialog_turns_per_batch": 1, "track_policy_version": 3}, TypeError, "track_policy_version: .*PolicyVersion"),
        ({"dialog_turns_per_batch": 1, "verbose": 1}, TypeError, "verbose"),
        ({"dialog_turns_per_batch": 1, "postproc": 1}, TypeError, "postproc"),
        ({"dialog_turns_per_batch": 1, "weight_updater": 1}, TypeError, "weight_updater"),
        ({"dialog_turn_per_batch": 1}, TypeError, "Did you mean 'dialog_turns_per_batch'"),
        ({"dialog_turns_per_batch": 1, "max_restarts": 1}, TypeError, "max_restarts: expected num_collectors="),
        ({"dialog_turns_per_batch": 1, "policy_factory": FakePolicy}, TypeError, "policy and policy_factory"),
    ],
)
def test_conflicts_name_their_arguments_at_construction(options, error, names):
    with pytest.raises(error, match=names):
        LLMCollector(FakeEnv(1), policy=FakePolicy(), **options)


def test_environment_and_policy_are_needed():
    with pytest.raises(TypeError, match="env: expected"):
        LLMCollector(policy=FakePolicy(), dialog_turns_per_batch=1)
    with pytest.raises(TypeError, match="policy_factory="):
        LLMCollector(FakeEnv(1), dialog_turns_per_batch=1)
    with pytest.raises(ValueError, match="async_envs=True: expected conversations"):
        LLMCollector(GymEnv("CartPole-v1"), policy=FakePolicy(), dialog_turns_per_batch=1, async_envs=True)


def test_options_can_be_read_from_a_collector(build):
    plain = build(1, dialog_turns_per_batch=1, flatten_data=True, postproc=len)
    assert (plain.yield_completed_trajectories, plain.yield_only_last_steps) == (False, False)
    assert (plain.flatten_data, plain.postproc, plain.replay_buffer, plain.verbose) == (True, len, None, False)
    last = build(1, yield_only_last_steps=True)
    assert (last.yield_completed_trajectories, last.yield_only_last_steps) == (True, True)
    assert build(1, trajs_per_batch=2).trajs_per_batch == 2
    with pytest.raises(AttributeError, match="has no attribute 'yield_everything'"):
        plain.yield_everything  # noqa: B018
    with Collector(GymEnv("CartPole-v1"), frames_per_batch=4, total_frames=8, postproc=len) as frames:
        assert (frames.postproc, frames.split_trajs, frames.reset_at_each_iter) == (len, None, False)


def test_completed_trajectories_come_one_at_a_time(build):
    batches = list(build(3, env={"prompts": 7}, yield_completed_trajectories=True))
    assert len(batches) == 7
    assert all(batch.ndim == 1 for batch in batches)
    for batch in batches:
        assert batch["turn"].tolist() == list(range(len(batch)))
        assert batch["next", "done"].reshape(-1).tolist() == [False] * (len(batch) - 1) + [True]


@pytest.mark.parametrize("async_envs", [False, True])
def test_only_last_steps(build, async_envs):
    batches = list(build(3, env={"prompts": 7}, yield_only_last_steps=True, async_envs=async_envs))
    assert [tuple(batch.batch_size) for batch in batches] == [(1,)] * 7
    assert all(batch["next", "done"].all() for batch in batches)
    assert sorted(int(batch["prompt_index"]) for batch in batches) == list(range(7))


@pytest.mark.parametrize("async_envs", [False, True])
def test_several_trajectories_at_a_time(build, async_envs):
    batches = list(build(3, env={"prompts": 9}, trajs_per_batch=3, async_envs=async_envs))
    assert [len(batch["collector", "traj_ids"].unique()) for batch in batches] == [3, 3, 3]
    for batch in batches:
        ids = batch["collector", "traj_ids"]
        assert int((ids[1:] != ids[:-1]).sum()) == 2  # one after another


@pytest.mark.parametrize("of_group", [False, True])
@pytest.mark.parametrize("async_envs", [False, True])
def test_groups_are_whole(build, async_envs, of_group):
    env = {"prompts": 6, "repeats": 4, "of_group": of_group}
    collector = build(5, env=env, groups_per_batch=2, async_envs=async_envs)
    batches = list(collector)
    assert len(batches) == 3
    for batch in batches:
        groups = batch["group_id"].tolist()
        assert len(set(groups)) == 2
        assert groups == [groups[0]] * groups.count(groups[0]) + [groups[-1]] * groups.count(groups[-1])
        for group in set(groups):
            last = batch["next", "done"].reshape(-1) & (batch["group_id"] == group)
            assert batch["repeat"][last].tolist() == [0, 1, 2, 3]
    stats = collector.stats()
    assert stats["groups_held"] == stats["frames_held"] == stats["conversations_undelivered"] == 0


def test_a_group_that_its_slots_cannot_hold_is_an_error(build):
    with pytest.raises(RollwrightError, match=r"conversation of prompt 0 .*Use as many environments as a group"):
        build(2, env={"repeats": 4, "of_group": True}, groups_per_batch=1).next()


def test_groups_of_an_environment_without_data_are_an_error():
    with pytest.raises(ValueError, match="groups_per_batch: expected an environment whose conversations"):
        LLMCollector(GymEnv("CartPole-v1"), policy=FakePolicy(), groups_per_batch=1)


def test_postproc_gets_each_batch_and_can_be_exchanged(build):
    seen = []
    collector = build(2, dialog_turns_per_batch=2, postproc=lambda batch: seen.append(batch.batch_size) or batch)
    collector.next()
    collector.set_postproc(lambda batch: batch.reshape(-1)[:1])
    assert seen == [torch.Size([2, 1])]
    assert collector.next().batch_size == (1,)
    collector.set_postproc(None)
    assert collector.next().batch_size == (2, 1)
    with pytest.raises(TypeError, match="postproc: expected a callable"):
        collector.set_postproc(3)


def test_a_queue_gets_an_item_for_each_turn(build):
    items = queue.Queue()
    collector = build(2, env={"prompts": 6}, dialog_turns_per_batch=4, queue=items)
    assert set(collector) == {None}
    turns = [items.get() for _ in range(items.qsize())]
    assert len(turns) == collector.stats()["frames"] == collector.stats()["write_count"]
    assert all(turn.batch_size == () for turn in turns)
    assert {int(turn["prompt_index"]) for turn in turns} == set(range(6))


@pytest.mark.parametrize("sink", ["queue", "buffer"])
def test_blank_turns_at_the_end_of_the_data_are_no_items(build, sink):
    items, buffer = queue.Queue(), ReplayBuffer(storage=RaggedStorage(100))
    where = {"queue": items} if sink == "queue" else {"replay_buffer": buffer}
    collector = build(5, env={"prompts": 7, "most_turns": 1}, dialog_turns_per_batch=5, **where)
    for _ in collector:
        pass
    found = list(items.queue) if sink == "queue" else [buffer[i] for i in range(len(buffer))]
    assert [int(each["prompt_index"]) for each in found] == list(range(7))
    assert collector.stats()["write_count"] == 7


def test_a_full_queue_is_waited_for_and_nothing_is_discarded(build):
    items = queue.Queue(maxsize=1)
    collector = build(2, env={"prompts": 6, "most_turns": 1}, dialog_turns_per_batch=2, queue=items)
    collector.start()
    assert wait_until(lambda: collector.stats()["waiting_for"] is not None)
    assert "room in the queue" in collector.stats()["waiting_for"]
    found = sorted(int(items.get(timeout=60)["prompt_index"]) for _ in range(6))
    assert found == list(range(6))


def test_shutdown_ends_the_wait_for_a_full_queue(build):
    collector = build(2, env={"epochs": None}, dialog_turns_per_batch=2, queue=queue.Queue(maxsize=1))
    collector.start()
    assert wait_until(lambda: collector.stats()["waiting_for"] is not None)
    collector.async_shutdown(timeout=10)
    assert collector.env.conversations.closed
    stats = collector.stats()
    first = stats["write_count"]  # what waited for room is named
    assert f"prompt {first} (epoch 0, repeat 0)" in stats["conversations_unfinished"]
    assert stats["undelivered"] == 1


def test_what_waits_for_a_full_queue_at_shutdown_is_named(build):
    collector = build(1, env={"most_turns": 1}, dialog_turns_per_batch=1, queue=queue.Queue(maxsize=1))
    collector.start()
    assert wait_until(lambda: collector.stats()["waiting_for"] is not None)
    collector.shutdown()
    stats = collector.stats()
    assert f"prompt {stats['write_count']} (epoch 0, repeat 0)" in stats["conversations_unfinished"]


def test_any_object_with_put_is_a_queue(build):
    class Sink:
        def __init__(self):
            self.items = []

        def put(self, item):
            self.items.append(item)

    sink = Sink()
    list(build(1, env={"prompts": 2, "repeats": 2}, groups_per_batch=1, queue=sink))
    assert [int(item["group_id"]) for item in sink.items] == sorted(int(item["group_id"]) for item in sink.items)


def test_versions_are_counted_and_stamped_on_each_token(build):
    collector = build(2, dialog_turns_per_batch=2, track_policy_version=True)
    assert collector.get_policy_version() == collector.policy_version == 0
    assert set(collector.next()["policy_version"].reshape(-1).tolist()) == {0}
    assert collector.increment_version() == 1
    batch = collector.next()
    assert set(batch["policy_version"].reshape(-1).tolist()) == {1}
    assert set(batch.reshape(-1)[0]["tokens_policy_version"].tolist()) == {1}
    collector.update_policy_weights_({"w": torch.ones(1)})
    assert collector.policy_version == collector.policy.engine.version == 2
    assert collector.policy.engine.weights == {"w": torch.ones(1)}
    assert set(collector.next()["policy_version"].reshape(-1).tolist()) == {2}


def test_versions_may_be_uuids(build):
    tracker = Uuids()
    collector = build(1, dialog_turns_per_batch=1, track_policy_version=tracker)
    first = collector.get_policy_version()
    assert first == tracker.version
    assert collector.next().reshape(-1)[0]["policy_version"] == first
    second = collector.increment_version()
    assert second != first
    assert collector.next().reshape(-1)[0]["policy_version"] == second
    assert isinstance(collector.stats()["policy_version"], str)


def test_versions_are_not_told_where_nobody_asked(build):
    assert build(1, dialog_turns_per_batch=1).get_policy_version() is None


def test_verbose_logs_a_line_for_each_batch(build, caplog):
    with caplog.at_level(logging.INFO, logger="rollwright.llm"):
        collector = build(2, dialog_turns_per_batch=2, total_dialog_turns=4, verbose=True)
        list(collector)
    assert [record.message.split(",")[0] for record in caplog.records] == [
        "LLMCollector: 2 of 4 turns",
        "LLMCollector: 4 of 4 turns",
    ]


def test_progress_is_in_turns(build, capfd):
    list(build(2, dialog_turns_per_batch=2, total_dialog_turns=4, progress=True))
    assert "LLMCollector: 4 / 4 turns, " in capfd.readouterr().err.splitlines()[-1]


def test_parts_can_be_reached(build):
    collector = build(2, dialog_turns_per_batch=2)
    assert collector.getattr_env("conversations") is collector.env.conversations
    assert collector.getattr_policy("engine") is collector.policy.engine
    assert collector.get_policy_model() is collector.policy is collector.get_model("policy")
    with pytest.raises(RuntimeError, match="no replay buffer"):
        collector.getattr_rb("storage")
    collector.init_updater(1)  # without an updater, nothing
    assert isinstance(collector, Collector)
    assert collector.dialog_turns_per_batch == 2
    assert collector.is_initialized()


def test_a_remote_collector_needs_ray():
    try:
        import ray  # noqa: F401
    except ModuleNotFoundError:
        with pytest.raises(RollwrightError, match="ray"):
            LLMCollector.as_remote()


def test_hooks_and_pause(build):
    calls = []
    collector = build(
        2,
        dialog_turns_per_batch=2,
        pre_collect_hook=lambda: calls.append("pre"),
        post_collect_hook=lambda batch: calls.append(tuple(batch.batch_size)),
    )
    with collector.pause():
        collector.next()
    assert calls == ["pre", (2, 1)]


def test_a_buffer_gets_flat_turns_and_a_thread_fills_it(build):
    class Store:
        def __init__(self):
            self.rows, self.lock = [], threading.Lock()

        def extend(self, data):
            with self.lock:
                self.rows += data.unbind(0)

        add = sample = None

    store = Store()
    store.add = store.sample = lambda *args: None
    collector = build(2, env={"prompts": 6}, dialog_turns_per_batch=4, replay_buffer=store)
    collector.start()
    assert wait_until(lambda: collector.stats()["completed"])
    collector.async_shutdown()
    assert {int(row["prompt_index"]) for row in store.rows} == set(range(6))
    assert len(store.rows) == collector.stats()["frames"]


def test_uuids_of_a_thread_are_those_that_were_published(build):
    buffer = ReplayBuffer(storage=RaggedStorage(4000))
    tracker = PolicyVersion("uuid")
    collector = build(
        dialog_turns_per_batch=2, replay_buffer=buffer, track_policy_version=tracker, env={"epochs": None}
    )
    published = [collector.get_policy_version()]
    collector.start()
    for _ in range(3):  # more than one between two turns, perhaps
        collector.increment_version()
        collector.increment_version()
        published.append(collector.get_policy_version())
    wait_until(lambda: buffer.write_count and buffer[len(buffer) - 1]["policy_version"] == published[-1])
    collector.shutdown()
    assert len(set(published)) == 4
    found = {row["policy_version"] for row in buffer[:].unbind(0)}
    assert published[-1] in found
    known = {tracker.at(number) for number in range(7)}
    assert found <= known
    assert set(published) <= known


def test_uuids_go_on_after_a_load(build):
    first = build(dialog_turns_per_batch=2, track_policy_version=PolicyVersion("uuid"))
    first.next()
    first.increment_version()
    state = first.state_dict()
    second = build(dialog_turns_per_batch=2, track_policy_version=PolicyVersion("uuid"))
    second.load_state_dict(state)
    assert second.get_policy_version() == first.get_policy_version()
    assert second.next()[0, 0]["policy_version"] == first.get_policy_version()
    second.increment_version()
    first.increment_version()
    assert second.get_policy_version() == first.get_policy_version()


def test_uuids_are_refused_with_workers():
    with pytest.raises(ValueError, match="workers count versions in integers, got a PolicyVersion of UUIDs"):
        LLMCollector(
            FakeEnv,
            policy_factory=FakePolicy,
            dialog_turns_per_batch=2,
            num_collectors=2,
            track_policy_version=PolicyVersion("uuid"),
        )
