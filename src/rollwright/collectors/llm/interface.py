"""Dialogues: what collectors of conversations offer beside other collectors, in one process or in many."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, cast

from tensordict import TensorDictBase

from rollwright.collectors.attribute_paths import resolve
from rollwright.collectors.base import BaseCollector
from rollwright.collectors.delivery.queues import QueueWriter
from rollwright.errors import require

if TYPE_CHECKING:
    from rollwright.collectors.llm.options import LLMOptions
    from rollwright.collectors.options import CollectorOptions

__all__ = ["LENGTH_UNKNOWN", "Dialogues", "environment_of"]

_log = logging.getLogger("rollwright.llm")
LENGTH_UNKNOWN = (
    "How many batches this collector delivers depends on its data (total_dialog_turns=-1), so it has no length. "
    "Iterate over it, or pass total_dialog_turns=."
)
_WORDS = {"frames_per_batch": "dialog_turns_per_batch", "total_frames": "total_dialog_turns"}


class Dialogues(BaseCollector):
    """Names and methods of collectors of conversations.

    Attributes:
        llm_options: as the user gave them.
    """

    llm_options: LLMOptions
    options: CollectorOptions
    frames_per_batch: int
    total_frames: float

    @staticmethod
    def _in_own_words(rounding: str) -> str:
        for word, own in _WORDS.items():
            rounding = rounding.replace(word, own)
        return rounding

    @property
    def dialog_turns_per_batch(self) -> int:
        """Turns in a batch, over all environments."""
        return self.frames_per_batch

    @property
    def total_dialog_turns(self) -> float:
        """Turns to take in all; infinity without an end."""
        return self.total_frames

    @property
    def _writer(self) -> QueueWriter | None:
        options = getattr(self, "options", None)
        buffer = None if options is None else options.replay_buffer
        return buffer if isinstance(buffer, QueueWriter) else None

    # Versions -----------------------------------------------------------------------------------

    @property
    def _is_tracked(self) -> bool:
        return self.llm_options.track_policy_version is not False

    @property
    def policy_version(self) -> Any:
        """Version of the weights: an integer or a UUID; None without ``track_policy_version``."""
        if not self._is_tracked:
            return None
        tracker, version = self._tracker, self._weights.version
        if hasattr(tracker, "at"):  # of the newest weights, which act from the next step of a thread on
            return tracker.at(version)
        return version if tracker is None or isinstance(tracker.version, int) else tracker.version

    @property
    def _tracker(self) -> Any:
        """The ``PolicyVersion`` that counts; None: the collector does."""
        given = self.llm_options.track_policy_version
        return None if isinstance(given, bool) else given

    def get_policy_version(self) -> Any:
        """Same as :attr:`policy_version`."""
        return self.policy_version

    def increment_version(self) -> Any:
        """Count an update of the weights; returns the new version."""
        self._weights.count_update()
        return self.policy_version

    def get_policy_model(self) -> Any:
        """The model of the policy: what an engine runs, or the policy itself."""
        policy = self.get_model("policy")
        return getattr(policy, "model", policy)

    # Parts ----------------------------------------------------------------------------------------

    def set_postproc(self, postproc: Callable[[TensorDictBase], TensorDictBase] | None) -> None:
        """Apply another function to each batch from the next one on.

        Raises:
            TypeError: it cannot be called.
        """
        if postproc is not None and not callable(postproc):
            raise TypeError(f"postproc: expected a callable or None, got {type(postproc).__name__}: {postproc!r}.")
        cast(Any, self)._change_options(postproc=postproc)

    def getattr_rb(self, attr: str) -> Any:
        """An attribute of the replay buffer.

        Raises:
            RuntimeError: there is none.
        """
        if self.options.replay_buffer is None or self._writer is not None:
            raise RuntimeError(f"getattr_rb: this collector has no replay buffer to read {attr!r} of.")
        return resolve(self.options.replay_buffer, attr)

    def is_initialized(self) -> bool:
        """Whether the collector can collect: it was constructed, and not shut down."""
        return not cast(Any, self).closed

    @classmethod
    def as_remote(cls, remote_config: Mapping[str, Any] | None = None) -> Any:
        """This class as an actor of Ray: ``LLMCollector.as_remote({"num_gpus": 1}).remote(env, policy_factory=...)``.

        Args:
            remote_config: what Ray reserves for it: ``num_cpus``, ``num_gpus``, ``memory``.

        Returns:
            A class of actors.

        Raises:
            MissingExtraError: Ray is not installed.
        """
        ray: Any = require("ray", extra="ray", purpose="as_remote()")
        return ray.remote(**remote_config)(cls) if remote_config else ray.remote(cls)

    def _log_batch(self) -> None:
        if not self.llm_options.verbose:
            return
        if not _log.isEnabledFor(logging.INFO) or not _log.hasHandlers():
            _log.setLevel(logging.INFO)
            _log.addHandler(logging.StreamHandler())
        stats = self.stats()
        rate = stats["frames_per_second"]
        _log.info(
            "%s: %s of %s turns, %s conversations, %s, policy version %s",
            type(self).__name__,
            f"{stats['frames']:,}",
            "endless" if stats["total_frames"] is None else f"{stats['total_frames']:,}",
            f"{stats['episodes']:,}",
            "" if rate is None else f"{rate:.1f} turns/s",
            self.policy_version,
        )


def environment_of(
    env: Any, options: dict[str, Any], policy: Callable[..., Any] | None
) -> tuple[Any, Callable[..., Any] | None, dict[str, Any]]:
    """Environment, policy and the other options of a collector of conversations.

    Raises:
        TypeError: there is no environment, or it was given twice; there is neither a policy nor what makes one.
    """
    other = options.pop("create_env_fn", None)
    if env is not None and other is not None:
        raise TypeError("env and create_env_fn are two names of the environment. Drop one of the two.")
    if env is None and other is None:
        raise TypeError("env: expected an environment, or a function that makes one, got None.")
    if policy is None and options.get("policy_factory") is None:
        raise TypeError(
            "policy: expected a policy, or policy_factory=, which makes one: there are no random answers. Pass for "
            "example a TransformersWrapper."
        )
    if policy is not None and options.get("policy_factory") is not None:
        raise TypeError("policy and policy_factory were both given. Drop one of the two.")
    return (other if env is None else env), policy, options
