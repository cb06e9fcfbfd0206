"""Finds the entries that a policy writes, by one call without side effects."""

from __future__ import annotations

import contextlib
import copy
import random
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from types import FunctionType, MethodType
from typing import Any, cast

import numpy as np
import torch
from tensordict import TensorDictBase
from torch import nn

from rollwright._keys import NestedKey
from rollwright.collectors.rollout.devices import Devices
from rollwright.collectors.rollout.paths import stages
from rollwright.collectors.rollout.paths.outputs import changed_keys, entries_before, entry_keys
from rollwright.collectors.rollout.paths.stages import IDS, VERSION
from rollwright.collectors.rollout.policy_copies import never_copied_in
from rollwright.data.layout import blank_frame
from rollwright.data.specs import TensorSpec
from rollwright.envs.base import EnvBase
from rollwright.envs.priming import may_write_indices
from rollwright.modules import RandomPolicy
from rollwright.modules.signature import Call
from rollwright.weight_update.policy_weights import is_never_copied, modules_in


class Trial:
    """Calls a policy on a copy of what it reads, and changes nothing else.

    A module is copied for that, but for its parameters, so that its buffers, counters and generators stay as they are,
    and modules that take shape at their first call do not take it here. A function, a bound method or another object is
    called itself, and so is what is never copied: the buffers of the modules in it are put back afterwards, and what
    else it changes stays changed. torch's, NumPy's and Python's global generators are put back.

    Args:
        call: the policy, on TensorDicts.
        policy: of the collector.
        env: of the collector.
        devices: of the collector.
        sync: to be called after a copy to the policy's device.
    """

    def __init__(self, call: Call, policy: Any, env: EnvBase, devices: Devices, sync: Callable[[], None]) -> None:
        self.call, self._policy, self._env = call, policy, env
        self._move = stages.mover(devices.policy if devices.cast_to_policy else None, sync)
        self._devices = {device for device in vars(devices).values() if isinstance(device, torch.device)}

    @contextmanager
    def _acting(self, *, checks: bool = True) -> Iterator[tuple[Any, stages.Stage]]:
        """What is called, and the stage that calls it."""
        env = self._env
        own, shared = _copied(self.call)
        stale = stages.stale_actions(env, self._policy)
        check = stages.action_check(env) if checks else _accept
        with _generators_kept(self._devices), _buffers_kept(shared), _uncompiled():
            yield own, stages.build_act(own, self._move, check, fresh_outputs=True, stale=stale)

    def give_shape(self) -> None:
        """Call a policy whose modules take shape at their first call, on zeros, so that an optimizer can be made.

        The modules themselves are called, not copies. Where zeros are not enough for that, the first step does it.
        """
        lazy = isinstance(self.call, nn.Module) and any(map(nn.parameter.is_lazy, self.call.parameters()))
        if not lazy or isinstance(self._policy, RandomPolicy):
            return
        act = stages.build_act(self.call, self._move, stages.action_check(self._env), fresh_outputs=True)
        with contextlib.suppress(Exception), torch.no_grad():
            act(self._zeros())

    def indices(self) -> list[NestedKey]:
        """One-hot actions that the policy writes as indices, as far as a call on zeros shows that.

        A policy that says what it writes is not called.
        """
        env = self._env
        unsaid = may_write_indices(env, self._policy)
        found: list[NestedKey] = []
        if unsaid:
            with contextlib.suppress(Exception), torch.no_grad(), self._acting(checks=False) as (_, act):
                acted = act(self._zeros())
                found = [key for key in unsaid if _is_index(acted.get(key, None), env.full_action_spec[key])]
        return found

    def _zeros(self) -> TensorDictBase:
        """All that a policy may read, as zeros."""
        env = self._env
        zeros = env.full_action_spec.zero().empty()
        for spec in (env.full_observation_spec, env.full_state_spec, env.full_done_spec):
            zeros.update(spec.zero())
        return zeros

    def outputs(self, current: TensorDictBase) -> TensorDictBase | None:
        """What the policy writes: its entries, all zero, or empty; see :func:`~rollwright.data.layout.blank_frame`.

        Args:
            current: real observations, ``[*env]``.

        Returns:
            The entries, ``[*env]``; None where random actions are all that the policy writes.
        """
        if isinstance(self._policy, RandomPolicy):
            return None
        with self._acting() as (_, act):
            given = current.clone()
            before = entries_before(given)
            acted = act(given)
        changed, actions = set(changed_keys(acted, before)), set(self._env.action_keys)
        written = [key for key in entry_keys(acted) if key not in (IDS, VERSION) and (key in actions or key in changed)]
        return blank_frame([acted.select(*written)])

    def failure(self, current: TensorDictBase) -> tuple[Any, Exception | None]:
        """The copy that was called, and what it raised."""
        with self._acting() as (own, act):
            try:
                act(current.clone())
            except Exception as error:
                return own, error
        return own, None


