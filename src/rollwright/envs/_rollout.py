"""The methods ``EnvBase.rollout``, which steps with a policy and stacks what happened, and ``EnvBase.rand_step``."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, cast

import torch
from tensordict import LazyStackedTensorDict, TensorDictBase, is_tensor_collection
from torch import nn

from rollwright._tensors import as_tensor
from rollwright.data.layout import end_of_trajectory, mark_truncated
from rollwright.modules import set_recurrent_mode
from rollwright.modules.signature import Call, speak_tensordict

if TYPE_CHECKING:
    from rollwright.envs.base import EnvBase


Policy = Callable[[TensorDictBase], TensorDictBase]


def rand_step(self: EnvBase, tensordict: TensorDictBase | None = None) -> TensorDictBase:
    """Take a random action and step; without data, from where the environment is, the first time from a reset.

    An environment that reads a state in its data, as some transforms do, is reset each time that none are given.
    """
    if tensordict is None and (not self.num_uses or self.state_keys):
        tensordict = self.reset()
    return self.step(self.rand_action(tensordict))


@set_recurrent_mode("sequential")  # the dimension of a batch of environments is not time, whatever the caller set
def rollout(  # noqa: D417 - self
    self: EnvBase,
    max_steps: int,
    policy: Policy | None = None,
    callback: Callable[[EnvBase, TensorDictBase], Any] | None = None,
    *,
    actions: Iterable[Any] | None = None,
    auto_reset: bool = True,
    auto_cast_to_device: bool = False,
    break_when_any_done: bool | None = None,
    break_when_all_done: bool | None = None,
    return_contiguous: bool | None = None,
    tensordict: TensorDictBase | None = None,
    set_truncated: bool = False,
    trust_policy: bool = False,
    storing_device: torch.device | str | int | None = None,
) -> TensorDictBase:
    """Step for up to ``max_steps`` with a policy.

    Args:
        max_steps: the most steps to take.
        policy: called on each TensorDict; random actions when None.
        callback: called as ``callback(env, tensordict)`` after each action was chosen.
        actions: one for each step, in place of a policy; the rollout is no longer than they are.
        auto_reset: reset first. If False, ``tensordict`` holds the start, of which only what is done is reset: what
            :meth:`step_mdp` makes of the last frame of a rollout goes on from it.
        auto_cast_to_device: move data to the policy's device and back at each step.
        break_when_any_done: stop when any environment is done (the default). If False, what is
            done is reset and stepping goes on; the last step is followed by no reset.
        break_when_all_done: stop when every environment is done; those that are done before
            go on without a reset.
        return_contiguous: stack into dense tensors (the default unless specs are dynamic); if
            False, the result is a lazy stack.
        tensordict: where to start (``auto_reset=False``), or data for ``reset``.
        set_truncated: mark the last step as truncated unless it is terminated.
        trust_policy: call the policy as it is. If False, a module whose ``forward`` takes entries by name is
            wrapped, as in a collector.
        storing_device: where frames are kept and returned; default: the environment's.

    Returns:
        ``[*batch, T]``, the last dimension named ``"time"``.
    """
    if max_steps < 1:
        raise ValueError(f"max_steps: expected at least 1, got {max_steps}.")
    if break_when_any_done and break_when_all_done:
        raise ValueError("break_when_any_done and break_when_all_done exclude one another; pass one of them.")
    if not auto_reset and tensordict is None:
        raise ValueError("tensordict: expected the start of the rollout with auto_reset=False, got None. Pass reset().")
    if policy is not None and not callable(policy):
        raise TypeError(
            f"policy: expected a callable that takes a TensorDict, got {type(policy).__name__}. "
            "Pass None for random actions."
        )
    if actions is not None:
        if policy is not None:
            raise ValueError("policy and actions were both given. Pass one of them.")
        given = list(itertools.islice(actions, max_steps))
        if not given:
            raise ValueError("actions: expected at least one, got none.")
        max_steps, policy, trust_policy = len(given), _following(given, self), True
    stop_at_any = not break_when_all_done if break_when_any_done is None else break_when_any_done
    if policy is not None and actions is None and auto_reset:
        self.fit_policy(policy)
    act: Call = self.rand_action if policy is None else policy
    if policy is not None and not trust_policy:
        act = speak_tensordict(policy, self, strict=False)
    if auto_cast_to_device and policy is not None:
        act = _on_device_of(policy, act, self)
    start = None if tensordict is None else tensordict.copy()
    td = self.reset(start) if auto_reset else self.maybe_reset(cast(TensorDictBase, start))
    frames: list[TensorDictBase] = []
    device = None if storing_device is None else torch.device(storing_device)

    def keep(frame: TensorDictBase) -> TensorDictBase:
        copy = frame.clone()
        return copy if device is None else copy.to(device)

    ended: torch.Tensor | bool = False
    for t in range(max_steps):
        chosen = act(td)
        if chosen is not None and chosen is not td:
            td.update(_checked(chosen))
        if callback is not None:
            callback(self, td)
        if stop_at_any or break_when_all_done or t == max_steps - 1:  # what follows the last step is not reset
            td = self.step(td)
            following = self.step_mdp(td)
            self.trim_frame(td, following)
            frames.append(keep(td))  # policies may write into what they see, and into buffers of their own
            ends = end_of_trajectory(td.get("next"), self.done_groups, td.ndim)
            ended = ended | ends if break_when_all_done else ends.any()
            if bool(as_tensor(ended).all()) or t == max_steps - 1:
                break
            td = following
        else:
            frame, td = self.step_and_maybe_reset(td)
            frames.append(keep(frame))
    ndim = frames[0].ndim
    if return_contiguous is False:  # named at once: names that are set later are checked against entries of any shape
        out: TensorDictBase = LazyStackedTensorDict(*frames, stack_dim=ndim, stack_dim_name="time")
    else:
        out = cast(TensorDictBase, LazyStackedTensorDict.maybe_dense_stack(frames, ndim))
        out.names = [*[None] * ndim, "time"]
    if set_truncated:
        mark_truncated(self.done_groups, out[..., -1].get("next"), ndim)
    return out


def _following(actions: Iterable[Any], env: EnvBase) -> Policy:
    """A policy that takes actions which were given, one after the other."""
    left = iter(actions)

    def act(td: TensorDictBase) -> TensorDictBase:
        action = next(left)
        if is_tensor_collection(action):
            return td.update(action)
        return td.set(env.action_key, torch.as_tensor(action, device=env.device))

    return act


def _checked(chosen: Any) -> TensorDictBase:
    if not is_tensor_collection(chosen):
        raise TypeError(
            f"policy: expected it to return a TensorDict (or None), got {type(chosen).__name__}. Write the action into "
            "the TensorDict and return that."
        )
    return cast(TensorDictBase, chosen)


def _on_device_of(policy: Policy, call: Call, env: EnvBase) -> Call:
    parameter = next(policy.parameters(), None) if isinstance(policy, nn.Module) else None
    device = getattr(policy, "device", None) if parameter is None else parameter.device

    def act(td: TensorDictBase) -> TensorDictBase:
        seen = td.to(device)
        chosen = call(seen)
        chosen = seen if chosen is None else chosen
        return chosen.to(env.device) if env.device is not None else chosen

    return call if device is None else act
