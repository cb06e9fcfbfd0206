"""Memory that is lent out: a loan lasts as long as anything reads it, and no memory is lent twice."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import queue
import random
import threading

import numpy as np
import pytest
import torch
from tensordict import LazyStackedTensorDict, TensorDict

from rollwright._memory.pool import MemoryPool, Slab

FLOAT = torch.float32


def slab_of(*shape, dtype=FLOAT):
    return Slab(shape, dtype)


def borrow(pool, place="obs", shape=(4,), dtype=FLOAT):
    return pool.take(place, shape, dtype)


# Loans ------------------------------------------------------------------------------------------------


def graph(tensor):
    """A graph whose backward needs the tensor."""
    return (torch.ones(2, 3, requires_grad=True) * tensor).sum()


def cycle(tensor):
    """Garbage that only the collector of cycles finds."""
    first: list = [tensor]
    first.append(first)
    return first


def buffer(tensor):
    module = torch.nn.Module()
    module.register_buffer("held", tensor)
    return module


KEEPERS = {
    "the tensor": lambda tensor: tensor,
    "a row": lambda tensor: tensor[1],
    "an element": lambda tensor: tensor[1, 2],
    "a flat view": lambda tensor: tensor.view(-1),
    "a transposed view": lambda tensor: tensor.T,
    "a view of another dtype": lambda tensor: tensor.view(torch.int32),
    "a strided view": lambda tensor: tensor.as_strided((2,), (3,)),
    "an expanded view": lambda tensor: tensor.expand(5, 2, 3),
    "one row of unbind": lambda tensor: tensor.unbind(0)[1],
    "a part of split": lambda tensor: tensor.split(1, dim=1)[2],
    "detached": lambda tensor: tensor.detach(),
    "data": lambda tensor: tensor.data,
    "a parameter": lambda tensor: torch.nn.Parameter(tensor),
    "a buffer of a module": buffer,
    "numpy": lambda tensor: tensor.numpy(),
    "a row of numpy": lambda tensor: tensor.numpy()[1, ::2],
    "a memoryview": lambda tensor: memoryview(tensor.numpy()),
    "frombuffer": lambda tensor: torch.frombuffer(tensor.numpy(), dtype=torch.uint8),
    "from numpy and back": lambda tensor: torch.from_numpy(tensor.numpy()[1:]),
    "the storage": lambda tensor: tensor.untyped_storage(),
    "a dlpack capsule": lambda tensor: torch.utils.dlpack.to_dlpack(tensor),
    "a tensor from dlpack": lambda tensor: torch.utils.dlpack.from_dlpack(tensor),
    "an array from dlpack": lambda tensor: np.from_dlpack(tensor),
    "a graph": graph,
    "a nested TensorDict": lambda tensor: TensorDict({"next": {"obs": tensor}}, [2]),
    "a frame of a TensorDict": lambda tensor: TensorDict({"obs": tensor}, [2]).unbind(0)[1],
    "a slice of a TensorDict": lambda tensor: TensorDict({"obs": tensor}, [2])[1:],
    "a lazy stack": lambda tensor: LazyStackedTensorDict(TensorDict({"obs": tensor}, [2]), TensorDict({}, [2])),
    "a shallow copy": copy.copy,
    "a cycle": cycle,
    "a closure": lambda tensor: lambda: tensor,
    "an exception": lambda tensor: ValueError(tensor),
}


@pytest.mark.parametrize("name", KEEPERS)
def test_a_loan_lasts_as_long_as_something_reads_the_memory(name):
    slab = slab_of(2, 3)
    kept = KEEPERS[name](slab.borrow().tensor)
    assert slab.borrowed
    del kept
    if name == "a cycle":
        gc.collect()
    assert not slab.borrowed


def saved(tensor):
    file = io.BytesIO()
    torch.save(tensor, file)
    file.seek(0)
    return torch.load(file)


COPIES = {
    "clone": torch.clone,
    "pickle": lambda tensor: pickle.loads(pickle.dumps(tensor)),
    "deepcopy": copy.deepcopy,
    "torch.save": saved,
    "another dtype": lambda tensor: tensor.double(),
    "an array of its own": lambda tensor: tensor.numpy().copy(),
    "a list": lambda tensor: tensor.tolist(),
    "a result": lambda tensor: tensor + 1,
    "a clone of a TensorDict": lambda tensor: TensorDict({"obs": tensor}, [2]).clone(),
    "a stack": lambda tensor: torch.stack([tensor, tensor]),
}


@pytest.mark.parametrize("name", COPIES)
def test_a_copy_ends_the_loan(name):
    slab = slab_of(2, 3)
    kept = COPIES[name](slab.borrow().tensor)
    assert not slab.borrowed
    assert kept is not None


def test_the_last_of_many_readers_ends_the_loan():
    slab = slab_of(4, 3)
    tensor = slab.borrow().tensor
    readers = [tensor, *tensor.unbind(0), tensor.numpy(), tensor.untyped_storage(), tensor.detach()]
    del tensor
    random.Random(0).shuffle(readers)
    while readers:
        assert slab.borrowed
        readers.pop()
    assert not slab.borrowed


def test_a_graph_reads_what_it_saved_until_its_backward():
    slab = slab_of(2, 3)
    tensor = slab.borrow().tensor.fill_(2.0)
    weight = torch.ones(2, 3, requires_grad=True)
    loss = (weight * tensor).sum()
    del tensor
    assert slab.borrowed
    loss.backward()
    assert not slab.borrowed  # the graph is freed
    assert torch.equal(weight.grad, torch.full((2, 3), 2.0))


def test_a_tensor_that_a_finalizer_brings_back_is_still_lent():
    brought_back = []

    class Phoenix:
        def __init__(self, tensor):
            self.tensor, self.me = tensor, self

        def __del__(self):
            brought_back.append(self.tensor)

    slab = slab_of(2, 3)
    Phoenix(slab.borrow().tensor)
    gc.collect()
    assert len(brought_back) == 1
    assert slab.borrowed
    brought_back.clear()
    assert not slab.borrowed


def test_a_tensor_that_moves_into_shared_memory_ends_the_loan_and_keeps_its_values():
    slab = slab_of(2, 3)
    tensor = slab.borrow().tensor.fill_(1.0).share_memory_()
    assert not slab.borrowed
    slab.borrow().tensor.fill_(2.0)
    assert torch.equal(tensor, torch.ones(2, 3))


def test_the_array_of_the_owner_is_the_memory_of_the_loan_and_keeps_none_open():
    slab = slab_of(2, 3)
    tensor, array = slab.borrow()
    array[...] = 7
    assert torch.equal(tensor, torch.full((2, 3), 7.0))
    assert array.__array_interface__["data"][0] == tensor.data_ptr()
    del tensor
    assert not slab.borrowed


def test_lent_memory_is_not_lent_again():
    slab = slab_of(2, 3)
    row = slab.borrow().tensor[0]
    with pytest.raises(RuntimeError, match=r"borrowed\. Wait until"):
        slab.borrow()
    del row
    assert slab.borrow().tensor.shape == (2, 3)


def test_a_loan_outlives_its_slab():
    tensor = slab_of(1000).borrow().tensor.fill_(3.0)
    gc.collect()
    others = [torch.full((1000,), 5.0) for _ in range(10)]
    assert torch.equal(tensor, torch.full((1000,), 3.0))
    assert len(others) == 10


DTYPES = [
    torch.bool,
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.uint16,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.complex64,
    torch.complex128,
]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(3,), (2, 3, 4), (5, 1)], ids=str)
def test_memory_of_any_dtype(dtype, shape):
    slab = slab_of(*shape, dtype=dtype)
    tensor = slab.borrow().tensor
    assert (tuple(tensor.shape), tensor.dtype, tensor.is_contiguous()) == (shape, dtype, True)
    assert slab.num_bytes == tensor.nbytes
    assert tensor.data_ptr() % 16 == 0
    wanted = torch.arange(tensor.numel()).reshape(shape).to(dtype)
    assert torch.equal(tensor.copy_(wanted), wanted)
    view = tensor[0]
    del tensor
    assert slab.borrowed
    del view
    assert not slab.borrowed


@pytest.mark.parametrize("shape", [(0,), (0, 3), (3, 0)], ids=str)
def test_memory_of_no_elements(shape):
    slab = slab_of(*shape)
    for _ in range(2):
        tensor = slab.borrow().tensor
        assert (tuple(tensor.shape), tensor.nbytes, slab.num_bytes) == (shape, 0, 0)
        del tensor


def test_memory_of_one_number():
    slab = slab_of()
    number = slab.borrow().tensor.fill_(4.0)
    assert (number.shape, number.item(), slab.num_bytes) == ((), 4.0, 4)


# The pool ---------------------------------------------------------------------------------------------


def test_the_same_memory_comes_back_when_nothing_reads_it():
    pool = MemoryPool()
    addresses = {borrow(pool).tensor.data_ptr() for _ in range(20)}
    assert len(addresses) == 1
    assert pool.num_bytes == 16


def test_two_addresses_alternate_where_each_loan_outlives_the_next_taking():
    pool = MemoryPool()
    addresses = []
    held = None
    for _ in range(20):
        held = borrow(pool).tensor  # the one before is dropped only now
        addresses.append(held.data_ptr())
    assert addresses[::2] == addresses[:1] * 10
    assert addresses[1::2] == addresses[1:2] * 10
    assert addresses[0] != addresses[1]
    assert pool.num_bytes == 32


def test_what_is_held_is_never_lent_again():
    pool, chance = MemoryPool(), random.Random(0)
    held = []
    for stamp in range(300):
        tensor, array = borrow(pool)
        array[...] = stamp
        held.append((stamp, tensor))
        del tensor
        while held and chance.random() < 0.45:
            held.pop(chance.randrange(len(held)))
        assert len({tensor.data_ptr() for _, tensor in held}) == len(held)
        assert all(bool((tensor == stamp).all()) for stamp, tensor in held)


def test_as_many_slabs_as_open_loans_and_one_more():
    pool, chance = MemoryPool(), random.Random(1)
    held = []
    for _ in range(300):
        if held and chance.random() < 0.5:
            chance.shuffle(held)
            del held[chance.randrange(len(held)) :]
        held.append(borrow(pool).tensor)
        assert pool.num_bytes_borrowed == 16 * len(held)
        assert pool.num_bytes <= 16 * (len(held) + 1)


def test_slabs_that_came_back_are_let_go_with_the_next_taking():
    pool = MemoryPool()
    held = [borrow(pool).tensor for _ in range(10)]
    assert pool.num_bytes == pool.num_bytes_borrowed == 160
    held.clear()
    assert (pool.num_bytes, pool.num_bytes_borrowed) == (160, 0)
    borrow(pool)
    assert pool.num_bytes == 32


@pytest.mark.parametrize(("shape", "dtype"), [((5,), FLOAT), ((2, 2), FLOAT), ((4,), torch.int32)])
def test_slabs_of_another_layout_are_let_go(shape, dtype):
    pool = MemoryPool()
    held = borrow(pool).tensor.fill_(9.0)
    other = borrow(pool, shape=shape, dtype=dtype).tensor
    assert (other.shape, other.dtype) == (shape, dtype)
    assert pool.num_bytes == other.nbytes
    other.zero_()
    assert torch.equal(held, torch.full((4,), 9.0))


def test_places_do_not_share_memory():
    pool = MemoryPool()
    places = ["obs", ("next", "obs"), "action"]
    held = [borrow(pool, place).tensor.fill_(i) for i, place in enumerate(places)]
    assert len({tensor.data_ptr() for tensor in held}) == 3
    assert [tensor[0].item() for tensor in held] == [0, 1, 2]
    assert pool.num_bytes == 48


def test_a_cleared_pool_holds_nothing_and_its_loans_live_on():
    pool = MemoryPool()
    held = borrow(pool).tensor.fill_(1.0)
    pool.clear()
    assert (pool.num_bytes, pool.num_bytes_borrowed) == (0, 0)
    borrow(pool).tensor.fill_(2.0)
    assert torch.equal(held, torch.ones(4))


def test_loans_that_other_threads_read_and_drop():
    """Each of four threads holds a few loans; what it holds has the stamp that it came with until it is dropped."""
    pool = MemoryPool()
    lent: queue.Queue = queue.Queue(maxsize=8)
    broken = []

    def read(seed):
        held, chance = [], random.Random(seed)
        while (item := lent.get()) is not None:
            held.append(item)
            while len(held) > 4 or (held and chance.random() < 0.5):
                stamp, tensor = held.pop(chance.randrange(len(held)))
                if not bool((tensor == stamp).all()):
                    broken.append(stamp)
                del tensor
            del item

    threads = [threading.Thread(target=read, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for stamp in range(2000):
        tensor, array = borrow(pool, shape=(64,))
        array[...] = stamp
        lent.put((stamp, tensor))
        del tensor
        assert pool.num_bytes <= 256 * (4 * 5 + 8 + 4 + 2)  # held, waiting, being handed over, and one more
    for _ in threads:
        lent.put(None)
    for thread in threads:
        thread.join(10)
    gc.collect()
    assert broken == []
    assert pool.num_bytes_borrowed == 0
