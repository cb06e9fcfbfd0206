"""Our collector, as a user would build it for each case."""

from __future__ import annotations

from tensordict.nn import NormalParamExtractor, ProbabilisticTensorDictModule, TensorDictModule, TensorDictSequential
from torch import distributions, nn

from benchmarks.cases import COMPILED, TRANSFORMS, Case, make_network
from rollwright.collectors import Collector
from rollwright.envs import Compose, EnvBase, EnvPoolEnv, GymEnv, InitTracker, RewardSum, StepCounter, TransformedEnv

SEED = 0


def make_env(case: Case, side: str) -> EnvBase:
    env: EnvBase
    if case.source == "envpool":
        env = EnvPoolEnv(case.env_id, case.num_envs, categorical_action_encoding=True)
    elif case.num_envs == 1:
        env = GymEnv(case.env_id, categorical_action_encoding=True)
    else:
        env = GymEnv(case.env_id, num_envs=case.num_envs, categorical_action_encoding=True)
    if side == TRANSFORMS:
        return TransformedEnv(env, Compose(InitTracker(), StepCounter(), RewardSum()))
    return env


def make_policy(case: Case) -> TensorDictSequential:
    net = make_network(case.policy)
    keys = ["logits"]
    distribution = distributions.Categorical
    if case.policy == "gaussian":
        net, keys, distribution = nn.Sequential(*net, NormalParamExtractor()), ["loc", "scale"], distributions.Normal
    return TensorDictSequential(
        TensorDictModule(net, in_keys=["pixels" if case.policy == "pixels" else "observation"], out_keys=keys),
        ProbabilisticTensorDictModule(
            in_keys=keys, out_keys=["action"], distribution_class=distribution, return_log_prob=True
        ),
    )


def make_collector(case: Case, side: str) -> Collector:
    collector = Collector(
        make_env(case, side),
        make_policy(case),
        frames_per_batch=case.frames_per_batch,
        total_frames=-1,
        compile_policy=side == COMPILED,
    )
    collector.set_seed(SEED)
    return collector
