"""Starts the workers of a collector, and allocates the memory that they share with it."""

from __future__ import annotations

import contextlib
import dataclasses
import pickle
import uuid
from collections.abc import Sequence
from typing import Any

import torch

from rollwright._memory import Segment
from rollwright._processes.channel import dumps, dumps_by_name
from rollwright._processes.files import raise_file_limit
from rollwright.collectors.delivery_options import is_service
from rollwright.collectors.options import CollectorOptions
from rollwright.collectors.rollout.counts import FrameCounts
from rollwright.collectors.rollout.policy_copies import never_copied_in
from rollwright.collectors.workers.group import WorkerGroup
from rollwright.collectors.workers.handles import Restarts, Watchdog
from rollwright.collectors.workers.memory import BlockStore
from rollwright.collectors.workers.options import WorkerOptions, check_join
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
