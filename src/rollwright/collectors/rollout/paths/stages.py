"""Stages of a step, built once: act, step, and the copies between them; and what a policy wrote in a call."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any, cast

import torch
from tensordict import (
    LazyStackedTensorDict,
    NonTensorData,
    NonTensorStack,
    TensorDict,
    TensorDictBase,
    is_tensor_collection,
)

from rollwright._keys import NestedKey, as_tuple, key_str, unravel
from rollwright.collectors.reports.observers import named_range
from rollwright.data.layout import TRAJ_IDS
from rollwright.data.specs import Categorical, MultiCategorical, MultiOneHot, NonTensor, OneHot, TensorSpec
from rollwright.envs.base import EnvBase
from rollwright.errors import PolicyError, PolicyKeyError
from rollwright.modules.signature import Call

Before = dict[NestedKey, Any] | list[Any]  # entries by key, or those of each row of a lazy stack


def entries(td: TensorDictBase, place: tuple[str, ...] = ()) -> Iterator[tuple[NestedKey, Any]]:
    """The leaves of a TensorDict; objects and stacks count as leaves.

    Raises:
        RuntimeError: it is a lazy stack with a ragged tensor, which has no common shape to be read with.
    """
    for key, value in td.items():
        if type(value) is TensorDict:
            yield from entries(value, (*place, key))
        else:
            yield unravel((*place, key)) if place else key, value


def entries_or_rows(td: TensorDictBase) -> Iterator[tuple[NestedKey, Any]]:
    """The leaves of a TensorDict; a ragged tensor as the list of its rows."""
    if not isinstance(td, LazyStackedTensorDict):
        yield from entries(td)
        return
    for key in td.keys():  # noqa: SIM118 - a TensorDict iterates over its rows
        try:
            yield unravel(key), td.get(key)
        except RuntimeError:
            yield unravel(key), [row.get(key) for row in td.unbind(0)]


def entry_keys(td: TensorDictBase) -> list[NestedKey]:
    """The keys of :func:`entries`, of all rows of a lazy stack; nothing is read."""
    if isinstance(td, LazyStackedTensorDict):
        return list(dict.fromkeys(key for row in td.tensordicts for key in entry_keys(row)))
    return [key for key, _ in entries(td)]


def entries_before(td: TensorDictBase) -> Before:
    """The leaves that a TensorDict holds before a policy is called with it."""
    if isinstance(td, LazyStackedTensorDict):
        return [entries_before(row) for row in td.tensordicts]
    return dict(entries(td))


def write_outputs(current: TensorDictBase, chosen: TensorDictBase, before: Before, *, fresh: bool) -> TensorDictBase:
    """Write what a policy has changed or added into the current TensorDict, in place.

    Args:
        current: ``[*env]``.
        chosen: what the policy returned, ``[*env]``; its rows may differ in shape.
        before: of :func:`entries_before`, of what the policy was called with.
        fresh: False where the policy overwrites its outputs at the next call: they are copied.

    Returns:
        ``current``; or a lazy stack of its rows, where rows of the outputs differ in shape and those before did not.
    """
    if isinstance(current, LazyStackedTensorDict):
        dim = current.stack_dim
        mine = isinstance(chosen, LazyStackedTensorDict) and chosen.stack_dim == dim
        rows = cast(LazyStackedTensorDict, chosen).tensordicts if mine else chosen.unbind(dim)
        for i, row in enumerate(rows):
            old = before[i] if isinstance(before, list) and mine else {}
            current.tensordicts[i] = write_outputs(current.tensordicts[i], row, old, fresh=fresh)
        return current
    try:
        written = list(entries(chosen))
    except RuntimeError:
        if not isinstance(chosen, LazyStackedTensorDict) or chosen.stack_dim >= current.ndim:
            raise
        dim = chosen.stack_dim
        rows_of_it = LazyStackedTensorDict(*current.unbind(dim), stack_dim=dim)
        return write_outputs(rows_of_it, chosen, before, fresh=fresh)
    old = before if isinstance(before, dict) else {}
    for key, value in written:
        if old.get(key) is not value or not isinstance(value, torch.Tensor):  # stacks are written into
            current.set(key, value if fresh else value.clone())
    return current


def changed_keys(td: TensorDictBase, before: Before) -> list[NestedKey]:
    """The entries that are not those of :func:`entries_before`, each once."""
    if isinstance(td, LazyStackedTensorDict):
        olds = before if isinstance(before, list) else [{}] * len(td.tensordicts)
        changed = [changed_keys(row, old) for row, old in zip(td.tensordicts, olds, strict=True)]
        return list(dict.fromkeys(key for keys in changed for key in keys))
    old = before if isinstance(before, dict) else {}
    return [key for key, value in entries(td) if old.get(key) is not value]


def has_entry(td: TensorDictBase, key: NestedKey) -> bool:
    """Whether there is an entry, which may be ragged; nothing is read."""
    if isinstance(td, LazyStackedTensorDict):
        return all(has_entry(row, key) for row in td.tensordicts)
    name, *below = as_tuple(key)
    if name not in td.keys():  # noqa: SIM118 - a TensorDict iterates over its rows
        return False
    return not below or has_entry(td.get(name), unravel(tuple(below)))


def remove_entry(td: TensorDictBase, key: NestedKey) -> None:
    """Take an entry out, which may be ragged, or may not be there."""
    if isinstance(td, LazyStackedTensorDict):
        for row in td.tensordicts:
            remove_entry(row, key)
        return
    name, *below = as_tuple(key)
    if name not in td.keys():  # noqa: SIM118 - a TensorDict iterates over its rows
        return
    if below:
        remove_entry(td.get(name), unravel(tuple(below)))
    else:
        td.del_(name)


Stage = Callable[[TensorDictBase], TensorDictBase]
Step = Callable[[TensorDictBase], tuple[TensorDictBase, TensorDictBase]]

IDS, VERSION = TRAJ_IDS, "policy_version"


def mover(device: torch.device | None, sync: Callable[[], None]) -> Stage:
    """Data on ``device``, ready to be read there; None leaves them where they are."""
    if device is None:
        return lambda td: td

    def move(td: TensorDictBase) -> TensorDictBase:
        moved = td.to(device, non_blocking=True)
        sync()
        return moved

    return named_range("rollwright.copy", move)


def build_act(
    policy: Call,
    move: Stage,
    check: Callable[[TensorDictBase], None],
    *,
    fresh_outputs: bool,
    stale: Iterable[NestedKey] = (),
) -> Stage:
    """The stage that writes actions into the current TensorDict.

    Args:
        policy: TensorDict in, TensorDict (or None) out.
        move: brings the current TensorDict to the policy's device.
        check: tests the actions.
        fresh_outputs: False when the policy overwrites its outputs at the next call.
        stale: entries to take out first: a policy that writes no action must not repeat its last one in silence.
    """
    stale = list(stale)

    def act(current: TensorDictBase) -> TensorDictBase:
        for key in stale:
            remove_entry(current, key)
        seen = move(current)
        before = None if seen is current and fresh_outputs else entries_before(seen)
        chosen = policy(seen)
        chosen = seen if chosen is None else chosen
        if not is_tensor_collection(chosen):
            raise PolicyError(
                f"policy: expected it to return a TensorDict (or None), got {type(chosen).__name__}. Write the action "
                "into the TensorDict and return that, or wrap the function in a TensorDictModule."
            )
        if chosen is not current or not fresh_outputs:
            known = before if before is not None else entries_before(current)
            current = write_outputs(current, chosen, known, fresh=fresh_outputs)
        states = current.get("next", None)
        if states is not None:  # they are the next step's root, and a policy may write them into one buffer
            current.set("next", states.clone())
        check(current)
        return current

    return act


def stale_actions(env: EnvBase, policy: Any) -> list[NestedKey]:
    """Actions of the last step that neither the environment nor the policy reads in the next one."""
    read = {*env.observation_keys, *env.state_keys, *map(unravel, getattr(policy, "in_keys", ()))}
    return [key for key in env.action_keys if key not in read]


def build_step(env: EnvBase, move: Stage, *, reset_when_done: bool, current_has_no_device: bool) -> Step:
    """The stage that steps the environment: the frame, and the current TensorDict of the next step."""

    def advance(td: TensorDictBase) -> tuple[TensorDictBase, TensorDictBase]:
        td = env.step(td)
        following = env._step_mdp(td)
        env.trim_frame(td, following)
        return td, following

    stage: Step = env.step_and_maybe_reset if reset_when_done else advance

    def step(current: TensorDictBase) -> tuple[TensorDictBase, TensorDictBase]:
        stepped, following = stage(move(current))
        if stepped is not current:
            outcome = stepped.get("next")
            current.set("next", outcome.copy().clear_device_() if current_has_no_device else outcome)
        if current_has_no_device and following.device is not None:
            following.clear_device_()
        return current, following

    return step


def action_check(env: EnvBase) -> Callable[[TensorDictBase], None]:
    """Tests that every action is there and has the shape of its spec; ragged ones are the environment's to test."""
    ndim, specs = env.ndim, env.full_action_spec.leaves()
    free = {key for key in env.action_keys if isinstance(specs[key], NonTensor) or -1 in specs[key].shape}
    actions = [(key, specs[key]) for key in env.action_keys if key not in free]
    others = env.stand_ins

    def check(current: TensorDictBase) -> None:
        for key in free:
            if not has_entry(current, key) and not (key in others and has_entry(current, others[key])):
                raise _unwritten(env, current, key)
        for key, spec in actions:
            expected = current.batch_size + spec.shape[ndim:]
            try:
                value: Any = current.get(key, None)
            except RuntimeError as error:  # of a lazy stack
                raise PolicyError(
                    f"policy: it wrote {key!r} with a shape that differs between environments; {env} expects "
                    f"{list(expected)}, as in {spec}. Write one shape, or let the spec have -1 where sizes vary."
                ) from error
            if value is None:
                raise _unwritten(env, current, key)
            if isinstance(value, torch.Tensor) and value.numel() != expected.numel():
                raise PolicyError(
                    f"policy: it wrote {key!r} with shape {list(value.shape)}; {env} expects {list(expected)}, as in "
                    f"{spec}.{_hint(spec, value)}"
                )

    return check


