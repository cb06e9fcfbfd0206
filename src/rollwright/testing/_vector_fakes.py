"""Fakes with observations of seven numbers or as images, moved by discrete or continuous actions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import TensorDictModuleBase
from torch.nn.functional import one_hot

from rollwright.data.specs import Bounded, Categorical, Composite, OneHot, TensorSpec, Unbounded
from rollwright.envs.base import EnvBase
from rollwright.errors import EnvError
from rollwright.testing._fakes import check_actions


class _MockEnv(EnvBase):
    """Moves its observation by ``action / 100``; what the fakes of this file share.

    The observation is there twice: for the policy (``out_key``), which transforms may change, and for
    the environment's own use (``_out_key``), which it reads back with the next step.
    """

    size = 7
    maxstep = 100
    out_key = "observation"
    _out_key = "observation_orig"

    # For tests that reach for attributes of an environment in another process.
    custom_attr = 1

    def __init__(
        self,
        *,
        observation_spec: Composite | None = None,
        action_spec: TensorSpec | None = None,
        state_spec: Composite | None = None,
        reward_spec: TensorSpec | None = None,
        done_spec: TensorSpec | None = None,
        batch_size: torch.Size | tuple[int, ...] | list[int] | None = None,
        from_pixels: bool | None = None,
        dtype: torch.dtype | None = None,
        seed: int = 100,
        device: torch.device | str | None = "cpu",
        allow_done_after_reset: bool = False,
    ) -> None:
        super().__init__(device=device, batch_size=batch_size, allow_done_after_reset=allow_done_after_reset)
        self.dtype = torch.get_default_dtype() if dtype is None else dtype
        self.from_pixels = self.out_key == "pixels" if from_pixels is None else from_pixels
        batch = self.batch_size
        observed = Unbounded((*batch, *self._observation_shape()), dtype=self.dtype)
        both = Composite({self.out_key: observed, self._out_key: observed.clone()}, shape=batch)
        self.observation_spec = both if observation_spec is None else observation_spec
        read_back = Composite({self._out_key: observed.clone()}, shape=batch)
        self.state_spec = read_back if state_spec is None else state_spec
        self.action_spec = self._default_action() if action_spec is None else action_spec
        self.reward_spec = Unbounded((*batch, 1), dtype=self.dtype) if reward_spec is None else reward_spec
        flag = Categorical(2, shape=(*batch, 1), dtype=torch.bool)
        self.done_spec = flag if done_spec is None else done_spec
        self._set_seed(seed)

    @property
    def custom_prop(self) -> int:
        """A property, for tests that read it from afar."""
        return 2

    @property
    def custom_td(self) -> TensorDict:
        """A TensorDict, for tests that read it from afar."""
        return TensorDict({"a": torch.zeros(3)})

    def custom_fun(self) -> int:
        """A method, for tests that call it from afar."""
        return 0

    def _set_seed(self, seed: int | None) -> None:
        if seed is not None:
            self.seed = seed
            self.counter = seed % 17

    def _observation_shape(self) -> tuple[int, ...]:
        return (self.size,)

    def _default_action(self) -> TensorSpec:
        return Bounded(-1.0, 1.0, (*self.batch_size, self._observation_shape()[-1]), dtype=self.dtype)

    # An image holds the numbers on its diagonal: [..., n] or [..., channels, n] inside.

    def _get_in_obs(self, obs: torch.Tensor) -> torch.Tensor:
        return obs

    def _get_out_obs(self, obs: torch.Tensor) -> torch.Tensor:
        return obs

    def _observed(self, obs: torch.Tensor) -> TensorDict:
        shown = self._get_out_obs(obs)
        return TensorDict(
            {self.out_key: shown, self._out_key: shown.clone()}, shown.shape[: self.ndim], device=self.device
        )

    def _action(self, tensordict: TensorDictBase) -> torch.Tensor:
        action: torch.Tensor = tensordict["action"]
        return action

    def _step(self, tensordict: TensorDictBase) -> TensorDictBase:
        check_actions(self, tensordict)
        obs = self._get_in_obs(tensordict[self._out_key])
        action = self._action(tensordict) / self.maxstep
        obs = obs + action.reshape(
            *action.shape[: self.ndim], *[1] * (obs.ndim - action.ndim), *action.shape[self.ndim :]
        )
        reached = torch.isclose(obs, torch.full_like(obs, self.counter + 1)).flatten(self.ndim).any(-1, keepdim=True)
        done = self._ends(reached)
        outcome = self._observed(obs)
        return outcome.update({"reward": reached.to(self.dtype), "done": done, "terminated": done.clone()})

    def _ends(self, reached: torch.Tensor) -> torch.Tensor:
        return reached


class DiscreteActionVecMockEnv(_MockEnv):
    """Seven numbers that one-hot (or integer) actions raise, never done; for value-based policies.

    The first observation is ``seed % 17`` plus the number of resets, in all seven places.
    """

    def __init__(self, *, categorical_action_encoding: bool = False, **kwargs: Any) -> None:
        self.__dict__["categorical_action_encoding"] = categorical_action_encoding
        super().__init__(**kwargs)

    def _default_action(self) -> TensorSpec:
        if self.categorical_action_encoding:
            return Categorical(self.size, shape=self.batch_size)
        return OneHot(self.size, shape=(*self.batch_size, self.size))

    def _action(self, tensordict: TensorDictBase) -> torch.Tensor:
        action: torch.Tensor = tensordict["action"]
        if self.categorical_action_encoding:
            return action.unsqueeze(-1)
        if not bool((action.sum(-1) == 1).all()):
            raise EnvError(f"{self}: step got an 'action' that is not one-hot. Write one 1 and zeros besides.")
        return action

    def _reset(self, tensordict: TensorDictBase | None = None, **kwargs: Any) -> TensorDictBase:
        self.counter += 1
        channels = self._observation_shape()[:-2]
        return self._observed(torch.full((*self.batch_size, *channels, self.size), self.counter, dtype=self.dtype))

    def _ends(self, reached: torch.Tensor) -> torch.Tensor:
        return torch.zeros_like(reached)


class ContinuousActionVecMockEnv(_MockEnv):
    """Seven random numbers that bounded actions move, done when one of them meets a counter; for actors."""

    def _reset(self, tensordict: TensorDictBase | None = None, **kwargs: Any) -> TensorDictBase:
        self.counter += 1
        self.step_count = 0
        return self.full_observation_spec.rand()

    def _step(self, tensordict: TensorDictBase) -> TensorDictBase:
        self.step_count += 1
        return super()._step(tensordict)


class DiscreteActionConvMockEnv(DiscreteActionVecMockEnv):
    """:class:`DiscreteActionVecMockEnv` with its numbers on the diagonal of ``pixels`` ``[1, 7, 7]``."""

    out_key = "pixels"
    _out_key = "pixels_orig"

    def _observation_shape(self) -> tuple[int, ...]:
        return (1, self.size, self.size)

    def _get_in_obs(self, obs: torch.Tensor) -> torch.Tensor:
        return obs.diagonal(0, -1, -2)

    def _get_out_obs(self, obs: torch.Tensor) -> torch.Tensor:
        return obs.diag_embed()


class ContinuousActionConvMockEnv(ContinuousActionVecMockEnv):
    """:class:`ContinuousActionVecMockEnv` with images ``[channels, n, n]``, after a step diagonal ones."""

    out_key = "pixels"
    _out_key = "pixels_orig"
    pixel_shape: tuple[int, ...]

    def __init__(self, *, pixel_shape: Sequence[int] | None = None, **kwargs: Any) -> None:
        self.__dict__["pixel_shape"] = (1, self.size, self.size) if pixel_shape is None else tuple(pixel_shape)
        super().__init__(**kwargs)

    def _observation_shape(self) -> tuple[int, ...]:
        return self.pixel_shape

    def _get_in_obs(self, obs: torch.Tensor) -> torch.Tensor:
        return obs.diagonal(0, -1, -2)

    def _get_out_obs(self, obs: torch.Tensor) -> torch.Tensor:
        return obs.diag_embed()


class DiscreteActionVecPolicy(TensorDictModuleBase):
    """Moves the place after the largest number of ``observation``: the same one-hot actions in every run."""

    in_key = "observation"

    def __init__(self) -> None:
        super().__init__()
        self.in_keys = [self.in_key]
        self.out_keys = ["action"]

    def _numbers(self, tensordict: TensorDictBase) -> torch.Tensor:
        observation: torch.Tensor = tensordict[self.in_key]
        return observation

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Write ``action``, int64 one-hot of the observation's shape."""
        observation = self._numbers(tensordict)
        size = observation.shape[-1]
        largest = size - 1 - observation.flip(-1).argmax(-1)  # the last of several
        return tensordict.set("action", one_hot((largest + 1) % size, size))


class DiscreteActionConvPolicy(DiscreteActionVecPolicy):
    """:class:`DiscreteActionVecPolicy` for ``pixels`` ``[1, 7, 7]``, whose diagonal holds the numbers."""

    in_key = "pixels"

    def _numbers(self, tensordict: TensorDictBase) -> torch.Tensor:
        return super()._numbers(tensordict).diagonal(0, -1, -2).squeeze(-2)
