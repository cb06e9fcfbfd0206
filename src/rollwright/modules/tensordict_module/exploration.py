"""Exploration: modules that change an action while ``ExplorationType.RANDOM`` is set."""

from __future__ import annotations

import math
import sys
from typing import Any

import torch
from tensordict import TensorDictBase
from tensordict.nn import InteractionType, TensorDictModuleBase
from tensordict.nn.probabilistic import interaction_type
from tensordict.utils import expand_as_right, expand_right
from torch import Tensor

from rollwright._foreign import kind_in
from rollwright._keys import NestedKey
from rollwright._warnings import warn_user
from rollwright.data.specs import Composite, TensorSpec, to_torchrl
from rollwright.modules.tensordict_module.safe import own_spec, project_outputs

__all__ = [
    "AdditiveGaussianModule",
    "EGreedyModule",
    "OrnsteinUhlenbeckProcessModule",
    "Spread",
    "explores",
    "flags_of",
    "random_actions",
    "set_exploration_modules_spec_from_env",
]


def explores() -> bool:
    """Whether actions are to be changed: under ``ExplorationType.RANDOM``, or where none is set."""
    return interaction_type() in (InteractionType.RANDOM, None)


def random_actions(spec: Any, like: Tensor, mask: Tensor | None = None) -> Tensor:
    """Random members of a spec in the shape of an action.

    Raises:
        ValueError: the shapes do not fit.
    """
    added = like.shape[: len(like.shape) - len(spec.shape)]
    if (*added, *spec.shape) != tuple(like.shape):
        raise ValueError(f"spec: expected shape {list(like.shape)}, that of the action, got {list(spec.shape)}.")
    if mask is not None:
        spec, added = spec.expand(like.shape) if added else spec, torch.Size(())
        spec.update_mask(mask)
    value: Tensor = spec.rand(added)
    return value.to(like.device)


class _Annealed(TensorDictModuleBase):
    """An exploration module whose strength falls linearly with ``step``.

    Args:
        name: of the strength.
        first: at the beginning.
        last: at the end.
        steps: number of frames from ``first`` to ``last``.
        error: for bad values.

    Raises:
        Exception: of class ``error``: ``last`` is greater than ``first``.
    """

    def __init__(
        self, name: str, first: float, last: float, steps: int, device: Any, error: type[Exception] = RuntimeError
    ) -> None:
        super().__init__()
        if last > first:
            raise error(f"{name}_end: expected at most {name}_init={first}, got {last}. It falls, or stays as it is.")
        self._strength, self.annealing_num_steps = name, steps
        self.register_buffer(f"{name}_init", torch.as_tensor(first, device=device))
        self.register_buffer(f"{name}_end", torch.as_tensor(last, device=device))
        self.register_buffer(name, torch.as_tensor(first, dtype=torch.float32, device=device).clone())

    def step(self, frames: int = 1) -> None:
        """Move on by a number of frames.

        Raises:
            ValueError: ``annealing_num_steps`` is not positive.
        """
        if self.annealing_num_steps <= 0:
            raise ValueError(f"annealing_num_steps: expected a positive number, got {self.annealing_num_steps}.")
        name = self._strength
        now, first, last = (getattr(self, each) for each in (name, f"{name}_init", f"{name}_end"))
        for _ in range(frames):
            now.copy_(torch.maximum(last, now - (first - last) / self.annealing_num_steps))

    def _action_specs(self, spec: Any, key: NestedKey) -> Composite | None:
        own = own_spec(spec)
        if own is None or isinstance(own, Composite):
            return own
        return Composite({key: own}, shape=own.shape[:-1])


