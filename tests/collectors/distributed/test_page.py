"""The commands of docs/process_groups.md start the program there with submitit and with torchrun."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from tests.patience import patient

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs" / "process_groups.md").read_text()
BLOCKS = re.findall(r"^```sh\n(.*?)^```", PAGE, re.M | re.S)
COMMANDS = {"submitit" if "submitit" in block else "torchrun": block for block in BLOCKS}


@pytest.mark.slow
@pytest.mark.timeout(120)
@pytest.mark.parametrize("launcher", sorted(COMMANDS))
def test_the_program_runs_as_the_page_says(tmp_path, launcher):
    [program] = re.findall(r"^```python\n(.*?)^```", PAGE, re.M | re.S)
    (tmp_path / "train.py").write_text(program)
    commands = "\n".join(line for line in COMMANDS[launcher].splitlines() if not line.startswith("pip "))
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    environment = {**os.environ, "PATH": path, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        ["bash", "-ec", commands],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=patient(100),
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("trained on torch.Size([2, 100])") == 2
    assert "Traceback" not in done.stderr
