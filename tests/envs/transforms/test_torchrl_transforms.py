"""TorchRL's transforms as those of rollwright, and changes after that; where torchrl is installed."""

import gymnasium
import numpy as np
import pytest
import torch

from rollwright.collectors import Collector
from rollwright.envs import GymWrapper, TransformedEnv
from rollwright.envs.arrays import ARRAY_FORMS, ArrayTransform
from rollwright.errors import EnvError, RollwrightError

envs = pytest.importorskip("torchrl.envs")
CART_POLE = "CartPole-v1"


class Shift(envs.Transform):
    """A transform of a user's own."""

    def _call(self, next_tensordict):
        return next_tensordict.set("b", next_tensordict["b"] + 1)

    def _reset(self, tensordict, tensordict_reset):
        return self._call(tensordict_reset)


def around(env, *transforms):
    return envs.TransformedEnv(env, envs.Compose(*transforms))


class Seen(gymnasium.Env):
    """Images, observations of several shapes and dtypes, and actions of float64; ends after four or five steps."""

    observation_space = gymnasium.spaces.Dict(
        pixels=gymnasium.spaces.Box(0, 255, (5, 7, 3), np.uint8),
        a=gymnasium.spaces.Box(-9, 9, (1, 4), np.float32),
        b=gymnasium.spaces.Box(-9, 9, (2,), np.float32),
        d=gymnasium.spaces.Box(-9, 9, (3,), np.float64),
    )
    action_space = gymnasium.spaces.Box(-1, 1, (2,), np.float64)

    def seen(self):
        draw = self.np_random
        numbers = {key: draw.normal(size=size).astype(kind) for key, size, kind in _NUMBERS}
        return {"pixels": draw.integers(0, 256, (5, 7, 3), np.uint8), **numbers}

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.count = 0
        return self.seen(), {}

    def step(self, action):
        assert action.dtype == np.float64
        self.count += 1
        reward = round(self.np_random.normal()) * 1.5 + float(action.sum()) * (self.count % 3)
        return self.seen(), reward, self.count == 5, self.count == 4 and bool(self.np_random.integers(2)), {}


_NUMBERS = (("a", (1, 4), np.float32), ("b", 2, np.float32), ("d", 3, np.float64))
KINDS = {  # by what TorchRL's are set to
    "BinarizeReward": lambda: [envs.BinarizeReward()],
    "CatTensors": lambda: [envs.CatTensors(["b"], "c", del_keys=False), envs.CatTensors(["c", "b"], "e")],
    "ClipTransform": lambda: [envs.ClipTransform(["a", "b", "reward"], low=-0.3, high=0.0)],
    "ClipTransform, one end": lambda: [envs.ClipTransform(["a", "d"], ["x", "y"], low=-0.3)],
    "DoubleToFloat": lambda: [envs.DoubleToFloat()],
    "DoubleToFloat, keys": lambda: [envs.DoubleToFloat(["d"], ["e"], ["action"])],
    "FlattenObservation": lambda: [envs.FlattenObservation(-2, -1, in_keys=["a"])],
    "FlattenObservation, positive": lambda: [
        envs.FlattenObservation(0, 1, in_keys=["pixels"], out_keys=["flat"], allow_positive_dim=True)
    ],
    "InitTracker": lambda: [
        envs.InitTracker("first"),
        envs.StepCounter(3, step_count_key="n"),
        envs.RewardSum(["reward"], ["sum"]),
    ],
    "ObservationNorm": lambda: [
        envs.ObservationNorm(torch.rand(2), torch.rand(2) + 0.1, in_keys=["b"]),
        envs.ObservationNorm(0.3, 0.7, in_keys=["d"], standard_normal=True),
    ],
    "RewardClipping": lambda: [envs.RewardClipping(-1.0, 1.3)],
    "RewardScaling": lambda: [envs.RewardScaling(1, 3), envs.RewardScaling(0.1, 0.7, standard_normal=True)],
    "SignTransform": lambda: [envs.SignTransform(in_keys=["reward", "b"])],
    "SqueezeTransform": lambda: [envs.SqueezeTransform(-2, in_keys=["a"])],
    "SqueezeTransform, positive": lambda: [
        envs.SqueezeTransform(0, in_keys=["a"], out_keys=["c"], allow_positive_dim=True)
    ],
    "ToTensorImage": lambda: [envs.ToTensorImage(), envs.GrayScale()],
    "ToTensorImage, integers": lambda: [envs.ToTensorImage(from_int=False, dtype=torch.uint8)],
    "UnsqueezeTransform": lambda: [envs.UnsqueezeTransform(0, in_keys=["b", "d"], allow_positive_dim=True)],
    "VecNorm": lambda: [envs.VecNorm(in_keys=["b", "d", "reward"], decay=0.9)],
}
STAY = {  # TorchRL steps these
    "CatFrames": lambda: [envs.CatFrames(3, -1, in_keys=["b"])],
    "ActionScaling": lambda: [envs.ActionScaling()],
    "RewardScaling of float64": lambda: [envs.RewardScaling(torch.ones(1, dtype=torch.float64), 2.0)],
}


