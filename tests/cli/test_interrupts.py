from __future__ import annotations

import os
import signal
import sys
import threading

import pytest
import torch
from tests.patience import patient

from rollwright.cli.interrupts import SignalInterrupts
from rollwright.collectors import Collector
from rollwright.data.datasets import describe_dataset, load_dataset, writer
from rollwright.envs import GymEnv

ENDLESS = ("collect", "CartPole-v1", "--frames", "1e8")


def assert_first_frames(frames, num_envs, seed):
    env = GymEnv("CartPole-v1", **({"num_envs": num_envs} if num_envs > 1 else {}))
    steps = frames.batch_size[-1]
    collector = Collector(env, frames_per_batch=steps * num_envs, total_frames=steps * num_envs)
    collector.set_seed(seed)
    with collector:
        expected = collector.next()
    for key, value in expected.items(True, True):
        assert torch.equal(frames[key], value), key


def read_until(process, text):
    for line in process.stdout:
        if text in line:
            return line
    pytest.fail(f"ended without {text!r}: {process.communicate()[1]}")


# The signals ---------------------------------------------------------------------------------------


def test_first_signal_asks_and_second_raises():
    with SignalInterrupts() as interrupts:
        assert not interrupts.collection_stopped()
        signal.raise_signal(signal.SIGINT)
        assert interrupts.collection_stopped()
        assert interrupts.exit_status == 130
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)  # only once: what follows saves
        assert interrupts.hurried


def test_nothing_raises_while_saving():
    with SignalInterrupts() as interrupts:
        with interrupts.saving():
            for _ in range(3):
                signal.raise_signal(signal.SIGTERM)
        assert interrupts.exit_status == 143
        assert interrupts.hurried


def test_handlers_are_put_back():
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    with SignalInterrupts():
        assert signal.getsignal(signal.SIGINT) is not before[0]
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before


def test_works_outside_of_the_main_thread():
    seen = []

    def use():
        with SignalInterrupts() as interrupts:
            seen.append(interrupts.collection_stopped())

    thread = threading.Thread(target=use)
    thread.start()
    thread.join()
    assert seen == [False]


# Ctrl-C in this process ----------------------------------------------------------------------------


def test_second_signal_while_saving_loses_nothing(run, tmp_path, monkeypatch):
    write, calls = writer.DatasetWriter.write, []

    def interrupted_write(self, batch, steps=None):
        calls.append(steps)
        if len(calls) == 3:
            signal.raise_signal(signal.SIGINT)
            signal.raise_signal(signal.SIGINT)
        write(self, batch, steps)

    monkeypatch.setattr(writer.DatasetWriter, "write", interrupted_write)
    out = tmp_path / "out"
    result = run(*ENDLESS, "--frames-per-batch", 40, "--num-envs", 2, "--seed", 5, "--output", out, "--quiet")
    assert result.status == 130
    assert result.err.startswith("interrupted: saved 120 of 100,000,000 frames")
    frames = load_dataset(out)
    assert frames.batch_size == (2, 60)
    assert_first_frames(frames, 2, 5)


def test_step_under_way_is_finished_and_kept(run, tmp_path, module):
    name = module(
        """
import signal, torch
def make():
    calls = iter(range(10**9))
    def act(td):
        if next(calls) == 24:
            signal.raise_signal(signal.SIGINT)
        return td.set("action", torch.tensor([[1, 0], [0, 1]]))
    return act
"""
    )
    out = tmp_path / "out"
    arguments = [*ENDLESS, "--frames-per-batch", 40, "--num-envs", 2, "--policy", f"{name}:make"]
    assert run(*arguments, "--output", out).status == 130
    frames = load_dataset(out)
    assert frames.batch_size == (2, 25)  # one batch of 20 steps, and the 5 steps of the second
    assert (frames["collector", "traj_ids"] >= 0).all()
    assert describe_dataset(out)["complete"] is False


def test_signal_during_the_shutdown_denies_nothing(run, tmp_path, monkeypatch):
    def interrupted(*args):
        raise KeyboardInterrupt

    monkeypatch.setattr("rollwright.cli.collect._shut_down", interrupted)
    out = tmp_path / "out"
    result = run("collect", "CartPole-v1", "--frames", 20, "--output", out)
    assert result.status == 0
    assert "nothing was saved" not in result.err
    assert load_dataset(out).numel() == 20


def test_signal_before_anything_was_collected(run, tmp_path, module):
    name = module("def make():\n    raise KeyboardInterrupt\n")
    result = run("collect", "CartPole-v1", "--policy", f"{name}:make", "--output", tmp_path / "out")
    assert result.status == 130
    assert "nothing was saved" in result.err
    assert not (tmp_path / "out").exists()


