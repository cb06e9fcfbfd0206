"""The core of a collector: a policy, an environment and a batch's memory, joined at construction, and the loop."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, Unpack, cast

import torch
from tensordict import TensorDictBase

from rollwright._keys import NestedKey, leaf_keys
from rollwright._memory import MemoryPool
from rollwright.collectors.arguments import checked_seed
from rollwright.collectors.base import BaseCollector
from rollwright.collectors.core import Path, UnfitOutputs
from rollwright.collectors.delivery.checks import ledger_of
from rollwright.collectors.delivery.storage_memory import batch_memory
from rollwright.collectors.factory import local_options
from rollwright.collectors.options import CollectorOptions
from rollwright.collectors.profiling import named_range
from rollwright.collectors.rollout import policy as policies
from rollwright.collectors.rollout.counts import FrameCounts
from rollwright.collectors.rollout.devices import Devices, module_device, nothing, sync_function
from rollwright.collectors.rollout.environment import EnvMaker, make_env
from rollwright.collectors.rollout.paths import stages
from rollwright.collectors.rollout.paths.choice import choose_path, plain_path
from rollwright.collectors.rollout.policy_errors import explained
from rollwright.collectors.rollout.policy_trial import Trial
from rollwright.collectors.rollout.stats import EpisodeStats, StageTimer
from rollwright.collectors.rollout.trajectory_ids import TrajectoryPool
from rollwright.data.compact import BoundaryKeeper
from rollwright.data.layout import end_of_trajectory, mark_truncated
from rollwright.data.specs.shapes import as_device
from rollwright.envs.priming import provide_for_policy
from rollwright.envs.utils import set_exploration_type
from rollwright.errors import NotNative
from rollwright.modules import set_recurrent_mode

if TYPE_CHECKING:
    from rollwright.collectors.keywords import CollectorKeywords

__all__ = ["RolloutCore"]


def _never() -> bool:
    return False


def _and_write(path: Path, write: Callable[[TensorDictBase], None]) -> Callable[[int], None]:
    def record(t: int) -> None:
        path.record(t)
        write(path.frame(t))

    return record


class RolloutCore(BaseCollector):
    """The part of :class:`~rollwright.collectors.Collector` that steps the environment, one batch at a time."""

    _write_frame: Callable[[TensorDictBase], None] | None = None  # given each frame when it was recorded

    def __init__(
        self, create_env_fn: EnvMaker, policy: Callable[..., Any] | None = None, **options: Unpack[CollectorKeywords]
    ) -> None:
        self.closed = True  # until construction succeeds
        self.options = CollectorOptions.parse(local_options(options), type(self).__name__)
        self.env = make_env(create_env_fn, self.options)
        self._setup_policy(policy)
        self._setup_devices()
        self._setup_frames()
        self.pre_collect_hook = self.options.pre_collect_hook
        self.post_collect_hook = self.options.post_collect_hook
        self.worker_idx = self.options.worker_idx
        self._traj_pool = self._new_traj_pool()
        self._timer = StageTimer()
        self._episodes = EpisodeStats()
        self._frames = self._iter = self._policy_version = 0
        self._memory = self._new_memory()
        self._fresh_ids: torch.Tensor | None = None
        self._outputs: tuple[TensorDictBase | None] | None = None  # of the policy, once it was tried
        self._begun = False  # whether the last rollout came as far as its first step
        self._stepped = False  # whether a frame was taken in this object's life
        self._anew = torch.ones(self.env.numel(), dtype=torch.bool).numpy()
        self._check_finite = stages.finite_check(self.env)
        self._interrupted = _never if self.options.interruptor is None else self.options.interruptor.collection_stopped
        self._take(choose_path(self))
        self._to_compile = bool(self.options.compile_policy)  # at the first batch, which has the first observations
        self._check_inputs(policies.entries_of(self.env, self.options))
        self._take_updater(self.options.weight_updater)
        self.closed = False
        if self.options.weight_recv_schemes:
            self.register_scheme_receiver(dict(self.options.weight_recv_schemes))

    # Construction -----------------------------------------------------------------------------

    def _new_traj_pool(self) -> TrajectoryPool:
        return TrajectoryPool(ledger_of(self.options.replay_buffer))

    def _new_memory(self) -> MemoryPool:
        return batch_memory(self.options)

    def _setup_policy(self, policy: Any) -> None:
        options = self.options
        acting = policies.make_policy(policy, options, self.env)
        if options.auto_register_policy_transforms:
            self.env = provide_for_policy(self.env, acting)
        device = options.policy_device or options.device
        module, original = policies.place_policy(acting, as_device(device))
        self.policy = module  # the user's object, or its copy on another device: its weights act
        self._policy_call = policies.wrap_policy(module, options, self.env)
        # Where update_policy_weights_() reads when it is given nothing; None: the weights that act are the user's own.
        self._policy_source = policy if options.policy_factory is not None else original

    def _setup_devices(self) -> None:
        """Resolve devices, casts and synchronisation, once."""
        options = self.options
        devices = Devices.resolve(options, self.env.device, module_device(self.policy))
        self.devices = devices
        self.policy_device, self.env_device, self.storing_device = devices.policy, devices.env, devices.storing
        self._cast_to_policy_device = devices.cast_to_policy
        self._cast_to_env_device = devices.cast_to_env
        self._carrier_has_no_device = devices.carrier_has_none
        self._sync_policy = self._get_sync_fn(devices.policy)
        self._sync_env = self._get_sync_fn(devices.env)
        self._sync_storage = self._get_sync_fn(devices.storing)

    def _get_sync_fn(self, device: torch.device | None) -> Callable[[], None]:
        return nothing if self.options.no_cuda_sync else sync_function(device)

    def _setup_frames(self) -> None:
        """Round counts to what can be delivered, and say so once."""
        counts = self._counts = FrameCounts.of(self.options, self.env.numel())
        self.frames_per_batch, self.total_frames = counts.frames, counts.total
        self.requested_frames_per_batch = self.options.frames_per_batch
        self.init_random_frames = counts.random_frames
        if counts.rounding:
            warnings.warn(f"{type(self).__name__} delivers whole batches: {counts.rounding}.", stacklevel=4)

    def _take(self, path: Path) -> None:
        """Take ``path`` from now on: the short list of callables that a rollout runs through."""
        self._path = path
        self._act = named_range("rollwright.policy", path.act)
        self._step = named_range("rollwright.env", path.step)
        write = self._write_frame
        record = path.record if write is None else _and_write(path, write)
        self._record = named_range("rollwright.write", record)

    @property
    def _carrier(self) -> TensorDictBase | None:
        """What the next step is taken from, ``[*env]``."""
        return self._path.carrier

    def _check_inputs(self, available: Iterable[NestedKey]) -> None:
        if not self.options.trust_policy:
            policies.check_inputs(self.policy, available, self.env)

    def _compile_policy(self) -> None:
        wanted, self._to_compile = self.options.compile_policy, False
        try:
            with self._timer.aside():
                self._path.compile(wanted if isinstance(wanted, Mapping) else {})
        except NotNative as reason:
            warnings.warn(f"compile_policy: the policy runs uncompiled. {reason}", stacklevel=4)

    @property
    def _how(self) -> dict[str, str]:
        """What runs the environment and the policy, and why."""
        how = dict(self._path.how)
        if self._to_compile and how["policy"].startswith("native"):
            how["policy"] += ", to be compiled at the first batch"
        return how

    def _update_traj_ids(self, ended: torch.Tensor) -> None:
        """Give fresh ids where ``ended``, bool ``[*env]``, says."""
        self._path.renew_ids(ended)

    # Rollouts ---------------------------------------------------------------------------------

    def rollout(self) -> TensorDictBase:
        """Collect one batch, which counts as neither delivered nor post-processed.

        Returns:
            ``[*env, T]``, see the class.

        Raises:
            RuntimeError: the collector was shut down.
        """
        self._check_open()
        clock, spend = time.perf_counter, self._timer.spend
        self._begun = False
        if self._pre_collect_hook is not None:
            self._pre_collect_hook()
        self._begun = True
        with torch.no_grad(), set_exploration_type(self.options.exploration_type), set_recurrent_mode("sequential"):
            try:
                self._begin()
                for t in range(self._counts.steps):
                    begun = clock()
                    self._act(t)  # the policy reads observations and writes actions
                    acted = clock()
                    self._step(t)  # the environment steps; what ended begins anew
                    stepped = clock()
                    self._record(t)  # the frame goes into the batch's memory
                    spend(begun, acted, stepped, clock())
                    if self._interrupted():
                        break
                return self._finish(t + 1)
            except BaseException as error:
                told = explained(error, self._trial(), self._path)
                self._path.carrier = None  # what follows begins anew: a step may have been taken in part
                if told is None:
                    raise
                raise told from error

    def _begin(self) -> None:
        """Open a batch."""
        if not self._path.started or (self.options.reset_at_each_iter and self._fresh_ids is None):
            self._make_carrier()
        if not self._stepped:  # a reset may lack what the specs of states name
            self._check_inputs(leaf_keys(cast(TensorDictBase, self._path.carrier)))
        random = self._frames < self.init_random_frames
        try:
            self._open(random)
        except UnfitOutputs as reason:
            self._go_plain(random, reason)
        except NotNative:
            self._change_path()
            try:
                self._open(random)
            except NotNative as reason:
                self._go_plain(random, reason)
        self._fresh_ids = None
        self._stepped = True

    def _open(self, random: bool) -> None:
        if self._to_compile:
            self._compile_policy()
        if random:
            self._path.conform(self._outputs_of_policy())
        self._path.begin(random=random)

    def _outputs_of_policy(self) -> TensorDictBase | None:
        """What the policy writes; it is called for that once, on real observations."""
        if self._outputs is None:
            self._outputs = (self._trial().outputs(cast(TensorDictBase, self._path.carrier)),)
        return self._outputs[0]

    def _trial(self) -> Trial:
        return Trial(self._policy_call, self.policy, self.env, self.devices, self._sync_policy)

    def _go_plain(self, random: bool, reason: Exception) -> None:
        self._change_path(plain_path(self, {"policy": str(reason)}))
        self._open(random)

    def _change_path(self, path: Path | None = None) -> None:
        """Go on another way: environment or policy are no longer what the path was chosen for."""
        carrier = self._path.carrier
        if path is None:
            self._outputs = None
        self._take(choose_path(self) if path is None else path)
        try:
            self._path.carrier = carrier
        except NotNative as reason:  # it was made before a transform came that carries something
            self._take(plain_path(self, {"env": str(reason)}))
            self._path.carrier = carrier
        self._to_compile = path is None and bool(self.options.compile_policy)

    def _give_up(
        self, frames: list[TensorDictBase], carrier: TensorDictBase, keeper: BoundaryKeeper | None, reason: str
    ) -> None:
        """Take the plain path in the middle of a batch."""
        path = plain_path(self, {"policy": reason})
        path.take_over(frames, carrier, keeper)
        self._take(path)

    def _finish(self, steps: int) -> TensorDictBase:
        """Close the batch of ``steps`` steps: what was asked of its end, and what is counted."""
        batch = self._path.finish(steps)
        self._sync_storage()
        self._check_finite(batch, self._path.finite_keys)
        taken = batch if steps == self._counts.steps else batch[..., :steps]
        self._count_episodes(taken)
        if self.options.set_truncated:
            groups = self.env.done_groups
            cut = mark_truncated(groups, batch[..., steps - 1].get("next"), self.env.ndim)
            if self.options.track_traj_ids:
                self._update_traj_ids(cut)
        self._taken = steps * self.env.numel()
        return batch

    def _count_episodes(self, taken: TensorDictBase) -> None:
        outcome = taken.get("next")
        groups = self.env.done_groups
        ended = end_of_trajectory(outcome, groups, taken.ndim)
        if not self.options.reset_when_done:  # frames go on after the end, and the episode is over once
            ended = ended & ~end_of_trajectory(taken, groups, taken.ndim)
        keys = self.env.reward_keys
        reward = outcome.get(keys[0]) if len(keys) == 1 else None
        self._episodes.update_from(taken, reward, ended, self._anew)
        self._anew[:] = False

    def _check_open(self) -> None:
        if self.closed:
            raise RuntimeError(f"{type(self).__name__} was shut down. Make a new one to collect more.")

    # Trajectories ----------------------------------------------------------------------------

    def _check_path(self) -> None:
        try:
            self._path.check()
        except NotNative:
            self._change_path()

    def _make_carrier(self, **kwargs: Any) -> None:
        """Reset the environment and begin new trajectories."""
        if self.env.is_closed:
            self.env.reopen()
        self._check_path()
        with torch.no_grad():
            self._path.reset(**kwargs)
        self._anew[:] = True
        if self._fresh_ids is None:  # ids of trajectories that never took a step are used again
            self._fresh_ids = self._traj_pool.get_traj_and_increment(self.env.numel()).reshape(self.env.batch_size)
        if self.options.track_traj_ids:
            self._path.set_ids(self._fresh_ids)

    def reset(self, index: Any = None, **kwargs: Any) -> None:
        """Begin new trajectories, in all environments or in some of a batch.

        Args:
            index: anything that indexes the environment's batch; None for all.
            **kwargs: go to the environment's ``reset``.
        """
        if index is not None and not self.env.ndim:
            raise RuntimeError(f"reset: index={index!r} was given, and {self.env} is not a batch. Call reset().")
        if index is None:
            self._make_carrier(**kwargs)
            return
        if not self._path.started:
            self._make_carrier()
        marked = torch.zeros(self.env.batch_size, dtype=torch.bool)
        try:
            marked[index] = True
        except (IndexError, TypeError) as error:
            batch = list(self.env.batch_size)
            raise IndexError(
                f"reset: index={index!r} does not index the environment's batch {batch}: {error}."
            ) from error
        self._check_path()
        with torch.no_grad():
            self._path.reset_some(marked, **kwargs)
        self._anew |= marked.flatten().numpy()
        if self.options.track_traj_ids and self._fresh_ids is None:
            self._update_traj_ids(marked)

    def set_seed(self, seed: int, static_seed: bool = False) -> int:
        """Seed environments and torch's global generator, and begin anew with the next batch.

        Args:
            seed: of the first environment; further ones get ``seed + 1`` and so on.
            static_seed: give all environments the same seed.

        Returns:
            The seed of the last environment.
        """
        seed = checked_seed(seed)
        last = self.env.set_seed(seed, static_seed=static_seed)
        self._path.carrier = None
        return seed if last is None else last
