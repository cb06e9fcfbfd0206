"""Modules at the paths that programs of the field import from."""

from importlib import import_module

import pytest

import rollwright.envs.transforms

PATHS = {
    "collectors.collectors": ["AsyncCollector", "MultiAsyncCollector", "MultiSyncCollector", "SyncDataCollector"],
    "collectors.distributed.generic": ["DistributedCollector", "DistributedDataCollector"],
    "collectors.distributed.ray": ["RayCollector"],
    "collectors.distributed.rpc": ["RPCCollector", "RPCDataCollector"],
    "collectors.distributed.sync": ["DistributedSyncCollector", "DistributedSyncDataCollector"],
    "collectors.llm": ["LLMCollector"],
    "collectors.utils": ["split_trajectories"],
    "data.llm.history": ["History"],
    "data.postprocs": ["MultiStep", "DensifyReward"],
    "data.replay_buffers.ray_buffer": ["RayReplayBuffer"],
    "data.replay_buffers.replay_buffers": ["ReplayBuffer", "TensorDictPrioritizedReplayBuffer"],
    "data.replay_buffers.samplers": [
        "PrioritizedSampler",
        "RandomSampler",
        "SamplerWithoutReplacement",
        "SliceSampler",
    ],
    "data.replay_buffers.storages": ["LazyMemmapStorage", "LazyTensorStorage", "ListStorage", "TensorStorage"],
    "data.replay_buffers.writers": ["RoundRobinWriter", "TensorDictMaxValueWriter"],
    "data.tensor_specs": ["CategoricalBox", "Composite", "ContinuousBox"],
    "envs.async_envs": ["AsyncEnvPool"],
    "envs.batched_envs": ["ParallelEnv", "SerialEnv"],
    "envs.common": ["EnvBase"],
    "envs.env_creator": ["EnvCreator"],
    "envs.libs.dm_control": ["DMControlEnv", "DMControlWrapper"],
    "envs.libs.gym": ["GymEnv", "GymWrapper", "set_gym_backend"],
    "envs.libs.pettingzoo": ["PettingZooEnv", "PettingZooWrapper"],
    "envs.transforms.transforms": rollwright.envs.transforms.__all__,
    "envs.utils": ["ExplorationType", "check_env_specs", "set_exploration_type", "step_mdp"],
    "modules.distributions.continuous": ["IndependentNormal", "TanhDelta", "TanhNormal"],
    "modules.distributions.discrete": ["MaskedCategorical", "OneHotCategorical"],
    "modules.tensordict_module.actors": ["ProbabilisticActor", "QValueActor"],
    "modules.tensordict_module.common": ["SafeModule"],
    "modules.tensordict_module.exploration": ["AdditiveGaussianModule", "EGreedyModule"],
    "modules.tensordict_module.probabilistic": ["SafeProbabilisticModule", "SafeProbabilisticTensorDictSequential"],
    "modules.tensordict_module.rnn": ["GRUModule", "LSTMModule", "set_recurrent_mode"],
    "modules.tensordict_module.sequence": ["SafeSequential"],
    "modules.utils": ["get_env_transforms_from_module", "get_primers_from_module"],
    "weight_update": ["MultiProcessWeightSyncScheme", "SharedMemWeightSyncScheme"],
}


@pytest.mark.parametrize("path", PATHS)
def test_names_are_there_and_are_those_of_the_package(path):
    module, package = import_module(f"rollwright.{path}"), import_module(f"rollwright.{path.split('.')[0]}")
    for name in PATHS[path]:
        assert getattr(module, name) is getattr(package, name, getattr(module, name))
        assert name in module.__all__
