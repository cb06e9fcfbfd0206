"""state_dict and load_state_dict: what goes on, what begins anew, and what is said about it."""

from __future__ import annotations

import io
import random

import numpy as np
import pytest
import torch
from tests.variants import in_turn

from rollwright.collectors.rollout.paths import choice as path_choice
from rollwright.envs import Compose, GymEnv, RewardSum, StepCounter, TransformedEnv, VecNorm
from rollwright.errors import EnvError, NotNative
from rollwright.testing.mocking_classes import CountingEnv


def through_a_file(state):
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def cartpole():
    return TransformedEnv(GymEnv("CartPole-v1"), VecNorm(in_keys=["observation"]))


def test_entries(make, cartpole_actor):
    state = make(cartpole, cartpole_actor(), frames_per_batch=10, total_frames=50).state_dict()
    assert {"policy_state_dict", "env_state_dict", "traj_pool"} <= set(state)


def test_a_restored_collector_delivers_what_was_left(make, cartpole_actor):
    first = make(cartpole, cartpole_actor(), frames_per_batch=10, total_frames=50)
    first.next()
    first.next()
    state = through_a_file(first.state_dict())
    second = make(cartpole, cartpole_actor(1), frames_per_batch=10, total_frames=50)
    second.load_state_dict(state)
    assert second.stats()["frames"] == 20
    assert second.stats()["batches"] == 2
    assert len(list(second)) == 3


def test_a_restored_finished_collector_yields_nothing_more(make):
    first = make(CountingEnv(), frames_per_batch=10, total_frames=20)
    list(first)
    second = make(CountingEnv(), frames_per_batch=10, total_frames=20)
    second.load_state_dict(through_a_file(first.state_dict()))
    assert list(second) == []
    assert second.next() is None
    assert second.completed


def test_ids_go_on_above_the_saved_ones(make, count):
    env = CountingEnv(max_steps=1)
    first = make(env, count(env), frames_per_batch=10, total_frames=40)
    used = int(first.next()["collector", "traj_ids"].max())
    state = through_a_file(first.state_dict())
    second = make(CountingEnv(max_steps=1), count(env), frames_per_batch=10, total_frames=40)
    second.load_state_dict(state)
    assert int(second.next()["collector", "traj_ids"].min()) > used


def test_ids_are_never_given_twice_when_an_older_state_is_loaded(make, count):
    env = CountingEnv(max_steps=1)
    collector = make(env, count(env), frames_per_batch=10, total_frames=40)
    state = through_a_file(collector.state_dict())
    used = int(collector.next()["collector", "traj_ids"].max())
    collector.load_state_dict(state)
    assert int(collector.next()["collector", "traj_ids"].min()) > used


def test_weights_are_restored(make, pendulum_actor):
    first = make(lambda: GymEnv("Pendulum-v1"), pendulum_actor(0.25), frames_per_batch=5)
    second = make(lambda: GymEnv("Pendulum-v1"), pendulum_actor(1.0), frames_per_batch=5)
    second.load_state_dict(through_a_file(first.state_dict()))
    batch = second.next()
    torch.testing.assert_close(batch["action"], 0.25 * batch["observation"][:, :1])


def test_statistics_of_transforms_are_restored(make):
    first = make(cartpole, frames_per_batch=200)
    first.next()
    second = make(cartpole, frames_per_batch=200)
    second.load_state_dict(through_a_file(first.state_dict()))
    left, right = first.env.state_dict(), second.env.state_dict()
    assert left.keys() == right.keys()
    assert left
    for key, value in left.items():
        if isinstance(value, torch.Tensor):
            assert torch.equal(value, right[key]), key


def test_the_policy_version_is_kept(make, pendulum_actor):
    first = make(lambda: GymEnv("Pendulum-v1"), pendulum_actor(), frames_per_batch=5, track_policy_version=True)
    for _ in range(3):
        first.update_policy_weights_()
    second = make(lambda: GymEnv("Pendulum-v1"), pendulum_actor(), frames_per_batch=5, track_policy_version=True)
    second.load_state_dict(through_a_file(first.state_dict()))
    assert bool((second.next()["policy_version"] == 3).all())
    assert second.update_policy_weights_() == 4


