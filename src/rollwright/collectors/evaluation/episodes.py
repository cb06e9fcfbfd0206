"""Runs the episodes of evaluations, with a collector of its own, and makes numbers of them; statistics stay frozen."""

from __future__ import annotations

import copy
import inspect
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from numpy.typing import NDArray
from tensordict import TensorDictBase
from torch import nn

from rollwright._keys import NestedKey, as_tuple, key_str
from rollwright._memory import Segment
from rollwright.collectors.collector import Collector
from rollwright.collectors.rollout.policy import never_copied_in
from rollwright.data.layout import MASK, end_of_trajectory, pad_trajectories
from rollwright.envs.base import EnvBase, closed_on_error
from rollwright.envs.batched.base import BatchedEnv
from rollwright.envs.batched.host import Hosted
from rollwright.envs.foreign import as_env, as_maker, check_maker, is_around, is_env, makers_in
from rollwright.envs.recreation import RecreatedEnv
from rollwright.envs.transforms import StepCounter, Transform, TransformedEnv
from rollwright.envs.transforms.vecnorm import RunningNorm
from rollwright.modules.modes import in_eval_mode
from rollwright.weight_update.forms import State, flat_state, prepare
from rollwright.weight_update.policy_weights import is_never_copied, weights_of


class _Episode(NamedTuple):
    """One episode: its return, its number of frames, its environment, and its first frame among all of these."""

    total: float
    length: int
    env: int
    start: int


class EpisodeResults:
    """Counts a fixed number of episodes for each environment, so that short ones are not preferred.

    Of ``n`` episodes over ``e`` environments, environment ``i`` gives its first ``n // e + (i < n % e)``. To take
    those that end first would prefer the short ones.

    Args:
        num_episodes: in all.
        num_envs: number of environments that step together.

    Example:
        >>> results = EpisodeResults(num_episodes=2, num_envs=2)
        >>> ended = np.array([[True, True, True], [False, False, True]])
        >>> results.take(np.ones((2, 3)), ended)
        >>> results.complete, results.returns, results.lengths
        (True, [1.0, 3.0], [1, 3])
    """

    def __init__(self, num_episodes: int, num_envs: int) -> None:
        self._left = num_episodes // num_envs + (np.arange(num_envs) < num_episodes % num_envs)
        self._return = np.zeros(num_envs)
        self._length = np.zeros(num_envs, np.int64)
        self._episodes: list[list[_Episode]] = [[] for _ in range(num_envs)]
        self._steps = 0
        self.frames_stepped = 0

    @property
    def complete(self) -> bool:
        """Whether all episodes have ended."""
        return not self._left.any()

    def take(self, rewards: NDArray[Any], ended: NDArray[np.bool_]) -> None:
        """Count the frames of a batch, the next ones of each environment.

        Args:
            rewards: float ``[num_envs, T]``.
            ended: bool ``[num_envs, T]``, the last frame of an episode.
        """
        self.frames_stepped += ended.size
        for env in np.flatnonzero(self._left).tolist():
            start = 0
            for end in np.flatnonzero(ended[env]).tolist():
                self._add(env, rewards[env, start : end + 1])
                length = int(self._length[env])
                first = self._steps + end + 1 - length
                self._episodes[env].append(_Episode(float(self._return[env]), length, env, first))
                self._return[env] = self._length[env] = 0
                self._left[env] -= 1
                start = end + 1
                if not self._left[env]:
                    break
            else:
                self._add(env, rewards[env, start:])
        self._steps += ended.shape[1]

    def _add(self, env: int, rewards: NDArray[Any]) -> None:
        self._return[env] += rewards.sum(dtype=np.float64)
        self._length[env] += len(rewards)

    def _in_order(self) -> list[_Episode]:
        """The first episode of each environment, then the second of each, and so on."""
        most = max(len(found) for found in self._episodes)
        return [found[i] for i in range(most) for found in self._episodes if i < len(found)]

    @property
    def returns(self) -> list[float]:
        """Sums of rewards."""
        return [episode.total for episode in self._in_order()]

    @property
    def lengths(self) -> list[int]:
        """Numbers of frames."""
        return [episode.length for episode in self._in_order()]

    @property
    def places(self) -> list[tuple[int, int]]:
        """Environment and first frame."""
        return [(episode.env, episode.start) for episode in self._in_order()]

    def summary(self) -> dict[str, Any]:
        """Numbers over all episodes, as JSON knows them; deviations are those of a sample (0 for one episode)."""
        returns, lengths = np.array(self.returns), np.array(self.lengths)
        several = int(len(returns) > 1)
        return {
            "reward": float(returns.mean()),
            "reward_std": float(returns.std(ddof=several)),
            "reward_min": float(returns.min()),
            "reward_max": float(returns.max()),
            "episode_length": float(lengths.mean()),
            "episode_length_std": float(lengths.std(ddof=several)),
            "episode_length_min": int(lengths.min()),
            "episode_length_max": int(lengths.max()),
            "num_episodes": len(returns),
            "frames": int(lengths.sum()),
            "returns": returns.tolist(),
            "lengths": lengths.tolist(),
        }


