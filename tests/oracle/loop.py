"""A collector written out, for others to be compared with: code of users, gymnasium, NumPy and torch, nothing else."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

Entries = dict[str, Any]  # values by key; nested keys are joined with dots
Act = Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]


class GymRow:
    """One environment of gymnasium.

    Args:
        env: of gymnasium.
        name: of an observation that is no dictionary.
        to_action: what a row of the policy's action is to the environment.
    """

    def __init__(
        self, env: Any, name: str = "observation", to_action: Callable[[np.ndarray], Any] = np.asarray
    ) -> None:
        self.env, self.name, self.to_action = env, name, to_action

    def _entries(self, observation: Any) -> Entries:
        found = observation if isinstance(observation, dict) else {self.name: observation}
        return {key: value if isinstance(value, str) else np.array(value) for key, value in found.items()}

    def reset(self, seed: int | None = None) -> Entries:
        """The first observation of an episode."""
        return self._entries(self.env.reset(seed=seed)[0])

    def step(self, action: np.ndarray) -> tuple[Entries, float, bool, bool]:
        """Observation, reward, terminated, truncated."""
        observation, reward, terminated, truncated, _ = self.env.step(self.to_action(action))
        return self._entries(observation), reward, terminated, truncated


class Change:
    """A transform, written out for one environment; this one changes nothing."""

    def reset(self, seen: Entries) -> None:
        """Change what an episode begins with, in place."""

    def step(self, seen: Entries, after: Entries) -> None:
        """Change what has followed, in place: observations, ``reward``, ``terminated``, ``truncated``."""


def collect(
    rows: Sequence[GymRow],
    act: Act,
    steps: int,
    *,
    seed: int,
    changes: Callable[[], Sequence[Change]] = tuple,
    reset_when_done: bool = True,
) -> dict[str, Any]:
    """Step environments side by side.

    Args:
        rows: the environments.
        act: what a policy writes, of the observations of all environments, ``[rows, ...]``, or ``[...]`` of one alone.
        steps: of each environment.
        seed: of the first environment; each other has the next number.
        changes: makes the transforms of an environment.
        reset_when_done: whether an environment that has ended is reset.

    Returns:
        Entries ``[rows, steps, ...]`` by key, NumPy or lists of text; below ``"next."`` what followed, the ids of
        trajectories at ``"collector.traj_ids"``.
    """
    chains = [list(changes()) for _ in rows]
    seen, ids, num_ids = [], list(range(len(rows))), len(rows)
    for i, row in enumerate(rows):
        seen.append(_begun(row, chains[i], seed + i))
    frames: list[list[Entries]] = [[] for _ in rows]
    for _ in range(steps):
        numbers = [key for key, value in seen[0].items() if not isinstance(value, str)]
        given = {key: torch.stack([torch.from_numpy(np.array(each[key])) for each in seen]) for key in numbers}
        written = act({key: value[0] for key, value in given.items()} if len(rows) == 1 else given)
        for i, row in enumerate(rows):
            mine = {
                key: (value if len(rows) == 1 else value[i]).detach().numpy().copy() for key, value in written.items()
            }
            observed, reward, terminated, truncated = row.step(mine["action"])
            flags = {"terminated": terminated, "truncated": truncated}
            after: Entries = {**observed, "reward": np.float32(reward), **flags}
            for change in chains[i]:
                change.step(seen[i], after)
            after["done"] = after["terminated"] or after["truncated"]
            frame = {**seen[i], **mine, "collector.traj_ids": ids[i]}
            frames[i].append({**frame, **{f"next.{key}": value for key, value in after.items()}})
            if after["done"] and reset_when_done:
                seen[i], ids[i], num_ids = _begun(row, chains[i]), num_ids, num_ids + 1
            else:
                seen[i] = {key: value for key, value in after.items() if key != "reward"}
    return {key: _column(frames, key) for key in frames[0][0]}


def _begun(row: GymRow, changes: Sequence[Change], seed: int | None = None) -> Entries:
    seen = {**row.reset(seed), "terminated": False, "truncated": False, "done": False}
    for change in changes:
        change.reset(seen)
    return seen


def _column(frames: list[list[Entries]], key: str) -> Any:
    values = [[frame[key] for frame in row] for row in frames]
    return values if isinstance(values[0][0], str) else np.array(values)
