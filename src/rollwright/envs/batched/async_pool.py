"""AsyncEnvPool: environments that are sent actions, and received from, each in its own time."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Literal, cast

import torch
from tensordict import TensorDictBase

from rollwright._interrupts import uninterrupted
from rollwright._keys import without
from rollwright._processes.start import check_start_method
from rollwright._warnings import warn_user
from rollwright.envs.base import EnvBase
from rollwright.envs.batched.async_halves import INDEX, AsyncHalves, first_index
from rollwright.envs.batched.async_slots import Came, ProcessSlots, Slots, ThreadSlots
from rollwright.envs.factories import EnvFunction, GymnasiumEnv, own_kwargs
from rollwright.envs.foreign import as_maker, check_maker, makers_in, remedy_for

_BACKENDS = ("threading", "multiprocessing")
_STACKS = ("dense", "maybe_dense", "lazy")

Maker = str | EnvBase | GymnasiumEnv | EnvFunction


class AsyncEnvPool(AsyncHalves):
    """Steps and resets environments independently: send to some, receive from those that are ready.

    Each call has two halves: ``async_step_send`` and ``async_step_recv``, ``async_reset_send`` and
    ``async_reset_recv``, ``async_step_and_maybe_reset_send`` and ``async_step_and_maybe_reset_recv``. Results have
    ``"env_index"``, int64 ``[n, *batch]``: the environment of each row, in the order in which they were ready. Send
    data with the ``"env_index"`` of the environments that should get it. ``reset``, ``step`` and the others give the
    results of :class:`~rollwright.envs.SerialEnv`. They wait for all environments, which must all be idle.

    In threads, environments that draw from torch's global generator share it, and draw in any order. In processes, each
    has its own.

    If an environment raises, or takes longer than ``env_step_timeout``, the ``recv`` that reaches it raises. Results of
    the others stay for the next one. The environment is then idle, and can be reset unless its process has ended.

    Args:
        env_makers: makes an environment; or an environment, or a list of these.
        backend: ``"threading"``: each environment in a thread of this process, and made there if it is to be made.
            ``"multiprocessing"``: each in a process; functions only.
        stack: how results are stacked: ``"dense"``, ``"lazy"``, or ``"maybe_dense"`` (dense, unless they differ).
        create_env_kwargs: arguments for the functions, or a list of them.
        min_get: number of results that a ``recv`` waits for, by default.
        device: device of the data; None: that of the environments.
        env_step_timeout: seconds for a step or a reset; None: an hour.
        mp_start_method: how processes start: ``"forkserver"`` (None), ``"spawn"`` or ``"fork"``.
        exchange: no effect, for programs that were written for it.
        policy: see :class:`~rollwright.envs.EnvBase`.

    Attributes:
        num_envs: number of environments.
        min_get: as above; may be set.

    Raises:
        TypeError, ValueError: an argument is wrong, or environments do not fit together.
        EnvError: an environment could not be made.

    Example:
        >>> from rollwright.envs import GymEnv
        >>> env = AsyncEnvPool([lambda: GymEnv("CartPole-v1")] * 3)
        >>> data = env.rand_action(env.reset())
        >>> env.async_step_and_maybe_reset_send(data)
        >>> stepped, root = env.async_step_and_maybe_reset_recv(min_get=2)  # the first two or three
        >>> root = env.rand_action(root)
        >>> env.async_step_and_maybe_reset_send(root)  # these go on; others are still in progress
        >>> sorted(stepped["env_index"].tolist()) == sorted(root["env_index"].tolist())
        True
        >>> stepped["next", "reward"].shape == (len(stepped), 1)
        True
        >>> env.close()
    """

    _ended = False

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
        mp_start_method: Literal["forkserver", "spawn", "fork"] | None = None,
        exchange: str | None = None,
        policy: Callable[..., Any] | None = None,
    ) -> None:
        makers = _makers(env_makers, create_env_kwargs, backend)
        _check(backend, stack, min_get, env_step_timeout, len(makers))
        check_start_method("mp_start_method", mp_start_method)
        name = type(self).__name__
        launch: Callable[[], Slots]
        if backend == "threading":
            launch = partial(ThreadSlots, makers, name, env_step_timeout)
        else:
            launch = partial(ProcessSlots, makers, name, env_step_timeout, mp_start_method)
        slots = launch()
        try:
            super().__init__(slots, device, stack=stack, min_get=min_get, env_step_timeout=env_step_timeout)
            if stack == "dense" and self._ragged:
                raise ValueError(
                    "stack='dense': the environments' entries differ. Pass stack='lazy' or stack='maybe_dense'."
                )
            self.backend, self._launch = backend, launch
            self._take(slots)
        except BaseException:
            slots.close()
            raise

    def _take(self, slots: Slots) -> None:
        if isinstance(slots, ThreadSlots):
            for i, env in enumerate(slots.facts):
                self.add_module(f"worker{i}", env)
            weakref.finalize(self, slots.stop_threads).atexit = False  # threads end when nobody can send any more
        elif isinstance(slots, ProcessSlots):
            slots.lay_out(self)
        self._slots = slots  # from here on, attributes are looked up in the environments
        self._ended = False

    def known_parts(self) -> Sequence[Any]:
        """The environments that are already made."""
        return self._slots.facts

    def _open(self) -> Sequence[Any]:
        if not self._ended:  # the call of close() was interrupted
            self.close()
        self._take(self._launch())
        return self._slots.facts

    @property
    def num_envs(self) -> int:
        """Number of environments."""
        return self.num_workers

    @property
    def env_batch_sizes(self) -> list[torch.Size]:
        """Batch size of each environment."""
        return [self.batch_size[1:]] * self.num_workers

    # All together -----------------------------------------------------------------------------

    def reset(self, tensordict: TensorDictBase | None = None, **kwargs: Any) -> TensorDictBase:
        """Begin new trajectories in all environments, or in those that ``"_reset"`` marks; waits for them."""
        self._check_idle("reset")
        return super().reset(tensordict, **kwargs)

    def rand_action(self, tensordict: TensorDictBase | None = None) -> TensorDictBase:
        """Write random actions, for the environments that ``"env_index"`` names where that is there."""
        if tensordict is None or tensordict.get(INDEX, None) is None:
            return super().rand_action(tensordict)
        actions = self.full_action_spec.rand()
        if tensordict.batch_size == self.batch_size[1:]:
            return tensordict.update(actions[first_index(tensordict[INDEX])])
        return tensordict.update(actions[[first_index(row[INDEX]) for row in tensordict.unbind(0)]])

    def _step(self, tensordict: TensorDictBase) -> TensorDictBase:
        rows = dict(enumerate(tensordict.unbind(0)))
        return self._stack(list(self._together(cast(Any, rows), resets=False).values()))

    def _reset(self, tensordict: TensorDictBase | None = None, **kwargs: Any) -> TensorDictBase:
        self.seed_for_reset(kwargs)
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
        for row, td in rows.items():
            given = td if td is None else without(td, INDEX)
            with uninterrupted:
                self._slots.post(row, given, resets=resets, kwargs=own_kwargs(kwargs, row))
                self._strays.add(row)  # until it has come, for whoever is called next if this is interrupted
        while len(came) < len(rows):
            self._slots.wait(self._limit_s)
            with uninterrupted:
                for one in self._slots.collect():
                    self._strays.discard(one.row)
                    came[one.row] = one
        for row in sorted(came):
            error = came[row].error
            if error is not None:
                raise error
        return {row: cast(TensorDictBase, came[row].outcome) for row in sorted(came)}

    def call_in_hosts(self, function: Callable[..., object]) -> None:
        """Call a function in each thread or process that hosts environments, with each :class:`Hosted` there."""
        self._slots.call_in_hosts(function)

    def _seed_envs(self, seed: int | None, static_seed: bool) -> int | None:
        self._check_idle("set_seed")
        return self.seed_each(range(self.num_workers), seed, static_seed, self._slots.set_seed)

    def to(self, device: torch.device | str | int | None) -> AsyncEnvPool:  # type: ignore[override]
        """Move the environments and the batch; returns the environment."""
        if device is not None:
            self._check_idle("to")
            self._slots.move(device)
        super().to(device)
        return self

    def _check_batch(self, tensordict: TensorDictBase, call: str) -> None:
        super()._check_batch(tensordict, call)
        self._check_idle(call)
        self._check_order(tensordict)

    def _check_order(self, td: TensorDictBase) -> None:
        """Test that what was received out of order is not taken for data of all environments in theirs."""
        if td.get(INDEX, None) is None:
            return
        rows = [first_index(row[INDEX]) for row in td.unbind(0)]
        if rows != list(range(self.num_workers)):
            raise ValueError(
                f"tensordict: expected environments 0 to {self.num_workers - 1} in order, got 'env_index' {rows}. Use "
                "async_step_send() and the like, which go by it, or sort the data."
            )

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if "_slots" not in self.__dict__ or name.startswith("_") or self.is_closed:
                raise
        return self._slots.look_up(name)

    def call(self, env_index: int, name: str, *args: Any) -> Any:
        """Call a method of one environment, and return what it returns.

        Raises:
            RuntimeError: the environment is busy.
        """
        if env_index in self.busy:
            raise RuntimeError(
                f"call: environment {env_index} has not been received from since it was sent something. Call "
                f"async_*_recv() first; busy are {self.busy}."
            )
        return self._slots.call(env_index, name, args)

    def close(self, *, raise_if_closed: bool = True) -> None:
        """Close all environments and end their threads or processes, within seconds, whatever they do.

        A call that follows an interrupted one ends what is left, and waits no more than a second for environments.

        Warns:
            RuntimeWarning: a thread had to be left behind, or a process to be killed.
        """
        hurries = self.is_closed and not self._ended  # the call before was interrupted
        super().close(raise_if_closed=raise_if_closed and not hurries)
        if self._ended:
            return
        self._forget()
        errors, forced = self._slots.close(hurries=hurries)
        self._ended = True
        if forced:
            warn_user(f"{type(self).__name__}: {'; '.join(forced)}.", RuntimeWarning)
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


def _makers(env_makers: Any, kwargs: Any, backend: Any) -> list[Callable[[], EnvBase]]:
    listed = makers_in(env_makers)
    given = [as_maker(one) for one in ([env_makers] if listed is None else listed)]
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
                    f"create_env_kwargs. {remedy_for(one)}"
                )
            if any(one is other for other in given[:i]):
                raise ValueError(f"env_makers[{i}]: got the same environment twice. Pass a callable.")
            makers.append(partial(_itself, one))
        elif callable(one):
            check_maker(f"env_makers[{i}]", one, its)
            makers.append(partial(one, **(its or {})))
        else:
            raise TypeError(
                f"env_makers[{i}]: expected a name, a callable or an environment, got {type(one).__name__}. "
                f"{remedy_for(one)}"
            )
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
