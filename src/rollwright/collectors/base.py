"""BaseCollector: the interface of all collectors, wherever their environments run; and Interruptor."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from html import escape
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, Unpack, cast

from tensordict import TensorDictBase

from rollwright._processes.forks import on_fork
from rollwright.collectors.core import Hooks, PostHook, PreHook, Reachable, WorkerStats, resolve
from rollwright.collectors.loggers import Logger
from rollwright.collectors.options import CollectorOptions
from rollwright.collectors.reports.observers import Observers, Profile, ProfileConfig
from rollwright.collectors.reports.report import report_of
from rollwright.collectors.reports.statistics import CollectorStats
from rollwright.collectors.weights import CollectorWeights, pick_weights
from rollwright.data.llm.turns import Version
from rollwright.errors import require
from rollwright.weight_update import WeightSyncScheme, WeightUpdaterBase

if TYPE_CHECKING:
    from rollwright.collectors.keywords import CollectorKeywords
    from rollwright.collectors.rollout.environment import EnvMaker


class Interruptor:
    """A switch that ends the current rollout after its current step.

    The collector reads it once a step, after the step was taken: an interrupted batch holds at least
    one step, and frames that were not taken have the trajectory id -1.

    Example:
        >>> switch = Interruptor()
        >>> switch.stop_collection()
        >>> switch.collection_stopped()
        True
        >>> switch.start_collection()
        >>> switch.collection_stopped()
        False
    """

    def __init__(self) -> None:
        self._stopped = threading.Event()
        on_fork(self)

    def reset_after_fork(self) -> None:
        """In a forked child, for the lock inside the event."""
        stopped, self._stopped = self._stopped.is_set(), threading.Event()
        if stopped:
            self._stopped.set()

    def start_collection(self) -> None:
        """Let rollouts run to their end."""
        self._stopped.clear()

    def stop_collection(self) -> None:
        """End the current rollout, and every further one after its first step."""
        self._stopped.set()

    def collection_stopped(self) -> bool:
        """Whether rollouts are to stop."""
        return self._stopped.is_set()


class BaseCollector(Reachable, ABC):
    """Iterates over batches of experience.

    A collector is an iterable (each ``iter()`` goes on where the last one stopped), an iterator through
    :meth:`next`, and a context manager that shuts down on exit.
    """

    closed: bool
    options: CollectorOptions
    _hooks: Hooks
    _observers: Observers
    _profile: Profile
    _weights: CollectorWeights
    _worker_idx: int | None = None
    _iterating: Iterator[TensorDictBase | None] | None = None

    def __init__(
        self, create_env_fn: EnvMaker, policy: Callable[..., Any] | None = None, **options: Unpack[CollectorKeywords]
    ) -> None:
        self._construct(create_env_fn, policy, dict[str, Any](options))  # mypy reads Collector.__new__ for arguments

    @abstractmethod
    def _construct(self, create_env_fn: Any, policy: Callable[..., Any] | None, options: dict[str, Any]) -> None:
        """Make the parts of the collector."""

    @staticmethod
    def _in_own_words(rounding: str) -> str:
        """How a subclass names what was rounded."""
        return rounding

    def is_initialized(self) -> bool:
        """Whether the collector can collect: it was constructed, and not shut down."""
        return not self.closed

    @classmethod
    def as_remote(cls, remote_config: Mapping[str, Any] | None = None) -> Any:
        """This class as an actor of Ray: ``Collector.as_remote({"num_gpus": 1}).remote(create_env_fn, policy, ...)``.

        Args:
            remote_config: what Ray reserves for it: ``num_cpus``, ``num_gpus``, ``memory``.

        Returns:
            A class of actors.

        Raises:
            MissingExtraError: Ray is not installed.
        """
        ray: Any = require("ray", extra="ray", purpose="as_remote()")
        return ray.remote(**remote_config)(cls) if remote_config else ray.remote(cls)

    if not TYPE_CHECKING:  # so that type checkers still know which names there are

        def __getattr__(self, name: str) -> Any:
            """An option, by its name: ``collector.postproc``."""
            if name not in ("options", "llm_options", "own_options"):
                for holder in ("options", "llm_options", "own_options"):
                    declared = self.__dict__.get(holder)
                    if declared is not None and name in type(declared).__dataclass_fields__:
                        return getattr(declared, name)
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    # Iteration --------------------------------------------------------------------------------

    @abstractmethod
    def iterator(self) -> Iterator[TensorDictBase | None]:
        """Yield batches until ``total_frames`` are delivered."""

    def __iter__(self) -> Iterator[TensorDictBase]:
        """Same as :meth:`iterator`, typed for those who read the batches: with a replay buffer, each one is None."""
        return cast("Iterator[TensorDictBase]", self.iterator())

    def next(self) -> TensorDictBase | None:
        """The next batch, or None when all are delivered.

        With a replay buffer, batches go there and None is returned each time; ``stats()["completed"]`` shows the end,
        as does ``next(collector)``, which raises ``StopIteration``.
        """
        iterating = self._to_go_on()
        for batch in iterating:  # there is no call, after which Ctrl-C would lose it
            self._iterating = iterating
            return batch
        return None

    def __next__(self) -> TensorDictBase:
        iterating = self._to_go_on()
        for batch in iterating:
            self._iterating = iterating
            return batch
        raise StopIteration

    def _to_go_on(self) -> Iterator[TensorDictBase]:
        """What the last call of :meth:`next` has left off; after its end or an error, a new one."""
        iterating, self._iterating = self._iterating, None
        return cast("Iterator[TensorDictBase]", self.iterator() if iterating is None else iterating)

    @abstractmethod
    def __len__(self) -> int:
        """Number of batches in all."""

    # Control ----------------------------------------------------------------------------------

    @abstractmethod
    def shutdown(self, timeout: float | None = None, close_env: bool = True, raise_on_error: bool = True) -> None:
        """Release environments and workers. May be called again."""

    def async_shutdown(self, timeout: float | None = None, close_env: bool = True) -> None:
        """Same as :meth:`shutdown`, for a collector that runs in the background."""
        self.shutdown(timeout=timeout, close_env=close_env)

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Keep a collector that runs in the background from stepping inside the ``with`` block."""
        yield

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.shutdown(raise_on_error=error is None)

    @abstractmethod
    def set_seed(self, seed: int, static_seed: bool = False) -> int:
        """Seed environments and torch; returns the seed of the last environment."""

    @abstractmethod
    def state_dict(self) -> OrderedDict[str, Any]:
        """What :meth:`load_state_dict` needs to go on."""

    @abstractmethod
    def load_state_dict(self, state_dict: Mapping[str, Any], **kwargs: Any) -> None:
        """Go on from a saved state."""

    @abstractmethod
    def stats(self, *, workers: WorkerStats = True) -> CollectorStats:
        """A snapshot of counts, rates and episodes that ``json.dumps`` takes; :class:`CollectorStats` lists them.

        Args:
            workers: with an entry ``workers``, for each of them; without workers there is none.
        """

    def is_running(self) -> bool:
        """Whether the thread of :meth:`start` collects, or is paused."""
        background = self.stats(workers=False).get("background", {})
        return bool(background.get("running"))

    def report(self) -> str:
        """What :meth:`stats` says, in words: where the time goes, what is slow, and what you can do about it.

        Example:
            >>> from rollwright import Collector
            >>> with Collector("CartPole-v1", frames_per_batch=200) as collector:
            ...     _ = collector.next()
            ...     print(collector.report().splitlines()[0].split(";")[0])
            Collector: 200 frames in 1 batches
        """
        return report_of(type(self).__name__, self.stats())

    def log_to(self, logger: Logger, *, every_s: float = 0.0, prefix: str = "collector") -> None:
        """Write the numbers of :meth:`stats` to a logger, at each batch that is delivered.

        They are points at the frames collected: ``collector/mean_return``, ``collector/frames_per_second``,
        ``collector/workers/0/frames``. Several loggers may be added. A logger that raises ends the iteration with its
        error; the next call of :meth:`next` delivers the batch that it came with.

        Args:
            logger: a :class:`~rollwright.collectors.loggers.Logger`, such as a ``CSVLogger``. It stays yours to close.
            every_s: seconds between two points, at least; the last batch always is one.
            prefix: of the names.

        Raises:
            TypeError: it is no logger.
            ValueError: ``every_s`` is negative.

        Example:
            >>> import tempfile
            >>> from rollwright import Collector
            >>> from rollwright.collectors.loggers import CSVLogger
            >>> with tempfile.TemporaryDirectory() as folder, CSVLogger(folder) as logger:
            ...     with Collector("CartPole-v1", frames_per_batch=100, total_frames=300) as collector:
            ...         collector.log_to(logger)
            ...         batches = sum(1 for _ in collector)
            ...     rows = (Path(folder) / "progress.csv").read_text().split()
            >>> batches, len(rows)
            (3, 4)
        """
        self._observers.add(logger, every_s, prefix)

    def _repr_html_(self) -> str:
        """What a notebook shows of it."""
        return f"<pre>{escape(self.report())}</pre>"

    @abstractmethod
    def fake_tensordict(self) -> TensorDictBase:
        """A batch of zeros with entries, shapes, dtypes and names of those that are delivered; nothing is stepped.

        To make storages or optimizers with, before the first batch. The policy is called once, on zeros, without side
        effects. With a replay buffer it is what a rollout brings there. Of whole trajectories
        (``trajs_per_batch``), whose number and lengths are not known, it holds one for each environment, as long as a
        rollout. True is only what ``set_truncated`` marks. Boundaries of ``compact_obs`` are left out.

        Raises:
            ValueError: frames vary in shape, as those of conversations do.
            RuntimeError: the collector was shut down.

        Example:
            >>> from rollwright.collectors import Collector
            >>> with Collector("CartPole-v1", frames_per_batch=32) as collector:
            ...     fake = collector.fake_tensordict()
            ...     fake.shape, fake["next", "reward"].dtype, collector.stats()["frames"]
            (torch.Size([32]), torch.float32, 0)
        """

    # Weights ----------------------------------------------------------------------------------

    def update_policy_weights_(
        self,
        policy_or_weights: Any = None,
        *,
        weights: Any = None,
        policy: Any = None,
        policy_weights: Any = None,
        weights_dict: Mapping[str, Any] | None = None,
        model_id: str | None = None,
        worker_ids: Any = None,
    ) -> int:
        """Give the policy new weights.

        In one process they act from the next batch on; while a thread collects (``start()``), they are copied, and act
        from its next step on (from its next batch on where the policy is compiled). Weights for workers are copied: a
        worker takes them between two steps, and acts with one version or with the next, never with a mixture. With
        ``max_policy_lag`` and ``policy_lag="wait"``, waits for workers whose rollout would be too stale.

        Args:
            policy_or_weights: a module, a ``state_dict``, a TensorDict or a nested dictionary of weights; or a
                dictionary from worker indices to any of these. Without any weights, the policy that was given at
                construction is read again (which matters when a copy of it acts elsewhere).
            weights: same, by name.
            policy: same, by name.
            policy_weights: same, by the name that older programs use.
            weights_dict: weights by the model that they are for: all are applied, or none.
            model_id: ``"policy"``, or a path from the collector such as ``"env.transform[0]"``.
            worker_ids: the workers (indices, or devices) to update; None for all.

        Returns:
            The version of the weights, one more than before.

        Raises:
            ValueError: arguments contradict one another, or weights do not fit; nothing was changed.
            TypeError: weights of an unknown form, or for something that has none.
            RuntimeError: nothing was given, and there is no module whose weights could be read.
        """
        given = pick_weights(policy_or_weights, weights, policy, policy_weights)
        return self._weights.update(given, weights_dict=weights_dict, model_id=model_id, worker_ids=worker_ids)

    def push_to_workers(self, weights: Any, worker_ids: Sequence[Any] | None) -> int:
        """For weight updaters: publish weights to workers without asking the updater again; returns the version."""
        return self._weights.apply(weights, worker_ids=worker_ids)

    @abstractmethod
    def get_model(self, model_id: str) -> Any:
        """The model that an id names."""

    def increment_version(self) -> Version | None:
        """Count an update of the weights; returns the new version."""
        self._weights.count_update()
        return self.policy_version

    def get_policy_model(self) -> Any:
        """The model of the policy: what an engine runs, or the policy itself."""
        policy = self.get_model("policy")
        return getattr(policy, "model", policy)

    def getattr_rb(self, attr: str) -> Any:
        """An attribute of the replay buffer, by name or path.

        Raises:
            RuntimeError: there is none.
        """
        if not hasattr(self.options.replay_buffer, "sample"):
            raise RuntimeError(f"getattr_rb: this collector has no replay buffer to read {attr!r} of.")
        return resolve(self.options.replay_buffer, attr)

    @property
    def weight_updater(self) -> WeightUpdaterBase | None:
        """The updater that the collector was given, or None."""
        return self._weights.updater

    def init_updater(self, *args: Any, **kwargs: Any) -> None:
        """Pass arguments to the weight updater's ``init``; without an updater, do nothing."""
        if self.weight_updater is not None:
            self.weight_updater.init(*args, **kwargs)

    @property
    def _receiver_schemes(self) -> dict[str, WeightSyncScheme] | None:
        """The name that paths of ``cascade_execute`` have for schemes."""
        return self._weights.receiver_schemes

    @_receiver_schemes.setter
    def _receiver_schemes(self, schemes: dict[str, WeightSyncScheme] | None) -> None:
        self._weights.receiver_schemes = schemes

    def register_scheme_receiver(
        self, weight_recv_schemes: dict[str, WeightSyncScheme], *, synchronize_weights: bool = True
    ) -> None:
        """Take weights from schemes whose senders are elsewhere; see :meth:`receive_weights`.

        Args:
            weight_recv_schemes: by model.
            synchronize_weights: wait for the first weights of each, and take them.

        Raises:
            TypeError: one is no scheme.
            TimeoutError: a sender has sent nothing.
        """
        self._weights.register_schemes(weight_recv_schemes, synchronize_weights=synchronize_weights)

    def receive_weights(self, policy_or_weights: Any = None, *, weights: Any = None, policy: Any = None) -> None:
        """Take weights: those that schemes have brought (:meth:`register_scheme_receiver`), or those that are passed.

        Raises:
            ValueError: weights were passed, and schemes are registered.
        """
        self._weights.receive(policy_or_weights, weights, policy)

    # Hooks ------------------------------------------------------------------------------------

    @property
    def pre_collect_hook(self) -> PreHook | None:
        """Called without arguments before each rollout; may be set at any time."""
        return self._hooks.pre_collect_hook

    @pre_collect_hook.setter
    def pre_collect_hook(self, hook: PreHook | None) -> None:
        self._set_hook("pre_collect_hook", hook)

    @property
    def post_collect_hook(self) -> PostHook | None:
        """Called with each batch just before it is delivered; may be set at any time."""
        return self._hooks.post_collect_hook

    @post_collect_hook.setter
    def post_collect_hook(self, hook: PostHook | None) -> None:
        self._set_hook("post_collect_hook", hook)

    def _set_hook(self, name: str, hook: Any) -> None:
        self._hooks.set(name, hook)

    def set_pre_collect_hook(self, hook: PreHook | None) -> None:
        """Set :attr:`pre_collect_hook`."""
        self.pre_collect_hook = hook

    def set_post_collect_hook(self, hook: PostHook | None) -> None:
        """Set :attr:`post_collect_hook`."""
        self.post_collect_hook = hook

    # Reaching in ------------------------------------------------------------------------------

    @property
    def worker_idx(self) -> int:
        """Index of this collector among its siblings.

        Raises:
            RuntimeError: it was never set.
        """
        if self._worker_idx is None:
            raise RuntimeError("worker_idx is not set. Pass worker_idx= to the collector, or assign it.")
        return self._worker_idx

    @worker_idx.setter
    def worker_idx(self, value: int | None) -> None:
        self._worker_idx = value

    # Profiling --------------------------------------------------------------------------------

    def enable_profile(
        self,
        *,
        workers: list[int] | None = None,
        num_rollouts: int = 3,
        warmup_rollouts: int = 1,
        save_path: str | Path | None = None,
        activities: list[str] | None = None,
        record_shapes: bool = True,
        profile_memory: bool = False,
        with_stack: bool = True,
        with_flops: bool = False,
        on_trace_ready: Callable[[Any], None] | None = None,
    ) -> None:
        """Trace the first rollouts; see :class:`~rollwright.collectors.ProfileConfig` for the arguments.

        Raises:
            RuntimeError: iteration has begun.
            ValueError: ``num_rollouts`` does not exceed ``warmup_rollouts``.
        """
        self._profile.enable(
            workers=[0] if workers is None else list(workers),
            num_rollouts=num_rollouts,
            warmup_rollouts=warmup_rollouts,
            save_path=save_path,
            activities=["cpu", "cuda"] if activities is None else list(activities),
            record_shapes=record_shapes,
            profile_memory=profile_memory,
            with_stack=with_stack,
            with_flops=with_flops,
            on_trace_ready=on_trace_ready,
        )

    def disable_profile(self) -> None:
        """Trace no (further) rollouts; what was recorded is written."""
        self._profile.disable()

    @property
    def profile_config(self) -> ProfileConfig | None:
        """What is traced, or None."""
        return self._profile.config
