"""ArrayPath: an environment and a policy on NumPy arrays, rows written straight into the batch's memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from numpy.typing import NDArray
from tensordict import TensorDict, TensorDictBase

from rollwright._keys import NestedKey, as_tuple, is_private, leaf_keys, unravel
from rollwright.collectors import _plan
from rollwright.collectors._path import Path
from rollwright.collectors.flat import FlatPolicy, compile_flat
from rollwright.collectors.options import CollectorOptions
from rollwright.collectors.recording import Block, Field
from rollwright.collectors.trajectories import TrajectoryPool, ids_after
from rollwright.data.compact import BoundaryKeeper
from rollwright.data.memory import MemoryPool
from rollwright.envs.arrays import FLAGS, ArrayEnv, Entry, Rows, Values
from rollwright.envs.base import EnvBase
from rollwright.errors import NotNative, PolicyError

__all__ = ["ArrayPath"]

IDS, VERSION = ("collector", "traj_ids"), "policy_version"
_FLAG = np.dtype(np.bool_)


def _below_next(key: NestedKey) -> NestedKey:
    return unravel(("next", *as_tuple(key)))


def _field(shape: Sequence[int], dtype: np.dtype[Any]) -> Field:
    return Field(tuple(shape), torch.from_numpy(np.empty(0, dtype)).dtype, torch.device("cpu"))


Reads = list[tuple[NestedKey, tuple[int, ...] | None]]


class Actor(NamedTuple):
    """A flat policy, and the entries that it reads, each with the shape of its tensor if it is in row form."""

    policy: FlatPolicy
    reads: Reads


class Layout(NamedTuple):
    """What a batch holds, settled with its first step.

    Attributes:
        acts: the policy's outputs: key, shape and dtype.
        presets: those below ``"next"``: key, and key inside ``"next"``.
        fields: the entries of a frame.
        roots: what is written from the carrier at each step: key, place in the frame, whether a column.
        outcomes: what is written from the outcome at each step, likewise.
    """

    acts: list[tuple[NestedKey, tuple[int, ...], np.dtype[Any]]]
    presets: list[tuple[NestedKey, NestedKey]]
    fields: dict[NestedKey, Field]
    roots: list[tuple[NestedKey, NestedKey, bool]]
    outcomes: list[tuple[NestedKey, NestedKey, bool]]


class ArrayPath(Path):
    """Steps an environment on arrays with a policy on arrays.

    The work of a step: the policy's calls, the environment's step, one write into each row. Trajectory ids, ``done``
    and the flags of roots follow from the rows of a batch, and are filled in at its end.

    Args:
        env: the environment.
        arrays: its array form.
        policy: the policy.
        random: random actions.
        options: of the collector.
        device: where batches are delivered.
        carrier_device: that of the carrier.
        steps: T.
        pool: hands out trajectory ids.
        memory: lends the memory of batches.
        version: tells the version of the weights that act.
        how: why this path was taken.
    """

    def __init__(
        self,
        env: EnvBase,
        arrays: ArrayEnv,
        policy: FlatPolicy,
        random: FlatPolicy,
        *,
        options: CollectorOptions,
        device: torch.device | None,
        carrier_device: torch.device | None,
        steps: int,
        pool: TrajectoryPool,
        memory: MemoryPool,
        version: Callable[[], int],
        how: dict[str, str],
    ) -> None:
        self.how = dict(how)
        self._env, self._arrays, self._steps, self._device = env, arrays, steps, device
        self._carrier_device = carrier_device
        self._pool, self._memory, self._version = pool, memory, version
        self._batch = arrays.batch
        self._check_action = _plan.action_check(env)
        flag = Entry((*self._batch, 1), _FLAG, True)
        flags: dict[NestedKey, Entry] = dict.fromkeys(cast("tuple[NestedKey, ...]", FLAGS), flag)
        self._roots = {**arrays.entries, **flags}
        self._policy, self._random = self._actor(policy), self._actor(random)
        self._acting = self._policy
        self._tracks_ids, self._tracks_version = options.track_traj_ids, options.track_policy_version
        self._reuses = options.return_same_td
        repeated = set(_plan.next_keys(env)) if options.compact_obs else set()
        self._outcomes = {**arrays.entries, **arrays.rewards, **flags}
        self._dropped = {_below_next(key) for key in repeated}
        self._keeper = BoundaryKeeper(repeated, env.batch_size, device) if options.compact_obs else None
        off: Any = np.zeros(self._batch, np.bool_) if self._batch else False
        self._no_flags: Values = dict.fromkeys(FLAGS, off)
        self._root: Values | None = None
        self._ids: NDArray[Any] = np.full(self._batch, -1)
        self._block: Block | None = None
        self._layouts: dict[FlatPolicy, Layout] = {}
        self._ahead: Sequence[NDArray[Any]] | None = None  # outputs of the first step, where it was taken already

    def _actor(self, policy: FlatPolicy) -> Actor:
        reads = [(key, self._roots[key]) for key in policy.in_keys]
        return Actor(policy, [(key, entry.shape if entry.column else None) for key, entry in reads])

    # The carrier ------------------------------------------------------------------------------

    @property
    def started(self) -> bool:
        """See :attr:`Path.started`."""
        return self._root is not None

    @property
    def carrier(self) -> TensorDictBase | None:
        """See :attr:`Path.carrier`."""
        root = self._root
        if root is None:
            return None
        carrier = TensorDict({}, batch_size=self._batch, device=self._carrier_device)
        for key, value in root.items():
            if key == VERSION or as_tuple(key)[0] == "next" or key in self._arrays.rewards:
                continue  # of the last step, not of the next one
            entry = self._roots.get(key)
            array = np.array(value) if entry is None else np.array(value, entry.dtype).reshape(entry.shape)
            carrier.set(key, torch.from_numpy(array))
        if self._tracks_ids:
            carrier.set(IDS, torch.from_numpy(np.array(self._ids)))
        return carrier

    @carrier.setter
    def carrier(self, carrier: TensorDictBase | None) -> None:
        if carrier is None:
            self._root = None
            return
        root: Values = dict(self._no_flags)
        for key in leaf_keys(carrier):
            value = np.array(carrier.get(key).detach().cpu().numpy())
            if key == IDS:
                self._ids = value
            elif key not in FLAGS:
                entry = self._roots.get(key)
                root[key] = value.reshape(self._batch)[()] if entry is not None and entry.column else value
        self._root = root

    def reset(self, **kwargs: Any) -> None:
        """See :meth:`Path.reset`."""
        self._root = {**self._arrays.reset(None, **kwargs), **self._no_flags}

    def reset_some(self, marked: torch.Tensor, **kwargs: Any) -> None:
        """See :meth:`Path.reset_some`."""
        if bool(marked.any()):
            self._root = self._anew(cast(Values, self._root), marked.numpy(), **kwargs)

    def set_ids(self, ids: torch.Tensor) -> None:
        """See :meth:`Path.set_ids`."""
        self._ids = ids.reshape(self._batch).numpy().copy()

    def renew_ids(self, ended: torch.Tensor) -> None:
        """See :meth:`Path.renew_ids`."""
        self._ids = ids_after(self._ids, ended.reshape(1, *self._batch).numpy(), self._pool)[-1]

    def compile(self, arguments: Mapping[str, Any]) -> None:
        """See :meth:`Path.compile`."""
        policy, reads = self._policy
        example = dict(zip(policy.in_keys, self._inputs(cast(Values, self._root), reads), strict=True))
        compiled = compile_flat(policy, arguments=arguments, example=example)
        self._policy = self._acting = self._actor(compiled)
        self.how["policy"] = compiled.how

    def check(self) -> None:
        """See :meth:`Path.check`."""
        self._arrays.check()

    # A rollout ----------------------------------------------------------------------------------------

    def begin(self, *, random: bool) -> None:
        """See :meth:`Path.begin`."""
        self._acting = self._random if random else self._policy
        self.check()
        policy, reads = self._acting
        policy.start(self._steps)
        self.finite_keys = [key for key in policy.finite_keys if not is_private(key)]
        self._ahead = None if policy in self._layouts else self._tried(policy, reads)
        if self._keeper is not None:
            self._keeper.begin()

    def _tried(self, policy: FlatPolicy, reads: Reads) -> Sequence[NDArray[Any]]:
        """The outputs of the first step that a policy takes, which may show that it must take the plain path.

        Raises:
            NotNative: it must, and random numbers are as before.
        """
        numbers = torch.get_rng_state()
        try:
            return policy(*self._inputs(cast(Values, self._root), reads))
        except NotNative:
            torch.set_rng_state(numbers)
            raise

    def act(self, t: int) -> None:
        """See :meth:`Path.act`."""
        root = cast(Values, self._root)
        policy, reads = self._acting
        if t or self._ahead is None:
            outputs = policy(*self._inputs(root, reads))
        else:
            outputs, self._ahead = self._ahead, None
        if t == 0:
            self._open(outputs)
        for (key, shape, dtype), value in zip(self._acts, outputs, strict=True):
            if value.shape != shape or value.dtype != dtype:
                raise _other_shape(key, value, shape, dtype, t)
            root[key] = value

    def _inputs(self, root: Values, reads: Reads) -> list[NDArray[Any]]:
        return [
            root[key] if shape is None else np.array(root[key], self._roots[key].dtype).reshape(shape)
            for key, shape in reads
        ]

    def step(self, t: int) -> None:
        """See :meth:`Path.step`."""
        root = cast(Values, self._root)
        preset = {key: root[full] for full, key in self._presets}
        self._out = out = self._arrays.step(root, preset)
        for key, value in preset.items():
            out.setdefault(key, value)
        self._following = following = {**root, **out}
        ended = out["done"]
        if self._batch:
            if ended.any():
                self._following = self._anew(following, ended)
        elif ended:
            self._following = {**following, **self._arrays.reset(None), **self._no_flags}

    def _anew(self, root: Values, rows: Rows, **kwargs: Any) -> Values:
        """``root`` with the first values of new trajectories where ``rows`` marks."""
        if rows.all():
            return {**root, **self._arrays.reset(rows, **kwargs), **self._no_flags}
        fresh = self._arrays.reset(rows, **kwargs)
        merged = {**root, **self._no_flags}
        for key, value in fresh.items():
            merged[key] = new = root[key].copy()
            new[rows] = value[rows]
        return merged

    def record(self, t: int) -> None:
        """See :meth:`Path.record`."""
        root, out = cast(Values, self._root), self._out
        for key, row in self._root_rows:
            row[t] = root[key]
        for key, row in self._out_rows:
            row[t] = out[key]
        if self._keeper is not None:
            ended = np.asarray(out["done"])
            if ended.any():
                self._keep(t, ended)
        if self._tracks_version:
            self._version_row[t] = self._version()
        self._root = self._following

    def _keep(self, t: int, ended: Rows) -> None:
        """Keep aside the next observations of step ``t`` where ``ended`` says."""
        keeper = cast(BoundaryKeeper, self._keeper)
        where = np.flatnonzero(ended)
        rows = {}
        for key in keeper.keys:
            entry = self._roots[key]
            value = np.asarray(self._out[key], entry.dtype).reshape(-1, *entry.shape[len(self._batch) :])
            rows[key] = torch.from_numpy(value[where])
        keeper.keep_rows(t, torch.from_numpy(where), rows)

    # The memory of a batch ------------------------------------------------------------------------------

    def _open(self, outputs: Sequence[NDArray[Any]]) -> None:
        """Lay out the batch by what the policy wrote at its first step."""
        acts = [
            (key, value.shape, value.dtype) for key, value in zip(self._acting.policy.out_keys, outputs, strict=True)
        ]
        layout = self._layouts.get(self._acting.policy)
        if layout is None or layout.acts != acts:
            written = TensorDict({}, batch_size=self._batch)
            for (key, _, _), value in zip(acts, outputs, strict=True):
                written.set(key, torch.from_numpy(value))
            self._check_action(written)
            layout = self._layouts[self._acting.policy] = self._lay_out(acts)
        self._acts, self._presets = layout.acts, layout.presets
        old, fields = self._block, layout.fields
        if self._reuses and old is not None and old.fields == fields:
            block = old.reopened()
        else:
            to_move = self._device is not None and self._device.type != "cpu"
            device = None if to_move else self._device
            block = Block(fields, self._batch, self._steps, device, self._memory, pinned=to_move)
        self._block = block
        self._root_rows = [(key, _row(block, at, column)) for key, at, column in layout.roots]
        self._out_rows = [(key, _row(block, at, column)) for key, at, column in layout.outcomes]
        if self._tracks_version:
            self._version_row = block.rows(VERSION)

    def _lay_out(self, acts: list[tuple[NestedKey, tuple[int, ...], np.dtype[Any]]]) -> Layout:
        fields: dict[NestedKey, Field] = {}
        layout = Layout(acts, [], fields, [], [])
        for key, entry in self._roots.items():
            fields[key] = _field(entry.shape, entry.dtype)
            if key not in FLAGS:
                layout.roots.append((key, key, entry.column))
        for key, entry in self._outcomes.items():
            fields[_below_next(key)] = _field(entry.shape, entry.dtype)
            if key != "done":
                layout.outcomes.append((key, _below_next(key), entry.column))
        for key, shape, dtype in acts:
            if as_tuple(key)[0] == "next":
                layout.presets.append((key, unravel(as_tuple(key)[1:])))
            elif not is_private(key):
                fields[key] = _field(shape, dtype)
                layout.roots.append((key, key, False))
        if self._tracks_ids:
            fields[IDS] = _field(self._batch, np.dtype(np.int64))
        if self._tracks_version:
            fields[VERSION] = fields[_below_next(VERSION)] = _field(self._batch, np.dtype(np.int64))
        for key in [key for key in fields if key in self._dropped or is_private(key)]:
            del fields[key]
        kept = [[row for row in rows if row[1] in fields] for rows in (layout.roots, layout.outcomes)]
        return layout._replace(roots=kept[0], outcomes=kept[1])

    def finish(self, steps: int) -> TensorDictBase:
        """See :meth:`Path.finish`."""
        block = cast(Block, self._block)
        self._fill(block, steps)
        batch = block.finish(steps)
        if not self._reuses:
            self._block, self._root_rows, self._out_rows = None, [], []
        if self._device is not None and batch.device != self._device:
            batch = batch.to(self._device, non_blocking=True)
        if self._keeper is None:
            return batch
        self._keep(steps - 1, ~np.asarray(self._out["done"]))  # the batch ends here, so no root repeats them
        return self._keeper.finish(batch)

    def _fill(self, block: Block, steps: int) -> None:
        """Write what follows from the rows of the batch: ``done``, the roots' flags, ids."""
        done, terminated, truncated = (block.rows(("next", flag))[:steps] for flag in FLAGS)
        np.logical_or(terminated, truncated, out=done)
        for flag in FLAGS:
            block.rows(flag)[:steps] = False  # what ended has begun anew before the next step
        if self._tracks_ids:
            ids = ids_after(self._ids, done.reshape(steps, *self._batch), self._pool)
            block.rows(IDS)[:steps] = ids[:-1]
            self._ids = ids[-1]
        if self._tracks_version:
            block.rows(_below_next(VERSION))[:steps] = block.rows(VERSION)[:steps]


def _row(block: Block, at: NestedKey, column: bool) -> NDArray[Any]:
    rows = block.rows(at)
    return rows[..., 0] if column else rows


def _other_shape(
    key: NestedKey, value: NDArray[Any], shape: tuple[int, ...], dtype: np.dtype[Any], t: int
) -> PolicyError:
    return PolicyError(
        f"policy: it wrote {key!r} with shape {list(value.shape)} and dtype {value.dtype} at step {t} of a batch, "
        f"after {list(shape)} and {dtype} at its first. Pass use_buffers=False, which collects frames of any shape."
    )
