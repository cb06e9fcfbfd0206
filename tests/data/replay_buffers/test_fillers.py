"""Who fills a buffer is asked as long as they are there, and keep nothing alive."""

from __future__ import annotations

import copy
import os
import pickle

import pytest
import torch
from tensordict import TensorDict

from rollwright.data import LazyTensorStorage, ReplayBuffer, ReplayBufferEnsemble, SampleToInsertRatio


class Filler:
    error: Exception | None = None

    def raise_error(self) -> None:
        error, self.error = self.error, None
        if error is not None:
            raise error


def make_buffer() -> ReplayBuffer:
    buffer = ReplayBuffer(storage=LazyTensorStorage(10), batch_size=2)
    buffer.extend(TensorDict({"obs": torch.zeros(3)}, [3]))
    return buffer


def test_all_who_fill_it_are_asked():
    buffer, one, two = make_buffer(), Filler(), Filler()
    for filler in (one, two, one):
        buffer.fillers.add(filler.raise_error)
    assert len(buffer) == 3
    two.error = OSError("second")
    with pytest.raises(OSError, match="second"):
        buffer.sample()
    assert len(buffer.sample()) == 2


def test_an_ensemble_asks_those_of_its_members():
    ensemble, filler = ReplayBufferEnsemble(make_buffer(), make_buffer(), batch_size=4), Filler()
    ensemble.members[1].fillers.add(filler.raise_error)
    for watch in (ensemble.sample, lambda: ensemble.write_count):
        filler.error = OSError("of a member")
        assert ensemble.num_given() == 6
        with pytest.raises(OSError, match="of a member"):
            watch()


def test_who_is_gone_is_not_asked_and_copies_ask_nobody():
    buffer, filler = make_buffer(), Filler()
    filler.error = OSError("gone")
    buffer.fillers.add(filler.raise_error)
    assert len(copy.deepcopy(buffer)) == len(pickle.loads(pickle.dumps(buffer))) == 3
    del filler
    assert len(buffer) == 3


def test_an_ensemble_is_emptied_whole_whatever_went_wrong_before():
    members = [make_buffer(), make_buffer()]
    limiter = SampleToInsertRatio(1.0, margin=20.0)
    ensemble = ReplayBufferEnsemble(*members, batch_size=2, limiter=limiter)
    filler = Filler()
    members[0].fillers.add(filler.raise_error)
    filler.error = OSError("before")
    ensemble.empty()
    assert [len(member.storage) for member in members] == [0, 0]
    with pytest.raises(OSError, match="before"):
        len(members[0])


def test_a_fork_has_nobody_who_fills_it():
    buffer, filler = make_buffer(), Filler()
    buffer.fillers.add(filler.raise_error)
    filler.error = OSError("of the parent")
    child = os.fork()
    if not child:
        code = 1
        try:
            code = 0 if len(buffer) == 3 else 2
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    with pytest.raises(OSError, match="of the parent"):
        len(buffer)
