"""ThreadSlots: each environment of a pool in a thread."""

from __future__ import annotations

import contextlib
import queue
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from tensordict import TensorDictBase

from rollwright._interrupts import uninterrupted
from rollwright._processes.threads import DaemonThread
from rollwright.envs.base import EnvBase
from rollwright.envs.batched.async_slots import Came, Slots
from rollwright.envs.batched.hosting.processes import CLOSE_S, DEFAULT_TIMEOUT_S, SHORT_CLOSE_S, START_S
from rollwright.envs.each import renamed
from rollwright.envs.factories import Factory, call_each, check_apart, made, placed
from rollwright.errors import EnvError, RollwrightError

GONE, LEFT = "gone", "left behind"
_LAST_BREATH_S = 2.0  # of a thread that has nothing left to do


class _Work(NamedTuple):
    serial: int
    td: TensorDictBase | None
    resets: bool
    kwargs: dict[str, Any]


Inbox = queue.SimpleQueue[_Work | None]


class _EnvThread(DaemonThread):
    """The thread of an environment.

    Args:
        name: of the thread.
        serve: what it does, with what is put into its inbox; ends at None.
    """

    def __init__(self, name: str, serve: Callable[[Inbox], None]) -> None:
        super().__init__(name)
        self.inbox: Inbox = queue.SimpleQueue()
        self._serve = serve

    def _work(self) -> None:
        self._serve(self.inbox)

    def stop(self, timeout_s: float) -> bool:
        """See :class:`DaemonThread`."""
        self.inbox.put(None)
        return super().stop(timeout_s)


