"""Warnings point at the line of the program that they concern, however deep in the package they arise."""

from __future__ import annotations

import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from tensordict import TensorDict
from tests.collectors.workers.envs import gain, makers, tally

import rollwright
from rollwright import Collector, Evaluator
from rollwright._warnings import warn_user
from rollwright.data import LazyTensorStorage, ReplayBuffer
from rollwright.data.replay_buffers import PolicyAgeFilter
from rollwright.envs import SerialEnv


class Own(Collector):
    def __init__(self, *args, **options):
        super().__init__(*args, **options)


def in_process():
    return Collector(SerialEnv(2, tally), gain(), frames_per_batch=15, total_frames=30)


def subclass():
    return Own(SerialEnv(2, tally), gain(), frames_per_batch=15, total_frames=30)


def synchronous():
    return Collector(makers(2), gain(), num_collectors=2, sync=True, frames_per_batch=15, total_frames=32)


def asynchronous():
    return Collector(makers(2), gain(), num_collectors=2, sync=False, frames_per_batch=16, total_frames=30)


def remote():
    return Collector(
        makers(2), gain(), num_collectors=2, sync=True, backend="tcp", frames_per_batch=15, total_frames=32
    )


@pytest.mark.parametrize("make", [in_process, subclass, synchronous, asynchronous, remote])
def test_a_warning_of_a_constructor_names_the_line_that_calls_it(make):
    with warnings.catch_warnings(record=True, action="always") as caught:
        made = make()
    made.shutdown()
    assert caught
    assert {each.filename for each in caught} == {__file__}


class Kept(torch.nn.Linear):
    def __deepcopy__(self, memo):
        raise TypeError("there is one of these")


def test_a_warning_of_an_evaluator_names_the_line_that_calls_it():
    module = Kept(1, 1)
    with warnings.catch_warnings(record=True, action="always") as caught:
        made = Evaluator(tally, lambda td: td.set("action", module(td["observation"])))
    made.shutdown()
    assert [each.filename for each in caught] == [__file__]


def test_a_warning_of_a_transform_of_a_buffer_names_the_line_that_samples():
    buffer = ReplayBuffer(storage=LazyTensorStorage(10), batch_size=2)
    buffer.append_transform(PolicyAgeFilter(lambda: 1, 1))
    with warnings.catch_warnings(record=True, action="always") as caught:
        buffer.extend(TensorDict({"reward": torch.zeros(4)}, [4]))
    assert [each.filename for each in caught] == [__file__]


def test_a_warning_in_a_thread_of_the_package_has_a_place():
    def warned():
        with warnings.catch_warnings(record=True, action="always") as caught:
            warn_user("nobody called", RuntimeWarning)
        return caught

    with ThreadPoolExecutor(1) as pool:
        [found] = pool.submit(warned).result()
    assert (str(found.message), found.category, found.filename) == ("nobody called", RuntimeWarning, __file__)


def test_no_line_of_the_package_counts_frames():
    source = Path(rollwright.__file__).parent
    assert [str(path) for path in source.rglob("*.py") if "stacklevel" in path.read_text()] == []
