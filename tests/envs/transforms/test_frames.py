"""CatFrames: windows by row, partial resets, data with a time dimension, specs, state."""

from __future__ import annotations

import copy

import pytest
import torch
from tensordict import TensorDict

from rollwright.data import Bounded, Unbounded
from rollwright.envs import CatFrames, Compose, GymEnv, ObservationNorm, RewardSum, TransformedEnv, check_env_specs
from rollwright.errors import EnvError
from rollwright.testing.mocking_classes import DiscreteActionConvMockEnv


def climb(env, steps, policy):
    return env.rollout(steps, policy, break_when_any_done=False)


def rungs(rollout, key="rung"):
    """The rungs in each window, oldest first, below the start of the row."""
    return rollout[key][..., 0::2].remainder(100).int().tolist()


def test_windows_restart_for_each_row_alone(ladder, do_nothing):
    env = TransformedEnv(ladder([2, 9]), CatFrames(3, -1, ["rung"]))
    check_env_specs(env)
    rollout = climb(env, 5, do_nothing)
    assert rungs(rollout)[0] == [[0, 0, 0], [0, 0, 1], [0, 0, 0], [0, 0, 1], [0, 0, 0]]
    assert rungs(rollout)[1] == [[0, 0, 0], [0, 0, 1], [0, 1, 2], [1, 2, 3], [2, 3, 4]]
    following = rungs(rollout, ("next", "rung"))
    assert following[0] == [[0, 0, 1], [0, 1, 2], [0, 0, 1], [0, 1, 2], [0, 0, 1]]
    assert following[1] == [[0, 0, 1], [0, 1, 2], [1, 2, 3], [2, 3, 4], [3, 4, 5]]


def test_constant_padding(ladder, do_nothing):
    env = TransformedEnv(ladder([2, 9]), CatFrames(3, -1, ["rung"], padding="constant", padding_value=-5000))
    check_env_specs(env)
    assert env.observation_spec["rung"].low.min() == -5000
    rollout = climb(env, 4, do_nothing)
    assert rollout["rung"][0, :, 0].tolist() == [-5000, -5000, -5000, -5000]
    assert rollout["rung"][1, :, 0].tolist() == [-5000, -5000, 100, 101]


def test_rows_that_go_on_are_untouched_by_a_reset(ladder, do_nothing):
    env = TransformedEnv(ladder([9, 9, 9]), CatFrames(2, -1, ["rung"], ["frames"]))
    td = env.reset()
    for _ in range(3):
        td = env.step_and_maybe_reset(do_nothing(td))[1]
    td = env.reset(td.set("_reset", torch.tensor([[False], [True], [False]])))
    assert td["frames"][:, 0].tolist() == [2, 100, 202]
    frame = env.step(do_nothing(td))
    assert frame["next", "frames"][:, 0].tolist() == [3, 100, 203]
    assert frame["next", "frames"][:, 2].tolist() == [4, 101, 204]


def test_later_transforms_and_users_cannot_disturb_the_past(ladder, do_nothing):
    norm = ObservationNorm(0.0, 10.0, in_keys=["rung"])
    env = TransformedEnv(ladder([9]), Compose(CatFrames(2, -1, ["rung"]), norm))
    td = env.reset()
    for step in range(1, 4):
        td["rung"].mul_(0)  # a policy that normalises in place
        td = env.step_and_maybe_reset(do_nothing(td))[1]
        assert td["rung"][0, ::2].tolist() == [10.0 * (step - 1), 10.0 * step]


def test_images_along_channels():
    env = TransformedEnv(DiscreteActionConvMockEnv(), CatFrames(4, -3))
    check_env_specs(env)
    single = DiscreteActionConvMockEnv().observation_spec["pixels"].shape
    assert env.reset()["pixels"].shape == (*single[:-3], 4 * single[-3], *single[-2:])


def test_discrete_observations_get_a_plain_spec(ladder):
    env = TransformedEnv(ladder([3], masks=True), CatFrames(2, -1, ["mask"], ["masks"]))
    assert env.observation_spec["masks"] == Unbounded((1, 6), dtype=torch.bool)
    check_env_specs(env)


