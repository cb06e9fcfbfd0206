"""GymEnv and GymWrapper over a single environment."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.vector import SyncVectorEnv

from rollwright.data import Binary, Bounded, Categorical, MultiCategorical, MultiOneHot, NonTensor, OneHot, Unbounded
from rollwright.envs import ParallelEnv, SerialEnv, check_env_specs
from rollwright.envs.libs import GymEnv, GymWrapper, default_info_dict_reader, gym_backend, set_gym_backend
from rollwright.errors import EnvError, EnvKeyError

BOX = spaces.Box(-1, 1, (2,), np.float32)


class Echo(gymnasium.Env):
    """Any spaces; observations are samples; refuses actions that its space does not contain."""

    def __init__(self, observation_space: spaces.Space = BOX, action_space: spaces.Space = BOX) -> None:
        self.observation_space = observation_space
        self.action_space = action_space
        self.taken: list[Any] = []
        self.resets: list[dict] = []

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> tuple[Any, dict]:
        super().reset(seed=seed)
        self.resets.append({"seed": seed, "options": options})
        return self.observation_space.sample(), {}

    def step(self, action: Any) -> tuple[Any, Any, Any, Any, dict]:
        assert self.action_space.contains(action), (action, type(action))
        self.taken.append(action)
        return self.observation_space.sample(), 1, False, False, {}


class Scripted(Echo):
    """Returns what it is told to, as observation or as the whole result of a step."""

    def __init__(self, observation: Any = None, result: Any = None, space: spaces.Space = BOX) -> None:
        super().__init__(space)
        self.observation, self.result = observation, result

    def step(self, action: Any) -> Any:
        if isinstance(self.result, Exception):
            raise self.result
        if self.result is not None:
            return self.result
        return self.observation, 1.0, False, False, {}


# Construction --------------------------------------------------------------------------------------


def test_names_and_attributes() -> None:
    env = GymEnv("CartPole-v1", max_episode_steps=7)
    assert repr(env) == "GymEnv(env=CartPole-v1, batch_size=[], device=None)"
    assert env.env_name == "CartPole-v1"
    assert env.spec.max_episode_steps == 7
    assert env.unwrapped is env._env.unwrapped
    assert repr(GymWrapper(Echo())) == "GymWrapper(env=Echo, batch_size=[], device=None)"
    with pytest.raises(AttributeError, match="no_such_thing"):
        _ = env.no_such_thing


def test_names_that_can_be_made() -> None:
    assert "CartPole-v1" in GymEnv.available_envs
    assert GymEnv("CartPole-v1").available_envs == GymEnv.available_envs


@pytest.mark.parametrize(
    ("space", "name"),
    [
        (spaces.Box(0, 255, (4, 5, 3), np.uint8), "pixels"),
        (spaces.Box(0, 255, (4, 5, 1), np.uint8), "observation"),
        (spaces.Box(0, 255, (4, 5), np.uint8), "observation"),
        (spaces.Box(0, 10, (4, 5, 3), np.uint8), "observation"),
        (spaces.Box(0, 255, (4, 5, 3), np.float32), "observation"),
    ],
)
def test_images_in_colours_are_pixels(space: spaces.Space, name: str) -> None:
    one, several = GymWrapper(Echo(space)), GymWrapper(SyncVectorEnv([lambda: Echo(space)] * 2))
    assert set(one.observation_spec.keys()) == set(several.observation_spec.keys()) == {name}
    assert one.rollout(2)[name].dtype == one.observation_spec[name].dtype


def test_batch_size_and_device_defaults() -> None:
    env = GymEnv("CartPole-v1")
    assert env.batch_size == torch.Size([])
    assert env.device is None
    assert GymEnv("CartPole-v1", num_envs=0).batch_size == torch.Size([])
    on_cpu = GymEnv("CartPole-v1", device="cpu")
    assert on_cpu.device == torch.device("cpu")
    assert on_cpu.rollout(2).device == torch.device("cpu")


def test_layout_of_a_step() -> None:
    rollout = GymEnv("CartPole-v1").rollout(3)
    assert rollout["observation"].shape == (3, 4)
    assert rollout["observation"].dtype == torch.float32
    assert rollout["action"].shape == (3, 2)
    assert rollout["next", "reward"].shape == (3, 1)
    assert rollout["next", "reward"].dtype == torch.float32
    for flag in ("done", "terminated", "truncated"):
        assert rollout["next", flag].shape == (3, 1)
        assert rollout["next", flag].dtype == torch.bool
    assert GymEnv("CartPole-v1", categorical_action_encoding=True).rollout(3)["action"].shape == (3,)


@pytest.mark.parametrize("make", [lambda: GymEnv("NoSuchTask-v0"), lambda: GymEnv("no_such_package:Task-v0")])
def test_unknown_task_repeats_gymnasiums_message(make: Any) -> None:
    with pytest.raises(EnvError, match=r"gymnasium raised .*(NoSuchTask|no_such_package)"):
        make()


@pytest.mark.parametrize(
    ("kwargs", "error", "message"),
    [
        ({"no_such_option": 1}, EnvError, "no_such_option"),
        ({"num_envs": -1}, ValueError, "num_envs: expected"),
        ({"num_envs": True}, ValueError, "num_envs: expected"),
        ({"frame_skip": 0}, ValueError, "frame_skip: expected"),
        ({"vectorization_mode": "threads", "num_envs": 2}, ValueError, "vectorization_mode: expected"),
    ],
)
def test_bad_options(kwargs: dict, error: type, message: str) -> None:
    with pytest.raises(error, match=message):
        GymEnv("CartPole-v1", **kwargs)


@pytest.mark.parametrize("env", ["CartPole-v1", None, lambda: gymnasium.make("CartPole-v1"), BOX])
def test_wrapper_refuses_what_is_no_environment(env: Any) -> None:
    with pytest.raises(TypeError, match=r"env: expected a gymnasium\.Env.*GymEnv\(name\)"):
        GymWrapper(env)


@pytest.mark.parametrize("name", ["observation_space", "action_space"])
def test_an_environment_without_a_space(name: str) -> None:
    class Half(gymnasium.Env):
        pass

    spaces_of = {"observation_space": BOX, "action_space": BOX}
    env = Half()
    env.__dict__.update({key: space for key, space in spaces_of.items() if key != name})
    with pytest.raises(EnvError, match=rf"env: .*Half has no {name}. Set self.{name} in its constructor"):
        GymWrapper(env)


def test_name_must_be_a_string() -> None:
    with pytest.raises(TypeError, match="env_name"):
        GymEnv(gymnasium.make("CartPole-v1"))


def test_backend() -> None:
    set_gym_backend("gymnasium").set()
    with set_gym_backend(gymnasium):
        assert gym_backend() is gymnasium
        assert gym_backend("wrappers") is gymnasium.wrappers
    assert set_gym_backend("gymnasium")(lambda x: x + 1)(1) == 2
    with pytest.warns(UserWarning, match="made by gymnasium"), set_gym_backend("gym"):
        assert gym_backend() is gymnasium
    for other in ("brax", torch):
        with pytest.raises(ValueError, match=r"backend: expected 'gymnasium'"):
            set_gym_backend(other)


# Spaces --------------------------------------------------------------------------------------------

NESTED = spaces.Dict(a=BOX, b=spaces.Dict(c=spaces.Discrete(3), d=spaces.Tuple((BOX, spaces.Discrete(2)))))


@pytest.mark.parametrize("categorical", [False, True])
@pytest.mark.parametrize(
    "space",
    [
        BOX,
        spaces.Box(-1, 1, (), np.float64),
        spaces.Box(0, 255, (3, 4, 1), np.uint8),
        spaces.Box(0, 1000, (2,), np.uint16),
        spaces.Box(-5, 5, (2,), np.int32),
        spaces.Discrete(4),
        spaces.Discrete(4, start=-2),
        spaces.MultiDiscrete([2, 3]),
        spaces.MultiDiscrete([2, 2], start=[1, 5]),
        spaces.MultiDiscrete([[2, 3], [4, 5]]),
        spaces.MultiBinary(3),
        spaces.MultiBinary((2, 2)),
        spaces.Tuple((spaces.Discrete(2), BOX)),
        NESTED,
    ],
    ids=str,
)
def test_every_space_as_observation_and_as_action(space: spaces.Space, categorical: bool) -> None:
    check_env_specs(GymWrapper(Echo(space), categorical_action_encoding=categorical), seed=0)
    check_env_specs(GymWrapper(Echo(action_space=space), categorical_action_encoding=categorical), seed=0)


@pytest.mark.parametrize(
    "space",
    [
        spaces.Text(5),
        spaces.Sequence(BOX),
        spaces.Graph(BOX, spaces.Discrete(2)),
        spaces.Dict(words=spaces.Text(5), x=BOX),
        spaces.OneOf((BOX, spaces.Discrete(2))),
    ],
    ids=str,
)
def test_spaces_that_no_tensor_holds(space: spaces.Space) -> None:
    env = GymWrapper(Echo(space))
    env.observation_space.seed(0)
    rollout = env.rollout(3)
    check_env_specs(env)
    key = "words" if isinstance(space, spaces.Dict) else "observation"
    assert isinstance(env.observation_spec[key], NonTensor)
    names = rollout[-1]["next", key]
    assert (space[key] if isinstance(space, spaces.Dict) else space).contains(names)


def test_specs_of_spaces() -> None:
    def spec(space: spaces.Space, categorical: bool = False) -> Any:
        return GymWrapper(Echo(action_space=space), categorical).action_spec

    assert isinstance(spec(BOX), Bounded)
    assert isinstance(spec(spaces.Box(-np.inf, np.inf, (2,))), Unbounded)
    assert isinstance(spec(spaces.Discrete(3)), OneHot)
    assert isinstance(spec(spaces.Discrete(3), True), Categorical)
    assert isinstance(spec(spaces.MultiDiscrete([2, 3])), MultiOneHot)
    assert isinstance(spec(spaces.MultiDiscrete([2, 3]), True), MultiCategorical)
    assert isinstance(spec(spaces.MultiBinary(3)), Binary)


def test_keys_of_dict_and_tuple() -> None:
    env = GymWrapper(Echo(NESTED, spaces.Dict(move=spaces.Discrete(2), turn=spaces.Tuple((BOX, BOX)))))
    assert set(env.observation_keys) == {"a", ("b", "c"), ("b", "d", "0"), ("b", "d", "1")}
    assert set(env.action_keys) == {"move", ("turn", "0"), ("turn", "1")}
    env = GymWrapper(Echo(spaces.Tuple((BOX, BOX)), spaces.Tuple((BOX, BOX))))
    assert env.observation_keys == [("observation", "0"), ("observation", "1")]
    assert env.action_keys == [("action", "0"), ("action", "1")]


@pytest.mark.parametrize("name", ["action", "reward", "done", "next"])
def test_names_that_clash(name: str) -> None:
    with pytest.raises(ValueError, match=rf"same name.*'{name}'.*TransformObservation"):
        GymWrapper(Echo(spaces.Dict({name: BOX})))


def test_discrete_values_begin_at_start() -> None:
    class Fixed(Echo):
        def reset(self, **kwargs: Any) -> tuple[Any, dict]:
            return np.int64(6), {}

    space = spaces.Discrete(3, start=5)
    assert GymWrapper(Fixed(space)).reset()["observation"].tolist() == [0, 1, 0]
    assert GymWrapper(Fixed(space), True).reset()["observation"].item() == 1
    env = GymWrapper(Echo(action_space=space))
    env.step(env.reset().set("action", torch.tensor([0, 0, 1])))
    assert env._env.taken == [7]
    assert type(env._env.taken[0]) is int


def test_actions_reach_the_environment() -> None:
    env = GymWrapper(Echo(action_space=spaces.Tuple((spaces.MultiDiscrete([2, 3]), spaces.Dict(x=BOX)))))
    td = env.reset()
    td["action", "0"] = torch.tensor([0, 1, 1, 0, 0])
    td["action", "1", "x"] = torch.tensor([0.5, -0.5])
    env.step(td)
    first, second = env._env.taken[0]
    assert first.tolist() == [1, 0]
    assert second["x"].tolist() == [0.5, -0.5]


@pytest.mark.parametrize("batch", [(), (2,)])
def test_actions_that_no_tensor_holds(batch: tuple[int, ...]) -> None:
    def make() -> Echo:
        return Echo(action_space=spaces.Dict(say=spaces.Text(5), move=spaces.Discrete(2)))

    env = GymWrapper(SyncVectorEnv([make] * 2, autoreset_mode="Disabled") if batch else make())
    env.rollout(2)
    for single in env._env.envs if batch else [env._env]:
        assert [type(action["say"]) for action in single.taken] == [str, str]


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.float32])
def test_one_hot_actions_of_any_dtype(dtype: torch.dtype) -> None:
    env = GymWrapper(Echo(action_space=spaces.Discrete(3)))
    env.step(env.reset().set("action", torch.tensor([0, 1, 0], dtype=dtype)))
    assert env._env.taken == [1]


# Actions that an environment cannot take --------------------------------------------------------------


@pytest.mark.parametrize(
    ("space", "categorical", "action", "message"),
    [
        (BOX, False, torch.tensor([0.0, torch.nan]), r"NaN or infinity .*index \[1\]"),
        (BOX, False, torch.tensor([torch.inf, 0.0]), "NaN or infinity"),
        (BOX, False, torch.zeros(3), r"shape \[3\], expected \[2\]"),
        (spaces.Box(-5, 5, (2,), np.int32), False, torch.zeros(2), "has dtype float32, expected int32"),
        (spaces.Box(0, 255, (2,), np.uint8), False, torch.tensor([0, 256]), "integers that uint8 can hold"),
        (spaces.Discrete(3), False, torch.tensor([torch.nan, 0.0, 0.0]), "must be one-hot.*finite"),
        (spaces.Discrete(3), False, torch.tensor([0.0, torch.inf, 0.0]), "must be one-hot.*finite"),
        (spaces.Discrete(3), False, torch.full((3,), -torch.inf), "must be one-hot.*finite"),
        (spaces.Discrete(3), False, torch.tensor(1), r"shape \[\], expected \[3\]"),
        (spaces.Discrete(3), True, torch.tensor(3), r"must lie in 0 \.\. 2, got 3"),
        (spaces.Discrete(3), True, torch.tensor(-1), r"must lie in 0 \.\. 2"),
        (spaces.Discrete(3), True, torch.tensor(1.0), "dtype float32, expected integers"),
        (spaces.Discrete(3), True, torch.ones(1, 1), r"shape \[1, 1\] and dtype float32, expected \[\] of integers"),
        (
            BOX,
            False,
            torch.zeros(3, dtype=torch.complex64),
            r"complex64, expected \[2\] of float32. Reshape and cast it",
        ),
        (spaces.Discrete(3), True, torch.tensor([1]), r"shape \[1\], expected \[\]"),
        (spaces.MultiDiscrete([2, 2]), False, torch.tensor([1, 0, torch.nan, 1]), "must be one-hot.*finite"),
        (spaces.MultiDiscrete([2, 2]), True, torch.tensor([0, 2]), r"must lie in 0 \.\. \[1, 1\].*index \[1\]"),
        (spaces.MultiBinary(2), False, torch.tensor([0, 2]), "zeros and ones"),
    ],
)
def test_bad_actions(space: spaces.Space, categorical: bool, action: torch.Tensor, message: str) -> None:
    env = GymWrapper(Echo(action_space=space), categorical)
    with pytest.raises(EnvError, match=rf"GymWrapper\(env=Echo.*'action' .*{message}"):
        env.step(env.reset().set("action", action))
    assert env._env.taken == []


def test_missing_action() -> None:
    env = GymEnv("CartPole-v1")
    with pytest.raises(EnvKeyError, match=r"CartPole-v1.*'action'.*rand_action"):
        env.step(env.reset())


def test_action_that_is_no_tensor() -> None:
    env = GymWrapper(Echo())
    with pytest.raises(EnvError, match="'action' must be a tensor"):
        env.step(env.reset().set_non_tensor("action", "left"))


# Environments that break their spaces -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("space", "observation", "message"),
    [
        (BOX, np.zeros(3, np.float32), r"'observation' has shape \[3\]; its space says \[2\]"),
        (BOX, np.zeros(2, np.int64), "'observation' has dtype int64; its space says float32"),
        (BOX, None, "'observation' has shape"),
        (BOX, "text", "'observation' has shape"),
        (BOX, [[1], [1, 2]], "'observation' is not an array"),
        (spaces.Box(0, 5, (), np.int64), 1.5, "'observation' has dtype float64"),
        (spaces.Discrete(3), 3, "'observation' is 3, outside"),
        (spaces.Discrete(3), 0.0, "'observation' is 0.0; its space says integers"),
        (spaces.MultiDiscrete([2, 2]), np.array([0, 2]), "outside"),
        (spaces.Dict(a=BOX), {"a": np.zeros(1, np.float32)}, r"'a' has shape \[1\]"),
    ],
)
def test_bad_observations(space: spaces.Space, observation: Any, message: str) -> None:
    env = GymWrapper(Scripted(observation, space=space))
    with pytest.raises(EnvError, match=rf"GymWrapper\(env=Scripted.*step.*{message}"):
        env.rand_step()


def test_observations_of_very_many_choices_take_no_table() -> None:
    env = GymWrapper(Scripted(70_000, space=spaces.Discrete(100_000)))
    observation = env.rand_step()["next", "observation"]
    assert observation.shape == (100_000,)
    assert observation.nonzero().tolist() == [[70_000]]
    pair = GymWrapper(Scripted(np.array([2, 70_000]), space=spaces.MultiDiscrete([3, 100_000])))
    assert pair.rand_step()["next", "observation"].nonzero().tolist() == [[2], [70_003]]


@pytest.mark.parametrize("shape", [(), (3,), (2, 2)])
def test_boxes_of_bools(shape: tuple[int, ...]) -> None:
    space = spaces.Box(0, 1, shape, np.bool_)
    env = GymWrapper(Echo(space, space))
    td = env.rand_step()
    assert (td["next", "observation"].dtype, td["next", "observation"].shape) == (torch.bool, shape)
    assert env._env.taken[0].dtype == np.bool_
    assert np.array_equal(env._env.taken[0], td["action"].numpy())
    check_env_specs(env)


@pytest.mark.parametrize("shape", [(), (2,)])
def test_other_floats_are_cast_with_one_warning(shape: tuple[int, ...]) -> None:
    number = 1 / 3
    value = np.full(shape, number)[()]  # float64
    env = GymWrapper(Scripted(value, space=spaces.Box(-1, 1, shape, np.float32)))
    td = env.rand_action(env.reset())
    with pytest.warns(UserWarning, match=r"'observation' has dtype float64; its space says float32\. It is cast"):
        env.step(td)
    for _ in range(3):
        stepped = env.step(td)["next", "observation"]  # warnings are errors here
        assert stepped.dtype == torch.float32
        assert bool((stepped == np.float32(number)).all())


@pytest.mark.parametrize("observation", [{}, {"b": 1}, np.zeros(2), None])
def test_missing_observation(observation: Any) -> None:
    env = GymWrapper(Scripted(observation, space=spaces.Dict(a=BOX)))
    with pytest.raises(EnvKeyError, match=r"env=Scripted.*step returned no 'a'"):
        env.rand_step()


GOOD = np.zeros(2, np.float32)


@pytest.mark.parametrize(
    ("result", "message"),
    [
        ((GOOD, 1.0, False, {}), "step must return .* got 4 values"),
        (GOOD, "step must return .* got ndarray"),
        ((GOOD, None, False, False, {}), "'reward' = None, expected a number"),
        ((GOOD, "much", False, False, {}), "'reward' = 'much'"),
        ((GOOD, np.zeros(2), False, False, {}), "'reward'"),
        ((GOOD, 1.0, None, False, {}), "'terminated' = None"),
        ((GOOD, 1.0, False, "no", {}), "'truncated' = 'no'"),
        (RuntimeError("the wheel came off"), "raised in step: RuntimeError: the wheel came off"),
    ],
)
def test_bad_results_of_a_step(result: Any, message: str) -> None:
    with pytest.raises(EnvError, match=rf"(?s)GymWrapper\(env=Scripted.*{message}"):
        GymWrapper(Scripted(result=result)).rand_step()


def test_bad_result_of_a_reset() -> None:
    env = Echo()
    env.reset = lambda **kwargs: env.observation_space.sample()
    with pytest.raises(EnvError, match=r"reset must return \(observation, info\), got ndarray"):
        GymWrapper(env).reset()


@pytest.mark.parametrize(
    ("space", "observation"), [(BOX, [0.5, 1]), (spaces.Box(0, 1, ()), 0.5), (spaces.Discrete(2), np.array(1))]
)
def test_python_numbers_and_lists_are_observations(space: spaces.Space, observation: Any) -> None:
    check_env_specs(GymWrapper(Scripted(observation, space=space)))


@pytest.mark.parametrize("reward", [1, True, np.float64(1), np.array(1.0), np.array([1], np.int8)])
def test_rewards_and_flags_are_cast(reward: Any) -> None:
    outcome = GymWrapper(Scripted(result=(GOOD, reward, np.bool_(True), 0, {}))).rand_step()["next"]
    assert outcome["reward"].dtype == torch.float32
    assert outcome["reward"].tolist() == [1.0]
    assert [outcome[key].item() for key in ("terminated", "truncated", "done")] == [True, False, True]


# Memory ------------------------------------------------------------------------------------------------


def test_data_is_not_the_environments_memory() -> None:
    class Reusing(Echo):
        buffer = np.zeros(2, np.float32)

        def reset(self, **kwargs: Any) -> tuple[Any, dict]:
            self.buffer[:] = 0
            return self.buffer, {}

        def step(self, action: Any) -> Any:
            action[:] = 9  # an environment that scribbles on its input
            self.buffer += 1
            return self.buffer, 0.0, False, False, {}

    rollout = GymWrapper(Reusing()).rollout(3)
    assert rollout["observation"][:, 0].tolist() == [0, 1, 2]
    assert rollout["next", "observation"][:, 0].tolist() == [1, 2, 3]
    assert (rollout["action"] <= 1).all()


# Seeds and options -------------------------------------------------------------------------------------


def test_seed_is_passed_with_the_next_reset_only() -> None:
    env = GymWrapper(Echo())
    assert env.set_seed(3) == 3
    env.reset()
    env.reset()
    env.reset(seed=5, options={"easy": True})
    assert [call["seed"] for call in env._env.resets] == [3, None, 5]
    assert [call["options"] for call in env._env.resets] == [None, None, {"easy": True}]


def test_same_seed_same_data() -> None:
    def rollout(seed: int) -> torch.Tensor:
        env = GymEnv("CartPole-v1")
        env.set_seed(seed)
        return env.rollout(50, break_when_any_done=False)["next", "observation"]

    assert torch.equal(rollout(0), rollout(0))
    assert not torch.equal(rollout(0), rollout(1))


def test_seeding_in_the_middle_reproduces_the_beginning() -> None:
    env = GymEnv("CartPole-v1")
    env.set_seed(0)
    first = env.rollout(20, break_when_any_done=False)
    env.set_seed(0)
    assert (first == env.rollout(20, break_when_any_done=False)).all()


# Life --------------------------------------------------------------------------------------------------


def test_close() -> None:
    class Closing(Echo):
        closed = 0

        def close(self) -> None:
            self.closed += 1

    env = GymWrapper(Closing())
    td = env.rand_action(env.reset())
    env.close()
    assert env._env.closed == 1
    with pytest.raises(EnvError, match=r"env=Closing.*clos"):
        env.step(td)
    env.close()
    env.close(raise_if_closed=False)
    assert env._env.closed == 1
    assert not env.reset()["done"].any()  # if the environment allows it, as most of gymnasium do
    env.step(td)
    env.close()
    assert env._env.closed == 2


@pytest.mark.parametrize("twin_of", [copy.deepcopy, lambda env: pickle.loads(pickle.dumps(env))])
def test_copies_go_their_own_way(twin_of: Any) -> None:
    env = GymEnv("CartPole-v1", categorical_action_encoding=True)
    env.set_seed(0)
    td = env.reset()
    twin = twin_of(env)
    for _ in range(5):
        stepped = env.step(td.copy().set("action", torch.tensor(1)))
        twin_stepped = twin.step(td.copy().set("action", torch.tensor(1)))
        assert (stepped == twin_stepped).all()


# Frame skips and pixels ----------------------------------------------------------------------------------


def test_frame_skip_sums_rewards_and_stops_at_the_end() -> None:
    env = GymEnv("CartPole-v1", frame_skip=4, max_episode_steps=10)
    env.set_seed(0)
    plain = gymnasium.make("CartPole-v1", max_episode_steps=10)
    plain.reset(seed=0)
    rollout = env.rollout(5, policy=lambda td: td.set("action", torch.tensor([0, 1])))
    for t, frame in enumerate(rollout.unbind(0)):
        rewards = []
        for _ in range(4):
            obs, reward, terminated, truncated, _ = plain.step(1)
            rewards.append(reward)
            if terminated or truncated:
                break
        assert frame["next", "reward"].item() == sum(rewards), t
        np.testing.assert_array_equal(frame["next", "observation"].numpy(), obs)
    assert rollout["next", "done"][-1]


def test_frame_skip_of_environments_that_skip_by_themselves() -> None:
    made = []
    gymnasium.register("Skipping-v0", lambda frameskip: made.append(frameskip) or Echo(), kwargs={"frameskip": 4})
    try:
        env = GymEnv("Skipping-v0", frame_skip=2)
    finally:
        del gymnasium.registry["Skipping-v0"]
    assert made == [2]
    env.rand_step()
    assert len(env.unwrapped.taken) == 1


def test_pixels() -> None:
    env = GymEnv("CartPole-v1", from_pixels=True)
    assert env.observation_keys == ["pixels"]
    pixels = env.rollout(2)["next", "pixels"]
    assert pixels.shape == (2, 400, 600, 3)
    assert pixels.dtype == torch.uint8
    both = GymEnv("CartPole-v1", from_pixels=True, pixels_only=False)
    assert both.observation_keys == ["observation", "pixels"]
    check_env_specs(both)
    made = gymnasium.make("CartPole-v1", render_mode="rgb_array")
    assert GymWrapper(made, from_pixels=True).observation_keys == ["observation", "pixels"]
    assert [(env.from_pixels, env.pixels_only), (both.from_pixels, both.pixels_only)] == [(True, True), (True, False)]
    assert not GymEnv("CartPole-v1").from_pixels
    with pytest.raises(ValueError, match=r"from_pixels: expected .*render_mode='rgb_array'"):
        GymWrapper(gymnasium.make("CartPole-v1"), from_pixels=True)


# Info --------------------------------------------------------------------------------------------------


class Informing(Echo):
    """Counts in ``info``; "late" is there from the first step on."""

    def reset(self, **kwargs: Any) -> tuple[Any, dict]:
        self.count = 0
        return super().reset(**kwargs)[0], {"count": 0, "_private": 1}

    def step(self, action: Any) -> Any:
        self.count += 1
        *rest, _ = super().step(action)
        info = {"count": self.count, "late": np.full(2, self.count, np.int32), "nest": {"x": 1.5}, "reward": 3.0}
        return (*rest, info)


def test_info_by_key() -> None:
    env = GymWrapper(Informing()).set_info_dict_reader(default_info_dict_reader(["count", ("nest", "x")]))
    check_env_specs(env)
    rollout = env.rollout(3)
    assert rollout["count"].tolist() == [0.0, 1.0, 2.0]
    assert rollout["next", "count"].tolist() == [1.0, 2.0, 3.0]
    assert rollout["nest", "x"].tolist() == [0.0, 1.5, 1.5]


@pytest.mark.parametrize("as_mapping", [False, True])
def test_info_with_specs(as_mapping: bool) -> None:
    late = Unbounded((2,), dtype=torch.int32)
    reader = default_info_dict_reader(["late"], {"late": late} if as_mapping else [late])
    env = GymWrapper(Informing()).set_info_dict_reader(reader)
    check_env_specs(env)
    assert env.rollout(3)["next", "late"].tolist() == [[1, 1], [2, 2], [3, 3]]


def test_info_found_in_the_environment() -> None:
    env = GymWrapper(Informing()).auto_register_info_dict()
    assert set(env.observation_keys) == {"observation", "count", "late", ("nest", "x")}  # "reward" is taken
    assert env.observation_spec["late"].dtype == torch.int32
    assert env.rollout(2)["late"].tolist() == [[0, 0], [1, 1]]
    with pytest.raises(RuntimeError, match="info reader already"):
        env.auto_register_info_dict()


def test_info_read_by_a_function() -> None:
    env = GymWrapper(Informing())
    env.set_info_dict_reader(lambda info, td: td.set("twice", torch.tensor(2 * info["count"])))
    assert env.rollout(2)["next", "twice"].tolist() == [2, 4]


def test_info_errors() -> None:
    with pytest.raises(ValueError, match="one spec for each"):
        default_info_dict_reader(["a", "b"], [Unbounded(())])
    with pytest.raises(ValueError, match="expected specs of the keys"):
        default_info_dict_reader(["a"], {"b": Unbounded(())})
    with pytest.raises(ValueError, match="'observation' already"):
        GymWrapper(Informing()).set_info_dict_reader(default_info_dict_reader(["observation"]))
    env = GymWrapper(Informing()).set_info_dict_reader(default_info_dict_reader(["late"]))
    with pytest.raises(EnvError, match=r"env=Informing.*info entry 'late'.*shape \[\], got shape \[2\].*spec="):
        env.rand_step()


@pytest.mark.parametrize("num_envs", [None, 3])
def test_several_workers_are_a_parallel_env(num_envs: int | None) -> None:
    env = GymEnv("CartPole-v1", num_workers=2, num_envs=num_envs, categorical_action_encoding=True)
    try:
        assert isinstance(env, ParallelEnv)
        assert env.batch_size == ((2,) if num_envs is None else (2, 3))
        assert env.rollout(3)["action"].dtype == torch.int64
    finally:
        env.close()
    assert type(GymEnv("CartPole-v1", num_workers=1, num_envs=num_envs)) is GymEnv
    assert type(pickle.loads(pickle.dumps(GymEnv("CartPole-v1", num_workers=1)))) is GymEnv
    with pytest.raises(ValueError, match="num_workers: expected a number of at least 1, got 0"):
        GymEnv("CartPole-v1", num_workers=0)


class Precise(GymWrapper):
    """Declares rewards of double precision, as wrappers of other libraries do."""

    reward_dtype = np.float64


@pytest.mark.parametrize("number", [0.1, np.float64(0.1), 1])
def test_rewards_have_the_dtype_that_the_wrapper_declares(number):
    env = Precise(gymnasium.wrappers.TransformReward(gymnasium.make("CartPole-v1"), lambda _: number))
    rewards = env.rollout(3)["next", "reward"]
    assert rewards.dtype == env.reward_spec.dtype == torch.float64
    assert rewards.flatten().tolist() == [number] * 3


@pytest.mark.parametrize("make", [GymEnv, lambda name: SerialEnv(2, lambda: GymEnv(name))])
def test_a_step_that_is_exchanged_later_is_the_one_that_is_taken(make):
    env = make("CartPole-v1")
    env.rollout(2)
    inner = env.worker0 if isinstance(env, SerialEnv) else env
    step, taken = inner._step, []
    inner._step = lambda td: taken.append(td) or step(td)
    env.rollout(2)
    assert len(taken) == 2