class EGreedyModule(_Annealed):
    """Replaces the action by a random one with a probability that falls from ``eps_init`` to ``eps_end``.

    Args:
        spec: of the action, of one environment or of the batch; or a Composite with it.
        eps_init: the probability at first.
        eps_end: the probability at last.
        annealing_num_steps: number of frames of :meth:`step` in between.
        action_key: the action.
        action_mask_key: actions that are allowed.
        device: of the buffers.

    Raises:
        RuntimeError: ``eps_end`` is greater than ``eps_init``.

    Example:
        >>> from tensordict import TensorDict
        >>> from rollwright.data import Categorical
        >>> module = EGreedyModule(Categorical(2), eps_init=1.0, eps_end=0.0, annealing_num_steps=10)
        >>> module.step(10)
        >>> module(TensorDict(action=torch.tensor(1)))["action"], module.eps
        (tensor(1), tensor(0.))
    """

    eps: Tensor
    in_keys: Any
    out_keys: Any

    def __init__(
        self,
        spec: TensorSpec | None,
        eps_init: float = 1.0,
        eps_end: float = 0.1,
        annealing_num_steps: int = 1000,
        *,
        action_key: NestedKey = "action",
        action_mask_key: NestedKey | None = None,
        device: Any = None,
    ) -> None:
        super().__init__("eps", eps_init, eps_end, annealing_num_steps, device)
        self.action_key, self.action_mask_key = action_key, action_mask_key
        self.in_keys = [action_key, *([] if action_mask_key is None else [action_mask_key])]
        self.out_keys = [action_key]
        own = self._action_specs(spec, action_key)
        self._spec = own if own is None or device is None else own.to(device)

    @property
    def spec(self) -> Any:
        """Of the action, in a Composite."""
        return self._spec

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Replace the action, of each element of the batch by itself.

        Raises:
            RuntimeError: there is no spec.
            KeyError: the mask is missing.
        """
        if not explores():
            return tensordict
        key = self.action_key
        inner = tensordict.get(key[:-1]) if isinstance(key, tuple) and len(key) > 1 else tensordict
        mask = None if self.action_mask_key is None else tensordict.get(self.action_mask_key, None)
        if self.action_mask_key is not None and mask is None:
            raise KeyError(f"action_mask_key: {self.action_mask_key!r} is missing.")
        return tensordict.set(key, self.on_tensors(tensordict.get(key), mask, inner.batch_size))

    def on_tensors(self, action: Tensor, mask: Tensor | None, batch: torch.Size) -> Tensor:
        """The action, replaced for some elements of a batch."""
        if self._spec is None:
            raise RuntimeError("spec: an EGreedyModule draws actions from it. Pass env.action_spec.")
        chance = torch.rand(batch, device=self.eps.device) < self.eps
        other = random_actions(self._spec[self.action_key], action, mask)
        return torch.where(chance if chance.shape == action.shape else expand_as_right(chance, action), other, action)


class AdditiveGaussianModule(_Annealed):
    """Adds normal noise to the action, and projects it onto its spec.

    Args:
        spec: of the action, or a Composite with it. None: a collector fills in that of its environment.
        sigma_init: factor of the noise at first.
        sigma_end: the factor at last.
        annealing_num_steps: number of frames of :meth:`step` in between.
        mean: of the noise.
        std: of the noise, before the factor.
        action_key: the action.
        safe: has no effect: the action is projected in any case.
        device: of the buffers.

    Raises:
        RuntimeError: ``sigma_end`` is greater than ``sigma_init``.

    Example:
        >>> from tensordict import TensorDict
        >>> from rollwright.data import Bounded
        >>> module = AdditiveGaussianModule(Bounded(-1, 1, shape=(2,)), sigma_init=9.0)
        >>> bool((module(TensorDict(action=torch.zeros(2)))["action"].abs() <= 1).all())
        True
    """

    sigma: Tensor
    in_keys: Any
    out_keys: Any
    mean: Tensor
    std: Tensor

    def __init__(
        self,
        spec: TensorSpec | None = None,
        sigma_init: float = 1.0,
        sigma_end: float = 0.1,
        annealing_num_steps: int = 1000,
        mean: float = 0.0,
        std: float = 1.0,
        *,
        action_key: NestedKey = "action",
        safe: bool = False,
        device: Any = None,
    ) -> None:
        super().__init__("sigma", sigma_init, sigma_end, annealing_num_steps, device)
        self.action_key, self.safe = action_key, safe
        self.in_keys, self.out_keys = [action_key], [action_key]
        self.register_buffer("mean", torch.as_tensor(mean, device=device))
        self.register_buffer("std", torch.as_tensor(std, device=device))
        self._spec = self._action_specs(spec, action_key)

    @property
    def spec(self) -> Any:
        """Of the action, in a Composite."""
        return self._spec

    @spec.setter
    def spec(self, value: Any) -> None:
        self._spec = self._action_specs(value, self.action_key)

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Add noise.

        Raises:
            RuntimeError: there is no spec.
        """
        if explores():
            tensordict.set(self.action_key, self.on_tensors(tensordict.get(self.action_key)))
        return tensordict

    def on_tensors(self, action: Tensor) -> Tensor:
        """The action with noise."""
        if self._spec is None:
            raise RuntimeError("spec: an AdditiveGaussianModule projects onto it. Pass env.action_spec, or set spec.")
        mean, std = (
            each if each.is_floating_point() else each.to(torch.get_default_dtype()) for each in (self.mean, self.std)
        )
        # The numbers of torch.normal(mean, std), without its test of std.
        noise = torch.empty(action.shape, dtype=mean.dtype, device=mean.device).normal_().mul_(std).add_(mean)
        noise = noise.to(action.device).mul_(self.sigma)
        return self._spec[self.action_key].project(action + noise)  # type: ignore[no-any-return]


