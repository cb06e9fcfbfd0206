"""What holds the environments of a pool: threads or processes."""

from __future__ import annotations

import contextlib
import queue
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from tensordict import TensorDictBase

from rollwright._interrupts import uninterrupted
from rollwright._processes.channel import ByValue
from rollwright._processes.threads import DaemonThread
from rollwright.envs.base import EnvBase
from rollwright.envs.batched import host
from rollwright.envs.batched.messages import Nests, ResetRows, StepRows, dense_leaves
from rollwright.envs.batched.processes import (
    CLOSE_S,
    DEFAULT_TIMEOUT_S,
    SHORT_CLOSE_S,
    START_S,
    EnvProcesses,
    Outcomes,
    lay_out_outcomes,
)
from rollwright.envs.factories import Factory, call_each, check_apart, made, placed, renamed
from rollwright.errors import EnvError, RollwrightError


class Came(NamedTuple):
    """The result of a step or a reset.

    Attributes:
        row: whose.
        outcome: as of ``step_outcome`` or ``reset_outcome``; None if it failed.
        error: why.
    """

    row: int
    outcome: TensorDictBase | None
    error: Exception | None


class Slots(ABC):
    """One place for each environment; at most one call is in progress in each.

    Attributes:
        facts: what is known of each environment: batch size, device, specs.
    """

    facts: Sequence[Any]

    @abstractmethod
    def post(self, row: int, td: TensorDictBase | None, *, resets: bool, kwargs: dict[str, Any]) -> None:
        """Begin a step (from ``td``), or a reset. If it raises, nothing has begun."""

    @abstractmethod
    def wait(self, timeout_s: float) -> None:
        """Wait until at least one call has ended, or the time is over. An interrupt here loses nothing."""

    @abstractmethod
    def collect(self) -> Iterator[Came]:
        """All that has ended so far. To be used up at once, in a block that nothing interrupts."""

    @abstractmethod
    def set_seed(self, row: int, seed: int | None, static_seed: bool) -> int | None:
        """Seed an environment, where none is busy."""

    @abstractmethod
    def move(self, device: torch.device | str | int) -> None:
        """Move all environments, where none is busy; :attr:`facts` change."""

    def call_in_hosts(self, function: Callable[..., object]) -> None:  # noqa: B027  (threads are in this process)
        """Call a function in each process that hosts environments, with each :class:`Hosted` there."""

    @abstractmethod
    def look_up(self, name: str) -> Any:
        """An attribute of each, as a list; or a function that calls a method of each."""

    @abstractmethod
    def call(self, row: int, name: str, args: tuple[Any, ...]) -> Any:
        """What a method of one environment returns, which is not busy."""

    @abstractmethod
    def close(self, *, hurries: bool = False) -> tuple[list[Exception], list[str]]:
        """Close all, within seconds: what they raised, and what had to be left behind or killed.

        Args:
            hurries: an earlier call was interrupted: end what is left of them, and wait for no more than a second.
        """


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
        """Ask the thread to end; returns whether it has, within ``timeout_s``."""
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
        """Begin a step (from ``td``), or a reset. If it raises, nothing has begun."""
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
        """Wait until at least one call has ended, or the time is over. An interrupt here loses nothing."""
        due = min((since + self._limit_s for _, since in self._since.values()), default=float("inf"))
        self._listen(min(timeout_s, max(0.0, due - time.monotonic())))

    def collect(self) -> Iterator[Came]:
        """All that has ended so far. To be used up at once, in a block that nothing interrupts."""
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
        """Seed an environment, where none is busy."""
        return self.facts[row].set_seed(seed, static_seed)

    def move(self, device: torch.device | str | int) -> None:
        """Move all environments, where none is busy; :attr:`facts` change."""
        for env in self.facts:
            env.to(device)

    def look_up(self, name: str) -> Any:
        """An attribute of each, as a list; or a function that calls a method of each."""
        values = [getattr(env, name) for env in self.facts]
        return call_each(values) if all(callable(value) for value in values) else values

    def call(self, row: int, name: str, args: tuple[Any, ...]) -> Any:
        """What a method of one environment returns, which is not busy."""
        return getattr(self.facts[row], name)(*args)

    def stop_threads(self) -> None:
        """Let each thread end when its current call returns; does not wait."""
        for place in self._places:
            place.stop(0.0)

    def close(self, *, hurries: bool = False) -> tuple[list[Exception], list[str]]:
        """Close all, within seconds: what they raised, and what had to be left behind or killed."""
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


