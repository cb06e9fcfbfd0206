"""Environments of TorchRL as environments of this library, around the same environments of gymnasium."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import gymnasium
import torch

from rollwright._foreign import class_path, kind_in
from rollwright._keys import NestedKey, unravel
from rollwright.envs.arrays import (
    Entry,
    Rows,
    Values,
    array_form,
    check_open,
    entries_of,
    refuse_overrides,
    works_on_tensordicts,
)
from rollwright.envs.base import EnvBase, WrapperArrays
from rollwright.envs.libs.gym import GymWrapper
from rollwright.envs.libs.torchrl import STEPPED_THERE, TorchRLStep, TorchRLWrapper, is_serial
from rollwright.envs.serial import SerialEnv
from rollwright.envs.transforms.base import Transform
from rollwright.envs.transforms.compose import Compose
from rollwright.envs.transforms.foreign import HeldTransform, Itself, LastResets, Watch, settings_of, translated
from rollwright.envs.transforms.transformed_env import TransformedEnv
from rollwright.errors import EnvError, NotNative

_METHODS = {"step", "reset", "_step", "_reset", "read_obs", "read_reward", "read_done", "read_action"}
_GYM = ("torchrl.envs.libs.gym.GymEnv", "torchrl.envs.libs.gym.GymWrapper")


class TranslatedArrays(WrapperArrays):
    """The array form of a :class:`TorchRLWrapper` around TorchRL's ``GymEnv`` or ``GymWrapper``, with transforms.

    Or around a ``SerialEnv`` of these. It is that of a translation: an environment of this library around the same
    environment of gymnasium, with transforms of this library that share TorchRL's tensors of state. Other environments
    below known transforms are stepped by TorchRL, and the transforms are translated.

    Args:
        env: the environment.

    Raises:
        NotNative: TorchRL's environment is another one, or a transform of it changes what the environment is given.
    """

    def __init__(self, env: TorchRLWrapper) -> None:
        refuse_overrides(env, TorchRLWrapper)
        if env.run_type_checks or (env.device is not None and env.device.type != "cpu"):
            raise NotNative("run_type_checks=True" if env.run_type_checks else f"its device is {env.device}")
        self._env, self._watches = env, list[Watch]()
        super().__init__(array_form(_translated(env.torchrl_env, self._watches), unfit=True))
        self.on_tensordicts = self._base.on_tensordicts
        found = entries_of(env.full_observation_spec, env.ndim), entries_of(env.full_reward_spec, env.ndim)
        same = [_forms(entries) for entries in found] == [_forms(self.entries), _forms(self.rewards)]
        if not same or {*env.action_keys} - {*self.reads}:
            raise NotNative(f"the specs of {class_path(env.torchrl_env)} are not those of its spaces and transforms")

    def check(self) -> None:
        """See :meth:`ArrayEnv.check`.

        Raises:
            EnvError: TorchRL's environment was changed.
        """
        for watch in self._watches:
            watch.check()
        self._base.check()

    def step(self, root: Values, preset: Values) -> Values:
        """Act."""
        check_open(self._env, "step")
        return self._with_masks(lambda: self._base.step(root, preset))

    def reset(self, rows: Rows | None, **kwargs: Any) -> Values:
        """Begin new trajectories in the environments that ``rows``, bool ``[*batch]``, marks; None: in all."""
        check_open(self._env, "reset")
        return self._with_masks(lambda: self._base.reset(rows, **kwargs))

    def reset_from(self, root: Values, rows: Rows | None, **kwargs: Any) -> Values:
        """The same where what goes on may be read: ``root``, from which the next step would be taken."""
        check_open(self._env, "reset")
        return self._with_masks(lambda: self._base.reset_from(root, rows, **kwargs))

    def _with_masks(self, call: Callable[[], Values]) -> Values:
        """The result of a call, after which masks that TorchRL's transforms have written are taken over."""
        if not self.may_be_unfit:
            return call()
        try:
            return call()
        finally:
            self._env.take_masks()


TorchRLWrapper.translate = TranslatedArrays


def _forms(entries: dict[NestedKey, Entry]) -> dict[NestedKey, Any]:
    return {unravel(key): entry[:2] for key, entry in entries.items()}


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


# Environments -------------------------------------------------------------------------------------


