"""AsyncEnvPool: environments that are sent actions, and received from, each in its own time."""

from __future__ import annotations

import time
import warnings
import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Literal, NamedTuple, cast

import torch
from tensordict import LazyStackedTensorDict, TensorDictBase

from rollwright._keys import leaf_keys, without
from rollwright._processes.starting import check_start_method
from rollwright.data.layout import deciding_groups
from rollwright.envs._async_slots import Came, ProcessSlots, Slots, ThreadSlots
from rollwright.envs._batched import BatchedEnv
from rollwright.envs._env_messages import Form
from rollwright.envs._env_processes import PATIENCE_S
from rollwright.envs._parallel_rows import shareable
from rollwright.envs._partial_reset import merge_reset, reset_masks
from rollwright.envs._workers import placed
from rollwright.envs.base import EnvBase
from rollwright.errors import EnvError

__all__ = ["AsyncEnvPool"]

INDEX = "env_index"
STEP, RESET, BOTH = "step", "reset", "step_and_maybe_reset"
_BACKENDS = ("threading", "multiprocessing")
_STACKS = ("dense", "maybe_dense", "lazy")

Maker = EnvBase | Callable[..., EnvBase]


class _Task(NamedTuple):
    """What an environment is busy with.

    Attributes:
        call: ``"step"``, ``"reset"`` or ``"step_and_maybe_reset"``.
        root: what it was sent; None for a reset of all that it is.
        stepped: the result of the step, where a reset follows it.
    """

    call: str
    root: TensorDictBase | None
    stepped: TensorDictBase | None = None


