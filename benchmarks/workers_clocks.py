"""What is measured with a clock, in the same way for every peer: starts, and weights on their way. Needs torch only."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.cases import make_network

PARTS = 8  # of the weights, between the two stamps
LIMIT_S = 120.0


def measure_starts(make: Callable[[], Any]) -> dict[str, float]:
    """Seconds from the construction of a collector to its first batch.

    Args:
        make: makes a collector.

    Returns:
        ``first`` of this program, and ``second``, after the first was shut down.
    """
    seconds = []
    for _ in range(2):
        start = time.perf_counter()
        collector = make()
        next(iter(collector))
        seconds.append(time.perf_counter() - start)
        collector.shutdown()
    return {"first": seconds[0], "second": seconds[1]}


class Stamped(nn.Module):
    """A small policy in weights of a given size, which says when it acted, where, and with which weights.

    Args:
        num_bytes: of all weights, about.

    Attributes:
        out_keys: what ``forward`` returns: action, int64; the stamps before and behind the weights, int64; the time of
            the clock that all processes share, float64 seconds; the process, int64.
    """

    out_keys = ("action", "stamp", "stamp_behind", "acted_at", "pid")

    def __init__(self, num_bytes: int) -> None:
        super().__init__()
        self.before = nn.Parameter(torch.zeros(()))
        self.net = make_network("categorical")
        self.weights = nn.ParameterList(torch.zeros(max(1, num_bytes // 4 // PARTS)) for _ in range(PARTS))
        self.behind = nn.Parameter(torch.zeros(()))

    @torch.no_grad()
    def stamp(self, number: int) -> None:
        """Change all weights but those of the network."""
        for parameter in (self.before, *self.weights, self.behind):
            parameter.fill_(number)

    def forward(self, observation: Tensor) -> tuple[Tensor, ...]:
        """Act on float32 ``[4]``."""
        before = self.before.detach().to(torch.int64)
        action = self.net(observation).argmax(-1)
        behind = self.behind.detach().to(torch.int64)
        now = torch.tensor(time.perf_counter(), dtype=torch.float64)
        return action, before, behind, now, torch.tensor(os.getpid())


def measure_publications(
    collector: Any, learner: Stamped, publish: Callable[[], Any], workers: int, rounds: int
) -> dict[str, Any]:
    """Change all weights, publish them, and find the first frame of each worker that acted with them.

    Args:
        collector: of workers that act with a :class:`Stamped`; iterated over all the time.
        learner: another one, whose weights are published.
        publish: publishes them.
        workers: how many must have acted.
        rounds: number of publications.

    Returns:
        Lists of seconds, an item a publication: ``call`` (publishing takes so long), and from its beginning to the
        ``first`` and to the ``last`` worker's first step with the new weights; ``torn``, the number of frames that
        acted with a mixture, of ``frames``.
    """
    batches = iter(collector)
    found: dict[str, Any] = {"call": [], "first": [], "last": [], "torn": 0, "frames": 0}
    for number in range(1, rounds + 1):
        for _ in range(4 * workers):  # all of them act, and have acted with the last weights
            _look_through(next(batches), number, found)
        learner.stamp(number)
        start = time.perf_counter()
        publish()
        found["call"].append(time.perf_counter() - start)
        first_steps = _first_steps(batches, number, workers, found)
        found["first"].append(min(first_steps) - start)
        found["last"].append(max(first_steps) - start)
    return found


def _first_steps(batches: Iterator[Any], number: int, workers: int, found: dict[str, Any]) -> list[float]:
    times: dict[int, float] = {}
    until = time.perf_counter() + LIMIT_S
    while len(times) < workers:
        if time.perf_counter() > until:
            raise TimeoutError(f"{len(times)} of {workers} workers acted with the new weights within {LIMIT_S:g} s")
        for pid, seconds in _look_through(next(batches), number, found):
            times.setdefault(pid, seconds)
    return list(times.values())


def _look_through(batch: Any, number: int, found: dict[str, Any]) -> list[tuple[int, float]]:
    """Process and time of each frame that acted with the weights of that number, in order of time."""
    stamps, behind, acted_at, pids = (batch[key].reshape(-1) for key in Stamped.out_keys[1:])
    found["torn"] += int((stamps != behind).sum())
    found["frames"] += stamps.numel()
    new = (stamps == number) & (behind == number)
    return sorted(zip(pids[new].tolist(), acted_at[new].tolist(), strict=True), key=lambda pair: pair[1])