def seen_by(number, make):
    base = envs.GymWrapper(Seen()) if not number else envs.SerialEnv(number, lambda: envs.GymWrapper(Seen()))
    return around(base, *make())


@pytest.mark.filterwarnings("ignore::FutureWarning")
class TestTransforms:
    """Frames equal those of TorchRL's own steps."""

    @pytest.mark.parametrize("number", [0, 2])
    @pytest.mark.parametrize("name", [*KINDS, *STAY])
    def test_frames(self, name, number):
        found = []
        for options in ({"use_buffers": False}, {}):
            torch.manual_seed(0)
            env = seen_by(number, {**KINDS, **STAY}[name])
            env.set_seed(3)
            with Collector(env, None, frames_per_batch=20, **options) as collector:
                found.append(torch.cat([collector.next().clone() for _ in range(2)], -1))
                how = collector.stats()["paths"]["env"]
        assert how == "native: NumPy arrays" if name in KINDS else "TorchRL steps it" in how
        theirs, ours = found
        assert set(ours.keys(True, True)) == set(theirs.keys(True, True))
        for key in theirs.keys(True, True):
            assert ours[key].dtype == theirs[key].dtype, key
            assert torch.equal(ours[key], theirs[key]), key

    def test_a_registered_class(self, monkeypatch):
        def make_form(transform, env):
            def change(values):
                values["b"] = values["b"] + 1

            return ArrayTransform({}, [], lambda root, out: change(out), change)

        monkeypatch.setitem(ARRAY_FORMS, Shift, make_form)
        found = []
        for options in ({"use_buffers": False}, {}):
            env = seen_by(0, lambda: [Shift()])
            env.set_seed(3)
            torch.manual_seed(1)
            with Collector(env, None, frames_per_batch=20, **options) as collector:
                found.append(collector.next()["next", "b"].clone())
                how = collector.stats()["paths"]["env"]
        assert how == "native: NumPy arrays"
        assert torch.equal(*found)

    def test_workers(self):
        def make():
            return seen_by(0, KINDS["InitTracker"])

        found = []
        for options in ({"use_buffers": False}, {}):
            collector = Collector(make, None, frames_per_batch=20, num_collectors=2, sync=True, **options)
            collector.set_seed(3)
            found.append(collector.next().clone())
            collector.shutdown()
        theirs, ours = found
        assert all(torch.equal(ours[key], theirs[key]) for key in theirs.keys(True, True) if key != "action")


class Meddles(envs.Transform):
    """Changes another transform at its fifth step."""

    def __init__(self, counter):
        super().__init__()
        self.others, self.count = [counter], 0

    def _call(self, next_tensordict):
        self.count += 1
        if self.count == 5:
            self.others[0].max_steps = 3
        return next_tensordict


def meddling():
    counter = envs.StepCounter(9)
    return around(envs.GymEnv(CART_POLE), counter, Meddles(counter))


class Reader:
    """A reader of info without entries."""

    def __call__(self, info, tensordict):
        return tensordict


