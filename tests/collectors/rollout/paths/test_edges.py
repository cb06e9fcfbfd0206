"""Where the two paths once gave different results: each case beside the plain path."""

from __future__ import annotations

from functools import partial

import gymnasium
import pytest
import torch
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from tensordict.nn import ProbabilisticTensorDictModule, TensorDictModule, TensorDictSequential
from torch import distributions, nn

from rollwright.collectors import Collector
from rollwright.collectors.rollout.paths import choice as path_choice
from rollwright.envs import (
    Compose,
    GymEnv,
    GymWrapper,
    InitTracker,
    ParallelEnv,
    RewardSum,
    SerialEnv,
    StepCounter,
    TransformedEnv,
)
from rollwright.errors import NotNative, PolicyError


@pytest.fixture(params=["native", "plain"])
def build(request, monkeypatch):
    """Makes a collector of CartPole on one of the paths."""
    if request.param == "plain":

        def refuse(core):
            raise NotNative("a test")

        monkeypatch.setattr(path_choice, "arrays_of", refuse)
    made = []

    def make(policy, env=None, **options):
        collector = Collector(env or GymEnv("CartPole-v1", categorical_action_encoding=True), policy, **options)
        made.append(collector)
        collector.set_seed(0)
        return collector

    yield make
    for collector in made:
        collector.shutdown()


def sampled(net, **options):
    return TensorDictSequential(
        TensorDictModule(net, ["observation"], ["logits"]),
        ProbabilisticTensorDictModule(["logits"], ["action"], distribution_class=distributions.Categorical, **options),
    )


def counting(td):
    """Carries a count of its own calls in the data."""
    count = td.get("count", torch.zeros(1))
    return td.set("count", count + 1).set("action", torch.tensor(0))


def test_a_policy_on_tensordicts_finds_what_it_wrote_after_a_restore(build):
    first = build(counting, frames_per_batch=5)
    first.next()
    state = first.state_dict()
    second = build(counting, frames_per_batch=5)
    second.load_state_dict(state)
    assert second.next()["count"].flatten().tolist() == [6.0, 7.0, 8.0, 9.0, 10.0]


def test_a_layer_that_gives_its_input_leaves_observations_as_they_are(build):
    net = nn.Sequential(nn.Dropout(0.0), nn.Tanh(), nn.Linear(4, 2)).train()
    batch = build(sampled(net), frames_per_batch=20).next()
    going_on = ~batch["next", "done"][:-1, 0]
    assert torch.equal(batch["observation"][1:][going_on], batch["next", "observation"][:-1][going_on])


@pytest.mark.parametrize("hidden", [{"log_prob_key": "_lp", "return_log_prob": True}, {}], ids=["private", "selected"])
def test_a_diverged_policy_is_an_error_though_no_entry_shows_it(build, hidden):
    net = nn.Linear(4, 2)
    policy = sampled(net, **hidden)
    if not hidden:
        policy = TensorDictSequential(*policy.module, selected_out_keys=["action"])
    collector = build(policy, frames_per_batch=5)
    with torch.no_grad():
        net.weight.fill_(float("nan"))
    with pytest.raises((ValueError, RuntimeError)):
        collector.next()


@pytest.mark.parametrize("late", ["a word", torch.zeros(2, dtype=torch.bfloat16)], ids=["text", "bfloat16"])
@pytest.mark.parametrize("first_late", [5, 7], ids=["batch", "step"])
def test_what_no_row_holds_is_delivered_whenever_it_comes(build, late, first_late):
    calls = []

    def policy(td):
        calls.append(None)
        td.set("action", torch.tensor(len(calls) % 2))
        return td.set("note", late) if len(calls) > first_late else td.set("note", torch.ones(3))

    collector = build(policy, frames_per_batch=5)
    for number in range(3):
        batch = collector.next()
        assert len(batch) == 5
        assert batch["action"].tolist() == [(number * 5 + t + 1) % 2 for t in range(5)]
    assert len(calls) == 15  # nothing was asked twice


def test_compilation_outlives_a_change_before_the_next_trajectories():
    policy = sampled(nn.Linear(4, 2), return_log_prob=True)
    env = GymEnv("CartPole-v1", categorical_action_encoding=True)
    with Collector(env, policy, frames_per_batch=5, compile_policy=True) as collector:
        collector.next()
        collector.set_seed(1)
        policy.eval()
        collector.next()
        assert "NumPy program" in collector.stats()["paths"]["policy"]


class Publishing(gymnasium.Wrapper):
    """Publishes new weights in the middle of each third step."""

    def __init__(self):
        super().__init__(gymnasium.make("CartPole-v1"))
        self.steps, self.publish = 0, lambda: None

    def step(self, action):
        self.steps += 1
        if self.steps % 3 == 0:
            self.publish()
        return super().step(action)


def test_the_version_is_that_of_the_weights_that_acted(build):
    inner = Publishing()
    policy = sampled(nn.Linear(4, 2), return_log_prob=True)
    env = GymWrapper(inner, categorical_action_encoding=True)
    collector = build(policy, env, frames_per_batch=7, track_policy_version=True)
    inner.publish = collector.increment_version
    assert collector.next()["policy_version"].tolist() == [0, 0, 0, 1, 1, 1, 2]


def test_a_compiled_policy_acts_with_one_version_a_batch_and_says_so():
    inner = Publishing()
    net = nn.Linear(4, 2)
    collector = Collector(
        GymWrapper(inner, categorical_action_encoding=True),
        sampled(net, return_log_prob=True),
        frames_per_batch=7,
        track_policy_version=True,
        compile_policy=True,
    )

    def publish():
        with torch.no_grad():
            net.weight.mul_(2.0)
        collector.increment_version()

    inner.publish = publish
    for _ in range(3):
        weight, bias, version = net.weight.detach().clone(), net.bias.detach(), collector.policy_version
        batch = collector.next()
        assert set(batch["policy_version"].tolist()) == {version}
        torch.testing.assert_close(batch["logits"], nn.functional.linear(batch["observation"], weight, bias))
    collector.shutdown()


