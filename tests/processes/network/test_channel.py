"""NetworkChannel: messages and raw memory arrive whole and in order, however they are cut."""

from __future__ import annotations

import os
import socket

import numpy as np
import pytest

from rollwright._processes.channel import ChannelClosed
from rollwright._processes.network.channel import Keys, NetworkChannel

KEYS = Keys(b"sent by one" * 3, b"sent by other" * 3)


@pytest.fixture(params=[None, KEYS], ids=["plain", "with codes"])
def ends(request):
    server = socket.create_server(("127.0.0.1", 0))
    one = socket.create_connection(server.getsockname())
    other, _ = server.accept()
    server.close()
    keys = request.param
    lines = NetworkChannel(one, keys), NetworkChannel(other, None if keys is None else Keys(*reversed(keys)))
    yield lines
    for line in lines:
        line.close()


class Receiver:
    """Keeps messages, with their pieces in memory of its own."""

    def __init__(self, line):
        self.line, self.found, self.placed = line, [], []

    def place(self, message, sizes):
        self.placed.append(message)
        return [memoryview(bytearray(size)) for size in sizes]

    def received(self, message, pieces):
        self.found.append((message, [bytes(piece) for piece in pieces]))

    def read(self):
        self.line.read(self.place, self.received)
        return self.found


def nothing(message, sizes):
    return []


def pump(sender, receiver, count):
    while len(receiver.found) < count:
        if sender.behind:
            sender.read(nothing, lambda message, pieces: None)
        receiver.read()
    return receiver.found


def again_and_again(call):
    for _ in range(3):
        call()


def test_messages_and_pieces_arrive_in_order(ends):
    mine, theirs = ends
    rng = np.random.default_rng(0)
    sent = []
    for number in range(40):
        pieces = [rng.bytes(size) for size in rng.integers(0, 300_000, size=number % 5)]
        mine.post(("message", number), [memoryview(piece) for piece in pieces])
        sent.append((("message", number), pieces))
    assert mine.behind  # more than the system takes
    assert pump(mine, Receiver(theirs), 40) == sent
    assert not mine.behind
    assert not mine.behind


def test_a_message_of_many_pieces_arrives(ends):
    mine, theirs = ends
    pieces = [bytes([i % 256]) * (i % 7) for i in range(3000)]
    mine.post("many", [memoryview(piece) for piece in pieces])
    assert pump(mine, Receiver(theirs), 1) == [("many", pieces)]


def test_what_has_arrived_is_read_after_a_hang_up_and_then_it_is_an_error(ends):
    mine, theirs = ends
    mine.post("last words", [memoryview(b"abc")])
    mine.close()
    receiver = Receiver(theirs)
    with pytest.raises(ChannelClosed):
        again_and_again(receiver.read)
    assert receiver.found == [("last words", [b"abc"])]
    with pytest.raises(ChannelClosed):  # the first may still find room
        again_and_again(lambda: theirs.post("too late", [memoryview(bytes(1 << 22))]))


def test_a_forked_child_neither_uses_nor_keeps_the_connection(ends):
    mine, theirs = ends
    reading, writing = os.pipe()
    pid = os.fork()
    if not pid:
        os.write(writing, bytes([mine.fileno() == theirs.fileno() == -1]))
        os._exit(0)
    assert os.read(reading, 1) == b"\x01"
    os.waitpid(pid, 0)
    mine.post("still there", [memoryview(b"abc")])
    assert pump(mine, Receiver(theirs), 1) == [("still there", [b"abc"])]
    for fd in (reading, writing):
        os.close(fd)


def test_a_place_that_is_taken_away_is_not_written(ends):
    mine, theirs = ends
    content, memory, other = bytes([7]) * (1 << 24), bytearray(1 << 24), bytearray(5)
    mine.post("large", [memoryview(b""), memoryview(content), memoryview(content[:5])])
    found = []

    def read():
        places = [memoryview(bytearray()), memoryview(memory), memoryview(other)]
        theirs.read(lambda message, sizes: places, lambda message, pieces: found.append(message))

    while not any(memory[:1]):
        read()
    theirs.divert(lambda message, number: message == "large" and number == 1)
    written = memory.count(7)
    assert 0 < written < len(memory)
    mine.post("next")
    while found != ["large", "next"]:
        mine.read(nothing, lambda message, pieces: None)
        read()
    assert memory.count(7) == written
    assert other == content[:5]
