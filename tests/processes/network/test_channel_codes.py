"""NetworkChannel with keys: what somebody between both ends has touched is an error, before anything is made of it."""

from __future__ import annotations

import pickle
import re
import socket

import pytest

from rollwright._processes.channel import ChannelClosed
from rollwright._processes.network import channel as channel_module
from rollwright._processes.network.channel import Keys, MessageForged, NetworkChannel

KEYS = Keys(b"sent by one" * 3, b"sent by other" * 3)
THEIRS = Keys(*reversed(KEYS))
PIECES = [b"abc", b"", b"defgh"]


@pytest.fixture
def line():
    """``line(keys)``: a line, and the socket that it is connected to."""
    made = []

    def connect(keys=KEYS):
        server = socket.create_server(("127.0.0.1", 0))
        raw = socket.create_connection(server.getsockname())
        made.append(raw)
        made.append(NetworkChannel(server.accept()[0], keys))
        server.close()
        return made[-1], raw

    yield connect
    for each in made:
        each.close()


@pytest.fixture
def sent(line):
    """What three messages are on the wire."""
    mine, wire = line()
    found = []
    for number in range(3):
        mine.post(("message", number), [memoryview(piece) for piece in PIECES])
        assert not mine.behind
        found.append(wire.recv(1 << 16))
    return found


@pytest.fixture
def taken(line, monkeypatch):
    """``taken(content, keys)``: what the other end makes of bytes: the messages, and the error."""
    made_of = []
    monkeypatch.setattr(
        channel_module.pickle, "loads", lambda body: (made_of.append(body), pickle._loads(bytes(body)))[1]
    )

    def take(content, keys=THEIRS):
        theirs, wire = line(keys)
        found = []
        wire.sendall(content)
        wire.shutdown(socket.SHUT_WR)
        made_of.clear()
        error = None
        while error is None:
            try:
                theirs.read(
                    lambda message, sizes: [memoryview(bytearray(size)) for size in sizes],
                    lambda message, pieces: found.append((*message, [bytes(piece) for piece in pieces])),
                )
            except (ChannelClosed, MessageForged) as failed:
                error = failed
        assert all(pickle._loads(bytes(body))[0] == "message" for body in made_of)
        assert all(pieces == PIECES for *_, pieces in found)
        theirs.close()
        return [number for _, number, _ in found], error

    return take


def test_what_nobody_touched_arrives(sent, taken):
    numbers, error = taken(b"".join(sent))
    assert numbers == [0, 1, 2]
    assert isinstance(error, ChannelClosed)


def test_one_bit_that_differs_anywhere_is_an_error_that_names_the_other_end(sent, taken):
    content = b"".join(sent[:2])
    for place in range(len(sent[0]), len(content)):
        changed = bytearray(content)
        changed[place] ^= 1 << place % 8
        numbers, error = taken(changed)
        assert numbers == [0], place
        assert isinstance(error, MessageForged)
        assert re.match(r"what has arrived from 127\.0\.0\.1:\d+ is not what was sent there", str(error))


@pytest.mark.parametrize(
    ("order", "arrive"),
    [([0, 0], [0]), ([0, 2], [0]), ([1, 0], []), ([0, 1, 2, 1], [0, 1, 2])],
    ids=["repeated", "left out", "reordered", "repeated later"],
)
def test_messages_that_are_whole_and_out_of_place_are_errors(sent, taken, order, arrive):
    numbers, error = taken(b"".join(sent[i] for i in order))
    assert numbers == arrive
    assert isinstance(error, MessageForged)


def test_a_message_that_is_cut_does_not_arrive(sent, taken):
    for length in range(1, len(sent[1])):
        numbers, error = taken(sent[0] + sent[1][:length])
        assert numbers == [0]
        assert isinstance(error, ChannelClosed)


def test_messages_of_another_connection_and_its_own_that_come_back_are_errors(sent, taken):
    for keys in (Keys(b"another" * 5, b"connection" * 5), KEYS):
        numbers, error = taken(sent[0], keys)
        assert numbers == []
        assert isinstance(error, MessageForged)


def test_sizes_are_believed_only_with_their_code(sent, taken):
    numbers, error = taken((1 << 60).to_bytes(8, "little") * 2 + sent[0][16:])
    assert numbers == []
    assert isinstance(error, MessageForged)
