"""Transforms of TorchRL as transforms of this library, and around environments of this library."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import nullcontext
from types import MappingProxyType
from typing import Any, NamedTuple, Self, cast

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase
from torch import nn

from rollwright._foreign import class_path, is_torchrl_transform, kind_in, overrides
from rollwright._keys import NestedKey, unravel
from rollwright.data.specs import Composite, TensorSpec
from rollwright.data.specs.conversion import from_torchrl, to_torchrl
from rollwright.envs.arrays import ARRAY_FORMS, ArrayEnv, ArrayTransform, Rows, Values
from rollwright.envs.libs.torchrl import Masks, holder_of, only_below_next, transform_trims, trim_by
from rollwright.envs.tensordicts_on_arrays import OnTensorDicts, RootTensorDicts
from rollwright.envs.transforms.base import Transform
from rollwright.envs.transforms.bookkeeping import InitTracker, RewardSum, StepCounter
from rollwright.envs.transforms.entries import CatTensors, FlattenObservation, SqueezeTransform, UnsqueezeTransform
from rollwright.envs.transforms.images import CenterCrop, GrayScale, Resize, ToTensorImage
from rollwright.envs.transforms.primer import TensorDictPrimer
from rollwright.envs.transforms.values import (
    BinarizeReward,
    ClipTransform,
    DoubleToFloat,
    ObservationNorm,
    RewardClipping,
    RewardScaling,
    SignTransform,
)
from rollwright.errors import EnvError, NotNative


class Itself(NamedTuple):
    """An object, equal to itself alone; shown by its class."""

    thing: object

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Itself) and other.thing is self.thing

    def __hash__(self) -> int:
        return id(self.thing)

    def __repr__(self) -> str:
        return class_path(self.thing)


class Watch:
    """What a translation of an object depends on.

    Args:
        theirs: the object.
        read: from it to values by name.
    """

    def __init__(self, theirs: Any, read: Callable[[Any], Mapping[str, Any]]) -> None:
        self._theirs, self._read = theirs, read
        self._then = _copied(read(theirs))

    def check(self) -> None:
        """Test that the object is what was translated.

        Raises:
            EnvError: it was changed.
        """
        now = _copied(self._read(self._theirs))
        if now != self._then:
            name = next(name for name, value in now.items() if value != self._then[name])
            raise EnvError(
                f"{class_path(self._theirs)}: expected {name} as it was when the collector was made, "
                f"{self._then[name]!r}, got {now[name]!r}. TorchRL's environments are translated when a collector is "
                "made: change them before, or make another collector; with use_buffers=False, TorchRL steps them."
            )


def _copied(value: Any) -> Any:
    """A copy that ``==`` compares."""
    if isinstance(value, torch.Tensor):
        return value.dtype, value.tolist()
    if isinstance(value, Mapping):
        return {key: _copied(part) for key, part in value.items()}
    return list(value) if isinstance(value, list) else value


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
        """The transform as it is, called on TensorDicts where an environment is stepped on arrays."""
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


_KEY_NAMES = ("in_keys", "out_keys", "in_keys_inv", "out_keys_inv")


class ForeignTransform(Transform):
    """A transform of TorchRL as one of this library; ``TransformedEnv`` and ``Compose`` make it by themselves.

    TorchRL's transform does what it did: steps, resets, the way in, specs. It meets its ``parent`` and its
    ``container`` as environments of TorchRL. Attributes that this object does not have are those of TorchRL's
    transform, and so are those that are set. Both have one ``state_dict()``.

    Args:
        transform: of TorchRL, one of a user's own class included; it must not be on an environment.

    Attributes:
        torchrl_transform: ``transform``.

    Raises:
        TypeError: it is none, or for environments that reset themselves.
        RuntimeError: it belongs to an environment of TorchRL.
    """

    inner_name = "torchrl_transform"  # among its modules
    _not_saved = ("_held",)

    def __init__(self, transform: Any) -> None:
        _check(transform)
        super().__init__()
        for name in _KEY_NAMES:  # they are TorchRL's
            delattr(self, name)
        self.__dict__["_held"] = None
        self._modules[self.inner_name] = transform

    # What TorchRL's transform does --------------------------------------------------------------

    def _theirs(self, name: str, *args: Any) -> Any:
        """The result of a method that is for those who write transforms."""
        return getattr(self._placed(), name)(*args)

    def _call(self, next_tensordict: TensorDictBase) -> TensorDictBase:
        return cast(TensorDictBase, self._theirs("_call", next_tensordict))

    def _step(self, tensordict: TensorDictBase, next_tensordict: TensorDictBase) -> TensorDictBase:
        changed: TensorDictBase = self._theirs("_step", tensordict, next_tensordict)
        self._take_masks()
        return changed

    def _reset(self, tensordict: TensorDictBase, tensordict_reset: TensorDictBase) -> TensorDictBase:
        changed: TensorDictBase = self._theirs("_reset", self._reset_data(tensordict), tensordict_reset)
        self._take_masks()
        return changed

    def _take_masks(self) -> None:
        """What TorchRL's transform has written into the action's spec, such as ``ActionMask``."""
        env, held = self.container, self.__dict__["_held"]
        if env is not None and held is not None:
            self._remember("masks", lambda: Masks(held.full_action_spec, env.full_action_spec, env.action_keys)).take()

    def _reset_env_preprocess(self, tensordict: TensorDictBase | None) -> TensorDictBase | None:
        given = None if tensordict is None else self._reset_data(tensordict)
        changed: TensorDictBase | None = self._theirs("_reset_env_preprocess", given)
        return tensordict if changed is given else changed

    def _reset_data(self, tensordict: TensorDictBase) -> TensorDictBase:
        """What TorchRL's environments pass to a transform at a reset: marks, and what a step reads."""
        env = self.container
        if env is None:
            return tensordict
        keys = self._remember("reset_data", lambda: [*env.reset_keys, *env.state_keys])
        return tensordict.select(*keys, strict=False)

    def _inv_call(self, tensordict: TensorDictBase) -> TensorDictBase:
        return cast(TensorDictBase, self._theirs("_inv_call", tensordict))

    def inv(self, tensordict: TensorDictBase) -> TensorDictBase:
        """What the environment is given for ``tensordict``, which is left as it is."""
        return cast(TensorDictBase, self._placed().inv(tensordict))

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Change data outside of an environment: applies ``_apply_transform`` to the root's entries."""
        return cast(TensorDictBase, self._placed()(tensordict))

    def trim_frame(self, frame: TensorDictBase, following: TensorDictBase) -> None:
        """Change a frame once the data of the next step were taken from it, see :meth:`EnvBase.trim_frame`."""
        if self._trims:
            trim_by(self._placed(), frame, following, self._remember("dropped", self._only_below_next))

    @property
    def _trims(self) -> bool:
        return self._remember("trims", lambda: transform_trims(self._inner))

    def _only_below_next(self) -> list[NestedKey]:
        return [] if self.container is None else only_below_next(self.container.fake_tensordict())

    def complete_fake(self, fake: TensorDictBase) -> TensorDictBase:
        """What :meth:`EnvBase.fake_tensordict` gives, where frames have other entries than the specs say."""
        return cast(TensorDictBase, self._theirs("transform_fake_tensordict", fake))

    def _apply_transform(self, obs: torch.Tensor) -> torch.Tensor:
        return cast(torch.Tensor, self._theirs("_apply_transform", obs))

    def _inv_apply_transform(self, state: torch.Tensor) -> torch.Tensor:
        return cast(torch.Tensor, self._theirs("_inv_apply_transform", state))

    @property
    def inverts(self) -> bool:
        """True: TorchRL's transforms are always asked."""
        return True

    def dump(self, **kwargs: Any) -> Any:
        """Write out what TorchRL's transform has gathered."""
        return self._placed().dump(**kwargs)

    def close(self) -> None:
        """Close TorchRL's transform."""
        self._inner.close()

    @property
    def is_known(self) -> bool:
        """Whether TorchRL's transform has a counterpart in this library."""
        try:
            return translated(self._placed()) is not None
        except NotNative:
            return False

    def on_arrays(self, env: ArrayEnv) -> ArrayTransform:
        """What the counterpart of TorchRL's transform does, with the tensors of that.

        Raises:
            NotNative: it has none.
        """
        ours = translated(self._placed())
        ours.set_parent(self.parent)
        return ours.on_arrays(env)

    def on_tensordicts(self, env: ArrayEnv, roots: RootTensorDicts) -> OnTensorDicts:
        """See :meth:`Transform.on_tensordicts`; for a transform of TorchRL without a counterpart.

        Raises:
            NotNative: it changes what a reset or a step is given.
        """
        inner, parent = self._placed(), self.parent
        if parent is None:
            raise NotNative(f"{class_path(inner)} is on no environment")
        spec = self.transform_output_spec(parent.output_spec.clone())
        return called_on_tensordicts(self, inner, env, roots, list(parent.done_keys), spec)

    # Specs ------------------------------------------------------------------------------------

    def _changed(self, method: str, spec: Composite) -> Composite:
        """A spec after TorchRL's transform."""
        changed: TensorSpec = from_torchrl(getattr(self._placed(), method)(to_torchrl(spec)))
        if not isinstance(changed, Composite):
            raise EnvError(f"{self}: {method} must return a Composite, got {type(changed).__name__}. Return all specs.")
        for name, child in spec.items():  # TorchRL has None for an empty one
            if name not in changed and isinstance(child, Composite) and not child.keys():
                changed[name] = child.clone()
        return changed

    def transform_observation_spec(self, observation_spec: Composite) -> Composite:
        """The spec of all observations after this transform."""
        return self._changed("transform_observation_spec", observation_spec)

    def transform_reward_spec(self, reward_spec: Composite) -> Composite:
        """The spec of all rewards after this transform."""
        return self._changed("transform_reward_spec", reward_spec)

    def transform_done_spec(self, done_spec: Composite) -> Composite:
        """The spec of all flags after this transform."""
        return self._changed("transform_done_spec", done_spec)

    def transform_action_spec(self, action_spec: Composite) -> Composite:
        """The spec of all actions, as the policy sees them."""
        return self._changed("transform_action_spec", action_spec)

    def transform_state_spec(self, state_spec: Composite) -> Composite:
        """The spec of what a step reads beside the action."""
        return self._changed("transform_state_spec", state_spec)

    def transform_output_spec(self, output_spec: Composite) -> Composite:
        """``full_observation_spec``, ``full_reward_spec`` and ``full_done_spec`` after this transform."""
        return self._changed("transform_output_spec", output_spec)

    def transform_input_spec(self, input_spec: Composite) -> Composite:
        """``full_action_spec`` and ``full_state_spec`` after this transform."""
        return self._changed("transform_input_spec", input_spec)

    # The environment around -------------------------------------------------------------------

    @property
    def _inner(self) -> Any:
        return self._modules[self.inner_name]

    def _placed(self) -> Any:
        """TorchRL's transform, which knows the environment around."""
        if self.__dict__["_held"] is None and (parent := self.parent) is not None:
            self._check_place(parent)
            self.__dict__["_held"] = holder_of(parent, self._inner)
        return self._inner

    def _check_place(self, env: Any) -> None:
        """Test that the transform leaves batch size and device of the environment as they are."""
        inner = self._inner
        size, device = inner.transform_env_batch_size(env.batch_size), inner.transform_env_device(env.device)
        if tuple(size) != tuple(env.batch_size):
            raise EnvError(
                f"{class_path(inner)}: expected a transform that keeps the batch size {list(env.batch_size)}, got one "
                f"that makes it {list(size)}. Put it into TorchRL's TransformedEnv around "
                "rollwright.envs.to_torchrl(env), which collectors take."
            )
        if device != env.device and {str(device), str(env.device)} != {"None", "cpu"}:
            raise EnvError(
                f"{class_path(inner)}: expected a transform that keeps the device {env.device}, got one that makes it "
                f"{device}. Move the environment with env.to(device), or pass storing_device= to the collector."
            )

    def _release(self) -> None:
        super()._release()
        self._forget()

    def empty_cache(self) -> None:
        """Forget what was derived from the environment's specs."""
        super().empty_cache()
        self._forget()

    def _forget(self) -> None:
        """Let TorchRL's transform meet its environment anew."""
        if self.__dict__.get("_held") is not None:
            self.__dict__["_held"] = None
            self.__dict__["_memo"].pop("masks", None)
            self._inner.reset_parent()

    # The object -------------------------------------------------------------------------------

    def clone(self) -> Self:
        """A copy without an environment, around TorchRL's own copy."""
        return type(self)(self._inner.clone())

    def to(self, *args: Any, **kwargs: Any) -> Self:
        """Move TorchRL's transform; returns this one."""
        self._forget()
        self._modules[self.inner_name] = self._inner.to(*args, **kwargs)
        return self

    def state_dict(self, *args: Any, destination: Any = None, prefix: str = "", keep_vars: bool = False) -> Any:
        """The state of TorchRL's transform."""
        if args:  # as torch takes them, by place
            destination, prefix, keep_vars = (*args, prefix, keep_vars)[:3] if len(args) < 3 else args
        found = self._inner.state_dict(destination=destination, prefix=prefix, keep_vars=keep_vars)
        if destination is None or found is destination:
            return found
        destination.update({prefix + name: value for name, value in found.items()})  # a method of its own made it
        return destination

    @property
    def has_own_state(self) -> bool:
        """Whether TorchRL's transform has more in its ``state_dict()`` than parameters and buffers."""
        kind = type(self._inner)
        return kind.state_dict is not nn.Module.state_dict or kind.get_extra_state is not nn.Module.get_extra_state

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        inner = self._inner
        state = {name: state_dict.pop(name) for name in list(state_dict) if name.startswith(prefix)}
        if type(inner).load_state_dict is not nn.Module.load_state_dict:
            inner.load_state_dict({name.removeprefix(prefix): value for name, value in state.items()})
            state = nn.Module.state_dict(inner, prefix=prefix)  # torch goes on with its parts
        state_dict.update(
            {f"{prefix}{self.inner_name}.{name.removeprefix(prefix)}": value for name, value in state.items()}
        )
        super()._load_from_state_dict(state_dict, prefix, *args)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            inner = self.__dict__.get("_modules", {}).get(self.inner_name)
            if inner is None or name.startswith("__") or hasattr(type(self), name):
                raise
        value = getattr(inner, name)
        if callable(value) and not isinstance(value, nn.Module):
            self._placed()  # it may ask for the environment
        return value

    def __setattr__(self, name: str, value: Any) -> None:
        inner = self.__dict__.get("_modules", {}).get(self.inner_name)
        if inner is None or name in self.__dict__ or hasattr(type(self), name):
            super().__setattr__(name, value)
        else:
            setattr(inner, name, value)

    def __getstate__(self) -> dict[str, Any]:
        state = super().__getstate__()
        return state | {"_held": None, "_modules": {self.inner_name: self._inner.clone()}}  # the environment stays here

    def __repr__(self) -> str:
        return repr(self._inner)


