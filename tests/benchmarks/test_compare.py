"""The comparison: its cases run, its table says what was measured and what was not."""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path

import pytest
import torch
from benchmarks.cases import CASES, HAND, MASKED, OURS, SB3, Case, find_case
from benchmarks.compare import Measured, main, measure, promise_rows, table_rows
from benchmarks.peers.protocol import Peer, PeerError

from benchmarks import compare, hand, ours


def short(name: str, steps: int = 40) -> Case:
    return dataclasses.replace(find_case(name), steps=steps)


@pytest.fixture(autouse=True)
def _threads():
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_the_loop_by_hand_stores_what_our_collector_stores(case):
    if case.source == "envpool":
        pytest.importorskip("envpool")
    case = dataclasses.replace(case, num_envs=min(case.num_envs, 4), steps=6)
    loop, close = hand.make_loop(case, HAND)
    with ours.make_collector(case, OURS) as collector:
        batch = next(iter(collector))
    stored = loop.collect()
    close()
    pairs = {"traj_id": ("collector", "traj_ids"), "log_prob": "action_log_prob", "next_observation": "observation"}
    if case.policy == "pixels":
        pairs |= {"observation": "pixels", "next_observation": "pixels"}
    for name, value in stored.items():
        below = name in ("next_observation", "reward", "terminated", "truncated", "done")
        entry = batch["next"] if below else batch
        assert entry[pairs.get(name, name)].numel() == value.numel(), name
        assert entry[pairs.get(name, name)].dtype == value.dtype, name


@pytest.mark.parametrize("side", [HAND, MASKED])
def test_envpool_by_hand_crosses_no_episode(side):
    pytest.importorskip("envpool")
    loop, close = hand.make_loop(dataclasses.replace(find_case("64 CartPole, EnvPool"), num_envs=3), side)
    batch = {name: value.clone() for name, value in loop.collect().items()}
    close()
    valid = batch.get("valid", torch.ones_like(batch["done"]))
    assert batch["done"].any()
    assert loop.frames == valid.sum()
    followed = ~batch["done"][:-1]
    assert torch.equal(batch["observation"][1:][followed], batch["next_observation"][:-1][followed])
    # The first observation of an episode is small; the last is beyond a limit, unless time ended it.
    assert (batch["observation"][1:][~followed & valid[1:]].abs() <= 0.05).all()
    over = batch["terminated"] & valid
    last = batch["next_observation"][over]
    assert ((last[:, 0].abs() > 2.4) | (last[:, 2].abs() > 0.209)).all()
    if side == MASKED:
        assert torch.equal(~valid[1:], batch["done"][:-1])


def test_all_sides_of_a_case_are_measured_once_a_round():
    result = measure(short("Pendulum"), {}, rounds=2, seconds=0.0)
    assert {name: len(rates) for name, rates in result.rates.items()} == {HAND: 2, OURS: 2}
    assert all(rate > 0 for rates in result.rates.values() for rate in rates)


def test_a_peer_without_an_environment_is_named(tmp_path):
    result = measure(short("Pendulum"), {"torchrl": tmp_path / "no", "sb3": tmp_path / "no"}, rounds=1, seconds=0.0)
    assert set(result.missing) == {*compare.USUAL_PEERS}
    assert "there is no no at" in result.missing[SB3]
    assert any("not measured: there is no" in row[2] for row in table_rows([result]))


def test_a_peer_that_fails_says_why():
    with pytest.raises(PeerError, match="No module named"):
        Peer(Path(sys.executable), "benchmarks.peers.absent", "1 CartPole", "")


def test_promises_are_judged_by_the_ratio_and_left_open_without_one():
    case = find_case("256 CartPole, EnvPool")  # at least 0.85 of the loop by hand
    kept = promise_rows([Measured(case, {HAND: [100.0], OURS: [90.0]}, {})])
    broken = promise_rows([Measured(case, {HAND: [100.0], OURS: [80.0]}, {})])
    absent = promise_rows([Measured(case, {OURS: [80.0]}, {})])
    assert [row[2:] for row in kept + broken + absent] == [["0.90", "yes"], ["0.80", "no"], ["not measured", ""]]


def test_the_report_names_what_was_measured(tmp_path, capsys):
    main(["--case", "Pendulum", "--quick", "--no-peers", "--out", str(tmp_path)])
    text = (tmp_path / "compare.md").read_text()
    assert "rollwright 0." in text
    assert "| Pendulum | by hand |" in text
    assert set(json.loads((tmp_path / "compare.json").read_text())["Pendulum"]["frames_per_second"]) == {HAND, OURS}
    assert (tmp_path / "compare.png").exists() or "no picture" in capsys.readouterr().out
