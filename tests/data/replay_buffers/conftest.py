"""Fixtures of the tests of replay buffers."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture(autouse=True)
def _seeded():
    """What a test draws is the same in each run."""
    torch.manual_seed(0)
