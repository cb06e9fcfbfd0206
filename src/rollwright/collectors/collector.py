"""Collector: steps environments with a policy, in this process."""

from __future__ import annotations

import inspect
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from numbers import Integral
from typing import Any, cast

import torch
from tensordict import TensorDictBase, is_tensor_collection

from rollwright._keys import as_tuple, is_private, unravel
from rollwright.collectors import _plan
from rollwright.collectors import policy as policies
from rollwright.collectors import weights as weight_forms
from rollwright.collectors._env import EnvMaker, make_env
from rollwright.collectors._paths import resolve
from rollwright.collectors.base import BaseCollector
from rollwright.collectors.counts import FrameCounts
from rollwright.collectors.devices import Devices, as_device, module_device, nothing, sync_function
from rollwright.collectors.options import CollectorOptions
from rollwright.collectors.profiling import RolloutProfiler, named_range
from rollwright.collectors.recording import Recorder
from rollwright.collectors.stats import EpisodeStats, StageTimer
from rollwright.collectors.trajectories import TrajectoryPool, renew
from rollwright.data.compact import BoundaryKeeper
from rollwright.data.layout import end_of_trajectory, mark_truncated, split_trajectories
from rollwright.envs.utils import set_exploration_type

__all__ = ["Collector"]


class Collector(BaseCollector):
    """Collects experience in this process.

    Args:
        create_env_fn: an environment, or a callable that makes one.
        policy: a callable on TensorDicts, a ``TensorDictModule``, an ``nn.Module`` whose ``forward`` takes entries of
            the environment by name, or None for random actions.
        **options: those of :class:`~rollwright.collectors.CollectorOptions`.

    Yields:
        TensorDicts ``[*env, T]``, ``T = ceil(frames_per_batch / number of environments)``, the last dimension named
        ``"time"``. The root holds what the policy saw and did; ``"next"`` holds what came of it, with the true last
        observation where a trajectory ended. ``("collector", "traj_ids")`` int64 ``[*env, T]`` tells trajectories
        apart; a trajectory may go on in the next batch. Each batch has memory of its own (unless ``return_same_td``).

    Raises:
        ValueError, TypeError: an option is wrong, or two of them contradict one another.
        EnvError, PolicyError: the environment or the policy broke its contract; the message says how.

    Example:
        >>> from rollwright.envs import GymEnv
        >>> with Collector(lambda: GymEnv("CartPole-v1"), frames_per_batch=64, total_frames=128) as collector:
        ...     for batch in collector:
        ...         print(batch.shape, batch.names, batch["next", "reward"].shape)
        torch.Size([64]) ['time'] torch.Size([64, 1])
        torch.Size([64]) ['time'] torch.Size([64, 1])
    """

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
        self._pool = TrajectoryPool()
        self._timer = StageTimer()
        self._episodes = EpisodeStats()
        self._frames = self._iter = self._policy_version = 0
        self._profiler: RolloutProfiler | None = None
        self._carrier: TensorDictBase | None = None
        self._fresh_ids: torch.Tensor | None = None
        self._anew = torch.ones(self.env.numel(), dtype=torch.bool).numpy()
        self._setup_stages()
        self._make_carrier()
        if not self.options.trust_policy:
            policies.check_inputs(self.policy.module, cast(TensorDictBase, self._carrier), self.env)
        self.closed = False

    # Construction -----------------------------------------------------------------------------

    def _setup_policy(self, policy: Any) -> None:
        options = self.options
        acting = policies.make_policy(policy, options, self.env)
        device = options.policy_device or options.device
        module, original = policies.place_policy(acting, as_device(device))
        wrapped = policies.wrap_policy(module, options, self.env)
        call, fresh = policies.accelerate(wrapped, options)
        source = policy if options.policy_factory is not None else original
        self.policy = policies.PolicyHandle(call, module, source, fresh)

    def _setup_devices(self) -> None:
        """Resolve devices, casts and synchronisation, once."""
        options = self.options
        devices = Devices.resolve(options, self.env.device, module_device(self.policy.module))
        self.devices = devices
        self.policy_device, self.env_device, self.storing_device = (
            devices.policy,
            devices.env,
            devices.storing,
        )
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
        act = _plan.build_act(self.policy.call, to_policy, check, fresh_outputs=self.policy.fresh_outputs)
        random = _plan.build_act(env.rand_action, lambda td: td, check, fresh_outputs=True)
        step = _plan.build_step(
            env,
            to_env,
            reset_when_done=options.reset_when_done,
            carrier_has_no_device=self._carrier_has_no_device,
        )
        if options.track_policy_version:
            random, _ = _plan.tag_version(random, step, lambda: self._policy_version, env.batch_size)
            act, step = _plan.tag_version(act, step, lambda: self._policy_version, env.batch_size)
        self._act, self._act_randomly, self._step = (
            timed("policy", act),
            timed("policy", random),
            timed("env", step),
        )
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
        self._fresh_ids = None
        with torch.no_grad(), set_exploration_type(self.options.exploration_type):
            for t in range(self._counts.steps):
                carrier = act(carrier)  # the policy reads observations and writes actions
                frame, carrier = self._step(carrier)  # the environment steps; what ended is reset
                self._record(t, frame)  # the frame goes into the batch's memory
                last = t == self._counts.steps - 1 or self._interrupted()
                self._note_boundaries(t, frame, carrier, last)  # fresh ids where trajectories ended
                if last:
                    break
        self._carrier = carrier
        return self._finish(t + 1)

    def _note_boundaries(self, t: int, frame: TensorDictBase, carrier: TensorDictBase, last: bool) -> None:
        ended = end_of_trajectory(frame.get("next"), self.env._done_groups, self.env.ndim)
        if self.options.track_traj_ids:
            self._update_traj_ids(carrier, ended)
        if self._keeper is not None:
            self._keeper.keep(t, frame.get("next"), torch.ones_like(ended) if last else ended)

    def _update_traj_ids(self, carrier: TensorDictBase, ended: torch.Tensor) -> None:
        ids = carrier.get(("collector", "traj_ids"))
        fresh = renew(ids, ended, self._pool)
        if fresh is not ids:
            carrier.set("collector", carrier.get("collector").copy().set("traj_ids", fresh))

    def _finish(self, steps: int) -> TensorDictBase:
        """Close the batch of ``steps`` steps: what was asked of its end, and what is counted."""
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
                self._update_traj_ids(cast(TensorDictBase, self._carrier), cut)
        self._taken = steps * self.env.numel()
        return batch

    def _count_episodes(self, taken: TensorDictBase) -> None:
        outcome = taken.get("next")
        ended = end_of_trajectory(outcome, self.env._done_groups, taken.ndim)
        keys = self.env.reward_keys
        reward = outcome.get(keys[0]) if len(keys) == 1 else None
        self._episodes.update_from(taken, reward, ended, self._anew)
        self._anew[:] = False

    def iterator(self) -> Iterator[TensorDictBase]:
        """Yield batches until ``total_frames`` are delivered, from wherever the collector stands."""
        while not self.completed:
            yield self._deliver()

    @property
    def completed(self) -> bool:
        """Whether ``total_frames`` are delivered."""
        return self._frames >= self.total_frames

    def _check_open(self) -> None:
        if self.closed:
            raise RuntimeError(f"{type(self).__name__} was shut down. Make a new one to collect more.")

    def _deliver(self) -> TensorDictBase:
        self._check_open()
        self._started = True
        self._start_profiler()
        with self._timer.running():
            batch = self._shape(self.rollout())
        self._frames += self._taken
        self._iter += 1
        if self._post_collect_hook is not None:
            self._post_collect_hook(batch)
        if self._profiler is not None:
            self._profiler.step()
        return batch

    def _shape(self, batch: TensorDictBase) -> TensorDictBase:
        """Split, post-process, and drop private entries."""
        if self.options.split_trajs:
            batch = self._split(batch)
        if self.options.postproc is not None:
            batch = self.options.postproc(batch)
            if not is_tensor_collection(batch):
                raise TypeError(
                    f"postproc: expected it to return a TensorDict, got {type(batch).__name__}. Return the batch from it."
                )
            private = [key for key in batch.keys(True) if is_private(key)]
            batch = batch.exclude(*private) if private else batch
        return batch

    def _split(self, batch: TensorDictBase) -> TensorDictBase:
        return split_trajectories(batch, prefix="collector")

    def __len__(self) -> int:
        if self._counts.batches is None:
            raise RuntimeError("This collector has no end (total_frames=-1), hence no length.")
        return self._counts.batches

    # State ------------------------------------------------------------------------------------

    def _make_carrier(self, **kwargs: Any) -> None:
        """Reset the environment and begin new trajectories."""
        with torch.no_grad():
            self._carrier = self._prepared(self.env.reset(**kwargs))
        self._anew[:] = True
        if self._fresh_ids is None:  # ids of trajectories that never took a step are used again
            self._fresh_ids = self._pool.get_traj_and_increment(self.env.numel()).reshape(self.env.batch_size)
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
        marked[index] = True
        for group in self.env._done_groups:
            flags = carrier.get(group.done)
            mask = marked.reshape(marked.shape + (1,) * (flags.ndim - marked.ndim)).expand(flags.shape)
            carrier.set(group.reset, mask.to(flags.device).clone())
        with torch.no_grad():
            self._carrier = self._prepared(self.env.reset(carrier, **kwargs))
        self._anew |= marked.flatten().numpy()
        if self.options.track_traj_ids and self._fresh_ids is None:
            self._update_traj_ids(self._carrier, marked)

    @property
    def _traj_pool(self) -> TrajectoryPool:
        return self._pool

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
        return seed if last is None else last

    def state_dict(self) -> OrderedDict[str, Any]:
        """Weights, the state of transforms, counters and the next trajectory id.

        Returns:
            ``policy_state_dict`` (where the policy is a module), ``env_state_dict``, ``frames``, ``iter``,
            ``policy_version`` and ``traj_pool``.
        """
        state: OrderedDict[str, Any] = OrderedDict()
        if isinstance(self.policy.module, torch.nn.Module):
            state["policy_state_dict"] = self.policy.module.state_dict()
        state["env_state_dict"] = self.env.state_dict()
        state.update(frames=self._frames, iter=self._iter, policy_version=self._policy_version)
        state["traj_pool"] = self._pool.state_dict()
        return state

    def load_state_dict(self, state_dict: Mapping[str, Any], **kwargs: Any) -> None:
        """Go on from a saved state, with new trajectories.

        Args:
            state_dict: of :meth:`state_dict`.
            **kwargs: go to ``load_state_dict`` of policy and environment (``strict=False``).
        """
        if "env_state_dict" not in state_dict:
            raise KeyError(f"state_dict: expected 'env_state_dict' among its entries, got {sorted(state_dict)}.")
        if "policy_state_dict" in state_dict and isinstance(self.policy.module, torch.nn.Module):
            self.policy.module.load_state_dict(state_dict["policy_state_dict"], **kwargs)
        self.env.load_state_dict(state_dict["env_state_dict"], **kwargs)
        self._frames = int(state_dict.get("frames", 0))
        self._iter = int(state_dict.get("iter", 0))
        self._policy_version = int(state_dict.get("policy_version", 0))
        if "traj_pool" in state_dict:
            self._pool.load_state_dict(state_dict["traj_pool"])
        self._carrier = self._fresh_ids = None

    # Weights ----------------------------------------------------------------------------------

    def update_policy_weights_(
        self,
        policy_or_weights: Any = None,
        /,
        *,
        weights: Any = None,
        policy: Any = None,
        weights_dict: Mapping[str, Any] | None = None,
        model_id: str | None = None,
        worker_ids: Any = None,
    ) -> int:
        """See :meth:`BaseCollector.update_policy_weights_`; the next batch acts with the new weights."""
        update = weight_forms.parse_update(
            weight_forms.pick_weights(policy_or_weights, weights, policy),
            weights_dict=weights_dict,
            model_id=model_id,
            worker_ids=worker_ids,
            own={self._worker_idx or 0, self.policy_device},
            fallback=self.policy.source,
        )
        ready = [weight_forms.prepare(self.get_model(name), new, name) for name, new in update.items()]
        for apply in ready:
            apply()
        return self.increment_version()

    def receive_weights(self, policy_or_weights: Any = None, /, *, weights: Any = None, policy: Any = None) -> None:
        """Same as :meth:`update_policy_weights_`, for the receiving end; returns nothing."""
        self.update_policy_weights_(weight_forms.pick_weights(policy_or_weights, weights, policy))

    def get_model(self, model_id: str) -> Any:
        """The model that an id names: ``"policy"``, a path from the collector, or a part of the policy (``"actor"``).

        Raises:
            ValueError: there is no such model.
        """
        if model_id == "policy":
            return self.policy.module
        try:
            return resolve(self, model_id)
        except AttributeError:
            try:
                return resolve(self.policy.module, model_id)
            except AttributeError as error:
                raise ValueError(
                    f"model_id: expected 'policy', a part of it, or a path from the collector such as 'env.transform', "
                    f"got {model_id!r}. {error}"
                ) from error

    @property
    def policy_version(self) -> int:
        """Number of updates of the weights so far."""
        return self._policy_version

    def get_policy_version(self) -> int:
        """Same as :attr:`policy_version`."""
        return self._policy_version

    def increment_version(self) -> int:
        """Count an update of the weights; returns the new version."""
        self._policy_version += 1
        return self._policy_version

    # Observation ------------------------------------------------------------------------------

    def stats(self) -> dict[str, Any]:
        """Counts, rates and episodes; ``json.dumps`` takes it.

        Returns:
            ``frames``, ``batches`` (delivered), ``total_frames``, ``total_batches`` (None without an end),
            ``completed``, ``frames_per_second``, ``seconds`` by stage, ``episodes``, ``mean_return`` and
            ``mean_length`` (over the last 100), ``last_return``, ``policy_version``, ``devices``, ``bytes_held``,
            ``waiting_for``.
        """
        elapsed = self._timer.total
        return {
            "frames": self._frames,
            "batches": self._iter,
            "total_frames": None if self._counts.batches is None else self.total_frames,
            "total_batches": self._counts.batches,
            "completed": self.completed,
            "frames_per_batch": self.frames_per_batch,
            "frames_per_second": self._frames / elapsed if elapsed else None,
            "seconds": {"total": elapsed, **self._timer.seconds},
            **self._episodes.summary(),
            "policy_version": self._policy_version,
            "devices": {name: None if device is None else str(device) for name, device in vars(self.devices).items()},
            "bytes_held": self._recorder.num_bytes,
            "waiting_for": None,
        }

    def getattr_env(self, attr: str) -> Any:
        """An attribute of the environment."""
        return resolve(self.env, attr)

    def getattr_policy(self, attr: str) -> Any:
        """An attribute of the policy."""
        return resolve(self.policy.module, attr)

    def _start_profiler(self) -> None:
        config = self._profile_config
        if config is not None and self._profiler is None:
            self._profiler = RolloutProfiler(config, self._worker_idx or 0)
        if self._profiler is not None:
            self._profiler.start()

    def disable_profile(self) -> None:
        """Trace no (further) rollouts; what was recorded is written."""
        super().disable_profile()
        if self._profiler is not None:
            self._profiler.stop()
            self._profiler = None

    def shutdown(self, timeout: float | None = None, close_env: bool = True, raise_on_error: bool = True) -> None:
        """Close the environment and write what a profiler has recorded. May be called again.

        Args:
            timeout: no effect in one process.
            close_env: close the environment too.
            raise_on_error: if False, an error of the environment's ``close`` is dropped.
        """
        if self.closed:
            return
        self.closed = True
        try:
            self.disable_profile()
            if close_env:
                self.env.close(raise_if_closed=False)
        except Exception:
            if raise_on_error:
                raise

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}(\n    env={self.env},\n    policy={self.policy.module},\n"
            f"    frames_per_batch={self.frames_per_batch}, total_frames={self.total_frames},\n"
            f"    devices={self.devices},\n)"
        )


_first, *_rest = inspect.signature(Collector.__init__).parameters.values()
Collector.__signature__ = inspect.Signature([*_rest[:2], *CollectorOptions.parameters()])  # type: ignore[attr-defined]
