"""Every option of a collector, on three kinds of environment: arrays and TensorDicts give the same bits."""

from __future__ import annotations

import random

import pytest
import torch
from tests.variants import in_turn

from rollwright.envs.utils import ExplorationType


class StopAt:
    """Interrupts the collection at the calls that are named."""

    def __init__(self, *calls: int):
        self.calls, self.seen = set(calls), 0

    def collection_stopped(self) -> bool:
        self.seen += 1
        return self.seen in self.calls


def doubled(batch):
    batch.set("twice", batch.get(("next", "reward")) * 2)
    return batch.set(("next", "reward"), batch.get(("next", "reward")).zero_())


OPTIONS = {
    "defaults": dict,
    "compact": lambda: {"compact_obs": True},
    "version": lambda: {"track_policy_version": True},
    "cut": lambda: {"set_truncated": True},
    "reset": lambda: {"reset_at_each_iter": True},
    "split": lambda: {"split_trajs": True},
    "limit": lambda: {"max_frames_per_traj": 3},
    "random first": lambda: {"init_random_frames": 24},
    "interrupted": lambda: {"interruptor": StopAt(1, 5, 12)},
    "same memory": lambda: {"return_same_td": True},
    "no ids": lambda: {"track_traj_ids": False},
    "postproc": lambda: {"postproc": doubled},
    "stored on cpu": lambda: {"storing_device": "cpu"},
    "device": lambda: {"device": "cpu"},
    "one frame": lambda: {"frames_per_batch": 1},
    "seven frames": lambda: {"frames_per_batch": 7},
    "many frames": lambda: {"frames_per_batch": 50},
    "mode": lambda: {"exploration_type": ExplorationType.MODE},
    "deterministic": lambda: {"exploration_type": ExplorationType.DETERMINISTIC},
    "buffers": lambda: {"use_buffers": True},
    "whole": lambda: {"trajs_per_batch": 2, "max_frames_per_traj": 6},
    "whole, flat": lambda: {"trajs_per_batch": 2, "traj_format": "cat", "max_frames_per_traj": 6},
}
ENVS = {"pendulum": "gaussian", "sync same step": "one-hot", "primed serial": "recurrent"}
CLASHES = [{"own same step", "limit"}, {"split", "no ids"}, {"interrupted", "no ids"}, {"split", "same memory"}]
CLASHES += [{"mode", "deterministic"}, {"one frame", "seven frames"}, {"many frames", "seven frames"}]
CLASHES += [{"many frames", "one frame"}, {"stored on cpu", "device"}, {"whole", "whole, flat"}]
CLASHES += [
    {whole, other}
    for whole in ("whole", "whole, flat")
    for other in ("split", "compact", "same memory", "no ids", "random first", "reset", "limit", "own same step")
]


def new_weights(collector, i):
    """Before each batch but the first: other weights, in place, as a state_dict, or as new tensors."""
    policy = collector.policy
    if i == 0 or not isinstance(policy, torch.nn.Module) or not any(True for _ in policy.parameters()):
        return
    state = {name: value * 0.5 + 0.1 * i for name, value in policy.state_dict().items()}
    if i % 3 == 0:
        policy.load_state_dict(state, assign=True)
    collector.update_policy_weights_(state)


@pytest.mark.parametrize(("name", "env"), in_turn(OPTIONS, [*ENVS]))
def test_paths_agree_under_the_option(both, lab, env, name):
    both(lab.envs[env], ENVS[env], options=OPTIONS[name], script=new_weights, batches=4)


def test_paths_agree_on_means_of_distributions(both, lab):
    both(lab.envs["pendulum"], "gaussian", options=lambda: {"exploration_type": ExplorationType.MEAN})


def combination(lab, seed):
    """An environment, a policy and some options, by a seed."""
    rng = random.Random(seed)
    env = rng.choice([name for name in lab.envs if "async" not in name and "pool" not in name])
    example = lab.envs[env]()
    kinds = [kind for kind in lab.kinds if kind == "none" or lab.build(example, kind) is not None]
    counts = "step_count" in str(example.observation_keys)
    example.close()
    names = rng.sample(list(OPTIONS), rng.randint(2, 6))
    chosen: list[str] = []
    for name in names:
        if not any(clash <= {env, *chosen, name} for clash in CLASHES) and not (
            name in ("limit", "whole", "whole, flat") and counts
        ):
            chosen.append(name)
    return env, rng.choice(kinds), chosen


@pytest.mark.parametrize("seed", [*range(16), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(16, 60))])
def test_paths_agree_on_mixtures(both, lab, seed):
    env, policy, names = combination(lab, seed)

    def options():
        return {key: value for name in names for key, value in OPTIONS[name]().items()}

    both(lab.envs[env], policy, options=options, script=new_weights, batches=4)
