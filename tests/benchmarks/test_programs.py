"""Whole programs: the loop by hand stores what a collector stores, and the report names the worst case."""

from __future__ import annotations

import dataclasses
import json

import pytest
import torch
from benchmarks.programs import Measured, main, ratio_rows
from benchmarks.programs_cases import HAND, OURS, PROGRAMS, find_program
from benchmarks.programs_hand import Loop
from benchmarks.programs_sides import Library, NotThere, make_program

SMALL = ("Pendulum, SAC with a buffer", "CartPole, GRU", "8 x CartPole, GRU", "8 x A user's environment")


@pytest.fixture(autouse=True)
def _threads():
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("name", SMALL)
def test_the_loop_by_hand_stores_what_our_collector_stores(name):
    program = dataclasses.replace(find_program(name), steps=30, samples=0)
    library = Library("rollwright")
    _, collector = make_program(library, program)
    batch = next(iter(collector))
    collector.shutdown()
    loop = Loop(program)
    stored = loop.collect()
    loop.close()
    assert stored.batch_size == batch.batch_size
    for key in (
        "observation",
        "action",
        "action_log_prob",
        ("next", "observation"),
        ("next", "done"),
        ("collector", "traj_ids"),
    ):
        assert stored[key].numel() == batch[key].numel(), key
        assert stored[key].dtype == batch[key].dtype, key


def test_the_loop_by_hand_crosses_no_episode():
    program = dataclasses.replace(find_program("8 x CartPole, GRU"), steps=60)
    loop = Loop(program)
    batch = loop.collect()
    loop.close()
    done = batch["next", "done"][:, :-1]
    assert done.any()
    following, ids = batch["observation"][:, 1:], batch["collector", "traj_ids"]
    assert torch.equal(following[~done], batch["next", "observation"][:, :-1][~done])
    assert (following[done].abs() <= 0.05).all()
    assert torch.equal(ids[:, 1:] != ids[:, :-1], done)
    assert not batch["recurrent_state"][:, 1:][done].any()


def test_a_name_that_is_lacking_is_named():
    with pytest.raises(NotThere, match=r"rollwright\.envs\.NoSuchTransform"):
        Library("rollwright").transform("NoSuchTransform")


def test_the_report_gives_worst_mean_and_best():
    results = [Measured(PROGRAMS[i], {HAND: [100.0], OURS: [speed]}, {}, {}) for i, speed in enumerate((50.0, 150.0))]
    rows = {row[0]: row[1:] for row in ratio_rows(results)}
    assert [rows[name][0] for name in ("**worst**", "**mean**", "**best**")] == ["0.50", "1.00", "1.50"]
    assert rows[PROGRAMS[0].name][2] == "not measured"


def test_it_runs_and_writes_table_and_json(tmp_path):
    main(["--quick", "--no-peers", "--case", SMALL[0], "--out", str(tmp_path)])
    assert "**worst**" in (tmp_path / "programs.md").read_text()
    raw = json.loads((tmp_path / "programs.json").read_text())[SMALL[0]]
    assert {HAND, OURS} <= set(raw["frames_per_second"])
