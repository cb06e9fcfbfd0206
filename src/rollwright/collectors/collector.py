"""Collector: delivers batches of experience, collected in this process."""

from __future__ import annotations

import warnings
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Literal, Self, Unpack, overload

from rollwright._options import with_options
from rollwright.collectors import saved_state as _resume
from rollwright.collectors._backgrounding import BackgroundCore
from rollwright.collectors.attribute_paths import resolve
from rollwright.collectors.factory import BackendOptions, make_with_workers
from rollwright.collectors.options import CollectorOptions
from rollwright.collectors.weights import updates as weight_forms
from rollwright.collectors.workers.options import WorkerOptions
from rollwright.envs.recreation.policy import num_recreations

if TYPE_CHECKING:
    from rollwright.collectors.keywords import CollectorKeywords, MultiKeywords, WorkerKeywords
    from rollwright.collectors.multi import MultiAsyncCollector, MultiCollector, MultiSyncCollector
    from rollwright.collectors.rollout.environment import EnvMaker, EnvMakers

__all__ = ["Collector"]

MYPY = False  # which mypy takes to be true


@with_options(CollectorOptions, BackendOptions, WorkerOptions, leave_out=["num_workers"])
class Collector(BackgroundCore):
    """Collects experience in this process.

    With ``num_collectors=N`` or ``backend="process"``, in N other processes: the call returns a
    :class:`~rollwright.collectors.MultiCollector` then (``sync=False`` by default).

    Args:
        create_env_fn: an environment, or a callable that makes one.
        policy: a callable on TensorDicts, a ``TensorDictModule``, an ``nn.Module`` whose ``forward`` takes entries of
            the environment by name, or None for random actions.
        **options: those of :class:`~rollwright.collectors.CollectorOptions`; ``num_collectors`` and ``backend``; with
            them, those of :class:`~rollwright.collectors.MultiCollector`.

    Yields:
        TensorDicts ``[*env, T]``, ``T = ceil(frames_per_batch / number of environments)``, the last dimension named
        ``"time"``. The root holds what the policy saw and did; ``"next"`` holds what came of it, with the true last
        observation where a trajectory ended. ``("collector", "traj_ids")`` int64 ``[*env, T]`` tells trajectories
        apart; a trajectory may go on in the next batch. Each batch has memory of its own (unless ``return_same_td``).

    Raises:
        ValueError, TypeError: an option is wrong, or two of them contradict one another.
        EnvError, PolicyError: the environment or the policy broke its contract; the message says how.

    Example:
        >>> from rollwright.envs import GymEnv
        >>> with Collector(lambda: GymEnv("CartPole-v1"), frames_per_batch=64, total_frames=128) as collector:
        ...     for batch in collector:
        ...         print(batch.shape, batch.names, batch["next", "reward"].shape)
        torch.Size([64]) ['time'] torch.Size([64, 1])
        torch.Size([64]) ['time'] torch.Size([64, 1])
    """

    _has_warned_of_unsaved = False

    # mypy reads __new__ and not the inherited __init__; pyright reads both, for subclasses too, and needs the last one.
    @overload
    def __new__(  # type: ignore[misc]  # of another class
        cls,
        create_env_fn: EnvMakers,
        policy: Callable[..., Any] | None = None,
        *,
        num_collectors: int,
        sync: Literal[True],
        backend: Literal["process", "multiprocessing"] | None = None,
        **options: Unpack[WorkerKeywords],
    ) -> MultiSyncCollector: ...
    @overload
    def __new__(  # type: ignore[misc]
        cls,
        create_env_fn: EnvMakers,
        policy: Callable[..., Any] | None = None,
        *,
        num_collectors: int,
        sync: Literal[False] | None = None,
        backend: Literal["process", "multiprocessing"] | None = None,
        **options: Unpack[WorkerKeywords],
    ) -> MultiAsyncCollector: ...
    @overload
    def __new__(  # type: ignore[misc]
        cls,
        create_env_fn: EnvMakers,
        policy: Callable[..., Any] | None = None,
        *,
        num_collectors: int,
        sync: bool | None,
        backend: Literal["process", "multiprocessing"] | None = None,
        **options: Unpack[WorkerKeywords],
    ) -> MultiCollector: ...
    @overload
    def __new__(  # type: ignore[misc]
        cls,
        create_env_fn: EnvMakers,
        policy: Callable[..., Any] | None = None,
        *,
        backend: Literal["process", "multiprocessing"],
        **options: Unpack[MultiKeywords],
    ) -> MultiCollector: ...
    @overload
    def __new__(
        cls,
        create_env_fn: EnvMaker,
        policy: Callable[..., Any] | None = None,
        **options: Unpack[CollectorKeywords],
    ) -> Self: ...

    if not MYPY:

        @overload
        def __new__(cls, *args: Any, **kwargs: Any) -> Self: ...

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """Choose by ``backend`` and ``num_collectors``; a collector with workers is of another class."""
        other = make_with_workers(args, kwargs) if cls is Collector else None
        return super().__new__(cls) if other is None else other

    # State ------------------------------------------------------------------------------------

    def state_dict(self) -> OrderedDict[str, Any]:
        """What it takes to go on from here, bit for bit, in this process or another; for use between batches.

        ``torch.load(..., weights_only=True)`` reads it. Saving changes nothing in the run.

        Returns:
            ``policy_state_dict`` (where the policy is a module) and ``env_state_dict``, both of them live and no
            copies, as everywhere in torch; ``frames``, ``iter``, ``policy_version``, ``traj_pool`` (the next
            trajectory id) and ``episodes`` (statistics); ``env_checkpoint`` (all that the environment is, its
            random generators included) and ``trajectories`` (what the next step is taken from; None where the
            environment cannot be saved);
            ``held`` (frames of whole trajectories that are not delivered yet; a replay buffer has a state of its own);
            ``streams`` (the global generators of torch, NumPy and Python); ``unsaved``: a line for each thing that
            could not be saved.

        Warns:
            UserWarning: something could not be saved; once for each collector.

        Example:
            >>> from rollwright.envs import GymEnv
            >>> first, second = (Collector(lambda: GymEnv("CartPole-v1"), frames_per_batch=32) for _ in range(2))
            >>> _ = first.next()
            >>> state = first.state_dict()
            >>> expected = first.next()
            >>> second.load_state_dict(state)
            >>> bool((second.next() == expected).all())
            True
        """
        with self._between_batches():
            state = _resume.save(self)
        if state["unsaved"] and not self._has_warned_of_unsaved:
            self._has_warned_of_unsaved = True
            anew = "begins its environment anew, with new trajectory ids"
            loses = anew if state["trajectories"] is None else "goes on without it"
            warnings.warn(
                f"state_dict: not all can be saved, and a collector that loads this state {loses}. "
                f"{'; '.join(state['unsaved'])}.",
                UserWarning,
                stacklevel=2,
            )
        return state

    def load_state_dict(self, state_dict: Mapping[str, Any], **kwargs: Any) -> None:
        """Go on from a saved state.

        The next batch of a collector that was made with the same arguments and has stepped nothing is, to the bit,
        the one that the saved collector delivered next. A collector that has stepped gives new ids to the
        trajectories that it goes on with, for it may have used theirs. Trajectories begin anew where the
        environment was not saved (``unsaved`` names it) or was of another make.

        .. warning:: The state of an environment is pickled, and loading it can run any code. Load only what you trust.

        Args:
            state_dict: of :meth:`state_dict`.
            **kwargs: go to ``load_state_dict`` of policy and environment (``strict=False``).

        Raises:
            KeyError: it is the state of something else.
            EnvError: a class of the environment is not there under its name.

        Warns:
            UserWarning: the environment is of another make than the one that was saved.
        """
        with self._between_batches():
            _resume.load(self, state_dict, **kwargs)

    # Weights ----------------------------------------------------------------------------------

    def _update_weights(
        self, given: Any, *, weights_dict: Mapping[str, Any] | None, model_id: str | None, worker_ids: Any
    ) -> int:
        """Apply an update from the next batch on.

        While a thread collects (:meth:`start`), the weights are copied here, and act from the thread's next step on
        (from its next batch on where the policy is compiled).

        Raises:
            RuntimeError: a thread collects, nothing was given, and there is no module in the policy to read again.
        """
        self._raise_of_background()
        update = weight_forms.parse_update(
            given,
            weights_dict=weights_dict,
            model_id=model_id,
            worker_ids=worker_ids,
            own={self._worker_idx or 0, self.policy_device},
            fallback=self._policy_source,
        )
        running = self._running
        if running is not None:
            if not update and self._none_to_publish:
                raise RuntimeError(
                    f"update_policy_weights_: found no module in the policy ({type(self.policy).__name__}) whose "
                    "weights could be published to the thread of start(). Pass an nn.Module or a TensorDictModule "
                    "as policy, or call increment_version() to count an update of your own."
                )
            update = {name: weight_forms.snapshot(new) for name, new in update.items()}
        ready = {name: weight_forms.prepare(self.get_model(name), new, name) for name, new in update.items()}
        version = None if running is None else running.publish(ready)
        if version is not None:
            return version
        for apply in ready.values():
            apply()
        self._policy_version += 1
        return self._policy_version

    def _version_now(self) -> int:
        return self.policy_version

    def _not_acting(self) -> AbstractContextManager[None]:
        return self.pause()

    def _received(self, models: Sequence[str]) -> None:
        self.increment_version()

    def get_model(self, model_id: str) -> Any:
        """The model that an id names: ``"policy"``, a path from the collector, or a part of the policy (``"actor"``).

        Raises:
            ValueError: there is no such model.
        """
        if model_id == "policy":
            return self.policy if self._policy_target is None else self._policy_target
        try:
            return resolve(self, model_id)
        except AttributeError:
            try:
                return resolve(self.policy, model_id)
            except AttributeError as error:
                raise ValueError(
                    f"model_id: expected 'policy', a part of it, or a path from the collector such as 'env.transform', "
                    f"got {model_id!r}. {error}"
                ) from error

    @property
    def policy_version(self) -> int:
        """Number of updates of the weights so far."""
        running = self._running
        return self._policy_version if running is None else running.version

    def get_policy_version(self) -> int:
        """Same as :attr:`policy_version`."""
        return self.policy_version

    def increment_version(self) -> int:
        """Count an update of the weights; returns the new version."""
        running = self._running
        version = None if running is None else running.publish({})
        if version is None:
            version = self._policy_version = self._policy_version + 1
        return version

    # Observation ------------------------------------------------------------------------------

    def stats(self) -> dict[str, Any]:
        """Counts, rates and episodes; ``json.dumps`` takes it.

        Returns:
            ``frames``, ``batches`` (delivered), ``total_frames``, ``total_batches`` (None without an end),
            ``completed``, ``frames_per_batch``, ``frames_per_second``, ``seconds`` by stage, ``episodes``,
            ``mean_return`` and ``mean_length`` (over the last 100), ``last_return``, ``policy_version``,
            ``env_recreations`` (environments recreated by ``on_env_failure="recreate"``), ``devices``,
            ``paths`` (what runs environment and policy, how a buffer is written, and why), ``bytes_held``,
            ``waiting_for``. With ``trajs_per_batch``: ``trajectories_held`` (complete, not delivered yet),
            ``frames_held`` (of these, and of those under way) and ``frames_dropped`` (of those that a reset has cut).
            With a replay buffer: its ``write_count``. After :meth:`start`: ``background`` (whether the thread is
            ``running``, ``paused``, or ended by an ``error``) and ``policy_version_acting``.
        """
        elapsed = self._timer.total - (0.0 if self._background is None else self._background.rest_s)
        return {
            "frames": self._frames,
            "batches": self._iter,
            "total_frames": None if self._counts.batches is None else self.total_frames,
            "total_batches": self._delivery.num_batches,
            "completed": self.completed,
            "frames_per_batch": self.frames_per_batch,
            "frames_per_second": self._timer.frames / elapsed if elapsed else None,
            "seconds": {"total": elapsed, **self._timer.seconds},
            **self._episodes.summary(),
            "policy_version": self.policy_version,
            "env_recreations": num_recreations(self.env),
            "devices": {name: None if device is None else str(device) for name, device in vars(self.devices).items()},
            "paths": {**self._how, **self._delivery.how},
            "bytes_held": self._memory.num_bytes,
            **self._delivery.stats(),
            "waiting_for": None,
            **self._background_stats(),
        }

    def getattr_env(self, attr: str) -> Any:
        """An attribute of the environment."""
        return resolve(self.env, attr)

    def getattr_policy(self, attr: str) -> Any:
        """An attribute of the policy."""
        return resolve(self.policy, attr)

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}(\n    env={self.env},\n    policy={self.policy},\n"
            f"    frames_per_batch={self.frames_per_batch}, total_frames={self.total_frames},\n"
            f"    devices={self.devices},\n    paths={self._how},\n)"
        )
