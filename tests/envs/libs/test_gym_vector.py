"""GymWrapper and GymEnv over vector environments: autoreset modes, partial resets, seeds, infos."""

from __future__ import annotations

import copy
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv, VectorEnv
from gymnasium.wrappers import vector as wrappers

from rollwright.envs import check_env_specs
from rollwright.envs.libs import GymEnv, GymWrapper, default_info_dict_reader
from rollwright.errors import EnvError

BOX = spaces.Box(-np.inf, np.inf, (2,), np.float32)
ALL_SPACES = spaces.Dict(
    x=BOX, n=spaces.Discrete(100), nest=spaces.Dict(t=spaces.Tuple((BOX, spaces.MultiBinary(2)))), words=spaces.Text(20)
)


class Counter(gymnasium.Env):
    """Ends after ``length`` steps; observation is (episode, step); the episode's number counts resets."""

    observation_space = BOX
    action_space = spaces.Discrete(2)

    def __init__(self, length: int = 3) -> None:
        self.length, self.episode, self.seeds = length, -1, []

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> tuple[Any, dict]:
        super().reset(seed=seed)
        self.seeds.append(seed)
        self.episode += 1
        self.count = 0
        return self._observe(), {"count": 0.0}

    def step(self, action: int) -> tuple[Any, float, bool, bool, dict]:
        self.count += 1
        ended = self.count == self.length
        return self._observe(), float(self.count), ended and self.length % 2 == 1, ended, {"count": float(self.count)}

    def _observe(self) -> Any:
        return np.array([self.episode, self.count], np.float32)


class CounterOfEverything(Counter):
    """The same in every kind of space."""

    observation_space = ALL_SPACES

    def _observe(self) -> Any:
        x = np.array([self.episode, self.count], np.float32)
        flags = np.array([self.count % 2, 1], np.int8)
        return {"x": x, "n": self.count, "nest": {"t": (x, flags)}, "words": f"e{self.episode} c{self.count}"}


def sync(mode: AutoresetMode, *lengths: int, cls: type = Counter, **kwargs: Any) -> SyncVectorEnv:
    return SyncVectorEnv([lambda n=n: cls(n) for n in lengths], autoreset_mode=mode, **kwargs)


MODES = list(AutoresetMode)


@pytest.mark.parametrize("mode", MODES)
def test_episodes_of_different_lengths_reset_each_by_itself(mode: AutoresetMode) -> None:
    env = GymWrapper(sync(mode, 2, 3))
    rollout = env.rollout(6, break_when_any_done=False)
    # (episode, step) before and after each step
    assert rollout["observation"][0].tolist() == [[0, 0], [0, 1], [1, 0], [1, 1], [2, 0], [2, 1]]
    assert rollout["next", "observation"][0].tolist() == [[0, 1], [0, 2], [1, 1], [1, 2], [2, 1], [2, 2]]
    assert rollout["observation"][1].tolist() == [[0, 0], [0, 1], [0, 2], [1, 0], [1, 1], [1, 2]]
    assert rollout["next", "observation"][1].tolist() == [[0, 1], [0, 2], [0, 3], [1, 1], [1, 2], [1, 3]]
    assert rollout["next", "reward"].squeeze(-1).tolist() == [[1, 2, 1, 2, 1, 2], [1, 2, 3, 1, 2, 3]]
    assert rollout["next", "truncated"].squeeze(-1).int().tolist() == [[0, 1] * 3, [0, 0, 1] * 2]
    assert rollout["next", "terminated"].squeeze(-1).int().tolist() == [[0] * 6, [0, 0, 1] * 2]


@pytest.mark.parametrize("mode", MODES)
def test_every_space_keeps_its_last_observation(mode: AutoresetMode) -> None:
    env = GymWrapper(sync(mode, 2, 3, cls=CounterOfEverything), categorical_action_encoding=True)
    check_env_specs(env)
    env = GymWrapper(sync(mode, 2, 3, cls=CounterOfEverything), categorical_action_encoding=True)
    rollout = env.rollout(5, break_when_any_done=False)
    assert rollout["next", "n"].tolist() == [[1, 2, 1, 2, 1], [1, 2, 3, 1, 2]]
    assert rollout["n"].tolist() == [[0, 1, 0, 1, 0], [0, 1, 2, 0, 1]]
    assert rollout["next", "nest", "t", "0"][..., 1].tolist() == [[1, 2, 1, 2, 1], [1, 2, 3, 1, 2]]
    words = [[rollout[i, t]["next", "words"] for t in range(5)] for i in range(2)]
    assert words == [["e0 c1", "e0 c2", "e1 c1", "e1 c2", "e2 c1"], ["e0 c1", "e0 c2", "e0 c3", "e1 c1", "e1 c2"]]


