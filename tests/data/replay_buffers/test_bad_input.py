"""What is wrong is said at once: the argument, what was expected, what was given, what to do."""

from __future__ import annotations

import re

import numpy as np
import pytest
import torch
from tensordict import NonTensorData, NonTensorStack, TensorDict

from rollwright.data import (
    LazyMemmapStorage,
    LazyTensorStorage,
    ListStorage,
    PrioritizedReplayBuffer,
    PrioritizedSampler,
    PrioritizedSliceSampler,
    RaggedStorage,
    RandomSampler,
    ReplayBuffer,
    ReplayBufferEnsemble,
    SamplerWithoutReplacement,
    SliceSampler,
    SliceSamplerWithoutReplacement,
    TensorDictPrioritizedReplayBuffer,
    TensorDictReplayBuffer,
    TensorStorage,
)

ROWS = [LazyTensorStorage, LazyMemmapStorage]


def frames(n: int = 6) -> TensorDict:
    return TensorDict(
        {
            "obs": torch.zeros(n, 3),
            "collector": {"traj_ids": torch.arange(n) // 3},
            "next": {"done": torch.zeros(n, 1)},
        },
        [n],
    )


def filled(storage=LazyTensorStorage, **options) -> ReplayBuffer:
    buffer = TensorDictReplayBuffer(storage=storage(20), **{"batch_size": 4, **options})
    buffer.extend(frames())
    return buffer


# Data --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("storage", [*ROWS, ListStorage, RaggedStorage])
def test_nothing_and_one_element_are_no_batch(storage):
    buffer = ReplayBuffer(storage=storage(20), batch_size=4)
    with pytest.raises(ValueError, match=r"data: expected at least one element, got none"):
        buffer.extend([])
    for element in (frames()[0], torch.tensor(1.0)):
        with pytest.raises(ValueError, match=r"data: .*batch dimensions|data: expected a batch.*Pass one element"):
            buffer.extend(element)
    assert len(buffer) == 0


@pytest.mark.parametrize("storage", [*ROWS, ListStorage, RaggedStorage])
def test_the_rows_of_an_array_are_elements(storage):
    buffer = ReplayBuffer(storage=storage(20), batch_size=4)
    assert buffer.extend(np.arange(6.0).reshape(3, 2)).tolist() == [0, 1, 2]
    assert torch.equal(buffer[1], torch.tensor([2.0, 3.0], dtype=torch.float64))


def test_a_last_batch_of_slices_that_would_be_short_is_one_of_trajectories():
    buffer = filled(sampler=SliceSamplerWithoutReplacement(slice_len=2, drop_last=True), batch_size=6)
    with pytest.raises(ValueError, match=r"at most the 2 trajectories that are stored.*drop_last.*got 3"):
        buffer.sample()


@pytest.mark.parametrize("storage", ROWS)
@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (lambda td: td.exclude("obs"), KeyError, r"Missing: 'obs'.*unknown: none"),
        (lambda td: td.set("new", torch.zeros(6)), KeyError, r"Missing: none.*unknown: 'new'.*another buffer"),
        (lambda td: td.set("obs", torch.zeros(6, 4)), ValueError, r"'obs'.*\[6\] \+ \[3\].*got \[6, 4\]"),
        (lambda td: td.set("obs", torch.zeros(6, 3).double()), ValueError, r"'obs'.*float32.*got.*float64.*Convert"),
        (lambda td: td.set(("next", "done"), torch.zeros(6)), ValueError, r"\('next', 'done'\).*got \[6\]"),
        (lambda td: td.set("name", "text"), (TypeError, KeyError), "name"),
        (lambda td: td[:0], ValueError, "at least one element"),
        (lambda td: td[0], ValueError, r"batch dimensions.*add\(\)"),
        (lambda td: td.to_dict(), TypeError, r"TensorDict or tensor.*got dict"),
        (lambda td: torch.zeros(6, 3), KeyError, "Missing"),
        (lambda td: None, TypeError, "got NoneType"),
    ],
)
def test_data_that_do_not_fit_are_refused_and_change_nothing(storage, change, error, message):
    buffer = filled(storage)
    with pytest.raises(error, match=message):
        buffer.extend(change(frames()))
    assert (len(buffer), buffer.write_count) == (6, 6)
    assert buffer.extend(frames()).tolist() == [6, 7, 8, 9, 10, 11]  # no row was lost