class AsyncEnvPool(BatchedEnv):
    """A batch of environments that step and reset independently: send to some, receive what is ready.

    Each call has two halves: ``async_step_send`` and ``async_step_recv``, ``async_reset_send`` and
    ``async_reset_recv``, ``async_step_and_maybe_reset_send`` and ``async_step_and_maybe_reset_recv``. Data carries
    ``"env_index"``, int64 ``[n, *batch]``: which environment each row belongs to, in the order in which they were
    ready. ``reset``, ``step`` and the rest work as in :class:`~rollwright.envs.SerialEnv`, with equal results, and
    wait for all; they need all environments to be idle.

    An environment that raises, or takes longer than ``env_step_timeout``, makes the ``recv`` that comes upon it raise;
    results of others stay for the next one. It is idle then, and can be reset; one whose process has ended cannot.

    Args:
        env_makers: a callable that makes an environment, or an environment, or a list of these.
        backend: ``"threading"``: each environment in a thread of this process (made there too, if it is to be
            made); ``"multiprocessing"``: each in a process, callables only.
        stack: of results: ``"dense"``; ``"lazy"``; ``"maybe_dense"``: dense, unless environments differ.
        create_env_kwargs: arguments for the callables, or a list of them.
        min_get: how many results a ``recv`` waits for, unless it says otherwise.
        device: where data is put; None: where the environments have theirs.
        env_step_timeout: seconds that a step or a reset may take; None: an hour.
        mp_start_method: of processes: ``"forkserver"`` (None), ``"spawn"`` or ``"fork"``.

    Attributes:
        num_envs: number of environments.
        min_get: see above; may be set.

    Raises:
        TypeError, ValueError: an argument is wrong, or environments do not fit together.
        EnvError: a factory failed.

    Example:
        >>> from rollwright.envs import GymEnv
        >>> env = AsyncEnvPool([lambda: GymEnv("CartPole-v1")] * 3)
        >>> data = env.rand_action(env.reset())
        >>> env.async_step_and_maybe_reset_send(data)
        >>> stepped, root = env.async_step_and_maybe_reset_recv(min_get=2)  # the first two or three
        >>> root = env.rand_action(root)
        >>> env.async_step_and_maybe_reset_send(root)  # these go on; others are still under way
        >>> sorted(stepped["env_index"].tolist()) == sorted(root["env_index"].tolist())
        True
        >>> stepped["next", "reward"].shape == (len(stepped), 1)
        True
        >>> env.close()
    """

    def __init__(
        self,
        env_makers: Maker | Sequence[Maker],
        *,
        backend: Literal["threading", "multiprocessing"] = "threading",
        stack: Literal["dense", "maybe_dense", "lazy"] = "maybe_dense",
        create_env_kwargs: Mapping[str, Any] | Sequence[Mapping[str, Any]] | None = None,
        min_get: int = 1,
        device: torch.device | str | int | None = None,
        env_step_timeout: float | None = None,
        mp_start_method: str | None = None,
    ) -> None:
        makers = _makers(env_makers, create_env_kwargs, backend)
        _check(backend, stack, min_get, env_step_timeout, len(makers))
        check_start_method("mp_start_method", mp_start_method)
        name = type(self).__name__
        slots: Slots
        if backend == "threading":
            slots = ThreadSlots(makers, name, env_step_timeout)
        else:
            slots = ProcessSlots(makers, name, env_step_timeout, mp_start_method)
        try:
            super().__init__(slots.facts, device)
            if stack == "dense" and self._ragged:
                raise ValueError(
                    "stack='dense': the environments' entries differ. Pass stack='lazy' or stack='maybe_dense'."
                )
        except BaseException:
            slots.close()
            raise
        self.backend, self.stack, self.min_get = backend, stack, min_get
        self._lazy = stack == "lazy" or self._ragged
        self._limit_s = PATIENCE_S if env_step_timeout is None else env_step_timeout
        self._tasks: dict[int, _Task] = {}
        self._strays: set[int] = set()  # busy with a call whose caller was interrupted: what comes of it is dropped
        self._ready: dict[str, deque[tuple[int, Any]]] = {call: deque() for call in (STEP, RESET, BOTH)}
        if isinstance(slots, ThreadSlots):
            for i, env in enumerate(slots.facts):
                self.add_module(f"worker{i}", env)
            weakref.finalize(self, slots._leave).atexit = False  # threads end when nobody can send any more
        elif isinstance(slots, ProcessSlots):
            self._lay_out(slots)
        self._slots = slots  # from here on, attributes are looked up in the environments

    def _lay_out(self, slots: ProcessSlots) -> None:
        full = [self.full_observation_spec, self.full_state_spec, self.full_reward_spec, self.full_done_spec]
        entries = shareable(full)
        returned = [*self.observation_keys, *self.reward_keys, *self.done_keys]
        form = Form(tuple(key for key in dict.fromkeys(returned) if key in entries), {})
        slots.lay_out(entries, form, self.batch_size[1:])

    @property
    def num_envs(self) -> int:
        """Number of environments."""
        return self.num_workers

    @property
    def env_batch_sizes(self) -> list[torch.Size]:
        """Batch size of each environment."""
        return [self.batch_size[1:]] * self.num_workers

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
            env_index: whose rows these are; None: what ``tensordict["env_index"]`` says, or all in order.

        Raises:
            RuntimeError: one of them is busy.
            ValueError: it is unclear, or unknown, which environments are meant.
        """
        self._send(STEP, tensordict, env_index)

    def async_step_and_maybe_reset_send(
        self, tensordict: TensorDictBase, env_index: int | Sequence[int] | None = None
    ) -> None:
        """Let some environments take a step, and begin anew if that was the last one; see :meth:`async_step_send`."""
        self._send(BOTH, tensordict, env_index)

    def async_reset_send(
        self, tensordict: TensorDictBase | None = None, env_index: int | Sequence[int] | None = None, **kwargs: Any
    ) -> None:
        """Let some environments begin anew.

        Args:
            tensordict: data for the reset, or None.
            env_index: which ones; None: what ``tensordict["env_index"]`` says, or all.
            **kwargs: go to the environment's reset.

        Raises:
            RuntimeError, ValueError: as for :meth:`async_step_send`.
        """
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
        for row, root in zip(rows, tds, strict=True):
            self._begin_task(row, _Task(call, root), resets=call == RESET, kwargs=kwargs)

    def _begin_task(self, row: int, task: _Task, *, resets: bool, kwargs: dict[str, Any]) -> None:
        self._tasks[row] = task
        given = task.root
        if given is not None and given.get(INDEX, None) is not None:
            given = given.exclude(INDEX)
        self._slots.post(row, given, resets=resets, kwargs=kwargs)

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
            env_index = [_first(row[INDEX]) for row in cast(list[TensorDictBase], tds)]
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
            RuntimeError: more are waited for than are under way.
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
            ended trajectories have begun anew.
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
        """First data of environments that have begun anew; see :meth:`async_step_recv`."""
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
        if len(known) < count or not set(wanted or ()) <= set(known) or count < 1 or (max_get or count) < count:
            raise RuntimeError(
                f"async_{call}_recv: expected to wait for 1 to {len(known)} results, as many as were sent "
                f"(environments {sorted(known)}), got min_get={count}, max_get={max_get}, env_index={wanted}."
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
        """Results that are ready; those of environments that have failed are as good as any: they are to be told."""
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
        for came in self._slots.collect(timeout_s):
            if came.row in self._strays:
                self._strays.discard(came.row)
            else:
                self._advance_task(self._tasks.pop(came.row), came)

    def _settle(self) -> None:
        """Wait for calls whose caller was interrupted; environments that do not come back fail in time."""
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
        flags = [(group.reset, root.get(group.done)) for group in deciding_groups(self._done_groups)]
        if not any(bool(flag.any()) for _, flag in flags):
            return False
        for key, flag in flags:
            root.set(key, flag.clone())
        return True

    def _begun(self, root: TensorDictBase | None, fresh: TensorDictBase) -> TensorDictBase:
        return fresh if root is None else merge_reset(self, root, fresh, reset_masks(self, root))

    def _stacked(self, found: list[tuple[int, TensorDictBase]]) -> TensorDictBase:
        tds = []
        for row, td in found:
            td = td.copy()
            td.set(INDEX, torch.full(td.batch_size, row, dtype=torch.int64, device=self.device))
            tds.append(td)
        if self._lazy:
            return cast(TensorDictBase, LazyStackedTensorDict.lazy_stack(tds, 0))
        if self.stack == "maybe_dense":
            return cast(TensorDictBase, LazyStackedTensorDict.maybe_dense_stack(tds, 0))
        return cast(TensorDictBase, torch.stack(tds, 0))  # type: ignore[arg-type]

    # All together -----------------------------------------------------------------------------

    def reset(self, tensordict: TensorDictBase | None = None, **kwargs: Any) -> TensorDictBase:
        """See :meth:`EnvBase.reset`; the result has ``"env_index"`` too."""
        fresh = super().reset(tensordict, **kwargs)
        rows = torch.arange(self.num_workers, device=self.device).reshape(-1, *[1] * (self.ndim - 1))
        return fresh.set(INDEX, rows.expand(self.batch_size).clone())

    def _step(self, tensordict: TensorDictBase) -> TensorDictBase:
        self._check_idle("step")
        rows = dict(enumerate(tensordict.unbind(0)))
        return self._stack(list(self._together(cast(Any, rows), resets=False).values()))

    def _reset(self, tensordict: TensorDictBase | None = None, **kwargs: Any) -> TensorDictBase:
        self._check_idle("reset")
        self._seed_for_reset(kwargs)
        given = [None] * self.num_workers if tensordict is None else tensordict.unbind(0)
        rows = {row: td for row, td in enumerate(given) if self._is_marked(td)}
        fresh = self._together(rows, resets=True, **kwargs)
        every = [fresh.get(row) for row in range(self.num_workers)]
        return self._stack(self._filled(every, self._slots.facts))

    def _together(
        self, rows: Mapping[int, TensorDictBase | None], *, resets: bool, **kwargs: Any
    ) -> dict[int, TensorDictBase]:
        """One call in each of ``rows``, all of which are waited for, whatever some of them raise."""
        came: dict[int, Came] = {}
        self._strays = set(rows)
        for row, td in rows.items():
            given = td if td is None else without(td, INDEX)
            self._slots.post(row, given, resets=resets, kwargs=kwargs)
        while len(came) < len(rows):
            came.update((one.row, one) for one in self._slots.collect(self._limit_s))
        self._strays.clear()
        for row in sorted(came):
            error = came[row].error
            if error is not None:
                raise error
        return {row: cast(TensorDictBase, came[row].outcome) for row in sorted(came)}

    def _seed_envs(self, seed: int | None, static_seed: bool) -> int | None:
        self._check_idle("set_seed")
        last = None
        for row in range(self.num_workers):
            last = self._slots.set_seed(row, seed, static_seed)
            if seed is not None and last is not None and not static_seed:
                seed = last + 1
        return last

    def to(self, device: torch.device | str | int | None) -> AsyncEnvPool:  # type: ignore[override]
        """Move the environments and the batch; returns the environment."""
        if device is not None:
            self._check_idle("to")
            self._slots.move(device)
        super().to(device)
        return self

    def _check_idle(self, what: str) -> None:
        self._settle()
        if self._tasks or any(self._ready.values()):
            raise RuntimeError(
                f"{what}: environments {self.busy} have been sent something that nobody has received. Receive it first."
            )

    def _check_open(self, what: str) -> None:
        if self.is_closed:
            raise EnvError(f"{self}: {what} after close(). Make a new pool.")

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if "_slots" not in self.__dict__ or name.startswith("_") or self.is_closed:
                raise
        self._check_idle(name)
        return self._slots.look_up(name)

    def close(self, *, raise_if_closed: bool = True) -> None:
        """Close all environments and end their threads or processes, within seconds, whatever they do.

        Warns:
            RuntimeWarning: a thread had to be left behind, or a process to be killed.
        """
        was_closed = self.is_closed
        super().close(raise_if_closed=raise_if_closed)
        if was_closed:
            return
        errors, forced = self._slots.close()
        if forced:
            warnings.warn(f"{type(self).__name__}: {'; '.join(forced)}.", RuntimeWarning, stacklevel=2)
        if errors:
            raise errors[0]

    def shutdown(self) -> None:
        """Same as :meth:`close`; may be called again."""
        self.close(raise_if_closed=False)

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}(num_envs={self.num_workers}, backend={self.backend!r}, "
            f"batch_size={list(self.batch_size)}, device={self.device})"
        )


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


def _first(index: Any) -> int:
    """The environment's index, from an entry of its row: a tensor, or an object."""
    return int(index.flatten()[0]) if isinstance(index, torch.Tensor) else int(index)


