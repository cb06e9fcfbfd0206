"""Evaluator in an actor of a Ray cluster, and RayEvalWorker."""

from __future__ import annotations

import os
import signal
import time

import pytest
import torch
from tensordict.nn import TensorDictModule
from tests.patience import patient
from tests.ray_cluster import attached
from torch import nn

from rollwright.collectors import Evaluator, RayEvalWorker
from rollwright.envs import GymEnv
from rollwright.errors import MissingExtraError, WorkerError

ray = pytest.importorskip("ray")
pytestmark = [pytest.mark.ray, pytest.mark.timeout(120)]


@pytest.fixture(scope="module")
def cluster():
    with attached() as address:
        yield address


def pendulum():
    return GymEnv("Pendulum-v1")


def policy(seed=0):
    torch.manual_seed(seed)
    return TensorDictModule(nn.Linear(3, 1), in_keys=["observation"], out_keys=["action"])


def test_an_actor_evaluates_as_a_process_does_and_a_killed_one_is_an_error(cluster):
    options = {"num_trajectories": 2, "max_steps": 20, "seed": 3}
    with Evaluator(pendulum, policy(), **options) as local:
        expected = [local.evaluate(), local.evaluate(policy(1))]
    with Evaluator(pendulum, policy(), backend="ray", **options) as evaluator:
        found = [evaluator.evaluate(), evaluator.evaluate(policy(1))]
        assert [each["eval/returns"] for each in found] == [each["eval/returns"] for each in expected]
        with pytest.raises(ValueError, match="policy"):
            evaluator.evaluate({"nothing": torch.zeros(3)})
        assert evaluator.evaluate()["eval/returns"] == expected[0]["eval/returns"]
        killed = time.monotonic()
        os.kill(evaluator.stats()["pid"], signal.SIGKILL)
        with pytest.raises(WorkerError, match=r"Evaluator's Ray actor .*SIGKILL.*Make a new Evaluator"):
            evaluator.evaluate()
        assert time.monotonic() - killed < patient(3.0)
        evaluator.shutdown(raise_on_error=False)
    assert ray.is_initialized()


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"backend_options": {"host": 1}}, TypeError, "has no option 'host'"),
        ({"backend_options": {"remote_configs": [{}]}}, TypeError, "remote_configs: expected a dictionary"),
        ({"backend_options": {"remote_configs": {"num_gpus": 9}}}, ValueError, "group 0 asks for CPU 1, GPU 9"),
        ({"start_method": "fork"}, ValueError, "start_method='fork' is for processes"),
        ({"backend": "process", "backend_options": {"address": "a:1"}}, ValueError, "backend='process' has none"),
    ],
)
def test_wrong_options_are_refused(cluster, options, error, message):
    with pytest.raises(error, match=message):
        Evaluator(pendulum, policy(), **{"backend": "ray", **options})


def test_ray_that_is_not_installed_is_an_error_with_the_command(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "ray", None)
    with pytest.raises(MissingExtraError, match=r"pip install 'rollwright\[ray\]'"):
        Evaluator(pendulum, policy(), backend="ray")


def test_rollouts_on_request_with_the_weights_that_were_submitted(cluster):
    with pytest.raises(TypeError, match="policy_maker: expected a callable, got int"):
        RayEvalWorker(None, pendulum, 3)
    worker = RayEvalWorker(None, pendulum, lambda env: policy(), num_gpus=0, name="judge")
    try:
        assert worker.poll() is None
        worker.submit(policy(1), max_steps=5)
        found = worker.poll(timeout=patient(30.0))
        assert found["reward"] < 0
        assert found["frames"] is None
        assert worker.poll() is None
        same = RayEvalWorker.from_name("judge")
        same.submit({"nothing": torch.zeros(1)}, max_steps=5)
        with pytest.raises(ValueError, match="nothing"):
            same.poll(timeout=patient(30.0))
    finally:
        worker.shutdown()
        worker.shutdown()
    with pytest.raises(RuntimeError, match="was shut down"):
        worker.submit(policy(), max_steps=5)
    assert ray.is_initialized()