def padded_episodes(batches: Sequence[TensorDictBase], results: EpisodeResults) -> TensorDictBase:
    """The frames of the episodes, in the order of ``returns``.

    Args:
        batches: ``[*env, T]`` each, as ``results`` has taken them.
        results: complete.

    Returns:
        ``[episodes, longest]``, padded, with the mask ``("collector", "mask")``.
    """
    frames = cast(TensorDictBase, torch.cat(cast(Any, list(batches)), batches[0].ndim - 1))
    steps = frames.batch_size[-1]
    starts = torch.tensor([env * steps + start for env, start in results.places], device="cpu")
    return pad_trajectories(frames.reshape(-1), starts, torch.tensor(results.lengths, device="cpu"), MASK)


def as_number(value: Any) -> Any:
    """A tensor or array of one number as that number, anything else as it is.

    Example:
        >>> as_number(torch.tensor(2.5)), as_number([1, 2])
        (2.5, [1, 2])
    """
    return (
        value.item()
        if isinstance(value, torch.Tensor | np.ndarray | np.generic) and np.prod(value.shape) == 1
        else value
    )


class _Float(float):
    """A float with the method by which tensors give their number."""

    def item(self) -> float:
        """The number."""
        return float(self)


class _Int(int):
    """An int with the method by which tensors give their number."""

    def item(self) -> int:
        """The number."""
        return int(self)


class _Numbers(list[Any]):
    """A list of numbers with that method."""

    def item(self) -> float:
        """Their mean: who asks for one number wants to log one."""
        return float(np.mean(self))


def with_item(result: Mapping[str, Any]) -> dict[str, Any]:
    """The same results, which also have ``item()``, for functions that expect tensors.

    Example:
        >>> found = with_item({"reward": 2.5, "num_episodes": 3, "lengths": [1, 2]})
        >>> found, found["reward"].item(), found["lengths"].item()
        ({'reward': 2.5, 'num_episodes': 3, 'lengths': [1, 2]}, 2.5, 1.5)
    """
    kinds: dict[type, Any] = {float: _Float, int: _Int, list: _Numbers}
    return {name: kinds.get(type(value), lambda same: same)(value) for name, value in result.items()}


def freeze(env: EnvBase) -> EnvBase:
    """Stop the running statistics of an environment's transforms (all that have ``freeze()``); returns it."""
    env.eval()
    for module in env.modules():
        halt: Any = getattr(module, "freeze", None) if isinstance(module, Transform) else None
        if callable(halt):
            halt()
        if isinstance(module, RecreatedEnv):
            module.on_recreation(_inherit)
        if isinstance(module, BatchedEnv):
            module.call_in_hosts(_freeze_hosted)
    return env


def _inherit(env: EnvBase, before: EnvBase | None) -> None:
    """Freeze an environment that takes the place of a frozen one, with the statistics of that."""
    freeze(env)
    if before is None:  # they were in a process that is lost
        check_statistics(env)
        return
    for new, old in zip(env.modules(), before.modules(), strict=False):
        if isinstance(new, Transform) and type(new) is type(old) and hasattr(new, "freeze"):
            prepare_weights(new, dict(old.state_dict()), type(new).__name__)()


def check_statistics(env: EnvBase) -> None:
    """Test that frozen statistics are there to normalise by.

    Raises:
        RuntimeError: they are not.
    """
    for name, module in env.named_modules():
        if isinstance(module, BatchedEnv):
            module.call_in_hosts(_check_hosted)
        if not isinstance(module, RunningNorm):
            continue
        written = {*env.observation_keys, *env.reward_keys}
        for index, (key, out_key) in enumerate(zip(module.in_keys, module.out_keys, strict=True)):
            seen = module.has_seen(index)
            if out_key in written if seen is None else not seen:
                raise RuntimeError(
                    f"evaluation: {module} has no statistics of {key!r}, and evaluation does not gather any. Pass "
                    f"evaluate() or trigger_eval() weights_dict={{{_model_id(name)!r}: that transform of the training "
                    "environment}, or let create_env_fn put a frozen_copy() of it on the environment."
                )


