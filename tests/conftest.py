"""What holds for every test: ``cuda`` tests are skipped without a device, and limits grow with the machine's load."""

from __future__ import annotations

from collections.abc import Generator

import pytest
import torch
from tests.patience import patient


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="needs a CUDA device")
    for item in items:
        if item.get_closest_marker("cuda"):
            item.add_marker(skip)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """Scale the time limit of the test."""
    marker = item.get_closest_marker("timeout")
    limit_s, how = (item.config.getini("timeout"), {}) if marker is None else (marker.args[0], marker.kwargs)
    item.add_marker(pytest.mark.timeout(patient(float(limit_s)), **how), append=False)
    return (yield)
