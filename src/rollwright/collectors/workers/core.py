"""WorkerCore: the collector of a worker. Its frames lie in blocks, its ids are apart from its siblings'."""

from __future__ import annotations

import pickle
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from tensordict import TensorDict, TensorDictBase

from rollwright._keys import NestedKey, unravel
from rollwright._memory import MemoryPool
from rollwright._processes.channel import ByValue
from rollwright.collectors.collector import Collector
from rollwright.collectors.delivery.background import paused_error
from rollwright.collectors.delivery.batches import TrajectoryBatches, copied
from rollwright.collectors.delivery.checks import ledger_of
from rollwright.collectors.profiling import ProfileConfig
from rollwright.collectors.rollout.devices import module_device
from rollwright.collectors.rollout.trajectory_ids import TrajectoryPool
from rollwright.collectors.workers import messages as say
from rollwright.collectors.workers.counters import State, Time, Word, Words
from rollwright.collectors.workers.memory.blocks import BatchForm, BlockMemory, Place
from rollwright.collectors.workers.memory.packing import ParcelMemory
from rollwright.envs.base import EnvBase
from rollwright.envs.recreation.policy import num_recreations
from rollwright.weight_update.forms import describe

if TYPE_CHECKING:
    from rollwright.collectors.workers.worker import WorkerSpec

__all__ = ["StridedPool", "WorkerCore"]

Ask = Callable[[BatchForm], Place | None]


