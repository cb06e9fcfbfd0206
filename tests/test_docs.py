"""Every program in the README and the docs runs."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import gymnasium
import pytest

ROOT = Path(__file__).parents[1]
BLOCK = re.compile(r"^```python\n(.*?)^```", re.DOTALL | re.MULTILINE)
# Excerpts, which show a part of something: what they leave out.
ELSEWHERE = ("ray",)  # pages whose programs run in tests of their own: tests/collectors/workers/remote/test_ray.py
MISSING: dict[str, Any] = {"my_gymnasium_env": lambda: gymnasium.make("Pendulum-v1")}


def programs():
    for path in [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]:
        for i, block in enumerate(BLOCK.findall(path.read_text())):
            if path.stem not in ELSEWHERE and ("def " in block or "import " in block):
                yield pytest.param(path, block, id=f"{path.stem}-{i}")


@pytest.mark.parametrize(("path", "program"), list(programs()))
def test_program_runs(path, program):
    if "rgb_array" in program:
        pytest.importorskip("pygame")
    missing = {name: make() for name, make in MISSING.items() if name in program}
    exec(compile(program, str(path), "exec"), {"__name__": "__main__", **missing})


def test_the_readme_has_programs():
    assert BLOCK.findall((ROOT / "README.md").read_text())
