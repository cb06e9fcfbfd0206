"""Saved after a batch and restored in another process, a collector gives the bits that the first one went on with."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.patience import patient
from tests.programs import Programs

pytestmark = pytest.mark.filterwarnings("ignore:.*split_trajs=True pads")


# Both processes import this file.
MAKERS = """
import random
import gymnasium
import numpy as np
import torch
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space
from tensordict import TensorDict
from tensordict.nn import NormalParamExtractor, ProbabilisticTensorDictModule, ProbabilisticTensorDictSequential
from tensordict.nn import TensorDictModule
from torch import distributions, nn
from rollwright.collectors import Collector
from rollwright.collectors.rollout.paths import choice as path_choice
from rollwright.collectors.utils import restore_next
from rollwright.data import Bounded, Categorical, Composite, Unbounded
from rollwright.envs import EnvBase, GymEnv, GymWrapper, SerialEnv, TransformedEnv
from rollwright.envs.transforms import Compose, InitTracker, RewardSum, StepCounter, TensorDictPrimer, VecNorm
from rollwright.errors import NotNative
from rollwright.testing.mocking_classes import CountingEnvWithString
from rollwright.testing.mocking_classes import NestedCountingEnv

class Streams(EnvBase):
    "Draws from the global generators of NumPy, of Python and of torch."
    def __init__(self):
        super().__init__()
        self.observation_spec = Composite(observation=Unbounded(4))
        self.action_spec = Categorical(2, shape=())
        self.count = 0
    def _set_seed(self, seed): ...
    def _draw(self):
        return torch.tensor([np.random.normal(), random.gauss(0, 1), random.random(), torch.rand(()).item()])
    def _reset(self, tensordict=None, **kwargs):
        self.count = 0
        return TensorDict({"observation": self._draw()})
    def _step(self, tensordict):
        self.count += 1
        return TensorDict({"observation": self._draw(), "reward": 1.0, "done": self.count == 7})

class OwnVector(VectorEnv):
    "A vector environment of its own kind, with episodes of random length."
    metadata = {"autoreset_mode": AutoresetMode.DISABLED}
    def __init__(self):
        self.num_envs = 3
        self.single_observation_space = gymnasium.spaces.Box(-9, 9, (4,), np.float32)
        self.single_action_space = gymnasium.spaces.Discrete(2)
        self.observation_space = batch_space(self.single_observation_space, 3)
        self.action_space = batch_space(self.single_action_space, 3)
        self.state = np.zeros((3, 4), np.float32)
    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        mask = (options or {}).get("reset_mask", np.ones(3, bool))
        self.state[mask] = self.np_random.uniform(-1, 1, (int(mask.sum()), 4))
        return self.state.copy(), {}
    def step(self, actions):
        self.state += self.np_random.normal(size=(3, 4)).astype(np.float32) / 2 + actions[:, None]
        ended = np.abs(self.state).max(-1) > 8
        self.state = np.clip(self.state, -9, 9)
        return self.state.copy(), self.state[:, 0].astype(float), ended, np.zeros(3, bool), {}

def cartpole():
    return GymEnv("CartPole-v1")

def cartpoles():
    return GymEnv("CartPole-v1", num_envs=3)

def pendulum():
    return GymEnv("Pendulum-v1", max_episode_steps=15)

def booked(make=cartpole, *others):
    return TransformedEnv(make(), Compose(StepCounter(), RewardSum(), InitTracker(), *others))

def primed():
    return booked(cartpole, TensorDictPrimer(hidden=Bounded(-1, 1, (2,)), random=True))

def sampler(reads, distribution, **options):
    return ProbabilisticTensorDictModule(reads, ["action"], distribution_class=distribution, **options)

def sampling():
    net = TensorDictModule(nn.Linear(4, 2), ["observation"], ["logits"])
    draw = sampler(["logits"], distributions.OneHotCategorical, return_log_prob=True)
    return ProbabilisticTensorDictSequential(net, draw)

