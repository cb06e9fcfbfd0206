"""ReplayBuffer: sampling, transforms, collation, prefetching, iteration, seeds."""

from __future__ import annotations

import json
import pickle
import threading

import pytest
import torch
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import TensorDictModule

from rollwright.data import (
    LazyMemmapStorage,
    LazyTensorStorage,
    ListStorage,
    PrioritizedReplayBuffer,
    PrioritizedSampler,
    RaggedStorage,
    RandomSampler,
    ReplayBuffer,
    SamplerWithoutReplacement,
    SliceSampler,
    TensorDictMaxValueWriter,
    TensorDictPrioritizedReplayBuffer,
    TensorDictReplayBuffer,
)
from rollwright.data.replay_buffers._threads import Ticket
from rollwright.envs.transforms import Compose, RewardScaling, Transform

STORAGES = [LazyTensorStorage, LazyMemmapStorage, ListStorage, RaggedStorage]


def numbered(n: int, start: int = 0) -> TensorDict:
    serial = torch.arange(start, start + n)
    return TensorDict({"serial": serial, "next": {"reward": serial.float().unsqueeze(-1)}}, [n])


def as_stored(buffer: ReplayBuffer) -> TensorDict:
    return ReplayBuffer(storage=buffer.storage)[:]


def filled(n: int = 10, size: int = 100, **options) -> ReplayBuffer:
    kind = options.pop("kind", ReplayBuffer)
    buffer = kind(**{"storage": LazyTensorStorage(size), "batch_size": 4, **options})
    buffer.extend(numbered(n))
    return buffer


# Sampling ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("storage", STORAGES)
def test_a_batch_has_the_size_that_was_asked_for(storage):
    buffer = filled(storage=storage(20))
    assert buffer.sample().batch_size == (4,)
    assert buffer.sample(7).batch_size == (7,)
    with pytest.raises(ValueError, match="batch_size"):
        filled(batch_size=None).sample()
    assert filled(batch_size=None).sample(3).batch_size == (3,)


@pytest.mark.parametrize("storage", STORAGES)
def test_info_says_where_elements_lie(storage):
    buffer = filled(storage=storage(20))
    batch, info = buffer.sample(return_info=True)
    assert info["index"].shape == (4,)
    assert batch["serial"].tolist() == info["index"].tolist()
    assert set(batch.keys()) == {"serial", "next"}


def test_a_buffer_of_tensordicts_puts_the_places_into_the_batch():
    buffer = filled(kind=TensorDictReplayBuffer)
    batch, info = buffer.sample(return_info=True)
    assert batch["index"].tolist() == info["index"].tolist() == batch["serial"].tolist()
    grid = TensorDictReplayBuffer(storage=LazyTensorStorage(20, ndim=2), batch_size=5)
    grid.extend(numbered(12).reshape(3, 4))
    batch = grid.sample()
    assert batch["index"].shape == (5, 2)
    assert (batch["index"][:, 1] * 4 + batch["index"][:, 0]).tolist() == batch["serial"].tolist()


def test_uniform_sampling_draws_all_alike():
    torch.manual_seed(0)
    counts = filled(10).sample(20_000)["serial"].bincount(minlength=10)
    assert len(counts) == 10
    assert ((counts - 2000).abs() < 5 * 45).all()  # five standard deviations


def test_defaults_are_a_list_of_a_thousand_drawn_uniformly():
    buffer = ReplayBuffer()
    assert isinstance(buffer.storage, ListStorage)
    assert buffer.storage.max_size == 1000
    assert isinstance(buffer.sampler, RandomSampler)
    buffer.extend([1, 2])
    assert set(buffer.sample(20)) == {1, 2}


def test_parts_may_be_given_as_callables():
    buffer = ReplayBuffer(
        storage=lambda: LazyTensorStorage(5),
        sampler=SamplerWithoutReplacement,
        writer=lambda: TensorDictMaxValueWriter("serial"),
        transform_factory=lambda: Shift(in_keys=["serial"], out_keys=["next_serial"]),
        batch_size=5,
    )
    buffer.extend(numbered(9))
    batch = buffer.sample()
    assert sorted(batch["serial"].tolist()) == [4, 5, 6, 7, 8]
    assert torch.equal(batch["next_serial"], batch["serial"] + 1)


