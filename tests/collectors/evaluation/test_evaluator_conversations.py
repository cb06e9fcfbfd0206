"""Evaluations of language models: the conversations of held-out prompts, from the beginning of the data each time."""

from __future__ import annotations

import time
from functools import partial

import pytest
import torch
from tests.collectors.llm.fakes import FakeEnv, FakePolicy
from tests.patience import patient
from torch import nn

from rollwright.collectors import Evaluator
from rollwright.collectors.llm import LLMCollector
from rollwright.data.llm import pass_at_k
from rollwright.envs import GymEnv

ENV = partial(FakeEnv, 4, prompts=12, repeats=2)


def evaluator(env=ENV, policy=FakePolicy, **options):
    return Evaluator(env, policy_factory=policy, **{"num_trajectories": None, **options})


def collected(seed, env=ENV):
    """Returns and lengths of all conversations, in the order of the data."""
    returns, lengths = [], []
    with LLMCollector(env(), FakePolicy(), trajs_per_batch=1, delivery_order="data") as collector:
        collector.set_seed(seed)
        for batch in collector:
            returns.append(sum(float(row["next", "reward"].sum()) for row in batch.unbind(0)))
            lengths.append(len(batch))
    return returns, lengths


@pytest.mark.parametrize("backend", ["thread", "process"])
def test_each_evaluation_has_all_conversations_of_the_data_in_its_order(backend):
    metrics_fn = partial(pass_at_k, k=(1, 2), at_least=1000.0)
    with evaluator(backend=backend, seed=3, metrics_fn=metrics_fn) as evaluations:
        found = [evaluations.evaluate(step=step, policy_version=7) for step in range(2)]
    returns, lengths = collected(3)
    for step, result in enumerate(found):
        assert (result["eval/returns"], result["eval/lengths"]) == (returns, lengths)
        assert result["eval/num_episodes"] == 24
        assert result["eval/frames"] == result["eval/frames_stepped"] == sum(lengths)
        assert result["eval/reward"] == pytest.approx(sum(returns) / 24)
        assert (result["eval/step"], result["eval/policy_version"]) == (step, 7)
        right = [total >= 1000 for total in returns]
        assert result["eval/pass@1"] == pytest.approx(sum(right) / 24)
        assert result["eval/pass@2"] == pytest.approx(sum(map(any, zip(right[::2], right[1::2], strict=True))) / 12)


def test_without_a_seed_it_is_that_of_the_data_and_endless_data_is_taken_once():
    with evaluator(partial(FakeEnv, 4, prompts=12, repeats=2, epochs=None)) as evaluations:
        found = [evaluations.evaluate()["eval/returns"] for _ in range(2)]
    assert found == [collected(0)[0]] * 2


def test_a_number_of_conversations_are_the_first_ones():
    with evaluator(num_trajectories=5) as evaluations:
        assert evaluations.evaluate()["eval/returns"] == collected(0)[0][:5]
        assert evaluations.trigger_eval()
        assert evaluations.wait()["eval/num_episodes"] == 5


def test_weights_reach_the_engine_of_evaluations():
    made, model = [], nn.Linear(2, 1)

    def policy():
        made.append(FakePolicy())
        return made[-1]

    with Evaluator(ENV, model, policy_factory=policy, num_trajectories=2) as evaluations:
        for value in (1.0, 2.0):
            with torch.no_grad():
                model.bias.fill_(value)
            evaluations.evaluate()
            assert made[0].engine.weights["bias"].tolist() == [value]
            assert evaluations.stats()["policy_version"] == made[0].engine.version == value
        evaluations.evaluate({"weight": torch.ones(1, 2), "bias": torch.zeros(1)})
        assert made[0].engine.weights["bias"].tolist() == [0.0]
    assert len(made) == 1
    assert made[0].engine.closed


class Fails(FakePolicy):
    """Its engine raises, once."""

    def __init__(self):
        super().__init__()
        step, self.left = self.engine.step, [1]

        def failing(tokens=1):
            if self.left:
                self.left.pop()
                raise RuntimeError("the engine is ill")
            step(tokens)

        self.engine.step = failing


def test_an_error_is_raised_once_and_the_next_evaluation_is_whole():
    with evaluator(policy=Fails) as evaluations:
        with pytest.raises(RuntimeError, match="the engine is ill"):
            evaluations.evaluate()
        assert evaluations.evaluate()["eval/returns"] == collected(0)[0]


def test_shutdown_ends_an_evaluation_in_the_middle():
    evaluations = evaluator(policy=partial(FakePolicy, delay_s=0.01), num_trajectories=24)
    evaluations.trigger_eval()
    while not evaluations.stats()["frames"]:
        time.sleep(0.01)
    began = time.monotonic()
    evaluations.shutdown()
    assert time.monotonic() - began < patient(2.0)


def test_data_that_ends_before_is_an_error_with_the_number_that_there_was():
    with (
        evaluator(num_trajectories=30) as evaluations,
        pytest.raises(ValueError, match=r"num_trajectories=30: the data has ended after 24 conversations.*epochs=None"),
    ):
        evaluations.evaluate()


WRONG = {
    "max_steps": ({"max_steps": 3}, ValueError, "max_steps: expected None .*got 3. Pass max_turns= to the environment"),
    "frames": ({"frames_per_batch": 3}, ValueError, "frames_per_batch: expected None where conversations are ev"),
    "none": ({"num_trajectories": 0}, ValueError, "num_trajectories: expected an integer of at least 1, got 0"),
    "engine": (
        {"policy": FakePolicy(), "policy_factory": None},
        TypeError,
        "policy: FakePolicy has an engine.*Pass policy_factory=",
    ),
    "no end": (
        {"create_env_fn": lambda: GymEnv("CartPole-v1"), "policy_factory": None},
        TypeError,
        "GymEnv has no data",
    ),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_what_cannot_be_evaluated_is_refused_at_construction(wrong):
    given, error, message = WRONG[wrong]
    options = {"create_env_fn": ENV, "policy_factory": FakePolicy, "num_trajectories": None, **given}
    with pytest.raises(error, match=message):
        Evaluator(**options)
