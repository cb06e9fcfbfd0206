"""BatchLayout: the entries of a batch on arrays, and where the values of a step go."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from rollwright._keys import NestedKey, as_tuple, is_private, key_str, unravel
from rollwright.collectors.rollout.paths.recording import FrameField
from rollwright.envs.arrays import FLAGS, Entry, Values

Form = tuple[tuple[int, ...], np.dtype[Any]]


class BatchLayout(NamedTuple):
    """Entries of a batch, fixed by its first step.

    Attributes:
        acts: shape and dtype of the policy's outputs.
        presets: those below ``"next"``: key, and key inside ``"next"``.
        fields: the entries of a frame.
        roots: what is written from the current TensorDict at each step: key, place in the frame, whether a column.
        outcomes: what is written from the outcome at each step, likewise.
        blank: what is zero in the whole batch.
    """

    acts: dict[NestedKey, Form]
    presets: list[tuple[NestedKey, NestedKey]]
    fields: dict[NestedKey, FrameField]
    roots: list[tuple[NestedKey, NestedKey, bool]]
    outcomes: list[tuple[NestedKey, NestedKey, bool]]
    blank: list[NestedKey]


def lay_out(
    acts: dict[NestedKey, Form],
    roots: Mapping[NestedKey, Entry],
    outcomes: Mapping[NestedKey, Entry],
    *,
    batch: tuple[int, ...],
    dropped: Collection[NestedKey],
    own: Sequence[NestedKey],
    blank: Mapping[NestedKey, Form],
    done_follows: bool,
    roots_have_flags: bool,
) -> BatchLayout:
    """Decide what goes where.

    Args:
        acts: the policy's outputs, those below ``"next"`` among them.
        roots: entries of the current TensorDict.
        outcomes: entries of what comes of a step.
        batch: the environment's batch size.
        dropped: places in the frame that the batch leaves out.
        own: what the collector writes itself, int64 ``[*batch]``.
        blank: shape and dtype of what is zero in the whole batch.
        done_follows: whether ``done`` follows from the other flags, and is not written at each step.
        roots_have_flags: whether flags of roots may be set, so that they are written at each step.
    """
    fields: dict[NestedKey, FrameField] = {}
    layout = BatchLayout(acts, [], fields, [], [], [])
    for key, entry in roots.items():
        fields[key] = _field(entry.shape, entry.dtype)
        if key not in FLAGS or roots_have_flags:  # else they follow from the rows of the batch
            layout.roots.append((key, key, entry.column))
    for key, entry in outcomes.items():
        fields[below_next(key)] = _field(entry.shape, entry.dtype)
        if key != "done" or not done_follows:
            layout.outcomes.append((key, below_next(key), entry.column))
    for key, (shape, dtype) in acts.items():
        if as_tuple(key)[0] == "next":
            layout.presets.append((key, unravel(as_tuple(key)[1:])))
        elif not is_private(key):
            fields[key] = _field(shape, dtype)
            layout.roots.append((key, key, False))
    for key, (shape, dtype) in blank.items():
        fields[key] = _field(shape, dtype)
    for key in own:
        fields[key] = _field(batch, np.dtype(np.int64))
    for key in [key for key in fields if key in dropped or is_private(key)]:
        del fields[key]
    kept = [[row for row in rows if row[1] in fields] for rows in (layout.roots, layout.outcomes)]
    return BatchLayout(acts, layout.presets, fields, kept[0], kept[1], [key for key in blank if key in fields])


def below_next(key: NestedKey) -> NestedKey:
    """The key of an entry's outcome.

    >>> below_next("observation"), below_next(("agent", "observation"))
    (('next', 'observation'), ('next', 'agent', 'observation'))
    """
    return unravel(("next", *as_tuple(key)))


def _field(shape: Sequence[int], dtype: np.dtype[Any]) -> FrameField:
    return FrameField(tuple(shape), torch.from_numpy(np.empty(0, dtype)).dtype, torch.device("cpu"))


def unfit(outputs: Values, roots: Collection[NestedKey], kind: type = np.ndarray) -> str | None:
    """Why a policy's outputs cannot lie in rows, all of one ``kind``, beside those of the environment, ``roots``."""
    for key, value in outputs.items():
        if not isinstance(value, kind):
            return f"it writes {key!r}, which is no {'array' if kind is np.ndarray else 'tensor'}"
        below = unravel(as_tuple(key)[1:]) if as_tuple(key)[0] == "next" else None
        if key in roots or (below is not None and below not in roots):
            return f"it writes {key!r}, beside what the environment has"
    return None


def difference(outputs: Values, acts: Mapping[NestedKey, tuple[Any, Any]], kind: type[Any] = np.ndarray) -> str | None:
    """What of a policy's outputs, all of one ``kind``, is not as it was in the first step of the batch, ``acts``."""
    for key, value in outputs.items():
        form = acts.get(key)
        if form is None or type(value) is not kind or value.shape != form[0] or value.dtype != form[1]:
            break
    else:
        if len(outputs) == len(acts):
            return None
    if outputs.keys() != acts.keys():
        return f"it writes {key_str(outputs)} after {key_str(acts)}"
    forms = {key: (getattr(value, "shape", None), getattr(value, "dtype", None)) for key, value in outputs.items()}
    varied = [key for key, form in forms.items() if form != acts[key]]
    return f"{varied[0]!r} varies in shape or dtype" if varied else None
