"""A file of rows that was damaged: an error that names it, or rows that were written, and never for ever."""

from __future__ import annotations

import copy
import os
import shutil
import signal
import struct

import pytest
import torch
from tensordict import TensorDict

from rollwright._memory.segment import Segment
from rollwright.cli import main
from rollwright.data import LazyMemmapStorage, LazyTensorStorage, ReplayBuffer
from rollwright.data.replay_buffers.ledger.counters import (
    GAP,
    HEADER,
    NUM_SLOTS,
    SLOT,
)
from rollwright.data.replay_buffers.ledger.ledger import Ledger
from rollwright.data.replay_buffers.storages.memory import _HEAD, _PAGE, ROWS_FILE
from rollwright.errors import DamagedFileError

SIZE = 50
EXTREMES = [-(2**63), -(2**40), -1, 0, 1, 49, 50, 51, 2**31, 2**40, 2**63 - 1]


@pytest.fixture(autouse=True)
def no_loop():
    """Ends a test that would never end, however slow the machine is."""

    def too_long(*_: object) -> None:
        raise TimeoutError("opening did not come to an end")

    before = signal.signal(signal.SIGALRM, too_long)
    signal.alarm(300)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


def rows(n: int, start: int = 0) -> TensorDict:
    serial = torch.arange(start, start + n)
    return TensorDict({"serial": serial + 1000, "obs": torch.ones(n, 2) * serial[:, None]}, [n])


def simple(folder) -> set[int]:
    """Rows from the first on."""
    ReplayBuffer(storage=LazyMemmapStorage(SIZE, scratch_dir=folder)).extend(rows(20))
    return set(range(20))


def around(folder) -> set[int]:
    """A ring that was overwritten."""
    buffer = ReplayBuffer(storage=LazyMemmapStorage(SIZE, scratch_dir=folder))
    for n in range(8):
        buffer.extend(rows(10, 10 * n))
    return set(range(80))


def with_gaps(folder) -> set[int]:
    """Rows that were given up, and rows that are still being written."""
    storage = LazyMemmapStorage(SIZE, scratch_dir=folder)
    written: set[int] = set()
    for n in range(4):
        written.update(range(n * 8, n * 8 + 5))
        storage.append(rows(5, n * 8))
        lost = storage.reserve(3)
        storage.publish(lost, [(lost.start, lost.stop)]) if n % 2 else storage.abandon(lost)
    storage.reserve(2)  # nobody ends it
    storage.append(rows(5, 34))
    return written | set(range(34, 39))


def dropped(folder) -> set[int]:
    """Rows of which the first were dropped."""
    buffer = ReplayBuffer(storage=LazyMemmapStorage(SIZE, scratch_dir=folder))
    buffer.extend(rows(10))
    buffer.empty()
    buffer.extend(rows(10, 10))
    return set(range(20))


def restored(folder) -> set[int]:
    """Rows that another buffer held, and whose first positions were never written here."""
    buffer = ReplayBuffer(storage=LazyTensorStorage(SIZE))
    buffer.extend(rows(12))
    buffer.empty()
    buffer.extend(rows(10, 12))
    buffer.storage.ledger.abandon(buffer.storage.reserve(3))
    buffer.extend(rows(5, 25))
    buffer.dumps(folder)
    return set(range(12, 30))


MAKERS = [simple, around, with_gaps, dropped, restored]


def held(folder) -> list[int]:
    """What the folder holds, when it is opened and looked at in every way."""
    buffer = ReplayBuffer(storage=LazyMemmapStorage(scratch_dir=folder, existsok=True), batch_size=8)
    found = buffer[:]
    assert len(found) == len(buffer) <= SIZE
    assert buffer.storage.ledger.num_lost >= 0
    if len(buffer):
        buffer.sample()
        assert bool((found["serial"] - 1000 == found["obs"][:, 0]).all())
    buffer.storage.append(rows(1))
    return (found["serial"] - 1000).tolist()