class StridedPool(TrajectoryPool):
    """Ids of one worker of several: ``k * num_workers + worker``, so that all have their own, in any order of events.

    Args:
        words: hold k, for the one that takes this worker's place.
        worker: index.
        num_workers: how many there are.
    """

    def __init__(self, words: Words, worker: int, num_workers: int) -> None:
        super().__init__()
        self._words, self._worker, self._stride = words.whole, worker, num_workers
        self._next = self._words[Word.NUM_IDS]

    def take(self, n: int) -> NDArray[np.int64]:
        """``n`` fresh ids as an array."""
        first, self._next = self._next, self._next + n
        self._words[Word.NUM_IDS] = self._next
        return np.arange(first, first + n, dtype=np.int64) * self._stride + self._worker

    def state_dict(self) -> dict[str, int]:
        """The least number that is no id yet, of any worker's."""
        return {"traj_id": self._next * self._stride}

    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        """Go on above the saved ids, and never below those handed out already."""
        self._next = max(self._next, -(-int(state_dict["traj_id"]) // self._stride))
        self._words[Word.NUM_IDS] = self._next


class WorkerCore(Collector):
    """A collector whose batches are for another process."""

    def __init__(self, spec: WorkerSpec, words: Words, ask: Ask, stopping: Callable[[], bool]) -> None:
        self._spec, self._words, self._stopping = spec, words, stopping
        self._parcels = ParcelMemory(spec.parcels)
        self._blocks = BlockMemory(spec.blocks, ask)
        self._frames_dropped = 0
        self._spent: list[float] = []
        self._refusing: tuple[str | None, str | None] = (
            None,
            None,
        )  # rollouts, and what waits for the end of one: to whom
        self.skip_published: Callable[[], None] = lambda: None
        policy = None if spec.policy is None else pickle.loads(spec.policy)
        if isinstance(spec.create_env_fn, EnvBase):  # a copy, with the generator of its siblings
            spec.create_env_fn.set_seed(int(torch.empty((), dtype=torch.int64).random_()) % 2**31)
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            super().__init__(spec.create_env_fn, policy, **vars(spec.options))
        self._go_on_counting()
        self._said = _notes(said)
        self._how_told: dict[str, str] = {}

    def _go_on_counting(self) -> None:
        """Count from where the worker was whose place this one takes."""
        whole, parts, timer = self._words.whole, self._words.parts, self._timer
        self._frames, self._iter = whole[Word.FRAMES], whole[Word.BATCHES]
        self._episodes.episodes, self._frames_dropped = whole[Word.EPISODES], whole[Word.FRAMES_DROPPED]
        self._recreations_before = whole[Word.ENV_RECREATIONS]
        timer.total = parts[Time.TOTAL_S]
        timer.seconds = {"policy": parts[Time.POLICY_S], "env": parts[Time.ENV_S], "write": parts[Time.WRITE_S]}

    def _new_traj_pool(self) -> TrajectoryPool:
        ledger = ledger_of(self.options.replay_buffer)
        if ledger is not None:
            return TrajectoryPool(ledger)
        return StridedPool(self._words, self._spec.index, self._spec.num_workers)

    def _new_memory(self) -> MemoryPool:
        with_blocks = self.options.replay_buffer is None and self.options.trajs_per_batch is None
        return self._blocks if with_blocks else super()._new_memory()

    def ready(self) -> say.Ready:
        """What its collector is told of it."""
        device = self.storing_device
        notes = [(kind, text) for kind, text in self._take_said() if "delivers whole batches" not in text]
        return say.Ready(
            num_envs=self.env.numel(),
            batch_size=tuple(self.env.batch_size),
            shapes=_shapes(self.env),
            frames_per_batch=self.frames_per_batch,
            random_frames=self.init_random_frames,
            device=None if device is None else str(device),
            policy_device=str(module_device(self.policy) or self.policy_device or "cpu"),
            threads=torch.get_num_threads(),
            description=f"env={self.env}, policy={type(self.policy).__name__}",
            how=self._tell_how(),
            warnings=ByValue(notes),
        )

    def news(self) -> say.Noted | None:
        """What has changed of that since the last report: a policy is compiled at its first batch."""
        how, said = self._how_told, self._take_said()
        return say.Noted(self._how_told, ByValue(said)) if self._tell_how() != how or said else None

    def _tell_how(self) -> dict[str, str]:
        self._how_told = {**self._how, **self._delivery.how}
        return self._how_told

    def _take_said(self) -> list[tuple[type[Warning], str]]:
        said, self._said = self._said, []
        return said

    def take_version(self, version: int) -> None:
        """Act with another version of the weights."""
        self._policy_version = version
        self._words.whole[Word.VERSION] = version

    def _begin(self) -> None:
        self._words.state = State.COLLECTING  # the environment may be reset, which may be stuck, too
        super()._begin()
        self._words.state = State.COLLECTING  # what comes is the first step, with the whole limit for itself

    def _compile_policy(self) -> None:
        before, self._words.state = self._words.state, State.STARTING  # takes as long as it takes
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            super()._compile_policy()
        self._said += _notes(said)
        self._words.state = before

    def _finish(self, steps: int) -> TensorDictBase:
        self._words.state = State.DELIVERING
        return super()._finish(steps)

    # Rollouts ---------------------------------------------------------------------------------

    def take_rollout(self, order: say.Collect) -> say.Collected:
        """Take a rollout, and hand it over."""
        word = self._words.whole
        frames, dropped = self._frames, self._frames_dropped
        word[Word.OLDEST] = self._policy_version
        self._oldest = self._policy_version
        self._blocks.begin(order.offset, order.layout)
        if order.anew:
            self._path.carrier = None
            self._delivery.forget()
        found: Any = None
        try:
            with self.spending(None):
                if isinstance(self._delivery, TrajectoryBatches):
                    batch: Any = self._complete()
                else:
                    batch = self._delivery.next()
            found = self._sorted(batch)
        finally:
            batch = None
            held = self._blocks.end()
            self._tell()
        in_block, rest, lacking, nesting = found
        dropped = self._frames_dropped - dropped
        return say.Collected(
            run=order.run,
            frames=self._frames - frames - dropped,
            steps=self._taken // self.env.numel(),
            in_block=in_block,
            rest=rest,
            lacking=lacking,
            nesting=nesting,
            held=held,
            oldest_version=self._oldest,
            newest_version=self._policy_version,
            dropped_frames=dropped,
        )

    def _complete(self) -> list[TensorDictBase]:
        """The trajectories that ended in a rollout, one after another ``[length]``."""
        delivery = cast(TrajectoryBatches, self._delivery)
        delivery._take_in(delivery.assembler)
        found = delivery.assembler.pop(delivery.assembler.num_complete)
        return [self._hand_out(copied(trajectory.pieces)) for trajectory in found]

    def _collect(self) -> TensorDictBase:
        """See :class:`DeliveringCore`; a batch that is too stale is thrown away, and taken again."""
        limit, word = self._spec.max_policy_lag, self._words.whole
        while True:
            batch = super()._collect()
            if limit is None or word[Word.PUBLISHED] - self._oldest <= limit or self._stopping():
                return batch
            self._frames_dropped += self._taken
            word[Word.FRAMES_DROPPED] = self._frames_dropped
            self._path.carrier = None  # no trajectory goes on across the hole
            self._oldest = word[Word.OLDEST] = self._policy_version

    def _sorted(self, batch: Any) -> tuple[bool, Any, tuple[NestedKey, ...], dict[NestedKey, tuple[int, ...]]]:
        """What of a batch lies in the block, and the rest of it, packed."""
        windows = self._blocks.windows
        if batch is None:
            return False, None, (), {}
        if not windows or type(batch) is not TensorDict or batch.batch_size != self._batch_size():
            return False, self._parcels.pack(batch), (), {}
        rest: dict[NestedKey, Any] = {}
        nesting: dict[NestedKey, tuple[int, ...]] = {}
        missing = set(windows)
        for place, value in _nodes(batch):
            key = unravel(place)
            if isinstance(value, TensorDictBase):
                if value.is_empty():
                    rest[key] = value
                elif value.batch_size != batch.batch_size:
                    nesting[key] = tuple(value.batch_size[batch.ndim :])
                continue
            window = windows.get(key)
            if window is None or not _is(value, window):
                rest[key] = value
            else:
                missing.discard(key)
        packed = self._parcels.pack(rest) if rest else None
        return True, packed, tuple(missing), nesting

    def _batch_size(self) -> torch.Size:
        return torch.Size([*self.env.batch_size, self._counts.steps])

    # What is told ---------------------------------------------------------------------------------

    @contextmanager
    def spending(self, stage: str | None) -> Iterator[None]:
        """Add the time of the ``with`` block to that of a stage; what is spent inside on another is not counted."""
        begun = time.perf_counter()
        self._spent.append(0.0)
        try:
            yield
        finally:
            elapsed = time.perf_counter() - begun
            inside = self._spent.pop()
            if self._spent:
                self._spent[-1] += elapsed
            if stage is not None:
                self._words.parts[Time[f"{stage.upper()}_S"]] += elapsed - inside

    def _tell(self) -> None:
        """Write down how far it has come."""
        whole, parts, seconds = self._words.whole, self._words.parts, self._timer.seconds
        whole[Word.FRAMES], whole[Word.BATCHES] = self._frames, self._iter
        whole[Word.ENV_RECREATIONS] = self._recreations_before + num_recreations(self.env)
        parts[Time.POLICY_S], parts[Time.ENV_S] = seconds["policy"], seconds["env"]
        parts[Time.WRITE_S], parts[Time.TOTAL_S] = seconds["write"], self._timer.total
        episodes = self._episodes
        if whole[Word.EPISODES] != episodes.episodes and episodes.num_in_window:
            summary = episodes.summary()
            whole[Word.EPISODES] = summary["episodes"]
            parts[Time.MEAN_RETURN], parts[Time.MEAN_LENGTH] = summary["mean_return"], summary["mean_length"]
            parts[Time.LAST_RETURN], parts[Time.WINDOW] = summary["last_return"], float(episodes.num_in_window)
            parts[Time.LAST_RETURN_AT] = time.monotonic()

    # For calls from the other process ---------------------------------------------------------

    @contextmanager
    def called(self, path: str, *, paused: bool, in_rollout: bool) -> Iterator[None]:
        """Call ``path`` in the ``with`` block, which refuses what cannot be done now.

        Args:
            path: for the message.
            paused: no rollout may begin.
            in_rollout: there is one under way, and what has to wait for its end is not to be called.
        """
        before, self._refusing = self._refusing, (path if paused or in_rollout else None, path if in_rollout else None)
        try:
            yield
        finally:
            self._refusing = before

    def _check_idle(self, what: str) -> None:
        if self._refusing[0] is not None:
            raise paused_error(self._refusing[0])
        super()._check_idle(what)

    def _between_batches(self) -> AbstractContextManager[None]:
        if self._refusing[1] is not None:
            raise paused_error(self._refusing[1])
        return super()._between_batches()

    def rollout(self) -> TensorDictBase:
        """See :meth:`Collector.rollout`."""
        self._check_idle("rollout")
        return super().rollout()

    @property
    def replay_buffer(self) -> Any:
        """Where frames go; None without."""
        return self.options.replay_buffer

    def describe_model(self, model_id: str) -> Any:
        """What a model takes; see :func:`~rollwright.weight_update.forms.describe`."""
        return describe(self.get_model(model_id), model_id)

    def load_saved_state(self, state: Any, **kwargs: Any) -> None:
        """:meth:`load_state_dict`, whatever was published before."""
        self.load_state_dict(state, **kwargs)
        self.skip_published()
        self._words.whole[Word.VERSION] = self._policy_version

    def profile(self, config: ProfileConfig) -> None:
        """Trace rollouts as ``config`` says."""
        self._profile_config = config

    def set_hook(self, name: str, hook: Any) -> None:
        """Set ``pre_collect_hook`` or ``post_collect_hook``."""
        setattr(self, name, hook)


def _notes(caught: list[warnings.WarningMessage]) -> list[tuple[type[Warning], str]]:
    return [(entry.category, str(entry.message)) for entry in caught]


def _shapes(env: EnvBase) -> dict[NestedKey, tuple[int, ...]]:
    """Of all that an environment reads and says."""
    specs = (env.full_observation_spec, env.full_action_spec, env.full_reward_spec, env.full_done_spec)
    return {unravel(key): tuple(leaf.shape) for spec in specs for key, leaf in spec.items(True, True)}


def _nodes(td: TensorDictBase, place: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    for key, value in td.items():
        yield (*place, key), value
        if type(value) is TensorDict:
            yield from _nodes(value, (*place, key))


def _is(value: Any, window: torch.Tensor) -> bool:
    """Whether a value is the very memory of a window."""
    return (
        type(value) is torch.Tensor
        and value.shape == window.shape
        and value.dtype == window.dtype
        and ((value.data_ptr() == window.data_ptr() and value.stride() == window.stride()) or not value.numel())
    )