@pytest.mark.parametrize("state", [{}, {"policy_state_dict": {}}, {"anything": 1}])
def test_a_state_of_something_else_is_named(make, state):
    with pytest.raises(KeyError, match="env_state_dict"):
        make(CountingEnv(), frames_per_batch=4).load_state_dict(state)


def test_load_state_dict_passes_strict_on(make, pendulum_actor):
    collector = make(lambda: GymEnv("Pendulum-v1"), pendulum_actor(0.25), frames_per_batch=5)
    state = collector.state_dict()
    state["policy_state_dict"] = {**state["policy_state_dict"], "new.weight": torch.ones(1)}
    with pytest.raises(RuntimeError, match=r"new\.weight"):
        collector.load_state_dict(state)
    collector.load_state_dict(state, strict=False)


# Bits -----------------------------------------------------------------------------------------------

FRAMES = 60


def cartpoles():
    return TransformedEnv(GymEnv("CartPole-v1", num_envs=2), StepCounter())


@pytest.fixture(params=["arrays", "plain"])
def build(request, monkeypatch, make):
    """``build(env, policy, **options)``: a collector that takes the path of the test."""
    if request.param == "plain":

        def refuse(core):
            raise NotNative("a test")

        monkeypatch.setattr(path_choice, "arrays_of", refuse)

    def made(env=cartpoles, policy=None, **options):
        collector = make(env, policy, **{"frames_per_batch": FRAMES, **options})
        assert collector.stats()["paths"]["env"].startswith("plain" if request.param == "plain" else "native")
        return collector

    return made


def untouched(collector):
    pass


def seeded(collector):
    collector.set_seed(3)


def stepped(collector):
    collector.next()


def reset(collector):
    collector.next()
    collector.reset()


def reset_in_part(collector):
    collector.next()
    collector.reset([1])


@pytest.mark.parametrize(
    ("ready", "options"),
    in_turn([untouched, seeded, stepped, reset, reset_in_part], [{}, {"reset_at_each_iter": True}]),
)
def test_a_restored_collector_goes_on_from_wherever_the_first_one_stood(build, same, ready, options):
    first = build(**options)
    ready(first)
    state = first.state_dict()  # not through a file: what the first does next must not reach it
    expected = [first.next(), first.next()]
    for _ in range(2):  # nor must what the second does
        second = build(**options)
        second.load_state_dict(state)
        for batch in expected:
            same(second.next(), batch)
        assert second.stats()["episodes"] == first.stats()["episodes"]
        assert second.stats()["mean_return"] == first.stats()["mean_return"]


def test_a_policy_that_writes_in_place_reaches_no_saved_state(make):
    def policy(td):
        td.set("seen", td["observation"].clone())
        td["observation"].zero_()
        return td.set("action", torch.ones(1, dtype=torch.int32))

    first = make(CountingEnv(), policy, frames_per_batch=4)
    first.next()
    state = first.state_dict()
    expected = first.next()["seen"]
    assert expected.flatten().tolist() == [4, 5, 0, 1]
    for _ in range(2):
        second = make(CountingEnv(), policy, frames_per_batch=4)
        second.load_state_dict(state)
        assert torch.equal(second.next()["seen"], expected)


def test_saving_changes_nothing(build, same):
    runs = []
    for save in (False, True):
        collector = build(total_frames=FRAMES * 4)
        collector.set_seed(0)
        batches = []
        for batch in collector:
            batches.append(batch)
            if save:
                collector.state_dict()
        runs.append(batches)
    for left, right in zip(*runs, strict=True):
        same(left, right)


