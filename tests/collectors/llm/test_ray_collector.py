"""RayLLMCollector on a real cluster of this machine: records, weights, kills, the ragged buffer, the end."""

from __future__ import annotations

import collections
import os
import random
import re
import signal
import sys
import warnings
from functools import partial

import pytest
import torch
from tests.collectors.llm.fakes import FakeEnv, FakePolicy
from tests.collectors.llm.shares import kill_one, tally, turns
from tests.collectors.llm.test_buffer_kills import records_of
from tests.collectors.llm.test_groups import even
from tests.collectors.workers.processes import gone, wait_until
from tests.patience import patient
from tests.ray_cluster import attached

from rollwright.collectors import Evaluator
from rollwright.collectors.llm import LLMCollector, RayLLMCollector
from rollwright.data import RaggedStorage, RayReplayBuffer
from rollwright.errors import MissingExtraError, WorkerError

ray = pytest.importorskip("ray")
pytestmark = [pytest.mark.ray, pytest.mark.timeout(120)]

ENV = partial(FakeEnv, 4, prompts=16, repeats=3)


@pytest.fixture(scope="module")
def cluster():
    """The address of a cluster, to which this process is connected."""
    with attached() as address:
        yield address


@pytest.fixture
def build(cluster):
    """``build(**options)``: a collector of fakes in two actors, that ends with the test."""
    made = []

    def of(env=ENV, policy=FakePolicy, **options):
        made.append(RayLLMCollector(env, policy_factory=policy, **{"num_collectors": 2, "num_cpus": 1, **options}))
        return made[-1]

    yield of
    for collector in made:
        collector.shutdown(raise_on_error=False)


def living(job):
    """Processes of the actors of a program that live."""
    states = ray._private.state.actors().values()
    return [state["Pid"] for state in states if state["State"] != "DEAD" and state["JobID"] == job]


def actors():
    """Those of this one."""
    return living(ray.get_runtime_context().get_job_id())


def of_one_process(**options):
    with LLMCollector(ENV, policy_factory=FakePolicy, **options) as collector:
        return {name: kept for batch in collector for name, kept in records_of(batch).items()}


def pids(collector):
    return [worker["pid"] for worker in collector.stats()["workers"]]


# The same as one process -------------------------------------------------------------------------------------------


def test_batches_of_all_actors_are_the_records_of_one_process_and_no_process_is_left(build):
    collector = build(dialog_turns_per_batch=8)
    found, sizes = {}, set()
    processes = [*pids(collector), *actors()]
    assert len(actors()) == 2
    for batch in collector:
        sizes.add(tuple(batch.shape))
        new = records_of(batch)
        assert not new.keys() & found.keys()
        found |= new
    assert found == of_one_process(dialog_turns_per_batch=8)
    assert (8, 1) in sizes
    assert all(len(size) == 2 for size in sizes)
    collector.shutdown()
    assert gone(processes, patient(10.0))
    assert wait_until(lambda: actors() == [], 10.0)
    assert ray.is_initialized()


def test_groups_that_are_kept_in_the_order_of_the_data_within_a_bound_of_versions(build):
    """``keep_group``, ``delivery_order``, ``on_error`` and ``max_policy_lag`` hold as with workers."""
    options = {"groups_per_batch": 1, "keep_group": even, "delivery_order": "data", "on_error": "drop"}
    collector = build(sync_iter=False, track_policy_version=True, max_policy_lag=1, **options)
    delivered = collections.defaultdict(list)
    for published, batch in enumerate(collector):
        (prompt,) = {name[0] for name in turns(batch)}
        delivered[int(batch["group_id"][0]) % 2].append(prompt)
        assert collector.policy_version - int(batch["policy_version"].max()) <= 1
        collector.update_policy_weights_({"weight": torch.full((3,), float(published))})
    assert sorted(prompt for each in delivered.values() for prompt in each) == list(range(0, 16, 2))
    assert all(prompts == sorted(prompts) for prompts in delivered.values())
    assert collector.stats()["groups_filtered"] == {"odd prompt": 8}


def test_weights_act_in_all_of_the_next_batch(build):
    collector = build(partial(FakeEnv, 2, epochs=None), dialog_turns_per_batch=4, track_policy_version=True)
    for version in range(3):
        assert set(collector.next()["policy_version"].reshape(-1).tolist()) == {version}
        assert collector.update_policy_weights_({"weight": torch.full((3,), float(version))}) == version + 1
    assert [one["weight"].tolist() for one in collector.getattr_policy("engine.weights")] == [[2.0] * 3] * 2


# Failures ----------------------------------------------------------------------------------------------------------


def test_killed_workers_and_actors_are_replaced_and_no_turn_is_lost_or_twice(build):
    policy = partial(FakePolicy, delay_s=0.002)
    how = {"on_worker_failure": "restart", "max_restarts": 100, "restart_delay": 0.0}
    env = partial(FakeEnv, 4, prompts=30, repeats=4)
    collector = build(env, policy, sync_iter=False, groups_per_batch=1, **how)
    draw, found = random.Random(1), collections.Counter()
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        for number, batch in enumerate(collector):
            found.update(turns(batch))
            if number == 3:
                os.kill(actors()[0], signal.SIGKILL)
            elif number in (1, 8):
                kill_one(collector, draw)
    texts = [str(each.message) for each in warned]
    assert any(re.search(r"worker [01] on .*\(group [01], a Ray actor\).*was killed", text) for text in texts), texts
    assert any(re.search(r"worker [01] on .*\(group [01], a Ray actor\).*was lost", text) for text in texts), texts
    with LLMCollector(env, policy_factory=FakePolicy, groups_per_batch=1) as alone:
        wanted = collections.Counter(name for batch in alone for name in turns(batch))
    assert found == wanted, tally(found, wanted)


