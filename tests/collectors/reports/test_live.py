"""Reports of running collectors: written while they run, removed when they end, whoever ends them."""

from __future__ import annotations

import gc
import json
import os
import signal
import time
from pathlib import Path

import pytest
from tests.patience import patient

from rollwright.collectors import Collector
from rollwright.collectors.reports.live import SWITCH, reports_folder, running
from rollwright.data import LazyTensorStorage, ReplayBuffer
from rollwright.envs import GymEnv

PROGRAM = """
import threading
from rollwright import Collector
with Collector("CartPole-v1", frames_per_batch=50) as collector:
    collector.next()
    threading.Event().wait(60)
"""


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    return tmp_path


def cartpole():
    return GymEnv("CartPole-v1")


def until(holds):
    limit = time.monotonic() + patient(20)
    while not (found := holds()) and time.monotonic() < limit:
        time.sleep(0.02)
    return found


@pytest.mark.parametrize("workers", [{}, {"num_collectors": 2, "sync": True}, {"num_collectors": 2, "sync": False}])
def test_a_collector_reports_itself_until_its_shutdown(workers, monkeypatch):
    monkeypatch.setenv(SWITCH, "1")
    with Collector(cartpole, frames_per_batch=40, **workers) as collector:
        collector.next()
        (found,) = until(lambda: [each for each in running() if each.stats["frames"]])
        assert (found.pid, found.name) == (os.getpid(), type(collector).__name__)
        assert found.stats.keys() == collector.stats().keys()
    assert running() == []
    assert list(reports_folder().iterdir()) == []


def test_only_those_that_were_asked_for_report_themselves(monkeypatch, capfd):
    monkeypatch.delenv(SWITCH, raising=False)
    with Collector(cartpole, frames_per_batch=40), Collector(cartpole, frames_per_batch=30, progress=True):
        (found,) = until(running)
    assert found.stats["frames_per_batch"] == 30


def test_one_that_is_dropped_without_a_shutdown_reports_itself_no_more(monkeypatch):
    monkeypatch.setenv(SWITCH, "1")
    collector = Collector(cartpole, frames_per_batch=40)
    assert until(running)
    collector._rollout.close()
    del collector
    gc.collect()
    assert until(lambda: not running())


def test_the_file_of_a_killed_program_is_removed(programs, folder):
    program = programs.start("-c", PROGRAM, env={SWITCH: "1", "TMPDIR": str(folder)})
    assert until(running)
    program.send_signal(signal.SIGKILL)
    program.wait(patient(10))
    assert running() == []
    assert list(reports_folder().iterdir()) == []


def test_a_folder_of_somebody_else_is_refused_and_collecting_goes_on(folder, monkeypatch, caplog):
    (folder / f"rollwright-reports-{os.getuid()}").mkdir(mode=0o777)
    (folder / f"rollwright-reports-{os.getuid()}").chmod(0o777)
    with pytest.raises(PermissionError, match="only you can write to"):
        reports_folder()
    monkeypatch.setenv(SWITCH, "1")
    with Collector(cartpole, frames_per_batch=40) as collector:
        assert until(lambda: "rollwright top cannot show this Collector" in caplog.text)
        collector.next()


def test_a_report_that_grows_old_says_so(monkeypatch):
    path = reports_folder() / f"{os.getpid()}-7.json"
    path.write_text(json.dumps({"pid": os.getpid(), "program": "train.py", "name": "Collector", "stats": {}}))
    os.utime(path, (time.time() - 60, time.time() - 60))
    (found,) = running()
    assert 59 < found.age_s < 90
    os.utime(path, (time.time() - 7200, time.time() - 7200))  # its number may be that of another process by now
    assert running() == []
    assert not path.exists()


def test_a_full_disk_leaves_nothing_behind_and_reports_go_on_when_there_is_room(folder, monkeypatch, caplog):
    monkeypatch.setattr("rollwright.collectors.reports.live._EVERY_S", 0.01)
    write, is_full = Path.write_text, True

    def half(path, text):
        write(path, text[:9] if is_full else text)
        if is_full:
            raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_text", half)
    with Collector(cartpole, frames_per_batch=10, progress=True):
        until(lambda: caplog.records)
        is_full = False
        until(running)
    assert [record.getMessage() for record in caplog.records] == [
        "rollwright top cannot show this Collector: [Errno 28] No space left on device"
    ]
    assert not list(reports_folder().iterdir())


def test_stats_that_json_does_not_take_are_told(monkeypatch, caplog):
    monkeypatch.setattr("rollwright.collectors.reports.live._EVERY_S", 0.01)
    monkeypatch.setattr(ReplayBuffer, "stats", lambda buffer: {"mine": {1, 2}})
    buffer = ReplayBuffer(storage=LazyTensorStorage(10), batch_size=2)
    with Collector(cartpole, frames_per_batch=10, progress=True, replay_buffer=buffer):
        until(lambda: caplog.records)
    assert "type set is not JSON serializable" in caplog.text


def test_what_a_killed_program_has_half_written_is_removed():
    (reports_folder() / "999999999-0.new").write_text("{")
    mine = reports_folder() / f"{os.getpid()}-99.new"
    mine.write_text("{")
    assert running() == []
    assert list(reports_folder().iterdir()) == [mine]
    mine.unlink()
