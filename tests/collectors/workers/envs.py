"""Environments and policies whose frames say where they come from; all can be sent to a worker by reference.

An observation of :class:`Tally` is ``(ident, instance, episode, step, draw)``: who made it, which object, how often
that was reset before, how many steps it took since, and a number drawn from its generator. So a frame that is lost,
delivered twice, torn or spliced into another trajectory is seen.
"""

from __future__ import annotations

import contextlib
import itertools
import multiprocessing
import os
import signal
import threading
import time
from functools import partial
from typing import Any, NamedTuple

import gymnasium
import numpy as np
import torch
from gymnasium import spaces
from tensordict.nn import ProbabilisticTensorDictModule, ProbabilisticTensorDictSequential, TensorDictModule
from torch import nn

from rollwright.envs import GymWrapper, SerialEnv

IDENT, INSTANCE, EPISODE, STEP, DRAW = range(5)
IDS, VERSION, DONE = ("collector", "traj_ids"), "policy_version", ("next", "done")
_instances = itertools.count(1)


# Trouble -----------------------------------------------------------------------------------------------------------


class Boom(ValueError):
    """An error of the user's own, whose constructor takes more than a message."""

    def __init__(self, number: int, *, why: str = "because") -> None:
        super().__init__(f"boom {number} {why}")
        self.number = number


class Trouble(NamedTuple):
    """What goes wrong, at which call, and whether it happens once for all processes (``once``: path of a file)."""

    kind: str = "none"
    at: int = 0
    once: str | None = None

    def strike(self, call: int) -> None:
        """Do it, if it is time."""
        if call < self.at or self.kind == "none" or (self.once is not None and not _first(self.once)):
            return
        if self.kind == "raise":
            raise ValueError(f"boom at call {call}")
        if self.kind == "raise own":
            raise Boom(call)
        if self.kind == "sleep":
            time.sleep(1000)
        if self.kind == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if self.kind == "exit":
            os._exit(3)
        if self.kind == "sys.exit":
            raise SystemExit(4)
        if self.kind == "stop":
            os.kill(os.getpid(), signal.SIGSTOP)


def _first(path: str) -> bool:
    with contextlib.suppress(FileExistsError):
        os.close(os.open(path, os.O_CREAT | os.O_EXCL))
        return True
    return False


NO_TROUBLE = Trouble()


# Environments ------------------------------------------------------------------------------------------------------


class Tally(gymnasium.Env):
    """Counts; episodes have 3 to 13 steps, and end by turns in termination and in truncation.

    Args:
        ident: who it is.
        step_s: seconds that a step sleeps.
        length: of all episodes; None: as above, drawn from the generator.
        trouble: of a step; ``on_reset``, ``on_close``: of these.
    """

    action_space = spaces.Box(-np.inf, np.inf, (1,), np.float32)
    observation_space = spaces.Box(-np.inf, np.inf, (5,), np.float64)

    def __init__(
        self,
        ident: int = 0,
        *,
        step_s: float = 0.0,
        length: int | None = None,
        trouble: Trouble = NO_TROUBLE,
        on_reset: Trouble = NO_TROUBLE,
        on_close: Trouble = NO_TROUBLE,
    ) -> None:
        self.ident, self.step_s, self.length = ident, step_s, length
        self.trouble, self.on_reset, self.on_close = trouble, on_reset, on_close
        self.instance = os.getpid() * 1000 + next(_instances)
        self.episode, self.now, self.calls, self.limit = -1, 0, 0, 1

    def _seen(self) -> np.ndarray:
        return np.array([self.ident, self.instance, self.episode, self.now, self.np_random.random()])

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[np.ndarray, dict[str, Any]]:
        super().reset(seed=seed)
        self.episode += 1
        self.now = 0
        self.limit = int(self.np_random.integers(3, 14)) if self.length is None else self.length
        self.on_reset.strike(self.episode)
        return self._seen(), {}

    def step(self, action: Any) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        self.calls += 1
        if self.step_s:
            time.sleep(self.step_s)
        self.trouble.strike(self.calls)
        self.now += 1
        ended, odd = self.now >= self.limit, self.episode % 2 == 1
        return self._seen(), float(self.now), ended and not odd, ended and odd, {}

    def close(self) -> None:
        self.on_close.strike(0)