def test_one_frame_is_the_frame(ladder, do_nothing):
    env = TransformedEnv(ladder([2, 3]), CatFrames(1, -1, ["rung"]))
    assert (climb(env, 5, do_nothing) == climb(ladder([2, 3]), 5, do_nothing)).all()


@pytest.mark.parametrize("padding", ["same", "constant"])
@pytest.mark.parametrize("N", [1, 2, 4, 9])
def test_data_give_what_the_environment_gives(ladder, do_nothing, padding, N):
    env = TransformedEnv(ladder([2, 3, 9]), CatFrames(N, -1, ["rung"], ["frames"], padding, -7.0))
    rollout = climb(env, 7, do_nothing)
    keys = ["rung", ("next", "rung")], ["frames", ("next", "frames")]
    offline = CatFrames(N, -1, *keys, padding, -7.0)
    data = offline(rollout.exclude("frames", ("next", "frames")))
    for key in keys[1]:
        assert torch.equal(data[key], rollout[key])
    in_place = CatFrames(N, -1, keys[0], padding=padding, padding_value=-7.0)(rollout.clone())
    assert torch.equal(in_place["next", "rung"], rollout["next", "frames"])


def test_time_may_be_any_named_dimension(ladder, do_nothing):
    rollout = climb(ladder([2, 3]), 7, do_nothing)
    join = CatFrames(3, -1, ["rung"], ["frames"])
    expected = join(rollout.clone())["frames"]
    assert torch.equal(join(rollout.transpose(0, 1))["frames"], expected.transpose(0, 1))


@pytest.mark.parametrize("marks", ["is_init", ("collector", "traj_ids"), ("next", "done")])
def test_slices_are_joined_apart(marks):
    """Slices of a replay buffer end in no done flag where they were cut out of a trajectory."""
    data = TensorDict({"x": torch.arange(6.0)[:, None], "next": {"reward": torch.ones(6, 1)}}, [6])
    marked = {
        "is_init": torch.tensor([[True], [False], [False], [True], [False], [False]]),
        ("collector", "traj_ids"): torch.tensor([0, 0, 0, 7, 7, 7]),
        ("next", "done"): torch.tensor([[False], [False], [True], [False], [False], [False]]),
    }
    data.set(marks, marked[marks])
    assert CatFrames(3, -1, ["x"])(data.clone())["x"].tolist() == [
        *([0, 0, 0], [0, 0, 1], [0, 1, 2]),
        *([3, 3, 3], [3, 3, 4], [3, 4, 5]),
    ]
    total = RewardSum([("next", "reward")], ["total"])(data)["total"]
    assert total.squeeze(-1).tolist() == [1, 2, 3, 1, 2, 3]


def test_images_in_data():
    images = torch.arange(5.0).reshape(5, 1, 1, 1).expand(5, 1, 2, 2)
    data = CatFrames(3, -3)(TensorDict({"pixels": images}, [5]))
    assert data["pixels"].shape == (5, 3, 2, 2)
    assert data["pixels"][:, :, 0, 0].tolist() == [[0, 0, 0], [0, 0, 1], [0, 1, 2], [1, 2, 3], [2, 3, 4]]


def test_state_dict_round_trip(ladder, do_nothing):
    env = TransformedEnv(ladder([9]), CatFrames(3, -1, ["rung"]))
    td = env.reset()
    for _ in range(3):
        td = env.step_and_maybe_reset(do_nothing(td))[1]
    state, carried = copy.deepcopy(env.state_dict()), td.clone()
    expected = env.step(do_nothing(td))["next", "rung"]
    other = TransformedEnv(ladder([9]), CatFrames(3, -1, ["rung"]))
    other.load_state_dict(state)
    other.base_env.taken += 3
    assert torch.equal(other.step(do_nothing(carried))["next", "rung"], expected)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((0, -1), "N: expected at least 1, got 0"),
        ((2, 1), "dim: expected a negative number, counted from the last dimension, got 1"),
        ((2, -1, None, None, "zeros"), r"padding: expected one of \('same', 'constant'\), got 'zeros'"),
    ],
)
def test_wrong_arguments(arguments, message):
    with pytest.raises(ValueError, match=message):
        CatFrames(*arguments)


