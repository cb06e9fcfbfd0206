"""What another process could not import travels with its code; everything else by name."""

from __future__ import annotations

import importlib.util
import subprocess
import sys

import cloudpickle
import pytest

from rollwright._processes.pickling import dumps

CODE = "FACTOR = 3\ndef helper(x):\n    return FACTOR * x\nclass Made:\n    def call(self):\n        return helper(2)\n"


@pytest.fixture
def loaded(tmp_path):
    """A module that was loaded from a file in no search path, as test runners and plug-ins do."""
    path = tmp_path / "loaded_by_path.py"
    path.write_text(CODE)
    spec = importlib.util.spec_from_file_location("loaded_by_path", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name]


def test_a_module_that_no_search_finds(loaded):
    script = "import pickle, sys; print(pickle.loads(sys.stdin.buffer.read()).call())"
    found = subprocess.run([sys.executable, "-c", script], input=dumps(loaded.Made()), capture_output=True, check=True)
    assert found.stdout.strip() == b"6"
    assert cloudpickle.list_registry_pickle_by_value() == set()


def test_what_is_found_goes_by_name():
    assert len(dumps(subprocess.run)) < 100


def test_what_the_user_has_registered_stays_so(loaded):
    cloudpickle.register_pickle_by_value(loaded)
    try:
        dumps(loaded.Made())
        assert cloudpickle.list_registry_pickle_by_value() == {"loaded_by_path"}
    finally:
        cloudpickle.unregister_pickle_by_value(loaded)


class Nest:
    """Pickled with a pickle inside."""

    def __init__(self, inner, outer):
        self.inner, self.outer = inner, outer

    def __reduce__(self):
        return Nest, (dumps(self.inner), self.outer)


def test_a_pickle_in_a_pickle(loaded):
    assert dumps(Nest(loaded.Made(), loaded.Made())).count(b"FACTOR") >= 2
