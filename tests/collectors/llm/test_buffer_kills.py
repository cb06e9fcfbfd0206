"""Two workers fill one ragged buffer in the background, and are killed: nothing half written, lost, or stored twice."""

from __future__ import annotations

import os
import random
import signal
import time
import warnings
from functools import partial

import pytest
import torch
from tensordict import is_non_tensor
from tests.collectors.llm.fakes import VOCABULARY
from tests.collectors.llm.shares import KEYS, buffer, make
from tests.patience import patient

from rollwright.data import RaggedStorage, ReplayBuffer

OF_THE_RUN = ("seconds", "collector")  # differ from run to run
MODES = {
    "turns": {"dialog_turns_per_batch": 10},
    "stream": {"dialog_turns_per_batch": 6, "async_envs": True},
    "conversations": {"trajs_per_batch": 2, "async_envs": True},
    "groups": {"groups_per_batch": 1, "async_envs": True},
}


def checked(row):
    """A record whose entries fit each other: its name, and what does not differ from run to run."""
    tokens, response = row["tokens"], row["tokens_response"]
    begin = len(tokens) - len(response)
    assert len(response) == len(row["log_probs"]) == len(row["tokens_policy_version"]) > 0
    assert torch.equal(tokens[begin:], response)
    assert torch.equal(row["log_probs"], -response.float() / VOCABULARY)
    assert row["attention_mask"].tolist() == [1] * len(tokens)
    assert row["assistant_mask"].tolist() == [False] * begin + [True] * len(response)
    assert row["tokens_policy_version"].tolist() == [0] * len(response)
    assert row["collector", "traj_ids"] >= 0
    assert row["next", "reward"].item() == response.sum().item()
    if not row["next", "done"]:
        assert torch.equal(row["next", "tokens"][: len(tokens)], tokens)
    kept = {}
    for key, value in row.exclude(*OF_THE_RUN).items(include_nested=True, leaves_only=True):
        kept[key] = value.data if is_non_tensor(value) else value.tolist() if isinstance(value, torch.Tensor) else value
    return tuple(int(row[key]) for key in KEYS), kept


def records_of(batch):
    """Records by name; none comes twice."""
    found = {}
    for row in batch.reshape(-1).unbind(0):
        if row["collector", "traj_ids"] >= 0:
            name, kept = checked(row)
            assert name not in found, f"{name} is there twice"
            found[name] = kept
    return found


def undisturbed(**options):
    with make(0, delay_s=0.0, **options) as collector:
        return {name: kept for batch in collector for name, kept in records_of(batch).items()}


def wait_for(condition, collector):
    until = time.monotonic() + patient(30)
    while not condition():
        assert time.monotonic() < until, collector.stats()
        time.sleep(0.002)


def kill(collector, worker, after_s):
    """Kill a worker some time after it has begun to collect."""

    def state():
        return collector.stats()["workers"][worker]

    wait_for(lambda: state()["alive"] and state()["state"] != "starting", collector)
    pid = state()["pid"]
    time.sleep(after_s)
    os.kill(pid, signal.SIGKILL)
    wait_for(lambda: state()["pid"] != pid, collector)


def fill_under_kills(kills, seed, mode, make_buffer=buffer):
    """Kill workers at random moments, spread over the data; what was counted."""
    draw, rb, options = random.Random(seed), make_buffer(), {"env": {"prompts": 10 + 3 * kills}, **MODES[mode]}
    wanted = undisturbed(**options)
    at = sorted(draw.randrange(len(wanted) * 3 // 4) for _ in range(kills))
    published = {}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*It is replaced", RuntimeWarning)
        with make(2, replay_buffer=rb, **options) as collector:
            collector.start()
            for turns in at:
                wait_for(lambda turns=turns: len(rb) >= turns, collector)
                kill(collector, draw.randrange(2), draw.uniform(0.0, 0.03))
                now = records_of(rb[:]) if len(rb) else {}
                assert published.keys() <= now.keys(), "turns that were published are lost"
                published = now
            wait_for(lambda: collector.completed, collector)
            restarts = collector.stats()["restarts"]
    found = records_of(rb[:])
    assert restarts >= kills
    assert found == wanted
    tally = {
        "kills": kills,
        "restarts": restarts,
        "turns": len(wanted),
        "positions given up": getattr(rb.storage.ledger, "num_lost", 0),
        "half written": 0,
        "skipped": len(wanted.keys() - found.keys()),
        "twice": 0,
        "other tokens": sum(found[name] != wanted[name] for name in found),
    }
    rb.shutdown()
    return tally


@pytest.mark.parametrize("mode", ["stream", "groups"])
def test_killed_workers_leave_nothing_half_written_and_lose_nothing(mode):
    assert fill_under_kills(3, 2, mode)["kills"] == 3


def service():
    return ReplayBuffer(storage=partial(RaggedStorage, 10_000), batch_size=4, service_backend="process")


@pytest.mark.parametrize("mode", ["groups"])
def test_killed_workers_leave_nothing_half_written_in_a_service(mode):
    assert fill_under_kills(3, 2, mode, service)["kills"] == 3


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("mode", MODES)
def test_fifty_kills(mode, capsys):
    tally = fill_under_kills(50, 50, mode)
    with capsys.disabled():
        print(f"\n{mode}: " + ", ".join(f"{name} {value:,}" for name, value in tally.items()))
