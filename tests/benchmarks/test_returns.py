"""The report of returns compares means by their spread, and names a peer that is not there."""

from __future__ import annotations

from pathlib import Path

import pytest
from benchmarks.returns import main, rows


def test_a_difference_is_given_over_its_standard_error():
    found = {"ppo": {"rollwright": [1.0, 2.0, 3.0], "torchrl": [2.0, 3.0, 4.0]}}
    ((title, ours, theirs, difference),) = rows(found)
    assert (title, ours, theirs) == ("PPO, CartPole-v1", "2.0 ± 1.0", "3.0 ± 1.0")
    assert float(difference) == pytest.approx(-1 / (2 / 3) ** 0.5, abs=0.05)


def test_a_peer_that_is_not_there_is_named(tmp_path):
    main(["--quick", "--torchrl-python", str(Path("nowhere/python")), "--out", str(tmp_path)])
    assert "Not measured: there is no python at nowhere/python" in (tmp_path / "returns.md").read_text()
