"""RpcCarrier: moves pieces of messages by calls of torch.distributed.rpc."""

from __future__ import annotations

import contextlib
import importlib
import os
import threading
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from rollwright._processes.forks import on_fork
from rollwright._processes.network.carrier import CarrierFailed
from rollwright._processes.network.pair import tensor_over

_CHUNK = 1 << 23  # bytes that one call brings
_open: weakref.WeakValueDictionary[str, RpcCarrier] = weakref.WeakValueDictionary()  # by key


class RpcCarrier:
    """One end of a connection by calls; see :class:`~rollwright._processes.network.carrier.Carrier`.

    Each call brings a tensor of at most 8 MiB, in memory of TensorPipe's, which is copied to where it is to lie by the
    thread that runs the call. Calls may overtake one another, so they are numbered.

    Args:
        key: of both ends; no other carrier has it.
        other: name of the other member.
        limit_s: for each call.
        min_bytes: pieces of fewer bytes are left to the socket.
        leave: called by :meth:`close`.
    """

    def __init__(
        self, key: str, other: str, *, limit_s: float, min_bytes: int, leave: Callable[[], None] = lambda: None
    ) -> None:
        self.min_bytes, self.num_bytes_done = min_bytes, 0
        self._key, self._other, self._limit_s, self._leave = key, other, limit_s, leave
        self._rpc: Any = None
        self._failure: str | None = None
        self._closed = False
        self._lock = threading.RLock()
        self._unsent, self._num_sent = 0, 0
        self._places: deque[memoryview | None] = deque()  # of chunks that have not come, in order; None: nowhere
        self._pieces: deque[int] = deque()  # for each place, the number of its piece
        self._first, self._missing = 0, 0  # number of the first place; bytes
        self._early: dict[int, torch.Tensor] = {}  # chunks that came before their place was known
        self._bell = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        weakref.finalize(self, os.close, self._bell).atexit = False
        _open[key] = self
        on_fork(self)

    # Its members --------------------------------------------------------------------------------------

    def connected(self) -> None:
        """Both members are there."""
        self._rpc = importlib.import_module("torch.distributed.rpc")
        self._ring()

    def fail(self, why: str) -> None:
        """They will not be, or are not any more."""
        with self._lock:
            self._failure = self._failure or f"rpc: {why}"
        self._ring()

    # For the line -------------------------------------------------------------------------------------

    def fileno(self) -> int:
        """Ready to be read when something was sent or received, or has failed; until :meth:`read`."""
        return self._bell

    def read(self) -> None:
        """Take note of what was sent and received."""
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._bell)
        if self._failure is not None and (self._rpc is None or self._unsent or self._missing):
            raise CarrierFailed(self._failure)

    @property
    def is_connected(self) -> bool:
        """Whether the other end is reached."""
        return self._rpc is not None

    def send(self, pieces: Sequence[memoryview]) -> None:
        """Send memory, which must not change before :attr:`num_bytes_unsent` is 0."""
        for piece in pieces:
            memory = piece.cast("B")
            for at in range(0, len(memory), _CHUNK):
                self._call(memory[at : at + _CHUNK])

    def _call(self, chunk: memoryview) -> None:
        with self._lock:
            self._unsent += len(chunk)
            number, self._num_sent = self._num_sent, self._num_sent + 1
        try:
            tensor = tensor_over(chunk)
            call = self._rpc.rpc_async(self._other, _deliver, (self._key, number, tensor), timeout=self._limit_s)
        except Exception as error:
            self.fail(_brief(error))
            return
        call.add_done_callback(partial(self._sent, chunk))  # which keeps the memory until then

    def _sent(self, chunk: memoryview, call: Any) -> None:
        try:
            call.value()
        except Exception as error:
            self.fail(_brief(error))
            return
        with self._lock:
            self._unsent -= len(chunk)
            self.num_bytes_done += len(chunk)
        self._ring()

    @property
    def num_bytes_unsent(self) -> int:
        """What was to be sent, and is not sent yet."""
        return self._unsent

    def receive(self, pieces: Sequence[memoryview]) -> None:
        """Write what the other end sends next into this memory."""
        for index, piece in enumerate(pieces):
            memory = piece.cast("B")
            for at in range(0, len(memory), _CHUNK):
                with self._lock:
                    chunk = memory[at : at + _CHUNK]
                    number = self._first + len(self._places)
                    self._places.append(chunk)
                    self._pieces.append(index)
                    self._missing += len(chunk)
                    early = self._early.pop(number, None)
                if early is not None:
                    self.deliver(number, early)
        if self._failure is not None:
            self._ring()

    def deliver(self, number: int, tensor: torch.Tensor) -> None:
        """A chunk has come."""
        with self._lock:  # whoever takes memory away waits for this
            if self._closed:
                return
            if number >= self._first + len(self._places):
                self._early[number] = tensor
                return
            place = self._places[number - self._first]
            if place is not None:
                tensor_over(place).copy_(tensor)
            self._places[number - self._first] = _DONE
            while self._places and self._places[0] is _DONE:
                self._places.popleft()
                self._pieces.popleft()
                self._first += 1
            self._missing -= tensor.numel()
            self.num_bytes_done += tensor.numel()
        self._ring()

    @property
    def is_receiving(self) -> bool:
        """Whether something was to be received, and is not there yet."""
        return self._missing > 0

    def divert(self, is_meant: Callable[[int], bool]) -> None:
        """Write pieces of what is being received elsewhere, as far as they are to come: their memory is taken away."""
        with self._lock:
            pairs = zip(self._places, self._pieces, strict=True)
            self._places = deque(place if place is _DONE or not is_meant(index) else None for place, index in pairs)

    def close(self) -> None:
        """Give up what is to be sent and received: no memory is written or read any more. May be called again."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            self._places.clear()
            self._pieces.clear()
            self._early.clear()
        self.fail("this end was closed")
        self._leave()

    def reset_after_fork(self) -> None:
        """In a forked child: forget the members, which are the parent's."""
        self._lock = threading.RLock()
        self._closed, self._rpc, self._failure = True, None, "rpc: it belongs to the parent of this process"

    def _ring(self) -> None:
        with contextlib.suppress(BlockingIOError, OSError):
            os.eventfd_write(self._bell, 1)


_DONE = memoryview(b"")


def _deliver(key: str, number: int, tensor: torch.Tensor) -> None:
    """What a call runs at the other member."""
    carrier = _open.get(key)
    if carrier is not None:
        carrier.deliver(number, tensor)


def _brief(error: Exception) -> str:
    return str(error).partition("\n")[0].partition(" (this error originated")[0]
