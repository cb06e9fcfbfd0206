"""Transforms of entries: values, specs, inverses, errors."""

from __future__ import annotations

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from tensordict import TensorDict

from rollwright.collectors import Collector
from rollwright.data import Binary, Bounded, LazyTensorStorage, ReplayBuffer, Unbounded
from rollwright.envs import (
    BinarizeReward,
    CatTensors,
    CenterCrop,
    ClipTransform,
    Compose,
    ExcludeTransform,
    FlattenObservation,
    GrayScale,
    GymEnv,
    GymWrapper,
    ObservationNorm,
    RenameTransform,
    Resize,
    RewardClipping,
    RewardSum,
    SelectTransform,
    SignTransform,
    SqueezeTransform,
    StepCounter,
    ToTensorImage,
    Transform,
    TransformedEnv,
    UnsqueezeTransform,
    check_env_specs,
)
from rollwright.testing.mocking_classes import ContinuousActionVecMockEnv


def pendulum(*transforms):
    return TransformedEnv(GymEnv("Pendulum-v1"), Compose(*transforms))


class Camera(gymnasium.Env):
    observation_space = spaces.Dict(pixels=spaces.Box(0, 255, (8, 6, 3), np.uint8))
    action_space = spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return self.observation_space.sample(), {}

    def step(self, action):
        return self.observation_space.sample(), 0.0, False, False, {}


IMAGES = [ToTensorImage, GrayScale, lambda: Resize(5, 4), lambda: CenterCrop(3, 2)]

ON_PENDULUM = {
    "clip": lambda: [ClipTransform(["observation", "reward"], low=-0.5, high=0.5)],
    "clip below": lambda: [ClipTransform(["reward"], low=-0.5)],
    "clip actions": lambda: [ClipTransform(in_keys_inv=["action"], low=-1, high=1)],
    "rewards": lambda: [RewardClipping(-1, 1), RewardSum()],
    "sign": lambda: [SignTransform(["reward"], None, ["action"])],
    "binarize": lambda: [BinarizeReward()],
    "unsqueeze": lambda: [UnsqueezeTransform(-1, in_keys=["observation"], in_keys_inv=["action"])],
    "squeeze": lambda: [SqueezeTransform(-1, in_keys=["reward"], in_keys_inv=["action"])],
    "rename": lambda: [RenameTransform(["observation", "reward"], ["seen", "gain"], ["action"], ["move"])],
    "rename flags": lambda: [RenameTransform(["done"], ["over"], create_copy=True)],
    "select": lambda: [StepCounter(), RewardSum(), SelectTransform("observation", keep_dones=False)],
    "exclude": lambda: [ExcludeTransform("truncated", "reward")],
    "join": lambda: [ObservationNorm(0, 2, ["observation"], ["norm"]), CatTensors(["norm", "observation"], "both")],
}


@pytest.mark.parametrize("name", list(ON_PENDULUM))
def test_specs_hold_and_a_collector_takes_it(name):
    check_env_specs(pendulum(*ON_PENDULUM[name]()))
    env = pendulum(*ON_PENDULUM[name]())
    collector = Collector(env, frames_per_batch=7, total_frames=14)
    keys = [set(batch.keys(True, True)) for batch in collector]
    assert keys[0] == keys[1]


@pytest.mark.parametrize("num", range(1, 5))
def test_specs_of_images_hold(num):
    images = GymWrapper(Camera())
    check_env_specs(TransformedEnv(images, Compose(*[make() for make in IMAGES[:num]])))


# Values --------------------------------------------------------------------------------------------------------------


def test_bounds_of_clipped_entries():
    spec = pendulum(ClipTransform(["observation"], low=-0.5, high=2.0)).observation_spec["observation"]
    assert spec.low.tolist() == [-0.5, -0.5, -0.5]
    assert spec.high.tolist() == [1, 1, 2]
    assert pendulum(RewardClipping(-1, 1)).reward_spec == Bounded(-1.0, 1.0, (1,))
    assert pendulum(BinarizeReward()).reward_spec == Binary(shape=(1,), dtype=torch.int8)


def test_the_environment_gets_clipped_actions_and_the_policy_sees_its_bounds():
    env = pendulum(ClipTransform(in_keys_inv=["action"], low=-1, high=1))
    assert env.action_spec == env.base_env.action_spec
    given = []
    step = env.base_env.step_outcome
    env.base_env.step_outcome = lambda td: given.append(td["action"].clone()) or step(td)
    env.step(env.reset().set("action", torch.tensor([2.0])))
    assert given[0].item() == 1


