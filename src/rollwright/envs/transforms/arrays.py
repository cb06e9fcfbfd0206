"""The array form of a TransformedEnv whose transforms work on arrays, see :meth:`Transform.on_arrays`."""

from __future__ import annotations

from operator import is_
from typing import TYPE_CHECKING, Any

from rollwright._keys import unravel
from rollwright.envs.arrays import (
    ArrayEnv,
    ArrayTransform,
    Rows,
    Values,
    array_form,
    check_flags,
    check_open,
    named_error,
    refuse_overrides,
)
from rollwright.envs.transforms.base import Transform
from rollwright.envs.transforms.compose import Compose
from rollwright.envs.wrapper import WrapperArrays
from rollwright.errors import NotNative, RollwrightError

if TYPE_CHECKING:
    from rollwright.envs.transforms.transformed_env import TransformedEnv

__all__ = ["TransformedArrays"]

OVERRIDABLE = {"_apply_transform", "_call", "_reset", "_step"}  # on an instance


def _same(now: list[Transform], then: list[Transform]) -> bool:
    return len(now) == len(then) and all(map(is_, now, then))


def _chain(transform: Transform) -> list[Transform]:
    if type(transform) is Compose:
        return [part for child in transform for part in _chain(child)]
    return [transform]


class TransformedArrays(WrapperArrays):
    """The array form of a :class:`TransformedEnv`.

    Raises:
        NotNative: a transform works on TensorDicts, or the environment has no array form.
    """

    def __init__(self, env: TransformedEnv, known: type[TransformedEnv], base: ArrayEnv | None = None) -> None:
        refuse_overrides(env, known)
        check_flags(env)
        if not env.cache_specs:
            raise NotNative("cache_specs=False")
        self._env, self._known = env, known
        base = array_form(env.base_env) if base is None else base
        super().__init__(base)
        self.entries, self.rewards, self.reads = dict(base.entries), dict(base.rewards), list(base.reads)
        self._parts: list[ArrayTransform] = []
        self._transforms = _chain(env.transform)
        for transform in self._transforms:
            if "on_arrays" not in vars(type(transform)) or OVERRIDABLE & vars(transform).keys():
                raise NotNative(f"{type(transform).__name__} works on TensorDicts")
            part = transform.on_arrays(self)  # with the entries of those before
            self._parts.append(part)
            for key in part.drops:
                self.entries.pop(key, None)
                self.rewards.pop(key, None)
            self.entries.update(part.entries)
            self.rewards.update(part.rewards)
            self.reads += [key for key in part.reads if key not in self.reads]
        self._steps = [part.step for part in self._parts]
        announced = [{unravel(key) for key in keys} for keys in (env.observation_keys, env.reward_keys)]
        if [self.entries.keys(), self.rewards.keys()] != announced:
            raise NotNative("its specs are not those of its transforms")

    def check(self) -> None:
        """See :meth:`ArrayEnv.check`."""
        self._base.check()
        if not _same(_chain(self._env.transform), self._transforms):
            raise NotNative("its transforms have changed")

    def step(self, root: Values, preset: Values) -> Values:
        """See :meth:`ArrayEnv.step`."""
        check_open(self._env, "step")
        return self._transformed(root, preset, self._base.step(root, preset))

    def _transformed(self, root: Values, preset: Values, out: Values) -> Values:
        for key, value in preset.items():
            out.setdefault(key, value)
        try:
            for step in self._steps:
                step(root, out)
        except KeyError as error:
            raise named_error(self._env, "step", error) from error
        return out

    def groups(self, number: int) -> list[ArrayEnv]:
        """See :meth:`ArrayEnv.groups`."""
        return [TransformedArrays(self._env, self._known, base) for base in self._base.groups(number)]

    def send(self, root: Values, preset: Values) -> None:
        """See :meth:`ArrayEnv.send`."""
        check_open(self._env, "step")
        self._base.send(root, preset)
        self._sent = root, preset

    def receive(self) -> Values:
        """See :meth:`ArrayEnv.receive`."""
        return self._transformed(*self._sent, self._base.receive())

    def reset(self, rows: Rows | None, **kwargs: Any) -> Values:
        """See :meth:`ArrayEnv.reset`."""
        check_open(self._env, "reset")
        fresh = self._base.reset(rows, **kwargs)
        try:
            for part in self._parts:
                part.reset(fresh)
        except RollwrightError:
            raise
        except Exception as error:
            raise named_error(self._env, "reset", error) from error
        return fresh