def test_collate_fn_makes_the_batch():
    buffer = ReplayBuffer(storage=ListStorage(5), batch_size=3, collate_fn=lambda items: "-".join(sorted(set(items))))
    buffer.extend(["a", "a"])
    assert buffer.sample() == "a"
    rows = filled(collate_fn=lambda batch: batch["serial"].tolist())
    assert all(isinstance(number, int) for number in rows.sample())


def test_a_list_of_tensordicts_of_different_entries_is_not_refused():
    buffer = ReplayBuffer(storage=ListStorage(5), batch_size=8)
    for n in range(1, 4):
        buffer.add(TensorDict({"obs": torch.full((n,), n)}, []))
    batch = buffer.sample()
    for n in range(8):
        obs = batch[n]["obs"]
        assert len(obs) == obs[0]


# Seeds -------------------------------------------------------------------------------------------


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


SAMPLERS = {
    "random": RandomSampler,
    "without": SamplerWithoutReplacement,
    "prioritized": lambda: PrioritizedSampler(100, 0.7, 0.5),
}


@pytest.mark.parametrize("prefetch", [None, 3])
@pytest.mark.parametrize("sampler", SAMPLERS)
def test_the_same_seed_draws_the_same_batches(sampler, prefetch):
    runs = []
    for how in ("argument", "set_rng", "global"):
        buffer = filled(
            sampler=SAMPLERS[sampler], prefetch=prefetch, generator=seeded(7) if how == "argument" else None
        )
        if how == "set_rng":
            buffer.sample()
            buffer.set_sampler(SAMPLERS[sampler]())
            buffer.set_rng(seeded(7))
        elif how == "global":
            torch.manual_seed(7)
        runs.append([buffer.sample()["serial"].tolist() for _ in range(9)])
        buffer.shutdown()
    assert runs[0] == runs[1] == runs[2]
    other = filled(sampler=SAMPLERS[sampler], generator=seeded(8))
    assert [other.sample()["serial"].tolist() for _ in range(9)] != runs[0]


def test_a_generator_of_its_own_leaves_the_global_one_alone():
    buffer = filled(generator=seeded(1))
    before = torch.get_rng_state()
    buffer.sample()
    assert torch.equal(torch.get_rng_state(), before)


# Transforms --------------------------------------------------------------------------------------


class Shift(Transform):
    """Stores x - 10 where x was written, and delivers x + 1 of what is stored."""

    def _apply_transform(self, obs):
        return obs + 1

    def _inv_apply_transform(self, state):
        return state - 10


class Tag(Transform):
    """Says in its inverse what to store, without naming entries."""

    def _inv_call(self, tensordict):
        return tensordict.set("tag", torch.ones(tensordict.shape))

    def forward(self, tensordict):
        return tensordict


@pytest.mark.parametrize("storage", STORAGES)
def test_a_transform_applies_to_batches_and_its_inverse_to_what_is_written(storage):
    data = numbered(6)
    buffer = ReplayBuffer(
        storage=storage(20), batch_size=30, transform=Shift(in_keys=["serial"], in_keys_inv=["serial"])
    )
    buffer.extend(data)
    buffer.add(numbered(1, start=6)[0])
    assert as_stored(buffer)["serial"].tolist() == [n - 10 for n in range(7)]
    assert buffer[:]["serial"].tolist() == [n - 9 for n in range(7)]
    assert buffer[2]["serial"] == -7
    assert set(buffer.sample()["serial"].tolist()) == {n - 9 for n in range(7)}
    assert data["serial"].tolist() == list(range(6))  # the caller's data are left as they are


@pytest.mark.parametrize("storage", STORAGES)
def test_what_replaces_elements_is_inverted_too(storage):
    buffer = filled(storage=storage(20), transform=Shift(in_keys=["serial"], in_keys_inv=["serial"]))
    buffer[3] = numbered(1, start=70)[0]
    buffer[5:7] = numbered(2, start=80)
    assert as_stored(buffer)["serial"].tolist() == [-10, -9, -8, 60, -6, 70, 71, -3, -2, -1]


def test_nothing_is_replaced_where_a_transform_leaves_nothing():
    class Nothing:
        def __call__(self, batch):
            return batch

        def inv(self, data):
            return None

    buffer = filled()
    buffer.append_transform(Nothing())
    buffer[3] = numbered(1, start=70)[0]
    assert buffer[:]["serial"].tolist() == list(range(10))


