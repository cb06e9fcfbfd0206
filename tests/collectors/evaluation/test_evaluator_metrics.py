"""Evaluator: results from the frames of episodes, and what functions for results get."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from tensordict import TensorDictBase
from tensordict.nn import TensorDictModule
from torch import nn

from rollwright.collectors import Evaluator
from rollwright.envs import EnvBase, GymEnv, SerialEnv
from rollwright.modules import RandomPolicy
from rollwright.testing.mocking_classes import CountingEnv

backends = pytest.mark.parametrize("backend", ["thread", "process"])
MASK = ("collector", "mask")


def pressed() -> TensorDictModule:
    """Counts on at each step."""
    return TensorDictModule(lambda td: torch.ones_like(td, dtype=torch.bool), ["observation"], ["action"])


def counting(steps: int) -> EnvBase:
    return CountingEnv(max_steps=steps)


def summary(frames: TensorDictBase) -> dict[str, Any]:
    """What the tests look at: real frames, what was observed, and the mean of it as a tensor."""
    mask = frames[MASK]
    return {
        "shape": list(frames.batch_size),
        "lengths_of_mask": mask.sum(-1).tolist(),
        "seen": [row[real].flatten().tolist() for row, real in zip(frames["next", "observation"], mask, strict=True)],
        "mean": frames["next", "reward"][mask].mean(),
        "padding": int(frames["next", "observation"][~mask].count_nonzero()),
    }


@backends
def test_metrics_are_of_the_episodes_that_count(backend: str) -> None:
    def make() -> EnvBase:
        return SerialEnv(2, [lambda: counting(2), lambda: counting(4)])

    with Evaluator(make, pressed(), num_trajectories=3, backend=backend, metrics_fn=summary) as evaluator:
        for _ in range(2):
            result = evaluator.evaluate()
            assert result["eval/lengths_of_mask"] == result["eval/lengths"]
            assert result["eval/shape"] == [3, max(result["eval/lengths"])]
            assert result["eval/seen"] == [list(range(1, length + 1)) for length in result["eval/lengths"]]
            assert result["eval/padding"] == 0
            assert type(result["eval/mean"]) is float
            assert result["eval/mean"] == pytest.approx(sum(result["eval/returns"]) / result["eval/frames"])
            json.dumps(result)


def test_metrics_span_batches() -> None:
    env = counting(7)
    with Evaluator(env, pressed(), num_trajectories=4, frames_per_batch=3, metrics_fn=summary) as evaluator:
        result = evaluator.evaluate()
    assert result["eval/seen"] == [list(range(1, length + 1)) for length in result["eval/lengths"]]
    assert len(result["eval/seen"]) == 4


def test_metrics_are_named_after_the_prefix_and_may_replace_results() -> None:
    metrics = {"reward": -1, "mine": 3}
    with Evaluator(
        counting(3), pressed(), num_trajectories=1, log_prefix="test", metrics_fn=lambda _: metrics
    ) as evaluator:
        result = evaluator.evaluate()
    assert (result["test/reward"], result["test/mine"]) == (-1, 3)


@pytest.mark.parametrize("returned", [3.0, {1: 2.0}, None])
def test_metrics_have_to_be_a_dictionary(returned: Any) -> None:
    with Evaluator(counting(3), pressed(), num_trajectories=1, metrics_fn=lambda _: returned) as evaluator:
        with pytest.raises(TypeError, match="metrics_fn: expected it to return a dictionary"):
            evaluator.evaluate()
        with pytest.raises(TypeError, match="metrics_fn: expected it to return a dictionary"):
            evaluator.evaluate()
    with pytest.raises(TypeError, match="metrics_fn: expected a callable or None, got int"):
        Evaluator(counting(3), pressed(), metrics_fn=3)


@backends
def test_numbers_for_on_result_are_numbers_with_item(backend: str) -> None:
    seen: list[dict[str, Any]] = []
    with Evaluator(
        lambda: counting(3), pressed(), num_trajectories=2, backend=backend, on_result=seen.append
    ) as evaluator:
        result = evaluator.evaluate(step=5)
    (given,) = seen
    assert given == result
    assert json.loads(json.dumps(given)) == result
    numbers = {name: value.item() for name, value in given.items() if not isinstance(value, list)}
    assert all(type(numbers[name]) is type(result[name]) in (int, float) for name in numbers)
    assert given["eval/returns"].item() == result["eval/reward"]
    assert repr(given) == repr(result)


@backends
def test_a_policy_factory_may_need_the_environment(backend: str) -> None:
    def make_policy(env: EnvBase) -> Any:
        width = env.observation_spec["observation"].shape[-1]
        return TensorDictModule(nn.Linear(width, *env.action_spec.shape), ["observation"], ["action"])

    with Evaluator(
        lambda: GymEnv("Pendulum-v1"), policy_factory=make_policy, num_trajectories=1, max_steps=5, backend=backend
    ) as evaluator:
        assert evaluator.evaluate()["eval/lengths"] == [5]
    with Evaluator(counting(3), policy_factory=RandomPolicy, num_trajectories=1, max_steps=4) as evaluator:
        assert evaluator.evaluate()["eval/num_episodes"] == 1
