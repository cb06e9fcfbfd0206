"""save_env and load_env: what is restored goes on, bit for bit, as what was saved; what cannot be saved is named."""

from __future__ import annotations

import importlib
import importlib.util
import pickle
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium.vector import AsyncVectorEnv
from tensordict import TensorDict, TensorDictBase
from tests.patience import patient
from tests.programs import Programs

from rollwright.data import Categorical, Composite, Unbounded
from rollwright.envs import EnvBase, GymEnv, GymWrapper, SerialEnv, TransformedEnv, checkpoint
from rollwright.envs.checkpoint import load_env, save_env, unpacked
from rollwright.envs.libs import EnvPoolEnv, default_info_dict_reader
from rollwright.envs.libs.pettingzoo import AgentGroup
from rollwright.envs.libs.vector import VectorEpisodes
from rollwright.envs.recreation import RecreationPolicy
from rollwright.envs.transforms import ActionMask, CatFrames, StepCounter, Transform, VecNorm
from rollwright.errors import EnvError
from rollwright.testing.mocking_classes import CountingEnv, HeterogeneousCountingEnv

# Both processes import this file. `run` steps and resets; it returns what a user sees, and the last data.
MAKERS = """
import functools
import gymnasium
import numpy as np
import torch
from gymnasium.vector import AutoresetMode, SyncVectorEnv, VectorEnv
from gymnasium.vector.utils import batch_space
from tensordict import TensorDict
from rollwright.data import Categorical, Composite, Unbounded
from rollwright.envs import EnvBase, GymEnv, GymWrapper, SerialEnv, TransformedEnv, checkpoint
from rollwright.envs.transforms import CatFrames, Compose, RewardSum, StepCounter, VecNorm
from rollwright.testing.mocking_classes import CountingEnvWithString

class Walk(EnvBase):
    "A random walk of many kinds of state: a generator, arrays, an array and a tensor over one memory, a closure."
    def __init__(self):
        super().__init__(batch_size=[2])
        self.observation_spec = Composite(observation=Unbounded((2, 3)), shape=[2])
        self.action_spec = Categorical(2, shape=[2])
        self.rng = np.random.default_rng(0)
        self.steps = [0, 0]
        self.place = torch.zeros(2, 3)
        self.view = self.place.numpy()[::-1]
        self.noise = lambda shape: self.rng.normal(size=shape)
    def _set_seed(self, seed):
        self.rng = np.random.default_rng(seed)
    def _reset(self, tensordict=None, **kwargs):
        mask = None if tensordict is None else tensordict.get("_reset", None)
        for i in range(2):
            if mask is None or mask[i]:
                self.steps[i] = 0
                self.view[1 - i] = self.noise(3)
        return TensorDict({"observation": self.place.clone()}, [2])
    def _step(self, tensordict):
        self.steps = [step + 1 for step in self.steps]
        self.view += self.noise((2, 3)) + tensordict["action"].numpy()[::-1, None]
        done = torch.tensor([step >= 6 + i for i, step in enumerate(self.steps)])
        return TensorDict({"observation": self.place.clone(), "reward": self.place.sum(-1), "done": done}, [2])

class OwnVector(VectorEnv):
    "A vector environment of its own kind, with episodes of random length."
    metadata = {"autoreset_mode": AutoresetMode.DISABLED}
    def __init__(self):
        self.num_envs = 3
        self.single_observation_space = gymnasium.spaces.Box(-9, 9, (2,), np.float32)
        self.single_action_space = gymnasium.spaces.Discrete(2)
        self.observation_space = batch_space(self.single_observation_space, 3)
        self.action_space = batch_space(self.single_action_space, 3)
        self.state = np.zeros((3, 2), np.float32)
    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        mask = (options or {}).get("reset_mask", np.ones(3, bool))
        self.state[mask] = self.np_random.uniform(-1, 1, (int(mask.sum()), 2))
        return self.state.copy(), {}
    def step(self, actions):
        self.state += self.np_random.normal(size=(3, 2)).astype(np.float32) / 2
        ended = np.abs(self.state).max(-1) > 3
        self.state = np.clip(self.state, -9, 9)
        return self.state.copy(), self.state[:, 0].astype(float), ended, np.zeros(3, bool), {}

def short_pendulum():
    return GymEnv("Pendulum-v1", max_episode_steps=15)

def bookkept(make):
    norm = VecNorm(in_keys=["observation"], decay=0.9)
    frames = CatFrames(N=3, dim=-1, in_keys=["observation"], out_keys=["frames"])
    return TransformedEnv(make(), Compose(StepCounter(max_steps=12), RewardSum(), norm, frames))

CARTPOLES = [lambda: gymnasium.make("CartPole-v1")] * 3
MAKE = {
    "CartPole": lambda: GymEnv("CartPole-v1"),
    "CartPole, checked": lambda: GymEnv("CartPole-v1", disable_env_checker=False),
    "Pendulum": short_pendulum,
    "sync": lambda: GymEnv("CartPole-v1", num_envs=3),
    "sync, same step": lambda: GymWrapper(SyncVectorEnv(CARTPOLES, autoreset_mode=AutoresetMode.SAME_STEP)),
    "own vector class": lambda: GymWrapper(OwnVector()),
    "serial": lambda: SerialEnv(4, lambda: GymEnv("CartPole-v1")),
    "transformed": lambda: bookkept(MAKE["sync"]),
    "serial of transformed": lambda: SerialEnv(2, lambda: bookkept(short_pendulum)),
    "walk": Walk,
    "strings": CountingEnvWithString,
    "pixels": lambda: GymEnv("CartPole-v1", from_pixels=True),
}

def run(env, td, actions):
    seen = []
    for action in actions:
        td = env.maybe_reset(td)
        td = env.step(td.update(action))
        seen.append(td.clone())
        td = env._step_mdp(td)
    return seen, td
"""

