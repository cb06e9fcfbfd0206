"""TensorDicts between environment and policy: the place in the data, its end, saved states, and versions."""

from __future__ import annotations

import functools
import io
import queue
import warnings
from functools import partial

import pytest
import torch
from tests import llm_models
from tests.collectors.llm.test_models import ORIGIN, leaves

from rollwright.collectors.llm import LLMCollector
from rollwright.data.replay_buffers import LazyStackStorage, ReplayBuffer
from rollwright.envs import StepCounter, TransformedEnv
from rollwright.envs.llm import ChatEnv, LLMEnv
from rollwright.errors import EnvError
from rollwright.modules.llm import TransformersWrapper

pytestmark = [pytest.mark.llm, pytest.mark.usefixtures("_one_thread")]


@pytest.fixture
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


PROMPTS = 6


class Talks:
    """Answers 0 to 3 times, by its row, then it is over."""

    def __init__(self, row):
        self.left = row["turns"]

    def reply(self, messages):
        self.left -= 1
        return [{"role": "user", "content": "again"}], float(len(messages)), self.left < 0

    def state_dict(self):
        return {"left": self.left}

    def load_state_dict(self, state):
        self.left = state["left"]


def chats(slots=3, *, prompts=PROMPTS, transform=None, **options):
    rows = [{"text": "x" * (1 + number), "turns": number * 7 % 4} for number in range(prompts)]
    options = {"epochs": 1, "environment": Talks, **options}
    env = ChatEnv.from_dataloader(rows, tokenizer=llm_models.tokenizer(), batch_size=slots, **options)
    return env if transform is None else TransformedEnv(env, transform)


def texts(slots=3, *, prompts=PROMPTS, **options):
    rows = [{"text": "x" * (1 + number)} for number in range(prompts)]
    return LLMEnv.from_dataloader(rows, tokenizer=llm_models.tokenizer(), batch_size=slots, epochs=1, **options)


@functools.cache
def model():
    """One for all tests, which change nothing of it."""
    return llm_models.model()


def wrapper(**options):
    options = {"generate_kwargs": {"max_new_tokens": 4}, **options}
    return TransformersWrapper(model(), tokenizer=llm_models.tokenizer(), **options)


def answer(td):
    """A policy without an engine."""
    td["text", "response"] = [f"{len(prompt)} letters" for prompt in td["text", "prompt"]]
    return td


KEYS = ("prompt_index", "epoch", "repeat", "turn")


def turns(batch):
    found = {}
    for row in batch.reshape(-1).unbind(0):
        if row["collector", "traj_ids"] >= 0:
            name = tuple(int(row[key]) for key in KEYS)
            assert name not in found
            found[name] = row["text", "response"]
    return found


def copied(state):
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def same(native, plain, apart=()):
    """Records are equal, but for what only one of the two paths has."""
    assert native.batch_size == plain.batch_size
    for one, other in zip(native.reshape(-1).unbind(0), plain.reshape(-1).unbind(0), strict=True):
        first, second = leaves(one), leaves(other)
        only_plain = {("seed",), *apart, *(key for key in second if key[0] == "next" and key[-1] in ORIGIN)}
        assert first.keys() - second.keys() <= {("seconds", "tool"), ("seconds", "reward")}
        assert second.keys() - first.keys() <= only_plain
        shared = {key for key in first.keys() & second.keys() if key[0] != "seconds"}
        assert {key: first[key] for key in shared} == {key: second[key] for key in shared}


# The end of the data ------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [chats, texts])
@pytest.mark.parametrize(
    "options",
    [
        {"dialog_turns_per_batch": 9},
        {"dialog_turns_per_batch": 9, "flatten_data": True},
        {"trajs_per_batch": 2, "async_envs": False},
        {"groups_per_batch": 1, "async_envs": False},
        {"yield_only_last_steps": True, "async_envs": False},
        {"dialog_turns_per_batch": 3, "reset_at_each_iter": True},
    ],
    ids=lambda options: "-".join(options),
)
def test_both_paths_give_the_same_to_the_end_of_the_data(make, options):
    found, stats = [], []
    for plain in (False, True):
        policy = wrapper()
        acting = (lambda td, policy=policy: policy(td)) if plain else policy
        with LLMCollector(make(), acting, **options) as collector:
            assert collector.stats()["paths"]["env"].startswith("plain" if plain else "native")
            found.append(list(collector))
            stats.append(collector.stats())
    assert len(found[0]) == len(found[1]) > 0
    for native, plain in zip(*found, strict=True):
        same(native, plain)
    counted = ("frames", "episodes", "completed", "conversations_in_progress", "conversations_dropped")
    assert {key: stats[0][key] for key in counted} == {key: stats[1][key] for key in counted}
    assert stats[1]["conversations_undelivered"] == 0


