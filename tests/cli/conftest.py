"""Ways to run the command line: in this process, and in one of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

import rollwright
from rollwright.cli import main


class Result(NamedTuple):
    status: int
    out: str
    err: str


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Callable[..., Result]:
    """Runs a command in this process."""

    def call(*arguments: object) -> Result:
        capsys.readouterr()
        status = main([str(argument) for argument in arguments])
        return Result(status, *capsys.readouterr())

    return call


@pytest.fixture
def spawn(tmp_path: Path) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Starts ``python -m rollwright`` in ``tmp_path``."""
    started: list[subprocess.Popen[str]] = []
    source = str(Path(rollwright.__file__).parents[1])
    environment = {**os.environ, "PYTHONPATH": source, "OMP_NUM_THREADS": "1", "COLUMNS": "120"}

    def start(*arguments: object, stdout: int = subprocess.PIPE) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "rollwright", *map(str, arguments)]
        process = subprocess.Popen(
            command, cwd=tmp_path, env=environment, stdout=stdout, stderr=subprocess.PIPE, text=True
        )
        started.append(process)
        return process

    yield start
    for process in started:
        if process.poll() is None:
            process.kill()
        process.communicate()


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], str]]:
    """Writes a module into the current folder; gives its name."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    names: list[str] = []

    def write(text: str) -> str:
        name = f"policies_{abs(hash((text, tmp_path)))}"
        (tmp_path / f"{name}.py").write_text(text)
        names.append(name)
        return name

    yield write
    for name in names:
        sys.modules.pop(name, None)
