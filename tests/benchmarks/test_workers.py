"""The benchmarks of many workers: sides deliver what is counted, the counting is right, reports say what is there."""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
import time
from contextlib import ExitStack

import pytest
import torch
from benchmarks.peers.gymnasium_workers import draw_any
from benchmarks.workers import Measured, main, measure, promise_rows, table_rows
from benchmarks.workers_cases import (
    ASYNC,
    CARTPOLE,
    CASES,
    GYMNASIUM,
    ONE,
    PIXELS,
    PIXELS_RANDOM,
    SYNC,
    TARGETS,
    TORCHRL_ASYNC,
    TORCHRL_SYNC,
    Case,
    find_case,
    make_gym,
)
from benchmarks.workers_clocks import Stamped, measure_publications, measure_starts
from benchmarks.workers_counts import MessageCounter, count
from benchmarks.workers_publish import measure_own
from benchmarks.workers_publish import table_rows as publish_rows
from benchmarks.workers_sides import check_batch, make_collector, make_side
from benchmarks.workers_start import promise_rows as start_promises
from tests.variants import in_turn

from rollwright._processes.channel import Channel


@pytest.fixture(autouse=True)
def _threads():
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize(("side", "source"), in_turn([ONE, SYNC, ASYNC], [CARTPOLE, PIXELS, PIXELS_RANDOM]))
def test_each_side_delivers_whole_batches(source, side):
    case = Case(source, 2, 20)
    with make_collector(case, side) as collector:
        batch = next(iter(collector))
        assert batch.numel() == (40 if side == SYNC else 20)
        check_batch(batch, 20)
    with ExitStack() as stack:
        assert make_side(case, side, stack)() == (20 if side == ONE else 40)


@pytest.mark.parametrize("what", ["a gap", "one id twice", "frames not stepped"])
def test_a_batch_that_is_not_whole_is_seen(what):
    with make_collector(Case(CARTPOLE, 2, 30), SYNC) as collector:
        batch = next(iter(collector)).clone()
    ids = batch["collector", "traj_ids"]
    if what == "a gap":
        batch["observation"][1, 1] += 1
        expected = "missing in the middle"
    elif what == "one id twice":
        ids[1, -1] = ids[0, 0]
        expected = "two workers"
    else:
        ids[0, -1] = -1
        expected = "not stepped"
    with pytest.raises(RuntimeError, match=expected):
        check_batch(batch, 30)


@pytest.mark.parametrize("busy", [False, True])
def test_a_step_takes_as_long_as_it_is_said_to(busy):
    env = make_gym(Case(CARTPOLE, 1, 1, step_ms=20, busy=busy))
    env.reset(seed=0)
    start, used = time.perf_counter(), time.thread_time()
    for _ in range(3):
        env.step(0)
    assert time.perf_counter() - start >= 0.06
    assert (time.thread_time() - used >= 0.06) is busy


def test_images_are_a_stack_of_the_last_four():
    env = make_gym(Case(PIXELS, 1, 1))
    seen = [env.reset(seed=0)[0], *(env.step(1)[0] for _ in range(4))]
    assert seen[0].shape == (84, 84, 4)
    assert [int(image.any()) for image in seen[0].transpose(2, 0, 1)] == [0, 0, 0, 1]
    for before, after in itertools.pairwise(seen):
        assert (after[..., :3] == before[..., 1:]).all()
        assert after[..., 3].any()
        assert not (after[..., 3] == before[..., 3]).all()


def test_all_sides_of_a_case_are_measured_once_a_round(tmp_path):
    case = dataclasses.replace(find_case("CartPole; 2"), steps=20)
    result = measure(case, {"own": tmp_path / "no", "torchrl": tmp_path / "no"}, rounds=2, seconds=0.0)
    assert {name: len(rates) for name, rates in result.rates.items()} == {ONE: 2, SYNC: 2, ASYNC: 2}
    assert all(rate > 0 for rates in result.rates.values() for rate in rates)
    assert set(result.missing) == {GYMNASIUM, TORCHRL_SYNC, TORCHRL_ASYNC}
    assert table_rows([result])[0][:2] == ["CartPole", "2"]