@pytest.mark.parametrize("slots", [1, 3, 20])
def test_data_that_is_over_ends_a_collector_of_any_policy(slots):
    with LLMCollector(chats(slots, transform=StepCounter()), answer, dialog_turns_per_batch=slots) as collector:
        found = {}
        for batch in collector:
            found |= turns(batch)
        stats = collector.stats()
    assert {name[0] for name in found} == set(range(PROMPTS))
    assert {name[0]: name[3] for name in sorted(found)} == {number: number * 7 % 4 for number in range(PROMPTS)}
    assert stats["completed"]
    assert stats["frames"] == len(found)
    assert stats["episodes"] == PROMPTS
    assert stats["conversations_in_progress"] == 0


# The place in the data ------------------------------------------------------------------------------------

OPTIONS = [{"dialog_turns_per_batch": 6}, {"trajs_per_batch": 2}, {"groups_per_batch": 1}]


@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: "-".join(options))
def test_nothing_is_skipped_and_nothing_comes_twice(options):
    def make():
        return LLMCollector(chats(repeats=2, transform=StepCounter()), answer, **options)

    with make() as collector:
        expected = {}
        for batch in collector:
            expected |= turns(batch)
    collector, found = make(), {}
    while (batch := collector.next()) is not None:
        new = turns(batch)
        assert not new.keys() & found.keys()
        found |= new
        state = copied(collector.state_dict())
        assert not state["unsaved"]
        collector.shutdown()
        collector = make()
        collector.load_state_dict(state)
    collector.shutdown()
    assert found == expected
    assert len(expected) == 2 * sum(1 + number * 7 % 4 for number in range(PROMPTS))


@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: "-".join(options))
def test_a_restored_collector_goes_on_bit_for_bit(options):
    policy = wrapper()
    env = {"repeats": 2, "transform": None}
    with (
        LLMCollector(chats(**env), lambda td: policy(td), **options) as first,
        LLMCollector(chats(**env), lambda td: policy(td), **options) as second,
    ):
        for _ in range(3):
            first.next()
        second.load_state_dict(copied(first.state_dict()))
        while (batch := first.next()) is not None:
            restored = second.next()
            same(batch, restored)
            assert torch.equal(batch["collector", "traj_ids"], restored["collector", "traj_ids"])
        assert second.next() is None
        assert first.stats()["episodes"] == second.stats()["episodes"]
        assert first.stats()["mean_return"] == second.stats()["mean_return"]


@pytest.mark.parametrize("options", OPTIONS[1:], ids=lambda options: "-".join(options))
@pytest.mark.parametrize("native", [False, True])
def test_what_was_held_counts_as_delivered_after_a_restore_into_a_collector_that_has_stepped(options, native):
    def make():
        return LLMCollector(chats(repeats=2, slots=5), wrapper() if native else answer, **options)

    with make() as first, make() as second, make() as third:
        done = {}
        for _ in range(2):
            done |= turns(first.next())
        second.next()
        second.load_state_dict(copied(first.state_dict()))
        done |= turns(second.next())
        third.load_state_dict(copied(second.state_dict()))
        while (batch := third.next()) is not None:
            new = turns(batch)
            assert not new.keys() & done.keys()
            done |= new
    assert len(done) == 2 * sum(1 + number * 7 % 4 for number in range(PROMPTS))


@pytest.mark.parametrize("options", OPTIONS[:2], ids=lambda options: "-".join(options))
def test_a_state_of_another_number_of_slots_goes_on_from_its_place_in_the_data(options):
    with LLMCollector(chats(3), answer, **options) as first, LLMCollector(chats(2), answer, **options) as second:
        found = turns(first.next())
        with pytest.warns(UserWarning, match="begins anew, .*batch size"):
            second.load_state_dict(copied(first.state_dict()))
        for batch in second:
            new = turns(batch)
            assert not new.keys() & found.keys()
            found |= new
        dropped = second.stats()["conversations_dropped"]
    wanted = {(number, 0, 0, turn) for number in range(PROMPTS) for turn in range(1 + number * 7 % 4)}
    assert len({name[0] for name in wanted - found.keys()}) == dropped
    assert dropped == (0 if "trajs_per_batch" in options else 3)


