"""Names, and environments of gymnasium, where an environment is expected."""

from __future__ import annotations

import sys
import threading

import gymnasium
import pytest
import torch
from gymnasium.envs.classic_control import CartPoleEnv

from rollwright._processes.child import Child
from rollwright.collectors import Collector, Evaluator, MultiAsyncCollector, MultiSyncCollector
from rollwright.envs import (
    AsyncEnvPool,
    BraxEnv,
    EnvCreator,
    GymEnv,
    GymnaxEnv,
    ParallelEnv,
    SerialEnv,
    StepCounter,
    TransformedEnv,
    VmasEnv,
)
from rollwright.errors import EnvError, MissingExtraError


def vector():
    return gymnasium.make_vec("CartPole-v1", num_envs=2, vectorization_mode="sync")


def batches(given, **options):
    collector = Collector(given, frames_per_batch=20, total_frames=40, **options)
    try:
        collector.set_seed(3)
        return [batch.clone() for batch in collector]
    finally:
        collector.shutdown()


ONE = {
    "name": lambda: "CartPole-v1",
    "environment": lambda: gymnasium.make("CartPole-v1"),
    "function": lambda: lambda: gymnasium.make("CartPole-v1"),
    "function of one of ours": lambda: lambda: GymEnv("CartPole-v1", categorical_action_encoding=True),
    "list": lambda: ["CartPole-v1"],
}


@pytest.mark.parametrize("given", ONE)
def test_what_is_given_is_the_same_environment(given):
    expected = batches(GymEnv("CartPole-v1", categorical_action_encoding=True))
    for ours, theirs in zip(expected, batches(ONE[given]()), strict=True):
        assert torch.equal(ours["next", "observation"], theirs["next", "observation"])
        assert torch.equal(ours["action"], theirs["action"])
        assert theirs["action"].dtype == torch.int64
        assert theirs["action"].shape == (20,)


def test_a_class_makes_environments():
    assert batches(CartPoleEnv)[0]["observation"].shape == (20, 4)


@pytest.mark.parametrize("given", [vector, vector()], ids=["function", "environment"])
def test_vector_environments(given):
    assert batches(given)[0].batch_size == (2, 10)


def test_arguments_go_to_the_named_environment():
    first = batches("CartPole-v1", create_env_kwargs={"num_envs": 2})[0]
    assert first.batch_size == (2, 10)


@pytest.mark.parametrize("kind", [MultiSyncCollector, MultiAsyncCollector])
def test_workers_make_named_environments(kind):
    collector = kind(["CartPole-v1", "CartPole-v1"], frames_per_batch=20, total_frames=40)
    try:
        assert sum(batch.numel() for batch in collector) == 40
    finally:
        collector.shutdown()


@pytest.mark.parametrize("given", ["name", "environment", "function"])
def test_workers_of_one(given):
    found = batches(ONE[given](), num_collectors=2, sync=True)
    assert [batch.numel() for batch in found] == [20, 20]


def test_a_name_is_no_list_of_letters_on_other_machines():
    collector = Collector("CartPole-v1", frames_per_batch=20, backend="tcp", num_collectors=1)
    try:
        assert collector.next().numel() == 20
    finally:
        collector.shutdown()


@pytest.mark.parametrize("given", ["name", "function"])
@pytest.mark.parametrize("kind", [SerialEnv, ParallelEnv])
def test_batches_of_environments(kind, given):
    env = kind(2, ONE[given]())
    try:
        assert env.rollout(3)["action"].shape == (2, 3)
    finally:
        env.close()


def test_pools_of_environments():
    env = AsyncEnvPool(["CartPole-v1", "CartPole-v1"], backend="threading")
    try:
        assert env.rollout(3).batch_size == (2, 3)
    finally:
        env.close()


@pytest.mark.parametrize("given", ["CartPole-v1", gymnasium.make("CartPole-v1")], ids=["name", "environment"])
def test_transforms_around(given):
    assert TransformedEnv(given, StepCounter()).rollout(3)["next", "step_count"].flatten().tolist() == [1, 2, 3]


def test_creators():
    assert EnvCreator("CartPole-v1")().rollout(2)["action"].dtype == torch.int64


def test_evaluations():
    with Evaluator("CartPole-v1", lambda obs: 1, num_trajectories=2) as evaluator:
        assert 5 <= evaluator.evaluate()["eval/reward"] <= 20


def test_an_environment_given_stays_open_after_a_failed_construction():
    env = gymnasium.make("CartPole-v1")
    with pytest.raises(ValueError, match="frames_per_batch"):
        Collector(env, frames_per_batch=-3)
    env.reset()


@pytest.mark.parametrize("options", [{}, {"num_collectors": 2}])
def test_a_name_that_is_not_registered(options):
    with pytest.raises(EnvError, match=r"CartPole-v9.*v1"):
        Collector("CartPole-v9", frames_per_batch=4, **options)


