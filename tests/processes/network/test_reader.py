"""BackgroundReader: reads when the program does not, hands on what that raises, and ends with what it reads."""

from __future__ import annotations

import gc
import socket
import threading

import pytest

from rollwright._processes.network import channel as channel_module
from rollwright._processes.network.channel import BackgroundReader

LIMIT_S = 20


class Inbox:
    def __init__(self, error=None):
        self.mine, self.theirs = socket.socketpair()
        self.read_by, self.error = None, error
        self.arrived = threading.Event()

    def read(self):
        self.mine.recv(1)
        self.read_by = threading.current_thread()
        self.arrived.set()
        if self.error is not None:
            raise self.error


def thread_of(reader):
    return next(each for each in threading.enumerate() if each.name == "rollwright-reader")


@pytest.fixture
def inbox():
    made = Inbox()
    yield made
    made.mine.close()
    made.theirs.close()


def test_what_arrives_is_read_while_the_program_does_not(inbox):
    reader = BackgroundReader(inbox.mine.fileno(), inbox.read)
    inbox.theirs.send(b"1")
    assert inbox.arrived.wait(LIMIT_S)
    assert inbox.read_by.name == "rollwright-reader"
    reader.stop()
    assert not inbox.read_by.is_alive()
    reader.stop()


def test_it_rests_while_the_program_reads(inbox, monkeypatch):
    monkeypatch.setattr(channel_module, "_ABSENT_S", 30.0)
    reader = BackgroundReader(inbox.mine.fileno(), inbox.read)
    reader.program_reads()
    inbox.theirs.send(b"1")
    assert not inbox.arrived.wait(0.2)
    reader.stop()
    assert not inbox.arrived.is_set()


def test_what_reading_raises_is_raised_where_the_program_reads_next(inbox):
    inbox.error = LookupError("no module")
    reader = BackgroundReader(inbox.mine.fileno(), inbox.read)
    inbox.theirs.send(b"1")
    thread_of(reader).join(LIMIT_S)
    with pytest.raises(LookupError, match="no module"):
        reader.program_reads()
    reader.program_reads()
    reader.stop()


def test_it_ends_with_what_it_reads():
    inbox = Inbox()
    reader = BackgroundReader(inbox.mine.fileno(), inbox.read)
    thread = thread_of(reader)
    theirs, mine = inbox.theirs, inbox.mine
    del inbox
    gc.collect()
    thread.join(LIMIT_S)
    assert not thread.is_alive()
    theirs.close()
    mine.close()
