"""Joins the rollouts of workers into the TensorDict that is delivered."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import torch
from tensordict import LazyStackedTensorDict, TensorDict, TensorDictBase

from rollwright._keys import NestedKey, place
from rollwright.collectors.workers.memory import Block, Join
from rollwright.collectors.workers.messages import Collected
from rollwright.data.compact import join_tables, put_table
from rollwright.data.layout import MASK, TRAJ_IDS, blank_frame, is_dense, split_trajectories, stack_frames

B = TypeVar("B", bound=TensorDictBase)


@dataclass(eq=False)
class Result:
    """A rollout that has arrived.

    Attributes:
        worker: index.
        number: how many this worker has collected, with this one.
        found: what the worker sent.
        block: where its batch lies, if it lies in one.
        part: which part of the block is this worker's.
        rest: what does not lie there, opened.
        device: of the batch; None: no common one.
    """

    worker: int
    number: int
    found: Collected
    block: Block | None
    part: int
    rest: Any
    device: torch.device | None


def restored(worker: int, held: Any, device: torch.device | None) -> Result:
    """A rollout that was saved before it was delivered."""
    found = Collected(-1, 0, 0, False, None, (), {}, (), 0, 0, 0)
    return Result(worker, 0, found, None, 0, held, device)


def batch_of(result: Result) -> Any:
    """What one worker has collected: a batch ``[*env, T]`` over its memory, or a list of trajectories."""
    if not result.found.in_block:
        return _named(result.rest, result.found)
    block = cast(Block, result.block)
    tensors = {key: block.layout.part(tensor, result.part) for key, tensor in block.borrow().items()}
    form = block.layout.form
    size = torch.Size([*form.env, block.layout.steps[result.part]])
    return _built(tensors, size, result.found, result.rest or {}, result.device)


def joined(results: Sequence[Result], join: Join) -> TensorDictBase:
    """What all workers have collected, in one batch: over the memory that they wrote, where they wrote to one block."""
    extras = _joined_extras(results, join) if _share_a_block(results) else None
    if extras is None:
        return _named(_stacked([batch_of(result) for result in results], join), results[0].found)
    block = cast(Block, results[0].block)
    return _built(block.borrow(), block.layout.batch_size, results[0].found, extras, results[0].device)


def mark_taken(batch: TensorDictBase) -> None:
    """Write which frames were taken, where workers may have been interrupted."""
    ids = batch.get(TRAJ_IDS, None)
    if ids is not None:
        batch.set(MASK, ids >= 0)


def _built(
    tensors: Mapping[NestedKey, torch.Tensor],
    size: torch.Size,
    found: Collected,
    extras: Mapping[NestedKey, Any],
    device: torch.device | None,
) -> TensorDict:
    nested: dict[str, Any] = {}
    for key, tensor in tensors.items():
        if key in found.lacking:
            continue
        if type(key) is str:
            nested[key] = tensor
        else:
            place(nested, key, tensor)
    names: Any = [*[None] * (len(size) - 1), "time"]
    batch = _named(TensorDict(nested, batch_size=size, device=device, names=names), found)
    for key, value in extras.items():
        batch.set(key, value)
    for key, rest in found.nesting.items():
        batch.get(key).batch_size = torch.Size([*size, *rest])
    return batch


def _named(batch: B, found: Collected) -> B:
    """A batch, or several in one, whose last dimensions have the names that the worker's have."""
    if found.names is not None:
        batch.names = [*[None] * (batch.ndim - len(found.names)), *found.names]
    return batch


def _share_a_block(results: Sequence[Result]) -> bool:
    """Whether all lie in one block, with the same entries in it and beside it."""
    block, first = results[0].block, results[0].found
    return all(
        result.found.in_block
        and result.block is block
        and set(result.found.lacking) == set(first.lacking)
        and result.found.nesting == first.nesting
        and (result.rest or {}).keys() == (results[0].rest or {}).keys()
        for result in results
    )


