"""When does it pay to step environments in groups in turn (``env_groups``), so that the policy acts while others step?

Eight environments in two processes, stepped in one group and in two; both sides take turns. The environments compute
for 1 ms a step, or sleep as one that waits for another machine; the policy computes on the CPU, or sleeps as one that
waits for an accelerator. It takes its time for each call, or for all rows of a step together; CartPole with a network
of 64 units is there as it is. At best a step in groups takes as long as the slowest of three: all steps in a process,
all calls of the policy, one group's step and call; with one group, it is the step and the call of all.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

import gymnasium
import torch
from tensordict.nn import TensorDictModule, TensorDictSequential
from torch import Tensor, nn

from benchmarks import report
from benchmarks.workers_envs import Slow
from rollwright.cli.measuring import alternate, rate, ratios, summary
from rollwright.collectors import Collector
from rollwright.envs import GymWrapper, ParallelEnv

NUM_ENVS, NUM_PROCESSES, STEP_MS = 8, 2, 1.0
GROUPS = (1, 2)


class Case(NamedTuple):
    """What is measured.

    Attributes:
        env: what an environment does for 1 ms: ``"computes"`` or ``"sleeps"``; ``"CartPole"``: nothing is added.
        policy: what the policy does, likewise; ``"64 units"``: nothing is added.
        policy_ms: how long.
        by_row: for all rows of a step together; if False, for each call.
    """

    env: str
    policy: str = "64 units"
    policy_ms: float = 0.0
    by_row: bool = False


KINDS = (("computes", "sleeps"), ("computes", "computes"), ("sleeps", "computes"))
CASES = [Case("CartPole")]
CASES += [Case(*kind, ms, by_row) for kind in KINDS for by_row in (False, True) for ms in (0.1, 1.0, 3.0)]


class Thinking(nn.Module):
    """Takes its time and passes on what it is given."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        self._case = case

    def forward(self, x: Tensor) -> Tensor:
        case = self._case
        seconds = case.policy_ms / 1e3 * (len(x) / NUM_ENVS if case.by_row else 1.0)
        if case.policy == "sleeps":
            time.sleep(seconds)
        elif case.policy == "computes":
            until = time.thread_time() + seconds
            while time.thread_time() < until:
                pass
        return x


def make_env(case: Case) -> GymWrapper:
    env = gymnasium.make("CartPole-v1")
    if case.env != "CartPole":
        env = Slow(env, STEP_MS, case.env == "computes")
    return GymWrapper(env, categorical_action_encoding=True)


def make_policy(case: Case) -> TensorDictSequential:
    torch.manual_seed(0)
    net = nn.Sequential(Thinking(case), nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 2))
    return TensorDictSequential(
        TensorDictModule(net, ["observation"], ["logits"]),
        TensorDictModule(lambda logits: logits.argmax(-1), ["logits"], ["action"]),
    )


def make_collector(case: Case, groups: int, steps: int) -> Collector:
    return Collector(
        lambda: ParallelEnv(NUM_ENVS, lambda: make_env(case), num_processes=NUM_PROCESSES),
        make_policy(case),
        frames_per_batch=NUM_ENVS * steps,
        env_groups=groups,
    )


def measure(case: Case, rounds: int, seconds: float, steps: int = 50) -> dict[int, list[float]]:
    """Frames per second of each number of groups, in order of rounds."""
    with ExitStack() as stack:
        sides = {}
        for groups in GROUPS:
            collector = make_collector(case, groups, steps)
            stack.callback(collector.shutdown)
            collector.next()
            sides[str(groups)] = lambda collector=collector: rate(lambda: collector.next().numel(), seconds=seconds)
        return {int(groups): rates for groups, rates in alternate(sides, rounds).items()}


def row_of(case: Case, rates: Mapping[int, list[float]]) -> list[str]:
    policy = case.policy
    if case.policy_ms:
        policy += f", {case.policy_ms:g} ms {'a step' if case.by_row else 'a call'}"
    ratio = ratios(rates[2], rates[1])
    frames = [f"{summary(rates[groups]).median:,.0f}" for groups in GROUPS]
    return [case.env, policy, *frames, f"{ratio.median:.2f}", f"({ratio.low:.2f} to {ratio.high:.2f})"]


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--rounds", type=int, default=7)
    add("--seconds", type=float, default=0.5, help="of each side in each round, at least")
    add("--quick", action="store_true", help="see that everything runs: 1 round of 10 ms")
    add("--out", type=Path, default=report.RESULTS, metavar="DIR")
    arguments = parser.parse_args(argv)
    if arguments.quick:
        arguments.rounds, arguments.seconds = 1, 0.01
    torch.set_num_threads(1)
    rows = []
    for case in CASES:
        rows.append(row_of(case, measure(case, arguments.rounds, arguments.seconds)))
        print(rows[-1], flush=True)
    report.write(
        arguments.out,
        "groups.md",
        "Groups of environments in turn",
        f"Frames per second of {NUM_ENVS} environments in {NUM_PROCESSES} processes, medians of {arguments.rounds} "
        f"rounds of {arguments.seconds:g} s in turns; the ratio is that of single rounds, with quartiles.",
        report.markdown_table(("environment", "policy", "1 group", "2 groups", "ratio", ""), rows),
    )


if __name__ == "__main__":
    main()
