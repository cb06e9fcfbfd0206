"""Turns of conversations in a RaggedStorage: each row holds what is new, and refers to the turn before."""

from __future__ import annotations

import copy
import io
import multiprocessing
import pickle
import random
from itertools import pairwise
from typing import Any

import pytest
import torch
from tensordict import lazy_stack
from tests.data.llm.turn_examples import turn

from rollwright.data import LazyStackStorage, RaggedStorage, ReplayBuffer, SliceSampler, TensorDictReplayBuffer
from rollwright.data.encoding import Encoded
from rollwright.data.llm import RecordLayout, Turn, record
from rollwright.data.llm.turns import Marks
from rollwright.data.transcript import Transcript

FORK = multiprocessing.get_context("fork")
NESTED, FLAT = RecordLayout(history=True), RecordLayout(nested=False)
KINDS = ["private", "shared"]


def make(kind: str, size: int, *, chunk_bytes: int = 4096, **options: Any) -> ReplayBuffer:
    storage = RaggedStorage(size, chunk_bytes=chunk_bytes)
    return ReplayBuffer(**{"storage": storage, "shared": kind == "shared", "batch_size": 8, **options})


class Talk:
    """A conversation that goes on turn by turn: each adds 20 tokens."""

    def __init__(self, number: int) -> None:
        self.number, self.turns = number, 0
        self.transcript = Transcript.reserved(16)
        self._add(5, "user")

    def _add(self, tokens: int, role: str) -> None:
        start = self.transcript.size + 1000 * self.number
        self.transcript.append(list(range(start, start + tokens)))
        self.transcript.texts.append(f"{role} {start} ")
        self.transcript.messages.append({"role": role, "content": str(start)})

    def turn(self) -> Turn:
        prompt = self.transcript.mark()
        self._add(12, "assistant")
        answer = self.transcript.mark()
        self._add(8, "user")
        number, self.turns = self.turns, self.turns + 1
        one = turn(number, 4, 12, self.number, response_text=f"answer {number}", terminated=False)
        one.place(Marks(prompt, answer, self.transcript.mark()))
        one.marks.following.settle()  # type: ignore[union-attr]
        return one

    def record(self, layout: RecordLayout = NESTED) -> Any:
        return record(self.turn(), layout, traj_id=self.number)


def check(found: Any, expected: Any) -> None:
    """Compare whole records."""
    assert set(found.keys(True)) == set(expected.keys(True))
    for key, value in expected.items(True, True):
        other = found.get(key)
        if isinstance(value, torch.Tensor):
            assert other.dtype == value.dtype, key
            assert torch.equal(other, value), key
        elif hasattr(value, "to_chats"):
            assert other.to_chats() == value.to_chats(), key
        elif hasattr(value, "tolist"):
            assert other.tolist() == value.tolist(), key
        else:
            assert other.data == value.data, key


