"""TorchRLWrapper: an environment of TorchRL as one of this library."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar, Self

import torch
from tensordict import TensorDictBase

from rollwright._foreign import class_path, is_torchrl_env, kind_in
from rollwright._keys import leaves, without
from rollwright.data.specs import TensorSpec
from rollwright.data.specs.shapes import as_device
from rollwright.data.specs.torchrl import from_torchrl
from rollwright.envs.arrays import ArrayEnv
from rollwright.envs.base import EnvBase
from rollwright.envs.libs.torchrl.frames import only_below_next, trim_by, trims
from rollwright.envs.libs.torchrl.masks import Masks
from rollwright.envs.libs.torchrl.steps import TorchRLStep
from rollwright.envs.own.arrays import OwnArrays
from rollwright.errors import EnvError, NotNative

__all__ = ["STEPPED_THERE", "TorchRLWrapper"]

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
