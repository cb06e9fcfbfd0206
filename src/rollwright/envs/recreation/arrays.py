"""The array form of an environment that is recreated when it raises."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
from tensordict import TensorDictBase

from rollwright._keys import NestedKey
from rollwright.envs.arrays import (
    ArrayEnv,
    Entry,
    Rows,
    Values,
    array_form,
    check_flags,
    check_open,
    constant,
    refuse_overrides,
)
from rollwright.envs.wrapper import WrapperArrays
from rollwright.errors import EnvError, NotNative, RollwrightError

if TYPE_CHECKING:
    from rollwright.envs.recreation.env import RecreatedEnv


class RecreatedArrays(WrapperArrays):
    """The array form of a :class:`~rollwright.envs.recreation.env.RecreatedEnv`.

    Raises:
        NotNative: the environment has no array form.
    """

    def __init__(self, env: RecreatedEnv) -> None:
        refuse_overrides(env, type(env))
        check_flags(env)
        super().__init__(array_form(env.base_env))
        self.env, self._of = env, env.base_env

    def check(self) -> None:
        """See :meth:`ArrayEnv.check`."""
        with suppress(EnvError):  # what is broken raises in the next step, which recreates it
            self._form().check()

    def groups(self, number: int) -> list[ArrayEnv]:
        """See :meth:`ArrayEnv.groups`."""
        raise NotNative("on_env_failure='recreate' recreates the batch as a whole")

    def _form(self) -> ArrayEnv:
        """The array form of the environment that is there now."""
        env = self.env.base_env
        if self._of is not env:
            ahead = self._base.resets_ahead
            try:
                self._base = array_form(env)
            except NotNative as reason:
                raise EnvError(
                    f"create_env_fn: it made {env} in the place of one on arrays, and this one is not: {reason}. With "
                    "on_env_failure='recreate', make environments of one kind."
                ) from reason
            self._of, self._base.resets_ahead = env, ahead
        return self._base

    def step(self, root: Values, preset: Values) -> Values:
        """See :meth:`ArrayEnv.step`."""
        env = self.env
        check_open(env, "step")
        if not env.awaits_reset:
            try:
                out = self._form().step(root, preset)
            except RollwrightError as error:
                if env.last_observed is None or not root.keys() >= set(self.reads):
                    raise
                env.recreate(error)
            else:
                env.note_step(out)
                return out
        env.note_end()
        return self._missed()

    def _missed(self) -> Values:
        """The outcome of a step that was none."""
        last = self._last()
        out: Values = {key: np.array(last[key])[()] for key in self.entries}
        out.update({key: constant(entry, 0) for key, entry in self.rewards.items()})
        for flag, value in (("done", True), ("terminated", False), ("truncated", True)):
            out[flag] = np.full(self.batch, value)[()]
        return out

    def _last(self) -> Values:
        last = self.env.last_observed
        if not isinstance(last, TensorDictBase):
            return cast(Values, last)
        return {key: _row_form(cast(torch.Tensor, last.get(key)), entry) for key, entry in self.entries.items()}

    def reset(self, rows: Rows | None, **kwargs: Any) -> Values:
        """See :meth:`ArrayEnv.reset`."""
        env = self.env
        check_open(env, "reset")
        partial = rows is not None and not bool(rows.all())

        def reset(whole: bool) -> Values:
            return self._form().reset(None if whole else rows, **kwargs)

        fresh = cast(Values, env.reset_with(reset, partial, kwargs))
        merges = partial and env.last_observed is not None
        env.last_observed = self._merged(fresh, cast(Rows, rows)) if merges else fresh
        return fresh

    def _merged(self, fresh: Values, rows: Rows) -> Values:
        merged: dict[NestedKey, Any] = {}
        for key, value in self._last().items():
            if key in fresh:
                merged[key] = new = value.copy()
                new[rows] = fresh[key][rows]
        return merged


def _row_form(value: torch.Tensor, entry: Entry) -> Any:
    array = value.detach().cpu().numpy()
    return array.reshape(array.shape[:-1])[()] if entry.column else array
