"""Text, ragged tensors and tensorclass entries, written by environment and policy, in batches of a collector."""

from __future__ import annotations

import io
import itertools
from functools import partial

import pytest
import torch
from tensordict import LazyStackedTensorDict, TensorDict
from tests.collectors.dialogs import Answers, Dialog, Words, frames_of
from tests.variants import in_turn
from torch import nn

from rollwright.collectors import Interruptor
from rollwright.data import LazyMemmapStorage, LazyTensorStorage, ListStorage, MultiStep, ReplayBuffer
from rollwright.data.layout import split_trajectories
from rollwright.envs import AsyncEnvPool, GymEnv, ParallelEnv, SerialEnv, step_mdp
from rollwright.errors import PolicyError, PolicyKeyError
from rollwright.testing.mocking_classes import CountingEnv, Str2StrEnv

IDS = ("collector", "traj_ids")
FORMS = ["in place", "rows", "new"]


def check(batch, *, messages=False):
    """Every frame is whole, and follows the one before."""
    for row in batch.reshape(-1, batch.shape[-1]).unbind(0) if batch.ndim > 1 else [batch]:
        frames = frames_of(row)
        for frame in frames:
            assert frame["answer"] == frame["text"].upper()
            assert frame["answer_tokens"] == frame["tokens"] * 2
            assert frame["policy"]["log_probs"] == [-float(token) for token in frame["tokens"] * 2]
            assert len(frame["prompt"]["mask"]) == len(frame["tokens"])
            if messages:
                for place in (frame, frame["next"]):
                    assert place["message"] == ("Words", place["text"], "user", len(place["text"]))
                assert frame["reply"] == ("Words", frame["answer"], "assistant", len(frame["answer"]))
        for one, other in itertools.pairwise(frames):
            if not one["next"]["done"][0]:
                assert other["text"] == one["next"]["text"]
                assert other["collector"]["traj_ids"] == one["collector"]["traj_ids"]
            else:
                assert other["text"].endswith("t0")


@pytest.mark.parametrize("messages", [False, True])
@pytest.mark.parametrize(("size", "form"), in_turn([(), (1,), (3,), (2, 2)], list(FORMS)))
def test_a_policy_may_write_ragged_entries_in_any_form(make, size, form, messages):
    env = Dialog(size, messages=messages)
    collector = make(env, Answers(form, messages), frames_per_batch=7 * env.numel(), total_frames=14 * env.numel())
    for batch in collector:
        assert isinstance(batch, LazyStackedTensorDict)
        assert (batch.shape, batch.stack_dim) == ((*size, 7), len(size))
        check(batch, messages=messages)
    if messages:
        assert isinstance(batch["message"], Words)
        assert isinstance(batch["next", "message"][..., 0], Words)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("option", ["policy_device", "storing_device", "version", "lists", "no ids", "no resets"])
def test_ragged_entries_beside_options(make, form, option):
    options = {
        "policy_device": {"policy_device": "cpu"},
        "storing_device": {"storing_device": "cpu"},
        "version": {"track_policy_version": True},
        "lists": {"use_buffers": False},
        "no ids": {"track_traj_ids": False},
        "no resets": {"reset_when_done": False},
    }[option]
    env = Dialog((2,), turns=99 if option == "no resets" else 2)
    batch = make(env, Answers(form), frames_per_batch=10, **options).next()
    for frame in frames_of(batch):
        assert frame["answer_tokens"] == frame["tokens"] * 2


@pytest.mark.parametrize("form", ["in place", "new"])
@pytest.mark.parametrize("size", [(), (3,), (2, 2)])
def test_text_and_tensorclass_entries_of_one_shape(make, size, form):
    """Dense batches of them are TensorDicts, and rows are reset one by one."""
    env = Dialog(size, messages=True, dense=True)
    collector = make(env, Answers(form, messages=True), frames_per_batch=7 * env.numel(), total_frames=14 * env.numel())
    for batch in collector:
        assert type(batch) is TensorDict
        assert isinstance(batch["message"], Words)
        assert isinstance(batch["reply"], Words)
        check(batch, messages=True)


@pytest.mark.parametrize("dense", [False, True])
def test_tensorclass_entries_pass_from_step_to_step(dense):
    env = Dialog((2,), messages=True, dense=dense)
    act = Answers(messages=True)
    stepped = env.step(act(env.reset()))
    for root in (env.step_mdp(stepped), step_mdp(stepped)):
        assert isinstance(root["message"], Words)
        assert isinstance(root["reply"], Words)
        assert list(root["message"].content) == list(stepped["next", "message"].content) == ["e0 r0 t1", "e0 r1 t1"]
    _, after = env.step_and_maybe_reset(act(env.step_mdp(stepped)))
    assert isinstance(after["message"], Words)
    assert list(after["message"].content) == ["e1 r0 t0", "e0 r1 t2"]
    assert after["message"].letters.tolist() == [8, 8]


