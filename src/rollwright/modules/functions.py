"""Functions from an observation to an action as policies."""

from __future__ import annotations

import inspect
import random
import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from tensordict import TensorDictBase

from rollwright._keys import NestedKey, key_str
from rollwright._memory import in_numpy
from rollwright.data.specs import OneHot, TensorSpec

if TYPE_CHECKING:
    from rollwright.envs.base import EnvBase

Takes = Literal["tensordict", "tensor", "array"]

_NUMBERS = (bool, int, float, np.generic, list, tuple)


class ActionForm:
    """Turns what a function returned into an action of an environment.

    Tensors, numbers, lists and NumPy arrays become tensors of its dtype and shape; where the spec is one-hot, an index
    becomes one.

    Args:
        spec: of the action, its shape with the batch of the environment.
    """

    def __init__(self, spec: TensorSpec) -> None:
        self._spec = spec
        self._indices = isinstance(spec, OneHot)
        self._shape = tuple(spec.shape)
        known = spec.dtype is not None and in_numpy(spec.dtype) and -1 not in self._shape
        self._dtype = torch.empty(0, dtype=spec.dtype, device="cpu").numpy().dtype if known else None
        self._casts = {"i": "iub", "u": "iub", "f": "iubf"}.get(self._dtype.kind, "") if self._dtype else ""

    def __call__(self, value: Any) -> Any:
        """The action as a tensor; what is neither a number nor an array stays as it is.

        Raises:
            ValueError: a number with a fraction, or none, where the action is an integer; or no such index.
        """
        if not isinstance(value, torch.Tensor):
            if not isinstance(value, (np.ndarray, *_NUMBERS)):
                return value
            value = torch.as_tensor(_numbers(value), device=self._spec.device)
        if self._is_index(value):
            return self._one_hot(value)
        spec = self._spec
        if value.dtype != spec.dtype:
            if value.is_floating_point() and not _is_float(spec.dtype) and not bool((value == value.round()).all()):
                raise ValueError(
                    f"policy: expected an action of {spec.dtype}, got {value.tolist()}. Return a whole number."
                )
            value = value.to(spec.dtype)
        return value.reshape(spec.shape) if value.shape.numel() == spec.shape.numel() else value

    def array(self, value: Any) -> Any:
        """The same values as an array with memory of its own.

        Raises:
            ValueError: see a call.
        """
        if isinstance(value, (np.ndarray, *_NUMBERS)):
            found = _numbers(value)
            if found.dtype.kind in self._casts and found.shape == self._shape:
                return found.astype(self._dtype)  # a copy
        elif type(value) is torch.Tensor and value.dtype == self._spec.dtype and value.shape == self._shape:
            return value.detach().numpy().copy()
        value = self(value)
        return value.detach().numpy().copy() if isinstance(value, torch.Tensor) else value

    def _is_index(self, value: torch.Tensor) -> bool:
        shape = self._spec.shape
        return self._indices and not value.is_floating_point() and value.shape in (shape[:-1], (*shape[:-1], 1))

    def _one_hot(self, value: torch.Tensor) -> torch.Tensor:
        shape, dtype = self._spec.shape, self._spec.dtype
        if value.numel() and not 0 <= int(value.min()) <= int(value.max()) < shape[-1]:
            raise ValueError(f"policy: expected actions from 0 to {shape[-1] - 1}, got {value.tolist()}.")
        return torch.nn.functional.one_hot(value.reshape(shape[:-1]).long(), shape[-1]).to(dtype)


