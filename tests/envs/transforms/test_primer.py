"""TensorDictPrimer: first values, what policies carry, expansion, partial resets."""

from __future__ import annotations

import pytest
import torch
from tensordict import TensorDict

from rollwright.data import Bounded, Categorical, Composite, NonTensor, Unbounded
from rollwright.envs import Compose, InitTracker, StepCounter, TensorDictPrimer, TransformedEnv, check_env_specs
from rollwright.errors import EnvError, SpecError
from rollwright.testing.mocking_classes import CountingEnv, NestedCountingEnv


def recurrent(td):
    """A policy with a state: it adds one."""
    return td.update({"action": torch.zeros(*td.batch_size, 1), "next": {"hidden": td["hidden"] + 1}})


def test_rows_that_begin_anew_get_first_values(ladder):
    env = TransformedEnv(ladder([2, 3, 9]), TensorDictPrimer(hidden=Unbounded((2,)), default_value=5.0))
    check_env_specs(env)
    rollout = env.rollout(6, recurrent, break_when_any_done=False)
    assert rollout["hidden"].shape == (3, 6, 2)
    assert rollout["hidden"][..., 0].tolist() == [[5, 6, 5, 6, 5, 6], [5, 6, 7, 5, 6, 7], [5, 6, 7, 8, 9, 10]]
    assert torch.equal(rollout["next", "hidden"], rollout["hidden"] + 1)


def test_what_the_policy_leaves_is_carried(ladder, do_nothing):
    env = TransformedEnv(ladder([2, 3]), TensorDictPrimer(hidden=Unbounded((2,)), random=True))
    rollout = env.rollout(2, do_nothing)
    assert torch.equal(rollout["next", "hidden"], rollout["hidden"])
    assert torch.equal(rollout["hidden"][:, 0], rollout["hidden"][:, 1])
    assert rollout["hidden"].std() > 0


def test_specs_and_state(ladder):
    env = TransformedEnv(ladder([2, 3]), TensorDictPrimer({("policy", "hidden"): Unbounded((4,))}))
    assert env.observation_spec["policy", "hidden"].shape == (2, 4)
    assert env.state_spec["policy", "hidden"].shape == (2, 4)
    check_env_specs(env)


@pytest.mark.parametrize(
    ("expand_specs", "shape", "expected"),
    [(None, (3,), (2, 3)), (None, (2, 3), (2, 3)), (True, (2, 3), (2, 2, 3)), (False, (2, 3), (2, 3))],
)
def test_expansion(ladder, expand_specs, shape, expected):
    env = TransformedEnv(ladder([2, 3]), TensorDictPrimer(hidden=Unbounded(shape), expand_specs=expand_specs))
    assert env.reset()["hidden"].shape == expected
    check_env_specs(env)


@pytest.mark.parametrize(("outer", "expected"), [([2], (2, 3)), ([], (2, 2, 3))])
def test_a_composite_of_the_batch_is_not_expanded_again(ladder, outer, expected):
    primers = Composite(hidden=Unbounded((2, 3)), shape=outer)
    env = TransformedEnv(ladder([2, 3]), TensorDictPrimer(primers, expand_specs=True))
    assert env.reset()["hidden"].shape == expected
    check_env_specs(env)


def test_specs_that_must_have_batch_dimensions(ladder):
    env = TransformedEnv(ladder([2, 3]), TensorDictPrimer(hidden=Unbounded((3,)), expand_specs=False))
    with pytest.raises(EnvError, match=r"batch size \[2\] \(expand_specs=False\), got .*expand_specs=True"):
        env.reset()


def test_primers_as_composite(ladder):
    primers = Composite(hidden=Unbounded((3,)), mode=Categorical(4))
    values = {"hidden": 2.0, "mode": 3}
    env = TransformedEnv(ladder([2, 3]), TensorDictPrimer(primers, expand_specs=True, default_value=values))
    td = env.reset()
    assert td["hidden"].unique() == 2
    assert td["mode"].tolist() == [3, 3]
    assert td["mode"].dtype == torch.int64
    check_env_specs(env)


