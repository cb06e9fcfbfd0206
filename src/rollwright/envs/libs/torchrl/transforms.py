"""Transforms of TorchRL as transforms of this library, which share their tensors of state."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext
from types import MappingProxyType
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase
from torch import nn

from rollwright._foreign import class_path, overrides
from rollwright._keys import NestedKey, unravel
from rollwright.data.specs import Composite
from rollwright.data.specs.torchrl import from_torchrl
from rollwright.envs.arrays import ARRAY_FORMS, ArrayEnv, ArrayTransform, Rows, Values
from rollwright.envs.libs.torchrl.frames import transform_trims
from rollwright.envs.libs.torchrl.watch import Itself
from rollwright.envs.on_arrays.tensordicts import OnTensorDicts, RootTensorDicts
from rollwright.envs.transforms.base import Transform
from rollwright.envs.transforms.bookkeeping import InitTracker, RewardSum, StepCounter
from rollwright.envs.transforms.entries.bounds import BinarizeReward, ClipTransform, RewardClipping, SignTransform
from rollwright.envs.transforms.entries.joining import CatTensors
from rollwright.envs.transforms.entries.pixels import CenterCrop, GrayScale, Resize, ToTensorImage
from rollwright.envs.transforms.entries.shapes import FlattenObservation, SqueezeTransform, UnsqueezeTransform
from rollwright.envs.transforms.primer import TensorDictPrimer
from rollwright.envs.transforms.scaling import DoubleToFloat, ObservationNorm, RewardScaling
from rollwright.errors import NotNative

__all__ = ["HeldTransform", "LastResets", "called_on_tensordicts", "settings_of", "translated"]

_NO_LOCK = nullcontext()
_METHODS = ("_call", "_apply_transform", "_reset", "_step", "_inv_call", "_inv_apply_transform", "forward")


class _Kind(NamedTuple):
    """How transforms of one class of TorchRL are translated.

    Attributes:
        make: from arguments to a transform of this library.
        arguments: names of arguments, and of TorchRL's attributes that they are.
        shared: buffers that both have.
        expected: attributes that ``make`` has no argument for, and the value that they must have.
        takes_itself: whether ``make`` is given TorchRL's transform, too.
    """

    make: Callable[..., Transform]
    arguments: Mapping[str, str]
    shared: tuple[str, ...] = ()
    expected: Mapping[str, Any] = MappingProxyType({})
    takes_itself: bool = False


def translated(theirs: Any) -> Transform:
    """A transform of this library that does what one of TorchRL does, bit for bit, and shares its tensors of state.

    Args:
        theirs: the transform of TorchRL, in an environment.

    Raises:
        NotNative: its class has no counterpart, or it is set to do something that the counterpart does not.
    """
    if type(theirs) in ARRAY_FORMS:
        return _Registered(theirs)
    kind = _kind_of(theirs)
    if kind is None:
        raise NotNative(f"{class_path(theirs)} has no counterpart in rollwright")
    if any(name in vars(theirs) for name in _METHODS):
        raise NotNative(f"{class_path(theirs)} has methods of its own")
    for name, value in kind.expected.items():
        if (found := getattr(theirs, name)) != value:
            raise NotNative(f"{class_path(theirs)} has {name}={found!r}")
    if "in_keys_inv" not in kind.arguments and list(theirs.in_keys_inv or []):
        raise NotNative(f"{class_path(theirs)} changes actions, by in_keys_inv={theirs.in_keys_inv}")
    tensors = {name: getattr(theirs, name) for name in kind.shared}
    if any(isinstance(tensor, nn.UninitializedBuffer) for tensor in tensors.values()):
        raise NotNative(f"{class_path(theirs)} has no {', '.join(tensors)} yet. Call init_stats() first")
    arguments = {name: getattr(theirs, attribute) for name, attribute in kind.arguments.items()}
    try:
        ours = kind.make(theirs, **arguments) if kind.takes_itself else kind.make(**arguments)
    except (KeyError, TypeError, ValueError, RuntimeError) as error:
        raise NotNative(f"{class_path(theirs)}: {error}") from error
    for name, tensor in tensors.items():
        setattr(ours, name, tensor)
    return ours


def _kind_of(theirs: Any) -> _Kind | None:
    kind = type(theirs)
    return _KINDS.get(kind.__name__) if kind.__module__.startswith("torchrl.envs.transforms.") else None


def settings_of(theirs: Any) -> dict[str, Any]:
    """What a translation of a transform depends on: attributes by name, and the tensors that are shared."""
    kind = _kind_of(theirs)
    if kind is None or type(theirs) in ARRAY_FORMS:
        return {}
    found = {name: getattr(theirs, name) for name in (*kind.arguments.values(), *kind.expected)}
    return found | {name: Itself(getattr(theirs, name)) for name in kind.shared}


# Transforms that stay TorchRL's -------------------------------------------------------------------


class HeldTransform(Transform):
    """A transform of TorchRL, in an environment there, called on TensorDicts as that environment does.

    Args:
        theirs: the transform.
        read_at_reset: keys of what it is given of the root at resets.

    Attributes:
        follows_last_resets: whether rows that are not reset hold what their last reset returned.
    """

    theirs: Any
    follows_last_resets = False

    def __init__(self, theirs: Any, read_at_reset: Iterable[NestedKey] = ()) -> None:
        super().__init__()
        self.__dict__.update(theirs=theirs)  # no module of this one: modes and devices are set there
        self._read_at_reset = list(read_at_reset)

    def _step(self, tensordict: TensorDictBase, next_tensordict: TensorDictBase) -> TensorDictBase:
        return cast(TensorDictBase, self.theirs._step(tensordict, next_tensordict))

    def _reset(self, tensordict: TensorDictBase, tensordict_reset: TensorDictBase) -> TensorDictBase:
        given = tensordict.select(*self._read_at_reset, strict=False)
        return cast(TensorDictBase, self.theirs._reset(given, tensordict_reset))

    def transform_output_spec(self, output_spec: Composite) -> Composite:
        """The specs after TorchRL's transform, in the environment there."""
        return cast(Composite, from_torchrl(self.theirs.transform_output_spec(self.theirs.parent.output_spec.clone())))

    def on_tensordicts(self, env: ArrayEnv, roots: RootTensorDicts) -> OnTensorDicts:
        """See :meth:`Transform.on_tensordicts`."""
        parent = self.theirs.parent
        spec = self.transform_output_spec(parent.output_spec)
        return called_on_tensordicts(self, self.theirs, env, roots, list(parent.done_keys), spec)


