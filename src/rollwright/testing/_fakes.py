"""Fake environments that count, or move seven numbers, and what fake environments are made of."""

from __future__ import annotations

import random
import string
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import TensorDictModuleBase

from rollwright._keys import NestedKey, key_str, leaf_keys
from rollwright.data.specs import Binary, Categorical, Composite, NonTensor, TensorSpec, Unbounded
from rollwright.envs.base import EnvBase
from rollwright.errors import EnvError, EnvKeyError


class UnseededEnv(EnvBase):
    """An environment with no randomness of its own; what is random comes from torch's global generator."""

    def _set_seed(self, seed: int | None) -> None:
        """Nothing to do."""


def check_actions(env: EnvBase, tensordict: TensorDictBase) -> None:
    """Test that ``tensordict`` holds every action of ``env`` with as many elements as its spec.

    Policies that are ported from elsewhere write actions of other dtypes, or without a trailing dimension
    of one; the fakes cast and reshape them.

    Raises:
        EnvKeyError: an action is missing.
        EnvError: an action has another number of elements, or is NaN.
    """
    for key in env.action_keys:
        value = tensordict.get(key, None)
        if value is None:
            raise EnvKeyError(
                f"{env}: step got no {key!r}. It got {key_str(leaf_keys(tensordict)) or 'nothing'}. "
                "Let the policy write it."
            )
        spec = env.full_action_spec[key]
        if not isinstance(spec, NonTensor):
            check_action(env, key, value, tensordict.batch_size + spec.shape[env.ndim :])


def check_action(env: EnvBase, key: NestedKey, value: torch.Tensor, shape: torch.Size) -> None:
    """Test one action; see :func:`check_actions`."""
    if value.numel() != shape.numel():
        raise EnvError(
            f"{env}: step got {key!r} with shape {list(value.shape)}, expected {list(shape)}. "
            "Reshape the policy's output."
        )
    if value.is_floating_point() and bool(value.isnan().any()):
        raise EnvError(f"{env}: step got NaN in {key!r}. Look for the first NaN in the policy.")


def reset_rows(env: EnvBase, tensordict: TensorDictBase | None) -> torch.Tensor:
    """Which environments of the batch are to be reset: bool ``[*batch, 1]``, True in all for a plain reset.

    Where several groups of flags hold a ``"_reset"``, one that is marked suffices.
    """
    rows: torch.Tensor | None = None
    given = TensorDict() if tensordict is None else tensordict
    for key in env.reset_keys:
        mask = given.get(key, None)
        if mask is not None:
            marked = mask.flatten(env.ndim).any(-1, keepdim=True)
            rows = marked if rows is None else rows | marked
    if rows is None:
        return torch.ones((*env.batch_size, 1), dtype=torch.bool, device=env.device)
    return rows


class RandomStrings:
    """Lower-case text of ``min_size`` to ``max_size`` letters from a generator of its own."""

    def __init__(self, min_size: int, max_size: int) -> None:
        self.min_size, self.max_size = min_size, max_size
        self.generator = random.Random(0)

    def __call__(self) -> str:
        size = self.generator.randint(self.min_size, self.max_size)
        return "".join(self.generator.choices(string.ascii_lowercase, k=size))


