"""The public names of each package, and what importing them does not import."""

from __future__ import annotations

import importlib
import os
import pkgutil
import re
import subprocess
import sys

import pytest

import rollwright

MODULES = list(pkgutil.walk_packages(rollwright.__path__, "rollwright."))
PACKAGES = ["rollwright", *(module.name for module in MODULES if module.ispkg)]
OPTIONAL = {"envpool", "h5py", "matplotlib", "minari", "pygame", "ray", "tensorboard", "transformers", "vllm"}


@pytest.mark.parametrize("name", PACKAGES)
def test_all_is_sorted_and_can_be_imported(name: str) -> None:
    package = importlib.import_module(name)
    exported = getattr(package, "__all__", [])  # a package may export nothing
    assert exported == sorted(set(exported))
    assert [public for public in exported if not hasattr(package, public)] == []


def test_no_module_imports_an_optional_package() -> None:
    names = [module.name for module in MODULES if not module.name.endswith("__main__")]
    program = f"""
import importlib, sys
for name in {names!r}:
    importlib.import_module(name)
print(*sorted({OPTIONAL!r} & sys.modules.keys()))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == []


TOP = {
    "AsyncEnvPool",
    "Collector",
    "EnvBase",
    "Evaluator",
    "ExplorationType",
    "GymEnv",
    "GymWrapper",
    "LazyMemmapStorage",
    "LazyTensorStorage",
    "MultiCollector",
    "ParallelEnv",
    "ReplayBuffer",
    "SerialEnv",
    "SliceSampler",
    "TensorDictPrioritizedReplayBuffer",
    "TensorDictReplayBuffer",
    "TransformedEnv",
    "__version__",
}


def test_the_top_has_what_most_programs_need_and_no_more() -> None:
    assert set(rollwright.__all__) == TOP
    assert set(dir(rollwright)) >= TOP
    classes = (rollwright.Collector, rollwright.GymEnv, rollwright.ReplayBuffer)
    assert [cls.__name__ for cls in classes] == ["Collector", "GymEnv", "ReplayBuffer"]
    with pytest.raises(AttributeError, match="module 'rollwright' has no attribute 'Colector'"):
        rollwright.Colector  # noqa: B018


@pytest.mark.parametrize(
    ("statement", "message"),
    [
        (
            "from rollwright import Colector",
            "cannot import name 'Colector' from 'rollwright'. Did you mean 'Collector'?",
        ),
        (
            "from rollwright import StepCounter",
            "'StepCounter' from 'rollwright'. Write: from rollwright.envs import Step",
        ),
        ("from rollwright.envs import StepCountr", "from 'rollwright.envs'. Did you mean 'StepCounter'?"),
        ("from rollwright.data import Compsite", "from 'rollwright.data'. Did you mean 'Composite'?"),
        ("from rollwright.modules import Actr", "from 'rollwright.modules'. Did you mean 'Actor'?"),
        ("from rollwright.collectors import MultiSyncColector", "Did you mean 'MultiSyncCollector'?"),
        ("from rollwright.envs.llm import ChatEnvv", "Did you mean 'ChatEnv'?"),
    ],
)
def test_a_name_that_is_not_there_is_answered_with_the_nearest(statement: str, message: str) -> None:
    with pytest.raises(ImportError, match=re.escape(message)):
        exec(statement)


def test_a_name_that_is_not_there_is_no_attribute() -> None:
    for name in PACKAGES:
        assert not hasattr(importlib.import_module(name), "nothing")
    with pytest.raises(AttributeError, match=r"has no attribute 'StepCountr'\. Did you mean 'StepCounter'\?"):
        importlib.import_module("rollwright.envs").StepCountr  # noqa: B018


def test_importing_the_top_imports_nothing_heavy() -> None:
    program = """
import sys
before = set(sys.modules)
import rollwright
dir(rollwright)
print(*sorted(name for name in set(sys.modules) - before if name.split(".")[0] in {"gymnasium", "numpy", "torch"}))
"""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == []
