import json

import numpy as np
import pytest
import torch
from benchmarks.replay import Measured, growth_rows, main, measure, measure_growth, promise_rows, table_rows
from benchmarks.replay_cases import (
    CASES,
    CPPRB,
    EXTEND,
    LIMIT,
    LIMIT_OUT,
    OBSERVATIONS,
    OPERATIONS,
    OURS,
    ROWS,
    SLICE_LEN,
    SLICES,
    TARGETS,
    TORCHRL,
    TORCHRL_CACHED,
    UNIFORM,
    Case,
    check_rows,
    check_slices,
    find_case,
    make_rows,
)
from benchmarks.replay_sides import make_limits

from benchmarks import replay
from rollwright.data import replay_buffers


@pytest.fixture(autouse=True)
def _threads():
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("on_disk", [False, True], ids=["memory", "mapped"])
@pytest.mark.parametrize("operation", OPERATIONS)
def test_every_operation_is_measured_and_what_it_does_is_right(operation, on_disk):
    case = Case(2_000, "16 B", on_disk)
    result = measure(case, operation, {}, rounds=2, seconds=0.0)
    assert set(result.rates) - {LIMIT, LIMIT_OUT} == {OURS}
    assert all(len(rates) == 2 and min(rates) > 0 for rates in result.rates.values())


@pytest.mark.parametrize("frame", OBSERVATIONS)
def test_frames_have_the_size_that_they_are_named_by(frame):
    case = Case(1_000, frame)
    rows = make_rows(case, 0, 10)
    assert sum(value.nbytes for value in rows.values()) == 10 * case.frame_bytes
    number, unit = frame.split()
    assert case.frame_bytes == pytest.approx(int(number) * {"B": 1, "KiB": 1024}[unit], rel=0.02)


def test_trajectories_have_random_lengths_and_pieces_of_the_frames_fit_together():
    case = Case(5_000, "16 B")
    whole = make_rows(case, 0, 5_000)
    assert np.array_equal(whole["episode"][1_234:2_000], make_rows(case, 1_234, 766)["episode"])
    lengths = np.unique(whole["episode"], return_counts=True)[1]
    assert lengths.min() < SLICE_LEN < lengths.max() <= 200


@pytest.mark.parametrize("frame", OBSERVATIONS)
@pytest.mark.parametrize("entry", ["obs", "reward", "episode"])
def test_a_row_that_is_torn_is_seen(frame, entry):
    case = Case(1_000, frame)
    rows = make_rows(case, 0, 256)
    check_rows(case, rows)
    rows[entry][7] = rows[entry][250]
    with pytest.raises(RuntimeError, match="whole"):
        check_rows(case, rows)


def test_a_slice_that_crosses_a_boundary_is_seen():
    case = Case(2_000, "16 B")
    with pytest.raises(RuntimeError, match="crosses"):
        check_slices(case, make_rows(case, 0, 256))  # no trajectory has so many frames


def test_a_buffer_that_draws_torn_rows_is_not_reported(monkeypatch):
    class Torn(replay_buffers.ReplayBuffer):
        def sample(self, *arguments, **options):
            batch = super().sample(*arguments, **options)
            return batch.set("reward", batch["reward"].roll(1, 0))

    monkeypatch.setattr(replay_buffers, "ReplayBuffer", Torn)
    with pytest.raises(RuntimeError, match="whole"):
        measure(Case(2_000, "16 B"), UNIFORM, {}, rounds=1, seconds=0.0)


def test_numpy_writes_and_takes_the_same_bytes(tmp_path):
    case = Case(2_000, "1 KiB")
    for operation, names in ((EXTEND, {LIMIT}), (UNIFORM, {LIMIT, LIMIT_OUT}), (SLICES, {LIMIT, LIMIT_OUT})):
        sides = make_limits(case, operation, tmp_path)
        assert set(sides) == names
        for side in sides.values():
            assert side.call() == (ROWS if operation == EXTEND else 1)
            side.check()


def test_peers_without_an_environment_are_named(tmp_path):
    pythons = {"torchrl": tmp_path / "no", "cpprb": tmp_path / "no"}
    result = measure(Case(1_000, "16 B"), SLICES, pythons, rounds=1, seconds=0.0)
    assert set(result.missing) == {TORCHRL, TORCHRL_CACHED, CPPRB}
    assert "there is no no at" in table_rows([result])[0][3]


def test_promises_are_judged_by_the_ratio_and_left_open_without_one():
    case = find_case("10,000 of 28 KiB, in memory")  # at least 0.7 of NumPy
    kept = promise_rows([Measured(case, EXTEND, {OURS: [80.0], LIMIT: [100.0]}, {})])
    broken = promise_rows([Measured(case, EXTEND, {OURS: [60.0], LIMIT: [100.0]}, {})])
    judged = [row[2:] for row in kept + broken if row[0] == f"{case.name}: {EXTEND}, x {LIMIT}"]
    assert judged == [["0.80", "yes"], ["0.60", "no"]]
    assert sum(row[2] == "not measured" for row in kept) == len(TARGETS) - 1


def test_every_target_names_an_operation_of_a_case():
    for target in TARGETS:
        assert target.operation in find_case(target.case).operations
    assert len({case.name for case in CASES}) == len(CASES)


def test_growth_is_time_as_a_multiple_of_the_smallest():
    grown = measure_growth((1_000, 2_000), rounds=2, seconds=0.0)
    assert {number: len(values) for number, values in grown.items()} == {1_000: 2, 2_000: 2}
    assert [row[2][:4] for row in growth_rows({10: [100.0], 20: [50.0]})] == ["1.00", "2.00"]
    assert replay._growth_kept({10: [100.0], 20: [50.0]})[0][2:] == ["2.00", "no"]


def test_the_report_names_what_was_measured(tmp_path, capsys):
    main(["--quick", "--no-peers", "--operation", UNIFORM, "--case", CASES[0].name, "--out", str(tmp_path)])
    text = (tmp_path / "replay.md").read_text()
    assert f"| {CASES[0].name} | {UNIFORM} |" in text
    assert "rollwright 0." in capsys.readouterr().out
    raw = json.loads((tmp_path / "replay.json").read_text())
    assert [(entry["case"], entry["operation"]) for entry in raw] == [(CASES[0].name, UNIFORM)]
    assert set(raw[0]["rates"]) == {OURS, LIMIT, LIMIT_OUT}
