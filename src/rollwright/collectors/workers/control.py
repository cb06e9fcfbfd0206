"""What a collector does with its workers: starts them, calls them between rollouts, and merges their statistics."""

from __future__ import annotations

import contextlib
import dataclasses
import pickle
import threading
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from rollwright._memory import Segment
from rollwright._processes.channel import dumps, dumps_by_name
from rollwright._processes.files import raise_file_limit
from rollwright._processes.threads import DaemonThread
from rollwright.collectors.core import WorkerStats, check_worker_stats, never
from rollwright.collectors.delivery.thread import BufferFiller, log_end
from rollwright.collectors.options import CollectorOptions, is_service
from rollwright.collectors.rollout.policy import never_copied_in
from rollwright.collectors.rollout.stats import NUM_EPISODES, FrameCounts
from rollwright.collectors.workers.counters import Count, WorkerCounters, WorkerState
from rollwright.collectors.workers.group import WorkerGroup
from rollwright.collectors.workers.handles import Restarts, Watchdog
from rollwright.collectors.workers.memory import BlockStore
from rollwright.collectors.workers.options import WorkerOptions, check_join
from rollwright.collectors.workers.schedule import Schedule
from rollwright.collectors.workers.transports import transport_of
from rollwright.collectors.workers.worker import WorkerSpec
from rollwright.weight_update.policy_weights import weights_of
from rollwright.weight_update.schemes import Publisher


class BufferWriters:
    """Names workers to the replay service that they write, and gives up those that are gone.

    A worker that was given up may still run, on a machine that has been silent: nothing of it is stored any more.

    Args:
        buffer: that the workers write; one that is in no service needs nothing of this.
    """

    def __init__(self, buffer: Any) -> None:
        self._buffer = buffer if is_service(buffer) else None
        self._name = uuid.uuid4().hex[:12]
        self._generations: dict[int, int] = {}

    def _place(self, index: int) -> str:
        return f"{self._name}/{index}"

    def prepare(self, spec: WorkerSpec) -> WorkerSpec:
        """The spec of a worker that is about to be started: it writes under a name of its own."""
        if self._buffer is None:
            return spec
        generation = self._generations[spec.index] = self._generations.get(spec.index, -1) + 1
        writer = self._buffer.as_writer(self._place(spec.index), generation)
        return dataclasses.replace(spec, options=dataclasses.replace(spec.options, replay_buffer=writer))

    def give_up(self, index: int) -> None:
        """Have nothing stored any more of a worker that is gone. Does not wait."""
        if self._buffer is not None and index in self._generations:
            with contextlib.suppress(RuntimeError):  # the service is gone, too
                self._buffer.give_up(self._place(index), self._generations[index])


