"""Runs the episodes of evaluations, with a collector of its own."""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any, NamedTuple

import numpy as np
import torch
from tensordict import TensorDictBase
from torch import nn

from rollwright._keys import NestedKey, as_tuple, key_str
from rollwright._memory import Segment
from rollwright.collectors.collector import Collector
from rollwright.collectors.evaluation.results import (
    EpisodeResults,
    FrozenBuffers,
    as_number,
    check_statistics,
    freeze,
    padded_episodes,
    prepare_weights,
)
from rollwright.collectors.rollout.policy_copies import never_copied_in
from rollwright.data.layout import end_of_trajectory
from rollwright.envs.base import EnvBase, closed_on_error
from rollwright.envs.libs.foreign import as_env, as_maker, check_maker, is_around, is_env, makers_in
from rollwright.envs.transforms import StepCounter, TransformedEnv
from rollwright.modules.modes import in_eval_mode
from rollwright.weight_update.forms import State
from rollwright.weight_update.policy_weights import weights_of

_STEPS = 100  # of a batch, at most: how far an evaluation steps beyond its end


class Stopped(Exception):
    """An evaluation was ended before it was complete."""


class Settings(NamedTuple):
    """All that evaluations have in common; goes to another process.

    Attributes:
        create_env_fn: an environment, or what makes one.
        policy: what acts, or None.
        target: the module in it that takes weights, where that is not the policy itself.
        num_episodes: of an evaluation; None: conversations with all of the data.
        seed: that each evaluation begins with, or None.
        reward_key: the reward; None: the only one.
        metrics_fn: more results from the frames of all episodes, or None.
        dump_video: whether transforms write out what they have gathered after each.
        options: of the collector.
    """

    create_env_fn: Any
    policy: Any
    target: nn.Module | None
    num_episodes: int | None
    seed: int | None
    reward_key: NestedKey | None
    metrics_fn: Callable[[TensorDictBase], Mapping[str, Any]] | None
    dump_video: bool
    options: dict[str, Any]


class EvaluationRequest(NamedTuple):
    """One evaluation.

    Attributes:
        step: that of training, for the result.
        policy_version: of the weights, for the result.
        weights: flat states by model, copies.
    """

    step: int
    policy_version: int
    weights: Mapping[str, State]


class EvaluationProgress:
    """Three numbers that an evaluation and those who wait for it share: frames so far, the last sign of life, a stop.

    Args:
        memory: of at least 24 bytes, for two processes; None: of this process alone.
    """

    num_bytes = 24

    def __init__(self, memory: Segment | None = None) -> None:
        self._numbers: Any = np.zeros(3, np.int64)
        if memory is not None:
            self._numbers = np.frombuffer(memory.map(0, self.num_bytes), np.int64)

    def begin(self) -> None:
        """An evaluation begins."""
        self._numbers[0] = 0
        self._numbers[1] = time.monotonic_ns()

    def beat(self, frames: int = 0) -> None:
        """So many frames were taken."""
        self._numbers[0] += frames
        self._numbers[1] = time.monotonic_ns()

    @property
    def frames(self) -> int:
        """Taken in this evaluation."""
        return int(self._numbers[0])

    @property
    def beaten_at(self) -> int:
        """When the last sign of life was given, in nanoseconds."""
        return int(self._numbers[1])

    @property
    def silence_s(self) -> float:
        """Seconds since the last sign of life."""
        return float(time.monotonic_ns() - self._numbers[1]) / 1e9

    @property
    def stopped(self) -> bool:
        """Whether the evaluation is to end after its step."""
        return bool(self._numbers[2])

    def stop(self) -> None:
        """Ask for that."""
        self._numbers[2] = 1


