"""The engine of transformers: log-probabilities, equal tokens in any batch, and the methods of an engine."""

from __future__ import annotations

import copy
import pickle
import threading
from typing import Any

import pytest
import torch
import transformers
from tests.llm_models import MODELS, model, tokenizer
from tests.variants import in_turn

from rollwright.data.llm.codec import Codec
from rollwright.data.llm.turns import FinishReason
from rollwright.modules.llm.decoding import Decoding
from rollwright.modules.llm.engine import Completion, Request, Sampling
from rollwright.modules.llm.sampling import token_log_probs
from rollwright.modules.llm.transformers_engine import TransformersEngine

pytestmark = pytest.mark.llm
STOP = tuple(range(20))  # of 512 tokens: responses end at unequal lengths


def _prompts(number: int, seed: int = 0, longest: int = 30) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, longest, (number,), generator=generator).tolist()
    return [torch.randint(0, 400, (length,), generator=generator) for length in lengths]


def _lively(kind: str) -> Any:
    """A model whose logits differ by more than those of small random weights."""
    lm = model(kind)
    with torch.no_grad():
        for parameter in lm.parameters():
            if parameter.ndim > 1:
                parameter.mul_(6)
    return lm


def _all(engine: TransformersEngine) -> dict[Any, Completion]:
    done: dict[Any, Completion] = {}
    while engine.in_progress:
        done.update((completion.key, completion) for completion in engine.results())
    done.update((completion.key, completion) for completion in engine.results(0))
    return done


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize(
    ("options", "mode"),
    in_turn(
        [
            {"temperature": 0.5},
            {},
            {"temperature": 2.0, "repetition_penalty": 1.3},
            {"top_k": 5, "presence_penalty": 1.0, "frequency_penalty": 0.5},
            {"top_p": 0.8, "min_p": 0.05},
            {"temperature": 0.0},
        ],
        ["sampled", "raw"],
    ),
)
def test_log_probs_equal_a_forward_pass(kind: str, mode: str, options: dict[str, Any]) -> None:
    lm, plain = _lively(kind), tokenizer("plain")  # its padding token is its end token
    sampling = Sampling(max_new_tokens=8, log_prob_mode=mode, stop_token_ids=STOP, **options)
    engine = TransformersEngine(lm, tokenizer=plain, sampling=sampling)
    prompts = _prompts(8)
    prompts[3] = torch.tensor([plain.pad_token_id, plain.pad_token_id, 7])  # looks like padding, and is none
    done = {c.key: c for c in engine.generate([Request(key, p, seed=key) for key, p in enumerate(prompts)])}
    ended = 0
    for key, prompt in enumerate(prompts):
        tokens = done[key].tokens
        with torch.no_grad():
            logits = lm(torch.cat([prompt, tokens])[None]).logits[0, len(prompt) - 1 : -1]
        expected = token_log_probs(logits, tokens, sampling, prompt)
        assert (done[key].log_probs - expected).abs().max() < 1e-4
        ended += done[key].finish_reason is FinishReason.STOP
        assert (int(tokens[-1]) in engine.end_ids) is (done[key].finish_reason is FinishReason.STOP)
        assert not set(tokens[:-1].tolist()) & set(engine.end_ids)
    assert ended or options.get("temperature") == 0.0


@pytest.mark.parametrize("kind", MODELS)
def test_the_same_seed_gives_the_same_tokens_in_any_batch_and_order(kind: str) -> None:
    lm, prompts = _lively(kind), _prompts(32)
    found = []
    for size, order in ((1, 1), (8, 1), (32, -1)):
        engine = TransformersEngine(lm, sampling=Sampling(max_new_tokens=16, stop_token_ids=STOP), max_batch_size=size)
        engine.submit([Request(key, prompt, seed=7 * key) for key, prompt in enumerate(prompts)][::order])
        done = _all(engine)
        found.append([done[key].tokens.tolist() for key in range(32)])
    assert all(tokens == found[0] for tokens in found)
    assert len({len(tokens) for tokens in found[0]}) > 5