def first_rows():
    return [partial(Dialog, (2,), messages=True, first_row=first) for first in (0, 2)]


POOLS = {
    "serial": lambda: SerialEnv(2, first_rows()),
    "parallel": lambda: ParallelEnv(2, first_rows()),
    "threads": lambda: AsyncEnvPool(first_rows()),
    "threads, lazy": lambda: AsyncEnvPool(first_rows(), stack="lazy"),
    "processes": lambda: AsyncEnvPool(first_rows(), backend="multiprocessing"),
}


@pytest.mark.parametrize("pool", POOLS)
def test_pools_of_batched_environments(make, pool):
    env = POOLS[pool]()
    assert env.batch_size == (2, 2)
    collector = make(env, Answers("new", messages=True), frames_per_batch=28, total_frames=56)
    for batch in collector:
        assert batch.shape == (2, 2, 7)
        check(batch, messages=True)
        assert sorted({int(text.split()[1][1:]) for row in batch["text"] for env in row for text in env}) == [
            0,
            1,
            2,
            3,
        ]


@pytest.mark.parametrize("stack", ["dense", "maybe_dense", "lazy"])
@pytest.mark.parametrize("backend", ["threading", "multiprocessing"])
def test_asynchronous_pools_of_batched_environments_of_tensors(make, backend, stack):
    one = partial(CountingEnv, batch_size=[2], max_steps=2)
    env = AsyncEnvPool([one, one], backend=backend, stack=stack)
    batch = make(env, lambda td: td.set("action", ones(td)), frames_per_batch=28).next()
    assert type(batch) is TensorDict
    assert batch.shape == (2, 2, 7)
    assert batch["observation"].squeeze(-1).tolist() == [[[0, 1, 2, 0, 1, 2, 0]] * 2] * 2
    assert len(batch[IDS].unique()) == 12


def test_whole_trajectories_of_ragged_records(make):
    env = Dialog((2,), messages=True)
    collector = make(
        env, Answers("new", True), frames_per_batch=10, total_frames=80, trajs_per_batch=3, traj_format="cat"
    )
    batches = list(collector)
    assert len(batches) > 5
    for batch in batches:
        assert int(batch["next", "done"].sum()) == 3
        check(batch, messages=True)
        assert isinstance(batch["message"], Words)


def test_a_flat_batch_and_a_flat_buffer_of_ragged_records(make):
    def collect(**options):
        env = Dialog((2,), messages=True)
        return make(env, Answers("new", True), frames_per_batch=10, total_frames=10, **options)

    whole = frames_of(collect().next())
    assert frames_of(collect(postproc=lambda batch: batch.reshape(-1)).next()) == whole
    assert frames_of(collect(postproc=lambda batch: batch.flatten()).next()) == whole
    for options in ({}, {"extend_buffer": False}):
        buffer = ReplayBuffer(storage=ListStorage(100))
        list(collect(replay_buffer=buffer, **options))
        kept = frames_of(buffer[:])
        assert sorted(map(str, kept)) == sorted(map(str, whole))
    buffer = ReplayBuffer(storage=ListStorage(100))
    list(collect(replay_buffer=buffer, trajs_per_batch=1))
    assert {frame["text"] for frame in frames_of(buffer[:])} < {frame["text"] for frame in whole}


@pytest.mark.parametrize("options", [{}, {"trajs_per_batch": 2, "traj_format": "cat"}], ids=["rollouts", "held"])
@pytest.mark.parametrize("messages", [False, True])
def test_ragged_records_in_a_saved_state(make, options, messages):
    class Policy(nn.Module):  # which has no state
        forward = Answers("new", messages).__call__

    def build():
        return make(Dialog((2,), messages=messages), Policy(), frames_per_batch=10, total_frames=200, **options)

    collector = build()
    collector.next()
    file = io.BytesIO()
    state = collector.state_dict()
    assert state["unsaved"] == []
    parts = [state["trajectories"]["carrier"], *(state["held"]["open"] if state["held"] else ())]
    assert {"pickled" in part for part in parts} == {messages}  # text and ragged tensors are no objects
    torch.save(state, file)
    file.seek(0)
    expected = [frames_of(collector.next()) for _ in range(3)]
    state = torch.load(file, weights_only=True)
    other = build()
    other.load_state_dict(state)
    assert [frames_of(other.next()) for _ in range(3)] == expected


