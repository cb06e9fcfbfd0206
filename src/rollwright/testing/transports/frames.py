"""An environment whose frames say which ones they are, policies for it, and what must hold of its frames."""

from __future__ import annotations

import os
import secrets
import signal
import time
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, cast

import gymnasium
import numpy as np
import torch
from gymnasium import spaces
from tensordict import LazyStackedTensorDict, TensorDict, TensorDictBase
from tensordict.nn import ProbabilisticTensorDictModule, ProbabilisticTensorDictSequential, TensorDictModule
from torch import nn

from rollwright.data import Composite, NonTensor, Unbounded
from rollwright.envs import GymWrapper, SerialEnv, Transform, TransformedEnv

NUM_SEVERAL = 3
"""Environments in a batched one."""

IDENT, LIFE, EPISODE, STEP, DRAW = range(5)
IDS, VERSION = ("collector", "traj_ids"), "policy_version"


def expect(holds: object, message: str) -> None:
    """Fail a check.

    Raises:
        AssertionError: with the message, unless it holds.
    """
    if not holds:
        raise AssertionError(message)


class NumberedEnv(gymnasium.Env[Any, Any]):
    """Observations are float64 ``[5]``: ident, life, episode, step, and a number drawn from the generator.

    An episode has 3 to 13 steps; the reward of a step is its number. A frame that is lost, delivered twice, torn or put
    into another trajectory is seen.

    Args:
        ident: of the environment.
        life: of the object; None: drawn at random, so that no two objects on any machines have the same.
        step_s: seconds that a step sleeps.
        raises_at: number of the step, counted over all episodes, that raises ValueError; None: none.
        dies_at: likewise, at which the process is killed.

    Example:
        >>> env = NumberedEnv(7, life=0)
        >>> env.reset(seed=0)[0][:4].tolist(), env.step(0)[0][:4].tolist()
        ([7.0, 0.0, 0.0, 0.0], [7.0, 0.0, 0.0, 1.0])
    """

    action_space = spaces.Box(-np.inf, np.inf, (1,), np.float32)
    observation_space = spaces.Box(-np.inf, np.inf, (5,), np.float64)

    def __init__(
        self,
        ident: int = 0,
        *,
        life: int | None = None,
        step_s: float = 0.0,
        raises_at: int | None = None,
        dies_at: int | None = None,
    ) -> None:
        self._ident, self._step_s, self._raises_at, self._dies_at = ident, step_s, raises_at, dies_at
        self._life = secrets.randbits(48) if life is None else life
        self._episode, self._step, self._num_steps, self._length = -1, 0, 0, 1

    def _observed(self) -> np.ndarray[Any, Any]:
        return np.array([self._ident, self._life, self._episode, self._step, self.np_random.random()])

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        """Begin the next episode, whose length is drawn."""
        super().reset(seed=seed)
        self._episode, self._step = self._episode + 1, 0
        self._length = int(self.np_random.integers(3, 14))
        return self._observed(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """Take a step, which may sleep, raise or kill the process."""
        self._num_steps += 1
        if self._step_s:
            time.sleep(self._step_s)
        if self._num_steps == self._dies_at:
            os.kill(os.getpid(), signal.SIGKILL)
        if self._num_steps == self._raises_at:
            raise ValueError(f"environment {self._ident} raises in step {self._num_steps}")
        self._step += 1
        ended, odd = self._step >= self._length, self._episode % 2 == 1
        return self._observed(), float(self._step), ended and not odd, ended and odd, {}


class UniformImages(gymnasium.Env[Any, Any]):
    """Images uint8 ``[64, 64, 3]`` called ``"observation"``, all of whose pixels are equal; episodes of 20 steps."""

    action_space = spaces.Box(-np.inf, np.inf, (1,), np.float32)
    observation_space = spaces.Box(0, 254, (64, 64, 3), np.uint8)

    def __init__(self) -> None:
        self._step = 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        """Begin with a new image."""
        super().reset(seed=seed)
        self._step = 0
        return self._observed(), {}

    def _observed(self) -> Any:
        return np.full((64, 64, 3), self.np_random.integers(255), np.uint8)

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """Show a new image."""
        self._step += 1
        return self._observed(), 1.0, self._step >= 20, False, {}


def numbered(ident: int = 0, **options: Any) -> GymWrapper:
    """A :class:`NumberedEnv`."""
    return GymWrapper(NumberedEnv(ident, **options))


def several(ident: int = 0, **options: Any) -> SerialEnv:
    """Three of them, as one batched environment."""
    return SerialEnv(NUM_SEVERAL, [partial(numbered, 10 * ident + i, **options) for i in range(NUM_SEVERAL)])


def images(ident: int = 0) -> GymWrapper:
    """A :class:`UniformImages`."""
    return GymWrapper(UniformImages())


class _Ragged(Transform):
    """Adds text, and as many numbers as steps were taken, to the ``"observation"`` of :class:`NumberedEnv`."""

    def __init__(self) -> None:
        super().__init__(["observation"], [("nest", "many"), ("nest", "text")])

    def _call(self, next_tensordict: TensorDictBase) -> TensorDictBase:
        step = int(next_tensordict["observation"][STEP])
        return next_tensordict.set("nest", TensorDict({"many": torch.arange(step + 1), "text": f"step {step}"}))

    def _reset(self, tensordict: TensorDictBase, tensordict_reset: TensorDictBase) -> TensorDictBase:
        return self._call(tensordict_reset)

    def transform_observation_spec(self, observation_spec: Composite) -> Composite:
        """Announce both."""
        spec = observation_spec.clone()
        spec["nest"] = Composite(many=Unbounded((-1,), dtype=torch.int64), text=NonTensor((), example_data=""))
        return spec


def ragged(ident: int = 0, **options: Any) -> TransformedEnv:
    """A :class:`NumberedEnv` with ragged entries and text below a key."""
    return TransformedEnv(numbered(ident, **options), _Ragged())


def factories(num_workers: int, make: Callable[..., Any] = numbered, **options: Any) -> list[Any]:
    """A factory for each worker, whose ident is the worker's index."""
    return [partial(make, worker, **options) for worker in range(num_workers)]


# Policies ---------------------------------------------------------------------------------------------


class _Constant(nn.Module):
    def __init__(self, value: float) -> None:
        super().__init__()
        self.value = nn.Parameter(torch.tensor([float(value)]))

    def forward(self, observation: torch.Tensor) -> torch.Tensor:
        return self.value.expand(*observation.shape[:-1], 1).clone()


class _Uniform(nn.Module):
    """Many weights; the least and the greatest of their elements are written beside the action."""

    def __init__(self, num_weights: int, size: int) -> None:
        super().__init__()
        self.weights = nn.ParameterList(torch.zeros(size) for _ in range(num_weights))

    def fill(self, value: float) -> None:
        """Set all elements."""
        with torch.no_grad():
            for weight in self.weights:
                weight.fill_(value)

    def forward(self, observation: torch.Tensor) -> tuple[torch.Tensor, ...]:
        bounds = torch.stack([torch.stack(torch.aminmax(weight)) for weight in self.weights])
        lead = (*observation.shape[:-1], 1)
        low, high = (bound.expand(lead).clone() for bound in (bounds.min(), bounds.max()))
        return torch.ones(lead), low, high


class _Drawing(nn.Module):
    """Location and scale of actions, from the number that the environment drew."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(1, 1)
        with torch.no_grad():
            self.linear.weight.fill_(2.0)
            self.linear.bias.fill_(-1.0)

    def forward(self, observation: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        loc = self.linear(observation[..., DRAW:].float())
        return loc, torch.ones_like(loc)


def constant(value: float = 1.0) -> TensorDictModule:
    """A policy with one weight, which is every action."""
    return TensorDictModule(_Constant(value), ["observation"], ["action"])


def counting() -> TensorDictModule:
    """A policy that writes ragged entries and text below a key, for :func:`ragged`."""
    return TensorDictModule(
        _count, [("nest", "many"), ("nest", "text")], ["action", ("said", "twice"), ("said", "text")]
    )


def _count(many: torch.Tensor, text: str) -> tuple[Any, ...]:
    return torch.ones(1), 2 * many, text.upper()


def uniform(num_weights: int = 8, size: int = 4096) -> TensorDictModule:
    """A policy with many weights, to be filled with one value; it writes ``"low"`` and ``"high"`` of them."""
    return TensorDictModule(_Uniform(num_weights, size), ["observation"], ["action", "low", "high"])


def sampling() -> ProbabilisticTensorDictSequential:
    """A policy that draws its actions."""
    return ProbabilisticTensorDictSequential(
        TensorDictModule(_Drawing(), ["observation"], ["loc", "scale"]),
        ProbabilisticTensorDictModule(
            ["loc", "scale"], ["action"], distribution_class=torch.distributions.Normal, return_log_prob=True
        ),
    )


# What holds of frames ---------------------------------------------------------------------------------


def flat(batches: Iterable[TensorDictBase]) -> TensorDictBase:
    """Batches as one, ``[frames]``; frames of each environment in order of time."""
    parts: list[TensorDictBase] = []
    for batch in batches:
        rows = batch.tensordicts if isinstance(batch, LazyStackedTensorDict) else [batch]
        parts += [row.reshape(-1) for row in rows]
    together: Any = torch.cat(parts, 0)  # type: ignore[arg-type]
    return cast(TensorDictBase, together)


def whole_trajectories(batches: Iterable[TensorDictBase], *, ended: bool = False) -> dict[int, TensorDictBase]:
    """The trajectories of frames of :class:`NumberedEnv`, by id.

    Args:
        batches: that were delivered.
        ended: whether each must have its end.

    Raises:
        AssertionError: a frame is there twice, one is missing in the middle, an id stands for two trajectories, or a
            trajectory has two ids; or one has no end.
    """
    frames = flat(batches)
    ids, seen, after = frames[IDS], frames["observation"], frames["next", "observation"]
    found: dict[int, TensorDictBase] = {}
    sources: dict[tuple[float, ...], int] = {}
    order = torch.argsort(ids, stable=True)
    numbers, counts = torch.unique_consecutive(ids[order], return_counts=True)
    for number, rows in zip(numbers.tolist(), order.split(counts.tolist()), strict=True):
        steps, source = seen[rows, STEP], tuple(seen[rows[0], : EPISODE + 1].tolist())
        expect(bool((seen[rows, : EPISODE + 1] == seen[rows[0], : EPISODE + 1]).all()), f"id {number} stands for two")
        expect(
            torch.equal(steps, torch.arange(len(rows), dtype=steps.dtype)),
            f"trajectory {number}: expected steps 0, 1, 2, ..., each once and in order, got {steps.tolist()}",
        )
        expect(
            torch.equal(after[rows[:-1]], seen[rows[1:]]) and torch.equal(after[rows, STEP], steps + 1),
            f"trajectory {number}: a frame does not begin as the one before has ended",
        )
        expect(torch.equal(frames["next", "reward"][rows, 0].double(), steps + 1), f"trajectory {number}: rewards")
        expect(source not in sources, f"one trajectory has the ids {number} and {sources.get(source)}")
        done = frames["next", "done"][rows, 0]
        expect(not bool(done[:-1].any()), f"trajectory {number} goes on behind its end")
        expect(not ended or bool(done[-1]), f"trajectory {number} has no end")
        sources[source], found[number] = number, frames[rows]
    return found


def no_episode_missing(trajectories: dict[int, TensorDictBase]) -> None:
    """Test that the episodes of each environment follow one another.

    Args:
        trajectories: see :func:`whole_trajectories`.

    Raises:
        AssertionError: one is missing between two others.
    """
    episodes: dict[tuple[float, ...], list[int]] = {}
    for trajectory in trajectories.values():
        ident, life, episode = trajectory["observation"][0, :STEP].tolist()
        episodes.setdefault((ident, life), []).append(int(episode))
    for (ident, _), found in episodes.items():
        found.sort()
        wanted = list(range(found[0], found[0] + len(found)))
        expect(found == wanted, f"environment {ident:g}: expected each episode once, got {found}")
