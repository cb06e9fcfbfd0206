"""The report of a collector: its figures are those of stats(), and its remarks name what is slow."""

from __future__ import annotations

import io
import time

import pytest
import torch
from tests.patience import patient

from rollwright.collectors import Collector
from rollwright.collectors.reports.report import report_of, shares_of
from rollwright.data import LazyTensorStorage, TensorDictReplayBuffer
from rollwright.envs import GymEnv

STATS = {"frames": 1_000, "batches": 5, "episodes": 0, "frames_per_second": 10.0, "mean_return": None}


def cartpole():
    return GymEnv("CartPole-v1")


def act(td):
    return td.set("action", torch.nn.functional.one_hot(torch.randint(2, ()), 2))


def test_shares_add_up_to_the_measured_time():
    shares = shares_of({"seconds": {"env": 3.0, "policy": 1.0, "total": 8.0}})
    assert shares == {"env": 0.375, "policy": 0.125, "everything else": 0.5}
    assert shares_of({"seconds": {}}) == {}


def test_before_the_first_batch_it_says_that_there_is_none():
    with Collector(cartpole, frames_per_batch=10) as collector:
        assert collector.report().startswith("Collector: 0 frames in 0 batches")


def test_a_policy_on_tensordicts_is_named_with_the_reason():
    with Collector(cartpole, act, frames_per_batch=50) as collector:
        collector.next()
        report, why = collector.report(), collector.stats()["paths"]["policy"]
    assert not why.startswith("native")
    assert f"The policy runs on TensorDicts, which costs time at each step: {why}" in report


@pytest.mark.parametrize(
    ("seconds", "words"),
    [
        ({"env": 8.0, "policy": 1.0, "total": 10.0}, "The environment takes most of the time"),
        ({"env": 1.0, "policy": 8.0, "total": 10.0}, "The policy takes most of the time"),
        ({"env": 1.0, "policy": 1.0, "wait": 8.0, "total": 10.0}, "Workers wait for your loop"),
    ],
)
def test_what_takes_most_of_the_time_is_named(seconds, words):
    report = report_of("Collector", {**STATS, "seconds": seconds})
    assert report.count("most of the time") == 1
    assert words in report


def unequal(slow_wait):
    seconds = [{"env": 1.0, "wait": 5.0, "total": 1.0}, {"env": 6.0, "wait": slow_wait, "total": 6.0}]
    workers = [{"index": i, "batches": 2, "seconds": each} for i, each in enumerate(seconds)]
    whole = {name: sum(each[name] for each in seconds) for name in seconds[0]}
    return {"workers": workers, "workers_alive": 2, "restarts": 0, "seconds": whole}


def test_where_workers_wait_for_a_slow_one_it_is_named_and_not_the_loop():
    report = report_of("MultiCollector", {**STATS, **unequal(slow_wait=0.1)})
    assert "Worker 1 is much slower than the others" in report
    assert "your loop" not in report
    report = report_of("MultiCollector", {**STATS, **unequal(slow_wait=20.0)})  # all wait for the loop
    assert "Worker 1 is much slower" not in report
    assert "Workers wait for your loop" in report


def test_shares_of_workers_are_of_their_whole_time():
    shares = shares_of({"seconds": {"env": 1.0, "wait": 3.0, "total": 1.0}, "workers": []})
    assert shares == {"wait": 0.75, "env": 0.25}


def test_of_workers_it_names_the_slowest_and_what_was_lost():
    workers = [{"index": i, "batches": 2, "seconds": {"total": total}} for i, total in enumerate([1.0, 6.0])]
    lost = {"workers": workers, "workers_alive": 2, "restarts": 3, "frames_stale": 70, "policy_lag": 2}
    report = report_of("MultiCollector", {**STATS, **lost, "policy_version": 4})
    assert "slowest worker: 1, 3 s a batch (the fastest 0.5 s)" in report
    assert "70 frames were thrown away (max_policy_lag)" in report
    assert "Workers were replaced 3 times" in report
    assert "version 4; the oldest that act are 2 versions behind" in report


def test_workers_and_a_buffer_report_what_stats_say():
    buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(1_000), batch_size=8, shared=True)
    with Collector(cartpole, frames_per_batch=40, num_collectors=2, sync=True, replay_buffer=buffer) as collector:
        collector.next()
        report, stats = collector.report(), collector.stats()
    assert "workers: 2 of 2 alive, 0 restarts" in report
    assert stats["buffer"]["size"] == stats["write_count"] > 0
    assert f"buffer: {stats['write_count']:,} of 1,000 elements" in report
    assert f"{stats['seconds']['env']:.3g} s" in report


def test_a_notebook_shows_it_escaped():
    with Collector(cartpole, lambda td: act(td), frames_per_batch=10) as collector:
        shown = collector._repr_html_()
    assert shown.startswith("<pre>")
    assert "<lambda>" not in shown


# Progress -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("workers", [{}, {"num_collectors": 2, "sync": True}, {"num_collectors": 2, "sync": False}])
def test_without_a_terminal_progress_is_a_line_now_and_then(workers, capfd):
    with Collector(cartpole, frames_per_batch=100, total_frames=400, progress=True, **workers) as collector:
        for _ in collector:
            pass
        mean = collector.stats()["mean_return"]
    out, err = capfd.readouterr()
    lines = err.splitlines()
    assert not out
    assert 2 <= len(lines) <= 4  # the first, the last, and what two seconds let through; workers print none
    assert lines[0].startswith(f"{type(collector).__name__}: ")
    assert "400 / 400 frames, " in lines[-1]
    assert lines[-1].endswith(f"mean return {mean:,.1f}")


def test_on_a_terminal_progress_is_a_bar_that_gives_the_cursor_back(monkeypatch):
    screen = io.StringIO()
    screen.isatty = lambda: True
    monkeypatch.setattr("sys.stderr", screen)
    monkeypatch.setenv("TERM", "xterm")
    with Collector(cartpole, frames_per_batch=100, progress=True) as collector:
        for _ in range(3):
            collector.next()
            time.sleep(0.11)  # drawn ten times a second at most
    drawn = screen.getvalue()
    assert "300 frames, " in drawn
    assert drawn.rindex("\x1b[?25h") > drawn.rindex("\x1b[?25l")


def test_progress_shows_what_a_thread_collects(capfd):
    buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(1_000), batch_size=8)
    with Collector(cartpole, frames_per_batch=100, total_frames=300, replay_buffer=buffer, progress=True) as collector:
        collector.start()
        limit = time.monotonic() + patient(20)
        while collector.is_running() and time.monotonic() < limit:
            time.sleep(0.01)
    assert "Collector: 300 / 300 frames" in capfd.readouterr().err
