"""Somebody between two machines who changes, repeats or cuts what they send: an error, and nothing of it is used."""

from __future__ import annotations

import contextlib
import re
import threading

import pytest
import torch
from tests.collectors.workers.envs import gain, makers
from tests.collectors.workers.remote.proxy import Proxy
from tests.variants import in_turn

from rollwright._processes.network import handshake
from rollwright.collectors.workers.remote.transport import LocalLauncher
from rollwright.data import LazyTensorStorage, ReplayBuffer
from rollwright.errors import WorkerError

FAULTS = {
    "changed": lambda content: bytes([content[0] ^ 1]) + content[1:],
    "repeated": lambda content: content + content,
    "cut": lambda content: content[1:],
}


class Meddling:
    """Alters once, when it was asked to, the next that goes one way."""

    def __init__(self, fault, is_back):
        self._fault, self._is_back = FAULTS[fault], is_back
        self.asked, self.done = threading.Event(), threading.Event()

    def __call__(self, content, is_back):
        if is_back is not self._is_back or not self.asked.is_set() or self.done.is_set():
            return content
        self.done.set()
        return self._fault(content)


def for_ever(call):
    while True:
        call()


@pytest.fixture
def buffer():
    made = ReplayBuffer(storage=lambda: LazyTensorStorage(100), batch_size=4, service_backend="process")
    yield made
    made.shutdown()


@pytest.fixture
def distant(monkeypatch):
    """This machine counts as two."""
    monkeypatch.setattr(handshake, "_is_local", lambda end: False)


@pytest.mark.parametrize(("fault", "is_back"), in_turn(FAULTS, [False, True]))
def test_a_host_whose_messages_are_touched_is_lost_with_its_name(make, distant, monkeypatch, fault, is_back):
    alter, launch = Meddling(fault, is_back), LocalLauncher.launch
    with contextlib.ExitStack() as stack:

        def launch_behind_a_proxy(self, group, address, secret):
            proxy = stack.enter_context(Proxy(address))
            proxy.alter = alter
            return launch(self, group, proxy.address, secret)

        monkeypatch.setattr(LocalLauncher, "launch", launch_behind_a_proxy)
        collector = make("sync", makers(2), gain(), frames_per_batch=40, backend="tcp")
        expected = collector.next()
        assert torch.isfinite(expected["observation"]).all()
        alter.asked.set()
        with pytest.raises(WorkerError, match=r"\(group \d\)") as raised:
            for_ever(collector.next)
        if not is_back:
            assert re.search(r"what has arrived from 127\.0\.0\.1:\d+ is not what was sent there", str(raised.value))
        collector.shutdown(raise_on_error=False)


@pytest.mark.parametrize("is_back", [False, True], ids=["to the service", "from the service"])
@pytest.mark.parametrize("fault", FAULTS)
def test_a_replay_service_whose_messages_are_touched_raises(distant, buffer, fault, is_back):
    buffer.extend(torch.arange(100))
    alter = Meddling(fault, is_back)
    with Proxy(buffer.address) as proxy:
        proxy.alter = alter
        client = buffer.client(address=proxy.address)
        assert client.sample().shape == (4,)
        alter.asked.set()
        for _ in range(2):  # for good
            with pytest.raises(WorkerError, match=r"what has arrived from 127\.0\.0\.1:\d+ is not what was sent"):
                for_ever(client.sample)
        client.shutdown()
    assert len(buffer) == 100
