"""MultiLLMCollector: dialogues from several processes, which share the groups of the data."""

from __future__ import annotations

import contextlib
import re
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, cast

from tensordict import TensorDictBase

from rollwright._options import with_options
from rollwright.collectors.core import WorkerStats, checked_state
from rollwright.collectors.delivery.stored import QueueBacklog, QueueClosed, QueueWriter
from rollwright.collectors.llm.interface import (
    LENGTH_UNKNOWN,
    checked_postproc,
    environment_of,
    in_own_words,
    log_batch,
    version_by,
)
from rollwright.collectors.llm.options import LLMOptions
from rollwright.collectors.multi import MultiCollector
from rollwright.collectors.options import ConversationOptions
from rollwright.collectors.reports.statistics import CollectorStats
from rollwright.collectors.rollout.state import td_from
from rollwright.collectors.workers.control import select_workers
from rollwright.collectors.workers.options import BackendOptions, WorkerOptions, num_in_each
from rollwright.data.llm.records import origins_in
from rollwright.data.llm.turns import Version
from rollwright.errors import WorkerError


@with_options(LLMOptions, WorkerOptions)
class MultiLLMCollector(MultiCollector):
    """Collects dialogues in several processes; ``LLMCollector(..., num_collectors=N)`` makes it.

    Each worker has an environment and a policy of its own, and takes the conversations of each N-th group. All have
    one seed: the tokens of a conversation are those that one process would sample.

    Args:
        env: makes an environment, in a worker; or a list of such functions, one for each worker.
        policy: sent to each worker; an engine cannot be sent: pass ``policy_factory``.
        **options: those of :class:`~rollwright.collectors.llm.options.LLMOptions` and of
            :class:`~rollwright.collectors.workers.options.WorkerOptions`.
    """

    _options_kind = ConversationOptions
    _may_end = True

    def __init__(self, env: Any = None, policy: Callable[..., Any] | None = None, **options: Any) -> None:
        self._construct(*environment_of(env, options, policy))

    def _construct(self, create_env_fn: Any, policy: Callable[..., Any] | None, options: dict[str, Any]) -> None:
        owner = "LLMCollector" if type(self) is MultiLLMCollector else type(self)
        own, others = WorkerOptions.split(options, owner, LLMOptions)
        self.llm_options = LLMOptions.parse(others, owner)
        _check_for_workers(self.llm_options)
        given = {name: options[name] for name in vars(own) if name in options}
        asked = self.llm_options.translated()
        writer = asked["replay_buffer"]
        if isinstance(
            writer, QueueWriter
        ):  # this process puts the turns, so that a worker that is killed puts none twice
            self._backlog = QueueBacklog(writer)
            asked["replay_buffer"] = None
            one_each = "groups_per_batch" if self.llm_options.groups_per_batch else "trajs_per_batch"
            if self.llm_options.delivers_whole:
                asked |= {one_each: 1, "traj_format": "cat"}
        super()._construct(create_env_fn, policy, {**given, **asked})

    @staticmethod
    def _in_own_words(rounding: str) -> str:
        return in_own_words(rounding)

    @property
    def policy_version(self) -> Version | None:  # type: ignore[override]
        """Version of the weights; None without ``track_policy_version``."""
        return version_by(self.llm_options.track_policy_version, self._weights.version)

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

    def iterator(self) -> Iterator[TensorDictBase | None]:
        """Yield until ``total_frames`` are stepped, from wherever the collector stands."""
        for batch in super().iterator():
            if self.llm_options.verbose:
                log_batch(self)
            yield batch
            batch = None  # its memory is the consumer's alone

    def __len__(self) -> int:
        if self.options.total_frames == -1:
            raise TypeError(LENGTH_UNKNOWN)
        return super().__len__()

    def set_seed(self, seed: int, static_seed: bool = True) -> int:
        """Seed the data and the answers of all workers, and begin the data again; all workers have one seed.

        Args:
            seed: of all.
            static_seed: no effect.
        """
        return super().set_seed(seed, static_seed=True)

    def state_dict(self, *, engine_weights: bool = False) -> OrderedDict[str, Any]:
        """What :meth:`load_state_dict` needs to go on; turns that are not in the queue yet are at ``"queue"``."""
        if self._backlog is None:
            return super().state_dict(engine_weights=engine_weights)
        with self._backlog.lock:
            state = super().state_dict(engine_weights=engine_weights)
            state["queue"] = self._backlog.state_dict()
        return state

    def stats(self, *, workers: WorkerStats = True) -> CollectorStats:
        """Counts of all workers, as those of a ``MultiCollector``; with a queue, ``write_count`` counts the turns put.

        Complete conversations that no batch was made of yet count as undelivered.
        """
        found: dict[str, Any] = {**_before_a_rollout(), **super().stats()}
        backlog = self._backlog
        held = dict.fromkeys(origin for turns in self._schedule.trajectories_held for origin in origins_in(turns))
        if self._schedule.filtered:
            found["groups_filtered"] = dict(Counter(found["groups_filtered"]) + self._schedule.filtered)
        if held:
            found["conversations_undelivered"] += len(held)
            names = [origin.name for origin in held]
            found["conversations_unfinished"] = [*found["conversations_unfinished"], *names]
        if backlog is not None:
            found |= {"write_count": backlog.writer.write_count, "undelivered": found["undelivered"] + len(backlog)}
            found["waiting_for"] = backlog.writer.waiting_for or found["waiting_for"]
        return cast(CollectorStats, select_workers(found, workers))

    def shutdown(self, timeout: float | None = None, close_env: bool = True, raise_on_error: bool = True) -> None:
        """End the workers, and a thread that waits for room in the queue. May be called again."""
        if self._backlog is not None:
            self._backlog.writer.closed = True
        with contextlib.suppress(QueueClosed):  # what was not put is not delivered, as the state knows
            super().shutdown(timeout, close_env, raise_on_error)

    def load_state_dict(self, state_dict: Mapping[str, Any], **kwargs: Any) -> None:
        """Go on from a saved state, also of another number of workers: the data is divided anew.

        Then, whole conversations that were not delivered begin again, and turns that were delivered go on.

        Raises:
            KeyError, TypeError: it is the state of something else, or none.
            ValueError: what is in progress cannot be divided anew; with the reason.
        """
        queued = [td_from(row) for row in checked_state(state_dict).get("queue", ())]
        super().load_state_dict(self._divided(state_dict), **kwargs)
        if self._backlog is not None:
            self._backlog.restore(queued)

    def _divided(self, state: Mapping[str, Any]) -> Mapping[str, Any]:
        count, saved = self.num_workers, [name for name in state if re.fullmatch(r"worker\d+", str(name))]
        if not saved or len(saved) == count or "undelivered" not in state:
            return state
        waiting = state["undelivered"]["waiting"]
        if self.own_options.sync and waiting:
            raise ValueError(
                f"state_dict: expected the state of {count} workers in step, got that of {len(saved)}, with "
                f"rollouts of theirs that make no batch of {count}. Pass num_collectors={len(saved)}, or sync=False."
            )
        names = [f"worker{i}" for i in range(len(saved))]
        states = [{**state[name], "traj_pool": state["traj_pool"]} for name in names]
        try:
            [parts] = self._calls.between("divided", [((states, count), {})], workers=[0])
        except WorkerError as error:
            raise ValueError(
                f"state_dict: expected the state of {count} workers, got that of {len(saved)}, which cannot be divided "
                f"anew: {error} Pass num_collectors={len(saved)}."
            ) from error
        others = {name: value for name, value in state.items() if name not in saved}
        moved = [{**result, "worker": result["worker"] % count} for result in waiting]
        others["undelivered"] = {**state["undelivered"], "waiting": moved}
        return {**others, **{f"worker{i}": part for i, part in enumerate(parts)}}

    def _change_options(self, **changes: Any) -> None:
        self._calls.in_all("change_options", **changes)
        self.options = self.options.override(**changes)
        self._group.change_options(**changes)


