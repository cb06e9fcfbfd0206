"""SerialEnv: several environments in one process, stepped in turn."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch
from tensordict import LazyStackedTensorDict, TensorDictBase

from rollwright.envs._serial_arrays import SerialArrays
from rollwright.envs._workers import (
    SPECS,
    Factories,
    FactoryKwargs,
    common_batch_size,
    common_device,
    factories,
    is_ragged,
    stacked_specs,
)
from rollwright.envs.arrays import ArrayEnv
from rollwright.envs.base import EnvBase
from rollwright.errors import EnvError, RollwrightError

__all__ = ["SerialEnv"]


class SerialEnv(EnvBase):
    """A batch of environments that are stepped one after the other.

    The batch size is ``[num_workers, *batch]``, where ``batch`` is that of each environment. A partial
    reset reaches only the environments that ``"_reset"`` marks. Environments whose entries differ
    give lazily stacked TensorDicts. Attributes that are not found here are looked up in the
    environments: ``env.some_attribute`` is a list of theirs, ``env.some_method(...)`` a list of what
    it returned.

    Args:
        num_workers: number of environments.
        create_env_fn: makes an environment; or a list with one such function for each.
        create_env_kwargs: arguments for it, or a list of them.
        device: where the batch's data is put; None: where the environments have theirs.
        serial_for_single: no effect; there so that a program can exchange this class for ``ParallelEnv``.
        share_individual_td: no effect, as ``serial_for_single``.
        mp_start_method: no effect, as ``serial_for_single``.

    Raises:
        TypeError: ``create_env_fn`` is not, or does not make, what it should.
        ValueError: lists of another length than ``num_workers``; environments that do not fit together.

    Example:
        >>> from rollwright.envs import GymEnv
        >>> env = SerialEnv(2, lambda: GymEnv("CartPole-v1"))
        >>> env.set_seed(0)
        1
        >>> env.rollout(5).batch_size
        torch.Size([2, 5])
        >>> env.env_name
        ['CartPole-v1', 'CartPole-v1']
    """

    _returns_copies = True  # stacking copies

    def __init__(
        self,
        num_workers: int,
        create_env_fn: Factories,
        *,
        create_env_kwargs: FactoryKwargs = None,
        device: torch.device | str | int | None = None,
        serial_for_single: bool = False,
        share_individual_td: bool | None = None,
        mp_start_method: str | None = None,
    ) -> None:
        makers = factories(num_workers, create_env_fn, create_env_kwargs)
        envs = [_made(i, maker) for i, maker in enumerate(makers)]
        batch = common_batch_size([env.batch_size for env in envs])
        super().__init__(
            device=common_device([env.device for env in envs]) if device is None else device,
            batch_size=(num_workers, *batch),
            allow_done_after_reset=any(env.allow_done_after_reset for env in envs),
        )
        self.num_workers = num_workers
        for i, env in enumerate(envs):
            self.add_module(f"worker{i}", env)
        self._envs = envs  # from here on, attributes are looked up in them, which may have a "worker0" too
        parts = {name: [getattr(env, f"full_{name}_spec") for env in envs] for name in SPECS}
        for name, spec in stacked_specs(parts, self.device).items():
            setattr(self, f"full_{name}_spec", spec)
        self._ragged = any(is_ragged(getattr(self, f"full_{name}_spec")) for name in SPECS)

    # Stepping ---------------------------------------------------------------------------------

    def _step(self, tensordict: TensorDictBase) -> TensorDictBase:
        outcomes = []
        for i, (env, row) in enumerate(zip(self._envs, tensordict.unbind(0), strict=True)):
            with self._naming(i):
                outcomes.append(env._advance(_placed(row, env.device)))
        return self._stack(outcomes)

    def _reset(self, tensordict: TensorDictBase | None = None, **kwargs: Any) -> TensorDictBase:
        self._seed_for_reset(kwargs)
        rows = [None] * self.num_workers if tensordict is None else tensordict.unbind(0)
        fresh: list[TensorDictBase | None] = []
        for i, (env, row) in enumerate(zip(self._envs, rows, strict=True)):
            with self._naming(i):
                if not self._is_marked(row):
                    fresh.append(None)
                else:
                    fresh.append(env._begin(None if row is None else _placed(row, env.device), **kwargs))
        return self._stack(self._filled(fresh))

    def _seed_for_reset(self, kwargs: dict[str, Any]) -> None:
        """Take a seed out of the arguments of a reset, and seed each environment with its own, as ``set_seed``."""
        seed = kwargs.pop("seed", None)
        if seed is not None:
            self._seed_envs(seed, False)

    def _is_marked(self, row: TensorDictBase | None) -> bool:
        """Whether a worker has anything to reset: without any mask, or with one that is not all False."""
        masks = [] if row is None else [row.get(key, None) for key in self.reset_keys]
        masks = [mask for mask in masks if mask is not None]
        return not masks or any(bool(mask.any()) for mask in masks)

    def _filled(self, fresh: list[TensorDictBase | None]) -> list[TensorDictBase]:
        """Something of the right form for workers that were not reset; it is not read."""
        if self._ragged:
            return [
                env.full_observation_spec.zero().update(env.full_done_spec.zero()) if row is None else row
                for env, row in zip(self._envs, fresh, strict=True)
            ]
        example = next(row for row in fresh if row is not None)
        return [example if row is None else row for row in fresh]

    def _stack(self, rows: list[TensorDictBase]) -> TensorDictBase:
        rows = [_placed(row, self.device) for row in rows]
        if self._ragged:
            return cast(TensorDictBase, LazyStackedTensorDict.lazy_stack(rows, 0))
        return cast(TensorDictBase, torch.stack(rows, 0))  # type: ignore[arg-type]

    @contextmanager
    def _naming(self, worker: int) -> Iterator[None]:
        """Errors say which environment raised them."""
        try:
            yield
        except RollwrightError as error:
            raise self._renamed(worker, error) from error

    def _renamed(self, worker: int, error: RollwrightError) -> RollwrightError:
        return _renamed(f"{type(self).__name__}[{worker}]", error)

    def _array_form(self) -> ArrayEnv:
        return SerialArrays(self, SerialEnv)

    # The environments together ------------------------------------------------------------------

    def set_seed(self, seed: int | None = None, static_seed: bool = False) -> int | None:
        """Seed all environments: the first of each worker follows the last of the worker before.

        Returns:
            The seed of the last environment.
        """
        last = super().set_seed(seed, static_seed)
        if seed is not None:
            torch.manual_seed(seed)  # the environments have left theirs
        return last

    def _seed_envs(self, seed: int | None, static_seed: bool) -> int | None:
        last = None
        for env in self._envs:
            last = env.set_seed(seed, static_seed)
            if seed is not None and last is not None and not static_seed:
                seed = last + 1
        return last

    def start(self) -> None:
        """No effect: the environments are there from the beginning."""

    def to(self, device: torch.device | str | int | None) -> SerialEnv:  # type: ignore[override]
        """Move the environments and the batch; returns the environment."""
        if device is not None:
            for env in self._envs:
                env.to(device)
        super().to(device)
        return self

    def close(self, *, raise_if_closed: bool = True) -> None:
        """Close all environments. A second call raises unless ``raise_if_closed=False``."""
        was_closed = self.is_closed
        super().close(raise_if_closed=raise_if_closed)
        errors: list[Exception] = []
        for env in () if was_closed else self._envs:
            try:
                env.close(raise_if_closed=False)
            except Exception as error:  # the others are to be closed all the same
                errors.append(error)
        if errors:
            raise errors[0]

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            envs = self.__dict__.get("_envs")
            if envs is None or name.startswith("_"):
                raise
        values = [getattr(env, name) for env in envs]
        return _call_each(values) if all(callable(value) for value in values) else values

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}(num_workers={self.num_workers}, env={self._envs[0]}, "
            f"batch_size={list(self.batch_size)}, device={self.device})"
        )


def _made(worker: int, maker: Callable[[], EnvBase]) -> EnvBase:
    try:
        env = maker()
    except RollwrightError as error:
        raise _renamed(f"create_env_fn of worker {worker}", error) from error
    except Exception as error:
        raise EnvError(f"create_env_fn of worker {worker} raised {type(error).__name__}: {error}") from error
    if not isinstance(env, EnvBase):
        raise TypeError(
            "create_env_fn: expected a function that makes an environment of rollwright, got one that made "
            f"{type(env).__name__} (worker {worker}). Wrap gymnasium environments in GymWrapper."
        )
    return env


def _renamed(place: str, error: RollwrightError) -> RollwrightError:
    """The error with its place in front; subclasses from elsewhere may take other arguments."""
    kind = type(error) if type(error).__module__ == RollwrightError.__module__ else EnvError
    return kind(f"{place}: {error}")


def _placed(td: TensorDictBase, device: torch.device | None) -> TensorDictBase:
    return td if device is None or td.device == device else td.to(device)


def _call_each(functions: list[Callable[..., Any]]) -> Callable[..., list[Any]]:
    def call(*args: Any, **kwargs: Any) -> list[Any]:
        return [function(*args, **kwargs) for function in functions]

    return call
