"""ProcessSlots: each environment of a pool in a process."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from tensordict import TensorDictBase

from rollwright._interrupts import uninterrupted
from rollwright._processes.channel import ByValue
from rollwright.envs.base import EnvBase
from rollwright.envs.batched.async_slots import Came, Slots
from rollwright.envs.batched.hosting import calls
from rollwright.envs.batched.hosting.messages import ResetRows, StepRows
from rollwright.envs.batched.hosting.outcomes import Outcomes, lay_out_outcomes
from rollwright.envs.batched.hosting.processes import DEFAULT_TIMEOUT_S, SHORT_CLOSE_S, EnvProcesses
from rollwright.envs.batched.hosting.td_rows import Nests, dense_leaves
from rollwright.envs.each import renamed
from rollwright.envs.factories import Factory
from rollwright.errors import EnvError, RollwrightError

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
            makers, len(makers), describe=calls.describe, start_method=start_method, timeout_s=timeout_s
        )
        self.facts: list[calls.EnvFacts] = self._processes.described
        self._outcomes: Outcomes
        self._in_progress: dict[int, tuple[int, str, float]] = {}  # by row: ticket, call, since when

    def lay_out(self, env: EnvBase) -> None:
        """Give the outcomes of a batch their places; once, before the first call."""
        self._outcomes = lay_out_outcomes(env, self._processes)

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

        with uninterrupted:
            ticket = self._processes.post(command, [row], layout, keeps=True)
            self._processes.flush()
            self._in_progress[row] = ticket, "reset" if resets else "step", time.monotonic()

    def wait(self, timeout_s: float) -> None:
        """See :class:`Slots`."""
        until = time.monotonic() + timeout_s
        self._processes.run_once(0.0)
        while not any(map(self._is_over, self._in_progress)) and (left := until - time.monotonic()) > 0:
            due = min((since + self._limit_s for _, _, since in self._in_progress.values()), default=until)
            self._processes.run_once(max(0.0, min(left, due - time.monotonic(), _NAP_S)))

    def collect(self) -> Iterator[Came]:
        """See :class:`Slots`."""
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
        """See :class:`Slots`."""
        last: int | None = self._ask(calls.set_seed, seed, static_seed, rows=[row])[0]
        return last

    def move(self, device: torch.device | str | int) -> None:
        """See :class:`Slots`."""
        self.facts[:] = self._ask(calls.move, device)

    def call_in_hosts(self, function: Callable[..., object]) -> None:
        """See :class:`Slots`."""
        self._ask(function)

    def look_up(self, name: str) -> Any:
        """See :class:`Slots`."""
        values = self._ask(calls.look_up, name)
        if not any(isinstance(value, calls.Sign) for value in values):
            return values
        return lambda *args, **kwargs: self._ask(calls.call, name, args, kwargs)

    def call(self, row: int, name: str, args: tuple[Any, ...]) -> Any:
        """See :class:`Slots`."""
        return self._ask(calls.call, name, args, {}, rows=[row])[0]

    def pids(self) -> list[int | None]:
        """Of the processes; None for one that has ended."""
        return self._processes.pids()

    def close(self, *, hurries: bool = False) -> tuple[list[Exception], list[str]]:
        """See :class:`Slots`."""
        raised, forced = self._processes.end(SHORT_CLOSE_S if hurries else None)
        return [one.failure.error(f"{self._name}[{one.row}]") for one in raised], forced
