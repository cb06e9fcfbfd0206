"""ThreadSlots: each environment of a pool in a thread."""

from __future__ import annotations

import atexit
import contextlib
import queue
import threading
import time
import weakref
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from tensordict import TensorDictBase

from rollwright.envs._async_slots import Came, Slots
from rollwright.envs._env_processes import CLOSE_S, PATIENCE_S, START_S
from rollwright.envs._workers import Factory, call_each, made, placed, renamed
from rollwright.envs.base import EnvBase
from rollwright.errors import EnvError, RollwrightError

__all__ = ["ThreadSlots"]

_EXIT_S = 1.0  # when the interpreter exits


class _Work(NamedTuple):
    serial: int
    td: TensorDictBase | None
    resets: bool
    kwargs: dict[str, Any]


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
        self._name, self._limit_s = name, PATIENCE_S if timeout_s is None else timeout_s
        self._makers = list(makers)
        self._inboxes: list[queue.SimpleQueue[_Work | None]] = [queue.SimpleQueue() for _ in makers]
        self._outbox: queue.SimpleQueue[tuple[int, int, Any]] = queue.SimpleQueue()
        self._since: dict[int, tuple[int, float]] = {}  # by row: serial and time of the call under way
        self._lost: set[int] = set()  # rows whose thread did not come back
        self._serial = 0
        self._failed = False  # whether a factory has
        self._num_torch_threads = torch.get_num_threads()
        self.facts: list[EnvBase] = []
        self._threads = [
            threading.Thread(target=self._serve, args=(row,), name=f"{name}[{row}]", daemon=True)
            for row in range(len(self._makers))
        ]
        _at_exit.add(self)
        for row, thread in enumerate(self._threads):
            self._since[row] = 0, time.monotonic()
            thread.start()
        self._await_envs()

    def _await_envs(self) -> None:
        envs: dict[int, EnvBase] = {}
        errors: dict[int, Exception] = {}
        until = time.monotonic() + START_S
        while len(envs) + len(errors) < len(self._makers) and not errors:
            try:
                row, _, result = self._outbox.get(timeout=max(0.0, until - time.monotonic()))
            except queue.Empty:
                missing = sorted(set(range(len(self._makers))) - set(envs))
                errors[missing[0]] = EnvError(
                    f"create_env_fn of workers {missing} did not come back within {START_S:g} s."
                )
                break
            (errors if isinstance(result, Exception) else envs)[row] = result
        if errors:
            self._failed = True
            self._leave()
            raise errors[min(errors)]
        self._since.clear()
        self.facts = [envs[row] for row in range(len(self._makers))]

    def _serve(self, row: int) -> None:
        """What a thread runs."""
        torch.set_num_threads(self._num_torch_threads)  # a new thread takes as many as there are cores
        try:
            env = made(row, self._makers[row])
        except Exception as error:
            self._outbox.put((row, 0, error))
            return
        self._outbox.put((row, 0, env))
        while (work := self._inboxes[row].get()) is not None:
            result: Any
            try:
                td = None if work.td is None else placed(work.td, env.device)
                result = env._begin(td, **work.kwargs) if work.resets else env._advance(td)  # type: ignore[arg-type]
            except Exception as error:
                result = error
            self._outbox.put((row, work.serial, result))
        if self._failed:  # an environment may have been made after another's factory had failed
            with contextlib.suppress(Exception):  # the earlier error tells more
                env.close(raise_if_closed=False)

    def post(self, row: int, td: TensorDictBase | None, *, resets: bool, kwargs: dict[str, Any]) -> None:
        """See :class:`Slots`."""
        self._serial += 1
        self._since[row] = self._serial, time.monotonic()
        if row in self._lost:
            error = EnvError(f"{self._name}[{row}] is still busy with a call that took longer than env_step_timeout.")
            self._outbox.put((row, self._serial, error))
        else:
            self._inboxes[row].put(_Work(self._serial, td, resets, kwargs))

    def collect(self, timeout_s: float) -> list[Came]:
        """See :class:`Slots`."""
        found: list[Came] = []
        until = time.monotonic() + timeout_s
        while not found:
            due = min([until, *(since + self._limit_s for _, since in self._since.values())])
            found += self._taken(max(0.0, due - time.monotonic()))
            found += self._overdue()
            if time.monotonic() >= until:
                break
        while not self._outbox.empty():
            found += self._taken(0.0)
        return found

    def _taken(self, timeout_s: float) -> list[Came]:
        try:
            row, serial, result = self._outbox.get(timeout=timeout_s) if timeout_s else self._outbox.get_nowait()
        except queue.Empty:
            return []
        if self._since.get(row, (None,))[0] != serial:
            self._lost.discard(row)  # it came back after all; nobody waits for this any more
            return []
        del self._since[row]
        if not isinstance(result, Exception):
            return [Came(row, result, None)]
        named = f"{self._name}[{row}]"
        error = renamed(named, result) if isinstance(result, RollwrightError) else EnvError(f"{named}: {result}")
        error.__cause__ = result
        return [Came(row, None, error)]

    def _overdue(self) -> list[Came]:
        now = time.monotonic()
        late = [row for row, (_, since) in self._since.items() if now - since > self._limit_s]
        for row in late:
            del self._since[row]
            self._lost.add(row)
        return [
            Came(row, None, EnvError(f"{self._name}[{row}] did not come back within {self._limit_s:g} s."))
            for row in late
        ]

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

    def _leave(self) -> None:
        for inbox in self._inboxes:
            inbox.put(None)

    def close(self) -> tuple[list[Exception], list[str]]:
        """See :class:`Slots`."""
        self._leave()
        until = time.monotonic() + CLOSE_S
        errors: list[Exception] = []
        forced: list[str] = []
        for row, (thread, env) in enumerate(zip(self._threads, self.facts, strict=True)):
            thread.join(0.0 if row in self._lost else max(0.0, until - time.monotonic()))
            if thread.is_alive():
                forced.append(f"the thread of environment {row} is left behind, in a call that does not come back")
                continue
            try:
                env.close(raise_if_closed=False)
            except Exception as error:  # the others are to be closed all the same
                errors.append(error)
        return errors, forced


_at_exit: weakref.WeakSet[ThreadSlots] = weakref.WeakSet()


@atexit.register
def _end_all() -> None:
    """End all threads before the interpreter does: one that is stopped inside torch would crash it."""
    until = time.monotonic() + _EXIT_S
    for slots in list(_at_exit):
        slots._leave()
    for slots in list(_at_exit):
        for thread in slots._threads:
            thread.join(max(0.0, until - time.monotonic()))
