"""Memory that a process keeps when it frees it."""

from __future__ import annotations

import platform

import pytest

PROGRAM = """
import ctypes, resource, torch
from rollwright._memory import keep_freed_memory

ctypes.CDLL(None).mallopt(-3, 128 * 1024)  # else the C library raises this limit itself, or not

def faults(count):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(count):
        [torch.empty(1_400_000, dtype=torch.uint8).fill_(1) for _ in range(3)]
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

faults(5)
without = faults(20)
assert keep_freed_memory()
faults(5)
print(without, faults(20))
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="needs the C library of GNU")
def test_memory_that_was_freed_is_used_again_without_faults(programs):
    done = programs.run("-c", PROGRAM)
    without, kept = map(int, done.stdout.split())
    assert without > 20 * 100
    assert kept < without / 10
