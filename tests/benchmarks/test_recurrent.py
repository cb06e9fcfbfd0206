"""The sides of the recurrent benchmark do the same work."""

from __future__ import annotations

import pytest
import torch
from benchmarks.recurrent import KINDS, PADDED, Case, main, measure


@pytest.mark.parametrize("kind", KINDS)
def test_all_sides_have_the_same_loss_and_gradients(kind):
    case = Case(kind, 8, seed=0)
    grads = [
        torch.autograd.grad(loss(), list(case.parameters()))
        for loss in (case.flat_loss, case.padded_loss, case.packed_loss)
    ]
    for side in grads[1:]:
        for mine, theirs in zip(grads[0], side, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)


def test_sides_that_disagree_are_an_error():
    case = Case("GRU", 8, seed=0)
    case.flat["target"].add_(1.0)
    with pytest.raises(RuntimeError, match="the sides disagree on the loss"):
        measure(case, 1, 0.0)


def test_it_runs_and_writes_a_table(tmp_path, capsys):
    threads = torch.get_num_threads()
    try:
        main(["--quick", "--hidden-size", "8", "--out", str(tmp_path)])
    finally:
        torch.set_num_threads(threads)
    assert PADDED in (tmp_path / "recurrent.md").read_text()
    assert "GRU, hidden 8" in capsys.readouterr().out
