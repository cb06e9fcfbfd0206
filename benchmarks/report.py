"""Writes what was measured: a table in Markdown, a picture, and the machine it was measured on."""

from __future__ import annotations

import platform
import subprocess
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path

import torch

import rollwright
from rollwright.errors import MissingExtraError, require

RESULTS = Path(__file__).parent / "results"


def markdown_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table whose first column is text and whose others are aligned to the right."""
    lines = [header, ["---", *["---:"] * (len(header) - 1)], *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def machine() -> str:
    """What was measured, the machine and the versions, in a line."""
    packages = ", ".join(f"{name} {version(name)}" for name in ("torch", "tensordict", "gymnasium", "numpy"))
    threads = torch.get_num_threads()
    python = f"Python {platform.python_version()}"
    return f"rollwright {source()}; {_processor()}, {python}, {packages}; torch threads: {threads}"


def source() -> str:
    """The version and the commit of the rollwright that is imported, and whether files of the package were changed."""
    folder = Path(rollwright.__file__).parent
    commit = _git(folder, "rev-parse", "--short", "HEAD")
    if not commit:
        return f"{rollwright.__version__} (no commit)"
    changed = " with changes" if _git(folder, "status", "--porcelain", "--", ".") else ""
    return f"{rollwright.__version__} (commit {commit}{changed})"


def _git(folder: Path, *arguments: str) -> str:
    """What git says; nothing where there is no git or no repository."""
    try:
        done = subprocess.run(["git", *arguments], cwd=folder, capture_output=True, text=True, check=False, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"{len(names)} x {names[0]}" if names else platform.machine()


def write(folder: Path, name: str, title: str, *parts: str) -> None:
    """Write ``name`` into ``folder``, and print it."""
    folder.mkdir(parents=True, exist_ok=True)
    text = "\n\n".join([f"# {title}", machine(), *parts]) + "\n"
    (folder / name).write_text(text)
    print(text)


def save_figure(figure, path: Path) -> None:
    """Save a picture where :func:`new_figure` could make one."""
    if figure is not None:
        figure.savefig(path, dpi=120)
        print(f"picture: {path}\n")


def new_figure(width: float, height: float):
    """A figure of matplotlib; None, with a line that says so, where matplotlib is not installed."""
    try:
        figures = require("matplotlib.figure", extra="plot", purpose="the picture")
    except MissingExtraError as error:
        print(f"no picture: {error}")
        return None
    return figures.Figure(figsize=(width, height), layout="constrained")
