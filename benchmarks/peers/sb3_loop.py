"""Stable-Baselines3's rollout collection of PPO, into its rollout buffer.

Its policy has a value function, which costs it time that the others do not spend: here it is a single linear layer,
the least it can be. It stores values and log-probabilities, neither logits nor next observations. Its normal policy
has one deviation for all states.
"""

from __future__ import annotations

from collections.abc import Callable

import gymnasium
import torch
from stable_baselines3 import PPO
from stable_baselines3.common.torch_layers import BaseFeaturesExtractor
from stable_baselines3.common.vec_env import DummyVecEnv
from torch import Tensor, nn

from benchmarks.cases import Case, find_case, make_network
from benchmarks.peers.protocol import serve


class Convolutions(BaseFeaturesExtractor):
    """The layers of the case's network between the image, which comes with its channels in front, and the last."""

    def __init__(self, observation_space: gymnasium.Space) -> None:
        super().__init__(observation_space, features_dim=64)
        self.layers = nn.Sequential(*make_network("pixels")[1:-1])

    def forward(self, observation: Tensor) -> Tensor:
        return self.layers(observation)


def make_model(case: Case) -> PPO:
    env = DummyVecEnv([lambda: gymnasium.make(case.env_id, disable_env_checker=True)] * case.num_envs)
    kwargs = {"net_arch": {"pi": [64, 64], "vf": []}, "activation_fn": nn.Tanh}
    if case.policy == "pixels":
        kwargs = {"net_arch": [], "features_extractor_class": Convolutions}
    kind = "CnnPolicy" if case.policy == "pixels" else "MlpPolicy"
    return PPO(kind, env, n_steps=case.steps, batch_size=case.frames_per_batch, policy_kwargs=kwargs, device="cpu")


def make(name: str, side: str) -> Callable[[], int]:
    torch.set_num_threads(1)
    case = find_case(name)
    if case.source == "envpool":
        raise SystemExit("has no interface to EnvPool")
    model = make_model(case)
    _, callback = model._setup_learn(10**9)

    def collect() -> int:
        model.collect_rollouts(model.env, callback, model.rollout_buffer, case.steps)
        return case.frames_per_batch

    return collect


if __name__ == "__main__":
    serve(make)
