"""Results of evaluations: episodes as numbers and padded batches, and statistics that stay frozen meanwhile."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from numpy.typing import NDArray
from tensordict import TensorDictBase
from torch import nn

from rollwright.collectors.rollout.policy_copies import never_copied_in
from rollwright.data.layout import MASK, pad_trajectories
from rollwright.envs.base import EnvBase
from rollwright.envs.batched.base import BatchedEnv
from rollwright.envs.batched.host import Hosted
from rollwright.envs.recreation import RecreatedEnv
from rollwright.envs.transforms import Transform
from rollwright.envs.transforms.vecnorm import RunningNorm
from rollwright.weight_update.forms import State, prepare
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