def test_a_state_can_be_loaded_while_iteration_is_under_way(build, same):
    first = build()
    first.next()
    state = first.state_dict()
    expected = first.next()
    second = build(total_frames=FRAMES * 4)
    delivered = []
    for batch in second:
        delivered.append(batch)
        if len(delivered) == 1:
            second.load_state_dict(state)
    assert len(delivered) == 4  # one of its own, and three that the loaded state left
    same(delivered[1], expected, but=["collector"])


def test_batches_may_have_another_size_after_loading(build, same, stream):
    first = build(init_random_frames=FRAMES)
    first.next()
    state = first.state_dict()
    expected = stream([first.next(), first.next()])
    second = build(frames_per_batch=FRAMES * 2)
    second.load_state_dict(state)
    same(second.next(), expected)


def test_set_seed_after_loading_gives_the_bits_of_the_seed(build, same):
    state = build().state_dict()
    batches = []
    for loads in (False, True):
        collector = build()
        if loads:
            collector.load_state_dict(state)
        collector.set_seed(5)
        batches.append(collector.next())
    same(*batches)


def test_running_statistics_forget_the_reset_at_construction_after_loading_too(make, same):
    first, second = make(cartpole, frames_per_batch=50), make(cartpole, frames_per_batch=50)
    second.load_state_dict(through_a_file(first.state_dict()))
    batches = []
    for collector in (first, second):
        collector.set_seed(0)
        batches.append(collector.next())
    same(*batches)


# Ids --------------------------------------------------------------------------------------------------


def test_loading_what_was_just_saved_changes_nothing(build, same):
    batches = []
    for loads in (False, True):
        collector = build()
        collector.set_seed(0)
        collector.next()
        if loads:
            collector.load_state_dict(through_a_file(collector.state_dict()))
        batches.append(collector.next())
    same(*batches)


def test_a_collector_that_goes_back_gives_new_ids(build, same):
    """The steps are those from before; the ids are not, for the consumer has seen other steps under them."""
    collector = build(policy=None, frames_per_batch=4)
    collector.set_seed(0)
    collector.next()
    state = collector.state_dict()
    before = collector.next()  # nothing ended, so no id was given
    assert not before["next", "done"].any()
    for _ in range(2):
        pool = collector._traj_pool.state_dict()["traj_id"]
        collector.load_state_dict(state)
        again = collector.next()
        same(again, before, but=["collector"])
        assert int(again["collector", "traj_ids"].min()) >= pool


def test_ids_that_were_not_tracked_are_given_anew(build):
    first = build(track_traj_ids=False, frames_per_batch=4)
    first.next()
    second = build(frames_per_batch=4)
    second.load_state_dict(first.state_dict())
    assert second.next()["collector", "traj_ids"].tolist() == [[2, 2], [3, 3]]
    third = build(track_traj_ids=False, frames_per_batch=4)
    third.load_state_dict(second.state_dict())
    assert "collector" not in third.next()


def test_versions_that_are_tracked_no_more_are_dropped(build):
    first = build(track_policy_version=True)
    first.next()
    second = build()
    second.load_state_dict(first.state_dict())
    assert "policy_version" not in second.next()


# What begins anew ---------------------------------------------------------------------------------------


def test_states_of_older_versions_begin_new_trajectories(build):
    first = build()
    used = int(first.next()["collector", "traj_ids"].max())
    old = ("policy_state_dict", "env_state_dict", "frames", "iter", "policy_version", "traj_pool")
    state = {name: value for name, value in first.state_dict().items() if name in old}
    second = build()
    with pytest.warns(UserWarning, match=r"the state has no .*'streams'.*begins anew"):
        second.load_state_dict(state)
    batch = second.next()
    assert int(batch["collector", "traj_ids"].min()) > used
    assert bool((batch["step_count"][:, 0] == 0).all())
    assert second.stats()["batches"] == 2


def test_an_environment_of_another_make_begins_anew_and_says_so(build):
    first = build()
    used = int(first.next()["collector", "traj_ids"].max())
    second = build(lambda: TransformedEnv(GymEnv("CartPole-v1", num_envs=3), StepCounter()))
    with pytest.warns(UserWarning, match=r"begins anew, with new trajectory ids\..*batch size \[2\]"):
        second.load_state_dict(first.state_dict())
    batch = second.next()
    assert int(batch["collector", "traj_ids"].min()) > used
    assert bool((batch["step_count"][:, 0] == 0).all())
    assert second.stats()["frames"] == FRAMES * 2


