"""TensorPath: an environment whose batch is in its tensors, on any device; the host reads nothing in a step."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from tensordict import TensorDict, TensorDictBase
from torch import Tensor

from rollwright._keys import NestedKey, as_tuple, is_private, key_str, leaf_keys, unravel
from rollwright.collectors.core import Actor, Path, UnfitOutputs
from rollwright.collectors.rollout.paths import stages
from rollwright.collectors.rollout.paths.actors import CastActor, as_tensor
from rollwright.collectors.rollout.paths.parts import PathParts, Taken
from rollwright.collectors.rollout.paths.recording import BatchMemory, FrameField, below_next, difference, unfit
from rollwright.collectors.rollout.paths.stages import IDS, VERSION, action_forms, entries_or_rows, write_outputs
from rollwright.data.entries import unchecked_td
from rollwright.envs.arrays import UnfitOutcome
from rollwright.envs.own_tensors import OwnTensors, Tensors
from rollwright.errors import NotNative, PolicyError

NEXT_VERSION = below_next(VERSION)


class Rows:
    """Rows of a batch that are written together.

    Args:
        block: the memory of the batch.
        time: its dimension of time.
        keys: of values, and of the entries that they are written into; those that the batch leaves out are passed over.
    """

    def __init__(self, block: BatchMemory, time: int, keys: Iterable[tuple[NestedKey, NestedKey]]) -> None:
        kept = [(key, block.memory[at]) for key, at in keys if at in block.memory]
        self._keys, self._memory = [key for key, _ in kept], [memory for _, memory in kept]
        self._time, self._first = time, 0
        self._rows: list[tuple[Tensor, ...]] = []  # of some times from ``_first`` on

    def write(self, t: int, values: Mapping[NestedKey, Tensor]) -> None:
        """Copy the values of time ``t``, in one call."""
        if self._keys:
            at = t - self._first
            if not 0 <= at < len(self._rows):
                self._see(t)
                at = 0
            torch._foreach_copy_(self._rows[at], [values[key] for key in self._keys])

    def _see(self, t: int) -> None:
        """Make views of the rows from time ``t`` on, of many at once: a third of the work of single ones."""
        stop = min(t + 64, self._memory[0].shape[self._time])
        views = [memory.narrow(self._time, t, stop - t).unbind(self._time) for memory in self._memory]
        self._first, self._rows = t, list(zip(*views, strict=True))


class TensorPath(Path):
    """Steps an environment on its tensors with a policy on tensors.

    The work of a step: the policy's calls, the environment's step, one copy of each entry into its row, and where
    something ended, one of each entry that the reset changes. What the environment returned is in the batch before the
    environment is called again, which may then write into the same memory.

    Of an environment that is reset by mask (:attr:`OwnTensors.by_mask`), nothing is read before the batch is finished:
    trajectory ids are taken there, from the flags of the batch.

    Args:
        parts: what it is made of.
        env: the environment's tensor form.
        policy: acts.
        random: acts at random.
        how: why this path was taken.
    """

    def __init__(
        self, parts: PathParts, env: OwnTensors, policy: Actor, random: Actor, *, how: Mapping[str, str]
    ) -> None:
        self.how = dict(how)
        options, self._env, self._tensors = parts.options, parts.env, env
        self._steps, self._device = parts.steps, parts.devices.storing
        self._has_no_device, self._leave = parts.devices.current_has_no_device, parts.hand_over
        self._pool, self._memory, self._version = parts.ids, parts.memory, parts.version
        self._batch, self._number = env.batch, env.batch.numel()
        self._check_action = stages.action_check(parts.env)
        self._resets, self._reuses = options.reset_when_done, options.return_same_td
        self._tracks_ids, self._tracks_version = options.track_traj_ids, options.track_policy_version
        self._late = env.by_mask and options.extend_buffer and self._resets  # ids are taken when the batch is finished
        self._policy, self._random = policy, CastActor(random)
        self._acting = policy
        self._like: TensorDictBase | None = None  # what the policy writes, in batches of random actions
        self._blanks: dict[NestedKey, tuple[torch.Size, torch.dtype]] = {}  # its entries that they have zeros for
        off = torch.zeros((*self._batch, 1), dtype=torch.bool, device=env.device)
        self._no_flags: Tensors = dict.fromkeys(env.root_flags, off)
        self._roots = {*env.entries, *env.flags, *env.root_flags}
        self._carried = [*env.entries, *env.flags, *([] if self._resets else env.root_flags)]  # from frame to frame
        self._tags: dict[NestedKey, Any] = {}  # what the root has besides: ids and version
        self._presets: dict[NestedKey, NestedKey] = {}  # what the policy writes below "next", and its key there
        self._root: Tensors | None = None
        self._live: set[NestedKey] = set()  # observations in memory that the environment writes again
        self._changed: set[NestedKey] = set()  # entries of the environment that the policy writes into
        self._given: Tensors = {}  # of the first step: the root before it was copied
        self._numbers: dict[NestedKey, int] = {}  # how often each was written before the policy's first call
        self._acted = -1  # the version that has acted last; -1: none has
        self._versions: list[int] = []
        self._version_of_batch: int | None = None  # where one version acts in all of it
        self._ids: NDArray[Any] = np.full(tuple(self._batch), -1)
        self._changes: list[tuple[int, NDArray[Any]]] = []  # of ids in this batch: from which time on
        self._block: BatchMemory | None = None
        self._acts: dict[NestedKey, tuple[Any, Any]] = {}
        self._ahead: Tensors | None = None  # outputs of the first step, where it was taken already
        self._out: Tensors = {}

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
        root: Tensors = dict(self._no_flags)
        for key in leaf_keys(current):
            value = current.get(key)
            if not isinstance(value, Tensor):
                raise NotNative(f"{key!r} of the current TensorDict is no tensor")
            if key == IDS:
                self.set_ids(value)
            elif key not in root or not self._resets:
                root[key] = value.detach().to(self._tensors.device, copy=True)
        if missing := [key for key in self._roots if key not in root]:
            raise NotNative(f"the current TensorDict has no {key_str(missing)}")
        self._root = root

    def _as_tensordict(self, root: Tensors) -> TensorDictBase:
        kept = {key: value.clone() for key, value in root.items() if as_tuple(key)[0] not in ("next", VERSION)}
        if self._tracks_ids:
            kept[IDS] = torch.from_numpy(self._ids.copy()).to(self._tensors.device)
        td = self._tensors.tensordict(kept)
        return td.clear_device_() if self._has_no_device else td

    def _seen(self, root: Tensors) -> TensorDict:
        """What the environment is given: the root, trajectory ids and the version, where they are known."""
        return self._tensors.tensordict({**root, **self._tags})

    def _tag(self, version: int) -> None:
        """Note the version that acts, and what the next frames are tagged with."""
        if version != self._acted:
            self._acted = version
            self._tags[VERSION] = torch.full(self._batch, version, device=self._tensors.device)

    def _set_ids(self, ids: NDArray[Any]) -> None:
        self._ids = ids
        if self._tracks_ids and not self._late:
            nest = {"traj_ids": torch.from_numpy(ids).to(self._tensors.device)}
            self._tags["collector"] = unchecked_td(nest, self._batch, device=self._tensors.td_device, nested=False)

    def _marked(self, root: Tensors, marks: Tensor) -> TensorDictBase:
        """What a reset is given."""
        seen = root if self._presets == {} else {key: root[key] for key in root if as_tuple(key)[0] != "next"}
        return self._tensors.tensordict({**seen, **self._tags, "_reset": marks})

    def reset(self, **kwargs: Any) -> None:
        """Reset all environments; trajectory ids are to be set next."""
        self._root = {**self._no_flags, **self._tensors.reset(None, **kwargs)}

    def reset_some(self, marked: Tensor, **kwargs: Any) -> None:
        """Reset where ``marked``, bool ``[*env]``, says; the other environments go on."""
        if bool(marked.any()):
            marks = marked.reshape((*self._batch, 1)).to(self._tensors.device)
            root = cast(Tensors, self._root)
            self._put_reset(root, self._tensors.reset(self._marked(root, marks), **kwargs), marks)
            if not self._resets:
                root.update((flag, root[flag] & ~marks) for flag in self._no_flags)

    def _put_reset(self, root: Tensors, fresh: Tensors, marks: Tensor) -> None:
        """Put the first values of new trajectories into ``root``, where ``marks`` says."""
        masks: dict[int, Tensor] = {}
        for key, value in fresh.items():
            old = root[key]
            if value is not old:
                mask = masks.get(value.ndim)
                if mask is None:
                    mask = masks[value.ndim] = marks.reshape((*self._batch, *[1] * (value.ndim - len(self._batch))))
                root[key] = torch.where(mask, value, old)

    def set_ids(self, ids: Tensor) -> None:
        """Give each environment the id, int64 ``[*env]``, of the trajectory that it is in."""
        self._set_ids(ids.reshape(tuple(self._batch)).cpu().numpy().copy())

    def replace_ids(self, ended: Tensor) -> None:
        """Give fresh ids where ``ended``, bool ``[*env]``, says."""
        where = ended.cpu().numpy().reshape(-1).nonzero()[0]
        ids = self._ids.copy()
        ids.reshape(-1)[where] = self._pool.take(len(where))
        self._set_ids(ids)

    def compile(self, arguments: Mapping[str, Any]) -> None:
        """Make the policy cheaper, and warm it up on the current TensorDict."""
        self._policy = self._policy.compiled(arguments, cast(Tensors, self._root))
        self.how["policy"] = self._policy.how

    def check(self) -> None:
        """Test that the environment is what the path was chosen for."""
        self._tensors.check()

    # A rollout ----------------------------------------------------------------------------------------

    def conform(self, outputs: TensorDictBase | None) -> None:
        """Give batches of random actions the entries that the policy writes, zero where no action is."""
        if outputs is self._like:
            return
        written = {} if outputs is None else {key: as_tensor(value) for key, value in entries_or_rows(outputs)}
        if against := unfit(written, self._roots, Tensor):
            raise UnfitOutputs(against)
        forms = {key: (value.shape, value.dtype) for key, value in written.items()}
        self._random.forms = {key: forms[key] for key in action_forms(self._env, outputs)}
        drawn = set(self._env.action_keys)
        self._blanks = {key: form for key, form in forms.items() if key not in drawn and as_tuple(key)[0] != "next"}
        self._like = outputs

    def begin(self, *, random: bool) -> None:
        """Open a batch, with random actions or with the policy's."""
        before, self._acting = self._acting, self._random if random else self._policy
        self.check()
        self._acting.start(self._steps)
        self.finite_keys = [key for key in self._acting.finite_keys if not is_private(key)]
        self._changes, self._versions = [(0, self._ids)], []
        self._version_of_batch = self._version() if self._acting.frozen else None
        self._given = dict(cast(Tensors, self._root))  # may be the environment's memory, which it is going to write
        self._root = root = {key: value.clone() if key in self._roots else value for key, value in self._given.items()}
        self._numbers, self._changed = {key: root[key]._version for key in self._roots}, set()
        self._ahead = self._tried() if self._acting is not before or not self._acts else None
        self.how["policy"] = self._policy.how  # a first call may have shown it

    def _tried(self) -> Tensors:
        """The outputs of the first step that a policy takes, which may show that it must take the plain path.

        Raises:
            NotNative: it must, and random numbers are as before.
        """
        device = self._tensors.device
        numbers = torch.get_rng_state(), torch.cuda.get_rng_state(device) if device.type == "cuda" else None
        try:
            return self._outputs()
        except NotNative as reason:
            torch.set_rng_state(numbers[0])
            if numbers[1] is not None:
                torch.cuda.set_rng_state(numbers[1], device)
            raise UnfitOutputs(str(reason)) from reason

    def _outputs(self) -> Tensors:
        """What the policy writes; where it writes into what it is given, too, that is not the environment's memory."""
        root = cast(Tensors, self._root)
        for key in self._changed:
            root[key] = root[key].clone()
        return self._acting(root, self._ids)

    def act(self, t: int) -> None:
        """The policy reads observations and writes actions."""
        root = cast(Tensors, self._root)
        if self._tracks_version:  # the version that acts, whatever is published before the frame is written
            self._tag(self._version() if self._version_of_batch is None else self._version_of_batch)
            self._versions.append(self._acted)
        outputs, self._ahead = self._called() if self._ahead is None else self._ahead, None
        if t == 0:
            self._changed = {key for key, number in self._numbers.items() if root[key]._version != number}
            if against := unfit(outputs, self._roots, Tensor):
                self._hand_over(0, outputs, {"policy": against})
                return
            self._check_action(self._tensors.tensordict(outputs))
            self._acts = {key: (value.shape, value.dtype) for key, value in outputs.items()}
            self._presets = {key: unravel(as_tuple(key)[1:]) for key in outputs if as_tuple(key)[0] == "next"}
        elif self._acting.varies and (other := difference(outputs, self._acts, Tensor)):
            self._hand_over(t, outputs, {"policy": other})
            return
        root.update(outputs)

    def _called(self) -> Tensors:
        try:
            return self._outputs()
        except NotNative as reason:
            raise PolicyError(
                f"policy: {reason}, where it has written tensors before. Let it write tensors always, or pass "
                "use_buffers=False, which collects frames of any content."
            ) from reason

    def step(self, t: int) -> None:
        """The environment steps; what ended is reset."""
        root = cast(Tensors, self._root)
        try:
            self._out = out = self._tensors.step(self._seen(root))
        except UnfitOutcome as found:
            self._hand_over(t, self._written_now(), {"env": str(found)}, Taken(found.outcome))
            return
        for full, key in self._presets.items():
            out.setdefault(key, root[full])
        before = self._given or root
        for key in self._tensors.entries:
            value = out[key]
            if key in self._live or value.data_ptr() == before[key].data_ptr():  # the policy may have kept what it saw
                self._live.add(key)
                out[key] = value.clone()
        self._given = {}

    def record(self, t: int) -> None:
        """The frame goes into the batch's memory."""
        root = cast(Tensors, self._root)
        if t == 0:
            self._open()
            self._root_rows.write(0, root)
        self._act_rows.write(t, root)
        self._out_rows.write(t, self._out)

    def follow(self, t: int) -> None:
        """After step ``t`` was recorded: reset what ended, where :meth:`step` has not done it."""
        root, out = cast(Tensors, self._root), self._out
        for key in self._carried:
            root[key] = out[key]
        if self._resets:
            ended = out["done"]
            if self._tensors.by_mask or bool(ended.any()):
                try:
                    seen = {**root, **{flag: out[flag] for flag in self._no_flags}}
                    fresh = self._tensors.reset(self._marked(seen, ended.clone()), after_step=True)
                except UnfitOutcome as found:
                    self._leave_after(t, ended, found)
                    return
                self._put_reset(root, fresh, ended)
                self._note_ends(t, ended)
        if t + 1 < self._steps:
            self._root_rows.write(t + 1, root)

    def _note_ends(self, t: int, ended: Tensor) -> None:
        if self._tracks_ids and not self._late:
            self.replace_ids(ended)
            self._changes.append((t + 1, self._ids))

    # The plain path goes on --------------------------------------------------------------------------

    def _written_now(self) -> Tensors:
        """What the policy has written for the current step."""
        root = cast(Tensors, self._root)
        return {key: root[key] for key in self._acts}

    def _frames(self, steps: int) -> list[TensorDictBase]:
        if not steps:
            return []
        self._fill(0, steps)
        return cast(BatchMemory, self._block).frames(steps)

    def _hand_over(self, t: int, outputs: Tensors, against: Mapping[str, str], taken: Taken | None = None) -> None:
        """Leave the batch at step ``t``, for which the policy has acted, to the plain path; see :class:`ArrayPath`."""
        written = self._tensors.tensordict(outputs)
        self._check_action(written)
        frames = self._frames(t)
        if t:  # the environment may have written into its memory
            root, memory = cast(Tensors, self._root), cast(BatchMemory, self._block).memory
            root.update((key, memory[key].select(len(self._batch), t)) for key in self._carried if key in memory)
        if taken is not None and taken.outcome is not None and self._has_no_device:
            taken.outcome.clear_device_()  # as that of each step on TensorDicts
        current = write_outputs(cast(TensorDictBase, self.current), written, {}, fresh=True)
        if self._tracks_version:
            current.set(VERSION, torch.full(self._batch, self._acted, device="cpu"))
        self._leave(frames, current, None, against, self._acting is self._random, taken)

    def _leave_after(self, t: int, ended: Tensor, found: UnfitOutcome) -> None:
        """Leave the batch after step ``t``, whose reset has returned what does not fit, to the plain path."""
        frames, random = self._frames(t + 1), self._acting is self._random
        taken = Taken(None)
        if bool(ended.any()):  # else a reset by mask, of nothing
            if self._tracks_ids and not self._late:
                self.replace_ids(ended)
            taken = Taken(None, ended.reshape(tuple(self._batch)), found.outcome)
        self._leave(frames, cast(TensorDictBase, self.current), None, {"env": str(found)}, random, taken)

    # The memory of a batch ------------------------------------------------------------------------------

    def _open(self) -> None:
        """Lay out the batch by its first frame."""
        env, device = self._tensors, self._tensors.device
        of_root = {key: cast(Tensors, self._root)[key] for key in self._roots}
        acts = {key: value for key, value in self._written_now().items() if as_tuple(key)[0] != "next"}
        blanks = self._blanks if self._acting is self._random else {}
        fields = {
            key: FrameField(tuple(value.shape), value.dtype, device) for key, value in {**of_root, **acts}.items()
        }
        for key, value in self._out.items():
            fields[below_next(key)] = FrameField(tuple(value.shape), value.dtype, device)
        fields.update({key: FrameField(tuple(shape), dtype, device) for key, (shape, dtype) in blanks.items()})
        own = [*([IDS] if self._tracks_ids else []), *([VERSION, NEXT_VERSION] if self._tracks_version else [])]
        fields.update({key: FrameField(tuple(self._batch), torch.int64, device) for key in own})
        fields = {key: field for key, field in fields.items() if not is_private(key)}
        old = self._block
        if self._reuses and old is not None and old.fields == fields:
            block = old.reopened()
        else:
            moves = self._device is not None and self._device != device
            block = BatchMemory(fields, tuple(self._batch), self._steps, None if moves else self._device, self._memory)
            block.nest({str(key): tuple(size[len(self._batch) :]) for key, size in env.nests.items()})
        self._block, memory, time = block, block.memory, len(self._batch)
        flags = set(self._no_flags) if self._resets else set()  # are False: what ended was reset
        fixed = [key for key in of_root if key not in flags and key not in self._changed]
        written = [(key, key) for key in [*acts, *self._changed]]
        self._root_rows = Rows(block, time, zip(fixed, fixed, strict=True))
        self._act_rows = Rows(block, time, written)
        self._out_rows = Rows(block, time, [(key, below_next(key)) for key in self._out])
        for key in [*flags, *blanks]:
            if key in memory:
                memory[key].zero_()

    def finish(self, steps: int) -> TensorDictBase:
        """Close the batch after ``steps`` steps; times that were not taken are zero, their ids -1."""
        block = cast(BatchMemory, self._block)
        self._fill(0, steps)
        batch = block.finish(steps)
        self._tensors.check_batch()
        if not self._reuses:
            self._block = None
        del self._root_rows, self._act_rows, self._out_rows  # views, which would keep the memory of the batch borrowed
        if self._device is not None and batch.device != self._device:
            batch = batch.to(self._device, non_blocking=True)
        return batch

    def frame(self, t: int) -> TensorDictBase:
        """The frame ``[*env]`` of time ``t``, which was recorded last, as the batch will hold it."""
        self._fill(t, t + 1)
        return cast(BatchMemory, self._block).frame(t)

    def _fill(self, begin: int, stop: int) -> None:
        """Write trajectory ids and versions of the steps from ``begin`` to ``stop``."""
        memory, time = cast(BatchMemory, self._block).memory, len(self._batch)
        if self._tracks_version:
            versions = torch.tensor(self._versions[begin:stop], device="cpu").to(self._tensors.device)
            for key in (VERSION, NEXT_VERSION):
                memory[key].narrow(time, begin, stop - begin).copy_(versions)
        if not self._tracks_ids:
            return
        rows = memory[IDS].movedim(time, 0)
        if self._late:
            self._take_ids(rows[:stop], memory[("next", "done")].movedim(time, 0)[:stop])
            return
        stops = [first for first, _ in self._changes[1:]] + [stop]
        for (first, ids), last in zip(self._changes, stops, strict=True):
            if max(first, begin) < min(last, stop):
                rows[max(first, begin) : min(last, stop)].copy_(torch.from_numpy(ids))

    def _take_ids(self, rows: Tensor, ended: Tensor) -> None:
        """Write the trajectory ids of the batch into ``rows``, by its flags; both are ``[T, *env]``.

        The k-th end of the batch, in the order of steps and then of environments, begins the trajectory with the k-th
        of the ids that are taken here. Those of the next step are noted.
        """
        flat, ended = rows.view(len(rows), self._number), ended.view(len(rows), self._number)
        flat.copy_(torch.from_numpy(self._ids.reshape(-1)))
        where = ended.any(0).nonzero().squeeze(1)  # in which something has ended: often few of many
        if not len(where):
            return
        marks = ended[:, where]
        ends = marks.flatten().cumsum(0)
        latest = torch.where(marks, ends.view(marks.shape), 0).cummax(0).values  # number of the last end; 0: none
        taken = torch.from_numpy(np.append(-1, self._pool.take(int(ends[-1])))).to(rows.device)
        following = torch.where(latest > 0, taken[latest], flat[0, where])
        flat[1:, where] = following[:-1]
        self._ids = self._ids.copy()
        self._ids.reshape(-1)[where.cpu().numpy()] = following[-1].cpu().numpy()