def _hint(spec: TensorSpec, value: torch.Tensor) -> str:
    """What a policy writes that writes another shape, as far as that can be told."""
    if isinstance(spec, OneHot | MultiOneHot) and not value.is_floating_point():
        around = "put CategoricalAction() around it, " if isinstance(spec, OneHot) else ""
        return (
            " The spec is one-hot. If the policy writes indices, create the environment with "
            f"categorical_action_encoding=True, {around}or let the policy write one-hot actions (OneHotCategorical; "
            "action_space='one_hot' of QValueModule)."
        )
    if isinstance(spec, Categorical | MultiCategorical) and value.is_floating_point():
        return (
            " The spec takes indices. If these are logits or values, let the policy draw from them "
            "(ProbabilisticActor with distribution_class=Categorical), or take the largest (QValueActor)."
        )
    return ""


def _unwritten(env: EnvBase, current: TensorDictBase, key: NestedKey) -> PolicyKeyError:
    return PolicyKeyError(
        f"policy: it wrote no {key!r}, which {env} needs. Entries after the call: "
        f"{key_str(current.keys(True, True))}. Add {key!r} to its out_keys, or return it "
        "from a function."
    )


def finite_check(env: EnvBase) -> Callable[[TensorDictBase, Iterable[NestedKey]], None]:
    """Tests, on a whole batch, that no continuous action, and no other entry named, is NaN (or infinite, above)."""
    specs = env.full_action_spec
    keys = [key for key in env.action_keys if (dtype := specs[key].dtype) and dtype.is_floating_point]
    keys = [key for key in keys if -1 not in specs[key].shape]

    def check(batch: TensorDictBase, others: Iterable[NestedKey]) -> None:
        for key in dict.fromkeys([*keys, *others]):
            value = batch.get(key, None)
            if not isinstance(value, torch.Tensor):
                continue
            # -inf is a logit of what cannot be chosen; +inf is one of what cannot be sampled.
            bad = torch.isnan(value) if key in keys else ~(value < math.inf)
            if bool(bad.any()):
                first = bad.nonzero()[0].tolist()[: batch.ndim]
                raise PolicyError(
                    f"policy: {key!r} is {'NaN' if key in keys else 'NaN or infinite'}, first at index {first} of the "
                    "batch. Look for infinite weights or losses, or for a scale of zero."
                )

    return check


