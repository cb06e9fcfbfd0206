"""What a collector can be made from, and what happens (once) while it is made."""

from __future__ import annotations

import inspect

import cloudpickle
import pytest
import torch
from tensordict import TensorDict

from rollwright.collectors import BaseCollector, Collector, CollectorOptions, SyncDataCollector
from rollwright.envs import EnvCreator, GymEnv, SerialEnv
from rollwright.modules import RandomPolicy
from rollwright.testing.mocking_classes import CountingEnv

REFERENCE_003 = [
    "create_env_fn",
    "policy",
    "frames_per_batch",
    "total_frames",
    "device",
    "storing_device",
    "create_env_kwargs",
    "max_frames_per_traj",
    "init_random_frames",
    "reset_at_each_iter",
    "postproc",
    "split_trajs",
    "exploration_type",
    "exploration_mode",
    "return_same_td",
    "reset_when_done",
    "interruptor",
]
REFERENCE_000 = [
    "policy_device",
    "env_device",
    "storing_device",
    "no_cuda_sync",
    "track_traj_ids",
    "split_trajs",
    "set_truncated",
    "pre_collect_hook",
    "post_collect_hook",
    "postproc",
    "reset_at_each_iter",
    "frames_per_batch",
]
ISSUE = [
    "policy_factory",
    "compact_obs",
    "use_buffers",
    "trust_policy",
    "compile_policy",
    "cudagraph_policy",
    "create_env_kwargs",
    "track_policy_version",
    "trajs_per_batch",
    "traj_format",
    "replay_buffer",
    "extend_buffer",
    "worker_idx",
    "interruptor",
    "set_truncated",
]


@pytest.mark.parametrize("name", sorted({*REFERENCE_003, *REFERENCE_000, *ISSUE} - {"exploration_mode"}))
def test_the_signature_names_every_option(name):
    assert name in inspect.signature(Collector).parameters


@pytest.mark.parametrize("name", REFERENCE_003)
def test_the_legacy_signature_names_every_option_of_reference_003(name):
    assert name in inspect.signature(SyncDataCollector).parameters


@pytest.mark.parametrize("cls", [Collector, SyncDataCollector])
def test_options_are_keyword_only(cls):
    names = list(inspect.signature(cls).parameters)
    assert names[:2] == ["create_env_fn", "policy"]
    for name in names[2:]:
        assert inspect.signature(cls).parameters[name].kind is inspect.Parameter.KEYWORD_ONLY


@pytest.mark.parametrize("name", list(inspect.signature(Collector).parameters)[2:])
def test_every_option_is_documented(name):
    assert f" {name}:" in inspect.getdoc(Collector).replace("\n", " ")


METHODS = [
    "iterator",
    "__iter__",
    "next",
    "__len__",
    "reset",
    "rollout",
    "set_seed",
    "state_dict",
    "load_state_dict",
    "shutdown",
    "async_shutdown",
    "update_policy_weights_",
    "receive_weights",
    "enable_profile",
    "disable_profile",
    "stats",
    "cascade_execute",
    "pause",
    "init_updater",
    "map_fn",
    "get_distant_attr",
    "__enter__",
    "__exit__",
]


@pytest.mark.parametrize("name", METHODS)
def test_every_method_of_the_references_is_there(name):
    assert callable(getattr(Collector, name))
    assert name.startswith("__") or inspect.getdoc(getattr(Collector, name))


@pytest.mark.parametrize("cls", [Collector, SyncDataCollector])
def test_collectors_are_base_collectors(cls):
    assert issubclass(cls, BaseCollector)


def test_legacy_paths():
    from rollwright.collectors import collectors, utils

    assert collectors.SyncDataCollector is SyncDataCollector
    assert callable(utils.split_trajectories)


FORMS = {
    "environment": lambda: GymEnv("CartPole-v1"),
    "callable": lambda: lambda: GymEnv("CartPole-v1"),
    "list of one": lambda: [lambda: GymEnv("CartPole-v1")],
    "tuple of one": lambda: (lambda: GymEnv("CartPole-v1"),),
    "creator": lambda: EnvCreator(lambda: GymEnv("CartPole-v1")),
    "batch": lambda: SerialEnv(2, lambda: GymEnv("CartPole-v1")),
    "vector": lambda: GymEnv("CartPole-v1", num_envs=2),
}


@pytest.mark.parametrize("form", FORMS)
def test_forms_of_create_env_fn(make, form):
    collector = make(FORMS[form](), frames_per_batch=8, total_frames=8)
    (batch,) = list(collector)
    assert batch.numel() == 8


