"""What must hold of frames of :class:`~tests.collectors.workers.envs.Tally`, whoever delivers them."""

from __future__ import annotations

import itertools
from collections import defaultdict
from typing import Any, NamedTuple

import torch
from tensordict import LazyStackedTensorDict, TensorDictBase
from tests.collectors.workers.envs import DONE, DRAW, EPISODE, IDENT, IDS, INSTANCE, STEP

__all__ = ["Tallies", "check", "flat", "per_worker"]


class Tallies(NamedTuple):
    """What was found."""

    frames: int
    trajectories: int
    whole: int  # of them, those that ended
    gaps: int  # trajectories that did not end though their environment began another
    instances: dict[int, set[int]]  # of environments, by ident


def flat(batches: Any) -> TensorDictBase:
    """Batches as one, ``[frames]``; each environment's frames are in order of time."""
    batches = [batches] if isinstance(batches, TensorDictBase) else list(batches)
    parts: list[TensorDictBase] = []
    for batch in batches:
        rows = batch.tensordicts if isinstance(batch, LazyStackedTensorDict) else [batch]
        parts += [row.reshape(-1) for row in rows]
    return torch.cat(parts, 0)


def per_worker(batches: Any) -> list[TensorDictBase]:
    """Stacked batches ``[workers, *env, T]`` as one stream ``[*env, time]`` for each worker."""
    batches = list(batches)
    rows = [batch.unbind(0) for batch in batches]
    return [torch.cat(list(parts), parts[0].ndim - 1) for parts in zip(*rows, strict=True)]


def check(frames: Any, *, gaps: bool = False, whole: bool = False, ring: bool = False) -> Tallies:
    """Every trajectory is one stretch of one episode of one environment, and says so in each of its frames.

    Args:
        frames: batches, or one.
        gaps: whether a trajectory may stop without an end (its environment was replaced, or frames were dropped).
        whole: whether every trajectory must have its end.
        ring: whether the oldest trajectories may lack their first frames.
    """
    frames = flat(frames)
    ids = frames[IDS].tolist()
    seen, after, done = frames["observation"], frames["next", "observation"], frames[DONE].reshape(-1)
    assert torch.equal(done, (frames["next", "terminated"] | frames["next", "truncated"]).reshape(-1))
    places = defaultdict(list)
    for place, number in enumerate(ids):
        places[number].append(place)
    assert min(places, default=0) >= 0
    by_instance: dict[tuple[int, int], list[tuple[int, int, bool]]] = defaultdict(list)
    for number, rows in places.items():
        index = torch.tensor(rows)
        own, following, ends = seen[index], after[index], done[index]
        source = own[0, [IDENT, INSTANCE, EPISODE]]
        assert torch.equal(own[:, [IDENT, INSTANCE, EPISODE]], source.expand(len(rows), 3)), f"id {number} is spliced"
        assert torch.equal(following[:, [IDENT, INSTANCE, EPISODE]], source.expand(len(rows), 3)), number
        first = own[0, STEP] if ring else 0.0
        assert torch.equal(own[:, STEP], first + torch.arange(len(rows), dtype=torch.float64)), (
            f"id {number} has a hole"
        )
        assert torch.equal(following[:, STEP], own[:, STEP] + 1), number
        assert torch.equal(following[:-1, DRAW], own[1:, DRAW]), number
        assert torch.equal(frames["next", "reward"].reshape(-1)[index].double(), following[:, STEP]), number
        assert not ends[:-1].any(), number
        assert not whole or bool(ends[-1]), f"id {number} has no end"
        by_instance[int(source[0]), int(source[1])].append((number, int(source[2]), bool(ends[-1])))
    num_gaps = sum(_gaps(stretches, gaps) for stretches in by_instance.values())
    instances = defaultdict(set)
    for ident, instance in by_instance:
        instances[ident].add(instance)
    num_whole = sum(ended for stretches in by_instance.values() for *_, ended in stretches)
    return Tallies(len(ids), len(places), num_whole, num_gaps, dict(instances))


def _gaps(stretches: list[tuple[int, int, bool]], allowed: bool) -> int:
    """Of the trajectories of one environment, in order of appearance: how often something is missing between two."""
    found = 0
    for (number, episode, ended), (later, next_episode, _) in itertools.pairwise(stretches):
        assert later > number, "ids of one environment fall"
        assert next_episode > episode, "episodes of one environment fall"
        gap = not ended or next_episode != episode + 1
        assert allowed or not gap, f"between episodes {episode} (id {number}) and {next_episode} (id {later})"
        found += gap
    return found