RESUME = """
import sys, torch
sys.path.insert(0, sys.argv[1])
import makers
from rollwright.envs.checkpoint import load_env
states = torch.load(sys.argv[1] + "/states.pt", weights_only=True)
starts = torch.load(sys.argv[1] + "/starts.pt", weights_only=False)
seen = {}
for name, (td, actions) in starts.items():
    env = makers.MAKE[name]()
    load_env(env, states[name])
    seen[name] = makers.run(env, td, actions)[0]
torch.save(seen, sys.argv[1] + "/seen.pt")
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path: Path = tmp_path_factory.mktemp("checkpoint")
    (path / "makers.py").write_text(MAKERS)
    return path


@pytest.fixture(scope="module")
def makers(folder: Path) -> Any:
    spec = importlib.util.spec_from_file_location("makers", folder / "makers.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["makers"] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules["makers"]


def actions_for(env: EnvBase, number: int) -> list[TensorDictBase]:
    torch.manual_seed(1)
    return [env.full_action_spec.rand() for _ in range(number)]


def run_until_end(makers: Any, env: EnvBase) -> TensorDictBase:
    """Step at least seven times, and on until an episode has ended, whose reset is still to come."""
    env.set_seed(3)
    td = env.reset()
    actions = actions_for(env, 80)
    for count, action in enumerate(actions):
        if count >= 7 and env.any_done(td):
            return td
        _, td = makers.run(env, td, [action])
    return td


def same(first: list[TensorDictBase], second: list[TensorDictBase]) -> bool:
    flat = [[(key, leaf) for td in tds for key, leaf in td.items(True, True)] for tds in (first, second)]
    if [key for key, _ in flat[0]] != [key for key, _ in flat[1]]:
        return False
    pairs = zip(*([leaf for _, leaf in leaves] for leaves in flat), strict=True)
    return all(torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b for a, b in pairs)


NAMES = (
    "CartPole",
    "CartPole, checked",
    "Pendulum",
    "own vector class",
    "pixels",
    "serial",
    "serial of transformed",
    "strings",
    "sync",
    "sync, same step",
    "transformed",
    "walk",
)


@pytest.fixture(scope="module")
def resumed(
    makers: Any, folder: Path, programs_of_all: Programs
) -> dict[str, tuple[list[TensorDictBase], list[TensorDictBase]]]:
    """By name: what the saved environment went on to do, and what the restored one did in another process."""
    assert sorted(makers.MAKE) == sorted(NAMES)
    expected, starts, states = {}, {}, {}
    for name, make in makers.MAKE.items():
        env = make()
        td = run_until_end(makers, env)
        states[name], unsaved = save_env(env)
        assert unsaved == []
        starts[name] = td.clone(), actions_for(env, 4 if name == "pixels" else 40)
        expected[name] = makers.run(env, td, starts[name][1])[0]  # a reset writes into what it was given
    torch.save(states, folder / "states.pt")
    torch.save(starts, folder / "starts.pt")
    done = programs_of_all.run("-c", RESUME, folder, timeout=patient(100))
    assert done.returncode == 0, done.stderr
    seen = torch.load(folder / "seen.pt", weights_only=False)
    return {name: (expected[name], seen[name]) for name in expected}


@pytest.mark.parametrize("name", NAMES)
def test_restored_in_another_process_it_goes_on_with_the_same_bits(resumed: Any, name: str) -> None:
    expected, seen = resumed[name]
    assert same(expected, seen)
    if name != "pixels":  # too slow for a whole episode
        assert torch.stack([td["next", "done"] for td in seen]).any()


@pytest.mark.parametrize("name", [name for name in NAMES if name != "pixels"])
def test_saving_changes_nothing(makers: Any, name: str) -> None:
    runs = []
    for saves in (False, True):
        env = makers.MAKE[name]()
        td = run_until_end(makers, env)
        if saves:
            save_env(env)
        runs.append(makers.run(env, td, actions_for(env, 20))[0])
    assert same(*runs)


def test_a_state_can_be_loaded_again_and_again_into_environments_that_have_run(makers: Any) -> None:
    env = makers.MAKE["transformed"]()
    td = run_until_end(makers, env)
    state = save_env(env).state
    actions = actions_for(env, 20)
    expected = makers.run(env, td.clone(), actions)[0]
    for _ in range(2):
        load_env(env, state)
        assert same(makers.run(env, td.clone(), actions)[0], expected)


def test_random_streams_of_spaces_and_seeds_that_wait_for_a_reset_are_saved() -> None:
    env, again = GymEnv("CartPole-v1"), GymEnv("CartPole-v1")
    env.action_space.seed(5)
    env.observation_space.seed(6)
    env.set_seed(7)
    load_env(again, save_env(env).state)
    assert [env.action_space.sample() for _ in range(20)] == [again.action_space.sample() for _ in range(20)]
    assert (env.observation_space.sample() == again.observation_space.sample()).all()
    assert torch.equal(env.reset()["observation"], again.reset()["observation"])


# What is written in place, and what is shared -------------------------------------------------------


def test_buffers_and_specs_are_written_in_place() -> None:
    env = TransformedEnv(GymEnv("CartPole-v1"), VecNorm(in_keys=["observation"]))
    again = TransformedEnv(GymEnv("CartPole-v1"), VecNorm(in_keys=["observation"]))
    env.rollout(5)
    again.rollout(3)
    mean, spec = again.transform.mean_0, again.base_env.full_action_spec
    load_env(again, save_env(env).state)
    assert again.transform.mean_0 is mean
    assert torch.equal(mean, env.transform.mean_0)
    assert again.base_env.full_action_spec is spec


class Masked(EnvBase):
    """Allows one action alone, another with each step."""

    def __init__(self) -> None:
        super().__init__()
        self.observation_spec = Composite(action_mask=Categorical(2, shape=(4,), dtype=torch.bool))
        self.action_spec = Categorical(4, shape=())
        self.count = 0

    def _set_seed(self, seed: int | None) -> None: ...

    def _reset(self, tensordict: TensorDictBase | None = None, **kwargs: Any) -> TensorDictBase:
        return TensorDict({"action_mask": torch.arange(4) == self.count % 4})

    def _step(self, tensordict: TensorDictBase) -> TensorDictBase:
        self.count += 1
        return self._reset().update({"reward": 0.0, "done": False})


def test_masks_of_specs_are_saved() -> None:
    env, again = TransformedEnv(Masked(), ActionMask()), TransformedEnv(Masked(), ActionMask())
    env.rollout(3)
    held = again.action_spec  # as a random policy holds it
    load_env(again, save_env(env).state)
    assert held is again.action_spec
    assert held.rand() == 3
    again.step(TensorDict({"action": held.rand()}))
    assert held.rand() == 0


class Holding(CountingEnv):
    """Has an attribute ``held``."""

    def __init__(self, held: Any = None) -> None:
        super().__init__()
        self.held = held


def test_parts_that_share_an_object_go_on_sharing_it() -> None:
    generator = np.random.default_rng(0)
    env, again = SerialEnv(2, lambda: Holding(generator)), SerialEnv(2, Holding)
    load_env(again, save_env(env).state)
    first, second = again.held
    assert first is second
    assert first is not generator
    assert first.random() == generator.random()


def test_references_to_modules_are_to_the_live_ones() -> None:
    env, again = Holding(), Holding()
    env.held = [env, env.reset, env.count, env.full_action_spec]
    load_env(again, save_env(env).state)
    own, method, count, spec = again.held
    assert own is again
    assert method.__self__ is again
    assert count is again.count
    assert spec is again.full_action_spec


def test_attributes_of_transforms_are_saved_and_those_that_came_later_go() -> None:
    class Count(Transform):
        calls = 0

        def _call(self, next_tensordict: TensorDictBase) -> TensorDictBase:
            self.calls += 1
            return next_tensordict

    env, again = TransformedEnv(CountingEnv(), Count()), TransformedEnv(CountingEnv(), Count())
    empty = save_env(env).state
    env.rollout(3)
    load_env(again, save_env(env).state)
    assert again.transform.calls == 3
    assert again.transform.container is again
    load_env(again, empty)
    assert "calls" not in vars(again.transform)


def test_ragged_environments_can_be_saved() -> None:
    env, again = HeterogeneousCountingEnv(), HeterogeneousCountingEnv()
    env.rollout(2)
    load_env(again, save_env(env).state)
    assert torch.equal(env.count, again.count)


# What cannot be saved -------------------------------------------------------------------------------


class Guarded(gymnasium.Wrapper):
    """Holds something."""

    def __init__(self, env: gymnasium.Env, held: Any) -> None:
        super().__init__(env)
        self.held = held


class Rebuilt(gymnasium.Wrapper, gymnasium.utils.EzPickle):
    """Pickles, as MuJoCo's environments do, without its state."""

    def __init__(self) -> None:
        gymnasium.utils.EzPickle.__init__(self)
        gymnasium.Wrapper.__init__(self, gymnasium.make("CartPole-v1"))