class Ragged:
    """Acts in a batch of ordinary environments, and writes as many numbers as it has done steps, and more by row."""

    def __init__(self, actions, *, lazily_from=0):
        self.actions, self.calls, self.lazily_from = actions, 0, lazily_from

    def __call__(self, td):
        td = td.set("action", self.actions(td))
        self.calls += 1
        if self.calls <= self.lazily_from:
            return td.set("thoughts", torch.zeros(*td.shape, 2))
        rows = [
            TensorDict({"action": row["action"], "thoughts": torch.ones(self.calls + i)}) for i, row in enumerate(td)
        ]
        return LazyStackedTensorDict(*rows, stack_dim=0)


def ones(td):
    return torch.ones(*td.shape, 1, dtype=torch.int32)


def left(td):
    return torch.zeros(td.shape, dtype=torch.int64)


@pytest.mark.parametrize("late", [0, 2])
@pytest.mark.parametrize("kind", ["plain", "arrays"])
def test_ragged_outputs_in_an_environment_of_one_shape(make, kind, late):
    if kind == "plain":
        env, actions = CountingEnv(batch_size=[2], max_steps=99), ones
    else:
        env = SerialEnv(2, lambda: GymEnv("CartPole-v1", categorical_action_encoding=True))
        actions = left
    policy = Ragged(actions, lazily_from=late)
    batch = make(env, policy, frames_per_batch=8).next()
    sizes = [[frame["thoughts"].shape[0] for frame in row.unbind(0)] for row in batch.unbind(0)]
    expected = [[2] * late + [t + i for t in range(1, 5)][late:] for i in range(2)]
    assert sizes == expected
    assert torch.equal(batch["observation"][:, 1:], batch["next", "observation"][:, :-1])


def test_text_goes_to_and_fro(make):
    policy = lambda td: td.set("action", td["observation"][::-1])  # noqa: E731
    torch.manual_seed(0)  # no episode ends, as one step in a hundred does
    batch = make(Str2StrEnv(), policy, frames_per_batch=5).next()
    assert list(batch["action"]) == [text[::-1] for text in batch["observation"]]
    assert list(batch["observation"])[1:] == list(batch["next", "observation"])[:-1]


def test_an_action_that_is_missing_is_named_though_the_last_one_is_there(make):
    class Once(Answers):
        def __call__(self, td):
            if "t0" in td[0]["text"]:
                return super().__call__(td)
            return td

    collector = make(Dialog((2,), turns=3), Once("rows"), frames_per_batch=8)
    with pytest.raises(PolicyKeyError, match="it wrote no 'answer"):
        collector.next()


def test_an_action_of_varying_shape_is_named_where_its_spec_has_one_shape(make):
    def policy(td):
        rows = [TensorDict({"action": torch.ones(1 + i, dtype=torch.int32)}) for i in range(2)]
        return LazyStackedTensorDict(*rows, stack_dim=0)

    collector = make(CountingEnv(batch_size=[2]), policy, frames_per_batch=8)
    with pytest.raises(PolicyError, match=r"'action' with a shape that differs.*\[2, 1\].*-1"):
        collector.next()


def test_a_state_may_be_loaded_where_it_was_saved(make):
    collector = make(Dialog((2,)), Answers("new"), frames_per_batch=10, total_frames=200)
    collector.next()
    with pytest.warns(UserWarning, match="policy"):
        state = collector.state_dict()
    ids = collector.next()[IDS]
    collector.load_state_dict(state)
    assert frames_of(collector.next())[0]["text"].endswith("t1")
    other = make(Dialog((2,)), Answers("new"), frames_per_batch=10, total_frames=200)
    other.load_state_dict(state)
    other.load_state_dict(state)  # nothing has happened since: ids are free
    assert torch.equal(other.next()[IDS], ids)


# Frames that were not taken, and padding ------------------------------------------------------------------------


class Stopped(Interruptor):
    """Lets every rollout take as many steps as ``steps``."""

    def __init__(self, steps):
        super().__init__()
        self.steps, self.asked = steps, 0

    def collection_stopped(self):
        self.asked += 1
        return self.asked % self.steps == 0


