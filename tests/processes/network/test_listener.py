"""Listener: a true host is let in, whoever else connects, and nothing is done where nobody speaks."""

from __future__ import annotations

import contextlib
import os
import resource
import select
import socket
import threading
import time

import pytest

from rollwright._processes.network import handshake
from rollwright._processes.network.handshake import _MOST_PENDING, HandshakeRefused, Listener, connect_to

SECRET = b"only the two of us know this"
LIMIT_S = 60.0


class Served:
    """A listener, read in a thread whenever it is ready, and twice a second."""

    def __init__(self):
        self.let_in, self.refused, self.num_reads = [], [], 0
        self.listener = Listener(("127.0.0.1", 0), SECRET, self._admit, lambda peer, why: self.refused.append(why))
        self.address = self.listener.address
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def _admit(self, greeting, about):
        self.let_in.append((about, greeting.accept()))

    def _serve(self):
        poll = select.poll()
        poll.register(self.listener.fileno(), select.POLLIN)
        while not self._over.is_set():
            poll.poll(500)
            self.num_reads += 1
            self.listener.read()

    def close(self):
        self._over.set()
        self._thread.join(LIMIT_S)
        self.listener.close()
        for _, end in self.let_in:
            end.close()


@pytest.fixture
def served():
    made = Served()
    yield made
    made.close()


@pytest.fixture
def dial(served):
    """``dial(count)``: connections that say nothing."""
    ends = []

    def connect(count):
        ends.extend(socket.create_connection(served.address) for _ in range(count))
        return ends

    yield connect
    for end in ends:
        end.close()


def eventually(condition):
    until, pause = time.monotonic() + LIMIT_S, threading.Event()
    while not condition() and time.monotonic() < until:
        pause.wait(0.01)
    return condition()


def test_200_hosts_that_join_at_once_over_a_delay_are_all_let_in(served, monkeypatch):
    exactly, pause = handshake._exactly, threading.Event()
    monkeypatch.setattr(handshake, "_exactly", lambda *args: (pause.wait(0.1), exactly(*args))[1])
    joined, failed, together = [], [], threading.Barrier(200)

    def join():
        together.wait(LIMIT_S)
        try:
            joined.append(connect_to(served.address, SECRET, {}, LIMIT_S))
        except (HandshakeRefused, OSError) as error:
            failed.append(error)

    threads = [threading.Thread(target=join) for _ in range(200)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LIMIT_S)
    for end in joined:
        end.close()
    assert not failed
    assert len(joined) == 200
    assert eventually(lambda: len(served.let_in) == 200)


@pytest.mark.parametrize("said", [b"", b"\x00\x00", b"GET / HTTP/1.1\r\n\r\n"], ids=["nothing", "half", "garbage"])
def test_connections_that_open_and_close_are_forgotten(served, said):
    for _ in range(10):
        with socket.create_connection(served.address) as end:
            end.sendall(said)
    assert eventually(lambda: len(served.refused) == 10)
    before = served.num_reads
    threading.Event().wait(1.1)
    assert served.num_reads - before <= 4  # twice a second, and what was in progress


def test_who_is_silent_does_not_lock_out_a_true_host(served, dial):
    dial(_MOST_PENDING + 20)
    before = served.num_reads
    end = connect_to(served.address, SECRET, {}, LIMIT_S)
    assert eventually(lambda: len(served.let_in) == 1)  # noted behind the answer
    assert "said nothing while others waited" in served.refused
    assert served.num_reads - before < 4 * _MOST_PENDING  # it does not spin over those that wait
    end.close()


def test_silent_connections_stay_while_there_is_room(served, dial):
    dial(10)
    end = connect_to(served.address, SECRET, {}, LIMIT_S)
    assert not served.refused
    end.close()


def test_a_process_with_too_many_open_files_accepts_again_when_there_is_room(served):
    end = socket.socket()
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    taken = os.dup(0)
    resource.setrlimit(resource.RLIMIT_NOFILE, (taken + 1, limits[1]))
    spare = []
    try:
        with contextlib.suppress(OSError):
            while True:
                spare.append(os.dup(0))
        end.connect(served.address)
        assert eventually(lambda: served.refused)
        assert "raise ulimit -n" in served.refused[0]
        before = served.num_reads
        threading.Event().wait(0.5)
        assert served.num_reads - before < 5  # it does not spin
    finally:
        for fd in (taken, *spare):
            os.close(fd)
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert end.recv(100)  # it is greeted
    end.close()
