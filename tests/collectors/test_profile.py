"""Profiling: real Chrome traces, named ranges, and the user's own hooks left alone."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from rollwright.collectors import ProfileConfig
from rollwright.testing.mocking_classes import CountingEnv

RANGES = {"rollwright.policy", "rollwright.env", "rollwright.write"}
pytestmark = pytest.mark.filterwarnings("ignore:Profiler won't be using warmup")  # where a test asks for none


def marked_policy(td):
    with torch.profiler.record_function("mine"):
        return td.set("action", torch.ones(1, dtype=torch.int8))


def events(path):
    trace = json.loads(Path(path).read_text())
    return [event for event in trace["traceEvents"] if event.get("ph") == "X"]


def times_seen(path, name):
    return sum(event["name"] == name and event.get("cat") == "user_annotation" for event in events(path))


def test_a_trace_holds_the_rollouts_after_the_warm_up(make, tmp_path):
    path = tmp_path / "traces" / "worker_{worker_idx}.json"
    collector = make(CountingEnv(), marked_policy, frames_per_batch=5, total_frames=30)
    collector.enable_profile(num_rollouts=3, warmup_rollouts=1, save_path=path, activities=["cpu"])
    written = tmp_path / "traces" / "worker_0.json"
    seen = []
    for _ in collector:
        seen.append(written.exists())
    assert seen == [False, False, True, True, True, True]  # as soon as num_rollouts are over
    assert times_seen(written, "mine") == 10  # two rollouts of five steps
    assert any(event["name"].startswith("aten::") for event in events(written))


def test_the_default_path(make, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    collector = make(CountingEnv(), frames_per_batch=2, total_frames=8, worker_idx=3)
    collector.enable_profile()
    list(collector)
    assert events(tmp_path / "collector_profile_3.json")


def test_a_collection_that_ends_early_still_writes(make, tmp_path):
    path = tmp_path / "trace.json"
    collector = make(CountingEnv(), marked_policy, frames_per_batch=5, total_frames=10)
    collector.enable_profile(num_rollouts=50, warmup_rollouts=1, save_path=path, activities=["cpu"])
    list(collector)
    collector.shutdown()
    assert times_seen(path, "mine") == 5


def test_disable_profile_before_and_during(make, tmp_path):
    never, early = tmp_path / "never.json", tmp_path / "early.json"
    collector = make(CountingEnv(), frames_per_batch=5, total_frames=10)
    collector.enable_profile(save_path=never)
    collector.disable_profile()
    assert collector.profile_config is None
    list(collector)
    assert not never.exists()

    collector = make(CountingEnv(), marked_policy, frames_per_batch=5, total_frames=50)
    collector.enable_profile(num_rollouts=10, warmup_rollouts=0, save_path=early, activities=["cpu"])
    collector.next()
    collector.next()
    collector.disable_profile()
    assert times_seen(early, "mine") == 10
    collector.next()
    assert times_seen(early, "mine") == 10


def test_options_reach_the_profiler(make, tmp_path):
    path = tmp_path / "trace.json"
    collector = make(CountingEnv(), frames_per_batch=2, total_frames=4)
    collector.enable_profile(
        num_rollouts=2,
        warmup_rollouts=0,
        save_path=str(path),
        activities=["cpu"],
        record_shapes=True,
        with_stack=True,
        profile_memory=True,
        with_flops=True,
    )
    list(collector)
    trace = json.loads(path.read_text())
    assert trace.get("record_shapes") == 1
    assert trace.get("profile_memory") == 1
    assert any("python" in event.get("cat", "") for event in trace["traceEvents"])
    assert any("Input Dims" in event.get("args", {}) for event in trace["traceEvents"])


def test_on_trace_ready_takes_the_place_of_the_file(make, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    seen = []
    collector = make(CountingEnv(), marked_policy, frames_per_batch=2, total_frames=8)
    collector.enable_profile(
        num_rollouts=2,
        warmup_rollouts=1,
        activities=["cpu"],
        on_trace_ready=lambda profile: seen.append([e.key for e in profile.key_averages()]),
    )
    list(collector)
    assert len(seen) == 1
    assert "mine" in seen[0]
    assert list(tmp_path.iterdir()) == []


def test_the_users_hooks_survive(make, tmp_path):
    log = []
    collector = make(
        CountingEnv(),
        frames_per_batch=2,
        total_frames=8,
        pre_collect_hook=lambda: log.append("pre"),
        post_collect_hook=lambda td: log.append("post"),
    )
    before = collector.pre_collect_hook, collector.post_collect_hook
    collector.enable_profile(save_path=tmp_path / "trace.json")
    list(collector)
    assert log == ["pre", "post"] * 4
    assert (collector.pre_collect_hook, collector.post_collect_hook) == before


def test_too_late_is_an_error(make):
    collector = make(CountingEnv(), frames_per_batch=2, total_frames=8)
    collector.next()
    with pytest.raises(RuntimeError, match="before iteration"):
        collector.enable_profile()


@pytest.mark.parametrize(
    "arguments",
    [{"num_rollouts": 1, "warmup_rollouts": 1}, {"num_rollouts": 0}, {"num_rollouts": 2, "warmup_rollouts": 5}],
)
def test_there_must_be_a_rollout_after_the_warm_up(make, arguments):
    with pytest.raises(ValueError, match=r"num_rollouts.*warmup_rollouts"):
        make(CountingEnv(), frames_per_batch=2).enable_profile(**arguments)


def test_profile_config_shows_what_was_asked(make):
    collector = make(CountingEnv(), frames_per_batch=2)
    assert collector.profile_config is None
    collector.enable_profile(num_rollouts=5, warmup_rollouts=2, activities=["cpu"], with_flops=True)
    config = collector.profile_config
    assert isinstance(config, ProfileConfig)
    assert (config.num_rollouts, config.warmup_rollouts, config.activities) == (5, 2, ["cpu"])
    assert config.with_flops
    assert config.workers == [0]


def recorded(collector, batches=2):
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        for _ in range(batches):
            collector.next()
    return {event.key: event.count for event in profiler.key_averages() if event.key.startswith("rollwright")}


def test_named_ranges_are_switched_on_by_the_environment_variable(make, monkeypatch):
    monkeypatch.setenv("ROLLWRIGHT_PROFILING", "1")
    counts = recorded(make(CountingEnv(device="cpu"), frames_per_batch=3))
    assert set(counts) >= RANGES
    assert {counts[name] for name in RANGES} == {6}  # once a step


def test_copies_have_a_range_of_their_own(make, monkeypatch):
    from tensordict import TensorDict

    monkeypatch.setenv("ROLLWRIGHT_PROFILING", "1")
    collector = make(
        CountingEnv(device="cpu"),
        lambda td: TensorDict({"action": torch.ones(1, dtype=torch.int8)}),
        frames_per_batch=3,
        policy_device="meta",
        storing_device="cpu",
    )
    counts = recorded(collector)
    assert counts["rollwright.copy"] >= 12  # to the policy and to the environment


@pytest.mark.parametrize("value", [None, "0", ""])
def test_named_ranges_are_off_otherwise(make, monkeypatch, value):
    if value is None:
        monkeypatch.delenv("ROLLWRIGHT_PROFILING", raising=False)
    else:
        monkeypatch.setenv("ROLLWRIGHT_PROFILING", value)
    assert recorded(make(CountingEnv(), frames_per_batch=3)) == {}
