"""RandomPolicy: actions drawn from the action spec."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import torch
from tensordict import TensorDictBase
from torch import Tensor

from rollwright._foreign import is_torchrl_spec
from rollwright._keys import NestedKey, unravel
from rollwright.data.specs import Binary, Composite, MultiCategorical, MultiOneHot, OneHot, TensorSpec
from rollwright.data.specs.conversion import from_torchrl
from rollwright.data.specs.discrete import DiscreteSpec, choices

_VECTORS = (Binary, MultiCategorical, MultiOneHot, OneHot)  # one action is a vector, whatever its length


class RandomPolicy:
    """A policy that draws every action from its spec, with torch's global generator.

    Args:
        action_spec: of one action, or a Composite of several; TorchRL's are converted. None: a collector fills in that
            of its environment, once.
        action_key: where the action goes when ``action_spec`` is of one action.

    Example:
        >>> from tensordict import TensorDict
        >>> from rollwright.data import Bounded
        >>> policy = RandomPolicy(Bounded(-1, 1, shape=(3,)))
        >>> policy(TensorDict())["action"].shape
        torch.Size([3])
    """

    def __init__(self, action_spec: TensorSpec | None = None, action_key: NestedKey = "action") -> None:
        if is_torchrl_spec(action_spec):
            action_spec = from_torchrl(action_spec)
        if action_spec is not None and not isinstance(action_spec, TensorSpec):
            raise TypeError(
                f"action_spec: expected a spec or None, got {type(action_spec).__name__}. Pass env.action_spec."
            )
        self.action_spec = action_spec
        self.action_key = unravel(action_key)

    def __call__(self, td: TensorDictBase) -> TensorDictBase:
        """Write the action(s) into ``td`` and return it."""
        spec = self.action_spec
        if spec is None:
            raise RuntimeError(
                "action_spec: this RandomPolicy has none yet. Pass RandomPolicy(env.action_spec), or give the policy "
                "to a collector, which fills it in."
            )
        if isinstance(spec, Composite):
            if spec.shape != td.batch_size:
                spec = spec.expand(td.batch_size)
            return td.update(spec.rand())
        return td.set(self.action_key, spec.rand(missing_batch(spec, td.batch_size)))

    def set_action_spec_from_env(self, env: Any) -> None:
        """Take the spec of ``env``'s actions, unless there is one already."""
        if self.action_spec is None:
            self.action_spec = env.full_action_spec

    def with_masks_of(self, env: Any) -> RandomPolicy:
        """A policy that keeps to what ``env`` allows at each step, with the spec of another one of the same make."""
        spec: Any = self.action_spec
        if not isinstance(spec, TensorSpec) or spec is env.full_action_spec:
            return self
        if isinstance(spec, Composite) and not spec.shape:
            spec = spec.expand(env.batch_size)
        own = choices(spec if isinstance(spec, Composite) else Composite({self.action_key: spec}, shape=()))
        live = {
            key: leaf
            for key, leaf in choices(env.full_action_spec).items()
            if key in own and leaf is not own[key] and leaf.same_kind(own[key])
        }
        if not live:
            return self
        new = copy.copy(self)
        new.action_spec = spec.clone()
        for key, leaf in live.items():
            mine: Any = new.action_spec[key] if isinstance(spec, Composite) else new.action_spec
            mine.follow_mask(partial(_either, leaf, own[key].mask))
        return new

    def __repr__(self) -> str:
        return f"RandomPolicy(action_spec={self.action_spec})"


def _either(leaf: DiscreteSpec, mask: Tensor | None) -> Tensor | None:
    now = leaf.mask
    return mask if now is None else now


def missing_batch(spec: TensorSpec, batch: torch.Size) -> torch.Size:
    """The leading dimensions that the spec of one action lacks for a batch of them; none if it is that of a batch."""
    own = spec.shape[: spec.ndim - isinstance(spec, _VECTORS)]
    if own[: len(batch)] == batch:
        return torch.Size(())
    known = next(k for k in range(min(len(own), len(batch)), -1, -1) if own[:k] == batch[len(batch) - k :])
    return batch[: len(batch) - known]
