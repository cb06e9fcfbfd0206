"""Storages: what goes in comes out, whatever its shape, its dtype, its place and the order of calls."""

from __future__ import annotations

import weakref
from collections import deque

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict

from rollwright.data import (
    LazyMemmapStorage,
    LazyTensorStorage,
    ListStorage,
    RaggedStorage,
    ReplayBuffer,
    TensorDictReplayBuffer,
    TensorStorage,
)

STORAGES = {
    "tensor": LazyTensorStorage,
    "memmap": LazyMemmapStorage,
    "list": ListStorage,
    "shared": LazyTensorStorage,
    "ragged": RaggedStorage,
    "ragged-shared": RaggedStorage,
}
ROWS = ["tensor", "memmap", "shared"]  # those that keep rows of tensors


def make_buffer(kind: str, max_size: int, **options) -> ReplayBuffer:
    ndim = options.pop("ndim", 1)
    storage = STORAGES[kind](max_size, ndim=ndim) if kind in ROWS else STORAGES[kind](max_size)
    return ReplayBuffer(storage=storage, shared="shared" in kind, batch_size=4, **options)


def numbered(*shape: int, start: int = 0) -> TensorDict:
    """Elements that are told apart by their number, which each of their entries holds."""
    serial = torch.arange(start, start + int(np.prod(shape))).reshape(shape)
    wide = serial.unsqueeze(-1)
    return TensorDict(
        {"serial": serial, "next": {"obs": wide.expand(*shape, 3).double()}, "done": wide % 2 == 0}, shape
    )


def serials(data) -> list[int]:
    return data["serial"].reshape(-1).tolist()


def check_whole(data) -> None:
    """All entries of an element belong together."""
    serial = data["serial"].unsqueeze(-1)
    assert torch.equal(data["next", "obs"], serial.expand_as(data["next", "obs"]).double())
    assert torch.equal(data["done"], serial % 2 == 0)


# One dimension -----------------------------------------------------------------------------------

step = st.one_of(
    st.tuples(st.just("extend"), st.integers(1, 17)),
    st.tuples(st.just("add"), st.just(0)),
    st.tuples(st.just("sample"), st.integers(1, 9)),
    st.tuples(st.just("set"), st.integers(0, 100)),
    st.tuples(st.just("empty"), st.just(0)),
)


@pytest.mark.parametrize("kind", STORAGES)
@settings(max_examples=25, deadline=None)
@given(st.integers(1, 9), st.lists(step, max_size=14))
def test_a_storage_holds_what_a_deque_would(kind, max_size, steps):
    buffer, model = make_buffer(kind, max_size), deque(maxlen=max_size)
    written = 0
    for name, number in steps:
        if name == "extend":
            index = buffer.extend(numbered(number, start=written))
            model.extend(range(written, written + number))
            assert index.dtype == torch.int64
            assert index.shape == (number,)
            written += number
            held = min(number, max_size)
            assert len(set(index[-held:].tolist())) == held
        elif name == "add":
            where = buffer.add(numbered(1, start=written)[0])
            assert isinstance(where, int)
            model.append(written)
            written += 1
        elif name == "sample" and model:
            batch = buffer.sample(number)
            assert batch.batch_size == (number,)
            check_whole(batch)
            assert set(serials(batch)) <= set(model)
        elif name == "set" and model:
            place = number % len(model)
            old = int(buffer[place]["serial"])
            buffer[place] = numbered(1, start=1000 + written)[0]
            model[model.index(old)] = 1000 + written
            written += 1
        elif name == "empty":
            buffer.empty()
            model.clear()
        assert len(buffer) == len(model)
        if model:
            everything = buffer[:]
            check_whole(everything)
            assert sorted(serials(everything)) == sorted(model)


@pytest.mark.parametrize("kind", STORAGES)
def test_extend_says_where_elements_lie(kind):
    buffer = make_buffer(kind, 5)
    assert buffer.extend(numbered(3)).tolist() == [0, 1, 2]
    assert buffer.extend(numbered(3, start=3)).tolist() == [3, 4, 0]
    assert buffer.add(numbered(1, start=6)[0]) == 1
    assert serials(buffer[:]) == [5, 6, 2, 3, 4]
    assert buffer.write_count == 7


