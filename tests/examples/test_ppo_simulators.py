"""The examples on simulators learn from what these return; the simulators themselves need not be installed."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from tensordict import TensorDict

from rollwright.data import Bounded, Composite, Unbounded
from rollwright.envs import EnvBase

EXAMPLES = Path(__file__).parents[2] / "examples"


class Chase(EnvBase):
    """Two agents of each of 32 environments are rewarded for actions like what they see."""

    resets_by_mask = True

    def __init__(self, agents=(2,)):
        super().__init__(batch_size=[32])
        self.rows = (32, *agents)
        nest = {"observation": Unbounded((*self.rows, 2))}, {"action": Bounded(-1, 1, (*self.rows, 2))}
        rewards = {"reward": Unbounded((*self.rows, 1))}
        made = [Composite(entries, shape=self.rows) for entries in (*nest, rewards)]
        made = [Composite(agents=one, shape=[32]) for one in made] if agents else made
        self.observation_spec, self.action_spec, self.reward_spec = made
        self.add_truncated_keys()
        self.agents, self.count = bool(agents), 0

    def seen(self, **more):
        self.goal = torch.rand(*self.rows, 2) - 0.5
        entries = {"observation": self.goal, **more}
        return TensorDict({"agents": TensorDict(entries, self.rows)} if self.agents else entries, [32])

    def _reset(self, tensordict=None, **kwargs):
        return self.seen()

    def _step(self, tensordict):
        action = tensordict["agents", "action"] if self.agents else tensordict["action"]
        reward = -(action - self.goal).square().sum(-1, keepdim=True)
        self.count += 1
        over = torch.full((32, 1), self.count % 10 == 0)
        return self.seen(reward=reward).update({"terminated": over & ~over, "truncated": over, "done": over})

    def _set_seed(self, seed):
        torch.manual_seed(seed)


@pytest.mark.parametrize("agents", [(2,), ()], ids=["agents", "one"])
def test_learns(monkeypatch, agents):
    monkeypatch.syspath_prepend(str(EXAMPLES))
    sys.modules.pop("ppo_vmas", None)
    import ppo_vmas

    keys = ppo_vmas.Keys() if agents else ppo_vmas.Keys(("observation",), ("action",), ("reward",))
    for name, value in {"STEPS": 16, "EPOCHS": 4, "MINIBATCHES": 4}.items():
        monkeypatch.setattr(ppo_vmas, name, value)
    rewards = ppo_vmas.train(Chase(agents), keys, 0, 32 * 16 * 6, "cpu")
    assert len(rewards) == 6
    assert rewards[-1] > rewards[0] + 0.05
