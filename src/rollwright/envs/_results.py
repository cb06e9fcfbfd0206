"""What ``_step`` and ``_reset`` return: masks of partial resets, rows merged, results completed and checked."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch
from tensordict import LazyStackedTensorDict, TensorDictBase, is_non_tensor, is_tensor_collection, is_tensorclass

from rollwright._keys import NestedKey, as_tuple, key_str, leaf_keys, unravel, without
from rollwright._tensors import device_of
from rollwright._warnings import warn_user
from rollwright.data.layout import complete_done
from rollwright.data.layout.boundaries import take_token_rewards
from rollwright.data.specs import Composite, NonTensor, StackedComposite, TensorSpec
from rollwright.errors import EnvError, EnvKeyError

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


# A spec that was never set has one reward.
_WITHOUT_REWARD = " (self.reward_spec = Composite(shape=self.batch_size), where the environment has none)"


class SpecEntry(NamedTuple):
    """Requirements of the specs for one leaf; ``shape`` is below the batch, and None where nothing is checked."""

    key: NestedKey
    shape: torch.Size | None
    dtype: torch.dtype | None
    spec: TensorSpec


class Stack(NamedTuple):
    """A place where specs differ along a dimension, counted from the end of the batch; one list a row."""

    place: tuple[str, ...]
    dim: int
    rows: list[list[SpecEntry | Stack]]


def entries(spec: Composite, batch_ndim: int, place: tuple[str, ...] = ()) -> list[SpecEntry | Stack]:
    """The leaves of a Composite, flattened once for checking with each step."""
    if isinstance(spec, StackedComposite):
        rows = [entries(row, batch_ndim - (spec.dim < batch_ndim)) for row in spec.specs]
        return [Stack(place, spec.dim - batch_ndim, rows)]
    listed: list[SpecEntry | Stack] = []
    for name, leaf in spec.items():
        path = (*place, str(name))
        if isinstance(leaf, Composite):
            listed += entries(leaf, batch_ndim, path)
        elif leaf is None:
            continue
        elif isinstance(leaf, NonTensor) or leaf.dtype is None:
            listed.append(SpecEntry(unravel(path), None, None, leaf))
        else:
            listed.append(SpecEntry(unravel(path), leaf.shape[batch_ndim:], leaf.dtype, _without_mask(leaf)))
    return listed


def _without_mask(spec: TensorSpec) -> TensorSpec:
    """The spec with every outcome allowed: a mask speaks of the present, and data may be of an earlier step."""
    if not hasattr(spec, "update_mask"):
        return spec
    bare = spec.clone()
    bare.update_mask(None)
    return bare


def missing_actions(env: EnvBase, td: TensorDictBase) -> set[NestedKey]:
    """The actions that ``td``, from which a step is to be taken, does not hold."""
    return set(env.action_keys) - set(leaf_keys(td))


def check_entries(
    env: EnvBase,
    td: TensorDictBase,
    name: str,
    call: str,
    *,
    dtypes: bool = True,
    domains: bool | None = None,
) -> None:
    """Test that ``td`` holds what the spec ``name`` announces: presence, shape and dtype.

    Args:
        env: whose spec it is.
        td: ``[*batch]``.
        name: ``"observation"``, ``"action"``, ``"reward"``, ``"done"`` or ``"state"``.
        call: what returned ``td``, for the message.
        dtypes: test dtypes.
        domains: test that values lie in their specs; None for ``env.run_type_checks``.

    Raises:
        EnvKeyError: an entry is missing.
        EnvError: an entry has another shape or dtype, or lies outside its spec.
    """
    cached = env.remember(("entries", name), lambda: entries(env.full_spec(name), env.ndim))
    checks = Checks(env, name, call, dtypes, env.run_type_checks if domains is None else domains)
    checks.check(td, cached, td.batch_size)


class Checks(NamedTuple):
    """Checks of the entries of one spec, and names for their messages."""

    env: EnvBase
    name: str
    call: str
    dtypes: bool
    domains: bool

    def check(
        self, td: TensorDictBase, listed: list[SpecEntry | Stack], batch: torch.Size, place: tuple[str, ...] = ()
    ) -> None:
        """Test the entries of ``td``, which lies at ``place``; ``batch`` is its batch size in the environment."""
        simple = self.dtypes and not self.domains and not isinstance(td, LazyStackedTensorDict)
        for entry in listed:
            if isinstance(entry, Stack):
                self._check_stack(td, entry, batch, place)
                continue
            if simple and entry.shape is not None:  # one look in the usual case
                found = td.get(entry.key, None)
                if type(found) is torch.Tensor and found.dtype == entry.dtype and found.shape == batch + entry.shape:
                    continue
            if -1 in (entry.shape or ()) and isinstance(td, LazyStackedTensorDict):
                # Rows may be of different sizes; the spec's domain is that of the whole and is not tested.
                at = td.stack_dim
                for row in td.tensordicts:
                    self._replace(domains=False).check(row, [entry], batch[:at] + batch[at + 1 :], place)
                continue
            value, key = td.get(entry.key, None), unravel((*place, *as_tuple(entry.key)))
            if value is None:
                raise EnvKeyError(
                    f"{self.env}: {self.call} returned no {key!r}, which {self.name}_spec announces. "
                    f"It returned {key_str(leaf_keys(td)) or 'nothing'}. Return the entry, or take it out of "
                    f"{self.name}_spec{_WITHOUT_REWARD if self.name == 'reward' else ''}."
                )
            if entry.shape is not None:
                if self._is_flat_column(value, batch + entry.shape):
                    td.set(entry.key, value := value.unsqueeze(-1))
                self._check_leaf(value, entry, batch + entry.shape, key)

    def _is_flat_column(self, value: Any, expected: torch.Size) -> bool:
        """Whether an observation lacks the last dimension of its spec, of one, and may; see ``run_type_checks``."""
        lacks = isinstance(value, torch.Tensor) and (*value.shape, 1) == tuple(expected)
        return lacks and self.name == "observation" and not self.domains

    def _check_stack(self, td: TensorDictBase, stack: Stack, batch: torch.Size, place: tuple[str, ...]) -> None:
        at = len(batch) + stack.dim
        inner = batch if stack.dim >= 0 else batch[:at] + batch[at + 1 :]
        nest = td.get(stack.place, None) if stack.place else td
        place = (*place, *stack.place)
        rows = () if nest is None or at >= nest.ndim else nest.unbind(at)
        if len(rows) != len(stack.rows):
            raise EnvError(
                f"{self.env}: {self.call} returned {len(rows)} rows in {unravel(place) if place else 'the root'!r}; "
                f"{self.name}_spec says {len(stack.rows)}. Return a lazy stack of these along dimension {at}."
            )
        for row, listed in zip(rows, stack.rows, strict=True):
            self.check(row, listed, inner, place)

    def _check_leaf(self, value: Any, entry: SpecEntry, expected: torch.Size, key: NestedKey) -> None:
        if not isinstance(value, torch.Tensor):
            raise EnvError(
                f"{self._said(key)} of type {type(value).__name__}; {self.name}_spec says {entry.dtype} of shape "
                f"{list(expected)}. Return a tensor, or describe it with NonTensor or a nested Composite."
            )
        if self.dtypes and value.dtype != entry.dtype:
            raise EnvError(f"{self._said(key)} {_other_dtype(value, self.name, entry.dtype)}")
        if value.shape != expected and not _fits(value.shape, expected):
            raise EnvError(
                f"{self._said(key)} with shape {list(value.shape)}; {self.name}_spec says {list(expected)}. "
                "Reshape the value, or change the spec."
            )
        if self.domains and not entry.spec.is_in(value):
            raise EnvError(f"{self._said(key)} = {value}, which lies outside {entry.spec}. Clip it, or widen the spec.")

    def _said(self, key: NestedKey) -> str:
        return f"{self.env}: {self.call} returned {key!r}"


def _fits(shape: torch.Size, expected: torch.Size) -> bool:
    """Whether a shape matches one in which -1 stands for any size."""
    return len(shape) == len(expected) and all(e in (-1, n) for n, e in zip(shape, expected, strict=True))


def _other_dtype(value: torch.Tensor, name: str, dtype: torch.dtype | None) -> str:
    return f"with dtype {value.dtype}; {name}_spec says {dtype}. Cast the value, or change the spec."


def _match_trailing_one(env: EnvBase, td: TensorDictBase, name: str, call: str) -> None:
    """Reshape rewards or flags that lack (or have one too many) trailing dimensions of one."""

    def known() -> list[tuple[NestedKey, torch.dtype | None, torch.Size]]:
        spec = env.full_spec(name)
        return [(key, spec[key].dtype, spec[key].shape[env.ndim :]) for key in getattr(env, f"{name}_keys")]

    for key, dtype, shape in env.remember(("trailing", name), known):
        value = td.get(key, None)
        if value is None or not isinstance(value, torch.Tensor):
            continue
        if value.dtype != dtype:  # before flags are combined
            raise EnvError(f"{env}: {call} returned {key!r} {_other_dtype(value, name, dtype)}")
        expected = td.batch_size + shape
        if value.shape != expected and value.numel() == expected.numel():
            td.set(key, value.reshape(expected))


def _cast(env: EnvBase, td: TensorDictBase, names: Sequence[str], call: str) -> None:
    """Cast what a step or a reset returned to the dtypes of its specs, with one warning an entry."""

    def known() -> list[tuple[NestedKey, torch.dtype | None, str]]:
        return [(key, env.full_spec(name)[key].dtype, name) for name in names for key in env.full_spec(name).leaves()]

    for key, dtype, name in env.remember(("dtypes", call), known):
        value = td.get(key, None)
        if isinstance(value, torch.Tensor) and dtype is not None and value.dtype != dtype:
            text = f"{env}: {call} returned {key!r} with dtype {value.dtype}; {name}_spec says {dtype}. It is cast."
            env.remember(("cast", key), partial(warn_user, text, UserWarning))
            td.set(key, value.to(dtype))


def _as_outcome(env: EnvBase, given: TensorDictBase | None, td: object, call: str) -> TensorDictBase:
    if not is_tensor_collection(td):
        raise EnvError(
            f"{env}: _{call} must return a TensorDict, got {type(td).__name__}. "
            "Return TensorDict({...}, batch_size=self.batch_size)."
        )
    td = cast(TensorDictBase, td)
    if td is given:
        raise EnvError(f"{env}: _{call} returned the TensorDict it was given. Return a new one.")
    if td.get("next", None) is not None:
        raise EnvError(f"{env}: _{call} returned an entry 'next'. Return its content at the root; step() nests it.")
    if not env.returns_copies:  # or a buffer that the next step overwrites would rewrite the frames before
        td = td.clone()
    expected = env.batch_size if env.batch_locked or given is None else given.batch_size
    if td.batch_size != expected:
        if td.batch_size[: len(expected)] != expected and td.batch_size != torch.Size([]):
            raise EnvError(
                f"{env}: _{call} returned batch size {list(td.batch_size)}, expected {list(expected)}. "
                "Pass batch_size=self.batch_size to the TensorDict."
            )
        try:
            td.batch_size = expected
        except RuntimeError as error:
            raise EnvError(
                f"{env}: _{call} returned batch size {list(td.batch_size)}, expected {list(expected)}, and "
                f"an entry does not begin with that: {str(error).rstrip('.')}. Return entries of that batch size."
            ) from error
    if env.device is not None and td.device != env.device:
        td = td.to(env.device)
    return td


def complete_step(env: EnvBase, given: TensorDictBase, outcome: object) -> TensorDictBase:
    """The result of ``_step``: flags completed, shapes of rewards and flags mended, all checked."""
    td = _as_outcome(env, given, outcome, "step")
    if env.casts_outcomes:
        _cast(env, td, ("observation", "reward", "done"), "step")
    of_tokens = take_token_rewards(td, env.reward_keys[0], 1) if env.has_token_rewards else []
    _match_trailing_one(env, td, "reward", "step")
    _match_trailing_one(env, td, "done", "step")
    may_contradict, unknown = env.remember("own flags", lambda: (env.sets_own_flags, _unannounced_flags(env)))
    complete_done(td, env.done_groups, may_contradict=may_contradict)
    if unknown:
        _refuse_unannounced(env, td, unknown)
    check_entries(env, td, "observation", "step")
    check_entries(env, td, "reward", "step")
    check_entries(env, td, "done", "step")
    for row, reward in of_tokens:
        row.set(env.reward_keys[0], reward)
    return td


def _unannounced_flags(env: EnvBase) -> list[NestedKey]:
    """Where a ``truncated`` would lie beside a ``done`` whose spec has none: it would end nothing."""
    lone = [group for group in env.done_groups if group.truncated is None and as_tuple(group.done)[-1] == "done"]
    keys = [unravel((*group.prefix, "truncated")) for group in lone]
    return [key for key in keys if key not in {*env.observation_keys, *env.state_keys}]


def _refuse_unannounced(env: EnvBase, td: TensorDictBase, keys: list[NestedKey]) -> None:
    """Test that there are no such flags.

    Raises:
        EnvError: there is one.
    """
    for key in keys:
        if td.get(key, None) is not None:
            raise EnvError(
                f"{env}: step returned {key!r}, which done_spec does not announce: it would end no trajectory. Call "
                "self.add_truncated_keys() at the end of __init__, or announce it in self.done_spec."
            )


def complete_reset(env: EnvBase, given: TensorDictBase | None, fresh: object) -> TensorDictBase:
    """The result of ``_reset``: flags completed (False where absent), all checked."""
    td = _as_outcome(env, given, fresh, "reset")
    if env.casts_outcomes:
        _cast(env, td, ("observation", "done"), "reset")
    _match_trailing_one(env, td, "done", "reset")
    complete_done(td, env.done_groups)
    spec = env.full_done_spec
    for key in env.done_keys:
        if td.get(key, None) is None:
            shape = td.batch_size + spec[key].shape[env.ndim :]
            td.set(key, torch.zeros(shape, dtype=torch.bool, device=env.device or device_of(td)))
    check_entries(env, td, "observation", "reset")
    check_entries(env, td, "done", "reset")
    if given is None:
        check_alive(env, td, None)
    return td


def check_alive(env: EnvBase, td: TensorDictBase, masks: Masks | None) -> None:
    """Test that nothing is done right after a reset, where ``masks`` (of :func:`reset_masks`) marks it.

    Raises:
        EnvError: something is.
    """
    if env.allow_done_after_reset:
        return
    for group in env.done_groups:
        done = td.get(group.done)
        if masks is not None:
            done = done & mask_like(masks, group.prefix, done, td.ndim)
        if bool(done.any()):
            raise done_after_reset(env, group.done)


def done_after_reset(env: EnvBase, key: NestedKey) -> EnvError:
    """The error of a flag that is set right after a reset."""
    return EnvError(f"{env}: {key!r} is True right after reset. If that is meant, pass allow_done_after_reset=True.")
