"""TorchRLStep: calls ``_step`` of TorchRL's environments where ``step`` would only complete flags and rewards."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from tensordict import TensorDictBase

from rollwright._foreign import class_path

__all__ = ["TorchRLStep", "is_serial"]

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
        outcome: TensorDictBase = getattr(env, _STEP)(tensordict)
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


def is_serial(env: Any) -> bool:
    """Whether an environment is TorchRL's ``SerialEnv``, with the methods of that class."""
    return class_path(env) == _SERIAL and not {"step", "reset", _STEP, _RESET} & vars(env).keys()
