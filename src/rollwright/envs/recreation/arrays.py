"""The array form of an environment that is recreated when it raises."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
from tensordict import TensorDictBase

from rollwright._keys import NestedKey
from rollwright.envs._partial_reset import merge_reset
from rollwright.envs.arrays import (
    ArrayEnv,
    Entry,
    Rows,
    Values,
    array_form,
    check_flags,
    refuse_overrides,
)
from rollwright.envs.wrapper import WrapperArrays
from rollwright.errors import EnvError, NotNative

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
        super().__init__(array_form(env.base_env, unfit=True))
        self.env, self._of = env, env.base_env
        self._forms: Mapping[NestedKey, Entry] = {}  # of roots

    def see_roots(self, forms: Mapping[NestedKey, Entry]) -> None:
        """See :meth:`ArrayEnv.see_roots`."""
        self._forms = forms
        super().see_roots(forms)

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
                self._base = array_form(env, unfit=True)
            except NotNative as reason:
                raise EnvError(
                    f"create_env_fn: it made {env} in the place of one on arrays, and this one is not: {reason}. With "
                    "on_env_failure='recreate', make environments of one kind."
                ) from reason
            self._of, self._base.resets_ahead = env, ahead
            self._base.see_roots(self._forms)
        return self._base

    def step(self, root: Values, preset: Values) -> Values:
        """See :meth:`ArrayEnv.step`."""
        return self.env.step_with(
            lambda: self._form().step(root, preset), self._missed, lambda: root.keys() >= set(self.reads)
        )

    def _missed(self) -> Values:
        """The outcome of a step that was none."""
        out = self._values(self.env.missed(), {**self.entries, **self.rewards})
        for flag, value in (("done", True), ("terminated", False), ("truncated", True)):
            out[flag] = np.full(self.batch, value)[()]
        return out

    def _values(self, td: TensorDictBase, entries: Mapping[NestedKey, Entry]) -> Values:
        out: Values = {}
        for key, entry in entries.items():
            array = cast(torch.Tensor, td.get(key)).numpy()
            out[key] = array.reshape(array.shape[:-1])[()] if entry.column else array
        return out

    def reset(self, rows: Rows | None, **kwargs: Any) -> Values:
        """See :meth:`ArrayEnv.reset`."""
        return self._reset(rows, kwargs, lambda form, rows: form.reset(rows, **kwargs))

    def reset_from(self, root: Values, rows: Rows | None, **kwargs: Any) -> Values:
        """See :meth:`ArrayEnv.reset_from`."""
        return self._reset(rows, kwargs, lambda form, rows: form.reset_from(root, rows, **kwargs))

    def _reset(
        self, rows: Rows | None, kwargs: dict[str, Any], reset: Callable[[ArrayEnv, Rows | None], Values]
    ) -> Values:
        def merge(fresh: TensorDictBase | Values) -> TensorDictBase | Values:
            marks = cast(Rows, rows)
            if isinstance(fresh, TensorDictBase):
                return merge_reset(self.env, self.env.last(), fresh, {(): torch.from_numpy(marks[..., None])})
            merged = self._values(self.env.last(), self.entries)
            for key, value in merged.items():
                value[marks] = fresh[key][marks]
            return merged

        is_partial = rows is not None and not bool(rows.all())
        take = lambda whole: reset(self._form(), None if whole else rows)  # noqa: E731
        return self.env.reset_with(take, merge if is_partial else None, kwargs)
