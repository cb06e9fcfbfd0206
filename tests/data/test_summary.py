"""Summaries: of batches, and what a notebook shows of buffers."""

from __future__ import annotations

import json

import pytest
import torch
from tensordict import TensorDict

from rollwright.data import LazyTensorStorage, ListStorage, ReplayBuffer, TensorDictReplayBuffer
from rollwright.data.datasets import summarize


def batch() -> TensorDict:
    done = torch.tensor([[False, True, False, False], [False, False, False, True]]).unsqueeze(-1)
    outcome = {"reward": torch.full((2, 4, 1), 2.0), "done": done, "terminated": done.clone()}
    return TensorDict({"observation": torch.zeros(2, 4, 3), "next": outcome}, [2, 4])


def test_a_summary_has_entries_and_episodes():
    summary = summarize(batch())
    found = summary.as_dict()
    assert (found["frames"], found["batch_size"], found["bytes"]) == (8, [2, 4], 8 * 4 * 4 + 16)
    assert {entry["key"][-1]: entry["shape"] for entry in found["entries"]}["observation"] == [2, 4, 3]
    assert (found["episodes"]["count"], found["episodes"]["unfinished"]) == (2, 1)
    assert found["episodes"]["return"]["mean"] == 6.0
    assert json.loads(json.dumps(found)) == found
    assert "2 complete (2 terminated, 0 truncated), 1 unfinished" in str(summary)
    assert summary._repr_html_().startswith("<pre>8 frames [2, 4]")


def test_frames_without_flags_say_what_is_missing():
    assert "episodes   unknown: there is no flag" in str(summarize(batch().exclude("next")))


@pytest.mark.parametrize("kind", [LazyTensorStorage, ListStorage])
def test_a_notebook_shows_how_full_a_buffer_is_and_what_an_element_holds(kind):
    buffer = TensorDictReplayBuffer(storage=kind(10), batch_size=2)
    assert "0 elements, 0 written so far" in buffer._repr_html_()
    for _ in range(2):
        buffer.extend(batch().reshape(-1))
    shown = buffer._repr_html_()
    assert "10 elements, 16 written so far" in shown
    assert "observation" in shown
    assert "[3]" in shown


def test_a_buffer_of_objects_is_shown_without_a_table():
    buffer = ReplayBuffer(storage=ListStorage(10))
    buffer.extend(["<b>", "two"])
    assert "2 elements" in buffer._repr_html_()
    assert "<b>" not in buffer._repr_html_()
