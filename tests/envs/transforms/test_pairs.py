"""Transforms together: every mock environment under a long chain, pairs that interact."""

from __future__ import annotations

import itertools

import pytest
import torch

from rollwright.data import Unbounded
from rollwright.envs import (
    ActionMask,
    CatFrames,
    Compose,
    DoubleToFloat,
    InitTracker,
    ObservationNorm,
    RewardScaling,
    RewardSum,
    StepCounter,
    TensorDictPrimer,
    TransformedEnv,
    VecNorm,
    check_env_specs,
)
from rollwright.testing.mocking_classes import (
    ContinuousActionVecMockEnv,
    CountingBatchedEnv,
    CountingEnv,
    CountingEnvWithString,
    DiscreteActionConvMockEnv,
    DiscreteActionVecMockEnv,
    EnvThatDoesNothing,
    EnvWithDynamicSpec,
    EnvWithMetadata,
    HeterogeneousCountingEnv,
    MultiAgentCountingEnv,
    MultiKeyCountingEnv,
    NestedCountingEnv,
    Str2StrEnv,
)

ENVIRONMENTS = {
    "batched": lambda: CountingBatchedEnv(max_steps=torch.tensor([1, 2, 4]), batch_size=[3]),
    "continuous": ContinuousActionVecMockEnv,
    "counting": CountingEnv,
    "discrete": DiscreteActionVecMockEnv,
    "dynamic": EnvWithDynamicSpec,
    "heterogeneous": lambda: HeterogeneousCountingEnv(batch_size=(2,)),
    "images": DiscreteActionConvMockEnv,
    "metadata": EnvWithMetadata,
    "multi-agent": lambda: MultiAgentCountingEnv(3, max_steps=2),
    "multi-key": lambda: MultiKeyCountingEnv(batch_size=(2,)),
    "nested": lambda: NestedCountingEnv(max_steps=2, batch_size=[2]),
    "nested-root": lambda: NestedCountingEnv(has_root_done=True, max_steps=2),
    "nested-without-flags": lambda: NestedCountingEnv(nest_done=False, max_steps=2),
    "nothing": EnvThatDoesNothing,
    "strings": CountingEnvWithString,
    "strings-only": Str2StrEnv,
}


@pytest.mark.parametrize("name", sorted(ENVIRONMENTS))
def test_bookkeeping_on_every_environment(name):
    primer = TensorDictPrimer(hidden=Unbounded((3,)))
    env = TransformedEnv(ENVIRONMENTS[name](), Compose(InitTracker(), StepCounter(3), RewardSum(), primer))
    check_env_specs(env)
    env.rollout(7, break_when_any_done=False)


STATEFUL = {
    "InitTracker": InitTracker,
    "StepCounter": lambda: StepCounter(4),
    "RewardSum": RewardSum,
    "primer": lambda: TensorDictPrimer(hidden=Unbounded((3,))),
    "scaling": lambda: RewardScaling(1.0, 2.0),
    "norm": lambda: ObservationNorm(1.0, 2.0, ["rung"]),
    "doubles": DoubleToFloat,
    "VecNorm": lambda: VecNorm(["rung", "reward"]),
    "CatFrames": lambda: CatFrames(2, -1, ["rung"]),
}


@pytest.mark.parametrize(("first", "second"), list(itertools.permutations(STATEFUL, 2)))
def test_pairs_hold_their_specs_and_start_rows_alone(ladder, do_nothing, first, second):
    """A row in a batch is what it is alone (but for VecNorm, which looks at all rows)."""

    def make(limits):
        return TransformedEnv(ladder(limits, dtype=torch.float64), Compose(STATEFUL[first](), STATEFUL[second]()))

    def act(td):
        dtype = torch.float32 if "doubles" in (first, second) else torch.float64
        return do_nothing(td).set("action", td["action"].to(dtype))

    check_env_specs(make([2, 5]))
    together = make([2, 5]).rollout(8, act, break_when_any_done=False)
    if "VecNorm" in (first, second):
        return
    alone = make([2]).rollout(8, act, break_when_any_done=False)
    for key in alone.keys(True, True):
        assert torch.equal(together[:1].get(key), alone.get(key)), key


def test_long_chain_with_a_mask(ladder):
    chain = Compose(
        DoubleToFloat(),
        CatFrames(2, -1, ["rung"]),
        VecNorm(["rung"]),
        RewardScaling(0.0, 0.1),
        RewardSum(),
        StepCounter(3),
        InitTracker(),
        TensorDictPrimer(hidden=Unbounded((3,))),
        ActionMask(mask_key="mask"),
    )
    env = TransformedEnv(ladder([2, 4, 9], dtype=torch.float64, masks=True), chain)
    check_env_specs(env)
    rollout = env.rollout(12, break_when_any_done=False)
    assert torch.equal(rollout["is_init"], rollout["step_count"] == 0)
    assert torch.equal(rollout["is_init"][:, 1:], rollout["next", "done"][:, :-1])
    assert rollout["next", "step_count"].max() == 3
    torch.testing.assert_close(rollout["next", "episode_reward"][2, 2], torch.tensor([0.6]))
    assert {value.dtype for value in rollout.values(True, True)} == {torch.float32, torch.bool, torch.int64}
