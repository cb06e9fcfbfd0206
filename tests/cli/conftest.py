"""Runs the command line: in this process, and in one of its own."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
from tests.programs import Program, Programs

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
def spawn(programs: Programs, tmp_path: Path) -> Callable[..., Program]:
    """Starts ``python -m rollwright`` in ``tmp_path``."""

    def start(*arguments: object, stdout: int | None = None) -> Program:
        command = ("-m", "rollwright", *arguments)
        return programs.start(*command, cwd=tmp_path, env={"COLUMNS": "120"}, stdout=stdout)

    return start


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
