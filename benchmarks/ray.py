"""What does Ray cost, beside workers of this machine and TorchRL's RayCollector?

Two actors with one worker each, synchronous, on a local cluster: frames per second, the learner's processor, and
batches of 64 MB beside ``ray.get`` of the same data. All sides take turns.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import torch
from gymnasium import spaces

from benchmarks import report
from benchmarks.peers.protocol import ROOT, Peer, PeerError
from benchmarks.ray_cases import CASES, case_name
from benchmarks.workers_cases import Case
from benchmarks.workers_sides import make_env, make_policy
from rollwright.cli.measuring import alternate, rate, ratios, summary
from rollwright.collectors import Collector
from rollwright.envs import GymWrapper
from rollwright.errors import require

LOCAL, RAY, TORCHRL = "rollwright, processes", "rollwright, Ray", "TorchRL 0.14.1 RayCollector"
SIDES = (LOCAL, RAY, TORCHRL)
WORKERS = 2
LARGE_BYTES = 16 << 20  # of an observation: a batch has two of each worker
OURS, TENSORS, ARRAYS = "rollwright, Ray", "ray.get of torch tensors", "ray.get of NumPy arrays"
REST_S = 0.3


class Large(gymnasium.Env[Any, int]):
    """Observations of 16 MiB, the same array each time."""

    observation_space = spaces.Box(0, 255, (LARGE_BYTES,), np.uint8)
    action_space = spaces.Discrete(2)

    def __init__(self) -> None:
        self._seen = np.ones(LARGE_BYTES, np.uint8)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        return self._seen, {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        return self._seen, 0.0, False, False, {}


class Sender:
    """What hands over the same data by Ray: it makes the batch of one worker, and returns it."""

    def tensors(self) -> list[torch.Tensor]:
        return [torch.ones(LARGE_BYTES, dtype=torch.uint8) for _ in range(2)]

    def arrays(self) -> list[Any]:
        return [np.ones(LARGE_BYTES, np.uint8) for _ in range(2)]


def make_large() -> GymWrapper:
    return GymWrapper(Large())


def make_side(case: Case, side: str, niceness: int | None, stack: ExitStack) -> Callable[[], int]:
    collector = Collector(
        partial(make_env, case),
        make_policy(case),
        num_collectors=case.workers,
        sync=True,
        frames_per_batch=case.steps * case.workers,
        total_frames=-1,
        backend="ray" if side == RAY else None,
        backend_options={"niceness": niceness} if side == RAY else None,
    )
    stack.callback(collector.shutdown)
    collector.set_seed(0)
    return lambda: collector.next().numel()


def measure(
    case: Case, rounds: int, seconds: float, torchrl: Path | None, niceness: int | None = None
) -> tuple[dict[str, list[float]], float, str]:
    """Frames per second of all sides; milliseconds of the learner's processor for each worker and batch over Ray."""
    cpu_ms: list[float] = []
    missing = ""

    def timed(collect: Callable[[], int], side: str) -> float:
        for _ in range(2):
            collect()
        count, began = 0, time.process_time()

        def counted() -> int:
            nonlocal count
            count += 1
            return collect()

        found = rate(counted, seconds=seconds)
        if side == RAY:
            cpu_ms.append((time.process_time() - began) * 1e3 / count / case.workers)
        return found

    with ExitStack() as stack:
        sides = {side: partial(timed, make_side(case, side, niceness, stack), side) for side in (LOCAL, RAY)}
        if torchrl is not None:
            try:
                peer = Peer(torchrl, "benchmarks.peers.torchrl_ray", case_name(case), TORCHRL)
                stack.callback(peer.close)
                sides[TORCHRL] = partial(peer.rate, seconds)
            except PeerError as error:
                missing = str(error)
        rates = alternate(sides, rounds, rest_s=REST_S)
    return rates, summary(cpu_ms).median, missing