@pytest.mark.parametrize("kind", STORAGES)
def test_of_more_elements_than_there_is_room_for_the_last_stay(kind):
    buffer = make_buffer(kind, 4)
    buffer.extend(numbered(2))
    index = buffer.extend(numbered(11, start=2))
    assert sorted(serials(buffer[:])) == [9, 10, 11, 12]
    assert index.shape == (11,)
    assert index[:7].tolist() == [-1] * 7
    assert serials(buffer[index[7:]]) == [9, 10, 11, 12]


@pytest.mark.parametrize("kind", STORAGES)
def test_add_one_by_one_is_extend(kind):
    one, other = make_buffer(kind, 4), make_buffer(kind, 4)
    data = numbered(6)
    places = [one.add(data[n]) for n in range(6)]
    index = torch.cat([other.extend(data[:4]), other.extend(data[4:])])
    assert places == index.tolist()
    assert bool((one[:] == other[:]).all())
    assert (one.write_count, len(one)) == (other.write_count, len(other)) == (6, 4)


INDICES = [
    0,
    -1,
    slice(None),
    slice(1, None, 2),
    slice(-3, -1),
    slice(None, None, -1),
    [3, 0, 3],
    [-2, 1],
    torch.tensor([4, 2]),
    torch.tensor([True, False, True, False, False, True]),
    np.array([1, 5]),
    np.array([True] * 3 + [False] * 3),
    torch.tensor(2),
    slice(2, 2),
]


@pytest.mark.parametrize("kind", STORAGES)
@pytest.mark.parametrize("index", INDICES, ids=str)
def test_indexing_is_that_of_a_tensor(kind, index):
    buffer = make_buffer(kind, 10)
    data = numbered(6)
    buffer.extend(data)
    expected = np.arange(6)[index.numpy() if isinstance(index, torch.Tensor) else index]
    got = buffer[index]
    if not expected.size:
        assert len(got) == 0
        return
    assert got.batch_size == expected.shape
    assert got["serial"].tolist() == expected.tolist()
    check_whole(got)


@pytest.mark.parametrize("kind", STORAGES)
@pytest.mark.parametrize("index", INDICES, ids=str)
def test_elements_are_replaced_by_the_same_indices(kind, index):
    buffer = make_buffer(kind, 10)
    buffer.extend(numbered(6))
    model = np.arange(6)
    where = index.numpy() if isinstance(index, torch.Tensor) else index
    shape = model[where].shape
    if not model[where].size:
        return
    new = numbered(*shape, start=50)
    model[where] = new["serial"].numpy()
    buffer[index] = new
    assert serials(buffer[:]) == model.tolist()
    check_whole(buffer[:])
    assert buffer.write_count == 6


@pytest.mark.parametrize("kind", STORAGES)
def test_a_place_that_is_not_there_is_an_index_error(kind):
    buffer = make_buffer(kind, 10)
    buffer.extend(numbered(3))
    for index in (3, -4, [0, 3], torch.tensor([7])):
        with pytest.raises(IndexError):
            buffer[index]
    with pytest.raises(IndexError):
        buffer[3] = numbered(1)[0]


@pytest.mark.parametrize("kind", STORAGES)
def test_what_is_read_is_a_copy_and_so_is_what_is_stored(kind):
    buffer = make_buffer(kind, 10)
    data = numbered(3)
    buffer.extend(data)
    data["serial"].zero_()
    batch = buffer.sample()
    batch["serial"].fill_(99)
    batch["next", "obs"].fill_(99)
    for index in (0, -1, slice(None), [1, 2]):
        buffer[index]["serial"].fill_(77)
    assert serials(buffer[:]) == [0, 1, 2]
    check_whole(buffer[:])


@pytest.mark.parametrize("kind", STORAGES)
def test_what_is_stored_is_in_nobodys_graph(kind):
    buffer = make_buffer(kind, 10)
    weight = torch.ones(3, requires_grad=True)
    buffer.extend(TensorDict({"value": weight * 2}, [3]))
    buffer[0] = TensorDict({"value": weight[0] * 5}, [])
    assert buffer[:]["value"].tolist() == [5.0, 2.0, 2.0]
    assert not any(batch["value"].requires_grad for batch in (buffer[:], buffer.sample(), buffer[1]))