@pytest.mark.parametrize("storage", ROWS)
def test_the_first_data_are_looked_at_too(storage):
    buffer = ReplayBuffer(storage=storage(10))
    for data, error, message in (
        (TensorDict({}, [3]), ValueError, "elements with entries"),
        (frames()[:0], ValueError, "at least one element|expected elements"),
        (TensorDict({"name": "text"}, [3]), TypeError, r"'name'.*ListStorage"),
        (["a", "b"], TypeError, "ListStorage"),
        (torch.tensor(3.0), (TypeError, ValueError), r"batch dimension"),
    ):
        with pytest.raises(error, match=message):
            buffer.extend(data)
    buffer.extend(frames())
    assert len(buffer) == 6


@pytest.mark.parametrize("storage", [*ROWS, TensorStorage])
@pytest.mark.parametrize("text", [NonTensorStack(*"abcdef"), NonTensorData("abc", [6])], ids=["stack", "data"])
@pytest.mark.parametrize("key", ["mission", ("next", "mission")])
def test_text_is_refused_by_name_and_nothing_is_written(storage, text, key):
    data = frames().set(key, text)
    with pytest.raises(TypeError, match=rf"tensors only.*{re.escape(repr(key))}.*ListStorage.*data.exclude"):
        ReplayBuffer(storage=TensorStorage(data) if storage is TensorStorage else storage(10)).extend(data)
    buffer = ReplayBuffer(storage=TensorStorage(frames(), 10) if storage is TensorStorage else storage(10))
    buffer.extend(data.exclude(key))
    held = buffer.write_count
    for write in (buffer.extend, lambda batch: buffer.add(batch[0]), lambda batch: buffer.extend_pieces([batch])):
        with pytest.raises(TypeError, match="tensors only"):
            write(data)
    assert buffer.write_count == held
    kept = ReplayBuffer(storage=ListStorage(10))
    kept.extend(data)
    assert list(kept[:][key]) == list(data[key]) if isinstance(text, NonTensorStack) else data[key]


def test_entries_whose_shape_varies_need_a_list():
    parts = [TensorDict({"obs": torch.zeros(n)}, []) for n in (2, 3)]
    ragged = TensorDict.lazy_stack(parts)
    with pytest.raises(ValueError, match="ListStorage"):
        ReplayBuffer(storage=LazyTensorStorage(10)).extend(ragged)
    jagged = torch.nested.nested_tensor([torch.zeros(n) for n in (2, 3)], layout=torch.jagged)
    for data, where in ((jagged, "a nested tensor"), (TensorDict({"obs": jagged}, [2]), "'obs'")):
        with pytest.raises(ValueError, match=f"shape varies.*{where}.*RaggedStorage or a ListStorage"):
            ReplayBuffer(storage=LazyTensorStorage(10)).extend(data)
    buffer = ReplayBuffer(storage=ListStorage(10))
    buffer.extend(ragged)
    assert len(buffer) == 2


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("stored", [0, 2])
def test_entries_that_some_elements_have_are_not_dropped(nested, stored):
    one, other = TensorDict({"obs": torch.zeros(2)}), TensorDict({"obs": torch.zeros(2), "more": torch.zeros(1)})
    if nested:
        one, other = TensorDict({"next": one}), TensorDict({"next": other})
    buffer = ReplayBuffer(storage=LazyTensorStorage(10))
    if stored:
        buffer.extend(TensorDict.lazy_stack([one] * stored))
    for parts in ([one, other], [other, one]):
        with pytest.raises(KeyError, match="the same entries in all elements, got 'more' in some of them only"):
            buffer.extend(TensorDict.lazy_stack(parts))
        with pytest.raises(KeyError, match="more"):
            buffer.extend_pieces([TensorDict.lazy_stack([one, one]), TensorDict.lazy_stack(parts)])
    assert len(buffer) == stored
    kept = ReplayBuffer(storage=RaggedStorage(10))
    kept.extend(TensorDict.lazy_stack([one, other]))
    assert [len(each.keys(True, True)) for each in kept[:].unbind(0)] == [1, 2]


def test_dimensions_that_do_not_fit():
    buffer = ReplayBuffer(storage=LazyTensorStorage(20, ndim=2))
    with pytest.raises(ValueError, match=r"ndim=2.*2 batch dimensions.*got batch size \[6\]"):
        buffer.extend(frames())
    buffer.extend(frames().reshape(2, 3))
    with pytest.raises(ValueError, match=r"expected 'obs' of shape \[2, 2\]|expected .* of shape \[2, 2\]"):
        buffer.extend(frames().reshape(3, 2))
    assert len(buffer) == 6


