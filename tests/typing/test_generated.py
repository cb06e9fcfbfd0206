"""What type checkers read is what is declared."""

from __future__ import annotations

import inspect
from dataclasses import fields
from typing import get_type_hints

import pytest
from tests.typing.generate import GENERATED, SRC

from rollwright.collectors import CollectorOptions, Evaluator
from rollwright.collectors.keywords import CollectorKeywords, EvaluatorKeywords, MultiKeywords
from rollwright.collectors.workers.options import BackendOptions, WorkerOptions
from rollwright.data.replay_buffers import ReplayBuffer, SliceSampler
from rollwright.data.replay_buffers.keywords import BufferKeywords, SliceKeywords


@pytest.mark.parametrize("path", GENERATED)
def test_the_generated_file_is_up_to_date(path):
    assert (SRC / path).read_text() == GENERATED[path](), "run python tests/typing/generate.py"


def test_options_of_collectors():
    declared = {field.name for field in fields(CollectorOptions)}
    own = {name: hint for name, hint in get_type_hints(CollectorOptions).items() if name in declared}
    seen = get_type_hints(CollectorKeywords)
    assert seen.keys() == declared | {field.name for field in fields(BackendOptions)} | {"sync", "backend"}
    assert {name: seen[name] for name in declared} == own
    assert get_type_hints(MultiKeywords).keys() == declared | {field.name for field in fields(WorkerOptions)} - {
        "backend"
    }
    assert get_type_hints(EvaluatorKeywords).keys() < inspect.signature(Evaluator).parameters.keys()


@pytest.mark.parametrize(("cls", "keywords"), [(ReplayBuffer, BufferKeywords), (SliceSampler, SliceKeywords)])
def test_options_of_buffers_and_samplers(cls, keywords):
    assert keywords.__annotations__.keys() == inspect.signature(cls).parameters.keys()
