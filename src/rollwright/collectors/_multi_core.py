"""MultiCore: workers joined with a schedule at construction, and what they deliver."""

from __future__ import annotations

import logging
import math
import pickle
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import cloudpickle  # type: ignore[import-untyped]
import torch
from tensordict import TensorDictBase

from rollwright._memory import Segment
from rollwright._processes.forks import on_fork
from rollwright._processes.pickling import dumps
from rollwright.collectors._delivering import SPLITS
from rollwright.collectors.base import BaseCollector
from rollwright.collectors.delivery.batches import never
from rollwright.collectors.delivery.stored import await_publication
from rollwright.collectors.options import CollectorOptions
from rollwright.collectors.rollout.policy import check_policy
from rollwright.collectors.workers.background import Runner
from rollwright.collectors.workers.counters import Word
from rollwright.collectors.workers.group import WorkerGroup
from rollwright.collectors.workers.memory.store import BlockStore
from rollwright.collectors.workers.options import WorkerOptions, check_join, factories_of, options_of_workers
from rollwright.collectors.workers.restarts import Restarts
from rollwright.collectors.workers.schedules.first_come import FirstCome
from rollwright.collectors.workers.schedules.gather import Gather
from rollwright.collectors.workers.schedules.joining import are_alike
from rollwright.collectors.workers.schedules.schedule import Schedule
from rollwright.collectors.workers.schedules.staleness import Staleness
from rollwright.collectors.workers.watching import Watch
from rollwright.collectors.workers.worker import WorkerSpec
from rollwright.data.layout import split_trajectories
from rollwright.weight_update.publisher import Publisher

__all__ = ["MultiCore"]


_log = logging.getLogger("rollwright")


