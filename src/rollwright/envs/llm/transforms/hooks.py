"""Transforms on turns: what a transform does where conversations are collected without TensorDicts."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, cast

import torch

from rollwright.data.llm.turns import Turn
from rollwright.envs.llm.transforms.policy_version import PolicyVersion
from rollwright.envs.transforms import Compose, RewardSum, StepCounter, Transform
from rollwright.errors import NotNative

TurnHook = Callable[[Turn, dict[str, Any]], None]


def turn_hooks(transform: Transform) -> list[TurnHook]:
    """Functions that do on a :class:`Turn` what a transform does on TensorDicts.

    Each is called with a complete turn and a dictionary of its conversation, empty at its first turn, which belongs to
    the state of the conversation. It writes ``turn.extras``, at the root and below ``"next"``, and may set
    ``turn.truncated``, which ends the conversation.

    Raises:
        NotNative: the transform has no such form.
    """
    if isinstance(transform, Compose):
        return [hook for part in cast("Iterable[Transform]", transform) for hook in turn_hooks(part)]
    if type(transform) is PolicyVersion:
        return [_stamping(transform)]
    if type(transform) is StepCounter and (transform.max_steps is None or _cuts_as_usual(transform)):
        return [_counting(transform.step_count_key, transform.max_steps)]
    if type(transform) is RewardSum and list(transform.in_keys) in ([], ["reward"]):
        return [_summing(str(transform.out_keys[0]) if transform.out_keys else "episode_reward")]
    raise NotNative(f"{type(transform).__name__} works on TensorDicts")


def _stamping(transform: PolicyVersion) -> TurnHook:
    def stamp(turn: Turn, memory: dict[str, Any]) -> None:
        """Below ``"next"``; the engine stamps turns and tokens itself."""
        version = transform.version
        extras: dict[Any, Any] = turn.extras
        extras["next", "policy_version"] = torch.tensor(version) if isinstance(version, int) else version

    return stamp


def _cuts_as_usual(transform: StepCounter) -> bool:
    return transform.update_done and transform.truncated_key == "truncated"


def _counting(key: str, most: int | None) -> TurnHook:
    def count(turn: Turn, memory: dict[str, Any]) -> None:
        before = memory.get(key, 0)
        memory[key] = before + 1
        extras: dict[Any, Any] = turn.extras
        extras[key], extras["next", key] = torch.tensor([before]), torch.tensor([before + 1])
        turn.truncated = turn.truncated or (most is not None and before + 1 >= most)

    return count


def _summing(key: str) -> TurnHook:
    def add(turn: Turn, memory: dict[str, Any]) -> None:
        before = memory.get(key, torch.zeros(1))
        reward = turn.reward
        memory[key] = before + (reward.sum() if isinstance(reward, torch.Tensor) else reward)
        extras: dict[Any, Any] = turn.extras
        extras[key], extras["next", key] = before, memory[key]

    return add
