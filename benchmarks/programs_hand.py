"""The programs as a loop by hand: gymnasium, NumPy, torch, and a TensorDict at the end of each batch."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import gymnasium
import numpy as np
import torch
from numpy.typing import NDArray
from tensordict import TensorDict
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.programs_cases import Program, make_network
from benchmarks.programs_point import PointGym

SEED = 0
_HALF_LOG_TAU = 0.5 * math.log(2 * math.pi)
_SMALLEST_SCALE = 1e-4
_BIAS = math.log(math.expm1(1 - _SMALLEST_SCALE))
Arrays = dict[str, NDArray[Any]]


def make_gym(program: Program) -> gymnasium.Env[Any, Any]:
    """The environment, with gymnasium's wrappers for what belongs to it."""
    if program.stack == "dictionary":
        import minigrid  # noqa: F401 - registers its environments

        env = gymnasium.make(program.env_id, disable_env_checker=True)
        return gymnasium.wrappers.FilterObservation(env, ["image", "direction"])
    if program.stack == "atari":
        import ale_py

        gymnasium.register_envs(ale_py)
        return AtariStart(gymnasium.make(program.env_id, disable_env_checker=True))
    return PointGym() if program.stack == "environment" else gymnasium.make(program.env_id)


class AtariStart(gymnasium.Wrapper[Any, Any, Any, Any]):
    """Up to 30 steps without an action after a reset, and the loss of a life in ``info["end-of-life"]``."""

    lives = 0

    def reset(self, **options: Any) -> tuple[Any, dict[str, Any]]:
        observation, info = self.env.reset(**options)
        for _ in range(int(self.np_random.integers(1, 31))):
            observation, _, terminated, truncated, info = self.env.step(0)
            if terminated or truncated:
                observation, info = self.env.reset()
        self.lives = info["lives"]
        return observation, info

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        observation, reward, terminated, truncated, info = self.env.step(action)
        info["end-of-life"] = info["lives"] < self.lives
        self.lives = info["lives"]
        return observation, reward, terminated, truncated, info


# What the transforms do: from raw observations [envs, ...] to the entries that are stored ------------------


class Plain:
    """Observations as they are, with the dtype that the policy reads; also the entries of a dictionary."""

    def __init__(self, program: Program) -> None:
        self.dictionary, self.clips = program.stack == "dictionary", program.stack == "own"

    def __call__(self, raw: list[Any], ended: NDArray[np.bool_] | None) -> Arrays:
        if self.dictionary:
            return {name: np.array([each[name] for each in raw]) for name in ("image", "direction")}
        seen = np.array(raw, np.float32)
        return {"observation": np.clip(seen, -5, 5) if self.clips else seen}


class Normalized:
    """Running statistics of all observations seen, as `VecNorm` keeps them."""

    def __init__(self, program: Program) -> None:
        self.sum, self.square, self.count = 0.0, 0.0, 0.0

    def __call__(self, raw: list[Any], ended: NDArray[np.bool_] | None) -> Arrays:
        x, decay = np.array(raw), 0.99999
        self.sum = self.sum * decay + x.sum(0)
        self.square = self.square * decay + (x * x).sum(0)
        self.count = self.count * decay + len(x)
        loc = self.sum / self.count
        scale = np.sqrt(np.maximum(self.square / self.count - loc * loc, 1e-2))
        return {"observation": ((x - loc) / scale).astype(np.float32)}


class Frames:
    """Grey pictures of 84 x 84 in [0, 1], the last four of them."""

    def __init__(self, program: Program) -> None:
        self.stack = np.zeros((program.num_envs, 4, 84, 84), np.float32)
        self.weights = torch.tensor([0.2989, 0.587, 0.114]) / 255

    def __call__(self, raw: list[Any], ended: NDArray[np.bool_] | None) -> Arrays:
        pictures = torch.from_numpy(np.array(raw))
        grey = (pictures.float() @ self.weights).unsqueeze(1)
        small = functional.interpolate(grey, (84, 84), mode="bilinear", antialias=True).numpy()
        stack = np.concatenate([self.stack[:, 1:], small], 1)
        first = slice(None) if ended is None else ended
        if ended is None or ended.any():
            stack[first] = small[first]
        self.stack = stack
        return {"pixels": stack}


