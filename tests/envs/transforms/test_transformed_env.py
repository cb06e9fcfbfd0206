"""TransformedEnv: nesting, what it shares with its base environment, specs, state."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from tensordict import TensorDict, TensorDictBase

from rollwright.collectors import Collector
from rollwright.data import Composite, Unbounded
from rollwright.envs import (
    CatFrames,
    Compose,
    GymEnv,
    InitTracker,
    RewardSum,
    SerialEnv,
    StepCounter,
    TensorDictPrimer,
    Transform,
    TransformedEnv,
    VecNorm,
    check_env_specs,
)
from rollwright.errors import EnvError
from rollwright.testing.mocking_classes import ContinuousActionVecMockEnv, CountingBatchedEnv


def test_empty_chain_changes_nothing(do_nothing, ladder):
    plain, wrapped = ladder([2, 3, 4]), TransformedEnv(ladder([2, 3, 4]))
    check_env_specs(wrapped)
    rollouts = [env.rollout(9, do_nothing, break_when_any_done=False) for env in (plain, wrapped)]
    assert (rollouts[0] == rollouts[1]).all()
    assert wrapped.specs == plain.specs
    assert isinstance(wrapped.transform, Compose)


def test_nested_environments_become_one(ladder):
    inner = TransformedEnv(ladder([2, 4]), StepCounter())
    outer = TransformedEnv(inner, InitTracker())
    assert outer.base_env is inner.base_env
    assert [type(t) for t in outer.transform] == [StepCounter, InitTracker]
    assert all(t.container is outer for t in outer.transform)
    again = TransformedEnv(outer, Compose(RewardSum(), lambda td: td))
    assert len(again.transform) == 4
    assert len(TransformedEnv(again).transform) == 4
    check_env_specs(again)
    check_env_specs(inner)  # the environment unwrapped goes on working


def test_nesting_can_be_kept(ladder, do_nothing):
    inner = TransformedEnv(ladder([2, 4]), StepCounter())
    outer = TransformedEnv(inner, StepCounter(3, step_count_key="n"), auto_unwrap=False)
    assert outer.base_env is inner
    check_env_specs(outer)
    rollout = outer.rollout(6, do_nothing, break_when_any_done=False)
    assert torch.equal(rollout["n"], rollout["step_count"])
    assert outer.limits is inner.base_env.limits


def test_a_refused_transform_leaves_the_inner_environment_alone(ladder):
    inner = TransformedEnv(ladder([2]), StepCounter())
    taken = InitTracker()
    owner = TransformedEnv(ladder([2]), taken)
    with pytest.raises(RuntimeError, match="already belongs"):
        TransformedEnv(inner, taken)
    assert inner.transform.container is inner
    assert taken.container is owner


def test_append_and_insert(ladder):
    env = TransformedEnv(ladder([2]), StepCounter())
    assert env.append_transform(RewardSum()) is env
    assert env.insert_transform(0, InitTracker()) is env
    assert [type(t) for t in env.transform] == [InitTracker, StepCounter, RewardSum]
    check_env_specs(env)
    assert isinstance(ladder([2]).append_transform(StepCounter()), TransformedEnv)


def test_transform_can_be_replaced(ladder):
    counter = StepCounter()
    env = TransformedEnv(ladder([2]), counter)
    env.reset()
    env.transform = RewardSum()
    assert counter.container is None
    assert set(env.reset().keys()) == {"rung", "episode_reward", "done", "terminated"}


def test_a_function_is_a_transform(ladder, do_nothing):
    def shift(td):
        return td.set("rung", td["rung"] + 7)

    env = TransformedEnv(ladder([3]), shift)
    rollout = env.rollout(2, do_nothing)
    assert rollout["rung"][0, :, 0].tolist() == [7, 8]
    assert rollout["next", "rung"][0, :, 0].tolist() == [8, 9]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((3,), "base_env: expected an environment of rollwright.*got int: 3. Pass a name such as"),
        (("env", 3), "transform: expected a Transform, or a function from .*, got int. Subclass Transform"),
        (("env", [StepCounter()]), r"got list. Write Compose\(\*transforms\)"),
        (("env", StepCounter), r"got the class StepCounter. Call it: StepCounter\(\)"),
        (("env", GymEnv("CartPole-v1")), r"got rollwright.*GymEnv, an environment. Put .*TransformedEnv\(env, "),
    ],
)
def test_wrong_types(ladder, arguments, message):
    arguments = tuple(ladder([2]) if a == "env" else a for a in arguments)
    with pytest.raises(TypeError, match=message):
        TransformedEnv(*arguments)


def test_attributes_fall_through(ladder):
    env = TransformedEnv(ladder([2, 3]), StepCounter())
    assert env.limits is env.base_env.limits
    assert (env.batch_size, env.ndim, env.device, env.batch_locked) == (torch.Size([2]), 1, None, True)
    with pytest.raises(AttributeError, match="no_such_thing"):
        _ = env.no_such_thing
    env.run_type_checks = True
    assert env.base_env.run_type_checks
    assert env.run_type_checks
    with pytest.raises(AttributeError, match="Set it there"):
        env.batch_size = [3]
    with pytest.raises(AttributeError, match=r"Set env.base_env.reward_spec and call env.empty_cache\(\)"):
        env.reward_spec = Unbounded((2, 1))


def test_attribute_error_in_a_spec_is_not_hidden(ladder):
    class Broken(Transform):
        def transform_observation_spec(self, observation_spec):
            return observation_spec.no_such_method()

    env = TransformedEnv(ladder([2]), Broken())
    with pytest.raises(EnvError, match=r"transform_output_spec raised AttributeError: .*no_such_method"):
        _ = env.observation_spec


def test_changed_base_specs_after_empty_cache(ladder):
    env = TransformedEnv(ladder([2]), StepCounter())
    assert "truncated" not in env.done_keys
    assert env.add_truncated_keys() is env
    assert "truncated" in env.done_keys
    assert "truncated" in env.base_env.done_keys
    env.base_env.reward_spec = Unbounded((1, 2))
    env.empty_cache()
    assert env.reward_spec.shape == (1, 2)


def test_specs_can_be_computed_each_time(ladder, do_nothing):
    class Growing(Transform):
        size = 2

        def _call(self, next_tensordict):
            return next_tensordict.set("tail", torch.zeros(1, self.size))

        def _reset(self, tensordict, tensordict_reset):
            return self._call(tensordict_reset)

        def transform_observation_spec(self, observation_spec):
            return observation_spec.clone().set("tail", Unbounded((1, self.size)))

    for cache_specs in (False, True):
        env = TransformedEnv(ladder([9]), Growing(), cache_specs=cache_specs)
        td = env.reset()
        env.transform.size = 3
        if cache_specs:
            with pytest.raises(EnvError, match=r"'tail' with shape \[1, 3\]; observation_spec says \[1, 2\]"):
                env.step(do_nothing(td))
        else:
            assert env.step(do_nothing(td))["next", "tail"].shape == (1, 3)
            assert env.observation_spec["tail"].shape == (1, 3)


def test_cached_specs_are_computed_once(ladder):
    calls = []

    class Counting(Transform):
        def transform_output_spec(self, output_spec):
            calls.append("out")
            return output_spec

        def transform_input_spec(self, input_spec):
            calls.append("in")
            return input_spec

    env = TransformedEnv(ladder([2]), Counting())
    assert calls == []  # not before they are asked for
    env.rollout(5, break_when_any_done=False)
    assert sorted(calls) == ["in", "out"]


def test_specs_of_the_base_environment_stay(ladder):
    base = ladder([2])
    before = base.specs.clone()
    env = TransformedEnv(base, Compose(StepCounter(3), RewardSum(), VecNorm(["rung"]), CatFrames(2, -1, ["rung"])))
    env.rollout(5, break_when_any_done=False)
    assert base.specs == before


def test_entries_that_the_policy_wrote_below_next_stay(ladder):
    env = TransformedEnv(ladder([5]), TensorDictPrimer(hidden=Unbounded((1, 3))))
    td = env.reset()
    td["action"] = torch.zeros(1, 1)
    td["next", "hidden"] = torch.ones(1, 3)
    td["next", "rung"] = torch.full((1, 2), 55.0)  # the environment's own entries win
    following = env.step(td)
    assert following["next", "hidden"].sum() == 3
    assert following["next", "rung"][0, 0] == 1


def test_reset_arguments_reach_the_base_environment(ladder):
    seen = {}

    class Listening(ladder):
        def _reset(self, tensordict=None, **kwargs):
            seen.update(kwargs, keys=None if tensordict is None else set(tensordict.keys()))
            return super()._reset(tensordict)

    env = TransformedEnv(Listening([2, 2]), Compose(StepCounter(), InitTracker()))
    td = env.reset(options=3)
    assert seen == {"options": 3, "keys": None}
    env.reset(td.set("_reset", torch.tensor([[True], [False]])))
    assert seen["keys"] == {"_reset"}


def test_seed_goes_through():
    def run(env):
        last = env.set_seed(3)
        return last, env.rollout(5)

    plain = run(ContinuousActionVecMockEnv())
    wrapped = run(TransformedEnv(ContinuousActionVecMockEnv(), Compose()))
    assert plain[0] == wrapped[0]
    assert (plain[1] == wrapped[1]).all()


def test_close(ladder):
    env = TransformedEnv(ladder([2]), StepCounter())
    env.close()
    assert env.is_closed
    assert env.base_env.is_closed
    env.close()
    batched = TransformedEnv(SerialEnv(2, lambda: ladder([2])), StepCounter())
    batched.close()
    with pytest.raises(EnvError, match="already closed"):
        batched.close()
    batched.close(raise_if_closed=False)


def test_dump_reaches_each_transform(ladder):
    class Dumped(Transform):
        def dump(self, **kwargs):
            written.append(kwargs)

    written = []
    TransformedEnv(ladder([2]), Compose(Dumped(), StepCounter(), Dumped())).transform.dump(suffix="a")
    assert written == [{"suffix": "a"}] * 2


def test_rand_action_of_the_base_environment(ladder):
    class Picky(ladder):
        def rand_action(self, tensordict=None):
            tensordict = TensorDict({}, self.batch_size) if tensordict is None else tensordict
            return tensordict.set("action", torch.full((*self.batch_size, 1), 0.25))

    assert TransformedEnv(Picky([2]), StepCounter()).rollout(2)["action"].unique() == 0.25

    class Rename(Transform):
        def transform_action_spec(self, action_spec):
            return Composite(wish=action_spec["action"], shape=action_spec.shape)

    renamed = TransformedEnv(Picky([2]), Rename(in_keys_inv=["action"], out_keys_inv=["wish"]))
    assert "wish" in renamed.rand_action(renamed.reset())
    check_env_specs(renamed)


def chain():
    return Compose(StepCounter(7), RewardSum(), InitTracker(), CatFrames(2, -1, ["rung"]), VecNorm(["rung"]))


def go_on(env, td, steps, policy):
    seen = []
    for _ in range(steps):
        frame, td = env.step_and_maybe_reset(policy(td))
        seen.append(frame)
    return torch.stack(seen, -1), td


def test_resume_from_state_dict_and_data(do_nothing):
    def make():
        base = CountingBatchedEnv(max_steps=torch.tensor([2, 4, 5]), batch_size=[3])
        frames = CatFrames(2, -1, ["observation"])
        return TransformedEnv(base, Compose(StepCounter(4), RewardSum(), InitTracker(), frames, VecNorm()))

    def count(td):
        return td.set("action", torch.ones(3, 1, dtype=torch.int8))

    env = make()
    _, td = go_on(env, env.reset(), 6, count)
    state, carried = copy.deepcopy(env.state_dict()), td.clone()
    expected, _ = go_on(env, td, 8, count)
    resumed = make()
    resumed.load_state_dict(state)
    got, _ = go_on(resumed, carried, 8, count)
    assert (expected == got).all()
    assert {key.split(".")[0] for key in state} == {"base_env", "transform"}


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda env: pickle.loads(pickle.dumps(env))])
def test_copies_are_whole(counting_env, duplicate):
    env, policy = counting_env
    _, td = go_on(env, env.reset(), 5, policy)
    twin = duplicate(env)
    assert twin.transform.container is twin
    assert all(t.container is twin for t in twin.transform)
    assert (go_on(env, td.clone(), 6, policy)[0] == go_on(twin, td.clone(), 6, policy)[0]).all()


@pytest.fixture
def counting_env():
    base = CountingBatchedEnv(max_steps=torch.tensor([2, 4, 5]), batch_size=[3])
    env = TransformedEnv(base, Compose(StepCounter(4), CatFrames(2, -1, ["observation"]), VecNorm()))
    return env, lambda td: td.set("action", torch.ones(3, 1, dtype=torch.int8))


def test_train_and_eval_reach_transforms(ladder):
    env = TransformedEnv(ladder([2]), Compose(StepCounter()))
    env.eval()
    assert not env.transform[0].training
    env.train()
    assert env.transform[0].training


def test_to_moves_transforms_and_specs(ladder):
    env = TransformedEnv(ladder([2]), VecNorm(["rung"]))
    env.reset()
    assert env.to("cpu") is env
    assert env.device == torch.device("cpu")
    assert env.observation_spec.device == torch.device("cpu")
    check_env_specs(env)
    assert TransformedEnv(ladder([2]), StepCounter(), device="cpu").device == torch.device("cpu")


@pytest.mark.cuda
def test_cuda():
    base = CountingBatchedEnv(max_steps=torch.tensor([2, 4]), batch_size=[2], device="cpu")
    frames = CatFrames(2, -1, ["observation"])
    primer = TensorDictPrimer(hidden=Unbounded((3,)))
    chain = Compose(StepCounter(3), RewardSum(), InitTracker(), frames, VecNorm(), primer)
    env = TransformedEnv(base, chain, device="cuda")
    check_env_specs(env)
    rollout = env.rollout(9, break_when_any_done=False)
    assert {value.device.type for value in rollout.values(True, True)} == {"cuda"}


def test_repr_says_what_is_inside(ladder):
    text = repr(TransformedEnv(ladder([2]), StepCounter(3)))
    assert text == "TransformedEnv(Ladder(batch_size=[1], device=None), StepCounter(max_steps=3))"


def test_errors_of_the_base_environment_name_it(ladder):
    class Faulty(ladder):
        def _step(self, tensordict):
            return super()._step(tensordict).exclude("rung")

    env = TransformedEnv(Faulty([2]), StepCounter())
    with pytest.raises(EnvError, match=r"^Faulty\(.*: step returned no 'rung'"):
        env.rollout(1)


def test_unwrapped_transforms_are_the_same_objects(ladder, do_nothing):
    norm = VecNorm(["rung"], decay=1.0)
    outer = TransformedEnv(TransformedEnv(ladder([9]), norm), StepCounter())
    outer.rollout(3, do_nothing)
    assert norm.loc["rung"][0] == 1.5
    norm.freeze()
    outer.rollout(3, do_nothing)
    assert norm.loc["rung"][0] == 1.5


def test_transforms_come_back_when_the_outer_environment_is_gone(ladder):
    inner = TransformedEnv(ladder([9]), Compose(RewardSum(), InitTracker()))
    TransformedEnv(inner, StepCounter())
    assert all(t.container is inner for t in inner.transform)
    check_env_specs(inner)


def test_base_environment_can_be_replaced(ladder):
    env = TransformedEnv(ladder([2]), StepCounter())
    env.reset()
    env.base_env = ladder([2, 3, 4])
    assert env.batch_size == (3,)
    check_env_specs(env)


class Halved(Transform):
    """Leaves half an entry below ``"next"``; the next step begins with the whole."""

    def __init__(self, key):
        super().__init__()
        self.key = key

    def trim_frame(self, frame, following):
        outcome = frame["next"]
        outcome["half"] = outcome.pop(self.key) / 2


@pytest.mark.parametrize("whole_episodes", [False, True])
def test_a_frame_changes_after_the_data_of_the_next_step_were_taken_from_it(do_nothing, ladder, whole_episodes):
    env = TransformedEnv(ladder([2, 3]), Compose(Halved("rung"), StepCounter()))
    plain = ladder([2, 3]).rollout(5, do_nothing, break_when_any_done=whole_episodes)
    rolled = env.rollout(5, do_nothing, break_when_any_done=whole_episodes)
    with Collector(env, do_nothing, frames_per_batch=10, reset_when_done=not whole_episodes) as collector:
        batch = next(iter(collector))[:, : plain.shape[-1]]
    for frames in (rolled, batch):
        assert ("next", "rung") not in frames.keys(True, True)
        assert torch.equal(frames["rung"], plain["rung"])
        assert torch.equal(frames["next", "half"] * 2, plain["next", "rung"])


def test_what_changes_frames_is_not_stepped_on_arrays():
    env = TransformedEnv(GymEnv("CartPole-v1"), Halved("observation"))
    with Collector(env, frames_per_batch=10) as collector:
        assert "Halved changes frames once" in collector.stats()["paths"]["env"]
        batch = next(iter(collector))
    goes_on = ~batch["next", "done"].squeeze(-1)[:-1]
    assert torch.equal(batch["next", "half"][:-1][goes_on] * 2, batch["observation"][1:][goes_on])


@pytest.mark.parametrize("returns", [True, False])
def test_a_function_with_an_inverse_changes_actions_too(returns: bool) -> None:
    class Half:
        def __call__(self, td: TensorDictBase) -> TensorDictBase:
            return td.set("double", 2 * td["observation"])

        def inv(self, td: TensorDictBase) -> TensorDictBase | None:
            td.set("action", td["action"] / 2)
            return td if returns else None

    env, bare = TransformedEnv(GymEnv("Pendulum-v1"), Half()), GymEnv("Pendulum-v1")
    td, plain = env.reset(seed=0), bare.reset(seed=0)
    assert torch.equal(td["double"], 2 * td["observation"])
    found = env.step(td.set("action", torch.ones(1)))
    expected = bare.step(plain.set("action", torch.full((1,), 0.5)))
    assert torch.equal(found["next", "observation"], expected["next", "observation"])
    assert found["action"] == 1
