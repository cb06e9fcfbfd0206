"""``rollwright join``: groups that are there early or late, and hosts that are not let in or give up."""

from __future__ import annotations

import re
import signal
import socket
import threading
import time

import pytest
from tests.collectors.workers.envs import VERSION, gain, makers
from tests.collectors.workers.processes import gone, wait_until
from tests.patience import patient

from rollwright._processes.network.handshake import SECRET, HandshakeRefused, connect_to
from rollwright.collectors.workers.remote.transport import Manual, RemoteTransport
from rollwright.errors import WorkerError

KNOWN = "a secret of tests, long enough"


@pytest.fixture
def address():
    """Where a collector may listen."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        return f"127.0.0.1:{taken.getsockname()[1]}"


@pytest.fixture
def join(programs, address):
    """``join(secret=..., ...)``: the command, started."""

    def start(*options, secret=KNOWN, at=None):
        command = ("-m", "rollwright", "join", at or address, *options)
        return programs.start(*command, env={SECRET: secret})

    return start


@pytest.fixture
def collect(make, address):
    """``collect(kind, num_workers, **options)``: a collector that others join."""

    def build(kind, num_workers, **options):
        given = {"launcher": "join", "address": address, "secret": KNOWN}
        options = {"frames_per_batch": 20 * num_workers, "backend": "tcp", "backend_options": given, **options}
        return make(kind, makers(num_workers), gain(1.0), start_timeout=patient(30), **options)

    return build


def said(program):
    """What it wrote to standard error until its end."""
    return program.communicate(patient(20))[1]


def test_hosts_that_wait_before_the_collector_is_there_are_all_let_in(collect, join, monkeypatch):
    """Even if it has sent nothing to the second group yet when both knock."""
    early = []
    connect = RemoteTransport.connect

    def connect_late(self, spec):
        connection = connect(self, spec)
        if spec.index == 0:
            early.extend(join() for _ in range(2))
            assert wait_until(lambda: len(self._early) == 1 or any(program.poll() is not None for program in early))
        return connection

    monkeypatch.setattr(RemoteTransport, "connect", connect_late)
    collector = collect("sync", 2)
    assert collector.next().shape == (2, 20)
    collector.shutdown()
    for program in early:
        assert "the collector has ended" in said(program)
        assert program.returncode == 0


def test_a_host_that_gives_up_before_its_group_is_wanted_is_forgotten(collect, join, monkeypatch):
    connect = RemoteTransport.connect

    def connect_late(self, spec):
        connection = connect(self, spec)
        if spec.index == 0:
            first = join()
            assert wait_until(lambda: self._connections[0].is_joined)
            impatient = join()
            assert wait_until(lambda: self._early)
            impatient.kill()
            assert wait_until(lambda: not self._early)
            assert first.poll() is None
            assert self.refused[-1] == "127.0.0.1 has hung up"
            join()
        return connection

    monkeypatch.setattr(RemoteTransport, "connect", connect_late)
    assert collect("sync", 2).next().shape == (2, 20)


def test_weights_that_were_published_before_a_host_joins_reach_it(collect, join):
    first = join()
    collector = collect("sync", 1, on_worker_failure="restart", restart_delay=0.0, track_policy_version=True)
    collector.next()
    for gain_of in (2.0, 3.0):
        collector.update_policy_weights_(gain(gain_of))
    batch = collector.next()
    assert batch[VERSION].unique().tolist() == [2]
    first.kill()
    wait_until(lambda: first.poll() is not None)
    join()
    with pytest.warns(RuntimeWarning, match="It is replaced"):
        batch = collector.next()
    assert batch[VERSION].unique().tolist() == [2]
    collector.update_policy_weights_(gain(4.0))
    assert collector.next()[VERSION].unique().tolist() == [3]


def test_a_host_may_join_in_place_of_a_lost_one_before_the_program_looks(collect, join, monkeypatch):
    heard, admit = threading.Event(), RemoteTransport._admit
    monkeypatch.setattr(RemoteTransport, "_admit", lambda *args: (admit(*args), heard.set()))
    first = join()
    collector = collect("sync", 1, on_worker_failure="restart", restart_delay=0.0)
    collector.next()
    heard.clear()
    first.kill()
    first.wait(patient(20.0))  # until then its connection may be open
    second = join()
    assert heard.wait(patient(20.0))
    assert second.poll() is None
    with pytest.warns(RuntimeWarning, match="It is replaced"):
        assert collector.next().shape == (1, 20)
    assert second.poll() is None
    assert collector.stats()["restarts"] == 1


# What is not let in, or gives up ------------------------------------------------------------------------------


def test_another_secret_is_refused_on_both_sides(collect, join):
    join()
    collector = collect("sync", 1)
    other = join(secret="a secret of somebody else, as long")
    assert "has another secret. Pass the secret that it was started with" in said(other)
    assert other.returncode == 2
    assert collector.next().shape == (1, 20)


def test_one_too_many_is_sent_away(collect, join):
    join()
    collector = collect("sync", 1)
    other = join("--timeout", "1")
    assert "has refused: all of its groups have been joined" in said(other)
    assert other.returncode == 2
    assert collector.next().shape == (1, 20)


def test_one_who_finds_no_place_asks_again_while_the_collector_sees_that_a_host_is_lost(collect, join, monkeypatch):
    refused, drop = threading.Event(), RemoteTransport._drop
    monkeypatch.setattr(RemoteTransport, "_drop", lambda *args: (drop(*args), refused.set()))
    first = join()
    collector = collect("sync", 1, on_worker_failure="restart", restart_delay=0.0)
    collector.next()
    second = join()
    assert refused.wait(patient(20.0))
    first.kill()
    with pytest.warns(RuntimeWarning, match="It is replaced"):
        assert collector.next().shape == (1, 20)
    assert second.poll() is None


WRONG = {
    "nothing listens": (("--timeout", "1"), None, "nothing listens at 127.0.0.1:.* Start the collector first"),
    "no port": ((), "127.0.0.1", "HOST:PORT: expected"),
    "no such host": ((), "no.such.host.invalid:29400", "no.such.host.invalid:29400 cannot be reached"),
}


@pytest.mark.parametrize(("options", "at", "message"), WRONG.values(), ids=WRONG)
def test_a_wrong_address_is_an_error_of_one_line(join, options, at, message):
    program = join(*options, at=at)
    errors = said(program)
    assert program.returncode == 2
    *before, last = errors.splitlines()
    assert all(line.startswith("waiting for the collector at") for line in before)
    assert len(before) <= 1
    assert re.search(message, last)


def test_what_is_no_collector_is_named(join):
    with socket.create_server(("127.0.0.1", 0)) as other:
        program = join(at=f"127.0.0.1:{other.getsockname()[1]}")
        end, _ = other.accept()
        end.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n" * 3)
        assert "is no collector of rollwright" in said(program)
        end.close()


def test_ctrl_c_ends_a_host_that_waits_for_an_answer(join):
    with socket.create_server(("127.0.0.1", 0)) as silent:
        program = join(at=f"127.0.0.1:{silent.getsockname()[1]}")
        end, _ = silent.accept()
        with end:
            program.send_signal(signal.SIGINT)
            assert "Traceback" not in said(program)
            assert program.returncode == 130


def test_ctrl_c_ends_a_host_that_serves_and_the_collector_says_which(collect, join):
    program = join("--name", "elsewhere")
    collector = collect("async", 1)
    collector.next()
    pids = [worker["pid"] for worker in collector.stats()["workers"]]
    program.send_signal(signal.SIGINT)
    assert "Traceback" not in said(program)
    assert program.returncode == 130
    with pytest.raises(WorkerError, match="worker 0 on elsewhere was lost: elsewhere has hung up"):
        for _ in collector:
            pass
    assert gone(pids)


def test_the_wait_for_hosts_names_who_was_refused_and_why():
    transport = RemoteTransport(1, 1, Manual(), secret=KNOWN.encode(), start_timeout=0.2)
    try:
        link = transport._start(0)
        with pytest.raises(HandshakeRefused, match="another secret"):
            connect_to(transport.address, b"a secret of somebody else", {}, patient(20.0))
        assert wait_until(lambda: transport.tend() or link.lost)
        assert "nothing joined within start_timeout=0.2 s (refused: 127.0.0.1 it does not know" in link._failure.text
    finally:
        transport.close()


def test_a_connection_that_opens_and_closes_leaves_the_learner_at_rest():
    transport = RemoteTransport(1, 1, Manual(), secret=KNOWN.encode())
    try:
        for _ in range(10):
            socket.create_connection(transport.address).close()
        assert wait_until(lambda: len(transport.refused) == 10)
        used = time.process_time()
        threading.Event().wait(1.0)
        assert time.process_time() - used < 0.15
    finally:
        transport.close()
