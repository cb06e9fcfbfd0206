"""The backend that docs/transports.md shows is one: it passes the suite."""

from __future__ import annotations

import sys

import pytest
from tests.patience import patient
from tests.test_docs import BLOCK, ROOT

from rollwright.collectors.workers.transports import BACKENDS
from rollwright.testing.transports import check_transport


@pytest.fixture
def documented(tmp_path, monkeypatch):
    """The first block is a module, the second gives it a name."""
    module, name, *_ = BLOCK.findall((ROOT / "docs" / "transports.md").read_text())
    (tmp_path / "my_cluster.py").write_text(module)
    monkeypatch.syspath_prepend(str(tmp_path))
    exec(name, {})
    yield
    del BACKENDS["my_cluster"], sys.modules["my_cluster"]


@pytest.mark.parametrize("name", ["weights_by_worker", pytest.param("shutdown", marks=pytest.mark.slow)])
def test_the_documented_backend(documented, name):
    options = {"num_workers_per_collector": 3}
    check_transport("my_cluster", options, only=[name], limit_s=patient(60.0), failure_s=patient(5.0))
