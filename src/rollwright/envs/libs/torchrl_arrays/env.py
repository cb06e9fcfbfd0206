"""The array form of TorchRL's environments of gymnasium: the gymnasium environment inside is stepped directly."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import gymnasium
import torch
from tensordict import TensorDictBase

from rollwright._foreign import class_path, kind_in
from rollwright._keys import NestedKey, leaves, unravel
from rollwright.data.specs import Composite
from rollwright.data.specs.torchrl import from_torchrl
from rollwright.envs._checks import complete_reset, complete_step
from rollwright.envs.arrays import (
    FLAGS,
    ArrayEnv,
    ArrayTransform,
    Entry,
    Rows,
    UnfitOutcome,
    Values,
    array_form,
    check_flags,
    check_open,
    entries_of,
    refuse_overrides,
    works_on_tensordicts,
)
from rollwright.envs.libs.gym import GymWrapper
from rollwright.envs.libs.torchrl_arrays.frames import trims
from rollwright.envs.libs.torchrl_arrays.steps import TorchRLStep, is_serial, reset_of
from rollwright.envs.libs.torchrl_arrays.transforms import array_transform, check_outputs_only, is_known, reads_root
from rollwright.envs.on_arrays.chain import ArrayChain, ChainDeviation
from rollwright.envs.on_arrays.tensordicts import OnTensorDicts, RootTensorDicts
from rollwright.envs.own.arrays import OwnArrays
from rollwright.envs.serial_arrays import TurnArrays
from rollwright.errors import NotNative

if TYPE_CHECKING:
    from rollwright.envs.libs.torchrl import TorchRLWrapper

__all__ = ["TorchRLArrays", "torchrl_array_form"]

Method = Callable[..., TensorDictBase]
_METHODS = {"step", "reset", "_step", "_reset", "read_obs", "read_reward", "read_done", "read_action"}
_STEPPED_THERE = "TorchRL steps it, since "
_GYM = ("torchrl.envs.libs.gym.GymEnv", "torchrl.envs.libs.gym.GymWrapper")


def torchrl_array_form(env: TorchRLWrapper, known: type[TorchRLWrapper], step: Method, reset: Method) -> ArrayEnv:
    """The array form of a :class:`TorchRLWrapper`.

    TorchRL's environments of gymnasium, with transforms that are known, are taken apart. All others TorchRL steps on
    TensorDicts; what they return is read as arrays.

    Args:
        env: the environment.
        known: the class whose steps these are.
        step: the environment's ``_step``.
        reset: its ``_reset``.

    Raises:
        NotNative: what it returns does not fit arrays.
    """
    if trims(env.torchrl_env):
        raise NotNative(f"{class_path(env.torchrl_env)} changes frames once the data of the next step were taken")
    try:
        return TorchRLArrays(env, known)
    except NotNative as reason:
        form = _stepped_there(env, known, step, _without_given(env, reset))
        form.held_back = f"{_STEPPED_THERE}{reason}"
        return form


def _stepped_there(env: TorchRLWrapper, known: type[TorchRLWrapper], step: Method, reset: Method) -> OwnArrays:
    """The array form of an environment that TorchRL steps on TensorDicts."""
    if any(getattr(env.torchrl_env.full_action_spec[key], "mask", None) is not None for key in env.action_keys):
        raise NotNative(f"the action spec of {class_path(env.torchrl_env)} has a mask")
    return OwnArrays(env, known, step, reset)


def _without_given(env: TorchRLWrapper, begin: Method) -> Method:
    """``begin``, the environment's ``_reset``, less what it was given: TorchRL's merges all of that into the result."""
    own = {*env.observation_keys, *env.state_keys, *env.done_keys}

    def reset(tensordict: TensorDictBase | None, **kwargs: Any) -> TensorDictBase:
        fresh = begin(tensordict, **kwargs)
        if tensordict is None:
            return fresh
        given = leaves(tensordict)
        return fresh.select(*(key for key in leaves(fresh) if key in own or key not in given))

    return reset


class TorchRLArrays(ArrayEnv):
    """The array form of a :class:`TorchRLWrapper` around TorchRL's ``GymEnv`` or ``GymWrapper``, with transforms.

    Or around a ``SerialEnv`` of these. Resets and steps go to the gymnasium environments, which TorchRL's environment
    shares. Other environments with transforms are stepped by TorchRL, and their transforms follow here. Statistics of
    TorchRL's transforms are updated in place, where TorchRL keeps them.

    Args:
        env: the environment.
        known: the class whose steps these are.

    Raises:
        NotNative: TorchRL's environment is another one, or one of its transforms is not known.
    """

    def __init__(self, env: TorchRLWrapper, known: type[TorchRLWrapper]) -> None:
        refuse_overrides(env, known)
        self._env, self.batch = env, tuple(env.batch_size)
        base, self._transforms = _taken_apart(env.torchrl_env)
        self._inner = _environments(base)
        self._base = self._base_form(base, known)
        check_flags(env, lacks_truncated=len(self._base.root_flags) < len(FLAGS))
        self.root_flags = tuple(flag for flag in FLAGS if flag in env.done_keys)
        self.done_follows, self.held_back = self._base.done_follows, self._base.held_back
        self.keeps_resets = self._base.keeps_resets
        roots = RootTensorDicts(env.batch_size, env.device, set(env.reward_keys))
        self._chain = ArrayChain(self._base, roots, may_contradict=env.sets_own_flags)
        self.entries, self.rewards, self.reads = self._chain.entries, self._chain.rewards, self._chain.reads
        for transform in self._transforms:
            part = self._part(transform)
            if part.inverse is not None:
                raise NotNative(f"{class_path(transform)} changes what the environment is given")
            self._chain.add(part)
        self.on_tensordicts = self._chain.on_tensordicts
        self.may_be_unfit = self._base.may_be_unfit or bool(self.on_tensordicts)
        self._compare()

    def _base_form(self, base: Any, known: type[TorchRLWrapper]) -> ArrayEnv:
        """The array form of the environment inside of the transforms."""
        try:
            return array_form(_gym_wrapper(base)) if self._inner is None else _SerialArrays(base, self._inner, known)
        except NotNative as reason:
            if not self._transforms or not TorchRLStep(base).is_plain:
                raise
            form = _stepped_there(known(base), known, TorchRLStep(base), reset_of(base))
            form.keeps_resets = self._inner is not None
            form.held_back = f"{_STEPPED_THERE}{reason}"
            return form

    def see_roots(self, forms: Mapping[NestedKey, Entry]) -> None:
        """See :meth:`ArrayEnv.see_roots`."""
        self._chain.roots.forms = dict(forms)
        self._base.see_roots(forms)

    def _part(self, transform: Any) -> ArrayTransform | OnTensorDicts:
        if is_known(transform):
            return array_transform(transform, self)
        name, before = check_outputs_only(transform), transform.parent.output_spec.clone()
        flags = list(before["full_done_spec"].keys())
        spec = cast(Composite, from_torchrl(transform.transform_output_spec(before)))
        called, roots = _Called(transform, self._env), self._chain.roots
        return OnTensorDicts(called, name, self, flags, spec, roots, reads_root=reads_root(transform))

    def _compare(self) -> None:
        """Test that this form has the entries that TorchRL's environment has, and takes the same actions.

        Raises:
            NotNative: it has not.
        """
        env = self._env
        ndim = env.ndim
        found = entries_of(env.full_observation_spec, ndim), entries_of(env.full_reward_spec, ndim, env.reward_keys)
        if _forms(found[0]) != _forms(self.entries) or _forms(found[1]) != _forms(self.rewards):
            raise NotNative(f"the specs of {class_path(env.torchrl_env)} are not those of its spaces and transforms")
        if set(env.action_keys) - set(self.reads):
            raise NotNative(f"the actions of {class_path(env.torchrl_env)} have other keys")

    def check(self) -> None:
        """See :meth:`ArrayEnv.check`."""
        base, transforms = _taken_apart(self._env.torchrl_env)
        same = len(transforms) == len(self._transforms)
        if not same or any(now is not then for now, then in zip(transforms, self._transforms, strict=True)):
            raise NotNative("the transforms of TorchRL's environment have changed")
        if self._inner is None:
            if not self._base.may_be_unfit:
                _check_base(base)
        elif base.is_closed or list(map(id, self._inner)) != list(map(id, _environments(base) or [])):
            raise NotNative("the environments of TorchRL's SerialEnv were closed, and others were made")
        self._base.check()

    def step(self, root: Values, preset: Values) -> Values:
        """See :meth:`ArrayEnv.step`."""
        check_open(self._env, "step")
        try:
            out = self._base.step(root, preset)
        except UnfitOutcome as found:
            for key, value in preset.items():
                if found.outcome.get(key, None) is None:
                    found.outcome.set(key, torch.from_numpy(value))
            raise self._finished(root, 0, found.outcome, str(found)) from None
        if self._base.may_be_unfit:
            self._env.take_masks()
        for key, value in preset.items():  # transforms see what the policy has written, and leave it
            out.setdefault(key, value)
        try:
            self._chain.step(root, out)
        except ChainDeviation as found:
            raise self._finished(root, found.place, found.deviation.changed, str(found)) from None
        return out

    def _finished(self, root: Values, place: int, outcome: TensorDictBase, reason: str) -> UnfitOutcome:
        """A step that was taken on arrays as far as the transform at ``place``, finished on TensorDicts."""
        given = self._chain.roots.of_step(root)
        for transform in self._transforms[place:]:
            outcome = _Called(transform, self._env).transform_step(given, outcome)
        return UnfitOutcome(reason, complete_step(self._env, given, outcome))

    def reset(self, rows: Rows | None, **kwargs: Any) -> Values:
        """See :meth:`ArrayEnv.reset`."""
        return self._reset(rows, None, kwargs)

    def reset_from(self, root: Values, rows: Rows | None, **kwargs: Any) -> Values:
        """See :meth:`ArrayEnv.reset_from`."""
        return self._reset(rows, root, kwargs)

    def _reset(self, rows: Rows | None, root: Values | None, kwargs: dict[str, Any]) -> Values:
        check_open(self._env, "reset")
        try:
            if root is None or not self._base.may_be_unfit:
                values = self._base.reset(rows, **kwargs)
            else:
                passed = {key: root[key] for key in self._env.state_keys if key in root}
                values = self._base.reset_from(passed, rows, **kwargs)
        except UnfitOutcome as found:
            raise self._finished_reset(rows, root, 0, found.outcome, str(found)) from None
        if self._base.may_be_unfit:
            self._env.take_masks()
        try:
            self._chain.reset(values, rows, root)
        except ChainDeviation as found:
            raise self._finished_reset(rows, root, found.place, found.deviation.changed, str(found)) from None
        return values

    def _finished_reset(
        self, rows: Rows | None, root: Values | None, place: int, fresh: TensorDictBase, reason: str
    ) -> UnfitOutcome:
        """A reset that was made on arrays as far as the transform at ``place``, finished on TensorDicts."""
        marked = None if root is None else self._chain.roots.of_reset(root, rows)
        given = fresh.empty() if marked is None else marked
        for transform in self._transforms[place:]:
            fresh = _Called(transform, self._env).transform_reset(given, fresh)
        return UnfitOutcome(reason, complete_reset(self._env, marked, fresh))


class _Called(NamedTuple):
    """A transform of TorchRL in an environment there, called as that environment does.

    Attributes:
        transform: it.
        env: around TorchRL's environment.
    """

    transform: Any
    env: TorchRLWrapper

    def transform_step(self, tensordict: TensorDictBase, next_tensordict: TensorDictBase) -> TensorDictBase:
        """What a step returned, changed."""
        return self._result("_step", tensordict, next_tensordict)

    def transform_reset(self, tensordict: TensorDictBase, tensordict_reset: TensorDictBase) -> TensorDictBase:
        """What a reset returned, changed."""
        given = tensordict.select(*self.env.reset_keys, *self.env.state_keys, strict=False)
        return self._result("_reset", given, tensordict_reset)

    def _result(self, name: str, *args: Any) -> TensorDictBase:
        """The result of a method that is for those who write transforms."""
        changed: TensorDictBase = getattr(self.transform, name)(*args)
        self.env.take_masks()  # such as ActionMask writes into the action's spec
        return changed


class _SerialArrays(TurnArrays):
    """The array form of TorchRL's ``SerialEnv``: a reset repeats in the other rows what their last resets returned.

    That is kept where TorchRL keeps it, in memory of the ``SerialEnv``.

    Args:
        env: the ``SerialEnv``.
        inner: its environments.
        known: the class of their wrappers.

    Raises:
        NotNative: one has no array form, or they differ.
    """

    keeps_resets = True

    def __init__(self, env: Any, inner: list[Any], known: type[TorchRLWrapper]) -> None:
        if len({id(each) for each in inner}) != len(inner):
            raise NotNative("TorchRL's SerialEnv steps one environment in several rows")
        parts = [array_form(known(each), unfit=True) for each in inner]
        for part in parts:
            if part.held_back:
                raise NotNative(part.held_back.removeprefix(_STEPPED_THERE))
            if part.may_be_unfit:
                raise NotNative(works_on_tensordicts(part.on_tensordicts))
        super().__init__(parts, "SerialEnv")
        shared = vars(env).get("shared_tensordict_parent")
        if shared is None:
            raise NotNative("TorchRL's SerialEnv has use_buffers=False")
        found = {key: shared.get(key).numpy() for key in self.entries}
        self._shared = {key: value[..., 0] if self.entries[key].column else value for key, value in found.items()}

    def reset(self, rows: Rows | None, **kwargs: Any) -> Values:
        """See :meth:`ArrayEnv.reset`."""
        fresh = super().reset(rows, **kwargs)
        for key, shared in self._shared.items():
            if rows is None:
                shared[:] = fresh[key]
            else:
                shared[rows] = fresh[key][rows]
                fresh[key] = shared.copy()
        return fresh


def _forms(entries: dict[Any, Entry]) -> dict[Any, Any]:
    return {unravel(key): (entry.shape, entry.dtype) for key, entry in entries.items()}


def _taken_apart(env: Any) -> tuple[Any, list[Any]]:
    """The environment inside of all transforms, and these, the first that acts first."""
    transforms: list[Any] = []
    while "TransformedEnv" in kind_in("torchrl", env):
        if type(env).__name__ != "TransformedEnv":
            raise NotNative(f"{class_path(env)} may change what TransformedEnv does")
        transforms = [*_chain(env.transform), *transforms]
        env = env.base_env
    return env, transforms


def _chain(transform: Any) -> list[Any]:
    if transform is None:
        return []
    if kind_in("torchrl", transform)[:1] == ["Compose"] and type(transform).__module__.startswith("torchrl."):
        return [part for child in transform.transforms for part in _chain(child)]
    return [transform]


def _check_base(env: Any) -> None:
    """Test that steps and resets of an environment are those of the gymnasium environment that it wraps.

    Raises:
        NotNative: they are not.
    """
    name = class_path(env)
    if name not in _GYM:
        raise NotNative(f"{name} is stepped by TorchRL. GymEnv and GymWrapper of TorchRL run on arrays")
    if env.info_dict_reader:
        raise NotNative(f"{name} has readers of info. Use rollwright.envs.GymEnv, or leave them out")
    if vars(env).get("wrapper_frame_skip", 1) != 1:
        raise NotNative(f"{name} skips frames. Make the environment with rollwright.envs.GymEnv(frame_skip=...)")
    if env.run_type_checks:
        raise NotNative("run_type_checks=True")
    if any(getattr(env.full_action_spec[key], "mask", None) is not None for key in env.action_keys):
        raise NotNative(f"the action spec of {name} has a mask")
    if any(
        name in vars(env) for name in ("step", "reset", "_step", "_reset", "read_obs", "read_reward", "read_action")
    ):
        raise NotNative(f"{name} has methods of its own")


def _environments(env: Any) -> list[Any] | None:
    """The environments of TorchRL's ``SerialEnv``, which starts; None: it is none."""
    if not is_serial(env):
        return None
    if env.is_closed:
        env.start()
    return list(env._envs)


def _gym_wrapper(env: Any) -> GymWrapper:
    """One of our wrappers around the gymnasium environment of one of TorchRL's."""
    _check_base(env)
    inner = vars(env).get("_env")
    if not isinstance(inner, gymnasium.Env):
        raise NotNative(f"{class_path(env)} is around {class_path(inner)}, which is no gymnasium.Env")
    categorical = bool(vars(env).get("_categorical_action_encoding", False))
    try:
        wrapper = GymWrapper(inner, categorical_action_encoding=categorical)
    except (TypeError, ValueError) as error:
        raise NotNative(f"{class_path(inner)}: {error}") from error
    for key in wrapper.action_keys:
        theirs = env.full_action_spec[key] if key in env.action_keys else None
        ours = wrapper.full_action_spec[key]
        if theirs is None or theirs.shape != ours.shape or theirs.dtype != ours.dtype:
            raise NotNative(f"the action spec of {class_path(env)} is not that of its action space")
        if theirs.device not in (None, torch.device("cpu")):
            raise NotNative(f"its device is {theirs.device}")
    return wrapper
