"""Transform: what the defaults do, keys, ownership, copies."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from tensordict import TensorDict

from rollwright.data import Bounded, Composite, Unbounded
from rollwright.envs import (
    Compose,
    DoubleToFloat,
    ObservationNorm,
    RewardSum,
    StepCounter,
    Transform,
    TransformedEnv,
    check_env_specs,
)
from rollwright.envs.transforms.base import map_spec
from rollwright.errors import EnvError, EnvKeyError


class Double(Transform):
    """Doubles entries."""

    def _apply_transform(self, obs):
        return obs * 2

    def _inv_apply_transform(self, state):
        return state / 2


class CallOnly(Transform):
    """Overrides ``_call`` and nothing else."""

    def _call(self, next_tensordict):
        return next_tensordict.set("rung", next_tensordict["rung"] + 1000)


def test_apply_transform_acts_at_steps_and_at_resets(ladder, do_nothing):
    env = TransformedEnv(ladder([3, 3]), Double(in_keys=["rung"]))
    rollout = env.rollout(2, do_nothing)
    assert rollout["rung"][:, 0, 0].tolist() == [0, 200]
    assert rollout["next", "rung"][..., 0].tolist() == [[2, 4], [202, 204]]


def test_reward_key_is_skipped_at_reset(ladder, do_nothing):
    env = TransformedEnv(ladder([3]), Double(in_keys=["reward"]))
    assert env.rollout(3, do_nothing)["next", "reward"].flatten().tolist() == [2, 4, 6]


def test_overridden_call_is_left_to_reset(ladder, do_nothing):
    env = TransformedEnv(ladder([3]), CallOnly())
    td = env.reset()
    assert td["rung"][0, 0] == 0
    assert env.step(do_nothing(td))["next", "rung"][0, 0] == 1001


def test_out_key_is_written_beside_in_key(ladder, do_nothing):
    class Seen(Double):
        def transform_observation_spec(self, observation_spec):
            return map_spec(observation_spec, self._pairs(), lambda spec: Unbounded(spec.shape))

    env = TransformedEnv(ladder([3, 5]), Seen(in_keys=["rung"], out_keys=[("deep", "rung")]))
    check_env_specs(env)
    td = env.reset()
    assert torch.equal(td["deep", "rung"], 2 * td["rung"])


def test_missing_key_names_transform_and_key(ladder, do_nothing):
    env = TransformedEnv(ladder([3]), Double(in_keys=["rungs"]))
    with pytest.raises(EnvError, match=r"Double: no entry 'rungs'; there are .*'rung'.*Correct the transform's keys"):
        env.step(do_nothing(env.reset()))


def test_unannounced_shape_names_key(ladder):
    class Cut(Transform):
        def _apply_transform(self, obs):
            return obs[..., :1]

    env = TransformedEnv(ladder([3]), Cut(in_keys=["rung"]))
    with pytest.raises(EnvError, match=r"'rung' with shape \[1, 1\]; observation_spec says \[1, 2\]"):
        env.reset()


def test_announced_but_missing_at_reset(ladder):
    class Late(Transform):
        def _call(self, next_tensordict):
            return next_tensordict.set("late", next_tensordict["rung"])

        def transform_observation_spec(self, observation_spec):
            return observation_spec.clone().set("late", observation_spec["rung"].clone())

    with pytest.raises(EnvKeyError, match="reset returned no 'late'"):
        TransformedEnv(ladder([3]), Late()).reset()


def test_transform_that_does_nothing_says_so(ladder):
    with pytest.raises(RuntimeError, match="define _apply_transform"):
        Transform(in_keys=["x"])(TensorDict({"x": torch.zeros(1)}))


def test_keys_of_unequal_number():
    with pytest.raises(ValueError, match="one of out_keys for each of in_keys, got 1"):
        Double(in_keys=["a", "b"], out_keys=["c"])(TensorDict({}))


@pytest.mark.parametrize("keys", ["a", ["a"], ("n", "a"), [("n", "a"), "a"]])
def test_keys_are_normalised(keys):
    transform = Double(in_keys=keys)
    assert transform.in_keys == transform.out_keys
    assert isinstance(transform.in_keys, list)
    data = TensorDict({"a": torch.ones(()), "n": {"a": torch.ones(())}})
    done = transform(data)
    assert all(done[key] == 2 for key in transform.in_keys)


def test_inverse_reads_out_keys_and_writes_in_keys(ladder):
    env = ladder([3])
    halved = TransformedEnv(env, Double(in_keys_inv=["action"], out_keys_inv=["wish"]))
    td = halved.reset().set("wish", torch.full((1, 1), 8.0))
    halved.step(td)
    assert env.actions[0].item() == 4
    assert "action" not in td  # the caller's data stay as they are


def test_inv_leaves_its_argument():
    td = TensorDict({"action": torch.ones(())})
    assert Double(in_keys_inv=["action"]).inv(td)["action"] == 0.5
    assert td["action"] == 1


def test_second_owner_is_refused(ladder):
    transform = StepCounter()
    env = TransformedEnv(ladder([3]), transform)
    for take in (lambda: TransformedEnv(ladder([3]), transform), lambda: Compose(transform)):
        with pytest.raises(RuntimeError, match=r"StepCounter already belongs .* pass transform.clone\(\)"):
            take()
    other = TransformedEnv(ladder([3]), transform.clone())
    assert transform.container is env
    assert other.transform.container is other


def test_owner_that_is_gone_does_not_count(ladder):
    transform = StepCounter()
    TransformedEnv(ladder([3]), transform)
    env = TransformedEnv(ladder([3]), transform)
    assert transform.container is env


def test_removed_transform_is_free(ladder):
    env = TransformedEnv(ladder([3]), Compose(StepCounter(), RewardSum()))
    counter = env.transform.pop(0)
    assert counter.container is None
    assert "step_count" not in env.observation_keys
    Compose(counter)


def test_parent_has_the_transforms_before(ladder):
    env = TransformedEnv(ladder([3]), Compose(StepCounter(), Compose(Double(in_keys=["rung"]), RewardSum())))
    counter, nested = env.transform
    assert "step_count" not in counter.parent.observation_keys
    last = nested[1]
    assert [type(t) for t in last.parent.transform] == [StepCounter, Double]
    assert last.parent is last.parent
    assert last.container is env
    assert last.parent.base_env is env.base_env


def test_parent_follows_changes(ladder):
    env = TransformedEnv(ladder([3]), RewardSum())
    assert "n" not in env.transform.parent.observation_keys
    env.insert_transform(0, StepCounter(step_count_key="n"))
    assert "n" in env.transform[1].parent.observation_keys


def test_no_environment_no_parent():
    assert Compose(StepCounter())[0].parent is None
    assert StepCounter().container is None


def test_long_chains_stay_cheap(ladder):
    calls = []

    class Count(Transform):
        def transform_output_spec(self, output_spec):
            calls.append(self.parent.observation_keys)
            return super().transform_output_spec(output_spec)

    env = TransformedEnv(ladder([3]), Compose(*(Count() for _ in range(12))))
    env.reset()
    assert len(calls) <= 12 * 13  # each of the parents computes its specs once


def test_copies_do_not_drag_the_environment_along(ladder):
    env = TransformedEnv(ladder([3]), Compose(StepCounter(2), RewardSum()))
    env.reset()
    for twin in (pickle.loads(pickle.dumps(env.transform)), copy.deepcopy(env.transform)):
        assert twin.container is None
        assert [t.container for t in twin] == [None, None]
        assert twin[0].holder is twin
        TransformedEnv(ladder([3]), twin).reset()


def test_late_buffers_take_the_shape_that_was_saved():
    class Late(Transform):
        def __init__(self):
            super().__init__()
            self.register_buffer("seen", None)

    old, new = Late(), Compose(Late())
    old.seen = torch.arange(3)
    new.load_state_dict(Compose(old).state_dict())
    assert new[0].seen.tolist() == [0, 1, 2]


def test_map_spec_leaves_its_argument():
    spec = Composite(a=Unbounded((1,)), b=Unbounded((2,)))
    moved = map_spec(spec, [("a", "c"), ("z", "z")], lambda leaf: leaf.to(torch.float64), move=True)
    assert set(moved.keys()) == {"b", "c"}
    assert set(spec.keys()) == {"a", "b"}
    assert moved["c"].dtype == torch.float64


@pytest.mark.parametrize("chain", [lambda *parts: parts[0], Compose])
def test_the_spec_of_one_entry_is_changed_alone(chain):
    norm = chain(ObservationNorm(1.0, 2.0, in_keys=["observation"]), DoubleToFloat(in_keys=["observation"]))
    spec = norm.transform_observation_spec(Bounded(0.0, 1.0, (3,), dtype=torch.float64))
    assert spec == Bounded(1.0, 3.0, (3,), dtype=torch.float64 if chain is not Compose else torch.float32)


def test_what_a_reset_is_given_can_be_changed(ladder, do_nothing):
    given = []

    class Start(Transform):
        def __init__(self, name):
            super().__init__()
            self.name = name

        def _reset_env_preprocess(self, tensordict):
            given.append((self.name, None if tensordict is None else set(tensordict.keys())))
            return tensordict

    class Masked(Transform):
        """Has the first environment alone reset."""

        def _reset_env_preprocess(self, tensordict):
            return tensordict if tensordict is None else tensordict.set("_reset", torch.tensor([[True], [False]]))

    env = TransformedEnv(ladder([9, 9]), Compose(Start("inner"), Start("outer"), Masked()))
    td = env.reset()
    assert given == [("outer", None), ("inner", None)]  # the last first, as on the way in
    td = env.step(do_nothing(td))["next"].exclude("reward")
    td["_reset"] = torch.ones(2, 1, dtype=torch.bool)
    env.transform.transform_reset_input(td)
    assert td["_reset"].tolist() == [[True], [False]]


def test_an_environment_puts_transforms_into_evaluation_mode(ladder):
    first, second = Double(in_keys=["rung"]), Double(in_keys=["rung"])
    env = TransformedEnv(ladder([3]), Compose(first))
    assert not first.training
    env.train()
    env.append_transform(second)
    assert first.training
    assert not second.training
