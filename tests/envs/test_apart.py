"""Environments of a batch that share a simulator, and one that somebody else uses, are no trap."""

from __future__ import annotations

import gymnasium
import pytest
from tests.variants import in_turn

from rollwright import Collector, GymEnv
from rollwright.envs import AsyncEnvPool, GymWrapper, ParallelEnv, SerialEnv


def impossible(batch) -> int:
    """How many transitions CartPole does not make."""
    (here, speed), there = batch["observation"][..., :2].unbind(-1), batch["next", "observation"][..., 0]
    return int(((there - (here + 0.02 * speed)).abs() > 1e-5).sum())


BATCHES = {
    "serial": lambda make: SerialEnv(2, make),
    "one process": lambda make: ParallelEnv(2, make, num_processes=1),
    "threads": lambda make: AsyncEnvPool([make] * 2, backend="threading"),
}
_base = gymnasium.make("CartPole-v1")
_env = GymEnv("CartPole-v1")
MAKERS = {"an environment": lambda: _env, "what it wraps": lambda: GymWrapper(_base), "gymnasium's": lambda: _base}


@pytest.mark.parametrize(("batch", "made"), in_turn(BATCHES, MAKERS))
def test_one_environment_in_two_places_is_refused(batch, made):
    with pytest.raises(ValueError, match=r"create_env_fn: made the same environment for places 0 and 1 \(Gym"):
        BATCHES[batch](MAKERS[made])


USES = {"a rollout": lambda env: env.rollout(3), "a reset": lambda env: env.reset()}


@pytest.mark.parametrize("use_buffers", [None, False])
@pytest.mark.parametrize("use", USES.values(), ids=USES)
@pytest.mark.parametrize("num_envs", [None, 2])
def test_an_environment_that_was_used_between_two_batches_begins_anew(use, use_buffers, num_envs):
    env = GymEnv("CartPole-v1", num_envs=num_envs) if num_envs else GymEnv("CartPole-v1")
    frames = 7 * (num_envs or 1)
    with Collector(env, frames_per_batch=frames, total_frames=4 * frames, use_buffers=use_buffers) as collector:
        collector.set_seed(0)
        first = collector.next()
        use(env)
        with pytest.warns(UserWarning, match=r"somebody else has reset or stepped GymEnv.*of its own"):
            second = collector.next()
        use(env)
        third, fourth = collector.next(), collector.next()  # it is said once
    assert sum(map(impossible, (first, second, third, fourth))) == 0
    ids = [batch["collector", "traj_ids"] for batch in (first, second, third, fourth)]
    assert not set(ids[0].flatten().tolist()) & set(ids[1].flatten().tolist())
    assert bool((ids[3][..., 0] == ids[2][..., -1]).any() or third["next", "done"][..., -1, :].any())


@pytest.mark.filterwarnings("ignore:.*somebody else:UserWarning")
def test_two_collectors_of_one_environment_never_go_on_with_the_other_s_trajectory():
    env = GymEnv("CartPole-v1")
    one, other = (Collector(env, frames_per_batch=5) for _ in range(2))
    batches = [collector.next() for _ in range(4) for collector in (one, other)]
    assert sum(map(impossible, batches)) == 0


def test_what_the_collector_does_itself_is_no_use_of_others(recwarn):
    with Collector(GymEnv("CartPole-v1", num_envs=2), frames_per_batch=8, total_frames=80) as collector:
        collector.next()
        collector.reset(0)
        collector.next()
        collector.reset()
        collector.next()
        collector.set_seed(1)
        collector.fake_tensordict()
        collector.next()
        collector.load_state_dict(collector.state_dict())
        collector.next()
    assert [str(entry.message) for entry in recwarn] == []
