"""Prioritised sampling: probabilities and weights as published, over whatever was written, overwritten and updated."""

from __future__ import annotations

import pickle

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict

from rollwright.data.replay_buffers.buffer import ReplayBuffer
from rollwright.data.replay_buffers.kinds import TensorDictPrioritizedReplayBuffer
from rollwright.data.replay_buffers.samplers.prioritized import PrioritizedSampler
from rollwright.data.replay_buffers.storages.storage import ListStorage
from rollwright.data.replay_buffers.storages.tensors import LazyTensorStorage

EPS = 1e-8


def write(storage, *shape):
    storage.append(TensorDict({"x": torch.zeros(shape)}, shape), dim=storage.ndim - 1)


def stored(n, size=None):
    storage = LazyTensorStorage(size or n)
    write(storage, n)
    return storage


def drawn(sampler, storage, n, seed=0):
    with storage.ledger.reading():
        draw = sampler.draw(storage, n, torch.Generator().manual_seed(seed))
    return draw.index, draw.info["priority_weight"].numpy()


def probabilities(priorities, alpha):
    mass = np.where(np.isnan(priorities), 0.0, (priorities + EPS) ** alpha)
    return mass / max(mass.sum(), 1e-300)


def check_distribution(index, expected):
    n = len(index)
    counts = np.bincount(index, minlength=len(expected))
    assert counts[expected == 0].sum() == 0
    held = expected * n > 5
    chi_square = ((counts[held] - n * expected[held]) ** 2 / (n * expected[held])).sum()
    assert chi_square < held.sum() + 5 * np.sqrt(2 * held.sum())


@pytest.mark.parametrize("alpha", [0.0, 0.6, 1.0, 2.0])
@pytest.mark.parametrize("beta", [0.0, 0.4, 1.0])
def test_probabilities_and_weights_are_those_of_the_paper(alpha, beta):
    storage, sampler = stored(6), PrioritizedSampler(6, alpha, beta)
    priorities = np.array([0.5, 1.0, 2.0, 0.25, 4.0, 3.0])
    sampler.update_priority(np.arange(6), torch.from_numpy(priorities), storage)
    index, weight = drawn(sampler, storage, 30_000)
    chances = probabilities(priorities, alpha)
    check_distribution(index, chances)
    published = (6 * chances) ** -beta
    np.testing.assert_allclose(weight, (published / published.max())[index], rtol=1e-6)
    assert weight.dtype == np.float32
    assert PrioritizedSampler(6, alpha, beta, dtype=torch.float64).draw(storage, 3).info["priority_weight"].dtype == (
        torch.float64
    )


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    size=st.integers(1, 40),
    columns=st.sampled_from([1, 3]),
    within=st.booleans(),
    listen=st.booleans(),
)
def test_equals_an_array_of_priorities(seed, size, columns, within, listen):
    """Writes, gaps, updates with repeated and dead elements, more written than stored: nothing dead has a mass."""
    rng = np.random.default_rng(seed)
    storage = LazyTensorStorage(size * columns, ndim=1 if columns == 1 else 2)
    sampler = PrioritizedSampler(size * columns, 0.7, 0.5, max_priority_within_buffer=within)
    expected, largest = np.full(size * columns, np.nan), 1.0

    def catch_up():
        sampler.follow(storage)
        live = np.zeros(size * columns, bool)
        live[storage.live_index()] = True
        expected[~live] = np.nan
        new = live & (born != seen)
        if within and not np.isnan(expected[live & ~new]).all():
            expected[new] = np.nanmax(expected[live & ~new])
        else:
            expected[new] = 1.0 if within else largest
        seen[live] = born[live]

    born, seen = np.full(size * columns, -1), np.full(size * columns, -2)
    for _ in range(15):
        for _ in range(1 if listen else int(rng.integers(1, 4))):
            n = int(rng.integers(1, size + 1))
            first = storage.ledger.end()
            if storage.capacity and rng.random() < 0.2:
                storage.ledger.abandon(storage.ledger.reserve(min(n, 3)))
                continue
            write(storage, n) if columns == 1 else write(storage, columns, n)
            rows = np.arange(first, first + n) % size
            for column in range(columns):
                born[rows * columns + column] = np.arange(first, first + n)
        catch_up()
        if len(storage):
            index = rng.integers(0, size * columns, 5)
            value = rng.choice([0.0, 0.1, 3.0, rng.random()], 5)
            sampler.update_priority(np.append(index, -1), np.append(value, 9e9), storage)
            for i, v in zip(index, value, strict=True):
                if not np.isnan(expected[i]):
                    expected[i] = v
            reached = value[~np.isnan(expected[index])]
            largest = max(largest, reached.max(initial=0.0))
        masses = np.zeros(size * columns)
        held = sampler._masses.leaves[: size * columns]
        masses[: len(held)] = held
        np.testing.assert_allclose(masses / max(masses.sum(), 1e-300), np.nan_to_num(probabilities(expected, 0.7)))
        if len(storage):
            index, weight = drawn(sampler, storage, 30, int(rng.integers(99)))
            assert set(index.tolist()) <= set(storage.live_index().tolist())
            assert ((weight > 0) & (weight <= 1)).all()