def test_a_killed_actor_is_an_error_that_names_it(build):
    collector = build(partial(FakeEnv, 2, epochs=None), num_collectors=1, dialog_turns_per_batch=2)
    collector.next()
    [victim] = actors()
    os.kill(victim, signal.SIGKILL)
    with pytest.raises(WorkerError, match=r"worker 0 on .*was lost: .*group 0, a Ray actor\) has"):
        for _ in collector:
            pass


PROGRAM = """
import ray
from functools import partial
from tests.collectors.llm.fakes import FakeEnv, FakePolicy
from rollwright.collectors.llm import RayLLMCollector

options = {"policy_factory": FakePolicy, "dialog_turns_per_batch": 2}
with RayLLMCollector(partial(FakeEnv, 2, epochs=None), **options) as collector:
    print(collector.stats()["workers"][0]["pid"], ray.get_runtime_context().get_job_id(), flush=True)
    for batch in collector:
        del batch
"""


def test_ctrl_c_ends_the_actors(cluster, programs, tmp_path):
    script = tmp_path / "collect.py"
    script.write_text(PROGRAM)
    program = programs.start(script, env={"PYTHONPATH": os.pathsep.join(sys.path), "RAY_ADDRESS": cluster})
    pid, job = program.stdout.readline().split()
    program.send_signal(signal.SIGINT)
    _, errors = program.communicate(timeout=patient(30.0))
    assert "KeyboardInterrupt" in errors
    assert gone([int(pid)], patient(10.0))
    assert wait_until(lambda: living(job) == [], 10.0)


# Buffers ------------------------------------------------------------------------------------------------------------


def test_actors_fill_a_ragged_buffer_in_an_actor(build):
    storage = partial(RaggedStorage, 1000)
    buffer = RayReplayBuffer(storage=storage, remote_config={"num_cpus": 0.1}, batch_size=4)
    try:
        collector = build(sync_iter=False, trajs_per_batch=2, replay_buffer=buffer)
        assert set(collector) == {None}
        wanted = of_one_process(trajs_per_batch=2)
        assert records_of(buffer[:]) == wanted
        assert len(buffer) == buffer.write_count == len(wanted)
        sample = buffer.sample()
        assert all(name in wanted for name in turns(sample))
    finally:
        buffer.shutdown()


def test_held_out_prompts_are_evaluated_in_an_actor(cluster):
    options = {"policy_factory": FakePolicy, "num_trajectories": None, "seed": 3}
    with Evaluator(ENV, backend="ray", backend_options={"remote_configs": {"num_cpus": 1}}, **options) as there:
        found = there.evaluate()
    with Evaluator(ENV, **options) as evaluator:
        wanted = evaluator.evaluate()
    assert found["eval/num_episodes"] == 48
    assert found["eval/returns"] == wanted["eval/returns"]


# What is wrong at construction --------------------------------------------------------------------------------------

WRONG = {
    "backend": ({"backend": "tcp"}, TypeError, "RayLLMCollector has no option 'backend': its class says"),
    "sync": ({"sync": True}, TypeError, "'sync': here it is called sync_iter"),
    "sync_iter": ({"sync_iter": 1}, TypeError, "sync_iter: expected True or False, got int: 1"),
    "unknown": ({"num_colectors": 2}, TypeError, "RayLLMCollector has .*Did you mean 'num_collectors'"),
    "count": ({"num_collectors": 0}, ValueError, "num_collectors: expected an integer of at least 1, got 0"),
    "CPUs": ({"num_cpus": 2, "remote_config": {"num_cpus": 1}}, ValueError, "num_cpus: got 2, and 1 in remote_config"),
    "GPUs": (
        {"num_gpus": 1, "remote_config": [{"num_gpus": 2}]},
        ValueError,
        "num_gpus: got 1, and 2 in remote_config",
    ),
    "config": ({"remote_config": 3, "num_cpus": 1}, TypeError, "remote_configs: expected a dictionary.*got int"),
    "twice": (
        {"backend_options": {"remote_configs": {}}},
        ValueError,
        "backend_options: got 'remote_configs', which is said by remote_config=",
    ),
    "order": (
        {"delivery_order": "data", "dialog_turns_per_batch": 2, "groups_per_batch": None},
        ValueError,
        "delivery_order='data': expected complete conversations, got turns",
    ),
    "groups": (
        {"keep_group": even, "trajs_per_batch": 1, "groups_per_batch": None},
        ValueError,
        "keep_group: expected groups_per_batch=",
    ),
    "lag": ({"max_policy_lag": -1}, ValueError, "max_policy_lag: expected an integer of at least 0, got -1"),
    "errors": ({"on_error": "ignore"}, ValueError, "on_error: expected 'raise' or 'drop' or 'mask', got 'ignore'"),
    "policy": ({"policy_factory": None}, TypeError, "policy: expected a policy, or policy_factory="),
    "env": ({"env": None}, TypeError, "env: expected an environment"),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_wrong_arguments_are_refused(monkeypatch, wrong):
    given, error, message = WRONG[wrong]
    monkeypatch.setattr("rollwright.collectors.workers.transports.transport_of", None)  # nothing is started
    with pytest.raises(error, match=message):
        RayLLMCollector(**{"env": ENV, "policy_factory": FakePolicy, "groups_per_batch": 1, **given})


def test_ray_that_is_not_installed_is_an_error_with_the_command(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "ray", None)
    with pytest.raises(MissingExtraError, match=r"backend='ray' needs .*pip install 'rollwright\[ray\]'"):
        RayLLMCollector(ENV, policy_factory=FakePolicy, groups_per_batch=1)
