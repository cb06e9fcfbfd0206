"""Agents that are killed in mid-call, hang, or fail: groups are complete or failed whole, and no process is left."""

from __future__ import annotations

import os
import random
import time
from pathlib import Path

import pytest
from tests.envs.llm.agents.scripted import ScriptedEngine, collector
from tests.envs.llm.agents.test_programs import assert_ends, program
from tests.patience import patient

from rollwright.envs.llm import AgentEnv

pytestmark = pytest.mark.llm
# How a program ends is drawn from its row and from how often it has begun: killed while it waits for an answer, with a
# child that it has started; failed; hanging; or well, after two turns.
ENDS = """
import random, signal, subprocess, threading
open(os.path.join(row["folder"], str(os.getpid())), "w").close()
draw = random.Random(row["number"] * 1000 + len(os.listdir(row["folder"])) + int(row["seed"]))
how = draw.choices(["well", "killed", "fails", "hangs"], row["weights"])[0]
ask("Hi.")
if how == "killed":
    child = subprocess.Popen(["sleep", "300"])
    open(os.path.join(row["folder"], str(child.pid)), "w").close()
    threading.Timer(draw.uniform(0.0, 0.02), os.kill, (os.getpid(), signal.SIGKILL)).start()
    while True:
        ask("Hi again.")
if how == "fails":
    raise RuntimeError("on purpose")
if how == "hangs":
    time.sleep(300)
ask("Bye.")
"""


def storm(folder: Path, *, rows: int, seed: int, weights: list[int], limit_s: float, streams: bool, on_error: str):
    """Collect all groups; returns those delivered whole, the counts of failures, and the seconds."""
    of = [{"number": number, "folder": str(folder), "seed": seed, "weights": weights} for number in range(rows)]
    env = AgentEnv.from_dataloader(of, program(ENDS), batch_size=8, repeats=2, epochs=1, reply_timeout_s=limit_s)
    made, _ = collector(
        None,
        of=env,
        engine=ScriptedEngine(delay_s=0.001),
        groups_per_batch=1,
        async_envs=streams,
        on_error=on_error,
        max_failures=1000,
    )
    begun, found = time.monotonic(), []
    with made:
        for batch in made:
            found.append(batch)
        stats = made.stats()
    assert_ends(*map(int, os.listdir(folder)))
    return found, stats, time.monotonic() - begun


def check(found, stats, rows, on_error):
    """Each group once, whole; with ``mask``, failures are in it and masked; with ``drop``, they are not there."""
    failed = sum(stats["conversations_failed"].values())
    seen = 0
    for batch in found:
        groups = {int(one["group_id"]) for one in batch.unbind(0)}
        assert len(groups) == 1
        repeats = {int(one["repeat"]) for one in batch.unbind(0)}
        seen += len(repeats)
        for one in batch.unbind(0):
            ended_badly = one["finish_reason"] == "error"
            assert not (ended_badly and one["masks", "all_assistant_mask"].any())
    if on_error == "mask":
        assert len(found) == rows
        assert seen == 2 * rows
    else:
        assert seen == 2 * rows - failed
    return seen, failed


@pytest.mark.parametrize(("streams", "on_error"), [(True, "mask"), (False, "drop")])
def test_groups_are_complete_or_say_what_failed(streams, on_error, tmp_path):
    options = {"rows": 6, "seed": 1, "weights": [4, 3, 2, 0], "limit_s": patient(10.0)}
    found, stats, _ = storm(tmp_path, streams=streams, on_error=on_error, **options)
    _, failed = check(found, stats, 6, on_error)
    assert failed > 0
    assert set(stats["conversations_failed"]) == {"AgentError"}


@pytest.mark.slow
@pytest.mark.timeout(3000)
@pytest.mark.filterwarnings("ignore:LLMCollector ends without a batch")  # all that were begun have failed
def test_a_hundred_rounds(tmp_path):
    draw, tally = random.Random(0), {"delivered": 0, "failed": 0, "longest": 0.0}
    for number in range(100):
        folder = tmp_path / str(number)
        folder.mkdir()
        on_error = draw.choice(["mask", "drop"])
        options = {"rows": 4, "seed": number, "weights": [5, 4, 2, 1], "limit_s": 4.0}
        found, stats, seconds = storm(folder, streams=draw.random() < 0.5, on_error=on_error, **options)
        seen, failed = check(found, stats, 4, on_error)
        tally["delivered"] += seen - failed * (on_error == "mask")
        tally["failed"] += failed
        tally["longest"] = max(tally["longest"], seconds)
        print(number + 1, tally, flush=True)
    assert tally["failed"] > 100
    assert tally["delivered"] + tally["failed"] == 800
