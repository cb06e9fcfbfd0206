"""The tensor form of GymWrapper, around a gymnasium vector environment whose data are tensors of one device."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, VectorEnv
from tensordict import TensorDict, TensorDictBase
from torch import Tensor

from rollwright._keys import leaf_keys
from rollwright.data.specs import OneHot
from rollwright.data.specs.conversion import Leaf
from rollwright.envs.libs.vector import autoreset_mode
from rollwright.envs.own_tensors import OwnTensors, Tensors
from rollwright.errors import EnvError, NotNative

if TYPE_CHECKING:
    from rollwright.envs.libs.gym import GymWrapper


def device_of_env(env: Any) -> torch.device | None:
    """The device that a vector environment says its tensors have; None: it names none."""
    named = getattr(getattr(env, "unwrapped", None), "device", None) if isinstance(env, VectorEnv) else None
    try:
        return None if named is None else torch.device(named)
    except (RuntimeError, TypeError):
        return None


def gym_tensors(env: GymWrapper, known: type[GymWrapper]) -> OwnTensors:
    """The tensor form of a :class:`GymWrapper`.

    Raises:
        NotNative: see :meth:`GymWrapper.on_tensors`.
    """
    vector = env.on_tensors()
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


class VectorTensors:
    """Steps and resets a vector environment on tensors; see :class:`VectorEpisodes` for when it resets by itself.

    Args:
        env: around the environment.
        observations: entries of its observation space.
        actions: of its action space.

    Raises:
        NotNative: its spaces are not numbers in boxes, bits and choices from 0.

    Attributes:
        gym: the environment.
        mode: when it resets by itself.
        marks_missing: whether ``"observation_missing"`` says where last observations are not there; else that is an
            error.
    """

    def __init__(self, env: GymWrapper, observations: list[Leaf], actions: list[Leaf]) -> None:
        self._env, self.gym = env, env.gym_env
        self.device = torch.device("cpu") if env.device is None else env.device
        self._observations = [(leaf.key, leaf.path, leaf.spec.dtype) for leaf in observations]
        if any(not isinstance(leaf.space, spaces.Box | spaces.MultiBinary) for leaf in observations):
            raise NotNative("its observations are not numbers in boxes, or bits")
        self._actions = [(leaf.key, leaf.path, _writer(leaf, self.device)) for leaf in actions]
        self._is_single = len(actions) == 1 and not actions[0].path
        if not self._is_single and not isinstance(self.gym.single_action_space, spaces.Dict):
            raise NotNative("its actions are in tuples")
        self.mode = autoreset_mode(self.gym)
        self.marks_missing = self.mode is AutoresetMode.SAME_STEP and device_of_env(self.gym) is not None
        self._batch = env.batch_size
        self._fresh: Tensors = {}  # first observations of new episodes (SAME_STEP)
        self._ended: Tensor | None = None  # where they are
        self._lost: Tensor | None = None  # where last observations are missing
        self._held: tuple[Tensor, Tensors] | None = None  # what has ended and was not reset, and its last data

    def check(self) -> None:
        """Test that the environment is what this form was made of; to be called once a batch."""
        if self._env.on_tensors() is not self:
            raise NotNative("its gymnasium environment is another one")

    def check_batch(self) -> None:
        """Test what nobody has read in the steps of a batch.

        Raises:
            EnvError: last observations of episodes are lost.
        """
        lost, self._lost = self._lost, None
        if lost is not None and bool(lost.any()):
            raise EnvError(
                f"{self.gym} announces AutoresetMode.SAME_STEP but put no 'final_obs' into info at the end "
                "of an episode, so its last observation is lost. Create it with "
                "autoreset_mode=AutoresetMode.DISABLED; or let it have an attribute 'device', that of its tensors: "
                "('next', 'observation_missing') marks such steps then."
            )

    # Steps ----------------------------------------------------------------------------------------

    def step(self, td: TensorDictBase) -> TensorDict:
        """Act; see :meth:`OwnTensors.step`."""
        values = self.gym.step(self._raw_action(td))
        if not isinstance(values, tuple) or len(values) != 5:
            raise EnvError(f"{self._env}: step must return (observation, reward, terminated, truncated, info).")
        observation, reward, terminated, truncated, info = values
        terminated, truncated = self._flag(terminated), self._flag(truncated)
        seen = self._seen(observation)
        if self.mode is AutoresetMode.SAME_STEP:
            seen = self._with_last(seen, terminated | truncated, terminated, info)
        reward = self._tensor(reward).reshape(*self._batch, 1).to(torch.float32)
        outcome: Tensors = {"reward": reward, "terminated": terminated, "truncated": truncated}
        return self._tensordict({**seen, **outcome})

    def step_alone(self, td: TensorDictBase) -> Tensors:
        """Act, in memory of its own; what has ended and was not reset stays as it ended, with rewards of zero."""
        if self._held is not None and self.mode is not AutoresetMode.SAME_STEP and bool(self._held[0].any()):
            self.gym.reset(options={"reset_mask": self._held[0].reshape(self._batch)})
        out = copies_of(self.step(td))
        self.check_batch()
        out["done"] = ended = out["terminated"] | out["truncated"]
        if self._held is not None:
            held, last = self._held
            last["reward"] = torch.zeros_like(out["reward"])
            out = {key: torch.where(_like(held, value), last[key], value) for key, value in out.items()}
            self._ended = None if self._ended is None else self._ended & ~held
            ended = ended | held
        self._held = ended, {key: value.clone() for key, value in out.items()}
        return out

    def _with_last(self, seen: Tensors, ended: Tensor, terminated: Tensor, info: Any) -> Tensors:
        """``seen`` with true last observations where episodes have ended; what follows them is kept.

        Where the environment tells none, they are marked as missing: NaN where the trajectory was truncated, zero where
        it terminated, so that nothing follows.
        """
        self._fresh, self._ended = seen, ended
        names = [name for name in ("final_obs", "final_observation") if isinstance(info, dict) and name in info]
        final = info[names[0]] if names else None
        told = self._flag(info[f"_{names[0]}"]) if names and isinstance(info.get(f"_{names[0]}"), Tensor) else None
        there = ended if told is None else ended & told
        missing = ended if final is None else None if told is None else ended & ~told
        last = dict(seen)
        for key, path, _ in self._observations if final is not None else ():
            value, first = _at(final, path), seen[key]
            if isinstance(value, Tensor) and value.shape == first.shape:
                last[key] = torch.where(_like(there, first), value.to(first.dtype), first)
                continue
            last[key] = first.clone()
            for i in np.flatnonzero(there.cpu().numpy()).tolist():  # a list of single observations
                last[key][i] = self._tensor(_at(cast(Any, final)[i], path))
        if missing is not None and self.marks_missing:
            last["observation_missing"] = missing
            for key, _, dtype in self._observations:
                value = last[key]
                nothing = torch.zeros_like(value)
                if dtype is not None and dtype.is_floating_point:
                    nothing = nothing.masked_fill(_like(~terminated, value), torch.nan)
                last[key] = torch.where(_like(missing, value), nothing, value)
        elif missing is not None:
            self._lost = missing if self._lost is None else self._lost | missing
        return last

    def reset_by_itself(self, td: TensorDictBase) -> TensorDict:
        """What the environment has reset with the last step; nothing else is marked."""
        self._ended = None
        return self._tensordict(self._fresh)

    def reset(self, td: TensorDictBase | None, **kwargs: Any) -> TensorDict:
        """Begin new episodes; see :meth:`OwnTensors.reset`."""
        marks = None if td is None else td.get("_reset", None)
        marks = None if marks is None else marks.reshape(*self._batch, 1)
        seed, options = kwargs.pop("seed", None), kwargs.pop("options", None)
        seeds = self._env.seeds_for(None if marks is None else marks.reshape(self._batch), seed)
        if seeds is not None:
            kwargs["seed"] = seeds if getattr(self.gym.unwrapped, "takes_seeds", False) else seeds[0]
        if self._held is not None:
            self._held = None if marks is None else (self._held[0] & ~marks, self._held[1])
        if marks is not None and self.mode is not AutoresetMode.SAME_STEP:
            mask = marks.reshape(self._batch)
            return self.begun(self.gym.reset(options={**(options or {}), "reset_mask": mask}, **kwargs))
        ended = self._ended
        rest = marks if marks is None or ended is None else marks & ~ended
        self._ended = None if marks is None or ended is None else ended & ~marks
        if rest is None or bool(rest.all()):
            return self.begun(self.gym.reset(options=options, **kwargs))
        if bool(rest.any()):
            raise EnvError(
                f"{self.gym} cannot reset its environments {rest.reshape(-1).nonzero().flatten().tolist()} alone: only "
                "those whose episode ended with the last step have been reset. Reset all of them, or create it with "
                "autoreset_mode=AutoresetMode.DISABLED."
            )
        return self._tensordict(self._fresh)

    def begun(self, values: Any) -> TensorDict:
        """What a reset has returned, as data."""
        if not isinstance(values, tuple) or len(values) != 2:
            raise EnvError(f"{self._env}: reset must return (observation, info).")
        return self._tensordict(self._seen(values[0]))

    # Values ---------------------------------------------------------------------------------------

    def _seen(self, observation: Any) -> Tensors:
        seen = {key: self._tensor(_at(observation, path)) for key, path, _ in self._observations}
        for key, _, dtype in self._observations:
            if (value := seen[key]).dtype is not dtype and value.is_floating_point():
                seen[key] = value.to(dtype)
        if self.marks_missing:
            seen["observation_missing"] = torch.zeros((*self._batch, 1), dtype=torch.bool, device=self.device)
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


def copies_of(data: TensorDictBase) -> Tensors:
    """The entries of what a step or a reset returned, in memory that the environment does not write again."""
    return {key: data.get(key).clone() for key in leaf_keys(data)}


def _like(mask: Tensor, value: Tensor) -> Tensor:
    """A mask ``[num_envs, 1]`` with the number of dimensions of ``value``."""
    return mask.reshape(len(mask), *[1] * (value.ndim - 1))


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
