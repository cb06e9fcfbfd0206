"""Every example runs, is short, and does what it says."""

from __future__ import annotations

from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.py")), ids=lambda path: path.name)
def test_short(path):
    assert len(path.read_text().splitlines()) <= 175  # of which settings take some 20
