"""TorchRLWrapper, an environment of TorchRL as one of this library, and to_torchrl, the other way."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from functools import cache
from typing import Any, ClassVar, Self

import torch
from tensordict import TensorDictBase

from rollwright._foreign import class_path, is_torchrl_env, kind_in, overrides
from rollwright._keys import NestedKey, leaf_keys, leaves, without
from rollwright.data.specs import Composite, TensorSpec
from rollwright.data.specs.conversion import from_torchrl
from rollwright.data.specs.conversion import to_torchrl as spec_to_torchrl
from rollwright.data.specs.shapes import as_device
from rollwright.envs.arrays import ArrayEnv
from rollwright.envs.base import EnvBase
from rollwright.envs.own_arrays import OwnArrays
from rollwright.errors import EnvError, NotNative, require


class Masks:
    """Takes masks over from specs of TorchRL.

    Args:
        theirs: action specs of TorchRL, by key.
        ours: the same of this library.
        keys: of the actions.
    """

    def __init__(self, theirs: Any, ours: Composite, keys: Iterable[NestedKey]) -> None:
        pairs = [(theirs[key], ours[key]) for key in keys]
        self._pairs: list[tuple[Any, Any]] = [pair for pair in pairs if all(hasattr(each, _UPDATE) for each in pair)]

    def take(self) -> None:
        """Write what is allowed now into the specs of this library."""
        for theirs, ours in self._pairs:
            if theirs.mask is not None or ours.mask is not None:
                ours.update_mask(theirs.mask)


_UPDATE = "update_mask"


_HOOK = "_post_step_mdp_hooks"


def transform_trims(transform: Any) -> bool:
    """Whether a transform of TorchRL changes frames once the data of the next step were taken from them."""
    return overrides(transform, _HOOK)


def trims(env: Any) -> bool:
    """As :func:`transform_trims`, of an environment of TorchRL and all of its transforms."""
    while "TransformedEnv" in kind_in("torchrl", env):
        if transform_trims(env.transform):
            return True
        env = env.base_env
    return getattr(env, _HOOK, None) is not None


def only_below_next(fake: TensorDictBase) -> list[NestedKey]:
    """Entries that steps return and roots lack, of a :meth:`EnvBase.fake_tensordict`."""
    at_root = set(leaf_keys(fake))
    return [key for key in leaf_keys(fake.get("next")) if key not in at_root]


def trim_by(owner: Any, frame: TensorDictBase, following: TensorDictBase, dropped: Iterable[NestedKey]) -> None:
    """Let an environment or a transform of TorchRL change a frame.

    Args:
        owner: the environment or the transform.
        frame: what a step returned, changed in place.
        following: the data of the next step, changed in place.
        dropped: entries of ``following`` that TorchRL does not carry over to it.

    Raises:
        EnvError: it returned others in their place.
    """
    for key in dropped:
        following.pop(key, None)
    changed, after = getattr(owner, _HOOK)(frame, following)
    if changed is not frame or after is not following:
        raise EnvError(
            f"{class_path(owner)}: expected {_HOOK} to return the TensorDicts that it is given, got others. Change "
            "them in place."
        )


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


STEPPED_THERE = "TorchRL steps it, since "
_SPECS = ("observation", "state", "action", "reward", "done")


class TorchRLWrapper(EnvBase):
    """An environment of TorchRL (a batch of them, one with transforms) as one of this library.

    Collectors, ``ParallelEnv``, ``SerialEnv``, ``TransformedEnv`` and ``Evaluator`` put it around TorchRL's
    environments by themselves. TorchRL's environment does what it did: resets (of some of a batch, too), steps, its
    transforms, its seeds. Attributes that the wrapper does not have are those of that environment.

    Args:
        env: an environment of TorchRL. The wrapper steps and closes it.

    Attributes:
        torchrl_env: ``env``.

    Raises:
        TypeError: it is none.
        EnvError: a spec of it has no counterpart here.
    """

    returns_copies = True  # TorchRL's collector keeps what a step returns, too
    casts_outcomes = True  # as TorchRL does where it writes them into memory of a batch
    translate: ClassVar[Callable[[Any], ArrayEnv]]  # set by what knows the environments of this library

    def __init__(self, env: Any) -> None:
        if not is_torchrl_env(env):
            raise TypeError(f"env: expected an environment of TorchRL, got {class_path(env)}: {env!r}. Make one first.")
        # What has passed TorchRL's own check of flags after a reset is not judged again.
        super().__init__(device=env.device, batch_size=env.batch_size, allow_done_after_reset=True)
        self.torchrl_env = env
        self._torchrl_step = TorchRLStep(env)
        self.batch_locked = bool(env.batch_locked)
        self._reopen()  # TorchRL marks most environments as closed from the start
        for name in _SPECS:
            theirs = getattr(env, f"full_{name}_spec")
            try:
                ours = from_torchrl(theirs)
            except RuntimeError as error:
                raise EnvError(f"{class_path(env)}: {name}_spec: {error}") from error
            self.set_full_spec(name, ours)
        self._find_masks()

    def _find_masks(self) -> None:
        self._masks = Masks(self.torchrl_env.full_action_spec, self.full_action_spec, self.action_keys)

    def take_masks(self) -> None:
        """Take over what is allowed now, which transforms and environments of TorchRL write into their specs."""
        self._masks.take()

    def _reset(self, tensordict: TensorDictBase | None = None, **kwargs: Any) -> TensorDictBase:
        if tensordict is None:
            fresh: TensorDictBase = self.torchrl_env.reset(**kwargs)
        else:
            fresh = without(self.torchrl_env.reset(tensordict.copy(), **kwargs), "next", *self.reset_keys)
        self.take_masks()
        return fresh

    def _step(self, tensordict: TensorDictBase) -> TensorDictBase:
        return self._stepped(without(tensordict, "_"))

    def _stepped(self, tensordict: TensorDictBase) -> TensorDictBase:
        """What a step returns for ``tensordict``, into which the environment may write."""
        outcome = self._torchrl_step(tensordict)
        self.take_masks()
        return outcome

    def trim_frame(self, frame: TensorDictBase, following: TensorDictBase) -> None:
        """Change a frame after the next step was taken from it."""
        if self.remember("trims", lambda: trims(self.torchrl_env)):
            dropped = self.remember("dropped", lambda: only_below_next(self.fake_tensordict()))
            trim_by(self.torchrl_env, frame, following, dropped)

    def fake_tensordict(self) -> TensorDictBase:
        """A step of zeros with every entry that a step has."""
        if not trims(self.torchrl_env):
            return super().fake_tensordict()
        fake: TensorDictBase = self.torchrl_env.fake_tensordict()
        return fake

    def _array_form(self) -> ArrayEnv:
        env = self.torchrl_env
        if trims(env):
            raise NotNative(f"{class_path(env)} changes frames once the data of the next step were taken from them")
        try:
            return type(self).translate(self)
        except NotNative as reason:
            form = self._stepped_there()
            form.held_back = f"{STEPPED_THERE}{reason}"
            return form

    def _stepped_there(self) -> ArrayEnv:
        """The array form of an environment that TorchRL steps on TensorDicts."""
        env = self.torchrl_env
        if any(getattr(env.full_action_spec[key], "mask", None) is not None for key in self.action_keys):
            raise NotNative(f"the action spec of {class_path(env)} has a mask")
        return OwnArrays(self, TorchRLWrapper, self._stepped, self._reset_alone)

    def _reset_alone(self, tensordict: TensorDictBase | None, **kwargs: Any) -> TensorDictBase:
        """:meth:`_reset`, less what it was given: TorchRL's merges all of that into the result."""
        fresh = self._reset(tensordict, **kwargs)
        if tensordict is None:
            return fresh
        own, given = {*self.observation_keys, *self.state_keys, *self.done_keys}, leaves(tensordict)
        return fresh.select(*(key for key in leaves(fresh) if key in own or key not in given))

    def rand_action(self, tensordict: TensorDictBase | None = None) -> TensorDictBase:
        """Random actions, drawn by TorchRL's environment from its own action spec."""
        acted: TensorDictBase = self.torchrl_env.rand_action(tensordict)
        return acted

    def _set_seed(self, seed: int | None) -> int | None:
        return self._seed_envs(seed, False)

    def _seed_envs(self, seed: int | None, static_seed: bool) -> int | None:
        last: int | None = self.torchrl_env.set_seed(seed, static_seed=static_seed)
        return last

    def set_full_spec(self, name: str, spec: TensorSpec) -> None:
        """Set a spec of this wrapper; TorchRL's environment keeps its own."""
        super().set_full_spec(name, spec)
        if "torchrl_env" in self._modules and name == "action":
            self._find_masks()

    def to(self, device: torch.device | str | int | None) -> Self:  # type: ignore[override]
        """Move TorchRL's environment and these specs to a device; returns the wrapper."""
        if device is not None and self.device != as_device(device):
            self.torchrl_env = self.torchrl_env.to(device)
            self._torchrl_step = TorchRLStep(self.torchrl_env)
        super().to(device)
        self._find_masks()
        return self

    def close(self, *, raise_if_closed: bool = True) -> None:
        """Close TorchRL's environment."""
        super().close(raise_if_closed=raise_if_closed)
        if not self.torchrl_env.is_closed:
            self.torchrl_env.close()

    def _reopen(self) -> None:
        # TorchRL's environments go on after close() as far as what they hold does; batches of them start again.
        self.is_closed = False
        if not _starts_late(self.torchrl_env):
            _innermost(self.torchrl_env).is_closed = False

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            env = self.__dict__.get("_modules", {}).get("torchrl_env")
            if env is None or name.startswith("_") or hasattr(type(self), name):
                raise
            if env.is_closed and _starts_late(env):  # it has no environments to ask
                raise
        return getattr(env, name)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.torchrl_env!r})"