_NAP_S = 0.2


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
        self._name, self._limit_s = name, DEFAULT_TIMEOUT_S if timeout_s is None else timeout_s
        self._processes = EnvProcesses(
            makers, len(makers), describe=host.describe, start_method=start_method, timeout_s=timeout_s
        )
        self.facts: list[host.EnvFacts] = self._processes.described
        self._outcomes: Outcomes
        self._in_progress: dict[int, tuple[int, str, float]] = {}  # by row: ticket, call, since when

    def lay_out(self, env: EnvBase) -> None:
        """Give the outcomes of a batch their places; once, before the first call."""
        self._outcomes = lay_out_outcomes(env, self._processes)

    def post(self, row: int, td: TensorDictBase | None, *, resets: bool, kwargs: dict[str, Any]) -> None:
        """Begin a step (from ``td``), or a reset. If it raises, nothing has begun."""
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

        with uninterrupted:
            ticket = self._processes.post(command, [row], layout, keeps=True)
            self._processes.flush()
            self._in_progress[row] = ticket, "reset" if resets else "step", time.monotonic()

    def wait(self, timeout_s: float) -> None:
        """Wait until at least one call has ended, or the time is over. An interrupt here loses nothing."""
        until = time.monotonic() + timeout_s
        self._processes.run_once(0.0)
        while not any(map(self._is_over, self._in_progress)) and (left := until - time.monotonic()) > 0:
            due = min((since + self._limit_s for _, _, since in self._in_progress.values()), default=until)
            self._processes.run_once(max(0.0, min(left, due - time.monotonic(), _NAP_S)))

    def collect(self) -> Iterator[Came]:
        """All that has ended so far. To be used up at once, in a block that nothing interrupts."""
        for row in [row for row in self._in_progress if self._is_over(row)]:
            yield self._came(row)

    def _is_over(self, row: int) -> bool:
        ticket, _, since = self._in_progress[row]
        return self._processes.is_answered(ticket) or time.monotonic() - since > self._limit_s

    def _came(self, row: int) -> Came:
        ticket, call, since = self._in_progress.pop(row)
        self._processes.kill_late(ticket)
        gathered = self._processes.gather(ticket)
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
        rest = self._outcomes.beside(gathered.replies.values())
        return Came(row, self._outcomes.row(call, row, rest), None)

    def _ask(self, function: Callable[..., Any], *args: Any, rows: list[int] | None = None) -> list[Any]:
        _, gathered = self._processes.call(function, args, rows)
        for raised in gathered.raised:
            remote = raised.failure.error(f"{self._name}[{raised.row}]")
            if raised.kind is AttributeError:
                raise AttributeError(raised.text) from remote
            raise remote
        for lost in gathered.lost:
            raise EnvError(f"{self._name}[{lost.row}]: its process {lost.how}. Make the pool anew.")
        return list(gathered.values().values())

    def set_seed(self, row: int, seed: int | None, static_seed: bool) -> int | None:
        """Seed an environment, where none is busy."""
        last: int | None = self._ask(host.set_seed, seed, static_seed, rows=[row])[0]
        return last

    def move(self, device: torch.device | str | int) -> None:
        """Move all environments, where none is busy; :attr:`facts` change."""
        self.facts[:] = self._ask(host.move, device)

    def call_in_hosts(self, function: Callable[..., object]) -> None:
        """See :class:`Slots`."""
        self._ask(function)

    def look_up(self, name: str) -> Any:
        """An attribute of each, as a list; or a function that calls a method of each."""
        values = self._ask(host.look_up, name)
        if not any(isinstance(value, host.Sign) for value in values):
            return values
        return lambda *args, **kwargs: self._ask(host.call, name, args, kwargs)

    def call(self, row: int, name: str, args: tuple[Any, ...]) -> Any:
        """What a method of one environment returns, which is not busy."""
        return self._ask(host.call, name, args, {}, rows=[row])[0]

    def pids(self) -> list[int | None]:
        """Of the processes; None for one that has ended."""
        return self._processes.pids()

    def close(self, *, hurries: bool = False) -> tuple[list[Exception], list[str]]:
        """Close all, within seconds: what they raised, and what had to be left behind or killed."""
        raised, forced = self._processes.end(SHORT_CLOSE_S if hurries else None)
        return [one.failure.error(f"{self._name}[{one.row}]") for one in raised], forced
