import json

import pytest
import torch
from benchmarks.replay_sharing import COLLECT, EXTEND, OWN, SHARED, Turn, main, promise_rows, table_rows


@pytest.fixture(autouse=True)
def _threads():
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def test_writers_are_measured_beside_samplers(tmp_path, monkeypatch):
    monkeypatch.setattr("benchmarks.replay_sharing.STORED", 1_000)
    main(["--quick", "--out", str(tmp_path)])
    results = json.loads((tmp_path / "replay_sharing.json").read_text())
    assert list(results) == [EXTEND, COLLECT]
    for turns in results.values():
        assert {number: list(sides) for number, sides in turns.items()} == {"0": [SHARED], "1": [SHARED, OWN]}
        [alone], [shared] = turns["0"][SHARED], turns["1"][SHARED]
        assert alone[0] >= 0 < alone[1]
        assert shared[2] > alone[2] == 0
    assert "| kept |" in (tmp_path / "replay_sharing.md").read_text()


def test_rates_are_told_as_parts_of_what_others_leave():
    turns = {
        "0": {SHARED: [Turn(100.0, 0.001, 0.0)] * 3},
        "4": {SHARED: [Turn(30.0, 0.02, 500.0)] * 3, OWN: [Turn(40.0, 0.01, 600.0)] * 3},
        "8": {SHARED: [Turn(5.0, 1.5, 500.0)] * 3, OWN: [Turn(20.0, 0.1, 600.0)] * 3},
    }
    none, four, eight = table_rows({EXTEND: turns})
    assert none[1:4] == ["0", "100", "1"]
    assert four[1:] == [
        "4",
        "30",
        "0.30 (0.30 to 0.30)",
        "0.40 (0.40 to 0.40)",
        "0.75 (0.75 to 0.75)",
        "20.0",
        "10.0",
        "500",
    ]
    assert eight[5:8] == ["0.25 (0.25 to 0.25)", "1500.0", "100.0"]
    assert [row[1:] for row in promise_rows({EXTEND: turns})] == [[">= 0.5", "0.75", "yes"], [">= 0.5", "0.25", "NO"]]