def _accept(current: TensorDictBase) -> None:
    """Take all actions."""


def _is_index(value: Any, spec: TensorSpec) -> bool:
    """Whether an action is an index of what a spec has as one-hot."""
    if not isinstance(value, torch.Tensor) or value.is_floating_point() or value.dtype == torch.bool:
        return False
    return value.shape == spec.shape[:-1] and value.numel() != spec.shape.numel()


def action_forms(env: EnvBase, outputs: TensorDictBase | None) -> dict[NestedKey, torch.Tensor]:
    """Zeros of the actions that a policy writes in another dtype or shape than their specs; random ones follow it."""
    forms: dict[NestedKey, torch.Tensor] = {}
    for key in env.action_keys:
        spec, value = env.full_action_spec[key], None if outputs is None else outputs.get(key)
        if not isinstance(value, torch.Tensor) or -1 in spec.shape or spec.dtype is None:
            continue
        differs = (value.dtype, value.shape) != (spec.dtype, spec.shape)
        if differs and value.numel() == spec.shape.numel() and torch.can_cast(spec.dtype, value.dtype):
            forms[key] = value
    return forms


def _copied(call: Any) -> tuple[Any, list[Any]]:
    """A module with the same parameters and everything else of its own; and what it calls that was not copied."""
    if not isinstance(call, nn.Module) or is_never_copied(call):
        return call, [call]
    memo: dict[int, Any] = {id(own): own for own in call.parameters() if not nn.parameter.is_lazy(own)}
    memo |= {id(part): part for part in never_copied_in(call)}
    around = [module for module in call.modules() if type(vars(module).get("module")) in (FunctionType, MethodType)]
    functions = [vars(module)["module"] for module in around]
    shared = [getattr(function, "__self__", function) for function in functions]
    memo |= {id(one): one for one in shared if not isinstance(one, nn.Module)}  # an agent, with all that it has
    try:
        for module in around:  # which tensordict would pickle, with all that the function reaches
            memo[id(module)] = copied = object.__new__(type(module))
            copied.__dict__ = {name: copy.deepcopy(value, memo) for name, value in vars(module).items()}
        return copy.deepcopy(call, memo), shared
    except Exception:  # an object may refuse to be copied in any way it likes
        return call, [call, *shared]


def _uncompiled() -> AbstractContextManager[Any]:
    """What ``torch.compile`` returned runs as it was written: a copy would be compiled by itself."""
    if "torch._dynamo" not in sys.modules:  # which takes seconds to import
        return contextlib.nullcontext()
    return cast(AbstractContextManager[Any], torch.compiler.set_stance("force_eager"))


@contextmanager
def _generators_kept(devices: set[torch.device]) -> Iterator[None]:
    """Give the global generators the states back that they had."""
    indices = sorted({torch.cuda.current_device() if d.index is None else d.index for d in devices if d.type == "cuda"})
    numbers, python = np.random.get_state(), random.getstate()
    try:
        with torch.random.fork_rng(indices):
            yield
    finally:
        np.random.set_state(numbers)
        random.setstate(python)


@contextmanager
def _buffers_kept(shared: list[Any]) -> Iterator[None]:
    """Give the buffers of the modules in some objects the values back that they had."""
    held = [
        (module, name, buffer, buffer.clone())
        for one in shared
        for outermost in modules_in(one)
        for module in outermost.modules()
        for name, buffer in module.named_buffers(recurse=False, remove_duplicate=False)
    ]
    try:
        yield
    finally:
        with torch.no_grad():
            for owner, name, buffer, value in held:
                buffer.copy_(value)
                setattr(owner, name, buffer)
