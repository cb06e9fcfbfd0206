"""Traces: what is written is read, whatever was cut off, begins again, or is no trace."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from rollwright.data.llm import FinishReason, Origin, Trace, TraceWriter, Turn

ORIGIN = Origin(3, 0, 1, 3, 7)


def turns(count: int, origin: Origin = ORIGIN, first: int = 100) -> list[Turn]:
    """Turns of a conversation that extend one another; their tokens are views of one memory."""
    memory = torch.arange(first, first + 10 * count)
    chat: list[dict[str, Any]] = [{"role": "user", "content": "begin"}]
    made = []
    for number in range(count):
        answer, more = {"role": "assistant", "content": f"{number}"}, [{"role": "user", "content": "\ud800 go on"}]
        last = number == count - 1
        made.append(
            Turn(
                origin,
                number,
                0,
                list(chat),
                answer,
                "".join(each["content"] for each in chat),
                f"{number}",
                memory[: 10 * number + 8],
                10 * number + 5,
                torch.tensor([-0.1, -1 / 3, float("nan")]),
                "sampled",
                torch.tensor([1, 1, 2]),
                2,
                FinishReason.STOP,
                added=() if last else more,
                next_prompt=None if last else memory[: 10 * number + 15],
                next_prompt_text="" if last else "".join(each["content"] for each in [*chat, answer, *more]),
                reward=torch.tensor([0.0, 0.5, 1.0]) if number else 2.0,
                terminated=last,
                seconds={"generation": 0.5},
                extras={("next", "rewards", "right"): torch.tensor([1.0]), "note": "a"},
            )
        )
        chat += [answer, *more]
    return made


def assert_equal(one: Turn, other: Turn) -> None:
    for name in Turn.__dataclass_fields__:
        if name == "marks":  # where it is in memory
            continue
        first, second = getattr(one, name), getattr(other, name)
        if name == "extras":
            assert first.keys() == second.keys()
            assert torch.equal(first["next", "rewards", "right"], second["next", "rewards", "right"])
        elif isinstance(first, torch.Tensor):
            assert first.dtype == second.dtype
            assert torch.equal(first.nan_to_num(), second.nan_to_num()), name
        else:
            assert (list(first) == list(second)) if name in ("prompt", "added") else first == second


def test_conversations_are_read_as_they_were_written(tmp_path: Path) -> None:
    writer, other = TraceWriter(tmp_path, {"max_length": 9}), Origin(4, 0, 0, 4, 7)
    first, second = turns(4), turns(2, other)
    for turn in (first[0], second[0], first[1], first[2], second[1], first[3]):
        writer.turn(turn, 5, total=3.0)
    found = Trace.read(tmp_path)
    assert found.engine == {"max_length": 9}
    assert [(each.origin, each.end, each.total, each.id) for each in found.conversations] == [
        (other, "terminated", 3.0, 5),
        (ORIGIN, "terminated", 3.0, 5),
    ]
    for written, read in ((second, found.conversations[0]), (first, found.conversations[1])):
        for one, two in zip(written, read.turns, strict=True):
            assert_equal(one, two)
    [file] = tmp_path.iterdir()
    sizes = [len(line) for line in file.read_bytes().splitlines()]
    assert sizes[-2] < 1.3 * sizes[1]  # a line has what its turn adds


def test_a_conversation_that_begins_again_or_goes_on_replaces_what_was_written(tmp_path: Path) -> None:
    for count, since in ((3, 0), (2, 0), (4, 1)):
        writer = TraceWriter(tmp_path, {}, name=str(count))
        for turn in turns(count)[since:]:
            writer.turn(turn, count, total=float(count))
    [found] = Trace.read(tmp_path).conversations
    assert (found.total, found.id, len(found.turns)) == (4.0, 4, 4)
    for one, two in zip(turns(4)[1:], found.turns[1:], strict=True):
        assert_equal(one, two)
    writer.turn(turns(4)[0], 9)
    assert [(each.end, len(each.turns)) for each in Trace.read(tmp_path).conversations] == [("", 1)]
    writer.end(ORIGIN, "dropped", "it was slow")
    [found] = Trace.read(tmp_path).conversations
    assert (found.end, found.why, len(found.turns)) == ("dropped", "it was slow", 1)


def test_a_tail_that_was_cut_off_is_left_out_wherever_it_was_cut(tmp_path: Path) -> None:
    writer = TraceWriter(tmp_path, {})
    for turn in turns(2):
        writer.turn(turn, 0)
    [file] = tmp_path.iterdir()
    whole = file.read_bytes()
    ends = [place for place, byte in enumerate(whole) if byte == 10]
    for cut in range(ends[1] + 1, len(whole), 37):
        file.write_bytes(whole[:cut])
        found = Trace.read(tmp_path)
        assert found.num_torn == (whole[cut - 1] != 10)
        assert sum(len(each.turns) for each in found.conversations) == sum(end < cut for end in ends[1:3])


def test_what_a_process_has_written_is_there_when_it_is_killed(tmp_path: Path) -> None:
    program = (
        "import sys, time; sys.path.insert(0, sys.argv[2])\n"
        "from tests.data.llm.test_trace import turns, TraceWriter\n"
        "writer = TraceWriter(sys.argv[1], {})\n"
        "for turn in turns(3): writer.turn(turn, 0)\n"
        "print('written', flush=True); time.sleep(60)"
    )
    root = str(Path(__file__).parents[3])
    with subprocess.Popen([sys.executable, "-c", program, str(tmp_path), root], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"written\n"
        process.send_signal(signal.SIGKILL)
    [found] = Trace.read(tmp_path).conversations
    assert (found.end, len(found.turns)) == ("terminated", 3)


def test_a_write_that_fails_leaves_a_file_that_can_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writer = TraceWriter(tmp_path, {})
    first, second, third = turns(3)
    writer.turn(first, 0)
    write, calls = os.write, []

    def full(file: int, text: bytes) -> int:
        calls.append(text)
        if len(calls) > 1:
            raise OSError(28, "No space left on device")
        return write(file, text[:20])

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", full)
        with pytest.raises(OSError, match="No space left"):
            writer.turn(second, 0)
    writer.turn(second, 0)
    writer.turn(third, 0)
    found = Trace.read(tmp_path)
    assert (len(found.conversations[0].turns), found.num_torn) == (3, 1)


def test_what_is_no_trace_is_an_error(tmp_path: Path) -> None:
    assert not Trace.is_in(tmp_path / "nothing")
    with pytest.raises(ValueError, match=r"trace: expected a folder .* got .*nothing', which has no .trace.jsonl"):
        Trace.read(tmp_path / "nothing")
    TraceWriter(tmp_path, {}).turn(turns(1)[0], 0)
    [file] = tmp_path.iterdir()
    assert Trace.is_in(tmp_path)
    file.write_text('{"trace": 1, "engine": {}}\noops\n')
    with pytest.raises(ValueError, match=r"trace: expected JSON in line 2 of .*, got b'oops.*Take the file out"):
        Trace.read(tmp_path)
    file.write_text('{"trace": 99, "engine": {}}\n')
    with pytest.raises(ValueError, match="format 99 is not known"):
        Trace.read(tmp_path)
