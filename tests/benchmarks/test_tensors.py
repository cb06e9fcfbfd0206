"""The sides of the benchmark of environments that are one tensor collect the same frames."""

from __future__ import annotations

import pytest
import torch
from benchmarks.tensors import KINDS, ByHand, Case, Ours, main

ENTRIES = {"seen": "observation", "action": "action", "next": ("next", "observation"), "reward": ("next", "reward")}
ENTRIES |= {"done": ("next", "done"), "root done": "done", "ids": ("collector", "traj_ids")}


@pytest.mark.parametrize("kind", KINDS)
def test_both_sides_collect_the_same_frames(kind):
    case, found = Case(kind, 64), []
    for side in (ByHand, Ours):
        torch.manual_seed(0)
        made = side(case, 64)
        for _ in range(3):
            made.collect()
        found.append(made)
    hand, ours = found
    assert ours.how == "native: tensors"
    for name, key in ENTRIES.items():
        if kind == "agents" and name in ("seen", "action", "next"):
            key = ("next", "agents", "observation") if name == "next" else ("agents", key)
        assert torch.equal(hand.batch[name], ours.batch[key]), name
    assert int(hand.batch["ids"].max()) > 64
    ours.close()


def test_it_runs_and_writes_a_table(tmp_path, capsys):
    threads = torch.get_num_threads()
    try:
        main(["--quick", "--out", str(tmp_path)])
    finally:
        torch.set_num_threads(threads)
    assert "8192" in (tmp_path / "tensors.md").read_text()
    assert "native: tensors" in capsys.readouterr().out
