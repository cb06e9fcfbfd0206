"""Pieces of messages move over a Gloo pair of their own, and messages stay in order."""

from __future__ import annotations

import os
import select
import socket
import subprocess
import sys
import threading
import time
from datetime import timedelta
from functools import partial

import numpy as np
import pytest
import torch
import torch.distributed as dist
from tests.patience import patient

from rollwright._processes.channel import ChannelClosed
from rollwright._processes.network.carriers import PairCarrier
from rollwright._processes.network.line import CarrierFailed, Line

LARGE = 20_000_000  # bytes; several chunks


def gloo(store, name, rank, timeout_s=20.0):
    options = dist.ProcessGroupGloo._Options()
    options._timeout = timedelta(seconds=timeout_s)
    options._devices = [dist.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
    return dist.ProcessGroupGloo(dist.PrefixStore(name, store), rank, 2, options)


def wait_until(condition, limit_s=20.0):
    until = time.monotonic() + patient(limit_s)
    while not condition():
        assert time.monotonic() < until
        time.sleep(1e-3)


@pytest.fixture
def carriers():
    """``carriers(*limits_s, **options)``: both ends of a pair."""
    made = []

    def build(*limits_s, connected=True, **options):
        store = dist.HashStore()
        pair = [
            PairCarrier(partial(gloo, store, "pair", rank), rank, min_bytes=1000, limit_s=limit_s, **options)
            for rank, limit_s in enumerate(limits_s or (30.0, 30.0))
        ]
        made.extend(pair)
        if connected:
            wait_until(lambda: all(each.is_connected for each in pair))
        return pair

    yield build
    for carrier in made:
        carrier.close()
    assert all(carrier.join(patient(5.0)) for carrier in made)


@pytest.fixture
def ends(carriers):
    server = socket.create_server(("127.0.0.1", 0))
    one = socket.create_connection(server.getsockname())
    other, _ = server.accept()
    server.close()
    lines = Line(one), Line(other)
    for line, carrier in zip(lines, carriers(), strict=True):
        line.use(carrier)
        line.carrier = carrier
    yield lines
    for line in lines:
        line.close()


class Receiver:
    """Keeps messages, with their pieces in memory of its own."""

    def __init__(self, line):
        self.line, self.found, self.memory = line, [], []

    def place(self, message, sizes):
        self.memory = [memoryview(bytearray(size)) for size in sizes]
        return self.memory

    def received(self, message, pieces):
        self.found.append((message, [bytes(piece) for piece in pieces]))

    def read(self):
        self.line.read(self.place, self.received)
        return self.found


def nothing(message, sizes):
    return []


def pump(sender, receiver, count):
    until = time.monotonic() + patient(20)
    while len(receiver.found) < count:
        assert time.monotonic() < until
        if sender.behind:
            sender.read(nothing, lambda message, pieces: None)
        wait_for(receiver.line, 0.01)
        receiver.read()
    return receiver.found


def wait_for(line, timeout_s):
    poll = select.poll()
    poll.register(line.fileno(), select.POLLIN)
    return bool(poll.poll(timeout_s * 1e3))


def test_pieces_of_all_sizes_arrive_and_messages_stay_in_order(ends):
    mine, theirs = ends
    rng, sent = np.random.default_rng(0), []
    for number in range(30):
        pieces = [rng.bytes(size) for size in (*rng.integers(0, 100_000, size=number % 4), *[LARGE] * (number == 7))]
        mine.post(("message", number), [memoryview(piece) for piece in pieces])
        sent.append((("message", number), pieces))
    assert pump(mine, Receiver(theirs), 30) == sent
    wait_until(lambda: not mine.behind)
    assert not mine.behind


def test_both_directions_move_at_once(ends):
    content = np.random.default_rng(1).bytes(LARGE)
    receivers = [Receiver(line) for line in ends]
    for line in ends:
        line.post("large", [memoryview(content)])

    def read():
        for receiver in receivers:
            receiver.read()
        return all(receiver.found for receiver in receivers)

    wait_until(read)
    assert all(receiver.found == [("large", [content])] for receiver in receivers)


def test_large_pieces_do_not_pass_through_the_socket(ends):
    mine, theirs = ends
    mine.post("large", [memoryview(bytes(LARGE)), memoryview(bytes(10))])
    receiver = Receiver(theirs)
    wait_until(receiver.read)
    assert theirs.carrier.num_bytes_done == LARGE
    wait_until(lambda: mine.carrier.num_bytes_done == LARGE)  # it counts a piece when the transport says so


def test_a_message_waits_for_its_pieces_without_work(carriers, ends):
    """While a piece is missing, later messages stay in the socket, and the descriptor is silent."""
    mine, theirs = ends
    held = threading.Event()
    real = mine.carrier.send
    mine.carrier.send = lambda pieces: threading.Thread(target=lambda: (held.wait(20), real(pieces))).start()
    mine.post("first", [memoryview(b"x" * 5000)])
    mine.post("second")
    receiver = Receiver(theirs)
    wait_until(lambda: receiver.memory or receiver.read())
    assert receiver.found == []
    # Before it is silent, the pair may report that it is connected.
    wait_until(lambda: not receiver.read() and not wait_for(theirs, 0.1))
    assert receiver.read() == []
    held.set()
    assert [message for message, _ in pump(mine, receiver, 2)] == ["first", "second"]


def test_pieces_go_by_the_socket_until_the_pair_is_there(carriers):
    one, other = (Line(end) for end in socket.socketpair())
    lone = PairCarrier(threading.Event().wait, 0, min_bytes=1)  # never connected
    one.use(lone)
    one.post("early", [memoryview(b"abc")])
    assert pump(one, Receiver(other), 1) == [("early", [b"abc"])]
    one.close()
    other.close()


def test_a_pair_that_cannot_be_connected_says_why(carriers):
    def connect():
        raise RuntimeError("[/a/file.cc:12] no such interface. This is typically caused by you")

    carrier = PairCarrier(connect, 0)
    assert select.select([carrier.fileno()], [], [], patient(5.0))[0]
    with pytest.raises(CarrierFailed, match=r"^gloo: the pair could not be connected: no such interface$"):
        carrier.read()


def test_a_silent_pair_is_an_error_at_its_limit_and_both_ends_know(carriers):
    mine, theirs = carriers(0.3, 30.0)
    theirs.receive([memoryview(bytearray(5000))])
    mine.receive([memoryview(bytearray(5000))])  # what is never sent
    began = time.monotonic()
    with pytest.raises(CarrierFailed, match=r"gloo: .*300ms"):
        wait_until(mine.read)
    assert time.monotonic() - began < patient(2.0)
    with pytest.raises(CarrierFailed, match=r"(closed|reset) by peer|closure"):
        wait_until(theirs.read)


def test_a_send_waits_for_a_receiver_as_long_as_it_takes(carriers):
    mine, theirs = carriers(0.2, 0.2)
    mine.send([memoryview(b"y" * LARGE)])
    time.sleep(0.6)
    memory = memoryview(bytearray(LARGE))
    theirs.receive([memory])
    wait_until(lambda: not theirs.is_receiving)
    theirs.read()
    assert bytes(memory[-10:]) == b"y" * 10


def test_memory_that_is_taken_away_is_not_written(ends):
    mine, theirs = ends
    receiver = Receiver(theirs)
    mine.post("large", [memoryview(b"\x07" * (10 * LARGE))])
    while not receiver.memory:
        receiver.read()
    theirs.divert(lambda message, number: message == "large")
    [memory] = receiver.memory
    written = bytes(memory).count(7)
    assert written < len(memory)
    mine.post("next")
    assert [message for message, _ in pump(mine, receiver, 2)] == ["large", "next"]
    assert bytes(memory).count(7) == written


def test_memory_that_is_taken_away_of_a_stuck_transfer_ends_the_pair(ends):
    mine, theirs = ends
    mine.carrier.send = lambda pieces: None
    mine.post("large", [memoryview(b"\x07" * 5000)])
    receiver = Receiver(theirs)
    while not receiver.memory:
        receiver.read()
    wait_until(lambda: theirs.carrier._in.num_begun)
    theirs.divert(lambda message, number: True)
    with pytest.raises(CarrierFailed, match="taken away"):
        receiver.read()


def test_closing_ends_what_is_on_its_way_at_once(carriers):
    mine, theirs = carriers()
    for each in (mine, theirs):  # both wait for what nobody sends
        each.receive([memoryview(bytearray(100))])
    wait_until(lambda: mine._in.num_begun and theirs._in.num_begun)
    began = time.monotonic()
    mine.close()
    assert mine.join(patient(1.0))
    with pytest.raises(CarrierFailed):
        wait_until(theirs.read)
    assert time.monotonic() - began < patient(1.0)


@pytest.fixture
def started():
    """``subprocess.Popen``, which ends with the test."""
    processes = []

    def start(*args, **options):
        processes.append(subprocess.Popen(*args, **options))
        return processes[-1]

    yield start
    for process in processes:
        process.kill()
        process.communicate()


CHILD = """
import os, sys, time
from functools import partial
import torch.distributed as dist
from tests.processes.network.test_pair import gloo
from rollwright._processes.network.carriers import PairCarrier
store = dist.TCPStore("127.0.0.1", int(sys.argv[1]), None, False)
carrier = PairCarrier(partial(gloo, store, "pair", 1), 1)
carrier.receive([memoryview(bytearray(100))])
print("there", flush=True)
if sys.argv[2] == "end":  # with a thread in the middle of an operation
    while not carrier.is_connected:
        time.sleep(0.01)
    sys.exit(0)
time.sleep(100)
"""


@pytest.mark.parametrize("how", ["kill", "end"])
def test_a_process_that_ends_is_an_error_soon_and_ends_quietly(carriers, started, how):
    store = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    mine = PairCarrier(partial(gloo, store, "pair", 0), 0)
    child = started(
        [sys.executable, "-c", CHILD, str(store.port), how],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(["src", "."])},
    )
    assert child.stdout.readline() == "there\n"
    wait_until(lambda: mine.is_connected)
    mine.receive([memoryview(bytearray(100))])
    began = time.monotonic()
    if how == "kill":
        child.kill()
    with pytest.raises(CarrierFailed, match=r"gloo: .*(closed|reset) by peer"):
        wait_until(mine.read)
    assert time.monotonic() - began < patient(2.0)
    _, errors = child.communicate(timeout=patient(20))
    assert child.returncode == (-9 if how == "kill" else 0), errors
    assert "terminate" not in errors
    mine.close()
    assert mine.join(patient(2.0))


def test_a_line_whose_other_end_is_gone_is_an_error_while_pieces_are_missing(ends):
    mine, theirs = ends
    mine.carrier.send = lambda pieces: None
    mine.post("large", [memoryview(bytes(5000))])
    receiver = Receiver(theirs)
    while not receiver.memory:
        receiver.read()
    mine.close()
    with pytest.raises((ChannelClosed, CarrierFailed)):
        wait_until(receiver.read)


def test_a_forked_child_leaves_the_pair_to_its_parent(ends):
    mine, theirs = ends
    pid = os.fork()
    if not pid:
        mine.close()
        theirs.close()
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0
    mine.post("still there", [memoryview(b"z" * LARGE)])
    assert pump(mine, Receiver(theirs), 1) == [("still there", [b"z" * LARGE])]


def test_what_is_staged_on_a_device_arrives_too(carriers):
    """As for NCCL, with the processor as the device."""
    mine, theirs = carriers(staging=torch.device("cpu"))
    memory = memoryview(bytearray(LARGE))
    mine.send([memoryview(b"s" * LARGE)])
    theirs.receive([memory])
    wait_until(lambda: not theirs.is_receiving)
    assert bytes(memory) == b"s" * LARGE
