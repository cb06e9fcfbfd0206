"""Batches of random actions (``init_random_frames``) have the entries of later ones, on arrays and on TensorDicts."""

from __future__ import annotations

import pytest
import torch

from rollwright.collectors.rollout import policy_trial as _trial

FEW = ["cartpole", "pendulum", "dict of actions", "odd dtypes", "sync of 4", "transformed serial", "serial of serial"]


def forms(batch):
    return {key: (batch.get(key).shape, batch.get(key).dtype) for key in batch.keys(True, True)}


@pytest.mark.parametrize("env_name", FEW)
def test_entries_are_those_of_later_batches(both, lab, env_name):
    make = lab.envs[env_name]
    example = make()
    kinds = [kind for kind in lab.kinds if lab.build(example, kind) is not None]
    drawn = {*example.action_keys, *example.observation_keys, *example.state_keys}
    example.close()
    assert len(kinds) > 2
    for kind in kinds:
        for run in both(make, kind, options=lambda: {"init_random_frames": 8, "frames_per_batch": 8}):
            random, *acted = run.batches
            assert forms(random) == forms(acted[0]) == forms(acted[1]), kind
            for key in random.exclude("next", "collector", "done", "terminated", "truncated", *drawn).keys(True, True):
                assert not random.get(key).any(), (kind, key)


CASES = [("pendulum", "gaussian"), ("sync of 4", "one-hot"), ("primed serial", "recurrent")]


@pytest.mark.parametrize(("env_name", "kind"), CASES)
def test_looking_at_what_a_policy_writes_changes_no_number(both, lab, monkeypatch, env_name, kind):
    """The frames are those of collectors that do not look."""

    def runs():
        options = {"init_random_frames": 16, "frames_per_batch": 8}
        return both(lab.envs[env_name], kind, options=lambda: options, batches=4)

    looked = runs()
    monkeypatch.setattr(_trial.Trial, "outputs", lambda *args: None)
    for one, other in zip(looked, runs(), strict=True):
        assert torch.equal(one.rng, other.rng)
        for left, right in zip(one.batches, other.batches, strict=True):
            for key in right.keys(True, True):
                assert torch.equal(left[key], right[key].to(left[key].dtype)), key
