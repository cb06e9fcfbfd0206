"""Environments of PettingZoo."""

from __future__ import annotations

import os

os.environ.setdefault("SDL_VIDEODRIVER", "dummy")

import numpy as np
import pytest
import torch
from gymnasium import spaces

from rollwright.collectors import Collector, MultiSyncCollector
from rollwright.envs import GymWrapper, ParallelEnv, PettingZooEnv, PettingZooWrapper, SerialEnv, check_env_specs
from rollwright.errors import EnvError

pettingzoo = pytest.importorskip("pettingzoo")

ENVS = {
    "simple_spread": ("mpe2", lambda: PettingZooEnv("mpe/simple_spread_v3", parallel=True, max_cycles=10)),
    "simple_tag": ("mpe2", lambda: PettingZooEnv("simple_tag_v3", max_cycles=10, use_mask=True)),
    "pistonball": ("pymunk", lambda: PettingZooEnv("pistonball_v6", n_pistons=3, max_cycles=10)),
    "knights": ("pygame", lambda: PettingZooEnv("knights_archers_zombies_v11", use_mask=True, done_on_any=False)),
    "knights in turn": ("pygame", lambda: PettingZooEnv("knights_archers_zombies_v11", parallel=False, use_mask=True)),
    "tictactoe": ("pygame", lambda: PettingZooEnv("tictactoe_v3", parallel=False, use_mask=True)),
    "connect four": ("pygame", lambda: PettingZooEnv("connect_four_v3", parallel=False, use_mask=True)),
}


def made(name):
    package, make = ENVS[name]
    pytest.importorskip(package)
    return make()


@pytest.mark.parametrize("name", ENVS)
def test_specs_describe_what_environments_return(name):
    env = made(name)
    check_env_specs(env)
    env.close()


def test_stacked_agents_are_those_of_the_environment():
    module = pytest.importorskip("mpe2.simple_tag_v3")
    env = PettingZooWrapper(module.parallel_env(max_cycles=5))
    assert env.group_map == {"adversary": ["adversary_0", "adversary_1", "adversary_2"], "agent": ["agent_0"]}
    env.set_seed(3)
    frames = env.rollout(20)
    assert frames.shape == (5,)
    theirs = module.parallel_env(max_cycles=5)
    found, _ = theirs.reset(seed=3)
    for frame in frames.unbind(0):
        actions = {}
        for group, agents in env.group_map.items():
            for row, agent in enumerate(agents):
                assert torch.equal(frame[group, "observation"][row], torch.from_numpy(found[agent]))
                actions[agent] = int(frame[group, "action"][row])
        found, rewards, _, truncated, _ = theirs.step(actions)
        assert frame["next", "adversary", "reward"][1].item() == pytest.approx(rewards["adversary_1"])
        assert frame["next", "agent", "truncated"].item() == truncated["agent_0"]
        assert frame["next", "agent", "observation"][0].tolist() == found["agent_0"].tolist()


def test_turns_and_allowed_actions():
    env = made("tictactoe")
    env.set_seed(0)
    frames = env.rollout(20)
    assert 5 <= len(frames) <= 9
    turns = frames["player_1", "mask"][:, 0]
    assert turns.tolist() == [i % 2 == 0 for i in range(len(frames))]
    assert torch.equal(frames["player_2", "mask"][:, 0], ~turns)
    played = torch.where(turns, frames["player_1", "action"][:, 0], frames["player_2", "action"][:, 0])
    assert played.unique().numel() == len(frames)
    assert frames["player_1", "action_mask"][2].sum() == 7
    assert frames["next", "done"].sum() == 1
    last = frames["next"][-1]
    assert last["player_1", "reward"].item() == -last["player_2", "reward"].item()