@pytest.mark.parametrize("mode", MODES)
def test_ended_environments_stay_as_they_ended(mode: AutoresetMode) -> None:
    env = GymWrapper(sync(mode, 2, 4))
    rollout = env.rollout(10, break_when_all_done=True)
    assert rollout.batch_size == (2, 4)
    assert rollout["next", "observation"][0].tolist() == [[0, 1], [0, 2], [0, 2], [0, 2]]
    assert rollout["next", "reward"][0].squeeze(-1).tolist() == [1, 2, 0, 0]
    assert rollout["next", "done"][0].squeeze(-1).tolist() == [False, True, True, True]
    assert rollout["next", "observation"][1].tolist() == [[0, 1], [0, 2], [0, 3], [0, 4]]
    again = env.rollout(2, break_when_any_done=False)
    assert again["observation"][..., 1].tolist() == [[0, 1], [0, 1]]


@pytest.mark.parametrize("mode", MODES)
def test_partial_reset_of_a_running_environment(mode: AutoresetMode) -> None:
    env = GymWrapper(sync(mode, 5, 5))
    td = env.rand_step(env.reset())["next"]
    td["_reset"] = torch.tensor([[False], [True]])
    td = env.reset(td)
    assert td["observation"].tolist() == [[0, 1], [1, 0]]
    assert env.rand_step(td)["next", "observation"].tolist() == [[0, 2], [1, 1]]


def test_same_step_reset_is_not_done_twice() -> None:
    env = GymWrapper(sync(AutoresetMode.SAME_STEP, 1, 1))
    rollout = env.rollout(4, break_when_any_done=False)
    assert rollout["observation"][..., 0].tolist() == [[0, 1, 2, 3]] * 2


def test_kept_first_observations_are_served_once() -> None:
    env = GymWrapper(sync(AutoresetMode.SAME_STEP, 1, 5))
    _, td = env.step_and_maybe_reset(env.rand_action(env.reset()))
    td["_reset"] = torch.tensor([[True], [False]])
    assert env.reset(td)["observation"].tolist() == [[2, 0], [0, 1]]


@pytest.mark.parametrize("mode", MODES)
def test_data_survives_the_next_step(mode: AutoresetMode) -> None:
    env = GymWrapper(sync(mode, 2, 3, copy=False))
    td = env.reset()
    kept = []
    for _ in range(5):
        frame, td = env.step_and_maybe_reset(env.rand_action(td))
        kept.append((frame, frame.clone()))
    assert all((frame == twin).all() for frame, twin in kept)


def test_async_with_and_without_shared_memory() -> None:
    makers = [lambda: Counter(2), lambda: Counter(3)]
    env = GymWrapper(AsyncVectorEnv(makers, autoreset_mode=AutoresetMode.DISABLED, shared_memory=False))
    rollout = env.rollout(5, break_when_any_done=False)
    assert rollout["next", "observation"][0, :, 1].tolist() == [1, 2, 1, 2, 1]
    env.close()
    forgetful = AsyncVectorEnv(makers, autoreset_mode=AutoresetMode.NEXT_STEP, shared_memory=False)
    with pytest.raises(ValueError, match=r"shared_memory=True, or with autoreset_mode=AutoresetMode\.DISABLED"):
        GymWrapper(forgetful)
    forgetful.close()


@pytest.mark.filterwarnings("ignore:.*ERROR")  # how gymnasium tells of its processes
def test_error_in_a_process_of_async() -> None:
    class Broken(Counter):
        def step(self, action: int) -> Any:
            raise ValueError("the wheel came off")

    env = GymWrapper(AsyncVectorEnv([Broken] * 2, autoreset_mode=AutoresetMode.DISABLED))
    td = env.rand_action(env.reset())
    with pytest.raises(EnvError, match=r"AsyncVectorEnv.*ValueError: the wheel came off"):
        env.step(td)
    env.close()


