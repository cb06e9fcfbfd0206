"""Collectors with transforms of episodes go on from a saved state, bit for bit."""

from __future__ import annotations

import copy

import pytest
import torch
from tests.variants import in_turn

from rollwright.collectors import Collector
from rollwright.envs import (
    ActionScaling,
    CatFrames,
    Compose,
    FrameSkipTransform,
    GymEnv,
    NoopResetEnv,
    RandomTruncationTransform,
    RewardSum,
    SerialEnv,
    StepCounter,
    TargetReturn,
    TimeMaxPool,
    TransformedEnv,
    VecNorm,
    VecNormV2,
)


def chain(*first):
    return Compose(
        *first,
        CatFrames(3, -1, ["observation"], ["past"]),
        FrameSkipTransform(2),
        StepCounter(),
        RandomTruncationTransform(3, 9, 0.5),
        TimeMaxPool(["observation"], ["pool"], T=2),
        TargetReturn(5.0),
        RewardSum(),
        VecNormV2(["past"], ["norm"]),
        VecNorm(["pool"], ["other"]),
    )


MAKERS = {
    "pole": lambda: TransformedEnv(GymEnv("CartPole-v1"), chain(NoopResetEnv(4))),
    "poles": lambda: TransformedEnv(GymEnv("CartPole-v1", num_envs=8), chain()),
    "several": lambda: TransformedEnv(SerialEnv(3, lambda: GymEnv("CartPole-v1")), chain()),
    "in several": lambda: SerialEnv(2, lambda: TransformedEnv(GymEnv("CartPole-v1"), chain(NoopResetEnv(4)))),
    "pendulum": lambda: TransformedEnv(GymEnv("Pendulum-v1"), chain(ActionScaling())),
}


@pytest.mark.parametrize(("name", "options"), in_turn(MAKERS, [{}, {"use_buffers": False}]))
def test_the_tail_is_that_of_an_uninterrupted_run(name, options):
    def collector():
        return Collector(MAKERS[name](), None, frames_per_batch=48, total_frames=192, **options)

    torch.manual_seed(0)
    with collector() as whole:
        whole.set_seed(3)
        batches, saved = [], None
        for batch in whole:
            batches.append(batch.clone())
            if len(batches) == 2:
                saved = copy.deepcopy(whole.state_dict())
        paths = whole.stats()["paths"]["env"]
    assert paths.startswith("plain" if options else "native")
    torch.manual_seed(77)
    with collector() as other:
        other.load_state_dict(saved)
        tail = [batch.clone() for batch in other]
    assert len(tail) == 2
    for batch, expected in zip(tail, batches[2:], strict=True):
        for key in expected.keys(True, True):
            assert torch.equal(batch[key], expected[key]), key
    assert sum(batch["next", "done"].sum() for batch in batches) > 3