class EpisodeRunner:
    """Runs evaluations, one after another; also the interruptor of its collector, which calls it after each step.

    Args:
        env: in which episodes are run, frozen.
        settings: what and how.
        progress: shared with those who wait.
        gone: whether nobody waits any more; asked about twice a second.
        own_generators: whether torch's generators are this object's to seed, and not shared with training.

    Raises:
        ValueError: it is unclear which reward counts.
        EnvError, PolicyError, TypeError: those of the collector.
    """

    def __init__(
        self,
        env: Any,
        settings: Settings,
        progress: EvaluationProgress,
        gone: Callable[[], bool],
        *,
        own_generators: bool,
    ) -> None:
        self._settings, self._progress, self._gone = settings, progress, gone
        self._own_generators = own_generators
        self._buffers = FrozenBuffers(None)
        self._asked = time.monotonic()
        self._num_envs = env.numel() if isinstance(env, EnvBase) else 1
        factory = settings.options.get("policy_factory")
        options: dict[str, Any] = {**settings.options, "create_env_kwargs": None}
        with ExitStack() as modes:

            def evaluating(policy: Any) -> Any:
                self._modules = _modules_of(policy)
                modes.enter_context(in_eval_mode(self._modules))
                return policy

            if factory is not None:
                arguments = (env,) if _takes_env(factory) else ()
                options["policy_factory"] = lambda: evaluating(factory(*arguments))
            policy = None if factory is not None else evaluating(settings.policy)
            self._collector = self._made_collector(env, policy, options)
        if settings.target is not None:
            self._collector.set_weight_target(settings.target)
        self._reward_key = _reward_key(self._collector.env, settings.reward_key)

    def _made_collector(self, env: Any, policy: Any, options: dict[str, Any]) -> Collector:
        if self._settings.num_episodes is None:
            raise TypeError(
                f"num_trajectories: expected a number of episodes, got None, and {type(env).__name__} has no data that "
                "comes to an end. Pass a number."
            )
        limit = options.get("max_frames_per_traj") or 0
        if limit > 0 and isinstance(env, EnvBase) and _counts_steps(env):
            env = TransformedEnv(env, StepCounter(limit, step_count_key="eval_step_count"))
            options["max_frames_per_traj"] = None
        steps = min(limit, _STEPS) if limit > 0 else _STEPS
        options.setdefault("frames_per_batch", steps * self._num_envs)
        made: Collector = Collector(env, policy, interruptor=self, **options)
        return made

    def collection_stopped(self) -> bool:
        """After each step: a sign of life; statistics are put back; whether the evaluation ends here."""
        self._buffers.restore()
        self._progress.beat(self._num_envs)
        return self._progress.stopped or self._alone()

    def _alone(self) -> bool:
        now = time.monotonic()
        if now - self._asked < 0.5:
            return False
        self._asked = now
        return self._gone()

    def run(self, request: EvaluationRequest, begun: Callable[[], None]) -> dict[str, Any]:
        """Evaluate.

        Args:
            request: with which weights.
            begun: called when the environments are seeded.

        Returns:
            See :meth:`~rollwright.collectors.Evaluator.evaluate`.

        Raises:
            Stopped: it was ended before.
            ValueError, TypeError: weights do not fit, and none were taken; or ``metrics_fn`` returns no dictionary.
            Exception: what environment or policy raised.
        """
        with in_eval_mode(self._modules):  # they may be those that are trained, where they cannot be copied
            return self._run(request, begun)

    def _run(self, request: EvaluationRequest, begun: Callable[[], None]) -> dict[str, Any]:
        collector, start = self._collector, time.perf_counter()
        self._load(request.weights)
        check_statistics(collector.env)
        self._seed()
        begun()
        results, frames = self._episodes()
        seconds = time.perf_counter() - start
        env: Any = collector.env
        while self._settings.dump_video and isinstance(env, TransformedEnv):
            env.transform.dump()
            env = env.base_env
        metrics = {} if self._settings.metrics_fn is None else self._settings.metrics_fn(frames)
        return {
            **results.summary(),
            "frames_stepped": results.frames_stepped,
            "seconds": seconds,
            "fps": results.frames_stepped / seconds,
            "policy_version": request.policy_version,
            "step": request.step,
            **_checked_metrics(metrics),
        }

    def _load(self, weights: Mapping[str, State]) -> None:
        """Take new weights; none, if some do not fit."""
        ready = [prepare_weights(self._collector.get_model(name), new, name) for name, new in weights.items()]
        for apply in ready:
            apply()
        self._buffers = FrozenBuffers(self._collector.get_model("policy"))

    def _episodes(self) -> tuple[EpisodeResults, Any]:
        """Run them: their results, and their frames where ``metrics_fn`` is to have them."""
        collector = self._collector
        results = EpisodeResults(self._settings.num_episodes or 0, self._num_envs)
        frames: list[TensorDictBase] = []
        while not results.complete:
            batch = collector.next()
            if batch is None or self._progress.stopped or self._gone():
                raise Stopped
            ended = end_of_trajectory(batch.get("next"), collector.env.done_groups, batch.ndim)
            reward: Any = batch.get(("next", *as_tuple(self._reward_key)))
            rewards = reward.reshape(*batch.shape, -1).double().sum(-1)
            shape = (self._num_envs, batch.shape[-1])
            results.take(rewards.reshape(shape).cpu().numpy(), ended.reshape(shape).cpu().numpy())
            if self._settings.metrics_fn is not None:
                frames.append(batch)
        return results, padded_episodes(frames, results) if frames else None

    def _seed(self) -> None:
        """Begin new episodes."""
        if self._settings.seed is None:
            self._collector.reset()
            return
        devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()
        kept = nullcontext() if self._own_generators else torch.random.fork_rng(devices)
        with kept:
            self._collector.set_seed(self._settings.seed)

    def close(self) -> None:
        """Close the environment."""
        self._collector.shutdown(raise_on_error=False)


