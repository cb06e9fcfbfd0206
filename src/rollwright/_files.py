"""Files without a name."""

from __future__ import annotations

import os
import tempfile

__all__ = ["unnamed_file"]


def unnamed_file(on_disk: bool = False) -> int:
    """The descriptor of a new file without a name, which lies in memory where the system allows it."""
    if hasattr(os, "memfd_create") and not on_disk:
        return os.memfd_create("rollwright", os.MFD_CLOEXEC)
    with tempfile.TemporaryFile(prefix="rollwright-") as file:
        return os.dup(file.fileno())