@pytest.mark.parametrize("kind", [SerialEnv, ParallelEnv])
def test_an_environment_for_many_is_refused(kind):
    with pytest.raises(TypeError, match=r"create_env_fn: expected a function that makes an environment"):
        kind(2, gymnasium.make("CartPole-v1"))


NAMES = ["CartPole-v9", "Qwerty", "CartPol-v1"]
TAKERS = {
    "collector": lambda name: Collector(name, frames_per_batch=4),
    "workers": lambda name: Collector(name, frames_per_batch=4, num_collectors=2),
    "serial": lambda name: SerialEnv(2, name),
    "parallel": lambda name: ParallelEnv(2, name),
    "pool": lambda name: AsyncEnvPool([name], backend="multiprocessing"),
    "transforms": TransformedEnv,
    "creator": EnvCreator,
    "environment": GymEnv,
}


@pytest.mark.parametrize("taker", TAKERS)
@pytest.mark.parametrize("name", NAMES)
def test_names_that_are_not_registered_fail_with_names_that_are_before_a_process_starts(name, taker, monkeypatch):
    monkeypatch.setattr(Child, "__init__", None)
    with pytest.raises(EnvError, match=rf"{name}.*gymnasium raised .*Pass .*'package:{name}'") as caught:
        TAKERS[taker](name)
    assert ("'CartPole-v1'" in str(caught.value)) == name.startswith("CartPol")


def test_workers_may_register_a_name_first():
    collector = Collector("Registered-v0", frames_per_batch=20, num_collectors=1, init_fn=register)
    try:
        assert collector.next().numel() == 20
    finally:
        collector.shutdown()


def register():
    gymnasium.register("Registered-v0", CartPoleEnv)


@pytest.mark.parametrize("kind", [SerialEnv, ParallelEnv, lambda n, env: EnvCreator(env)])
def test_the_class_of_an_instance_is_named_where_a_function_is_expected(kind):
    given = gymnasium.make("CartPole-v1")
    with pytest.raises(TypeError, match=r"got TimeLimit: .*lambda: gymnasium.make\('CartPole-v1'\)"):
        kind(2, given)


class Unsendable(gymnasium.Wrapper):
    def __init__(self):
        super().__init__(gymnasium.make("CartPole-v1"))
        self.lock = threading.Lock()


@pytest.mark.parametrize("options", [{}, {"backend": "tcp"}])
def test_an_instance_that_cannot_be_pickled_is_refused_with_what_to_pass(options):
    with pytest.raises(TypeError, match=r"cannot pickle '_thread.lock'.*Pass a function .*lambda: Unsendable\(...\)"):
        Collector(Unsendable(), frames_per_batch=4, num_collectors=2, **options)


CALLERS = {
    "collector": lambda given: Collector(given, frames_per_batch=4),
    "workers": lambda given: Collector(given, frames_per_batch=4, num_collectors=2),
    "parallel": lambda given: ParallelEnv(2, given),
    "pool": lambda given: AsyncEnvPool([given], backend="multiprocessing"),
    "evaluation": lambda given: Evaluator(given, lambda obs: 1),
}


@pytest.mark.parametrize("caller", CALLERS)
def test_classes_and_functions_that_need_arguments_are_refused_with_them(caller):
    with pytest.raises(TypeError, match=r"TimeLimit\(env.*missing .*'env'.*lambda: TimeLimit\(gymnasium.make"):
        CALLERS[caller](gymnasium.wrappers.TimeLimit)
    with pytest.raises(TypeError, match=r"named\(name\).*missing .*'name'.*create_env_kwargs"):
        CALLERS[caller](named)


def named(name):
    return gymnasium.make(name)


def test_arguments_that_a_function_does_not_take_are_refused():
    with pytest.raises(TypeError, match=r"named\(name\) cannot be called with the arguments nmae"):
        Collector(named, frames_per_batch=4, create_env_kwargs={"nmae": "CartPole-v1"})


def test_actions_of_a_name_are_integers_and_those_of_gym_env_are_one_hot():
    assert batches("CartPole-v1")[0]["action"].dtype == torch.int64
    assert batches(lambda: GymEnv("CartPole-v1"))[0]["action"].shape == (20, 2)


@pytest.mark.parametrize(
    ("make", "module", "extra"),
    [
        (lambda: VmasEnv("balance", 2), "vmas", "vmas"),
        (lambda: BraxEnv("ant", 2), "brax", "brax"),
        (lambda: GymnaxEnv("CartPole-v1", 2), "gymnax", "gymnax"),
    ],
    ids=["vmas", "brax", "gymnax"],
)
def test_simulators_that_are_not_installed_are_named(monkeypatch, make, module, extra):
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(MissingExtraError, match=rf"pip install 'rollwright\[{extra}\]'"):
        make()
