"""Factories of the environments of a batch, and the properties that they share."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import gymnasium
import torch
from gymnasium.vector import VectorEnv
from tensordict import TensorDictBase

from rollwright.data.specs import Composite, StackedComposite, stack
from rollwright.envs.base import EnvBase
from rollwright.envs.each import renamed
from rollwright.envs.libs.foreign import as_env, as_maker, check_maker, is_env, remedy_for
from rollwright.errors import EnvError, RollwrightError, text_of

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