def test_space_that_was_set_aside_is_given_back(run, tmp_path, module):
    name = module(
        "import signal, torch\ndef make():\n    def act(td):\n        signal.raise_signal(signal.SIGTERM)\n"
        "        return td.set('action', torch.tensor([1, 0]))\n    return act\n"
    )
    out = tmp_path / "out"
    result = run(*ENDLESS, "--output", out, "--policy", f"{name}:make")
    assert result.status == 143
    assert sum(file.stat().st_size for file in out.rglob("*.memmap")) < 100
    assert load_dataset(out).batch_size == (1,)


# Signals to another process ------------------------------------------------------------------------


@pytest.mark.skipif(sys.platform == "win32", reason="POSIX signals")
def test_ctrl_c_saves_what_is_complete(spawn, tmp_path):
    process = spawn(*ENDLESS, "--num-envs", 3, "--seed", 7, "--output", "out")
    read_until(process, "frames/s")
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=patient(60))
    assert process.returncode == 130, err
    frames = load_dataset(tmp_path / "out")
    assert f"interrupted: saved {frames.numel():,} of " in err
    assert err.rstrip().endswith("in out")
    assert "Traceback" not in err
    assert_first_frames(frames, 3, 7)


@pytest.mark.skipif(sys.platform == "win32", reason="POSIX signals")
def test_second_ctrl_c_cuts_a_stuck_step_short(spawn, tmp_path):
    (tmp_path / "stuck.py").write_text(
        """
import signal, threading, torch
def make():
    calls = iter(range(10**9))
    def act(td):
        if next(calls) == 50:
            print("no way out", flush=True)
            interrupts = signal.getsignal(signal.SIGINT).__self__
            while not interrupts.collection_stopped():
                threading.Event().wait(0.01)
            print("still in here", flush=True)
            threading.Event().wait()
        return td.set("action", torch.tensor([1, 0]))
    return act
"""
    )
    process = spawn(*ENDLESS, "--frames-per-batch", 20, "--policy", "stuck:make", "--output", "out")
    read_until(process, "no way out")
    process.send_signal(signal.SIGINT)
    read_until(process, "still in here")
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=patient(60))
    assert process.returncode == 130, err
    assert "interrupted: saved 40 of " in err
    assert load_dataset(tmp_path / "out").batch_size == (40,)


@pytest.mark.skipif(sys.platform == "win32", reason="POSIX signals")
def test_killed_hard_leaves_complete_batches_that_say_so(spawn, run, tmp_path):
    process = spawn(*ENDLESS, "--num-envs", 2, "--frames-per-batch", 50, "--seed", 1, "--output", "out")
    read_until(process, "frames/s")
    process.kill()
    process.communicate()
    out = tmp_path / "out"
    description = describe_dataset(out)
    assert description["complete"] is False
    frames = load_dataset(out)
    assert frames.numel() == description["frames"] >= 50
    assert_first_frames(frames, 2, 1)
    shown = run("inspect", out)
    assert shown.status == 0
    assert "INCOMPLETE" in shown.out
    assert run("inspect", out / "frames").out.splitlines()[2:] == shown.out.splitlines()[2:]
    assert run("collect", "CartPole-v1", "--output", out).status == 2
    assert load_dataset(out).numel() == description["frames"]


@pytest.mark.skipif(not hasattr(os, "openpty"), reason="needs a pseudo-terminal")
def test_terminal_shows_live_progress(spawn, tmp_path):
    ours, theirs = os.openpty()
    process = spawn("collect", "CartPole-v1", "--frames", 600, "--output", "out", stdout=theirs)
    os.close(theirs)
    shown = b""
    while True:
        try:
            data = os.read(ours, 4096)
        except OSError:  # the other end was closed
            break
        if not data:
            break
        shown += data
    os.close(ours)
    assert process.wait(timeout=patient(60)) == 0
    text = shown.decode()
    assert "600 / 600 frames" in text
    assert " episodes, return " in text
    assert "━" in text  # a bar
    assert "saved 600 frames" in text


def test_collection_outlives_the_reader_of_its_lines(spawn, tmp_path):
    process = spawn("collect", "CartPole-v1", "--frames", 100, "--output", "out")
    process.stdout.close()
    assert process.wait(timeout=patient(60)) == 0
    assert process.stderr.read() == ""
    assert describe_dataset(tmp_path / "out")["complete"] is True