def test_clipping_keeps_what_is_not_a_number():
    value = torch.tensor([float("nan"), -0.0, float("inf")])
    found = ClipTransform(["x"], low=0.0, high=1.0)(TensorDict({"x": value}))["x"]
    assert found[0].isnan()
    assert found[2] == 1


def test_shapes_there_and_back():
    env = pendulum(UnsqueezeTransform(0, allow_positive_dim=True, in_keys=["observation"], in_keys_inv=["action"]))
    assert env.observation_spec["observation"].shape == (1, 3)
    assert env.action_spec.shape == (1, 1)
    assert env.rollout(2)["observation"].shape == (2, 1, 3)
    flat = FlattenObservation(-3, -1, ["x"])(TensorDict({"x": torch.arange(24).view(2, 2, 3, 2)}, [2]))["x"]
    assert flat.tolist() == torch.arange(24).view(2, 12).tolist()


def test_names_may_be_exchanged():
    td = RenameTransform(["a", "b"], ["b", "a"])(TensorDict({"a": torch.zeros(1), "b": torch.ones(1)}))
    assert (td["a"].item(), td["b"].item()) == (1, 0)


@pytest.mark.parametrize("chained", [False, True])
def test_what_a_buffer_stores_under_another_name_is_stored_once(chained):
    data = TensorDict({"x": torch.arange(4.0).unsqueeze(-1), "n": {"y": torch.ones(4)}}, [4])
    rename: Transform = RenameTransform(["a", "b"], ["x", ("n", "y")], ["a", "b"], ["x", ("n", "y")])
    rename = Compose(rename) if chained else rename
    buffer = ReplayBuffer(storage=LazyTensorStorage(4), batch_size=4, transform=rename)
    buffer.extend(data)
    assert set(buffer.storage[:].keys(True, True)) == {"a", "b"}
    assert set(buffer.sample().keys(True, True)) == set(data.keys(True, True)) == {"x", ("n", "y")}
    copies = RenameTransform([], [], ["a"], ["x"], create_copy=True)
    assert set(copies.inv(data).keys(True, True)) == {"a", "x", ("n", "y")}
    swapped = RenameTransform([], [], ["a", "b"], ["b", "a"]).inv(TensorDict({"a": 1, "b": 2}))
    assert (swapped["a"].item(), swapped["b"].item()) == (2, 1)


def test_renamed_rewards_and_actions():
    env = pendulum(RenameTransform(["reward"], ["gain"], ["action"], ["move"]))
    td = env.rollout(2)
    assert "move" in td.keys() and "action" not in td.keys()  # noqa: SIM118, PT018
    assert env.reward_keys == ["gain"]
    assert env.action_keys == ["move"]


def test_select_keeps_what_steps_read():
    td = pendulum(StepCounter(), SelectTransform("observation")).rollout(3)
    assert td["next", "step_count"].flatten().tolist() == [1, 2, 3]
    td = pendulum(ObservationNorm(0, 2, ["observation"], ["norm"]), SelectTransform("norm")).rollout(3)
    assert "observation" not in td.keys()  # noqa: SIM118


def test_joined_in_the_order_of_names_or_as_given():
    data = {"b": torch.ones(2), "a": torch.zeros(1)}
    assert CatTensors(["b", "a"], "c")(TensorDict(data.copy()))["c"].tolist() == [0, 1, 1]
    kept = CatTensors(["b", "a"], "c", sort=False, del_keys=False)(TensorDict(data.copy()))
    assert kept["c"].tolist() == [1, 1, 0]
    assert set(kept.keys()) == {"a", "b", "c"}
    vectors = TensorDict({"a": torch.zeros(2), "b": torch.ones(2)})
    rows = CatTensors(["b", "a"], "c", dim=-2, unsqueeze_if_oor=True)(vectors)
    assert rows["c"].shape == (2, 2)
    bounds = pendulum(CatTensors(["observation"], "v")).observation_spec["v"]
    assert bounds == pendulum().observation_spec["observation"]


