"""Wrong programs, one a line: type checkers report an error in each line that is marked, and in no other."""

from rollwright import (
    AsyncEnvPool,
    Collector,
    EnvBase,
    Evaluator,
    GymEnv,
    GymWrapper,
    LazyTensorStorage,
    MultiCollector,
    ParallelEnv,
    ReplayBuffer,
    SerialEnv,
    SliceSampler,
    TensorDictPrioritizedReplayBuffer,
    TensorDictReplayBuffer,
)
from rollwright.collectors import MultiSyncCollector, SyncDataCollector
from rollwright.data import PrioritizedSliceSampler, ReplayBufferEnsemble, SliceSamplerWithoutReplacement
from rollwright.modules.llm import TransformersWrapper
from rollwright.weight_update import SharedMemWeightSyncScheme


def make() -> GymEnv:
    return GymEnv("CartPole-v1")


# Collectors
Collector(make, frame_per_batch=200)  # error
Collector(make, frames_per_batch="x")  # error
Collector(make, total_frames=None)  # error
Collector(3)  # error
Collector(make, 3)  # error
Collector(make, num_collectors="2")  # error
Collector(make, num_collectors=2, cat_result=0)  # error
Collector(make, traj_format="list")  # error
Collector(make, exploration_type="random")  # error
Collector(make, replay_buffer=LazyTensorStorage(10))  # error
Collector(make, env_step_timeout=3.0)  # error
Collector(make, backend="rayy")  # error
MultiCollector([make], on_worker_failure="ignore")  # error
MultiSyncCollector(make, num_worker=2)  # error
SyncDataCollector(make, exploration_mode=3)  # error
Evaluator(make, num_trajectory=3)  # error
Evaluator(make, total_frames=3)  # error
Collector(make).update_policy_weights()  # error
print(Collector(make).preemptive_threshold)  # error
for batch in Collector(make, create_env_kwarg={}):  # error
    print(batch)

# Environments
GymEnv("CartPole-v1", num_env=3)  # error
GymEnv("CartPole-v1", num_envs="3")  # error
GymEnv("CartPole-v1", vectorization_mode="parallel")  # error
GymEnv(3)  # error
GymWrapper("CartPole-v1")  # error
ParallelEnv(2, make, num_process=2)  # error
SerialEnv("2", make)  # error
SerialEnv(2, 3)  # error
AsyncEnvPool([make], backend="ray")  # error
EnvBase(batch_sizes=[])  # error
make().rollout("3")  # error
make().step()  # error

# Replay buffers
TensorDictReplayBuffer(bach_size=3)  # error
ReplayBuffer(batch_size="32")  # error
ReplayBuffer(sampler="random")  # error
TensorDictPrioritizedReplayBuffer(alpha=0.7)  # error
SliceSampler(slice_length=3)  # error
SliceSamplerWithoutReplacement(slice_len="3")  # error
PrioritizedSliceSampler(100, 1.0, 1.0, slice_length=3)  # error
LazyTensorStorage("100")  # error
ReplayBufferEnsemble(ReplayBuffer(), sample_from_al=True)  # error
TensorDictReplayBuffer().sample("3")  # error

# Language models and weights
TransformersWrapper("model", input_mode="messages")  # error
TransformersWrapper("model", log_prob_mode="model")  # error
TransformersWrapper("model", record_layout="deep")  # error
TransformersWrapper("model").log_prob(make().reset(), padding_side="both")  # error
SharedMemWeightSyncScheme(strategy="module")  # error
