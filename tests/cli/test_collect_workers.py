"""``rollwright collect --workers``: what lies in the dataset, what is shown, how it ends."""

from __future__ import annotations

import io
import json
import os
import signal
from functools import partial

import pytest
import torch
from rich.console import Console
from tests.patience import patient

from rollwright._processes.connection import ExceptionInfo as Raised
from rollwright.cli import workers
from rollwright.cli.errors import Failure
from rollwright.cli.workers import table
from rollwright.collectors import MultiSyncCollector
from rollwright.data.datasets import describe_dataset, load_dataset
from rollwright.envs import GymEnv

COUNTED = """
import os, torch
def make():
    pid = os.getpid()
    def act(td):
        td["pid"] = torch.full((*td.batch_size, 1), pid)
        td["action"] = torch.ones(td.batch_size, dtype=torch.int64)
        return td
    return act
def break_late():
    steps = iter(range(45))
    def act(td):
        if next(steps, None) is None:
            raise RuntimeError("the policy broke")
        return td.set("action", torch.tensor(1))
    return act
def hang():
    def act(td):
        open("hangs", "w").close()
        import threading
        threading.Event().wait(60)
    return act
"""


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (Failure("--policy: none"), "worker 1: Failure: --policy: none"),
        (FileNotFoundError("no weights"), "worker 1: FileNotFoundError: no weights"),
        (FileExistsError("weights"), "worker 1: FileExistsError: weights"),
    ],
)
def test_what_a_worker_raises_at_its_start_ends_the_command(run, monkeypatch, error, told):
    def fail(*_):
        raise Raised.of(error).error("worker 1", 1)

    monkeypatch.setattr(workers, "make_collector", fail)
    result = run("collect", "CartPole-v1", "--workers", 2, "--frames", 10)
    assert result.status in (1, 2)
    assert result.err == f"rollwright collect: {told}\n"


def read_until(process, text):
    for line in process.stdout:
        if text in line:
            return line
    pytest.fail(f"ended without {text!r}: {process.communicate()[1]}")


@pytest.mark.parametrize("num_envs", [1, 2])
def test_workers_in_step_write_a_row_for_each_environment(run, tmp_path, num_envs):
    out = tmp_path / "out"
    result = run(
        *("collect", "CartPole-v1", "--workers", 2, "--num-envs", num_envs, "--frames", 240),
        *("--frames-per-batch", 80, "--seed", 3, "--output", out),
    )
    assert result.status == 0, result.err
    assert f"in 2 workers of {num_envs} environment" in result.out
    options = {"num_envs": num_envs} if num_envs > 1 else {}
    collector = MultiSyncCollector(
        partial(GymEnv, "CartPole-v1", **options), num_workers=2, frames_per_batch=240, total_frames=240
    )
    collector.set_seed(3)
    with collector:
        expected = collector.next().clone()
    frames = load_dataset(out)
    assert frames.batch_size == (2 * num_envs, 240 // 2 // num_envs)
    for key, value in expected.items(True, True):
        assert torch.equal(frames[key], value.reshape(frames[key].shape)), key
    assert run("inspect", out, "--check").status == 0


@pytest.mark.parametrize("num_envs", [1, 2])
def test_workers_by_themselves_write_complete_episodes(run, tmp_path, num_envs):
    out = tmp_path / "out"
    result = run(
        *("collect", "CartPole-v1", "--workers", 2, "--async", "--num-envs", num_envs, "--frames", 500),
        *("--seed", 3, "--output", out),
    )
    assert result.status == 0, result.err
    frames = load_dataset(out)
    assert frames.batch_size == (500,)
    ends = frames["next", "done"].squeeze(-1).nonzero().squeeze(-1).tolist()
    ids = frames["collector", "traj_ids"]
    starts = [0, *(end + 1 for end in ends)]
    for start, stop in zip(starts, [*starts[1:], 500], strict=True):
        assert len(set(ids[start:stop].tolist())) <= 1
        assert start == 500 or frames["observation"][start].abs().max() <= 0.05  # an episode begins
    assert describe_dataset(out)["complete"] is True
    assert run("inspect", out, "--check").status == 0


def test_the_description_names_workers_and_pace(run, tmp_path):
    for options in ([], ["--sync"], ["--async"]):
        out = tmp_path / f"out{''.join(options)}"
        run(*("collect", "CartPole-v1", "--workers", 2, *options, "--frames", 40, "--output", out))
        source = json.loads((out / "dataset.json").read_text())["source"]
        assert (source["workers"], source["pace"]) == (2, "async" if "--async" in options else "sync")


def test_a_policy_is_made_in_each_worker(run, tmp_path, module):
    out = tmp_path / "out"
    result = run(
        *("collect", "CartPole-v1", "--workers", 2, "--frames", 40, "--categorical-actions"),
        *("--policy", f"{module(COUNTED)}:make", "--output", out),
    )
    assert result.status == 0, result.err
    pids = load_dataset(out)["pid"].squeeze(-1)
    assert [len(set(row.tolist())) for row in pids] == [1, 1]
    assert len({os.getpid(), *pids[:, 0].tolist()}) == 3


def test_a_policy_that_breaks_in_a_worker_keeps_complete_batches(run, tmp_path, module):
    out = tmp_path / "out"
    result = run(
        *("collect", "CartPole-v1", "--workers", 2, "--frames", 200, "--frames-per-batch", 40),
        *("--categorical-actions", "--policy", f"{module(COUNTED)}:break_late", "--output", out),
    )
    assert result.status == 1
    assert "RuntimeError: the policy broke" in result.err
    assert "worker " in result.err
    assert "saved 80 of 200 frames" in result.err
    assert "Traceback" not in result.err
    assert load_dataset(out).batch_size == (2, 40)


def test_what_cannot_be_made_in_a_worker_is_refused(run, tmp_path, module):
    name = module("import os\nmain = os.getpid()\ndef make():\n    return None\n")
    result = run("collect", "CartPole-v1", "--workers", 2, "--policy", f"{name}:make", "--output", tmp_path / "out")
    assert result.status == 2
    assert "make() returned None" in result.err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--async"], "--async: says how workers collect. Add --workers N."),
        (["--sync"], "--sync: says how workers collect. Add --workers N."),
        (["--workers", "2", "--sync", "--async"], "not allowed with argument"),
        (["--workers", "0"], "--workers: expected a whole number of at least 1"),
    ],
)
def test_wrong_arguments_are_refused(run, tmp_path, options, message):
    result = run("collect", "CartPole-v1", "--output", tmp_path / "out", *options)
    assert result.status == 2
    assert message in result.err
    assert not (tmp_path / "out").exists()


