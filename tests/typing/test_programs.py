"""Type checkers find what is wrong in programs, and nothing where nothing is."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
RIGHT, WRONG = (Path(__file__).with_name(f"{name}.py") for name in ("right", "wrong"))
# A program of these has the same errors where mypy takes all of these modules for Any, and takes a third of the time.
UNREAD = """
[[tool.mypy.overrides]]
module = [
    "gymnasium.wrappers.transform_observation", "huggingface_hub.*", "markdown_it.*", "matplotlib.*", "mpmath.*",
    "pydantic.*", "pygame.*", "rich.*", "sympy.*",
    "torch._dynamo.*", "torch._export.*", "torch._functorch.*", "torch._higher_order_ops.*", "torch._inductor.*",
    "torch._library.*", "torch._native.*", "torch._numpy.*", "torch.ao.*", "torch.distributed.*", "torch.export.*",
    "torch.fx.*", "torch.jit.*", "torch.masked.*", "torch.onnx.*", "torch.package.*", "torch.quantization.*",
    "torch.testing.*", "transformers.*",
]
follow_imports = "skip"
"""
MARKED = {n for n, line in enumerate(WRONG.read_text().splitlines(), 1) if line.endswith("# error")}
Found = dict[Path, dict[int, list[str]]]  # messages by file and line

pytestmark = pytest.mark.timeout(600)  # mypy reads all of torch where it has no cache


def run(*command: str) -> str:
    environment = {**os.environ, "MYPYPATH": str(ROOT / "src"), "NO_COLOR": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 1, done.stdout + done.stderr  # errors, and not that it could not run
    return done.stdout


def found_by_mypy(folder: Path) -> Found:
    pytest.importorskip("mypy", reason="mypy is not installed; it comes with the extra 'dev'")
    config = folder / "pyproject.toml"
    config.write_text((ROOT / "pyproject.toml").read_text() + UNREAD)
    options = ["--config-file", str(config), "--cache-dir", str(ROOT / ".mypy_cache" / "programs"), "--no-pretty"]
    out = run(sys.executable, "-m", "mypy", *options, str(RIGHT), str(WRONG))
    found: Found = {RIGHT: {}, WRONG: {}}
    for path, line, message in re.findall(r"^(.+?):(\d+): error: (.*)$", out, re.M):
        found.setdefault((ROOT / path).resolve(), {}).setdefault(int(line), []).append(message)
    return found


def found_by_pyright(folder: Path) -> Found:
    pyright = shutil.which("basedpyright", path=os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]))
    if pyright is None:
        pytest.skip("basedpyright is not installed; it comes with the extra 'dev'")
    options = ["--outputjson", "--level", "error", "--pythonpath", sys.executable, "--project", str(RIGHT.parent)]
    found: Found = {RIGHT: {}, WRONG: {}}
    for each in json.loads(run(pyright, *options))["generalDiagnostics"]:
        line = each["range"]["start"]["line"] + 1
        found.setdefault(Path(each["file"]), {}).setdefault(line, []).append(each["message"])
    return found


@pytest.mark.parametrize("checker", [found_by_mypy, found_by_pyright])
def test_wrong_programs_are_errors_and_right_ones_are_not(checker, tmp_path):
    found = checker(tmp_path)
    assert found.pop(RIGHT) == {}
    wrong = found.pop(WRONG)
    assert len(MARKED) >= 20
    assert {"unmarked": wrong.keys() - MARKED, "missed": MARKED - wrong.keys()} == {"unmarked": set(), "missed": set()}
    assert found == {}