def called_on_tensordicts(
    caller: Transform, theirs: Any, env: ArrayEnv, roots: RootTensorDicts, flags: list[NestedKey], spec: Composite
) -> OnTensorDicts:
    """The steps and resets of a transform of TorchRL that has no counterpart here.

    Args:
        caller: calls it.
        theirs: the transform.
        env: see :meth:`Transform.on_tensordicts`.
        roots: likewise.
        flags: of the root before the transform.
        spec: of the output after it.

    Raises:
        NotNative: it changes what steps or resets are given, too, or frames later on.
    """
    name, own = class_path(theirs), vars(theirs).keys()
    if transform_trims(theirs):
        raise NotNative(f"{name} changes frames once the data of the next step were taken from them")
    given = ("_reset_env_preprocess", "_inv_call", "inv", "_inv_apply_transform")
    if overrides(theirs, *given) or own & set(given) or list(getattr(theirs, "in_keys_inv", None) or []):
        raise NotNative(f"{name} changes what a step or a reset is given, on TensorDicts")
    if getattr(theirs, "enable_inv_on_reset", False):
        raise NotNative(f"{name} changes what a reset is given")
    reads_root = overrides(theirs, "_step") or "_step" in own
    return OnTensorDicts(caller, name, env, flags, spec, roots, reads_root=reads_root)


class _Registered(HeldTransform):
    """A transform of TorchRL for whose class ``register_array_form`` was called."""

    def on_arrays(self, env: ArrayEnv) -> ArrayTransform:
        """See :meth:`Transform.on_arrays`."""
        return ARRAY_FORMS[type(self.theirs)](self.theirs, env)


class _RunningNorm(HeldTransform):
    """TorchRL's ``VecNorm``: its own formula, called on tensors; statistics stay where TorchRL keeps them."""

    def on_arrays(self, env: ArrayEnv) -> ArrayTransform:
        """See :meth:`Transform.on_arrays`."""
        theirs, name, known = self.theirs, class_path(self.theirs), {**env.entries, **env.rewards}
        keys = [unravel(key) for key in theirs.in_keys]
        if env.batch and not self.follows_last_resets:
            raise NotNative(f"{name} counts rows of a batch that are not reset. Put it into each environment")
        if keys != [unravel(key) for key in theirs.out_keys]:
            raise NotNative(f"{name} has out_keys of its own")
        if unknown := [key for key in keys if key not in known or known[key].dtype.kind != "f"]:
            raise NotNative(f"{name} normalises {unknown[0]!r}, which is no entry of floating-point numbers")

        begun: set[NestedKey] = set()

        def normalise(values: Values) -> None:
            with theirs.lock or _NO_LOCK:
                for key in keys:
                    if key in values:
                        entry = known[key]
                        value = torch.from_numpy(np.array(values[key], entry.dtype).reshape(entry.shape))
                        if key not in begun:
                            theirs._init(TensorDict({key: value}, env.batch), key)
                            begun.add(key)
                        found = theirs._update(key, value, N=math.prod(env.batch)).numpy()
                        values[key] = found[..., 0][()] if entry.column else found

        return ArrayTransform({}, [], lambda root, out: normalise(out), normalise)


