"""Sources of a program's own modules go where they are not found."""

from __future__ import annotations

import importlib
import os
import pickle
import subprocess
import sys
from pathlib import Path

import pytest

from rollwright._processes.channel import dumps
from rollwright._processes.network.sources import with_sources

SRC = Path(__file__).parents[3] / "src"
LOAD = "import pickle, sys; print(pickle.load(sys.stdin.buffer)())"


@pytest.fixture
def written(tmp_path, monkeypatch):
    """A package and two modules that only this process finds."""
    (tmp_path / "own_package" / "folder").mkdir(parents=True)
    (tmp_path / "own_package" / "__init__.py").write_text("from own_package.folder.inner import NUMBER\n")
    (tmp_path / "own_package" / "folder" / "inner.py").write_text("import own_other\nNUMBER = own_other.BASE + 2\n")
    (tmp_path / "own_other.py").write_text("BASE = 40\n\ndef fails():\n    raise ValueError('seen')\n")
    (tmp_path / "own_entry.py").write_text("import own_package\n\ndef answer():\n    return own_package.NUMBER\n")
    (tmp_path / "own_stranger.py").write_text("SECRET = 'nobody needs it'\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    names = ["own_entry", "own_stranger"]
    yield [importlib.import_module(name) for name in names]
    for name in [name for name in sys.modules if name.startswith("own_")]:
        del sys.modules[name]


def elsewhere(pickled: bytes) -> subprocess.CompletedProcess[bytes]:
    environ = {**os.environ, "PYTHONPATH": str(SRC)}
    return subprocess.run([sys.executable, "-c", LOAD], input=pickled, env=environ, capture_output=True, check=False)


def test_modules_that_are_not_found_elsewhere_are_made_from_their_sources(written):
    entry, _ = written
    bare = dumps(entry.answer)
    lacking = elsewhere(bare)
    assert lacking.returncode == 1
    assert b"No module named 'own_entry'" in lacking.stderr
    sent = with_sources(bare)
    assert b"nobody needs it" not in sent
    done = elsewhere(sent)
    assert (done.returncode, done.stdout) == (0, b"42\n"), done.stderr


def test_a_traceback_shows_the_lines_of_such_a_module(written):
    done = elsewhere(with_sources(dumps(sys.modules["own_other"].fails)))
    assert b"raise ValueError('seen')" in done.stderr


def test_what_needs_none_is_sent_as_it_is():
    bare = pickle.dumps(len)
    assert with_sources(bare) is bare
