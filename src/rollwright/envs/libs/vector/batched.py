"""BatchedEnv: an environment that steps many and is no ``VectorEnv``, as one of gymnasium."""

from __future__ import annotations

from typing import Any

import gymnasium
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space

from rollwright._foreign import class_path


def is_batched(thing: Any) -> bool:
    """Whether an object steps ``num_envs`` environments, as those of Isaac Lab and mjlab, and is no ``VectorEnv``."""
    if isinstance(thing, (VectorEnv, type)):
        return False
    base = getattr(thing, "unwrapped", None)
    many = isinstance(thing, gymnasium.Env) or getattr(base, "is_vector_env", False) is True
    return many and isinstance(getattr(base, "num_envs", None), int) and hasattr(base, "single_action_space")


class BatchedEnv(VectorEnv[Any, Any, Any]):
    """Such an environment as a vector environment of gymnasium.

    Where it does not say when it resets what has ended (``metadata["autoreset_mode"]``), one with ``is_vector_env``
    does so within the step, unless ``cfg.auto_reset`` is False.

    Args:
        env: the environment.
    """

    def __init__(self, env: Any) -> None:
        self.env, base = env, env.unwrapped
        self.metadata = dict(getattr(env, "metadata", None) or {})
        if "autoreset_mode" not in self.metadata and getattr(base, "is_vector_env", False):
            waits = getattr(getattr(base, "cfg", None), "auto_reset", True) is False
            self.metadata["autoreset_mode"] = AutoresetMode.DISABLED if waits else AutoresetMode.SAME_STEP
        self.num_envs, self.spec = base.num_envs, getattr(env, "spec", None)
        find = getattr(env, "get_wrapper_attr", lambda name: getattr(env, name))
        self.single_observation_space = _space(find("single_observation_space"))
        self.single_action_space = _space(find("single_action_space"))
        self.observation_space = batch_space(self.single_observation_space, self.num_envs)
        self.action_space = batch_space(self.single_action_space, self.num_envs)

    @property
    def unwrapped(self) -> Any:
        """The environment without wrappers."""
        return self.env.unwrapped

    def step(self, actions: Any) -> Any:
        """Step all environments."""
        return self.env.step(actions)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        """Reset all environments, or what ``options["reset_mask"]`` marks."""
        return self.env.reset(seed=seed, options=options)

    def close(self, **kwargs: Any) -> None:
        """Close the environment."""
        self.env.close()

    def __repr__(self) -> str:
        return f"{class_path(self.unwrapped)}(num_envs={self.num_envs})"


def _space(space: Any) -> spaces.Space[Any]:
    """A space of gymnasium; those of mjlab have the same attributes.

    Raises:
        TypeError: it is none, nor like one.
    """
    if isinstance(space, spaces.Space):
        return space
    if hasattr(space, "spaces"):
        return spaces.Dict({name: _space(one) for name, one in space.spaces.items()})
    if hasattr(space, "low"):
        return spaces.Box(space.low, space.high, space.shape, space.dtype)
    raise TypeError(f"env: expected spaces of gymnasium, or a Box or Dict like its own, got {class_path(space)}.")
