"""The benchmark of throughput: both sides generate all that was asked for, and its table says what was measured."""

from __future__ import annotations

import pytest
import torch

from benchmarks import llm_throughput as throughput

pytest.importorskip("transformers")
pytestmark = pytest.mark.llm


def test_our_side_generates_all_tokens() -> None:
    work = throughput.make_work(6, longest=5)
    assert throughput.ours(throughput.make_model(32, 1), work, 3) == sum(work.lengths)
    assert all(1 <= length <= 5 for length in work.lengths)


def test_rates_are_the_best_of_all_rounds_and_of_the_same_work() -> None:
    torch.manual_seed(0)
    calls = []

    def side() -> int:
        calls.append(torch.randn(200, 200) @ torch.randn(200, 200))
        return 7

    found = throughput.rates({throughput.OURS: side, throughput.PEER: side}, 7, 3)
    assert len(calls) == 6
    assert min(found.values()) > 0
    with pytest.raises(AssertionError):
        throughput.rates({"one": side}, 8, 1)
    row = throughput.rows_of("tiny", 4, {throughput.OURS: 2000.0, throughput.PEER: 1000.0})
    assert row == ["tiny, batch 4", "2,000", "1,000", "2.00", "yes"]


@pytest.mark.parametrize("kind", [throughput.ENVIRONMENT, throughput.TOOL])
def test_a_wait_follows_each_answer_and_all_run_beside_each_other(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"STEP_S": 0.0, "ANSWER_S": 0.0, "LONGEST": 4}.items():
        monkeypatch.setattr(throughput, name, value)
    seconds = throughput.waiting(kind, 0.2, 32)
    assert 0.2 * (throughput.TURNS - 1) <= seconds < 0.1 * 32 * throughput.TURNS  # one after another: twice as much