def test_every_target_names_a_case_and_is_judged_by_the_ratio():
    named = {(case.env_name, case.workers): case for case in CASES}
    assert len(named) == len(CASES)
    for target in TARGETS:
        case = named[target.env_name, target.workers]
        rates = {target.base: [100.0], target.side: [100.0 * target.least]}
        (kept,) = (row for row in promise_rows([Measured(case, rates, {})]) if row[2] != "not measured")
        broken = promise_rows([Measured(case, {**rates, target.side: [99.0 * target.least]}, {})])
        assert kept[3] == "yes"
        assert "no" in [row[3] for row in broken]


def test_actions_by_chance_for_the_loop_by_hand():
    action, log_prob, _ = draw_any(torch.zeros(64, 3))
    assert sorted(set(action.tolist())) == [0, 1]
    assert log_prob.shape == (64,)


def test_messages_are_counted_and_channels_are_left_as_they_were():
    before = Channel.send, Channel.recv
    mine, theirs = Channel.pair()
    with MessageCounter() as counter:
        mine.send(b"x" * 1000)
        theirs.recv(1.0)
    assert counter.messages == 2
    assert 2000 <= counter.num_bytes <= 2100
    assert (Channel.send, Channel.recv) == before


@pytest.mark.parametrize("side", [SYNC, ASYNC])
def test_handing_over_copies_nothing_and_takes_two_messages_a_rollout(side):
    counts = count(Case(PIXELS_RANDOM, 2, 30), side, batches=4, idle_s=0.1)
    assert counts.bytes_moved == 0
    assert round(counts.messages) == (4 if side == SYNC else 2)  # the first or the last may belong to others
    assert counts.message_bytes < 1000
    assert counts.frame_bytes > 2 * 84 * 84 * 4


def test_starts_are_those_of_a_collector_and_of_another_after_it():
    told = []

    class Slow:
        def __init__(self):
            told.append("made")

        def __iter__(self):
            return iter([told.append("first batch")])

        def shutdown(self):
            told.append("shut down")

    seconds = measure_starts(Slow)
    assert told == ["made", "first batch", "shut down"] * 2
    assert set(seconds) == {"first", "second"}
    seconds = {SYNC: {"first": [1.0], "second": [0.3]}, TORCHRL_SYNC: {"first": [4.0], "second": [1.0]}}
    judged = start_promises(seconds)
    assert [row[2:] for row in judged] == [["0.25", "yes"], ["0.30", "no"], ["not measured", ""], ["not measured", ""]]


@pytest.mark.parametrize("side", [SYNC, ASYNC])
def test_published_weights_act_whole_and_soon(side):
    found = measure_own(side, workers=2, num_bytes=100_000, rounds=3)
    assert found["torn"] == 0
    assert found["frames"] > 0
    for call, first, last in zip(found["call"], found["first"], found["last"], strict=True):
        assert 0 < first <= last < 60
        assert call > 0
    (row,) = publish_rows({"1 MB": {side: found}})
    assert row[:2] == ["1 MB", side]
    assert publish_rows({"1 MB": {side: {"missing": "no such thing"}}})[0][2] == "not measured: no such thing"


def test_frames_of_two_versions_are_counted():
    policy = Stamped(1000)
    policy.stamp(1)
    with torch.no_grad():
        policy.behind.fill_(0)
    whole, torn = Stamped(1000), policy
    whole.stamp(1)

    def frames(module):
        outputs = dict(zip(Stamped.out_keys, module(torch.zeros(4)), strict=True))
        assert int(outputs["pid"]) == os.getpid()
        return {key: value.reshape(1) for key, value in outputs.items()}

    old = Stamped(1000)
    stream = [*(lambda: frames(old) for _ in range(4)), lambda: frames(torn), lambda: frames(whole)]
    found = measure_publications((make() for make in stream), whole, lambda: None, workers=1, rounds=1)
    assert (found["torn"], found["frames"]) == (1, 6)
    assert found["first"] == found["last"]


def test_the_report_names_what_was_measured(tmp_path, capsys):
    main(["--quick", "--no-peers", "--env", CARTPOLE, "--workers", "1", "--out", str(tmp_path)])
    text = (tmp_path / "workers.md").read_text()
    assert "| CartPole | 1 |" in text
    assert "rollwright 0." in capsys.readouterr().out
    assert set(json.loads((tmp_path / "workers.json").read_text())["CartPole; 1"]["frames_per_second"]) == {
        ONE,
        SYNC,
        ASYNC,
    }
