"""AsyncHalves: sends calls to environments, and receives their results, separately."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from typing import Any, NamedTuple, cast

import torch
from tensordict import LazyStackedTensorDict, TensorDictBase

from rollwright._interrupts import uninterrupted
from rollwright._keys import leaf_keys
from rollwright.data.layout import deciding_groups
from rollwright.envs._results import LastSeen, merge_reset, reset_masks, with_kept
from rollwright.envs.batched.async_slots import Came, Slots
from rollwright.envs.batched.base import BatchedEnv
from rollwright.envs.batched.processes import DEFAULT_TIMEOUT_S
from rollwright.envs.factories import placed
from rollwright.errors import EnvError

INDEX = "env_index"
STEP, RESET, BOTH = "step", "reset", "step_and_maybe_reset"


class _Task(NamedTuple):
    """The current call of an environment.

    Attributes:
        call: ``"step"``, ``"reset"`` or ``"step_and_maybe_reset"``.
        root: what it was sent; None for a reset of all that it is.
        stepped: the result of the step, where a reset follows it.
    """

    call: str
    root: TensorDictBase | None
    stepped: TensorDictBase | None = None


class AsyncHalves(BatchedEnv):
    """The part of :class:`~rollwright.envs.AsyncEnvPool` that lets each environment go by itself.

    Args:
        slots: where the environments are.
        device: where data is put; None: where the environments have theirs.
        stack: how results are stacked.
        min_get: how many results a ``recv`` waits for, by default.
        env_step_timeout: seconds that a step or a reset may take; None: an hour.
    """

    _slots: Slots

    def __init__(
        self,
        slots: Slots,
        device: torch.device | str | int | None,
        *,
        stack: str,
        min_get: int,
        env_step_timeout: float | None,
    ) -> None:
        super().__init__(slots.facts, device)
        self.stack, self.min_get = stack, min_get
        self._limit_s = DEFAULT_TIMEOUT_S if env_step_timeout is None else env_step_timeout
        self._tasks: dict[int, _Task] = {}
        self._strays: set[int] = set()  # busy with a call whose caller was interrupted: its result is dropped
        self._ready: dict[str, deque[tuple[int, Any]]] = {call: deque() for call in (STEP, RESET, BOTH)}

    @property
    def busy(self) -> list[int]:
        """The environments that have been sent something which nobody has received yet."""
        waiting = [row for ready in self._ready.values() for row, _ in ready]
        return sorted([*self._tasks, *waiting])

    # Sending ----------------------------------------------------------------------------------

    def async_step_send(self, tensordict: TensorDictBase, env_index: int | Sequence[int] | None = None) -> None:
        """Let some environments take a step.

        Args:
            tensordict: with actions, ``[n, *batch]``; or ``[*batch]`` for one environment.
            env_index: whose rows these are; None: those of ``tensordict["env_index"]``, or all in order.

        Raises:
            RuntimeError: one of them is busy.
            ValueError: it is unclear, or unknown, which environments are meant.
        """
        self._send(STEP, tensordict, env_index)

    def async_step_and_maybe_reset_send(
        self, tensordict: TensorDictBase, env_index: int | Sequence[int] | None = None
    ) -> None:
        """Let some environments take a step, and reset those whose trajectory ended; see :meth:`async_step_send`."""
        self._send(BOTH, tensordict, env_index)

    def async_reset_send(
        self, tensordict: TensorDictBase | None = None, env_index: int | Sequence[int] | None = None, **kwargs: Any
    ) -> None:
        """Let some environments be reset.

        Args:
            tensordict: data for the reset, or None.
            env_index: which ones; None: those of ``tensordict["env_index"]``, or all.
            **kwargs: go to the environment's reset.

        Raises:
            RuntimeError, ValueError: as for :meth:`async_step_send`.
        """
        if self.is_closed and tensordict is None and env_index is None:
            self._reopen()
        self._send(RESET, tensordict, env_index, **kwargs)

    def _send(self, call: str, td: TensorDictBase | None, env_index: Any, **kwargs: Any) -> None:
        self._check_open(f"async_{call}_send")
        self._settle()
        rows, tds = self._rows_of(td, env_index, call)
        if busy := sorted(set(rows) & set(self.busy)):
            raise RuntimeError(
                f"async_{call}_send: environments {busy} have not been received from since they were sent something. "
                f"Call async_*_recv() first; busy are {self.busy}."
            )
        self.forget_last_seen()
        with uninterrupted:  # either all are sent something, or none
            for row, root in zip(rows, tds, strict=True):
                self._begin_task(row, _Task(call, root), resets=call == RESET, kwargs=kwargs)

    def _begin_task(self, row: int, task: _Task, *, resets: bool, kwargs: dict[str, Any]) -> None:
        given = task.root
        if given is not None and given.get(INDEX, None) is not None:
            given = given.exclude(INDEX)
        self._slots.post(row, given, resets=resets, kwargs=kwargs)
        self._tasks[row] = task

    def _rows_of(
        self, td: TensorDictBase | None, env_index: Any, call: str
    ) -> tuple[list[int], list[TensorDictBase | None]]:
        """Which environments are meant, and what each is sent."""
        if td is not None and not isinstance(td, TensorDictBase):
            raise TypeError(f"tensordict: expected a TensorDict, got {type(td).__name__}.")
        inner = self.batch_size[1:]
        single = td is not None and td.batch_size == inner
        if td is not None and not single and td.batch_size[1:] != inner:
            raise ValueError(
                f"async_{call}_send: expected data of batch size {['n', *inner]}, or {list(inner)} for one "
                f"environment, got {list(td.batch_size)}."
            )
        tds: list[TensorDictBase | None] | None = None
        if td is not None:
            tds = [td] if single else list(td.unbind(0))
        if env_index is None and td is not None and td.get(INDEX, None) is not None:
            env_index = [first_index(row[INDEX]) for row in cast(list[TensorDictBase], tds)]
        if env_index is None:
            if tds is not None and (single or len(tds) != self.num_workers):
                raise ValueError(
                    f"async_{call}_send: got {len(tds)} of {self.num_workers} environments, and not which. Pass "
                    "env_index=, or set tensordict['env_index']."
                )
            env_index = range(self.num_workers)
        rows = [int(row) for row in (env_index if _is_list(env_index) else [env_index])]
        if len(set(rows)) != len(rows) or not all(0 <= row < self.num_workers for row in rows):
            raise ValueError(f"env_index: expected different numbers from 0 to {self.num_workers - 1}, got {rows}.")
        if tds is not None and len(tds) != len(rows):
            raise ValueError(f"env_index: names {len(rows)} environments, and there is data of {len(tds)}.")
        return rows, [None] * len(rows) if tds is None else tds

    # Receiving --------------------------------------------------------------------------------

    def async_step_recv(
        self,
        min_get: int | None = None,
        env_index: int | Sequence[int] | None = None,
        *,
        max_get: int | None = None,
        timeout: float | None = None,
    ) -> TensorDictBase:
        """What steps have come to.

        Args:
            min_get: how many to wait for; None: :attr:`min_get`.
            env_index: wait for exactly these environments instead.
            max_get: the most to return; None: all that are ready.
            timeout: seconds to wait; None: as long as ``env_step_timeout`` lets steps take.

        Returns:
            What was sent with ``"next"`` set, and ``"env_index"``, ``[n, *batch]``, in the order of completion (that of
            ``env_index`` where that is given).

        Raises:
            EnvError: an environment has failed; other results stay.
            TimeoutError: too few are ready in time; they stay.
            RuntimeError: more are waited for than are in progress.
            ValueError: fewer than one are waited for, or more than ``max_get``.
        """
        return self._stacked(self._recv(STEP, min_get, env_index, max_get, timeout))

    def async_step_and_maybe_reset_recv(
        self,
        min_get: int | None = None,
        env_index: int | Sequence[int] | None = None,
        *,
        max_get: int | None = None,
        timeout: float | None = None,
    ) -> tuple[TensorDictBase, TensorDictBase]:
        """What steps have come to, and what the next ones are to be taken from; see :meth:`async_step_recv`.

        Returns:
            ``[n, *batch]`` each: the steps, with the true last observation; and the roots of the next ones, where
            environments whose trajectories ended are reset.
        """
        found = self._recv(BOTH, min_get, env_index, max_get, timeout)
        stepped = [(row, pair[0]) for row, pair in found]
        return self._stacked(stepped), self._stacked([(row, pair[1]) for row, pair in found])

    def async_reset_recv(
        self,
        min_get: int | None = None,
        env_index: int | Sequence[int] | None = None,
        *,
        max_get: int | None = None,
        timeout: float | None = None,
    ) -> TensorDictBase:
        """First data of environments that were reset; see :meth:`async_step_recv`."""
        return self._stacked(self._recv(RESET, min_get, env_index, max_get, timeout))

    def _recv(
        self, call: str, min_get: int | None, env_index: Any, max_get: int | None, timeout: float | None
    ) -> list[tuple[int, Any]]:
        self._check_open(f"async_{call}_recv")
        ready = self._ready[call]
        pending = [row for row, task in self._tasks.items() if task.call == call]
        known = [*pending, *(row for row, _ in ready)]
        if env_index is None:
            wanted, count = None, self.min_get if min_get is None else min_get
        else:
            wanted = [int(row) for row in (env_index if _is_list(env_index) else [env_index])]
            count = len(wanted)
        if count < 1 or (max_get is not None and max_get < count):
            raise ValueError(
                f"async_{call}_recv: expected to wait for at least 1 result, and for no more than max_get, got "
                f"min_get={count}, max_get={max_get}."
            )
        if len(known) < count or not set(wanted or ()) <= set(known):
            raise RuntimeError(
                f"async_{call}_recv: expected to wait for 1 to {len(known)} results, as many as were sent "
                f"(environments {sorted(known)}), got min_get={count}, env_index={wanted}."
            )
        until = None if timeout is None else time.monotonic() + timeout
        self._pump(0.0)
        while (have := self._count(ready, wanted)) < count:
            left = self._limit_s if until is None else until - time.monotonic()
            if left <= 0:
                raise TimeoutError(
                    f"async_{call}_recv: waited {timeout:g} s for {count} results, and {have} are ready; they stay. "
                    f"Under way are environments {sorted(self._tasks)}."
                )
            self._pump(left)
        return self._taken(call, wanted, max_get)

    def _count(self, ready: deque[tuple[int, Any]], wanted: list[int] | None) -> int:
        """Results that are ready; those of environments that have failed count, too: their errors are to be raised."""
        return sum(wanted is None or row in wanted for row, _ in ready)

    def _taken(self, call: str, wanted: list[int] | None, max_get: int | None) -> list[tuple[int, Any]]:
        ready = self._ready[call]
        chosen = [entry for entry in ready if wanted is None or entry[0] in wanted]
        chosen = chosen if wanted is None else sorted(chosen, key=lambda entry: wanted.index(entry[0]))
        chosen = chosen if wanted is not None or max_get is None else chosen[:max_get]
        failed = next((entry for entry in chosen if isinstance(entry[1], Exception)), None)
        gone = [failed] if failed is not None else chosen
        rows = {row for row, _ in gone}
        self._ready[call] = deque(entry for entry in ready if entry[0] not in rows)
        if failed is not None:
            raise failed[1]
        return chosen

    def _pump(self, timeout_s: float) -> None:
        """Take in what environments have done."""
        self._slots.wait(timeout_s)
        with uninterrupted:
            for came in self._slots.collect():
                if came.row in self._strays:
                    self._strays.discard(came.row)
                else:
                    self._advance_task(self._tasks.pop(came.row), came)

    def _settle(self) -> None:
        """Wait for calls whose caller was interrupted; environments that do not return fail in time."""
        while self._strays:
            self._pump(self._limit_s)

    def _advance_task(self, task: _Task, came: Came) -> None:
        row, fresh = came.row, came.outcome
        if fresh is None:
            self._ready[task.call].append((row, came.error))
            return
        fresh = placed(fresh, self.device)
        root = task.root if task.root is None else placed(task.root, self.device)
        try:
            if task.call == STEP:
                result: Any = _stepped(root, fresh)
            elif task.call == RESET:
                result = self._begun(root, fresh)
            elif task.stepped is None:
                stepped = _stepped(root, fresh)
                after = self._step_mdp(stepped)
                if self._mark(after):
                    self._begin_task(row, _Task(BOTH, after, stepped), resets=True, kwargs={})
                    return
                result = stepped, after
            else:
                result = task.stepped, self._begun(root, fresh)
        except EnvError as error:
            result = error
        self._ready[task.call].append((row, result))

    def _mark(self, root: TensorDictBase) -> bool:
        """Mark what has ended; returns whether anything has."""
        flags = [(group.reset, root.get(group.done)) for group in deciding_groups(self.done_groups)]
        if not any(bool(flag.any()) for _, flag in flags):
            return False
        for key, flag in flags:
            root.set(key, flag.clone())
        return True

    def _begun(self, root: TensorDictBase | None, fresh: TensorDictBase) -> TensorDictBase:
        if root is None:
            return fresh
        masks = reset_masks(self, root)
        return merge_reset(self, with_kept(self, root, masks, LastSeen()), fresh, masks)

    def _stacked(self, found: list[tuple[int, TensorDictBase]]) -> TensorDictBase:
        tds = []
        for row, td in found:
            td = td.copy()
            td.set(INDEX, torch.full(td.batch_size, row, dtype=torch.int64, device=self.device))
            tds.append(td)
        if self.stack == "lazy" or self._ragged:
            return cast(TensorDictBase, LazyStackedTensorDict.lazy_stack(tds, 0))
        if self.stack == "maybe_dense":
            return cast(TensorDictBase, LazyStackedTensorDict.maybe_dense_stack(tds, 0))
        return cast(TensorDictBase, torch.stack(tds, 0))  # type: ignore[arg-type]

    # What is allowed when --------------------------------------------------------------------------

    def _check_idle(self, what: str) -> None:
        self._settle()
        if self._tasks or any(self._ready.values()):
            calls = {task.call for task in self._tasks.values()} | {call for call in self._ready if self._ready[call]}
            halves = " and ".join(f"async_{call}_recv()" for call in sorted(calls))
            raise RuntimeError(
                f"{what}: environments {self.busy} have been sent something that nobody has received. Receive it "
                f"first, by {halves}."
            )

    def _check_open(self, what: str) -> None:
        if self.is_closed:
            raise EnvError(f"{self}: {what} after close(). Make a new pool.")

    def _forget(self) -> None:
        """Drop what is in progress, and what nobody has received."""
        self._tasks.clear()
        self._strays.clear()
        for ready in self._ready.values():
            ready.clear()


def _stepped(root: TensorDictBase | None, outcome: TensorDictBase) -> TensorDictBase:
    """What :meth:`EnvBase.step` returns for a row."""
    done = cast(TensorDictBase, root).copy()
    preset = done.get("next", None)
    if preset is not None:
        outcome.update(preset.exclude(*leaf_keys(outcome)))
    return done.set("next", outcome)


def _is_list(index: Any) -> bool:
    return isinstance(index, Sequence | torch.Tensor | range) and not (
        isinstance(index, torch.Tensor) and not index.ndim
    )


def first_index(index: Any) -> int:
    """The environment's index, from an entry of its row: a tensor, or an object."""
    return int(index.flatten()[0]) if isinstance(index, torch.Tensor) else int(index)
