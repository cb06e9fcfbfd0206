"""For every test: markers of promises, time limits that grow with the load, programs, and no process that is left."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest
import torch
from tests.collectors.workers.processes import left_behind, strangers
from tests.patience import patient
from tests.programs import IMPORTED_BY_WORKERS, Programs
from tests.promises import PROMISES

from rollwright._processes.start import SERVER_IMPORTS

pytest_plugins = ["pytester"]
gc.disable()  # until all is imported, and nothing of it is garbage

# Tests run in as many processes as there are cores. With more threads than cores, a softmax of six numbers waits for
# milliseconds until all threads of its process have had their turn.
torch.set_num_threads(1)

# Tests start many interpreters. They compile the package once, and not each of them, where containers forbid that.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

SERVER_IMPORTS.extend(IMPORTED_BY_WORKERS)

FIRST = ("typing", "examples")  # folders of few tests that take long: at the end, one process would wait for another
_MARKERS: dict[Path, list[str]] = {}
for _name, _promise in PROMISES.items():
    for _file in _promise.files:
        _MARKERS.setdefault(Path(__file__).parent / _file, []).append(_name)


def pytest_configure(config: pytest.Config) -> None:
    for name, promise in PROMISES.items():
        config.addinivalue_line("markers", f"{name}: {promise.text}")


@pytest.hookimpl(tryfirst=True)  # before markers select
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        for name in _MARKERS.get(item.path, ()):
            item.add_marker(name)
    items.sort(key=lambda item: item.path.parent.name not in FIRST)
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="needs a CUDA device")
    for item in items:
        if item.get_closest_marker("cuda"):
            item.add_marker(skip)


def pytest_collection_finish() -> None:
    """Leave all that was imported out of garbage collections: each took half a second otherwise."""
    gc.collect()
    gc.freeze()
    gc.enable()


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """Scale the time limit of the test."""
    marker = item.get_closest_marker("timeout")
    limit_s, how = (item.config.getini("timeout"), {}) if marker is None else (marker.args[0], marker.kwargs)
    item.add_marker(pytest.mark.timeout(patient(float(limit_s)), **how), append=False)
    return (yield)


@pytest.fixture(autouse=True, scope="module")
def no_process_left() -> Iterator[None]:
    """The tests of a file end the processes that they start; later files would be blamed for them."""
    yield
    if strangers():
        gc.collect()
        assert left_behind() == []


@pytest.fixture(scope="session")
def programs_of_all() -> Iterator[Programs]:
    """One for all tests: it starts when a program does."""
    programs = Programs()
    yield programs
    programs.stop()


@pytest.fixture
def programs(programs_of_all: Programs) -> Iterator[Programs]:
    """Starts Python programs; those that still run at the end of the test are killed."""
    yield programs_of_all
    programs_of_all.close()
