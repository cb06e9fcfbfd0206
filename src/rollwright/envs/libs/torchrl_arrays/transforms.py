"""Transforms of TorchRL on arrays, by the names of their classes; what they keep stays theirs."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from tensordict import TensorDict

from rollwright._foreign import class_path, overrides
from rollwright._keys import NestedKey, unravel
from rollwright.envs.arrays import ARRAY_FORMS, ArrayEnv, ArrayTransform, Entry, Values, constant
from rollwright.envs.libs.torchrl_arrays.frames import transform_trims
from rollwright.envs.transforms.primer import as_primer
from rollwright.errors import NotNative

__all__ = ["array_transform", "check_outputs_only", "is_known", "reads_root"]

_METHODS = ("_call", "_apply_transform", "_reset", "_step", "_inv_call", "_inv_apply_transform", "forward")
_NO_LOCK = nullcontext()
Pairs = list[tuple[NestedKey, NestedKey]]


def array_transform(transform: Any, env: ArrayEnv) -> ArrayTransform:
    """The array form of a transform of TorchRL.

    Args:
        transform: what it is made of, and whose state it shares.
        env: has the entries that the transform is given.

    Raises:
        NotNative: the transform is not known, or is set to do something that is not.
    """
    make = _maker(transform)
    if make is None:
        raise NotNative(
            f"{class_path(transform)} works on TensorDicts. TorchRL's {', '.join(sorted(_KINDS))} run on arrays, and "
            "so do most transforms of rollwright.envs, and those for which register_array_form was called"
        )
    if any(name in vars(transform) for name in _METHODS):
        raise NotNative(f"{class_path(transform)} has methods of its own")
    return make(transform, env)


def is_known(transform: Any) -> bool:
    """Whether transforms of the class of this one have an array form."""
    return _maker(transform) is not None and not any(name in vars(transform) for name in _METHODS)


def _maker(transform: Any) -> Callable[[Any, ArrayEnv], ArrayTransform] | None:
    kind = type(transform)
    make = ARRAY_FORMS.get(kind)
    if make is None and kind.__module__.startswith("torchrl.envs.transforms."):
        make = _KINDS.get(kind.__name__)
    return make


def check_outputs_only(transform: Any) -> str:
    """Test that a transform of TorchRL changes no more than what steps and resets return; returns its name.

    Raises:
        NotNative: it changes what they are given, too, or frames later on.
    """
    name, own = class_path(transform), vars(transform).keys()
    if transform_trims(transform):
        raise NotNative(f"{name} changes frames once the data of the next step were taken from them")
    given = ("_reset_env_preprocess", "_inv_call", "inv", "_inv_apply_transform")
    if overrides(transform, *given) or own & set(given) or list(getattr(transform, "in_keys_inv", None) or []):
        raise NotNative(f"{name} changes what a step or a reset is given, on TensorDicts")
    if getattr(transform, "enable_inv_on_reset", False):
        raise NotNative(f"{name} changes what a reset is given")
    return name


def reads_root(transform: Any) -> bool:
    """Whether a transform of TorchRL may read what a step began from."""
    return overrides(transform, "_step") or "_step" in vars(transform)


def _pairs(transform: Any, env: ArrayEnv) -> Pairs:
    """Keys read and written.

    Raises:
        NotNative: one is no entry of the environment, or the transform has an inverse.
    """
    if list(transform.in_keys_inv or []):
        raise NotNative(f"{class_path(transform)} changes actions, by in_keys_inv={transform.in_keys_inv}")
    pairs = list(zip(map(unravel, transform.in_keys), map(unravel, transform.out_keys), strict=True))
    for key, _ in pairs:
        if key not in env.entries and key not in env.rewards:
            raise NotNative(f"{class_path(transform)} reads {key!r}, which is neither an observation nor a reward")
    return pairs


def _entry_by_entry(
    transform: Any, env: ArrayEnv, change: Callable[[NestedKey, Entry], tuple[Entry, Callable[[Any], Any]]]
) -> ArrayTransform:
    """Each value for itself, at steps and, what resets return, at resets."""
    entries: dict[NestedKey, Entry] = {}
    rewards: dict[NestedKey, Entry] = {}
    at_step: list[tuple[NestedKey, NestedKey, Callable[[Any], Any]]] = []
    for key, out_key in _pairs(transform, env):
        is_reward = key in env.rewards
        if is_reward and out_key != key:
            raise NotNative(f"{class_path(transform)} writes a reward to {out_key!r}")
        now = rewards.get(key, env.rewards[key]) if is_reward else entries.get(key, env.entries.get(key))
        if now is None:
            raise NotNative(f"{class_path(transform)} reads {key!r}, which it has taken away")
        (rewards if is_reward else entries)[out_key], function = change(key, now)
        at_step.append((key, out_key, function))
    at_reset = [part for part in at_step if part[0] not in env.rewards]

    def step(root: Values, out: Values) -> None:
        for key, out_key, function in at_step:
            out[out_key] = function(out[key])

    def reset(fresh: Values) -> None:
        for key, out_key, function in at_reset:
            fresh[out_key] = function(fresh[key])

    return ArrayTransform(entries, [], step, reset, rewards)


def _value_by_value(transform: Any, env: ArrayEnv) -> ArrayTransform:
    """Transforms that change each value for itself, by their ``_apply_transform`` on tensors."""
    apply: Callable[[torch.Tensor], torch.Tensor] = transform._apply_transform

    def change(key: NestedKey, entry: Entry) -> tuple[Entry, Callable[[Any], Any]]:
        like = apply(torch.from_numpy(np.zeros(entry.shape, entry.dtype)))
        if entry.column and tuple(like.shape) != entry.shape:
            raise NotNative(f"{class_path(transform)} changes the shape of {key!r} to {tuple(like.shape)}")
        changed = Entry(tuple(like.shape), like.numpy().dtype, entry.column)
        return changed, _on_tensors(apply, entry)

    return _entry_by_entry(transform, env, change)


def _double_to_float(transform: Any, env: ArrayEnv) -> ArrayTransform:
    def as_float32(value: Any) -> Any:
        with np.errstate(all="ignore"):  # as torch does
            return value.astype(np.float32)

    return _entry_by_entry(transform, env, lambda _, entry: (entry.replace(dtype=np.dtype(np.float32)), as_float32))


def _affine(transform: Any, env: ArrayEnv) -> ArrayTransform:
    """``RewardScaling`` and ``ObservationNorm``; their numbers are read at each step."""
    if isinstance(transform.loc, torch.nn.UninitializedBuffer) or transform.loc.device.type != "cpu":
        raise NotNative(f"{class_path(transform)} has no loc and scale on the CPU. Call init_stats() first")

    def apply(value: torch.Tensor) -> torch.Tensor:
        loc: torch.Tensor = transform.loc
        scale: torch.Tensor = transform.scale
        return (value - loc) / scale if transform.standard_normal else value * scale + loc

    def change(_: NestedKey, entry: Entry) -> tuple[Entry, Callable[[Any], Any]]:
        like = apply(torch.from_numpy(np.zeros(entry.shape, entry.dtype)))
        if tuple(like.shape) != entry.shape:
            raise NotNative(f"{class_path(transform)} changes shape {entry.shape} to {tuple(like.shape)}")
        return entry.replace(dtype=like.numpy().dtype), _on_tensors(apply, entry)

    return _entry_by_entry(transform, env, change)


def _on_tensors(function: Callable[[torch.Tensor], torch.Tensor], entry: Entry) -> Callable[[Any], Any]:
    """A function of tensors on values in row form."""
    if entry.column:
        return lambda value: function(torch.from_numpy(np.asarray(value).reshape(entry.shape))).numpy()[..., 0][()]
    return lambda value: function(torch.from_numpy(value)).numpy()


class _Statistics:
    """Running statistics of one entry of a ``VecNorm``, as views of its tensors; updated under its lock.

    All rows of a batch are counted, at resets too, whichever rows are reset.

    Args:
        transform: the ``VecNorm``.
        key: of the entry.
        entry: shape and dtype.
        batch: shape of the batch.
    """

    def __init__(self, transform: Any, key: NestedKey, entry: Entry, batch: tuple[int, ...]) -> None:
        self._transform, self._key, self._entry, self._batch = transform, key, entry, batch
        self._shape, self._num_rows = entry.shape[len(batch) :], math.prod(batch)
        self._called = _on_tensors(self._call_transform, entry)
        self._names = [_suffixed(key, name) for name in ("_sum", "_ssq", "_count")]
        self._held: list[torch.Tensor] | None = None
        self._views: list[Any] = []

    def _call_transform(self, value: torch.Tensor) -> torch.Tensor:
        """The transform itself, which makes the tensors of its statistics."""
        data = self._transform(TensorDict({self._key: value.clone()}, batch_size=self._batch))
        changed: torch.Tensor = data.get(self._key)
        return changed

    def _found(self) -> bool:
        """Whether there are statistics of the entry's shape; :attr:`_views` shows them."""
        shared = vars(self._transform).get("_td")
        held = None if shared is None else [shared.get(name, None) for name in self._names]
        if held is None or any(tensor is None for tensor in held):
            return False
        last = self._held
        if last is not None and held[0] is last[0] and held[1] is last[1] and held[2] is last[2]:
            return True
        shapes = [self._shape, self._shape, (1,)]
        if [tuple(tensor.shape) for tensor in held] != shapes or any(t.device.type != "cpu" for t in held):
            return False
        self._held, self._views = held, [tensor.detach().numpy() for tensor in held]
        return True

    def __call__(self, given: Any) -> Any:
        """The value of one step, counted and normalised."""
        if not self._found():
            return self._called(given)
        transform = self._transform
        total, squares, count = self._views
        value = np.asarray(given).reshape(self._entry.shape)
        eps = transform.eps
        with transform.lock or _NO_LOCK, np.errstate(all="ignore"):  # overflows as torch does
            if not transform.frozen:
                total *= transform.decay
                total += self._summed(value)
                squares *= transform.decay
                squares += self._summed(value * value)
                count *= transform.decay
                count += self._num_rows
            mean = total / count
            spread = np.maximum(squares / count - mean * mean, eps)
            torch.from_numpy(spread).sqrt_()  # torch's root of float32 is not NumPy's, to the bit
            result = (value - mean) / np.maximum(spread, eps)
        return result[..., 0][()] if self._entry.column else result

    def _summed(self, value: NDArray[Any]) -> NDArray[Any]:
        """The sum over the batch, in torch's order of additions."""
        if not self._batch:
            return value
        total = torch.from_numpy(value)
        for _ in self._batch:
            total = total.sum(0)
        return total.numpy()