def _before_a_rollout() -> dict[str, Any]:
    """What paths report, where no worker has ended a rollout yet."""
    found: dict[str, Any] = dict.fromkeys(
        (f"conversations_{name}" for name in ("in_progress", "dropped", "undelivered")), 0
    )
    return found | {"conversations_failed": {}, "groups_filtered": {}, "conversations_unfinished": []}


def _check_for_workers(options: LLMOptions) -> None:
    """Refuse what workers cannot have.

    Raises:
        ValueError: versions are to be UUIDs.
    """
    if isinstance(getattr(options.track_policy_version, "version", 0), str):
        raise ValueError(
            "track_policy_version: workers count versions in integers, got a PolicyVersion of UUIDs. Pass True or "
            "PolicyVersion('int'), or collect in this process."
        )


def made_with_workers(args: Sequence[Any], options: Mapping[str, Any]) -> MultiLLMCollector:
    """The collector with workers that ``num_collectors`` or ``backend`` asks for.

    Raises:
        ValueError: ``backend="direct"`` contradicts ``num_collectors``.
    """
    return MultiLLMCollector(*args, **with_worker_count(args[0] if args else options.get("env"), options))


def with_worker_count(env: Any, options: Mapping[str, Any]) -> dict[str, Any]:
    """Options with ``num_workers`` in place of ``num_collectors``.

    Args:
        env: what makes environments, or a list with one for each worker; None: it is among the options.
        options: as they were given.
    """
    given = dict(options)
    count = BackendOptions(num_collectors=given.pop("num_collectors", None)).num_collectors
    env = given.get("create_env_fn") if env is None else env
    if count is not None or not isinstance(env, Sequence):
        given["num_workers"] = (1 if count is None else count) * num_in_each(options)
    return given
