"""Each promise has a marker, and tests that exist."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.programs import Programs
from tests.promises import PROMISES

HERE = Path(__file__).parent


def test_all_promises_have_a_marker(request: pytest.FixtureRequest) -> None:
    lines = request.config.getini("markers")
    assert list(PROMISES) == [f"p{n}" for n in range(1, 11)]
    assert {name for name in PROMISES if any(line.startswith(f"{name}: ") for line in lines)} == set(PROMISES)


@pytest.mark.parametrize("name", PROMISES)
def test_the_tests_of_a_promise_exist(name: str) -> None:
    files = PROMISES[name].files
    assert list(files) == sorted(set(files))
    assert [file for file in files if not (HERE / file).is_file()] == []


def test_the_tests_of_a_promise_are_marked(pytester: pytest.Pytester, programs: Programs) -> None:
    """As ``pytest -m p9`` finds them: a file of the table is marked, and no other."""
    conftest = (HERE / "conftest.py").read_text()
    folder = pytester.mkdir("tests")
    for name in ("promises.py", "patience.py", "programs.py", "collectors/workers/processes.py"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text((HERE / name).read_text())
    (folder / "conftest.py").write_text(conftest)
    for file in ("processes/test_pool.py", "processes/test_other.py"):
        (folder / file).parent.mkdir(exist_ok=True)
        (folder / file).write_text("def test_it(): pass\n")
    pytester.makeini("[pytest]\npythonpath = .\naddopts = --import-mode=importlib\ntimeout = 60\n")
    options = ("-m", "p9", "--collect-only", "-q", "-p", "no:cacheprovider")
    found = programs.run("-m", "pytest", *options, cwd=pytester.path)
    assert "tests/processes/test_pool.py::test_it" in found.stdout, found.stdout + found.stderr
    assert "test_other" not in found.stdout