def test_a_list_takes_elements_one_by_one():
    buffer = ReplayBuffer(storage=ListStorage(5))
    for data in ({"a": 1}, "text", 3):
        with pytest.raises(TypeError, match=r"list of elements.*add\(\)"):
            buffer.extend(data)
    with pytest.raises(ValueError, match="at least one element"):
        buffer.extend([])


@pytest.mark.parametrize("storage", [*ROWS, ListStorage])
def test_elements_are_replaced_by_as_many(storage):
    buffer = filled(storage)
    with pytest.raises((ValueError, KeyError), match="data"):
        buffer[:3] = frames(2)
    if storage is not ListStorage:
        with pytest.raises(KeyError, match="data: expected the entries"):
            buffer[:3] = frames(3).exclude("obs")


# Sampling ----------------------------------------------------------------------------------------

SAMPLERS = {
    "random": None,
    "without": SamplerWithoutReplacement,
    "prioritized": lambda: PrioritizedSampler(20, 0.5, 0.5),
    "slices": lambda: SliceSampler(slice_len=2),
    "slices_without": lambda: SliceSamplerWithoutReplacement(slice_len=2),
    "slices_prioritized": lambda: PrioritizedSliceSampler(20, 0.5, 0.5, slice_len=2),
}


@pytest.mark.parametrize("storage", [*ROWS, ListStorage])
@pytest.mark.parametrize("sampler", SAMPLERS)
def test_an_empty_buffer(storage, sampler):
    buffer = ReplayBuffer(storage=storage(10), sampler=SAMPLERS[sampler], batch_size=4)
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"empty.*extend\(\)"):
            buffer.sample()
        buffer.extend(frames())
        assert buffer.sample().batch_size == (4,)
        buffer.empty()


@pytest.mark.parametrize("sampler", [SliceSampler, SliceSamplerWithoutReplacement, "prioritized"])
def test_slices_longer_than_any_trajectory(sampler):
    kind = (lambda **options: PrioritizedSliceSampler(20, 0.5, 0.5, **options)) if sampler == "prioritized" else sampler
    buffer = filled(sampler=kind(slice_len=4, strict_length=True))
    with pytest.raises(ValueError, match=r"slice_len: expected at most 3.*got 4.*strict_length=False"):
        buffer.sample()
    short = filled(sampler=kind(slice_len=4), batch_size=8)
    assert short.sample().batch_size == (6,)


def test_a_storage_too_small_for_one_trajectory():
    buffer = ReplayBuffer(storage=LazyTensorStorage(4), batch_size=4)
    with pytest.raises(ValueError, match=r"trajectory of 6 frames.*room for 4.*larger"):
        buffer.extend_pieces([frames(3), frames(3)])
    assert len(buffer) == buffer.write_count == 0
    slices = ReplayBuffer(
        storage=LazyTensorStorage(4), sampler=SliceSampler(slice_len=5, strict_length=True), batch_size=5
    )
    slices.extend(frames(9).set(("collector", "traj_ids"), torch.zeros(9, dtype=torch.int64)))
    with pytest.raises(ValueError, match="slice_len: expected at most 4"):
        slices.sample()


@pytest.mark.parametrize(
    ("options", "size", "remedy"),
    [
        ({"slice_len": 32}, 16, "Pass batch_size=32, or"),
        ({"slice_len": 32}, 40, "Pass batch_size=32 or batch_size=64, or"),
        ({"num_slices": 3}, 4, "Pass batch_size=3 or batch_size=6, or"),
        ({"num_slices": 3, "slice_len": 4}, 13, "Pass batch_size=12, or"),
    ],
)
def test_the_nearest_batch_sizes_that_slices_fill(options, size, remedy):
    buffer = filled(sampler=SliceSampler(**options))
    with pytest.raises(ValueError, match=remedy):
        buffer.sample(size)
    assert len(buffer.sample(int(remedy.split("=")[1].split()[0].strip(","))))