def parts_of(thing: Any) -> list[Any] | None:
    """The transforms of TorchRL's ``Compose``, taken out of it; None: it is something else, or a class of its own."""
    if type(thing).__name__ != "Compose" or kind_in("torchrl", thing)[:2] != ["Compose", "Transform"]:
        return None
    _check_free(thing)
    return list(_taken_out(thing))


def _taken_out(chain: Any) -> Iterator[Any]:
    for part in list(chain):
        part.reset_parent()
        called = getattr(part, "func", None) if type(part).__name__ == "_CallableTransform" else None
        yield called if isinstance(called, Transform) else part  # TorchRL takes ours for functions


def _check_free(transform: Any) -> None:
    if transform.container is not None:
        raise RuntimeError(
            f"transform: this {class_path(transform)} already belongs to {type(transform.container).__name__} of "
            "TorchRL. It can follow only one environment; pass transform.clone()."
        )


def _check(transform: Any) -> None:
    if not is_torchrl_transform(transform):
        raise TypeError(f"transform: expected one of TorchRL, got {class_path(transform)}. Pass it as it is.")
    _check_free(transform)
    name = class_path(transform)
    if "AutoResetTransform" in kind_in("torchrl", transform):
        raise TypeError(
            f"transform: {name} is for environments that reset themselves, which those of rollwright do not. Leave it "
            "out."
        )
