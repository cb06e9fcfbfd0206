"""While another thread publishes all the time, every frame is acted by weights of one version, which is its tag."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import pytest
from tests.collectors.workers.envs import VERSION, many

from rollwright.testing.mocking_classes import CountingEnv

KINDS = ["sync", "async", "buffer"]
NUM_ENVS = 64


class Seen(NamedTuple):
    """What the frames of a run say.

    Attributes:
        frames: how many there are.
        torn: frames whose weights were not all equal.
        mistagged: frames whose weights were not those of their tag.
        versions: that acted.
    """

    frames: int
    torn: int
    mistagged: int
    versions: set[int]

    @classmethod
    def of(cls, data: Any) -> Seen:
        """Of a batch."""
        low, high, tag = (data[key].reshape(-1).long() for key in ("low", "high", VERSION))
        return cls(
            tag.numel(), int((low != high).sum()), int(((low != tag) & (low == high)).sum()), set(tag.unique().tolist())
        )

    def __add__(self, other: Any) -> Seen:
        return Seen(
            *(one + more for one, more in zip(self[:3], other[:3], strict=True)), self.versions | other.versions
        )


class Publisher(threading.Thread):
    """Publishes weights whose every element is their version, one after another, until it is told to stop."""

    def __init__(self, collector: Any, policy: Any) -> None:
        super().__init__(daemon=True)
        self.collector, self.policy = collector, policy
        self.over = threading.Event()
        self.published, self.error = 0, None

    def run(self) -> None:
        try:
            while not self.over.is_set():
                self.policy.module.fill(self.published + 1)
                self.published += 1
                assert self.collector.update_policy_weights_() == self.published
        except BaseException as error:
            self.error = error


@contextmanager
def publishing(collector: Any, policy: Any) -> Iterator[Publisher]:
    """Publish inside the ``with`` block."""
    publisher = Publisher(collector, policy)
    publisher.start()
    try:
        yield publisher
    finally:
        publisher.over.set()
        publisher.join(60)
    if publisher.error is not None:
        raise publisher.error


def run(make: Any, buffer: Any, kind: str, total: int, **size: int) -> tuple[Seen, int]:
    """Collect, while all is published at any time; what was seen, and the versions published."""
    policy = many(**size)
    make_env = partial(CountingEnv, batch_size=[NUM_ENVS])
    options = {"frames_per_batch": 20 * NUM_ENVS, "total_frames": total, "track_policy_version": True}
    if kind == "buffer":
        options["replay_buffer"] = buffer(total, ndim=2)
    collector = make("sync" if kind == "sync" else "async", [make_env] * 2, policy, **options)
    seen = Seen(0, 0, 0, set())
    with publishing(collector, policy) as publisher:
        for batch in collector:
            if batch is not None:
                seen += Seen.of(batch)
    if kind == "buffer":
        seen = Seen.of(options["replay_buffer"][:])
    return seen, publisher.published


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_is_torn(make, buffer, kind):
    seen, published = run(make, buffer, kind, 40_960, num_weights=8, size=16_384)
    assert seen.frames >= 40_960
    assert (seen.torn, seen.mistagged) == (0, 0)
    assert len(seen.versions) > 20
    assert max(seen.versions) <= published


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("kind", KINDS[:2])
def test_nothing_is_torn_in_a_million_steps(make, buffer, kind):
    """Weights of 8 MB in 64 tensors: a copy takes so long that it is mostly overtaken by a publication."""
    begun = time.monotonic()
    seen, published = run(make, buffer, kind, 1_000_960, num_weights=64, size=32_768)
    print(
        f"\n{kind}: {seen.frames:,} frames, {published:,} versions published, {len(seen.versions):,} seen, "
        f"{seen.torn} torn, {seen.mistagged} mistagged, {time.monotonic() - begun:.0f} s"
    )
    assert seen.frames >= 1_000_000
    assert (seen.torn, seen.mistagged) == (0, 0)
    assert len(seen.versions) > 1000