@pytest.mark.parametrize("options", [{}, {"end_key": ("next", "done")}])
@pytest.mark.parametrize("kind", [SliceSampler, SliceSamplerWithoutReplacement])
def test_slices_of_elements_that_hold_several_frames(kind, options):
    data = frames().reshape(2, 3)
    buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(20), sampler=kind(slice_len=2, **options), batch_size=4)
    remedy = r"ndim=1 takes a batch \[2, 3\] .*extend\(data.reshape\(-1\)\).*LazyTensorStorage\(n, ndim=2\)"
    for write in (buffer.extend, lambda data: buffer.extend_pieces([data])):
        with pytest.raises(ValueError, match=remedy):
            write(data)
    assert len(buffer) == 0  # nothing was stored, and the remedy works
    buffer.extend(data.reshape(-1))
    assert buffer.sample().batch_size[0] <= 4
    grid = TensorDictReplayBuffer(
        storage=LazyTensorStorage(20, ndim=2), sampler=kind(slice_len=2, **options), batch_size=4
    )
    grid.extend(data)
    assert grid.sample()["obs"].shape == (4, 3)


def test_batch_sizes_that_slices_do_not_fill():
    with pytest.raises(ValueError, match=r"batch_size.*slice_len=3.*got 4"):
        filled(sampler=SliceSampler(slice_len=3)).sample()
    with pytest.raises(ValueError, match=r"batch_size.*num_slices=3.*got 4"):
        filled(sampler=SliceSampler(num_slices=3)).sample()
    with pytest.raises(ValueError, match=r"batch_size.*num_slices=2 \* slice_len=3.*got 4"):
        filled(sampler=SliceSampler(num_slices=2, slice_len=3)).sample()


def test_nothing_tells_trajectories_apart():
    buffer = ReplayBuffer(storage=LazyTensorStorage(9), sampler=SliceSampler(slice_len=2), batch_size=4)
    buffer.extend(TensorDict({"obs": torch.zeros(5)}, [5]))
    with pytest.raises(KeyError, match=r"traj_key.*'obs'"):
        buffer.sample()
    named = filled(sampler=SliceSampler(slice_len=2, traj_key="id"))
    with pytest.raises(KeyError, match=r"traj_key.*'id'"):
        named.sample()
    tensors = ReplayBuffer(storage=LazyTensorStorage(9), sampler=SliceSampler(slice_len=2), batch_size=4)
    tensors.extend(torch.zeros(5))
    with pytest.raises(KeyError, match="no TensorDicts"):
        tensors.sample()


@pytest.mark.parametrize("batch_size", [0, -1, 2.0, "4", True])
def test_batch_sizes_are_positive_integers(batch_size):
    with pytest.raises((ValueError, TypeError), match="batch_size: expected an integer of at least 1"):
        filled(batch_size=batch_size)
    with pytest.raises((ValueError, TypeError), match="batch_size: expected an integer of at least 1"):
        filled().sample(batch_size)


def test_priorities():
    buffer = TensorDictPrioritizedReplayBuffer(alpha=0.5, beta=0.5, storage=LazyTensorStorage(9), batch_size=4)
    index = buffer.extend(frames())
    for priority in (torch.full((6,), -1.0), torch.full((6,), float("nan")), torch.full((6,), float("inf"))):
        with pytest.raises(ValueError, match="priorit"):
            buffer.update_priority(index, priority)
    with pytest.raises(ValueError, match="priorit"):
        buffer.update_priority(index, torch.zeros(4))
    for places in (torch.tensor([9]), torch.tensor([400])):
        with pytest.raises((IndexError, ValueError), match="index"):
            buffer.update_priority(places, torch.ones(1))
    with pytest.raises(KeyError, match="td_error"):
        buffer.update_tensordict_priority(buffer.sample())
    buffer.set_sampler(RandomSampler())
    buffer.update_tensordict_priority(buffer.sample())  # nothing to set
    assert buffer.sample().batch_size == (4,)


# Constructors ------------------------------------------------------------------------------------


