"""Tianshou's Collector, into its replay buffer; the policy adds logits and log-probabilities to what is stored."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import gymnasium
import torch
from tianshou.algorithm.modelfree.reinforce import ProbabilisticActorPolicy
from tianshou.data import Batch, Collector, VectorReplayBuffer
from tianshou.env import DummyVectorEnv
from torch import Tensor, distributions, nn
from torch.nn import functional

from benchmarks.cases import Case, find_case, make_network
from benchmarks.peers.protocol import serve


class Actor(nn.Module):
    """The case's network, as Tianshou calls it."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        self.net = make_network(case.policy)

    def forward(self, obs: Any, state: Any = None, info: Any = None) -> tuple[Any, Any]:
        return self.net(torch.as_tensor(obs)), state


def _categorical(logits: Tensor) -> distributions.Distribution:
    return distributions.Categorical(logits=logits)


def _normal(output: Tensor) -> distributions.Distribution:
    loc, raw = output.chunk(2, -1)
    return distributions.Independent(distributions.Normal(loc, functional.softplus(raw) + 0.01), 1)


class Policy(ProbabilisticActorPolicy):
    """Stores the distribution's parameters and the action's log-probability beside the action."""

    def forward(self, batch: Any, state: Any = None) -> Any:
        result = super().forward(batch, state)
        result.policy = Batch(parameters=result.logits, log_prob=result.dist.log_prob(result.act))
        return result


def make_env(case: Case) -> Any:
    if case.source == "envpool":
        import envpool

        return envpool.make(case.env_id, env_type="gymnasium", num_envs=case.num_envs, seed=0)
    return DummyVectorEnv([lambda: gymnasium.make(case.env_id, disable_env_checker=True)] * case.num_envs)


def make(name: str, side: str) -> Callable[[], int]:
    torch.set_num_threads(1)
    case = find_case(name)
    env = make_env(case)
    space = env.action_space[0] if isinstance(env.action_space, list) else env.action_space
    policy = Policy(
        actor=Actor(case),
        dist_fn=_normal if case.policy == "gaussian" else _categorical,
        action_space=space,
        action_scaling=False,
        action_bound_method=None,
    )
    buffer = VectorReplayBuffer(case.frames_per_batch, case.num_envs)
    collector = Collector(policy, env, buffer)
    collector.reset()

    def collect() -> int:
        with torch.no_grad():
            return int(collector.collect(n_step=case.frames_per_batch).n_collected_steps)

    return collect


if __name__ == "__main__":
    serve(make)