class MultiCore(BaseCollector):
    """The part of :class:`~rollwright.collectors.MultiCollector` that starts, delivers, and ends."""

    _sync: bool | None = None
    _ended = False
    _leave_limiter: tuple[Callable[[], None], ...] = ()

    def __init__(self, create_env_fn: Any, policy: Any = None, **options: Any) -> None:
        self.closed = True  # until there are workers
        owner = type(self).__name__
        if self._sync is not None:
            if options.get("sync", self._sync) is not self._sync:
                raise ValueError(f"sync: {owner} has sync={self._sync}, got {options['sync']!r}. Drop it.")
            options["sync"] = self._sync
        own, others = WorkerOptions.split(options, owner)
        factories = factories_of(create_env_fn, own.num_workers, owner)
        self.num_workers = len(factories)
        self.own_options = own
        per_worker = options_of_workers(others, self.num_workers, own)
        self.options = replace(
            per_worker[0],
            **{name: others[name] for name in ("total_frames", "trajs_per_batch", "traj_format") if name in others},
        )
        self._same_td: TensorDictBase | None = None
        self._returns_same = bool(others.get("return_same_td"))
        self._splits = bool(own.sync and others.get("split_trajs"))
        self._postproc = others.get("postproc") if self._splits else None
        if self._splits:
            warnings.warn(SPLITS.format(owner), UserWarning, stacklevel=4)
        self._pre_collect_hook = per_worker[0].pre_collect_hook
        self._post_collect_hook = per_worker[0].post_collect_hook
        frames = others.get("frames_per_batch", CollectorOptions.frames_per_batch)
        self.requested_frames_per_batch = sum(frames) if isinstance(frames, list | tuple) and own.sync else frames
        self._version = 0
        self._begin()
        on_fork(self, MultiCore._leave)
        self._pausers: list[int] = []  # threads inside pause()
        self._runner: Runner | None = None
        self._policy = policy
        if policy is not None and self.options.policy_factory is None:
            check_policy(policy)
        self._threads_before = torch.get_num_threads()
        if own.num_threads is not None:
            torch.set_num_threads(own.num_threads)
        buffer = self.options.replay_buffer
        if buffer is not None and hasattr(buffer, "share"):
            buffer.share()
        self._publisher = Publisher(self.num_workers, others.get("weight_sync_schemes"))
        try:
            self._start(factories, policy, per_worker)
            self._take_updater(others.get("weight_updater"))
            if others.get("weight_recv_schemes"):
                self.register_scheme_receiver(others["weight_recv_schemes"])
        except BaseException:
            self.shutdown(raise_on_error=False)
            raise

    def _begin(self) -> None:
        self._publishing = threading.Lock()
        self._taking = threading.Lock()  # a batch: of threads that iterate, one at a time

    def _leave(self) -> None:
        """In a forked child: whatever is asked here is refused, and there is nothing to shut down."""
        self._begin()
        self.closed = self._ended = True

    # Construction -----------------------------------------------------------------------------

    def _start(self, factories: Sequence[Any], policy: Any, per_worker: Sequence[CollectorOptions]) -> None:
        own = self.own_options
        self._words, self._segment = Segment(), Segment()
        self._segments = [self._words, self._segment]
        seed = int(torch.empty((), dtype=torch.int64).random_()) % 2**62
        has_policy = policy is not None and self.options.policy_factory is None
        pickled = _pickled(policy, own.start_method) if has_policy else None
        specs = [
            WorkerSpec(
                index=i,
                num_workers=self.num_workers,
                create_env_fn=factories[i],
                policy=pickled,
                options=per_worker[i],
                init_fn=own.init_fn,
                seed=seed + i,
                words=self._words,
                blocks=self._segment,
                parcels=self._new_parcels(),
                boards=tuple(self._publisher.boards(i)),
                max_policy_lag=own.max_policy_lag if self.options.replay_buffer is not None else None,
            )
            for i in range(self.num_workers)
        ]
        threads = own.threads_of(self.num_workers)
        self._group = WorkerGroup(
            specs,
            start_method=own.start_method,
            num_threads=[threads] * self.num_workers,
            restarts=Restarts(
                wanted=own.on_worker_failure == "restart", most=own.max_restarts, delay_s=own.restart_delay
            ),
            watch=Watch(own.env_step_timeout),
            forget=self._publisher.forget,
        )
        self._group.start()
        self.closed = False
        self._setup_counts()
        self._schedule = self._new_schedule()
        self._group.listener = self._schedule
        self._limiter = getattr(self.options.replay_buffer, "insert_limiter", None)
        if self._limiter is not None:
            self._limiter.check(frames=self.frames_per_batch)
            self._schedule.limiter = self._limiter
            self._leave_limiter = (self._limiter.on_change(self._group.wake), self._limiter.add_inserter(self._inserts))

    def _new_parcels(self) -> tuple[Segment, Segment]:
        pair = Segment(), Segment()
        self._segments += pair
        return pair

    def _setup_counts(self) -> None:
        """Round counts to what can be delivered, and say so once."""
        ready = [worker.ready for worker in self._group.workers if worker.ready is not None]
        sizes = {told.batch_size for told in ready}
        if self.own_options.sync and len(sizes) > 1:
            raise ValueError(
                f"create_env_fn: a batch of all workers needs environments of one batch size, got {sorted(sizes)}. "
                "Batch environments of one size together in each worker, or pass sync=False."
            )
        each = [told.frames_per_batch for told in ready]
        asked = self.requested_frames_per_batch
        self.frames_per_batch = sum(each) if self.own_options.sync else max(each)
        total = self.options.total_frames
        own = self.own_options
        check_join(own, ready)
        even = own.waits_for(self.num_workers) == self.num_workers if own.sync else len(set(each)) == 1
        batches = None if total == -1 else -(-total // self.frames_per_batch)
        self._num_batches = batches if even else None
        self.total_frames: float = math.inf if batches is None else batches * self.frames_per_batch if even else total
        self.init_random_frames = sum(told.random_frames for told in ready)
        said = []
        if asked != self.frames_per_batch and not isinstance(asked, list | tuple):
            said.append(f"frames_per_batch={asked} becomes {self.frames_per_batch}, in {self.num_workers} workers")
        if total not in (-1, self.total_frames):
            said.append(
                f"total_frames={total} becomes {self.total_frames}, {batches} batches of {self.frames_per_batch}"
            )
        if said:
            warnings.warn(f"{type(self).__name__} delivers whole batches: {'; '.join(said)}.", stacklevel=4)

    def _new_schedule(self) -> Schedule:
        own, options = self.own_options, self.options
        store = BlockStore(self._segment, own.max_batches_held)
        shared: dict[str, Any] = {
            "total_frames": self.total_frames,
            "trajs_per_batch": options.trajs_per_batch,
            "padded": options.traj_format == "padded",
            "stored": options.replay_buffer is not None,
            "staleness": Staleness(
                None if options.replay_buffer is not None else own.max_policy_lag,
                waits=own.policy_lag == "wait",
                versions=lambda: [worker.words.whole[Word.PUBLISHED] for worker in self._group.workers],
            ),
        }
        if own.sync:
            return Gather(self._group, store, join=own.join, least=own.waits_for(self.num_workers), **shared)
        return FirstCome(self._group, store, **shared)

    # Delivery ---------------------------------------------------------------------------------

    def iterator(self) -> Iterator[TensorDictBase | None]:
        """Yield until ``total_frames`` are stepped, from wherever the collector stands.

        Batches; or, with a replay buffer, None for each rollout (``sync=True``: of all workers) that was written there.
        Several threads may iterate at once: each batch goes to one of them.
        """
        while True:
            self._check_open()
            self._check_idle("iteration")
            if self._pauses_here:
                raise RuntimeError("iteration inside pause(): the workers rest until the pause ends. Leave it first.")
            self._schedule.raise_error()
            self._started = True
            if self.own_options.update_at_each_batch:
                self.update_policy_weights_()
            with self._taking:
                self._await_room()
                if not self._schedule.ready():
                    return
                found = [self._schedule.next(shaped=self._shaped)]
            if self.options.replay_buffer is not None:
                await_publication(self.options.replay_buffer, lambda: self.closed)
            yield found.pop()  # no reference stays here: its memory is the consumer's alone

    def _shaped(self, batch: Any) -> TensorDictBase | None:
        """What is done with a batch of all workers that could not be done in each."""
        if batch is None:
            return None
        shaped: TensorDictBase = batch
        if self._splits:
            shaped = split_trajectories(shaped, prefix="collector")
            shaped = shaped if self._postproc is None else self._postproc(shaped)
        device = self.options.storing_device or self.options.device
        if device is not None and torch.device(device).type != "cpu":
            shaped = shaped.to(device)
        if not self._returns_same:
            return shaped
        if self._same_td is None or not are_alike(self._same_td, shaped):
            self._same_td = shaped.clone()
        else:
            self._same_td.update_(shaped)
        return self._same_td

    def __len__(self) -> int:
        if self.options.total_frames == -1:
            raise RuntimeError(
                "This collector has no end (total_frames=-1), hence no length. Pass total_frames= to set one."
            )
        whole_trajectories = self.options.trajs_per_batch is not None and self.options.replay_buffer is None
        if self._num_batches is None or whole_trajectories:
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
        return self._num_batches

    @property
    def completed(self) -> bool:
        """Whether ``total_frames`` were stepped."""
        return self._schedule.frames >= self.total_frames

    # A thread that collects -------------------------------------------------------------------

    def start(self) -> None:
        """Keep the workers collecting into the replay buffer, until the end, or :meth:`async_shutdown`.

        What goes wrong is raised at the next call of :meth:`pause`, :meth:`update_policy_weights_`, :meth:`reset`,
        :meth:`state_dict`, :meth:`async_shutdown` or iteration.

        Raises:
            RuntimeError: there is no replay buffer, they collect already, or the collector was shut down.
        """
        self._check_open()
        self._raise_of_runner()
        if self.options.replay_buffer is None:
            raise RuntimeError(
                "start: this collector has no replay buffer, and nobody would get what the workers collect. Pass "
                "replay_buffer= to it, or iterate over it."
            )
        if self._running:
            raise RuntimeError("start: this collector runs already. Call async_shutdown() to end it.")
        self._started = True
        self._runner = Runner(self._deliver_one)
        self._runner.start()

    def _deliver_one(self, give_up: Callable[[], bool]) -> bool:
        schedule = self._schedule
        schedule.raise_error()
        if not schedule.ready(give_up):
            return False
        if self.own_options.update_at_each_batch:
            self.update_policy_weights_()
        self._await_room(lambda: self._hears_of_an_end(give_up))
        schedule.next(give_up)
        return True

    def _hears_of_an_end(self, give_up: Callable[[], bool]) -> bool:
        """While the thread waits for samples: whether there is something else to see to."""
        self._group.look()
        return give_up() or bool(self._schedule.errors)

    @property
    def _running(self) -> bool:
        return self._runner is not None and self._runner.running

    def _raise_of_runner(self) -> None:
        if self._runner is not None and not self._runner.inside:
            self._runner.raise_error()

    def _check_idle(self, what: str) -> None:
        self._raise_of_runner()
        if self._running and self._runner is not None and not self._runner.inside:
            raise RuntimeError(
                f"{what}: the workers collect for the replay buffer, since start(). Sample from it; call "
                "async_shutdown() to end that."
            )

    def _await_room(self, stop: Callable[[], bool] = never) -> None:
        """Wait for the buffer's limiter, where no worker is at work."""
        limiter, frames = self._limiter, self.frames_per_batch
        if limiter is None or any(worker.runs for worker in self._group.workers) or limiter.may_insert(frames):
            return
        self._schedule.waiting_for = limiter.wants(frames)
        try:
            limiter.await_insert(frames, stop=stop, whom=type(self).__name__)
        finally:
            self._schedule.waiting_for = None

    def _inserts(self) -> str:
        """For who samples and waits: what the workers do."""
        self._raise_of_runner()
        if not self._running:
            return f"{type(self).__name__} is not running; it has collected {self._schedule.frames:,} frames"
        return f"the workers of {type(self).__name__}: {self._group.doing()}"

    @property
    def _pauses_here(self) -> bool:
        """Whether this thread is inside :meth:`pause`."""
        return threading.get_ident() in self._pausers

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Keep all workers between two steps inside the ``with`` block; they always go on after it.

        ``map_fn``, ``cascade_execute``, ``get_distant_attr`` and new hooks reach all workers where they rest: no
        rollout ends for them, and a replay buffer stays as it is. What has to wait for the end of a rollout is an error
        there. ``reset``, ``set_seed``, ``state_dict`` and ``load_state_dict`` of this collector end the rollouts under
        way where there is a replay buffer, and write them; without one, they are an error in the middle of a rollout.

        Raises:
            TimeoutError: a step under way takes longer than a minute.
        """
        self._check_open()
        self._raise_of_runner()
        self._pausers.append(threading.get_ident())
        try:
            with self._group.pausing():
                yield
        finally:
            self._pausers.remove(threading.get_ident())

    # The end ----------------------------------------------------------------------------------

    def _check_open(self) -> None:
        if self.closed:
            if hasattr(self, "_group"):
                self._group.check_home()
            raise RuntimeError(f"{type(self).__name__} was shut down. Make a new one to collect more.")

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
        self.closed = True
        runner = self._runner
        for leave in self._leave_limiter:
            leave()
        if runner is not None:
            runner.stop(0.0)
            self._group.wake()
        limit = self.own_options.shutdown_timeout if timeout is None else timeout
        error = self._group.end(limit, close_env=close_env)
        if runner is not None:
            runner.stop(1.0)
        for line in self._group.forced:
            _log.warning("shutdown: %s.", line)
        for segment in (*self._segments, *self._publisher.segments()):
            segment.close()  # what is mapped stays, for those who hold it
        self._ended = True
        if torch.get_num_threads() == self.own_options.num_threads:  # nobody has changed it since
            torch.set_num_threads(self._threads_before)
        if raise_on_error and runner is not None:
            runner.raise_error()
        schedule = getattr(self, "_schedule", None)  # there is none if construction failed
        if schedule is not None and not schedule.told:  # of several failures, one is enough
            error = next(iter(schedule.errors), error)
        if raise_on_error and error is not None:
            raise error


def _pickled(policy: Any, start_method: str | None) -> bytes:
    try:  # what was forked has every module
        return bytes(cloudpickle.dumps(policy, 5)) if start_method == "fork" else dumps(policy)
    except (TypeError, ValueError, AttributeError, RuntimeError, pickle.PicklingError) as error:
        raise TypeError(
            f"policy: {type(policy).__name__} cannot be sent to a worker process: {error}. Pass policy_factory=, a "
            "function that makes it there."
        ) from error