SEEN: dict[str, Callable[[Program], Any]] = {"mujoco": Normalized, "atari": Frames}


# What acts -----------------------------------------------------------------------------------------------


class Actor:
    """Acts on stored entries; remembers the state of a recurrent policy."""

    def __init__(self, program: Program) -> None:
        self.program, self.net = program, make_network(program)
        self.gru = nn.GRUCell(program.sizes[0], 64) if program.network == "gru" else None
        self.state = torch.zeros(program.num_envs, 64)
        self.draw = {"categorical": _categorical, "independent": _normal, "tanh_normal": _tanh_normal}[
            program.distribution
        ]

    def __call__(self, seen: Arrays, first: NDArray[np.bool_]) -> dict[str, Tensor]:
        inputs = [torch.from_numpy(seen[name]) for name in self.program.in_keys]
        if self.gru is None:
            return self.draw(self.net(*inputs))
        if first.any():
            self.state[torch.from_numpy(first)] = 0.0
        before = self.state
        self.state = self.gru(inputs[0], before)
        return {"recurrent_state": before, "features": self.state, **self.draw(self.net(self.state))}


def _categorical(logits: Tensor) -> dict[str, Tensor]:
    log_probs = torch.log_softmax(logits, -1)
    action = torch.multinomial(log_probs.exp(), 1)
    return {
        "logits": logits,
        "action": action.squeeze(-1),
        "action_log_prob": log_probs.gather(-1, action).squeeze(-1),
    }


def _normal(output: Tensor) -> dict[str, Tensor]:
    loc, raw = output.chunk(2, -1)
    scale = functional.softplus(raw + _BIAS).clamp_min(_SMALLEST_SCALE)
    action = torch.normal(loc, scale)
    log_prob = (-0.5 * ((action - loc) / scale) ** 2 - scale.log() - _HALF_LOG_TAU).sum(-1)
    return {"loc": loc, "scale": scale, "action": action, "action_log_prob": log_prob}


def _tanh_normal(output: Tensor) -> dict[str, Tensor]:
    drawn = _normal(output)
    raw = drawn["action"]
    correction = 2 * (math.log(2) - raw - functional.softplus(-2 * raw))
    return {**drawn, "action": raw.tanh(), "action_log_prob": drawn["action_log_prob"] - correction.sum(-1)}


# The loop ------------------------------------------------------------------------------------------------


class Loop:
    """Collects batches with the entries that a collector's have.

    Args:
        program: what is collected.
    """

    def __init__(self, program: Program) -> None:
        self.program = program
        self.envs = [make_gym(program) for _ in range(program.num_envs)]
        self.act = Actor(program)
        self.see = SEEN.get(program.stack, Plain)(program)
        raw = [env.reset(seed=SEED + i)[0] for i, env in enumerate(self.envs)]
        self.seen = self.see(raw, None)
        self.first = np.ones(program.num_envs, np.bool_)
        self.ids = np.arange(program.num_envs)
        self.next_id = program.num_envs
        self.returns = np.zeros(program.num_envs, np.float32)
        self.counts = np.zeros(program.num_envs, np.int64)
        self.sums = program.stack in ("mujoco", "atari")
        self.discrete = program.distribution == "categorical"

    @torch.no_grad()
    def collect(self) -> TensorDict:
        """A batch ``[steps]``, or ``[envs, steps]`` of several."""
        rows = [self._step() for _ in range(self.program.steps)]
        stacked = {name: _stack([row[name] for row in rows]) for name in rows[0]}
        if self.program.num_envs == 1:
            stacked = {name: value.squeeze(1) for name, value in stacked.items()}
            size = [self.program.steps]
        else:
            stacked = {name: value.transpose(0, 1) for name, value in stacked.items()}
            size = [self.program.num_envs, self.program.steps]
        batch = TensorDict({}, size)
        for name, value in stacked.items():
            batch[tuple(name.split("/"))] = value
        return batch

    def close(self) -> None:
        for env in self.envs:
            env.close()

    def _step(self) -> dict[str, Any]:
        row: dict[str, Any] = {**self.seen, **self.act(self.seen, self.first)}
        row |= {"collector/traj_ids": self.ids.copy(), "is_init": self.first}
        actions = row["action"].numpy()
        raw, rewards, terminated, truncated, lost = [], [], [], [], []
        for env, action in zip(self.envs, actions, strict=True):
            observation, reward, ended, cut, info = env.step(int(action) if self.discrete else action)
            raw.append(observation)
            rewards.append(reward)
            terminated.append(ended)
            truncated.append(cut)
            lost.append(info.get("end-of-life", False))
        reward = np.array(rewards, np.float32)
        over, cut_off = np.array(terminated), np.array(truncated)
        done = over | cut_off
        row["next/terminated"], row["next/truncated"], row["next/done"] = over, cut_off, done
        if self.program.stack == "atari":
            row["next/end-of-life"] = np.array(lost)
        following = self.see(raw, np.zeros_like(done))
        row |= {f"next/{name}": value for name, value in following.items()}
        self._count(row, reward, done)
        row["next/reward"] = np.sign(reward) if self.program.stack == "atari" else reward
        self.seen, self.first = (self._reset(raw, following, done) if done.any() else following), done
        return row

    def _count(self, row: dict[str, Any], reward: NDArray[np.float32], done: NDArray[np.bool_]) -> None:
        if not self.sums:
            return
        row["episode_reward"], row["step_count"] = self.returns, self.counts
        self.returns, self.counts = self.returns + reward, self.counts + 1
        row["next/episode_reward"], row["next/step_count"] = self.returns, self.counts
        if done.any():
            self.returns, self.counts = np.where(done, 0, self.returns), np.where(done, 0, self.counts)

    def _reset(self, raw: list[Any], following: Arrays, done: NDArray[np.bool_]) -> Arrays:
        for i in np.flatnonzero(done):
            raw[i] = self.envs[i].reset()[0]
            self.ids[i] = self.next_id
            self.next_id += 1
        if isinstance(self.see, Frames):  # the others keep the frames that they have
            kept = self.see.stack
            fresh = self.see(raw, done)
            kept = np.where(done[:, None, None, None], fresh["pixels"], kept)
            self.see.stack = kept
            return {"pixels": kept}
        fresh = self.see(raw, done)
        shape = {name: done.reshape(-1, *[1] * (value.ndim - 1)) for name, value in fresh.items()}
        return {name: np.where(shape[name], value, following[name]) for name, value in fresh.items()}


def _stack(values: list[Any]) -> Tensor:
    if isinstance(values[0], Tensor):
        return torch.stack(values)
    return torch.from_numpy(np.stack(values))


class Ring:
    """A buffer by hand: arrays that are overwritten in turn, drawn from at random."""

    def __init__(self, size: int) -> None:
        self.size, self.place, self.count = size, 0, 0
        self.data: TensorDict | None = None

    def extend(self, batch: TensorDict) -> None:
        """Write a flat batch."""
        if self.data is None:
            self.data = batch[:1].expand(self.size).clone()
        rows = (torch.arange(len(batch)) + self.place) % self.size
        self.data[rows] = batch
        self.place = (self.place + len(batch)) % self.size
        self.count = min(self.count + len(batch), self.size)

    def sample(self, number: int) -> TensorDict:
        """Rows drawn with replacement."""
        assert self.data is not None
        return self.data[torch.randint(self.count, (number,))]


def make_hand(program: Program) -> tuple[Callable[[], int], Callable[[], None]]:
    """A function that collects a batch and returns its number of frames, and one that closes the environments."""
    loop, ring = Loop(program), Ring(100_000)

    def collect() -> int:
        batch = loop.collect()
        if program.samples:
            ring.extend(batch.reshape(-1))
            for _ in range(program.samples):
                ring.sample(256)
        return batch.numel()

    return collect, loop.close


def make_alone(program: Program) -> tuple[Callable[[], int], Callable[[], None]]:
    """Like :func:`make_hand`, but the environments are only stepped, with actions drawn before: no loop is faster."""
    envs = [make_gym(program) for _ in range(program.num_envs)]
    for i, env in enumerate(envs):
        env.reset(seed=SEED + i)
        env.action_space.seed(SEED + i)
    actions = [envs[0].action_space.sample() for _ in range(64)]

    def collect() -> int:
        for step in range(program.steps):
            for env in envs:
                _, _, terminated, truncated, _ = env.step(actions[step % 64])
                if terminated or truncated:
                    env.reset()
        return program.steps * len(envs)

    def close() -> None:
        for env in envs:
            env.close()

    return collect, close