def _model_id(name: str) -> str:
    """How a user names a transform of an environment, given its name among the modules."""
    return "env." + re.sub(r"\.(?:transforms\.)?(\d+)", r"[\1]", name)


def _freeze_hosted(hosted: Hosted) -> None:
    freeze(hosted.env)


def _check_hosted(hosted: Hosted) -> None:
    check_statistics(hosted.env)


def prepare_weights(target: Any, weights: State, name: str) -> Callable[[], None]:
    """Check weights for a model; returns the call that copies them, see :func:`prepare`.

    A transform takes statistics that it has no memory for yet, too.
    """
    if isinstance(target, Transform):
        for path, module in target.named_modules():
            buffers = _buffers_of(module)
            for held, buffer in buffers.items():
                saved = weights.get(f"{path}.{held}" if path else held)
                if isinstance(saved, torch.Tensor) and (buffer is None or buffer.shape != saved.shape):
                    buffers[held] = torch.zeros_like(saved, device=None if buffer is None else buffer.device)
    return prepare(target, weights, name)


def _buffers_of(module: nn.Module) -> dict[str, torch.Tensor | None]:
    """Buffers by name, those that are None included, which ``named_buffers`` leaves out."""
    buffers: dict[str, torch.Tensor | None] = vars(module)["_buffers"]
    return buffers


class _SavedBuffer(NamedTuple):
    buffers: dict[str, torch.Tensor | None]
    name: str
    tensor: torch.Tensor | None
    saved: torch.Tensor | None


class FrozenBuffers:
    """Puts buffers and extra state of a policy back, after each step in which they moved.

    Args:
        policy: anything; only modules have buffers.

    Example:
        >>> class Counts(nn.Module):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.register_buffer("seen", torch.zeros(()))
        ...     def forward(self, x):
        ...         self.seen += 1
        ...         return x
        >>> policy = Counts()
        >>> guard = FrozenBuffers(policy)
        >>> _ = policy(torch.ones(1))
        >>> guard.restore()
        >>> policy.seen
        tensor(0.)
    """

    def __init__(self, policy: Any) -> None:
        weights = None if is_never_copied(policy) else weights_of(policy)
        engines = set() if weights is None else {id(part) for part in never_copied_in(policy)}
        self._modules = [] if weights is None else [part for part in weights.modules() if id(part) not in engines]
        self.hold()

    def hold(self) -> None:
        """What buffers hold now is what they keep."""
        self._held = [
            _SavedBuffer(buffers, name, tensor, None if tensor is None else tensor.detach().clone())
            for buffers in map(_buffers_of, self._modules)
            for name, tensor in buffers.items()
        ]
        self._versions = [_version(held.tensor) for held in self._held]
        self._extra = [
            (module, copy.deepcopy(module.get_extra_state()))
            for module in self._modules
            if type(module).get_extra_state is not nn.Module.get_extra_state
        ]

    def restore(self) -> None:
        """Undo what a step did to them."""
        for index, (buffers, name, tensor, saved) in enumerate(self._held):
            if buffers.get(name) is tensor and _version(tensor) == self._versions[index]:
                continue
            buffers[name] = tensor
            if tensor is not None and saved is not None:
                with torch.no_grad():
                    tensor.copy_(saved)
                self._versions[index] = _version(tensor)
        for module, extra in self._extra:
            module.set_extra_state(copy.deepcopy(extra))


def _version(tensor: torch.Tensor | None) -> int:
    """A number that changes with each write; -1, as if it never did, for None."""
    return -1 if tensor is None else tensor._version


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


def copy_of(weights: Any, name: str) -> State:
    """Weights in any form as a flat state that nobody else writes, on the CPU.

    Raises:
        TypeError: they have none of the forms of weights.
    """
    with torch.no_grad():
        return {key: _value_copy(value) for key, value in flat_state(weights, name).items()}


def _value_copy(value: Any) -> Any:
    return value.detach().to("cpu", copy=True) if isinstance(value, torch.Tensor) else copy.deepcopy(value)
