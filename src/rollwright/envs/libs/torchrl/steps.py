"""TorchRLStep: calls ``_step`` of TorchRL's environments where ``step`` would only complete flags and rewards."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
from tensordict import TensorDictBase
from torch import Tensor

from rollwright._foreign import class_path
from rollwright.data.unchecked import unchecked_td
from rollwright.envs.arrays import STEPPED

__all__ = ["SerialStep", "TorchRLStep", "is_serial"]

_SERIAL = "torchrl.envs.batched_envs.SerialEnv"
_BASE = "torchrl.envs.common", "EnvBase"
_DONE, _TERMINATED, _TRUNCATED = "done", "terminated", "truncated"
_COMPLETE = "_step_proc_data"
_STEP, _RESET = "_step", "_reset"  # what those who write environments define
_PARTS = ("step", _COMPLETE, "_complete_done", "_assert_tensordict_shape", "_skip_tensordict")
_COMPLETED_ALIKE = ({_DONE}, {_TERMINATED}, {_TERMINATED, _TRUNCATED})  # here as there


class TorchRLStep:
    """Steps an environment of TorchRL; returns what ``env.step`` leaves below ``"next"``, perhaps without some flags.

    ``step`` of TorchRL's base class calls ``_step``, and completes the flags and the shapes of rewards in its result,
    which this library does itself. Where that class's ``step`` is used, and both would complete alike, ``_step`` alone
    is called.

    Args:
        env: an environment of TorchRL.

    Attributes:
        is_plain: whether it is so.
    """

    def __init__(self, env: Any) -> None:
        self._env, self.is_plain = env, _is_plain(env)
        self._serial = SerialStep(env) if is_serial(env) else None
        if self.is_plain:
            self._rewards = [(key, env.full_reward_spec[key].shape) for key in env.reward_keys]
            self._flags = [(key, env.full_done_spec[key].shape) for key in env.done_keys]
            self._alike = [set(env.done_keys), *_COMPLETED_ALIKE]

    def __call__(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Step.

        Args:
            tensordict: as :meth:`~rollwright.envs.EnvBase.step` takes it.
        """
        env = self._env
        if not self.is_plain:
            return env.step(tensordict.copy()).get("next")  # type: ignore[no-any-return]
        outcome: TensorDictBase = (self._serial or step_of(env))(tensordict)
        if not self._is_whole(outcome):
            outcome = getattr(env, _COMPLETE)(outcome)
        return outcome

    def _is_whole(self, outcome: TensorDictBase) -> bool:
        found = set()
        for key, shape in self._rewards:
            if not _has(outcome.get(key, None), shape):
                return False
        for key, shape in self._flags:
            value = outcome.get(key, None)
            if value is not None:
                found.add(key)
                if not _has(value, shape):
                    return False
        return found in self._alike


def _has(value: Any, shape: torch.Size) -> bool:
    """Whether a value has that shape, or lacks no more than its last dimension, of size 1."""
    return isinstance(value, torch.Tensor) and (value.shape == shape or (*value.shape, 1) == shape)


def _is_plain(env: Any) -> bool:
    """Whether all that ``step`` calls beside ``_step`` is TorchRL's base class's, and flags lie in the root."""
    known = next((base for base in type(env).__mro__ if (base.__module__, base.__name__) == _BASE), None)
    if known is None:
        return False
    changed = [name for name in _PARTS if name in vars(env) or not _same(type(env), known, name)]
    in_root = {*env.done_keys} <= {_DONE, _TERMINATED, _TRUNCATED}
    return bool(env.batch_locked) and not changed and not env.run_type_checks and in_root


def _same(kind: type, known: type, name: str) -> bool:
    """Whether a class has a method of another one, unchanged."""
    theirs = inspect.getattr_static(known, name, None)
    return theirs is not None and inspect.getattr_static(kind, name) is theirs


def step_of(env: Any) -> Callable[[TensorDictBase], TensorDictBase]:
    """The step of an environment of TorchRL without what its base class adds."""
    step: Callable[[TensorDictBase], TensorDictBase] = getattr(env, _STEP)
    return step


def is_serial(env: Any) -> bool:
    """Whether an environment is TorchRL's ``SerialEnv``, with the methods of that class."""
    return class_path(env) == _SERIAL and not {"step", "reset", _STEP, _RESET} & vars(env).keys()


class SerialStep:
    """Steps TorchRL's ``SerialEnv`` as its ``_step`` does, entry by entry.

    What its environments return goes into the memory that it keeps for that: other dtypes are cast there, entries that
    are missing keep the values of the step before, and those that no spec announces are left out.

    Args:
        env: the ``SerialEnv``.
    """

    def __init__(self, env: Any) -> None:
        self._env = env
        self._envs: Any = None  # those that were started last
        self._memory: list[tuple[str, Tensor]] = []  # of what steps return; empty: the SerialEnv is to step

    def __call__(self, tensordict: TensorDictBase) -> TensorDictBase:
        """What ``env._step(tensordict)`` would return."""
        env = self._env
        if (envs := vars(env).get("_envs")) is not self._envs:
            self._envs, self._memory = envs, _memory_of(env)
        if not self._memory or tensordict.get(STEPPED, None) is not None:
            return step_of(env)(tensordict)
        rows = tensordict.unbind(0)
        outcomes = [step_of(one)(row) for one, row in zip(self._envs, rows, strict=True)]
        if not self._write(outcomes):
            self._update(outcomes)
        fresh = {key: memory.clone() for key, memory in self._memory}
        return unchecked_td(fresh, env.batch_size, device=env.device)

    def _write(self, outcomes: Sequence[TensorDictBase]) -> bool:
        """Write what has the form of the memory; returns whether all has."""
        for key, memory in self._memory:
            values, shape, dtype = [outcome.get(key, None) for outcome in outcomes], memory.shape[1:], memory.dtype
            for value in values:
                if type(value) is not Tensor or value.dtype is not dtype or value.shape != shape or value.requires_grad:
                    return False
            torch.stack(values, out=memory)
        return True

    def _update(self, outcomes: Sequence[TensorDictBase]) -> None:
        """Write as TorchRL does."""
        keys = [key for key, _ in self._memory]
        kept = self._env.shared_tensordict_parent.get("next")
        for i, outcome in enumerate(outcomes):
            kept[i].update_(outcome, keys_to_update=keys)


def _memory_of(env: Any) -> list[tuple[str, Tensor]]:
    """Where a ``SerialEnv`` keeps what its steps return; empty: not in one tensor an entry, on its device."""
    facts = vars(env)
    shared, keys, envs = (facts.get(name) for name in ("shared_tensordict_parent", "_env_output_keys", "_envs"))
    if shared is None or not keys or not envs or facts.get("_non_tensor_keys") or env.device not in (None, _CPU):
        return []
    if any(not isinstance(key, str) for key in keys) or any(one.device != env.device for one in envs):
        return []
    found = [(key, shared.get(("next", key), None)) for key in keys]
    return found if all(type(memory) is Tensor for _, memory in found) else []


_CPU = torch.device("cpu")
