"""The engine on a service: the contract of engines, updates of each mode, and services that are gone."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.modules.llm.serving.services import LocalService, lively

from rollwright.data.llm.turns import FinishReason
from rollwright.errors import EngineLostError
from rollwright.modules.llm.engine import Completion, Request, Sampling
from rollwright.modules.llm.serving.async_engine import AsyncEngine
from rollwright.modules.llm.serving.weight_files import WeightFiles
from rollwright.testing.engines import ENGINE_CHECKS, EngineCase

pytestmark = pytest.mark.llm
PROMPT = torch.tensor([9, 8, 7])


@pytest.fixture
def service() -> Iterator[LocalService]:
    made = LocalService(lively())
    yield made
    made.close()


def engine_of(service: LocalService, **sampling: Any) -> AsyncEngine:
    return AsyncEngine(service, sampling=Sampling(**{"max_new_tokens": 400, **sampling}))


def finish(engine: AsyncEngine, count: int) -> list[Completion]:
    done: list[Completion] = []
    deadline = time.monotonic() + 60
    while len(done) < count and time.monotonic() < deadline:
        done += engine.results(1.0)
    assert len(done) == count
    return done


@pytest.mark.parametrize("freezes", [True, False], ids=["freezes", "aborts"])
@pytest.mark.parametrize("name", sorted(ENGINE_CHECKS.keys() - {"log_probs"}))
def test_the_contract_of_engines(name: str, freezes: bool) -> None:
    lm = lively()
    case = EngineCase(
        lambda sampling: AsyncEngine(LocalService(lm, freezes=freezes), sampling=sampling),
        lm,
        lively(1),
        updates=4,
        max_length=32,
    )
    ENGINE_CHECKS[name](case)


def test_updates_in_flight_interrupt_and_go_on_where_a_service_does_not_freeze() -> None:
    service = LocalService(lively(), freezes=False)
    engine = engine_of(service, max_new_tokens=100)
    engine.submit([Request(0, PROMPT, 0)])
    while not service.engine.in_progress:
        time.sleep(0.001)
    engine.update_weights(lively(1))
    (done,) = finish(engine, 1)
    assert len(done.tokens) == 100
    assert done.finish_reason is FinishReason.LENGTH
    assert engine.tokens_discarded == 0
    engine.close()


def test_newer_weights_replace_those_that_wait(service: LocalService) -> None:
    engine = engine_of(service)
    engine.submit([Request(0, PROMPT, 0)])
    for seed in (1, 2, 3):
        engine.update_weights(lively(seed), mode="between_turns")
        assert engine.version == 0
    engine.version = 7  # of the weights that came last
    engine.submit([Request("late", PROMPT, 1, max_new_tokens=2)])
    done = {one.key: one for one in finish(engine, 2)}
    assert set(done[0].versions.tolist()) == {0}  # type: ignore[union-attr]
    assert done["late"].versions.tolist() == [7, 7]  # type: ignore[union-attr]
    assert service.loads == 1
    assert engine.version == 7
    engine.close()


def test_a_service_that_is_gone_ends_its_requests_and_is_named(service: LocalService) -> None:
    engine = engine_of(service)
    engine.submit([Request(key, PROMPT, key) for key in range(3)])
    service.lose("it was killed")
    for one in finish(engine, 3):
        assert one.finish_reason is FinishReason.ERROR
        assert isinstance(one.error, EngineLostError)
        assert "the local service is gone: it was killed" in str(one.error)
    calls = [engine.pause, lambda: engine.update_weights(lively()), lambda: setattr(engine, "version", 9)]
    for call in calls:
        with pytest.raises(EngineLostError, match="it was killed"):
            call()
    engine.close()
    assert service.closed


def test_weights_that_a_service_does_not_take_stop_it_until_it_takes_others(service: LocalService) -> None:
    engine = engine_of(service)
    engine.submit([Request(0, PROMPT, 0)])
    service.shapes = None  # names are not known before
    with pytest.raises(EngineLostError, match="has not taken the weights of version 1, and generates nothing"):
        engine.update_weights({"weight": torch.zeros(1)})
    (done,) = finish(engine, 1)
    assert "has not taken the weights" in str(done.error)
    assert "has not taken" in str(engine.generate([Request(1, PROMPT, 0)])[0].error)
    engine.update_weights(lively(1), 5)
    assert set(engine.generate([Request(1, PROMPT, 0, max_new_tokens=3)])[0].versions.tolist()) == {5}  # type: ignore[union-attr]
    engine.close()


def test_weights_of_a_wrapper_of_files_and_wrong_ones(service: LocalService, tmp_path: Path) -> None:
    engine, other = engine_of(service, max_new_tokens=4), lively(1)
    holder = torch.nn.Module()
    holder.model = other
    other.save_pretrained(tmp_path)
    expected = None
    for weights in (other, holder, holder.state_dict(), str(tmp_path), WeightFiles(tmp_path)):
        engine.update_weights(lively(2))
        engine.update_weights(weights)
        (done,) = engine.generate([Request(0, PROMPT, 0)])
        expected = done.tokens.tolist() if expected is None else expected
        assert done.tokens.tolist() == expected
    with pytest.raises(ValueError, match=r"names differ .* unknown: 'weight'"):
        engine.update_weights({"weight": torch.zeros(1)})
    with pytest.raises(ValueError, match=r"'lm_head.weight' has shape \[1\], expected \[512, 32\]"):
        engine.update_weights(dict(other.state_dict()) | {"lm_head.weight": torch.zeros(1)})
    with pytest.raises(ValueError, match=r"expected a folder with files \*\.safetensors"):
        engine.update_weights(str(tmp_path / "none"))
    with pytest.raises(ValueError, match="mode of update_weights: expected 'in_flight'"):
        engine.update_weights(other, mode="now")  # type: ignore[arg-type]
    engine.close()


def test_files_of_weights_are_removed() -> None:
    files = WeightFiles.of({"a": torch.ones(2), "b": torch.ones(2).expand(2, 2)}, "a test")
    folder = files.path
    assert (folder / "model.safetensors").is_file()
    del files
    assert not folder.exists()


def test_an_engine_that_is_paused_too_long_says_so(service: LocalService, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rollwright.modules.llm.serving.async_engine._PAUSE_LIMIT_S", 0.1)
    engine = engine_of(service)
    engine.pause()
    engine.submit([Request(0, PROMPT, 0)])
    with pytest.raises(TimeoutError, match=r"1 requests waited 0.1 s while it was paused. Call resume"):
        engine.results()
    engine.resume()
    engine.close()


def test_sampling_is_checked_and_changed_between_requests(service: LocalService) -> None:
    engine = engine_of(service)
    with pytest.raises(ValueError, match="expected another than 99"):
        engine.submit([Request(0, PROMPT, 0, sampling=Sampling(top_k=99))])
    engine.submit([Request(0, PROMPT, 0)])
    with pytest.raises(RuntimeError, match="1 requests are in progress"):
        engine.sample_with(Sampling())
    engine.cancel([0])
    engine.sample_with(Sampling(max_new_tokens=2, stop_token_ids=(1,)))
    assert 1 in engine.end_ids
    assert len(engine.generate([Request(0, PROMPT, 0)])[0].tokens) <= 2
    engine.close()


def test_threads_share_an_engine(service: LocalService) -> None:
    engine, found = engine_of(service, max_new_tokens=5), []

    def ask(number: int) -> None:
        for turn in range(5):
            found.extend(engine.generate([Request((number, turn), PROMPT, turn)]))

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len({one.key for one in found}) == 20
    assert all(one.error is None for one in found)
    engine.close()
