"""Where the environments of a pool run: each in a thread, or each in a process."""

from __future__ import annotations

import atexit
import contextlib
import pickle
import queue
import threading
import time
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from tensordict import TensorDictBase

from rollwright._processes.channel import ByValue
from rollwright.envs import _parallel_calls as calls
from rollwright.envs._env_messages import Do, Form, ResetRows, StepRows
from rollwright.envs._env_processes import CLOSE_S, PATIENCE_S, START_S, EnvProcesses
from rollwright.envs._parallel_rows import Outcomes
from rollwright.envs._td_rows import Nests, dense_leaves
from rollwright.envs._workers import Factory, call_each, made, placed, renamed
from rollwright.envs.base import EnvBase
from rollwright.errors import EnvError, RollwrightError

__all__ = ["Came", "ProcessSlots", "Slots", "ThreadSlots"]

_NAP_S = 0.2
_EXIT_S = 1.0


class Came(NamedTuple):
    """What came of a step or a reset.

    Attributes:
        row: whose.
        outcome: as of ``_advance`` or ``_begin``; None if it failed.
        error: why.
    """

    row: int
    outcome: TensorDictBase | None
    error: Exception | None


class Slots(ABC):
    """One place for each environment; at most one call is under way in each.

    Attributes:
        facts: what is known of each environment: batch size, device, specs.
    """

    facts: Sequence[Any]

    @abstractmethod
    def post(self, row: int, td: TensorDictBase | None, *, resets: bool, kwargs: dict[str, Any]) -> None:
        """Begin a step (from ``td``), or a reset."""

    @abstractmethod
    def collect(self, timeout_s: float) -> list[Came]:
        """Wait until at least one call has ended, or the time is over; all that have."""

    @abstractmethod
    def set_seed(self, row: int, seed: int | None, static_seed: bool) -> int | None:
        """Seed an environment, where none is busy."""

    @abstractmethod
    def move(self, device: torch.device | str | int) -> None:
        """Move all environments, where none is busy; :attr:`facts` change."""

    @abstractmethod
    def look_up(self, name: str) -> Any:
        """An attribute of each, as a list; or a function that calls a method of each."""

    @abstractmethod
    def close(self) -> tuple[list[Exception], list[str]]:
        """Close all, within seconds: what they raised, and what had to be left behind or killed."""


# Threads --------------------------------------------------------------------------------------------


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
            self._leave()
            for env in envs.values():
                with contextlib.suppress(Exception):  # an earlier error tells more
                    env.close(raise_if_closed=False)
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
            wait_s = min(until, *(since + self._limit_s for _, since in self._since.values())) - time.monotonic()
            found += self._taken(max(0.0, wait_s))
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


# Processes ------------------------------------------------------------------------------------------