class Leaving(pettingzoo.ParallelEnv):
    """Agent number i leaves after i + 1 steps."""

    metadata = {"name": "leaving"}  # noqa: RUF012 - PettingZoo's interface

    def __init__(self):
        self.possible_agents = [f"one_{i}" for i in range(3)]

    def observation_space(self, agent):
        return spaces.Box(0, 9, (1,), np.float32)

    def action_space(self, agent):
        return spaces.Discrete(2)

    def reset(self, seed=None, options=None):
        self.agents, self.time = list(self.possible_agents), 0
        return {agent: np.zeros(1, np.float32) for agent in self.agents}, {agent: {} for agent in self.agents}

    def step(self, actions):
        assert set(actions) == set(self.agents)
        self.time += 1
        alive = list(self.agents)
        over = {agent: int(agent[-1]) < self.time for agent in alive}
        self.agents = [agent for agent in alive if not over[agent]]
        seen = {agent: np.full(1, self.time, np.float32) for agent in alive}
        return seen, dict.fromkeys(alive, 1.0), over, dict.fromkeys(alive, False), {agent: {} for agent in alive}


def test_agents_that_left_are_masked():
    env = PettingZooWrapper(Leaving(), use_mask=True, done_on_any=False)
    frames = env.rollout(9)["next"]
    assert frames["one", "mask"].tolist() == [[False, True, True], [False, False, True], [False, False, False]]
    assert frames["one", "terminated"][..., 0].tolist() == (~frames["one", "mask"]).tolist()
    assert frames["one", "reward"][..., 0].tolist() == [[1, 1, 1], [0, 1, 1], [0, 0, 1]]
    assert frames["one", "observation"][..., 0].tolist() == [[1, 1, 1], [0, 2, 2], [0, 0, 3]]
    assert frames["done"][:, 0].tolist() == [False, False, True]
    assert PettingZooWrapper(Leaving()).rollout(9).shape == (1,)
    with pytest.raises(EnvError, match="use_mask=True"):
        PettingZooWrapper(Leaving(), done_on_any=False).rollout(9)


@pytest.mark.parametrize("batch", [SerialEnv, ParallelEnv])
def test_batches_of_environments(batch):
    env = batch(2, ENVS["tictactoe"][1])
    frames = env.rollout(12, break_when_any_done=False)
    assert frames["player_1", "observation", "observation"].shape == (2, 12, 1, 3, 3, 2)
    env.close()


def test_collectors_and_workers():
    make = ENVS["simple_spread"][1]
    pytest.importorskip("mpe2")
    collector = Collector(make().pettingzoo_env, frames_per_batch=25, total_frames=25)
    (batch,) = list(collector)
    assert batch["agent", "action"].shape == (25, 3)
    assert batch["collector", "traj_ids"].unique().numel() == 3
    collector.shutdown()
    collector = MultiSyncCollector([make, make], frames_per_batch=20, total_frames=20)
    assert next(iter(collector))["next", "agent", "reward"].shape[-2:] == (3, 1)
    collector.shutdown()


def test_bad_input_is_named():
    env = made("tictactoe").pettingzoo_env
    with pytest.raises(TypeError, match="PettingZooWrapper"):
        GymWrapper(env)
    with pytest.raises(ValueError, match="use_mask=True"):
        PettingZooWrapper(env)
    with pytest.raises(TypeError, match=r"env: expected an environment of PettingZoo, got builtins.int"):
        PettingZooWrapper(3)
    with pytest.raises(ValueError, match=r"group_map: expected each of the agents player_1, player_2"):
        PettingZooWrapper(env, use_mask=True, group_map={"all": ["player_1"]})
    with pytest.raises(
        EnvError, match=r"parallel: 'tictactoe_v3' has no parallel_env\(\), got True. Pass parallel=False, use"
    ):
        PettingZooEnv("tictactoe_v3", parallel=True)
    with pytest.raises(EnvError, match="found no environment 'tictactoe_v99'"):
        PettingZooEnv("tictactoe_v99", parallel=False, use_mask=True)
