"""Does anything grow or get lost, with all of it at once for minutes?

Workers step environments into a shared buffer, processes sample it, the program publishes weights, samples too, and
forks a child every second, which samples and extends a buffer of its own. Memory, descriptors and threads of every
process are looked at all the time. At the end, frames stepped are compared with frames written, and what is stored is
tested for gaps. Exits with status 1 where something grew, or was lost.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import signal
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from tensordict import TensorDict
from tensordict.nn import TensorDictModule
from torch import nn

from benchmarks import report
from rollwright._memory.segment import Segment
from rollwright.collectors import MultiAsyncCollector
from rollwright.data import LazyTensorStorage, SliceSampler, TensorDictReplayBuffer
from rollwright.envs import GymEnv, StepCounter, TransformedEnv

STORED, BATCH, ROLLOUT = 20_000, 256, 20
_PUBLISH_S, _FORK_S, _LIMIT_S = 0.2, 1.0, 120.0
_GROWTH, _GROWTH_BYTES = 0.1, 16 << 20  # of private memory, both of which are too much
_LEAST = 12  # looks, below which nothing is said of growth
IDS, STEPS = ("collector", "traj_ids"), "step_count"


class Look(NamedTuple):
    """What a process holds at a moment.

    Attributes:
        rss: bytes of memory that it has mapped and touched.
        uss: those that it alone has.
        files: open descriptors.
        threads: of the system.
    """

    rss: int
    uss: int
    files: int
    threads: int


def look_at(pid: int) -> Look | None:
    """What a process holds; None: there is none."""
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:]
        files = len(os.listdir(f"/proc/{pid}/fd"))
        threads = len(os.listdir(f"/proc/{pid}/task"))
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return None
    kib = {name: int(rest.split()[0]) for name, _, rest in (line.partition(":") for line in lines)}
    return Look(kib["Rss"] << 10, (kib["Private_Clean"] + kib["Private_Dirty"]) << 10, files, threads)


def grown(looks: Sequence[Look]) -> list[str]:
    """What is more in the last quarter than in the second, where everything has happened once."""
    if len(looks) < _LEAST:
        return []
    quarter = len(looks) // 4
    before, after = looks[quarter : 2 * quarter], looks[-quarter:]
    found = []
    for name in ("files", "threads"):
        was, now = (max(getattr(look, name) for look in part) for part in (before, after))
        if now > was:
            found.append(f"{name}: {was} to {now}")
    was, now = (statistics.median(look.uss for look in part) for part in (before, after))
    if now > was * (1 + _GROWTH) and now > was + _GROWTH_BYTES:
        found.append(f"private memory: {was / 2**20:.0f} to {now / 2**20:.0f} MiB")
    return found


def gaps(data: TensorDict, spare: int) -> list[str]:
    """What is missing in rows that were written one after the other.

    Args:
        data: ``[n]``, oldest first.
        spare: trajectories at either end that may have been overwritten, or not begun.
    """
    ids, steps = data[IDS].numpy(), data[STEPS].reshape(-1).numpy()
    order = ids.argsort(kind="stable")
    same = ids[order][1:] == ids[order][:-1]
    jumps = int((steps[order][1:] - steps[order][:-1] != 1)[same].sum())
    found = [f"{jumps} frames are missing inside trajectories"] if jumps else []
    known = np.unique(ids)[spare : -spare or None]
    missing = int(np.setdiff1d(np.arange(known[0], known[-1] + 1), known).size) if len(known) else 0
    return [*found, f"{missing} trajectories are missing"] if missing else found


# The processes -----------------------------------------------------------------------------------------


def make_env() -> TransformedEnv:
    return TransformedEnv(GymEnv("CartPole-v1"), StepCounter())


def make_policy() -> TensorDictModule:
    return TensorDictModule(_Act(), ["observation"], ["action"])


class _Act(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 256), nn.Tanh(), nn.Linear(256, 2))

    def forward(self, observation: torch.Tensor) -> torch.Tensor:
        return nn.functional.one_hot(self.net(observation).argmax(-1), 2)


def check(batch: TensorDict) -> None:
    """Test that slices are whole."""
    steps, inside = batch[STEPS].reshape(-1), ~batch["is_init"].reshape(-1)
    if bool((batch["next", STEPS].reshape(-1) != steps + 1).any()) or bool(
        (steps[inside] != steps.roll(1)[inside] + 1).any()
    ):
        raise RuntimeError("a batch is torn")


def _sample(buffer: TensorDictReplayBuffer, segment: Segment, number: int, stop: int) -> None:
    """Sample until the number at ``stop`` is set, or the parent is gone; count batches in the one at ``number``."""
    torch.set_num_threads(1)
    parent: Any = multiprocessing.parent_process()
    count, over = (segment.map(8 * at, 8).cast("q") for at in (number, stop))
    while not over[0] and parent.is_alive():
        check(buffer.sample())
        count[0] += 1


def _in_fork(buffer: TensorDictReplayBuffer) -> None:
    """What a child does, and ends."""
    status = 1
    try:
        signal.alarm(int(_LIMIT_S))
        check(buffer.sample())
        own = TensorDictReplayBuffer(storage=LazyTensorStorage(100), batch_size=10)
        own.extend(buffer[:20])
        own.sample()
        status = 0
    finally:
        os._exit(status)


def _fork(buffer: TensorDictReplayBuffer) -> None:
    pid = os.fork()
    if not pid:
        _in_fork(buffer)
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    if status:
        raise RuntimeError(f"a forked child ended with status {status}")


# The run -----------------------------------------------------------------------------------------------


class Found(NamedTuple):
    """What came of a run.

    Attributes:
        looks: at each process, in order of time.
        counts: of frames, batches, forks, publications.
        wrong: what grew or was lost.
    """

    looks: dict[str, list[Look]]
    counts: dict[str, int]
    wrong: list[str]


def run(seconds: float, *, workers: int = 2, samplers: int = 2) -> Found:
    """All of it, for some seconds."""
    buffer = TensorDictReplayBuffer(
        storage=LazyTensorStorage(STORED), sampler=SliceSampler(slice_len=8), batch_size=BATCH, shared=True
    )
    policy = make_policy()
    collector = MultiAsyncCollector([make_env] * workers, policy, frames_per_batch=ROLLOUT, replay_buffer=buffer)
    segment = Segment()
    segment.grow(8 * (samplers + 1))
    totals, over = np.split(np.frombuffer(segment.map(0, 8 * (samplers + 1)), np.int64), [samplers])
    context: Any = multiprocessing.get_context("forkserver")
    processes = [
        context.Process(target=_sample, args=(buffer, segment, n, samplers), name=f"sampler {n}", daemon=True)
        for n in range(samplers)
    ]
    try:
        collector.start()
        _await(lambda: buffer.write_count >= 2 * BATCH, "the first frames")
        for process in processes:
            process.start()
        _await(lambda: bool((totals > 0).all()), "batches of all samplers")
        pids = {"main": os.getpid()} | {process.name: process.pid for process in processes}
        pids |= {f"worker {worker['index']}": worker["pid"] for worker in collector.stats()["workers"]}
        looks, counts = _go(seconds, collector, policy, buffer, pids)
        collector.async_shutdown()
        counts["batches of samplers"] = int(totals.sum())
    finally:
        over[:] = 1
        collector.shutdown(raise_on_error=False)
        for process in processes:
            if process.pid is not None:
                process.join(_LIMIT_S)
    wrong = [f"{name}, {line}" for name, of_one in looks.items() for line in grown(of_one)]
    wrong += [f"{process.name} ended with status {process.exitcode}" for process in processes if process.exitcode]
    return _judged(collector, buffer, looks, counts, wrong)


def _judged(
    collector: MultiAsyncCollector,
    buffer: TensorDictReplayBuffer,
    looks: dict[str, list[Look]],
    counts: dict[str, int],
    wrong: list[str],
) -> Found:
    stats = collector.stats()
    counts |= {"frames stepped": sum(worker["frames"] for worker in stats["workers"]), "rows": buffer.write_count}
    if counts["frames stepped"] != counts["rows"] or buffer.storage.ledger.num_lost:
        wrong.append(f"{counts['frames stepped']} frames were stepped, {counts['rows']} rows written")
    if stats["restarts"] or stats["forced"]:
        wrong.append(f"workers: {stats['restarts']} restarts, {stats['forced']}")
    return Found(looks, counts, wrong + gaps(buffer.storage.in_order(), 2 * len(stats["workers"])))


def _await(condition: Callable[[], bool], what: str) -> None:
    until = time.monotonic() + _LIMIT_S
    while not condition():
        if time.monotonic() > until:
            raise TimeoutError(f"waited {_LIMIT_S:g} s for {what}")
        time.sleep(0.01)


def _go(
    seconds: float,
    collector: MultiAsyncCollector,
    policy: nn.Module,
    buffer: TensorDictReplayBuffer,
    pids: Mapping[str, int],
) -> tuple[dict[str, list[Look]], dict[str, int]]:
    """Sample, publish, fork, and look, until the time is over."""
    looks: dict[str, list[Look]] = {name: [] for name in pids}
    counts = {"batches": 0, "publications": 0, "forks": 0}
    begin = time.monotonic()
    every = {"look": max(seconds / 60, 0.5), "publish": _PUBLISH_S, "fork": _FORK_S}
    due = dict.fromkeys(every, begin)
    while (now := time.monotonic()) < begin + seconds:
        check(buffer.sample())
        counts["batches"] += 1
        for name in [name for name in due if due[name] <= now]:
            due[name] = now + every[name]
            if name == "look":
                for process, pid in pids.items():
                    found = look_at(pid)
                    if found is None:
                        raise RuntimeError(f"{process} (pid {pid}) is gone")
                    looks[process].append(found)
            elif name == "publish":
                with torch.no_grad():
                    for parameter in policy.parameters():
                        parameter.mul_(0.999)
                collector.update_policy_weights_()
                counts["publications"] += 1
            else:
                _fork(buffer)
                counts["forks"] += 1
    return looks, counts


# The report --------------------------------------------------------------------------------------------


def table_rows(looks: Mapping[str, Sequence[Look]]) -> list[list[str]]:
    """A row for each process: at a quarter, a half and the end of the time."""
    rows = []
    for name, of_one in looks.items():
        chosen = [of_one[min(len(of_one) * part // 4, len(of_one) - 1)] for part in (1, 2, 4)]
        memory = [" / ".join(f"{getattr(look, kind) / 2**20:.0f}" for look in chosen) for kind in ("uss", "rss")]
        numbers = [" / ".join(str(getattr(look, kind)) for look in chosen) for kind in ("files", "threads")]
        rows.append([name, *memory, *numbers])
    return rows


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--samplers", type=int, default=2, help="processes that sample")
    parser.add_argument("--out", type=Path, default=report.RESULTS, metavar="DIR")
    arguments = parser.parse_args(argv)
    torch.set_num_threads(1)
    looks, counts, wrong = run(arguments.seconds, workers=arguments.workers, samplers=arguments.samplers)
    report.write(
        arguments.out,
        "soak.md",
        f"All at once, for {arguments.seconds:g} s",
        "At a quarter, a half and the end of the time.",
        report.markdown_table(("process", "USS, MiB", "RSS, MiB", "descriptors", "threads"), table_rows(looks)),
        "; ".join(f"{name}: {count:,}" for name, count in counts.items()) + ".",
        "What grew or was lost: " + ("; ".join(wrong) if wrong else "nothing") + ".",
    )
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
