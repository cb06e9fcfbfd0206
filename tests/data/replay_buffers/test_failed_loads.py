"""A load that raises names what is wrong and changes nothing: all goes on as if it had not been tried."""

from __future__ import annotations

import pytest
import torch
from tests.data.replay_buffers.test_checkpoint import SIZE, STORAGES, assert_go_on_alike, frames, used, write
from tests.variants import in_turn

from rollwright.data import (
    LazyTensorStorage,
    PrioritizedSampler,
    ReplayBuffer,
    ReplayBufferEnsemble,
    RoundRobinWriter,
    SamplerWithoutReplacement,
    SampleToInsertRatio,
)


def without(state, *path):
    name, *rest = path
    if rest:
        return {**state, name: without(state[name], *rest)}
    return {key: value for key, value in state.items() if key != name}


def changed(state, part, **entries):
    return {**state, part: {**state[part], **entries}}


def one_less(state):
    return changed(state, "storage", high=state["storage"]["high"] - 1)


WRONG = {
    "no dictionary": (list, "expected the state of a replay buffer"),
    **{
        f"no {name}": (lambda state, name=name: without(state, name), rf"\['{name}'\] missing")
        for name in ("storage", "sampler", "writer", "generator")
    },
    **{
        f"storage without {name}": (lambda state, name=name: without(state, "storage", name), f"'{name}' missing")
        for name in ("low", "high", "voids", "lost", "max_size", "ndim", "elements")
    },
    "sampler without alpha": (lambda state: without(state, "sampler", "alpha"), "'alpha' missing"),
    "a priority too many": (
        lambda state: changed(state, "sampler", priorities=torch.ones(SIZE + 1, dtype=torch.float64)),
        "as many priorities for each",
    ),
    "an element too many": (one_less, "expected .* elements for the positions"),
    "a generator cut short": (lambda state: {**state, "generator": state["generator"][:9]}, None),
    "a storage that is none": (lambda state: {**state, "storage": [1]}, "expected the state of a storage"),
}


@pytest.mark.parametrize(("wrong", "storage"), in_turn(WRONG, list(STORAGES)))
def test_a_load_that_raises_changes_nothing(storage, wrong):
    change, says = WRONG[wrong]
    other = used(storage, "prioritized")
    write(other, 11, 3000)
    buffer, twin = used(storage, "prioritized"), used(storage, "prioritized")
    with pytest.raises((KeyError, TypeError, ValueError, RuntimeError), match=says):
        buffer.load_state_dict(change(other.state_dict()))
    assert_go_on_alike(buffer, twin)


@pytest.mark.parametrize("storage", ["tensor", "memmap", "shared", "grid"])
def test_rows_of_other_entries_change_nothing(storage):
    other = used(storage, "prioritized")
    other.empty()
    batch = [frames(11), frames(11)] if storage == "grid" else None
    data = frames(11) if batch is None else torch.stack(batch)
    other.extend(data.set("more", torch.ones(data.shape)))
    buffer, twin = used(storage, "prioritized"), used(storage, "prioritized")
    with pytest.raises(KeyError, match="unknown: 'more'"):
        buffer.load_state_dict(other.state_dict())
    assert_go_on_alike(buffer, twin)


@pytest.mark.parametrize("storage", STORAGES)
def test_a_load_while_somebody_writes_changes_nothing(storage):
    state = used(storage, "prioritized").state_dict()
    buffer, twin = used(storage, "prioritized"), used(storage, "prioritized")
    write(buffer, 4, 900)
    write(twin, 4, 900)
    taken = [one.storage.ledger.reserve(1) for one in (buffer, twin)]
    with pytest.raises(RuntimeError, match=r"load_state_dict: .* pause or shut down"):
        buffer.load_state_dict(state)
    for one, reservation in zip((buffer, twin), taken, strict=True):
        one.storage.ledger.abandon(reservation)
    assert bool((buffer[:]["serial"] == twin[:]["serial"]).all())
    assert torch.equal(buffer.sample()["serial"], twin.sample()["serial"])


