"""Factories of environments: of those of a batch, and EnvCreator, which can be sent to other processes."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from functools import partial
from typing import Any, NamedTuple

import gymnasium
import torch
from gymnasium.vector import VectorEnv
from tensordict import TensorDict, TensorDictBase

from rollwright._processes.channel import dumps
from rollwright.data.specs import Composite, StackedComposite, stack
from rollwright.envs.base import EnvBase, closed_on_error
from rollwright.envs.foreign import as_env, as_maker, check_maker, is_env, remedy_for
from rollwright.errors import EnvError, RollwrightError, text_of

EACH = "list_of_kwargs"  # among the arguments of a reset: those of one worker each


def own_kwargs(kwargs: Mapping[str, Any], worker: int) -> dict[str, Any]:
    """The arguments of a reset for one worker: those of all, and its own out of ``list_of_kwargs``, which win."""
    common = dict(kwargs)
    each = common.pop(EACH, None)
    return common if each is None else {**common, **each[worker]}


def renamed(place: str, error: RollwrightError) -> RollwrightError:
    """The error with its place in front; subclasses from elsewhere may take other arguments."""
    kind = type(error) if type(error).__module__ == RollwrightError.__module__ else EnvError
    return kind(f"{place}: {error}")


GymnasiumEnv = gymnasium.Env[Any, Any] | VectorEnv[Any, Any, Any]
Factory = Callable[..., EnvBase]  # what functions of users become
EnvFunction = Callable[..., EnvBase | GymnasiumEnv]
EnvMaker = str | EnvFunction
Factories = EnvMaker | Sequence[EnvMaker]
FactoryKwargs = Mapping[str, Any] | Sequence[Mapping[str, Any]] | None

SPECS = ("observation", "state", "action", "reward", "done")


def factories(num_workers: int, create_env_fn: Factories, create_env_kwargs: FactoryKwargs) -> list[Factory]:
    """One function without arguments for each worker.

    Raises:
        EnvError: a name is not registered.
        TypeError: a factory cannot be called with its arguments, or is an environment.
        ValueError: ``num_workers`` is not a positive number, or a list has another length.
    """
    if not isinstance(num_workers, int) or isinstance(num_workers, bool) or num_workers < 1:
        raise ValueError(f"num_workers: expected a number of at least 1, got {num_workers!r}.")
    given = _one_each("create_env_fn", create_env_fn, num_workers)
    for maker in given:
        if is_env(maker) or not (callable(maker) or isinstance(maker, str)):
            raise TypeError(
                "create_env_fn: expected a function that makes an environment, a name, or a list of them, got "
                f"{type(maker).__name__}: {maker!r}. {remedy_for(maker)}"
            )
    makers = [as_maker(maker) for maker in given]
    arguments = _one_each("create_env_kwargs", create_env_kwargs, num_workers)
    for maker, kwargs in zip(makers, arguments, strict=True):
        check_maker("create_env_fn", maker, kwargs)
    return [partial(maker, **(kwargs or {})) for maker, kwargs in zip(makers, arguments, strict=True)]


def _one_each(name: str, given: Any, num_workers: int) -> list[Any]:
    if not isinstance(given, Sequence) or isinstance(given, str):
        return [given] * num_workers
    if len(given) != num_workers:
        raise ValueError(
            f"{name}: expected one entry for each of the {num_workers} workers, got {len(given)}. Change "
            "num_workers, or pass a single one for all."
        )
    return list(given)


def made(worker: int | None, maker: Factory) -> EnvBase:
    """The environment of a worker; None: of a collector, which has one.

    Raises:
        EnvError: the function raised.
        TypeError: it made something else.
    """
    place = "create_env_fn" if worker is None else f"create_env_fn of worker {worker}"
    try:
        env = as_env(maker())
    except RollwrightError as error:
        raise renamed(place, error) from error
    except Exception as error:
        raise EnvError(f"{place} raised {type(error).__name__}: {text_of(error)}") from error
    if not isinstance(env, EnvBase):
        raise TypeError(
            "create_env_fn: expected a function that makes an environment of rollwright, gymnasium or TorchRL, got one "
            f"that made {type(env).__name__}{'' if worker is None else f' (worker {worker})'}. {remedy_for(env)}"
        )
    return env


def check_apart(envs: Mapping[int, EnvBase]) -> None:
    """Test that environments of one process do not share one: each would step it, and see the steps of all.

    Args:
        envs: by place.

    Raises:
        ValueError: two of them are one, or are around one.
    """
    seen: dict[int, int] = {}
    for place, env in sorted(envs.items()):
        first = seen.setdefault(id(_innermost(env)), place)
        if first != place:
            raise ValueError(
                f"create_env_fn: made the same environment for places {first} and {place} ({env}). Each needs one of "
                "its own: make it inside the function."
            )


def _innermost(env: Any) -> Any:
    """What an environment is around, through all wrappers."""
    while (holder := getattr(env, "__dict__", {})).keys() & {"base_env", "_env"}:
        inside = holder.get("base_env", holder.get("_env"))
        if inside is None:
            break
        env = inside
    return env.unwrapped if isinstance(env, gymnasium.Env | VectorEnv) else env


def placed(td: TensorDictBase, device: torch.device | None) -> TensorDictBase:
    """``td`` on ``device``; None: where it is."""
    return td if device is None or td.device == device else td.to(device)


def common_batch_size(sizes: Sequence[torch.Size]) -> torch.Size:
    """The batch size that all environments have.

    Raises:
        ValueError: they differ.
    """
    if len(set(sizes)) > 1:
        raise ValueError(
            f"create_env_fn: expected environments of one batch size, got {[list(size) for size in sizes]}. "
            "Batch environments of one size together."
        )
    return sizes[0]


def common_device(devices: Sequence[torch.device | None]) -> torch.device | None:
    """The device that all environments have.

    Raises:
        ValueError: they differ.
    """
    if len(set(devices)) > 1:
        raise ValueError(
            f"device: the environments are on different devices, {[str(device) for device in devices]}. "
            "Pass device= to say where their data is to come together."
        )
    return devices[0]


def stacked_specs(specs: Mapping[str, Sequence[Composite]], device: torch.device | None) -> dict[str, Composite]:
    """The specs of the batch by name: dense where all environments have the same, else lazily stacked."""

    def placed(spec: Composite) -> Composite:
        if device is not None:
            return spec.to(device)
        return spec.clone().clear_device_()

    return {name: stack([placed(spec) for spec in each], 0) for name, each in specs.items()}


def is_ragged(spec: Composite) -> bool:
    """Whether the environments' entries differ, or grow, so that their data must be stacked lazily."""
    nested = [spec, *spec.values(True)]
    return any(isinstance(child, StackedComposite) or -1 in child.shape for child in nested if child is not None)


def call_each(functions: list[Callable[..., Any]]) -> Callable[..., list[Any]]:
    """A function that calls all of them, and lists what they return."""

    def call(*args: Any, **kwargs: Any) -> list[Any]:
        return [function(*args, **kwargs) for function in functions]

    return call


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
