"""EnvPoolEnv: resets, seeds, spaces, errors (its equality with raw EnvPool: test_gym_parity.py)."""

from __future__ import annotations

from typing import Any

import envpool
import pytest
import torch

from rollwright.envs import check_env_specs
from rollwright.envs.libs import EnvPoolEnv, GymWrapper, default_info_dict_reader
from rollwright.errors import EnvError, EnvKeyError, MissingExtraError


def test_layout() -> None:
    env = EnvPoolEnv("CartPole-v1", 3)
    assert repr(env) == "EnvPoolEnv(env=CartPole-v1, batch_size=[3], device=None)"
    rollout = env.rollout(4)
    assert rollout.batch_size == (3, 4)
    assert rollout["action"].shape == (3, 4, 2)
    assert rollout["next", "reward"].shape == (3, 4, 1)
    assert EnvPoolEnv("CartPole-v1", 2, categorical_action_encoding=True).rollout(4)["action"].shape == (2, 4)
    assert EnvPoolEnv("CartPole-v1", 2, device="cpu").rollout(2).device == torch.device("cpu")


@pytest.mark.parametrize("task", ["Pendulum-v1", "FrozenLake-v1", "Blackjack-v1", "Catch-v0", "FetchReach-v4"])
def test_specs(task: str) -> None:
    check_env_specs(EnvPoolEnv(task, 2), seed=0)


def test_truncation_is_told_from_termination_and_no_step_is_spent_on_a_reset() -> None:
    env = EnvPoolEnv("Pendulum-v1", 2, max_episode_steps=5)
    env.set_info_dict_reader(default_info_dict_reader(["elapsed_step"]))
    rollout = env.rollout(12, break_when_any_done=False)
    assert rollout["elapsed_step"][0].tolist() == [0, 1, 2, 3, 4, 0, 1, 2, 3, 4, 0, 1]
    assert rollout["next", "elapsed_step"][0].tolist() == [1, 2, 3, 4, 5, 1, 2, 3, 4, 5, 1, 2]
    ends = [t % 5 == 4 for t in range(12)]
    assert rollout["next", "truncated"][1].squeeze(-1).tolist() == ends
    assert not rollout["next", "terminated"].any()
    assert (rollout["next", "reward"] != 0).all()


def test_partial_reset() -> None:
    env = EnvPoolEnv("CartPole-v1", 3)
    env.set_info_dict_reader(default_info_dict_reader(["elapsed_step"]))
    td = env.rand_step(env.rand_step(env.reset())["next"])["next"]
    kept = td["observation"].clone()
    td["_reset"] = torch.tensor([[False], [True], [False]])
    td = env.reset(td)
    assert (td["observation"] == kept).all(-1).tolist() == [True, False, True]
    assert env.rand_step(td)["next", "elapsed_step"].tolist() == [3, 1, 3]


def test_ended_environments_stay_as_they_ended() -> None:
    env = EnvPoolEnv("CartPole-v1", 8)
    env.set_seed(0)
    rollout = env.rollout(500, break_when_all_done=True)
    done = rollout["next", "done"].squeeze(-1)
    assert done[:, -1].all()
    first = done.int().argmax(-1)
    assert len(set(first.tolist())) > 1
    for i, t in enumerate(first.tolist()):
        assert done[i, t:].all()
        assert not rollout["next", "reward"][i, t + 1 :].any()
        assert (rollout["next", "observation"][i, t:] == rollout["next", "observation"][i, t]).all()


def first_observations(env: EnvPoolEnv) -> torch.Tensor:
    return env.reset()["observation"]


def test_seeds() -> None:
    env = EnvPoolEnv("CartPole-v1", 3)
    assert env.set_seed(4) == 6
    before = env.rollout(20, break_when_any_done=False)
    env.set_seed(4)
    assert (env.rollout(20, break_when_any_done=False) == before).all()
    assert env.set_seed(5) == 7
    assert torch.equal(first_observations(env)[:2], before["observation"][1:, 0])
    assert env.set_seed(5, static_seed=True) == 5
    assert len(first_observations(env).unique(dim=0)) == 1


def test_without_a_seed_pools_differ() -> None:
    pools = [first_observations(EnvPoolEnv("CartPole-v1", 2)) for _ in range(2)]
    assert not torch.equal(*pools)


def test_seed_at_construction_equals_set_seed() -> None:
    env = EnvPoolEnv("CartPole-v1", 2)
    env.set_seed(3)
    state = torch.get_rng_state()
    assert torch.equal(first_observations(EnvPoolEnv("CartPole-v1", 2, seed=3)), first_observations(env))
    assert torch.equal(torch.get_rng_state(), state)


def test_a_seed_waits_for_a_reset_of_all() -> None:
    env = EnvPoolEnv("CartPole-v1", 2)
    td = env.reset()
    env.set_seed(0)
    td["_reset"] = torch.tensor([[True], [False]])
    env.reset(td)
    twin = EnvPoolEnv("CartPole-v1", 2, seed=0)
    assert torch.equal(first_observations(env), first_observations(twin))


@pytest.mark.parametrize(
    ("args", "kwargs", "error", "message"),
    [
        (("NoSuchTask-v0", 2), {}, EnvError, r"EnvPoolEnv\('NoSuchTask-v0'\): EnvPool raised .*not supported"),
        (("CartPole-v1", 0), {}, ValueError, "num_envs: expected"),
        (("CartPole-v1", 2.0), {}, ValueError, "num_envs: expected"),
        (("CartPole-v1", 2), {"batch_size": 1}, ValueError, "batch_size: EnvPoolEnv steps all"),
        (("CartPole-v1", 2), {"no_such_option": 1}, EnvError, "no_such_option"),
    ],
)
def test_bad_arguments(args: tuple, kwargs: dict, error: type, message: str) -> None:
    with pytest.raises(error, match=message):
        EnvPoolEnv(*args, **kwargs)


def test_bad_actions() -> None:
    env = EnvPoolEnv("Pendulum-v1", 2)
    with pytest.raises(EnvKeyError, match=r"env=Pendulum-v1.*'action'"):
        env.step(env.reset())
    with pytest.raises(EnvError, match=r"env=Pendulum-v1.*NaN or infinity"):
        env.step(env.reset().set("action", torch.full((2, 1), torch.nan)))


def test_close() -> None:
    env = EnvPoolEnv("CartPole-v1", 2)
    td = env.rand_action(env.reset())
    env.close()
    with pytest.raises(EnvError, match="clos"):
        env.step(td)


def test_wrapper_refuses_a_raw_pool() -> None:
    pool = envpool.make("FrozenLake-v1", env_type="gymnasium", num_envs=2)
    with pytest.raises(TypeError, match="Use EnvPoolEnv"):
        GymWrapper(pool)


def test_missing_package(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_envpool(name: str, *args: Any, **kwargs: Any) -> Any:
        raise ModuleNotFoundError(name, name=name)

    monkeypatch.setattr("importlib.import_module", no_envpool)
    with pytest.raises(MissingExtraError, match=r"EnvPoolEnv needs .*pip install 'rollwright\[envpool\]'"):
        EnvPoolEnv("CartPole-v1", 2)