@pytest.mark.parametrize("kind", MODELS)
def test_requests_have_sampling_of_their_own_in_one_call_of_the_model(kind: str) -> None:
    lm, prompts, calls = _lively(kind), _prompts(24), []
    ways: list[Sampling | None] = [
        None,
        Sampling(max_new_tokens=12, temperature=0.0),
        Sampling(max_new_tokens=20, top_k=7, repetition_penalty=1.5, stop_token_ids=STOP),
        Sampling(max_new_tokens=16, min_p=0.1, frequency_penalty=0.4, stop_token_ids=(30, 31, 32)),
    ]
    how = Sampling(max_new_tokens=16, stop_token_ids=STOP)
    requests = [Request(key, p, seed=3 * key, sampling=ways[key % 4]) for key, p in enumerate(prompts)]
    alone = {}
    for request in requests:
        engine = TransformersEngine(lm, sampling=request.sampling or how)
        (alone[request.key],) = engine.generate([Request(0, request.prompt, request.seed)])
    lm.register_forward_pre_hook(lambda *_: calls.append(None))
    together = TransformersEngine(lm, sampling=how, max_batch_size=24).generate(requests)
    for done in together:
        assert done.tokens.tolist() == alone[done.key].tokens.tolist()
        assert torch.allclose(done.log_probs, alone[done.key].log_probs, atol=1e-5)
        assert done.finish_reason is alone[done.key].finish_reason
    assert len(calls) == max(len(done.tokens) for done in together)
    assert len({len(done.tokens) for done in together}) > 3


@pytest.mark.parametrize("size", [1, 8])
def test_a_stop_string_ends_an_answer_at_the_token_that_completes_it(size: int) -> None:
    tok, lm = tokenizer("qwen"), _lively("qwen3")
    codec, prompts = Codec(tok), _prompts(16)
    free = TransformersEngine(lm, tokenizer=tok, sampling=Sampling(max_new_tokens=24, temperature=2.0))
    whole = {c.key: c for c in free.generate([Request(key, p, seed=key) for key, p in enumerate(prompts)])}
    stops = (
        "\ufffd\u00e9",
        *(codec.decode(whole[key].tokens[5:8].tolist()).strip("\ufffd") for key in range(0, 16, 2)),
    )
    sampling = Sampling(max_new_tokens=24, temperature=2.0, stop=tuple(stop for stop in stops if stop))
    engine = TransformersEngine(lm, tokenizer=tok, max_batch_size=size)
    engine.submit([Request(key, p, seed=key, sampling=sampling) for key, p in enumerate(prompts)])
    early = 0
    for key, done in _all(engine).items():
        tokens, texts = whole[key].tokens.tolist(), []
        for length in range(1, len(tokens) + 1):  # the oracle: all of the text, at each token
            texts.append(codec.decode(tokens[:length]))
            if any(stop in texts[-1] for stop in sampling.stop) or tokens[length - 1] in engine.end_ids:
                break
        assert done.tokens.tolist() == tokens[: len(texts)]
        assert torch.allclose(done.log_probs, whole[key].log_probs[: len(texts)], atol=1e-5)
        stopped = any(stop in texts[-1] for stop in sampling.stop) or tokens[len(texts) - 1] in engine.end_ids
        assert done.finish_reason is (FinishReason.STOP if stopped else FinishReason.LENGTH)
        early += len(texts) < len(tokens)
    assert early >= 8


def test_equal_prompts_share_a_pass_and_differ_by_seed() -> None:
    lm, widths = model(), []
    lm.register_forward_pre_hook(lambda _, args, kwargs: widths.append(kwargs["input_ids"].shape), with_kwargs=True)
    engine = TransformersEngine(lm, sampling=Sampling(max_new_tokens=4))
    prompt = torch.arange(9)
    done = engine.generate([Request(key, prompt.clone(), seed=key % 4) for key in range(8)])
    assert widths[0] == (1, 9)
    assert [shape[0] for shape in widths[1:]] == [8] * 3
    tokens = [completion.tokens.tolist() for completion in done]
    assert tokens[:4] == tokens[4:]
    assert len(set(map(tuple, tokens))) == 4


