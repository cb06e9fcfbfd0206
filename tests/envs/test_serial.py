"""SerialEnv: construction, partial resets, seeds, state, unlike environments (parity: test_gym_parity.py)."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from tensordict import LazyStackedTensorDict, TensorDict, TensorDictBase

from rollwright.data import Composite, OneHot, Unbounded
from rollwright.envs import EnvBase, StepCounter, TransformedEnv, check_env_specs, step_mdp
from rollwright.envs.factories import EnvCreator
from rollwright.envs.libs import GymEnv
from rollwright.envs.serial import SerialEnv
from rollwright.errors import EnvError, EnvKeyError


class Steps(EnvBase):
    """Counts steps; ends after ``length``; records its seeds and resets."""

    def __init__(self, length: int = 3, size: int = 1, device: str | None = None, batch: tuple[int, ...] = ()) -> None:
        super().__init__(device=device, batch_size=batch)
        self.length, self.seeds, self.resets = length, [], 0
        self.observation_spec = Composite(count=Unbounded((*batch, size)), shape=batch)
        self.action_spec = OneHot(2, (*batch, 2))
        self.register_buffer("total", torch.zeros(()))

    def _reset(self, tensordict: TensorDictBase | None = None, **kwargs: Any) -> TensorDictBase:
        self.resets += 1
        self.options = kwargs
        self.count = self.full_observation_spec["count"].zero()
        return TensorDict({"count": self.count}, self.batch_size, device=self.device)

    def _step(self, tensordict: TensorDictBase) -> TensorDictBase:
        if "fail" in tensordict:
            raise RuntimeError("out of order")
        self.count = self.count + 1
        self.total += 1
        done = (self.count[..., :1] >= self.length).clone()
        return TensorDict(
            {"count": self.count, "reward": self.count[..., :1], "done": done}, self.batch_size, device=self.device
        )

    def _set_seed(self, seed: int | None) -> None:
        self.seeds.append(seed)

    def multiply(self, number: int) -> int:
        return number * self.length


# Construction ------------------------------------------------------------------------------------------


def test_layout() -> None:
    env = SerialEnv(3, Steps)
    assert env.batch_size == (3,)
    assert env.device is None
    assert repr(env) == "SerialEnv(num_workers=3, env=Steps(batch_size=[], device=None), batch_size=[3], device=None)"
    rollout = env.rollout(2)
    assert rollout.batch_size == (3, 2)
    assert rollout["next", "reward"].shape == (3, 2, 1)
    assert type(rollout) is TensorDict
    check_env_specs(env)


def test_one_function_or_one_for_each_with_arguments() -> None:
    assert SerialEnv(2, Steps, create_env_kwargs={"length": 4}).length == [4, 4]
    assert SerialEnv(2, Steps, create_env_kwargs=[{"length": 4}, {}]).length == [4, 3]
    assert SerialEnv(2, [lambda: Steps(1), lambda: Steps(2)]).length == [1, 2]
    assert SerialEnv(2, EnvCreator(Steps, length=5), serial_for_single=True).length == [5, 5]
    assert SerialEnv(1, Steps).batch_size == (1,)


@pytest.mark.parametrize(
    ("args", "kwargs", "error", "message"),
    [
        ((0, Steps), {}, ValueError, "num_workers: expected a number of at least 1, got 0"),
        ((True, Steps), {}, ValueError, "num_workers"),
        ((2.0, Steps), {}, ValueError, "num_workers"),
        ((2, Steps), {"pin_memroy": True}, TypeError, "no option 'pin_memroy'. Did you mean 'pin_memory'"),
        ((2, 7), {}, TypeError, "create_env_fn: expected .* got int"),
        ((2, Steps()), {}, TypeError, r"create_env_fn: expected a function .* got Steps.*lambda"),
        ((2, [Steps, None]), {}, TypeError, "got NoneType"),
        ((2, StepCounter()), {}, TypeError, r"got rollwright.*StepCounter, a module.*TransformedEnv\(env, transform\)"),
        ((2, [Steps]), {}, ValueError, "create_env_fn: expected one entry for each of the 2 workers, got 1"),
        ((2, Steps), {"create_env_kwargs": [{}] * 3}, ValueError, "create_env_kwargs: expected one entry .* got 3"),
        ((2, lambda: 3), {}, TypeError, "one that made int .worker 0"),
        ((2, lambda: GymEnv("NoSuchTask-v0")), {}, EnvError, "worker 0: .*NoSuchTask"),
        ((2, Steps), {"create_env_kwargs": {"height": 1}}, TypeError, "create_env_fn: .*height"),
        ((2, [Steps, lambda: Steps(batch=(2,))]), {}, ValueError, r"one batch size, got \[\[\], \[2\]\]"),
        ((2, [Steps, lambda: Steps(device="cpu")]), {}, ValueError, "different devices.*Pass device="),
    ],
)
def test_bad_arguments(args: tuple, kwargs: dict, error: type, message: str) -> None:
    with pytest.raises(error, match=message):
        SerialEnv(*args, **kwargs)


# Steps and resets --------------------------------------------------------------------------------------


def test_episodes_of_different_lengths_reset_each_by_itself() -> None:
    env = SerialEnv(2, [lambda: Steps(2), lambda: Steps(3)])
    rollout = env.rollout(6, break_when_any_done=False)
    assert rollout["next", "count"].squeeze(-1).tolist() == [[1, 2, 1, 2, 1, 2], [1, 2, 3, 1, 2, 3]]
    assert rollout["count"].squeeze(-1).tolist() == [[0, 1, 0, 1, 0, 1], [0, 1, 2, 0, 1, 2]]
    assert env.resets == [3, 2]  # none after the last step


def test_partial_reset_reaches_the_marked_only() -> None:
    env = SerialEnv(3, Steps)
    td = env.rand_step(env.reset())["next"]
    td["_reset"] = torch.tensor([[False], [True], [False]])
    td = env.reset(td)
    assert env.resets == [1, 2, 1]
    assert td["count"].squeeze(-1).tolist() == [1, 0, 1]
    assert "_reset" not in td


def test_partial_reset_within_batched_environments() -> None:
    env = SerialEnv(2, lambda: Steps(batch=(2,)))
    assert env.batch_size == (2, 2)
    td = env.rand_step(env.reset())["next"]
    td["_reset"] = torch.tensor([[[False], [True]], [[False], [False]]])
    assert env.reset(td)["count"].squeeze(-1).tolist() == [[1, 0], [1, 1]]
    assert env.resets == [2, 1]


def test_transformed_environments_inside_and_outside() -> None:
    inside = SerialEnv(
        2, [lambda: TransformedEnv(Steps(2), StepCounter()), lambda: TransformedEnv(Steps(3), StepCounter())]
    )
    outside = TransformedEnv(SerialEnv(2, [lambda: Steps(2), lambda: Steps(3)]), StepCounter())
    for env in (inside, outside):
        check_env_specs(env)
        rollout = env.rollout(6, break_when_any_done=False)
        assert rollout["next", "step_count"].squeeze(-1).tolist() == [[1, 2, 1, 2, 1, 2], [1, 2, 3, 1, 2, 3]]


def test_reset_arguments_reach_the_environments() -> None:
    env = SerialEnv(2, Steps)
    env.reset(options={"easy": True})
    assert env.options == [{"options": {"easy": True}}] * 2
    env.reset(seed=4)
    assert env.seeds == [[4], [5]]


def test_results_are_not_shared_with_the_environments() -> None:
    env = SerialEnv(2, Steps)
    td = env.reset()
    first = env.rand_step(td)["next", "count"]
    first += 10
    assert env.rand_step(td)["next", "count"].squeeze(-1).tolist() == [2, 2]


def test_errors_name_the_environment() -> None:
    env = SerialEnv(3, lambda: GymEnv("CartPole-v1"))
    td = env.rand_action(env.reset())
    td["action"] = td["action"] / torch.tensor([[1.0], [1.0], [0.0]])  # NaN in the last
    with pytest.raises(EnvError, match=r"SerialEnv\[2\]: GymEnv\(env=CartPole-v1.*must be one-hot"):
        env.step(td)
    with pytest.raises(EnvKeyError, match=r"SerialEnv\[0\]: .*'action'"):
        env.step(env.reset())
    env = SerialEnv(2, Steps)
    with pytest.raises(EnvError, match=r"SerialEnv\[0\]: .*RuntimeError: out of order") as caught:
        env.step(env.rand_action(env.reset()).set("fail", torch.ones(2)))
    assert isinstance(caught.value.__cause__.__cause__, RuntimeError)


# Unlike environments -----------------------------------------------------------------------------------


def test_unlike_environments_are_stacked_lazily() -> None:
    env = SerialEnv(2, [lambda: Steps(2, size=2), lambda: Steps(3, size=5)])
    rollout = env.rollout(6, break_when_any_done=False)
    assert isinstance(rollout, LazyStackedTensorDict)
    assert rollout[0]["next", "count"][:, 0].tolist() == [1, 2, 1, 2, 1, 2]
    assert rollout[1]["next", "count"].shape == (6, 5)
    assert env.resets == [3, 2]  # none after the last step
    check_env_specs(env)


def test_unlike_tasks() -> None:
    env = SerialEnv(2, [lambda: GymEnv("CartPole-v1"), lambda: GymEnv("Pendulum-v1")])
    env.set_seed(0)
    rollout = env.rollout(30, break_when_any_done=False)
    assert [row["action"].shape for row in rollout.unbind(0)] == [(30, 2), (30, 1)]


# Seeds, state, life --------------------------------------------------------------------------------------


def test_seeds_follow_on() -> None:
    env = SerialEnv(3, lambda: GymEnv("CartPole-v1", num_envs=2))
    assert env.set_seed(10) == 15
    first = env.reset()["observation"]
    plain = GymEnv("CartPole-v1", num_envs=6)
    plain.set_seed(10)
    assert torch.equal(first.flatten(0, 1), plain.reset()["observation"])
    assert env.set_seed(10, static_seed=True) == 10
    assert len(env.reset()["observation"].flatten(0, 1).unique(dim=0)) == 1


def test_seeding_leaves_torchs_generator_as_for_a_single_environment() -> None:
    SerialEnv(2, Steps).set_seed(5)
    after = torch.rand(1)
    Steps().set_seed(5)
    assert torch.equal(after, torch.rand(1))


def test_same_seed_same_data() -> None:
    def rollout() -> TensorDictBase:
        env = SerialEnv(2, lambda: GymEnv("CartPole-v1"))
        env.set_seed(0)
        return env.rollout(50, break_when_any_done=False)

    assert (rollout() == rollout()).all()


def test_state_dict() -> None:
    env, twin = SerialEnv(2, Steps), SerialEnv(2, Steps)
    env.rollout(2)
    assert list(env.state_dict()) == ["worker0.total", "worker1.total"]
    twin.load_state_dict(env.state_dict())
    assert [worker.total.item() for worker in (twin.worker0, twin.worker1)] == [2.0, 2.0]


def test_attributes_and_methods_of_the_environments() -> None:
    env = SerialEnv(2, [lambda: Steps(2), lambda: Steps(3)])
    assert env.length == [2, 3]
    assert env.multiply(10) == [20, 30]
    with pytest.raises(AttributeError, match="no_such_thing"):
        _ = env.no_such_thing
    with pytest.raises(AttributeError):
        _ = env._private


def test_devices() -> None:
    env = SerialEnv(2, [lambda: Steps(device="cpu"), Steps], device="cpu")
    assert env.rollout(2).device == torch.device("cpu")
    assert SerialEnv(2, lambda: Steps(device="cpu")).device == torch.device("cpu")
    moved = SerialEnv(2, Steps).to("cpu")
    assert moved.worker0.device == torch.device("cpu")
    assert moved.rollout(2).device == torch.device("cpu")


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_data_of_environments_on_cpu_on_cuda() -> None:
    env = SerialEnv(2, lambda: Steps(device="cpu"), device="cuda")
    rollout = env.rollout(5, break_when_any_done=False)
    assert rollout.device.type == "cuda"
    assert rollout["next", "count"][0].squeeze(-1).tolist() == [1, 2, 3, 1, 2]


def test_close() -> None:
    env = SerialEnv(2, Steps)
    env.start()
    env.close()
    assert all(worker.is_closed for worker in env._envs)
    with pytest.raises(EnvError, match="clos"):
        env.step(env.fake_tensordict())
    with pytest.raises(EnvError, match="already closed"):
        env.close()
    env.close(raise_if_closed=False)


def test_close_closes_the_others_when_one_raises() -> None:
    class Stuck(Steps):
        def close(self, *, raise_if_closed: bool = True) -> None:
            raise RuntimeError("stuck")

    env = SerialEnv(2, [Stuck, Steps])
    with pytest.raises(RuntimeError, match="stuck"):
        env.close()
    assert env.worker1.is_closed


@pytest.mark.parametrize("twin_of", [copy.deepcopy, lambda env: pickle.loads(pickle.dumps(env))])
def test_copies_go_their_own_way(twin_of: Any) -> None:
    env = SerialEnv(2, lambda: GymEnv("CartPole-v1"))
    env.set_seed(0)
    td = env.rand_action(step_mdp(env.rand_step(env.reset())))  # after a step: what that keeps is not copied
    twin = twin_of(env)
    assert (env.step(td.copy()) == twin.step(td.copy())).all()
    assert twin._envs[0] is twin.worker0


def test_batches_of_batches() -> None:
    env = SerialEnv(2, lambda: SerialEnv(3, [lambda n=n: Steps(n) for n in (2, 3, 4)]))
    assert env.batch_size == (2, 3)
    assert env.set_seed(1) == 6
    rollout = env.rollout(6, break_when_any_done=False)
    expected = [[[t % n for t in range(6)] for n in (2, 3, 4)]] * 2
    assert rollout["count"].squeeze(-1).tolist() == expected


@pytest.mark.parametrize("make", [lambda: GymEnv("CartPole-v1"), lambda: SerialEnv(2, lambda: GymEnv("CartPole-v1"))])
def test_a_step_over_the_one_before_is_taken_on_arrays_and_keeps_what_the_policy_wrote(make, monkeypatch):
    env = make()
    td = env.rand_action(env.reset())
    td["next", "hidden"] = torch.ones(*env.batch_size, 3)
    env.step(td)
    first = td["next", "observation"].clone()
    monkeypatch.setattr(type(env), "_step", None)  # what steps on TensorDicts call
    env.step(env.rand_action(td))
    assert not torch.equal(td["next", "observation"], first)
    assert bool((td["next", "hidden"] == 1).all())