class Pixels(gymnasium.Env):
    """Images ``uint8 [size, size, 3]`` whose every pixel is ``(17 * episode + step) % 251``; episodes of 20 steps."""

    action_space = spaces.Discrete(2)

    def __init__(self, size: int = 64) -> None:
        self.observation_space = spaces.Box(0, 250, (size, size, 3), np.uint8)
        self.episode, self.now = -1, 0

    def _seen(self) -> np.ndarray:
        return np.full(self.observation_space.shape, (17 * self.episode + self.now) % 251, np.uint8)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[np.ndarray, dict[str, Any]]:
        super().reset(seed=seed)
        self.episode, self.now = self.episode + 1, 0
        return self._seen(), {}

    def step(self, action: Any) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        self.now += 1
        return self._seen(), 1.0, self.now >= 20, False, {}


def tally(ident: int = 0, **options: Any) -> GymWrapper:
    """One :class:`Tally`."""
    return GymWrapper(Tally(ident, **options))


def tallies(ident: int = 0, num_envs: int = 3, **options: Any) -> SerialEnv:
    """Several, with idents ``10 * ident``, ``10 * ident + 1``, …; troubles are those of the last."""
    troubles = {name: options.pop(name) for name in ("trouble", "on_reset", "on_close") if name in options}
    makers = [partial(tally, 10 * ident + i, **options) for i in range(num_envs)]
    makers[-1] = partial(makers[-1], **troubles)
    return SerialEnv(num_envs, makers)


def pixels(size: int = 64) -> GymWrapper:
    """One :class:`Pixels`."""
    return GymWrapper(Pixels(size))


def makers(num_workers: int = 2, *, make: Any = tally, **options: Any) -> list[Any]:
    """A factory for each worker, whose ident is the worker's index."""
    return [partial(make, worker, **options) for worker in range(num_workers)]


def one_bad(
    num_workers: int = 2, *, bad: int = 1, make: Any = tally, troubles: Any = None, **options: Any
) -> list[Any]:
    """:func:`makers`, where worker ``bad`` meets ``troubles``, a dictionary of arguments."""
    factories = makers(num_workers, make=make, **options)
    factories[bad] = partial(factories[bad], **troubles)
    return factories


def broken(ident: int = 0, **options: Any) -> GymWrapper:
    """A factory that raises."""
    raise LookupError(f"no environment for {ident}")


# Policies ----------------------------------------------------------------------------------------------------------


class Gain(nn.Module):
    """Every action is the gain."""

    def __init__(self, value: float = 1.0) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.tensor([float(value)]))

    def forward(self, observation: torch.Tensor) -> torch.Tensor:
        """Actions ``[*batch, 1]``."""
        return self.gain.expand(*observation.shape[:-1], 1).clone()


