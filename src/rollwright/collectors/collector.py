"""Collector: delivers batches of experience, collected in this process."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, Literal, Self, Unpack, cast, overload

import torch
from tensordict import TensorDictBase
from torch import nn

from rollwright._options import with_options
from rollwright.collectors.base import BaseCollector
from rollwright.collectors.core import Hooks, NothingLeft, WorkerStats, check_worker_stats
from rollwright.collectors.delivery.base import split
from rollwright.collectors.delivery.rows import batch_memory
from rollwright.collectors.delivery.saved_state import SavedState, warn_of_unsaved
from rollwright.collectors.delivery.stored import choose_delivery
from rollwright.collectors.delivery.thread import Background
from rollwright.collectors.options import CollectorOptions, ledger_of, warn_of_options
from rollwright.collectors.reports.observers import Observers, Profile
from rollwright.collectors.reports.statistics import CollectorStats
from rollwright.collectors.rollout.environment import EnvMaker, making_env
from rollwright.collectors.rollout.policy import making_policy, sync_function
from rollwright.collectors.rollout.rollout import Rollout
from rollwright.collectors.rollout.state import TrajectoryPool
from rollwright.collectors.rollout.stats import announce_rounding
from rollwright.collectors.weights import LocalWeights
from rollwright.collectors.workers.options import BackendOptions, WorkerOptions, local_options, make_with_workers
from rollwright.collectors.workers.transports import WorkerBackend

if TYPE_CHECKING:
    from rollwright.collectors.keywords import CollectorKeywords, MultiKeywords, WorkerKeywords
    from rollwright.collectors.multi import MultiAsyncCollector, MultiCollector, MultiSyncCollector
    from rollwright.collectors.rollout.environment import EnvMakers


MYPY = False  # which mypy takes to be true


@with_options(CollectorOptions, BackendOptions, WorkerOptions, leave_out=["num_workers"])
class Collector(BaseCollector):
    """Steps an environment with a policy, and yields batches of experience.

    Collects in this process. With ``num_collectors=N`` or ``backend="process"``, it collects in N other processes; the
    call then returns a :class:`~rollwright.collectors.MultiCollector` (``sync=False`` by default).

    Args:
        create_env_fn: an environment, its name, or a function that makes one.
        policy: a ``TensorDictModule``; a function or an ``nn.Module`` whose arguments are named like entries of the
            environment; a function of a TensorDict; None for random actions.
        **options: those of :class:`~rollwright.collectors.CollectorOptions`; ``num_collectors`` and ``backend``; with
            them, those of :class:`~rollwright.collectors.MultiCollector`.

    Yields:
        TensorDicts ``[*env, T]`` with ``T = ceil(frames_per_batch / number of environments)``; the last dimension is
        named ``"time"``. The root has what the policy saw and did. ``"next"`` has what followed, with the true last
        observation where a trajectory ended. ``("collector", "traj_ids")``, int64 ``[*env, T]``, identifies
        trajectories; a trajectory may continue in the next batch. Each batch has memory of its own, unless
        ``return_same_td=True``.

    Raises:
        ValueError, TypeError: an option is wrong, or two options contradict each other.
        EnvError, PolicyError: the environment or the policy broke its contract; the message describes it.

    Example:
        >>> from rollwright.envs import GymEnv
        >>> with Collector(lambda: GymEnv("CartPole-v1"), frames_per_batch=64, total_frames=128) as collector:
        ...     for batch in collector:
        ...         print(batch.shape, batch.names, batch["next", "reward"].shape)
        torch.Size([64]) ['time'] torch.Size([64, 1])
        torch.Size([64]) ['time'] torch.Size([64, 1])
    """

    also_local: tuple[str, ...] = ()  # options of collectors with workers that this one has in one process, too
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
        backend: WorkerBackend | None = None,
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
        backend: WorkerBackend | None = None,
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
        backend: WorkerBackend | None = None,
        **options: Unpack[WorkerKeywords],
    ) -> MultiCollector: ...
    @overload
    def __new__(  # type: ignore[misc]
        cls,
        create_env_fn: EnvMakers,
        policy: Callable[..., Any] | None = None,
        *,
        backend: WorkerBackend,
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

    def _construct(self, create_env_fn: EnvMaker, policy: Callable[..., Any] | None, options: dict[str, Any]) -> None:
        self.closed = True  # until construction succeeds
        owner = type(self).__name__
        self.options = parsed = self._parsed(local_options(options, type(self)))
        parsed.check_devices()
        self.worker_idx = parsed.worker_idx
        self._hooks = Hooks(parsed.pre_collect_hook, parsed.post_collect_hook)
        self._profile = Profile(lambda: self._worker_idx)
        self._observers = Observers(self.stats, progress=parsed.progress, name=owner, noun=self._in_own_words("frames"))
        self._kept: list[TensorDictBase | None] = []  # batches that nobody has got yet, since something was raised
        with making_env(create_env_fn, parsed) as env, making_policy(policy, parsed, env) as made:
            self._rollout = rollout = Rollout(
                env,
                made,
                parsed,
                given=policy,
                hooks=self._hooks,
                ids=TrajectoryPool(ledger_of(parsed.replay_buffer)),
                memory=batch_memory(parsed),
                interrupted=None if parsed.interruptor is None else parsed.interruptor.collection_stopped,
                owner=owner,
            )
            self.env, self._traj_pool = rollout.env, rollout.ids
            self.frames_per_batch, self.total_frames = rollout.counts.frames, rollout.counts.total
            self.requested_frames_per_batch = parsed.frames_per_batch
            self.init_random_frames = rollout.counts.random_frames
            self._setup_devices()
            announce_rounding(owner, self._in_own_words(rollout.counts.rounding))
            self._delivery = choose_delivery(rollout, self._profile, self._split)
            self._background = Background(rollout, self._delivery, self._observers.delivered)
            self._weights = LocalWeights(self, rollout, self._background, lambda: self._worker_idx)
            self._saved_state = SavedState(rollout, self._delivery)
            self._weights.use_updater(parsed.weight_updater, self)
            self.closed = False
            if parsed.weight_recv_schemes:
                self.register_scheme_receiver(dict(parsed.weight_recv_schemes))
            warn_of_options(owner, parsed)

    def _parsed(self, options: dict[str, Any]) -> CollectorOptions:
        return CollectorOptions.parse(options, type(self))

    def _change_options(self, **changes: Any) -> None:
        """Collect with other options from the next batch on."""
        with self._background.between_batches():
            self.options = self._rollout.options = self.options.override(**changes)

    @property
    def policy(self) -> Any:
        """What acts: the policy that was passed, or a copy of it on another device or for a thread."""
        return self._rollout.policy

    @property
    def completed(self) -> bool:
        """Whether ``total_frames`` were stepped."""
        return self._rollout.completed

    # One step, under the names of the reference pages -----------------------------------------

    def _setup_devices(self) -> None:
        devices, syncs = self._rollout.devices, self._rollout.syncs
        self.devices = devices
        self.policy_device, self.env_device, self.storing_device = devices.policy, devices.env, devices.storing
        self._cast_to_policy_device, self._cast_to_env_device = devices.cast_to_policy, devices.cast_to_env
        self._carrier_has_no_device = devices.current_has_no_device
        self._sync_policy, self._sync_env, self._sync_storage = syncs

    def _get_sync_fn(self, device: torch.device | None) -> Callable[[], None]:
        return sync_function(None if self.options.no_cuda_sync else device)

    @property
    def _carrier(self) -> TensorDictBase | None:
        return self._rollout.current

    def _make_carrier(self, **kwargs: Any) -> None:
        self._rollout.start_trajectories(**kwargs)

    def _update_traj_ids(self, ended: torch.Tensor) -> None:
        self._rollout.path.replace_ids(ended)

    def _split(self, batch: TensorDictBase) -> TensorDictBase:
        return split(batch)

    # Iteration --------------------------------------------------------------------------------

    def iterator(self) -> Iterator[TensorDictBase | None]:
        """Yield until ``total_frames`` are stepped, from wherever the collector stands.

        Batches; or, with a replay buffer, None for each rollout that was written there.
        """
        delivery, lock = self._delivery, self._background.step_lock
        while True:
            with lock.taken():
                self._background.check_idle("iteration")
                if not self._kept and not delivery.ready():
                    delivery.ended()
                    return
                has_room = bool(self._kept) or delivery.has_room()
                if has_room and not self._kept:
                    with suppress(NothingLeft):
                        delivery.next(self._kept)
            if self._kept:
                if self._observers.follow:
                    self._observers.delivered()
                yield from map(list.pop, [self._kept])  # by one operation: between two, Ctrl-C would lose it
            elif not has_room:
                delivery.await_room()

    def __len__(self) -> int:
        return self._delivery.length()

    def rollout(self) -> TensorDictBase:
        """Collect one batch, which counts as neither delivered nor post-processed.

        Trajectories that go on in it cannot be delivered whole any more (``trajs_per_batch``).

        Returns:
            ``[*env, T]``, see the class.

        Raises:
            RuntimeError: the collector was shut down.
        """
        with self._background.step_lock.taken():
            self._background.check_idle("rollout")
            try:
                return self._rollout.run()
            finally:
                self._delivery.missed()

    def fake_tensordict(self) -> TensorDictBase:
        """A batch of zeros with entries, shapes, dtypes and names of those that are delivered; nothing is stepped."""
        with self._background.between_batches():
            return self._delivery.blank()

    def reset(self, index: Any = None, **kwargs: Any) -> None:
        """Begin new trajectories, in all environments or in some of a batch.

        Trajectories that are held (``trajs_per_batch``) are dropped.

        Args:
            index: anything that indexes the environment's batch; None for all.
            **kwargs: go to the environment's ``reset``.
        """
        with self._background.between_batches():
            self._rollout.reset(index, **kwargs)
            if index is None:
                self._delivery.forget()

    def set_seed(self, seed: int, static_seed: bool = False) -> int:
        """Seed environments and torch's global generator, and begin new trajectories with the next batch.

        Trajectories that are held (``trajs_per_batch``) are dropped.

        Args:
            seed: of the first environment; further ones get ``seed + 1`` and so on.
            static_seed: give all environments the same seed.

        Returns:
            The seed of the last environment.
        """
        with self._background.between_batches():
            last = self._rollout.set_seed(seed, static_seed=static_seed)
            self._delivery.forget()
        return last

    # A thread ---------------------------------------------------------------------------------

    def start(self) -> None:
        """Collect in a thread, into the replay buffer, until ``total_frames`` are stepped or :meth:`async_shutdown`.

        The thread acts with a copy of the policy: train yours, and call :meth:`update_policy_weights_` when it is to
        act with the new weights. The modules that a function, a bound method, a ``functools.partial`` or another object
        reads are copied and updated, too; what else a function reads, it shares with yours (and a module that cannot be
        copied, with a warning). What goes wrong in the thread is raised at the next call of :meth:`pause`,
        :meth:`update_policy_weights_`, :meth:`reset`, :meth:`state_dict`, :meth:`async_shutdown` or iteration, or by a
        ``sample()`` of the buffer that waits (its ``limiter``), once; ``stats()["background"]`` has it before.
        Where the buffer has a limiter, the thread waits between two batches, and ``stats()["waiting_for"]`` reports it.
        Meanwhile:

        - :meth:`stats`, :meth:`pause`, :meth:`update_policy_weights_`: at any time.
        - :meth:`reset`, :meth:`set_seed`, :meth:`state_dict`, :meth:`load_state_dict`: the thread ends its batch
          between two steps, writes it, and rests until they are done.
        - iteration, :meth:`next`, :meth:`rollout`: an error.

        Raises:
            RuntimeError: there is no replay buffer, the thread runs already, or the collector was shut down.
            TypeError: the policy cannot be copied.

        Warns:
            UserWarning: modules act that could not be copied.

        Example:
            >>> import time
            >>> from rollwright.collectors import Collector
            >>> from rollwright.data import LazyTensorStorage, ReplayBuffer
            >>> from rollwright.envs import GymEnv
            >>> buffer = ReplayBuffer(storage=LazyTensorStorage(1000), batch_size=32)
            >>> collector = Collector(lambda: GymEnv("CartPole-v1"), frames_per_batch=50, replay_buffer=buffer)
            >>> collector.start()
            >>> while len(buffer) < 50:
            ...     time.sleep(0.001)
            >>> buffer.sample().shape
            torch.Size([32])
            >>> collector.async_shutdown()
        """
        self._rollout.check_open()
        self._background.start()

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Keep the thread of :meth:`start` between two steps inside the ``with`` block; it always goes on after it.

        The replay buffer stays as it is inside the block, also if ``map_fn`` is called: what would end the current
        batch is an error. Only :meth:`reset`, :meth:`set_seed`, :meth:`state_dict` and :meth:`load_state_dict`, called
        themselves, end that batch and write it: save the buffer after the collector's state.

        Raises:
            TimeoutError: the current step takes longer than a minute.
        """
        with self._background.pause():
            yield

    def map_fn(
        self,
        method_name: str,
        list_of_args: Sequence[Sequence[Any]] | None = None,
        list_of_kwargs: Sequence[Mapping[str, Any]] | None = None,
    ) -> Any:
        """Call a method of the collector, once for each set of arguments.

        Raises:
            RuntimeError: inside :meth:`pause`, for what would end the current batch.
        """
        with self._background.mapping():
            return super().map_fn(method_name, list_of_args, list_of_kwargs)

    def shutdown(self, timeout: float | None = None, close_env: bool = True, raise_on_error: bool = True) -> None:
        """End the thread of :meth:`start`, close the environment, write what a profiler has recorded.

        The thread ends between two steps, and what it collected is written. May be called again.

        Args:
            timeout: seconds to wait for the thread; None: 10. A thread that is stuck in a step is left behind, and
                closes the environment when it returns; it does not keep the interpreter from exiting.
            close_env: close the environment too.
            raise_on_error: if False, errors of the thread and of the environment's ``close`` are dropped.

        Raises:
            TimeoutError: the thread did not end in time; the message names what it does.
        """
        self._observers.close()
        if self.closed and self._background.thread is None:
            return

        def close(raise_on_error: bool = False) -> None:
            try:
                self.disable_profile()
                if close_env:
                    self._rollout.close()
            except Exception:
                if raise_on_error:
                    raise

        try:
            self._background.end(timeout, close, raise_on_error=raise_on_error, closed_before=self.closed)
        finally:
            if self._background.thread is None and not self.closed:
                close(raise_on_error)
            self.closed = self._rollout.closed = True

    # Reaching in ------------------------------------------------------------------------------

    def get_model(self, model_id: str) -> Any:
        """The model that an id names: ``"policy"``, a path from the collector, or a part of the policy (``"actor"``).

        Raises:
            ValueError: there is no such model.
        """
        return self._rollout.get_model(model_id, self)

    def set_weight_target(self, module: nn.Module) -> None:
        """Let new weights of ``"policy"`` go to a part of it, where the policy itself is no module."""
        self._rollout.acting.target = module

    # State ------------------------------------------------------------------------------------

    def state_dict(self, *, engine_weights: bool = False) -> OrderedDict[str, Any]:
        """What it takes to go on from here, bit for bit, in this process or another; for use between batches.

        ``torch.load(..., weights_only=True)`` reads it. Saving changes nothing in the run.

        Args:
            engine_weights: save the weights of the policy's engine, too, live: ``engine_state_dict``. A collector that
                loads them gives them to its engine.

        Returns:
            ``policy_state_dict`` (where it has weights; less what is never copied, such as an engine), live and no
            copy, as everywhere in torch, and ``env_state_dict``, a copy as all that follows; ``frames``, ``iter``,
            ``policy_version``, ``traj_pool`` (the next trajectory id) and ``episodes`` (statistics);
            ``env_checkpoint`` (all that the environment is, its random generators included) and ``trajectories``
            (what the next step is taken from; None where the environment cannot be saved);
            ``held`` (frames of whole trajectories that are not delivered yet; a replay buffer has a state of its own);
            ``streams`` (the global generators of torch, NumPy and Python); ``unsaved``: a line for each thing that
            could not be saved.

        Warns:
            UserWarning: something could not be saved; once for each collector.

        Raises:
            TypeError: ``engine_weights=True``, and there is no engine with weights in this process.

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
        with self._background.between_batches():
            state = self._saved_state.save(engine_weights=engine_weights)
            if any(batch is not None for batch in self._kept):
                state["unsaved"].append("the last batch, which nobody has got yet: call next() before")
        if not self._has_warned_of_unsaved:
            self._has_warned_of_unsaved = warn_of_unsaved({"": state})
        return state

    def load_state_dict(self, state_dict: Mapping[str, Any], **kwargs: Any) -> None:
        """Go on from a saved state.

        The next batch of a collector that was made with the same arguments and has stepped nothing is, to the bit,
        the one that the saved collector delivered next. A collector that has stepped gives new ids to the
        trajectories that it goes on with, for it may have used theirs. Trajectories are reset where the
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
        with self._background.between_batches():
            self._saved_state.load(state_dict, **kwargs)
            self._kept.clear()
            self._background.version_loaded()

    # Observation ------------------------------------------------------------------------------

    def stats(self, *, workers: WorkerStats = True) -> CollectorStats:
        """Counts, rates and episodes; :class:`CollectorStats` lists them, and ``json.dumps`` takes them.

        Args:
            workers: of collectors with workers; here it changes nothing.

        Raises:
            ValueError: ``workers`` is none of what they take.
        """
        check_worker_stats(workers)
        found = {
            **self._delivery.stats(),
            "requested_frames_per_batch": self.requested_frames_per_batch,
            "policy_version": self.policy_version,
            **self._background.stats(),
        }
        return cast(CollectorStats, found)

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}(\n    env={self.env},\n    policy={self.policy},\n"
            f"    frames_per_batch={self.frames_per_batch}, total_frames={self.total_frames},\n"
            f"    devices={self.devices},\n    paths={self._rollout.how},\n)"
        )