def test_a_transform_without_keys_may_have_an_inverse_too():
    for transform in (Tag(), Compose(RewardScaling(0.0, 1.0), Tag())):
        buffer = filled(transform=transform)
        assert as_stored(buffer)["tag"].tolist() == [1.0] * 10


def test_transforms_apply_in_order_and_their_inverses_in_reverse():
    buffer = ReplayBuffer(storage=LazyTensorStorage(20), batch_size=4)
    double = lambda data: data.set("serial", data["serial"] * 2)  # noqa: E731
    assert buffer.append_transform(double) is buffer
    buffer.append_transform(Compose(Shift(in_keys=["serial"], in_keys_inv=["serial"])))
    buffer.insert_transform(0, lambda data: data.set("serial", data["serial"] + 100))
    for index in (4, -4):
        with pytest.raises(IndexError, match=rf"index: expected one from -3 to 3, got {index}"):
            buffer.insert_transform(index, double)
    buffer.extend(numbered(1))
    assert as_stored(buffer)["serial"].tolist() == [-10]
    assert set(buffer.sample()["serial"].tolist()) == {(-10 + 100) * 2 + 1}
    assert buffer[:]["serial"].tolist() == [(-10 + 100) * 2 + 1]
    assert as_stored(buffer)["serial"].tolist() == [-10]


class Triple(Transform):
    def _apply_transform(self, obs):
        return obs * 3

    def _inv_apply_transform(self, state):
        return state * 3


@pytest.mark.parametrize("composed", [False, True])
def test_the_last_transform_is_inverted_first(composed):
    both = [kind(in_keys=["serial"], in_keys_inv=["serial"]) for kind in (Shift, Triple)]
    buffer = ReplayBuffer(storage=LazyTensorStorage(20), batch_size=4)
    for transform in [Compose(*both)] if composed else both:
        buffer.append_transform(transform)
    buffer.extend(numbered(1, start=5))
    assert as_stored(buffer)["serial"].tolist() == [5 * 3 - 10]
    assert set(buffer.sample()["serial"].tolist()) == {(5 + 1) * 3}


def test_counts():
    buffer = ReplayBuffer(storage=LazyTensorStorage(10), batch_size=2, prefetch=2)
    assert buffer.initialized
    assert buffer.stats()["utilization"] == 0.0
    buffer.extend(numbered(8))
    buffer.extend(numbered(8))
    assert json.loads(json.dumps(buffer.stats())) == {
        "size": 10,
        "write_count": 16,
        "capacity": 10,
        "utilization": 1.0,
        "prefetch_queue_size": 0,
        "initialized": True,
    }
    buffer.sample()
    assert buffer.stats()["prefetch_queue_size"] == 2
    buffer.shutdown()


def test_next_is_another_batch():
    buffer = filled(sampler=SamplerWithoutReplacement(shuffle=False))
    assert buffer.next()["serial"].tolist() == [0, 1, 2, 3]
    assert buffer.next()["serial"].tolist() == [4, 5, 6, 7]


def test_modules_and_callables_are_transforms():
    net = TensorDictModule(torch.nn.Linear(1, 2), in_keys=[("next", "reward")], out_keys=["value"])
    assert filled(transform=net).sample()["value"].shape == (4, 2)
    assert filled(transform=lambda batch: batch.exclude("next")).sample().keys() == {"serial"}
    tensors = ReplayBuffer(storage=LazyTensorStorage(5), batch_size=2, transform=torch.nn.Flatten(0))
    tensors.extend(torch.zeros(3, 4))
    assert tensors.sample().shape == (8,)


# Prefetching -------------------------------------------------------------------------------------


def prefetchers() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("rollwright-prefetch")]


def test_a_buffer_is_started_and_shut_down_as_one_in_a_service_is():
    buffer = filled(prefetch=1)
    assert buffer.start() is buffer
    assert buffer.is_alive
    buffer.sample()
    buffer.shutdown(timeout=1.0)
    assert not prefetchers()


@pytest.mark.parametrize("prefetch", [1, 3])
def test_prefetched_batches_are_those_that_would_have_been_drawn(prefetch):
    plain, ahead = (filled(50, generator=seeded(3), prefetch=n) for n in (None, prefetch))
    assert [plain.sample()["serial"].tolist() for _ in range(12)] == [
        ahead.sample()["serial"].tolist() for _ in range(12)
    ]
    ahead.shutdown()


