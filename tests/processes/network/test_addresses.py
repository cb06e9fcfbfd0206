"""Secrets: too short a one is refused, wherever it comes from."""

from __future__ import annotations

import subprocess
import sys

import pytest

from rollwright._processes.network.handshake import SECRET, secret_of
from rollwright.cli.errors import Failure
from rollwright.cli.join import run
from rollwright.cli.parser import build_parser
from rollwright.collectors.workers.remote import launching, submitit
from rollwright.data.replay_buffers.service.buffer import ServiceOptions

OPTIONS = {"launched": launching.Options, "submitit": submitit.Options, "service": ServiceOptions}


@pytest.mark.parametrize("short", ["", "abc"])
@pytest.mark.parametrize("kind", OPTIONS.values(), ids=OPTIONS)
def test_the_variable_is_checked_at_construction(kind, short, monkeypatch):
    monkeypatch.setenv(SECRET, short)
    with pytest.raises(
        ValueError, match=rf"{SECRET}: expected a text of at least 16 characters.*got str of {len(short)}"
    ):
        kind()
    kind(secret="a secret of tests, long enough")


def test_the_argument_wins_over_the_variable(monkeypatch):
    monkeypatch.delenv(SECRET, raising=False)
    assert secret_of(None) is None
    monkeypatch.setenv(SECRET, "a secret of the environment")
    assert secret_of(None) == "a secret of the environment"
    assert secret_of("a secret of the argument") == "a secret of the argument"


def test_who_joins_with_a_short_secret_is_told_so(monkeypatch, tmp_path):
    (tmp_path / "secret").write_text("abc\n")
    monkeypatch.setenv(SECRET, "")
    for options, name in (([], SECRET), (["--secret-file", str(tmp_path / "secret")], "--secret-file")):
        with pytest.raises(Failure, match=f"{name}: expected a text of at least 16"):
            run(build_parser().parse_args(["join", "127.0.0.1:1", *options]))


def test_an_actor_of_ray_that_starts_a_process_loads_no_torch():
    """It is there for one process, which has all that it needs."""
    code = "import sys; import rollwright._processes.network.ray; assert not {'torch', 'numpy'} & sys.modules.keys()"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
