"""MultiCollector: experience from several processes at a time."""

from __future__ import annotations

import logging
import math
import pickle
import re
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from numbers import Integral
from typing import TYPE_CHECKING, Any, Self, Unpack, cast

import torch
from tensordict import TensorDictBase

from rollwright._options import names_of, with_options
from rollwright._processes.channel import ByValue
from rollwright._processes.files import file_limit_named
from rollwright._processes.forks import on_fork, rest_if_ending
from rollwright.collectors.base import BaseCollector
from rollwright.collectors.core import Hooks, WorkerStats, checked_seed, checked_state, never, resolve
from rollwright.collectors.delivery.rows import as_trajectories
from rollwright.collectors.delivery.saved_state import (
    check_entries,
    check_generators,
    generator_states,
    load_generators,
    warn_of_unsaved,
)
from rollwright.collectors.delivery.stored import QueueBacklog, await_publication
from rollwright.collectors.options import CollectorOptions, stats_of_buffer, warn_of_splits
from rollwright.collectors.reports.observers import Observers, Profile
from rollwright.collectors.reports.statistics import CollectorStats
from rollwright.collectors.rollout.policy import check_policy, check_shaped
from rollwright.collectors.rollout.stats import announce_rounding
from rollwright.collectors.workers.control import WorkerCalls, Workers, WorkersBackground, merged_stats, select_workers
from rollwright.collectors.workers.counters import Count
from rollwright.collectors.workers.options import (
    WorkerOptions,
    delivery_device,
    factories_of,
    options_of_workers,
    register_workers,
)
from rollwright.collectors.workers.schedule import Schedule, check_undelivered
from rollwright.collectors.workers.strategies import (
    BatchShaping,
    FirstCome,
    Gather,
    PendingRollouts,
    Staleness,
    restored,
)
from rollwright.collectors.workers.transports import WorkerBackend
from rollwright.collectors.workers.weights import PeriodicUpdates, WorkersWeights
from rollwright.envs.foreign import check_maker
from rollwright.weight_update.schemes import Publisher

if TYPE_CHECKING:
    from rollwright.collectors.keywords import MultiKeywords
    from rollwright.collectors.rollout.environment import EnvMakers


_WHOLE = (  # options of this collector that are others for its workers
    *("total_frames", "trajs_per_batch", "groups_per_batch", "traj_format"),
    *("split_trajs", "postproc", "init_random_frames", "return_same_td", "storing_device", "progress"),
)
_log = logging.getLogger("rollwright")