def _suffixed(key: NestedKey, suffix: str) -> NestedKey:
    return key + suffix if isinstance(key, str) else (*key[:-1], key[-1] + suffix)


def _vec_norm(transform: Any, env: ArrayEnv) -> ArrayTransform:
    if env.batch and not env.keeps_resets:
        raise NotNative(
            f"{class_path(transform)} counts rows of a batch that are not reset. Put it into each environment"
        )
    if any(key != out_key for key, out_key in _pairs(transform, env)):
        raise NotNative(f"{class_path(transform)} has out_keys of its own")
    if type(transform.eps) is not float or type(transform.decay) is not float:
        raise NotNative(f"decay and eps of {class_path(transform)} are not both of type float")

    def change(key: NestedKey, entry: Entry) -> tuple[Entry, Callable[[Any], Any]]:
        if entry.dtype.kind != "f":
            raise NotNative(f"{class_path(transform)} normalises {key!r} of dtype {entry.dtype}")
        return entry, _Statistics(transform, key, entry, env.batch)

    return _entry_by_entry(transform, env, change)


def _init_tracker(transform: Any, env: ArrayEnv) -> ArrayTransform:
    key = transform.init_key
    entry = Entry((*env.batch, 1), np.dtype(np.bool_), True)
    no, yes = constant(entry, False), constant(entry, True)

    def step(root: Values, out: Values) -> None:
        out[key] = no

    def reset(fresh: Values) -> None:
        fresh[key] = yes

    return ArrayTransform({key: entry}, [], step, reset)


