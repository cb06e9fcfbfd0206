"""The examples of rollwright learn the tasks, as they are asked."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from importlib import import_module
from pathlib import Path

import torch
from tensordict.nn import TensorDictModule, TensorDictModuleBase

from benchmarks.learning.protocol import answer
from benchmarks.learning.tasks import ASYNC, EPISODES, SYNC, TASKS

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT / "src"), str(ROOT / "examples")]
TICKS = os.sysconf("SC_CLK_TCK")


def processor_seconds() -> float:
    """Of this process and its descendants, those that have ended included."""
    rows = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rpartition(")")[2].split()
        except OSError:  # it has ended
            continue
        rows[int(path.parent.name)] = int(fields[1]), sum(map(int, fields[11:15]))
    family = {os.getpid()}
    while more := {pid for pid, (parent, _) in rows.items() if parent in family} - family:
        family |= more
    return sum(rows[pid][1] for pid in family) / TICKS


def greedy(example: str, parts: dict[str, torch.nn.Module]) -> TensorDictModuleBase:
    """The policy that tests: without noise."""
    choices: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
        "ppo_cartpole": lambda seen: parts["actor"](seen).argmax(-1),
        "ppo_continuous": lambda seen: parts["actor"](seen)[0],
        "dqn_replay": lambda seen: parts["values"](seen).argmax(-1),
        "sac_async": lambda seen: parts["actor"].best(seen),
    }
    if example == "recurrent_ppo":
        return parts["policy"]  # which picks the likeliest action where a collector explores no more
    return TensorDictModule(choices[example], in_keys=["observation"], out_keys=["action"])


def learn(name: str, side: str, seed: int) -> dict[str, float]:
    from rollwright import Collector, GymEnv, TransformedEnv
    from rollwright.envs import DoubleToFloat, ExplorationType

    task = TASKS[name]
    example = import_module(task.example)
    workers = {"workers": 2 if side in (SYNC, ASYNC) else 0, "sync": side != ASYNC}
    settings = example.Settings(seed=seed, goal=float("inf"), **task.settings, **workers)
    settings.env = task.env
    begun, processor = time.perf_counter(), processor_seconds()
    run = example.train(settings)
    seconds = {"wall_s": time.perf_counter() - begun, "processor_s": processor_seconds() - processor}
    env = TransformedEnv(GymEnv(task.env, categorical_action_encoding=True), DoubleToFloat())
    options = {"trajs_per_batch": EPISODES, "exploration_type": ExplorationType.DETERMINISTIC}
    with Collector(env, greedy(task.example, run.parts), **options) as tests:
        tests.set_seed(1_000 + seed)
        tests.next()
        value = tests.stats()["mean_return"]
    return {"return": value, "frames": run.frames, **seconds}


if __name__ == "__main__":
    torch.set_num_threads(1)
    answer(learn)