@with_options(WorkerOptions, CollectorOptions)
class MultiCollector(BaseCollector):
    """Collects experience in several processes, each with an environment and a policy of its own.

    ``MultiCollector(..., sync=True)`` returns a :class:`MultiSyncCollector`. ``MultiCollector(..., sync=False)``, the
    default, returns a :class:`MultiAsyncCollector`.

    Args:
        create_env_fn: makes an environment, in a worker; or a list of such functions, one for each worker.
        policy: as for :class:`Collector`. Each worker acts with a copy; see :meth:`update_policy_weights_`.
        backend: where workers run. ``"process"`` (None): in processes of this machine. ``"tcp"``: in groups that share
            no memory with this process, on any machine. ``"ray"``: in such groups in actors of a Ray cluster.
        **options: those of :class:`~rollwright.collectors.workers.options.WorkerOptions` and of
            :class:`~rollwright.collectors.CollectorOptions`. ``frames_per_batch``, ``policy_factory``, devices and
            ``create_env_kwargs`` may be lists, one for each worker.

    Raises:
        ValueError, TypeError: an option is wrong, or two options contradict each other.
        WorkerError: a worker could not make its environment or its policy. It is also an instance of the original
            error's class.

    Example:
        >>> from rollwright.envs import GymEnv
        >>> make_env = lambda: GymEnv("CartPole-v1")
        >>> with MultiCollector([make_env] * 2, frames_per_batch=64, total_frames=128, sync=True) as collector:
        ...     for batch in collector:
        ...         print(batch.shape, batch.names)
        torch.Size([2, 32]) [None, 'time']
        torch.Size([2, 32]) [None, 'time']
    """

    _sync: bool | None = None
    _updates: PeriodicUpdates | None = None
    _options_kind: type[CollectorOptions] = CollectorOptions
    _may_end = False  # whether the data of a worker may be over
    _ended = False
    _has_warned_of_unsaved = False
    _backlog: QueueBacklog | None = None  # of a queue that gets what the workers collect

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        """Choose the class by ``sync``."""
        kinds = {True: MultiSyncCollector, False: MultiAsyncCollector}
        kind: Any = kinds[kwargs.get("sync") is True] if cls is MultiCollector else cls
        made: Self = super().__new__(kind)
        return made

    def __init__(
        self,
        create_env_fn: EnvMakers,
        policy: Callable[..., Any] | None = None,
        *,
        backend: WorkerBackend | None = None,
        **options: Unpack[MultiKeywords],
    ) -> None:
        self._construct(create_env_fn, policy, {"backend": backend, **options})

    def _construct(self, create_env_fn: EnvMakers, policy: Callable[..., Any] | None, options: dict[str, Any]) -> None:
        self.closed = True  # until there are workers
        owner = type(self).__name__
        if self._sync is not None:
            if options.get("sync", self._sync) is not self._sync:
                raise ValueError(f"sync: {owner} has sync={self._sync}, got {options['sync']!r}. Drop it.")
            options["sync"] = self._sync
        self.own_options, others = WorkerOptions.split(options, type(self), self._options_kind)
        own = self.own_options
        factories = factories_of(create_env_fn, own, owner)
        self.num_workers = len(factories)
        given, per_worker = options_of_workers(others, self.num_workers, own, self._options_kind)
        for factory, its in zip(factories, per_worker, strict=True):
            check_maker("create_env_fn", factory, its.create_env_kwargs)
        whole = {name: getattr(given, name) for name in _WHOLE if name in names_of(type(given))}
        self.options = replace(per_worker[0], **whole)
        splits = bool(own.sync and others.get("split_trajs"))
        self._shaped = BatchShaping(
            splits=splits,
            postproc=others.get("postproc") if splits else None,
            device=delivery_device(self.options),
            same_td=bool(others.get("return_same_td")),
        )
        if splits:
            warn_of_splits(owner)
        self._hooks = Hooks(self.options.pre_collect_hook, self.options.post_collect_hook)
        self._profile = Profile()
        self._observers = Observers(
            self.stats, progress=self.options.progress, name=owner, noun=self._in_own_words("frames")
        )
        frames = others.get("frames_per_batch", CollectorOptions.frames_per_batch)
        self.requested_frames_per_batch = sum(frames) if isinstance(frames, list | tuple) and own.sync else frames
        self._make_lock()
        on_fork(self)
        self._policy = policy
        sent = policy if self.options.policy_factory is None else None
        if sent is not None:
            check_policy(sent)
            check_shaped(sent)
        self._threads_before = torch.get_num_threads()
        if own.num_threads is not None:
            torch.set_num_threads(own.num_threads)
        buffer = self.options.replay_buffer
        if buffer is not None and hasattr(buffer, "share"):
            buffer.share()
        schemes = given.weight_sync_schemes
        with file_limit_named(f"{owner} with {self.num_workers} workers"):
            self._workers = Workers(factories, sent, per_worker, own, Publisher(self.num_workers, schemes))
        self._group = self._workers.group
        self._calls = WorkerCalls(self._group, self.num_workers, stored=buffer is not None, check=self._check)
        try:
            with file_limit_named(f"{owner} with {self.num_workers} workers"):
                self._start(owner, policy is None and self.options.policy_factory is None)
            self._weights.use_updater(others.get("weight_updater"), self)
            if others.get("weight_recv_schemes"):
                self.register_scheme_receiver(others["weight_recv_schemes"])
            self._weights.check_schemes(schemes or {})
            if own.update_at_each_batch:
                self._updates = PeriodicUpdates("update_at_each_batch")
            if self._updates is not None and self.weight_updater is None:
                self._weights.check_source(self._updates.option)
        except BaseException:
            self.shutdown(raise_on_error=False)
            raise

    def _start(self, owner: str, acts_at_random: bool) -> None:
        own = self.own_options
        self._group.start()
        self.closed = False
        self._counts = counts = self._workers.counts(self.requested_frames_per_batch, self.options.total_frames, own)
        self.frames_per_batch, self.total_frames = counts.frames, counts.total
        self.init_random_frames = counts.random_frames
        announce_rounding(owner, self._in_own_words(counts.rounding))
        self._schedule = self._new_schedule()
        self._group.listener = self._schedule
        self._background = WorkersBackground(
            self._group,
            self._schedule,
            self.options.replay_buffer,
            frames=counts.frames,
            owner=owner,
            before_batch=self._update_at_each_batch,
            delivered=self._observers.delivered,
            deliver=None if self._backlog is None else self._deliver_into_queue,
        )
        self._weights: WorkersWeights = WorkersWeights(
            self,
            self._group,
            self._schedule,
            self._workers.publisher,
            options=own,
            policy=self._policy,
            acts_at_random=acts_at_random,
            check=self._check,
        )

    def _make_lock(self) -> None:
        self._taking = threading.Lock()  # a batch: of threads that iterate, one at a time
        self._ending = threading.RLock()

    def reset_after_fork(self) -> None:
        """In a forked child: whatever is asked here is refused, and there is nothing to shut down."""
        self._make_lock()
        self.closed = self._ended = True

    def _new_schedule(self) -> Schedule:
        own, options = self.own_options, self.options
        stored = options.replay_buffer is not None
        rollouts = PendingRollouts(self._group, self._workers.store, self.total_frames)
        staleness = Staleness(
            None if stored else own.max_policy_lag,
            waits=own.policy_lag == "wait",
            versions=lambda: [worker.counters.counts[Count.PUBLISHED] for worker in self._group.workers],
        )
        return Schedule(
            rollouts,
            Gather(rollouts, join=own.join, least=own.waits_for(self.num_workers))
            if own.sync
            else FirstCome(rollouts, staleness, stored=stored),
            staleness,
            trajs_per_batch=options.trajs_per_batch or options.groups_per_batch,
            padded=options.traj_format == "padded",
            stored=stored,
            may_end=self._may_end,
        )

    # Delivery ---------------------------------------------------------------------------------

    def iterator(self) -> Iterator[TensorDictBase | None]:
        """Yield until ``total_frames`` are stepped, from wherever the collector stands.

        Batches; or, with a replay buffer, None for each rollout (``sync=True``: of all workers) that was written there.
        Several threads may iterate at once: each batch goes to one of them.
        """
        while True:
            self._check_open()
            self._background.check_idle("iteration")
            if self._calls.pauses_here:
                raise RuntimeError("iteration inside pause(): the workers rest until the pause ends. Leave it first.")
            self._schedule.raise_error()
            self._profile.started = True
            self._update_at_each_batch()
            taken: list[TensorDictBase | None] | None = []
            try:
                with self._taking:
                    self._background.await_room()
                    if self._backlog is not None:
                        if not self._deliver_into_queue():
                            return
                    elif not self._schedule.ready():
                        return
                    else:
                        self._schedule.next(shaped=self._shaped, into=taken)
                if self.options.replay_buffer is not None:
                    await_publication(self.options.replay_buffer, lambda: self.closed)
                self._observers.delivered()
            except BaseException:
                for batch in taken or ():
                    self._schedule.put_back(batch)
                rest_if_ending()
                raise
            # No reference stays here: its memory is the consumer's alone. Nor is there a call, after which Ctrl-C would
            # lose it; that is why it was not returned by one.
            batch, taken = taken[0] if taken else None, None
            yield (batch, batch := None)[0]

    def _deliver_into_queue(self, stop: Callable[[], bool] = never) -> bool:
        """Put what is delivered next into the queue, and what was not put before; False: nothing is to come."""
        backlog = self._backlog
        assert backlog is not None
        came = bool(backlog)
        backlog.drain()
        if self._schedule.ready(stop):
            with backlog.taking() as take:
                self._schedule.next(stop, shaped=take)
            backlog.drain()
            came = True
        return came

    def _update_at_each_batch(self) -> None:
        if self._updates is not None and self._updates.is_due():
            self.update_policy_weights_()

    def __len__(self) -> int:
        if self.options.total_frames == -1:
            raise RuntimeError(
                "This collector has no end (total_frames=-1), hence no length. Pass total_frames= to set one."
            )
        whole_trajectories = self.options.delivers_whole and self.options.replay_buffer is None
        if self._counts.batches is None or whole_trajectories:
            why = (
                "it delivers whole trajectories (trajs_per_batch)"
                if whole_trajectories
                else "workers that are waited for no longer take fewer frames (preemptive_threshold)"
                if self.own_options.sync
                else "the workers' batches have different sizes (frames_per_batch)"
            )
            raise TypeError(
                f"How many batches this collector delivers is not known, so it has no length: {why}. Iterate over it."
            )
        return self._counts.batches

    @property
    def completed(self) -> bool:
        """Whether ``total_frames`` were stepped."""
        over = self._schedule.frames >= self.total_frames or self._schedule.is_over
        return over and (self._backlog is None or not (self._schedule.has_undelivered or self._backlog))

    def start(self) -> None:
        """Keep the workers collecting into the replay buffer, until the end, or :meth:`async_shutdown`.

        What goes wrong is raised at the next call of :meth:`pause`, :meth:`update_policy_weights_`, :meth:`reset`,
        :meth:`state_dict`, :meth:`async_shutdown` or iteration.

        Raises:
            RuntimeError: there is no replay buffer, they collect already, or the collector was shut down.
        """
        self._check_open()
        self._background.start()
        self._profile.started = True

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Keep all workers between two steps inside the ``with`` block; they always go on after it.

        ``map_fn``, ``cascade_execute``, ``get_distant_attr`` and new hooks reach all workers where they rest: no
        rollout ends for them, and a replay buffer stays as it is. What has to wait for the end of a rollout is an
        error. ``reset``, ``set_seed``, ``state_dict`` and ``load_state_dict`` of this collector end the rollouts in
        progress where there is a replay buffer, and write them; without one, they are an error during a rollout.

        Raises:
            TimeoutError: a step in progress takes longer than a minute.
        """
        with self._calls.pausing():
            yield

    def _check_open(self) -> None:
        if self.closed:
            if hasattr(self, "_group"):
                self._group.check_home()
            raise RuntimeError(f"{type(self).__name__} was shut down. Make a new one to collect more.")

    def _check(self) -> None:
        """Raise if the collector was shut down, or what went wrong in its thread."""
        self._check_open()
        self._background.raise_error()

    def shutdown(self, timeout: float | None = None, close_env: bool = True, raise_on_error: bool = True) -> None:
        """End the workers: they are asked to, and made to if they do not. May be called again.

        With a replay buffer, what they have collected is written.

        Args:
            timeout: seconds for them to end by themselves; None: ``shutdown_timeout``. After it, they are terminated
                within two seconds.
            close_env: let them close their environments.
            raise_on_error: if False, what went wrong before is not raised.

        Raises:
            WorkerError: closing an environment raised.

        Who had to be terminated is logged, and in ``stats()["forced"]``.
        """
        if self._ended or not hasattr(self, "_group"):
            return
        self._observers.close()
        with self._ending:  # several threads may call this at once
            if not self._ended:
                self._shutdown(timeout, close_env=close_env, raise_on_error=raise_on_error)

    def _shutdown(self, timeout: float | None, *, close_env: bool, raise_on_error: bool) -> None:
        self.closed = True
        background: WorkersBackground | None = getattr(
            self, "_background", None
        )  # there is none if construction failed
        if background is not None:
            background.leave_limiter()
            background.stop(0.0)
        limit = self.own_options.shutdown_timeout if timeout is None else timeout
        error = self._group.end(limit, close_env=close_env)
        if background is not None:
            background.stop(1.0)
        for line in self._group.forced:
            _log.warning("shutdown: %s.", line)
        self._workers.release()
        self._ended = True
        if torch.get_num_threads() == self.own_options.num_threads:  # nobody has changed it since
            torch.set_num_threads(self._threads_before)
        if not raise_on_error:
            if background is not None:
                background.drop_error()
            return
        if background is not None:
            background.raise_at_end()
        schedule: Schedule | None = getattr(self, "_schedule", None)
        if schedule is not None and not schedule.raised:  # of several failures, one is enough
            error = next(iter(schedule.errors), error)
        if error is not None:
            raise error

    interruptor: None = None
    """Of one process; what interrupts workers is :attr:`preemptive_threshold`."""

    @property
    def preemptive_threshold(self) -> float:
        """Share of the workers that a synchronous batch waits for; 1.0: all."""
        given = self.own_options.preemptive_threshold
        return 1.0 if given is None else float(given)

    # State ------------------------------------------------------------------------------------

    def set_seed(self, seed: int, static_seed: bool = False) -> int:
        """Seed the environments and global generators of all workers, and reset them all with the next batch.

        Args:
            seed: of the first environment of the first worker; further ones get ``seed + 1`` and so on.
            static_seed: give all environments the same seed.

        Returns:
            The seed of the last environment.
        """
        seed = last = checked_seed(seed)
        for index in range(self.num_workers):
            [last] = self._calls.between("set_seed", [((seed, static_seed), {})], workers=[index])
            seed = seed if static_seed else last + 1
        self._forget()
        return last

    def _forget(self) -> None:
        """Drop what was collected before the last call of workers, and not delivered."""
        if self._backlog is not None:
            self._backlog.clear()
        self._schedule.forget({worker.index: worker.num_at_answer for worker in self._group.workers})

    def reset(self, index: Any = None, **kwargs: Any) -> None:
        """Begin new trajectories in all workers; complete ones that are held (``trajs_per_batch``) are dropped.

        Args:
            index: of workers, one or a list; None for all.
            **kwargs: go to the environments' ``reset``.

        Raises:
            TypeError, IndexError: there is no such worker.
        """
        chosen = None if index is None else list(index) if isinstance(index, list | tuple) else [index]
        expected = f"reset: index: expected workers of 0 to {self.num_workers - 1}, one or a list"
        if any(not isinstance(i, Integral) or isinstance(i, bool) for i in chosen or ()):
            raise TypeError(f"{expected}, got {index!r}. Pass None for all.")
        if any(i not in range(self.num_workers) for i in chosen or ()):
            raise IndexError(f"{expected}, got {index!r}. Pass None for all.")
        workers = None if chosen is None else sorted({int(i) for i in chosen})
        count = self.num_workers if workers is None else len(workers)
        self._calls.between("reset", [((), kwargs)] * count, workers=workers)
        if workers is None and self.options.delivers_whole:
            self._forget()

    def state_dict(self, *, engine_weights: bool = False) -> OrderedDict[str, Any]:
        """What :meth:`load_state_dict` needs to go on: that of each worker is at ``"worker0"``, ``"worker1"``...

        ``frames``, ``iter``, ``policy_version`` and ``traj_pool`` (the next trajectory id) are those of all.
        ``streams`` are the global random generators of this process, from which your loop draws.

        Warns:
            UserWarning: something could not be saved; once for each collector.
        """
        options = {"engine_weights": True} if engine_weights else {}
        states = self._calls.between("state_dict", [((), options)] * self.num_workers)
        state: OrderedDict[str, Any] = OrderedDict((f"worker{i}", saved) for i, saved in enumerate(states))
        schedule = self._schedule.state_dict({worker.index: worker.num_at_answer for worker in self._group.workers})
        state["frames"], state["iter"] = schedule["frames"], self._schedule.batches
        state["policy_version"] = self._weights.version
        state["traj_pool"] = {"traj_id": max(int(saved["traj_pool"]["traj_id"]) for saved in states)}
        state["undelivered"] = schedule
        state["streams"] = generator_states(range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ())
        if not self._has_warned_of_unsaved:
            self._has_warned_of_unsaved = warn_of_unsaved(dict(zip(state, states, strict=False)))
        return state

    def load_state_dict(self, state_dict: Mapping[str, Any], **kwargs: Any) -> None:
        """Go on from a saved state, of a collector with as many workers.

        Raises:
            KeyError, TypeError: it is the state of something else, or none, or entries are missing; as with whatever
                else raises, nothing was loaded.
        """
        checked_state(state_dict)
        names = [f"worker{i}" for i in range(self.num_workers)]
        missing = [name for name in (*names, "frames") if name not in state_dict]
        if missing or f"worker{self.num_workers}" in state_dict:
            raise KeyError(
                f"state_dict: expected the states of {self.num_workers} workers, got {sorted(map(str, state_dict))}."
            )
        for name in names:
            check_entries(state_dict[name], name)
        nothing = {"frames": state_dict["frames"], "waiting": [], "trajectories": []}
        undelivered = state_dict.get("undelivered", nothing)
        check_undelivered(undelivered)
        if (streams := state_dict.get("streams")) is not None:
            check_generators(streams)
        states = [((state_dict[name],), kwargs) for name in names]
        self._calls.between("check_saved_state", states)  # none loads what another one would refuse
        self._calls.between("load_saved_state", states)
        self._forget()
        self._schedule.load_state_dict(undelivered)
        self._schedule.batches = int(state_dict.get("iter", 0))
        self._weights.load(int(state_dict.get("policy_version", 0)), [state_dict[name] for name in names])
        if streams is not None:
            load_generators(streams)

    # Observation ------------------------------------------------------------------------------

    def stats(self, *, workers: WorkerStats = True) -> CollectorStats:
        """Counts, rates and episodes of all workers; ``json.dumps`` takes it. At any time, from any thread.

        Args:
            workers: False: leave out the entry ``workers``. Or one of the texts that other packages take, for numbers
                by name alone: ``"per_worker"`` has ``"worker_0/frames"`` and so on, ``"aggregate"`` those of all
                workers, ``"both"`` has both; ``workers`` is their count then.

        Returns:
            What :class:`CollectorStats` lists, of all workers together. What paths add
            (``conversations_in_progress`` and others) is as of the last rollout of each worker.
        """
        buffer = self.options.replay_buffer
        written = {} if buffer is None else stats_of_buffer(buffer)
        found = merged_stats(self._group, self._schedule, self._counts, self._weights.version)
        found["requested_frames_per_batch"] = self.requested_frames_per_batch
        found = {
            **found,
            "total_frames": None if math.isinf(self.total_frames) else int(self.total_frames),
            "completed": self.completed,
            **written,
            **self._background.stats(),
        }
        return cast(CollectorStats, select_workers(found, workers))

    def fake_tensordict(self) -> TensorDictBase:
        """A batch of zeros with the entries, shapes, dtypes and names of delivered ones; steps nothing."""
        blanks = self.map_fn("fake_tensordict")
        if self.options.delivers_whole:
            return as_trajectories(blanks, padded=self.options.traj_format == "padded")
        results = [restored(i, blank, blank.device) for i, blank in enumerate(blanks)]
        made = self._schedule.strategy.combine(results if self.own_options.sync else results[:1])
        return self._shaped.shape(made)

    def map_fn(
        self,
        method_name: str,
        list_of_args: Sequence[Sequence[Any]] | None = None,
        list_of_kwargs: Sequence[Mapping[str, Any]] | None = None,
    ) -> list[Any]:
        """Call a method of each worker's collector, between two rollouts; in order of workers, what it returned.

        Inside :meth:`pause` it is called where the workers rest, which may be in the middle of a rollout.

        Args:
            method_name: or a path, such as ``"env.step_count"``.
            list_of_args: positional arguments for each worker.
            list_of_kwargs: named ones.

        Raises:
            WorkerError: it raised, or a worker ended before it had answered, even if another takes its place: it may
                have done what was called.
            TimeoutError: a worker has not answered for a minute. One that takes two for a call has failed.
        """
        return self._calls.map(method_name, list_of_args, list_of_kwargs)

    def cascade_execute(self, attr_path: str, *args: Any, **kwargs: Any) -> Any:
        """Call what a path leads to, from this collector or, where it has no such part, from each worker's.

        Returns:
            The value; of workers, a list.
        """
        if hasattr(self, re.split(r"[.\[]", attr_path, maxsplit=1)[0]):
            return super().cascade_execute(attr_path, *args, **kwargs)
        return self._calls.in_all(attr_path, *args, **kwargs)

    def get_distant_attr(self, attr: str) -> list[Any]:
        """What a path from each worker's collector leads to, in order of workers; read between two steps."""
        self._check_open()
        return self._calls.read(attr)

    def get_model(self, model_id: str) -> Any:
        """The model that an id names, as far as it is known in this process: the policy that was passed.

        Raises:
            ValueError: it is another, which the workers have.
        """
        if model_id == "policy" and self._policy is not None:
            return self._policy
        try:
            return resolve(self._policy, model_id)
        except AttributeError as error:
            raise ValueError(f"model_id: {model_id!r} is not known in this process, only in its workers.") from error

    def _set_hook(self, name: str, hook: Any) -> None:
        changed = self.options.override(**{name: hook})  # checks it
        try:
            pickle.dumps(ByValue(hook))
        except Exception as error:  # a hook may refuse in any way it likes
            raise TypeError(f"{name}: cannot be sent to a worker process: {type(error).__name__}: {error}.") from error
        self._calls.in_all("set_hook", name, hook)
        self._schedule.forgive()
        self.options = changed
        self._group.change_options(**{name: hook})
        self._hooks.set(name, hook)

    def enable_profile(self, **options: Any) -> None:
        """Trace the first rollouts of some workers; see :class:`~rollwright.collectors.ProfileConfig`."""
        super().enable_profile(**options)
        config = self._profile.config
        chosen = [] if config is None else sorted(set(config.workers))
        strangers = [worker for worker in chosen if worker not in range(self.num_workers)]
        if strangers:
            self._profile.config = None
            raise ValueError(f"workers: expected some of 0 to {self.num_workers - 1}, got {strangers}.")
        self._calls.between("profile", [((config,), {})] * len(chosen), workers=chosen)

    def disable_profile(self) -> None:
        """Trace no (further) rollouts; what was recorded is written."""
        super().disable_profile()
        if not self.closed:
            self._calls.in_all("disable_profile")

    def __repr__(self) -> str:
        ready = self._group.workers[0].ready
        return (
            f"{type(self).__name__}(\n    num_workers={self.num_workers},\n"
            f"    worker0: {'' if ready is None else ready.description},\n"
            f"    frames_per_batch={self.frames_per_batch}, total_frames={self.total_frames},\n)"
        )


