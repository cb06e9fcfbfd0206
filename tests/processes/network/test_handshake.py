"""Handshake: who does not know the secret, or has other versions, is refused before anything is unpickled."""

from __future__ import annotations

import json
import socket
import threading

import pytest

from rollwright._processes.network import handshake
from rollwright._processes.network.channel import NetworkChannel
from rollwright._processes.network.handshake import HandshakeRefused, IncomingHandshake, connect_to

SECRET = b"only the two of us know this"


@pytest.fixture
def server():
    listening = socket.create_server(("127.0.0.1", 0))
    yield listening
    listening.close()


def greeted(server, secret=SECRET, dial=None, then=IncomingHandshake.accept):
    """What both sides came to: (what was said, or the error), (a socket, or the error)."""
    theirs = []

    def dial_in():
        try:
            theirs.append((dial or connect_to)(server.getsockname(), secret, {"group": 3}, 20.0))
        except (HandshakeRefused, OSError) as error:
            theirs.append(error)

    thread = threading.Thread(target=dial_in)
    thread.start()
    end, _ = server.accept()
    incoming, mine = IncomingHandshake(end, SECRET), None
    try:
        while mine is None:
            mine = incoming.read()
        then(incoming)
    except HandshakeRefused as error:
        mine = error
    thread.join(20)
    end.close()
    return mine, theirs[0]


def test_both_sides_prove_that_they_know_the_secret(server):
    about, end = greeted(server)
    assert about["group"] == 3
    assert about["host"] == socket.gethostname()
    assert isinstance(end, NetworkChannel)
    end.close()


@pytest.mark.parametrize("is_local", [True, False])
def test_messages_have_codes_unless_both_sides_see_one_machine(server, monkeypatch, is_local):
    """One of them may see a program of its own machine that hands bytes on to another one."""
    for seen in ([True, is_local], [is_local, True]):
        answers = iter(seen)
        monkeypatch.setattr(handshake, "_is_local", lambda end, answers=answers: next(answers))
        lines = []

        def accept(incoming, lines=lines):
            incoming.end = incoming.end.dup()
            lines.append(incoming.accept())

        _, end = greeted(server, then=accept)
        lines[0].post("to who joins")
        end.post("to who listens")
        for line, expected in ((end, "to who joins"), (lines[0], "to who listens")):
            found = []
            while not found:
                line.read(lambda message, sizes: [], lambda message, pieces, found=found: found.append(message))
            assert found == [expected]
        assert {each._hashes is None for each in (end, lines[0])} == {is_local}
        end.close()
        lines[0].close()


def test_another_secret_is_refused_and_both_sides_say_so(server):
    mine, theirs = greeted(server, secret=b"another one")
    assert "does not know the secret" in str(mine)
    assert isinstance(theirs, HandshakeRefused)
    assert "has another secret" in str(theirs)


def test_a_refusal_holds_nothing_that_depends_on_the_secret(server):
    answers = []

    def guessing(address, secret, about, timeout_s):
        with socket.create_connection(address) as end:
            end.recv(45)
            end.sendall((66).to_bytes(4, "big") + bytes(64) + b"{}")
            answers.append(end.recv(1 << 10))

    mine, _ = greeted(server, dial=guessing)
    assert "does not know the secret" in str(mine)
    assert answers[0][4:36] == bytes(32)


def test_other_versions_are_refused_by_name(server, monkeypatch):
    real = handshake.software_versions()
    told = iter([{**real, "torch": "0.1"}, real])  # of who joins first
    monkeypatch.setattr(handshake, "software_versions", lambda: next(told))
    mine, theirs = greeted(server)
    assert f"torch {real['torch']} here and 0.1" in str(mine)
    assert "has refused: both sides need the same versions" in str(theirs)


def test_a_reason_to_refuse_reaches_the_other_side(server):
    _, theirs = greeted(server, then=lambda incoming: incoming.refuse("all groups have been joined"))
    assert "all groups have been joined" in str(theirs)


@pytest.mark.parametrize("noise", [b"GET / HTTP/1.1\r\n\r\n", b"\x00\x00\x00\x05abcde", b"\xff" * 100])
def test_what_is_no_host_is_refused(server, noise):
    def dial(address, secret, about, timeout_s):
        end = socket.create_connection(address)
        end.sendall(noise)
        return end

    mine, end = greeted(server, dial=dial)
    assert "does not speak as a host" in str(mine)
    end.close()


def test_a_proof_is_of_one_connection(server):
    """What one host has sent is of no use to who has recorded it."""
    recorded = []

    def recording(address, secret, about, timeout_s):
        end = socket.create_connection(address)
        nonce = end.recv(45)[13:]
        text = json.dumps({"versions": handshake.software_versions(), **about}).encode()
        mine = bytes(32)
        proof = handshake._prove(secret, b"join", nonce, mine, text)
        content = mine + proof + text
        recorded.append(len(content).to_bytes(4, "big") + content)
        end.sendall(recorded[0])
        return end

    def replaying(address, secret, about, timeout_s):
        end = socket.create_connection(address)
        end.sendall(recorded[0])
        return end

    first, end = greeted(server, dial=recording)
    assert isinstance(first, dict)
    end.close()
    second, end = greeted(server, dial=replaying)
    assert "does not know the secret" in str(second)
    end.close()


def test_where_nothing_listens_the_error_has_the_address():
    free = socket.create_server(("127.0.0.1", 0))
    address = free.getsockname()
    free.close()
    with pytest.raises(ConnectionError, match=rf"nothing listens at 127.0.0.1:{address[1]}.*Start the collector"):
        connect_to(address, SECRET, {}, 0.2)