def unsaved(env: EnvBase) -> str:
    try:
        (line,) = save_env(env).unsaved
        return line
    finally:
        env.close()


def guarded(held: Any) -> GymWrapper:
    return GymWrapper(Guarded(gymnasium.make("CartPole-v1"), held))


def test_what_cannot_be_pickled_is_named() -> None:
    assert unsaved(guarded(threading.Lock())) == (
        "GymWrapper(CartPole-v1): cannot be pickled: TypeError: cannot pickle '_thread.lock' object (attribute _env)"
    )


def test_open_files_are_named(tmp_path: Path) -> None:
    for mode in ("w", "r", "rb"):  # a pickle of a file would be that of its text
        with (tmp_path / "log").open(mode) as file:
            assert "is an open file (attribute _env)" in unsaved(guarded(file))


def test_environments_that_would_be_pickled_without_their_state_are_named() -> None:
    line = unsaved(GymWrapper(Rebuilt()))
    assert line.startswith(
        "GymWrapper(CartPole-v1): cannot be pickled: PicklingError: Rebuilt is pickled by the arguments"
    )


def test_environments_in_other_processes_and_threads_are_named() -> None:
    maker: Callable[[], gymnasium.Env] = lambda: gymnasium.make("CartPole-v1")  # noqa: E731
    assert "AsyncVectorEnv has its environments in other processes" in unsaved(
        GymWrapper(AsyncVectorEnv([maker], autoreset_mode=gymnasium.vector.AutoresetMode.DISABLED))
    )
    line = unsaved(EnvPoolEnv("CartPole-v1", 2))
    assert line.startswith("EnvPoolEnv(CartPole-v1): cannot be pickled: TypeError: cannot pickle 'CartPole")


