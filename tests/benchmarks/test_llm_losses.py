"""TorchRL's losses on our batches, where TorchRL is installed in an environment of its own (`make bench`)."""

from __future__ import annotations

import pytest
import torch
from benchmarks.peers.protocol import ROOT

from benchmarks import llm_losses
from rollwright.data.llm import group_advantages

pytest.importorskip("transformers")
pytestmark = pytest.mark.llm
PYTHON = ROOT / ".venv-bench-torchrl/bin/python"


@pytest.fixture(scope="module")
def batch():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield group_advantages(llm_losses.collect())
    torch.set_num_threads(before)


def test_the_batch_has_whole_groups_of_two_turns_and_ragged_answers(batch):
    names = {tuple(int(row[key]) for key in ("group_id", "repeat", "turn")) for row in batch.unbind(0)}
    groups, samples = llm_losses.GROUPS, llm_losses.SAMPLES
    assert names == {(group, repeat, turn) for group in range(groups) for repeat in range(samples) for turn in (0, 1)}
    assert len({len(tokens) for tokens in batch.get(("tokens", "response"), as_list=True)}) > 3


def test_records_are_saved_under_their_own_keys(batch):
    row = llm_losses.saved_rows(batch)[0]
    whole = batch[0].exclude("history", ("next", "history"))
    assert torch.equal(row["log_probs"]["full"], whole["log_probs", "full"])
    assert row["tokens"].keys() == {"prompt", "response", "full", "policy_version"}
    assert row.keys() == set(whole.keys())


def test_a_difference_is_seen(batch):
    names = ("group_id", "repeat", "turn", "advantage")
    rows = [[float(row[key]) for key in names] for row in group_advantages(batch).unbind(0)]
    assert llm_losses.largest_difference(batch, rows, None) == 0
    rows[3][3] += 0.5
    assert llm_losses.largest_difference(batch, rows, None) == pytest.approx(0.5)


@pytest.mark.skipif(not PYTHON.exists(), reason="no environment with TorchRL: make bench makes it")
def test_torchrl_trains_on_our_batch_as_it_is(batch):
    found = llm_losses.ask(PYTHON, batch)
    for figures in found["grpo"].values():
        assert llm_losses.is_sound(figures)
        assert abs(figures["kl_approx"]) < 1e-5  # the log-probabilities are those of the model that has sampled
        assert figures["gradient_norm"] > 0
    assert llm_losses.largest_difference(batch, found["steps"], None) < 1e-5
    assert llm_losses.largest_difference(batch, found["sum"], "sum") < 1e-5
