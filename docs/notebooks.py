"""Pages of the documentation as notebooks: text cells and code cells. `make docs` writes them beside the pages."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

PAGES = ("first_batch", "ppo", "from_cleanrl", "from_stable_baselines3", "recipes")
CODE = re.compile(r"^```python\n(.*?)^```\n", re.DOTALL | re.MULTILINE)


def notebook(page: str) -> dict[str, Any]:
    """The notebook (nbformat 4.5) of a page in Markdown."""
    cells = []
    for i, part in enumerate(CODE.split(page)):
        text = part.strip("\n")
        if text:
            cell: dict[str, Any] = {"id": f"cell-{i}", "metadata": {}, "source": text.splitlines(keepends=True)}
            code = {"cell_type": "code", "execution_count": None, "outputs": []}
            cells.append({**cell, **(code if i % 2 else {"cell_type": "markdown"})})
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    metadata = {"kernelspec": kernel, "language_info": {"name": "python"}}
    return {"cells": cells, "metadata": metadata, "nbformat": 4, "nbformat_minor": 5}


def write(source: Path, target: Path) -> list[Path]:
    """Write the notebook of each page below ``source`` into ``target``."""
    target.mkdir(parents=True, exist_ok=True)
    written = []
    for name in PAGES:
        path = target / f"{name}.ipynb"
        path.write_text(json.dumps(notebook((source / f"{name}.md").read_text()), indent=1))
        written.append(path)
    return written
