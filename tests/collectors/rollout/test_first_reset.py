"""Environments see one reset, the first batch's, with its seed; so runs of wrappers that keep statistics are equal."""

from __future__ import annotations

import sys
from types import ModuleType

import gymnasium
import numpy as np
import pytest
import torch
from tensordict import TensorDict
from tensordict.nn import TensorDictModule

from rollwright.collectors import Collector
from rollwright.data import Composite, Unbounded
from rollwright.envs import GymEnv, GymWrapper, ParallelEnv, SerialEnv, StepCounter, TransformedEnv, VecNorm
from rollwright.errors import PolicyKeyError

CALLS: list[object] = []  # what environments of this process have been asked, since the test began
STEPS = 20


class Watched(gymnasium.Wrapper):
    def reset(self, *, seed=None, options=None):
        CALLS.append(("reset", seed))
        return self.env.reset(seed=seed, options=options)

    def step(self, action):
        CALLS.append("step")
        return self.env.step(action)


def pendulum():
    """Episodes of 7 steps, with the wrappers whose results depend on all resets and steps before."""
    env: gymnasium.Env = Watched(gymnasium.make("Pendulum-v1", max_episode_steps=7))
    env = gymnasium.wrappers.RecordEpisodeStatistics(env)
    return gymnasium.wrappers.NormalizeReward(gymnasium.wrappers.NormalizeObservation(env))


def wrapped():
    return GymWrapper(pendulum())


def act(observation):
    return (2 * observation[..., :1]).clamp(-2, 2)


class Act(torch.nn.Module):
    def forward(self, observation):
        return act(observation)


def by_hand(seed: int, steps: int = STEPS) -> dict[str, torch.Tensor]:
    env = pendulum()
    rows: dict[str, list] = {"observation": [], "next": [], "reward": [], "truncated": []}
    observation, _ = env.reset(seed=seed)
    for _ in range(steps):
        rows["observation"].append(np.array(observation, np.float32))
        action = act(torch.from_numpy(np.array(observation, np.float32))).numpy()
        observation, reward, _, truncated, _ = env.step(action)
        rows["next"].append(np.array(observation, np.float32))
        rows["reward"].append([np.float32(reward)])
        rows["truncated"].append([truncated])
        if truncated:
            observation, _ = env.reset()
    return {key: torch.tensor(np.array(value)) for key, value in rows.items()}


def assert_by_hand(batch: TensorDict, seed: int) -> None:
    hand = by_hand(seed)
    assert torch.equal(batch["observation"], hand["observation"])
    assert torch.equal(batch["next", "observation"], hand["next"])
    assert torch.equal(batch["next", "reward"], hand["reward"])
    assert torch.equal(batch["next", "truncated"], hand["truncated"])


@pytest.fixture(autouse=True)
def nothing_called():
    CALLS.clear()


@pytest.mark.parametrize("native", [True, False])
def test_an_environment_sees_one_seeded_reset_and_then_steps(make, native):
    policy = Act() if native else lambda td: td.set("action", act(td["observation"]))
    collector = make(wrapped, policy, frames_per_batch=STEPS, use_buffers=None if native else False)
    assert collector.stats()["paths"]["env"].startswith("native" if native else "plain")
    collector.set_seed(3)
    collector.state_dict()
    assert CALLS == []
    batch = collector.next()
    assert [("reset", 3), *["step"] * 7, ("reset", None), *["step"] * 7, ("reset", None), *["step"] * 6] == CALLS
    assert_by_hand(batch, 3)


@pytest.mark.parametrize("batched", [SerialEnv, ParallelEnv])
def test_batches_of_environments_equal_loops_by_hand(make, batched):
    collector = make(lambda: batched(2, wrapped), Act(), frames_per_batch=2 * STEPS)
    collector.set_seed(5)
    batch = collector.next()
    for row in range(2):
        assert_by_hand(batch[row], 5 + row)


def test_workers_equal_loops_by_hand():
    options = {"num_collectors": 2, "sync": True, "cat_results": "stack", "frames_per_batch": 2 * STEPS}
    with Collector(wrapped, Act(), **options) as collector:
        collector.set_seed(5)
        batch = collector.next()
    for row in range(2):
        assert_by_hand(batch[row], 5 + row)


