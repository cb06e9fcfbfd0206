"""Compose: order, changes to the chain, specs."""

from __future__ import annotations

import pytest
import torch
from tensordict import TensorDict
from torch import nn

from rollwright.envs import Compose, InitTracker, RewardSum, StepCounter, Transform, TransformedEnv
from rollwright.testing.mocking_classes import CountingEnv


class Append(Transform):
    """Notes its name in the data, with each of its methods."""

    def __init__(self, name: int) -> None:
        super().__init__()
        self.name = name

    def _note(self, td):
        return td.set("path", torch.cat([td.get("path", torch.zeros(0)), torch.tensor([float(self.name)])]))

    def _call(self, next_tensordict):
        return self._note(next_tensordict)

    def _reset(self, tensordict, tensordict_reset):
        return self._note(tensordict_reset)

    def _inv_call(self, tensordict):
        return self._note(tensordict)

    def forward(self, tensordict):
        return self._note(tensordict)


def path(td):
    return td["path"].int().tolist()


def test_order():
    chain = Compose(Append(1), Compose(Append(2), Append(3)))
    empty = TensorDict({})
    assert path(chain._call(TensorDict({}))) == [1, 2, 3]
    assert path(chain._step(empty, TensorDict({}))) == [1, 2, 3]
    assert path(chain._reset(empty, TensorDict({}))) == [1, 2, 3]
    assert path(chain(TensorDict({}))) == [1, 2, 3]
    assert path(chain.inv(empty)) == [3, 2, 1]
    assert empty.is_empty()


def names(chain):
    return [t.name for t in chain]


def test_changes_to_the_chain():
    chain = Compose([Append(1), Append(2)])
    chain.append(Append(5))
    chain.insert(0, Append(0))
    chain.insert(-1, Append(4))
    chain.insert(3, Compose(Append(31), Append(32)))
    assert names(chain) == [0, 1, 2, 31, 32, 4, 5]
    assert chain.pop().name == 5
    assert chain.pop(0).name == 0
    assert len(chain) == 5
    assert chain[-1].name == 4
    assert names(chain[1:3]) == [2, 31]
    assert chain[1:3][0] is not chain[1]  # a slice has clones
    with pytest.raises(IndexError, match=r"index: expected one from -5 to 5, got 6"):
        chain.insert(6, Append(0))


def test_functions_are_accepted():
    chain = Compose(lambda td: td.set("a", torch.ones(())))

    def in_place(td):
        td["b"] = td["a"] + 1

    chain.append(in_place)
    assert chain(TensorDict({}))["b"] == 2


@pytest.mark.parametrize("wrong", [3, "StepCounter", None])
def test_other_elements_are_refused(wrong):
    with pytest.raises(TypeError, match="transform: expected a Transform, or a function"):
        Compose(StepCounter(), wrong)


def test_a_class_is_refused():
    with pytest.raises(TypeError, match=r"got the class StepCounter. Call it: StepCounter\(\)"):
        Compose(StepCounter)


def test_specs_follow_changes(ladder):
    env = TransformedEnv(ladder([3]))
    for transform, key in ((StepCounter(), "step_count"), (InitTracker(), "is_init"), (RewardSum(), "episode_reward")):
        assert key not in env.reset()
        env.transform.append(transform)
        assert key in env.observation_keys
        assert key in env.reset()
    env.transform.pop(0)
    assert "step_count" not in env.reset()


def test_spec_of_the_wrong_type_names_the_transform(ladder):
    class Forgetful(Transform):
        def transform_output_spec(self, output_spec):
            output_spec["full_observation_spec"] = output_spec["full_observation_spec"]

    env = TransformedEnv(ladder([3]), Compose(Forgetful()))
    with pytest.raises(TypeError, match=r"Forgetful\(.*\): transform_output_spec must return a Composite, got None"):
        _ = env.observation_spec


def test_chain_of_another_environment_is_refused(ladder):
    chain = Compose(StepCounter())
    env = TransformedEnv(ladder([3]), chain)
    with pytest.raises(RuntimeError, match="Compose already belongs"):
        TransformedEnv(ladder([3]), chain)
    with pytest.raises(RuntimeError, match="Compose already belongs"):
        Compose().append(chain)
    TransformedEnv(ladder([3]), chain.clone()).reset()
    env.reset()


