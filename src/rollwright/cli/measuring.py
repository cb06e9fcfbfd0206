"""Handwritten collection loops without a library, and measurements of loops in turns.

The loops store what a collector stores: observation, action, the parameters of its distribution, its
log-probability, reward, flags, next observation, trajectory id. The true last observation of an
episode is kept, and no row crosses from an episode to the next. They know neither options nor
devices nor other spaces than Box observations with Box or Discrete actions.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import gymnasium
import numpy as np
import torch
from gymnasium import spaces
from gymnasium.vector import AutoresetMode
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional

Act = Callable[[Tensor], tuple[Tensor, Tensor, tuple[Tensor, ...]]]
Outcome = tuple[NDArray[Any], NDArray[Any], NDArray[Any], NDArray[Any], NDArray[Any]]
VectorStep = Callable[[Any, NDArray[Any]], Outcome]

_HALF_LOG_TAU = 0.5 * math.log(2 * math.pi)
_SMALLEST_SCALE = 0.01
_BIAS = math.log(math.expm1(1 - _SMALLEST_SCALE))  # so that an output of 0 is a scale of 1


def categorical(logits: Tensor) -> tuple[Tensor, Tensor, tuple[Tensor, ...]]:
    """Sample a categorical distribution.

    Args:
        logits: ``[*batch, choices]``.

    Returns:
        Action, int64 ``[*batch]``; its log-probability, ``[*batch]``; ``(logits,)``.
    """
    log_probs = torch.log_softmax(logits, -1)
    action = torch.multinomial(log_probs.exp(), 1)
    return action.squeeze(-1), log_probs.gather(-1, action).squeeze(-1), (logits,)


def gaussian(output: Tensor) -> tuple[Tensor, Tensor, tuple[Tensor, ...]]:
    """Sample independent normal distributions.

    Args:
        output: ``[*batch, 2 * size]``: means, then what softplus turns into standard deviations.

    Returns:
        Action ``[*batch, size]``; log-probability of each of its numbers, ``[*batch, size]``; ``(loc, scale)``.
    """
    loc, raw = output.chunk(2, -1)
    scale = functional.softplus(raw + _BIAS) + _SMALLEST_SCALE
    action = torch.normal(loc, scale)
    log_prob = -0.5 * ((action - loc) / scale) ** 2 - scale.log() - _HALF_LOG_TAU
    return action, log_prob, (loc, scale)


class _Loop:
    """Memory of a batch, ``[steps, *envs]``, as tensors and as NumPy views of them.

    The memory is allocated once: each batch overwrites the one before.
    """

    def __init__(self, env: Any, observation: Any, net: nn.Module, act: Act, steps: int, envs: tuple[int, ...]) -> None:
        self.env, self.observation, self.net, self.act, self.steps = env, observation, net, act, steps
        self.frames = steps * math.prod(envs)
        first = torch.as_tensor(observation)
        with torch.no_grad():
            action, log_prob, parameters = act(net(first))
        names = ("logits",) if len(parameters) == 1 else ("loc", "scale")
        self.batch: dict[str, Tensor] = {
            "observation": torch.empty((steps, *first.shape), dtype=first.dtype),
            "action": torch.empty((steps, *action.shape), dtype=action.dtype),
            "log_prob": torch.empty((steps, *log_prob.shape)),
            "reward": torch.empty((steps, *envs)),
            "terminated": torch.empty((steps, *envs), dtype=torch.bool),
            "truncated": torch.empty((steps, *envs), dtype=torch.bool),
            "done": torch.empty((steps, *envs), dtype=torch.bool),
            "next_observation": torch.empty((steps, *first.shape), dtype=first.dtype),
            "traj_id": torch.empty((steps, *envs), dtype=torch.int64),
        }
        for name, value in zip(names, parameters, strict=True):
            self.batch[name] = torch.empty((steps, *value.shape))
        self._rows = {name: tensor.numpy() for name, tensor in self.batch.items()}
        self._parameter_rows = [self._rows[name] for name in names]


class SingleLoop(_Loop):
    """Collects from one gymnasium environment.

    Args:
        env: made by ``gymnasium.make``; Box observations, Box or Discrete actions.
        observation: what ``env.reset`` returned.
        net: from an observation to what ``act`` takes.
        act: :func:`categorical` or :func:`gaussian`.
        steps: frames a batch.

    Example:
        >>> env = gymnasium.make("CartPole-v1")
        >>> loop = SingleLoop(env, env.reset(seed=0)[0], nn.Linear(4, 2), categorical, steps=10)
        >>> loop.collect()["next_observation"].shape
        torch.Size([10, 4])
    """

    def __init__(self, env: gymnasium.Env[Any, Any], observation: Any, net: nn.Module, act: Act, steps: int) -> None:
        super().__init__(env, observation, net, act, steps, ())
        self._discrete = isinstance(env.action_space, spaces.Discrete)
        self._traj_id = 0

    @torch.no_grad()
    def collect(self) -> dict[str, Tensor]:
        """Collect a batch; returns its tensors ``[steps, ...]``, which the next batch overwrites."""
        env, net, act, rows, inputs = self.env, self.net, self.act, self._rows, self.batch["observation"]
        for t in range(self.steps):
            rows["observation"][t] = self.observation
            action, log_prob, parameters = act(net(inputs[t]))
            chosen = action.numpy()
            rows["action"][t] = chosen
            rows["log_prob"][t] = log_prob.numpy()
            for row, value in zip(self._parameter_rows, parameters, strict=True):
                row[t] = value.numpy()
            observation, reward, terminated, truncated, _ = env.step(chosen.item() if self._discrete else chosen)
            done = terminated or truncated
            rows["next_observation"][t] = observation
            rows["reward"][t] = reward
            rows["terminated"][t] = terminated
            rows["truncated"][t] = truncated
            rows["done"][t] = done
            rows["traj_id"][t] = self._traj_id
            if done:
                observation, _ = env.reset()
                self._traj_id += 1
            self.observation = observation
        return self.batch


class VectorLoop(_Loop):
    """Collects from environments that are stepped together.

    Args:
        env: a vector environment, such as :func:`make_vector` makes.
        observation: what ``env.reset`` returned.
        net: from observations to what ``act`` takes.
        act: :func:`categorical` or :func:`gaussian`.
        steps: steps a batch; it has ``steps * num_envs`` frames.
        step: steps ``env`` with actions; returns the true next observations, rewards, terminations, truncations, and
            the observations to act on next.

    Example:
        >>> env = make_vector("CartPole-v1", 3)
        >>> loop = VectorLoop(env, env.reset(seed=0)[0], nn.Linear(4, 2), categorical, steps=10)
        >>> loop.collect()["next_observation"].shape
        torch.Size([10, 3, 4])
    """

    def __init__(
        self,
        env: Any,
        observation: NDArray[Any],
        net: nn.Module,
        act: Act,
        steps: int,
        step: VectorStep | None = None,
    ) -> None:
        num_envs = len(observation)
        super().__init__(env, observation, net, act, steps, (num_envs,))
        self._step = step_vector if step is None else step
        self._traj_ids = np.arange(num_envs)
        self._next_id = num_envs

    @torch.no_grad()
    def collect(self) -> dict[str, Tensor]:
        """Collect a batch; returns its tensors ``[steps, num_envs, ...]``, which the next batch overwrites."""
        env, net, act, step = self.env, self.net, self.act, self._step
        rows, inputs = self._rows, self.batch["observation"]
        for t in range(self.steps):
            rows["observation"][t] = self.observation
            action, log_prob, parameters = act(net(inputs[t]))
            chosen = action.numpy()
            rows["action"][t] = chosen
            rows["log_prob"][t] = log_prob.numpy()
            for row, value in zip(self._parameter_rows, parameters, strict=True):
                row[t] = value.numpy()
            final, reward, terminated, truncated, self.observation = step(env, chosen)
            done = terminated | truncated
            rows["next_observation"][t] = final
            rows["reward"][t] = reward
            rows["terminated"][t] = terminated
            rows["truncated"][t] = truncated
            rows["done"][t] = done
            rows["traj_id"][t] = self._traj_ids
            if done.any():
                ended = np.flatnonzero(done)
                self._traj_ids[ended] = np.arange(self._next_id, self._next_id + len(ended))
                self._next_id += len(ended)
        return self.batch


def make_vector(env_id: str, num_envs: int, **kwargs: Any) -> gymnasium.vector.VectorEnv[Any, Any, Any]:
    """Environments stepped in turn, each reset within the step that ends its episode."""
    options = {"autoreset_mode": AutoresetMode.SAME_STEP, "copy": False}
    return gymnasium.make_vec(env_id, num_envs, "sync", options, disable_env_checker=True, **kwargs)


def step_vector(env: Any, action: NDArray[Any]) -> Outcome:
    """Step what :func:`make_vector` makes."""
    observation, reward, terminated, truncated, info = env.step(action)
    last = info.get("final_obs")
    if last is None:
        return observation, reward, terminated, truncated, observation
    final = observation.copy()
    for i in np.flatnonzero(terminated | truncated):
        final[i] = last[i]
    return final, reward, terminated, truncated, observation


# Measurements --------------------------------------------------------------------------------------


class Summary(NamedTuple):
    """The middle of some measurements.

    Attributes:
        median: half of them are below.
        low: a quarter of them is below.
        high: a quarter of them is above.
    """

    median: float
    low: float
    high: float


def summary(values: Sequence[float]) -> Summary:
    """Median and quartiles.

    >>> summary([1.0, 2.0, 3.0, 4.0, 100.0])
    Summary(median=3.0, low=2.0, high=4.0)
    """
    low, median, high = np.percentile(values, [25, 50, 75]).tolist()
    return Summary(median, low, high)


def ratios(values: Sequence[float], base: Sequence[float]) -> Summary:
    """How many times faster than ``base``, round by round: noise that lasts longer than a round cancels.

    >>> ratios([2.0, 4.0, 3.0], [1.0, 2.0, 3.0]).median
    2.0
    """
    return summary([value / other for value, other in zip(values, base, strict=True)])


def rate(collect: Callable[[], int], *, frames: int = 1, seconds: float = 0.0) -> float:
    """Frames per second of ``collect``, called until it took so many frames and so many seconds.

    Args:
        collect: collects a batch; returns its number of frames.
        frames: the least to take.
        seconds: the least time to take.
    """
    taken = 0
    elapsed = 0.0
    start = time.perf_counter()
    while taken < frames or elapsed < seconds:
        taken += collect()
        elapsed = time.perf_counter() - start
    return taken / elapsed


def alternate(sides: Mapping[str, Callable[[], float]], rounds: int, *, rest_s: float = 0.0) -> dict[str, list[float]]:
    """Measure all sides once a round, each round in the other direction.

    Args:
        sides: for each name a function that returns a rate.
        rounds: number of rounds.
        rest_s: seconds of rest before each turn, where sides go on with something for a while after theirs.

    Returns:
        The rates of each side, in order of rounds.

    Example:
        >>> alternate({"one": lambda: 1.0, "two": lambda: 2.0}, rounds=2)
        {'one': [1.0, 1.0], 'two': [2.0, 2.0]}
    """
    rates: dict[str, list[float]] = {name: [] for name in sides}
    for i in range(rounds):
        for name in list(sides)[:: 1 if i % 2 == 0 else -1]:
            time.sleep(rest_s)
            rates[name].append(sides[name]())
    return rates
