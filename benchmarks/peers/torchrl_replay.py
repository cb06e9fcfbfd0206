"""TorchRL's replay buffers.

Its SliceSampler finds boundaries by ids (``traj_key``), which it does faster than by flags here, in each draw; with
``cache_values=True`` ("cached") it keeps them until the next write.
"""

from __future__ import annotations

import atexit
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
from torchrl.data import replay_buffers

from benchmarks.peers.protocol import serve
from benchmarks.replay_cases import find_case
from benchmarks.replay_sides import make_side


def make(name: str, operation: str) -> Callable[[], int]:
    torch.set_num_threads(1)
    folder = tempfile.TemporaryDirectory()
    atexit.register(folder.cleanup)
    side = make_side(replay_buffers, find_case(name), operation, Path(folder.name))
    side.call()
    side.check()
    return side.call


if __name__ == "__main__":
    serve(make)
