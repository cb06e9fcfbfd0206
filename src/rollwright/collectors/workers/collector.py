"""WorkerCollector: collects in a worker process, and serves calls from the collector's process."""

from __future__ import annotations

import pickle
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from tensordict import TensorDict, TensorDictBase, is_leaf_nontensor

from rollwright._keys import NestedKey, as_tuple, unravel
from rollwright._processes.channel import ByValue
from rollwright.collectors.core import Hooks, NothingLeft, PostHook, PreHook, Reachable, TrajectoryIds
from rollwright.collectors.delivery.base import TrajectoryBatches
from rollwright.collectors.delivery.rows import batch_memory
from rollwright.collectors.delivery.saved_state import SavedState
from rollwright.collectors.delivery.stored import choose_delivery
from rollwright.collectors.delivery.thread import Background, paused_error
from rollwright.collectors.options import ledger_of, warn_of_options
from rollwright.collectors.reports.observers import Profile, ProfileConfig
from rollwright.collectors.rollout.environment import making_env, note_waits
from rollwright.collectors.rollout.policy import making_policy, module_device
from rollwright.collectors.rollout.rollout import Rollout
from rollwright.collectors.rollout.state import TrajectoryPool
from rollwright.collectors.rollout.stats import EpisodeStats
from rollwright.collectors.weights import LocalWeights, WeightTargets, pick_weights
from rollwright.collectors.workers import messages
from rollwright.collectors.workers.counters import (
    Publications,
    StridedIds,
    WorkerCounters,
    WorkerObserver,
    packed_position,
)
from rollwright.collectors.workers.memory import BatchForm, BlockMemory, BlockPart, Packer
from rollwright.envs.base import EnvBase
from rollwright.weight_update.forms import Description, describe, prepare
from rollwright.weight_update.subscribing import WeightSubscriber

if TYPE_CHECKING:
    from rollwright.collectors.workers.worker import WorkerSpec


