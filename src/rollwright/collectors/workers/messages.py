"""Messages between a collector and its workers.

A worker's first message is :class:`Ready`. A collector asks for rollouts, one message each (:class:`Collect`), and a
worker answers each with what came of it (:class:`Collected` or :class:`Failed`). Everything else can be sent at any
time, and takes no rollout away. A :class:`Call` is answered by :class:`Returned` or :class:`Raised`, a :class:`Pause`
by :class:`Paused`, and a :class:`MemoryRequest` of the worker by :class:`MemoryGrant` or :class:`MemoryRefusal`;
nothing else is answered. At a :class:`Stop` the worker ends, and its connection raises ``ChannelClosed`` when all that
it had sent was taken.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from rollwright._keys import NestedKey
from rollwright._processes.connection import ExceptionInfo
from rollwright.collectors.workers.memory import BatchForm, BlockLayout

# To a worker ----------------------------------------------------------------------------------------


class Collect(NamedTuple):
    """Take a rollout.

    Attributes:
        run: its number.
        offset: of the block to write it to; None: ask for one.
        layout: number of the block's layout; a worker that has another by now asks for a block, too.
        reset: begin new trajectories: what those in progress have done before is lost.
    """

    run: int
    offset: int | None
    layout: int
    reset: bool


class MemoryGrant(NamedTuple):
    """Memory for the current rollout, as was asked for (:class:`MemoryRequest`).

    Attributes:
        run: number of the rollout.
        layout: of the block.
        number: of the layout.
        offset: of the block in the segment.
        part: which part of the block is the worker's.
    """

    run: int
    layout: BlockLayout
    number: int
    offset: int
    part: int


class MemoryRefusal(NamedTuple):
    """There is no memory for the current rollout."""

    why: str


class Interrupt(NamedTuple):
    """End a rollout after the current step, if it has not ended."""

    run: int


class Call(NamedTuple):
    """Call what a path leads to, from the worker's collector.

    Attributes:
        serial: number of the call.
        path: such as ``"env.set_seed"``.
        arguments: positional and named ones, in a :class:`~rollwright._processes.channel.ByValue`; None: do not call,
            return what the path leads to.
        between_batches: wait for the end of the current rollout; otherwise for the end of a step.
        cut: end the current rollout for it.
    """

    serial: int
    path: str
    arguments: Any
    between_batches: bool
    cut: bool


class Pause(NamedTuple):
    """Rest before the next step, until :class:`Resume`."""

    serial: int


class Resume(NamedTuple):
    """Go on after :class:`Pause`."""


class Stop(NamedTuple):
    """End: the current rollout is cut, and, with a replay buffer, written.

    Attributes:
        close_env: close the environment.
    """

    close_env: bool


# From a worker --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Ready:
    """The worker is there.

    Attributes:
        num_envs: environments that it steps together.
        batch_size: of the environment.
        shapes: of the environment's entries, by key.
        frames_per_batch: of a rollout, rounded up.
        random_frames: first frames with random actions, rounded up.
        device: where its batches lie; None: no common device.
        policy_device: where its policy acts; None: unknown.
        threads: that torch uses there.
        description: of its collector, for ``repr``.
        how: what runs environment and policy.
        warnings: category and text of each that its construction gave, in a
            :class:`~rollwright._processes.channel.ByValue`; but for those on rounding.
    """

    num_envs: int
    batch_size: tuple[int, ...]
    shapes: dict[NestedKey, tuple[int, ...]]
    frames_per_batch: int
    random_frames: int
    device: str | None
    policy_device: str | None
    threads: int
    description: str
    how: dict[str, str]
    warnings: Any


class Noted(NamedTuple):
    """Something of what :class:`Ready` holds has changed.

    Attributes:
        how: see :class:`Ready`.
        warnings: category and text of each that was given since.
    """

    how: dict[str, str]
    warnings: Any


class MemoryRequest(NamedTuple):
    """Memory for the current rollout is needed, in another form than that of the last block."""

    run: int
    form: BatchForm


class Collected(NamedTuple):
    """A rollout was taken.

    Attributes:
        run: its number.
        frames: that were stepped.
        steps: of each environment.
        in_block: whether a batch lies in the block of the rollout.
        rest: what does not lie in the block, packed (see :mod:`~rollwright.collectors.workers.memory`): the
            entries beside, or the whole batch, or a list of trajectories; None: nothing.
        lacking: entries of the block that the batch does not have.
        nesting: longer batch sizes of nested entries, by key.
        held: offsets of the blocks that something in the worker still reads.
        oldest_version: of the weights that acted.
        newest_version: likewise.
        dropped_frames: thrown away because they were too stale, see ``max_policy_lag``.
        is_over: whether nothing was taken, because the data is over.
        place: see :class:`Position`; of what is written into a replay buffer, :class:`Publishes` has it.
        of_path: what the path of the worker adds to ``stats()``.
        names: of the batch's dimensions, where a hook or ``postproc`` has changed them.
        oldest_tokens: versions of the oldest token of each of the trajectories in ``rest``, where they are known.
    """

    run: int
    frames: int
    steps: int
    in_block: bool
    rest: Any
    lacking: tuple[Any, ...]
    nesting: dict[Any, tuple[int, ...]]
    held: tuple[int, ...]
    oldest_version: int
    newest_version: int
    dropped_frames: int
    is_over: bool = False
    place: bytes | None = None
    of_path: Mapping[str, Any] | None = None
    names: tuple[str | None, ...] | None = None
    oldest_tokens: tuple[int | None, ...] = ()

    @classmethod
    def nothing(cls, run: int, version: int, of_path: Mapping[str, Any]) -> Collected:
        """The data is over."""
        return cls(run, 0, 0, False, None, (), {}, (), version, version, 0, is_over=True, of_path=of_path)


class Position(NamedTuple):
    """Where in the data the worker is after a call: who takes its place goes on from there.

    Attributes:
        place: of :meth:`~rollwright.collectors.core.DataCursor.place`, pickled.
    """

    place: bytes


class Publishes(NamedTuple):
    """The worker is about to write trajectories into a replay buffer.

    Attributes:
        number: counts on.
        place: see :class:`Position`, once they are published.
        last_is_published: whether what was announced before this was published.
    """

    number: int
    place: bytes
    last_is_published: bool


class Failed(NamedTuple):
    """A rollout raised."""

    run: int
    failure: ExceptionInfo


class Returned(NamedTuple):
    """The value that a call returned, in a :class:`~rollwright._processes.channel.ByValue`."""

    serial: int
    value: Any


class Raised(NamedTuple):
    """A call raised."""

    serial: int
    failure: ExceptionInfo


class Paused(NamedTuple):
    """The worker rests."""

    serial: int
