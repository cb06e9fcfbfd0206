"""EnvCreator."""

from __future__ import annotations

import pickle
from typing import Any

import gymnasium
import pytest
import torch

from rollwright.envs import SerialEnv, TransformedEnv, VecNorm
from rollwright.envs.factories import EnvCreator, env_creator
from rollwright.envs.libs import GymEnv


def test_makes_environments_with_its_arguments() -> None:
    make = EnvCreator(GymEnv, {"env_name": "CartPole-v1", "num_envs": 2}, num_envs=3)
    assert make().batch_size == (3,)
    assert make(num_envs=4).batch_size == (4,)
    assert make() is not make()
    assert make.make_variant(num_envs=5)().batch_size == (5,)
    assert make().batch_size == (3,)
    assert repr(make) == "EnvCreator(GymEnv, env_name='CartPole-v1', num_envs=3)"


def test_closures_can_be_pickled() -> None:
    task = "Pendulum-v1"
    make = pickle.loads(pickle.dumps(EnvCreator(lambda **kwargs: GymEnv(task, **kwargs), num_envs=2)))
    assert repr(make()) == "GymEnv(env=Pendulum-v1, batch_size=[2], device=None)"


def test_creators_nest() -> None:
    inner = EnvCreator(GymEnv, env_name="CartPole-v1")
    assert pickle.loads(pickle.dumps(EnvCreator(inner, num_envs=2)))().batch_size == (2,)


def test_decorator() -> None:
    @env_creator
    def make() -> GymEnv:
        return GymEnv("CartPole-v1")

    assert isinstance(make, EnvCreator)
    assert make().env_name == "CartPole-v1"


@pytest.mark.parametrize("given", [7, None, GymEnv("CartPole-v1")])
def test_refuses_what_makes_no_environment(given: Any) -> None:
    with pytest.raises(TypeError, match="create_env_fn: expected a function that makes an environment"):
        EnvCreator(given)


def test_the_specs_are_known_from_one_environment_that_is_closed():
    made = []
    make = EnvCreator(lambda: made.append(GymEnv("CartPole-v1", num_envs=2)) or made[-1])
    assert make.meta_data.specs["input_spec", "full_action_spec"] == GymEnv("CartPole-v1", num_envs=2).full_action_spec
    assert make.meta_data.batch_size == (2,)
    assert make.meta_data.tensordict["next", "reward"].shape == (2, 1)
    assert len(made) == 1
    assert made[0].is_closed
    other = pickle.loads(pickle.dumps(EnvCreator(GymEnv, env_name="Pendulum-v1")))
    assert other.meta_data.specs["output_spec", "full_observation_spec"] == GymEnv("Pendulum-v1").observation_spec


def test_environments_begin_with_the_state_that_was_loaded():
    def make_env() -> TransformedEnv:
        return TransformedEnv(GymEnv("CartPole-v1"), VecNorm(in_keys=["observation"]))

    env = make_env()
    env.rollout(20)
    make = EnvCreator(make_env)
    assert make.state_dict().keys() == env.state_dict().keys()
    make.load_state_dict(env.state_dict())
    for creator in (make, pickle.loads(pickle.dumps(make)), make.make_variant()):
        made = creator()
        assert torch.equal(made.transform.loc["observation"], env.transform.loc["observation"])
        made.rollout(3)  # with a copy
        assert all(torch.equal(value, env.state_dict()[key]) for key, value in creator.state_dict().items())
    both = SerialEnv(2, make).state_dict()
    for key, value in env.state_dict().items():
        assert torch.equal(both[f"worker0.{key}"], value)
        assert torch.equal(both[f"worker1.{key}"], value)


def test_a_loaded_state_is_a_copy():
    env = TransformedEnv(GymEnv("CartPole-v1"), VecNorm(in_keys=["observation"]))
    env.rollout(20)
    make = EnvCreator(lambda: TransformedEnv(GymEnv("CartPole-v1"), VecNorm(in_keys=["observation"])))
    make.load_state_dict(env.state_dict())
    before = env.transform.loc["observation"].clone()
    env.rollout(20)
    for value in make.state_dict().values():
        value.zero_()  # a copy, too
    assert torch.equal(make().transform.loc["observation"], before)
    assert not torch.equal(env.transform.loc["observation"], before)


def test_a_state_that_does_not_fit_is_an_error():
    made = []

    def make_env() -> GymEnv:
        made.append(GymEnv("CartPole-v1"))
        return made[-1]

    make = EnvCreator(make_env)
    make.load_state_dict({"transform.other": torch.zeros(1)})
    with pytest.raises(RuntimeError, match=r"transform\.other"):
        make()
    assert made[0].is_closed
    plain = EnvCreator(lambda: gymnasium.make("CartPole-v1"))
    plain.load_state_dict(plain.state_dict())
    assert plain().reset()["observation"].shape == (4,)