class WorkerCollector(Reachable):
    """Collects batches for another process.

    Args:
        spec: of the worker.
        counters: of the worker.
        ask: for memory in the middle of a rollout.
        subscriber: brings published weights.
        interrupted: asked after each step whether the batch ends there.
        stopping: whether the worker ends.
        send: a message to the collector's process, in the middle of a rollout.

    Attributes:
        observer: writes down how far it is.
    """

    _weights: LocalWeights

    def __init__(
        self,
        spec: WorkerSpec,
        counters: WorkerCounters,
        ask: Callable[[BatchForm], BlockPart | None],
        subscriber: WeightSubscriber,
        *,
        interrupted: Callable[[], bool],
        stopping: Callable[[], bool],
        send: Callable[[Any], None],
    ) -> None:
        self.options = options = spec.options
        options.check_devices()
        self.worker_idx = options.worker_idx
        self._subscriber = subscriber
        self._packer = Packer(spec.packing)
        self._blocks = BlockMemory(spec.blocks, ask)
        publications = Publications(counters, options, send) if spec.keeps_place else None
        self.observer = WorkerObserver(counters, spec.max_policy_lag, stopping, publications)
        self._refused_rollout: str | None = None  # the call that must not take a rollout,
        self._refused_end: str | None = None  # or wait for the end of the one in progress
        policy, weights = (None, None) if spec.policy is None else pickle.loads(spec.policy)
        if weights is not None:
            prepare(policy, weights, "policy")()
        if isinstance(spec.create_env_fn, EnvBase):  # a copy, with the generator of its siblings
            spec.create_env_fn.set_seed(int(torch.empty((), dtype=torch.int64, device="cpu").random_()) % 2**31)
        ledger = ledger_of(options.replay_buffer)
        ids: TrajectoryIds = TrajectoryPool(ledger) if ledger else StridedIds(counters, spec.index, spec.num_workers)
        in_blocks = options.replay_buffer is None and not options.delivers_whole
        self._hooks = Hooks(options.pre_collect_hook, options.post_collect_hook)
        self._profile = Profile(lambda: self.worker_idx)
        with (
            warnings.catch_warnings(record=True, action="always") as caught,
            making_env(spec.create_env_fn, options) as env,
            making_policy(policy, options, env) as made,
        ):
            self._rollout = rollout = Rollout(
                env,
                made,
                options,
                given=policy,
                hooks=self._hooks,
                ids=ids,
                memory=self._blocks if in_blocks else batch_memory(options),
                observer=self.observer,
                interrupted=interrupted,
                owner=type(self).__name__,
            )
            note_waits(env, counters.note_waits)
            self._delivery = choose_delivery(rollout, self._profile)
            warn_of_options(type(self).__name__, options)
        self.observer.notes += [(entry.category, str(entry.message)) for entry in caught]
        self.observer.continue_counts(self._delivery)
        self._weights = LocalWeights(
            self, rollout, Background(rollout, self._delivery), worker_idx=lambda: self.worker_idx
        )
        self._saved_state = SavedState(rollout, self._delivery)
        self.env, self.replay_buffer, self.devices = rollout.env, options.replay_buffer, rollout.devices
        self.frames_per_batch, self.init_random_frames = rollout.counts.frames, rollout.counts.random_frames
        self._how: dict[str, str] = {}  # as the collector knows it
        self._keeps_place, self._moved = spec.keeps_place, False
        if spec.keeps_place:
            rollout.cursor.keep_place()
        if spec.place is not None:
            rollout.cursor.load_state_dict(pickle.loads(spec.place), ids_are_free=True)
            rollout.cursor.look_ahead()  # the one before may have been killed behind its last rollout

    # For the worker ---------------------------------------------------------------------------

    def ready(self) -> messages.Ready:
        """What its collector has to know of it."""
        rollout, device = self._rollout, self.devices.storing
        return messages.Ready(
            num_envs=self.env.numel(),
            batch_size=tuple(self.env.batch_size),
            shapes=_shapes(self.env),
            frames_per_batch=rollout.counts.frames,
            random_frames=rollout.counts.random_frames,
            device=None if device is None else str(device),
            policy_device=str(module_device(self.policy) or self.devices.policy or "cpu"),
            threads=torch.get_num_threads(),
            description=f"env={self.env}, policy={type(self.policy).__name__}",
            how=self._current_how(),
            warnings=ByValue(self._taken_notes()),
        )

    def news(self) -> messages.Noted | None:
        """What has changed of that since the last report: a policy is compiled at its first batch."""
        how, notes = self._how, self._taken_notes()
        return messages.Noted(self._how, ByValue(notes)) if self._current_how() != how or notes else None

    def _current_how(self) -> dict[str, str]:
        self._how = {**self._rollout.how, **self._delivery.how}
        return self._how

    def _taken_notes(self) -> list[tuple[type[Warning], str]]:
        notes, self.observer.notes = self.observer.notes, []
        return notes

    def take_weights(self) -> None:
        """Take what was published, and act with its version; an engine takes whole states."""
        subscriber = self._subscriber
        targets = WeightTargets(self, self._rollout.acting, version=lambda: subscriber.version)
        self.take_version(subscriber.apply(targets))

    def take_version(self, version: int) -> None:
        """Act with another version of the weights."""
        self._rollout.acting.version = version
        self.observer.take_version(version)

    def moved(self) -> bytes | None:
        """Where in the data the worker is, if a call has changed that."""
        moved, self._moved = self._moved, False
        return self._place() if moved else None

    def _place(self) -> bytes | None:
        return packed_position(self._rollout.cursor.place()) if self._keeps_place else None

    def collect(self, order: messages.Collect) -> messages.Collected:
        """Collect a batch, and hand it over."""
        rollout, observer, delivery = self._rollout, self.observer, self._delivery
        frames, dropped = rollout.frames, observer.frames_dropped
        observer.begin()
        self._blocks.begin(order.offset, order.layout)
        if order.reset:
            rollout.start_over()
            delivery.forget()
            rollout.look_ahead()
        if rollout.cursor.is_over:
            return messages.Collected.nothing(order.run, observer.version, rollout.path.stats())
        try:
            with observer.spending(None):
                batch: Any = delivery.next_of_rollout() if isinstance(delivery, TrajectoryBatches) else delivery.taken()
            in_block, rest, lacking, nesting = self._sorted(batch)
            names = _changed_names(batch)
        except NothingLeft:
            return messages.Collected.nothing(order.run, observer.version, rollout.path.stats())
        finally:
            batch = None
            held = self._blocks.end()
            observer.write_counts(delivery)
        dropped = observer.frames_dropped - dropped
        return messages.Collected(
            run=order.run,
            frames=rollout.frames - frames - dropped,
            steps=rollout.steps_taken,
            in_block=in_block,
            rest=rest,
            lacking=lacking,
            nesting=nesting,
            held=held,
            oldest_version=observer.oldest,
            newest_version=observer.version,
            dropped_frames=dropped,
            place=self._place() if self.options.replay_buffer is None else None,
            of_path=rollout.path.stats() or None,
            names=names,
            oldest_tokens=tuple(getattr(delivery, "oldest", ())),
        )

    def _sorted(self, batch: Any) -> tuple[bool, Any, tuple[NestedKey, ...], dict[NestedKey, tuple[int, ...]]]:
        """What of a batch lies in the block, and the rest of it, packed."""
        windows = self._blocks.windows
        if batch is None:
            return False, None, (), {}
        if not windows or type(batch) is not TensorDict or batch.batch_size != self._batch_size:
            return False, self._packer.pack(batch), (), {}
        rest: dict[NestedKey, Any] = {}
        nesting: dict[NestedKey, tuple[int, ...]] = {}
        missing = set(windows)
        for place, value in _nodes(batch):
            key = unravel(place)
            if type(value) is TensorDict and not value.is_empty():  # what is in it is sorted by itself
                if value.batch_size != batch.batch_size:
                    nesting[key] = tuple(value.batch_size[batch.ndim :])
            elif key in missing and _is(value, windows[key]):
                missing.discard(key)
            else:
                rest[key] = value
        _check_all_sorted(batch, rest, windows.keys() - missing)
        packed = self._packer.pack(rest) if rest else None
        return True, packed, tuple(missing), nesting

    @property
    def _batch_size(self) -> torch.Size:
        return torch.Size([*self.env.batch_size, self._rollout.counts.steps])

    def shutdown(self, close_env: bool = True) -> None:
        """Write what was traced, and close the environment."""
        self.disable_profile()
        if close_env:
            self._rollout.close()
        self._rollout.closed = True

    # For calls from the other process ---------------------------------------------------------

    @contextmanager
    def called(self, path: str, *, paused: bool, in_rollout: bool) -> Iterator[None]:
        """Call ``path`` in the ``with`` block, which refuses what cannot be done now.

        Args:
            path: for the message.
            paused: no rollout may begin.
            in_rollout: there is one in progress, and what has to wait for its end is not to be called.
        """
        before = self._refused_rollout, self._refused_end
        self._refused_rollout = path if paused or in_rollout else None
        self._refused_end = path if in_rollout else None
        try:
            yield
        finally:
            self._refused_rollout, self._refused_end = before

    def _check_between_batches(self) -> None:
        if self._refused_end is not None:
            raise paused_error(self._refused_end)

    @property
    def policy(self) -> Any:
        """What acts."""
        return self._rollout.policy

    def next(self) -> TensorDictBase | None:
        """Collect what is delivered next, for the caller alone."""
        self._check_idle()
        self._moved = True
        if not self._delivery.ready():
            return None
        self._delivery.await_room()
        try:
            return self._delivery.taken()
        except NothingLeft:
            return None

    def _check_idle(self) -> None:
        if self._refused_rollout is not None:
            raise paused_error(self._refused_rollout)

    def rollout(self) -> TensorDictBase:
        """Collect one batch that is not delivered."""
        self._check_idle()
        self._moved = True
        try:
            return self._rollout.run()
        finally:
            self._delivery.missed()

    def fake_tensordict(self) -> TensorDictBase:
        """A batch of zeros like those that this worker delivers."""
        self._check_between_batches()
        return self._delivery.blank()

    def reset(self, index: Any = None, **kwargs: Any) -> None:
        """Begin new trajectories, in all environments or in some of a batch."""
        self._check_between_batches()
        self._moved = True
        self._rollout.reset(index, **kwargs)
        if index is None:
            self._delivery.forget()

    def set_seed(self, seed: int, static_seed: bool = False) -> int:
        """Seed environments and torch's global generator; returns the seed of the last environment."""
        self._check_between_batches()
        self._moved = True
        last = self._rollout.set_seed(seed, static_seed=static_seed)
        self._delivery.forget()
        return last

    def state_dict(self, *, engine_weights: bool = False) -> OrderedDict[str, Any]:
        """What :meth:`load_state_dict` needs to go on."""
        self._check_between_batches()
        return self._saved_state.save(engine_weights=engine_weights)

    def load_state_dict(self, state_dict: Mapping[str, Any], **kwargs: Any) -> None:
        """Go on from a saved state."""
        self._check_between_batches()
        self._saved_state.load(state_dict, **kwargs)
        self._moved = True
        self.take_version(self._rollout.acting.version)

    def check_saved_state(self, state_dict: Mapping[str, Any], **kwargs: Any) -> None:
        """Raise what :meth:`load_saved_state` would raise; nothing is changed."""
        self._check_between_batches()
        self._saved_state.check(state_dict, **kwargs)

    def load_saved_state(self, state_dict: Mapping[str, Any], **kwargs: Any) -> None:
        """:meth:`load_state_dict`, whatever was published before."""
        self.load_state_dict(state_dict, **kwargs)
        self._subscriber.skip()

    def divided(self, states: Sequence[Mapping[str, Any]], count: int) -> list[dict[str, Any]]:
        """States of ``count`` workers, made of those of another number of them.

        Raises:
            ValueError: they cannot be divided anew.
        """
        paths = self._rollout.cursor.divided([state["trajectories"] for state in states], count)
        of_all = ("policy_state_dict", "engine_state_dict", "env_state_dict", "policy_version", "traj_pool")
        first = {name: states[0][name] for name in of_all if name in states[0]}
        first |= {"frames": 0, "iter": 0, "episodes": EpisodeStats().state_dict(), "streams": None, "unsaved": []}
        return [{**first, "trajectories": path, "held": None} for path in paths]

    def stats(self) -> dict[str, Any]:
        """Counts, rates and episodes."""
        return self._delivery.stats()

    def get_model(self, model_id: str) -> Any:
        """The model that an id names."""
        return self._rollout.get_model(model_id, self)

    def describe_model(self, model_id: str) -> Description | None:
        """What a model takes; see :func:`~rollwright.weight_update.forms.describe`. None: its engine checks weights."""
        acting = self._rollout.acting
        if model_id == "policy" and acting.engine is not None:
            return acting.describe_engine()
        return describe(self.get_model(model_id), model_id)

    def update_policy_weights_(self, policy_or_weights: Any = None, *, weights: Any = None, **options: Any) -> int:
        """Apply new weights in this worker alone; returns their version."""
        return self._weights.apply(pick_weights(policy_or_weights, weights, None), **options)

    def increment_version(self) -> int:
        """Count an update of the weights; returns the new version."""
        return self._weights.count_update()

    @property
    def pre_collect_hook(self) -> PreHook | None:
        """Called before each rollout."""
        return self._hooks.pre_collect_hook

    @property
    def post_collect_hook(self) -> PostHook | None:
        """Called with each batch."""
        return self._hooks.post_collect_hook

    def set_hook(self, name: str, hook: Any) -> None:
        """Set ``pre_collect_hook`` or ``post_collect_hook``."""
        self._hooks.set(name, hook)

    def change_options(self, **changes: Any) -> None:
        """Collect with other options from the next batch on."""
        self.options = self._rollout.options = self.options.override(**changes)

    def profile(self, config: ProfileConfig) -> None:
        """Trace rollouts as ``config`` specifies."""
        self._profile.config = config

    def disable_profile(self) -> None:
        """Trace no (further) rollouts; what was recorded is written."""
        self._profile.disable()


