"""Fake environments with one peculiarity each: no state, objects as data, growing shapes, errors, images."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase
from torch import nn

from rollwright.data.specs import Bounded, Categorical, Composite, NonTensor, TensorSpec, Unbounded
from rollwright.envs.base import EnvBase
from rollwright.errors import EnvError
from rollwright.testing._fakes import (
    RandomStrings,
    UnseededEnv,
    check_actions,
)


class StateLessCountingEnv(UnseededEnv):
    """Adds its action to the ``count`` that it is given until ``max_count``; for ``batch_locked=False``.

    A plain reset keeps ``count`` and ``max_count`` where the data has them; else, and where ``"_reset"``
    is given, it starts at 0 with a random ``max_count`` from 10 to 19.
    """

    batch_locked = False

    def __init__(self) -> None:
        super().__init__()
        self.observation_spec = Composite(
            count=Unbounded((1,), dtype=torch.int32), max_count=Unbounded((1,), dtype=torch.int32)
        )
        self.state_spec = self.observation_spec
        self.action_spec = Unbounded((1,), dtype=torch.int32)
        flag = Unbounded((1,), dtype=torch.bool)
        self.done_spec = Composite(done=flag, terminated=flag.clone(), truncated=flag.clone())
        self.reward_spec = Unbounded((1,), dtype=torch.float32)

    def _reset(self, tensordict: TensorDictBase | None = None, **kwargs: Any) -> TensorDictBase:
        given = TensorDict({}, self.batch_size, device=self.device) if tensordict is None else tensordict
        shape = (*given.batch_size, 1)
        kept = given.empty() if given.get("_reset", None) is not None else given
        count, max_count = kept.get("count", None), kept.get("max_count", None)
        if count is None:
            count = torch.zeros(shape, dtype=torch.int32, device=given.device)
        if max_count is None:
            max_count = torch.randint(10, 20, shape, dtype=torch.int32, device=given.device)
        fields = {"count": count.clone(), "max_count": max_count.clone()}
        return TensorDict(fields, given.batch_size, device=given.device)

    def _step(self, tensordict: TensorDictBase) -> TensorDictBase:
        check_actions(self, tensordict)
        max_count = tensordict["max_count"]
        count = tensordict["count"] + tensordict["action"]
        reward = torch.zeros(count.shape, device=count.device)
        fields = {
            "count": count,
            "max_count": max_count.clone(),
            "reward": reward,
            "terminated": count >= max_count,
        }
        return TensorDict(fields, tensordict.batch_size, device=tensordict.device)


class EnvWithMetadata(UnseededEnv):
    """Carries an object through its state: ``non_tensor``, an int that counts steps."""

    def __init__(self) -> None:
        super().__init__()
        self.observation_spec = Composite(tensor=Unbounded((3,)), non_tensor=NonTensor(shape=(), example_data=0))
        self.state_spec = Composite(non_tensor=NonTensor(shape=(), example_data=0))
        self.reward_spec = Unbounded((1,))
        self.action_spec = Unbounded((1,))

    def _reset(self, tensordict: TensorDictBase | None = None, **kwargs: Any) -> TensorDictBase:
        return self._observe(0)

    def _step(self, tensordict: TensorDictBase) -> TensorDictBase:
        check_actions(self, tensordict)
        outcome = self._observe(tensordict["non_tensor"] + 1)
        return outcome.update({"reward": torch.zeros(1), "done": torch.zeros(1, dtype=torch.bool)})

    def _observe(self, count: int) -> TensorDictBase:
        seen = TensorDict({"tensor": torch.zeros(3)})
        seen.set_non_tensor("non_tensor", count)
        return seen


class EnvWithDynamicSpec(UnseededEnv):
    """Its ``observation`` ``[3, t + 1, 2]`` grows with time t, which fills it; done at ``max_count``."""

    def __init__(self, max_count: int = 5) -> None:
        super().__init__()
        self.observation_spec = Composite(observation=Unbounded((3, -1, 2)))
        self.action_spec = Bounded(-1.0, 1.0, (2,))
        self.done_spec = Categorical(2, shape=(1,), dtype=torch.bool)
        self.add_truncated_keys()
        self.reward_spec = Unbounded((1,))
        self.count = 0
        self.max_count = max_count

    def _reset(self, tensordict: TensorDictBase | None = None, **kwargs: Any) -> TensorDictBase:
        self.count = 0
        return self._observe()

    def _step(self, tensordict: TensorDictBase) -> TensorDictBase:
        check_actions(self, tensordict)
        self.count += 1
        done = torch.tensor([self.count >= self.max_count])
        # All three flags at once, as some simulators report the end of an episode.
        flags = {name: done.clone() for name in ("done", "terminated", "truncated")}
        return self._observe().update({"reward": torch.zeros(1), **flags})

    def _observe(self) -> TensorDict:
        return TensorDict({"observation": torch.full((3, self.count + 1, 2), float(self.count))})


class EnvThatDoesNothing(UnseededEnv):
    """Observes nothing, earns nothing, takes no action, never ends; for the plumbing alone."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.full_reward_spec = Composite(shape=self.batch_size)

    def _reset(self, tensordict: TensorDictBase | None = None, **kwargs: Any) -> TensorDictBase:
        return TensorDict({}, self.batch_size, device=self.device)

    def _step(self, tensordict: TensorDictBase) -> TensorDictBase:
        done = torch.zeros((*self.batch_size, 1), dtype=torch.bool, device=self.device)
        return TensorDict({"done": done}, self.batch_size, device=self.device)


