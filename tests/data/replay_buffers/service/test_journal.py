"""What a service has promised is read again, whatever a kill has cut short."""

from __future__ import annotations

import resource
import signal

import pytest

from rollwright.data.replay_buffers.service.dumps import JOURNAL_FILE, Journal
from rollwright.data.replay_buffers.service.messages import Request


def written(folder):
    """A journal of three records, and where each of them ends."""
    journal, ends = Journal(folder / "new", "run"), []
    file = folder / "new" / JOURNAL_FILE
    for note in (
        lambda: journal.note_given_up("one", 3),
        lambda: journal.note_request("client", Request(7, 2, "set_rng", b"body\n"), [memoryview(b"piece\n" * 100)]),
        lambda: journal.note_ids(10),
    ):
        note()
        ends.append(file.stat().st_size)
    return file, ends


def test_records_are_read_again(tmp_path):
    file, _ = written(tmp_path)
    read = Journal(file.parent, "run")
    assert read.given_up == {"one": 3}
    assert read.ids_end > 10
    [(client, request, [piece])] = read.requests
    assert (client, request) == ("client", Request(7, 0, "set_rng", b"body\n"))
    assert bytes(piece) == b"piece\n" * 100
    assert Journal(file.parent, "another").requests == []
    assert Journal(file.parent, "another").given_up == {"one": 3}


def test_a_record_that_was_cut_short_is_removed(tmp_path):
    file, ends = written(tmp_path)
    content = file.read_bytes()
    for length in range(len(content)):
        file.write_bytes(content[:length])
        whole = sum(end <= length for end in ends)
        read = Journal(file.parent, "run")
        assert (len(read.given_up), len(read.requests), int(read.ids_end > 0)) == tuple(
            int(whole > i) for i in range(3)
        )
        assert file.stat().st_size == [0, *ends][whole]
        read.note_given_up("two", 0)
        assert Journal(file.parent, "run").given_up["two"] == 0


def test_few_records_are_written_for_ids(tmp_path):
    journal = Journal(tmp_path, "run")
    for next_id in range(0, 10**6, 64):
        journal.note_ids(next_id)
        assert journal.ids_end >= next_id
    assert 10 <= len((tmp_path / JOURNAL_FILE).read_text().splitlines()) <= 20
    assert Journal(tmp_path, "run").ids_end == journal.ids_end


def test_a_record_for_which_there_is_no_room_leaves_nothing(tmp_path):
    file, _ = written(tmp_path)
    journal, size = Journal(file.parent, "run"), file.stat().st_size
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size + 50, before[1]))
    try:
        with pytest.raises(OSError, match="too large"):
            journal.note_request("client", Request(8, 2, "set_rng", b"x" * 1000), [])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)
    assert file.stat().st_size == size
    journal.note_given_up("two", 1)
    assert Journal(file.parent, "run").given_up == {"one": 3, "two": 1}