def _starts_late(env: Any) -> bool:
    """Whether an environment, or the one that it is around, starts at the first reset, and is closed until then."""
    return "BatchedEnvBase" in kind_in("torchrl", _innermost(env))


def _innermost(env: Any) -> Any:
    """The environment that TorchRL's transforms are around."""
    while "TransformedEnv" in kind_in("torchrl", env):
        env = env.base_env
    return env


def to_torchrl(env: EnvBase) -> Any:
    """An environment of this library as one of TorchRL, for its collectors, transforms and batches of environments.

    TorchRL has to be installed. TorchRL's environment steps and closes ``env``, which is its attribute
    ``rollwright_env``, and whose public attributes it has.

    Args:
        env: of this library; one of TorchRL is returned as it is, and a :class:`TorchRLWrapper` gives back what it is
            around.

    Returns:
        A ``torchrl.envs.EnvBase`` of the same batch size, device and specs.

    Raises:
        TypeError: it is no environment.
        SpecError: TorchRL has no spec of the same domain.
        MissingExtraError: TorchRL is not installed.
    """
    if is_torchrl_env(env):
        return env
    if isinstance(env, TorchRLWrapper):
        return env.torchrl_env
    if not isinstance(env, EnvBase):
        raise TypeError(
            f"env: expected an environment of rollwright, got {class_path(env)}: {env!r}. Wrap a gymnasium environment "
            "in GymWrapper."
        )
    return _kind()(env)


