"""StepsOnArrays: steps of an environment for whoever passes TensorDicts, taken by its array form."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase

from rollwright._keys import NestedKey, place
from rollwright.data.unchecked import unchecked_td
from rollwright.envs.arrays import ArrayEnv, Entry, Values, array_form
from rollwright.errors import NotNative

if TYPE_CHECKING:
    from rollwright.envs.base import EnvBase


class StepsOnArrays:
    """Makes arrays of a TensorDict for the array form of an environment, and a TensorDict of what its step returns.

    Args:
        env: the environment. A copy of it has a copy of this.
    """

    def __init__(self, env: EnvBase) -> None:
        self._env = env
        self._arrays: ArrayEnv | None = None
        self._may_be_native = True
        self._forms: dict[NestedKey, Entry] = {}
        self._is_nested = False

    def __reduce__(self) -> tuple[Any, ...]:
        return StepsOnArrays, (self._env,)

    def __call__(self, tensordict: TensorDictBase) -> TensorDict | None:
        """The outcome of a step, complete; None: it cannot be taken so, and nothing was stepped."""
        if not self._may_be_native or type(tensordict) is not TensorDict:
            return None
        arrays = self._form()
        if arrays is None or (arrays.reads_presets and tensordict.get("next", None) is not None):
            return None
        root: Values = {}
        for key in arrays.reads:
            value = tensordict.get(key, None)
            if type(value) is not torch.Tensor or value.dtype is torch.bfloat16 or value.device.type != "cpu":
                return None
            entry, array = arrays.entries.get(key), value.detach().numpy()
            root[key] = array[..., 0] if entry is not None and entry.column else array
        nested: dict[str, Any] = {}
        out, device = arrays.step(root, {}), self._env.device
        for key, (shape, dtype, _) in self._forms.items():
            place(nested, key, torch.from_numpy(np.asarray(out[key], dtype).reshape(shape)))
        for name, size in arrays.nests.items():
            nested[name] = unchecked_td(nested[name], torch.Size([*arrays.batch, *size]), device=device)
        return unchecked_td(nested, self._env.batch_size, device=device, nested=self._is_nested)

    def _form(self) -> ArrayEnv | None:
        """The array form as it is now."""
        try:
            if self._arrays is not None:
                self._arrays.check()
                return self._arrays
        except NotNative:
            self._arrays = None
        try:
            self._arrays = form = array_form(self._env)
        except NotNative:  # and the same at each step
            self._may_be_native = False
            return None
        flag = Entry((*form.batch, 1), np.dtype(np.bool_), True)
        self._forms = {**form.carried, **form.rewards, **dict.fromkeys(form.root_flags, flag)}
        self._is_nested = any(isinstance(key, tuple) for key in self._forms)
        return form
