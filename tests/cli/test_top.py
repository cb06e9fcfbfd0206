"""``rollwright top``: the collectors of this machine, once or live."""

from __future__ import annotations

import io
import json
import os

import pytest
from rich.console import Console

from rollwright.cli.top import view, watch
from rollwright.collectors import Collector
from rollwright.collectors.reports.live import Reported, reports_folder
from rollwright.envs import GymEnv


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))


@pytest.fixture(scope="module")
def stats():
    with Collector(lambda: GymEnv("CartPole-v1"), frames_per_batch=40, num_collectors=2, sync=True) as collector:
        collector.next()
        return collector.stats()


def report(stats, number=0, pid=None):
    found = {"pid": pid or os.getpid(), "program": "train.py", "name": "MultiSyncCollector", "stats": stats}
    (reports_folder() / f"{found['pid']}-{number}.json").write_text(json.dumps(found))


def test_prints_report_and_workers_where_there_is_no_terminal(run, stats):
    report(stats)
    result = run("top")
    assert result.status == 0, result.err
    assert f"train.py, process {os.getpid()}\nMultiSyncCollector: 40 frames in 1 batches" in result.out
    assert "Where the time goes (all workers together)" in result.out
    rows = [line.split() for line in result.out.splitlines()]
    assert [row[0] for row in rows if row[1:2] and row[0] in "01"] == ["0", "1"]
    assert [row for row in rows if row[:2] == ["worker", "state"]]


def test_prints_json(run, stats):
    report(stats)
    report(stats, 1, os.getppid())
    found = json.loads(run("top", "--json").out)
    assert {each["pid"] for each in found} == {os.getpid(), os.getppid()}
    assert found[0]["stats"] == stats
    (found,) = json.loads(run("top", os.getppid(), "--json").out)
    assert found["pid"] == os.getppid()


def test_without_a_collector_it_says_how_to_show_one(run):
    result = run("top")
    assert result.status == 1
    assert "ROLLWRIGHT_TOP=1" in result.err
    assert "progress=True" in result.err
    assert json.loads(run("top", "--json").out) == []
    assert "process 12" in run("top", 12).err


@pytest.mark.parametrize("ends", [True, False], ids=["ended", "Ctrl-C"])
def test_on_a_terminal_it_draws_until_all_have_ended_or_ctrl_c(stats, ends):
    screen = Console(file=io.StringIO(), force_terminal=True, width=120)
    found = [Reported(1, "train.py", "MultiSyncCollector", 0.5, stats)]
    later = [Reported(1, "train.py", "MultiSyncCollector", 9.0, {**stats, "frames": 80})]
    turns, waits = iter([later, [] if ends else later]), []

    def wait(seconds):
        waits.append(seconds)
        if not ends and len(waits) == 2:
            raise KeyboardInterrupt

    watch(screen, found, lambda: next(turns), wait)
    drawn = screen.file.getvalue()
    assert drawn.index("40 frames in 1") < drawn.index("80 frames in 1")
    assert ("no collector is left" in drawn) == ends
    assert "which has not reported for 9 s" in drawn
    assert waits == [1.0, 1.0]


def test_a_process_has_no_table(stats):
    alone = {name: value for name, value in stats.items() if name != "workers"}
    screen = Console(file=io.StringIO(), width=120)
    screen.print(view([Reported(1, "train.py", "Collector", 0.5, alone)]))
    assert "restarts" not in screen.file.getvalue().splitlines()[-1]