def _translated(env: Any, watches: list[Watch]) -> EnvBase:
    """An environment of this library that does what one of TorchRL does.

    Args:
        env: TorchRL's.
        watches: here is added what notices its changes.

    Raises:
        NotNative: there is none.
    """
    base, transforms = _taken_apart(env)
    number = len(watches)
    try:
        inner: EnvBase = _serial_env(base, watches) if is_serial(base) else _gym_wrapper(base)
    except NotNative:
        if not transforms or not TorchRLStep(base).is_plain:
            raise
        inner = TorchRLWrapper(base)
        del watches[number:]
    watches.append(Watch(env, _structure))
    if not transforms:
        return inner
    read_at_reset = [*inner.reset_keys, *env.state_spec.keys(True, True)]
    parts = [_part(theirs, read_at_reset, watches) for theirs in transforms]
    held = [part for part in parts if isinstance(part, HeldTransform)]
    for part in held:
        part.follows_last_resets = is_serial(base)
    repeated = [LastResets()] if held and is_serial(base) else []
    return TransformedEnv(inner, Compose(*repeated, *parts), auto_unwrap=False)


def _part(theirs: Any, read_at_reset: list[NestedKey], watches: list[Watch]) -> Transform:
    try:
        ours = translated(theirs)
    except NotNative:
        return HeldTransform(theirs, read_at_reset)
    watches.append(Watch(theirs, settings_of))
    return ours


def _gym_wrapper(env: Any) -> GymWrapper:
    """A wrapper of this library around the gymnasium environment of one of TorchRL's.

    Raises:
        NotNative: steps and resets are not those of the gymnasium environment alone.
    """
    name, inner = class_path(env), vars(env).get("_env")
    if name not in _GYM:
        raise NotNative(f"{name} is stepped by TorchRL. GymEnv and GymWrapper of TorchRL are translated")
    if not isinstance(inner, gymnasium.Env):
        raise NotNative(f"{name} is around {class_path(inner)}, which is no gymnasium.Env")
    if env.info_dict_reader:
        raise NotNative(f"{name} has readers of info. Use rollwright.envs.GymEnv, or leave them out")
    if vars(env).get("wrapper_frame_skip", 1) != 1:
        raise NotNative(f"{name} skips frames. Make the environment with rollwright.envs.GymEnv(frame_skip=...)")
    if env.run_type_checks:
        raise NotNative("run_type_checks=True")
    if any(getattr(env.full_action_spec[key], "mask", None) is not None for key in env.action_keys):
        raise NotNative(f"the action spec of {name} has a mask")
    if _METHODS & vars(env).keys():
        raise NotNative(f"{name} has methods of its own")
    categorical = bool(vars(env).get("_categorical_action_encoding", False))
    try:
        wrapper = GymWrapper(inner, categorical_action_encoding=categorical, device=env.device)
    except (TypeError, ValueError) as error:
        raise NotNative(f"{class_path(inner)}: {error}") from error
    for key in wrapper.action_keys:
        theirs = env.full_action_spec[key] if key in env.action_keys else None
        ours = wrapper.full_action_spec[key]
        if theirs is None or theirs.shape != ours.shape or theirs.dtype != ours.dtype:
            raise NotNative(f"the action spec of {name} is not that of its action space")
        if theirs.device not in (None, torch.device("cpu")):
            raise NotNative(f"its device is {theirs.device}")
    return wrapper


def _serial_env(env: Any, watches: list[Watch]) -> SerialEnv:
    """A ``SerialEnv`` of translations of the environments of TorchRL's.

    Raises:
        NotNative: one has none, or they differ.
    """
    members = _members(env)
    if len({id(each) for each in members}) != len(members):
        raise NotNative("TorchRL's SerialEnv steps one environment in several rows")
    if vars(env).get("shared_tensordict_parent") is None:
        raise NotNative("TorchRL's SerialEnv has use_buffers=False")
    inner = [_translated(each, watches) for each in members]
    for form in (array_form(each, unfit=True) for each in inner):
        if form.held_back or form.may_be_unfit:
            raise NotNative(form.held_back.removeprefix(STEPPED_THERE) or works_on_tensordicts(form.on_tensordicts))
    try:
        return SerialEnv(len(inner), [lambda each=each: each for each in inner], device=env.device)
    except (TypeError, ValueError, EnvError) as error:
        raise NotNative(f"{class_path(env)}: {error}") from error


def _members(env: Any) -> list[Any]:
    """The environments of TorchRL's ``SerialEnv``, which starts."""
    if env.is_closed:
        env.start()
    return list(env._envs)


# Changes ------------------------------------------------------------------------------------------


def _structure(env: Any) -> dict[str, Any]:
    """What an environment is made of."""
    base, transforms = _taken_apart(env)
    found = {"base_env": Itself(base), "transforms": [Itself(each) for each in transforms]}
    if is_serial(base):
        found["environments"] = [Itself(each) for each in vars(base).get("_envs") or ()]
    elif class_path(base) in _GYM:
        found |= {"_env": Itself(vars(base).get("_env")), "info_dict_reader": list(base.info_dict_reader)}
        found["methods of its own"] = sorted(_METHODS & vars(base).keys())
    return found