def _checked_metrics(metrics: Any) -> dict[str, Any]:
    """What ``metrics_fn`` has returned."""
    if not isinstance(metrics, Mapping) or not all(isinstance(name, str) for name in metrics):
        raise TypeError(
            f"metrics_fn: expected it to return a dictionary of numbers by name, got {type(metrics).__name__}: "
            f"{metrics!r}."
        )
    return {name: as_number(value) for name, value in metrics.items()}


@contextmanager
def frozen_env(settings: Settings) -> Iterator[Any]:
    """The environment of evaluations; closed if the block raises, unless it is the user's own."""
    given = settings.create_env_fn
    if (listed := makers_in(given)) is not None and len(listed) == 1:
        given = listed[0]
    given, kwargs = as_maker(given), settings.options.get("create_env_kwargs") or {}
    check_maker("create_env_fn", given, kwargs)
    made = as_env(given if is_env(given) or not callable(given) else given(**kwargs))
    with closed_on_error([made] if isinstance(made, EnvBase) and not is_around(made, given) else []):
        yield freeze(made) if isinstance(made, EnvBase) else made


def _counts_steps(env: EnvBase) -> bool:
    """Whether there is a StepCounter already, whose limit stays beside that of evaluations."""
    return any("step_count" in as_tuple(key) for key in (*env.observation_keys, *env.state_keys))


def _takes_env(factory: Callable[..., Any]) -> bool:
    """Whether a function that makes policies has to be given the environment: it cannot be called without argument."""
    try:
        signature = inspect.signature(factory)
    except (TypeError, ValueError):  # some built-in callables have none
        return False
    try:
        signature.bind()
    except TypeError:
        return True
    return False


def _modules_of(policy: Any) -> list[nn.Module]:
    """The modules of a policy; not those of engines, which see to it themselves, one token at a time."""
    theirs = {module for part in never_copied_in(policy) if isinstance(part, nn.Module) for module in part.modules()}
    roots = [part for part in (policy, weights_of(policy)) if isinstance(part, nn.Module)]
    return [module for root in roots for module in root.modules() if module not in theirs]


def _reward_key(env: EnvBase, wanted: NestedKey | None) -> NestedKey:
    keys = list(env.reward_keys)
    if wanted is None and len(keys) == 1:
        return keys[0]
    if wanted is None or wanted not in keys:
        raise ValueError(f"reward_key: expected one of {key_str(keys)}, the rewards of {env}, got {wanted!r}.")
    return wanted
