"""ArrayPath: an environment and a policy on NumPy arrays, rows written straight into the batch's memory."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from tensordict import LazyStackedTensorDict, NonTensorStack, TensorDict, TensorDictBase

from rollwright._keys import NestedKey, as_tuple, is_private, key_str, leaf_keys
from rollwright.collectors.core import Actor, Path, UnfitOutputs
from rollwright.collectors.rollout.paths import stages
from rollwright.collectors.rollout.paths.actors import CastActor, as_array
from rollwright.collectors.rollout.paths.parts import PathParts, Taken
from rollwright.collectors.rollout.paths.recording import (
    BatchLayout,
    BatchMemory,
    Form,
    below_next,
    difference,
    lay_out,
    unfit,
)
from rollwright.collectors.rollout.paths.stages import IDS, VERSION, action_forms, entries_or_rows, write_outputs
from rollwright.data.compact import BoundaryKeeper
from rollwright.envs.arrays import FLAGS, ArrayEnv, Entry, Rows, UnfitOutcome, Values, objects_of
from rollwright.envs.tensordicts_on_arrays import as_tensordict
from rollwright.errors import EnvError, NotNative, PolicyError

_FLAG = np.dtype(np.bool_)
NEXT_VERSION = below_next(VERSION)
VERSIONS = [VERSION, NEXT_VERSION]


_NOTHING: Values = {}


class ArrayPath(Path):
    """Steps an environment on arrays with a policy on arrays.

    The work of a step: the policy's calls, the environment's step, one write into each row. ``done`` and the flags of
    roots follow from the rows of a batch, and are filled in at its end.

    Args:
        parts: what it is made of.
        arrays: the environment's array form.
        policy: acts.
        random: acts at random.
        how: why this path was taken.
    """

    def __init__(
        self, parts: PathParts, arrays: ArrayEnv, policy: Actor, random: Actor, *, how: Mapping[str, str]
    ) -> None:
        self.how = dict(how)
        env, options, device = parts.env, parts.options, parts.devices.storing
        self._env, self._arrays, self._steps, self._device = env, arrays, parts.steps, device
        self._resets = arrays.resets_ahead = options.reset_when_done  # what ends is reset with the same step
        # Without a device for batches, what a policy on a GPU writes is delivered there.
        acts = parts.devices.policy
        self._acts_device = acts if device is None and acts is not None and acts.type == "cuda" else None
        self._current_device, self._leave = parts.current_device, parts.hand_over
        self._pool, self._memory, self._version = parts.ids, parts.memory, parts.version
        self._batch = arrays.batch
        self._check_action = stages.action_check(env)
        flag = Entry((*self._batch, 1), _FLAG, True)
        flags: dict[NestedKey, Entry] = dict.fromkeys(cast("tuple[NestedKey, ...]", arrays.root_flags), flag)
        self._roots = {**arrays.carried, **flags}
        arrays.see_roots(self._roots)
        self._objects = objects_of(arrays.entries)  # are in lists, beside the rows
        self._object_rows: dict[NestedKey, list[Any]] = {}
        self._policy, self._random = policy, CastActor(random)
        self._acting = policy
        self._like: TensorDictBase | None = None  # what the policy writes, in batches of random actions
        self._blanks: dict[NestedKey, Form] = {}  # its entries that they have zeros for
        self._tracks_ids, self._tracks_version = options.track_traj_ids, options.track_policy_version
        self._reuses = options.return_same_td
        repeated = set(stages.next_keys(env)) if options.compact_obs else set()
        self._outcomes = {**arrays.carried, **arrays.rewards, **flags}
        self._dropped = {below_next(key) for key in repeated}
        self._keeper = BoundaryKeeper(repeated, env.batch_size, device) if options.compact_obs else None
        off: Any = np.zeros(self._batch, np.bool_) if self._batch else False
        self._no_flags: Values = dict.fromkeys(arrays.root_flags, off)
        self._lacks_truncated = "truncated" not in arrays.root_flags
        self._root: Values | None = None
        self._acted = -1  # the version that has acted last; -1: none has
        self._ids: NDArray[Any] = np.full(self._batch, -1)
        self._block: BatchMemory | None = None
        self._layouts: dict[Actor, BatchLayout] = {}
        self._ahead: Values | None = None  # outputs of the first step, where it was taken already

    # The current TensorDict ----------------------------------------------------------------------

    @property
    def started(self) -> bool:
        """Whether there is a current TensorDict."""
        return self._root is not None

    @property
    def current(self) -> TensorDictBase | None:
        """What the next step is taken from, ``[*env]``; None: nothing, a reset comes first."""
        return None if self._root is None else self._as_tensordict(self._root)

    @current.setter
    def current(self, current: TensorDictBase | None) -> None:
        if current is None:
            self._root = None
            return
        root: Values = dict(self._no_flags)
        for key in leaf_keys(current):
            if key in self._objects:
                root[key] = current.get(key).copy()
                continue
            value = np.array(current.get(key).detach().cpu().numpy())
            if key == IDS:
                self._ids = value
            elif key not in FLAGS or (not self._resets and key in root):
                entry = self._roots.get(key)
                root[key] = value.reshape(self._batch)[()] if entry is not None and entry.column else value
        missing = [key for key in self._arrays.carried if key not in root]
        if missing:
            raise NotNative(f"the current TensorDict has no {key_str(missing)}")
        self._root = root

    def _as_tensordict(self, root: Values) -> TensorDictBase:
        current = TensorDict({}, batch_size=self._batch, device=self._current_device)
        for key, value in root.items():
            if key == VERSION or as_tuple(key)[0] == "next" or key in self._arrays.rewards:
                continue  # of the last step, not of the next one
            entry = self._roots.get(key)
            if key in self._objects:
                current.set(key, value.copy())
                continue
            array = np.array(value) if entry is None else np.array(value, entry.dtype).reshape(entry.shape)
            current.set(key, torch.from_numpy(array))
        for name, size in self._arrays.nests.items():
            current.get(name).batch_size = torch.Size([*self._batch, *size])
        if self._tracks_ids:
            current.set(IDS, torch.from_numpy(self._ids.copy()))
        return current

    def reset(self, **kwargs: Any) -> None:
        """Reset all environments; trajectory ids are to be set next."""
        self._root = {**self._arrays.reset(None, **kwargs), **self._no_flags}

    def reset_some(self, marked: torch.Tensor, **kwargs: Any) -> None:
        """Reset where ``marked``, bool ``[*env]``, says; the other environments go on."""
        if bool(marked.any()):
            root, rows = cast(Values, self._root), marked.numpy()
            self._root = fresh = reset_rows(self._arrays, root, self._no_flags, rows, self._seen(root), **kwargs)
            if not self._resets:
                fresh.update((flag, root[flag] & ~rows) for flag in self._no_flags)

    def _seen(self, root: Values) -> Values:
        """The root for transforms that see all of it."""
        if not self._arrays.may_be_unfit:
            return root
        seen = {key: value for key, value in root.items() if key not in self._arrays.rewards}  # of the step before
        if self._tracks_ids:
            seen[IDS] = self._ids.copy()
        if self._tracks_version and self._acted >= 0:
            seen[VERSION] = np.full(self._batch, self._acted)
        return seen

    def set_ids(self, ids: torch.Tensor) -> None:
        """Give each environment the id, int64 ``[*env]``, of the trajectory that it is in."""
        self._ids = ids.reshape(self._batch).numpy().copy()

    def replace_ids(self, ended: torch.Tensor) -> None:
        """Give fresh ids where ``ended``, bool ``[*env]``, says."""
        self._replace_ids(ended.reshape(self._batch).numpy())

    def compile(self, arguments: Mapping[str, Any]) -> None:
        """Make the policy cheaper, and warm it up on the current TensorDict."""
        self._policy = self._policy.compiled(arguments, cast(Values, self._root))
        self.how["policy"] = self._policy.how

    def check(self) -> None:
        """Test that the environment is what the path was chosen for."""
        self._arrays.check()

    # A rollout ----------------------------------------------------------------------------------------

    def conform(self, outputs: TensorDictBase | None) -> None:
        """Give batches of random actions the entries that the policy writes, zero where no action is."""
        if outputs is self._like:
            return
        written = {} if outputs is None else {key: as_array(value) for key, value in entries_or_rows(outputs.cpu())}
        if against := unfit(written, self._roots):
            raise UnfitOutputs(against)
        forms = {key: (value.shape, value.dtype) for key, value in written.items()}
        self._random.forms = {key: forms[key] for key in action_forms(self._env, outputs)}
        drawn = set(self._env.action_keys)
        self._blanks = {key: form for key, form in forms.items() if key not in drawn and as_tuple(key)[0] != "next"}
        self._layouts.pop(self._random, None)
        self._like = outputs

    def begin(self, *, random: bool) -> None:
        """Open a batch, with random actions or with the policy's."""
        self._acting = self._random if random else self._policy
        self.check()
        actor = self._acting
        self._start(actor)
        self.finite_keys = [key for key in actor.finite_keys if not is_private(key)]
        self._ahead = None if actor in self._layouts else self._tried(actor)
        self._version_of_batch = self._version() if actor.frozen else None
        self.how["policy"] = self._policy.how  # a first call may have shown it
        if self._keeper is not None:
            self._keeper.begin()

    def _start(self, actor: Actor) -> None:
        actor.start(self._steps)

    def _first(self, actor: Actor) -> Values:
        return actor(cast(Values, self._root), self._ids)

    def _tried(self, actor: Actor) -> Values:
        """The outputs of the first step that a policy takes, which may show that it must take the plain path.

        Raises:
            NotNative: it must, and random numbers are as before.
        """
        numbers = torch.get_rng_state()
        try:
            return self._first(actor)
        except NotNative as reason:
            torch.set_rng_state(numbers)
            raise UnfitOutputs(str(reason)) from reason

    def act(self, t: int) -> None:
        """The policy reads observations and writes actions."""
        root = cast(Values, self._root)
        if self._tracks_version:  # the version that acts, whatever is published before the frame is written
            self._acted = self._version() if self._version_of_batch is None else self._version_of_batch
        outputs, self._ahead = self._ahead, None
        if outputs is None:
            try:
                outputs = self._acting(root, self._ids)
            except NotNative as reason:
                raise no_tensors(reason) from reason
        if t == 0:
            if self._acting.varies and (against := unfit(outputs, self._roots)):
                self._hand_over(0, outputs, {"policy": against})
                return
            self._open(outputs)
        elif self._acting.varies and (other := difference(outputs, self._acts)):
            self._hand_over(t, outputs, {"policy": other})
            return
        root.update(outputs)

    def step(self, t: int) -> None:
        """The environment steps; what ended is reset."""
        root = cast(Values, self._root)
        preset = {key: root[full] for full, key in self._presets} if self._presets else _NOTHING
        try:
            seen = self._seen(root) if self._arrays.may_be_unfit else root
            self._out = out = self._arrays.step(seen, preset)
        except UnfitOutcome as found:
            self._hand_over(t, self._written_now(), {"env": str(found)}, Taken(found.outcome))
            return
        if self._lacks_truncated:
            del out["truncated"]
        for key, value in preset.items():
            out.setdefault(key, value)
        self._following = self._continued = continued = {**root, **out}
        ended = out["done"]
        try:
            if not self._resets:
                pass
            elif self._batch:
                if np.count_nonzero(ended):  # far cheaper than any()
                    self._following = reset_rows(self._arrays, continued, self._no_flags, ended, self._seen(continued))
            elif ended:
                fresh = self._arrays.reset_from(self._seen(continued), None)
                self._following = {**continued, **fresh, **self._no_flags}
        except UnfitOutcome as found:
            outcome = as_tensordict(out, self._outcomes, torch.Size(self._batch), self._current_device)
            marked = torch.from_numpy(np.array(ended))
            self._hand_over(t, self._written_now(), {"env": str(found)}, Taken(outcome, marked, found.outcome))

    def record(self, t: int) -> None:
        """The frame goes into the batch's memory."""
        root, out = cast(Values, self._root), self._out
        for key, row in self._root_rows:
            row[t] = root[key]
        for key, row in self._out_rows:
            row[t] = out[key]
        if self._tracks_version:
            self._version_row[t] = self._acted
        if self._tracks_ids:
            self._ids_row[t] = self._ids
        if self._following is not self._continued:
            self._note_ends(t, np.asarray(out["done"]))
        self._root = self._following

    def _note_ends(self, t: int, ended: Rows) -> None:
        """After a step with which trajectories have ended: fresh ids, and their last observations kept."""
        if self._tracks_ids:
            self._replace_ids(ended)
        if self._keeper is not None:
            self._keep(t, ended, self._out)

    def _replace_ids(self, ended: Rows) -> None:
        self._ids = ids = self._ids.copy()
        ids[ended] = self._pool.take(int(np.count_nonzero(ended)))

    def _keep(self, t: int, ended: Rows, out: Values, first: int = 0) -> None:
        """Keep aside the next observations of step ``t`` where ``ended`` says; ``out`` begins with row ``first``."""
        keeper = cast(BoundaryKeeper, self._keeper)
        where = np.flatnonzero(ended)
        rows = {}
        for key in keeper.keys:
            entry = self._roots[key]
            value = np.asarray(out[key], entry.dtype).reshape(-1, *entry.shape[len(self._batch) :])
            rows[key] = torch.from_numpy(value[where])
        keeper.keep_rows(t, torch.from_numpy(where + first), rows)

    def _written_now(self) -> Values:
        """What the policy has written for the current step."""
        root = cast(Values, self._root)
        return {key: root[key] for key in self._acts}

    def _hand_over(self, t: int, outputs: Values, against: Mapping[str, str], taken: Taken | None = None) -> None:
        """Leave the batch at step ``t``, for which the policy has acted, to the plain path.

        Args:
            t: the step.
            outputs: of the policy.
            against: why the environment or the policy cannot run on arrays.
            taken: the step, where the environment has taken it.
        """
        self._check_action(self._written(outputs))
        frames = []
        if t:
            block = cast(BatchMemory, self._block)
            self._fill(block, slice(t))
            frames = [self._frame(block, step) for step in range(t)] if self._objects else block.frames(t)
        if taken is not None and taken.outcome is not None and self._current_device is None:
            taken.outcome.clear_device_()  # as that of each step on TensorDicts
        current = cast(TensorDictBase, self.current)
        current = write_outputs(current, self._written(outputs), {}, fresh=True)
        if self._tracks_version:
            current.set(VERSION, torch.full(self._batch, self._acted, device="cpu"))
        self._leave(frames, current, self._keeper, against, self._acting is self._random, taken)

    def _written(self, outputs: Values) -> TensorDictBase:
        written: TensorDictBase = TensorDict({}, batch_size=self._batch)
        ragged = {key: value for key, value in outputs.items() if isinstance(value, list)}
        if ragged:
            rows = [TensorDict({key: value[i] for key, value in ragged.items()}) for i in range(*self._batch)]
            written = LazyStackedTensorDict(*rows, stack_dim=0)
        for key, value in outputs.items():
            if key not in ragged:
                written.set(key, torch.from_numpy(value) if isinstance(value, np.ndarray) else value)
        return written

    def _check_values(self, root: Values) -> None:
        """Test that values can be written as what the environment announces.

        Raises:
            EnvError: fractions would be cut off, say.
        """
        for key, entry in self._roots.items():
            if entry.dtype == np.object_:
                continue
            found = np.asarray(root[key]).dtype
            if not np.can_cast(found, entry.dtype, "same_kind"):
                raise EnvError(
                    f"{self._env}: its array form announces {key!r} as {entry.dtype}, and its values are {found}. "
                    "Correct on_arrays of the transform that sets it."
                )

    # The memory of a batch ------------------------------------------------------------------------------

    def _open(self, outputs: Values) -> None:
        """Lay out the batch by what the policy wrote at its first step."""
        acts = {key: (value.shape, value.dtype) for key, value in outputs.items()}
        layout = self._layouts.get(self._acting)
        if layout is None or layout.acts != acts:
            self._check_action(self._written(outputs))
            self._check_values(cast(Values, self._root))
            layout = self._layouts[self._acting] = lay_out(
                acts,
                _without(self._roots, self._objects),
                _without(self._outcomes, self._objects),
                batch=self._batch,
                dropped=self._dropped,
                own=[*([IDS] if self._tracks_ids else []), *(VERSIONS if self._tracks_version else [])],
                blank=self._blanks if self._acting is self._random else {},
                done_follows=self._arrays.done_follows,
                roots_have_flags=not self._resets,
            )
        self._acts, self._presets = layout.acts, layout.presets
        old, fields = self._block, layout.fields
        if self._reuses and old is not None and old.fields == fields:
            block = old.reopened()
        else:
            to_move = self._device is not None and self._device.type != "cpu"
            device = None if to_move else self._device
            block = BatchMemory(fields, self._batch, self._steps, device, self._memory, pinned=to_move)
            block.nest(self._arrays.nests)
        self._block = block
        self._root_rows = [(key, _row(block, at, column)) for key, at, column in layout.roots]
        self._out_rows = [(key, _row(block, at, column)) for key, at, column in layout.outcomes]
        self._open_objects()
        self._blank = layout.blank
        for key in layout.blank:
            block.rows(key)[...] = 0
        if self._tracks_version:
            self._version_row = block.rows(VERSION)
        if self._tracks_ids:
            self._ids_row = block.rows(IDS)

    def _open_objects(self) -> None:
        """Lists for the entries that hold objects, which :meth:`record` writes as it does rows."""
        self._object_rows = {}
        for key in self._objects:
            for at, rows in ((key, self._root_rows), (below_next(key), self._out_rows)):
                self._object_rows[at] = row = [None] * self._steps
                rows.append((key, cast(Any, row)))

    def _with_objects(self, batch: TensorDictBase, steps: int) -> None:
        """Set the objects of the steps taken; a step that was not taken has those of the last one.

        The object below ``"next"`` is that of the next root, which gets a copy, as does the root of the next batch.
        """
        for key, row in self._object_rows.items():
            taken = row[:steps]
            values = taken[:-1] if as_tuple(key)[0] == "next" else [value.copy() for value in taken[:-1]]
            values += [taken[-1].copy() for _ in range(self._steps - steps + 1)]
            # Setting the name afterwards would go through all values.
            batch.set(key, NonTensorStack(*values, stack_dim=0, stack_dim_name=batch.names[-1]))

    def finish(self, steps: int) -> TensorDictBase:
        """Close the batch after ``steps`` steps; times that were not taken are zero, their ids -1."""
        block = cast(BatchMemory, self._block)
        self._fill(block, slice(steps))
        batch = block.finish(steps)
        self._with_objects(batch, steps)
        if not self._reuses:
            self._block, self._root_rows, self._out_rows, self._object_rows = None, [], [], {}
        if self._device is not None and batch.device != self._device:
            batch = batch.to(self._device, non_blocking=True)
        if self._acts_device is not None:
            for key in (*self._acts, *self._blank):
                if not is_private(key):
                    batch.set(key, batch.get(key).to(self._acts_device))
        if self._keeper is None:
            return batch
        self._keep(steps - 1, ~np.asarray(self._out["done"]), self._out)  # the batch ends here, so no root repeats them
        return self._keeper.finish(batch)

    def frame(self, t: int) -> TensorDictBase:
        """The frame ``[*env]`` of time ``t``, which was recorded last, as the batch will hold it."""
        block = cast(BatchMemory, self._block)
        self._fill(block, slice(t, t + 1))
        return self._frame(block, t)

    def _frame(self, block: BatchMemory, t: int) -> TensorDictBase:
        frame = block.frame(t)
        for key, row in self._object_rows.items():
            frame.set(key, row[t].copy())
        return frame

    def _fill(self, block: BatchMemory, times: slice) -> None:
        """Write what follows from the rows of the batch: ``done``, the roots' flags, versions."""
        if self._arrays.done_follows:
            done, terminated, truncated = (block.rows(("next", flag))[times] for flag in FLAGS)
            np.logical_or(terminated, truncated, out=done)
        for flag in self._arrays.root_flags if self._resets else ():
            block.rows(flag)[times] = False  # what ended was reset before the next step
        if self._tracks_version:
            block.rows(NEXT_VERSION)[times] = block.rows(VERSION)[times]