def test_conversations_that_cannot_be_saved_begin_again():
    class Unsaved(Talks):
        state_dict = None

    def make():
        return LLMCollector(chats(environment=Unsaved), answer, trajs_per_batch=1)

    collector, found = make(), {}
    while (batch := collector.next()) is not None:
        new = turns(batch)
        assert not new.keys() & found.keys()
        found |= new
        with warnings.catch_warnings(action="ignore"):
            state = copied(collector.state_dict())
        assert all("has no state_dict" in line for line in state["unsaved"])
        collector.shutdown()
        collector = make()
        collector.load_state_dict(state)
    collector.shutdown()
    assert len(found) == sum(1 + number * 7 % 4 for number in range(PROMPTS))


@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: "-".join(options))
def test_an_error_begins_conversations_again(options):
    calls = []

    def fails(td):
        calls.append(len(td))
        if len(calls) in (2, 5):
            raise OSError("no connection")
        return answer(td)

    collector, found, failed = LLMCollector(chats(), fails, **options), {}, 0
    while True:
        try:
            batch = collector.next()
        except OSError:
            failed += 1
            continue
        if batch is None:
            break
        found.update({name: text for name, text in turns(batch).items() if name not in found})
    collector.shutdown()
    assert failed == 2
    assert len(found) == sum(1 + number * 7 % 4 for number in range(PROMPTS))


@pytest.mark.parametrize("options", OPTIONS[1:], ids=lambda options: "-".join(options))
def test_whole_conversations_go_on_from_where_the_batch_began_after_an_error(options):
    calls = []

    def fails(td):
        calls.append(len(td))
        if len(calls) in (4, 9):
            raise OSError("no connection")
        return answer(td)

    found, failed = [], 0
    with LLMCollector(chats(repeats=2), fails, dialog_turns_per_batch=3, **options) as collector:
        while True:
            try:
                batch = collector.next()
            except OSError:
                failed += 1
                continue
            if batch is None:
                break
            found += list(turns(batch))
        assert collector.stats()["frames_dropped"] == 0
    assert failed == 2
    assert len(found) == len(set(found)) == 2 * sum(1 + number * 7 % 4 for number in range(PROMPTS))
    assert sum(calls) == len(found) + 6  # each turn once, and the two steps that failed


def test_reset_drops_what_is_in_progress_and_counts_it():
    with LLMCollector(chats(), answer, dialog_turns_per_batch=3) as collector:
        collector.next()
        going_on = collector.stats()["conversations_in_progress"]
        assert going_on
        collector.reset()
        assert collector.stats()["conversations_dropped"] == going_on
        state = copied(collector.state_dict())
        dropped = {0, 1, 2}
        left = {name[0] for batch in collector for name in turns(batch)}
        assert not dropped & left
    with LLMCollector(chats(), answer, dialog_turns_per_batch=3) as again:
        again.load_state_dict(state)
        assert {name[0] for batch in again for name in turns(batch)} == left


def test_buffers_and_queues_get_turns_alone():
    expected = sum(1 + number * 7 % 4 for number in range(PROMPTS))
    buffer = ReplayBuffer(storage=LazyStackStorage(100), batch_size=4)
    with LLMCollector(chats(), answer, dialog_turns_per_batch=6, replay_buffer=buffer) as collector:
        assert all(each is None for each in collector)
    assert len(buffer) == expected
    assert (buffer[:]["collector", "traj_ids"] >= 0).all()
    turns_put = queue.Queue()
    with LLMCollector(chats(), answer, dialog_turns_per_batch=6, queue=turns_put) as collector:
        list(collector)
    assert turns_put.qsize() == expected


def test_a_seed_begins_the_data_again():
    with LLMCollector(chats(), answer, dialog_turns_per_batch=6) as collector:
        collector.next()
        collector.set_seed(3)
        assert {name[0] for batch in collector for name in turns(batch)} == set(range(PROMPTS))