class Workers:
    """Starts workers, and releases what they shared when they have ended.

    Args:
        factories: make the environments.
        policy: to be sent to each; None: none is.
        per_worker: options of each.
        own: options of all.
        publisher: of weights.

    Attributes:
        group: the workers.
        store: memory of batches.
        publisher: of weights.
    """

    def __init__(
        self,
        factories: Sequence[Any],
        policy: Any,
        per_worker: Sequence[CollectorOptions],
        own: WorkerOptions,
        publisher: Publisher,
    ) -> None:
        count = len(factories)
        raise_file_limit()
        counters, blocks = Segment(), Segment()
        packing = [(Segment(), Segment()) for _ in factories]
        self._segments = [counters, blocks, *(segment for pair in packing for segment in pair)]
        self.publisher = publisher
        seed = int(torch.empty((), dtype=torch.int64, device="cpu").random_()) % 2**62
        pickled = None if policy is None else _pickled(policy, own.start_method)
        specs = [
            WorkerSpec(
                index=i,
                num_workers=count,
                create_env_fn=factories[i],
                policy=pickled,
                options=per_worker[i],
                init_fn=own.init_fn,
                seed=seed + i,
                counters=counters,
                blocks=blocks,
                packing=packing[i],
                weights=tuple(publisher.weights_of(i)),
                max_policy_lag=own.max_policy_lag if per_worker[i].replay_buffer is not None else None,
                keeps_place=own.on_worker_failure == "restart",
            )
            for i in range(count)
        ]
        self._transport = transport_of(own, count)
        self._writers = BufferWriters(per_worker[0].replay_buffer)
        self.group = WorkerGroup(
            specs,
            transport=self._transport,
            restarts=Restarts(
                wanted=own.on_worker_failure == "restart", most=own.max_restarts, delay_s=own.restart_delay
            ),
            watch=Watchdog(own.env_step_timeout, start_timeout_s=own.start_timeout),
            forget=self._forget,
            prepare=self._writers.prepare,
        )
        self.store = BlockStore(blocks, own.max_batches_held)

    def _forget(self, index: int) -> None:
        """A worker is gone."""
        self.publisher.forget(index)
        self._writers.give_up(index)

    def counts(self, asked: Any, total: int, own: WorkerOptions) -> FrameCounts:
        """What is delivered of what was asked.

        Raises:
            ValueError: rollouts of these workers make no batch.
        """
        ready = [worker.ready for worker in self.group.workers if worker.ready is not None]
        sizes = {one.batch_size for one in ready}
        if own.sync and len(sizes) > 1:
            raise ValueError(
                f"create_env_fn: a batch of all workers needs environments of one batch size, got {sorted(sizes)}. "
                "Batch environments of one size together in each worker, or pass sync=False."
            )
        check_join(own, ready)
        return FrameCounts.of_workers(
            asked,
            total,
            [(one.frames_per_batch, one.random_frames) for one in ready],
            sync=bool(own.sync),
            waits=own.waits_for(len(ready)) == len(ready),
        )

    def release(self) -> None:
        """Close the shared memory; what is mapped stays, for those who hold it."""
        self._transport.close()
        for segment in (*self._segments, *self.publisher.segments()):
            segment.close()


def _pickled(policy: Any, start_method: str | None) -> bytes:
    if found := never_copied_in(policy):
        raise TypeError(
            f"policy: it holds {type(found[0]).__name__}, which is never copied, and so cannot be sent to a worker "
            "process. Pass policy_factory=, a function that makes it there."
        )
    try:  # what was forked has every module
        weights = weights_of(policy)  # a function that is imported there has others
        sent = policy, None if weights is None or weights is policy else weights.state_dict()
        return dumps_by_name(sent) if start_method == "fork" else dumps(sent)
    except (TypeError, ValueError, AttributeError, RuntimeError, pickle.PicklingError) as error:
        raise TypeError(
            f"policy: {type(policy).__name__} cannot be sent to a worker process: {error}. Pass policy_factory=, a "
            "function that makes it there."
        ) from error


Arguments = tuple[Sequence[Any], dict[str, Any]]  # positional ones, and named ones
_SAMPLES = {"list_of_args": "(3,)", "list_of_kwargs": "{'key': 3}"}


