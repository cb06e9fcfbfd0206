"""A replay service in a Ray actor, on a real cluster of this machine."""

from __future__ import annotations

import os
import signal
from functools import partial

import pytest
import torch
from tensordict import TensorDict
from tests.ray_cluster import attached

from rollwright.data import LazyTensorStorage, RayReplayBuffer, ReplayBuffer, TensorDictReplayBuffer
from rollwright.errors import WorkerError

ray = pytest.importorskip("ray")
pytestmark = [pytest.mark.ray, pytest.mark.timeout(120)]


@pytest.fixture(scope="module")
def cluster():
    with attached() as address:
        yield address


@pytest.fixture
def serve(cluster):
    made = []

    def build(*, service=None, **options):
        options = {"storage": partial(LazyTensorStorage, 1000), **options}
        config = {"num_cpus": 0.1}
        made.append(RayReplayBuffer(remote_config=config, service_backend_options=service, **options))
        return made[-1]

    yield build
    for buffer in made:
        buffer.shutdown()


def frames(first, count):
    ids = torch.arange(first, first + count)
    return TensorDict({"obs": ids.float().unsqueeze(-1).expand(count, 30), ("next", "id"): ids}, [count])


def test_an_actor_holds_the_buffer_and_tasks_write_to_it(serve):
    buffer = serve(replay_buffer_cls=TensorDictReplayBuffer, batch_size=8, prefetch=2)
    buffer.extend(frames(0, 20))

    def write(client, first):
        client.extend(frames(first, 10))
        client.shutdown()

    remote = ray.remote(num_cpus=0.1)(write)
    client = buffer.client()
    ray.get(remote.remote(client, 20), timeout=100)
    assert sorted(buffer["next", "id"].tolist()) == list(range(30))
    assert buffer.sample()["index"].shape == (8,)
    assert isinstance(buffer, ReplayBuffer)
    buffer.shutdown()
    assert ray.is_initialized()  # the cluster is the program's


@pytest.mark.slow
def test_a_killed_actor_is_an_error_with_what_is_lost_or_comes_back(serve, tmp_path):
    plain, saved = serve(), serve(service={"path": tmp_path / "dumps", "dump_every": 10})
    for buffer in (plain, saved):
        for first in range(0, 15, 5):
            buffer.extend(frames(first, 5))
        os.kill(buffer.host.pid, signal.SIGKILL)
    with pytest.raises(WorkerError, match="was killed with its actor: the 15 elements that it held are lost"):
        len(plain)
    with pytest.warns(RuntimeWarning, match="5 of the 15 elements that were written are lost"):
        assert len(saved) == 10


def test_bad_options(cluster):
    with pytest.raises(TypeError, match="remote_config"):
        RayReplayBuffer(remote_config=3)
    with pytest.raises(ValueError, match="got 'process'"):
        RayReplayBuffer(service_backend="process")
    with pytest.raises(ValueError, match="remote_config: the actor asks for CPU 1000"):
        ReplayBuffer(service_backend="ray", service_backend_options={"remote_config": {"num_cpus": 1000}})
