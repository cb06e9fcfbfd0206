"""How the benchmark talks to a side: a process of its own that answers lines of JSON, one run after another."""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
LIMIT_S = 3 * 3600.0


def answer(learn: Callable[[str, str, int], dict[str, float]]) -> None:
    """Learn what is asked, until there is nothing more; what else is printed goes to standard error."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for line in sys.stdin:
        print(json.dumps(learn(*json.loads(line))), file=answers, flush=True)


class Side:
    """A process that learns: the imports are done once.

    Args:
        python: of the environment that has what the module imports.
        module: calls :func:`answer`.
    """

    def __init__(self, python: Path, module: str) -> None:
        self._process = subprocess.Popen(
            [str(python), "-m", module],
            cwd=ROOT,
            env={**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def learn(self, *asked: Any) -> dict[str, float]:
        """The return, and the seconds that it took.

        Raises:
            RuntimeError: the process ended, or took longer than three hours.
        """
        print(json.dumps(asked), file=self._process.stdin, flush=True)
        ready, *_ = select.select([self._process.stdout], [], [], LIMIT_S)
        line = self._process.stdout.readline() if ready else ""
        if not line:
            raise RuntimeError(f"{asked}: expected an answer within {LIMIT_S:.0f} s; see its standard error")
        return json.loads(line)

    def close(self) -> None:
        self._process.stdin.close()
        self._process.wait(60)