def test_equal_seeds_give_equal_runs_whatever_was_called_before(make, same):
    batches = []
    for before in (lambda collector: None, repr, Collector.stats, Collector.state_dict):
        collector = make(wrapped, Act(), frames_per_batch=STEPS)
        before(collector)
        collector.set_seed(1)
        batches.append(collector.next())
    for batch in batches[1:]:
        same(batches[0], batch)


def test_running_statistics_of_a_transform_begin_with_the_first_batch(make, same):
    def normalised():
        return TransformedEnv(GymEnv("Pendulum-v1"), VecNorm(in_keys=["observation"]))

    collector, env = make(normalised, Act(), frames_per_batch=STEPS), normalised()
    collector.set_seed(2)
    env.set_seed(2)
    same(collector.next(), env.rollout(STEPS, Act()), but=["collector"])


def test_the_first_episode_of_a_video_is_the_first_one_collected(make, monkeypatch, tmp_path):
    videos = {}

    class Clip:
        def __init__(self, frames, fps):
            self.frames = frames

        def write_videofile(self, path, **kwargs):
            videos[path.rsplit("-", 1)[-1]] = len(self.frames)

    names = ["moviepy", "moviepy.video", "moviepy.video.io", "moviepy.video.io.ImageSequenceClip"]
    modules = {name: ModuleType(name) for name in names}
    for name in names[1:]:
        setattr(modules[name.rsplit(".", 1)[0]], name.rsplit(".", 1)[1], modules[name])
    modules[names[-1]].ImageSequenceClip = Clip
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setenv("SDL_VIDEODRIVER", "dummy")
    single = gymnasium.make("CartPole-v1", render_mode="rgb_array", max_episode_steps=4)
    env = gymnasium.wrappers.RecordVideo(single, str(tmp_path / "videos"), episode_trigger=lambda episode: True)
    collector = make(GymWrapper(env), None, frames_per_batch=8)
    collector.next()
    collector.shutdown()
    assert videos == {"0.mp4": 5, "1.mp4": 5, "2.mp4": 1}  # the observation of the reset, and four steps


def test_the_size_of_frames_is_found_below_the_wrappers(monkeypatch):
    monkeypatch.setenv("SDL_VIDEODRIVER", "dummy")
    env = Watched(gymnasium.make("CartPole-v1", render_mode="rgb_array"))
    env = GymWrapper(env, from_pixels=True)
    assert CALLS == []
    rollout = env.rollout(2)
    assert CALLS == [("reset", None), "step", "step"]
    assert rollout["pixels"].shape[-1] == 3
    env.close()


def test_a_reset_of_some_before_the_first_batch_begins_with_one_of_all(make):
    env = TransformedEnv(SerialEnv(2, wrapped), StepCounter())
    collector = make(env, None, frames_per_batch=4)
    collector.set_seed(0)
    collector.reset([1])
    assert CALLS == [("reset", 0), ("reset", 1), ("reset", None)]
    batch = collector.next()
    assert batch["collector", "traj_ids"].tolist() == [[0, 0], [1, 1]]
    assert CALLS[3:] == ["step"] * 4


def test_a_saved_collector_that_has_stepped_nothing_goes_on_alike(make, same):
    first, second = (make(wrapped, Act(), frames_per_batch=STEPS) for _ in range(2))
    second.load_state_dict(first.state_dict())  # no seed: its generators are saved before they are used
    same(first.next(), second.next())


def test_what_a_reset_lacks_is_named_before_the_policy_acts(make):
    class Module(torch.nn.Module):
        def forward(self, observation, hidden):
            raise AssertionError

    env = GymEnv("Pendulum-v1")
    policy = TensorDictModule(Module(), ["observation", "hidden"], ["action"])
    with pytest.raises(PolicyKeyError, match="hidden"):
        make(env, policy, frames_per_batch=4)
    env.state_spec = Composite(hidden=Unbounded((3,)))
    collector = make(env, policy, frames_per_batch=4)
    with pytest.raises(PolicyKeyError, match="hidden"):
        collector.next()