def test_leaf_spec_methods_fold():
    class AddKey(Transform):
        def transform_done_spec(self, done_spec):
            return done_spec.clone()

    chain = Compose(AddKey(), AddKey())
    from rollwright.data import Composite

    spec = Composite()
    for kind in ("observation", "reward", "done", "action", "state"):
        assert getattr(chain, f"transform_{kind}_spec")(spec) == spec


def test_repr_and_close(ladder):
    closed = []

    class Closing(Transform):
        def close(self):
            closed.append(True)

    env = TransformedEnv(ladder([3]), Compose(Closing(), Compose(Closing())))
    assert repr(env.transform) == "Compose(Closing(keys=[]), Compose(Closing(keys=[])))"
    env.close()
    assert closed == [True, True]


def test_transforms_of_another_library_are_refused_by_name():
    class NoopResetEnv(nn.Module):
        """Has what transforms have, and a forward that is not all of it."""

        def transform_observation_spec(self, spec):
            return spec

        def forward(self, tensordict):
            return tensordict

    NoopResetEnv.__module__, NoopResetEnv.__qualname__ = "otherlib.envs.transforms", "NoopResetEnv"
    foreign = NoopResetEnv()
    for put in (
        lambda: TransformedEnv(CountingEnv(), foreign),
        lambda: Compose(foreign),
        lambda: TransformedEnv(CountingEnv()).append_transform(foreign),
        lambda: TransformedEnv(CountingEnv()).insert_transform(0, foreign),
    ):
        with pytest.raises(TypeError, match=r"got otherlib\.envs\.transforms\.NoopResetEnv, a transform of another"):
            put()
    TransformedEnv(CountingEnv(), foreign.forward).rollout(2)  # all that is wanted of it
    TransformedEnv(CountingEnv(), nn.Identity()).rollout(2)


def test_parts_of_a_chain_that_is_in_no_environment_can_be_taken(ladder):
    chain = TransformedEnv(ladder([3]), Compose(StepCounter(), StepCounter(step_count_key="other"))).transform.clone()
    env = TransformedEnv(ladder([3]), Compose(*chain))
    assert [part.container for part in chain] == [env, env]
    assert env.rollout(2)["next", "other"].flatten().tolist() == [1, 2]
    with pytest.raises(RuntimeError, match="StepCounter already belongs"):
        TransformedEnv(ladder([3]), chain)
    with pytest.raises(RuntimeError, match="StepCounter already belongs"):
        Compose(chain[0])


def test_parts_of_a_chain_that_was_taken_out_have_no_environment(ladder):
    env = TransformedEnv(ladder([3]), Compose(StepCounter(), StepCounter(step_count_key="other")))
    chain = env.transform
    assert chain[1].parent is not None
    env.transform = StepCounter()
    assert [chain[0].parent, chain[1].parent] == [None, None]


@pytest.mark.parametrize("index", [0, 1, -1, -2])
def test_transforms_are_exchanged_and_taken_out_by_index(index):
    first, last = StepCounter(), InitTracker()
    env = TransformedEnv(CountingEnv(), Compose(first, last))
    assert "step_count" in env.observation_spec
    old, new = env.transform[index], RewardSum()
    env.transform[index] = new
    assert env.transform[index] is new
    assert len(env.transform) == 2
    assert new.container is env
    assert old.container is None
    assert "episode_reward" in env.rollout(2)
    assert ("step_count" in env.observation_spec) == (old is last)
    env.transform[index] = new  # it stays
    del env.transform[index]
    assert list(env.transform) == [last if old is first else first]
    assert "episode_reward" not in env.rollout(2)


def test_a_chain_may_take_the_place_of_one_transform():
    chain = Compose(StepCounter(), InitTracker())
    chain[0] = Compose(RewardSum(), StepCounter(max_steps=3))
    assert [type(part).__name__ for part in chain] == ["RewardSum", "StepCounter", "InitTracker"]
    chain[-1] = lambda td: td
    assert len(chain) == 3


def test_what_cannot_be_put_in_leaves_the_chain_as_it_was():
    env = TransformedEnv(CountingEnv(), Compose(StepCounter()))
    chain = Compose(InitTracker())
    with pytest.raises(RuntimeError, match="already belongs to another"):
        chain[0] = env.transform[0]
    with pytest.raises(TypeError):
        chain[0] = 3
    with pytest.raises(IndexError):
        chain[1] = RewardSum()
    with pytest.raises(IndexError):
        del chain[1]
    assert [type(part).__name__ for part in chain] == ["InitTracker"]