def test_short_answers_come_before_long_ones_and_others_join_in_flight() -> None:
    engine = TransformersEngine(model(), sampling=Sampling(max_new_tokens=40))
    prompts = _prompts(3)
    engine.submit([Request("long", prompts[0], 0), Request("short", prompts[1], 0, max_new_tokens=3)])
    assert [c.key for c in engine.results()] == ["short"]
    engine.submit([Request("late", prompts[2], 0, max_new_tokens=2)])
    late = engine.results()
    assert [c.key for c in late] == ["late"]
    assert engine.in_progress == 1
    alone = TransformersEngine(model(), sampling=Sampling(max_new_tokens=40))
    alone.submit([Request("long", prompts[0], 0), Request("late", prompts[2], 0, max_new_tokens=2)])
    expected = _all(alone)
    assert late[0].tokens.tolist() == expected["late"].tokens.tolist()
    assert engine.results()[0].tokens.tolist() == expected["long"].tokens.tolist()


def test_timeout_zero_generates_nothing_and_step_does() -> None:
    engine = TransformersEngine(model(), sampling=Sampling(max_new_tokens=3))
    engine.submit([Request(0, torch.arange(5), 0)])
    assert engine.results(0) == []
    engine.step(2)
    assert engine.results(0) == []
    engine.step()
    assert [len(c.tokens) for c in engine.results(0)] == [3]
    assert engine.results() == []  # nothing is in progress
    engine.submit([Request(0, torch.arange(5), 0)])
    assert engine.results(1e-9) == []


def test_a_response_never_exceeds_the_positions_beside_longer_ones() -> None:
    lm = model("gpt2", n_positions=32)
    engine = TransformersEngine(lm, sampling=Sampling(max_new_tokens=31))
    done = engine.generate([Request(n, torch.arange(n), seed=n) for n in (1, 31, 20, 5, 6, 7, 8)])
    assert [len(c.tokens) for c in done] == [31, 1, 12, 27, 26, 25, 24]
    assert {c.finish_reason for c in done} == {FinishReason.LENGTH}


@pytest.mark.parametrize(
    ("request_", "error", "message"),
    [
        (Request("a", torch.arange(0), 0), ValueError, "prompt of request 'a': it is empty"),
        (Request("a", torch.zeros(512, dtype=torch.int64), 0), ValueError, "has 512 tokens, and the model has 512 pos"),
        (Request("a", torch.tensor([5, 512]), 0), ValueError, r"token ids \[512\] are outside the vocabulary of 512"),
        (Request("a", torch.tensor([5, -1]), 0), ValueError, r"token ids \[-1\] are outside"),
        (Request("a", torch.tensor([0.5]), 0), TypeError, "expected an int64 tensor"),
        (Request("a", [5], 0), TypeError, "got list"),  # type: ignore[arg-type]
        (Request("a", torch.tensor([5]), 0, max_new_tokens=9), ValueError, "max_new_tokens of request 'a': expected 1"),
        (
            Request("a", torch.tensor([5]), 0, sampling=Sampling(stop_token_ids=(600,))),
            ValueError,
            r"stop_token_ids of request 'a': expected ids of a vocabulary of 512, got \[600\]",
        ),
        (
            Request("a", torch.tensor([5]), 0, sampling=Sampling(stop=("x",))),
            ValueError,
            "stop of request 'a': strings",
        ),
        (
            Request("a", torch.tensor([5]), 0, sampling=Sampling(log_prob_mode="raw")),
            ValueError,
            "sampling of request 'a': expected log_prob_mode='sampled'",
        ),
        (Request("there", torch.tensor([5]), 0), ValueError, "key of request 'there'"),
    ],
)
def test_wrong_requests_are_refused_whole(request_: Request, error: type[Exception], message: str) -> None:
    engine = TransformersEngine(model(), sampling=Sampling(max_new_tokens=8))
    engine.submit([Request("there", torch.tensor([5]), 0)])
    with pytest.raises(error, match=message):
        engine.submit([Request("good", torch.tensor([5]), 0), request_])
    assert list(_all(engine)) == ["there"]


