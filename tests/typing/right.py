"""Right programs, in which type checkers find nothing; ``assert_type`` says what they make of it."""

from collections.abc import Callable
from functools import partial
from typing import Any, assert_type

import gymnasium
import torch
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import TensorDictModule
from torch import nn

from rollwright import (
    AsyncEnvPool,
    Collector,
    EnvBase,
    Evaluator,
    ExplorationType,
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
    TransformedEnv,
)
from rollwright.collectors import MultiAsyncCollector, MultiSyncCollector, SyncDataCollector
from rollwright.collectors.llm import LLMCollector
from rollwright.data import (
    Composite,
    PrioritizedSliceSampler,
    ReplayBufferEnsemble,
    SliceSamplerWithoutReplacement,
    Unbounded,
    stack,
)
from rollwright.data.llm import group_advantages
from rollwright.envs import EnvCreator, StepCounter
from rollwright.envs.llm import ParsedAnswer, Tool, ToolCall, ToolParser, ToolSession, Toolset
from rollwright.modules.llm import TransformersWrapper
from rollwright.weight_update import SharedMemWeightSyncScheme

policy = TensorDictModule(nn.Linear(4, 2), in_keys=["observation"], out_keys=["action"])


def make() -> GymEnv:
    return GymEnv("CartPole-v1")


# Collectors
with Collector(make, policy, frames_per_batch=200, total_frames=1_000) as collector:
    assert_type(collector, Collector)
    for batch in collector:
        assert_type(batch, TensorDictBase)
        print(batch.shape, batch["next", "reward"].sum().item(), batch["collector", "traj_ids"].unique().tolist())
    assert_type(collector.next(), TensorDictBase | None)
    print(collector.stats()["mean_return"])
assert_type(Collector(make()), Collector)
assert_type(Collector("CartPole-v1"), Collector)
assert_type(Collector(gymnasium.make("CartPole-v1")), Collector)
assert_type(Collector(lambda: gymnasium.make("CartPole-v1"), num_collectors=2), MultiAsyncCollector)
assert_type(Collector(make, num_collectors=2), MultiAsyncCollector)
assert_type(Collector(make, num_collectors=2, sync=True, cat_results=0, frames_per_batch=[10, 20]), MultiSyncCollector)
assert_type(Collector([make, make], backend="process"), MultiCollector)
assert_type(Collector(make, num_collectors=None, backend="direct"), Collector)
assert_type(Collector(make, num_collectors=2).preemptive_threshold, float)
assert_type(MultiCollector([make] * 2, policy, sync=True), MultiCollector)
assert_type(MultiSyncCollector(make, num_workers=2, policy_device=["cpu", "cpu"]), MultiSyncCollector)
assert_type(SyncDataCollector(make, exploration_mode="random"), SyncDataCollector)
Collector(EnvCreator(make), nn.Linear(4, 2), device="cpu", policy_device=torch.device("cpu"))
Collector(partial(GymEnv, "CartPole-v1"), lambda td: td.set("action", 1), postproc=lambda td: td)
Collector(make, replay_buffer=ReplayBuffer(), extend_buffer=False, exploration_type=ExplorationType.RANDOM)
Collector(make, replay_buffer=ReplayBufferEnsemble(ReplayBuffer()), compile_policy={"fullgraph": True})
evaluator = Evaluator(make, policy, num_trajectories=3, max_steps=20, seed=0, device="cpu")
assert_type(evaluator.evaluate(step=1), dict[str, Any])


class Slow(Collector):
    """A collector with a constructor of its own."""

    def __init__(self, speed: int) -> None:
        super().__init__(make, frames_per_batch=speed)


assert_type(Slow(speed=3), Slow)


def train(collector: Collector | MultiCollector, make_env: Callable[[], EnvBase]) -> None:
    for batch in collector:
        assert_type(batch, TensorDictBase)
    options: dict[str, Any] = {"frames_per_batch": 3}
    Collector(make_env, **options)