def test_a_part_that_cannot_be_saved_keeps_no_other_from_it() -> None:
    def make() -> SerialEnv:
        held: list[Any] = [None, threading.Lock(), None]
        return SerialEnv(3, [lambda h=h: TransformedEnv(guarded(h), StepCounter()) for h in held])

    env, again = make(), make()
    env.set_seed(0)
    td = env.reset()
    checkpoint = save_env(env)
    (line,) = checkpoint.unsaved
    assert line.startswith("GymWrapper(CartPole-v1) [worker 1]: cannot be pickled: TypeError")
    action = actions_for(env, 1)[0]
    load_env(again, checkpoint.state)
    untouched = again.worker1._env
    seen = again._envs[0].step(td[0].update(action[0]))
    assert torch.equal(seen["next", "observation"], env._envs[0].step(td[0].update(action[0]))["next", "observation"])
    assert again.worker1._env is untouched
    with pytest.raises(EnvError, match="reset"):
        again._envs[1].step(td[1].update(action[1]))


def test_tensors_of_a_part_that_cannot_be_pickled_are_saved_all_the_same() -> None:
    env, again = Holding(threading.Lock()), Holding()
    env.count += 2
    load_env(again, save_env(env).state)
    assert again.count.item() == 2
    assert again.held is None


# Errors ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("saved", "live", "told"),
    [
        (lambda: GymEnv("CartPole-v1"), lambda: GymEnv("Acrobot-v1"), "CartPole-v1"),
        (lambda: GymEnv("Pendulum-v1", g=9.0), lambda: GymEnv("Pendulum-v1"), "'g': 9.0"),
        (lambda: GymEnv("CartPole-v1", max_episode_steps=7), lambda: GymEnv("CartPole-v1"), "max_episode_steps"),
        (lambda: SerialEnv(2, CountingEnv), lambda: SerialEnv(3, CountingEnv), r"<batch size \[2\]> when"),
        (lambda: SerialEnv(1, CountingEnv), lambda: SerialEnv(1, Holding), "worker0 was <CountingEnv>"),
        (CountingEnv, Holding, "is <Holding> here"),
        (lambda: CountingEnv(batch_size=[2]), CountingEnv, r"batch size \[2\]"),
        (CountingEnv, lambda: TransformedEnv(CountingEnv(), StepCounter()), "TransformedEnv"),
    ],
)
def test_environments_of_another_make_are_refused(saved: Any, live: Any, told: str) -> None:
    env = live()
    with pytest.raises(ValueError, match=f"state: expected that of an environment of the same make.*{told}"):
        load_env(env, save_env(saved()).state)