# Vector environments of other makes --------------------------------------------------------------------


class Custom(VectorEnv):
    """Two counters with ends after 2 and 3 steps, written as a vector environment."""

    single_observation_space, single_action_space = BOX, spaces.Discrete(2)

    def __init__(self, mode: AutoresetMode | None, final_obs: bool = True) -> None:
        self.metadata = {} if mode is None else {"autoreset_mode": mode}
        self.mode, self.final_obs = mode, final_obs
        self.num_envs, self.seeds = 2, []
        self.observation_space = spaces.Box(-np.inf, np.inf, (2, 2), np.float32)
        self.action_space = spaces.MultiDiscrete([2, 2])
        self.episode = np.full(2, -1)

    def reset(self, *, seed: Any = None, options: dict | None = None) -> tuple[Any, dict]:
        self.seeds.append(seed)
        rows = (options or {}).get("reset_mask", np.ones(2, bool))
        self.count = np.where(rows, 0, getattr(self, "count", 0))
        self.episode = self.episode + rows
        self.spent = getattr(self, "spent", rows) & ~rows
        return self._observe(), {}

    def step(self, actions: Any) -> Any:
        self.count = np.where(self.spent, 0, self.count + 1)
        self.episode = self.episode + self.spent
        ended = self.count == [2, 3]
        self.spent = ended if self.mode is AutoresetMode.NEXT_STEP else np.zeros(2, bool)
        info: dict[str, Any] = {}
        if self.mode is AutoresetMode.SAME_STEP and ended.any():
            if self.final_obs:
                info["final_obs"] = self._observe()
            self.count[ended] = 0
            self.episode[ended] += 1
        return self._observe(), np.ones(2), ended, np.zeros(2, bool), info

    def _observe(self) -> Any:
        return np.stack([self.episode, self.count], -1).astype(np.float32)


class Lockstep(Custom):
    """Resets all of its environments, or with the next step what has ended."""

    def reset(self, *, seed: Any = None, options: dict | None = None) -> tuple[Any, dict]:
        return super().reset(seed=seed)


@pytest.mark.parametrize("mode", MODES)
def test_custom_vector_environment(mode: AutoresetMode) -> None:
    env = GymWrapper(Custom(mode))
    assert env.set_seed(3) == 4
    rollout = env.rollout(5, break_when_any_done=False)
    assert rollout["next", "observation"][..., 1].tolist() == [[1, 2, 1, 2, 1], [1, 2, 3, 1, 2]]
    assert rollout["observation"][..., 0].tolist() == [[0, 0, 1, 1, 2], [0, 0, 0, 1, 1]]
    assert [seed for seed in env._env.seeds if seed is not None] == [3]  # gymnasium's contract is one number


def test_custom_same_step_environment_cannot_reset_parts() -> None:
    env = GymWrapper(Custom(AutoresetMode.SAME_STEP))
    td = env.rand_step(env.reset())["next"]
    td["_reset"] = torch.tensor([[True], [False]])
    with pytest.raises(EnvError, match=r"cannot reset its environments \[0\] alone.*DISABLED"):
        env.reset(td)


def test_same_step_without_final_observation() -> None:
    with pytest.raises(EnvError, match=r"no 'final_obs'.*DISABLED"):
        GymWrapper(Custom(AutoresetMode.SAME_STEP, final_obs=False)).rollout(3)


