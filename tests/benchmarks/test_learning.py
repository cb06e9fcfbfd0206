"""The benchmark of learning: its settings are those of the examples; its table and its figure have all runs."""

from __future__ import annotations

import importlib
import json
from dataclasses import fields
from pathlib import Path

import pytest
from benchmarks.learning.__main__ import draw, read, rows_of
from benchmarks.learning.tasks import SIDES, TASKS

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.mark.parametrize("name", TASKS)
def test_settings_are_those_of_the_example(monkeypatch, name):
    monkeypatch.syspath_prepend(str(EXAMPLES))
    example = importlib.import_module(TASKS[name].example)
    assert set(TASKS[name].settings) <= {field.name for field in fields(example.Settings)}
    assert {"workers", "sync"} <= {field.name for field in fields(example.Settings)}


def test_table_and_figure_have_the_runs(tmp_path):
    task = next(iter(TASKS))
    rows = [
        {"task": task, "side": side, "seed": seed, "return": 10.0 * seed, "processor_s": 3.0, "wall_s": 4.0}
        for seed in (1, 0)
        for side in SIDES
    ]
    path = tmp_path / "learning.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = read(path)
    assert [run["seed"] for run in found[task, SIDES[0]]] == [0, 1]
    assert rows_of(found)[0] == [task, SIDES[0], "2", "5 ± 7", "3", "4"]
    assert len(rows_of(found)) == len(SIDES)
    draw(found, tmp_path / "learning.png", dark=True)
    assert (tmp_path / "learning.png").read_bytes()[1:4] == b"PNG"