def stream(collector, batches=3):
    return torch.cat([collector.next().select("observation", "logits", "action") for _ in range(batches)])


@pytest.fixture
def against_plain(monkeypatch):
    """The frames of both paths for one policy."""

    def compare(make_policy, change=lambda policy: None):
        found = []
        for plain in (False, True):
            with monkeypatch.context() as patch:
                if plain:
                    patch.setattr(path_choice, "arrays_of", lambda core: (_ for _ in ()).throw(NotNative("a test")))
                torch.manual_seed(1)
                policy = make_policy()
                env = GymEnv("CartPole-v1", categorical_action_encoding=True)
                with Collector(env, policy, frames_per_batch=20) as collector:
                    collector.set_seed(3)
                    first = stream(collector, 1)
                    change(policy)
                    found.append(torch.cat([first, stream(collector)]))
        assert (found[0] == found[1]).all()

    return compare


def test_weights_that_are_no_parameters(against_plain):
    def plain_tensor(policy):
        linear = policy[0].module
        weight = linear.weight.detach().clone()
        del linear.weight
        linear.register_buffer("weight", weight)

    against_plain(lambda: sampled(nn.Linear(4, 2)), plain_tensor)


def test_weights_that_are_strided(against_plain):
    def tied(policy):
        linear = policy[0].module
        linear.weight = nn.Parameter(torch.linspace(-1, 1, 16)[::4].expand(2, 4))

    against_plain(lambda: sampled(nn.Linear(4, 2)), tied)


def test_autocast_of_the_caller(against_plain):
    class Wide(nn.Module):
        def forward(self, x):
            return x.float()

    with torch.autocast("cpu", dtype=torch.bfloat16):
        against_plain(lambda: sampled(nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 2), Wide())))


def test_a_transform_that_comes_between_two_batches(build):
    from rollwright.envs import TransformedEnv
    from rollwright.envs.transforms import InitTracker

    env = TransformedEnv(GymEnv("CartPole-v1", categorical_action_encoding=True))
    collector = build(sampled(nn.Linear(4, 2)), env, frames_per_batch=5)
    collector.next()
    env.append_transform(InitTracker())
    collector.reset()
    assert collector.next()["is_init"].flatten().tolist() == [True, False, False, False, False]


def test_a_policy_that_varies_is_refused_where_memory_is_to_be_used_again(build):
    calls = []

    def policy(td):
        calls.append(None)
        return td.set("action", torch.tensor(0)).set("note", torch.ones(len(calls)))

    collector = build(policy, frames_per_batch=5, return_same_td=True)
    with pytest.raises((ValueError, PolicyError), match="return_same_td"):
        collector.next()


def test_a_function_is_not_compiled_and_keeps_its_environment_on_arrays():
    env = GymEnv("CartPole-v1", categorical_action_encoding=True)
    collector = Collector(env, counting, frames_per_batch=5, compile_policy=True)
    with pytest.warns(UserWarning, match=r"compile_policy: the policy runs uncompiled\. Function is no TensorDict"):
        batch = collector.next()
    assert collector.stats()["paths"]["env"].startswith("native")
    assert batch["count"].flatten().tolist() == [1.0, 2.0, 3.0, 4.0, 5.0]
    collector.shutdown()


# Environments that go on after their end -----------------------------------------------------------------------------


def _going_on():
    one = partial(GymEnv, "CartPole-v1", categorical_action_encoding=True)

    def chain():
        return Compose(StepCounter(max_steps=9), RewardSum(), InitTracker())

    vector = [partial(gymnasium.make, "CartPole-v1")] * 3
    modes = {
        f"vector, {mode.value}": lambda mode=mode: GymWrapper(
            SyncVectorEnv(vector, autoreset_mode=mode), categorical_action_encoding=True
        )
        for mode in AutoresetMode
    }
    return {
        "one": one,
        "serial": lambda: SerialEnv(3, one),
        "transformed": lambda: TransformedEnv(SerialEnv(3, one), chain()),
        "transformed inside": lambda: SerialEnv(3, lambda: TransformedEnv(one(), chain())),
        "parallel": lambda: ParallelEnv(3, one, num_processes=1),
        **modes,
    }


@pytest.mark.filterwarnings("ignore:.*You are calling 'step\\(\\)':UserWarning")
@pytest.mark.parametrize("name", _going_on())
def test_environments_that_go_on_after_their_end_are_stepped_on_arrays(make, same, name):
    """With resets by hand between batches, of all and of some, and a state in the middle."""
    found = []
    for options in ({}, {"use_buffers": False}):
        batches, state = [], None
        for restored in (False, True):
            env = _going_on()[name]()
            collector = make(env, None, frames_per_batch=36, total_frames=180, reset_when_done=False, **options)
            assert collector.stats()["paths"]["env"].startswith("plain" if options else "native")
            if restored:
                collector.load_state_dict(state)
            else:
                collector.set_seed(3)
                torch.manual_seed(1)
            for number in range(1 if restored else 0, 4):
                batches.append(collector.next().clone())
                if number == 0 and not restored:
                    state = collector.state_dict()
                if number == 1:
                    collector.reset()
                if number == 2 and env.ndim:
                    collector.reset([0])
            collector.shutdown()
        found.append(batches)
    assert any(bool((batch["next", "done"] & batch["done"]).any()) for batch in found[0])
    for ours, plain in zip(*found, strict=True):
        same(ours, plain)