class WorkerCalls:
    """Calls what a path leads to, from the collector of each worker.

    Args:
        group: the workers.
        num_workers: how many.
        stored: whether rollouts are written into a replay buffer: then one in progress may be cut short for a call.
        check: raises if the collector was shut down, or failed.
    """

    def __init__(self, group: WorkerGroup, num_workers: int, *, stored: bool, check: Callable[[], None]) -> None:
        self._group, self._num, self._stored, self._check = group, num_workers, stored, check
        self._pausers: list[int] = []  # threads inside pause()

    def between(
        self, path: str, calls: Sequence[Arguments], workers: Sequence[int] | None = None, *, again: bool = True
    ) -> list[Any]:
        """Call something in workers, not in the middle of a rollout; ``again``: if one dies of it, in the next one."""
        self._check()
        return self._group.call(path, calls, workers=workers, between_batches=True, cut=self._stored, again=again)

    def any_time(self, path: str, calls: Sequence[Arguments], workers: Sequence[int] | None = None) -> list[Any]:
        """Call something in workers between two rollouts; inside a pause of this thread, where they rest."""
        if not self.pauses_here:
            return self.between(path, calls, workers, again=False)
        self._check()
        return self._group.call(path, calls, workers=workers)

    def in_all(self, path: str, *args: Any, **kwargs: Any) -> list[Any]:
        """:meth:`any_time`, in all workers, with the same arguments."""
        return self.any_time(path, [(args, kwargs)] * self._num)

    def map(
        self,
        path: str,
        list_of_args: Sequence[Sequence[Any]] | None,
        list_of_kwargs: Sequence[Mapping[str, Any]] | None,
    ) -> list[Any]:
        """:meth:`any_time`, in all workers, with arguments for each.

        Raises:
            TypeError, ValueError: there are not as many, or they are no arguments.
        """
        self._check_list("list_of_args", list_of_args, (list, tuple))
        self._check_list("list_of_kwargs", list_of_kwargs, (Mapping,))
        args = [()] * self._num if list_of_args is None else list_of_args
        kwargs = [{}] * self._num if list_of_kwargs is None else list_of_kwargs
        return self.any_time(path, [(tuple(a), dict(k)) for a, k in zip(args, kwargs, strict=True)])

    def _check_list(self, name: str, given: Any, kinds: tuple[type, ...]) -> None:
        if given is None:
            return
        if not (isinstance(given, Sequence) and all(isinstance(one, kinds) for one in given)):
            raise TypeError(
                f"{name}: expected a list with a {'tuple' if name == 'list_of_args' else 'dictionary'} for each of "
                f"{self._num} workers, got {given!r}. Pass for example [{_SAMPLES[name]}] * {self._num}."
            )
        if len(given) != self._num:
            raise ValueError(f"{name}: expected an entry for each of {self._num} workers, got {len(given)}.")

    def read(self, path: str) -> list[Any]:
        """What a path leads to in each worker, read between two steps."""
        return self._group.call(path, [None] * self._num, again=True)

    # Pauses -----------------------------------------------------------------------------------

    @property
    def pauses_here(self) -> bool:
        """Whether this thread is inside :meth:`pausing`."""
        return threading.get_ident() in self._pausers

    @contextmanager
    def pausing(self) -> Iterator[None]:
        """Keep all workers between two steps inside the ``with`` block."""
        self._check()
        here = threading.get_ident()  # another thread may be the one that collects a block that was never left
        self._pausers.append(here)
        try:
            with self._group.pausing():
                yield
        finally:
            self._pausers.remove(here)


class _Thread(DaemonThread):
    """Calls ``deliver`` again and again; it takes a condition to stop."""

    def __init__(self, deliver: Callable[[Callable[[], bool]], bool]) -> None:
        super().__init__("rollwright-schedule")
        self._deliver = deliver

    def _work(self) -> None:
        while not self.stopping and self._deliver(lambda: self.stopping):
            pass

    def _finish(self) -> None:
        if not self.stopping:
            log_end(self)