def test_functions_make_first_values(ladder):
    calls = []

    def make():
        calls.append(1)
        return torch.full((3,), float(len(calls)))

    env = TransformedEnv(ladder([2, 9]), TensorDictPrimer(hidden=Unbounded((3,)), default_value=make))
    rollout = env.rollout(5, lambda td: td.set("action", torch.zeros(2, 1)), break_when_any_done=False)
    assert rollout["hidden"][..., 0].tolist() == [[1, 1, 2, 2, 3], [1] * 5]


def test_values_are_not_shared_between_resets(ladder):
    first = torch.zeros(3)
    env = TransformedEnv(ladder([2]), TensorDictPrimer(hidden=Unbounded((3,)), default_value=first))
    env.reset()["hidden"].add_(1)
    assert env.reset()["hidden"].sum() == 0
    assert first.sum() == 0


@pytest.mark.parametrize("all_rows", [True, False])
def test_one_function_for_all(ladder, do_nothing, all_rows):
    asked = []

    def make(reset):
        asked.append(reset.tolist())
        n = 2 if all_rows else int(reset.sum())
        return TensorDict({"hidden": torch.full((n, 3), float(len(asked))), "n": torch.full((n, 1), 7.0)}, [n])

    primer = TensorDictPrimer(hidden=Unbounded((3,)), n=Unbounded((1,)), default_value=make, single_default_value=True)
    env = TransformedEnv(ladder([2, 9]), primer)
    rollout = env.rollout(3, do_nothing, break_when_any_done=False)
    assert rollout["hidden"][..., 0].tolist() == [[1, 1, 2], [1, 1, 1]]
    assert asked == [[True, True], [True, False]]


def test_one_function_that_forgets_an_entry(ladder):
    primer = TensorDictPrimer(
        hidden=Unbounded((3,)), default_value=lambda: TensorDict({}, [1]), single_default_value=True
    )
    with pytest.raises(EnvError, match="expected it to return all primers, got none for 'hidden'"):
        TransformedEnv(ladder([2]), primer).reset()


def test_values_outside_their_spec(ladder):
    def env(value):
        primer = TensorDictPrimer(hidden=Bounded(-1.0, 1.0, (3,)), default_value=lambda: value)
        return TransformedEnv(ladder([2]), primer)

    with pytest.raises(SpecError, match=r"'hidden': expected .*-1.0, 1.0"):
        env(torch.full((3,), 2.0)).reset()
    with pytest.raises(EnvError, match=r"a tensor that broadcasts to \[1, 3\] for 'hidden', got shape \[4\]"):
        env(torch.zeros(4)).reset()


def test_objects_can_be_primed():
    env = TransformedEnv(CountingEnv(), TensorDictPrimer(note=NonTensor(example_data="none")))
    assert env.reset()["note"] == "none"
    check_env_specs(env)


def test_reset_key_decides():
    env = NestedCountingEnv(max_steps=2, batch_size=[2])
    primer = TensorDictPrimer({("data", "hidden"): Unbounded((3, 4))}, reset_key=("data", "_reset"))
    env = TransformedEnv(env, Compose(primer, StepCounter(), InitTracker()))
    check_env_specs(env)
    env.rollout(5, break_when_any_done=False)


def test_on_data():
    td = TensorDictPrimer(hidden=Unbounded((2,)), default_value=3.0)(TensorDict({}, [4]))
    assert td["hidden"].shape == (4, 2)
    assert td["hidden"].unique() == 3


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"primers": {"a": Unbounded()}, "b": Unbounded()}, ValueError, r"got both \(\['b'\]\)"),
        ({"a": Unbounded(), "random": True, "default_value": 1.0}, ValueError, "expected None with random=True"),
        ({"a": Unbounded(), "default_value": {"b": 1.0}}, ValueError, r"one for each primer \('a'\), got them for 'b'"),
        ({"a": Unbounded(), "single_default_value": True}, ValueError, "expected a function with single_default_value"),
        ({"a": 3}, TypeError, "'a': expected a TensorSpec"),
    ],
)
def test_wrong_arguments(arguments, error, message):
    with pytest.raises(error, match=message):
        TensorDictPrimer(**arguments)


def test_data_that_no_reset_made(ladder):
    env = TransformedEnv(ladder([3]), TensorDictPrimer(hidden=Unbounded((3,))))
    with pytest.raises(EnvError, match="has no 'hidden', which a reset writes"):
        env.step(TensorDict({"action": torch.zeros(1, 1)}, [1]))
