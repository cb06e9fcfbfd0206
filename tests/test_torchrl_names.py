"""The page of TorchRL's names says what the package has."""

from __future__ import annotations

import runpy
from pathlib import Path

SCRIPT = Path(__file__).parents[1] / "docs" / "torchrl_names.py"


def test_the_page_is_what_the_script_writes() -> None:
    script = runpy.run_path(str(SCRIPT))
    assert script["PAGE"].read_text() == script["page"](), "run python docs/torchrl_names.py"


def test_names_that_are_there_and_others() -> None:
    text = runpy.run_path(str(SCRIPT))["page"]()
    collectors = text.partition("## `collectors`")[2].partition("## ")[0]
    there, _, missing = collectors.partition("| not there")
    assert "`AsyncCollector`" in there
    assert "`VanillaWeightUpdater`" in missing
    assert "| `ListStorage` | keeps copies |" in text