class WorkersBackground(BufferFiller):
    """A thread that asks workers for rollouts, and the limiter of the replay buffer that they write.

    Args:
        group: the workers.
        schedule: of their rollouts.
        buffer: that they write; None: there is none.
        frames: in a batch.
        owner: name of the collector's class.
        before_batch: called before each batch.
        delivered: called after each batch.
        deliver: what is done in place of waiting for the next batch: it puts that into a queue; False: there is none.
    """

    def __init__(
        self,
        group: WorkerGroup,
        schedule: Schedule,
        buffer: Any,
        *,
        frames: int,
        owner: str,
        before_batch: Callable[[], None],
        delivered: Callable[[], None],
        deliver: Callable[[Callable[[], bool]], bool] | None = None,
    ) -> None:
        super().__init__(buffer, owner, "the group of workers")
        self._group, self._schedule = group, schedule
        self._frames, self._before_batch, self._delivered = frames, before_batch, delivered
        self._into_queue, self._takes_all = deliver, deliver is not None
        self._leave_limiter: tuple[Callable[[], None], ...] = ()
        self._limiter = limiter = getattr(buffer, "insert_limiter", None)
        if limiter is not None:
            limiter.check(frames=frames)
            schedule.rollouts.limiter = limiter
            self._leave_limiter = (limiter.on_change(group.wake), limiter.add_inserter(self._inserts))

    def start(self) -> None:
        """Start the thread.

        Raises:
            RuntimeError: there is no replay buffer, or it runs already.
        """
        self.check_start()
        self.begin(_Thread(self._deliver_one))

    def _deliver_one(self, stop: Callable[[], bool]) -> bool:
        schedule = self._schedule
        schedule.raise_error()
        if self._into_queue is not None:
            self._before_batch()
            came = self._into_queue(stop)
            if came:
                self._delivered()
            return came
        if not schedule.ready(stop):
            return False
        self._before_batch()
        self.await_room(lambda: self._looks_and_stops(stop))
        schedule.next(stop)
        self._delivered()
        return True

    def _looks_and_stops(self, stop: Callable[[], bool]) -> bool:
        """While the thread waits for samples: whether there is something else to see to."""
        self._group.look()
        return stop() or bool(self._schedule.errors)

    def await_room(self, stop: Callable[[], bool] = never) -> None:
        """Wait for the buffer's limiter, where no worker is at work."""
        limiter, frames = self._limiter, self._frames
        if limiter is None or any(worker.runs for worker in self._group.workers) or limiter.may_insert(frames):
            return
        self._schedule.rollouts.waiting_for = limiter.wants(frames)
        try:
            limiter.await_insert(frames, stop=stop, whom=self._owner)
        finally:
            self._schedule.rollouts.waiting_for = None

    def _inserts(self) -> str:
        """For who samples and waits: what the workers do."""
        self.raise_error()
        if not self.running:
            return f"{self._owner} is not running; it has collected {self._schedule.frames:,} frames"
        return f"the workers of {self._owner}: {self._group.doing()}"

    def leave_limiter(self) -> None:
        """Who samples need not wait for these workers."""
        for leave in self._leave_limiter:
            leave()

    def stop(self, timeout_s: float) -> None:
        """Ask the thread to end, and wait for that."""
        if self.thread is not None:
            self.thread.stop(timeout_s)
            self._group.wake()

    def raise_at_end(self) -> None:
        """Raise what went wrong in the thread, also in the thread itself."""
        if self.thread is not None:
            self.thread.raise_error()

    def drop_error(self) -> None:
        """Nobody is to hear of what went wrong in the thread, neither the collector's user nor the buffer's."""
        self._dropped = True

    def stats(self) -> dict[str, Any]:
        """What ``stats()`` of a collector reports on it."""
        if self.thread is None:
            return {}
        return {"background": {"running": self.running, "error": self.thread.error_text()}}


_WAITING = {
    WorkerState.STARTING: "its environment and policy to be made",
    WorkerState.WAITING: "being asked for a rollout",
    WorkerState.PAUSED: "the end of a pause",
    WorkerState.PREPARING: "its pre_collect_hook",
}


