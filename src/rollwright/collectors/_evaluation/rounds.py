"""Rounds: evaluations one after another, with a collector of their own."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

from rollwright._keys import NestedKey, as_tuple, key_str
from rollwright._memory import Segment
from rollwright.collectors._evaluation.frozen import Guard, check_known, freeze, take_weights
from rollwright.collectors._evaluation.tally import Tally
from rollwright.collectors.collector import Collector
from rollwright.data.layout import end_of_trajectory
from rollwright.envs.base import EnvBase
from rollwright.envs.transforms import StepCounter, TransformedEnv
from rollwright.weight_update._forms import State

__all__ = ["Order", "Plan", "Pulse", "Rounds", "Stopped"]

_STEPS = 100  # of a batch, at most: how far an evaluation steps beyond its end


class Stopped(Exception):
    """An evaluation was ended before it was complete."""


class Plan(NamedTuple):
    """All that evaluations have in common; goes to another process.

    Attributes:
        create_env_fn: an environment, or what makes one.
        policy: what acts, or None.
        target: the module in it that takes weights, where that is not the policy itself.
        num_episodes: of an evaluation.
        seed: that each evaluation begins with, or None.
        reward_key: the reward; None: the only one.
        options: of the collector.
    """

    create_env_fn: Any
    policy: Any
    target: nn.Module | None
    num_episodes: int
    seed: int | None
    reward_key: NestedKey | None
    options: dict[str, Any]


class Order(NamedTuple):
    """One evaluation.

    Attributes:
        step: that of training, for the result.
        policy_version: of the weights, for the result.
        weights: flat states by model, copies.
    """

    step: int
    policy_version: int
    weights: Mapping[str, State]


class Pulse:
    """Three numbers that an evaluation and those who wait for it share: frames so far, the last sign of life, a stop.

    Args:
        memory: of at least 24 bytes, for two processes; None: of this process alone.
    """

    num_bytes = 24

    def __init__(self, memory: Segment | None = None) -> None:
        self._words: Any = np.zeros(3, np.int64)
        if memory is not None:
            self._words = np.frombuffer(memory.map(0, self.num_bytes), np.int64)

    def begin(self) -> None:
        """An evaluation begins."""
        self._words[0] = 0
        self._words[1] = time.monotonic_ns()

    def beat(self, frames: int = 0) -> None:
        """So many frames were taken."""
        self._words[0] += frames
        self._words[1] = time.monotonic_ns()

    @property
    def frames(self) -> int:
        """Taken in this evaluation."""
        return int(self._words[0])

    @property
    def silence_s(self) -> float:
        """Seconds since the last sign of life."""
        return float(time.monotonic_ns() - self._words[1]) / 1e9

    @property
    def stopped(self) -> bool:
        """Whether the evaluation is to end after its step."""
        return bool(self._words[2])

    def stop(self) -> None:
        """Ask for that."""
        self._words[2] = 1


class Rounds:
    """Evaluates, as often as it is told to; also the interruptor of its collector, which calls it after each step.

    Args:
        plan: what and how.
        pulse: shared with those who wait.
        gone: whether nobody waits any more; asked about twice a second.
        own_generators: whether torch's generators are this object's to seed, and not shared with training.

    Raises:
        ValueError: it is unclear which reward counts.
        EnvError, PolicyError, TypeError: those of the collector.
    """

    def __init__(self, plan: Plan, pulse: Pulse, gone: Callable[[], bool], *, own_generators: bool) -> None:
        self._plan, self._pulse, self._gone = plan, pulse, gone
        self._own_generators = own_generators
        self._guard = Guard(None)
        self._asked = time.monotonic()
        env = _frozen_env(plan.create_env_fn, plan.options.get("create_env_kwargs"))
        num_envs = env.numel() if isinstance(env, EnvBase) else 1
        options: dict[str, Any] = {**plan.options, "create_env_kwargs": None}
        limit = options.get("max_frames_per_traj") or 0
        if limit > 0 and isinstance(env, EnvBase) and _counts_steps(env):
            env = TransformedEnv(env, StepCounter(limit, step_count_key="eval_step_count"))
            options["max_frames_per_traj"] = None
        factory = options.get("policy_factory")
        if factory is not None:
            options["policy_factory"] = lambda: _in_eval_mode(factory())
        steps = min(limit, _STEPS) if limit > 0 else _STEPS
        policy = None if factory is not None else _in_eval_mode(plan.policy)
        options.setdefault("frames_per_batch", steps * num_envs)
        try:
            self._collector = Collector(env, policy, interruptor=self, **options)
        except BaseException:
            if isinstance(env, EnvBase):
                env.close(raise_if_closed=False)
            raise
        self._num_envs = num_envs
        if plan.target is not None and not isinstance(plan.policy, nn.Module):
            plan.target.eval()
            self._collector._policy_target = plan.target
        self._reward_key = _reward_key(self._collector.env, plan.reward_key)

    def collection_stopped(self) -> bool:
        """After each step: a sign of life; statistics are put back; whether the evaluation ends here."""
        self._guard.restore()
        self._pulse.beat(self._num_envs)
        return self._pulse.stopped or self._alone()

    def _alone(self) -> bool:
        now = time.monotonic()
        if now - self._asked < 0.5:
            return False
        self._asked = now
        return self._gone()

    def run(self, order: Order, begun: Callable[[], None]) -> dict[str, Any]:
        """Evaluate.

        Args:
            order: with which weights.
            begun: called when the environments are seeded.

        Returns:
            See :meth:`~rollwright.collectors.Evaluator.evaluate`.

        Raises:
            Stopped: it was ended before.
            ValueError, TypeError: weights do not fit; none were taken.
            Exception: what environment or policy raised.
        """
        collector, start = self._collector, time.perf_counter()
        ready = [take_weights(collector.get_model(name), new, name) for name, new in order.weights.items()]
        for apply in ready:
            apply()
        self._guard = Guard(collector.get_model("policy"))
        check_known(collector.env)
        self._seed()
        begun()
        tally = Tally(self._plan.num_episodes, self._num_envs)
        while not tally.complete:
            batch = collector.next()
            if batch is None or self._pulse.stopped or self._gone():
                raise Stopped
            ended = end_of_trajectory(batch.get("next"), collector.env._done_groups, batch.ndim)
            reward: Any = batch.get(("next", *as_tuple(self._reward_key)))
            rewards = reward.reshape(*batch.shape, -1).double().sum(-1)
            shape = (self._num_envs, batch.shape[-1])
            tally.take(rewards.reshape(shape).cpu().numpy(), ended.reshape(shape).cpu().numpy())
        seconds = time.perf_counter() - start
        return {
            **tally.summary(),
            "frames_stepped": tally.frames_stepped,
            "seconds": seconds,
            "fps": tally.frames_stepped / seconds,
            "policy_version": order.policy_version,
            "step": order.step,
        }

    def _seed(self) -> None:
        """Begin new episodes."""
        if self._plan.seed is None:
            self._collector.reset()
            return
        devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()
        kept = nullcontext() if self._own_generators else torch.random.fork_rng(devices)
        with kept:
            self._collector.set_seed(self._plan.seed)

    def close(self) -> None:
        """Close the environment."""
        self._collector.shutdown(raise_on_error=False)


def _frozen_env(create_env_fn: Any, kwargs: Mapping[str, Any] | None) -> Any:
    if isinstance(create_env_fn, Sequence) and len(create_env_fn) == 1:
        create_env_fn = create_env_fn[0]
    made = create_env_fn
    if not isinstance(made, EnvBase) and callable(made):
        made = made(**(kwargs or {}))
    return freeze(made) if isinstance(made, EnvBase) else made


def _counts_steps(env: EnvBase) -> bool:
    """Whether there is a StepCounter already, whose limit stays beside that of evaluations."""
    return any("step_count" in as_tuple(key) for key in (*env.observation_keys, *env.state_keys))


def _in_eval_mode(policy: Any) -> Any:
    return policy.eval() if isinstance(policy, nn.Module) else policy


def _reward_key(env: EnvBase, wanted: NestedKey | None) -> NestedKey:
    keys = list(env.reward_keys)
    if wanted is None and len(keys) == 1:
        return keys[0]
    if wanted is None or wanted not in keys:
        raise ValueError(f"reward_key: expected one of {key_str(keys)}, the rewards of {env}, got {wanted!r}.")
    return wanted