def test_minari_episodes_of_workers_claim_no_seed(run, tmp_path):
    minari = pytest.importorskip("minari")
    arguments = ("--frames", 300, "--format", "minari", "--dataset-id", "cart-v0", "--output", tmp_path)
    result = run("collect", "CartPole-v1", "--workers", 2, *arguments)
    assert result.status == 0, result.err
    dataset = minari.MinariDataset(tmp_path / "cart-v0" / "data")
    assert dataset.total_episodes > 2
    assert {episode.get("seed") for episode in dataset.storage.get_episode_metadata(range(2))} <= {None, "None"}


# Signals, and what is shown ------------------------------------------------------------------------


def test_ctrl_c_saves_what_is_complete(spawn, tmp_path):
    process = spawn("collect", "CartPole-v1", "--frames", "1e8", "--workers", 2, "--output", "out")
    read_until(process, "frames/s")
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=patient(60))
    assert process.returncode == 130, err
    frames = load_dataset(tmp_path / "out")
    assert f"interrupted: saved {frames.numel():,} of " in err
    assert "Traceback" not in err
    assert frames.batch_size[0] == 2


def test_a_second_signal_ends_workers_that_are_stuck(spawn, tmp_path):
    (tmp_path / "stuck.py").write_text(COUNTED)
    process = spawn("collect", "CartPole-v1", "--workers", 1, "--policy", "stuck:hang", "--output", "out")
    read_until(process, "collecting")
    while not (tmp_path / "hangs").exists():
        assert process.poll() is None
    process.send_signal(signal.SIGINT)
    process.send_signal(signal.SIGTERM)  # another one: two of a kind may become one on their way
    _, err = process.communicate(timeout=patient(60))
    assert process.returncode in (130, 143), err  # the status of the one that came first
    assert "interrupted: nothing was collected" in err


@pytest.mark.skipif(not hasattr(os, "openpty"), reason="needs a pseudo-terminal")
def test_a_terminal_shows_the_workers(spawn, tmp_path):
    ours, theirs = os.openpty()
    process = spawn("collect", "CartPole-v1", "--workers", 2, "--frames", 800, "--output", "out", stdout=theirs)
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
    assert process.wait(timeout=patient(60)) == 0, process.stderr.read()
    text = shown.decode()
    assert "800 / 800 frames" in text
    for name in ("worker", "state", "policy", "env", "wait", "restarts", "400"):
        assert name in text
    assert text.index("━") < text.index("restarts")


def test_the_table_has_a_row_for_each_worker():
    seconds = {"policy": 1.0, "env": 2.0, "write": 0.0, "weights": 0.0, "wait": 1.0, "total": 9.0}
    worker = {"index": 0, "alive": True, "state": "taking_weights", "frames": 1234, "episodes": 5, "restarts": 0}
    gone = {**worker, "index": 1, "alive": False, "seconds": dict.fromkeys(seconds, 0.0), "restarts": 2}
    console = Console(file=io.StringIO(), width=100)
    console.print(table({"workers": [{**worker, "seconds": seconds}, gone]}))
    _, first, second = (line.split() for line in console.file.getvalue().splitlines())
    assert first == ["0", "taking", "weights", "1,234", "5", "25%", "50%", "0%", "0%", "25%", "0"]
    assert second == ["1", "gone", "1,234", "5", "-", "-", "-", "-", "-", "2"]