def test_new_elements_get_the_largest_priority_so_far():
    storage, sampler = stored(4, size=10), PrioritizedSampler(10, 1.0, 1.0)
    sampler.update_priority(np.arange(4), torch.tensor([1.0, 7.0, 2.0, 0.5]), storage)
    sampler.update_priority(np.array([1]), 0.1, storage)
    write(storage, 2)
    sampler.follow(storage)
    np.testing.assert_allclose(sampler._masses.leaves[:6], [1.0, 0.1, 2.0, 0.5, 7.0, 7.0], atol=1e-6)
    within = PrioritizedSampler(10, 1.0, 1.0, max_priority_within_buffer=True)
    within.update_priority(np.arange(6), torch.tensor([1.0, 7.0, 2.0, 0.5, 0.0, 0.0]), storage)
    within.update_priority(np.array([1]), 0.1, storage)
    assert within.default_priority == 2.0


def test_several_priorities_for_an_element_are_reduced():
    storage = stored(3)
    errors = torch.tensor([[1.0, 5.0, 3.0], [2.0, 2.0, 5.0], [0.0, 0.0, 9.0]])
    for reduction, reduced in (("max", [5, 5, 9]), ("min", [1, 2, 0]), ("mean", [3, 3, 3]), ("median", [3, 2, 0])):
        sampler = PrioritizedSampler(3, 1.0, 1.0, reduction=reduction)
        sampler.update_priority(torch.arange(3), errors, storage)
        np.testing.assert_allclose(sampler._masses.leaves[:3], np.array(reduced, float), atol=1e-6)
    sampler.update_priority(torch.arange(3), 4.0, storage)
    np.testing.assert_allclose(sampler._masses.leaves[:3], 4.0, atol=1e-6)


def test_exponents_can_change():
    storage, sampler = stored(4, size=8), PrioritizedSampler(8, 0.0, 0.0)
    priorities = np.array([1.0, 2.0, 3.0, 4.0])
    sampler.update_priority(np.arange(4), priorities, storage)
    sampler.alpha, sampler.beta = 2.0, 1.0
    index, weight = drawn(sampler, storage, 20_000)
    check_distribution(index, probabilities(priorities, 2.0))
    np.testing.assert_allclose(weight, ((priorities + EPS) ** -2.0)[index], rtol=1e-6)
    with pytest.raises(ValueError, match=r"alpha: expected a number of at least 0, got -1"):
        sampler.alpha = -1


def test_a_restored_sampler_draws_the_same():
    storage, sampler = stored(30, size=50), PrioritizedSampler(50, 0.7, 0.3)
    sampler.update_priority(torch.arange(30), torch.rand(30), storage)
    twin = PrioritizedSampler(50, 0.1, 0.1)
    twin.load_state_dict(sampler.state_dict())
    unpickled = pickle.loads(pickle.dumps(sampler))
    write(storage, 40)
    for other in (twin, unpickled):
        for a, b in zip(drawn(sampler, storage, 64), drawn(other, storage, 64), strict=True):
            np.testing.assert_array_equal(a, b)


def test_grows_with_a_list_of_any_length():
    storage, sampler = ListStorage(None), PrioritizedSampler(1 << 40, 1.0, 1.0)
    for _ in range(3):
        storage.append(list(range(1500)))
        sampler.follow(storage)
    assert sampler._masses.total == pytest.approx(4500)
    assert sampler._masses.size < 20_000


def test_forgets_another_storage():
    sampler = PrioritizedSampler(10, 1.0, 1.0)
    one, two = stored(10), stored(4, size=10)
    sampler.update_priority(torch.arange(10), torch.arange(10.0), one)
    assert set(drawn(sampler, two, 100)[0].tolist()) == {0, 1, 2, 3}