def holder_of(env: EnvBase, transform: Any) -> Any:
    """TorchRL's ``TransformedEnv`` of an environment of this library and one transform of TorchRL.

    The transform has ``env`` for its parent then, as TorchRL's environment, and keeps its mode of training. Nothing
    that TorchRL does closes ``env``.

    Args:
        env: what the transform is to meet.
        transform: of TorchRL, on no environment.

    Raises:
        SpecError: TorchRL has no spec of the same domain.
        MissingExtraError: TorchRL is not installed.
    """
    envs = _torchrl_envs()
    modes = [(part, part.training) for part in transform.modules()]
    holder = envs.TransformedEnv(_view_kind()(env), transform, auto_unwrap=False)
    for part, mode in modes:
        part.training = mode
    return holder


def _torchrl_envs() -> Any:
    return require("torchrl.envs", extra="torchrl", purpose="to_torchrl")


@cache
def _view_kind() -> type:
    """The class of environments that TorchRL's transforms meet and do not own."""
    base: Any = _kind()

    class RollwrightView(base):  # type: ignore[misc]
        """An environment of rollwright as a transform of TorchRL sees it."""

        def close(self, *, raise_if_closed: bool = True) -> None:
            """Nothing: who made the environment closes it."""

    return RollwrightView


@cache
def _kind() -> type:
    """The class, made when it is first needed: its base is TorchRL's."""
    base: Any = _torchrl_envs().EnvBase

    class RollwrightEnv(base):  # type: ignore[misc]
        """An environment of rollwright that TorchRL steps."""

        def __init__(self, env: EnvBase) -> None:
            super().__init__(device=env.device, batch_size=env.batch_size, allow_done_after_reset=True)
            self.rollwright_env = env
            for name in ("observation", "state", "action", "reward", "done"):
                setattr(self, f"full_{name}_spec", spec_to_torchrl(env.full_spec(name)))

        def _reset(self, tensordict: TensorDictBase | None = None, **kwargs: Any) -> TensorDictBase:
            return self.rollwright_env.reset_outcome(tensordict, **kwargs)

        def _step(self, tensordict: TensorDictBase) -> TensorDictBase:
            outcome = self.rollwright_env.step_outcome(tensordict)
            preset = tensordict.get("next", None)
            return outcome if preset is None else outcome.update(preset.exclude(*leaf_keys(outcome)))

        def _set_seed(self, seed: int | None) -> None:
            self.rollwright_env.set_seed(seed)

        def close(self, *, raise_if_closed: bool = True) -> None:
            super().close(raise_if_closed=raise_if_closed)
            self.rollwright_env.close(raise_if_closed=False)

        @property
        def is_closed(self) -> bool:
            """Whether the environment of rollwright is; it stays open when this object is deleted."""
            return bool(self.rollwright_env.is_closed)

        @is_closed.setter
        def is_closed(self, value: bool) -> None:
            """Nothing: TorchRL sets it when it makes and closes an environment."""

        def __getattr__(self, name: str) -> Any:
            try:
                return super().__getattr__(name)
            except AttributeError:
                env = self.__dict__.get("_modules", {}).get("rollwright_env")
                if env is None or name.startswith("_") or hasattr(type(self), name):
                    raise
            return getattr(env, name)

    return RollwrightEnv
