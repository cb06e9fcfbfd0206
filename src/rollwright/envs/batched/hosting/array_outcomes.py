"""Outcomes on arrays where those of other environments may be TensorDicts: their structures, and what is not theirs."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import torch

from rollwright._keys import NestedKey, as_tuple
from rollwright.envs.arrays import FLAGS, ArrayEnv, Entry, UnfitOutcome, Values
from rollwright.envs.batched.hosting.messages import OutcomeStructure
from rollwright.envs.on_arrays.tensordicts import as_tensordict

__all__ = ["check_presets", "structure_of"]


def structure_of(form: ArrayEnv, keys: Iterable[NestedKey]) -> OutcomeStructure:
    """Of an outcome on arrays that has ``keys``, and flags, as a TensorDict would have it."""
    keys = list(keys)
    paths = [as_tuple(key) for key in keys]
    nests = {path[:n]: tuple(form.batch) for path in paths for n in range(1, len(path))}
    return OutcomeStructure((*keys, *form.root_flags), nests)


def check_presets(form: ArrayEnv, outcome: Values, preset: Values) -> None:
    """Test that what a policy wrote below ``"next"``, and the environment does not return itself, is as it was.

    Raises:
        UnfitOutcome: it is not, and has no place in shared rows.
    """
    for key, value in preset.items():
        if key in form.carried or key in form.rewards or key not in outcome:
            continue
        found = np.asarray(outcome[key])
        if (found.dtype, found.shape, found.tobytes()) != (value.dtype, value.shape, value.tobytes()):
            flag = Entry((*form.batch, 1), np.dtype(np.bool_), True)
            flags: dict[NestedKey, Entry] = dict.fromkeys(form.root_flags, flag)
            forms = {**form.carried, **form.rewards, **flags}
            shown = {name: value for name, value in outcome.items() if name not in FLAGS or name in form.root_flags}
            td = as_tensordict(shown, forms, torch.Size(form.batch), None)
            raise UnfitOutcome(f"its step changes {key!r}, which the policy has written", td)
