"""New weights of an engine of transformers while it generates: in every mode, at any moment."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any

import pytest
import torch
from tests.llm_models import model
from torch.nn.utils.rnn import pad_sequence

from rollwright.data.llm.turns import FinishReason
from rollwright.modules.llm.engine import CacheMode, Completion, Request, Sampling, UpdateMode
from rollwright.modules.llm.sampling import token_log_probs
from rollwright.modules.llm.transformers_engine import TransformersEngine

pytestmark = pytest.mark.llm
STOP = tuple(range(6))
HOW = Sampling(max_new_tokens=16, stop_token_ids=STOP)


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@cache
def _first() -> dict[str, torch.Tensor]:
    return dict(model(vocab_size=128, tie_word_embeddings=False).state_dict())


@cache
def _weights(version: int) -> dict[str, torch.Tensor]:
    """Those of a version: each differs from the others by a few percent."""
    generator = torch.Generator().manual_seed(version)
    return {
        name: value + 0.05 * torch.randn(value.shape, generator=generator) if value.ndim > 1 else value
        for name, value in _first().items()
    }


def _engine(**options: Any) -> TransformersEngine:
    lm = model(vocab_size=128, tie_word_embeddings=False)
    lm.load_state_dict(_weights(0))
    return TransformersEngine(lm, sampling=options.pop("sampling", HOW), **options)


def _error(found: Sequence[Completion]) -> float:
    """The largest difference of a log-probability from that of a forward pass under its version."""
    lm, worst = model(vocab_size=128, tie_word_embeddings=False), 0.0
    for version in sorted({version for done in found for version in _stamps(done)}):
        lm.load_state_dict(_weights(version))
        some = [done for done in found if version in _stamps(done)]
        sequences = [torch.cat([_prompt(done.key), done.tokens]) for done in some]
        with torch.no_grad():
            together = lm(pad_sequence(sequences, batch_first=True)).logits
        for done, sequence, logits in zip(some, sequences, together, strict=True):
            own = logits[len(sequence) - len(done.tokens) - 1 : len(sequence) - 1]
            differences = (token_log_probs(own, done.tokens, HOW) - done.log_probs).abs()
            worst = max(worst, float(differences[torch.tensor(_stamps(done)) == version].max()))
    return worst


def _stamps(done: Completion) -> list[int]:
    """Versions of its tokens."""
    assert isinstance(done.versions, torch.Tensor)
    stamps: list[int] = done.versions.tolist()
    return stamps


def _prompt(key: Any) -> torch.Tensor:
    generator = torch.Generator().manual_seed(key)
    return torch.randint(0, 128, (int(torch.randint(1, 30, (), generator=generator)),), generator=generator)


def _requests(*keys: int) -> list[Request]:
    return [Request(key, _prompt(key), seed=key) for key in keys]


@pytest.mark.parametrize(("kept", "updates"), [("keep", 40), ("rebuild", 200)])
def test_many_updates_lose_no_request_and_each_token_is_of_its_version(kept: CacheMode, updates: int) -> None:
    engine, chance = _engine(max_batch_size=24), random.Random(0)
    begun, done = 0, list[Completion]()
    for version in range(1, updates + 1):
        while engine.in_progress < 32:
            engine.submit(_requests(begun))
            begun += 1
        engine.step(chance.randrange(4))
        mode = chance.choice(["in_flight"] * 9 + ["resubmit", "between_turns", "wait"])
        engine.update_weights(_weights(version), mode=mode, cache=kept)  # type: ignore[arg-type]
        done += engine.results(0)
    while engine.in_progress:
        done += engine.results()
    assert sorted(found.key for found in done) == list(range(begun))  # type: ignore[type-var]
    assert engine.version == updates
    stamps = [_stamps(found) for found in done]
    assert all(each == sorted(each) for each in stamps)
    assert sum(len(set(each)) > 1 for each in stamps) > updates // 2
    assert engine.tokens_discarded > updates
    error = _error(done)
    print(f"{begun} responses, cache={kept!r}: log-probabilities differ by at most {error:.1e}")
    assert (error < 1e-4) is (kept == "rebuild")


def test_rows_go_on_with_a_cache_that_was_computed_again() -> None:
    """With the same weights, nothing changes: tokens are those of an engine that was left alone."""
    engine, alone = _engine(), _engine()
    engine.submit(_requests(*range(12)))
    for steps in (1, 3, 2, 5):
        engine.step(steps)
        engine.update_weights(_weights(0), cache="rebuild")
        engine.submit(_requests(100 + steps))
    done = {}
    while engine.in_progress:
        done |= {found.key: found for found in engine.results()}
    keys = [*range(12), 101, 103, 102, 105]
    for expected in alone.generate(_requests(*keys)):
        assert done[expected.key].tokens.tolist() == expected.tokens.tolist()
        assert torch.allclose(done[expected.key].log_probs, expected.log_probs, atol=1e-5)


def test_wait_ends_what_is_in_progress_and_begins_nothing() -> None:
    engine = _engine(max_batch_size=2)
    engine.submit(_requests(0, 1, 2))
    engine.step(2)
    engine.update_weights(_weights(1), mode="wait")
    assert engine.version == 1
    assert {found.key: set(_stamps(found)) for found in engine.results(0)} == {0: {0}, 1: {0}}
    (last,) = engine.results()
    assert set(_stamps(last)) == {1}
    assert _error([last]) < 1e-4


def test_wait_for_an_engine_that_another_thread_generates_with() -> None:
    engine, begun = _engine(sampling=Sampling(max_new_tokens=200)), threading.Event()
    engine.model.register_forward_pre_hook(lambda *_: begun.set())
    found: list[Completion] = []
    engine.submit(_requests(0, 1))
    thread = threading.Thread(target=lambda: found.extend(engine.generate(_requests(2))))
    thread.start()
    assert begun.wait(30)
    engine.update_weights(_weights(1), mode="wait")
    assert engine.version == 1
    thread.join(60)
    (last,) = found
    assert set(_stamps(last)) <= {0, 1}
    assert len(set(_stamps(last))) == 1


def test_between_turns_returns_at_once_and_keeps_a_copy() -> None:
    engine, weights = _engine(), {name: value.clone() for name, value in _weights(1).items()}
    engine.submit(_requests(0))
    engine.step(2)
    engine.update_weights(weights, mode="between_turns")
    assert engine.version == 0
    engine.submit(_requests(1))
    for value in weights.values():
        value.fill_(float("nan"))  # the trainer goes on
    engine.version = 5  # of the weights that are to come
    assert engine.version == 0
    done = {found.key: found for found in [*engine.results(), *engine.results()]}
    assert [set(_stamps(done[key])) for key in (0, 1)] == [{0}, {5}]
    assert engine.version == 5
    engine.update_weights(_weights(6), mode="between_turns")  # nothing is in progress
    assert engine.version == 6


@pytest.mark.parametrize("end", ["cancel", "newer"])
def test_weights_that_wait_are_loaded_when_all_is_cancelled_and_replaced_by_newer_ones(end: str) -> None:
    engine = _engine()
    engine.submit(_requests(0))
    engine.step(1)
    engine.update_weights(_weights(1), mode="between_turns")
    if end == "cancel":
        engine.cancel([0])
        assert engine.version == 1
        assert torch.equal(engine.model.state_dict()["lm_head.weight"], _weights(1)["lm_head.weight"])
        return
    engine.update_weights(_weights(2))
    (done,) = engine.results()
    assert set(_stamps(done)) == {0, 2}
    assert engine.version == 2
    assert torch.equal(engine.model.state_dict()["lm_head.weight"], _weights(2)["lm_head.weight"])


def test_resubmitted_responses_are_those_of_the_new_weights() -> None:
    engine, fresh = _engine(max_batch_size=4), _engine()
    fresh.update_weights(_weights(1))
    engine.submit(_requests(*range(6)))
    engine.step(3)
    engine.update_weights(_weights(1), mode="resubmit")
    assert 0 < engine.tokens_discarded <= 3 * 4
    done = {}
    while engine.in_progress:
        done |= {found.key: found for found in engine.results()}
    for expected in fresh.generate(_requests(*done)):
        if 0 in done[expected.key].versions:  # it had ended before
            continue
        assert done[expected.key].tokens.tolist() == expected.tokens.tolist()
        assert done[expected.key].finish_reason is expected.finish_reason


def test_a_paused_engine_is_not_waited_for_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rollwright.modules.llm.transformers_engine._PAUSE_LIMIT_S", 0.05)
    engine = _engine()
    engine.submit(_requests(0))
    engine.step(2)
    engine.pause()
    with pytest.raises(TimeoutError, match="while it was paused"):
        engine.update_weights(_weights(1), mode="wait")
    engine.resume()
    (done,) = engine.results()
    assert (set(_stamps(done)), engine.version) == ({0}, 0)
    assert done.finish_reason is not FinishReason.ERROR


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"mode": "later"},
            "mode of update_weights: expected 'in_flight' or 'wait' or 'between_turns' or 'resubmit', ",
        ),
        ({"cache": "drop"}, "cache of update_weights: expected 'keep' or 'rebuild', got 'drop'"),
    ],
)
def test_unknown_modes_change_nothing(options: dict[str, Any], message: str) -> None:
    engine = _engine()
    with pytest.raises(ValueError, match=message):
        engine.update_weights(_weights(1), **options)
    assert engine.version == 0


class _Adapted(torch.nn.Module):
    """A linear layer with a low-rank adapter, under the names of peft."""

    def __init__(self, base: torch.nn.Linear) -> None:
        super().__init__()
        self.base_layer = base
        self.lora_A = torch.nn.ModuleDict({"default": torch.nn.Linear(base.in_features, 2, bias=False)})
        self.lora_B = torch.nn.ModuleDict({"default": torch.nn.Linear(2, base.out_features, bias=False)})

    def forward(self, x: torch.Tensor) -> Any:
        return self.base_layer(x) + self.lora_B["default"](self.lora_A["default"](x))


def _adapted(seed: int) -> Any:
    lm = model(vocab_size=128, tie_word_embeddings=False)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        for layer in lm.model.layers:
            layer.self_attn.q_proj = _Adapted(layer.self_attn.q_proj)
            layer.self_attn.v_proj = _Adapted(layer.self_attn.v_proj)
    return lm


@pytest.mark.parametrize("form", ["as peft saves them", "as the model names them"])
@pytest.mark.parametrize("mode", ["in_flight", "between_turns"])
def test_weights_of_an_adapter_alone_are_taken(form: str, mode: UpdateMode) -> None:
    engine, other = TransformersEngine(_adapted(0), sampling=HOW), _adapted(1)
    before = engine.generate(_requests(0))[0]
    state = {name: value for name, value in other.state_dict().items() if ".lora_" in name}
    if form == "as peft saves them":
        state = {name.replace(".default", ""): value for name, value in state.items()}
    engine.submit(_requests(1))
    engine.step(2)
    engine.update_weights(state, mode=mode)
    engine.results()
    (after,), (expected,) = (
        engine.generate(_requests(0)),
        TransformersEngine(other, sampling=HOW).generate(_requests(0)),
    )
    assert after.log_probs.tolist() == expected.log_probs.tolist() != before.log_probs.tolist()
    assert set(_stamps(after)) == {1}
    first = next(iter(state))
    with pytest.raises(ValueError, match=r"Missing: 'model.layers.0.self_attn.q_proj.lora_A.default.weight'"):
        engine.update_weights({name: value for name, value in state.items() if name != first})
    with pytest.raises(ValueError, match="has shape"):
        engine.update_weights({**state, first: torch.zeros(1)})
    with pytest.raises(ValueError, match="Weights of an adapter go to a model that has it"):
        _engine().update_weights(state)
