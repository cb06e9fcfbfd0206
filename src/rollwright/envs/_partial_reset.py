"""Partial resets: the ``"_reset"`` masks, and old rows merged with fresh ones."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import torch
from tensordict import LazyStackedTensorDict, TensorDictBase, is_non_tensor, is_tensorclass

from rollwright._keys import key_str, leaf_keys, without
from rollwright.data.layout import complete_done
from rollwright.errors import EnvError

if TYPE_CHECKING:
    from rollwright.envs.base import EnvBase


Masks = dict[tuple[str, ...], torch.Tensor]


def reset_masks(env: EnvBase, td: TensorDictBase | None) -> Masks | None:
    """The ``"_reset"`` entries of ``td`` by place, or None for a reset of everything.

    Raises:
        EnvError: a mask is not bool, or has a shape that the environment's flags do not have.
    """
    if td is None:
        return None
    masks: Masks = {}
    for group in env.done_groups:
        mask = td.get(group.reset, None)
        if mask is None:
            continue
        expected = td.batch_size + env.full_done_spec[group.done].shape[env.ndim :]
        if not isinstance(mask, torch.Tensor) or mask.dtype != torch.bool:
            got = mask.dtype if isinstance(mask, torch.Tensor) else type(mask).__name__
            raise EnvError(f"{env}: {group.reset!r} is {got}, expected a bool tensor. Write mask.bool().")
        if mask.shape != expected:
            if mask.numel() != expected.numel():
                raise EnvError(
                    f"{env}: {group.reset!r} has shape {list(mask.shape)}, expected {list(expected)}, that "
                    f"of {group.done!r}. Give one flag for each environment."
                )
            mask = mask.reshape(expected)
            td.set(group.reset, mask)
        masks[group.prefix] = mask
    return masks or None


class LastSeen:
    """What an environment returned last; copies of it, such as those for other processes, hold nothing.

    Args:
        moment: of :meth:`EnvBase.moment`; what the environment returned is known until that is another.
        root: data that were reset, or acted on.
        outcome: of the step from there; None: it was a reset.
    """

    def __init__(
        self, moment: object = None, root: TensorDictBase | None = None, outcome: TensorDictBase | None = None
    ) -> None:
        self.moment, self._root, self._outcome = moment, root, outcome

    def following(self, env: EnvBase) -> TensorDictBase | None:
        """The root of the next step; None: not known."""
        if self._root is None or self.moment != env.moment():
            return None
        if self._outcome is None:
            return self._root
        return env._step_mdp(without(self._root).set("next", self._outcome))

    def __reduce__(self) -> tuple[Any, ...]:
        return LastSeen, ()


def with_kept(env: EnvBase, td: TensorDictBase, masks: Masks | None, last: LastSeen) -> TensorDictBase:
    """``td`` with what it lacks of rows that go on: what the environment returned last. ``td`` itself if it lacks none.

    Raises:
        EnvError: the environment does not know it.
    """
    if masks is None or all(bool(mask.all()) for mask in masks.values()):
        return td
    given, wanted = set(leaf_keys(td)), (*env.observation_keys, *env.done_keys)
    if not given.issuperset(env.done_keys):  # they may follow from those that are there
        td = td.copy()
        complete_done(td, env.done_groups)
        given = set(leaf_keys(td))
    missing = [key for key in wanted if key not in given]
    if not missing:
        return td
    known = last.following(env)
    if known is not None and known.batch_size == td.batch_size:
        kept = known.select(*missing, *(key for key in env.state_keys if key not in given), strict=False)
        unknown = set(missing) - set(leaf_keys(kept))
    else:
        kept, unknown = td, set(missing)
    if unknown:
        raise EnvError(
            f"{env}: reset got marks for some rows, and no {key_str(unknown)}, which the others go on with. The "
            "environment has not been reset yet, or a collector or a view has used it since. Set the marks in the data "
            "that the next step would be taken from, or reset all rows."
        )
    return kept.update(td)


def mask_like(masks: Masks, place: tuple[str, ...], value: torch.Tensor, batch_ndim: int) -> torch.Tensor:
    """The mask that governs ``value`` at ``place``, shaped to broadcast against it."""
    mask = _mask_at(masks, place, value.shape, batch_ndim)
    return mask.reshape(mask.shape + (1,) * (value.ndim - mask.ndim))


def _mask_at(masks: Masks, place: tuple[str, ...], shape: torch.Size, batch_ndim: int) -> torch.Tensor:
    """One flag for each leading element of ``shape``: for the environment, or for each of its agents."""
    governing = [prefix for prefix in masks if prefix == place[: len(prefix)]]
    if not governing:  # beside all groups: reset when any group of the environment is
        return torch.stack([mask.flatten(batch_ndim).any(-1) for mask in masks.values()]).any(0)
    mask = masks[() if () in masks else max(governing, key=len)]
    if mask.ndim > batch_ndim and mask.shape[-1] == 1:
        mask = mask.squeeze(-1)
    return mask if mask.shape == shape[: mask.ndim] else mask.flatten(batch_ndim).any(-1)


def merge_reset(env: EnvBase, old: TensorDictBase, fresh: TensorDictBase, masks: Masks | None) -> TensorDictBase:
    """``old`` with the marked rows of ``fresh``: a new TensorDict without ``"_reset"`` and ``"next"``."""
    out = without(old, "next", *env.reset_keys)
    fresh = fresh.exclude(*env.reset_keys)
    if masks is None or all(bool(mask.all()) for mask in masks.values()):
        return replace_entries(out, fresh)
    return _merge(out, fresh, masks, (), old.ndim)


def put_back(env: EnvBase, td: TensorDictBase, changed: TensorDictBase) -> TensorDictBase:
    """``td`` with the entries of ``changed``, without masks; ``changed`` itself where ``td`` cannot hold these."""
    if not _can_hold(td, changed):
        return changed
    if isinstance(td, LazyStackedTensorDict):
        for row, new in zip(td.tensordicts, cast(LazyStackedTensorDict, changed).tensordicts, strict=True):
            put_back(env, row, new)
        return td
    for key in env.reset_keys:
        if td.get(key, None) is not None:
            del td[key]
    for name, value in changed.items():
        td.set(name, value)
    return td


def _can_hold(td: TensorDictBase, changed: TensorDictBase) -> bool:
    if td.is_locked:
        return False
    lazy = isinstance(td, LazyStackedTensorDict), isinstance(changed, LazyStackedTensorDict)
    if not any(lazy):
        return True
    return all(lazy) and cast(Any, td).stack_dim == cast(Any, changed).stack_dim


def replace_entries(old: TensorDictBase, fresh: TensorDictBase) -> TensorDictBase:
    """``old`` updated with ``fresh``; tensor classes, whose shapes may be others, are replaced and not merged."""
    row = fresh
    while isinstance(row, LazyStackedTensorDict):  # of stacks, whose entries may be ragged themselves
        row = row.tensordicts[0]
    if row is not fresh:
        classes = [key for key, value in row.items() if _is_class(value)]
        old = without(old, *classes) if classes else old
    return old.update(fresh)


def _is_class(value: Any) -> bool:
    return is_tensorclass(value) and not is_non_tensor(value)


def _merge(
    old: TensorDictBase, fresh: TensorDictBase, masks: Masks, place: tuple[str, ...], batch_ndim: int
) -> TensorDictBase:
    stack = next((td for td in (fresh, old) if isinstance(td, LazyStackedTensorDict)), None)
    if stack is not None:
        return _merge_rows(old, fresh, masks, place, batch_ndim, stack.stack_dim)
    if batch_ndim and _shapes_differ(old, fresh):
        return _merge_rows(old, fresh, masks, place, batch_ndim, 0)
    for key, new in fresh.items():
        kept = old.get(key, None)
        if kept is not None:
            if isinstance(new, torch.Tensor):
                new = _where(mask_like(masks, place, new, batch_ndim), new, kept, str(key))
            elif is_non_tensor(new) or _is_class(new):
                new = _choose(_mask_at(masks, place, new.batch_size, batch_ndim), new, kept)
            elif is_tensorclass(new):
                new = _merge_class(kept, new, masks, (*place, str(key)), batch_ndim)
            else:
                new = _merge(kept, cast(TensorDictBase, new), masks, (*place, str(key)), batch_ndim)
        old.set(key, new)
    return old


def _merge_class(old: Any, fresh: Any, masks: Masks, place: tuple[str, ...], batch_ndim: int) -> Any:
    """:func:`_merge` of tensorclass entries: of the TensorDicts in them, which hold text as stacks."""
    inside = old._tensordict if is_tensorclass(old) else old
    return type(fresh)._from_tensordict(_merge(inside.copy(), fresh._tensordict, masks, place, batch_ndim))


def _shapes_differ(old: TensorDictBase, fresh: TensorDictBase) -> bool:
    return any(
        isinstance(new, torch.Tensor)
        and isinstance(kept := old.get(key, None), torch.Tensor)
        and kept.shape != new.shape
        for key, new in fresh.items()
    )


def _where(mask: torch.Tensor, new: torch.Tensor, kept: torch.Tensor, key: str) -> torch.Tensor:
    """``torch.where`` for tensors of one shape; of two shapes, one is taken whole."""
    if new.shape == kept.shape:
        return torch.where(mask, new, kept)
    if bool(mask.all()):
        return new
    if bool(mask.any()):
        raise EnvError(
            f"reset: {key!r} has shape {list(new.shape)} for agents that begin anew, and {list(kept.shape)} for "
            "others. Give all agents of an environment one shape, or reset them together."
        )
    return kept


def _merge_rows(
    old: TensorDictBase,
    fresh: TensorDictBase,
    masks: Masks,
    place: tuple[str, ...],
    batch_ndim: int,
    dim: int,
) -> TensorDictBase:
    """Merge the rows of lazy stacks, which may differ in shape, one by one; stack them again."""
    inner = batch_ndim - (dim < batch_ndim)
    if inner == batch_ndim:  # a stack of agents
        masks = {place: _mask_at(masks, place, fresh.batch_size, batch_ndim)}
    rows = []
    for i, (one, other) in enumerate(zip(old.unbind(dim), fresh.unbind(dim), strict=True)):
        of_row = {at: mask.select(dim, i) if mask.ndim > dim else mask for at, mask in masks.items()}
        rows.append(_merge(one, other, of_row, place, inner))
    return LazyStackedTensorDict.lazy_stack(rows, dim)


def _choose(mask: torch.Tensor, new: Any, kept: Any) -> Any:
    """``where`` for objects, which torch cannot select."""
    if mask.ndim == 0:
        return new if bool(mask) else kept
    rows = zip(mask, new.unbind(0), kept.unbind(0), strict=True)
    return LazyStackedTensorDict.maybe_dense_stack([_choose(*row) for row in rows], 0)