def merged_stats(group: WorkerGroup, schedule: Schedule, counts: FrameCounts, version: int) -> dict[str, Any]:
    """What ``stats()`` of a collector reports on its workers.

    Args:
        group: the workers.
        schedule: of their rollouts.
        counts: of the collector.
        version: of the weights that were published last.
    """
    group.look()
    workers = [_of_worker(group, index) for index in range(len(group.workers))]
    counters = [worker.counters for worker in group.workers]
    latest = last_episodes(counters, in_step=schedule.strategy.in_step)
    seconds = {name: sum(worker["seconds"][name] for worker in workers) for name in counters[0].seconds()}
    busiest = max(worker["seconds"]["total"] + worker["seconds"]["wait"] for worker in workers)
    held = schedule.store.num_borrowed
    return {
        "frames": schedule.frames,
        "batches": schedule.batches,
        "total_batches": counts.batches,
        "frames_per_batch": counts.frames,
        "frames_per_second": schedule.frames / busiest if busiest else None,
        "seconds": seconds,
        "episodes": sum(of_worker.counts[Count.EPISODES] for of_worker in counters),
        "mean_return": float(latest[:, 0].mean()) if len(latest) else None,
        "mean_length": float(latest[:, 1].mean()) if len(latest) else None,
        "last_return": float(latest[-1, 0]) if len(latest) else None,
        "policy_version": version,
        "policy_lag": max(version - worker["policy_version"] for worker in workers),
        "frames_stale": schedule.frames_stale,
        "workers": workers,
        "workers_alive": group.num_alive,
        "restarts": sum(worker["restarts"] for worker in workers),
        "env_recreations": sum(of_worker.counts[Count.ENV_RECREATIONS] for of_worker in counters),
        "threads": {"workers": [worker["threads"] for worker in workers]},
        "bytes_held": schedule.store.num_bytes,
        "leases": {
            "held": held,
            "most": schedule.store.most,
            "batches_copied": schedule.num_copied,
            "message": f"the consumer holds {held} batches: further ones are copied"
            if held >= schedule.store.most
            else None,
        },
        "forced": list(group.forced),
        "messages": schedule.rollouts.num_messages,
        "undelivered": schedule.num_undelivered,
        "trajectories_held": len(schedule.trajectories_held),
        "paths": next((worker.ready.how for worker in group.workers if worker.ready is not None), {}),
        "waiting_for": schedule.rollouts.waiting_for,
        **_of_paths([worker.of_path for worker in group.workers]),
    }


def _of_paths(found: list[Mapping[str, Any]]) -> dict[str, Any]:
    """What paths of workers report, at the end of the last rollout of each: numbers summed up, lists joined."""
    merged: dict[str, Any] = {}
    for of_worker in found:
        for name, value in of_worker.items():
            merged[name] = merged[name] + value if name in merged else value
    return merged


def _of_worker(group: WorkerGroup, index: int) -> dict[str, Any]:
    worker = group.workers[index]
    counters, alive = worker.counters, worker.alive
    state = counters.state if alive else WorkerState.ENDED
    return {
        "index": index,
        "alive": alive,
        "pid": worker.pid,
        "state": state.name.lower(),
        "frames": counters.counts[Count.FRAMES],
        "batches": counters.counts[Count.BATCHES],
        "episodes": counters.counts[Count.EPISODES],
        "seconds": counters.seconds(),
        "policy_version": counters.counts[Count.VERSION],
        "restarts": group.restarts.counts.get(index, 0),
        "env_recreations": counters.counts[Count.ENV_RECREATIONS],
        "threads": worker.threads,
        "error": None if worker.error is None else str(worker.error),
        "waiting_for": _WAITING.get(state),
    }


def last_episodes(counters: Sequence[WorkerCounters], *, in_step: bool) -> NDArray[np.float64]:
    """The episodes of all workers that ended last, as many as one process takes means over.

    Args:
        counters: of the workers.
        in_step: whether workers take their steps together, so that the step counts and no clock, as in one process.

    Returns:
        Rows of :meth:`~rollwright.collectors.rollout.stats.EpisodeStats.rows`, the last one at the end.
    """
    rows = np.concatenate([of_worker.episodes for of_worker in counters])
    rows = rows[rows[:, 2] > 0]
    return rows[np.argsort(rows[:, 3 if in_step else 2], kind="stable")[-NUM_EPISODES:]]


def select_workers(found: dict[str, Any], workers: WorkerStats) -> dict[str, Any]:
    """What of :func:`merged_stats` is asked for.

    Args:
        found: all of it.
        workers: see ``stats()``.
    """
    check_worker_stats(workers)
    if workers is True:
        return found
    each = found["workers"]
    chosen = {} if workers == "per_worker" else {name: value for name, value in found.items() if name != "workers"}
    if workers is False:
        return chosen
    chosen |= {"workers": len(each), "workers_alive": found["workers_alive"]}
    if workers != "aggregate":
        chosen |= {f"worker_{i}/{name}": value for i, one in enumerate(each) for name, value in one.items()}
    return chosen