def test_what_is_no_state_is_refused() -> None:
    with pytest.raises(ValueError, match="expected the state of save_env"):
        load_env(CountingEnv(), {"tensors": {}})
    with pytest.raises(ValueError, match="got list"):
        load_env(CountingEnv(), [])


def test_dynamic_shapes_are_no_obstacle() -> None:
    env = TransformedEnv(CountingEnv(), CatFrames(N=2, dim=-1, in_keys=["observation"]))
    fresh = save_env(env).state
    env.rollout(2)
    assert env.transform.frames_0 is not None
    load_env(env, fresh)
    assert env.transform.frames_0 is None
    assert isinstance(env.full_observation_spec["observation"], Unbounded)


def test_what_was_saved_before_modules_were_joined_is_read() -> None:
    for kind, before in (
        (RecreationPolicy, "rollwright.envs.recreation.policy"),
        (default_info_dict_reader, "rollwright.envs.libs._info"),
        (VectorEpisodes, "rollwright.envs.libs.vector.episodes"),
        (AgentGroup, "rollwright.envs.libs.pettingzoo.agents"),
    ):
        data = pickle.dumps(kind, protocol=0).replace(kind.__module__.encode(), before.encode())
        assert unpacked(torch.frombuffer(bytearray(data), dtype=torch.uint8)) is kind


@pytest.mark.parametrize(
    ("former", "name"),
    [
        ("data.specs.gymspaces", "Leaf"),
        ("data.specs.stacks.stackedcomposite", "StackedComposite"),
        ("envs.checkpoint.snapshot", "_view"),
        ("envs.transforms.scaling", "ObservationNorm"),
        ("envs.wrapper", "WrapperEnv"),
    ],
)
def test_states_name_modules_that_are_elsewhere_by_now(former, name):
    assert checkpoint.load(f"crollwright.{former}\n{name}\n.".encode(), {}).__name__ == name


def test_former_modules_are_gone_and_those_in_their_place_are_there():
    for former, module in checkpoint._FORMER_MODULES.items():
        assert importlib.util.find_spec(module) is not None, module
        with pytest.raises(ModuleNotFoundError):
            importlib.import_module(former)
