"""TorchRL's programs, and its environments and actors in our collector."""

from __future__ import annotations

import sys
from collections.abc import Callable

import torch

from benchmarks.peers.protocol import ROOT, serve
from benchmarks.programs_cases import INSIDE, find_program
from benchmarks.programs_sides import Library, make_program


def make(name: str, side: str) -> Callable[[], int]:
    torch.set_num_threads(1)
    collector = None
    if side == INSIDE:
        sys.path.append(str(ROOT / "src"))
        from rollwright.collectors import Collector as collector
    return make_program(Library("torchrl"), find_program(name), collector)[0]


if __name__ == "__main__":
    serve(make)
