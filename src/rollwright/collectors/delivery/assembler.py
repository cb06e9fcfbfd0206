"""TrajectoryAssembler: takes batches of frames, gives complete trajectories or groups, in the order of their ends."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from numpy.typing import NDArray
from tensordict import TensorDictBase

from rollwright.collectors.core import DataCursor
from rollwright.collectors.delivery.rows import HeldBatch, RowRange, concatenate, copied
from rollwright.collectors.rollout.paths.conversations.pool import is_pool_of_conversations
from rollwright.collectors.rollout.paths.stages import IDS
from rollwright.data.llm.records import origins_in
from rollwright.data.llm.turns import Origin
from rollwright.envs.base import EnvBase
from rollwright.envs.batched.async_pool import AsyncEnvPool
from rollwright.envs.llm.core import PromptSource

_NONE = -1
_Name = tuple[int, int]  # of a group: its number, and the repeat of one that is alone


class Trajectory(NamedTuple):
    """A complete trajectory: its frames are the rows of its pieces, in order.

    Attributes:
        pieces: views of the batches that it spans.
        length: number of frames.
        id: of the trajectory.
    """

    pieces: list[RowRange]
    length: int
    id: int


class TrajectoryAssembler:
    """Holds the trajectories that are in progress, as views of the batches that they came in, until they end.

    Nothing is copied, with one exception: a batch of which less than a quarter is still in progress is given back, and
    that part of it kept, so that one long trajectory among many short ones does not keep all of their memory.
    The work of a batch grows with the trajectories that end in it, not with its frames.

    Args:
        num_envs: number of environments that step together.

    Example:
        >>> from tensordict import TensorDict
        >>> batch = TensorDict({"x": torch.arange(5), "collector": {"traj_ids": torch.tensor([0, 0, 1, 1, 1])}}, [5])
        >>> assembler = TrajectoryAssembler(1)
        >>> assembler.take(batch, 5, torch.tensor([False, True, False, False, False]))
        >>> [found] = assembler.pop(1)
        >>> concatenate(found.pieces)["x"], assembler.frames_held
        (tensor([0, 1]), 3)
    """

    def __init__(self, num_envs: int) -> None:
        self._num_envs = num_envs
        self.frames_dropped = 0
        self._spoiled_below = 0  # trajectories with lower ids have begun unseen,
        self._spoiled: set[int] = set()  # and those with these
        self._rollouts: dict[int, HeldBatch] = {}
        self._clear()

    def _clear(self) -> None:
        self._complete: deque[Trajectory] = deque()
        self._rollouts.clear()
        self._serial = self._oldest = self._clock = 0
        # Of the trajectory in progress in each environment: the batch it began in (or none), when there, its id, and
        # the clock then, which counts the steps of an environment.
        self._since = np.full(self._num_envs, _NONE, np.int64)
        self._offset = np.zeros(self._num_envs, np.int64)
        self._id = np.full(self._num_envs, _NONE, np.int64)
        self._begun = np.zeros(self._num_envs, np.int64)

    # What is held -----------------------------------------------------------------------------

    @property
    def num_complete(self) -> int:
        """Trajectories that are complete and wait to be delivered."""
        return len(self._complete)

    def _completed(self, found: Trajectory) -> None:
        """A trajectory has ended."""
        self._complete.append(found)

    def _all_complete(self) -> list[Trajectory]:
        """All that ended and were not delivered."""
        return list(self._complete.copy())

    def first_frames(self) -> Iterator[tuple[int, TensorDictBase]]:
        """Ids of all that ended and were not delivered, each with its first frame ``[1]``."""
        for found in self._all_complete():
            piece = found.pieces[0]
            yield found.id, piece.frames.rows(piece.start, piece.start + 1)

    @property
    def frames_held(self) -> int:
        """Frames of trajectories that are in progress, or wait to be delivered."""
        in_progress = self._since != _NONE
        return int((self._clock - self._begun)[in_progress].sum()) + sum(found.length for found in self._all_complete())

    @property
    def num_bytes(self) -> int:
        """Memory that is kept alive."""
        sources = {id(piece.frames): piece.frames for found in self._all_complete() for piece in found.pieces}
        sources.update((id(frames), frames) for frames in list(self._rollouts.values()))
        return sum(frames.num_bytes for frames in sources.values())

    def drop(self) -> None:
        """Forget all that is held; :attr:`frames_dropped` counts it."""
        self.frames_dropped += self.frames_held
        self._clear()

    def miss(self, next_id: int) -> None:
        """Frames are taken that this object does not get: what is in progress cannot become whole any more.

        Args:
            next_id: trajectories with lower ids have begun by now.
        """
        self._spoiled_below = max(self._spoiled_below, next_id)
        self.drop_open(np.ones(self._num_envs, np.bool_))

    def drop_open(self, envs: NDArray[np.bool_]) -> None:
        """Forget the trajectories in progress in the environments that ``envs``, bool ``[num_envs]``, marks."""
        lost = envs & (self._since != _NONE)
        self.frames_dropped += int((self._clock - self._begun)[lost].sum())
        self._since[lost] = _NONE

    def drop_after_error(self, num_frames: int) -> None:
        """Forget what is in progress, in whatever state an interrupted :meth:`take` has left it.

        Args:
            num_frames: all that are held or were dropped until now; those that are not held any more count as dropped.
        """
        self._since[:] = _NONE
        self._rollouts.clear()
        self._oldest = self._serial
        self.frames_dropped = num_frames - self.frames_held

    # Batches in, trajectories out --------------------------------------------------------------------

    def take(self, batch: TensorDictBase, steps: int, ended: torch.Tensor) -> None:
        """Take in a batch.

        Args:
            batch: ``[*env, T]``, which is not to be written again.
            steps: those of the T that were taken.
            ended: bool ``[*env, T]``, the last frame of a trajectory.
        """
        shape = (self._num_envs, batch.batch_size[-1])
        ids = cast(torch.Tensor, batch.get(IDS)).reshape(shape)[:, :steps].cpu().numpy()
        ends = ended.reshape(shape)[:, :steps].cpu().numpy()
        serial, self._serial = self._serial, self._serial + 1
        self._rollouts[serial] = HeldBatch.of(batch, steps)
        self.drop_open(self._id != ids[:, 0])  # they were reset in the middle: nobody will see their end
        self._open(np.flatnonzero(self._since == _NONE), serial, 0, ids[:, 0])
        stops = ends.copy()
        stops[:, :-1] |= ids[:, 1:] != ids[:, :-1]
        for t, env in np.argwhere(stops.T).tolist():
            if self._since[env] == _NONE:
                pass
            elif ends[env, t] and not self._is_spoiled(int(self._id[env])):
                self._completed(self._close(env, serial, t))
            else:
                self.frames_dropped += self._clock + t + 1 - int(self._begun[env])
            self._since[env] = _NONE
            if t + 1 < steps:
                self._open(env, serial, t + 1, ids[:, t + 1])
        self._clock += steps
        self._let_go()
        self.settle()

    def settle(self) -> None:
        """A batch was taken, or there is none left."""

    def sift(self, keeps: Callable[[list[Trajectory]], bool]) -> None:
        """Decide on complete groups, where trajectories come in groups; those that are not kept are forgotten."""

    def _is_spoiled(self, name: int) -> bool:
        return name < self._spoiled_below or name in self._spoiled

    def pop(self, n: int) -> list[Trajectory]:
        """The ``n`` complete trajectories that ended first."""
        return [self._complete.popleft() for _ in range(n)]

    def put_back(self, popped: Sequence[Trajectory]) -> None:
        """Have trajectories that were popped be the next ones again, in the same order."""
        self._complete.extendleft(reversed(popped))

    def _open(self, envs: Any, serial: int, t: int, ids: NDArray[np.int64]) -> None:
        taken = ids[envs] >= 0  # where nothing was taken, the id is -1
        self._since[envs] = np.where(taken, serial, _NONE)
        self._offset[envs], self._id[envs] = t, ids[envs]
        self._begun[envs] = self._clock + t

    def _close(self, env: int, serial: int, t: int) -> Trajectory:
        since, skipped = int(self._since[env]), int(self._offset[env])
        pieces = []
        for at in range(since, serial + 1):
            frames = self._rollouts[at]
            start, stop = int(frames.starts[env]), int(frames.stops[env])
            begin = start + skipped if at == since else start
            pieces.append(RowRange(frames, begin, start + t + 1 if at == serial else stop))
        return Trajectory(pieces, self._clock + t + 1 - int(self._begun[env]), int(self._id[env]))

    def _let_go(self) -> None:
        """Give back the memory of batches that hold nothing that is in progress, or little of it."""
        in_progress = self._since != _NONE
        oldest = int(self._since[in_progress].min()) if in_progress.any() else self._serial
        for serial in range(self._oldest, oldest):
            del self._rollouts[serial]
        self._oldest = oldest
        age = 1
        while (serial := self._serial - 1 - age) >= oldest:  # each batch is looked at when its age is a power of two
            self._shrink(serial)
            age *= 2

    def _shrink(self, serial: int) -> None:
        frames = self._rollouts[serial]
        kept = np.flatnonzero((self._since != _NONE) & (self._since <= serial))
        skipped = np.where(self._since[kept] == serial, self._offset[kept], 0)
        starts = frames.starts[kept] + skipped
        if 4 * int((frames.stops[kept] - starts).sum()) < frames.num_rows:
            self._rollouts[serial] = frames.narrowed(kept, starts, skipped)

    # State ------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """What is held: the frames of each trajectory as a TensorDict ``[length]`` of its own."""
        envs = np.flatnonzero(self._since != _NONE).tolist()
        return {
            "envs": envs,
            "open": [copied(self._in_progress(env)) for env in envs],
            "complete": [copied(found.pieces) for found in self._all_complete()],
            "frames_dropped": self.frames_dropped,
            "spoiled_below": self._spoiled_below,
            "spoiled": sorted(self._spoiled),
        }

    def _in_progress(self, env: int) -> list[RowRange]:
        since, skipped = int(self._since[env]), int(self._offset[env])
        found = []
        for at in range(since, self._serial):
            frames = self._rollouts[at]
            start = int(frames.starts[env]) + (skipped if at == since else 0)
            found.append(RowRange(frames, start, int(frames.stops[env])))
        return found

    def load_state_dict(
        self,
        state: Mapping[str, Any],
        ids: NDArray[np.int64] | None,
        fresh: Iterable[int],
        saved_ids: NDArray[np.int64] | None = None,
    ) -> None:
        """Go on from a saved state.

        Args:
            state: of :meth:`state_dict`.
            ids: those of the trajectories in progress, int64 ``[num_envs]``; None: they are reset, and what was saved
                of them is dropped.
            fresh: ids for those that are complete; empty: they keep their own.
            saved_ids: what ``ids`` were when the state was saved; None: the same.
        """
        self._clear()
        self.frames_dropped = int(state["frames_dropped"])
        self._load_spoiled(state, ids, ids if saved_ids is None else saved_ids)
        names = iter(fresh)
        for td in state["complete"]:
            name = next(names, None)
            frames = td if name is None else _renamed(td, name)
            number = int(cast(torch.Tensor, frames.get(IDS)).reshape(-1)[0])
            self._completed(Trajectory([_piece(frames)], len(frames), number))
        held = list(zip(state["envs"], state["open"], strict=True))
        if ids is None:
            self.frames_dropped += sum(len(td) for _, td in held)
            return
        self.frames_dropped += sum(len(td) for env, td in held if ids[env] < 0)  # which begin again
        held = [(env, td) for env, td in held if ids[env] >= 0]
        longest = max((len(td) for _, td in held), default=0)
        self._clock = longest
        for env, td in held:  # each in a batch of its own length; the others have no row of it
            self._since[env], self._offset[env], self._id[env] = 0, 0, ids[env]
            self._begun[env] = longest - len(td)
        if held:
            whole = concatenate([_piece(_renamed(td, int(ids[env]))) for env, td in held])
            self._rollouts[0] = HeldBatch.of(whole, longest).placed(
                [env for env, _ in held], [len(td) for _, td in held], self._num_envs
            )
            self._serial = 1

    def _load_spoiled(
        self, state: Mapping[str, Any], ids: NDArray[np.int64] | None, saved_ids: NDArray[np.int64] | None
    ) -> None:
        """Those that have begun unseen are never whole, whatever they are called now."""
        self._spoiled_below, self._spoiled = int(state.get("spoiled_below", 0)), set(state.get("spoiled", ()))
        if ids is None or saved_ids is None:  # all were reset
            self._spoiled_below, self._spoiled = 0, set()
            return
        names = zip(ids.tolist(), saved_ids.tolist(), strict=True)
        self._spoiled = {new for new, old in names if self._is_spoiled(old)}
        self._spoiled_below = 0


def _piece(td: TensorDictBase) -> RowRange:
    return RowRange(HeldBatch.of(td, len(td)), 0, len(td))


def _renamed(td: TensorDictBase, name: int) -> TensorDictBase:
    return td.copy().set(IDS, torch.full_like(cast(torch.Tensor, td.get(IDS)), name))


def group_sizes(env: EnvBase, cursor: DataCursor) -> Callable[[Origin], int]:
    """How many conversations the group has that a conversation from somewhere belongs to, without those that failed.

    Raises:
        ValueError: the environment has no conversations.
    """
    source = getattr(getattr(env, "conversations", None), "source", None)
    if isinstance(source, PromptSource):
        undelivered = getattr(cursor, "undelivered", None)
        return source.group_size if undelivered is None else undelivered.group_size
    if isinstance(env, AsyncEnvPool) and is_pool_of_conversations(env):
        sizes: list[int] = env.repeats
        return lambda origin: sizes[origin.group % len(sizes)]
    raise ValueError(
        f"groups_per_batch: expected an environment whose conversations begin with prompts of a dataset, such as "
        f"LLMEnv or ChatEnv, got {env}. Pass trajs_per_batch=, which takes any environment."
    )


class GroupAssembler(TrajectoryAssembler):
    """A :class:`~rollwright.collectors.delivery.assembler.TrajectoryAssembler` whose trajectories come in groups.

    What is complete is counted, and popped, in groups: all conversations that begin with one prompt, in order of their
    repeats. A group is complete when its last conversation has ended.

    Args:
        num_envs: rows of a batch.
        size: how many conversations the group has that a conversation from somewhere belongs to.
        alone: each conversation is a group of its own.
        order: group and repeat of all conversations that were not delivered, in the order in which they are to be;
            None: that in which groups were complete.
    """

    def __init__(
        self,
        num_envs: int,
        size: Callable[[Origin], int],
        *,
        alone: bool = False,
        order: Callable[[], Iterator[_Name]] | None = None,
    ) -> None:
        self._size, self._alone, self._order = size, alone, order
        super().__init__(num_envs)

    def _clear(self) -> None:
        super()._clear()
        self._open_groups: dict[_Name, list[tuple[Origin, Trajectory]]] = {}
        self._early: dict[_Name, list[Trajectory]] = {}  # complete, and others come first
        self._next: deque[list[Trajectory]] = deque()  # that nobody has decided on
        self._groups: deque[list[Trajectory]] = deque()

    @property
    def num_complete(self) -> int:
        """Groups that are to be delivered."""
        return len(self._groups)

    @property
    def num_conversations_held(self) -> int:
        """Conversations that are complete and wait for others of their group, or to be delivered."""
        return len(self._all_complete())

    def _name(self, group: int, repeat: int) -> _Name:
        return group, repeat if self._alone else 0

    def _completed(self, found: Trajectory) -> None:
        origin = origin_of(found)
        name = self._name(origin.group, origin.repeat)
        self._open_groups.setdefault(name, []).append((origin, found))
        self._close_group(name)

    def _close_group(self, name: _Name) -> None:
        """A group is complete, if it is."""
        group = self._open_groups[name]
        if self._alone or len(group) >= self._size(group[0][0]):
            group.sort(key=lambda each: each[0].repeat)
            found = [trajectory for _, trajectory in self._open_groups.pop(name)]
            if self._order is None:
                self._next.append(found)
            else:
                self._early[name] = found

    def settle(self) -> None:
        """See :meth:`TrajectoryAssembler.settle`: groups may be complete without conversations that have failed."""
        for name in list(self._open_groups):
            self._close_group(name)
        if self._order is not None and self._early:
            ahead = {self._name_of(group[0]) for group in (*self._groups, *self._next)}
            for name in itertools.starmap(self._name, self._order()):
                if name in self._early:
                    self._next.append(self._early.pop(name))
                    ahead.add(name)
                elif name not in ahead:
                    break

    def sift(self, keeps: Callable[[list[Trajectory]], bool]) -> None:
        """Decide on complete groups, where trajectories come in groups; those that are not kept are forgotten."""
        while self._next:
            if keeps(self._next[0]):
                self._groups.append(self._next[0])
            self._next.popleft()

    def _name_of(self, found: Trajectory) -> _Name:
        origin = origin_of(found)
        return self._name(origin.group, origin.repeat)

    def _all_complete(self) -> list[Trajectory]:
        waiting = [trajectory for group in list(self._open_groups.values()) for _, trajectory in group]
        early = [trajectory for group in list(self._early.values()) for trajectory in group]
        complete = [*self._groups.copy(), *self._next.copy()]
        return [trajectory for group in complete for trajectory in group] + early + waiting

    def choose(self, choice: Callable[[list[list[Trajectory]]], list[list[Trajectory]]]) -> None:
        """Put the groups that are to be delivered in another order, or take some out."""
        self._groups = deque(choice(list(self._groups)))

    def pop(self, n: int) -> list[Trajectory]:
        """The conversations of the ``n`` groups that are next, group after group."""
        return [trajectory for _ in range(n) for trajectory in self._groups.popleft()]

    def put_back(self, popped: Sequence[Trajectory]) -> None:
        """Have trajectories that were popped be the next ones again, in the same order."""
        groups: dict[_Name, list[Trajectory]] = {}
        for found in popped:
            groups.setdefault(self._name_of(found), []).append(found)
        self._groups.extendleft(reversed(groups.values()))


def oldest_version(found: Trajectory) -> int | None:
    """Of the weights that sampled the first token of a conversation, which is its oldest; None: it is not known."""
    piece = found.pieces[0]
    first: Any = piece.frames.rows(piece.start, piece.start + 1)[0]
    flat = first.get("tokens_policy_version", None)
    versions = first.get(("tokens", "policy_version"), None) if flat is None else flat
    if not isinstance(versions, torch.Tensor) or not len(versions):
        stamp = first.get("policy_version", None)
        return int(stamp) if isinstance(stamp, torch.Tensor) and not stamp.ndim else None
    return int(versions[0])


def origin_of(found: Trajectory) -> Origin:
    """Where a conversation comes from, as its first frame says; the seed is not among that."""
    piece = found.pieces[0]
    return origins_in(piece.frames.rows(piece.start, piece.start + 1))[0]
