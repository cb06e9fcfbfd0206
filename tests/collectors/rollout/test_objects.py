"""Texts and other objects among the observations of an environment on arrays."""

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from tensordict.nn import TensorDictModule
from tests.variants import in_turn
from torch import nn

from rollwright.collectors import Collector
from rollwright.envs import GymWrapper, RewardSum, SerialEnv, StepCounter, TransformedEnv

WORDS = ["red", "green", "blue"]


class Missions(gymnasium.Env):
    """An image, a number and a text, drawn anew at each step; ends after five."""

    observation_space = spaces.Dict(
        {
            "image": spaces.Box(0, 255, (2, 2, 3), np.uint8),
            "direction": spaces.Discrete(4),
            "mission": spaces.Text(10),
            "path": spaces.Sequence(spaces.Discrete(3)),
        }
    )
    action_space = spaces.Box(-1, 1, (2,), np.float32)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.count = 0
        return self.look(), {}

    def step(self, action):
        self.count += 1
        return self.look(), 1.0, self.count == 5, False, {}

    def look(self):
        draw = self.np_random.integers
        return {
            "image": draw(0, 255, (2, 2, 3), dtype=np.uint8),
            "direction": int(draw(4)),
            "mission": WORDS[draw(3)],
            "path": tuple(draw(3, size=draw(4))),
        }


def see(image):
    return image.flatten(-3).float()[..., :2] / 255


def collect(env, reads=see, in_keys=("image",), **options):
    policy = TensorDictModule(reads, list(in_keys), ["action"])
    env.set_seed(0)
    torch.manual_seed(0)
    with Collector(env, policy, **{"frames_per_batch": 12, "total_frames": 48, **options}) as collector:
        return [None if b is None else b.clone() for b in collector], collector.stats()["paths"]["env"]


def check_equal(ours, plain):
    assert set(ours.keys(True, True)) == set(plain.keys(True, True))
    assert (ours.batch_size, ours.names, ours.device) == (plain.batch_size, plain.names, plain.device)
    for key in plain.keys(True, True):
        mine, other = ours.get(key), plain.get(key)
        if isinstance(other, torch.Tensor):
            assert torch.equal(mine, other), key
        else:
            assert type(mine) is type(other), key
            assert mine.batch_size == other.batch_size, key
            assert mine.tolist() == other.tolist(), key


ENVS = {
    "bare": lambda: GymWrapper(Missions()),
    "transforms": lambda: TransformedEnv(TransformedEnv(GymWrapper(Missions()), StepCounter(3)), RewardSum()),
}


OPTIONS = [{}, {"init_random_frames": 12}, {"split_trajs": True}, {"storing_device": "cpu"}]


@pytest.mark.filterwarnings("ignore:Collector. split_trajs")
@pytest.mark.parametrize(("options", "name"), in_turn(OPTIONS, list(ENVS)))
def test_batches_of_the_plain_path(name, options):
    native, how = collect(ENVS[name](), **options)
    plain, _ = collect(ENVS[name](), use_buffers=False, **options)
    assert how == "native: NumPy arrays"
    for mine, other in zip(native, plain, strict=True):
        check_equal(mine, other)


def test_batches_share_no_objects():
    (first, second, *_), _ = collect(GymWrapper(Missions()))
    assert first.get("mission").tensordicts[1] is not first.get(("next", "mission")).tensordicts[0]
    assert first["mission"] != second["mission"]


def test_a_state_that_is_saved_goes_on():
    def make():
        return GymWrapper(Missions())

    policy = TensorDictModule(see, ["image"], ["action"])
    options = {"frames_per_batch": 7, "total_frames": -1}
    env = make()
    env.set_seed(0)
    with Collector(env, policy, **options) as collector:
        collector.next()
        state = collector.state_dict()
        expected = collector.next().clone()
    with Collector(make(), policy, **options) as collector:
        collector.load_state_dict(state)
        check_equal(collector.next(), expected)


class TestPlain:
    """Where objects still need TensorDicts."""

    @pytest.mark.parametrize(
        ("make", "options", "reason"),
        [
            (lambda: SerialEnv(2, lambda: GymWrapper(Missions())), {}, "holds objects"),
            (ENVS["bare"], {"compact_obs": True}, "compact_obs=True"),
        ],
    )
    def test_the_entry_is_named(self, make, options, reason):
        _, how = collect(make(), **options)
        assert how.startswith("plain: entry 'mission' holds objects")
        assert reason in how

    def test_a_policy_that_reads_them(self):
        def act(mission):
            return torch.full((2,), float(len(mission)) / 10)

        native, _ = collect(GymWrapper(Missions()), act, ["mission"])
        plain, _ = collect(GymWrapper(Missions()), act, ["mission"], use_buffers=False)
        check_equal(native[0], plain[0])


def test_many_layers_see_images_only():
    net = nn.Sequential(nn.Flatten(-3), nn.Linear(12, 2))
    batches, how = collect(GymWrapper(Missions()), lambda image: net(image.float()))
    assert how == "native: NumPy arrays"
    assert batches[0]["mission"][0] in WORDS
