"""RolloutDelivery: delivers what one rollout collects; here each batch as it is, or whole trajectories."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from numpy.typing import NDArray
from tensordict import LazyStackedTensorDict, TensorDictBase, is_tensor_collection

from rollwright._interrupts import uninterrupted
from rollwright._keys import NestedKey, is_private, key_str
from rollwright._warnings import warn_user
from rollwright.collectors.core import NothingLeft, never
from rollwright.collectors.delivery.assembler import (
    GroupAssembler,
    Trajectory,
    TrajectoryAssembler,
    group_sizes,
    oldest_version,
    origin_of,
)
from rollwright.collectors.delivery.rows import RowRange, as_trajectories, common_keys, copied, pad
from rollwright.collectors.reports.observers import Profile
from rollwright.collectors.rollout.paths.stages import IDS
from rollwright.collectors.rollout.rollout import Rollout
from rollwright.collectors.rollout.state import placed, td_from, td_state
from rollwright.data.layout import TRAJ_IDS, split_trajectories
from rollwright.errors import EnvError, NoSilentEnd

_ENDLESS = "This collector has no end (total_frames=-1), hence no length. Pass total_frames= to set one."
_UNKNOWN = (
    "This collector delivers whole trajectories (trajs_per_batch), and how many will end is not known, so it has no "
    "length. Iterate over it instead."
)


def split(batch: TensorDictBase) -> TensorDictBase:
    """Trajectories of a batch, padded."""
    return split_trajectories(batch, prefix="collector")


def turns_taken(frames: TensorDictBase) -> TensorDictBase:
    """Frames ``[n]`` of conversations without the blank ones, which stand where the data was over."""
    ids = frames.get(TRAJ_IDS, None) if isinstance(frames, LazyStackedTensorDict) else None
    if ids is None or not bool((ids < 0).any()):
        return frames
    kept = [frame for frame, number in zip(frames.unbind(0), ids.tolist(), strict=True) if number >= 0]
    return LazyStackedTensorDict(*kept, stack_dim=0, stack_dim_name="time")


def make_assembler(rollout: Rollout) -> TrajectoryAssembler | None:
    """What puts trajectories together, where whole ones are delivered."""
    options, rows = rollout.options, rollout.num_rows
    if not options.delivers_whole:
        return None
    if options.groups_per_batch is None and options.delivery_order == "completion" and options.max_policy_lag is None:
        return TrajectoryAssembler(rows)
    _check_repeats(rollout)
    _check_lag(rollout)
    sizes, order = group_sizes(rollout.env, rollout.cursor), None
    if options.delivery_order == "data":
        source = getattr(getattr(rollout.env, "conversations", None), "source", None)
        if source is None:
            raise ValueError(
                "delivery_order='data': expected an environment with the conversations of one dataset, got "
                f"{rollout.env}. Leave it out."
            )
        order = source.undelivered
    return GroupAssembler(rows, sizes, alone=options.groups_per_batch is None, order=order)


def _check_lag(rollout: Rollout) -> None:
    """Test that a group can be complete before more of them are begun than the bound on their age allows.

    Raises:
        ValueError: it cannot.
    """
    options, source = rollout.options, getattr(getattr(rollout.env, "conversations", None), "source", None)
    turns, most = getattr(source, "interleave", 1), options.most_in_progress
    if most is not None and options.groups_per_batch is not None and turns > most:
        raise ValueError(
            f"max_policy_lag={options.max_policy_lag}: expected at most {most} prompts that take turns, as many groups "
            f"as may be in progress with groups_per_batch={options.groups_per_batch}, got {turns}: none would be "
            "complete in time. Pass group_repeats=True to the environment, or a larger bound."
        )


def _check_repeats(rollout: Rollout) -> None:
    source: Any = getattr(getattr(rollout.env, "conversations", None), "source", rollout.env)
    repeats = getattr(source, "repeats", None)
    if rollout.options.keep_group is not None and 1 in (repeats if isinstance(repeats, list) else [repeats]):
        raise ValueError(
            "keep_group: expected groups of at least 2 conversations, got repeats=1. Pass repeats= to the environment, "
            "or leave keep_group out."
        )


def _saved_ids(trajectories: Mapping[str, Any]) -> NDArray[Any] | None:
    """The ids of the trajectories that the rows of a batch were in when they were saved, int64 ``[rows]``."""
    if "row_ids" in trajectories:
        ids = trajectories["row_ids"]
        return None if ids is None else ids.cpu().numpy()
    saved = td_from(trajectories["carrier"])
    return None if saved is None else saved.get(IDS).reshape(-1).cpu().numpy()


class RolloutDelivery(ABC):
    """Delivers what a rollout collects.

    Args:
        rollout: collects.
        profile: traces rollouts.
        split: cuts batches into padded trajectories, where options ask for it.

    Attributes:
        batches: delivered so far.
        in_background: whether a thread collects, and others use the buffer meanwhile.
        waiting_for: what the next rollout waits for, while it does.
    """

    def __init__(
        self, rollout: Rollout, profile: Profile, split: Callable[[TensorDictBase], TensorDictBase] = split
    ) -> None:
        self.rollout, self._profile, self._split = rollout, profile, split
        self.assembler = make_assembler(rollout)
        self.batches = 0
        self.in_background = False
        self.waiting_for: str | None = None
        self._left_out: set[NestedKey] = set()
        self._delivered_trajectories = self._warned_of_end = False
        self._kept = self._filtered = 0  # groups since the last delivery
        self._ages: dict[tuple[int, int], int] = {}  # versions of groups that are in progress,
        self._complete_ages: list[int] = []  # and of those that are complete, in order

    def ready(self) -> bool:
        """Whether there is something to deliver; it may take rollouts to know."""
        self.rollout.look_ahead()
        return not self.rollout.completed

    def has_room(self) -> bool:
        """Whether the next rollout may begin now."""
        return True

    def await_room(self, stop: Callable[[], bool] = never) -> None:  # noqa: B027 - most have room
        """Wait until it may.

        Args:
            stop: asked again and again, whether to wait no longer.

        Raises:
            TimeoutError, RuntimeError: the wait is in vain.
        """

    @abstractmethod
    def next(self, taken: list[TensorDictBase | None]) -> None:
        """Put what is yielded next into ``taken``; only after :meth:`ready`.

        Until it is there, an error (Ctrl-C is one) means that nobody gets it; from then on, it is the caller's.
        """

    def taken(self) -> TensorDictBase | None:
        """What is yielded next, for a caller whom no Ctrl-C reaches."""
        found: list[TensorDictBase | None] = []
        self.next(found)
        return found.pop()

    def blank(self) -> TensorDictBase:
        """A batch of zeros like those that are delivered; of whole trajectories, one for each environment."""
        batch = self.rollout.blank()
        if self.assembler is not None:
            batch = as_trajectories([batch], padded=self.rollout.options.traj_format == "padded")
        return self._shape(batch)

    # What it reports ---------------------------------------------------------------------

    @property
    def num_batches(self) -> int | None:
        """How many batches will be yielded; None where that is not known."""
        return self.rollout.counts.batches

    def length(self) -> int:
        """How many batches will be yielded; None where that is not known.

        Raises:
            RuntimeError: there is no end.
            TypeError: it is not known.
        """
        if self.num_batches is not None:
            return self.num_batches
        # list() asks for a length, and takes a TypeError for none; without an end, it is better stopped.
        raise RuntimeError(_ENDLESS) if self.rollout.counts.batches is None else TypeError(_UNKNOWN)

    @property
    def how(self) -> dict[str, str]:
        """What is done with rollouts, by part, for ``stats()["paths"]``."""
        return {}

    def stats(self) -> dict[str, Any]:
        """What ``stats()`` of a collector reports on its rollout and its delivery."""
        held = self.assembler
        stats = {
            **self.rollout.stats(),
            "batches": self.batches,
            "total_batches": self.num_batches,
            "paths": {**self.rollout.how, **self.how},
            "waiting_for": self.waiting_for,
        }
        if held is not None:
            stats["trajectories_held"], stats["frames_held"] = held.num_complete, held.frames_held
            stats["frames_dropped"] = held.frames_dropped
        if isinstance(held, GroupAssembler) and self.rollout.options.groups_per_batch is not None:
            stats["groups_held"], stats["trajectories_held"] = held.num_complete, held.num_conversations_held
        return stats

    # Whole trajectories -------------------------------------------------------------------------

    def forget(self) -> None:
        """Drop what is held: all environments are reset."""
        if self.assembler is not None:
            self.assembler.drop()
            self.rollout.cursor.dropped()

    def missed(self) -> None:
        """Drop what cannot become whole: a rollout was taken that is not delivered, but returned to who asked."""
        self.rollout.cursor.delivered()
        if self.assembler is not None:
            self.assembler.miss(self.rollout.ids.state_dict()["traj_id"])

    def ended(self) -> None:
        """All frames are stepped: warn, once, where nothing of them became whole."""
        held = 0 if self.assembler is None else self.assembler.frames_held
        if held and not self._delivered_trajectories and not self._warned_of_end:
            self._warned_of_end = True
            warn_user(self._end_without_batch(held), UserWarning)

    def _end_without_batch(self, held: int) -> str:
        owner, names = self.rollout.owner, self.rollout.stats().get("conversations_unfinished")
        if names is None:
            return (
                f"{owner} ends without a batch of whole trajectories: frames_held={held} frames belong to fewer "
                "complete trajectories than trajs_per_batch asks for, or to none. Pass a larger total_frames, or a "
                "smaller max_frames_per_traj."
            )
        of = "groups" if self.rollout.options.groups_per_batch else "conversations"
        more = f", and {len(names) - 3} more" if len(names) > 3 else ""
        where = f" in {', '.join(names[:3])}{more}" if names else ""
        rest = '; stats()["conversations_unfinished"] names all of these' if names else ""
        if failed := sum(self.rollout.stats().get("conversations_failed", {}).values()):
            rest += f'; {failed} conversations have failed, see stats()["conversations_failed"]'
        return (
            f"{owner} ends without a batch of whole {of}: {held} turns were taken{where}, and are not delivered{rest}. "
            f"Pass a larger total_dialog_turns, or more data, or ask for fewer {of} in a batch."
        )

    def collect_trajectories(self) -> None:
        """Collect a batch, and hand it to the assembler; where that fails, its trajectories end there.

        Conversations go on from where the batch began.
        """
        rollout, assembler = self.rollout, self.assembler
        assert assembler is not None
        self._profile.start()
        known = assembler.frames_held + assembler.frames_dropped - rollout.frames
        batch: TensorDictBase | None = None
        rollout.expect()
        try:
            batch = rollout.collect()
            assembler.take(batch, rollout.steps_taken, rollout.ends_in(batch))
        except NothingLeft:
            self._sift()
            return
        except BaseException:
            if batch is not None:
                rollout.start_over()
                assembler.drop_after_error(known + rollout.frames)
            elif rollout.go_back_if_begun() and not rollout.cursor.offers_again:  # else what goes on has its id still
                assembler.drop_after_error(known + rollout.frames)
            raise
        self._profile.step()
        self._sift()

    def _sift(self) -> None:
        """Decide on groups that are complete."""
        if self.assembler is not None:
            self.assembler.settle()
            self.assembler.sift(self._keeps)

    def _keeps(self, group: Sequence[Trajectory]) -> bool:
        options = self.rollout.options
        if options.keep_group is None:
            return True
        with NoSilentEnd("keep_group"):
            answer = options.keep_group(copied([piece for each in group for piece in each.pieces]))
        if kept := not isinstance(answer, str) and (answer is None or bool(answer)):
            self._kept += 1
        else:
            reason = answer if isinstance(answer, str) else getattr(options.keep_group, "__name__", "keep_group")
            self.rollout.cursor.filtered([each.id for each in group], reason)
            self._filtered += 1
        return kept

    def _by_age(self, groups: list[list[Trajectory]]) -> list[list[Trajectory]]:
        """Complete groups that are not too old, the oldest first; and note the ages of these and of all others."""
        options, cursor = self.rollout.options, self.rollout.cursor
        first = self.rollout.acting.version - (options.max_policy_lag or 0)
        aged = [(_oldest(group) or 0, group) for group in groups]
        for version, group in aged:
            if version < first:
                cursor.filtered([each.id for each in group], f"older than max_policy_lag={options.max_policy_lag}")
        kept = sorted((each for each in aged if each[0] >= first), key=lambda each: each[0])
        complete = {(each.group, each.repeat) for _, group in kept for each in map(origin_of, group)}
        self._complete_ages, self._ages = [version for version, _ in kept], {}
        for origin, version in cursor.versions.items():
            if (origin.group, origin.repeat) not in complete:
                name = (origin.group, 0 if options.groups_per_batch else origin.repeat)
                self._ages[name] = min(version, self._ages.get(name, version))
        return [group for _, group in kept]

    def _check_oversampling(self) -> None:
        """Test that not too many groups were filtered since the last batch.

        Raises:
            EnvError: more than ``max_oversampling`` allows.
        """
        options, taken = self.rollout.options, self._filtered + self._kept
        most = options.max_oversampling * (options.groups_per_batch or 1)
        if self._filtered and taken >= most and self._kept < (options.groups_per_batch or 1):
            kept, self._kept, self._filtered = self._kept, 0, 0
            reasons = self.rollout.stats().get("groups_filtered")
            raise EnvError(
                f"keep_group: of {taken} groups that were collected for a batch, {kept} were kept, which is less than "
                f"groups_per_batch={options.groups_per_batch}; filtered so far: {dict(reasons or {})}. Keep more "
                "groups, choose other prompts, or pass a larger max_oversampling."
            )

    def give_back(self, popped: Sequence[Trajectory]) -> None:
        """The delivery of trajectories has failed: they are offered again, or dropped."""
        assembler = self.assembler
        assert assembler is not None
        if self.rollout.cursor.offers_again:
            assembler.put_back(popped)
        else:
            assembler.frames_dropped += sum(found.length for found in popped)

    def pieces_of(self, found: Trajectory) -> list[RowRange]:
        """What is delivered of a trajectory."""
        if not self.rollout.options.only_last_steps:
            return found.pieces
        return [found.pieces[-1].last_row()]

    def save_held(self) -> tuple[dict[str, Any] | None, list[str]]:
        """Frames of whole trajectories that are not delivered yet; or None, and why they cannot be saved."""
        if self.assembler is None:
            return None, []
        held = self.assembler.state_dict()
        try:
            saved = {name: [td_state(td) for td in held[name]] for name in ("open", "complete")}
        except Exception as error:
            return None, [f"objects in held trajectories: cannot be pickled: {type(error).__name__}: {error}"]
        return {**held, **saved}, []

    def check_held(self, held: Mapping[str, Any] | None) -> None:
        """Raise what :meth:`load_held` would raise of damaged frames; nothing is changed."""
        if held is not None and "rest" in held:
            held = held["of_trajectories"]
        if held is not None and self.assembler is not None:
            found = placed({name: held[name] for name in ("open", "complete", "envs", "frames_dropped")})
            _ = [td_from(td) for name in ("open", "complete") for td in found[name]]

    def load_held(
        self, held: Mapping[str, Any] | None, trajectories: Mapping[str, Any] | None, *, ids_are_free: bool
    ) -> None:
        """Go on with frames that were saved.

        Args:
            held: of :meth:`save_held`.
            trajectories: those in progress, as they were saved, if the rollout goes on with them.
            ids_are_free: whether those that are complete keep their ids.
        """
        assembler, rollout = self.assembler, self.rollout
        if assembler is None:
            return
        if held is None:
            assembler.drop()
            self.missed()  # trajectories that go on have begun elsewhere
            return
        loaded = {name: [td_from(td) for td in placed(held[name])] for name in ("open", "complete")}
        ids = None if trajectories is None else rollout.path.row_ids()
        saved_ids = None if trajectories is None or ids is None else _saved_ids(trajectories)
        fresh = () if ids_are_free else rollout.ids.take(len(loaded["complete"])).tolist()
        assembler.load_state_dict({**held, **loaded}, ids, fresh, saved_ids)
        rollout.cursor.load_undelivered(assembler.first_frames())

    # What subclasses do with a batch --------------------------------------------------------------

    @contextmanager
    def _collected(self, taken: Sequence[Any]) -> Iterator[TensorDictBase]:
        """A batch; where the ``with`` block raises before it is ``taken``, nobody gets it, and its trajectories end."""
        self._profile.start()
        with self.rollout.or_go_back(taken):
            yield self.rollout.collect()
        self._profile.step()

    def _hand_out(
        self, batch: TensorDictBase, store: Callable[[TensorDictBase], None] | None = None, *, count: bool = True
    ) -> TensorDictBase:
        """Shape a batch, count it, show it to the hook, and store it."""
        timer = self.rollout.timer
        with timer.running():
            batch = self._shape(batch)
        self._count_batch(batch, count)
        if store is not None:
            with timer.running():
                store(batch)
        return batch

    def _count_batch(self, batch: TensorDictBase, count: bool = True) -> None:
        self.batches += count
        if (hook := self.rollout.hooks.post_collect_hook) is not None:
            with NoSilentEnd("post_collect_hook"):
                hook(batch)

    def _shape(self, batch: TensorDictBase) -> TensorDictBase:
        """Split, post-process, and drop private entries."""
        options = self.rollout.options
        if options.split_trajs:
            batch = self._split(batch)
        if options.flatten_data and batch.ndim != 1:
            batch = batch.reshape(-1) if options.split_trajs else turns_taken(batch.reshape(-1))
        if options.postproc is not None:
            with NoSilentEnd("postproc"):
                batch = options.postproc(batch)
            if not is_tensor_collection(batch):
                raise TypeError(
                    f"postproc: expected it to return a TensorDict, got {type(batch).__name__}. Let it return one."
                )
            private = [key for key in batch.keys(True) if is_private(key)]
            batch = batch.exclude(*private) if private else batch
        return batch

    def _warn_of_left_out(self, keys: Iterable[NestedKey], why: str) -> None:
        """Warn, once, of entries that are not delivered."""
        new = set(keys) - self._left_out
        if new:
            self._left_out |= new
            warn_user(f"{self.rollout.owner} leaves out {key_str(new)}: {why}.", UserWarning)


class Batches(RolloutDelivery):
    """Yields each rollout."""

    def next(self, taken: list[TensorDictBase | None]) -> None:
        """See :meth:`RolloutDelivery.next`."""
        with self._collected(taken) as batch:
            found = self._hand_out(batch)
            with uninterrupted:
                self.rollout.cursor.delivered()
                taken.append(found)


def _oldest(group: Sequence[Trajectory]) -> int | None:
    """The version of the oldest token of some conversations; None: it is not known."""
    versions = [oldest_version(each) for each in group]
    return min((each for each in versions if each is not None), default=None)


class TrajectoryBatches(RolloutDelivery):
    """Yields a number of complete trajectories at a time, in the order in which they ended.

    Attributes:
        oldest: version of the oldest token of each that :meth:`next_of_rollout` has given last; None: not known.
    """

    assembler: TrajectoryAssembler
    oldest: Sequence[int | None] = ()
    num_batches = None

    @property
    def _count(self) -> int:
        return self.rollout.options.groups_per_batch or self.rollout.options.trajs_per_batch or 1

    def ready(self) -> bool:
        """Whether there is something to deliver; it may take rollouts to know."""
        self._sift()
        while self.assembler.num_complete < self._count or not self._is_in_time():
            self._check_oversampling()
            if self.rollout.completed:
                return False
            self.collect_trajectories()
        return True

    def _is_in_time(self) -> bool:
        """Whether what is not in the next batch can be delivered in those after it, before it is too old.

        The oldest are put first, and what is too old is taken out, so that there may be too few. With one update of the
        weights for each batch, of the groups that are left, as many as in n batches may be too old after n more.
        """
        options, assembler = self.rollout.options, self.assembler
        if options.max_policy_lag is None or not isinstance(assembler, GroupAssembler):
            return True
        assembler.choose(self._by_age)
        if assembler.num_complete < self._count:
            return False
        if options.policy_lag == "drop" or not self._ages:
            return True
        left = sorted([*self._ages.values(), *self._complete_ages[self._count :]])
        first = self.rollout.acting.version + 1 - options.max_policy_lag
        return all(version >= first + place // self._count for place, version in enumerate(left))

    def next(self, taken: list[TensorDictBase | None]) -> None:
        """See :meth:`RolloutDelivery.next`."""
        popped: list[Any] = []
        try:
            with uninterrupted:
                popped = self.assembler.pop(self._count)
            found = [self.pieces_of(trajectory) for trajectory in popped]
            pieces = [piece for trajectory in found for piece in trajectory]
            self._warn_of_left_out(common_keys(pieces)[1], "not every frame of these trajectories has them")
            padded = self.rollout.options.traj_format == "padded"
            batch = self._hand_out(pad(found) if padded else copied(pieces))
            with uninterrupted:
                self._delivered_trajectories = True
                self._kept = self._filtered = 0
                self.rollout.cursor.delivered(trajectory.id for trajectory in popped)
                taken.append(batch)
        except BaseException:
            if not taken:
                self.give_back(popped)
            raise

    def next_of_rollout(self) -> list[TensorDictBase]:
        """The trajectories (or groups) that are complete after one more rollout, each ``[length]``."""
        self.collect_trajectories()
        handed, popped = [], []
        oldest: list[int | None] = []
        self._check_oversampling()
        try:
            while self.assembler.num_complete:
                found = self.assembler.pop(1)  # of groups: all of one
                popped += found
                oldest.append(_oldest(found) if self.rollout.cursor.offers_again else None)
                handed.append(self._hand_out(copied([piece for each in found for piece in self.pieces_of(each)])))
        except BaseException:
            self.give_back(popped)
            raise
        if popped:
            self._kept = self._filtered = 0
            self.rollout.cursor.delivered(trajectory.id for trajectory in popped)
        self.oldest = oldest
        return handed