class OrnsteinUhlenbeckProcessModule(_Annealed):
    """Adds noise of an Ornstein-Uhlenbeck process to the action.

    ``noise_t = noise_{t-1} + theta * (mu - noise_{t-1}) * dt + sigma_t * sqrt(dt) * normal``; each environment has its
    own, which begins at ``x0`` where ``"is_init"`` is True (see the transform ``InitTracker``). It is kept in the data,
    in ``"_ou_prev_noise"`` and ``"_ou_steps"``.

    Args:
        spec: of the action, or a Composite with it.
        eps_init: factor of the noise at first.
        eps_end: the factor at last.
        annealing_num_steps: number of frames of :meth:`step` in between.
        theta: pull towards ``mu``.
        mu: long-term mean.
        sigma: strength of the normal noise.
        dt: time step.
        x0: noise at the beginning of an episode; default 0.
        sigma_min: sigma falls to this; None: it stays.
        n_steps_annealing: number of steps of an episode in which it falls.
        action_key: the action.
        is_init_key: where an episode begins.
        safe: project the action onto its spec.
        device: of the buffers.

    Raises:
        ValueError: ``eps_end`` is greater than ``eps_init``.
        RuntimeError: there is no spec.

    Example:
        >>> from tensordict import TensorDict
        >>> from rollwright.data import Bounded
        >>> module = OrnsteinUhlenbeckProcessModule(Bounded(-1, 1, shape=(2,)))
        >>> td = module(TensorDict(action=torch.zeros(2), is_init=torch.ones(1, dtype=torch.bool)))
        >>> td["_ou_steps"], td["action"].shape
        (tensor(1), torch.Size([2]))
    """

    eps: Tensor
    x0: Tensor
    in_keys: Any
    out_keys: Any

    def __init__(
        self,
        spec: TensorSpec,
        eps_init: float = 1.0,
        eps_end: float = 0.1,
        annealing_num_steps: int = 1000,
        theta: float = 0.15,
        mu: float = 0.0,
        sigma: float = 0.2,
        dt: float = 1e-2,
        x0: Any = None,
        sigma_min: float | None = None,
        n_steps_annealing: int = 1000,
        *,
        action_key: NestedKey = "action",
        is_init_key: NestedKey = "is_init",
        safe: bool = True,
        device: Any = None,
    ) -> None:
        super().__init__("eps", eps_init, eps_end, annealing_num_steps, device, ValueError)
        own = self._action_specs(spec, action_key)
        if own is None:
            raise RuntimeError("spec: expected the spec of the action, got None. Pass env.action_spec.")
        self._spec, self.safe = own, safe
        self.theta, self.mu, self.dt = theta, mu, dt
        slope = 0.0 if sigma_min is None else -(sigma - sigma_min) / n_steps_annealing
        self.spread = Spread(sigma, sigma if sigma_min is None else sigma_min, slope, dt)
        self.register_buffer("x0", torch.as_tensor(0.0 if x0 is None else x0, device=device))
        self.action_key, self.is_init_key = action_key, is_init_key
        self.in_keys = [action_key]
        self.out_keys = [action_key, "_ou_prev_noise", "_ou_steps"]
        if safe:
            self.register_forward_hook(project_outputs)

    @property
    def spec(self) -> Composite:
        """Of the action, in a Composite."""
        return self._spec

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Add noise."""
        if not explores():
            return tensordict
        key = self.action_key
        inner = tensordict.get(key[:-1]) if isinstance(key, tuple) and len(key) > 1 else tensordict
        is_init = tensordict.get(self.is_init_key, None)
        if is_init is None:
            warn_user(
                f"is_init_key: {self.is_init_key!r} is missing, so noise goes on over the ends of episodes. Add the "
                "transform InitTracker() to the environment.",
            )
        else:
            is_init = flags_of(is_init, inner.batch_size)
        action, noise, steps = tensordict.get(key), tensordict.get("_ou_prev_noise", None), None
        if noise is None:
            noise = torch.zeros(action.shape, device=action.device)
            steps = torch.zeros(inner.batch_size, dtype=torch.long, device=action.device)
        else:
            steps = tensordict.get("_ou_steps")
        action, noise, steps = self.on_tensors(action, noise, steps, is_init)
        return tensordict.set("_ou_prev_noise", noise).set(key, action).set("_ou_steps", steps)

    def on_tensors(
        self, action: Tensor, noise: Tensor, steps: Tensor, is_init: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The action with noise, the noise, and the number of steps."""
        if is_init is not None:
            noise = torch.masked_fill(noise, expand_right(is_init, noise.shape), 0)
            steps = torch.masked_fill(steps, is_init, 0)
        x0 = self.x0
        noise = noise + x0
        drift = self.theta * (self.mu - noise) * self.dt
        noise = noise + drift + torch.randn_like(noise).mul_(self.spread.at(steps, noise))
        return action + self.eps * noise, noise - x0, steps + 1