class ThreadSlots(Slots):
    """Each environment in a thread of this process, made there, at the same time.

    Args:
        makers: one for each row.
        name: of the pool, for messages.
        timeout_s: the longest that a step or a reset may take; None: an hour.

    Raises:
        EnvError, TypeError: a factory failed.
    """

    def __init__(self, makers: Sequence[Factory], name: str, timeout_s: float | None) -> None:
        self._name, self._limit_s = name, DEFAULT_TIMEOUT_S if timeout_s is None else timeout_s
        self._makers = list(makers)
        self._outbox: deque[tuple[int, int, Any]] = deque()
        self._bell: queue.SimpleQueue[None] = queue.SimpleQueue()  # rung after something was put into the outbox
        self._ends: dict[int, str] = {}  # by row: its thread has GONE, or was LEFT behind, whichever came first
        self._since: dict[int, tuple[int, float]] = {}  # by row: serial and time of the current call
        self._lost: set[int] = set()  # rows whose thread did not return
        self._serial = 0
        self.facts: list[EnvBase] = []
        self._places = [_EnvThread(f"{name}[{row}]", partial(self._serve, row)) for row in range(len(self._makers))]
        for row, place in enumerate(self._places):
            self._since[row] = 0, time.monotonic()
            place.start()
        try:
            self._await_envs()
        except BaseException:
            self._ends = dict.fromkeys(range(len(self._makers)), LEFT)  # each thread closes what it has made
            self.stop_threads()
            raise

    def _tell(self, row: int, serial: int, result: Any) -> None:
        self._outbox.append((row, serial, result))
        self._bell.put(None)

    def _listen(self, timeout_s: float) -> bool:
        """Wait until the outbox has something, or the time is over; whether it has.

        The bell may have rung for what was taken already, or an interrupt may have swallowed it: the outbox counts.
        """
        until = time.monotonic() + timeout_s
        while not self._outbox:
            try:
                self._bell.get(timeout=max(0.0, until - time.monotonic()))
            except queue.Empty:
                return bool(self._outbox)
        return True

    def _await_envs(self) -> None:
        envs: dict[int, EnvBase] = {}
        errors: dict[int, Exception] = {}
        until = time.monotonic() + START_S
        while len(envs) + len(errors) < len(self._makers) and not errors:
            if not self._listen(until - time.monotonic()):
                missing = sorted(set(range(len(self._makers))) - set(envs))
                errors[missing[0]] = EnvError(
                    f"create_env_fn of workers {missing} did not come back within {START_S:g} s."
                )
                break
            row, _, result = self._outbox.popleft()
            (errors if isinstance(result, Exception) else envs)[row] = result
        if errors:
            raise errors[min(errors)]
        check_apart(envs)
        self._since.clear()
        self.facts = [envs[row] for row in range(len(self._makers))]

    def _serve(self, row: int, inbox: Inbox) -> None:
        """What a thread runs."""
        try:
            env = made(row, self._makers[row])
        except Exception as error:
            self._tell(row, 0, error)
            return
        self._tell(row, 0, env)
        while (work := inbox.get()) is not None:
            result: Any
            try:
                td = None if work.td is None else placed(work.td, env.device)
                result = env.reset_outcome(td, **work.kwargs) if work.resets else env.step_outcome(td)  # type: ignore[arg-type]
            except Exception as error:
                result = error
            self._tell(row, work.serial, result)
        if self._ends.setdefault(row, GONE) == LEFT:  # nobody else will close it
            with contextlib.suppress(Exception):
                env.close(raise_if_closed=False)
        self._bell.put(None)

    def post(self, row: int, td: TensorDictBase | None, *, resets: bool, kwargs: dict[str, Any]) -> None:
        """See :class:`Slots`."""
        if self._places[row].left_behind:
            self._places[row].raise_error()
        with uninterrupted:
            self._serial += 1
            self._since[row] = self._serial, time.monotonic()
            if row in self._lost:
                error = EnvError(
                    f"{self._name}[{row}] is still busy with a call that took longer than env_step_timeout."
                )
                self._tell(row, self._serial, error)
            else:
                self._places[row].inbox.put(_Work(self._serial, td, resets, kwargs))

    def wait(self, timeout_s: float) -> None:
        """See :class:`Slots`."""
        due = min((since + self._limit_s for _, since in self._since.values()), default=float("inf"))
        self._listen(min(timeout_s, max(0.0, due - time.monotonic())))

    def collect(self) -> Iterator[Came]:
        """See :class:`Slots`."""
        with contextlib.suppress(queue.Empty):  # it has rung for what is taken now
            while True:
                self._bell.get_nowait()
        while self._outbox:
            came = self._taken(*self._outbox.popleft())
            if came is not None:
                yield came
        now = time.monotonic()
        for row in [row for row, (_, since) in self._since.items() if now - since > self._limit_s]:
            del self._since[row]
            self._lost.add(row)
            yield Came(row, None, EnvError(f"{self._name}[{row}] did not come back within {self._limit_s:g} s."))

    def _taken(self, row: int, serial: int, result: Any) -> Came | None:
        if self._since.get(row, (None,))[0] != serial:
            self._lost.discard(row)  # it returned after all; nobody waits for this any more
            return None
        del self._since[row]
        if not isinstance(result, Exception):
            return Came(row, result, None)
        named = f"{self._name}[{row}]"
        error = renamed(named, result) if isinstance(result, RollwrightError) else EnvError(f"{named}: {result}")
        error.__cause__ = result
        return Came(row, None, error)

    def set_seed(self, row: int, seed: int | None, static_seed: bool) -> int | None:
        """See :class:`Slots`."""
        return self.facts[row].set_seed(seed, static_seed)

    def move(self, device: torch.device | str | int) -> None:
        """See :class:`Slots`."""
        for env in self.facts:
            env.to(device)

    def look_up(self, name: str) -> Any:
        """See :class:`Slots`."""
        values = [getattr(env, name) for env in self.facts]
        return call_each(values) if all(callable(value) for value in values) else values

    def call(self, row: int, name: str, args: tuple[Any, ...]) -> Any:
        """See :class:`Slots`."""
        return getattr(self.facts[row], name)(*args)

    def stop_threads(self) -> None:
        """Let each thread end when its current call returns; does not wait."""
        for place in self._places:
            place.stop(0.0)

    def close(self, *, hurries: bool = False) -> tuple[list[Exception], list[str]]:
        """See :class:`Slots`."""
        self._ends.update({row: GONE for row, place in enumerate(self._places) if place.left_behind})  # in a fork
        self.stop_threads()
        until = time.monotonic() + (SHORT_CLOSE_S if hurries else CLOSE_S)
        awaited = set(range(len(self._places))) - self._lost
        while awaited - self._ends.keys() and (rest := until - time.monotonic()) > 0:
            with contextlib.suppress(queue.Empty):
                self._bell.get(timeout=rest)
        errors: list[Exception] = []
        forced: list[str] = []
        for row, (place, env) in enumerate(zip(self._places, self.facts, strict=True)):
            if self._ends.setdefault(row, LEFT) == LEFT:
                forced.append(f"the thread of environment {row} is left behind, in a call that does not come back")
                continue
            with uninterrupted:  # join() takes a thread for ended whose wait was interrupted
                place.stop(_LAST_BREATH_S)
            try:
                env.close(raise_if_closed=False)
            except Exception as error:  # the others are to be closed all the same
                errors.append(error)
        return errors, forced
