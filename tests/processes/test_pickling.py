"""What another process could not import travels with its code; everything else by name."""

from __future__ import annotations

import importlib.util
import os
import pickle
import signal
import subprocess
import sys
import threading

import cloudpickle
import pytest

from rollwright._processes import channel
from rollwright._processes.channel import dumps
from rollwright.envs import EnvCreator
from rollwright.weight_update.shared import dump_extras

CODE = "FACTOR = 3\ndef helper(x):\n    return FACTOR * x\nclass Made:\n    def call(self):\n        return helper(2)\n"


@pytest.fixture
def load(tmp_path, monkeypatch):
    """Load a module from a file in no search path, as test runners and plug-ins do."""

    def load(name):
        path = tmp_path / "some_file.py"
        path.write_text(CODE)
        spec = importlib.util.spec_from_file_location(name, path)
        module = importlib.util.module_from_spec(spec)
        monkeypatch.setitem(sys.modules, name, module)
        spec.loader.exec_module(module)
        return module

    return load


@pytest.fixture
def loaded(load):
    return load("loaded_by_path")


def elsewhere(pickled):
    """What ``call()`` of the object returns in another process."""
    script = "import pickle, sys; print(pickle.loads(sys.stdin.buffer.read()).call())"
    return int(subprocess.run([sys.executable, "-c", script], input=pickled, capture_output=True, check=True).stdout)


def test_a_module_that_no_search_finds(loaded):
    assert elsewhere(dumps(loaded.Made())) == 6
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


@pytest.mark.parametrize("name", ["code", "rollwright.my_plugin", "email.mime.text"])
def test_a_module_under_a_name_that_another_has(load, name):
    dumps(importlib.import_module("code").interact)
    assert elsewhere(dumps(load(name).Made())) == 6


def test_what_is_found_in_packages_goes_by_name():
    for value in (pytest.fixture, os.path.join, cloudpickle.dumps, EnvCreator, importlib.util.find_spec):
        assert len(dumps(value)) < 100


def test_a_lazy_module_stays_unloaded(tmp_path, monkeypatch):
    for name, places in (("lazy_found", [str(tmp_path)]), ("lazy_stranger", [])):
        path = tmp_path / f"{name}.py"
        path.write_text("import that_is_not_there")
        spec = importlib.util.spec_from_file_location(name, path)
        loader = spec.loader = importlib.util.LazyLoader(spec.loader)
        module = importlib.util.module_from_spec(spec)
        monkeypatch.setitem(sys.modules, name, module)
        monkeypatch.setattr(sys, "path", sys.path + places)
        loader.exec_module(module)
    assert pickle.loads(dumps(lambda: 1))() == 1


def test_a_finder_that_raises(loaded, monkeypatch):
    class Finder:
        def find_spec(self, name, path, target=None):
            raise KeyError(name)

    monkeypatch.setattr(sys, "meta_path", [Finder(), *sys.meta_path])
    assert elsewhere(dumps(loaded.Made())) == 6


def test_extra_state_and_environment_creators(loaded):
    assert b"FACTOR" in dump_extras({"net": loaded.Made()})
    assert b"FACTOR" in pickle.dumps(EnvCreator(loaded.helper))


class Waits:
    """Takes its time to be pickled."""

    def __init__(self):
        self.begun, self.go = threading.Event(), threading.Event()

    def __reduce__(self):
        self.begun.set()
        self.go.wait()
        return int, ()


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_fork_while_another_thread_pickles(loaded):
    value = Waits()
    thread = threading.Thread(target=dumps, args=(value,))
    thread.start()
    value.begun.wait()
    child = os.fork()
    if not child:
        signal.alarm(20)
        works = b"FACTOR" in dumps(loaded.Made()) and not cloudpickle.list_registry_pickle_by_value()
        os._exit(not works)
    value.go.set()
    thread.join()
    assert os.waitpid(child, 0)[1] == 0
    assert cloudpickle.list_registry_pickle_by_value() == set()


def test_modules_that_bear_the_name_of_another():
    importlib.import_module("_pydecimal")
    assert len(dumps(importlib.import_module("decimal").Decimal.from_float)) < 100
    assert len(dumps(importlib.import_module("collections.abc").Mapping)) < 100
    assert not {"decimal", "collections.abc"} & set(channel._strangers())