@pytest.mark.parametrize("stored", [False, True])
@pytest.mark.parametrize("native", [False, True])
def test_whole_conversations_of_several_slots_go_into_a_buffer(native, stored):
    options = {"replay_buffer": ReplayBuffer(storage=LazyStackStorage(100), batch_size=4)} if stored else {}
    with LLMCollector(chats(), wrapper() if native else answer, trajs_per_batch=1, **options) as collector:
        list(collector)
        assert collector.stats()["conversations_undelivered"] == 0
        assert collector.stats()["episodes"] == PROMPTS
    if stored:
        assert len(options["replay_buffer"]) == sum(1 + number * 7 % 4 for number in range(PROMPTS))


@pytest.mark.parametrize(("native", "async_envs"), [(False, False), (True, False), (True, True)])
def test_what_is_unfinished_at_the_end_is_counted_and_named(native, async_envs):
    options = {"dialog_turns_per_batch": 3, "total_dialog_turns": 6, "async_envs": async_envs, "groups_per_batch": 2}
    with LLMCollector(chats(repeats=2), wrapper() if native else answer, **options) as collector:
        with pytest.warns(
            UserWarning, match=r"without a batch of whole groups: \d turns .* prompt 0 \(epoch 0, repeat 0\)"
        ):
            assert list(collector) == []
        stats = collector.stats()
    names = stats["conversations_unfinished"]
    assert len(names) == len(set(names)) >= stats["conversations_in_progress"] + stats["conversations_undelivered"] > 0
    assert "prompt 0 (epoch 0, repeat 1)" in names
    options = {"dialog_turns_per_batch": 3, "async_envs": async_envs}
    with LLMCollector(chats(), wrapper() if native else answer, **options) as collector:
        list(collector)
        assert collector.stats()["conversations_unfinished"] == []


@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: "-".join(options))
@pytest.mark.slow
def test_two_workers_share_the_data_and_go_on_where_it_was(options):
    def make():
        return LLMCollector(partial(chats, repeats=2), answer, num_collectors=2, **options)

    found = {}
    with make() as first:
        for _ in range(2):
            found |= turns(first.next())
        with warnings.catch_warnings(action="ignore"):
            state = first.state_dict()
    with make() as second:
        second.load_state_dict(state)
        for batch in second:
            new = turns(batch)
            assert not new.keys() & found.keys()
            found |= new
    assert len(found) == 2 * sum(1 + number * 7 % 4 for number in range(PROMPTS))


def test_a_prompt_that_cannot_be_read_names_its_conversation():
    env = LLMEnv.from_dataloader([{"text": ""}], tokenizer=llm_models.tokenizer())
    with (
        LLMCollector(env, answer, dialog_turns_per_batch=1) as collector,
        pytest.raises(EnvError, match=r"conversation of prompt 0 \(epoch 0, repeat 0\), turn 0: .*at least one token"),
    ):
        collector.next()


@pytest.mark.parametrize("mode", ["history", "text"])
def test_without_a_tokenizer_of_its_own_an_environment_has_that_of_the_policy(mode):
    def taken(tokenizer, policy, transform=None):
        rows = [{"text": "x" * (1 + number), "turns": number * 7 % 4} for number in range(PROMPTS)]
        env = ChatEnv.from_dataloader(
            rows, tokenizer=tokenizer, batch_size=3, epochs=1, environment=Talks, input_mode=mode
        )
        env = env if transform is None else TransformedEnv(env, transform)
        with LLMCollector(env, policy=policy, trajs_per_batch=1) as collector:
            batches = list(collector)
        records = [record for batch in batches for record in batch.unbind(0)]
        return {tuple(int(one[key]) for key in KEYS): one["tokens", "full"].tolist() for one in records}

    class Plain:  # no engine that could be found
        def __init__(self):
            self.policy = wrapper()
            self.tokenizer = self.policy.tokenizer

        def __call__(self, td):
            return self.policy(td)

    expected = taken(llm_models.tokenizer(), wrapper())
    assert len(expected) == sum(1 + number * 7 % 4 for number in range(PROMPTS))
    assert taken(None, wrapper()) == expected
    assert taken(None, Plain()) == expected
    assert taken(None, Plain(), StepCounter()) == expected