class CountingEnv(UnseededEnv):
    """Counts up by its action, 0 or 1; for tests of everything that looks at time and at boundaries.

    ``observation`` is the count, int32 ``[*batch, 1]``; terminated when it exceeds ``max_steps``; the
    reward is 0.
    """

    count: torch.Tensor
    max_steps: Any
    start_val: Any

    def __init__(self, max_steps: int = 5, start_val: int = 0, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.max_steps = max_steps
        self.start_val = start_val
        shape = (*self.batch_size, 1)
        self.observation_spec = Composite(observation=Unbounded(shape, dtype=torch.int32), shape=self.batch_size)
        self.reward_spec = Unbounded(shape)
        self.done_spec = Categorical(2, shape=shape, dtype=torch.bool)
        self.action_spec = Binary(1, shape=shape)
        self.register_buffer("count", torch.zeros(shape, dtype=torch.int32, device=self.device))

    def _reset(self, tensordict: TensorDictBase | None = None, **kwargs: Any) -> TensorDictBase:
        self.count.copy_(torch.where(reset_rows(self, tensordict), self.start_val, self.count))
        return self._counted()

    def _step(self, tensordict: TensorDictBase) -> TensorDictBase:
        check_actions(self, tensordict)
        self.count += self._increment(tensordict).reshape(self.count.shape)
        reward = torch.zeros(self.count.shape, device=self.device)
        return self._counted().set("reward", reward)

    def _increment(self, tensordict: TensorDictBase) -> torch.Tensor:
        action: torch.Tensor = tensordict[self.action_key]
        return action.to(self.count)

    def _counted(self) -> TensorDictBase:
        done = self.count > self._limit()
        fields = {"observation": self.count.clone(), "done": done, "terminated": done.clone()}
        return TensorDict(fields, self.batch_size, device=self.device)

    def _limit(self) -> Any:
        return self.max_steps


class IncrementingEnv(CountingEnv):
    """:class:`CountingEnv` that counts every step, whatever the action."""

    def _increment(self, tensordict: TensorDictBase) -> torch.Tensor:
        return torch.ones_like(self.count)


class CountingEnvWithString(CountingEnv):
    """:class:`CountingEnv` with a random ``string`` beside the count; for tests of non-tensor data."""

    def __init__(self, *args: Any, max_size: int = 30, min_size: int = 4, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.max_size, self.min_size = max_size, min_size
        self.get_random_string = RandomStrings(min_size, max_size)
        self.full_observation_spec["string"] = NonTensor(
            shape=self.batch_size, device=self.device, example_data=self.get_random_string()
        )

    def _set_seed(self, seed: int | None) -> None:
        self.get_random_string.generator.seed(seed)

    def _counted(self) -> TensorDictBase:
        counted = super()._counted()
        counted.set_non_tensor("string", self.get_random_string())
        return counted


class CountingBatchedEnv(CountingEnv):
    """:class:`CountingEnv` whose rows have limits and starts of their own; for episodes of different lengths.

    Args:
        max_steps: of shape ``batch_size``.
        start_val: of shape ``batch_size``, or one number for all.
    """

    def __init__(
        self, max_steps: torch.Tensor | None = None, start_val: torch.Tensor | None = None, **kwargs: Any
    ) -> None:
        super().__init__(**kwargs)
        limits = torch.tensor(5) if max_steps is None else max_steps
        starts = torch.zeros((), dtype=torch.int32) if start_val is None else start_val
        if limits.shape != self.batch_size:
            raise RuntimeError(
                f"max_steps: expected one for each environment, shape {list(self.batch_size)}, got "
                f"{list(limits.shape)}. Pass a tensor of shape batch_size."
            )
        if starts.numel() not in (1, self.numel()):
            raise RuntimeError(
                f"start_val: expected one number or shape {list(self.batch_size)}, got {list(starts.shape)}. "
                "Pass a tensor of shape batch_size."
            )
        self.max_steps = limits
        self.start_val = starts.to(self.count).reshape(self.count.shape if starts.numel() > 1 else ())

    def _limit(self) -> Any:
        return self.max_steps.to(self.count.device).unsqueeze(-1)


class CountingEnvCountPolicy(TensorDictModuleBase):
    """Counts with every step: writes the action 1 into a :class:`CountingEnv`'s data."""

    def __init__(self, action_spec: TensorSpec, action_key: NestedKey = "action") -> None:
        super().__init__()
        if isinstance(action_spec, Composite):
            raise TypeError(
                "action_spec: expected the spec of one action, got a Composite. Pass "
                "env.full_action_spec[env.action_key]."
            )
        self.action_spec = action_spec
        self.action_key = action_key
        self.in_keys = []
        self.out_keys: list[Any] = [action_key]

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Write the action."""
        return tensordict.set(self.action_key, self.action_spec.zero() + 1)
