"""Messages between a replay service and those who use it, packed so that tensors are sent from where they lie."""

from __future__ import annotations

import io
import pickle
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from tensordict import TensorDict

from rollwright._memory import MemoryPool
from rollwright._processes.channel import dumps
from rollwright._processes.connection import ExceptionInfo
from rollwright.data.entries import unchecked_td
from rollwright.data.replay_buffers.buffer import ReplayBuffer
from rollwright.data.replay_buffers.limiter import SampleToInsertRatio
from rollwright.data.replay_buffers.samplers.slices import SliceSampler
from rollwright.data.replay_buffers.storages.storage import Storage


class WriterName(NamedTuple):
    """Who writes, where a writer may be given up and replaced.

    Attributes:
        name: of its place, such as that of a worker of a collector.
        generation: how many had the place before.
    """

    name: str
    generation: int


class Info(NamedTuple):
    """What is known of a buffer in a service without asking; it changes with its parts alone.

    Attributes:
        kind: name of its class.
        storage: name of the storage's class.
        sampler: name of the sampler's class.
        max_size: elements that the storage has room for.
        ndim: dimensions that distinguish its elements.
        dim_extend: which dimension of the data grows.
        keeps_objects: whether entries may be text and other objects.
        draws_slices: whether the sampler draws stretches of trajectories.
        has_priorities: whether the sampler has priorities.
        limiter: keeps sampling and collecting at one pace; a copy, for its numbers.
        priority_key: of a buffer of TensorDicts.
        num_transforms: that are applied to batches.
    """

    kind: str
    storage: str
    sampler: str
    max_size: int
    ndim: int
    dim_extend: int
    keeps_objects: bool
    draws_slices: bool
    has_priorities: bool
    limiter: SampleToInsertRatio | None
    priority_key: object
    num_transforms: int

    @classmethod
    def of(cls, buffer: ReplayBuffer) -> Info:
        """That on a buffer."""
        storage, sampler = buffer.storage, buffer.sampler
        return cls(
            kind=type(buffer).__name__,
            storage=type(storage).__name__,
            sampler=type(sampler).__name__,
            max_size=storage.max_size,
            ndim=storage.ndim,
            dim_extend=buffer.dim_extend,
            keeps_objects=storage.keeps_objects,
            draws_slices=isinstance(sampler, SliceSampler),
            has_priorities=sampler.has_priorities,
            limiter=buffer.limiter,
            priority_key=getattr(buffer, "priority_key", None),
            num_transforms=len(buffer.transforms),
        )


class Ready(NamedTuple):
    """The service listens.

    Attributes:
        address: host and port.
        info: on its buffer.
        write_count: elements of its buffer that were written before.
    """

    address: tuple[str, int]
    info: Info
    write_count: int = 0


class Request(NamedTuple):
    """Something to do, once; the pieces are memory of its arguments.

    Attributes:
        number: of the client's requests, rising.
        received: the client has the replies of all that it has sent below this number.
        what: path of a method from the buffer, such as ``"extend"`` or ``"storage.ledger.take_ids"``; or ``"info"``,
            ``"give_up"``, ``"was_done"``, ``"cancel"``, ``"finish"``, of the service itself.
        body: the arguments, by position and by name, packed.
    """

    number: int
    received: int
    what: str
    body: bytes


class Reply(NamedTuple):
    """What came of a request; the pieces are memory of the result.

    Attributes:
        number: of the request.
        body: the result, packed.
        failure: what was raised instead.
    """

    number: int
    body: bytes
    failure: ExceptionInfo | None = None


class Counts(NamedTuple):
    """The first message to a client; and to the owner, before the writes that they count are acknowledged.

    Attributes:
        write_count: elements that were written so far.
        num_stored: elements that are there.
        dump_failure: why they could not be saved the last time; None: they could.
    """

    write_count: int
    num_stored: int
    dump_failure: str | None = None


class Beat(NamedTuple):
    """The service is there."""


_INLINE = 128  # bytes of a tensor that are not worth a piece of their own
_WORTH_REUSE = 64 * 2**10  # bytes
_MOST_SLABS, _MOST_BYTES = 64, 256 * 2**20


class _Pickler(pickle.Pickler):
    def reducer_override(self, value: Any) -> Any:
        kind = type(value)
        if kind is TensorDict:
            names = value.names if any(value.names) else None
            entries = dict(value.items())
            return _tensordict, (entries, tuple(value.batch_size), value.device is not None, names)
        if kind not in (torch.Tensor, torch.nn.Parameter):
            return NotImplemented
        is_plain = value.layout is torch.strided and not value.is_quantized and not value.is_nested
        return _reduced(value.detach()) if is_plain else NotImplemented