class RefusesOnce(RoundRobinWriter):
    refused = False

    def load_state_dict(self, state_dict):
        if not self.refused:
            self.refused = True
            raise RuntimeError("not today")


def test_a_writer_that_refuses_leaves_the_sampler_and_the_rows():
    other = used("tensor", "without")
    other.sample()
    buffer, twin = used("tensor", "without"), used("tensor", "without")
    buffer.set_writer(RefusesOnce())
    with pytest.raises(RuntimeError, match="not today"):
        buffer.load_state_dict(other.state_dict())
    assert_go_on_alike(buffer, twin)


@pytest.mark.parametrize("lacks", ["sampled", "base", "at_base"])
def test_counts_of_a_limiter_are_all_needed(lacks):
    def limited():
        made = ReplayBuffer(
            storage=LazyTensorStorage(SIZE), batch_size=4, limiter=SampleToInsertRatio(4.0, margin=100.0)
        )
        made.extend(frames(20))
        return made

    other, buffer = limited(), limited()
    other.extend(frames(5))
    other.sample()
    before = buffer.limiter.stats()
    with pytest.raises(KeyError, match=rf"\['{lacks}'\] missing"):
        buffer.load_state_dict(without(other.state_dict(), "limiter", lacks))
    assert (len(buffer), buffer.limiter.stats()) == (20, before)


@pytest.mark.parametrize("lacks", [["sampler"], ["sampler", "alpha"], ["generator"]])
def test_a_folder_that_lacks_something_changes_nothing(lacks, tmp_path):
    other = used("tensor", "prioritized")
    write(other, 11, 3000)
    other.dumps(tmp_path)
    torch.save(without(torch.load(tmp_path / "state.pt", weights_only=True), *lacks), tmp_path / "state.pt")
    buffer, twin = used("tensor", "prioritized"), used("tensor", "prioritized")
    with pytest.raises(KeyError, match=f"'{lacks[-1]}'.* missing"):
        buffer.loads(tmp_path)
    assert_go_on_alike(buffer, twin)


def test_batches_that_were_prefetched_are_still_delivered():
    buffer = ReplayBuffer(
        storage=LazyTensorStorage(SIZE), sampler=SamplerWithoutReplacement(shuffle=False), batch_size=5, prefetch=2
    )
    buffer.extend(frames(SIZE))
    seen = [buffer.sample()["serial"]]
    with pytest.raises(KeyError, match="missing"):
        buffer.load_state_dict(without(buffer.state_dict(), "sampler", "left"))
    seen += [buffer.sample()["serial"] for _ in range(SIZE // 5 - 1)]
    assert torch.cat(seen).tolist() == list(range(SIZE))


def test_a_sampler_alone_stays_as_it_was():
    sampler = PrioritizedSampler(SIZE, 0.7, 0.5)
    before = sampler.state_dict()
    with pytest.raises(ValueError, match="could not convert"):
        sampler.load_state_dict({**before, "alpha": 0.1, "largest": "much"})
    assert (sampler.alpha, sampler.default_priority) == (0.7, 1.0)


@pytest.mark.parametrize("from_folder", [False, True])
@pytest.mark.parametrize("lacks", [["writer"], ["sampler", "alpha"], ["storage", "voids"]])
def test_no_member_of_an_ensemble_is_loaded_where_another_one_refuses(from_folder, lacks, tmp_path):
    def made():
        return ReplayBufferEnsemble(used("list", "prioritized"), used("list", "prioritized"), batch_size=8)

    other, ensemble, twin = made(), made(), made()
    for member in other.members:
        write(member, 11, 3000)
    state = without(other.state_dict(), "1", *lacks)
    if from_folder:
        other.dumps(tmp_path)
        stored = state["1"].pop("storage", None)
        torch.save(state["1"], tmp_path / "1" / "state.pt")
        torch.save(stored, tmp_path / "1" / "elements.pt")
    with pytest.raises(KeyError, match=f"'{lacks[-1]}'.* missing"):
        ensemble.loads(tmp_path) if from_folder else ensemble.load_state_dict(state)
    for member, same in zip(ensemble.members, twin.members, strict=True):
        assert_go_on_alike(member, same)
