"""EnvCreator: a function that makes environments, in a form that can be sent to other processes."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Mapping
from copy import deepcopy
from typing import Any, NamedTuple

import torch
from tensordict import TensorDict

from rollwright._processes.pickling import dumps
from rollwright.data.specs import Composite
from rollwright.envs.base import EnvBase
from rollwright.envs.closing import closed_on_error
from rollwright.envs.libs.foreign import as_env, as_maker, is_env, remedy_for

__all__ = ["EnvCreator", "EnvMetaData", "env_creator"]


class EnvMetaData(NamedTuple):
    """What an environment is known by without being made again.

    Attributes:
        specs: of the environment: ``"input_spec"`` and ``"output_spec"``.
        batch_size: of its data.
        device: of its data; None: none in particular.
        batch_locked: whether it can be stepped with data of that batch size alone.
        tensordict: zeros with the entries of a step.
    """

    specs: Composite
    batch_size: torch.Size
    device: torch.device | None
    batch_locked: bool
    tensordict: TensorDict


class EnvCreator:
    """A function that makes an environment, with its arguments; lambdas and closures can be pickled.

    Args:
        create_env_fn: returns an environment; or the name of a registered one.
        create_env_kwargs: arguments for it.
        **kwargs: more arguments for it, which win over ``create_env_kwargs``.

    Raises:
        TypeError: ``create_env_fn`` cannot be called, or is an environment.

    Example:
        >>> import pickle
        >>> from rollwright.envs import GymEnv
        >>> make = EnvCreator(lambda name: GymEnv(name), name="CartPole-v1")
        >>> pickle.loads(pickle.dumps(make))()
        GymEnv(env=CartPole-v1, batch_size=[], device=None)
        >>> make(name="Pendulum-v1")
        GymEnv(env=Pendulum-v1, batch_size=[], device=None)
    """

    def __init__(
        self,
        create_env_fn: str | Callable[..., Any],
        create_env_kwargs: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        if is_env(create_env_fn) or not (callable(create_env_fn) or isinstance(create_env_fn, str)):
            raise TypeError(
                "create_env_fn: expected a function that makes an environment, or a name, got "
                f"{type(create_env_fn).__name__}: {create_env_fn!r}. {remedy_for(create_env_fn)}"
            )
        self.create_env_fn = as_maker(create_env_fn)
        self.create_env_kwargs = {**(create_env_kwargs or {}), **kwargs}
        self._meta_data: EnvMetaData | None = None
        self._state: dict[str, Any] | None = None

    def __call__(self, **kwargs: Any) -> EnvBase:
        """Make an environment; arguments given here win over those given before."""
        made: EnvBase = self.create_env_fn(**{**self.create_env_kwargs, **kwargs})
        if self._state is not None:
            made = as_env(made)
            with closed_on_error([made]):
                made.load_state_dict(self._state)
        return made

    def state_dict(self) -> dict[str, Any]:
        """The state of the environments that are made: what was loaded, else that of one made and reset for it."""
        if self._state is not None:
            return deepcopy(self._state)
        env = as_env(self())
        try:
            env.reset()  # statistics take shape with the first data
            return deepcopy(dict(env.state_dict()))
        finally:
            env.close()

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Make environments that begin with the state of another one, its ``state_dict()``: statistics, say.

        Each has a copy. What does not fit is an error when an environment is made.
        """
        self._state = deepcopy(dict(state_dict))

    @property
    def meta_data(self) -> EnvMetaData:
        """Specs of the environments; the first time, one is made for it and closed."""
        if self._meta_data is None:
            env = self()
            try:
                batch_size, zeros = env.batch_size, env.fake_tensordict()
                self._meta_data = EnvMetaData(env.specs, batch_size, env.device, env.batch_locked, zeros)
            finally:
                env.close()
        return self._meta_data

    def make_variant(self, **kwargs: Any) -> EnvCreator:
        """A creator of the same environments with other arguments."""
        variant = EnvCreator(self.create_env_fn, {**self.create_env_kwargs, **kwargs})
        if self._state is not None:
            variant.load_state_dict(self._state)
        return variant

    def __getstate__(self) -> bytes:
        return dumps((self.create_env_fn, self.create_env_kwargs, self._state))

    def __setstate__(self, state: bytes) -> None:
        self.create_env_fn, self.create_env_kwargs, self._state = pickle.loads(state)
        self._meta_data = None

    def __repr__(self) -> str:
        name = getattr(self.create_env_fn, "__qualname__", repr(self.create_env_fn))
        arguments = "".join(f", {key}={value!r}" for key, value in self.create_env_kwargs.items())
        return f"EnvCreator({name}{arguments})"


def env_creator(fn: Callable[..., EnvBase]) -> EnvCreator:
    """Decorate a function that makes environments.

    >>> from rollwright.envs import GymEnv
    >>> @env_creator
    ... def make():
    ...     return GymEnv("CartPole-v1")
    >>> make
    EnvCreator(make)
    """
    return EnvCreator(fn)
