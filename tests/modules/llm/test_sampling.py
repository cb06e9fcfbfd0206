"""Sampling: known numbers, frequencies, and equal tokens on arrays and on tensors."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from rollwright.data.llm.turns import LogProbMode
from rollwright.modules.llm.distribution import TokenDistribution
from rollwright.modules.llm.engine import Sampling
from rollwright.modules.llm.sampling import (
    Drawn,
    Sampler,
    Seen,
    child_seed,
    draw_by_rows,
    draw_by_tensors,
    restrict,
    sampling_of,
    token_log_probs,
    uniforms,
)

pytestmark = pytest.mark.llm
MASK = 2**64 - 1


def _mixed(bits: int) -> int:
    bits = ((bits ^ (bits >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    bits = ((bits ^ (bits >> 27)) * 0x94D049BB133111EB) & MASK
    return bits ^ (bits >> 31)


def test_uniforms_are_splitmix64_of_seed_and_place() -> None:
    assert _mixed(0x9E3779B97F4A7C15) == 0xE220A8397B1DCDAF  # the first output of SplitMix64 for seed 0
    numbers = uniforms(np.array([3, 2**63 - 1], np.uint64), np.array([0, 7]), 5)
    for place in range(5):
        for half in range(2):
            for column, (seed, first) in enumerate([(3, 0), (2**63 - 1, 7)]):
                count = 2 * (first + place) + 1 + half
                bits = _mixed((_mixed(seed) + 0x9E3779B97F4A7C15 * count) & MASK)
                assert numbers[place, half, column] == ((bits >> 13) + 0.5) * 2.0**-51
    assert (numbers < 1).all()


def test_seeds_of_samples_differ() -> None:
    assert child_seed(5, 0) == 5
    assert len({child_seed(seed, place) for seed in range(20) for place in range(20)}) == 400


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(temperature=2.0, top_k=3), Sampling(top_p=0.7)])
@pytest.mark.parametrize("draw", [draw_by_rows, draw_by_tensors])
def test_frequencies_are_those_of_the_distribution(sampling: Sampling, draw: object) -> None:
    logits = torch.tensor([2.0, -1.0, 0.0, 1.0, -math.inf, 1.5, 0.3]).expand(40_000, 7).contiguous()
    kept = restrict(logits, sampling)
    numbers = uniforms(np.arange(40_000, dtype=np.uint64), np.zeros(40_000, np.int64), 1)[0]
    given = numbers if draw is draw_by_rows else torch.from_numpy(numbers)
    drawn = draw(logits, kept, given, False)  # type: ignore[operator]
    expected = kept[0].softmax(-1).numpy()
    found = np.bincount(drawn.tokens, minlength=7) / 40_000
    assert np.abs(found - expected).max() < 0.01
    assert found[expected == 0].sum() == 0
    assert np.allclose(np.exp(drawn.log_probs), expected[drawn.tokens], atol=1e-6)


@pytest.mark.parametrize("vocab", [2, 5, 64, 1000])
@pytest.mark.parametrize("raw", [False, True])
def test_rows_and_tensors_draw_the_same(vocab: int, raw: bool) -> None:
    generator = torch.Generator().manual_seed(vocab)
    logits = 3 * torch.randn(256, vocab, generator=generator)
    for sampling in (Sampling(), Sampling(temperature=0.5, top_k=4, top_p=0.9), None):
        kept = logits if sampling is None else restrict(logits, sampling)
        numbers = uniforms(np.arange(256, dtype=np.uint64), np.full(256, 3), 1)[0]
        one = draw_by_rows(logits, kept, None if sampling is None else numbers, raw)
        two = draw_by_tensors(logits, kept, None if sampling is None else torch.from_numpy(numbers), raw)
        assert one.tokens == two.tokens
        assert np.allclose(one.log_probs, two.log_probs, atol=1e-5)
        assert one.ids is None
        assert two.ids[:, 0].tolist() == two.tokens


def test_a_row_draws_the_same_alone_as_among_others() -> None:
    logits = torch.randn(32, 300, generator=torch.Generator().manual_seed(0))
    sampler, seeds = Sampler(Sampling()), np.arange(32, dtype=np.uint64)
    together = sampler(logits, sampler.place(uniforms(seeds, np.zeros(32, np.int64), 1))[0])
    for row in range(32):
        numbers = uniforms(seeds[row : row + 1], np.zeros(1, np.int64), 1)
        alone = sampler(logits[row : row + 1], sampler.place(numbers)[0])
        assert alone.tokens[0] == together.tokens[row]
        assert alone.log_probs[0] == together.log_probs[row]


def test_top_k_and_top_p_keep_the_smallest_sets() -> None:
    logits = torch.tensor([[0.1, 0.4, 0.2, 0.3]]).log()
    assert restrict(logits, Sampling(top_k=2)).isfinite().tolist() == [[False, True, False, True]]
    assert restrict(logits, Sampling(top_p=0.65)).isfinite().tolist() == [[False, True, False, True]]
    assert restrict(logits, Sampling(top_p=0.75)).isfinite().tolist() == [[False, True, True, True]]
    assert restrict(logits, Sampling(top_p=1e-6)).isfinite().sum() == 1
    assert restrict(logits, Sampling()) is logits


def test_min_p_keeps_what_is_probable_beside_the_best() -> None:
    logits = torch.tensor([[0.1, 0.4, 0.2, 0.3]]).log()
    assert restrict(logits, Sampling(min_p=0.45)).isfinite().tolist() == [[False, True, True, True]]
    assert restrict(logits, Sampling(min_p=0.8)).isfinite().sum() == 1
    hot = restrict(logits, Sampling(min_p=0.45, temperature=10.0))  # of the probabilities after temperature
    assert hot.isfinite().all()
    assert restrict(logits, Sampling(min_p=0.45, top_p=0.7)).isfinite().sum() == 2  # top-p counts what min-p left


def test_penalties_are_those_of_known_numbers() -> None:
    logits = torch.tensor([[2.0, -1.0, 1.0, 0.5, 0.0]])
    seen = [Seen(np.array([0, 1]), np.array([1, 2, 2]))]
    sampling = Sampling(repetition_penalty=2.0, presence_penalty=0.5, frequency_penalty=0.25)
    sampler = Sampler(sampling)
    assert sampler.penalises
    numbers = sampler.place(uniforms(np.zeros(1, np.uint64), np.zeros(1, np.int64), 1))[0]
    expected = torch.tensor([1.0, -2.0 - 0.75, 0.5 - 1.0, 0.5, 0.0]).log_softmax(-1)
    drawn = sampler(logits, numbers, seen)
    assert drawn.log_probs[0] == pytest.approx(float(expected[drawn.tokens[0]]), abs=1e-6)
    for token in (1, 2, 2, 0):
        response = torch.tensor([1, 2, 2, token])
        found = token_log_probs(logits.expand(4, -1), response, sampling, torch.tensor([0, 1]))
        assert float(found[-1]) == pytest.approx(float(expected[token]), abs=1e-6)
    with pytest.raises(ValueError, match="prompt: log-probabilities under penalties"):
        token_log_probs(logits, torch.tensor([1]), sampling)
    with pytest.raises(ValueError, match="sampling: log-probabilities under penalties"):
        TokenDistribution(logits, torch.ones(1, dtype=torch.bool), sampling)


VARIED = [
    Sampling(),
    Sampling(temperature=0.0),
    Sampling(top_k=4, temperature=2.0),
    Sampling(min_p=0.2),
    Sampling(top_p=0.5),
    Sampling(repetition_penalty=3.0, top_k=9),
    Sampling(presence_penalty=1.0, frequency_penalty=-0.5),
    Sampling(temperature=0.0, frequency_penalty=9.0),
]


@pytest.mark.parametrize("mode", ["sampled", "raw"])
def test_rows_of_unequal_sampling_draw_what_each_draws_alone(mode: LogProbMode) -> None:
    logits = 2 * torch.randn(16, 60, generator=torch.Generator().manual_seed(3))
    rows = [replace(one, log_prob_mode=mode) for one in VARIED] * 2
    seeds = np.arange(16, dtype=np.uint64)
    seen = [Seen(np.arange(row, 20), np.arange(row, 40) % 7) for row in range(16)]
    sampler = Sampler(rows[0]).of_rows(rows)
    for at in range(3):
        numbers = uniforms(seeds, np.full(16, at), 1)
        together = sampler(logits, sampler.place(numbers)[0], seen)
        tensors = draw_on_tensors(rows, logits, numbers, seen)
        assert together.tokens == tensors.tokens
        for row, how in enumerate(rows):
            single = Sampler(how)
            number = single.place(numbers[:, :, row : row + 1])[0]
            alone = single(logits[row : row + 1], number, seen[row : row + 1])
            assert alone.tokens[0] == together.tokens[row]
            assert together.log_probs[row] == pytest.approx(alone.log_probs[0], abs=1e-6)
            assert tensors.log_probs[row] == pytest.approx(alone.log_probs[0], abs=1e-5)


def draw_on_tensors(rows: list[Sampling], logits: torch.Tensor, numbers: Any, seen: list[Seen]) -> Drawn:
    sampler = Sampler(rows)
    sampler._draw = draw_by_tensors
    return sampler(logits, torch.from_numpy(numbers[0]), seen)


def test_rows_of_equal_sampling_cost_one_operation_on_tensors() -> None:
    counted = Counter[str]()

    class Counts(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            counted[str(func)] += 1
            return func(*args, **(kwargs or {}))

    own = Sampler(Sampling(max_new_tokens=8))
    sampler = own.of_rows([Sampling(max_new_tokens=8, stop=("x",)), Sampling(max_new_tokens=3)])
    assert sampler is own
    numbers = sampler.place(uniforms(np.zeros(2, np.uint64), np.zeros(2, np.int64), 1))[0]
    logits = torch.zeros(2, 30)
    with torch.inference_mode(), Counts():
        sampler(logits, numbers)
        found = dict(counted)
        counted.clear()
        logits.softmax(-1).numpy()
    assert found == counted


@pytest.mark.parametrize("mode", ["sampled", "raw"])
@pytest.mark.parametrize("options", [{"temperature": 0.0}, {"temperature": 0.5}, {"top_k": 5}, {"min_p": 0.1}])
def test_log_probs_of_given_tokens_are_those_of_the_draw(mode: str, options: dict[str, float]) -> None:
    sampling = Sampling(log_prob_mode=mode, **options)  # type: ignore[arg-type]
    logits = torch.randn(16, 50, generator=torch.Generator().manual_seed(1))
    sampler = Sampler(sampling)
    drawn = sampler(logits, uniforms(np.arange(16, dtype=np.uint64), np.zeros(16, np.int64), 1)[0])
    found = token_log_probs(logits, torch.tensor(drawn.tokens), sampling)
    assert torch.allclose(found, torch.tensor(drawn.log_probs), atol=1e-5)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_new_tokens": 0}, "max_new_tokens: expected at least 1, got 0"),
        ({"temperature": -1.0}, "temperature: expected 0 or more"),
        ({"top_k": -1}, "top_k: expected 0 or more"),
        ({"top_p": 0.0}, "top_p: expected more than 0"),
        ({"min_p": 1.5}, r"min_p: expected 0 \(all tokens\) to 1, got 1.5"),
        ({"repetition_penalty": 0.0}, r"repetition_penalty: expected more than 0"),
        ({"presence_penalty": float("nan")}, r"presence_penalty: expected a finite number"),
        ({"frequency_penalty": float("inf")}, r"frequency_penalty: expected a finite number"),
        ({"log_prob_mode": "both"}, "log_prob_mode: expected 'sampled' or 'raw', got 'both'"),
    ],
)
def test_wrong_values_are_errors(options: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Sampling(**options)  # type: ignore[arg-type]


@pytest.mark.parametrize("kwargs", [{"max_new_tokens": 4.0}, {"max_new_tokens": "4"}, {"top_k": "5"}, {"top_p": "1"}])
def test_what_is_no_number_is_an_error(kwargs: dict[str, Any]) -> None:
    (name,) = kwargs
    with pytest.raises(TypeError, match=rf"{name}: expected a .*number, got {kwargs[name]!r}"):
        sampling_of(kwargs, log_prob_mode="raw")


def test_generate_kwargs_have_the_names_of_the_field() -> None:
    found = sampling_of({"max_tokens": 3, "do_sample": False, "top_k": -1}, log_prob_mode="raw")
    assert found == Sampling(max_new_tokens=3, temperature=0.0, log_prob_mode="raw")
    found = sampling_of({"stop": "\n", "min_p": 0.1, "repetition_penalty": 1.1}, log_prob_mode="raw")
    assert found == Sampling(stop=("\n",), min_p=0.1, repetition_penalty=1.1, log_prob_mode="raw")
    with pytest.raises(TypeError, match="stop: expected a tuple of strings that are not empty, got"):
        sampling_of({"stop": ["a", ""]}, log_prob_mode="raw")
    with pytest.raises(ValueError, match="'num_beams' are not supported"):
        sampling_of({"num_beams": 2}, log_prob_mode="raw")
    with pytest.raises(ValueError, match="max_tokens beside max_new_tokens"):
        sampling_of({"max_tokens": 2, "max_new_tokens": 2}, log_prob_mode="raw")
