"""Who fills a buffer is asked as long as they are there, and keep nothing alive."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from tensordict import TensorDict

from rollwright.data import LazyTensorStorage, ReplayBuffer, ReplayBufferEnsemble


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