def test_errors_in_use(ladder, do_nothing):
    env = TransformedEnv(ladder([9]), CatFrames(2, -1, ["rung"]))
    with pytest.raises(EnvError, match=r"past frames of shape \[1, 4\] for 'rung', got none. Reset the environment"):
        env.step(do_nothing(TensorDict({}, [1])))
    with pytest.raises((EnvError, ValueError), match="dim: expected one of the 1 dimensions that 'rung' has"):
        TransformedEnv(ladder([9]), CatFrames(2, -2, ["rung"])).reset()
    with pytest.raises(ValueError, match="dim: expected one of the 1 dimensions that 'rung' has"):
        _ = TransformedEnv(ladder([9]), CatFrames(2, -2, ["rung"])).observation_spec
    with pytest.raises(ValueError, match="expected data with a time dimension"):
        CatFrames(2, -1, ["x"])(TensorDict({"x": torch.zeros(2)}))
    with pytest.raises(KeyError, match="no entry 'x'"):
        CatFrames(2, -1, [("next", "x")])(TensorDict({"next": {"x": torch.zeros(3, 2)}}, [3]))


def test_bounds_are_repeated(ladder):
    env = TransformedEnv(ladder([9]), CatFrames(2, -1, ["rung"]))
    assert env.observation_spec["rung"] == Bounded(-1000.0, 1000.0, (1, 4))


def test_the_entry_that_begins_frames_again_may_be_named(ladder, do_nothing):
    named = TransformedEnv(ladder([2, 9]), CatFrames(3, -1, ["rung"], reset_key="_reset", done_key="done"))
    plain = TransformedEnv(ladder([2, 9]), CatFrames(3, -1, ["rung"]))
    assert torch.equal(climb(named, 5, do_nothing)["next", "rung"], climb(plain, 5, do_nothing)["next", "rung"])
    cat = CatFrames(2, -1, ["x"], reset_key=("agents", "_reset"))
    first = TensorDict({"x": torch.zeros(2, 1)}, [2])
    cat.transform_reset(TensorDict({}, [2]), first)
    marks = {"agents": {"_reset": torch.tensor([[True], [False]])}, "_reset": torch.ones(2, 1, dtype=torch.bool)}
    cat.transform_reset(TensorDict(marks, [2]), TensorDict({"x": torch.ones(2, 1)}, [2]))
    step = cat.transform_step(TensorDict({}, [2]), TensorDict({"x": torch.full((2, 1), 5.0)}, [2]))
    assert step["x"].tolist() == [[1.0, 5.0], [0.0, 5.0]]


def test_a_named_entry_keeps_the_array_form(both_paths):
    def make():
        return TransformedEnv(GymEnv("CartPole-v1"), CatFrames(3, -1, ["observation"], reset_key="_reset"))

    assert both_paths(make, frames=60)["next", "done"].any()


def test_flags_that_end_trajectories_in_data_may_be_named():
    over = torch.tensor([0, 1, 0, 0], dtype=torch.bool).unsqueeze(-1)
    flags = {"done": torch.zeros(4, 1, dtype=torch.bool), "info": {"over": over}}
    data = TensorDict({"x": torch.arange(4).unsqueeze(-1), "next": flags}, [4])
    frames = CatFrames(2, -1, ["x"], done_key=("info", "over"))(data.clone())["x"]
    assert frames.tolist() == [[0, 0], [0, 1], [2, 2], [2, 3]]
    assert CatFrames(2, -1, ["x"])(data)["x"].tolist() == [[0, 0], [0, 1], [1, 2], [2, 3]]
    for argument in ("reset_key", "done_key"):
        with pytest.raises(TypeError, match=f"{argument}: expected a string"):
            CatFrames(2, -1, ["x"], **{argument: 3})


def test_frames_are_joined_in_what_is_returned_only():
    assert CatFrames(2, -1, ["x"], None, "same", 0, False).N == 2
    with pytest.raises(ValueError, match="as_inverse: expected False, got True"):
        CatFrames(2, -1, as_inverse=True)
