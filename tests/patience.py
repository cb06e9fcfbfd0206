"""Time limits that grow with the load of the machine: other programs make the suite slower, and not red."""

from __future__ import annotations

import os
from pathlib import Path

__all__ = ["patient", "slowness"]


def slowness() -> float:
    """How many times longer than on an idle machine a test may take: 1, and more where programs wait for a core."""
    per_core = max(os.getloadavg()[0], _num_runnable()) / (os.cpu_count() or 1)
    return 1.0 if per_core <= 1.0 else 2.0 * per_core


def patient(limit_s: float) -> float:
    """A time limit, in seconds, for what takes less than ``limit_s`` on an idle machine."""
    return limit_s * slowness()


def _num_runnable() -> int:
    try:
        return int(Path("/proc/loadavg").read_text().split()[3].split("/")[0])
    except (OSError, IndexError, ValueError):  # not on Linux
        return 0
