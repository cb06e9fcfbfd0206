"""Every program in the README and the docs runs."""

from __future__ import annotations

import inspect
import json
import re
import shlex
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import gymnasium
import pytest
import torch

from rollwright.cli.parser import build_parser

ROOT = Path(__file__).parents[1]
BLOCK = re.compile(r"^```python\n(.*?)^```", re.DOTALL | re.MULTILINE)
FIRST = BLOCK.findall((ROOT / "README.md").read_text())[0]
# Excerpts, which show a part of something: what they leave out.
ELSEWHERE = ("ray",)  # pages whose programs run in tests of their own: tests/collectors/workers/remote/test_ray.py
CONTINUED = ("first_batch", "llm", "ppo")  # pages whose programs go on from one another: they run as one
INSIDE = "rollwright.collectors.llm.workers"  # of whose names the reference has one
MISSING: dict[str, Any] = {"my_gymnasium_env": lambda: gymnasium.make("Pendulum-v1")}


def programs():
    for path in [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]:
        blocks = BLOCK.findall(path.read_text())
        for i, block in enumerate(["\n".join(blocks)] if path.stem in CONTINUED else blocks):
            if block == FIRST:
                continue  # has a test of its own
            if path.stem not in ELSEWHERE and ("def " in block or "import " in block):
                yield pytest.param(path, block, id=f"{path.stem}-{i}")


@pytest.mark.parametrize(("path", "program"), list(programs()))
def test_program_runs(path, program, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # what programs write is left there
    if "rgb_array" in program:
        pytest.importorskip("pygame")
    missing = {name: make() for name, make in MISSING.items() if name in program}
    exec(compile(program, str(path), "exec"), {"__name__": "__main__", **missing})


def test_the_first_program_of_the_readme_learns(capsys):
    torch.manual_seed(0)
    exec(compile(FIRST, "README.md", "exec"), {"__name__": "__main__"})
    returns = [float(word) for word in capsys.readouterr().out.split()]
    assert returns[0] < 50 < 150 < returns[-1]


def test_links_of_the_readme_have_targets_that_exist():
    text = (ROOT / "README.md").read_text()
    targets = dict(re.findall(r"^\[(\w+)\]: (\S+)$", text, re.MULTILINE))
    assert set(re.findall(r"\]\[(\w+)\]", text)) == set(targets)
    own = [target for target in targets.values() if not target.startswith("https://")]
    assert [target for target in own if not (ROOT / target).exists()] == []
    assert "](" not in text  # every target stands at the end, where one prefix makes all of them absolute


def reference():
    """Every object that the pages of the reference list, with its name there."""
    module = ""
    for path in sorted((ROOT / "docs" / "reference").glob("*.md")):
        for line in path.read_text().splitlines():
            if line.startswith(".. currentmodule::"):
                module = line.split()[-1]
            elif re.fullmatch(r"   \w+", line):
                yield getattr(import_module(module), line.strip()), f"{module}.{line.strip()}"


def test_the_reference_has_every_public_class_and_function_once():
    listed = [(id(thing), name) for thing, name in reference()]
    assert [name for i, name in listed if [j for j, _ in listed].count(i) > 1] == []
    modules = {"rollwright", *(name.rpartition(".")[0] for _, name in listed)} - {INSIDE}
    packages = [name for name in modules if hasattr(import_module(name), "__path__")]
    public = {
        id(thing): f"{package}.{name}"
        for package in packages
        for name in getattr(import_module(package), "__all__", [])
        if not name.startswith("_")
        and (inspect.isclass(thing := getattr(import_module(package), name)) or inspect.isroutine(thing))
    }
    assert [name for i, name in public.items() if i not in dict(listed)] == []


def test_the_front_pages_say_the_same():
    sentence = (ROOT / "README.md").read_text().split("\n\n")[1]
    assert sentence in (ROOT / "docs" / "index.md").read_text()


def commands():
    """Every command of ours that README and docs show, but for those with a placeholder."""
    for path in [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]:
        for line in path.read_text().splitlines():
            if line.startswith("rollwright ") and not re.search(r"\b[A-Z]{3,}\b|\.\.\.|\\$|\[", line.split("#")[0]):
                yield pytest.param(shlex.split(line, comments=True)[1:], id=f"{path.stem}: {line[:60]}")


@pytest.mark.parametrize("words", list(commands()))
def test_commands_have_the_options_that_are_shown(words):
    arguments = build_parser().parse_args(words)
    assert arguments.command == words[0]


def test_notebooks_have_the_programs_of_their_pages(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "docs"))
    notebooks = import_module("notebooks")
    for path in notebooks.write(ROOT / "docs", tmp_path):
        cells = json.loads(path.read_text())["cells"]
        programs = ["".join(cell["source"]) + "\n" for cell in cells if cell["cell_type"] == "code"]
        assert programs == BLOCK.findall((ROOT / "docs" / f"{path.stem}.md").read_text())
    del sys.modules["notebooks"]


@pytest.mark.parametrize(
    "word", ["tutorial", "video", "wandb", "slow", "checkpoint", "resume", "prioritized", "Atari", "GPU", "hang", "FAQ"]
)
def test_what_people_search_for_is_in_the_docs(word):
    pages = [path.read_text() for path in (ROOT / "docs").glob("*.md")]
    assert any(re.search(rf"\b{word}", page, re.IGNORECASE) for page in pages)