CHANGES = {
    "transforms": lambda env: env.append_transform(envs.RewardScaling(0.0, 3.0)),
    "max_steps": lambda env: setattr(env.transform[0], "max_steps", 5),
    "loc": lambda env: setattr(env.transform[1], "loc", torch.tensor(4.0)),
    "clamp_max": lambda env: env.transform[2].clamp_max.fill_(0.5),
    "in_keys": lambda env: env.transform[1].in_keys.append("other"),
    "_env": lambda env: setattr(env.base_env, "_env", gymnasium.make(CART_POLE)),
    "info_dict_reader": lambda env: env.base_env.info_dict_reader.append(Reader()),
    "methods of its own": lambda env: setattr(env.base_env, "read_obs", env.base_env.read_obs),
}


class TestChanges:
    def env(self):
        norm = envs.ObservationNorm(0.0, 1.0, in_keys=["observation"])
        return around(envs.GymEnv(CART_POLE), envs.StepCounter(), norm, envs.RewardClipping(0, 1))

    @pytest.mark.parametrize("name", CHANGES)
    def test_a_later_change_is_an_error_at_the_next_batch(self, name):
        env = self.env()
        with Collector(env, None, frames_per_batch=10) as collector:
            collector.next()
            CHANGES[name](env)
            with pytest.raises(EnvError, match=f"expected {name} as it was when the collector was made"):
                collector.next()

    def test_changes_in_a_serial_env_are_found(self):
        env = envs.SerialEnv(2, self.env)
        with Collector(env, None, frames_per_batch=10) as collector:
            collector.next()
            env._envs[1].transform[0].max_steps = 5
            with pytest.raises(EnvError, match=r"StepCounter: expected max_steps .*, None, got 5\. .*make another"):
                collector.next()
        env = envs.SerialEnv(2, self.env)
        with Collector(env, None, frames_per_batch=10) as collector:
            collector.next()
            env.close(), env.start()
            with pytest.raises(EnvError, match="SerialEnv: expected environments as it was"):
                collector.next()

    @pytest.mark.parametrize("workers", [0, 2])
    def test_a_change_during_a_batch(self, workers):
        options = {"num_collectors": workers, "sync": True} if workers else {}
        collector = Collector(meddling if workers else meddling(), None, frames_per_batch=20, **options)
        collector.next()
        with pytest.raises(RollwrightError, match="expected max_steps as it was when the collector was made, 9, got 3"):
            collector.next()
        collector.shutdown()

    def test_a_transform_around_an_environment_of_ours(self):
        env = TransformedEnv(GymWrapper(gymnasium.make(CART_POLE)), envs.StepCounter(9))
        with Collector(env, None, frames_per_batch=10) as collector:
            collector.next()
            env.transform.max_steps = 5
            with pytest.raises(EnvError, match="expected max_steps as it was"):
                collector.next()

    def test_tensors_are_shared(self):
        found = []
        for options in ({}, {"use_buffers": False}):
            env = self.env()
            env.set_seed(0)
            torch.manual_seed(1)
            with Collector(env, None, frames_per_batch=10, **options) as collector:
                collector.next()
                env.transform[1].loc.fill_(4.0)
                env.transform[1].load_state_dict(env.transform[1].state_dict() | {"scale": torch.tensor(3.0)})
                found.append(collector.next()["next", "observation"].clone())
        assert torch.equal(*found)
        assert found[0][:, 0].mean() > 3

    def test_torchrls_own_steps_follow_changes(self):
        env = self.env()
        with Collector(env, None, frames_per_batch=10, use_buffers=False) as collector:
            collector.next()
            env.transform[1].loc = torch.tensor(4.0)
            assert collector.next()["next", "observation"].mean() > 3

    def test_another_collector_takes_the_environment_as_it_is(self):
        env = self.env()
        for most in (5, 3):
            env.transform[0].max_steps = most
            with Collector(env, None, frames_per_batch=20, reset_at_each_iter=True) as collector:
                assert collector.next()["next", "step_count"].max() == most