class FunctionPolicy:
    """A function of one argument that is no entry of the environment: of a TensorDict, or of the one observation.

    Which of them shows at its first call. It is given the TensorDict; if it raises, or returns something without an
    action, it is given the observation as a tensor; and after that as a NumPy array. What has worked is kept. If
    nothing has, the first error is raised. Calls that did not count leave the global generators as they were. An
    annotation of the argument (``TensorDict``, ``torch.Tensor``, ``np.ndarray``) decides without a trial.

    Args:
        function: from a TensorDict to a TensorDict or None; or from an observation to an action.
        argument: the parameter that it takes.
        observation_key: entry that it may mean; None: the environment has several, and it is one of a TensorDict.
        env: whose actions they are.

    Attributes:
        takes: what the function is given; None: that shows at the first call.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        argument: inspect.Parameter,
        observation_key: NestedKey | None,
        env: EnvBase,
    ) -> None:
        self.function = function
        self.__qualname__ = getattr(function, "__qualname__", type(function).__name__)
        self.observation_key, self.action_key = observation_key, env.action_key
        self.form = ActionForm(env.full_action_spec[env.action_key])
        self.takes: Takes | None = _annotated(argument)
        self._argument = argument.name
        self._entries = key_str(env.observation_keys)

    def __call__(self, tensordict: TensorDictBase) -> TensorDictBase | None:
        """Act in ``tensordict``, which gets the action."""
        if self.takes is None:
            return self._of_entries(tensordict) if self.observation_key is None else self._decide(tensordict)
        if self.takes == "tensordict":
            result: TensorDictBase | None = self.function(tensordict)
            return result
        return self._of_observation(tensordict, self.takes)

    def _of_entries(self, tensordict: TensorDictBase) -> TensorDictBase | None:
        """The first call where there are several observations."""
        try:
            result = self.function(tensordict)
        except Exception as error:
            error.add_note(f"The policy was given a TensorDict. {self._several()}")
            raise
        if result is not None and not isinstance(result, TensorDictBase):
            raise TypeError(
                f"policy: {self.__qualname__}({self._argument}) was given a TensorDict and returned "
                f"{type(result).__name__}. {self._several()}"
            )
        self.takes = "tensordict"
        return result

    def _several(self) -> str:
        return (
            f"The environment has several observations, {self._entries}: name the arguments after those that it takes, "
            f"or read them from the TensorDict, write {key_str([self.action_key])} into it and return it."
        )

    def _decide(self, tensordict: TensorDictBase) -> TensorDictBase | None:
        given, generators = tensordict.copy(), _Generators()
        try:
            result = self.function(given)
        except Exception as error:
            generators.restore()
            self._try_observation(tensordict, error)
            return tensordict
        written = given if result is None else result
        known = {*tensordict.keys(True), *(written.keys(True) if isinstance(written, TensorDictBase) else ())}
        if isinstance(written, TensorDictBase) and self.action_key in known:
            self.takes = "tensordict"
            return tensordict.update(written)
        after = _Generators()
        try:
            generators.restore()
            self._try_observation(tensordict, None)
        except Exception:
            if isinstance(written, TensorDictBase):  # of a TensorDict, and it writes no action
                after.restore()
                self.takes = "tensordict"
                return tensordict.update(written)
            raise
        return tensordict

    def _try_observation(self, tensordict: TensorDictBase, error: Exception | None) -> None:
        kinds: tuple[Takes, ...] = ("tensor", "array")
        entry = key_str([] if self.observation_key is None else [self.observation_key])
        for takes in kinds:
            generators = _Generators()
            try:
                self._of_observation(tensordict, takes)
            except Exception as other:
                generators.restore()
                error = error or other
                continue
            self.takes = takes
            return
        assert error is not None
        error.add_note(
            f"The policy was given a TensorDict, and its entry {entry} as a tensor and as a "
            "NumPy array. Annotate its argument as TensorDict, torch.Tensor or np.ndarray to be given that alone."
        )
        raise error

    def _of_observation(self, tensordict: TensorDictBase, takes: Takes) -> TensorDictBase:
        observation = tensordict.get(self.observation_key)
        value = self.function(observation if takes == "tensor" else observation.detach().cpu().numpy())
        action = self.form(value)
        if not isinstance(action, torch.Tensor):
            raise self.no_action(value)
        return tensordict.set(self.action_key, action)

    def no_action(self, value: Any) -> TypeError:
        """The error about what the function returned where an action was expected."""
        return TypeError(
            f"policy: {self.__qualname__} returned "
            f"{type(value).__name__}, expected an action: a tensor, a NumPy array, a list or a number. Return one."
        )


def _numbers(value: Any) -> NDArray[Any]:
    """What a function returned as an array of numbers.

    Raises:
        TypeError: it holds something else.
    """
    try:
        found = np.asarray(value)
    except ValueError:  # its parts differ in shape
        found = None
    if found is None or found.dtype.kind not in "biufc":
        kinds = ", ".join(type(part).__name__ for part in value)[:100]
        raise TypeError(
            f"policy: expected an action, got a {type(value).__name__} of {len(value)} ({kinds}). Return the action "
            "alone: where a method returns (action, state), its first part."
        )
    return found


class _Generators:
    """The states of the global generators of torch (on the CPU), NumPy and Python, for a call that may not count."""

    def __init__(self) -> None:
        self._torch, self._numpy, self._python = torch.get_rng_state(), np.random.get_state(), random.getstate()

    def restore(self) -> None:
        """Go back to these states."""
        torch.set_rng_state(self._torch)
        np.random.set_state(self._numpy)
        random.setstate(self._python)


def _is_float(dtype: torch.dtype | None) -> bool:
    return dtype is None or dtype.is_floating_point


_ANNOTATIONS: tuple[tuple[str, Takes], ...] = (
    (r"\bTensorDict", "tensordict"),
    (r"\bTensor\b", "tensor"),
    (r"\b(ndarray|NDArray)\b", "array"),
)


def _annotated(argument: inspect.Parameter) -> Takes | None:
    """What a parameter is annotated with; None: nothing known, or several of them."""
    if argument.annotation is argument.empty:
        return None
    hint = argument.annotation
    text = hint if isinstance(hint, str) else inspect.formatannotation(hint)
    found = [takes for pattern, takes in _ANNOTATIONS if re.search(pattern, text)]
    return found[0] if len(found) == 1 else None