def test_what_is_refused():
    for options, message in (
        ({"alpha": -1}, "alpha: expected a number of at least 0, got -1"),
        ({"beta": float("nan")}, "beta: expected"),
        ({"eps": 0.0}, "eps: expected a number above 0"),
        ({"dtype": torch.int64}, "dtype: expected a floating point type"),
        ({"reduction": "sum"}, r"reduction: expected one of \['max', 'mean', 'median', 'min'\], got 'sum'"),
        ({"max_capacity": 0}, "max_capacity: expected an integer of at least 1, got 0"),
    ):
        with pytest.raises(ValueError, match=message):
            PrioritizedSampler(**{"max_capacity": 10, "alpha": 1.0, "beta": 1.0, **options})
    storage, sampler = stored(10), PrioritizedSampler(10, 1.0, 1.0)
    for value in (-1.0, float("nan"), float("inf")):
        with pytest.raises(
            ValueError, match=r"priority: expected finite numbers of at least 0, got \[(-1.0|nan|inf)\]"
        ):
            sampler.update_priority(np.array([0, 1]), torch.tensor([1.0, value]), storage)
    with pytest.raises(ValueError, match=r"one for each of the 3 elements, got shape \[2\]"):
        sampler.update_priority(np.arange(3), torch.ones(2), storage)
    with pytest.raises(IndexError, match="expected elements below 10, got 10"):
        sampler.update_priority(np.array([10]), 1.0, storage)
    with pytest.raises(ValueError, match=r"max_capacity: expected at least the 10 elements .* got 9"):
        PrioritizedSampler(9, 1.0, 1.0).follow(storage)


@pytest.mark.parametrize("columns", [1, 3])
@pytest.mark.parametrize("room", [30, 60, 75])
def test_priorities_move_with_their_elements_to_a_larger_storage(room, columns):
    shape = (columns, 5) if columns > 1 else (5,)

    def made(size):
        return LazyTensorStorage(size, ndim=len(shape)), PrioritizedSampler(size, 1.0, 1.0)

    def content(serial):
        steps = torch.arange(5) + 5 * serial
        value = (steps + 1000 * torch.arange(columns)[:, None]).reshape(shape)
        return TensorDict({"value": value}, shape)

    (small, sampler), (large, other) = made(30), made(room)
    for serial in range(9):  # over the seam of the small one
        small.append(content(serial), dim=len(shape) - 1)
    live = small.live_index()
    priorities = torch.arange(len(live), dtype=torch.float64)
    sampler.update_priority(live, priorities, small)
    given = dict(zip(small.read(live)["value"].tolist(), priorities.tolist(), strict=True))
    large.load_state_dict(small.state_dict())
    other.load_state_dict(sampler.state_dict())
    again = PrioritizedSampler(room, 1.0, 1.0)
    again.load_state_dict(other.state_dict())  # before it met a storage
    for one in (other, again):
        one.follow(large)
        held = large.live_index()
        found = dict(zip(large.read(held)["value"].tolist(), one._priorities.leaves[held].tolist(), strict=True))
        assert found == given
        assert int((one._masses.leaves > 0).sum()) == len(live)
        index, _ = drawn(one, large, 1000)
        assert set(large.read(index)["value"].tolist()) <= given.keys()


def test_priorities_of_other_positions_are_refused():
    storage, sampler = stored(10), PrioritizedSampler(10, 1.0, 1.0)
    sampler.follow(storage)
    state = sampler.state_dict()
    with pytest.raises(ValueError, match=r"max_capacity: expected at least the 10 elements .* got 9"):
        PrioritizedSampler(9, 1.0, 1.0).load_state_dict(state)
    with pytest.raises(ValueError, match=r"as many priorities for each of the 10 positions, got 7"):
        sampler.load_state_dict({**state, "priorities": state["priorities"][:7]})
    other = PrioritizedSampler(10, 1.0, 1.0)
    other.load_state_dict(state)
    grid = LazyTensorStorage(10, ndim=2)
    for _ in range(4):
        write(grid, 2, 3)
    with pytest.raises(ValueError, match=r"5 rows of 2 elements, got 10 for 10 positions"):
        other.follow(grid)
    other.follow(grid)  # as a new one
    assert other._masses.total == pytest.approx(10.0)


def test_capacity_is_rounded_up_to_whole_rows_as_the_storage_is():
    buffer = TensorDictPrioritizedReplayBuffer(
        alpha=0.7, beta=0.5, storage=LazyTensorStorage(10, ndim=2), batch_size=200
    )
    for _ in range(5):
        buffer.extend(TensorDict({"x": torch.zeros(4, 1)}, [4, 1]))
    assert len(buffer) == 12
    assert len({tuple(place) for place in buffer.sample()["index"].tolist()}) == 12


