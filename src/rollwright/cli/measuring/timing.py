"""Frames per second of several collection loops, measured in turns."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

__all__ = ["Summary", "alternate", "rate", "ratios", "summary"]


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
