"""ActionMask: random actions are allowed ones, after steps and after partial resets."""

from __future__ import annotations

import pytest
import torch
from tensordict import TensorDict

from rollwright.data import OneHot
from rollwright.envs import ActionMask, Compose, StepCounter, TransformedEnv, check_env_specs
from rollwright.errors import EnvError


@pytest.fixture(params=["number", "one-hot"])
def masked(request, ladder):
    """Makes a Ladder whose rows allow one action at a time."""

    def make(limits, *transforms, **kwargs):
        env = ladder(limits, masks=True)
        if request.param == "one-hot":
            env.action_spec = OneHot(3, (len(limits), 3))
        return TransformedEnv(env, Compose(*transforms, ActionMask(mask_key="mask")), **kwargs)

    return make


def chosen(rollout):
    action = rollout["action"]
    return (action if action.ndim == 2 else action.long().argmax(-1)).tolist()


@pytest.mark.parametrize("cache_specs", [True, False])
def test_random_actions_are_allowed(masked, cache_specs):
    env = masked([2, 4, 9], cache_specs=cache_specs)
    rollout = env.rollout(7, break_when_any_done=False)
    assert chosen(rollout) == [[0, 1, 0, 1, 0, 1, 0], [0, 1, 2, 0, 0, 1, 2], [0, 1, 2, 0, 1, 2, 0]]


def test_specs_hold(masked):
    check_env_specs(masked([2, 4, 9]))


def test_a_spec_that_was_handed_out_follows(masked):
    env = masked([9, 9])
    spec = env.action_spec
    td = env.reset()
    for step in range(4):
        action = spec.rand()
        assert (action if action.ndim == 1 else action.long().argmax(-1)).tolist() == [step % 3] * 2
        td = env.step_and_maybe_reset(td.set("action", action))[1]


def test_partial_reset_keeps_masks_of_other_rows(masked):
    env = masked([9, 9, 9])
    td = env.reset()
    for _ in range(2):
        td = env.step_and_maybe_reset(env.rand_action(td))[1]
    td = env.reset(td.set("_reset", torch.tensor([[True], [False], [False]])))
    assert chosen(env.rand_action(td).unsqueeze(1)) == [[0], [2], [2]]


def test_rows_that_are_done_may_allow_nothing(masked):
    env = masked([1, 5])
    env.rollout(4, break_when_any_done=False)
    env.rollout(5, break_when_all_done=True)


def test_a_row_that_goes_on_must_allow_something(ladder):
    class Stuck(ladder):
        def _observe(self):
            seen = super()._observe()
            return seen.set("mask", seen["mask"] & False) if bool((self.taken == 1).any()) else seen

    env = TransformedEnv(Stuck([5], masks=True), ActionMask(mask_key="mask"))
    with pytest.raises(EnvError, match="mask: expected an allowed outcome for each choice"):
        env.rollout(3)


def test_mask_survives_other_transforms(masked):
    env = masked([9, 9], StepCounter(2))
    assert chosen(env.rollout(5, break_when_any_done=False))[0] == [0, 1, 0, 1, 0]
    env.append_transform(StepCounter(step_count_key="n"))  # specs are computed anew, with the last mask
    assert env.action_spec.mask is not None


def test_the_base_environment_has_a_spec_of_its_own(masked):
    env = masked([9])
    env.reset()
    assert env.base_env.action_spec.mask is None


def test_errors(ladder):
    with pytest.raises(TypeError, match="action_key: expected a string or a tuple of strings, got 3"):
        ActionMask(3)
    with pytest.raises(TypeError, match=r"expected a discrete spec at action_key='action', got Unbounded"):
        _ = TransformedEnv(ladder([3]), ActionMask(mask_key="rung")).action_spec
    with pytest.raises(TypeError, match=r"at action_key='move', got None. The actions are \['action'\]"):
        _ = TransformedEnv(ladder([3], masks=True), ActionMask("move")).action_spec
    with pytest.raises(EnvError, match=r"no entry 'action_mask'; there are .*'mask'"):
        TransformedEnv(ladder([3], masks=True), ActionMask()).reset()
    with pytest.raises(RuntimeError, match="ActionMask needs an environment"):
        ActionMask()(TensorDict({}))
    with pytest.raises(RuntimeError, match="ActionMask needs an environment"):
        ActionMask()._call(TensorDict({"action_mask": torch.ones(3, dtype=torch.bool)}))