class ProcessSlots(Slots):
    """Each environment in a process of its own, with entries of one shape and dtype in shared memory.

    Args:
        makers: one for each row.
        name: of the pool, for messages.
        timeout_s: the longest that a step or a reset may take, then its process is killed; None: an hour.
        start_method: see :class:`~rollwright._processes.child.Child`.

    Raises:
        EnvError, TypeError: a factory failed.
    """

    def __init__(self, makers: Sequence[Factory], name: str, timeout_s: float | None, start_method: str | None) -> None:
        self._name, self._limit_s = name, PATIENCE_S if timeout_s is None else timeout_s
        self._processes = EnvProcesses(
            makers, len(makers), describe=calls.describe, start_method=start_method, timeout_s=timeout_s
        )
        self.facts: list[calls.EnvFacts] = self._processes.described
        self._outcomes: Outcomes
        self._under_way: dict[int, tuple[int, str, float]] = {}  # by row: ticket, call, since when

    def lay_out(self, entries: Any, form: Form, batch_size: torch.Size) -> None:
        """Give outcomes their places; once, before the first call."""
        self._outcomes = Outcomes(self._processes.lay_outcomes(entries), form, batch_size)

    def post(self, row: int, td: TensorDictBase | None, *, resets: bool, kwargs: dict[str, Any]) -> None:
        """See :class:`Slots`."""
        layout, rest = None, None
        nests: Nests = {}
        if td is not None:
            leaves, nests, complete = dense_leaves(td)
            count = len(self.facts)
            signature = tuple((key, (count, *value.shape), value.dtype) for key, value in leaves.items())
            layout, shared = self._processes.inputs(signature)
            for key, value in leaves.items():
                shared.tensors[key][row] = value.detach()
            if not complete:
                rest = ByValue({row: td.detach().exclude(*leaves)})
        packed = ByValue(kwargs) if kwargs else None

        def command(ticket: int, some: Any, mine: Any) -> StepRows | ResetRows:
            if resets:
                return ResetRows(ticket, some, layout, nests, rest, packed)
            return StepRows(ticket, some, layout or 0, nests, rest)

        ticket = self._processes.post(command, [row], layout)
        self._under_way[row] = ticket, "reset" if resets else "step", time.monotonic()

    def collect(self, timeout_s: float) -> list[Came]:
        """See :class:`Slots`."""
        until = time.monotonic() + timeout_s
        while True:
            found = [self._came(row) for row in list(self._under_way) if self._is_over(row)]
            left = until - time.monotonic()
            if found or left <= 0:
                return found
            due = min((since + self._limit_s for _, _, since in self._under_way.values()), default=until)
            self._processes.pump(max(0.0, min(left, due - time.monotonic(), _NAP_S)))

    def _is_over(self, row: int) -> bool:
        ticket, _, since = self._under_way[row]
        return not self._processes._due[ticket] or time.monotonic() - since > self._limit_s

    def _came(self, row: int) -> Came:
        ticket, call, since = self._under_way.pop(row)
        gathered = self._processes.gather(ticket, 0.0)  # it has answered; or it is late, and gets killed
        for raised in gathered.raised:
            remote = raised.failure.error(f"{self._name}[{row}]")
            known: Exception = raised.kind(raised.text)
            named = f"{self._name}[{row}]"
            error = renamed(named, known) if isinstance(known, RollwrightError) else EnvError(f"{named}: {raised.text}")
            error.__cause__ = remote
            return Came(row, None, error)
        for lost in gathered.lost:
            late = time.monotonic() - since > self._limit_s
            how = f"did not come back within {self._limit_s:g} s and was killed" if late else lost.how
            error = EnvError(f"{self._name}[{row}]: its process {how}, in {call}. Make the pool anew to go on with it.")
            error.__cause__ = None if lost.failure is None else lost.failure.error(f"{self._name}[{row}]")
            return Came(row, None, error)
        rest = self._outcomes.note(call, gathered.replies.values())
        return Came(row, self._outcomes.row(call, row, rest), None)

    def _ask(self, function: Callable[..., Any], *args: Any, rows: list[int] | None = None) -> list[Any]:
        packed = ByValue(args) if args else None
        ticket = self._processes.post(lambda ticket, some, _: Do(ticket, some, function, packed), rows)
        gathered = self._processes.gather(ticket)
        for raised in gathered.raised:
            remote = raised.failure.error(f"{self._name}[{raised.row}]")
            if raised.kind is AttributeError:
                raise AttributeError(raised.text) from remote
            raise remote
        for lost in gathered.lost:
            raise EnvError(f"{self._name}[{lost.row}]: its process {lost.how}. Make the pool anew.")
        values: dict[int, Any] = {}
        for reply in gathered.replies.values():
            values.update(pickle.loads(reply.values or b""))
        return [values[row] for row in sorted(values)]

    def set_seed(self, row: int, seed: int | None, static_seed: bool) -> int | None:
        """See :class:`Slots`."""
        last: int | None = self._ask(calls.set_seed, seed, static_seed, rows=[row])[0]
        return last

    def move(self, device: torch.device | str | int) -> None:
        """See :class:`Slots`."""
        self.facts = self._ask(calls.move, device)

    def look_up(self, name: str) -> Any:
        """See :class:`Slots`."""
        values = self._ask(calls.look_up, name)
        if not any(isinstance(value, calls.Sign) for value in values):
            return values
        return lambda *args, **kwargs: self._ask(calls.call, name, args, kwargs)

    def pids(self) -> list[int | None]:
        """Of the processes; None for one that has ended."""
        return self._processes.pids()

    def close(self) -> tuple[list[Exception], list[str]]:
        """See :class:`Slots`."""
        raised, forced = self._processes.end()
        return [one.failure.error(f"{self._name}[{one.row}]") for one in raised], forced
