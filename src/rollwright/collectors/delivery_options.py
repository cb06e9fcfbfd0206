"""Checks of combined options of delivery: whole trajectories, replay buffers, and the rest."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from rollwright._warnings import warn_user
from rollwright.data.replay_buffers import SliceSampler

if TYPE_CHECKING:
    from rollwright.collectors.options import CollectorOptions


_METHODS = ("extend", "add", "sample")
_AGAINST_TRAJS = {
    "split_trajs": "it pads the pieces of trajectories that one rollout holds. Drop split_trajs",
    "compact_obs": "what it leaves out is kept once a rollout, and a trajectory spans several. Drop compact_obs",
    "return_same_td": "it overwrites frames that are held until their trajectory ends. Drop return_same_td",
}
_AGAINST_BUFFERS = {
    "compact_obs": "what it leaves out of the frames is kept in a table beside each batch, which a buffer has no rows "
    "for. Drop compact_obs",
    "split_trajs": "padding would be stored as if it were frames. Drop split_trajs, and sample slices, or pass "
    "trajs_per_batch",
    "return_same_td": "with a buffer, nothing is returned. Drop return_same_td",
}


def check_delivery(options: CollectorOptions) -> None:
    """Test the options on trajectories and buffers.

    Raises:
        ValueError: options contradict one another, or a value is none of those known.
        TypeError: ``replay_buffer`` is none.
    """
    if options.trajs_per_batch is not None and options.groups_per_batch is not None:
        raise ValueError(
            f"trajs_per_batch={options.trajs_per_batch} and groups_per_batch={options.groups_per_batch} both say how "
            "many complete conversations are delivered at a time. Drop one of the two."
        )
    if options.delivers_whole:
        _check_trajectories(options)
    elif options.traj_format != "padded":
        raise ValueError(
            f"traj_format={options.traj_format!r} says how complete trajectories are delivered, and trajs_per_batch is "
            "None. Pass trajs_per_batch=, or drop traj_format."
        )
    if options.trajs_per_write is not None and not (options.delivers_whole and options.replay_buffer is not None):
        raise ValueError(
            f"trajs_per_write={options.trajs_per_write} says how many complete trajectories are written at a time. "
            "Pass trajs_per_batch= and replay_buffer= with it, or drop it."
        )
    if options.replay_buffer is not None:
        _check_buffer(options)
    elif not options.extend_buffer:
        raise ValueError("extend_buffer=False says how a buffer is written, and replay_buffer is None. Pass one.")


def _check_trajectories(options: CollectorOptions) -> None:
    _refuse("trajs_per_batch" if options.groups_per_batch is None else "groups_per_batch", options, _AGAINST_TRAJS)
    if not options.track_traj_ids:
        raise ValueError(
            "trajs_per_batch needs trajectory ids, and track_traj_ids is False. Drop one of the two options."
        )
    if not options.reset_when_done:
        raise ValueError(
            "trajs_per_batch delivers trajectories that ended, and reset_when_done=False goes on after the end under "
            "the same id. Drop one of the two options."
        )


def _check_buffer(options: CollectorOptions) -> None:
    buffer = options.replay_buffer
    missing = [name for name in _METHODS if not callable(getattr(buffer, name, None))]
    if missing or isinstance(buffer, type):
        lacks = "is a class" if isinstance(buffer, type) else f"has no {'(), '.join(missing)}()"
        raise TypeError(
            f"replay_buffer: expected a replay buffer, with extend(), add() and sample(), got {buffer!r}, which "
            f"{lacks}. Pass a rollwright.data.ReplayBuffer."
        )
    _refuse("replay_buffer", options, _AGAINST_BUFFERS)
    buffer_of(options)
    if options.delivers_whole:
        if storage_ndim(buffer) > 1:
            raise ValueError(
                "trajs_per_batch writes trajectories of any length one after another, and the storage of replay_buffer "
                f"has ndim={storage_ndim(buffer)}, hence rows of one length. Make the storage with ndim=1, the default."
            )
        if options.traj_format == "cat" and options.groups_per_batch is None:
            raise ValueError("traj_format has no effect with replay_buffer: trajectories are written flat. Drop it.")
    if not options.extend_buffer:
        if options.trajs_per_batch is not None:
            raise ValueError(
                "extend_buffer=False writes every step when it was taken, and trajs_per_batch holds it until its "
                "trajectory ends. Drop one of the two options."
            )
        if options.set_truncated:
            raise ValueError(
                "set_truncated marks the last frame of a rollout, which extend_buffer=False has written by then. Drop "
                "one of the two options."
            )


def _refuse(option: str, options: CollectorOptions, reasons: dict[str, str]) -> None:
    for name, reason in reasons.items():
        if getattr(options, name):
            raise ValueError(f"{option} and {name} contradict one another: {reason}.")


def storage_ndim(buffer: Any) -> int:
    """Number of dimensions of the storage of a buffer (of an ensemble: the most of its members); 1 if unknown."""
    members = getattr(buffer, "members", [buffer])
    return max(int(getattr(getattr(member, "storage", None), "ndim", 1)) for member in members)


def is_service(buffer: Any) -> bool:
    """Whether a buffer is in a process of its own, which writers on any machine reach."""
    return hasattr(buffer, "as_writer")


def write_count_of(buffer: Any) -> int | None:
    """Elements written to a buffer so far; None: it does not count, or is in a service that is gone."""
    try:
        found: int | None = buffer.num_given() if hasattr(buffer, "num_given") else getattr(buffer, "write_count", None)
    except (RuntimeError, OSError):  # of a service: other buffers do not raise
        if not is_service(buffer):
            raise
        return None
    return found


def stats_of_buffer(buffer: Any) -> dict[str, Any]:
    """What ``stats()`` of a collector has about its buffer."""
    found = {"write_count": write_count_of(buffer)}
    fill = getattr(buffer, "stats", None)  # others' buffers have none
    return found if fill is None else {**found, "buffer": fill()}


def draws_slices(buffer: Any) -> bool:
    """Whether the sampler of a buffer draws stretches of trajectories."""
    found = getattr(buffer, "draws_slices", None)
    return isinstance(getattr(buffer, "sampler", None), SliceSampler) if found is None else bool(found)


def ledger_of(buffer: Any) -> Any:
    """Where the writers of a buffer (of an ensemble: of all members) take trajectory ids; None if it has no such."""
    ledger = getattr(getattr(getattr(buffer, "members", [buffer])[0], "storage", None), "ledger", None)
    return ledger if hasattr(ledger, "take_ids") else None


def buffer_of(options: CollectorOptions) -> Any:
    """Where a collector writes: its replay buffer, or the member of an ensemble that is its own.

    Raises:
        ValueError: nothing names the member.
    """
    buffer: Any = options.replay_buffer
    worker = options.worker_idx
    members = getattr(buffer, "members", None)
    if members is None or buffer.routing_key is not None or buffer.routing_dim is not None:
        return buffer
    if worker is None or worker >= len(members):
        raise ValueError(
            f"replay_buffer: worker i writes to member i of an ensemble, which has {len(members)}, and this collector "
            f"has worker_idx={worker}. Pass worker_idx= of 0 to {len(members) - 1}, or the member itself."
        )
    return members[worker]


def add_filler(buffer: Any, raise_error: Callable[[], None]) -> None:
    """Let who only watches a buffer learn what has ended a collector's work in the background; see :class:`Fillers`."""
    for member in getattr(buffer, "members", (buffer,)):
        fillers = getattr(member, "fillers", None)
        if fillers is not None:
            fillers.add(raise_error)


def warn_of_splits(owner: str) -> None:
    """Warn of what ``split_trajs=True`` does."""
    warn_user(
        f"{owner}: split_trajs=True pads trajectories, and cuts them where batches end. Take batches as they are "
        "(the default), which tell trajectories apart by ('collector', 'traj_ids'), or pass trajs_per_batch= for whole "
        "ones.",
        UserWarning,
    )


def warn_of_options(owner: str, options: CollectorOptions) -> None:
    """Warn of options that do something else than a user may expect."""
    if options.split_trajs:
        warn_of_splits(owner)
    if options.postproc is not None and not options.extend_buffer:
        warn_user(
            f"{owner}: postproc works on whole rollouts, and with extend_buffer=False is not called. Give the replay "
            "buffer a transform instead, or pass extend_buffer=True.",
            UserWarning,
        )
