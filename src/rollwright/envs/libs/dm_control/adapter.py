"""An environment of dm_env as one of gymnasium."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

import gymnasium
import numpy as np
from gymnasium import Space, spaces
from numpy.typing import NDArray

from rollwright.errors import EnvError, require


class DMEnvAdapter(gymnasium.Env[Any, Any]):
    """An environment of dm_env as one of gymnasium; arrays keep their dtypes, and scalars have shape ``[1]``.

    Args:
        environment: a ``dm_env.Environment``.
        render_kwargs: go to ``physics.render`` (``height``, ``width``, ``camera_id``).

    Raises:
        EnvError: a spec of it has no counterpart among gymnasium's spaces.
    """

    metadata = {"render_modes": ["rgb_array"]}  # noqa: RUF012 - gymnasium's interface
    render_mode = "rgb_array"

    def __init__(self, environment: Any, render_kwargs: Mapping[str, Any]) -> None:
        self.environment = environment
        self.render_kwargs = dict(render_kwargs)
        self.observation_space = _space_of(environment.observation_spec(), "observation_spec")
        self._acts = environment.action_spec()
        self.action_space = _space_of(self._acts, "action_spec")

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        """Step; the last step of an episode is terminated where its discount is 0, and truncated elsewhere."""
        found = self.environment.step(_shaped_as(self._acts, action))
        last = found.last()
        terminated = bool(last and found.discount == 0)
        reward = np.float64(0.0) if found.reward is None else found.reward
        return _at_least_1d(found.observation), reward, terminated, last and not terminated, {}

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Begin an episode; ``seed`` first seeds the generator of the task."""
        if seed is not None:
            self.random.set_state(np.random.RandomState(seed).get_state())
        return _at_least_1d(self.environment.reset().observation), {}

    @property
    def random(self) -> np.random.RandomState:
        """The generator that episodes are drawn from: the task's, or the environment's.

        Raises:
            EnvError: there is none.
        """
        task = getattr(self.environment, "task", None)
        for owner, name in ((task, "random"), (self.environment, "random_state")):
            found = getattr(owner, name, None)
            if isinstance(found, np.random.RandomState):
                return found
        raise EnvError(
            f"{self.environment!r} has no generator to seed: neither task.random nor random_state is a "
            "numpy.random.RandomState. Give it its seed when you make it, and leave set_seed out."
        )

    def render(self) -> Any:
        """What a camera sees: uint8 ``[height, width, 3]``."""
        return self.environment.physics.render(**self.render_kwargs)

    def close(self) -> None:
        """Close the environment of dm_env."""
        self.environment.close()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or name == "environment":
            raise AttributeError(name)
        return getattr(self.environment, name)

    def __repr__(self) -> str:
        return f"DMEnvAdapter({self.environment!r})"


def _space_of(spec: Any, path: str) -> Space[Any]:
    """The space of a spec of dm_env, or of specs in dictionaries and sequences."""
    specs = require("dm_env.specs", extra="dm_control", purpose="DMControlWrapper")
    if isinstance(spec, Mapping):
        return spaces.Dict(OrderedDict((name, _space_of(one, f"{path}[{name!r}]")) for name, one in spec.items()))
    if isinstance(spec, (list, tuple)):
        return spaces.Tuple([_space_of(one, f"{path}[{i}]") for i, one in enumerate(spec)])
    if isinstance(spec, specs.DiscreteArray):
        return spaces.Discrete(spec.num_values, dtype=spec.dtype.type)
    dtype = getattr(spec, "dtype", None)
    if not isinstance(spec, specs.Array) or dtype is None or dtype.kind not in "biuf":
        raise EnvError(f"{path}: expected numbers, got {spec!r}. Leave it out with a wrapper of dm_env.")
    shape = spec.shape or (1,)
    if dtype.kind == "b":
        return spaces.MultiBinary(shape)
    low, high = (-np.inf, np.inf) if dtype.kind == "f" else (np.iinfo(dtype).min, np.iinfo(dtype).max)
    if isinstance(spec, specs.BoundedArray):
        low, high = spec.minimum, spec.maximum
    return spaces.Box(_filled(low, shape, dtype), _filled(high, shape, dtype), shape, dtype.type)


def _filled(bound: Any, shape: tuple[int, ...], dtype: np.dtype[Any]) -> NDArray[Any]:
    return np.array(np.broadcast_to(np.asarray(bound, dtype), shape))


def _at_least_1d(value: Any) -> Any:
    """Observations with scalars as arrays of one element; integers stay what they are."""
    if isinstance(value, Mapping):
        return {name: _at_least_1d(one) for name, one in value.items()}
    if isinstance(value, (list, tuple)):
        return tuple(_at_least_1d(one) for one in value)
    if isinstance(value, (int, np.integer)) or (isinstance(value, np.ndarray) and value.shape):
        return value
    return np.atleast_1d(value)


def _shaped_as(spec: Any, value: Any) -> Any:
    """Actions in the shapes of their specs."""
    if isinstance(spec, Mapping):
        return {name: _shaped_as(one, value[name]) for name, one in spec.items()}
    if isinstance(spec, (list, tuple)):
        return type(spec)(_shaped_as(one, part) for one, part in zip(spec, value, strict=True))
    return value if getattr(value, "shape", ()) == spec.shape else np.asarray(value).reshape(spec.shape)
