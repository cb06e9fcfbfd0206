"""Environments by name: packages that register them, and frames that are skipped once."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces
from tests.variants import in_turn

from rollwright.envs import DMControlEnv, GymEnv, GymWrapper
from rollwright.errors import EnvError, MissingExtraError


class Skipping(gymnasium.Env):
    """Counts its frames, of which it takes ``frameskip`` with each step."""

    observation_space = spaces.Box(0, np.inf, (1,), np.float32)
    action_space = spaces.Discrete(2)

    def __init__(self, frameskip: int = 4) -> None:
        self.frameskip = frameskip

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict]:
        self.frames = 0
        return np.zeros(1, np.float32), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict]:
        self.frames += self.frameskip
        return np.full(1, self.frames, np.float32), 1.0, False, False, {}


class Plain(Skipping):
    def __init__(self) -> None:
        super().__init__(1)


class Finder:
    """Imports ``minigrid`` as a module that registers what the real one does, as far as tests ask for it."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name not in ("minigrid", "skipping_envs"):
            return None
        return __import__("importlib.machinery").machinery.ModuleSpec(name, self)

    def create_module(self, spec: Any) -> None:
        return None

    def exec_module(self, module: ModuleType) -> None:
        gymnasium.register("MiniGrid-Skipping-v0", Skipping, kwargs={"frameskip": 4})
        gymnasium.register("own/Skipping-v2", Skipping, kwargs={"frameskip": 4})
        gymnasium.register("own/Plain-v0", Plain)


@pytest.fixture
def packages(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(sys, "meta_path", [Finder(), *sys.meta_path])
    known = set(gymnasium.registry)
    yield
    for name in set(gymnasium.registry) - known:
        del gymnasium.registry[name]
    for module in ("minigrid", "skipping_envs"):
        sys.modules.pop(module, None)


def frames(env: GymWrapper) -> float:
    return env.rollout(1)["next", "observation"].max().item()


@pytest.mark.usefixtures("packages")
@pytest.mark.parametrize(
    ("name", "options", "expected"),
    [
        ("MiniGrid-Skipping-v0", {}, 4),
        ("MiniGrid-Skipping-v0", {"frame_skip": 3}, 3),
        ("MiniGrid-Skipping-v0", {"frame_skip": 1}, 1),
        ("MiniGrid-Skipping-v0", {"frameskip": 2}, 2),
        ("skipping_envs:own/Skipping-v2", {"frame_skip": 3}, 3),
        ("skipping_envs:own/Skipping", {"frame_skip": 3}, 3),
        ("skipping_envs:own/Skipping-v2", {"frame_skip": 3, "num_envs": 2}, 3),
        ("skipping_envs:own/Plain-v0", {"frame_skip": 3}, 3),
    ],
)
@pytest.mark.filterwarnings("ignore:.*Using the latest versioned environment")
def test_frame_skip_is_what_a_step_takes_in_all(name: str, options: dict, expected: int) -> None:
    assert frames(GymEnv(name, **options)) == expected


@pytest.mark.usefixtures("packages")
def test_two_skips_that_would_multiply_are_refused() -> None:
    with pytest.raises(ValueError, match=r"frame_skip=4 and frameskip=2 say the same.*Pass one"):
        GymEnv("MiniGrid-Skipping-v0", frame_skip=4, frameskip=2)
    made = gymnasium.make("MiniGrid-Skipping-v0")
    with pytest.raises(ValueError, match=r"frame_skip=4: .*frameskip=4.*multiply.*Make it with frameskip=4 and"):
        GymWrapper(made, frame_skip=4)
    assert frames(GymWrapper(gymnasium.make("MiniGrid-Skipping-v0", frameskip=1), frame_skip=4)) == 4


@pytest.mark.parametrize(
    ("name", "package"),
    [
        ("ALE/Pong-v5", "rollwright[atari]"),
        ("PongNoFrameskip-v4", "rollwright[atari]"),
        ("FetchReach-v4", "gymnasium-robotics"),
    ],
)
def test_a_package_that_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch, name: str, package: str) -> None:
    for module in ("ale_py", "gymnasium_robotics"):
        monkeypatch.setitem(sys.modules, module, None)  # importing it raises
    for known in [known for known in gymnasium.registry if known == name]:
        monkeypatch.delitem(gymnasium.registry, known)
    with pytest.raises(
        MissingExtraError, match=rf"{name}.*which registers it and is not installed.*pip install"
    ) as caught:
        GymEnv(name)
    assert package in str(caught.value)


def test_errors_of_names_are_those_of_gymnasium() -> None:
    with pytest.raises(EnvError, match="Nowhere"):
        GymEnv("Nowhere-v0")
    with pytest.raises(EnvError, match="no_such_module"):
        GymEnv("no_such_module:Nowhere-v0")


@pytest.mark.parametrize(
    ("name", "skip"), in_turn(["ALE/Pong-v5", "ale_py:ALE/Pong-v5", "PongNoFrameskip-v4"], [None, 1, 4])
)
def test_frames_of_atari(name: str, skip: int | None) -> None:
    pytest.importorskip("ale_py")
    env = GymEnv(name, frame_skip=skip, obs_type="ram", repeat_action_probability=0.0)
    env.rollout(5)
    own = 1 if "NoFrameskip" in name else 4
    assert env.unwrapped.ale.getEpisodeFrameNumber() == 5 * (own if skip is None else skip)
    env.close()


def test_vector_atari_in_its_default_mode() -> None:
    pytest.importorskip("ale_py")
    options = {"num_envs": 2, "frame_skip": 4, "vectorization_mode": "vector_entry_point"}
    env = GymEnv("ALE/Breakout-v5", img_height=21, img_width=21, noop_max=0, max_num_frames_per_episode=80, **options)
    rollout = env.rollout(60, break_when_any_done=False)
    done = rollout["next", "done"][:, :-1, 0]
    assert done.sum() >= 4
    same = (rollout["next", "observation"][:, :-1] == rollout["observation"][:, 1:]).flatten(2).all(-1)
    assert bool(same[~done].all())
    env.close()


def test_names_of_a_library_that_is_not_installed_are_no_attribute(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "dm_control", None)
    assert not hasattr(DMControlEnv, "available_envs")
    with pytest.raises(AttributeError, match="dm_control"):
        DMControlEnv.available_envs  # noqa: B018
