"""TorchRL's collector.

Many environments in one process are its SerialEnv, or its wrapper around gymnasium's vector environment, in the
autoreset mode that suits it best. (Its GymEnv(num_envs=...) starts a process for each environment.)
"""

from __future__ import annotations

from collections.abc import Callable

import gymnasium
import torch
from gymnasium.vector import AutoresetMode
from tensordict.nn import NormalParamExtractor, ProbabilisticTensorDictModule, TensorDictModule, TensorDictSequential
from torch import nn
from torchrl.collectors import Collector
from torchrl.envs import GymEnv, GymWrapper, MultiThreadedEnv, SerialEnv

from benchmarks.cases import TORCHRL, Case, find_case, make_network
from benchmarks.peers.protocol import serve


def make_env(case: Case, side: str):
    if case.source == "envpool":
        return MultiThreadedEnv(num_workers=case.num_envs, env_name=case.env_id)  # knows one-hot actions only
    if case.num_envs == 1:
        return GymEnv(case.env_id, categorical_action_encoding=True)
    if side == TORCHRL:
        options = {"autoreset_mode": AutoresetMode.DISABLED}
        vector = gymnasium.make_vec(case.env_id, case.num_envs, "sync", options, disable_env_checker=True)
        return GymWrapper(vector, categorical_action_encoding=True)
    return SerialEnv(case.num_envs, lambda: GymEnv(case.env_id, categorical_action_encoding=True))


def make(name: str, side: str) -> Callable[[], int]:
    torch.set_num_threads(1)
    case = find_case(name)
    env = make_env(case, side)
    net, keys, distribution = make_network(case.policy), ["logits"], torch.distributions.Categorical
    if case.policy == "gaussian":
        net, keys = nn.Sequential(*net, NormalParamExtractor()), ["loc", "scale"]
        distribution = torch.distributions.Normal
    elif case.source == "envpool":
        distribution = torch.distributions.OneHotCategorical
    seen = "pixels" if "pixels" in set(env.observation_spec.keys()) else "observation"
    policy = TensorDictSequential(
        TensorDictModule(net, in_keys=[seen], out_keys=keys),
        ProbabilisticTensorDictModule(
            in_keys=keys, out_keys=["action"], distribution_class=distribution, return_log_prob=True
        ),
    )
    collector = Collector(env, policy, frames_per_batch=case.frames_per_batch, total_frames=-1)
    batches = iter(collector)
    return lambda: next(batches).numel()


if __name__ == "__main__":
    serve(make)
