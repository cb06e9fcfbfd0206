"""The checks of :func:`~rollwright.testing.engines.check_engine`: each is called with an :class:`EngineCase`."""

from __future__ import annotations

import math
import random
import time
from collections import Counter
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any

import torch

from rollwright.data.llm.turns import FinishReason, LogProbMode
from rollwright.errors import PolicyError
from rollwright.modules.llm.engine import CacheMode, Completion, Engine, Request, Sampling, UpdateMode
from rollwright.modules.llm.sampling import token_log_probs

_LIMIT_S = 120.0  # for what a check waits for


@dataclass
class EngineCase:
    """An engine to check.

    Attributes:
        make: returns the engine, which samples in the way it is given, with the weights of ``model`` or of ``other``.
        model, other: modules of transformers, of one structure; their logits tell one from the other.
        log_prob_mode: that the engine is made for.
        deterministic: whether a seed gives the same tokens beside any other requests.
        tolerance: of log-probabilities.
        max_length: of prompts and responses, in checks that measure no limit.
        updates: at random moments, at least.
        figures: what checks have measured, by name.
    """

    make: Callable[[Sampling], Engine]
    model: Any
    other: Any
    log_prob_mode: LogProbMode = "sampled"
    deterministic: bool = False
    tolerance: float = 1e-4
    max_length: int = 64
    updates: int = 20
    figures: dict[str, float] = field(default_factory=dict)

    def engine(self, **sampling: Any) -> Engine:
        """An engine with the weights of ``model``, as version 0."""
        engine = self.make(Sampling(log_prob_mode=self.log_prob_mode, **{"max_new_tokens": 24, **sampling}))
        engine.update_weights(self.model, 0)
        return engine

    def requests(self, count: int, *, seed: int = 0, prompts: int | None = None, **of_all: Any) -> list[Request]:
        """Requests with prompts of unequal lengths, keys from 0, and seeds."""
        generator = torch.Generator().manual_seed(seed)
        vocab = self.model.config.get_text_config().vocab_size
        lengths = torch.randint(1, self.max_length // 2, (prompts or count,), generator=generator).tolist()
        made = [torch.randint(0, vocab, (length,), generator=generator) for length in lengths]
        return [Request(key, made[key % len(made)], 1000 * seed + key, **of_all) for key in range(count)]


def log_probs(case: EngineCase) -> None:
    """Log-probabilities are those of a forward pass, for each way of sampling."""
    ways: list[dict[str, Any]] = [{}, {"temperature": 0.5}, {"temperature": 0.0}, {"top_k": 5}, {"top_p": 0.8}]
    ways += [{"min_p": 0.2}, {"repetition_penalty": 1.4, "presence_penalty": 0.3, "frequency_penalty": 0.2}]
    engine = case.engine()
    worst = 0.0
    for number, way in enumerate(ways):
        sampling = Sampling(max_new_tokens=16, log_prob_mode=case.log_prob_mode, **way)
        requests = case.requests(8, seed=number, sampling=sampling)
        for request, done in zip(requests, engine.generate(requests), strict=True):
            _check_whole(request, done, engine, sampling)
            error = _difference(case.model, request, done, sampling)
            _expect(error < case.tolerance, f"with {way}: log-probabilities as a forward pass gives them", error)
            worst = max(worst, error)
    engine.close()
    case.figures["largest difference of log-probabilities"] = worst


def joins(case: EngineCase) -> None:
    """A request that comes later and is short ends before one that is long."""
    engine = case.engine(max_new_tokens=case.max_length, stop_token_ids=())
    long, short = case.requests(2, seed=3)
    engine.submit([long])
    engine.step()
    engine.submit([Request("short", short.prompt, 0, max_new_tokens=1)])
    done = _all(engine, 2)
    _expect(done[0].key == "short" or len(done[0].tokens) < 8, "the short response first", done[0].key)
    engine.close()


def cancel(case: EngineCase) -> None:
    """Cancelled responses come once, with the tokens so far; others go on."""
    engine = case.engine()
    requests = case.requests(6)
    engine.submit(requests)
    engine.step(2)
    engine.cancel([0, 3, "unknown"])
    done = {one.key: one for one in _all(engine, 6)}
    for key in (0, 3):
        cancelled = done[key]
        _expect(_ended(cancelled) or cancelled.finish_reason is FinishReason.CANCELLED, "CANCELLED", cancelled)
        _check_lengths(cancelled)
    for key in (1, 2, 4, 5):
        _check_whole(requests[key], done[key], engine, engine.sampling)
    engine.submit([requests[0]])  # its key is free again
    _expect(len(_all(engine, 1)) == 1, "a completion of a key that is used again", "none")
    engine.close()


def pause(case: EngineCase) -> None:
    """A paused engine samples nothing, keeps what it was asked, cancels, and goes on."""
    engine = case.engine()
    engine.pause()
    engine.submit(case.requests(3))
    engine.step(3)
    _expect(not engine.results(0.2), "no completion while it is paused", "some")
    engine.cancel([1])
    _expect([one.key for one in engine.results(_LIMIT_S)] == [1], "the cancelled response, while paused", "another")
    engine.resume()
    _expect({one.key for one in _all(engine, 2)} == {0, 2}, "the others after resume()", "not these")
    engine.close()


def limits(case: EngineCase) -> None:
    """No response is longer than it may be, by its request, by its sampling, or by the room of the model."""
    engine = case.engine(max_new_tokens=5)
    (request,) = case.requests(1)
    few = engine.generate([Request(0, request.prompt, 0, max_new_tokens=2), Request(1, request.prompt, 1)])
    for done, most in zip(few, (2, 5), strict=True):
        _expect(len(done.tokens) == most or done.finish_reason is FinishReason.STOP, f"{most} tokens", len(done.tokens))
    if engine.max_length is not None:
        full = torch.full((engine.max_length - 1,), 9)
        (last,) = engine.generate([Request(0, full, 0)])
        _expect(len(last.tokens) == 1, "one token, where there is room for one", len(last.tokens))
    engine.close()


def refusals(case: EngineCase) -> None:
    """Wrong requests are refused whole, by name, before anything is generated."""
    engine = case.engine(max_new_tokens=4)
    good = torch.tensor([5, 6])
    wrong: list[Request] = [
        Request("bad", torch.zeros(0, dtype=torch.int64), 0),
        Request("bad", torch.tensor([engine.vocab_size]), 0),
        Request("bad", torch.tensor([-1]), 0),
        Request("bad", torch.tensor([0.5]), 0),
        Request("bad", good, 0, max_new_tokens=5),
        Request("good", good, 0),
    ]
    if engine.max_length is not None:
        wrong.append(Request("bad", torch.full((engine.max_length,), 5), 0))
    for request in wrong:
        try:
            engine.submit([Request("good", good, 0), request])
        except (ValueError, TypeError) as error:
            _expect(repr(request.key) in str(error), "the key in the message", error)
        else:
            _expect(False, f"{request} refused", "it was accepted")
    _expect(not engine.results(), "nothing in progress", "something")
    engine.close()


def ends(case: EngineCase) -> None:
    """A response ends at the first token, or string, that ends it, and holds it."""
    engine = case.engine()
    vocab = engine.vocab_size
    stops = tuple(range(0, vocab, 8))
    sampling = Sampling(max_new_tokens=32, stop_token_ids=stops, log_prob_mode=case.log_prob_mode)
    requests = case.requests(12, sampling=sampling)
    done = engine.generate(requests)
    for request, one in zip(requests, done, strict=True):
        _check_whole(request, one, engine, sampling)
    _expect(any(one.finish_reason is FinishReason.STOP for one in done), "one at least that ended by a token", "none")
    if engine.tokenizer is not None:
        sampling = Sampling(max_new_tokens=32, stop=("e", "a"), log_prob_mode=case.log_prob_mode)
        prompt = torch.tensor(engine.tokenizer("Two plus")["input_ids"])
        for one in engine.generate([Request(key, prompt, key, sampling=sampling) for key in range(12)]):
            text = engine.tokenizer.decode(one.tokens.tolist())
            before = engine.tokenizer.decode(one.tokens[:-1].tolist())
            _expect(not ({"e", "a"} & set(before)), "no string that ends it before the last token", before)
            if one.finish_reason is FinishReason.STOP and int(one.tokens[-1]) not in engine.end_ids:
                _expect(bool({"e", "a"} & set(text)), "the string that ended it", text)
    engine.close()


def versions(case: EngineCase) -> None:
    """Each token has the version of the weights that sampled it: numbers, or UUIDs."""
    engine = case.engine()
    requests = case.requests(4)
    for version in (0, 7, "a-uuid"):
        engine.version = version
        for one in engine.generate(requests):
            found = one.versions.tolist() if isinstance(one.versions, torch.Tensor) else list(one.versions)
            _expect(set(found) == {version}, f"the version {version!r} of each token", found)
    engine.update_weights(case.other)
    _expect(isinstance(engine.version, str) and engine.version != "a-uuid", "another UUID", engine.version)
    engine.update_weights(case.other, 3)
    request = requests[0]
    (done,) = engine.generate([request])
    _expect(_difference(case.other, request, done, engine.sampling) < case.tolerance, "the new weights", "others")
    _expect(done.versions.tolist() == [3] * len(done.tokens), "the version 3", done.versions)  # type: ignore[union-attr]
    engine.close()


def prefixes(case: EngineCase) -> None:
    """A prompt that begins after an update reads nothing that earlier weights have computed, also beside others."""
    engine = case.engine(max_new_tokens=8)
    prompt = torch.arange(case.max_length) % engine.vocab_size
    for version, weights in enumerate((case.model, case.other)):
        engine.submit([Request("beside", prompt[:3], version)])
        engine.update_weights(weights, version)
        for seed in range(2):
            request = Request(seed, prompt, seed)
            (done,) = engine.generate([request])
            error = _difference(weights, request, done, engine.sampling)
            _expect(error < case.tolerance, f"log-probabilities of the weights of version {version}", error)
        _all(engine, 1)
    engine.close()


def wrong_weights(case: EngineCase) -> None:
    """Weights that do not fit are refused, and the old ones stay."""
    engine = case.engine()
    for weights in ({"weight": torch.zeros(1)}, 5):
        try:
            engine.update_weights(weights)
        except (ValueError, TypeError, PolicyError):
            pass
        else:
            _expect(False, "weights of another structure refused", "they were taken")
    _expect(engine.version == 0, "the version of before", engine.version)
    (request,) = case.requests(1)
    (done,) = engine.generate([request])
    _expect(_difference(case.model, request, done, engine.sampling) < case.tolerance, "the old weights", "others")
    engine.close()


def updates_in_flight(case: EngineCase) -> None:
    """Updates at random moments: no response is lost or comes twice, and each token is of the version that it says."""
    caches: tuple[CacheMode, ...] = ("rebuild", "keep")
    for cache in caches:
        engine = case.engine(max_new_tokens=case.max_length // 2)
        count, seconds = _update_at_random(case, engine, cache)
        case.figures[f"updates in flight, cache={cache!r}"] = count
        case.figures[f"seconds of an update, cache={cache!r}"] = seconds
        engine.close()


def _update_at_random(case: EngineCase, engine: Engine, cache: CacheMode) -> tuple[int, float]:
    """Update while conversations run; the number of updates, and seconds of each."""
    models, numbers = (case.model, case.other), random.Random(0)
    requests: dict[Hashable, Request] = {}
    done: list[Completion] = []
    came = Counter[Hashable]()
    count, seconds, running = 0, 0.0, 0
    deadline = time.monotonic() + 5 * _LIMIT_S
    while count < case.updates or running:
        _expect(time.monotonic() < deadline, "all responses in time", f"{len(done)} of {len(requests)}")
        room = 32 - running if count < case.updates else 0
        joined = [
            Request(len(requests) + request.key, request.prompt, request.seed)  # type: ignore[operator]
            for request in case.requests(room, seed=count)
        ]
        requests.update((request.key, request) for request in joined)
        engine.submit(joined)
        engine.step(numbers.randrange(4))
        found = engine.results(numbers.random() * 0.02)
        done += found
        running += len(joined) - len(found)
        if running:
            begun = time.perf_counter()
            engine.update_weights(models[(count + 1) % 2], count + 1, cache=cache)
            seconds += time.perf_counter() - begun
            count += 1
    came.update(one.key for one in done)
    _expect(set(came.values()) == {1} and came.keys() == requests.keys(), "each response once", came.most_common(3))
    worst, changed = 0.0, 0
    for one in done:
        request = requests[one.key]
        _check_whole(request, one, engine, engine.sampling)
        stamps = one.versions.tolist()  # type: ignore[union-attr]
        _expect(stamps == sorted(stamps), "versions that rise", stamps)
        changed += len(set(stamps)) > 1
        for number, model in enumerate(models):
            mine = torch.tensor([stamp % 2 == number for stamp in stamps])
            worst = max(worst, _difference(model, request, one, engine.sampling, mine))
    _expect(changed > 0, "responses whose tokens are of several versions", "none")
    if cache == "rebuild":
        _expect(worst < case.tolerance, "log-probabilities of each token's version", worst)
    case.figures[f"largest difference of log-probabilities, cache={cache!r}"] = worst
    case.figures[f"responses, cache={cache!r}"] = len(done)
    case.figures[f"responses of several versions, cache={cache!r}"] = changed
    return count, seconds / max(count, 1)


def updates_that_wait(case: EngineCase) -> None:
    """Updates between responses: each response is of one version; those that begin again count what they had."""
    modes: tuple[UpdateMode, ...] = ("wait", "between_turns", "resubmit")
    for mode in modes:
        engine = case.engine()
        requests = case.requests(8)
        engine.submit(requests)
        engine.step(2)
        before = engine.tokens_discarded
        engine.update_weights(case.other, 1, mode=mode)
        engine.submit([Request("late", requests[0].prompt, 5)])
        for one in _all(engine, 9):
            stamps = set(one.versions.tolist())  # type: ignore[union-attr]
            _expect(len(stamps) == 1, f"one version a response, with {mode!r}", stamps)
            (stamp,) = stamps
            if one.key == "late" or mode == "resubmit":
                _expect(stamp == 1 or _ended(one), f"the new version, with {mode!r}", stamp)
        discarded = engine.tokens_discarded - before
        _expect(discarded >= 0 and (mode == "resubmit" or not discarded), "tokens discarded by 'resubmit' alone", mode)
        engine.close()


def seeds(case: EngineCase) -> None:
    """Equal seeds give equal tokens, alone; in any company, where that is promised. Other seeds give others."""
    engine = case.engine()
    (request,) = case.requests(1, seed=5)
    alone = [engine.generate([request])[0].tokens.tolist() for _ in range(2)]
    _expect(alone[0] == alone[1], "equal tokens of equal seeds", alone)
    other = engine.generate([Request(0, request.prompt, request.seed + 1)])[0].tokens.tolist()
    _expect(other != alone[0], "other tokens of another seed", other)
    if case.deterministic:
        company = [Request(n + 1, r.prompt, r.seed) for n, r in enumerate(case.requests(7, seed=6))]
        beside = engine.generate([request, *company])[0].tokens.tolist()
        _expect(beside == alone[0], "the same tokens beside other requests", beside)
    engine.close()


def close(case: EngineCase) -> None:
    """Closing cancels what is in progress; a closed engine refuses."""
    engine = case.engine()
    engine.submit(case.requests(2))
    engine.close()
    engine.close()
    _expect(len(engine.results()) == 2, "two completions after close()", "others")
    try:
        engine.submit(case.requests(1))
    except RuntimeError as error:
        _expect("closed" in str(error), "that it is closed, in the message", error)
    else:
        _expect(False, "requests refused after close()", "they were accepted")


def _all(engine: Engine, count: int) -> list[Completion]:
    """Completions, in the order in which they came."""
    done: list[Completion] = []
    deadline = time.monotonic() + _LIMIT_S
    while len(done) < count:
        _expect(time.monotonic() < deadline, f"{count} completions within {_LIMIT_S:g} s", len(done))
        done += engine.results(1.0)
    _expect(len(done) == count, f"{count} completions", len(done))
    return done


def _ended(done: Completion) -> bool:
    return done.finish_reason in (FinishReason.STOP, FinishReason.LENGTH)


def _check_lengths(done: Completion) -> None:
    counts = len(done.tokens), len(done.log_probs), len(done.versions)
    _expect(len(set(counts)) == 1, "as many log-probabilities and versions as tokens", counts)


def _check_whole(request: Request, done: Completion, engine: Engine, sampling: Sampling) -> None:
    """Check that a response ended where it is to end."""
    _expect(_ended(done), f"request {request.key!r} answered", f"{done.finish_reason}: {done.error}")
    _check_lengths(done)
    stops = {*engine.end_ids, *sampling.stop_token_ids}
    tokens = done.tokens.tolist()
    _expect(not stops & set(tokens[:-1]), "no token that ends a response before the last one", tokens)
    if done.finish_reason is FinishReason.LENGTH:
        room = math.inf if engine.max_length is None else engine.max_length - len(request.prompt)
        most = min(request.max_new_tokens or sampling.max_new_tokens, room)
        _expect(len(tokens) == most, f"{most} tokens, where it ended by its length", len(tokens))
    else:
        _expect(tokens[-1] in stops or bool(sampling.stop), "a token that ends it as the last one", tokens[-1])


def _difference(
    model: Any, request: Request, done: Completion, sampling: Sampling, mask: torch.Tensor | None = None
) -> float:
    """The largest difference to the log-probabilities of a forward pass, of the tokens of a mask."""
    if mask is not None and not bool(mask.any()):
        return 0.0
    prompt, tokens = request.prompt, done.tokens
    with torch.no_grad():
        logits = model(torch.cat([prompt, tokens])[None]).logits[0, len(prompt) - 1 : -1]
    expected = token_log_probs(logits, tokens, sampling, prompt)
    errors = (done.log_probs - expected).abs()
    return float(errors.max() if mask is None else errors[mask].max())


def _expect(holds: bool, expected: str, got: Any) -> None:
    if not holds:
        raise PolicyError(f"engine: expected {expected}; got {got}.")