def _reduced(tensor: torch.Tensor) -> Any:
    tensor = tensor.cpu().contiguous().resolve_conj().resolve_neg()
    count = tensor.numel() * tensor.element_size()
    if not count:
        return _small, (b"", tensor.dtype, tuple(tensor.shape))
    memory: Any = tensor.reshape(-1).view(torch.uint8).numpy()
    if count <= _INLINE:
        return _small, (memory.tobytes(), tensor.dtype, tuple(tensor.shape))
    return _tensor, (pickle.PickleBuffer(memory), tensor.dtype, tuple(tensor.shape))


def _tensor(memory: Any, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    return torch.frombuffer(memory, dtype=dtype).view(shape)


def _small(content: bytes, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    return (
        torch.frombuffer(bytearray(content), dtype=dtype).view(shape)
        if content
        else torch.empty(shape, dtype=dtype, device="cpu")
    )


def _tensordict(entries: dict[str, Any], batch_size: tuple[int, ...], has_device: bool, names: Any) -> TensorDict:
    made = unchecked_td(
        entries, torch.Size(batch_size), device=torch.device("cpu") if has_device else None, nested=False
    )
    if names is not None:
        made.names = names
    return made


def pack(value: Any) -> tuple[bytes, list[memoryview]]:
    """A pickle, and the memory that belongs to it, which must not change until it is sent.

    Tensors of other devices than the CPU, and those that do not lie in one piece, are copied. What arrives is on the
    CPU and in no autograd graph.

    Example:
        >>> body, pieces = pack({"a": torch.arange(100)})
        >>> [piece.nbytes for piece in pieces]
        [800]
        >>> int(unpack(body, pieces)["a"][-1])
        99
    """
    buffers: list[pickle.PickleBuffer] = []
    file = io.BytesIO()
    _Pickler(file, 5, buffer_callback=buffers.append).dump(value)
    return file.getvalue(), [buffer.raw() for buffer in buffers]


def unpack(body: bytes, pieces: Sequence[memoryview]) -> Any:
    """What :func:`pack` was given; its tensors lie in the pieces."""
    return pickle.loads(body, buffers=pieces)


class Code:
    """Stands for an object that may hold functions and classes: the object itself arrives, with their code."""

    def __init__(self, value: Any) -> None:
        self._value = value

    def __reduce__(self) -> Any:
        return _arrived, (dumps(self._value),)


def _arrived(pickled: bytes) -> Any:
    value = pickle.loads(pickled)
    if isinstance(value, Storage):
        value.move_here()
    return value


def memory_for(sizes: Sequence[int]) -> list[memoryview]:
    """Fresh memory for pieces of these sizes, aligned as torch aligns tensors."""
    return [memoryview(torch.empty(size, dtype=torch.uint8, device="cpu").numpy()) for size in sizes]  # type: ignore[arg-type]


class ReusedMemory:
    """Memory for pieces, each used again when nothing reads what was made of it; as :func:`memory_for` otherwise.

    A loop that samples and drops batches of one size takes no fresh memory, whose pages would have to be cleared.

    Example:
        >>> memory = ReusedMemory()
        >>> (piece,) = memory([2**20])
        >>> batch = torch.frombuffer(piece, dtype=torch.float32)
        >>> address = batch.data_ptr()
        >>> del piece, batch
        >>> torch.frombuffer(memory([2**20])[0], dtype=torch.float32).data_ptr() == address
        True
    """

    def __init__(self) -> None:
        self._pool = MemoryPool()  # of each size, a place for each piece of a message that has it

    def __call__(self, sizes: Sequence[int]) -> list[memoryview]:
        """Memory for pieces of these sizes."""
        return [
            self._take(place, size) if size >= _WORTH_REUSE else memory_for([size])[0]
            for place, size in enumerate(sizes)
        ]

    def _take(self, place: int, num_bytes: int) -> memoryview:
        piece: Any = self._pool.take((place, num_bytes), (num_bytes,), torch.uint8).tensor.numpy()
        if self._pool.num_slabs > _MOST_SLABS or self.num_bytes > _MOST_BYTES:
            self._pool.clear()  # whoever has borrowed some keeps it
        return memoryview(piece)  # tensors, arrays and views of it keep what it is of

    @property
    def num_bytes(self) -> int:
        """That are kept, borrowed or not."""
        return self._pool.num_bytes
