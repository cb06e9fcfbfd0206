"""NoopResetEnv: how many actions, what transforms see of them, trajectories that end early."""

from __future__ import annotations

import pytest
import torch

from rollwright.envs import (
    CatFrames,
    Compose,
    FrameSkipTransform,
    GymEnv,
    NoopResetEnv,
    RenameTransform,
    RewardSum,
    SerialEnv,
    StepCounter,
    TransformedEnv,
    check_env_specs,
)
from rollwright.errors import EnvError


def test_first_observations_are_those_of_torchrl(seeded):
    env = seeded("Pendulum-v1", NoopResetEnv(3, random=False))
    torch.manual_seed(0)
    seen = env.rollout(2)["observation"]
    expected = [
        [-0.9977561831474304, -0.06695187091827393, -1.5008937120437622],
        [-0.9997668862342834, 0.02159079723060131, -1.771889328956604],
    ]
    torch.testing.assert_close(seen, torch.tensor(expected))


@pytest.mark.parametrize(
    ("seed", "count", "expected"),
    [
        (0, 2, [-0.9905380606651306, -0.13723812997341156, -1.398463487625122]),
        (1, 1, [-0.6101734638214111, -0.7922678589820862, 0.1747046709060669]),
        (2, 0, [-0.39267849922180176, 0.9196758270263672, -0.8161681294441223]),
        (3, 4, [-0.5717359185218811, 0.8204376697540283, 2.259324073791504]),
    ],
)
def test_their_number_is_that_of_torchrl(seeded, seed, count, expected):
    env = seeded("Pendulum-v1", StepCounter(), NoopResetEnv(6), seed=seed)
    torch.manual_seed(seed)
    td = env.reset()
    assert td["step_count"].item() == count
    torch.testing.assert_close(td["observation"], torch.tensor(expected))


def test_transforms_after_it_do_not_see_them():
    env = TransformedEnv(GymEnv("Pendulum-v1"), Compose(NoopResetEnv(5, random=False), StepCounter(), RewardSum()))
    td = env.reset()
    assert td["step_count"].item() == 0
    assert td["episode_reward"].item() == 0
    assert "action" not in td.keys()  # noqa: SIM118
    check_env_specs(env)


def test_transforms_before_follow_them(seeded):
    env = seeded("Pendulum-v1", CatFrames(3, -1, ["observation"], ["past"]), NoopResetEnv(2, random=False))
    plain = seeded("Pendulum-v1")
    torch.manual_seed(0)
    first = env.reset()["past"]
    torch.manual_seed(0)
    td = plain.rollout(2)
    assert torch.equal(first, torch.cat([td["observation"][0], td["next", "observation"].flatten()]))
    assert torch.equal(env.state_dict()["transform.transforms.0.frames_0"], first)


def test_actions_go_through_transforms_before(seeded):
    renamed = RenameTransform([], [], ["action"], ["move"])
    env = TransformedEnv(GymEnv("Pendulum-v1"), Compose(renamed, NoopResetEnv(2, random=False)))
    assert "move" not in env.reset().keys()  # noqa: SIM118
    check_env_specs(env)


def test_a_trajectory_that_ends_is_begun_again():
    env = TransformedEnv(GymEnv("CartPole-v1"), Compose(StepCounter(), NoopResetEnv(12, random=False)))
    env.set_seed(1)
    for _ in range(5):
        td = env.reset()
        assert td["step_count"].item() == 12
        assert not td["done"].item()


MAKERS = {
    "one": lambda: TransformedEnv(
        GymEnv("CartPole-v1"), Compose(StepCounter(60), FrameSkipTransform(2), NoopResetEnv(6), RewardSum())
    ),
    "ending": lambda: TransformedEnv(
        GymEnv("CartPole-v1"), Compose(FrameSkipTransform(2), NoopResetEnv(6, random=False))
    ),
    "each": lambda: SerialEnv(8, lambda: TransformedEnv(GymEnv("CartPole-v1"), NoopResetEnv(6))),
    "cheetah": lambda: TransformedEnv(
        GymEnv("HalfCheetah-v5", max_episode_steps=11), Compose(NoopResetEnv(6), StepCounter())
    ),
}


@pytest.mark.parametrize("name", MAKERS)
def test_on_arrays_as_on_tensordicts(name, both_paths):
    td = both_paths(MAKERS[name], frames=96)
    assert td["next", "done"].sum() > 3


def test_mistakes_are_named():
    with pytest.raises(ValueError, match="noops: expected an integer of at least 1, got 0"):
        NoopResetEnv(0)
    with pytest.raises(ValueError, match="at least 0, got -1"):
        NoopResetEnv(-1, random=False)
    NoopResetEnv(0, random=False)
    batch = TransformedEnv(SerialEnv(2, lambda: GymEnv("CartPole-v1")), NoopResetEnv())
    with pytest.raises(EnvError, match=r"expected a single environment, got 2.*SerialEnv"):
        batch.observation_spec  # noqa: B018
    with pytest.raises(EnvError, match="11 trajectories ended within 500 random actions"):
        TransformedEnv(GymEnv("CartPole-v1"), NoopResetEnv(500, random=False)).reset()
    with pytest.raises(RuntimeError, match="TransformedEnv\\(env, NoopResetEnv"):
        NoopResetEnv()(batch.base_env.reset())