def test_images_by_hand():
    image = torch.tensor([[[255, 0, 0], [0, 255, 0]], [[0, 0, 255], [255, 255, 255]]], dtype=torch.uint8)
    td = Compose(ToTensorImage(), GrayScale())(TensorDict({"pixels": image}))
    assert td["pixels"].flatten().tolist() == pytest.approx([0.2989, 0.587, 0.114, 0.9999])
    assert GrayScale()(TensorDict({"pixels": torch.full((3, 1, 1), 200, dtype=torch.uint8)}))["pixels"].item() == 199
    tolerant = ToTensorImage(shape_tolerant=True)(TensorDict({"pixels": torch.rand(3, 5, 7)}))
    assert tolerant["pixels"].shape == (3, 5, 7)
    resized = Resize(2, interpolation="nearest")(TensorDict({"pixels": torch.arange(16.0).view(1, 4, 4)}))["pixels"]
    assert resized.flatten().tolist() == [0, 2, 8, 10]
    smooth = Resize(1)(TensorDict({"pixels": torch.tensor([[[0, 255], [0, 255]]], dtype=torch.uint8)}))["pixels"]
    assert smooth.dtype == torch.uint8
    assert smooth.item() in (127, 128)
    crop = CenterCrop(3, 2)(TensorDict({"pixels": torch.arange(48).view(1, 8, 6)}))["pixels"]
    assert crop.flatten().tolist() == [14, 15, 20, 21, 26, 27]


def test_many_images_at_once():
    images = torch.randint(255, (4, 5, 12, 10, 3), dtype=torch.uint8)
    td = Compose(ToTensorImage(), GrayScale(), Resize(6))(TensorDict({"pixels": images}, [4, 5]))
    assert td["pixels"].shape == (4, 5, 1, 6, 6)
    alone = Compose(ToTensorImage(), GrayScale(), Resize(6))(TensorDict({"pixels": images[2, 3]}))["pixels"]
    assert torch.allclose(td["pixels"][2, 3], alone)


# Errors --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "error", "text"),
    [
        (lambda: ClipTransform(["x"]), ValueError, "low, high: expected at least one bound"),
        (lambda: ClipTransform(["x"], low=2, high=1), ValueError, "expected low below high, got 2 and 1"),
        (lambda: ClipTransform(low=2), ValueError, "in_keys: expected entries"),
        (lambda: ClipTransform(["x"], low="a"), TypeError, "low: expected a number or None, got 'a'"),
        (lambda: RewardClipping(), ValueError, "clamp_min, clamp_max: expected at least one"),
        (lambda: SignTransform(), ValueError, "in_keys: expected entries for SignTransform"),
        (lambda: FlattenObservation(0, 1), ValueError, "first_dim: expected a negative number.*allow_positive_dim"),
        (lambda: UnsqueezeTransform(1, in_keys=["x"]), ValueError, "dim: expected a negative number"),
        (lambda: UnsqueezeTransform(-1), ValueError, "in_keys: expected entries for UnsqueezeTransform"),
        (lambda: RenameTransform(["a", "b"], ["c"]), ValueError, "one of out_keys for each of in_keys"),
        (lambda: RenameTransform(["a", "b"], ["c", "c"]), ValueError, "names that differ, got 'c' twice"),
        (lambda: CatTensors(["a"], dim=0), ValueError, "dim: expected a negative number"),
        (lambda: CatTensors([]), ValueError, "in_keys: expected observations to join"),
        (lambda: Resize(0), ValueError, "w: expected an integer of at least 1, got 0"),
        (lambda: Resize(4, interpolation="cubic"), ValueError, "interpolation: expected one of .*got 'cubic'"),
        (lambda: CenterCrop(4, 0.5), ValueError, "h: expected an integer"),
        (lambda: pendulum(RenameTransform(["done"], ["over"])).done_spec, ValueError, "is a flag.*create_copy=True"),
        (lambda: pendulum(ExcludeTransform("done")).done_spec, ValueError, "'done' says whether a trajectory"),
        (
            lambda: pendulum(StepCounter(), ExcludeTransform("step_count")).observation_spec,
            ValueError,
            "'step_count' is read by each step",
        ),
        (lambda: pendulum(CatTensors(["nothing"])).observation_spec, KeyError, "no observation 'nothing'; there are"),
        (
            lambda: pendulum(SqueezeTransform(-1, in_keys=["observation"])).observation_spec,
            ValueError,
            "size one at -1",
        ),
        (lambda: pendulum(ToTensorImage(in_keys=["observation"])).observation_spec, ValueError, "expected images"),
        (
            lambda: CenterCrop(9)(TensorDict({"pixels": torch.zeros(1, 4, 4)})),
            ValueError,
            "images of at least 9 x 9, got \\(4, 4\\)",
        ),
    ],
)
def test_mistakes_are_named(make, error, text):
    with pytest.raises(error, match=text):
        make()


def test_unbounded_observations_stay_unbounded():
    env = TransformedEnv(ContinuousActionVecMockEnv(), UnsqueezeTransform(-1, in_keys=["observation"]))
    spec = env.observation_spec["observation"]
    assert isinstance(spec, Unbounded)
    assert spec.shape[-1] == 1
