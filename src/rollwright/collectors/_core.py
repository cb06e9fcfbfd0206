"""The core of a collector: a policy, an environment and a batch's memory, joined at construction, and the loop."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from numbers import Integral
from typing import Any, cast

import torch
from tensordict import TensorDictBase

from rollwright._keys import as_tuple, unravel
from rollwright.collectors import _plan
from rollwright.collectors import policy as policies
from rollwright.collectors._env import EnvMaker, ResetUndo, make_env
from rollwright.collectors.base import BaseCollector
from rollwright.collectors.counts import FrameCounts
from rollwright.collectors.devices import Devices, module_device, nothing, sync_function
from rollwright.collectors.options import CollectorOptions
from rollwright.collectors.profiling import named_range
from rollwright.collectors.recording import Recorder
from rollwright.collectors.stats import EpisodeStats, StageTimer
from rollwright.collectors.trajectories import TrajectoryPool, renew
from rollwright.data.compact import BoundaryKeeper
from rollwright.data.layout import end_of_trajectory, mark_truncated
from rollwright.data.specs._shape import as_device
from rollwright.envs.utils import set_exploration_type

__all__ = ["RolloutCore"]


class RolloutCore(BaseCollector):
    """The part of :class:`~rollwright.collectors.Collector` that steps the environment, one batch at a time."""

    def __init__(self, create_env_fn: EnvMaker, policy: Any = None, **options: Any) -> None:
        self.closed = True  # until construction succeeds
        self.options = CollectorOptions.parse(options, type(self).__name__)
        self.env = make_env(create_env_fn, self.options)
        self._setup_policy(policy)
        self._setup_devices()
        self._setup_frames()
        self.pre_collect_hook = self.options.pre_collect_hook
        self.post_collect_hook = self.options.post_collect_hook
        self.worker_idx = self.options.worker_idx
        self._traj_pool = TrajectoryPool()
        self._timer = StageTimer()
        self._episodes = EpisodeStats()
        self._frames = self._iter = self._policy_version = 0
        self._carrier: TensorDictBase | None = None
        self._fresh_ids: torch.Tensor | None = None
        self._anew = torch.ones(self.env.numel(), dtype=torch.bool).numpy()
        self._setup_stages()
        self._first_reset: ResetUndo | None = ResetUndo(self.env)
        self._make_carrier()
        self._first_reset.seen()
        if not self.options.trust_policy:
            policies.check_inputs(self.policy, cast(TensorDictBase, self._carrier), self.env)
        self.closed = False

    # Construction -----------------------------------------------------------------------------

    def _setup_policy(self, policy: Any) -> None:
        options = self.options
        acting = policies.make_policy(policy, options, self.env)
        device = options.policy_device or options.device
        module, original = policies.place_policy(acting, as_device(device))
        wrapped = policies.wrap_policy(module, options, self.env)
        self.policy = module  # the user's object, or its copy on another device: its weights act
        self._policy_call, self._fresh_outputs = policies.accelerate(wrapped, options)
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
            warnings.warn(f"{type(self).__name__} delivers whole batches: {counts.rounding}.", stacklevel=3)

    def _setup_stages(self) -> None:
        """Build the short list of callables that a rollout runs through."""
        options, env, timed = self.options, self.env, self._timer.timed
        check = _plan.action_check(env)
        to_policy = _plan.mover(self.policy_device if self._cast_to_policy_device else None, self._sync_policy)
        to_env = _plan.mover(self.env_device if self._cast_to_env_device else None, self._sync_env)
        stale = _plan.stale_actions(env, self.policy)
        act = _plan.build_act(self._policy_call, to_policy, check, fresh_outputs=self._fresh_outputs, stale=stale)
        random = _plan.build_act(env.rand_action, lambda td: td, check, fresh_outputs=True)
        step = _plan.build_step(
            env,
            to_env,
            reset_when_done=options.reset_when_done,
            carrier_has_no_device=self._carrier_has_no_device,
        )
        if options.track_policy_version:
            act, random = (
                _plan.tag_act(stage, lambda: self._policy_version, env.batch_size) for stage in (act, random)
            )
            step = _plan.tag_step(step)
        self._act, self._act_randomly, self._step = timed("policy", act), timed("policy", random), timed("env", step)
        repeated = _plan.next_keys(env) if options.compact_obs else []
        self._keeper = BoundaryKeeper(repeated, env.batch_size, self.storing_device) if options.compact_obs else None
        self._recorder = Recorder(
            self._counts.steps,
            self.storing_device,
            dropped={unravel(("next", *as_tuple(key))) for key in repeated},
            use_blocks=True if options.return_same_td else options.use_buffers,
            reuse=options.return_same_td,
        )
        self._record = timed("write", named_range("rollwright.write", self._recorder.write))
        self._check_finite = _plan.finite_check(env)
        self._interrupted = (lambda: False) if options.interruptor is None else options.interruptor.collection_stopped

    # Rollouts ---------------------------------------------------------------------------------

    def rollout(self) -> TensorDictBase:
        """Collect one batch, which counts as neither delivered nor post-processed.

        Returns:
            ``[*env, T]``, see the class.

        Raises:
            RuntimeError: the collector was shut down.
        """
        self._check_open()
        if self._pre_collect_hook is not None:
            self._pre_collect_hook()
        if self._carrier is None or (self.options.reset_at_each_iter and self._fresh_ids is None):
            self._make_carrier()
        act = self._act_randomly if self._frames < self.init_random_frames else self._act
        carrier = cast(TensorDictBase, self._carrier)
        self._carrier = None  # stays None if a step fails: what follows begins anew
        self._fresh_ids = self._first_reset = None
        with torch.no_grad(), set_exploration_type(self.options.exploration_type):
            for t in range(self._counts.steps):
                carrier = act(carrier)  # the policy reads observations and writes actions
                frame, carrier = self._step(carrier)  # the environment steps; what ended is reset
                self._record(t, frame)  # the frame goes into the batch's memory
                last = t == self._counts.steps - 1 or self._interrupted()
                self._note_boundaries(t, frame, carrier, last)  # fresh ids where trajectories ended
                if last:
                    break
        batch = self._finish(t + 1, carrier)
        self._carrier = carrier
        return batch

    def _note_boundaries(self, t: int, frame: TensorDictBase, carrier: TensorDictBase, last: bool) -> None:
        ended = end_of_trajectory(frame.get("next"), self.env._done_groups, self.env.ndim)
        if self.options.track_traj_ids and self.options.reset_when_done:
            self._update_traj_ids(carrier, ended)
        if self._keeper is not None:
            self._keeper.keep(t, frame.get("next"), torch.ones_like(ended) if last else ended)

    def _update_traj_ids(self, carrier: TensorDictBase, ended: torch.Tensor) -> None:
        ids = carrier.get(("collector", "traj_ids"))
        fresh = renew(ids, ended, self._traj_pool)
        if fresh is not ids:
            carrier.set("collector", carrier.get("collector").copy().set("traj_ids", fresh))

    def _finish(self, steps: int, carrier: TensorDictBase) -> TensorDictBase:
        """Close the batch of ``steps`` steps, before ``carrier``: what was asked of its end, and what is counted."""
        batch = self._recorder.finish(steps)
        self._sync_storage()
        if self._keeper is not None:
            batch = self._keeper.finish(batch)
        self._check_finite(batch)
        taken = batch if steps == self._counts.steps else batch[..., :steps]
        self._count_episodes(taken)
        if self.options.set_truncated:
            groups = self.env._done_groups
            cut = mark_truncated(groups, batch[..., steps - 1].get("next"), self.env.ndim)
            if self.options.track_traj_ids:
                self._update_traj_ids(carrier, cut)
        self._taken = steps * self.env.numel()
        return batch

    def _count_episodes(self, taken: TensorDictBase) -> None:
        outcome = taken.get("next")
        groups = self.env._done_groups
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

    def _make_carrier(self, **kwargs: Any) -> None:
        """Reset the environment and begin new trajectories."""
        with torch.no_grad():
            self._carrier = self._prepared(self.env.reset(**kwargs))
        self._anew[:] = True
        if self._fresh_ids is None:  # ids of trajectories that never took a step are used again
            self._fresh_ids = self._traj_pool.get_traj_and_increment(self.env.numel()).reshape(self.env.batch_size)
        if self.options.track_traj_ids:
            self._carrier.set(("collector", "traj_ids"), self._fresh_ids)

    def _prepared(self, carrier: TensorDictBase) -> TensorDictBase:
        return carrier.clear_device_() if self._carrier_has_no_device else carrier

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
        if self._carrier is None:
            self._make_carrier()
        carrier = cast(TensorDictBase, self._carrier)
        marked = torch.zeros(self.env.batch_size, dtype=torch.bool)
        try:
            marked[index] = True
        except (IndexError, TypeError) as error:
            batch = list(self.env.batch_size)
            raise IndexError(
                f"reset: index={index!r} does not index the environment's batch {batch}: {error}."
            ) from error
        for group in self.env._done_groups:
            flags = carrier.get(group.done)
            mask = marked.reshape(marked.shape + (1,) * (flags.ndim - marked.ndim)).expand(flags.shape)
            carrier.set(group.reset, mask.to(flags.device).clone())
        with torch.no_grad():
            self._carrier = self._prepared(self.env.reset(carrier, **kwargs))
        self._anew |= marked.flatten().numpy()
        if self.options.track_traj_ids and self._fresh_ids is None:
            self._update_traj_ids(self._carrier, marked)

    def set_seed(self, seed: int, static_seed: bool = False) -> int:
        """Seed environments and torch's global generator, and begin anew with the next batch.

        Args:
            seed: of the first environment; further ones get ``seed + 1`` and so on.
            static_seed: give all environments the same seed.

        Returns:
            The seed of the last environment.
        """
        if not isinstance(seed, Integral) or isinstance(seed, bool):
            raise TypeError(f"seed: expected an integer, got {type(seed).__name__}: {seed!r}.")
        last = self.env.set_seed(seed, static_seed=static_seed)
        self._carrier = None
        if self._first_reset is not None:  # the one at construction had no seed: running statistics forget it
            self._first_reset.undo()
            self._first_reset = None
        return seed if last is None else last
