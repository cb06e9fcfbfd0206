"""Rounds of servers that answer 500, close the line, send half an answer, do not load weights, or are gone."""

from __future__ import annotations

import random
import time
import warnings
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.llm_models import tokenizer
from tests.modules.llm.serving.fake_servers import FakeVLLM
from tests.modules.llm.serving.services import lively

from rollwright.data.llm.turns import FinishReason
from rollwright.errors import EngineLostError
from rollwright.modules.llm import AsyncVLLM, Request, Sampling
from rollwright.modules.llm.serving import http

pytestmark = pytest.mark.llm
FAULTS = ("none", "500", "close", "half", "500 for good", "weights", "gone", "all gone")
REQUESTS, LIMIT_S = 16, 30.0
TOKENIZER = tokenizer()


def _round(number: int, models: list[Any], folder: Path, tally: Counter[str]) -> None:
    """Ask two replicas while one has a fault; each request comes once, whole or with its error."""
    chosen, numbers = FAULTS[number % len(FAULTS)], random.Random(number)
    servers = [FakeVLLM(models[0], folder) for _ in range(2)]
    how, addresses = Sampling(max_new_tokens=30), [one.address for one in servers]
    engine = AsyncVLLM.connect(*addresses, sampling=how, version=0, tokenizer=TOKENIZER)
    broken, path = servers[0], "/inference/v1/generate"
    if chosen in ("500", "close", "half"):
        broken.faults[path] = [500 if chosen == "500" else chosen] * numbers.randint(1, 2)
    if chosen == "500 for good":
        broken.faults[path] = [500] * 1000
    engine.submit([Request(key, torch.tensor([9, key]), key) for key in range(REQUESTS)])
    time.sleep(numbers.random() * 0.05)
    if chosen == "weights":
        broken.service.broken = True
    if chosen in ("gone", "all gone"):
        for one in servers if chosen == "all gone" else [broken]:
            one.service.lose("killed")
            one.faults |= {any_path: ["close"] * 1000 for any_path in (path, "/health", "/pause", "/resume")}
    try:
        engine.update_weights(models[1], 1)
        tally["updates"] += 1
    except EngineLostError:
        tally["updates that no replica took"] += 1
    done, deadline = [], time.monotonic() + LIMIT_S
    while len(done) < REQUESTS and time.monotonic() < deadline:
        done += engine.results(0.5)
    assert sorted(one.key for one in done) == list(range(REQUESTS)), (number, chosen, len(done))
    for one in done:
        tally[f"{chosen}: {one.finish_reason}"] += 1
        whole = one.finish_reason in (FinishReason.STOP, FinishReason.LENGTH)
        assert whole is (one.error is None)
        assert len(one.tokens) == len(one.log_probs) == len(one.versions)
        assert whole or chosen == "all gone"
    engine.close()
    for one in servers:
        one.close()


def _rounds(numbers: Iterable[int], folder: Path, monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    for name, value in {"_LOOK_S": 0.2, "_HEALTH_S": 0.5, "_WAITS_S": (0.01, 0.02)}.items():
        monkeypatch.setattr(http, name, value)
    models = [lively(), lively(1)]
    models[0].save_pretrained(folder)
    tally: Counter[str] = Counter()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # of replicas that get no work
        for number in numbers:
            _round(number, models, folder, tally)
    return tally


@pytest.mark.parametrize("fault", ["half", "500 for good", "weights", "all gone"])
def test_a_round_of_a_fault(fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tally = _rounds([FAULTS.index(fault)], tmp_path, monkeypatch)
    assert tally["updates that no replica took"] == (fault == "all gone")


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_hundred_rounds_of_faults(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tally = _rounds(range(100), tmp_path, monkeypatch)
    print("\n".join(f"{name}: {count}" for name, count in sorted(tally.items())))
    assert sum(count for name, count in tally.items() if ": " in name) == 100 * REQUESTS