def test_each_token_has_the_version_that_sampled_it() -> None:
    lm, other = model(seed=0), model(seed=1)
    engine = TransformersEngine(lm, sampling=Sampling(max_new_tokens=6), version=3)
    engine.submit([Request(0, torch.arange(5), 0)])
    engine.step(2)
    engine.update_weights(other)
    engine.step(1)
    engine.update_weights(other.state_dict(), version=9)
    (done,) = engine.results()
    assert done.versions.tolist() == [3, 3, 4, 9, 9, 9]  # type: ignore[union-attr]
    assert all(torch.equal(a, b) for a, b in zip(lm.parameters(), other.parameters(), strict=True))
    engine.update_weights(lm)  # its own module: the version alone
    assert engine.version == 10
    engine.version = "one"
    assert engine.generate([Request(0, torch.arange(5), 0)])[0].versions == ["one"] * 6
    with pytest.raises(ValueError, match="names differ"):
        engine.update_weights({"weight": torch.zeros(1)})
    assert engine.version == "one"


def test_a_version_set_while_a_response_is_generated_holds_from_the_next_token_on() -> None:
    lm, calls = model(), []
    engine = TransformersEngine(lm, sampling=Sampling(max_new_tokens=6))

    def hook(*_: Any) -> None:
        calls.append(None)
        if len(calls) == 3:
            engine.version = 9

    lm.register_forward_pre_hook(hook)
    (done,) = engine.generate([Request(0, torch.arange(5), 0)])
    assert done.versions.tolist() == [0, 0, 0, 9, 9, 9]  # type: ignore[union-attr]


def test_other_threads_are_let_in_between_two_tokens() -> None:
    lm, begun, changed, calls = model(), threading.Event(), threading.Event(), []
    engine = TransformersEngine(lm, sampling=Sampling(max_new_tokens=400))

    def hook(*_: Any) -> None:
        calls.append(None)
        if len(calls) == 3:  # tokens follow each other
            begun.set()

    lm.register_forward_hook(hook)

    def change() -> None:
        assert begun.wait(30)
        engine.version = 7
        engine.submit([Request("late", torch.arange(4), 1, max_new_tokens=1)])
        changed.set()

    thread = threading.Thread(target=change)
    thread.start()
    engine.submit([Request("long", torch.arange(5), 0)])
    found = engine.results()
    thread.join(30)
    assert changed.is_set()
    done = {completion.key: completion for completion in (*found, *_all(engine).values())}
    stamps = done["long"].versions.tolist()  # type: ignore[union-attr]
    assert stamps == sorted(stamps)
    assert {*stamps} == {0, 7}
    assert [completion.key for completion in found] == ["late"]


def test_cancel_gives_the_tokens_so_far() -> None:
    engine = TransformersEngine(model(), sampling=Sampling(max_new_tokens=6), max_batch_size=2)
    engine.submit([Request(key, torch.arange(5), key) for key in range(3)])
    engine.step(2)
    engine.cancel([0, 2, "unknown"])
    done = {c.key: c for c in engine.results(0)}
    assert {key: (c.finish_reason, len(c.tokens)) for key, c in done.items()} == {
        0: (FinishReason.CANCELLED, 2),
        2: (FinishReason.CANCELLED, 0),
    }
    whole = TransformersEngine(model(), sampling=Sampling(max_new_tokens=6))
    assert engine.results()[0].tokens.tolist() == whole.generate([Request(1, torch.arange(5), 1)])[0].tokens.tolist()