@pytest.mark.parametrize("kind", ["tensor", "memmap", "shared"])
def test_a_replacement_that_does_not_fit_changes_nothing(kind):
    buffer = make_buffer(kind, 10)
    buffer.extend(numbered(3))
    wrong = numbered(1, start=50)
    wrong["done"] = torch.zeros(1, 2, dtype=torch.bool)
    with pytest.raises(ValueError, match="'done'"):
        buffer[1:2] = wrong
    assert serials(buffer[:]) == [0, 1, 2]
    check_whole(buffer[:])


@pytest.mark.parametrize("kind", STORAGES)
def test_emptied_it_begins_again_and_counts_on(kind):
    buffer = make_buffer(kind, 4)
    buffer.extend(numbered(3))
    buffer.empty()
    assert len(buffer) == 0
    with pytest.raises(RuntimeError, match=r"empty.*extend\(\)"):
        buffer.sample()
    buffer.extend(numbered(2, start=10))
    assert sorted(serials(buffer[:])) == [10, 11]
    assert buffer.write_count == 5
    assert set(serials(buffer.sample(50))) == {10, 11}


DTYPES = [torch.bool, torch.uint8, torch.int64, torch.float16, torch.bfloat16, torch.float32, torch.complex64]


@pytest.mark.parametrize("kind", STORAGES)
def test_all_dtypes_and_shapes_come_back_to_the_bit(kind):
    buffer = make_buffer(kind, 5)
    torch.manual_seed(0)
    entries = {str(dtype): (torch.randn(8, 2, dtype=torch.complex64) * 3).real.to(dtype) for dtype in DTYPES[:-1]}
    entries["complex"] = torch.randn(8, dtype=torch.complex64)
    entries["deep"] = TensorDict({"a": {"b": torch.randn(8, 1, 2, 3)}}, [8])
    entries["nothing"] = torch.zeros(8, 0)
    data = TensorDict(entries, [8])
    for part in data.split(3):
        buffer.extend(part)
    for got, expected in ((buffer[:], data[[5, 6, 7, 3, 4]]), (buffer[[1, 4]], data[[6, 4]])):
        assert set(got.keys(True, True)) == set(expected.keys(True, True))
        for key in expected.keys(True, True):
            assert got[key].dtype == expected[key].dtype
            assert got[key].shape == expected[key].shape
            assert torch.equal(got[key], expected[key])