def tag_act(act: Stage, version: Callable[[], int | str]) -> Stage:
    """``act``, which also writes ``"policy_version"``, of the batch size of its data: that of the weights that act.

    int64, or text where versions are UUIDs.
    """

    def tagged(current: TensorDictBase) -> TensorDictBase:
        current.set(VERSION, version_tag(version(), current.batch_size))
        return act(current)

    return tagged


def version_tag(version: int | str, batch_size: torch.Size) -> Any:
    """A version for each of ``batch_size``: int64, or text."""
    if isinstance(version, int):
        return torch.full(batch_size, version, dtype=torch.int64, device="cpu")
    tag: Any = version
    for size in reversed(batch_size):
        tag = [tag] * size
    return NonTensorStack.from_list(tag) if batch_size else NonTensorData(tag)


def tag_step(step: Step) -> Step:
    """``step``, which also copies ``"policy_version"`` to ``"next"`` and to what the next step is taken from."""

    def tagged(current: TensorDictBase) -> tuple[TensorDictBase, TensorDictBase]:
        tag = current.get(VERSION)
        frame, following = step(current)
        frame.set(("next", VERSION), tag)
        following.set(VERSION, tag)
        return frame, following

    return tagged


def ragged_keys(env: EnvBase) -> set[NestedKey]:
    """Entries of a frame whose first dimension below the batch has any size (-1) in the specs."""
    ragged: set[NestedKey] = set()
    for name in ("observation", "state", "action", "reward", "done"):
        spec = env.full_spec(name)
        for key in spec.leaves():
            if spec[key].shape[env.ndim :][:1] == (-1,):
                ragged |= {unravel(key), unravel(("next", *as_tuple(key)))}
    return ragged


def next_keys(env: EnvBase) -> list[NestedKey]:
    """Keys below ``"next"`` that repeat at the root of the next step: observations and states, as far as tensors."""
    leaves = [(key, spec[key]) for spec in (env.full_observation_spec, env.full_state_spec) for key in spec.leaves()]
    # Objects and shapes that vary (-1) cannot be put back row by row: they stay where they are.
    shared = {unravel(key) for key, leaf in leaves if not isinstance(leaf, NonTensor) and -1 not in leaf.shape}
    return sorted(shared, key=as_tuple)


def action_forms(env: EnvBase, outputs: TensorDictBase | None) -> dict[NestedKey, torch.Tensor]:
    """Zeros of the actions that a policy writes in another dtype or shape than their specs; random ones follow it."""
    forms: dict[NestedKey, torch.Tensor] = {}
    for key in env.action_keys:
        spec, value = env.full_action_spec[key], None if outputs is None else outputs.get(key)
        if not isinstance(value, torch.Tensor) or -1 in spec.shape or spec.dtype is None:
            continue
        differs = (value.dtype, value.shape) != (spec.dtype, spec.shape)
        if differs and value.numel() == spec.shape.numel() and torch.can_cast(spec.dtype, value.dtype):
            forms[key] = value
    return forms