def _step_counter(transform: Any, env: ArrayEnv) -> ArrayTransform:
    key, most = transform.step_count_key, transform.max_steps
    if most is not None and (transform.truncated_key != "truncated" or not transform.update_done):
        raise NotNative("TorchRL's StepCounter sets another flag than done and truncated")
    entry = Entry((*env.batch, 1), np.dtype(np.int64), True)
    zero, one = constant(entry, 0), constant(entry, 1)

    def step(root: Values, out: Values) -> None:
        out[key] = count = root[key] + one
        if most is not None:
            ended = count >= most
            out["truncated"], out["done"] = ended | out["truncated"], ended | out["truncated"] | out["done"]

    def reset(fresh: Values) -> None:
        fresh[key] = zero

    return ArrayTransform({key: entry}, [key], step, reset)


def _reward_sum(transform: Any, env: ArrayEnv) -> ArrayTransform:
    pairs = _pairs(transform, env)
    if unknown := [key for key, _ in pairs if key not in env.rewards]:
        raise NotNative(f"TorchRL's RewardSum sums {unknown[0]!r}")
    if list(transform.reset_keys) != ["_reset"] * len(pairs) or vars(transform).get("reward_spec", False):
        raise NotNative("TorchRL's RewardSum has reset_keys, or is announced among the rewards")
    entries = {out_key: env.rewards[key] for key, out_key in pairs}
    zeros = {key: constant(entry, 0) for key, entry in entries.items()}

    def step(root: Values, out: Values) -> None:
        for key, out_key in pairs:
            out[out_key] = root[out_key] + out[key]

    def reset(fresh: Values) -> None:
        fresh.update(zeros)

    return ArrayTransform(entries, list(entries), step, reset)


def _primer(transform: Any, env: ArrayEnv) -> ArrayTransform:
    if transform.call_before_env_reset:
        raise NotNative(f"{class_path(transform)} writes before the reset")
    ours = as_primer(transform)
    ours.expand_specs = None  # TorchRL's has done that, where it was asked to
    return ours.on_arrays(env)


_VALUES = [
    "BinarizeReward",
    "CenterCrop",
    "ClipTransform",
    "FlattenObservation",
    "GrayScale",
    "Resize",
    "RewardClipping",
    "SignTransform",
    "SqueezeTransform",
    "ToTensorImage",
    "UnsqueezeTransform",
]

_KINDS: dict[str, Callable[[Any, ArrayEnv], ArrayTransform]] = {
    **dict.fromkeys(_VALUES, _value_by_value),
    "DoubleToFloat": _double_to_float,
    "InitTracker": _init_tracker,
    "ObservationNorm": _affine,
    "RewardScaling": _affine,
    "RewardSum": _reward_sum,
    "StepCounter": _step_counter,
    "TensorDictPrimer": _primer,
    "VecNorm": _vec_norm,
}