@pytest.mark.parametrize("part", ["storage", "sampler", "writer"])
def test_parts_of_torchrls_buffers_are_refused_with_a_remedy(part):
    theirs = type("Part", (), {"__module__": "torchrl.data.replay_buffers"})()
    with pytest.raises(TypeError, match=rf"{part}: expected .*got torchrl.*Part.*buffer of TorchRL"):
        ReplayBuffer(**{part: theirs})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"storage": 10}, "storage: expected a Storage"),
        ({"storage": dict}, "storage: expected a Storage"),
        ({"sampler": "random"}, "sampler: expected a Sampler"),
        ({"writer": 3}, "writer: expected a Writer"),
        ({"collate_fn": 3}, "collate_fn: expected a callable"),
        ({"prefetch": -1}, "prefetch: expected an integer of at least 1"),
        ({"prefetch": 1.5}, "prefetch: expected an integer of at least 1"),
        ({"transform": 3}, "transform: expected a transform"),
        ({"transform": abs, "transform_factory": lambda: abs}, "transform and transform_factory"),
        ({"transform_factory": 3}, "transform_factory"),
        ({"batch_size": 0}, "batch_size: expected an integer of at least 1"),
        ({"dim_extend": 1}, "dim_extend: expected a dimension"),
        ({"dim_extend": "time"}, "dim_extend: expected a dimension"),
        ({"generator": 7}, r"generator: expected a torch.Generator"),
    ],
)
def test_buffers(options, message):
    with pytest.raises((TypeError, ValueError), match=message):
        ReplayBuffer(**{"storage": LazyTensorStorage(5), **options})


@pytest.mark.parametrize(
    ("kind", "remedy"),
    [
        ("LazyTensorStorage", "Use rollwright.data.LazyTensorStorage; or leave it in a buffer of TorchRL"),
        ("CompressedListStorage", r"Use LazyTensorStorage\(size\) of rollwright.data, say"),
    ],
)
def test_parts_of_torchrl(kind, remedy):
    """They are named with what to use, and their own text, which may raise, is not asked for."""

    def raises(part):
        raise AttributeError

    part = type(kind, (), {"__module__": "torchrl.data.replay_buffers.storages", "__repr__": raises})()
    with pytest.raises(TypeError, match=rf"storage: expected a Storage .*got torchrl.*\.{kind}\. {remedy}"):
        ReplayBuffer(storage=part)
    with pytest.raises(TypeError, match=rf"buffers: .*got torchrl.*\.{kind}\. Pass one"):
        ReplayBufferEnsemble(part)


@pytest.mark.skipif(torch.cuda.is_available(), reason="memory can be pinned")
def test_pinned_memory_needs_a_device():
    with pytest.raises(ValueError, match=r"pin_memory.*CUDA"):
        ReplayBuffer(pin_memory=True)


@pytest.mark.parametrize("size", [0, -3, 2.5, "10", True])
@pytest.mark.parametrize("storage", [*ROWS, ListStorage])
def test_sizes_of_storages(storage, size):
    with pytest.raises((TypeError, ValueError), match="max_size: expected an integer of at least 1"):
        storage(size)


@pytest.mark.parametrize("storage", ROWS)
def test_dimensions_of_storages(storage):
    for ndim in (0, 1.5):
        with pytest.raises((TypeError, ValueError), match="ndim: expected an integer of at least 1"):
            storage(5, ndim=ndim)


def test_given_storages():
    with pytest.raises((TypeError, ValueError), match="storage: expected a TensorDict"):
        TensorStorage([1, 2])
    with pytest.raises((TypeError, ValueError), match="storage: expected a TensorDict"):
        TensorStorage(frames(), ndim=2)


def test_devices():
    with pytest.raises(ValueError, match=r"shared.*CPU"):
        ReplayBuffer(storage=LazyTensorStorage(5, device="meta"), shared=True)
    with pytest.raises((RuntimeError, ValueError, TypeError), match=r"device|nowhere"):
        LazyTensorStorage(5, device="nowhere")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "num_slices, slice_len"),
        ({"slice_len": 0}, "slice_len: expected an integer of at least 1"),
        ({"num_slices": 1.5}, "num_slices: expected an integer of at least 1"),
        ({"slice_len": 4, "span": 4}, r"span: expected .*\(4\), or a pair of these, .*got 4"),
        ({"slice_len": 4, "span": [1, 4]}, r"span: expected .*got \[1, 4\]"),
        ({"num_slices": 4, "span": [1, 2, 3]}, r"span: expected .*a slice has, or a pair of these, .*got \[1, 2, 3\]"),
        ({"slice_len": 4, "span": (1,)}, "span: expected .*a pair"),
        ({"slice_len": 4, "span": "ab"}, "span: expected .*got 'ab'"),
        ({"slice_len": 4, "span": None}, "span: expected .*got None"),
        ({"slice_len": 4, "end_key": 3}, "end_key: expected a string or a tuple of strings, got int: 3"),
        ({"slice_len": 4, "traj_key": [1]}, "traj_key: expected a string"),
        ({"slice_len": 4, "init_key": 3}, "init_key: expected a string"),
        ({"slice_len": 4, "truncated_key": ()}, "truncated_key: expected a string"),
        ({"slice_len": 4, "ends": [True]}, "ends: expected a tensor .*got list"),
        ({"slice_len": 4, "ends": torch.zeros(4, 2)}, "ends"),
        ({"slice_len": 4, "traj_key": "a", "trajectories": torch.zeros(4)}, "trajectories"),
    ],
)
def test_slice_samplers(options, message):
    for kind in (SliceSampler, SliceSamplerWithoutReplacement):
        with pytest.raises((ValueError, TypeError), match=message):
            kind(**options)


