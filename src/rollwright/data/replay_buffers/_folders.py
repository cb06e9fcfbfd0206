"""Folders that are replaced as a whole: whatever is killed meanwhile, the old one or the new one is there."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

__all__ = ["recover", "replace"]


def replace(folder: Path, new: Path) -> None:
    """Put ``new`` in the place of ``folder``, which steps aside for a moment: see :func:`recover`."""
    recover(folder)
    if not folder.exists():
        os.replace(new, folder)
        return
    old = _aside(folder)
    shutil.rmtree(old, ignore_errors=True)  # of a process that was killed before it was done with it
    os.replace(folder, old)
    os.replace(new, folder)
    shutil.rmtree(old)


def recover(folder: Path) -> None:
    """Put back a folder whose process was killed while it was being replaced; for use before a folder is opened."""
    if not folder.exists() and _aside(folder).exists():
        os.replace(_aside(folder), folder)


def _aside(folder: Path) -> Path:
    return folder.with_name(f".{folder.name}.old")
