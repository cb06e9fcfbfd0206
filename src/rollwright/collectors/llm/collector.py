"""LLMCollector: delivers dialogues with a language model, turn by turn or whole."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Unpack

from tensordict import TensorDictBase

from rollwright._options import with_options
from rollwright.collectors.collector import Collector
from rollwright.collectors.core import checked_state
from rollwright.collectors.delivery.stored import QueueClosed
from rollwright.collectors.llm.interface import (
    LENGTH_UNKNOWN,
    checked_postproc,
    environment_of,
    in_own_words,
    log_batch,
    queue_of,
    version_by,
)
from rollwright.collectors.llm.options import LLMOptions, check_lag
from rollwright.collectors.llm.workers import made_with_workers
from rollwright.collectors.options import ConversationOptions
from rollwright.collectors.rollout.environment import version_of
from rollwright.collectors.rollout.paths.conversations.exchange import WaitsEnded
from rollwright.collectors.rollout.paths.conversations.turns import TurnPath
from rollwright.collectors.workers.options import BackendOptions, WorkerOptions, wants_workers
from rollwright.data.llm.turns import Version

if TYPE_CHECKING:
    from rollwright.collectors.keywords import LLMKeywords
    from rollwright.collectors.rollout.environment import EnvMakers

_GRACE_S = 2.0  # for what is in progress at shutdown


@with_options(LLMOptions, BackendOptions, WorkerOptions, leave_out=["num_workers"])
class LLMCollector(Collector):
    """Collects dialogues: a language model answers, an environment follows, until the conversation is over.

    A frame is a turn: what the model read, what it wrote, and what followed. A conversation is a trajectory. Where the
    environment is made of conversations (``LLMEnv``, ``ChatEnv``) and the policy has an engine
    (``TransformersWrapper``), messages and tokens are passed between the two as they are, and a TensorDict is made of
    each turn when its batch is delivered. Any other environment and any other policy pass TensorDicts.

    With ``num_collectors=N``, in N processes: the call returns a
    :class:`~rollwright.collectors.llm.workers.MultiLLMCollector`, whose workers share the groups of the data.

    Args:
        env: an environment, or a callable that makes one; ``create_env_fn`` by the name of other collectors.
        policy: a callable on TensorDicts, such as a ``TransformersWrapper``.
        **options: those of :class:`~rollwright.collectors.llm.options.LLMOptions`.

    Yields:
        Lazily stacked TensorDicts ``[*env, T]``, the last dimension named ``"time"``; ``[N]`` with ``async_envs`` or
        ``flatten_data``; of complete conversations ``[turns]``, one conversation after another. Ragged entries have a
        length of their own in each record. With ``replay_buffer`` or ``queue``: None, when a batch was written.

    Raises:
        ValueError, TypeError: an option is wrong, or two of them contradict one another.
        EnvError, PolicyError: the environment or the policy broke its contract; the message names the conversation.
    """

    also_local = ("max_policy_lag", "policy_lag")

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """Choose by ``backend`` and ``num_collectors``; a collector with workers is of another class."""
        if cls is LLMCollector and wants_workers(kwargs):
            return made_with_workers(args, kwargs)
        return object.__new__(cls)

    def __init__(
        self, env: EnvMakers | None = None, policy: Callable[..., Any] | None = None, **options: Unpack[LLMKeywords]
    ) -> None:
        self._construct(*environment_of(env, dict[str, Any](options), policy))

    def _construct(self, create_env_fn: Any, policy: Callable[..., Any] | None, options: dict[str, Any]) -> None:
        super()._construct(create_env_fn, policy, options)
        self._use_tracker()

    def _parsed(self, options: dict[str, Any]) -> ConversationOptions:
        lag = {name: options.pop(name) for name in self.also_local if name in options}
        self.llm_options = LLMOptions.parse(options, type(self))
        parsed = ConversationOptions(**self.llm_options.translated(), **lag)
        if parsed.max_policy_lag is not None:
            check_lag(parsed.max_policy_lag, self.llm_options)
        return parsed

    @staticmethod
    def _in_own_words(rounding: str) -> str:
        return in_own_words(rounding)

    def _use_tracker(self) -> None:
        """Stamp turns with the versions of a ``PolicyVersion``: the user's, or the environment's."""
        if self._tracker is not None:
            self._rollout.acting.use_tracker(self._tracker)

    @property
    def _tracker(self) -> Any:
        given = self.llm_options.track_policy_version
        return version_of(self.env) if given is True else given or None

    @property
    def policy_version(self) -> Version | None:  # type: ignore[override]
        """Version of the weights: an integer or a UUID; None without ``track_policy_version``."""
        given = self.llm_options.track_policy_version
        return version_by(given and (self._tracker or True), self._weights.version)

    @property
    def dialog_turns_per_batch(self) -> int:
        """Turns in a batch, over all environments."""
        return self.frames_per_batch

    @property
    def total_dialog_turns(self) -> float:
        """Turns to take in all; infinity without an end."""
        return self.total_frames

    def set_postproc(self, postproc: Callable[[TensorDictBase], TensorDictBase] | None) -> None:
        """Apply another function to each batch from the next one on.

        Raises:
            TypeError: it cannot be called.
        """
        self._change_options(postproc=self.llm_options.shaping(checked_postproc(postproc)))

    def state_dict(self, *, engine_weights: bool = False) -> OrderedDict[str, Any]:
        """What :meth:`load_state_dict` needs to go on; ``version_tracker`` is the state of a ``PolicyVersion``."""
        state = super().state_dict(engine_weights=engine_weights)
        given = self._tracker
        if hasattr(given, "get_extra_state"):
            state["version_tracker"] = given.get_extra_state()
        return state

    def load_state_dict(self, state_dict: Mapping[str, Any], **kwargs: Any) -> None:
        """Go on from a saved state."""
        given, saved = self._tracker, checked_state(state_dict).get("version_tracker")
        if saved is None or not hasattr(given, "set_extra_state"):
            super().load_state_dict(state_dict, **kwargs)
            return
        before = given.get_extra_state()
        try:
            given.set_extra_state(saved)
            super().load_state_dict(state_dict, **kwargs)
        except BaseException:
            given.set_extra_state(before)
            raise
        given.set_extra_state(saved)  # to load the version has counted
        self._use_tracker()  # the engine stamps tokens with the version that was loaded

    def iterator(self) -> Iterator[TensorDictBase | None]:
        """Yield until ``total_frames`` are stepped, from wherever the collector stands."""
        for batch in super().iterator():
            if self.llm_options.verbose:
                log_batch(self)
            yield batch
            batch = None  # its memory is the consumer's alone

    def __len__(self) -> int:
        if self.options.total_frames == -1:
            raise TypeError(LENGTH_UNKNOWN)  # which list() takes for none
        return super().__len__()

    def shutdown(self, timeout: float | None = None, close_env: bool = True, raise_on_error: bool = True) -> None:
        """End the thread of :meth:`start`, and one that waits for room in the queue; close the environment.

        Answers, tools and rewards that a thread waits for have two seconds more, or half of ``timeout``. Conversations
        that they are missing from are not delivered, and counted in ``stats()["conversations_in_progress"]``.
        """
        writer = queue_of(self.options)
        if writer is not None:
            writer.closed = True
        path = self._rollout.path
        if isinstance(path, TurnPath):
            path.end_waits(_GRACE_S if timeout is None else min(_GRACE_S, timeout / 2))
        try:
            super().shutdown(timeout, close_env, raise_on_error)
        except (QueueClosed, WaitsEnded):  # in the thread: what was not taken is not delivered, as the state knows
            super().shutdown(timeout, close_env, raise_on_error)