def test_a_span_may_be_a_list():
    for kind in (SliceSampler, SliceSamplerWithoutReplacement):
        assert kind(slice_len=4, span=[True, 2]).span == kind(slice_len=4, span=(True, 2)).span == (True, 2)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"alpha": -1.0}, "alpha"),
        ({"beta": -0.5}, "beta"),
        ({"eps": 0.0}, "eps"),
        ({"max_capacity": 0}, "max_capacity"),
        ({"reduction": "product"}, "reduction"),
    ],
)
def test_prioritized_samplers(options, message):
    with pytest.raises((ValueError, TypeError), match=message):
        PrioritizedSampler(**{"max_capacity": 10, "alpha": 0.5, "beta": 0.5, **options})
    with pytest.raises((ValueError, TypeError), match=message):
        PrioritizedSliceSampler(**{"max_capacity": 10, "alpha": 0.5, "beta": 0.5, "slice_len": 2, **options})


def test_an_unknown_option_is_an_error():
    for kind in (ReplayBuffer, TensorDictReplayBuffer):
        with pytest.raises(TypeError, match="colate_fn"):
            kind(colate_fn=list)
    with pytest.raises(TypeError, match="colate_fn"):
        PrioritizedReplayBuffer(alpha=1.0, beta=1.0, colate_fn=list)


@pytest.mark.parametrize(
    ("index", "message"),
    [
        (torch.arange(6) >= 3, r"index: expected integers.*got bool\. Of a mask, pass mask\.nonzero\(\)"),
        (torch.tensor([2.7]), r"index: expected integers.*got float32"),
    ],
    ids=["mask", "float"],
)
def test_what_is_no_index_of_elements_changes_no_priority(index, message):
    buffer = TensorDictPrioritizedReplayBuffer(alpha=1.0, beta=0.5, storage=LazyTensorStorage(6), batch_size=4)
    buffer.extend(frames())
    before = buffer.sampler.state_dict()
    with pytest.raises(TypeError, match=message):
        buffer.update_priority(index, torch.ones(len(index)))
    after = buffer.sampler.state_dict()
    assert all(torch.equal(after[key], value) for key, value in before.items() if isinstance(value, torch.Tensor))


@pytest.mark.parametrize("storage", ROWS)
@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (lambda data: data.set("obs", data["obs"].to("meta")), "'obs' as a dense tensor, got one that is on the d"),
        (
            lambda data: data.set("obs", data["obs"].to_sparse()),
            r"'obs' as a dense tensor, got one that is of tor",
        ),
    ],
    ids=["meta", "sparse"],
)
def test_tensors_that_cannot_be_copied_cost_no_element(storage, bad, message):
    buffer = ReplayBuffer(storage=storage(6))
    buffer.extend(frames())
    with pytest.raises(ValueError, match=message):
        buffer.extend(bad(frames(3)))
    assert len(buffer) == buffer.write_count == 6


def test_elements_of_several_frames_say_how_to_store_frames():
    buffer = ReplayBuffer(storage=LazyTensorStorage(50), batch_size=4)
    assert len(buffer.extend(TensorDict({"obs": torch.zeros(4, 10, 3)}, [4, 10]))) == 4
    for n in ([4, 7], [40]):
        with pytest.raises(ValueError, match=r"elements are batches \[10\].*extend\(data.reshape\(-1\)\)"):
            buffer.extend(TensorDict({"obs": torch.zeros(*n, 3)}, n))


def test_priorities_that_were_not_written_say_how_to_write_them():
    options = {"alpha": 0.6, "beta": 0.4, "storage": LazyTensorStorage(10), "batch_size": 2}
    buffer = TensorDictPrioritizedReplayBuffer(**options)
    buffer.extend(frames(5))
    with pytest.raises(KeyError, match=r"expected the entries .*td_error.*error.abs\(\)"):
        buffer.update_tensordict_priority(buffer.sample())