class Spread:
    """The factor of the normal noise of a process, which may fall from step to step.

    Args:
        sigma: deviation in the first step.
        sigma_min: the least one.
        slope: by which it changes with each step.
        dt: length of a step.
    """

    def __init__(self, sigma: float, sigma_min: float, slope: float, dt: float) -> None:
        self._sigma, self._sigma_min, self._slope, self._root = sigma, sigma_min, slope, math.sqrt(dt)
        # In the precision that it has where it changes.
        self._constant = None if slope else float(torch.tensor(float(max(sigma, sigma_min)), device="cpu") * self._root)

    def at(self, steps: Tensor, noise: Tensor) -> Any:
        """The factor after a number of steps, to be multiplied with noise of the shape of ``noise``."""
        if self._constant is not None:
            return self._constant
        count: Any = expand_as_right(steps, noise)
        return torch.clamp_min(self._slope * count + self._sigma, self._sigma_min) * self._root


def flags_of(is_init: Tensor, batch: torch.Size) -> Tensor:
    """The flag of each element of the batch of the actions."""
    if (is_init.ndim > 1 and is_init.shape[-1] == 1) or (is_init.shape == (1,) and not batch):
        is_init = is_init.squeeze(-1)
    if is_init.ndim > len(batch):
        return is_init.sum(tuple(range(len(batch), is_init.ndim)), dtype=torch.bool)
    return is_init if is_init.shape == batch else expand_right(is_init, batch)


def set_exploration_modules_spec_from_env(policy: Any, env: Any) -> None:
    """Give the actions' spec of ``env`` to each ``AdditiveGaussianModule`` in a policy that has none yet."""
    for part in policy.modules() if isinstance(policy, torch.nn.Module) else ():
        if isinstance(part, AdditiveGaussianModule) and part.spec is None:
            part.spec = env.full_action_spec_unbatched
        elif "torchrl" in sys.modules and "AdditiveGaussianModule" in kind_in("torchrl", part) and part.spec is None:
            part.spec = to_torchrl(env.full_action_spec_unbatched)