def _makers(env_makers: Any, kwargs: Any, backend: Any) -> list[Callable[[], EnvBase]]:
    given = list(env_makers) if isinstance(env_makers, Sequence) else [env_makers]
    if not given:
        raise ValueError("env_makers: expected at least one, got none.")
    arguments = list(kwargs) if isinstance(kwargs, Sequence) else [kwargs] * len(given)
    if len(arguments) != len(given):
        raise ValueError(f"create_env_kwargs: expected {len(given)}, one for each environment, got {len(arguments)}.")
    makers: list[Callable[[], EnvBase]] = []
    for i, (one, its) in enumerate(zip(given, arguments, strict=True)):
        if isinstance(one, EnvBase):
            if backend == "multiprocessing" or its:
                raise TypeError(
                    f"env_makers[{i}]: got an environment, which can neither go to another process nor take "
                    "create_env_kwargs. Pass a callable that makes it."
                )
            if any(one is other for other in given[:i]):
                raise ValueError(f"env_makers[{i}]: got the same environment twice. Pass a callable.")
            makers.append(partial(_itself, one))
        elif callable(one):
            makers.append(partial(one, **(its or {})))
        else:
            raise TypeError(f"env_makers[{i}]: expected a callable or an environment, got {type(one).__name__}.")
    return makers


def _itself(env: EnvBase) -> EnvBase:
    return env


def _check(backend: Any, stack: Any, min_get: Any, env_step_timeout: Any, num_envs: int) -> None:
    for name, value, known in (("backend", backend, _BACKENDS), ("stack", stack, _STACKS)):
        if value not in known:
            raise ValueError(f"{name}: expected one of {known}, got {value!r}.")
    if not isinstance(min_get, int) or isinstance(min_get, bool) or not 1 <= min_get <= num_envs:
        raise ValueError(f"min_get: expected a number from 1 to {num_envs}, that of environments, got {min_get!r}.")
    if env_step_timeout is not None and not env_step_timeout > 0:
        raise ValueError(f"env_step_timeout: expected seconds above 0, or None, got {env_step_timeout!r}.")