@pytest.mark.parametrize("size", [(), (2,)])
@pytest.mark.parametrize("steps", [1, 3])
def test_frames_that_were_not_taken_hold_nothing(make, size, steps):
    env = Dialog(size, turns=9, messages=True)
    batch = make(env, Answers(messages=True), frames_per_batch=5 * env.numel(), interruptor=Stopped(steps)).next()
    assert batch.shape == (*size, 5)
    taken = batch[..., :steps]
    check(taken, messages=True)
    assert int(taken[IDS].min()) >= 0
    for frame in frames_of(batch[..., steps:]):
        assert (frame["text"], frame["answer"], frame["next"]["text"]) == ("", "", "")
        assert frame["tokens"] == frame["answer_tokens"] == frame["next"]["tokens"] == frame["prompt"]["mask"] == []
        assert frame["message"] == frame["reply"] == ("Words", "", "", 0)
        assert frame["collector"]["traj_ids"] == -1
        assert frame["next"]["reward"] == [0.0]


@pytest.mark.filterwarnings("ignore:.*split_trajs=True pads")
@pytest.mark.parametrize("way", ["split_trajs", "trajs_per_batch"])
def test_padding_holds_nothing(make, way):
    options = {"split_trajs": True} if way == "split_trajs" else {"trajs_per_batch": 4, "traj_format": "padded"}
    env = Dialog((2,), messages=True)  # episodes of two and of three steps
    collector = make(env, Answers(messages=True), frames_per_batch=12, **options)
    batch = collector.next()
    lengths = batch["collector", "mask"].sum(-1).tolist()
    assert sorted(lengths) == sorted({"split_trajs": [2, 2, 2, 3, 3], "trajs_per_batch": [2, 2, 2, 3]}[way])
    for row, length in zip(batch.unbind(0), lengths, strict=True):
        check(row[:length], messages=True)
        assert len({int(frame[IDS]) for frame in row[:length].unbind(0)}) == 1
        for frame in frames_of(row[length:]) if length < 3 else []:
            assert (frame["text"], frame["answer"], frame["next"]["text"]) == ("", "", "")
            assert frame["tokens"] == frame["answer_tokens"] == frame["next"]["tokens"] == []
            assert frame["message"] == ("Words", "", "", 0)


def test_padding_of_nested_trajectories_holds_no_text(make):
    env = Dialog((2,), messages=True, dense=True)
    batch = make(env, Answers("new", True), frames_per_batch=8).next()
    nested = split_trajectories(batch, as_nested=True)
    padded = nested.to_padded_tensor(mask_key="mask")
    assert padded["mask"].sum(-1).tolist() == [2, 2, 3, 1]
    for frame, real in zip(frames_of(padded), padded["mask"].flatten().tolist(), strict=True):
        assert (frame["text"] != "") == (frame["message"][1] != "") == real


def test_returns_over_several_steps_of_ragged_records(make):
    env = Dialog((2,), turns=3, messages=True)
    collector = make(env, Answers("new", True), frames_per_batch=8, postproc=MultiStep(gamma=0.5, n_steps=2))
    batch = collector.next()
    frames = frames_of(batch[0])  # an episode of three steps, and the first of the next one
    assert [frame["text"] for frame in frames] == ["e0 r0 t0", "e0 r0 t1", "e0 r0 t2", "e1 r0 t0"]
    assert [frame["next"]["text"] for frame in frames] == ["e0 r0 t2", "e0 r0 t3", "e0 r0 t3", "e1 r0 t1"]
    assert [frame["next"]["reward"] for frame in frames] == [[2.0], [3.5], [3.0], [1.0]]
    assert [len(frame["next"]["tokens"]) for frame in frames] == [3, 4, 4, 2]


@pytest.mark.parametrize("storage", [LazyTensorStorage, LazyMemmapStorage])
def test_what_a_storage_of_tensors_cannot_hold_is_named(make, storage):
    dense = make(Dialog((2,), messages=True, dense=True), Answers("new", True), frames_per_batch=8).next().reshape(-1)
    ragged = make(Dialog((2,)), Answers("new"), frames_per_batch=8).next().reshape(-1)
    names = ["'text'", "'answer'", "'message'", "('next', 'message')"]
    for call, data in (("extend", dense), ("add", dense[0])):
        buffer = ReplayBuffer(storage=storage(100))
        with pytest.raises(TypeError, match="tensors only") as error:
            getattr(buffer, call)(data)
        assert all(name in str(error.value) for name in names), str(error.value)
        assert len(buffer) == 0
    for data in (ragged, ragged.exclude("text", "answer", ("next", "text"))):
        with pytest.raises(ValueError, match=r"'tokens'.*ListStorage"):
            ReplayBuffer(storage=storage(100)).extend(data)