def of_each(wrapper: Any) -> Any:
    return lambda mode: wrapper(sync(mode, 2, 3))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (Lockstep, r"does not read options\['reset_mask'\].*transition that never was.*Let reset\(\) take options="),
        (lambda mode: Custom(None), r"does not say when it resets.*Set it to the mode"),
        (
            of_each(wrappers.NormalizeObservation),
            r"no mode in which.*gymnasium\.wrappers\.NormalizeObservation\].*VecNorm",
        ),
        (of_each(wrappers.NormalizeReward), r"SAME_STEP, or .*gymnasium\.wrappers\.NormalizeReward\]"),
    ],
)
def test_environments_that_would_make_up_transitions_are_refused(make: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        GymWrapper(make(AutoresetMode.NEXT_STEP))


def test_what_is_advised_for_registered_environments_can_be_done() -> None:
    gymnasium.register("Lockstep-v0", Counter, vector_entry_point=lambda num_envs: Lockstep(AutoresetMode.NEXT_STEP))
    try:
        with pytest.raises(ValueError, match=r"Use GymEnv\('Lockstep-v0', num_envs=2\), or gymnasium.make_vec\("):
            GymEnv("Lockstep-v0", num_envs=2, vectorization_mode="vector_entry_point")
        assert GymEnv("Lockstep-v0", num_envs=2).batch_size == (2,)
    finally:
        del gymnasium.registry["Lockstep-v0"]


def test_normalised_rewards_are_taken_where_environments_reset_themselves() -> None:
    GymWrapper(wrappers.NormalizeReward(sync(AutoresetMode.SAME_STEP, 2, 3))).rollout(6, break_when_any_done=False)


@pytest.mark.parametrize("wrap", [lambda env: env, wrappers.RecordEpisodeStatistics])
def test_vector_cartpole_of_gymnasium_in_its_only_mode(wrap: Any) -> None:
    """Each environment follows its own episodes: a single CartPole that is put where each begins agrees."""
    env = GymWrapper(wrap(gymnasium.make_vec("CartPole-v1", 4)))  # an entry point of its own, NEXT_STEP
    env.set_seed(0)
    rollout = env.rollout(120, break_when_any_done=False)
    single = gymnasium.make("CartPole-v1").unwrapped
    ends = 0
    for frames in rollout.unbind(0):
        begins = True
        for frame in frames.unbind(0):
            if begins:
                single.reset()
                single.state = frame["observation"].double().numpy()
                assert np.abs(single.state).max() <= 0.05
            action = int(frame["action"].argmax())
            assert single.action_space.contains(action)
            observation, reward, terminated, *_ = single.step(action)
            assert torch.allclose(frame["next", "observation"], torch.from_numpy(observation), atol=1e-4)
            assert (frame["next", "reward"].item(), frame["next", "terminated"].item()) == (reward, terminated)
            begins = terminated
            ends += terminated
    assert ends > 8
    same = (rollout["next", "observation"][:, :-1] == rollout["observation"][:, 1:]).all(-1)
    assert torch.equal(same, ~rollout["next", "done"][:, :-1, 0])


def test_entry_point() -> None:
    gymnasium.register("Custom-v0", vector_entry_point=lambda num_envs: Custom(AutoresetMode.DISABLED))
    try:
        env = GymEnv("Custom-v0", num_envs=2, vectorization_mode="vector_entry_point")
    finally:
        del gymnasium.registry["Custom-v0"]
    assert repr(env) == "GymEnv(env=Custom-v0, batch_size=[2], device=None)"
    check_env_specs(env)


# GymEnv(num_envs=) ---------------------------------------------------------------------------------------


def test_num_envs() -> None:
    env = GymEnv("CartPole-v1", num_envs=3)
    assert repr(env) == "GymEnv(env=CartPole-v1, batch_size=[3], device=None)"
    assert env.rollout(4).batch_size == (3, 4)
    assert GymEnv("CartPole-v1", num_envs=1).batch_size == (1,)
    check_env_specs(env)
    assert env.num_envs == 3


def test_options_reach_the_environments() -> None:
    env = GymEnv("CartPole-v1", num_envs=2, max_episode_steps=8, frame_skip=4, from_pixels=True)
    rollout = env.rollout(3)
    assert rollout.batch_size == (2, 2)
    assert rollout["next", "truncated"][:, -1].all()
    assert rollout["pixels"].shape == (2, 2, 400, 600, 3)
    with pytest.raises(ValueError, match="got a vector environment"):
        GymWrapper(sync(AutoresetMode.DISABLED, 2), frame_skip=2)


@pytest.mark.parametrize("device", [None, "cpu"])
def test_device(device: str | None) -> None:
    rollout = GymEnv("CartPole-v1", num_envs=2, device=device).rollout(30, break_when_any_done=False)
    assert rollout.device == (None if device is None else torch.device(device))


def test_discrete_actions_and_their_errors() -> None:
    env = GymEnv("CartPole-v1", num_envs=3)
    td = env.reset()
    with pytest.raises(EnvError, match=r"'action' must be one-hot.*nan.*first at index \[1\]"):
        env.step(td.set("action", torch.tensor([[0.0, 1.0], [0.0, torch.nan], [1.0, 0.0]])))
    env = GymEnv("CartPole-v1", num_envs=3, categorical_action_encoding=True)
    with pytest.raises(EnvError, match=r"must lie in 0 \.\. 1.*first at index \[2\]"):
        env.step(env.reset().set("action", torch.tensor([0, 1, 2])))
    env = GymEnv("Pendulum-v1", num_envs=3)
    with pytest.raises(EnvError, match=r"NaN or infinity \(first at index \[1, 0\]\)"):
        env.step(env.reset().set("action", torch.tensor([[0.0], [torch.nan], [0.0]])))


# Seeds ---------------------------------------------------------------------------------------------------


def seeds_of(env: GymWrapper) -> list[list[int | None]]:
    return [single.seeds for single in env._env.envs]


def test_seeds() -> None:
    env = GymWrapper(sync(AutoresetMode.DISABLED, 5, 5))
    assert env.set_seed(3) == 4
    env.reset()
    env.reset()
    assert env.set_seed(3, static_seed=True) == 3
    env.reset()
    env.reset(seed=10)
    env.reset(seed=[7, 9])
    assert seeds_of(env) == [[3, None, 3, 10, 7], [4, None, 3, 11, 9]]


def test_a_partial_reset_uses_up_the_seeds_of_its_rows_only() -> None:
    env = GymWrapper(sync(AutoresetMode.DISABLED, 5, 5))
    td = env.reset()
    env.set_seed(3)
    for row in (0, 0, 1):
        td["_reset"] = torch.tensor([[row == 0], [row == 1]])
        td = env.reset(td)
    assert seeds_of(env) == [[None, 3, None], [None, 4]]


def test_seeds_of_environments_that_cannot_be_seeded_in_parts_wait_for_a_full_reset() -> None:
    env = GymWrapper(Custom(AutoresetMode.DISABLED))
    td = env.reset()
    env.set_seed(3)
    td["_reset"] = torch.tensor([[True], [False]])
    with pytest.raises(EnvError, match="cannot be seeded in parts"):
        env.reset(td.clone(), seed=1)
    env.set_seed(3)
    env.reset(td)
    env.reset()
    assert env._env.seeds == [None, None, 3]


def test_copies_go_their_own_way() -> None:
    env = GymEnv("CartPole-v1", num_envs=2)
    env.set_seed(0)
    td = env.rand_action(env.reset())
    twin = copy.deepcopy(env)
    assert (env.step(td.copy()) == twin.step(td.copy())).all()


# Info ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
def test_infos_belong_to_the_step_they_came_with(mode: AutoresetMode) -> None:
    env = GymWrapper(sync(mode, 2, 3)).set_info_dict_reader(default_info_dict_reader(["count", "absent"]))
    check_env_specs(env)
    rollout = env.rollout(5, break_when_any_done=False)
    assert rollout["next", "count"].tolist() == [[1, 2, 1, 2, 1], [1, 2, 3, 1, 2]]
    assert rollout["count"].tolist() == [[0, 1, 0, 1, 0], [0, 1, 2, 0, 1]]
    assert rollout["next", "absent"].tolist() == [[0] * 5] * 2


def test_infos_of_some_environments_only() -> None:
    class Sometimes(Counter):
        def step(self, action: int) -> Any:
            *rest, _ = super().step(action)
            return (*rest, {"vector": np.full(2, 7.0), "words": "x"} if self.length == 3 else {})

    reader = default_info_dict_reader()
    env = GymWrapper(sync(AutoresetMode.DISABLED, 2, 3, cls=Sometimes)).set_info_dict_reader(reader)
    assert reader.keys == ["count", "vector", "words"]
    assert env.rollout(2)["next", "vector"][:, 0].tolist() == [[0, 0], [7, 7]]


def test_an_environment_that_never_resets_parts_is_refused() -> None:
    with pytest.raises(ValueError, match=r"never resets by itself.*does not read options\['reset_mask'\], so that env"):
        GymWrapper(Lockstep(AutoresetMode.DISABLED))