def _joined_extras(results: Sequence[Result], join: Join) -> dict[NestedKey, Any] | None:
    """Entries beside the block of all workers; None where they cannot be in one TensorDict."""
    if not results[0].rest:
        return {}
    rests = []
    for result in results:
        form, steps = cast(Block, result.block).layout.form, cast(Block, result.block).layout.steps
        rests.append(TensorDict({}, [*form.env, steps[result.part]]))
        for key, value in result.rest.items():
            rests[-1].set(key, value)
    together = _stacked(rests, join)
    return {key: together.get(key) for key in results[0].rest} if type(together) is TensorDict else None


def _stacked(batches: Sequence[TensorDictBase], join: Join) -> TensorDictBase:
    """Join by copying; lazily where shapes differ. Rollouts that ended early, with their data, are filled up."""
    batches, table = join_tables(batches)
    together = _laid_together(batches, join)
    return together if table is None else put_table(together, table)


def _laid_together(batches: Sequence[TensorDictBase], join: Join) -> TensorDictBase:
    if join == "stack" or (join == "first" and batches[0].ndim > 1):
        batches = [_filled_up(batch, max(other.batch_size[-1] for other in batches)) for batch in batches]
    if join == "stack":
        return stack_frames(list(batches), 0, None)
    ndim = batches[0].ndim
    stacked: Any
    dim = 0 if join == "first" else ndim - 1
    try:
        stacked = torch.cat(cast(Any, list(batches)), dim)
    except (RuntimeError, KeyError) as error:
        raise ValueError(
            f"cat_results={0 if join == 'first' else -1}: rollouts of the workers have entries that cannot be "
            f"concatenated: {error}. Pass cat_results='stack', the default."
        ) from error
    stacked.names = [*[None] * (ndim - 1), "time"]
    return cast(TensorDictBase, stacked)


def _filled_up(batch: TensorDictBase, steps: int) -> TensorDictBase:
    """A lazy stack of frames with ``steps`` of them: those that were not taken hold nothing, and have the id -1."""
    missing = steps - batch.batch_size[-1]
    if not missing or not isinstance(batch, LazyStackedTensorDict) or batch.stack_dim != batch.ndim - 1:
        return batch
    frames = batch.tensordicts
    filled: Any = LazyStackedTensorDict(
        *frames, *(blank_frame(frames) for _ in range(missing)), stack_dim=batch.stack_dim, stack_dim_name="time"
    )
    return cast(TensorDictBase, filled)


def are_alike(one: TensorDictBase, other: TensorDictBase) -> bool:
    """Whether the one can be overwritten with the other, and nothing is left of it."""
    if not is_dense(one) or not is_dense(other) or one.batch_size != other.batch_size:
        return False
    ours, theirs = dict(one.items(True, True)), dict(other.items(True, True))
    return ours.keys() == theirs.keys() and all(
        (value.shape, value.dtype) == (theirs[key].shape, theirs[key].dtype) for key, value in ours.items()
    )


class BatchShaping:
    """Splits batches into trajectories, moves them to a device, and returns the same TensorDict each time.

    Args:
        splits: cut them into padded trajectories.
        postproc: called with what was split.
        device: where batches are delivered; None, or the CPU: where they are.
        same_td: write each batch into the first one, where it has the same entries.
    """

    def __init__(
        self,
        *,
        splits: bool,
        postproc: Callable[[TensorDictBase], TensorDictBase] | None,
        device: Any,
        same_td: bool,
    ) -> None:
        self._splits, self._postproc, self._returns_same = splits, postproc, same_td
        self._device = None if device is None or torch.device(device).type == "cpu" else device
        self._same_td: TensorDictBase | None = None

    def __call__(self, batch: TensorDictBase | None) -> TensorDictBase | None:
        """The batch to deliver; None stays None."""
        if batch is None:
            return None
        batch = self.shape(batch)
        if not self._returns_same:
            return batch
        if self._same_td is None or not are_alike(self._same_td, batch):
            self._same_td = batch.clone()
        else:
            self._same_td.update_(batch)
        return self._same_td

    def shape(self, batch: TensorDictBase) -> TensorDictBase:
        """The batch, split and moved, in a TensorDict of its own."""
        if self._splits:
            batch = split_trajectories(batch, prefix="collector")
            batch = batch if self._postproc is None else self._postproc(batch)
        return batch if self._device is None else batch.to(self._device)
