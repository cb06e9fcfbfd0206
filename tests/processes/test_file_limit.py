"""The limit of open files is raised where it may be, and named where it is not enough."""

from __future__ import annotations

import subprocess
import sys

import pytest

PROGRAM = """
import resource, sys
import torch
from rollwright import Collector
from rollwright.envs import GymEnv

def make_env():
    return GymEnv("CartPole-v1")

if __name__ == "__main__":
    soft, hard = int(sys.argv[1]), int(sys.argv[2])
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    remote = dict(backend="tcp", backend_options={"num_workers_per_collector": 1})
    options = remote if sys.argv[3] == "tcp" else {}
    collector = Collector(make_env, num_collectors=2, sync=True, frames_per_batch=20, total_frames=20, **options)
    print(len(list(collector)), *resource.getrlimit(resource.RLIMIT_NOFILE))
    collector.shutdown()
"""


@pytest.fixture
def program(tmp_path):
    """Its file."""
    path = tmp_path / "program.py"
    path.write_text(PROGRAM)
    return path


def test_the_soft_limit_is_raised_to_the_hard_one(program):
    """When the package is imported: in a new interpreter."""
    command = [sys.executable, program, "24", "1000", "tcp"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert ended.stdout.split() == ["1", "1000", "1000"], ended.stderr


@pytest.mark.parametrize("backend", ["tcp", "process"])
def test_too_many_open_files_are_an_error_that_names_the_limit(programs, program, backend):
    ended = programs.run(program, "24", "24", backend)
    assert ended.returncode == 1
    last = ended.stderr.strip().splitlines()[-1]
    assert "MultiSyncCollector with 2 workers: this process may have 24 open files" in last
    assert "Raise the limit (ulimit -n)" in last