def test_pause_and_resume_from_another_thread() -> None:
    engine = TransformersEngine(model(), sampling=Sampling(max_new_tokens=4))
    engine.pause()
    engine.submit([Request(0, torch.arange(5), 0)])
    engine.step(10)
    assert engine.results(0.01) == []
    thread = threading.Timer(0.05, engine.resume)
    thread.start()
    assert len(engine.results()) == 1
    thread.join()


def test_close_cancels_and_refuses() -> None:
    engine = TransformersEngine(model())
    engine.submit([Request(0, torch.arange(5), 0)])
    engine.close()
    engine.close()
    assert [c.finish_reason for c in engine.results()] == [FinishReason.CANCELLED]
    with pytest.raises(RuntimeError, match="it is closed"):
        engine.submit([Request(0, torch.arange(5), 0)])


def test_what_the_model_raises_ends_its_rows_only() -> None:
    lm, fail = model(), []

    def hook(*_: Any) -> None:
        if fail:
            raise ArithmeticError(fail.pop())

    lm.register_forward_pre_hook(hook)
    engine = TransformersEngine(lm, sampling=Sampling(max_new_tokens=4))
    engine.submit([Request(0, torch.arange(5), 0)])
    engine.step()
    fail.append("broken")
    (done,) = engine.results()
    assert done.finish_reason is FinishReason.ERROR
    assert str(done.error) == "broken"
    assert len(engine.generate([Request(0, torch.arange(5), 0)])[0].tokens) == 4


def test_logits_that_are_not_finite_are_an_error() -> None:
    lm = model()
    with torch.no_grad():
        lm.lm_head.weight.fill_(float("nan"))
    (done,) = TransformersEngine(lm, sampling=Sampling(max_new_tokens=2)).generate([Request("x", torch.arange(5), 0)])
    assert done.finish_reason is FinishReason.ERROR
    assert "request 'x': the model's logits are not finite" in str(done.error)


def test_an_engine_is_never_copied() -> None:
    engine = TransformersEngine(model())
    for attempt in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(TypeError, match="Pass policy_factory"):
            attempt(engine)  # type: ignore[operator]


def test_wrong_models_are_refused() -> None:
    with pytest.raises(TypeError, match="expected a causal language model of transformers, got Linear"):
        TransformersEngine(torch.nn.Linear(2, 2))
    config = transformers.T5Config(vocab_size=8, d_model=8, d_ff=8, num_layers=1, num_heads=1, d_kv=8)
    with pytest.raises(TypeError, match="T5ForConditionalGeneration, an encoder and a decoder"):
        TransformersEngine(transformers.T5ForConditionalGeneration(config))
    with pytest.raises(ValueError, match="its parameters are on the device 'meta'"):
        TransformersEngine(model().to("meta"))
    headless = TransformersEngine(model().model, sampling=Sampling(max_new_tokens=1))
    (failed,) = headless.generate([Request(0, torch.tensor([1]), 0)])
    assert "expected one that returns logits, got Qwen3Model" in str(failed.error)
    with pytest.raises(ValueError, match="max_batch_size: expected at least 1"):
        TransformersEngine(model(), max_batch_size=0)
    with pytest.raises(ValueError, match=r"stop: strings \('x',\) need a tokenizer"):
        TransformersEngine(model(), sampling=Sampling(stop=("x",)))
    with pytest.raises(ValueError, match="stop_token_ids"):
        TransformersEngine(model(), sampling=Sampling(stop_token_ids=(999,)))


def test_long_generation_joined_by_many_keeps_rows_apart() -> None:
    lm, prompts = model(), _prompts(25, longest=12)
    how = Sampling(max_new_tokens=80)
    limits = [80, *([7, 3, 5] * 8)]
    engine = TransformersEngine(lm, sampling=how, max_batch_size=3)
    requests = [Request(key, p, key, max_new_tokens=limits[key]) for key, p in enumerate(prompts)]
    engine.submit(requests)
    done = _all(engine)
    alone = TransformersEngine(lm, sampling=how, max_batch_size=1)
    for request in requests:
        (expected,) = alone.generate([request])
        assert done[request.key].tokens.tolist() == expected.tokens.tolist()
        assert torch.allclose(done[request.key].log_probs, expected.log_probs, atol=1e-5)