def written(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Bytes of each element that is written from now on."""
    sizes: list[int] = []
    write = Encoded.write

    def counted(self: Encoded, memory: Any) -> None:
        sizes.append(self.num_bytes)
        write(self, memory)

    monkeypatch.setattr(Encoded, "write", counted)
    return sizes


@pytest.mark.parametrize("layout", [NESTED, FLAT])
@pytest.mark.parametrize("kind", KINDS)
def test_bytes_of_a_turn_do_not_grow_with_those_before_it(
    kind: str, layout: RecordLayout, monkeypatch: pytest.MonkeyPatch
) -> None:
    buffer, sizes = make(kind, 500, chunk_bytes=1 << 16), written(monkeypatch)
    talks = [Talk(n) for n in range(3)]
    expected = []
    for _ in range(100):
        batch = [talk.record(layout) for talk in talks]
        expected += batch
        buffer.extend(lazy_stack(batch))
    of_one = sizes[::3]
    assert max(of_one[1:]) <= 1.1 * of_one[1]
    for found, one in list(zip(buffer[:], expected, strict=True))[::60]:
        check(found, one)


@pytest.mark.parametrize("kind", KINDS)
def test_rows_whose_first_turns_are_gone_are_whole(kind: str) -> None:
    buffer, rng = make(kind, 7), random.Random(0)
    talks = [Talk(n) for n in range(3)]
    expected: list[Any] = []
    for time in range(100):
        batch = [rng.choice(talks).record() for _ in range(rng.randint(1, 4))]
        expected += batch
        buffer.extend(lazy_stack(batch))
        if rng.random() < 0.1:
            talks[rng.randrange(3)] = Talk(rng.randrange(100))
        if time % 10 == 9:
            kept = {(int(one["group_id"]), int(one["turn"])): one for one in expected[-7:]}
            found = {(int(one["group_id"]), int(one["turn"])): one for one in buffer[:]}
            assert found.keys() == kept.keys()
            for name, one in kept.items():
                check(found[name], one)
    storage: Any = buffer.storage
    assert sum(len(one["tokens", "full"]) for one in expected[-7:]) < storage.num_bytes < 100 * 4096 * 4


@pytest.mark.parametrize("kind", KINDS)
def test_a_batch_that_is_larger_than_the_buffer(kind: str) -> None:
    buffer, talk = make(kind, 5), Talk(1)
    expected = [talk.record() for _ in range(12)]
    buffer.extend(lazy_stack(expected))
    for found, one in zip(sorted(buffer[:], key=lambda each: int(each["turn"])), expected[-5:], strict=True):
        check(found, one)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("how", ["state", "pickle", "copy", "shared later", "another kind"])
def test_what_is_saved_or_sent_is_whole_and_has_each_conversation_once(kind: str, how: str) -> None:
    buffer, talk = make(kind, 60), Talk(1)
    expected = [talk.record() for _ in range(100)][-60:]
    for one in expected:
        buffer.add(one)
    state = buffer.storage.state_dict()
    stream = io.BytesIO()
    torch.save(state, stream)
    assert len(stream.getvalue()) < 60 * 4000
    stream.seek(0)
    if how == "state":
        other = make(kind, 60)
        other.storage.load_state_dict(torch.load(stream, weights_only=True))
    elif how == "another kind":
        other = make("private" if kind == "shared" else "shared", 60)
        other.storage.load_state_dict(torch.load(stream, weights_only=True))
    elif how == "shared later":
        if kind == "shared":
            return
        other = buffer
        buffer.storage.share()
    else:
        storage = pickle.loads(pickle.dumps(buffer.storage)) if how == "pickle" and kind == "private" else None
        other = copy.deepcopy(buffer) if storage is None else ReplayBuffer(storage=storage, batch_size=8)
    elements = RaggedStorage.elements_of_state(other.storage.state_dict())
    assert len(elements) == len(expected)
    for found, again, one in list(zip(other[:], elements, expected, strict=True))[::19]:
        check(found, one)
        check(again, one)
    other.add(talk.record())
    newest = max(other[:], key=lambda one: int(one["turn"]))
    check(newest, record(_turn_of(1, 100), NESTED, traj_id=1))


def test_entries_that_were_set_changed_or_taken_out_are_kept() -> None:
    buffer, talk = make("private", 10), Talk(2)
    talk.record()
    one = talk.record()
    one["advantage"] = torch.ones(1, 1)
    one["next", "step_count"] = torch.tensor([3])
    one["masks", "all_assistant_mask"][-1] = False
    del one["seconds"]
    one["text"].pop("response")
    buffer.add(one)
    check(buffer[0], one)


@pytest.mark.parametrize("kind", KINDS)
def test_samplers_and_keys_read_what_is_not_stored_in_each_row(kind: str) -> None:
    buffer = make(kind, 100, sampler=SliceSampler(slice_len=3, strict_length=False), batch_size=6)
    talk = Talk(3)
    for _ in range(20):
        buffer.extend(lazy_stack([talk.record()]))
    batch = buffer.sample()
    assert batch["collector", "traj_ids"].tolist() == [3] * 6
    turns = batch["turn"].tolist()
    assert [later - first for first, later in pairwise(turns)].count(1) >= 4
    assert ("tokens", "full") in buffer.storage.keys()  # noqa: SIM118
    assert LazyStackStorage is RaggedStorage


@pytest.mark.parametrize("kind", KINDS)
def test_rows_that_are_replaced_stay_what_others_refer_to(kind: str) -> None:
    buffer, talk = make(kind, 30), Talk(4)
    expected = [talk.record() for _ in range(20)]
    buffer.extend(lazy_stack(expected))
    other = Talk(5)
    replaced = [other.record() for _ in range(3)]
    for row in range(3):
        buffer[row] = replaced[row]
    for _ in range(40):  # which fills chunks again
        buffer[25 % len(buffer)] = replaced[0]
    expected = [*replaced, *expected[3:]]
    for row in (0, 1, 2, 3, 10, 19):
        check(buffer[row], expected[row] if row != 25 % len(buffer) else replaced[0])
    buffer.empty()
    buffer.add(talk.record())
    assert buffer[0]["turn"] == 20
    assert buffer[0]["tokens", "full"].tolist()[:3] == [4000, 4001, 4002]


def _go_on(buffer: ReplayBuffer, talk: Talk, count: int) -> None:
    torch.set_num_threads(1)
    for _ in range(count):
        buffer.add(talk.record())


def test_forked_writers_go_on_with_the_same_conversation_each_for_itself() -> None:
    buffer, talk = make("shared", 200), Talk(6)
    _go_on(buffer, talk, 5)
    writers = [FORK.Process(target=_go_on, args=(buffer, talk, 20)) for _ in range(2)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join(60)
    _go_on(buffer, talk, 20)
    assert len(buffer) == 65
    for one in buffer[::4]:
        check(one, record(_turn_of(6, int(one["turn"])), NESTED, traj_id=6))


def _turn_of(number: int, at: int) -> Turn:
    talk = Talk(number)
    for _ in range(at):
        talk.turn()
    return talk.turn()


def test_a_buffer_of_tensordicts_takes_them() -> None:
    buffer = TensorDictReplayBuffer(storage=RaggedStorage(20), batch_size=4)
    talk = Talk(7)
    buffer.extend(lazy_stack([talk.record() for _ in range(8)]))
    batch = buffer.sample()
    assert all(len(one["tokens", "full"]) == 17 + 20 * int(one["turn"]) for one in batch)