class Str2StrEnv(EnvBase):
    """Observes and takes strings; done, and rewarded, in one step of a hundred; for text."""

    def __init__(self, min_size: int = 4, max_size: int = 10, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.observation_spec = Composite(observation=NonTensor(shape=(), example_data="an observation!"))
        self.action_spec = Composite(action=NonTensor(shape=(), example_data="an action!"))
        self.reward_spec = Unbounded((1,))
        self.min_size, self.max_size = min_size, max_size
        self.get_random_string = RandomStrings(min_size, max_size)

    def _set_seed(self, seed: int | None) -> None:
        self.get_random_string.generator.seed(seed)

    def _reset(self, tensordict: TensorDictBase | None = None, **kwargs: Any) -> TensorDictBase:
        seen = TensorDict({}, device=self.device)
        seen.set_non_tensor("observation", self.get_random_string())
        return seen

    def _step(self, tensordict: TensorDictBase) -> TensorDictBase:
        check_actions(self, tensordict)
        if not isinstance(tensordict["action"], str):
            got = type(tensordict["action"]).__name__
            raise EnvError(f"{self}: step expected a string in 'action', got {got}. Write one with set_non_tensor.")
        rare = {
            "done": torch.zeros(1, dtype=torch.bool).bernoulli_(0.01),
            "reward": torch.zeros(1).bernoulli_(0.01),
        }
        return self._reset().update(rare)


class EnvThatErrorsAfter10Iters(UnseededEnv):
    """Raises ``RuntimeError("max steps!")`` in its eleventh step; to test how errors reach the caller."""

    def __init__(self) -> None:
        super().__init__()
        self.action_spec = Composite(action=Unbounded((1,)))
        self.reward_spec = Composite(reward=Unbounded((1,)))
        self.done_spec = Composite(done=Categorical(2, shape=(1,), dtype=torch.bool))
        self.observation_spec = Composite(observation=Unbounded((1,)))
        self.counter = 0

    def _reset(self, tensordict: TensorDictBase | None = None, **kwargs: Any) -> TensorDictBase:
        return self.full_observation_spec.zero()

    def _step(self, tensordict: TensorDictBase) -> TensorDictBase:
        check_actions(self, tensordict)
        if self.counter >= 10:
            raise RuntimeError("max steps!")
        self.counter += 1
        outcome = self.full_observation_spec.zero().update(self.full_reward_spec.zero())
        return outcome.update(self.full_done_spec.zero())


class FastImageEnv(UnseededEnv):
    """Shows one image ``[*batch, channels, height, width]`` for ever, reward 1; for measuring the rest."""

    def __init__(
        self,
        img_shape: Sequence[int] = (4, 84, 84),
        device: torch.device | str | None = None,
        batch_size: Sequence[int] = (),
    ) -> None:
        super().__init__(device=device, batch_size=tuple(batch_size))
        self.img_shape = tuple(img_shape)
        batch = self.batch_size
        shape = (*batch, *self.img_shape)
        self.observation_spec = Composite(pixels=Unbounded(shape), shape=batch)
        self.action_spec = Bounded(-1.0, 1.0, (*batch, 4))
        self.reward_spec = Unbounded((*batch, 1))
        self.done_spec = Unbounded((*batch, 1), dtype=torch.bool)
        image = torch.rand(shape, generator=torch.Generator().manual_seed(0))
        self.register_buffer("_image", image if device is None else image.to(device), persistent=False)

    _image: torch.Tensor

    def _reset(self, tensordict: TensorDictBase | None = None, **kwargs: Any) -> TensorDictBase:
        return TensorDict({"pixels": self._image.clone()}, self.batch_size, device=self.device)

    def _step(self, tensordict: TensorDictBase) -> TensorDictBase:
        check_actions(self, tensordict)
        ones = torch.ones((*self.batch_size, 1), device=self.device)
        flags = torch.zeros(ones.shape, dtype=torch.bool, device=self.device)
        return self._reset().update({"reward": ones, "done": flags})


class MockBatchedLockedEnv(EnvBase):
    """Counts the steps since it was seeded, one count for the whole batch; for seeds and batch sizes.

    The count starts at ``seed % 17`` and is both observation and reward; a reset does not set it back.
    Done when it reaches ``max(c + 100, 2 * c)``, where ``c`` is the count at the last reset.
    """

    def __init__(
        self,
        device: torch.device | str | None = "cpu",
        batch_size: torch.Size | tuple[int, ...] | list[int] | None = None,
        *,
        observation_spec: Composite | None = None,
        action_spec: TensorSpec | None = None,
        state_spec: Composite | None = None,
        reward_spec: TensorSpec | None = None,
        done_spec: TensorSpec | None = None,
    ) -> None:
        super().__init__(device=device, batch_size=batch_size)
        shape = (*self.batch_size, 1)
        counted = Composite(observation=Unbounded(shape, dtype=torch.get_default_dtype()), shape=self.batch_size)
        self.observation_spec = counted if observation_spec is None else observation_spec
        self.state_spec = self._default_state(counted) if state_spec is None else state_spec
        self.action_spec = Unbounded(shape) if action_spec is None else action_spec
        self.reward_spec = Unbounded(shape, dtype=torch.get_default_dtype()) if reward_spec is None else reward_spec
        self.done_spec = Categorical(2, shape=shape, dtype=torch.bool) if done_spec is None else done_spec
        self.counter = 0
        self.max_val = 100

    def _default_state(self, counted: Composite) -> Composite:
        return counted

    def _set_seed(self, seed: int | None) -> None:
        if seed is not None:
            self.counter = seed % 17
            self.max_val = max(self.counter + 100, self.counter * 2)

    def _reset(self, tensordict: TensorDictBase | None = None, **kwargs: Any) -> TensorDictBase:
        self.max_val = max(self.counter + 100, self.counter * 2)
        return self._count(self.batch_size if tensordict is None else tensordict.batch_size)

    def _step(self, tensordict: TensorDictBase) -> TensorDictBase:
        check_actions(self, tensordict)
        self.counter += 1
        counted = self._count(tensordict.batch_size)
        return counted.set("reward", counted["observation"].clone())

    def _count(self, batch: torch.Size) -> TensorDict:
        shape = (*batch, *self.full_observation_spec["observation"].shape[self.ndim :])
        observation = torch.full(shape, float(self.counter), dtype=torch.get_default_dtype())
        done = torch.full((*batch, 1), self.counter >= self.max_val)
        fields = {"observation": observation, "done": done, "terminated": done.clone()}
        return TensorDict(fields, batch, device=self.device)


class MockSerialEnv(MockBatchedLockedEnv):
    """:class:`MockBatchedLockedEnv` without a batch or a state; for tests of environments one by one."""

    def _default_state(self, counted: Composite) -> Composite:
        return Composite(shape=self.batch_size)


class MockBatchedUnLockedEnv(MockBatchedLockedEnv):
    """:class:`MockBatchedLockedEnv` that takes the batch size of the data it is given."""

    batch_locked = False


class EnvWithScalarAction(UnseededEnv):
    """Takes actions of shape ``batch_size``, or with ``singleton`` of ``[*batch, 1]``; never done."""

    def __init__(self, singleton: bool = False, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.singleton = singleton
        batch = self.batch_size
        self.action_spec = Bounded(-1.0, 1.0, shape=(*batch, 1) if singleton else batch)
        self.observation_spec = Composite(observation=Unbounded((*batch, 3)), shape=batch)
        self.done_spec = Unbounded((*batch, 1), dtype=torch.bool)
        self.add_truncated_keys()
        self.reward_spec = Unbounded((*batch, 1))

    def _reset(self, tensordict: TensorDictBase | None = None, **kwargs: Any) -> TensorDictBase:
        return self._observe()

    def _step(self, tensordict: TensorDictBase) -> TensorDictBase:
        check_actions(self, tensordict)
        zeros = torch.zeros((*self.batch_size, 1), device=self.device)
        return self._observe().update({"reward": zeros, "done": zeros.bool()})

    def _observe(self) -> TensorDict:
        seen = torch.randn((*self.batch_size, 3), device=self.device)
        return TensorDict({"observation": seen}, self.batch_size, device=self.device)


class ActionObsMergeLinear(nn.Module):
    """A linear layer on action and observation side by side, as in a critic of both."""

    def __init__(self, in_size: int, out_size: int) -> None:
        super().__init__()
        self.linear = nn.Linear(in_size, out_size)

    def forward(self, observation: torch.Tensor, action: torch.Tensor) -> torch.Tensor:
        """``[..., in_size]`` in two parts to ``[..., out_size]``."""
        out: torch.Tensor = self.linear(torch.cat([observation, action], dim=-1))
        return out


class CountingEnvCountModule(nn.Module):
    """The action 1, whatever the input: :class:`CountingEnvCountPolicy` as a plain module."""

    def __init__(self, action_spec: TensorSpec) -> None:
        super().__init__()
        self.action_spec = action_spec

    def forward(self, t: torch.Tensor) -> torch.Tensor:
        """The action."""
        ones: torch.Tensor = self.action_spec.zero() + 1
        return ones