def gaussian():
    net = nn.Sequential(nn.Linear(3, 2), NormalParamExtractor())
    draw = sampler(["loc", "scale"], distributions.Normal)
    return ProbabilisticTensorDictSequential(TensorDictModule(net, ["observation"], ["loc", "scale"]), draw)

class Remembering(nn.Module):
    "Carries a state from step to step."
    def __init__(self):
        super().__init__()
        self.net = nn.Linear(6, 4)
    def forward(self, observation, hidden):
        logits, hidden = self.net(torch.cat([observation, hidden], -1)).split(2, -1)
        return logits, hidden.tanh()

def remembering():
    net = TensorDictModule(Remembering(), ["observation", "hidden"], ["logits", ("next", "hidden")])
    draw = sampler(["logits"], distributions.OneHotCategorical)
    return ProbabilisticTensorDictSequential(net, draw)

def none():
    return None

def norm():
    return booked(cartpole, VecNorm(in_keys=["observation"], decay=0.9))

CASES = {
    "CartPole": (cartpole, sampling, {}),
    "Pendulum": (pendulum, gaussian, {}),
    "serial": (lambda: SerialEnv(4, cartpole), sampling, {}),
    "sync": (cartpoles, sampling, {}),
    "own vector": (lambda: GymWrapper(OwnVector(), categorical_action_encoding=True), none, {}),
    "bookkeeping": (booked, sampling, {}),
    "bookkeeping of many": (lambda: booked(cartpoles), sampling, {}),
    "normalised": (norm, sampling, {}),
    "carried state": (primed, remembering, {}),
    "global streams": (Streams, none, {}),
    "strings": (lambda: CountingEnvWithString(max_steps=7), none, {}),
    "nested": (lambda: NestedCountingEnv(max_steps=7), none, {}),
    "random at first": (cartpoles, sampling, {"init_random_frames": 210}),
    "limited": (cartpole, sampling, {"max_frames_per_traj": 11}),
    "compact": (cartpoles, sampling, {"compact_obs": True}),
    "cut": (cartpoles, sampling, {"set_truncated": True}),
    "reset each time": (cartpoles, sampling, {"reset_at_each_iter": True}),
    "one memory": (cartpoles, sampling, {"return_same_td": True}),
    "versions": (cartpole, sampling, {"track_policy_version": True}),
    "no ids": (cartpole, sampling, {"track_traj_ids": False}),
    "split": (cartpole, sampling, {"split_trajs": True}),
    "compiled": (cartpoles, sampling, {"compile_policy": True}),
}
def make(name, plain):
    make_env, make_policy, options = CASES[name]
    native = path_choice.arrays_of
    if plain:
        def refuse(core):
            raise NotNative("a test")
        path_choice.arrays_of = refuse
    try:
        policy = make_policy()
        if policy is not None:
            for parameter in policy.parameters():
                nn.init.normal_(parameter, 0, 0.3)
        frames = {"max_frames_per_traj": -1, **options, "frames_per_batch": 35 * make_env().numel()}
        collector = Collector(make_env, policy, **frames)
    finally:
        path_choice.arrays_of = native
    return collector

def seen(collector, number):
    "Batches as dictionaries, and the statistics after them."
    found = []
    for _ in range(number):
        batch = collector.next()
        if "boundary" in batch.get("collector", {}).keys():
            batch = restore_next(batch)
        leaves = {str(key): value for key, value in batch.items(True, True)}
        found.append({key: v.clone() if isinstance(v, torch.Tensor) else batch_list(v) for key, v in leaves.items()})
    stats = collector.stats()
    names = "frames batches episodes mean_return mean_length last_return policy_version completed".split()
    return {"batches": found, "stats": {name: stats[name] for name in names}}

def batch_list(value):
    return value.tolist() if hasattr(value, "tolist") else value.data
"""

RESUME = """
import sys, torch
sys.path.insert(0, sys.argv[1])
import makers
torch.manual_seed(99)
states = torch.load(sys.argv[1] + "/states.pt", weights_only=True)
found = {}
for case, (name, loads_plain) in torch.load(sys.argv[1] + "/cases.pt", weights_only=True).items():
    collector = makers.make(name, loads_plain)
    collector.load_state_dict(states[case])
    found[case] = makers.seen(collector, 2)
    collector.shutdown()