def _without(state, name):
    return {key: value for key, value in state.items() if key != name}


def _late_error(state):
    return {**state, "env_checkpoint": {**state["env_checkpoint"], "attributes": torch.zeros(3, dtype=torch.uint8)}}


WRONG = {
    "weights of another shape": lambda state: {**state, "policy_state_dict": {}},
    "no policy_state_dict": lambda state: _without(state, "policy_state_dict"),
    "no trajectories": lambda state: _without(state, "trajectories"),
    "no streams": lambda state: _without(state, "streams"),
    "no env_checkpoint": lambda state: _without(state, "env_checkpoint"),
    "a stream cut short": lambda state: {**state, "streams": {**state["streams"], "torch": torch.zeros(3)}},
    "an environment that cannot be read": _late_error,
}


@pytest.mark.parametrize("wrong", WRONG)
@pytest.mark.parametrize("normalised", [False, True])
def test_a_load_that_raises_changes_nothing(make, same, pendulum_actor, wrong, normalised):
    def env():
        return (
            TransformedEnv(GymEnv("Pendulum-v1"), VecNorm(in_keys=["observation"]))
            if normalised
            else GymEnv("Pendulum-v1")
        )

    other = make(env, pendulum_actor(0.25), frames_per_batch=5)
    other.next()
    state = WRONG[wrong](through_a_file(other.state_dict()))
    batches = []
    for loads in (False, True):
        collector = make(env, pendulum_actor(), frames_per_batch=5)
        collector.set_seed(0)
        collector.next()
        if loads:
            lacking = f"'{wrong[3:]}'" if wrong.startswith("no ") else None
            with pytest.raises((KeyError, RuntimeError, TypeError, EnvError), match=lacking):
                collector.load_state_dict(state)
        batches.append(collector.next())
    same(*batches)


@pytest.mark.parametrize("use_buffers", [None, False])
def test_a_state_from_before_the_first_batch_loads_where_buffers_are_made_late(make, same, use_buffers):
    def env():
        return TransformedEnv(GymEnv("CartPole-v1"), Compose(VecNorm(in_keys=["observation"]), RewardSum()))

    collector = make(env, frames_per_batch=20, use_buffers=use_buffers)
    state = through_a_file(collector.state_dict())
    expected = collector.next()
    collector.load_state_dict(state)
    same(collector.next(), expected, but=["collector"])
    fresh = make(env, frames_per_batch=20, use_buffers=use_buffers)
    fresh.load_state_dict(state)
    same(fresh.next(), expected)


# Streams ------------------------------------------------------------------------------------------------


def test_global_generators_are_restored(make):
    collector = make(CountingEnv(), frames_per_batch=4)

    def draw():
        return torch.rand(()), np.random.normal(), random.gauss(0, 1)

    draw()  # of two normal numbers drawn together, one is left for the next call
    state = through_a_file(collector.state_dict())
    expected = draw()
    collector.load_state_dict(state)
    assert draw() == expected


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_the_generator_of_a_cuda_device_in_use_is_restored(make):
    collector = make(CountingEnv(), frames_per_batch=4, device="cuda:0")
    state = through_a_file(collector.state_dict())
    expected = torch.rand((), device="cuda:0")
    collector.load_state_dict(state)
    assert torch.equal(torch.rand((), device="cuda:0"), expected)


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_a_state_that_was_mapped_to_another_device_goes_back_to_its_own(build, same):
    first = build()
    first.next()
    file = io.BytesIO()
    torch.save(first.state_dict(), file)
    file.seek(0)
    expected = first.next().clone()
    second = build()
    second.load_state_dict(torch.load(file, map_location="cuda:0", weights_only=True))
    same(second.next(), expected)