def measure_large(rounds: int, seconds: float) -> dict[str, list[float]]:
    """Batches of 64 MiB per second, by each way."""
    ray: Any = require("ray", extra="ray", purpose="this benchmark")
    with ExitStack() as stack:
        collector = Collector(
            make_large,
            None,
            num_collectors=WORKERS,
            sync=True,
            frames_per_batch=WORKERS,
            total_frames=-1,
            backend="ray",
        )
        stack.callback(collector.shutdown)
        senders = [ray.remote(Sender).remote() for _ in range(WORKERS)]

        def ours() -> int:
            assert collector.next()["observation"].shape == (WORKERS, 1, LARGE_BYTES)
            return 1

        def fetched(method: str) -> int:
            parts = ray.get([getattr(sender, method).remote() for sender in senders])
            assert len(parts) == WORKERS
            return 1

        ways = {OURS: ours, TENSORS: partial(fetched, "tensors"), ARRAYS: partial(fetched, "arrays")}
        for way in ways.values():
            way()
        return alternate({name: partial(rate, way, seconds=seconds) for name, way in ways.items()}, rounds)


def main(argv: list[str] | None = None) -> None:
    arguments = _parser().parse_args(argv)
    if arguments.quick:
        arguments.rounds, arguments.seconds = 1, 0.01
    torch.set_num_threads(1)
    ray: Any = require("ray", extra="ray", purpose="this benchmark")
    ray.init(address="local", num_cpus=6, include_dashboard=False, log_to_driver=False)
    rows, notes, large = [], set(), {}
    try:
        for case in CASES[:1] if arguments.quick else CASES:
            print(f"{case_name(case)} ...", flush=True)
            torchrl = None if arguments.no_peers else arguments.torchrl_python
            rates, cpu_ms, missing = measure(case, arguments.rounds, arguments.seconds, torchrl, arguments.niceness)
            rows.append([case_name(case), *_cells(rates), f"{cpu_ms:.2f} ms"])
            notes |= {missing} - {""}
        print("64 MiB ...", flush=True)
        large = measure_large(arguments.rounds, arguments.seconds)
    finally:
        ray.shutdown()
    report.write(
        arguments.out,
        "ray.md",
        "Two actors of Ray",
        f"Medians of {arguments.rounds} rounds of {arguments.seconds:g} s in turns, quartiles in brackets. Ratios are "
        "medians over rounds.",
        report.markdown_table(
            ("case", *SIDES, "Ray / processes", "Ray / TorchRL", "learner's processor, a worker and batch"), rows
        ),
        "\n".join(f"- TorchRL was not measured: {note[:200]}" for note in sorted(notes)) or "All sides were measured.",
        "## Batches of 64 MiB",
        report.markdown_table(("way", "ms a batch"), [[name, _ms(values)] for name, values in large.items()]),
    )


def _cells(rates: dict[str, list[float]]) -> list[str]:
    found = [summary(rates[side]) if side in rates else None for side in SIDES]
    cells = ["" if one is None else f"{one.median:,.0f} ({one.low:,.0f} to {one.high:,.0f})" for one in found]
    for base in (LOCAL, TORCHRL):
        cells.append(f"{ratios(rates[RAY], rates[base]).median:.2f}" if base in rates else "")
    return cells


def _ms(values: list[float]) -> str:
    one = summary([1e3 / value for value in values])
    return f"{one.median:.0f} ({one.low:.0f} to {one.high:.0f})"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--rounds", type=int, default=5)
    add("--seconds", type=float, default=2.0, help="of each side in each round, at least")
    add("--quick", action="store_true", help="see that it runs: one case, 1 round of 10 ms")
    add("--no-peers", action="store_true", help="measure nothing but our collectors")
    add("--torchrl-python", type=Path, default=ROOT / ".venv-bench-torchrl/bin/python", metavar="PATH")
    add("--niceness", type=int, help="of our actors' workers, which Ray runs at 15: where other programs run, too")
    add("--out", type=Path, default=report.RESULTS, metavar="DIR")
    return parser


if __name__ == "__main__":
    sys.exit(main())