torch.save(found, sys.argv[1] + "/found.pt")
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path: Path = tmp_path_factory.mktemp("resume")
    (path / "makers.py").write_text(MAKERS)
    return path


@pytest.fixture(scope="module")
def makers(folder: Path) -> Any:
    spec = importlib.util.spec_from_file_location("makers", folder / "makers.py")
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["makers"] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules["makers"]


def begun(makers: Any, name: str, plain: bool) -> Any:
    """A collector that has delivered two batches."""
    collector = makers.make(name, plain)
    collector.set_seed(3)
    collector.next()
    collector.update_policy_weights_()
    collector.next()
    return collector


NAMES = (
    "CartPole",
    "Pendulum",
    "serial",
    "sync",
    "own vector",
    "bookkeeping",
    "bookkeeping of many",
    "normalised",
    "carried state",
    "global streams",
    "strings",
    "nested",
    "random at first",
    "limited",
    "compact",
    "cut",
    "reset each time",
    "one memory",
    "versions",
    "no ids",
    "split",
    "compiled",
)
PLAIN = ("nested", "strings")  # for all that these have no array form
PATHS = ("arrays", "plain", "arrays, then plain", "plain, then arrays")
QUICK = {name: {"arrays", PATHS[1 + number % 3]} for number, name in enumerate(NAMES)}  # of the paths; the rest is slow
CASES = [
    pytest.param(name, path, marks=[] if path in QUICK[name] else [pytest.mark.slow])
    for name in NAMES
    for path in PATHS
    if name != "compiled" or path == "arrays"
]


@pytest.fixture(scope="module")
def resumed(
    makers: Any, folder: Path, programs_of_all: Programs, request: pytest.FixtureRequest
) -> dict[str, tuple[Any, Any]]:
    """By case: what the saved collector went on to deliver, and what the restored one did in another process."""
    assert sorted(makers.CASES) == sorted(NAMES)
    selected = [item.callspec.params for item in request.session.items if item.path == request.path]
    expected, states, cases = {}, {}, {}
    for name in NAMES:
        paths = [each["path"] for each in selected if each["name"] == name]
        for path in dict.fromkeys(path.split(",")[0] for path in paths):
            collector = begun(makers, name, path == "plain")
            native = path == "arrays" and name not in PLAIN
            assert type(collector._rollout.path).__name__ == ("ArrayPath" if native else "PlainPath")
            state = collector.state_dict()
            assert state["unsaved"] == []
            episodes = collector.stats()["episodes"]
            found = makers.seen(collector, 2)
            assert found["stats"]["episodes"] > episodes
            collector.shutdown()
            for later in [one for one in paths if one.startswith(path)]:
                case = f"{name}: {later}"
                states[case], expected[case], cases[case] = state, found, (name, later.endswith("plain"))
    torch.save(states, folder / "states.pt")
    torch.save(cases, folder / "cases.pt")
    done = programs_of_all.run("-c", RESUME, folder, timeout=patient(110))
    assert done.returncode == 0, done.stderr
    found = torch.load(folder / "found.pt", weights_only=True)
    return {case: (expected[case], found[case]) for case in cases}


def differences(expected: Any, found: Any) -> list[str]:
    wrong = [] if expected["stats"] == found["stats"] else [f"{expected['stats']} {found['stats']}"]
    for i, (left, right) in enumerate(zip(expected["batches"], found["batches"], strict=True)):
        assert left.keys() == right.keys()
        for key, value in left.items():
            same = torch.equal(value, right[key]) if isinstance(value, torch.Tensor) else value == right[key]
            wrong += [] if same else [f"batch {i}: {key}"]
    return wrong


@pytest.mark.parametrize(("name", "path"), CASES)
def test_restored_in_another_process_it_delivers_the_same_bits(resumed: Any, name: str, path: str) -> None:
    expected, found = resumed[f"{name}: {path}"]
    assert differences(expected, found) == []