@pytest.mark.parametrize("dim_extend", [0, 1])
def test_a_row_brings_its_priorities(dim_extend):
    buffer = TensorDictPrioritizedReplayBuffer(
        alpha=1.0, beta=0.5, storage=LazyTensorStorage(12, ndim=2), batch_size=50, dim_extend=dim_extend
    )
    errors = torch.tensor([0.0, 0.0, 3.0, 0.0])
    buffer.add(TensorDict({"x": torch.arange(4), "td_error": errors}, [4]))
    assert buffer.sample()["x"].unique().tolist() == [2]


@pytest.mark.parametrize("dim_extend", [0, 1])
@pytest.mark.parametrize("steps", [3, 8])
def test_priorities_of_a_batch_go_with_the_index_that_writing_it_gave(dim_extend, steps):
    """Also where the batch was longer than the storage, and the first steps found no room."""
    buffer = ReplayBuffer(
        storage=LazyTensorStorage(12, ndim=2),
        sampler=PrioritizedSampler(12, 1.0, 0.5),
        batch_size=50,
        dim_extend=dim_extend,
    )
    shape = [2, steps] if dim_extend else [steps, 2]
    serial = torch.arange(2 * steps).reshape(shape)
    index = buffer.extend(TensorDict({"serial": serial}, shape))
    for largest in (serial == 2 * steps - 2, (serial == 2 * steps - 2)[..., None]):
        buffer.update_priority(index, largest.float())
        assert buffer.sample()["serial"].unique().tolist() == [2 * steps - 2]
    _, info = buffer.sample(4, return_info=True)
    buffer.update_priority(info["index"], torch.tensor([[1.0], [2.0], [3.0], [4.0]]))  # of elements, as ever


@pytest.mark.parametrize("one_by_one", [False, True])
def test_several_first_priorities_of_an_element_are_reduced(one_by_one):
    buffer = TensorDictPrioritizedReplayBuffer(alpha=1.0, beta=1.0, storage=LazyTensorStorage(3), batch_size=50)
    data = TensorDict({"td_error": torch.tensor([[0.0, 0.0], [0.0, 2.0], [1.0, 0.0]])}, [3])
    if one_by_one:
        for element in data.unbind(0):
            buffer.add(element)
    else:
        buffer.extend(data)
    assert buffer.sampler.state_dict()["priorities"].tolist() == [0.0, 2.0, 1.0]


def test_elements_that_were_not_stored_have_no_priority():
    buffer = TensorDictPrioritizedReplayBuffer(
        alpha=1.0, beta=0.5, storage=LazyTensorStorage(12, ndim=2), batch_size=50
    )
    x = torch.arange(20).reshape(4, 5)
    index = buffer.extend(TensorDict({"x": x}, [4, 5]))
    priority = torch.zeros(20)
    priority[[0, 1, 18]] = 1.0  # rows lie one after the other: the first two are not stored
    assert (index < 0).all(-1).sum() == 8
    buffer.update_priority(index, priority)
    kept = index[18].tolist()
    assert buffer.sample()["index"].unique(dim=0).tolist() == [kept]


def test_a_priority_that_overflows_is_drawn():
    torch.manual_seed(0)
    buffer = TensorDictPrioritizedReplayBuffer(alpha=2.0, beta=0.5, storage=LazyTensorStorage(10), batch_size=50)
    index = buffer.extend(TensorDict({"x": torch.arange(10)}, [10]))
    buffer.update_priority(index[3], 1e200)
    assert buffer.sample()["index"].unique().tolist() == [3]


@pytest.mark.parametrize("call", ["extend", "add"])
def test_a_first_priority_that_is_wrong_is_refused_before_anything_is_stored(call):
    buffer = TensorDictPrioritizedReplayBuffer(storage=LazyTensorStorage(20), alpha=1.0, beta=1.0, batch_size=4)
    data = TensorDict({"x": torch.arange(2), "td_error": torch.tensor([1.0, float("nan")])}, [2])
    for _ in range(2):
        with pytest.raises(ValueError, match="priority"):
            buffer.extend(data) if call == "extend" else buffer.add(data[1])
    assert (len(buffer), buffer.write_count) == (0, 0)
    buffer.extend(data, update_priority=False)
    assert len(buffer) == 2
