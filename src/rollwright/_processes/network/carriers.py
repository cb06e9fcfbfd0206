"""Carriers of large memory beside a line: a process group of two, and calls of torch.distributed.rpc."""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import Any

import numpy as np
import torch

from rollwright._processes.forks import ExitStage, call_at_exit, on_fork
from rollwright._processes.network.line import CarrierFailed

_CHUNK = 1 << 23  # bytes that one operation, or one call, moves
_AT_ONCE = 4  # operations that are begun before the first has ended
_TAG, _ABORT_TAG = 0, 1
_NO_LIMIT = timedelta(days=30)  # of a send: it waits until the other end takes it, as long as the line is open
_DIVERT_S = 0.5
_EXIT_S = 1.0  # for all threads, when this process ends


class PairCarrier:
    """One end of a pair; see :class:`~rollwright._processes.network.line.Carrier`.

    Operations of a process group wait, so there is a thread for each direction; one of them connects before. Memory is
    sent from where it lies and received to where it is to lie, in chunks of 8 MiB.

    An operation that begins in the moment in which the other end closes is lost by gloo, and its thread waits for ever.
    The line, whose socket is closed with the pair, says so, and the thread does not hold up the end of the process.

    Args:
        connect: makes the process group of two; may wait.
        rank: of this end, 0 or 1.
        name: of the kind of group, for messages.
        limit_s: for each chunk to arrive once it was announced.
        min_bytes: pieces of fewer bytes are left to the socket.
        staging: device that memory is copied to before it is sent, and received on; None: it is sent from where it is.
    """

    def __init__(
        self,
        connect: Callable[[], Any],
        rank: int,
        *,
        name: str = "gloo",
        limit_s: float = 30.0,
        min_bytes: int = 1 << 15,
        staging: torch.device | None = None,
    ) -> None:
        self.min_bytes, self.num_bytes_done = min_bytes, 0
        self._connect, self._other, self._name = connect, 1 - rank, name
        self._staging = staging
        self._group: Any = None
        self._failure: str | None = None
        self._closed = False
        self._changed = threading.Condition()
        self._out = _Direction(_NO_LIMIT)
        self._in = _Direction(timedelta(seconds=limit_s))
        self._bell = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        weakref.finalize(self, os.close, self._bell).atexit = False
        self._threads = [
            threading.Thread(target=run, name=f"rollwright-{name}", daemon=True) for run in (self._first, self._send)
        ]
        _living.add(self)
        on_fork(self)
        call_at_exit(_close_all, ExitStage.THREADS)
        self._threads[0].start()

    # For the line -------------------------------------------------------------------------------------

    def fileno(self) -> int:
        """Ready to be read when something was sent or received, or has failed; until :meth:`read`."""
        return self._bell

    def read(self) -> None:
        """Take note of what was sent and received."""
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._bell)
        if self._failure is not None and (self._group is None or self.is_receiving or self.num_bytes_unsent):
            raise CarrierFailed(self._failure)

    @property
    def is_connected(self) -> bool:
        """Whether the other end is reached."""
        return self._group is not None

    def send(self, pieces: Sequence[memoryview]) -> None:
        """Send memory, which must not change before :attr:`num_bytes_unsent` is 0."""
        self._add(self._out, pieces)

    @property
    def num_bytes_unsent(self) -> int:
        """What was to be sent, and is not sent yet."""
        return self._out.num_bytes

    def receive(self, pieces: Sequence[memoryview]) -> None:
        """Write what the other end sends next into this memory."""
        self._add(self._in, pieces)

    @property
    def is_receiving(self) -> bool:
        """Whether something was to be received, and is not there yet."""
        return self._in.num_bytes > 0

    def divert(self, is_meant: Callable[[int], bool]) -> None:
        """Write pieces of what is being received elsewhere, as far as they are to come: their memory is taken away."""
        until = time.monotonic() + _DIVERT_S
        with self._changed:
            self._in.waiting = deque(
                (number, memoryview(bytearray(len(chunk))) if is_meant(number) else chunk)
                for number, chunk in self._in.waiting
            )
            begun = self._in.num_begun
            while self._failure is None and self._in.num_ended < begun and (left_s := until - time.monotonic()) > 0:
                self._changed.wait(left_s)
            stuck = self._failure is None and self._in.num_ended < begun
        if stuck:
            self._fail(f"{self._name}: memory was taken away while nothing more arrived in it")
            self._abort()

    def close(self) -> None:
        """Give up what is to be sent and received: no memory is written or read any more. May be called again."""
        with self._changed:
            if self._closed:
                return
            self._closed = True
            self._changed.notify_all()
        self._fail(f"{self._name}: this end was closed")
        self._abort()
        self._group = None  # whose threads end with it

    def reset_after_fork(self) -> None:
        """In a forked child: forget the pair, which is the parent's.

        Its threads are not there, and to end it would hang: it is kept, even at the end of the interpreter.
        """
        for kept in (self._group, *self._out.begun, *self._in.begun):
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(kept))
        self._group = None
        self._closed, self._failure, self._threads = True, f"{self._name}: it belongs to the parent of this process", []
        self._changed = threading.Condition()

    def join(self, timeout_s: float) -> bool:
        """Wait until the threads of a closed end have ended; whether they have."""
        until = time.monotonic() + timeout_s
        for thread in self._threads:
            if thread.ident is not None:
                thread.join(max(0.0, until - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)

    # Threads ------------------------------------------------------------------------------------------

    def _add(self, direction: _Direction, pieces: Sequence[memoryview]) -> None:
        with self._changed:
            for number, piece in enumerate(pieces):
                memory = piece.cast("B")
                direction.waiting += [(number, memory[at : at + _CHUNK]) for at in range(0, len(memory), _CHUNK)]
                direction.num_bytes += len(memory)
            self._changed.notify_all()
        if self._failure is not None:
            self._ring()

    def _first(self) -> None:
        try:
            group = self._connect()
        except Exception as error:
            self._fail(f"{self._name}: the pair could not be connected: {_brief(error)}")
            return
        with self._changed:
            self._group = group
            if not self._closed:
                self._threads[1].start()
        if self._closed:
            self._abort()
            self._group = None
            return
        self._ring()
        self._serve(self._in, self._begin_receive)

    def _send(self) -> None:
        self._serve(self._out, self._begin_send)

    def _serve(self, direction: _Direction, begin: Callable[[memoryview], _Operation]) -> None:
        """Begin what waits, and wait for what was begun, in order."""
        try:
            while True:
                with self._changed:
                    while not (direction.waiting or direction.begun or self._failure is not None):
                        self._changed.wait()
                    chunks = direction.take(_AT_ONCE) if self._failure is None else []
                direction.begun += [begin(chunk) for chunk in chunks]
                if not direction.begun:
                    return
                first = direction.begun.popleft()
                first.wait(direction.limit)
                with self._changed:
                    direction.num_ended += 1
                    direction.num_bytes -= first.num_bytes
                    self.num_bytes_done += first.num_bytes
                    self._changed.notify_all()
                self._ring()
        except Exception as error:
            self._fail(f"{self._name}: {_brief(error)}")
        finally:
            direction.begun.clear()  # the memory is nobody's any more

    def _begin_send(self, chunk: memoryview) -> _Operation:
        memory = tensor_over(chunk)
        staged = memory if self._staging is None else memory.to(self._staging)
        return _Operation(self._group.send([staged], self._other, _TAG), chunk, None)

    def _begin_receive(self, chunk: memoryview) -> _Operation:
        memory = tensor_over(chunk)
        staged = memory if self._staging is None else torch.empty_like(memory, device=self._staging)
        copy = None if self._staging is None else lambda: memory.copy_(staged)
        return _Operation(self._group.recv([staged], self._other, _TAG), chunk, copy)

    def _fail(self, why: str) -> None:
        with self._changed:
            self._failure = self._failure or why
            self._changed.notify_all()
        self._ring()

    def _abort(self) -> None:
        """End all operations: one that misses its limit closes the pair; there is no other call for that."""
        if self._group is not None:
            with contextlib.suppress(RuntimeError):
                self._group.recv([torch.empty(1, device="cpu")], self._other, _ABORT_TAG).wait(
                    timedelta(milliseconds=1)
                )

    def _ring(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.eventfd_write(self._bell, 1)


class _Direction:
    """What is to be sent, or received."""

    def __init__(self, limit: timedelta) -> None:
        self.limit = limit
        self.waiting: deque[tuple[int, memoryview]] = deque()  # number of the piece, part of it
        self.begun: deque[_Operation] = deque()  # of the thread
        self.num_bytes, self.num_begun, self.num_ended = 0, 0, 0

    def take(self, most: int) -> list[memoryview]:
        """Chunks to begin with, so that so many are on their way."""
        count = min(len(self.waiting), most - len(self.begun))
        self.num_begun += count
        return [self.waiting.popleft()[1] for _ in range(count)]


class _Operation:
    """A chunk that is being sent or received."""

    def __init__(self, work: Any, chunk: memoryview, then: Callable[[], object] | None) -> None:
        self._work, self._chunk, self._then = work, chunk, then
        self.num_bytes = len(chunk)

    def wait(self, limit: timedelta) -> None:
        """Until it has ended."""
        self._work.wait(limit)
        if self._then is not None:
            self._then()


_living: weakref.WeakSet[PairCarrier] = weakref.WeakSet()


def _close_all() -> None:
    """Threads that are in the middle of an operation when the interpreter ends would make it abort."""
    living = list(_living)
    for carrier in living:
        carrier.close()
    until = time.monotonic() + _EXIT_S
    for carrier in living:
        carrier.join(max(0.0, until - time.monotonic()))


def tensor_over(memory: memoryview) -> torch.Tensor:
    """The bytes of memory as a tensor, without a copy; the caller keeps the memory."""
    address = np.frombuffer(memory, np.uint8).ctypes.data
    return torch.frombuffer((ctypes.c_uint8 * len(memory)).from_address(address), dtype=torch.uint8)


def _brief(error: Exception) -> str:
    """What an error of torch says, without its place in the source and its advice."""
    text = str(error).partition("\n")[0]
    if text.startswith("["):
        text = text.partition("] ")[2]
    return text.partition(". This is typically")[0]


_CHUNK = 1 << 23  # bytes that one call brings
_open: weakref.WeakValueDictionary[str, RpcCarrier] = weakref.WeakValueDictionary()  # by key


class RpcCarrier:
    """One end of a connection by calls; see :class:`~rollwright._processes.network.line.Carrier`.

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
            self.fail(_brief_of_call(error))
            return
        call.add_done_callback(partial(self._sent, chunk))  # which keeps the memory until then

    def _sent(self, chunk: memoryview, call: Any) -> None:
        try:
            call.value()
        except Exception as error:
            self.fail(_brief_of_call(error))
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


def _brief_of_call(error: Exception) -> str:
    return str(error).partition("\n")[0].partition(" (this error originated")[0]