class LastResets(Transform):
    """Repeats at a reset, in rows that are not reset, what their last reset returned, as TorchRL's ``SerialEnv``."""

    def on_arrays(self, env: ArrayEnv) -> ArrayTransform:
        """See :meth:`Transform.on_arrays`."""
        kept: Values = {}

        def restart(fresh: Values, rows: Rows | None) -> None:
            if rows is not None:
                for key, last in kept.items():
                    marks = rows.reshape(rows.shape + (1,) * (last.ndim - rows.ndim))
                    fresh[key] = np.where(marks, fresh[key], last)
            kept.update(fresh)

        return ArrayTransform({}, [], lambda root, out: None, lambda fresh: restart(fresh, None), restart=restart)


# Those that are known -----------------------------------------------------------------------------


def _reward_sum(in_keys: list[NestedKey], out_keys: list[NestedKey], reset_keys: list[NestedKey]) -> RewardSum:
    if list(reset_keys) != ["_reset"] * len(in_keys):
        raise ValueError("it has reset_keys")
    return RewardSum(in_keys, out_keys)


def _primer(random: bool, default_value: Any, primers: Any, **others: Any) -> TensorDictPrimer:
    default = None if random else default_value
    return TensorDictPrimer(
        cast(Composite, from_torchrl(primers)), random=bool(random), default_value=default, **others
    )


def _resize(theirs: Any, interpolation: Any, in_keys: list[NestedKey], **others: Any) -> Resize:
    seen, mode = theirs.parent.full_observation_spec, getattr(interpolation, "value", interpolation)
    if mode != "bilinear" or not all(seen[key].dtype.is_floating_point for key in in_keys):
        raise ValueError("torchvision rounds otherwise")
    return Resize(in_keys=in_keys, **others)


def _affine(make: Callable[..., Transform]) -> Callable[..., Transform]:
    return lambda standard_normal, **others: make(standard_normal=bool(standard_normal), **others)


def _alike(*names: str) -> dict[str, str]:
    return dict(zip(names, names, strict=True))


_KEYS = _alike("in_keys", "out_keys")
_INVERSE = _alike("in_keys_inv", "out_keys_inv")
_NUMBERS = "loc", "scale"
_DIM = {**_KEYS, "dim": "_dim"}

_KINDS = {
    "BinarizeReward": _Kind(BinarizeReward, _KEYS),
    "CatTensors": _Kind(
        lambda out_keys, **others: CatTensors(out_key=out_keys[0], sort=False, **others),
        {**_KEYS, "dim": "dim", "del_keys": "_del_keys", "unsqueeze_if_oor": "unsqueeze_if_oor"},
    ),
    "CenterCrop": _Kind(CenterCrop, _KEYS | _alike("w", "h")),
    "ClipTransform": _Kind(ClipTransform, _KEYS | _alike("low", "high")),
    "DoubleToFloat": _Kind(DoubleToFloat, _KEYS | _INVERSE),
    "FlattenObservation": _Kind(
        lambda **given: FlattenObservation(allow_positive_dim=True, **given),
        {**_KEYS, "first_dim": "_first_dim", "last_dim": "_last_dim"},
    ),
    "GrayScale": _Kind(GrayScale, _KEYS),
    "InitTracker": _Kind(InitTracker, _alike("init_key")),
    "ObservationNorm": _Kind(_affine(ObservationNorm), _KEYS | _alike(*_NUMBERS, "standard_normal"), _NUMBERS),
    "Resize": _Kind(_resize, _KEYS | _alike("w", "h", "interpolation"), takes_itself=True),
    "RewardClipping": _Kind(RewardClipping, _KEYS | _alike("clamp_min", "clamp_max")),
    "RewardScaling": _Kind(_affine(RewardScaling), _KEYS | _alike(*_NUMBERS, "standard_normal"), _NUMBERS),
    "RewardSum": _Kind(_reward_sum, _KEYS | _alike("reset_keys"), expected={"reward_spec": False}),
    "SignTransform": _Kind(SignTransform, _KEYS),
    "SqueezeTransform": _Kind(lambda **given: SqueezeTransform(allow_positive_dim=True, **given), _DIM),
    "StepCounter": _Kind(StepCounter, _alike("max_steps", "truncated_key", "step_count_key", "update_done")),
    "TensorDictPrimer": _Kind(
        _primer,
        _alike("primers", "random", "default_value", "single_default_value"),
        expected={"call_before_env_reset": False},
    ),
    "ToTensorImage": _Kind(
        ToTensorImage, _KEYS | _alike("from_int", "dtype"), expected={"unsqueeze": False, "shape_tolerant": False}
    ),
    "UnsqueezeTransform": _Kind(lambda **given: UnsqueezeTransform(allow_positive_dim=True, **given), _DIM),
    "VecNorm": _Kind(lambda theirs, **_: _RunningNorm(theirs), _KEYS | _alike("decay", "eps"), takes_itself=True),
}