def test_draws_wait_for_their_turn():
    begin = threading.Event()
    first = Ticket(begin)
    second = Ticket(first.over)
    order: list[int] = []

    def work(turn: Ticket, number: int) -> None:
        with turn:
            order.append(number)

    threads = [threading.Thread(target=work, args=arguments) for arguments in ((second, 2), (first, 1))]
    for thread in threads:
        thread.start()
    threads[0].join(0.05)
    assert order == []
    begin.set()
    for thread in threads:
        thread.join(60)
    assert order == [1, 2]


def test_shutdown_leaves_no_thread_and_sampling_goes_on():
    buffer = filled(prefetch=2)
    buffer.sample()
    assert prefetchers()
    buffer.shutdown()
    buffer.shutdown()
    assert not prefetchers()
    assert buffer.sample().batch_size == (4,)
    buffer.shutdown()
    assert not prefetchers()


def test_what_a_thread_raises_reaches_the_caller_once():
    buffer = ReplayBuffer(storage=LazyTensorStorage(10), batch_size=2, prefetch=2)
    with pytest.raises(RuntimeError, match="empty"):
        buffer.sample()
    buffer.extend(numbered(3))
    assert buffer.sample().batch_size == (2,)

    def fail(batch: TensorDictBase) -> TensorDictBase:
        raise ArithmeticError("of the transform")

    buffer.append_transform(fail)
    with pytest.raises(ArithmeticError, match="of the transform"):
        buffer.sample()
    buffer.shutdown()


def test_nothing_that_was_dropped_is_delivered_from_ahead():
    buffer = filled(prefetch=3)
    buffer.sample()
    buffer.empty()
    buffer.extend(numbered(5, start=1000))
    assert min(buffer.sample()["serial"].tolist()) >= 1000
    buffer.append_transform(lambda batch: batch.set("new", torch.ones(4)))
    assert set(buffer.sample().keys()) == {"serial", "next", "new"}
    state = filled(3).state_dict()
    buffer.load_state_dict(state)
    assert max(buffer.sample()["serial"].tolist()) < 3
    buffer.shutdown()


def test_another_batch_size_than_the_prefetched_is_refused():
    buffer = filled(prefetch=2)
    with pytest.raises(ValueError, match="batch_size: expected 4"):
        buffer.sample(5)


def test_threads_extend_and_sample_at_once():
    buffer = ReplayBuffer(storage=LazyTensorStorage(64), batch_size=32, prefetch=2)
    buffer.extend(torch.zeros(8, 256))
    failures: list[BaseException] = []

    def write(value: int) -> None:
        try:
            for n in range(100):
                buffer.extend(torch.full((5, 256), float(1000 * value + n)))
        except BaseException as error:
            failures.append(error)

    writers = [threading.Thread(target=write, args=(value,)) for value in (1, 2)]
    for writer in writers:
        writer.start()
    while any(writer.is_alive() for writer in writers):
        batch = buffer.sample()
        assert torch.equal(batch, batch[:, :1].expand_as(batch))  # no row of two halves
    for writer in writers:
        writer.join(60)
    assert not failures
    assert buffer.write_count == 8 + 1000
    buffer.shutdown()


# Iteration ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("prefetch", [None, 1, 4])
@pytest.mark.parametrize("storage", STORAGES)
def test_iteration_without_replacement_delivers_everything_once(storage, prefetch):
    buffer = filled(storage=storage(20), sampler=SamplerWithoutReplacement(), prefetch=prefetch)
    for _ in range(3):
        batches = [batch["serial"].tolist() for batch in buffer]
        assert [len(batch) for batch in batches] == [4, 4, 2]
        assert sorted(number for batch in batches for number in batch) == list(range(10))
    buffer.shutdown()


def test_iteration_leaves_out_a_short_batch_where_asked_to():
    buffer = filled(sampler=SamplerWithoutReplacement(drop_last=True))
    assert [len(batch) for batch in buffer] == [4, 4]


def test_iteration_with_replacement_goes_on():
    buffer = filled()
    batches = iter(buffer)
    assert all(next(batches).batch_size == (4,) for _ in range(10))
    with pytest.raises(ValueError, match="batch_size"):
        next(iter(filled(batch_size=None)))