# Environments
env = GymEnv("Pendulum-v1", num_envs=2, render_mode="rgb_array", g=9.8, policy=policy)
assert_type(env, GymEnv)
assert_type(env.reset(), TensorDictBase)
assert_type(env.step(env.rand_action(env.reset())), TensorDictBase)
assert_type(env.rollout(3), TensorDictBase)
assert_type(GymWrapper(gymnasium.make("CartPole-v1")), GymWrapper)
assert_type(SerialEnv(2, make, on_env_failure="recreate"), SerialEnv)
assert_type(ParallelEnv(2, [make, make], mp_start_method="spawn"), ParallelEnv)
assert_type(AsyncEnvPool([make] * 2), AsyncEnvPool)
assert_type(TransformedEnv(env, StepCounter()), TransformedEnv)
settings: dict[str, Any] = {"goal": 3}  # what type checkers do not know of an environment
GymEnv("Mine-v0", **settings)


class Countdown(EnvBase):
    """An environment with a constructor of its own."""

    def __init__(self, start: int, *, device: str | None = None) -> None:
        super().__init__(device=device, batch_size=[])


assert_type(Countdown(3, device="cpu"), Countdown)

# Replay buffers
buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(100), sampler=SliceSampler(slice_len=4), batch_size=32)
buffer.extend(TensorDict({"obs": torch.zeros(3)}, [3]))
assert_type(buffer.sample(), TensorDictBase)
assert_type(buffer.sample(return_info=True), tuple[TensorDictBase, dict[str, Any]])
for batch in buffer:
    assert_type(batch, TensorDictBase)
ReplayBuffer(storage=lambda: LazyTensorStorage(10), transform=lambda batch: batch, prefetch=2)
prioritized = TensorDictPrioritizedReplayBuffer(alpha=0.7, beta=0.5, eps=1e-6, storage=LazyTensorStorage(10))
assert_type(prioritized.sample(3), TensorDictBase)
PrioritizedSliceSampler(100, 1.0, 1.0, slice_len=3, strict_length=False)
SliceSamplerWithoutReplacement(slice_len=3, span=(True, 2), shuffle=False)
assert_type(buffer.add(TensorDict({"obs": torch.zeros(())})), int | torch.Tensor)
assert_type(ReplayBuffer().sample(3, return_info=True), tuple[Any, dict[str, Any]])
assert_type(ReplayBufferEnsemble(ReplayBuffer()).sample(return_info=True), tuple[Any, dict[str, Any]])

# Specs, and what wraps environments
assert_type(stack([Composite(x=Unbounded((3,)))] * 2), Composite)
wrapped = TransformedEnv(env, StepCounter())
assert_type(wrapped.is_closed, bool)
assert_type(wrapped.allow_done_after_reset, bool)


# Language models
def talk(turns: LLMCollector, batch: TensorDict, model: nn.Module) -> None:
    assert_type(turns.next(), TensorDictBase | None)
    assert_type(turns.policy_version, int | str | None)
    assert_type(turns.get_policy_version(), int | str | None)
    assert_type(turns.increment_version(), int | str | None)
    assert_type(group_advantages(batch), TensorDict)
    wrapper = TransformersWrapper(model, input_mode="text", log_prob_mode="raw", record_layout="nested")
    assert_type(wrapper.log_prob(batch, padding_side="left"), torch.Tensor)
    assert_type(Toolset([]).schemas, list[dict[str, Any]])
    SharedMemWeightSyncScheme("state_dict")


class Shouting(ToolParser):
    """A parser of a user's own."""

    def parse(self, text: str) -> ParsedAnswer:
        return ParsedAnswer(text, [ToolCall(name, {}) for name in text.split() if name.isupper()])


class Session(ToolSession):
    """A tool of a user's own, within one conversation."""

    @property
    def function(self) -> Callable[..., Any]:
        return print


class Printer(Tool):
    """A tool of a user's own."""

    name, schema, timeout_s = "print", {}, 1.0

    def begin(self) -> ToolSession:
        return Session()
