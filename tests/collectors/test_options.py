"""Options are declared once; signatures, help and checks follow from the declaration."""

from __future__ import annotations

import inspect
import pydoc
from dataclasses import fields

import pytest

from rollwright.collectors import (
    AsyncCollector,
    Collector,
    CollectorOptions,
    Evaluator,
    MultiAsyncCollector,
    MultiCollector,
    MultiSyncCollector,
    SyncDataCollector,
)
from rollwright.collectors.distributed import DistributedSyncCollector, RayCollector, RPCCollector
from rollwright.collectors.distributed.generic import GroupOptions
from rollwright.collectors.llm import RayLLMCollector
from rollwright.collectors.llm.options import LLMOptions
from rollwright.collectors.llm.workers import MultiLLMCollector
from rollwright.collectors.workers.options import BackendOptions, WorkerOptions

DECLARED = [CollectorOptions, WorkerOptions, BackendOptions]
SHOWN = {
    Collector: DECLARED,
    SyncDataCollector: [CollectorOptions],
    MultiCollector: [CollectorOptions, WorkerOptions],
    MultiSyncCollector: [CollectorOptions, WorkerOptions],
    MultiAsyncCollector: [CollectorOptions, WorkerOptions],
    AsyncCollector: [CollectorOptions, WorkerOptions],
    DistributedSyncCollector: [CollectorOptions, WorkerOptions, GroupOptions],
    RPCCollector: [CollectorOptions, WorkerOptions, GroupOptions],
    RayCollector: [CollectorOptions, WorkerOptions, GroupOptions],
    MultiLLMCollector: [LLMOptions, WorkerOptions],
    RayLLMCollector: [LLMOptions, WorkerOptions, BackendOptions],
}
OTHERWISE = {  # what is one number or one value there, or has another name
    Collector: {"num_workers"},
    AsyncCollector: {"num_workers"},
    DistributedSyncCollector: {"num_workers", "backend", "sync", "update_at_each_batch", "max_weight_update_interval"},
    RPCCollector: {"num_workers", "backend", "sync", "update_at_each_batch"},
    RayCollector: {"num_workers", "backend", "sync", "update_at_each_batch"},
    RayLLMCollector: {"num_workers", "backend", "sync"},
}
WRONG = [
    (CollectorOptions, {"frames_per_batch": "x"}, TypeError, "expected an integer of at least 1, got str: 'x'."),
    (CollectorOptions, {"frames_per_batch": None}, TypeError, "expected an integer of at least 1, got NoneType: None."),
    (CollectorOptions, {"reset_when_done": 1}, TypeError, "expected True or False, got int: 1."),
    (CollectorOptions, {"postproc": 3}, TypeError, "expected a callable or None, got int: 3."),
    (CollectorOptions, {"traj_format": "list"}, ValueError, "expected 'padded' or 'cat', got 'list'."),
    (CollectorOptions, {"create_env_kwargs": 3}, TypeError, "expected a dictionary, got int."),
    (WorkerOptions, {"max_restarts": -1}, ValueError, "expected an integer of at least 0, got -1."),
    (WorkerOptions, {"num_workers": 2.0}, TypeError, "expected an integer of at least 1, got float: 2.0."),
    (WorkerOptions, {"restart_delay": -1}, ValueError, "expected 0 s or more, got -1."),
    (WorkerOptions, {"env_step_timeout": 0}, ValueError, r"expected more than 0 s \(None: no limit\), got 0."),
    (WorkerOptions, {"policy_lag": "never"}, ValueError, "expected 'wait' or 'drop', got 'never'."),
    (WorkerOptions, {"backend": "cloud"}, ValueError, "expected None, 'direct', .*'multiprocessing', 'tcp'.* got"),
]


@pytest.mark.parametrize("declaration", DECLARED)
def test_every_option_has_a_sentence_where_it_is_declared(declaration):
    text = inspect.getdoc(declaration)
    assert [field.name for field in fields(declaration) if f"\n    {field.name}: " not in text] == []


@pytest.mark.parametrize(("cls", "declarations"), SHOWN.items())
def test_signature_and_help_list_every_option(cls, declarations):
    signature, text = inspect.signature(cls).parameters, pydoc.render_doc(cls, renderer=pydoc.plaintext)
    for declaration in declarations:
        for field in fields(declaration):
            if field.name in OTHERWISE.get(cls, ()):
                continue
            assert signature[field.name].default == field.default
            assert signature[field.name].annotation is not inspect.Parameter.empty
            assert f" {field.name}: " in text
    assert "**options" not in inspect.getdoc(cls)


@pytest.mark.parametrize(
    ("cls", "given", "message"),
    [
        (
            Collector,
            "num_colectors",
            r"Did you mean 'num_collectors'\? Its options, .* first: num_collectors, .*, device",
        ),
        (Collector, "envs", "'envs'. Its options, the most similar first: env_groups, .*num_collectors"),
        (RayCollector, "num_colectors", r"Did you mean 'num_collectors'\?"),
        (DistributedSyncCollector, "update_intervall", r"Did you mean 'update_interval'\?"),
        (Evaluator, "num_trajectory", r"Evaluator has .* mean 'num_trajectories'\?"),
    ],
)
def test_an_unknown_name_is_answered_with_the_names_of_the_signature(cls, given, message):
    with pytest.raises(TypeError, match=message):
        cls(lambda: None, None, **{given: 3})


def test_functions_for_groups_are_counted_by_groups():
    options = {"num_collectors": 2, "backend": "tcp", "backend_options": {"num_workers_per_collector": 2}}
    with pytest.raises(ValueError, match="one function for each of the 2 collectors, got 4"):
        Collector([lambda: None] * 4, None, **options)


def test_a_subclass_shows_its_own_constructor():
    class Mine(Collector):
        """A collector."""

        def __init__(self, speed: int = 3) -> None:
            super().__init__(lambda: None)

    class Same(Collector):
        """A collector."""

    assert list(inspect.signature(Mine).parameters) == ["speed"]
    assert inspect.signature(Same) == inspect.signature(Collector)


@pytest.mark.parametrize(("declaration", "given", "error", "message"), WRONG)
def test_a_wrong_value_is_refused_by_its_type(declaration, given, error, message):
    with pytest.raises(error, match=f"{next(iter(given))}: {message}"):
        declaration(**given)