def _training(kind: str = "gpt2") -> Any:
    """A model that is trained, but for one frozen part, and drops out a half of what it sees."""
    lm = model(kind).train()
    for part in lm.modules():
        if isinstance(part, torch.nn.Dropout):
            part.p = 0.5
    next(iter(lm.transformer.h)).eval()
    return lm


def _modes(lm: Any) -> dict[str, bool]:
    return {name: part.training for name, part in lm.named_modules()}


def _is_evaluating(lm: Any) -> bool:
    return not any(part.training for part in lm.modules())


@pytest.mark.parametrize("ends", ["whole", "step", "raises", "interrupt", "cancelled", "closed"])
def test_each_part_of_the_model_has_the_mode_of_before(ends: str) -> None:
    lm = _training()
    engine, before, seen = TransformersEngine(lm, sampling=Sampling(max_new_tokens=5)), _modes(lm), []
    assert len(set(before.values())) == 2

    def hook(*_: Any) -> None:
        seen.append(_is_evaluating(lm))
        if ends == "raises":
            raise ZeroDivisionError("in the model")
        if ends == "interrupt":
            raise KeyboardInterrupt

    handle = lm.register_forward_pre_hook(hook)
    request = Request(0, torch.arange(5), 0)
    match ends:
        case "whole" | "raises":
            (done,) = engine.generate([request])
            assert done.finish_reason is (FinishReason.ERROR if ends == "raises" else FinishReason.LENGTH)
        case "interrupt":
            with pytest.raises(KeyboardInterrupt):
                engine.generate([request])
        case _:
            engine.submit([request])
            engine.step(2)
            assert _modes(lm) == before
            engine.close() if ends == "closed" else engine.cancel([0])
            engine.results(0)
    assert seen
    assert all(seen)
    assert _modes(lm) == before
    handle.remove()
    equal = TransformersEngine(copy.deepcopy(lm).eval(), sampling=Sampling(max_new_tokens=5)).generate([request])
    if ends == "whole":
        assert torch.equal(done.tokens, equal[0].tokens)


def test_threads_that_generate_with_one_model_leave_it_in_the_mode_of_before() -> None:
    lm = _training()
    before, wrong, begun = _modes(lm), [], threading.Barrier(3)
    lm.register_forward_pre_hook(lambda *_: None if _is_evaluating(lm) else wrong.append(1))

    def generate(seed: int) -> None:
        engine = TransformersEngine(lm, sampling=Sampling(max_new_tokens=3))
        begun.wait(30)
        for key in range(10):
            engine.generate([Request(key, torch.arange(4), seed + key)])

    threads = [threading.Thread(target=generate, args=(100 * n,)) for n in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not wrong
    assert _modes(lm) == before


def test_a_model_is_trained_while_its_engine_is_paused() -> None:
    lm, modes = _training(), []
    engine = TransformersEngine(lm, sampling=Sampling(max_new_tokens=200))
    begun = threading.Event()
    lm.register_forward_pre_hook(lambda *_: begun.set())
    thread = threading.Thread(target=lambda: engine.generate([Request(0, torch.arange(4), 0)]))
    thread.start()
    assert begun.wait(30)
    engine.pause()
    modes.append(_modes(lm))
    engine.resume()
    thread.join(60)
    assert modes == [_modes(_training())]


def test_requests_that_wait_for_room_do_not_part_the_steps_of_those_in_progress(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls, step = [], Decoding.step
    monkeypatch.setattr(Decoding, "step", lambda *args: calls.append(None) or step(*args))  # type: ignore[func-returns-value]
    engine = TransformersEngine(model(), sampling=Sampling(max_new_tokens=20), max_batch_size=2)
    engine.submit([Request(key, torch.arange(5), key) for key in range(4)])
    assert len(_all(engine)) == 4
    assert len(calls) == 2  # one for each pair
