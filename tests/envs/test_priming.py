"""``policy=`` of an environment's constructor, and the collector's option that does the same."""

from __future__ import annotations

import functools

import pytest
import torch
from tensordict.nn import TensorDictModule, TensorDictModuleBase, TensorDictSequential
from tests.variants import in_turn
from torch import nn

from rollwright.collectors import Collector
from rollwright.data import Unbounded
from rollwright.envs import EnvBase, GymEnv, InitTracker, SerialEnv, StepCounter, TensorDictPrimer, TransformedEnv
from rollwright.envs.priming import provide_for_policy
from rollwright.errors import EnvKeyError, PolicyKeyError
from rollwright.modules import GRUModule, LSTMModule, RandomPolicy, set_recurrent_mode
from rollwright.testing.mocking_classes import CountingEnv

CartPole = functools.partial(GymEnv, "CartPole-v1")


class OneHot(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 2)

    def forward(self, features):
        return nn.functional.one_hot(self.linear(features).argmax(-1), 2)


def actor(kind=GRUModule, **options):
    torch.manual_seed(3)
    recurrent = kind(4, 8, in_key="observation", out_key="features", **options)
    return TensorDictSequential(recurrent, TensorDictModule(OneHot(), ["features"], ["action"]))


def transforms(env):
    return [type(transform).__name__ for transform in env.transform.transforms]


