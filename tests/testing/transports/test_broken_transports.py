"""Each check of the suite for transports fails on a transport that breaks what it is about."""

from __future__ import annotations

from typing import get_args

import pytest
from tests.patience import patient
from tests.testing.transports import broken

from rollwright.collectors.workers.transports import BACKENDS, Backend, WorkerBackend, register_backend
from rollwright.testing.transports import TRANSPORT_CHECKS, check_transport

FAULTS = {
    "stacked": [broken.Tears, broken.LosesRollouts],
    "concatenated": [broken.Reorders],
    "batched": [broken.Tears],
    "images": [broken.Tears],
    "recurrent": [broken.Resets],
    "reshaped": [broken.SpoilsPacked],
    "entries": [broken.Tears, broken.LosesRollouts],
    "asynchronous": [broken.Doubles, broken.Reorders, broken.LosesRollouts],
    "counts": [broken.DropsMessages, broken.LosesCounters, broken.LosesRollouts],
    "trajectories": [broken.CutsTrajectories, broken.LosesTrajectories],
    "buffer": [broken.WritesTooMuch, broken.FillsCopies],
    "backpressure": [broken.CollectsAhead],
    "weights_by_version": [broken.LosesWeights],
    "weights_by_worker": [broken.MixesUpWorkers],
    "weights_whole": [broken.MixesWeights],
    "weights_in_rollout": [broken.DelaysWeights],
    "calls": [broken.AnswersForOthers, broken.HidesTracebacks],
    "hooks": [broken.DropsHooks, broken.DropsInit],
    "saved_state": [broken.ForgetsStates],
    "raising_worker": [broken.HidesTracebacks],
    "cannot_start": [broken.HidesTracebacks],
    "cannot_send": [broken.RefusesAnyhow],
    "killed_worker": [broken.IgnoresTheDead],
    "replaced_worker": [broken.Doubles],
    "interrupt": [broken.DoesNotHear],
    "shutdown": [
        broken.LeavesProcesses,
        broken.LeavesThreads,
        broken.LeavesDescriptors,
        broken.LeavesMemory,
        broken.LeavesMappings,
    ],
}
CASES = [(name, fault) for name, faults in FAULTS.items() for fault in faults]
HANGS = (broken.DropsMessages, broken.IgnoresTheDead)
FOUND = {  # what the message names, where a check looks for several things
    broken.DoesNotHear: r"expected a KeyboardInterrupt within 0\.6 s",
    broken.LeavesProcesses: "process ",
    broken.LeavesThreads: "thread left",
    broken.LeavesDescriptors: "descriptors: {'pipe': 8}",
    broken.LeavesMemory: "/dev/shm/psm_",
    broken.LeavesMappings: "4 shared mappings",
}


@pytest.fixture
def breaking(monkeypatch):
    """``breaking(fault)``: the backend "broken" has it."""
    made = []

    def choose(kind):
        made.append(kind())
        monkeypatch.setattr(broken, "fault", made[-1])

    register_backend("broken", broken.__name__)
    yield choose
    for fault in made:
        fault.clean()
    del BACKENDS["broken"]


@pytest.mark.parametrize(("name", "fault"), CASES, ids=[f"{name}-{fault.__name__}" for name, fault in CASES])
def test_a_broken_transport_fails(breaking, name, fault):
    breaking(fault)
    limit_s = patient(1.5 if fault in HANGS else 60.0)
    limits = {"limit_s": limit_s, "interrupt_s": 0.6, "failure_s": patient(5.0), "gone_s": 0.5, "num_workers": 2}
    with pytest.raises(AssertionError, match=FOUND.get(fault, ".")) as caught:
        check_transport("broken", only=[name], **limits)
    assert f"in the check {name!r} of backend 'broken'" in caught.value.__notes__
    assert ("expected the check to end" in str(caught.value)) is (fault in HANGS)


def test_every_check_was_seen_to_fail():
    assert set(FAULTS) == set(TRANSPORT_CHECKS)


def test_the_backend_is_sound_without_a_fault(breaking):
    breaking(broken.Fault)
    sound = ["stacked", "trajectories", "weights_by_version", "calls", "shutdown"]
    check_transport("broken", only=sound, num_workers=2)


WRONG = {
    "no such check": ({"only": ["stackd"]}, ValueError, r"expected names among .*got \['stackd'\]"),
    "no such limit": ({"limits": 3}, TypeError, "limits"),
    "one worker": ({"num_workers": 1}, ValueError, "num_workers: expected at least 2, got 1"),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_wrong_arguments(wrong):
    arguments, error, message = WRONG[wrong]
    with pytest.raises(error, match=message):
        check_transport("process", **arguments)


def test_type_checkers_know_the_names_of_all_backends():
    own = [name for name, module in BACKENDS.items() if module.startswith("rollwright.")]  # tests register others
    assert get_args(WorkerBackend) == tuple(own)
    assert get_args(Backend) == ("direct", *own)


def test_a_name_is_registered_once():
    with pytest.raises(ValueError, match=r"name: 'tcp' is rollwright.*Pass another one"):
        register_backend("tcp", "mine")
    with pytest.raises(ValueError, match="'direct' is no workers at all"):
        register_backend("direct", "mine")
    with pytest.raises(TypeError, match="module: expected a text, got int"):
        register_backend("mine", 3)
