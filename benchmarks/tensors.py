"""What does a step cost where all environments are one tensor, beside a loop by hand over the same methods?

An ``EnvBase`` whose observations are flat, one with two agents below a name, and a gymnasium ``VectorEnv`` of tensors
that resets by itself. The loop by hand calls ``_step`` and ``_reset`` with a mask at each step (``step`` of the vector
environment), reads nothing, and writes what our batches hold: observations before and after, actions, rewards, flags,
trajectory ids. On the CPU, one thread; rates are frames per second of processor time. With ``--device cuda`` all of it
is on a GPU, and rates are frames per second, with all work of the GPU waited for.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space
from tensordict import TensorDict
from tensordict.nn import TensorDictModule
from torch import Tensor, nn

from benchmarks import report
from rollwright.cli.measuring import alternate, ratios, summary
from rollwright.collectors import Collector
from rollwright.data import Composite, Unbounded
from rollwright.envs import EnvBase, GymWrapper

SIZES = {64: 64, 1024: 32, 8192: 8}  # environments, and steps of a batch
KINDS = ("flat", "agents", "vector")


class Case(NamedTuple):
    """A kind of environment, and how many there are."""

    kind: str
    num: int
    device: str = "cpu"


class Arms(EnvBase):
    """Arms that are pushed about; each ends after a number of steps of its own."""

    resets_by_mask = True

    def __init__(self, num: int, agents: bool, device: str = "cpu") -> None:
        super().__init__(batch_size=[num], device=device)
        self.num, self.agents = num, agents
        seen, act = Unbounded((num, 8), device=device), Unbounded((num, 2), device=device)
        if agents:
            self.observation_spec = Composite(agents=Composite(observation=seen, shape=[num]), shape=[num])
            self.action_spec = Composite(agents=Composite(action=act, shape=[num]), shape=[num])
        else:
            self.observation_spec = Composite(observation=seen, shape=[num])
            self.action_spec = act
        self.reward_spec = Unbounded((num, 1), device=device)
        self.add_truncated_keys()
        self.state = torch.zeros(num, 8, device=device)
        self.count = torch.zeros(num, 1, dtype=torch.int64, device=device)
        self.limit = torch.randint(20, 200, (num, 1), generator=torch.Generator().manual_seed(0)).to(device)

    def _seen(self, **more: Tensor) -> TensorDict:
        seen: dict[str, Any] = {"observation": self.state}
        if self.agents:
            seen = {"agents": TensorDict(seen, [self.num], device=self.device)}
        return TensorDict({**seen, **more}, [self.num], device=self.device)

    def _reset(self, tensordict: Any = None, **kwargs: Any) -> TensorDict:
        marks = None if tensordict is None else tensordict.get("_reset", None)
        if marks is None:
            marks = torch.ones(self.num, 1, dtype=torch.bool, device=self.device)
        self.state = torch.where(marks, torch.rand_like(self.state), self.state)
        self.count = torch.where(marks, 0, self.count)
        return self._seen()

    def _step(self, tensordict: Any) -> TensorDict:
        action = tensordict["agents", "action"] if self.agents else tensordict["action"]
        self.state = state = self.state * 0.99 + torch.cat([action] * 4, -1) * 0.1
        self.count = self.count + 1
        terminated, truncated = state.abs().amax(-1, keepdim=True) > 5, self.count >= self.limit
        flags = {"terminated": terminated, "truncated": truncated, "done": terminated | truncated}
        return self._seen(reward=-(state * state).sum(-1, keepdim=True), **flags)

    def _set_seed(self, seed: int | None) -> None:
        torch.manual_seed(seed or 0)


class ArmsVector(VectorEnv[Any, Any, Any]):
    """The same as gymnasium has it; it resets what has ended by itself."""

    metadata: ClassVar[dict[str, Any]] = {"autoreset_mode": AutoresetMode.SAME_STEP}

    def __init__(self, num: int, device: str = "cpu") -> None:
        self.num_envs, self.arms = num, Arms(num, False, device)
        self.single_observation_space = spaces.Box(-np.inf, np.inf, (8,), np.float32)
        self.single_action_space = spaces.Box(-1, 1, (2,), np.float32)
        self.observation_space = batch_space(self.single_observation_space, num)
        self.action_space = batch_space(self.single_action_space, num)

    def reset(self, *, seed: Any = None, options: Any = None) -> tuple[Tensor, dict[str, Any]]:
        return self.arms._reset()["observation"], {}

    def step(self, actions: Any) -> Any:
        out = self.arms._step({"action": torch.as_tensor(actions)})
        ended = out["done"]
        fresh = self.arms._reset({"_reset": ended})["observation"]
        flags = out["terminated"].squeeze(-1), out["truncated"].squeeze(-1)
        return fresh, out["reward"].squeeze(-1), *flags, {"final_obs": out["observation"]}


def make_net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 2), nn.Tanh())


class ByHand:
    """A loop by hand over the methods of an environment.

    Args:
        case: which.
        steps: of a batch.
    """

    def __init__(self, case: Case, steps: int) -> None:
        self.case, self.steps, self.net = case, steps, make_net().to(case.device)
        num, device = case.num, case.device
        self.env: Any = ArmsVector(num, device) if case.kind == "vector" else Arms(num, case.kind == "agents", device)
        first: Any = self.env.reset()[0] if case.kind == "vector" else self.env._reset()
        self.seen = self._observed(first)
        self.ids, self.next_id = torch.arange(num, device=device), torch.tensor(num, device=device)
        self.batch: dict[str, Tensor] = {}

    def _observed(self, out: Any) -> Tensor:
        found: Tensor = out if isinstance(out, Tensor) else out["agents"] if self.case.kind == "agents" else out
        return found if isinstance(found, Tensor) else found["observation"]

    def _step(self, action: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        """What came of the step, and what the next one begins with."""
        if self.case.kind == "vector":
            fresh, reward, terminated, truncated, info = self.env.step(action)
            out = {"next": info["final_obs"], "reward": reward.unsqueeze(-1)}
            out["terminated"], out["truncated"] = terminated.unsqueeze(-1), truncated.unsqueeze(-1)
            out["done"] = out["terminated"] | out["truncated"]
            return out, fresh
        acts: Any = {"action": action}
        if self.case.kind == "agents":
            acts = {("agents", "action"): action}
        stepped = self.env._step(acts)
        out = {"next": self._observed(stepped)}
        for key in ("reward", "terminated", "truncated", "done"):
            out[key] = stepped[key]
        fresh = self._observed(self.env._reset({"_reset": out["done"]}))
        return out, torch.where(out["done"], fresh, out["next"])

    @torch.no_grad()
    def collect(self) -> int:
        """A batch; returns its number of frames."""
        num, steps = self.case.num, self.steps
        on: Any = {"device": self.case.device}
        batch = {"seen": torch.empty(num, steps, 8, **on), "action": torch.empty(num, steps, 2, **on)}
        batch.update({"next": torch.empty(num, steps, 8, **on), "reward": torch.empty(num, steps, 1, **on)})
        for flag in ("terminated", "truncated", "done"):
            batch[flag] = torch.empty(num, steps, 1, dtype=torch.bool, **on)
            batch["root " + flag] = torch.zeros(num, steps, 1, dtype=torch.bool, **on)
        batch["ids"] = torch.empty(num, steps, dtype=torch.int64, **on)
        for t in range(steps):
            action = self.net(self.seen)
            batch["seen"][:, t], batch["action"][:, t], batch["ids"][:, t] = self.seen, action, self.ids
            out, self.seen = self._step(action)
            for key, value in out.items():
                batch[key][:, t] = value
            ended = out["done"].squeeze(-1)
            count = ended.cumsum(0)
            self.ids = torch.where(ended, self.next_id + count - 1, self.ids)
            self.next_id = self.next_id + count[-1]
        self.batch = batch
        return num * steps


class Ours:
    """A collector over the same environment."""

    def __init__(self, case: Case, steps: int) -> None:
        self._collector = self._make(case, case.num * steps)
        self._batches: Iterator[Any] = iter(self._collector)
        self.batch: Any = None

    def _make(self, case: Case, frames: int) -> Collector:
        key, act = "observation", "action"
        if case.kind == "vector":
            env: Any = GymWrapper(ArmsVector(case.num, case.device), device=case.device)
        else:
            env = Arms(case.num, case.kind == "agents", case.device)
        keys: Any = (("agents", key), ("agents", act)) if case.kind == "agents" else (key, act)
        policy = TensorDictModule(make_net().to(case.device), [keys[0]], [keys[1]])
        return Collector(env, policy, frames_per_batch=frames, total_frames=-1)

    def collect(self) -> int:
        """A batch; returns its number of frames."""
        self.batch = next(self._batches)
        return int(self.batch.numel())

    @property
    def how(self) -> str:
        """How steps are taken."""
        return str(self._collector.stats()["paths"]["env"])

    def close(self) -> None:
        """End."""
        self._collector.shutdown()


def seconds_on(device: str) -> float:
    """Of processor time on the CPU; on a GPU of time, all of its work waited for."""
    if device == "cpu":
        return time.process_time()
    torch.cuda.synchronize()
    return time.perf_counter()


def rate_of(collect: Callable[[], int], seconds: float, device: str) -> float:
    """Frames per second, over at least so many seconds."""
    clock = partial(seconds_on, device)
    taken, begun = 0, clock()
    while not taken or clock() - begun < seconds:
        taken += collect()
    return taken / (clock() - begun)


def measure(case: Case, rounds: int, seconds: float) -> tuple[dict[str, list[float]], str]:
    """Rates of both sides, in order of rounds, and how ours takes its steps."""
    steps = SIZES[case.num]
    hand, ours = ByHand(case, steps), Ours(case, steps)
    for _ in range(2):  # the first shows what a vector environment returns
        hand.collect()
        ours.collect()
    try:
        sides = {
            "by hand": lambda: rate_of(hand.collect, seconds, case.device),
            "ours": lambda: rate_of(ours.collect, seconds, case.device),
        }
        return alternate(sides, rounds), ours.how
    finally:
        ours.close()


def row_of(case: Case, rates: dict[str, list[float]], how: str) -> list[str]:
    ratio = ratios(rates["ours"], rates["by hand"])
    frames = [f"{summary(rates[side]).median:,.0f}" for side in ("by hand", "ours")]
    return [case.kind, str(case.num), *frames, f"{ratio.median:.2f}", f"({ratio.low:.2f} to {ratio.high:.2f})", how]


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--rounds", type=int, default=15)
    add("--seconds", type=float, default=0.3, help="of each side in each round, at least")
    add("--quick", action="store_true", help="see that everything runs: 1 round of 10 ms")
    add("--device", default="cpu", help="of environments, policy and batches")
    add("--out", type=Path, default=report.RESULTS, metavar="DIR")
    arguments = parser.parse_args(argv)
    if arguments.quick:
        arguments.rounds, arguments.seconds = 1, 0.01
    torch.set_num_threads(1)
    of, name = ("processor time", "tensors.md") if arguments.device == "cpu" else ("time", "tensors_gpu.md")
    rows = []
    for case in [Case(kind, num, arguments.device) for kind in KINDS for num in SIZES]:
        rows.append(row_of(case, *measure(case, arguments.rounds, arguments.seconds)))
        print(rows[-1], flush=True)
    report.write(
        arguments.out,
        name,
        "Environments that are one tensor",
        f"Frames per second of {of}, medians of {arguments.rounds} rounds of {arguments.seconds:g} s in "
        f"turns, on {arguments.device}, one thread; the ratio is that of single rounds, with quartiles.",
        report.markdown_table(("environment", "number", "by hand", "ours", "ratio", "", "steps"), rows),
    )


if __name__ == "__main__":
    main()