# Priorities --------------------------------------------------------------------------------------


@pytest.mark.parametrize("storage", STORAGES)
def test_priorities_rule_what_is_drawn(storage):
    buffer = PrioritizedReplayBuffer(alpha=1.0, beta=1.0, storage=storage(10), batch_size=4000)
    index = buffer.extend(torch.arange(4.0))
    torch.manual_seed(0)
    buffer.update_priority(index, torch.tensor([0.0, 1.0, 3.0, 0.0]))
    batch, info = buffer.sample(return_info=True)
    counts = batch.long().bincount(minlength=4)
    assert counts[[0, 3]].tolist() == [0, 0]
    assert abs(int(counts[2]) - 3000) < 5 * 28
    weights = info["priority_weight"]
    assert torch.allclose(weights[batch == 1] / 3, weights[batch == 2][0])


def test_priorities_come_with_the_data_and_with_batches():
    buffer = TensorDictPrioritizedReplayBuffer(
        alpha=1.0, beta=1.0, storage=LazyTensorStorage(3), batch_size=64, priority_key="p"
    )
    buffer.extend(TensorDict({"n": torch.arange(3), "p": torch.tensor([0.0, 1.0, 0.0])}, [3]))
    batch = buffer.sample()
    assert set(batch["n"].tolist()) == {1}
    assert batch["priority_weight"].shape == (64,)
    buffer.add(TensorDict({"n": torch.tensor(3), "p": torch.tensor(0.0)}, []))
    batch = buffer.sample()
    assert set(batch["n"].tolist()) == {1}
    batch["p"] = torch.zeros(64)
    buffer.update_tensordict_priority(batch)
    buffer.extend(
        TensorDict({"n": torch.arange(9), "p": (torch.arange(9) == 7).float()}, [9])
    )  # more than there is room
    assert set(buffer.sample()["n"].tolist()) == {7}


def test_priorities_in_two_dimensions():
    buffer = TensorDictPrioritizedReplayBuffer(
        alpha=1.0, beta=1.0, storage=LazyTensorStorage(12, ndim=2), batch_size=64, priority_key="p"
    )
    serial = torch.arange(6).reshape(2, 3)
    index = buffer.extend(TensorDict({"n": serial, "p": (serial == 4).float()}, [2, 3]))
    assert set(buffer.sample()["n"].tolist()) == {4}
    buffer.update_priority(index, torch.tensor([0.0, 0, 0, 0, 1.0, 0]))  # the order of index: step by step
    assert set(buffer.sample()["n"].tolist()) == {2}


def test_update_priority_is_ignored_where_all_matter_alike():
    buffer = filled()
    buffer.update_priority(torch.tensor([0, 1]), torch.tensor([5.0, 6.0]))
    assert len(set(buffer.sample(400)["serial"].tolist())) == 10


# Parts -------------------------------------------------------------------------------------------


def test_parts_are_exchanged():
    buffer = filled()
    buffer.set_sampler(SamplerWithoutReplacement(shuffle=False))
    assert buffer.sample()["serial"].tolist() == [0, 1, 2, 3]
    buffer.set_storage(LazyTensorStorage(30, ndim=2))
    buffer.set_writer(TensorDictReplayBuffer(storage=ListStorage(1)).writer)
    index = buffer.extend(numbered(12).reshape(3, 4))
    assert index[:4].tolist() == [[0, 0], [0, 1], [0, 2], [1, 0]]


@pytest.mark.parametrize("storage", STORAGES)
def test_a_pickled_buffer_is_a_buffer(storage):
    buffer = filled(storage=storage(20), kind=TensorDictReplayBuffer, prefetch=1)
    buffer.sample()
    if storage is LazyMemmapStorage:
        return  # its file goes along only while a process is started: test_shared.py
    twin = pickle.loads(pickle.dumps(buffer))
    assert bool((twin[:] == buffer[:]).all())
    twin.extend(numbered(3, start=50))
    assert (len(twin), len(buffer)) == (13, 10)
    assert twin.sample().batch_size == (4,)
    for one in (buffer, twin):
        one.shutdown()


def test_what_it_is_can_be_read():
    text = repr(filled(sampler=SliceSampler(slice_len=2, traj_key="serial")))
    assert "LazyTensorStorage(len=10, max_size=100" in text
    assert "slice_len=2" in text
    assert "batch_size=4" in text