def _shapes(env: EnvBase) -> dict[NestedKey, tuple[int, ...]]:
    """Of all that an environment reads and says."""
    specs = (env.full_observation_spec, env.full_action_spec, env.full_reward_spec, env.full_done_spec)
    return {unravel(key): tuple(leaf.shape) for spec in specs for key, leaf in spec.leaves().items()}


def _changed_names(batch: Any) -> tuple[str | None, ...] | None:
    """Names of a batch's dimensions; None: those that it has where nobody changes them."""
    names = tuple(batch.names) if isinstance(batch, TensorDictBase) else ()
    return names if names and names != (*[None] * (len(names) - 1), "time") else None


def _nodes(td: TensorDictBase, place: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    for key, value in td.items():
        yield (*place, key), value
        if type(value) is TensorDict and not value.is_empty():
            yield from _nodes(value, (*place, key))


def _check_all_sorted(batch: TensorDictBase, rest: Mapping[NestedKey, Any], written: Set[NestedKey]) -> None:
    """Raise if an entry of a batch is neither in the block nor in the rest, nor lies in one that is."""
    for key in batch.keys(True, True, is_leaf=is_leaf_nontensor):
        path = as_tuple(key)
        if not any(unravel(path[:end]) in rest for end in range(len(path), 0, -1)) and unravel(path) not in written:
            raise AssertionError(f"the entry {key!r} of a batch was put neither in the block nor beside it")


def _is(value: Any, window: torch.Tensor) -> bool:
    """Whether a value is the very memory of a window."""
    return (
        type(value) is torch.Tensor
        and value.layout is torch.strided
        and not (value.is_nested or value.is_conj() or value.is_neg())
        and value.shape == window.shape
        and value.dtype == window.dtype
        and ((value.data_ptr() == window.data_ptr() and value.stride() == window.stride()) or not value.numel())
    )