class Many(nn.Module):
    """Many weights, always published equal; their least and their greatest element are written beside the action.

    Args:
        value: of all.
        num_weights: how many there are.
        size: of each.
    """

    def __init__(self, value: float = 0.0, num_weights: int = 2, size: int = 4096) -> None:
        super().__init__()
        self.weights = nn.ParameterList(torch.full((size,), float(value)) for _ in range(num_weights))

    def fill(self, value: float) -> None:
        """Set all elements."""
        with torch.no_grad():
            for weight in self.weights:
                weight.fill_(value)

    def forward(self, observation: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """The action (1), the least and the greatest element, each ``[*batch, 1]``."""
        bounds = torch.stack([torch.stack(torch.aminmax(weight)) for weight in self.weights])
        low, high = bounds[:, 0].min(), bounds[:, 1].max()
        lead = (*observation.shape[:-1], 1)
        return torch.ones(lead), low.expand(lead).clone(), high.expand(lead).clone()


class Running(nn.Module):
    """A gain in a parameter, a mean in a buffer, and a count that is extra state."""

    def __init__(self, value: float = 0.0) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.tensor([float(value)]))
        self.register_buffer("mean", torch.tensor([float(value)]))
        self.count = float(value)

    def get_extra_state(self) -> dict[str, float]:
        return {"count": self.count}

    def set_extra_state(self, state: dict[str, float]) -> None:
        self.count = state["count"]

    def forward(self, observation: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """The action, the mean and the count, each ``[*batch, 1]``."""
        lead = (*observation.shape[:-1], 1)
        return self.gain.expand(lead).clone(), self.mean.expand(lead).clone(), torch.full(lead, self.count)


class ActorCritic(nn.Module):
    """Two models in one policy."""

    def __init__(self, value: float = 0.0) -> None:
        super().__init__()
        self.actor, self.critic = Gain(value), Gain(value)

    def forward(self, observation: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Action and value."""
        return self.actor(observation), self.critic(observation)


class Failing(Gain):
    """Raises (or else) at its call number ``trouble.at``."""

    def __init__(self, trouble: Trouble, value: float = 1.0) -> None:
        super().__init__(value)
        self.trouble, self.calls = trouble, 0

    def forward(self, observation: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        self.trouble.strike(self.calls)
        return super().forward(observation)


def gain(value: float = 1.0) -> TensorDictModule:
    """:class:`Gain` as a policy."""
    return TensorDictModule(Gain(value), ["observation"], ["action"])


def many(**options: Any) -> TensorDictModule:
    """:class:`Many` as a policy."""
    return TensorDictModule(Many(**options), ["observation"], ["action", "low", "high"])


def running(value: float = 0.0) -> TensorDictModule:
    """:class:`Running` as a policy."""
    return TensorDictModule(Running(value), ["observation"], ["action", "mean", "count"])


def failing(trouble: Trouble) -> TensorDictModule:
    """:class:`Failing` as a policy."""
    return TensorDictModule(Failing(trouble), ["observation"], ["action"])


class Perishing(Gain):
    """Meets its fate in a worker, when its state is read, or it is asked to; or else when its state is loaded."""

    def __init__(self, trouble: Trouble, value: float = 1.0, *, loaded: bool = False) -> None:
        super().__init__(value)
        self.trouble, self.loaded = trouble, loaded

    def _meet(self, loaded: bool) -> str:
        if loaded is self.loaded and multiprocessing.parent_process() is not None:
            self.trouble.strike(0)
        return "alive"

    @property
    def fate(self) -> str:
        """That it lives."""
        return self._meet(loaded=False)

    def perish(self) -> str:
        """Same as :attr:`fate`."""
        return self.fate

    def get_extra_state(self) -> str:
        return self.fate

    def set_extra_state(self, state: str) -> None:
        assert state == self._meet(loaded=True)


def perishing(trouble: Trouble, value: float = 1.0, **options: Any) -> TensorDictModule:
    """:class:`Perishing` as a policy."""
    return TensorDictModule(Perishing(trouble, value, **options), ["observation"], ["action"])


class Features(nn.Module):
    """Location and scale of actions, from the number that the environment drew."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(1, 1)
        with torch.no_grad():
            self.linear.weight.fill_(2.0)
            self.linear.bias.fill_(-1.0)

    def forward(self, observation: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """``[*batch, 1]`` each."""
        loc = self.linear(observation[..., DRAW:].float())
        return loc, torch.ones_like(loc)


def sampling() -> ProbabilisticTensorDictSequential:
    """A policy that draws its actions."""
    return ProbabilisticTensorDictSequential(
        TensorDictModule(Features(), ["observation"], ["loc", "scale"]),
        ProbabilisticTensorDictModule(
            ["loc", "scale"], ["action"], distribution_class=torch.distributions.Normal, return_log_prob=True
        ),
    )


def with_thread() -> None:
    """An ``init_fn`` that leaves a thread of its own behind."""
    threading.Thread(target=time.sleep, args=(1000,), daemon=True).start()