@pytest.mark.parametrize("kind", STORAGES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_tensors_instead_of_tensordicts(kind, dtype):
    buffer = make_buffer(kind, 4)
    data = torch.arange(18).reshape(6, 3).to(dtype)
    buffer.extend(data[:4])
    buffer.extend(data[4:])
    assert torch.equal(buffer[:], data[[4, 5, 2, 3]])
    assert torch.equal(buffer[1], data[5])
    buffer[1] = data[0]
    buffer[2:4] = data[:2]
    assert torch.equal(buffer[:], data[[4, 0, 0, 1]])
    batch, info = buffer.sample(return_info=True)
    assert torch.equal(batch, buffer[info["index"]])


@pytest.mark.parametrize("kind", STORAGES)
def test_elements_with_dimensions_of_their_own(kind):
    buffer = make_buffer(kind, 4)
    data = numbered(6, 2)  # six elements, each a batch of two
    buffer.extend(data)
    assert len(buffer) == 4
    assert sorted(serials(buffer[:])) == list(range(4, 12))
    assert buffer.sample(3)["next", "obs"].shape == (3, 2, 3)


def test_a_list_holds_anything():
    buffer = ReplayBuffer(storage=ListStorage(3), batch_size=2, collate_fn=list)
    things = ["a", {"b": 1}, None, (2, 3)]
    assert buffer.extend(things[:2]).tolist() == [0, 1]
    assert [buffer.add(thing) for thing in things[2:]] == [2, 0]
    assert buffer[:] == [(2, 3), {"b": 1}, None]
    assert buffer[0] == (2, 3)
    buffer[1:] = ["x", "y"]
    assert buffer[[2, 1]] == ["y", "x"]


def test_a_list_without_a_limit_grows():
    buffer = ReplayBuffer(storage=ListStorage(), batch_size=2)
    buffer.extend(list(range(3000)))
    assert len(buffer) == 3000
    assert max(buffer.sample(1000)) < 3000


def test_a_storage_over_given_data():
    storage = TensorStorage(numbered(5), max_size=7)
    buffer = ReplayBuffer(storage=storage, batch_size=3)
    assert serials(buffer[:]) == [0, 1, 2, 3, 4]
    buffer.extend(numbered(3, start=5))
    assert sorted(serials(buffer[:])) == [1, 2, 3, 4, 5, 6, 7]
    check_whole(buffer[:])
    grid = ReplayBuffer(storage=TensorStorage(numbered(2, 3), ndim=2), batch_size=3)
    assert serials(grid[:]) == list(range(6))


# Several dimensions ------------------------------------------------------------------------------


def model_of(batches: list[TensorDict], dim: int, capacity: int) -> np.ndarray:
    """Serials as they lie in a ring of rows: those of ``dim``, which is put first."""
    rows = np.concatenate([np.moveaxis(batch["serial"].numpy(), dim, 0) for batch in batches])
    ring = np.full((capacity, *rows.shape[1:]), -1)
    for position, row in enumerate(rows):
        ring[position % capacity] = row
    return ring[: len(rows)]


@pytest.mark.parametrize("kind", ROWS)
@pytest.mark.parametrize(
    ("shape", "max_size", "dim"), [((2, 3), 10, 1), ((2, 3), 12, 0), ((2, 2, 3), 20, 2), ((2, 3, 2), 24, 1)]
)
def test_several_dimensions_lie_as_they_came(kind, shape, max_size, dim):
    ndim = len(shape)
    buffer = make_buffer(kind, max_size, ndim=ndim, dim_extend=None if dim == ndim - 1 else dim)
    rest = int(np.prod(shape)) // shape[dim]
    capacity = -(-max_size // rest)
    batches = []
    for n in range(4):
        batches.append(numbered(*shape, start=100 * n))
        index = buffer.extend(batches[-1])
        assert index.shape == (int(np.prod(shape)), ndim)
        ring = model_of(batches, dim, capacity)
        assert len(buffer) == ring.size
        assert np.array_equal(buffer[:]["serial"].numpy(), np.moveaxis(ring, 0, dim))
        check_whole(buffer[:])
        batch, info = buffer.sample(40, return_info=True)
        check_whole(batch)
        where = tuple(info["index"].T.numpy())
        assert batch["serial"].tolist() == ring[where].tolist()
        first_row = np.moveaxis(batches[-1]["serial"].numpy(), dim, 0).reshape(-1)
        assert ring[tuple(index.T.numpy())].tolist() == first_row.tolist()
    assert buffer.write_count == 4 * int(np.prod(shape))


@pytest.mark.parametrize("kind", ROWS)
def test_places_in_two_dimensions(kind):
    buffer = make_buffer(kind, 12, ndim=2)
    data = numbered(3, 4)
    buffer.extend(data)
    grid = data["serial"].numpy()
    for index in (
        (1, 2),
        (slice(None), -1),
        (slice(0, 2), [0, 3]),
        (torch.tensor([0, 2]), torch.tensor([1, 1])),
        1,
        slice(1, 3),
        [2, 0],
        torch.tensor([True, False, True]),
    ):
        plain = (
            tuple(np.asarray(i) if isinstance(i, torch.Tensor) else i for i in index)
            if isinstance(index, tuple)
            else (index.numpy() if isinstance(index, torch.Tensor) else index)
        )
        got = buffer[index]
        assert got["serial"].tolist() == grid[plain].tolist()
        assert got.batch_size == grid[plain].shape
    buffer[:, 1] = numbered(3, start=70)
    buffer[2, 0] = numbered(1, start=90)[0]
    grid[:, 1], grid[2, 0] = [70, 71, 72], 90
    assert np.array_equal(buffer[:]["serial"].numpy(), grid)
    with pytest.raises(IndexError):
        buffer[3, 0]


@pytest.mark.parametrize("kind", ROWS)
def test_add_in_two_dimensions_is_a_step_of_all_environments(kind):
    buffer = make_buffer(kind, 8, ndim=2)
    data = numbered(2, 5)
    where = torch.cat([buffer.add(data[:, t]) for t in range(5)])
    assert where.tolist() == [[t % 4, env] for t in range(5) for env in range(2)]
    assert np.array_equal(buffer[:]["serial"].numpy(), data["serial"].numpy()[:, [4, 1, 2, 3]])


@pytest.mark.parametrize("kind", ROWS)
def test_more_steps_than_there_is_room_for_in_two_dimensions(kind):
    buffer = make_buffer(kind, 6, ndim=2)
    index = buffer.extend(numbered(2, 10))
    assert sorted(serials(buffer[:])) == [7, 8, 9, 17, 18, 19]
    assert index.shape == (20, 2)
    assert (index[:14] == -1).all()


@pytest.mark.parametrize("ndim", [1, 2])
def test_an_empty_storage_has_no_elements_and_says_so(ndim):
    buffer = ReplayBuffer(storage=LazyTensorStorage(6, ndim=ndim))
    assert len(buffer) == buffer.write_count == 0
    assert len(buffer[:]) == 0
    with pytest.raises(RuntimeError, match="empty"):
        buffer.sample(1)


def test_tensors_in_two_dimensions():
    buffer = ReplayBuffer(storage=LazyTensorStorage(8, ndim=2), batch_size=3)
    data = torch.arange(12.0).reshape(2, 6)
    buffer.extend(data[:, :4])
    buffer.extend(data[:, 4:])
    assert torch.equal(buffer[:], data[:, [4, 5, 2, 3]])
    assert torch.equal(buffer[1, 0], data[1, 4])
    buffer.extend(torch.ones(2, 1))
    assert torch.equal(buffer[:, 2], torch.ones(2))


def test_two_dimensions_begin_with_a_wrapped_seam():
    buffer = ReplayBuffer(storage=LazyTensorStorage(6, ndim=2), batch_size=3)
    for n in range(7):  # three rows; each extend crosses the seam sooner or later
        buffer.extend(numbered(2, 2, start=10 * n))
    held = set(serials(buffer[:]))
    assert held == {60, 61, 62, 63, 51, 53}
    assert set(serials(buffer.sample(200))) == held


def test_what_is_sampled_from_a_list_is_a_copy():
    elements = [TensorDict({"x": torch.zeros(n)}) for n in (1, 2)]
    buffer = TensorDictReplayBuffer(storage=ListStorage(10), batch_size=20)
    buffer.extend(elements)
    for read in (buffer.sample(), buffer[:]):
        for td in read.unbind(0):
            td["x"].fill_(7.0)
    state = buffer.state_dict()["storage"]["elements"]
    state[0]["x"].fill_(8.0)
    for n, td in enumerate(elements):
        assert set(buffer[n].keys()) == {"x"}
        assert torch.equal(buffer[n]["x"], td["x"])


def test_an_empty_list_holds_nothing():
    class Thing:
        pass

    storage = ListStorage()
    for _ in range(3):
        things = [Thing() for _ in range(5)]
        seen = [weakref.ref(thing) for thing in things]
        storage.append(things)
        things.clear()
        assert all(ref() is not None for ref in seen)
        storage.clear()
        assert all(ref() is None for ref in seen)
        assert not storage._items
    assert storage.ledger.write_count == 15
    storage.append(["one"])
    assert storage.read(storage.live_index()) == ["one"]


def test_elements_of_another_kind_are_not_loaded():
    items, rows = ListStorage(10), LazyTensorStorage(10)
    items.append([1, 2])
    rows.append(torch.arange(2))
    with pytest.raises(ValueError, match="expected elements of a LazyTensorStorage, got list"):
        rows.load_state_dict(items.state_dict())
    with pytest.raises(ValueError, match="expected elements of a ListStorage, got Tensor"):
        items.load_state_dict(rows.state_dict())


@pytest.mark.parametrize("kind", [LazyTensorStorage, LazyMemmapStorage, ListStorage])
def test_compilable_is_accepted_and_changes_nothing(kind):
    buffer = ReplayBuffer(storage=kind(10, compilable=True), batch_size=4)
    buffer.extend(TensorDict({"obs": torch.arange(6.0)}, [6]))
    assert [row["obs"].item() for row in (buffer[i] for i in range(6))] == [0, 1, 2, 3, 4, 5]