@pytest.fixture(autouse=True, scope="module")
def _one_thread():
    """Layers this small lose time to more."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def collect():
    """``collect(env, policy, **options)``: a Collector that ends with the test."""
    made = []

    def build(*args, **options):
        made.append(Collector(*args, **options))
        return made[-1]

    yield build
    for collector in made:
        collector.shutdown()


# The constructor ------------------------------------------------------------------------------


def test_an_environment_gets_what_the_policy_reads():
    env = CartPole(policy=actor(LSTMModule, num_layers=2))
    assert transforms(env) == ["InitTracker", "TensorDictPrimer"]
    start = env.reset()
    assert start["is_init"].all()
    assert start["recurrent_state_h"].shape == start["recurrent_state_c"].shape == (2, 8)
    env.check_env_specs()


def test_a_policy_without_states_changes_nothing():
    feed_forward = TensorDictModule(nn.Linear(4, 2), ["observation"], ["action"])
    for policy in (feed_forward, RandomPolicy(), lambda td: td, None):
        assert type(CartPole(policy=policy)) is GymEnv


def test_what_is_there_is_not_added_again():
    policy = actor()
    env = CartPole(policy=policy)
    assert provide_for_policy(env, policy) is env
    assert transforms(TransformedEnv(env, policy=policy)) == ["InitTracker", "TensorDictPrimer"]
    tracked = TransformedEnv(CartPole(), InitTracker(), policy=policy)
    assert transforms(tracked) == ["InitTracker", "TensorDictPrimer"]
    primed = TransformedEnv(CartPole(), TensorDictPrimer(recurrent_state=Unbounded((1, 8))), policy=policy)
    assert transforms(primed) == ["TensorDictPrimer", "InitTracker"]


def test_it_sees_through_a_serial_env():
    policy = actor()
    inside = SerialEnv(2, lambda: CartPole(policy=policy), policy=policy)
    assert type(inside) is SerialEnv
    outside = SerialEnv(2, CartPole, policy=policy)
    assert transforms(outside) == ["InitTracker", "TensorDictPrimer"]
    for env in (inside, outside):
        assert env.reset()["recurrent_state"].shape == (2, 1, 8)


@pytest.mark.parametrize("num_envs", [1, 2])
def test_layers_are_no_batch(num_envs):
    policy = actor(num_layers=num_envs)
    assert SerialEnv(num_envs, CartPole, policy=policy).reset()["recurrent_state"].shape == (num_envs, num_envs, 8)


def test_several_recurrent_modules_are_all_provided_for():
    first = GRUModule(4, 8, in_keys=["observation", "h1"], out_keys=["middle", ("next", "h1")])
    second = LSTMModule(8, 8, in_keys=["middle", "h2", "c2", "begins"], out_keys=["y", ("next", "h2"), ("next", "c2")])
    policy = TensorDictSequential(first, second, TensorDictModule(OneHot(), ["y"], ["action"]))
    env = CartPole(policy=policy)
    assert transforms(env) == ["InitTracker", "InitTracker", "TensorDictPrimer", "TensorDictPrimer"]
    batch = env.rollout(30, policy, break_when_any_done=False)
    assert torch.equal(batch["begins"], batch["is_init"])
    with set_recurrent_mode("recurrent"):
        torch.testing.assert_close(policy(batch.copy())["y"], batch["y"], rtol=0, atol=1e-5)


class NoPrimer(TensorDictModuleBase):
    """Carries an entry that it knows too little of, as dropout with a mask of unknown shape."""

    def __init__(self) -> None:
        super().__init__()
        self.in_keys = self.out_keys = ["observation"]

    def forward(self, tensordict):
        return tensordict

    def make_tensordict_primer(self):
        raise RuntimeError("pass input_shape")


def test_a_part_that_makes_no_primer_is_named_and_the_others_are_provided_for():
    policy = TensorDictSequential(NoPrimer(), actor())
    with pytest.warns(UserWarning, match=r"policy: NoPrimer makes no primer.*\(pass input_shape\)"):
        env = provide_for_policy(CartPole(), policy)
    assert transforms(env) == ["InitTracker", "TensorDictPrimer"]
    assert {"action", "recurrent_state"} <= set(policy(env.reset()).keys())


def test_marks_lie_beside_the_flags():
    policy = GRUModule(4, 8, in_keys=["observation", "h", ("agents", "is_init")], out_keys=["y", ("next", "h")])
    with pytest.raises(EnvKeyError, match=r"\('agents', 'is_init'\), and .* only beside its flags: 'is_init'"):
        CartPole(policy=policy)


def test_states_of_another_shape_are_an_error():
    env = CartPole(policy=actor(num_layers=2))
    with pytest.raises(ValueError, match=r"carries 'recurrent_state' of shape \[1, 8\].*of shape \[2, 8\]"):
        provide_for_policy(env, actor())


@pytest.mark.parametrize("num_layers", [1, 2])
def test_two_modules_with_one_state_are_an_error(num_layers):
    both = TensorDictSequential(
        GRUModule(4, 8, in_key="observation", out_key="f"),
        GRUModule(8, 8, in_key="f", out_key="features", num_layers=num_layers),
    )
    words = r"GRUModule \(module.0\) and GRUModule \(module.1\) keep their states under one key, 'recurrent_state'"
    with pytest.raises(ValueError, match=words):
        CartPole(policy=both)


def test_one_module_in_two_places_has_one_state():
    shared = GRUModule(4, 8, in_key="observation", out_key="features")
    both = nn.ModuleList([TensorDictSequential(shared), TensorDictSequential(shared)])
    assert transforms(CartPole(policy=both)) == ["InitTracker", "TensorDictPrimer"]


@pytest.mark.parametrize("policy", [3, "gru"])
def test_a_policy_that_cannot_be_called(policy):
    with pytest.raises(TypeError, match=f"policy: expected a callable .* got {type(policy).__name__}"):
        CartPole(policy=policy)


def test_a_part_of_the_states_is_an_error():
    env = TransformedEnv(CartPole(), TensorDictPrimer(recurrent_state_h=Unbounded((1, 8))))
    with pytest.raises(ValueError, match="provides only 'recurrent_state_h'"):
        provide_for_policy(env, actor(LSTMModule))


def test_the_environment_that_was_given_stays_as_it_is():
    env = TransformedEnv(CartPole(), StepCounter())
    provided = provide_for_policy(env, actor())
    assert transforms(provided) == ["StepCounter", "InitTracker", "TensorDictPrimer"]
    assert "recurrent_state" not in env.reset()
    assert provided.transform.transforms[0] is env.transform  # which goes on counting in both


def test_a_constructor_of_its_own_keeps_its_policy():
    class Opponent(CountingEnv):
        def __init__(self, policy):
            super().__init__()
            self.opponent = policy

    policy = actor()
    assert Opponent(policy=policy).opponent is policy
    assert isinstance(Opponent(policy=policy), EnvBase)


# Rollouts agree with recurrent calls ----------------------------------------------------------

SOURCES = {
    "one": CartPole,
    "transformed": lambda: TransformedEnv(CartPole(), StepCounter(max_steps=7)),
    "serial": lambda: SerialEnv(3, CartPole),
    "vector": lambda: CartPole(num_envs=3),
}


@pytest.mark.parametrize("kind", [GRUModule, LSTMModule])
@pytest.mark.parametrize(("source", "python_based"), in_turn(SOURCES, [False, True]))
def test_a_recurrent_call_repeats_the_rollout(collect, source, kind, python_based):
    policy = actor(kind, num_layers=2, python_based=python_based)
    collector = collect(SOURCES[source](), policy, frames_per_batch=90, total_frames=180)
    collector.set_seed(0)
    for batch in collector:
        assert batch["is_init"][..., 1:, :].any()  # something began anew on the way
        stored = batch["recurrent_state" if kind is GRUModule else "recurrent_state_c"]
        assert (stored.flatten(-2).abs().sum(-1, keepdim=True) == 0).eq(batch["is_init"]).all()
        flat = batch.clone().reshape(-1)
        flat["is_init"].reshape(batch["is_init"].shape)[..., 0, :] = True  # where rows begin in the middle
        for view in (batch, flat):
            with set_recurrent_mode("recurrent"):
                again = policy(view.copy())
            torch.testing.assert_close(again["features"], view["features"], rtol=0, atol=1e-5)
            assert torch.equal(again["action"], view["action"])


def test_gradients_of_a_recurrent_call_equal_those_of_stepping_again():
    policy = actor()
    env = SerialEnv(2, lambda: TransformedEnv(CartPole(), StepCounter(max_steps=6)), policy=policy)
    env.set_seed(0)
    with torch.no_grad():
        batch = env.rollout(20, policy, break_when_any_done=False)
    features = []
    state = batch[:, 0]["recurrent_state"]
    for t in range(20):
        step = batch[:, t].clone()
        step["recurrent_state"] = torch.where(step["is_init"].unsqueeze(-1), step["recurrent_state"], state)
        features.append(policy(step)["features"])
        state = step["next", "recurrent_state"]
    losses = [torch.stack(features, 1).square().sum()]
    with set_recurrent_mode("recurrent"):
        losses.append(policy(batch.copy())["features"].square().sum())
    grads = [torch.autograd.grad(loss, list(policy[0].parameters())) for loss in losses]
    for stepped, run in zip(*grads, strict=True):
        torch.testing.assert_close(run, stepped, rtol=1e-5, atol=1e-5)


# The collector --------------------------------------------------------------------------------


def test_a_collector_appends_what_is_missing(collect):
    env = CartPole()
    collector = collect(env, actor(), frames_per_batch=10, total_frames=10)
    assert transforms(collector.env) == ["InitTracker", "TensorDictPrimer"]
    assert next(iter(collector))["next", "recurrent_state"].shape == (10, 1, 8)


def test_a_collector_adds_nothing_to_what_is_there(collect):
    policy = actor()
    env = CartPole(policy=policy)
    assert collect(env, policy, frames_per_batch=10, total_frames=10).env is env
    serial = SerialEnv(2, lambda: CartPole(policy=policy))
    assert collect(serial, policy, frames_per_batch=10, total_frames=10).env is serial


def test_a_policy_of_a_factory_is_provided_for(collect):
    collector = collect(CartPole, policy_factory=actor, frames_per_batch=10, total_frames=10, max_frames_per_traj=4)
    batch = next(iter(collector))
    assert batch["is_init"].squeeze(-1).nonzero().squeeze(-1).tolist() == [0, 4, 8]


def test_without_the_option_the_missing_entries_are_named():
    with pytest.raises(PolicyKeyError, match="reads 'is_init', 'recurrent_state', which GymEnv"):
        Collector(CartPole(), actor(), auto_register_policy_transforms=False)


def test_the_option_is_checked():
    with pytest.raises(TypeError, match="auto_register_policy_transforms: expected True or False, got str"):
        Collector(CartPole(), actor(), auto_register_policy_transforms="yes")


def test_a_collector_acts_step_by_step_in_any_mode(collect):
    collector = collect(SerialEnv(2, CartPole), actor(), frames_per_batch=10, total_frames=20)
    collector.set_seed(0)
    with set_recurrent_mode("recurrent"):
        batches = list(collector)
    with set_recurrent_mode("recurrent"):
        again = collector.policy(batches[1].copy())
    torch.testing.assert_close(again["features"], batches[1]["features"], rtol=0, atol=1e-5)


def test_a_rollout_takes_single_steps_whatever_mode_the_caller_has_set():
    gru = GRUModule(4, 8, in_keys=["observation", "state", "is_init"], out_keys=["features", ("next", "state")])
    head = TensorDictModule(OneHot(), in_keys=["features"], out_keys=["action"])
    policy = TensorDictSequential(gru, head)
    runs = []
    for mode in ("sequential", "recurrent"):
        env = GymEnv("CartPole-v1", num_envs=3, policy=policy)
        env.set_seed(0)
        with set_recurrent_mode(mode), torch.no_grad():
            runs.append(env.rollout(5, policy, break_when_any_done=False)["features"])
        env.close()
    assert torch.equal(runs[0], runs[1])