@pytest.mark.filterwarnings("ignore:.*a killed process was writing")
@pytest.mark.parametrize("every", [3, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("maker", MAKERS)
def test_no_number_of_the_ledger_makes_rows_of_nothing(maker, every, tmp_path):
    """In each place of the ledger, every third of the numbers that might be there, or all of them."""
    written = maker(tmp_path / "rows")
    file = tmp_path / "rows" / ROWS_FILE
    whole = file.read_bytes()
    assert set(held(tmp_path / "rows")) <= written
    slots, gaps = _PAGE + 8 * HEADER, _PAGE + 8 * (HEADER + SLOT * NUM_SLOTS)
    places = [_PAGE + 8 * n for n in range(HEADER)]
    places += [slots + 8 * n for n in range(6 * SLOT)] + [gaps - 8 * n for n in range(1, 5)]
    places += [gaps + 8 * n for n in range(5 * GAP)]
    refused = named = unchanged = 0
    for number, place in enumerate(places):
        [value] = struct.unpack_from("<q", whole, place)
        near = {value - 1, value + 1, *(value ^ 1 << bit for bit in range(2, 62, 12))}
        for other in sorted({*EXTREMES, *near} - {value})[number % every :: every]:
            damaged = bytearray(whole)
            struct.pack_into("<q", damaged, place, other)
            file.write_bytes(damaged)
            try:
                found = held(tmp_path / "rows")
            except DamagedFileError as error:
                refused += 1
                named += str(file) in str(error)
                unchanged += file.read_bytes()[: _PAGE + Ledger.num_bytes] == damaged[: _PAGE + Ledger.num_bytes]
            else:
                assert set(found) <= written, (place, value, other)
    assert refused == named == unchanged > 100 / every


@pytest.mark.parametrize("maker", [simple, restored])
def test_what_rows_hold_is_not_misread(maker, tmp_path):
    written = maker(tmp_path / "rows")
    file = tmp_path / "rows" / ROWS_FILE
    whole = file.read_bytes()
    text = _PAGE + Ledger.num_bytes
    [length] = struct.unpack_from("<I", whole, text)
    for at in range(text, text + 8 + length):
        damaged = bytearray(whole)
        damaged[at] ^= 1 << at % 8
        file.write_bytes(damaged)
        with pytest.raises(DamagedFileError, match=r"buffer.rows is damaged: what its rows hold"):
            held(tmp_path / "rows")
    for number in EXTREMES:
        damaged = bytearray(whole)
        struct.pack_into("<q", damaged, text, number)
        file.write_bytes(damaged)
        try:
            assert set(held(tmp_path / "rows")) <= written
        except DamagedFileError:
            pass
        except ValueError as error:  # no rows at all, and no size was given
            assert number == 0 and "max_size" in str(error)  # noqa: PT017, PT018


def test_a_file_cut_short_is_named_and_stays_as_it_is(tmp_path, capsys):
    simple(tmp_path / "rows")
    file = tmp_path / "rows" / ROWS_FILE
    whole = file.read_bytes()
    for length in (1, 10, 100, _PAGE, _PAGE + 100, _HEAD - 1, _HEAD, _HEAD + 1, len(whole) - 1):
        file.write_bytes(whole[:length])
        with pytest.raises(DamagedFileError, match=rf"{ROWS_FILE} is damaged: .* {length} bytes"):
            LazyMemmapStorage(SIZE, scratch_dir=tmp_path / "rows", existsok=True)
        assert main(["inspect", str(tmp_path / "rows")]) == 1
        assert ROWS_FILE in capsys.readouterr().err
        assert os.stat(file).st_size == length
        assert file.read_bytes() == whole[:length]


def test_zeros_are_no_empty_storage(tmp_path):
    simple(tmp_path / "rows")
    file = tmp_path / "rows" / ROWS_FILE
    whole = file.read_bytes()
    for zeros in (_PAGE, _HEAD, len(whole)):
        file.write_bytes(bytes(zeros) + whole[zeros:])
        with pytest.raises(DamagedFileError, match="begins with zeros"):
            LazyMemmapStorage(SIZE, scratch_dir=tmp_path / "rows", existsok=True)
    file.write_bytes(whole[:_PAGE] + bytes(Ledger.num_bytes) + whole[_PAGE + Ledger.num_bytes :])
    with pytest.raises(DamagedFileError, match="'capacity' is 0, expected 50"):
        LazyMemmapStorage(SIZE, scratch_dir=tmp_path / "rows", existsok=True)


@pytest.mark.parametrize("length", [0, _HEAD])
def test_a_file_whose_maker_was_killed_is_a_new_one(length, tmp_path):
    (tmp_path / ROWS_FILE).write_bytes(bytes(length))
    buffer = ReplayBuffer(storage=LazyMemmapStorage(SIZE, scratch_dir=tmp_path, existsok=True))
    buffer.extend(rows(5))
    assert len(held(tmp_path)) == 5


def test_a_file_that_others_may_be_writing_is_not_allocated_again(tmp_path, monkeypatch):
    """Where the system cannot allocate, each block is read and written: what is written meanwhile would be lost."""
    begins: list[int] = []
    allocate = Segment.allocate

    def noted(segment: Segment, start: int, num_bytes: int) -> None:
        begins.append(start)
        allocate(segment, start, num_bytes)

    monkeypatch.setattr(Segment, "allocate", noted)
    simple(tmp_path / "rows")
    assert 0 in begins
    begins.clear()
    buffer = ReplayBuffer(storage=LazyMemmapStorage(SIZE, scratch_dir=tmp_path / "rows", existsok=True), shared=True)
    copy.copy(buffer)
    assert not begins
    shutil.copytree(tmp_path / "rows", tmp_path / "copy")
    LazyMemmapStorage(SIZE, scratch_dir=tmp_path / "copy", existsok=True)
    assert 0 in begins


@pytest.mark.filterwarnings("ignore:.*a killed process was writing")
def test_a_process_killed_between_two_stores_leaves_no_damage(tmp_path):
    """The numbers of the ledger as they are after each single store of reserve, publish, abandon and clear."""
    storage = LazyMemmapStorage(SIZE, scratch_dir=tmp_path / "rows")
    storage.append(rows(5))
    seen: list[tuple[bytes, bytes]] = []
    memory, tail = storage.ledger._memory, storage._memory._tail

    class Recorded:
        def __init__(self, numbers: memoryview) -> None:
            self.numbers = numbers

        def __getitem__(self, at: int) -> int:
            return self.numbers[at]

        def __setitem__(self, at: int, value: int) -> None:
            self.numbers[at] = value
            seen.append((bytes(memory[: Ledger.num_bytes]), bytes(tail)))

    ledger = storage.ledger
    gaps, reservations = ledger._gaps, ledger._reservations
    head, reservations._slots, gaps._numbers = map(Recorded, (ledger._head, reservations._slots, gaps._numbers))
    ledger._head = gaps._head = reservations._head = head
    for n in range(30):
        taken = ledger.reserve(3)
        if n % 3 == 0:
            ledger.publish(taken, [(taken.start, taken.start + 1)])
        elif n % 3 == 1:
            ledger.abandon(taken)
        else:
            ledger.publish(taken)
        if n % 10 == 9:
            ledger.clear()
    assert len(seen) > 200
    file = tmp_path / "other" / ROWS_FILE
    file.parent.mkdir()
    whole = (tmp_path / "rows" / ROWS_FILE).read_bytes()
    for numbers, behind in seen:
        file.write_bytes(whole[:_PAGE] + numbers + whole[_PAGE + Ledger.num_bytes : -len(behind)] + behind)
        LazyMemmapStorage(scratch_dir=file.parent, existsok=True)