def _without(entries: Mapping[NestedKey, Entry], keys: list[NestedKey]) -> dict[NestedKey, Entry]:
    return {key: entry for key, entry in entries.items() if key not in keys}


def no_tensors(reason: NotNative) -> PolicyError:
    """The error of a policy that has written tensors, and writes something else."""
    return PolicyError(
        f"policy: {reason}, where it has written tensors before. Let it write tensors always, or pass "
        "use_buffers=False, which collects frames of any content."
    )


def reset_rows(
    arrays: ArrayEnv, root: Values, no_flags: Values, rows: Rows, seen: Values | None = None, **kwargs: Any
) -> Values:
    """``root`` with the first values of new trajectories where ``rows`` marks; ``seen`` of :meth:`ArrayPath._seen`."""
    fresh = arrays.reset_from(root if seen is None else seen, rows, **kwargs)
    if np.count_nonzero(rows) == rows.size:
        return {**root, **fresh, **no_flags}
    merged = {**root, **no_flags}
    marked: Any = np.flatnonzero(rows) if rows.ndim == 1 else rows
    if len(marked) == 1 and rows.ndim == 1:  # as a rule, and a row is cheaper than a list of rows
        marked = int(marked[0])
    for key, value in fresh.items():
        merged[key] = new = root[key].copy()
        new[marked] = value[marked]
    return merged


def _row(block: BatchMemory, at: NestedKey, column: bool) -> NDArray[Any]:
    rows = block.rows(at)
    return rows[..., 0] if column else rows
