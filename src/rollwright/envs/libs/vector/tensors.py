"""The tensor form of GymWrapper, around a gymnasium vector environment whose data are tensors of one device."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, VectorEnv
from tensordict import TensorDict, TensorDictBase
from torch import Tensor

from rollwright.data.specs import OneHot
from rollwright.envs.libs.codecs import Leaf
from rollwright.envs.libs.vector.parts import autoreset_mode
from rollwright.envs.own.tensors import OwnTensors, Tensors
from rollwright.errors import EnvError, NotNative

if TYPE_CHECKING:
    from rollwright.envs.libs.gym import GymWrapper

__all__ = ["device_of_env", "gym_tensors"]


def device_of_env(env: Any) -> torch.device | None:
    """The device that a vector environment says its tensors have; None: it names none."""
    named = getattr(getattr(env, "unwrapped", None), "device", None) if isinstance(env, VectorEnv) else None
    try:
        return None if named is None else torch.device(named)
    except (RuntimeError, TypeError):
        return None


def gym_tensors(env: GymWrapper, known: type[GymWrapper], observations: list[Leaf], actions: list[Leaf]) -> OwnTensors:
    """The tensor form of a :class:`GymWrapper`.

    Raises:
        NotNative: its environment returns no tensors, as far as is known, or its spaces are not numbers in boxes,
            bits and choices from 0.
    """
    if not env.returns_tensors:
        raise NotNative("its environment has not returned tensors so far")
    if env.info_dict_reader:
        raise NotNative("it reads info")
    vector = _VectorTensors(env, observations, actions)
    itself = vector.mode is AutoresetMode.SAME_STEP
    by_mask = itself or getattr(env.gym_env.unwrapped, "resets_by_mask", False) or vector.device.type != "cpu"
    return OwnTensors(
        env,
        known,
        vector.step,
        vector.reset,
        check=vector.check,
        check_batch=vector.check_batch,
        after_step=vector.reset_by_itself if itself else None,
        by_mask=by_mask,
        is_live=True,
        goes_on=False,
    )


class _VectorTensors:
    """Steps and resets a vector environment on tensors; see :class:`VectorEpisodes` for when it resets by itself.

    Args:
        env: around the environment.
        observations: entries of its observation space.
        actions: of its action space.
    """

    def __init__(self, env: GymWrapper, observations: list[Leaf], actions: list[Leaf]) -> None:
        self._env, self._gym = env, env.gym_env
        self.device = torch.device("cpu") if env.device is None else env.device
        self._observations = [(leaf.key, leaf.path, leaf.spec.dtype) for leaf in observations]
        if any(not isinstance(leaf.space, spaces.Box | spaces.MultiBinary) for leaf in observations):
            raise NotNative("its observations are not numbers in boxes, or bits")
        self._actions = [(leaf.key, leaf.path, _writer(leaf, self.device)) for leaf in actions]
        self._is_single = len(actions) == 1 and not actions[0].path
        if not self._is_single and not isinstance(self._gym.single_action_space, spaces.Dict):
            raise NotNative("its actions are in tuples")
        self.mode = autoreset_mode(self._gym)
        self._batch = env.batch_size
        self._fresh: Tensors = {}  # first observations of new episodes (SAME_STEP)
        self._ended: Tensor | None = None  # where they are
        self._lost: Tensor | None = None  # where last observations are missing

    def check(self) -> None:
        """See :meth:`OwnTensors.check`."""
        if self._env.gym_env is not self._gym:
            raise NotNative("its gymnasium environment is another one")
        if self._env.info_dict_reader:
            raise NotNative("it reads info")

    def check_batch(self) -> None:
        """Test what nobody has read in the steps of a batch.

        Raises:
            EnvError: last observations of episodes are lost.
        """
        lost, self._lost = self._lost, None
        if lost is not None and bool(lost.any()):
            raise EnvError(
                f"{self._gym} announces AutoresetMode.SAME_STEP but put no 'final_obs' into info at the end "
                "of an episode, so its last observation is lost. Create it with "
                "autoreset_mode=AutoresetMode.DISABLED."
            )

    # Steps ----------------------------------------------------------------------------------------

    def step(self, td: TensorDictBase) -> TensorDict:
        """Act; see :meth:`OwnTensors.step`."""
        values = self._gym.step(self._raw_action(td))
        if not isinstance(values, tuple) or len(values) != 5:
            raise EnvError(f"{self._env}: step must return (observation, reward, terminated, truncated, info).")
        observation, reward, terminated, truncated, info = values
        terminated, truncated = self._flag(terminated), self._flag(truncated)
        seen = self._seen(observation)
        if self.mode is AutoresetMode.SAME_STEP:
            seen = self._with_last(seen, terminated | truncated, info)
        reward = self._tensor(reward).reshape(*self._batch, 1).to(torch.float32)
        outcome: Tensors = {"reward": reward, "terminated": terminated, "truncated": truncated}
        return self._tensordict({**seen, **outcome})

    def _with_last(self, seen: Tensors, ended: Tensor, info: Any) -> Tensors:
        """``seen`` with true last observations where episodes have ended; what follows them is kept."""
        self._fresh, self._ended = seen, ended
        final = info.get("final_obs") if isinstance(info, dict) else None
        if final is None:
            self._lost = ended if self._lost is None else self._lost | ended
            return seen
        last = dict(seen)
        for key, path, _ in self._observations:
            value, first = _at(final, path), seen[key]
            if isinstance(value, Tensor) and value.shape == first.shape:
                mask = ended.reshape(*self._batch, *[1] * (first.ndim - len(self._batch)))
                last[key] = torch.where(mask, value.to(first.dtype), first)
                continue
            last[key] = first.clone()
            for i in np.flatnonzero(ended.cpu().numpy()).tolist():  # a list of single observations
                last[key][i] = self._tensor(_at(final[i], path))
        return last

    def reset_by_itself(self, td: TensorDictBase) -> TensorDict:
        """What the environment has reset with the last step; nothing else is marked."""
        self._ended = None
        return self._tensordict(self._fresh)

    def reset(self, td: TensorDictBase | None, **kwargs: Any) -> TensorDict:
        """Begin new episodes; see :meth:`OwnTensors.reset`."""
        marks = None if td is None else td.get("_reset").reshape(self._batch)
        seed, options = kwargs.pop("seed", None), kwargs.pop("options", None)
        seeds = self._env.seeds_for(marks, seed)
        if seeds is not None:
            kwargs["seed"] = seeds if getattr(self._gym.unwrapped, "takes_seeds", False) else seeds[0]
        ended, self._ended = self._ended, None
        if marks is None:
            return self._begun(self._gym.reset(options=options, **kwargs))
        if self.mode is not AutoresetMode.SAME_STEP:
            return self._begun(self._gym.reset(options={**(options or {}), "reset_mask": marks}, **kwargs))
        rest = marks if ended is None else marks & ~ended.reshape(self._batch)
        if bool(rest.any()):
            raise EnvError(
                f"{self._gym} cannot reset its environments {rest.nonzero().flatten().tolist()} alone: only those "
                "whose episode ended with the last step have been reset. Reset all of them, or create it with "
                "autoreset_mode=AutoresetMode.DISABLED."
            )
        return self._tensordict(self._fresh)

    def _begun(self, values: Any) -> TensorDict:
        if not isinstance(values, tuple) or len(values) != 2:
            raise EnvError(f"{self._env}: reset must return (observation, info).")
        return self._tensordict(self._seen(values[0]))

    # Values ---------------------------------------------------------------------------------------

    def _seen(self, observation: Any) -> Tensors:
        seen = {key: self._tensor(_at(observation, path)) for key, path, _ in self._observations}
        for key, _, dtype in self._observations:
            if (value := seen[key]).dtype is not dtype and value.is_floating_point():
                seen[key] = value.to(dtype)
        return seen

    def _tensor(self, value: Any) -> Tensor:
        if isinstance(value, Tensor) and value.device == self.device:
            return value
        return torch.as_tensor(value, device=self.device)

    def _flag(self, value: Any) -> Tensor:
        flag = self._tensor(value).reshape(*self._batch, 1)
        return flag if flag.dtype is torch.bool else flag != 0

    def _tensordict(self, values: Tensors) -> TensorDict:
        return self._env.tensordict_over(values)

    def _raw_action(self, td: TensorDictBase) -> Any:
        if self._is_single:
            key, _, write = self._actions[0]
            return write(td.get(key))
        raw: dict[str, Any] = {}
        for key, path, write in self._actions:
            inside = raw
            for name in path[:-1]:
                inside = inside.setdefault(name, {})
            inside[path[-1]] = write(td.get(key))
        return raw


def _at(value: Any, path: tuple[Any, ...]) -> Any:
    for name in path:
        value = value[name]
    return value


def _writer(leaf: Leaf, device: torch.device) -> Callable[[Tensor], Tensor]:
    """What makes an action of the space from the entry that a policy has written."""
    space, spec = leaf.space, leaf.spec
    if isinstance(space, spaces.Box | spaces.MultiBinary):
        dtype = torch.from_numpy(np.zeros(1, space.dtype)).dtype
        return lambda value: value if value.dtype is dtype else value.to(dtype)
    if isinstance(space, spaces.Discrete) and not space.start:
        return (lambda value: value.argmax(-1)) if isinstance(spec, OneHot) else lambda value: value
    raise NotNative(f"its action {leaf.key!r} is of {type(space).__name__}")
