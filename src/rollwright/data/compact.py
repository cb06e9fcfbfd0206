"""The compact layout of batches, which stores observations once, and its inverse.

Inside a trajectory ``("next", obs)`` at t is the root's ``obs`` at t+1, so a compact batch leaves the
former out. It keeps those that no root repeats (the last of each trajectory, and those at the end of the
batch) in one :class:`Table`, the non-tensor entry ``("collector", "boundaries")``; the int64 entry
``("collector", "boundary")`` ``[*env, T]`` says which row of it belongs to a frame. Where no row does, it is
``-1 - t``, so that frames which do not follow one another are not taken for neighbours.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, cast

import torch
from tensordict import TensorDict, TensorDictBase

from rollwright._keys import NestedKey, as_tuple, leaf_keys, leaves, without
from rollwright._warnings import warn_user
from rollwright.data.layout import TRAJ_IDS

BOUNDARY, _ROWS, _TIME = ("collector", "boundary"), ("collector", "boundaries"), "_time"


class Table:
    """What a compact batch keeps aside; can be compared, as TensorDict does where it stacks or writes objects.

    Args:
        rows: next observations, and the times of the steps that they end.
    """

    def __init__(self, rows: TensorDictBase) -> None:
        self.rows = rows

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Table):
            return NotImplemented
        mine, others = leaves(self.rows), leaves(other.rows)
        return mine.keys() == others.keys() and all(torch.equal(mine[key], others[key]) for key in mine)

    def __hash__(self) -> int:
        return hash(len(self.rows))

    def __repr__(self) -> str:
        return f"{type(self).__name__}({len(self.rows)} rows)"


class BoundaryKeeper:
    """Keeps aside the next observations that no root repeats, while a batch is collected.

    Args:
        keys: entries below ``"next"`` that the batch leaves out.
        batch_size: of the environment.
        device: where the batch is delivered.
    """

    def __init__(self, keys: Iterable[NestedKey], batch_size: torch.Size, device: torch.device | None) -> None:
        self.keys = list(keys)
        self._batch_size = batch_size
        self._device = device
        self._rows: list[TensorDictBase] = []
        self._places: list[tuple[int, torch.Tensor]] = []

    def begin(self) -> None:
        """Begin a batch: what a rollout that failed has left behind is dropped."""
        self._rows, self._places = [], []

    def keep(self, t: int, outcome: TensorDictBase, ended: torch.Tensor) -> None:
        """Keep the rows of ``outcome`` (``"next"`` at ``t``) that ``ended`` ``[*env]`` marks."""
        where = ended.flatten().nonzero().squeeze(-1)
        rows = outcome.select(*self.keys, strict=False).reshape(-1)[where.to(outcome.device)]
        self.keep_rows(t, where, {key: rows.get(key) for key in leaf_keys(rows)})

    def keep_rows(self, t: int, where: torch.Tensor, rows: Mapping[NestedKey, torch.Tensor]) -> None:
        """Keep what one step's next observations are in some environments.

        Args:
            t: of the step.
            where: int64 ``[n]``, indices into the flattened batch of environments.
            rows: values by key, ``[n, ...]``, not to be written again.
        """
        if len(where):
            held = TensorDict({}, [len(where)], device=self._device)
            for key, value in rows.items():
                held.set(key, value)
            self._rows.append(held)
            self._places.append((t, where))

    def finish(self, batch: TensorDictBase) -> TensorDictBase:
        """Write what was kept into the batch, and begin the next one."""
        index = (-1 - torch.arange(batch.batch_size[-1], device="cpu")).repeat(self._batch_size.numel(), 1)
        count = 0
        for t, where in self._places:
            index[where.cpu(), t] = torch.arange(count, count + len(where), device="cpu")
            count += len(where)
        rows = cast(TensorDictBase, torch.cat(cast(Any, self._rows)))
        rows.set(_TIME, torch.cat([torch.full((len(where),), t, device="cpu") for t, where in self._places]))
        batch.set(BOUNDARY, index.reshape(batch.batch_size).to(batch.device or "cpu"))
        put_table(batch, Table(rows))
        self._rows, self._places = [], []
        return batch


def without_table(entries: Mapping[NestedKey, Any]) -> dict[NestedKey, Any]:
    """The entries of a compact batch less its table, with a warning where it had one: what only it holds is lost.

    Example:
        >>> sorted(without_table({"observation": torch.zeros(3)}))
        ['observation']
    """
    if _ROWS not in entries:
        return dict(entries)
    warn_user(
        "data: they were collected with compact_obs=True, and rows of tensors have no place for the next observations "
        "that no root repeats: those at the ends of trajectories and of batches. They are not stored. To store all, "
        "pass restore_next(data); samples get the others back by NextStateReconstructor. To do without them and "
        "without this warning, exclude ('collector', 'boundary') and ('collector', 'boundaries').",
    )
    return {key: value for key, value in entries.items() if key not in (BOUNDARY, _ROWS)}


def is_table(key: NestedKey) -> bool:
    """Whether an entry holds what compact batches keep aside, and not one value a frame."""
    return key == _ROWS


def join_tables(batches: Sequence[TensorDictBase]) -> tuple[list[TensorDictBase], Table | None]:
    """Prepare compact batches for being joined.

    Returns:
        Batches whose ``("collector", "boundary")`` points to rows of one table, which they do not hold; and that table,
        for :func:`put_table`. The batches as they are, and None, where not all are compact.
    """
    held = [batch.get(_ROWS, None) for batch in batches]
    tables = [getattr(each, "data", None) for each in held]
    if not all(isinstance(table, Table) for table in tables):
        return list(batches), None
    rows = [cast(Table, table).rows for table in tables]
    joined, count = [], 0
    for batch, own in zip(batches, rows, strict=True):
        index = batch.get(BOUNDARY)
        joined.append(without(batch, _ROWS).set(BOUNDARY, torch.where(index >= 0, index + count, index)))
        count += len(own)
    return joined, Table(cast(TensorDictBase, torch.cat(cast(Any, rows))))


def put_table(batch: TensorDictBase, table: Table) -> TensorDictBase:
    """Give a compact batch its table."""
    batch.set_non_tensor(_ROWS, table)
    return batch


def restore_next(batch: TensorDictBase) -> TensorDictBase:
    """Put the next observations back into a batch collected with ``compact_obs=True``.

    Args:
        batch: ``[*env, T]``, frames in order of time along the last dimension, as the collector delivered it.

    Returns:
        A new TensorDict, ``("next", obs)`` of every frame included; tensors that were there are shared.

    Raises:
        KeyError: the batch is not compact.
        ValueError: the batch was cut short, frames were taken out of it, or it was joined with another one.

    Example:
        >>> from rollwright.collectors import Collector
        >>> from rollwright.envs import GymEnv
        >>> collector = Collector(lambda: GymEnv("CartPole-v1"), frames_per_batch=50, compact_obs=True)
        >>> batch = collector.next()
        >>> "observation" in batch["next"].keys(), "observation" in restore_next(batch)["next"].keys()
        (False, True)
        >>> collector.shutdown()
    """
    index, held = batch.get(BOUNDARY, None), batch.get(_ROWS, None)
    if index is None or held is None:
        raise KeyError(
            "batch: expected the entries ('collector', 'boundary') and ('collector', 'boundaries') of a compact batch. "
            "Collect with compact_obs=True; a batch collected without it has its next observations already."
        )
    table = getattr(held, "data", None)  # joined batches have several tables, and no one value
    if not isinstance(table, Table):
        raise ValueError("batch: it was joined from several compact batches. Call restore_next on each, then join.")
    rows, ids = table.rows, batch.get(TRAJ_IDS, None)
    untaken = torch.zeros_like(index, dtype=torch.bool) if ids is None else ids.to(index.device) < 0
    marked = index >= 0
    time = torch.where(marked, rows.get(_TIME).to(index.device)[index.clamp(min=0)], -1 - index)
    goes_on = torch.zeros_like(marked)
    goes_on[..., :-1] = time[..., 1:] == time[..., :-1] + 1
    if not bool((marked | untaken | goes_on).all()):
        raise ValueError(
            "batch: the last step, or one before it, goes on in a step that does not follow here, so its next "
            "observations are lost. "
            "Call restore_next on the batch as it was delivered, then index the result."
        )
    restored = batch.copy().exclude(BOUNDARY, _ROWS)  # a copy of each level: the batch keeps its own "next"
    for key in rows.exclude(_TIME).keys(True, True):
        root = cast(torch.Tensor, batch.get(key))
        following = root.roll(-1, dims=batch.ndim - 1)
        following[marked] = rows.get(key)[index[marked]]
        restored.set(("next", *as_tuple(key)), following)
    return restored
