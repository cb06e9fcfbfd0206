"""Calls of our own, counted: to make a CartPole collector, and of the learner for a batch of two workers; classes.

``rollout/test_counts.py`` counts those of a step.
"""

from __future__ import annotations

import statistics

import pytest
from tensordict.nn import ProbabilisticTensorDictModule, TensorDictModule, TensorDictSequential
from tests.calls import Calls
from torch import distributions, nn

from rollwright.collectors import MultiAsyncCollector, MultiSyncCollector
from rollwright.data import Composite, Unbounded
from rollwright.envs import GymEnv


def actor():
    """4-64-64-2 with tanh: logits, a one-hot action, its log-prob."""
    net = nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 2))
    return TensorDictSequential(
        TensorDictModule(net, in_keys=["observation"], out_keys=["logits"]),
        ProbabilisticTensorDictModule(
            in_keys=["logits"],
            out_keys=["action"],
            distribution_class=distributions.OneHotCategorical,
            return_log_prob=True,
        ),
    )


POLICIES = {"at random": lambda: None, "actor": actor}


@pytest.mark.parametrize(("policy", "most"), [("at random", 655), ("actor", 925)])
def test_calls_to_make_an_environment_and_a_collector(make, policy, most):
    for _ in range(2):  # the first time, caches of the process are filled
        acting = POLICIES[policy]()
        with Calls() as calls:
            make(GymEnv("CartPole-v1"), acting, frames_per_batch=200)
    assert calls.ours <= most


@pytest.mark.parametrize("policy", POLICIES)
def test_classes_and_files_that_a_batch_goes_through(make, policy):
    collector = make(GymEnv("CartPole-v1"), POLICIES[policy](), frames_per_batch=200)
    collector.next()
    with Calls() as calls:
        collector.next()
    assert len(calls.classes) <= 31  # one of them holds Ctrl-C back
    assert len(calls.files) <= 35


@pytest.mark.parametrize("kind", [MultiSyncCollector, MultiAsyncCollector])
@pytest.mark.parametrize("policy", POLICIES)
def test_calls_of_the_learner_for_a_batch_of_two_workers(make, kind, policy):
    """The median of 15 batches: messages may come together, and workers are looked after five times a second."""
    collector = make(GymEnv("CartPole-v1"), POLICIES[policy](), cls=kind, num_workers=2, frames_per_batch=20)
    counts = []
    for _ in range(19):
        with Calls() as calls:
            collector.next()
        counts.append(calls.ours)
    assert statistics.median(counts[4:]) <= 250


def test_the_counting_of_calls():
    """A function, a generator that goes on three times, and what is in comprehensions."""
    spec = Composite({"a": Unbounded(), "b": Unbounded()})
    with Calls() as none:
        pass
    with Calls() as calls:
        spec.leaves()  # has a comprehension, and calls _flat
        list(spec._present({"a": 0, "b": 0}))  # a generator
    assert none.ours == 0
    assert calls.ours == 3
    assert calls.files == {file for file in calls.files if file.endswith(("composite.py", "mapping.py"))}
    assert calls.classes == {"rollwright.data.specs.composite.Composite"}
