"""What collectors of conversations have in common, in one process and in many."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from rollwright.collectors.delivery.stored import QueueWriter
from rollwright.data.llm.turns import Version
from rollwright.modules.llm.replay import replaying

if TYPE_CHECKING:
    from rollwright.collectors.base import BaseCollector
    from rollwright.collectors.options import CollectorOptions

_log = logging.getLogger("rollwright.llm")
LENGTH_UNKNOWN = (
    "How many batches this collector delivers depends on its data (total_dialog_turns=-1), so it has no length. "
    "Iterate over it, or pass total_dialog_turns=."
)
_WORDS = {"frames_per_batch": "dialog_turns_per_batch", "total_frames": "total_dialog_turns", "frames": "turns"}


def in_own_words(rounding: str) -> str:
    """What was rounded, by the names that collectors of conversations have for it."""
    for word, own in _WORDS.items():
        rounding = rounding.replace(word, own)
    return rounding


def queue_of(options: CollectorOptions) -> QueueWriter | None:
    """What writes into the user's queue; None: there is none."""
    return options.replay_buffer if isinstance(options.replay_buffer, QueueWriter) else None


def version_by(tracker: Any, updates: int) -> Version | None:
    """The version after a number of updates, as the user counts: an integer or a UUID.

    Args:
        tracker: a ``PolicyVersion``, or an object like it; True: the collector counts; False: nobody does.
        updates: so far.
    """
    if tracker is False:
        return None
    if hasattr(tracker, "at"):  # of the newest weights, which act from the next step of a thread on
        found: Version = tracker.at(updates)
    else:
        found = updates if tracker is True or isinstance(tracker.version, int) else tracker.version
    return found


def checked_postproc(postproc: Any) -> Any:
    """The argument of ``set_postproc``.

    Raises:
        TypeError: it cannot be called.
    """
    if postproc is not None and not callable(postproc):
        raise TypeError(f"postproc: expected a callable or None, got {type(postproc).__name__}: {postproc!r}.")
    return postproc


def log_batch(collector: BaseCollector) -> None:
    """Log what ``verbose=True`` shows of each batch."""
    if not _log.isEnabledFor(logging.INFO) or not _log.hasHandlers():
        _log.setLevel(logging.INFO)
        _log.addHandler(logging.StreamHandler())
    stats = collector.stats()
    rate = stats["frames_per_second"]
    _log.info(
        "%s: %s of %s turns, %s conversations, %s, policy version %s",
        type(collector).__name__,
        f"{stats['frames']:,}",
        "endless" if stats["total_frames"] is None else f"{stats['total_frames']:,}",
        f"{stats['episodes']:,}",
        "" if rate is None else f"{rate:.1f} turns/s",
        collector.policy_version,
    )


def environment_of(
    env: Any, options: dict[str, Any], policy: Callable[..., Any] | None
) -> tuple[Any, Callable[..., Any] | None, dict[str, Any]]:
    """Environment, policy and the other options of a collector of conversations.

    Raises:
        TypeError: there is no environment, or it was given twice; there is neither a policy nor what makes one.
        ValueError: there is no trace to replay.
    """
    other = options.pop("create_env_fn", None)
    if env is not None and other is not None:
        raise TypeError("env and create_env_fn are two names of the environment. Drop one of the two.")
    if env is None and other is None:
        raise TypeError("env: expected an environment, or a function that makes one, got None.")
    if policy is not None and options.get("policy_factory") is not None:
        raise TypeError("policy and policy_factory were both given. Drop one of the two.")
    if (folder := options.get("replay")) is not None:
        options["policy_factory"] = replaying(folder, policy, options.get("policy_factory"))
        policy = None
    if policy is None and options.get("policy_factory") is None:
        raise TypeError(
            "policy: expected a policy, or policy_factory=, which makes one: there are no random answers. Pass for "
            "example a TransformersWrapper."
        )
    return (other if env is None else env), policy, options