def test_create_env_kwargs_reach_the_factory_once_and_stay_as_they_are(make):
    calls = []

    def factory(max_steps, *, start_val=0):
        calls.append((max_steps, start_val))
        return CountingEnv(max_steps=max_steps, start_val=start_val)

    arguments = {"max_steps": 7, "start_val": 3}
    collector = make(factory, create_env_kwargs=arguments, frames_per_batch=4, total_frames=4)
    assert calls == [(7, 3)]
    assert arguments == {"max_steps": 7, "start_val": 3}
    assert collector.next()["observation"][0].item() == 3


def test_the_environment_is_made_once(make):
    made = []

    def factory():
        made.append(CountingEnv())
        return made[-1]

    collector = make(factory, frames_per_batch=2, total_frames=6)
    list(collector)
    assert len(made) == 1


def test_no_policy_is_a_random_policy(make):
    collector = make(CountingEnv(batch_size=[1000], max_steps=10), frames_per_batch=1000, total_frames=1000)
    (batch,) = list(collector)
    assert 400 < int(batch["action"].sum()) < 600


def test_a_random_policy_without_a_spec_takes_the_environments_once(make):
    policy = RandomPolicy()
    first = make(CountingEnv(), policy, frames_per_batch=4, total_frames=4)
    list(first)
    spec = policy.action_spec
    assert spec is not None
    list(make(CountingEnv(), policy, frames_per_batch=4, total_frames=4))
    assert policy.action_spec is spec


def test_a_random_policy_keeps_the_spec_it_has(make):
    env = CountingEnv()
    policy = RandomPolicy(env.action_spec)
    spec = policy.action_spec
    list(make(env, policy, frames_per_batch=4, total_frames=4))
    assert policy.action_spec is spec


def test_the_policy_is_called_once_a_step_and_never_on_made_up_data(make):
    env = CountingEnv(max_steps=3, start_val=1)  # no real observation is zero
    seen = []

    def policy(td):
        seen.append(td["observation"].clone())
        return td.set("action", torch.ones_like(env.action_spec.zero()))

    collector = make(env, policy, frames_per_batch=5, total_frames=15)
    assert not seen
    batches = list(collector)
    assert len(seen) == 15
    assert all(bool(obs.all()) for obs in seen)
    torch.testing.assert_close(torch.stack(seen), torch.cat([batch["observation"] for batch in batches]))


def test_given_options_are_not_changed(make):
    options = {"frames_per_batch": 4, "total_frames": 8, "create_env_kwargs": {"max_steps": 3}}
    kept = {**options, "create_env_kwargs": dict(options["create_env_kwargs"])}
    list(make(CountingEnv, None, **options))
    assert options == kept


def test_options_travel_whole():
    """Workers and clusters will receive them: pickled and back they are equal."""
    options = CollectorOptions(
        frames_per_batch=3, total_frames=9, device="cpu", postproc=torch.clone, set_truncated=True
    )
    assert cloudpickle.loads(cloudpickle.dumps(options)) == options
    with pytest.raises((AttributeError, TypeError)):
        options.frames_per_batch = 4  # what was checked stays


def test_errors_of_the_first_reset_come_with_the_first_batch(make):
    collector = make(BrokenReset(), frames_per_batch=2, total_frames=2)
    with pytest.raises(RuntimeError, match="no such track"):
        collector.next()


class BrokenReset(CountingEnv):
    def _reset(self, tensordict=None, **kwargs):
        raise OSError("no such track")


def test_repr_shows_environment_policy_and_counts(make, cartpole_actor):
    collector = make(GymEnv("CartPole-v1"), cartpole_actor(), frames_per_batch=16, total_frames=32)
    shown = repr(collector)
    for part in ("Collector", "GymEnv", "OneHotActor", "16", "32"):
        assert part in shown


def test_total_frames_defaults_to_no_end(make):
    collector = make(CountingEnv(), frames_per_batch=2)
    taken = [batch.numel() for batch, _ in zip(collector, range(5), strict=False)]
    assert taken == [2] * 5


def test_a_rollout_is_a_batch(make):
    collector = make(CountingEnv(), frames_per_batch=6, total_frames=6)
    rollout = collector.rollout()
    assert isinstance(rollout, TensorDict)
    assert rollout.shape == (6,)
    assert rollout.names[-1] == "time"


def test_a_callable_environment_is_taken_as_it_is(make):
    """An EnvBase is an nn.Module, hence callable: it must not be called as a factory."""
    env = CountingEnv()
    assert make(env, frames_per_batch=2, total_frames=2).env is env