class MultiSyncCollector(MultiCollector):
    """A :class:`MultiCollector` whose batches are of all workers: one rollout of each, ``[W, *env, T]``.

    All rollouts of a batch begin with the same version of the weights. Two runs with the same seed are equal to the
    bit.
    """

    _sync = True


class MultiAsyncCollector(MultiCollector):
    """A :class:`MultiCollector` whose batches are of one worker each, ``[*env, T]``, first come, first served.

    Workers go on while the consumer has a batch; each is at most two rollouts ahead.
    """

    _sync = False


@with_options(WorkerOptions, CollectorOptions, leave_out=["num_workers"])
class AsyncCollector(MultiCollector):
    """A :class:`MultiAsyncCollector` of one worker: it collects while the consumer trains.

    Args:
        create_env_fn: makes the environment, in the worker.
        policy: see :class:`MultiCollector`.
        **options: of :class:`MultiCollector`, without ``num_workers``.

    Raises:
        ValueError: several environments are given, or another number of workers.

    Example:
        >>> with AsyncCollector("CartPole-v1", frames_per_batch=100, total_frames=200) as collector:
        ...     [batch.shape for batch in collector]
        [torch.Size([100]), torch.Size([100])]
    """

    _sync = False

    def __init__(
        self,
        create_env_fn: EnvMakers,
        policy: Callable[..., Any] | None = None,
        *,
        backend: WorkerBackend | None = None,
        **options: Unpack[MultiKeywords],
    ) -> None:
        options.setdefault("num_workers", 1)
        if options["num_workers"] != 1:
            raise ValueError(
                f"num_workers: AsyncCollector has one worker, got {options['num_workers']!r}. Use MultiAsyncCollector."
            )
        super().__init__(create_env_fn, policy, backend=backend, **options)


register_workers(MultiCollector)
