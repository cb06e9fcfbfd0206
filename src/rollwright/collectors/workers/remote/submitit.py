"""Backend "submitit": as "distributed", with groups of workers in jobs of Slurm."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from rollwright.collectors.workers.remote import launching

transport = launching.transport


@dataclass(frozen=True, kw_only=True)
class Options(launching.Options):
    """Options of ``backend="submitit"``: those of ``backend="distributed"`` with ``launcher="submitit"``."""

    launcher: Literal["submitit"] = "submitit"
