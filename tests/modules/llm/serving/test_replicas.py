"""Several engines as one: the contract of engines, conversations that stay, and replicas that are lost."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from tests.modules.llm.serving.services import LocalService, lively

from rollwright.data.llm.turns import FinishReason
from rollwright.errors import EngineLostError
from rollwright.modules.llm import Replicas, Request, Sampling
from rollwright.modules.llm.engine import Completion
from rollwright.modules.llm.serving.async_engine import AsyncEngine
from rollwright.testing.engines import ENGINE_CHECKS, EngineCase

pytestmark = pytest.mark.llm
PROMPT = torch.tensor([9, 8, 7])
CHECKS = ["cancel", "close", "joins", "limits", "pause", "refusals", "versions"]
CHECKS += ["updates_in_flight", "updates_that_wait"]


def engines(services: list[LocalService], **sampling: Any) -> Replicas:
    how = Sampling(**{"max_new_tokens": 300, **sampling})
    return Replicas([AsyncEngine(one, sampling=how) for one in services], ["left", "right"])


@pytest.fixture
def services() -> Iterator[list[LocalService]]:
    made = [LocalService(lively()) for _ in range(2)]
    yield made
    for one in made:
        one.close()


def finish(engine: Replicas, count: int) -> list[Completion]:
    done: list[Completion] = []
    deadline = time.monotonic() + 60
    while len(done) < count and time.monotonic() < deadline:
        done += engine.results(1.0)
    assert len(done) == count
    return done


def used(services: list[LocalService]) -> list[int]:
    return [one.answers for one in services]


@pytest.mark.parametrize("name", CHECKS)
def test_the_contract_of_engines(name: str) -> None:
    lm = lively()

    def make(sampling: Sampling) -> Replicas:
        return Replicas([AsyncEngine(LocalService(lm), sampling=sampling) for _ in range(2)])

    ENGINE_CHECKS[name](EngineCase(make, lm, lively(1), updates=3, max_length=32))


def test_work_is_shared_and_a_conversation_stays_where_its_prefix_is(services: list[LocalService]) -> None:
    engine = engines(services, max_new_tokens=4)
    prompts = {key: torch.arange(10 * key, 10 * key + 9) for key in range(6)}
    done = {one.key: one for one in engine.generate([Request(key, prompt, key) for key, prompt in prompts.items()])}
    assert used(services) == [3, 3]
    homes = {}
    for key, prompt in prompts.items():
        before = used(services)
        longer = torch.cat([prompt, done[key].tokens, torch.tensor([1, 2])])
        for turn in range(3):
            (one,) = engine.generate([Request((key, turn), longer, turn)])
            longer = torch.cat([longer, one.tokens, torch.tensor([3])])
        homes[key] = [after - start for after, start in zip(used(services), before, strict=True)]
    assert all(sorted(counts) == [0, 3] for counts in homes.values())
    assert {tuple(counts) for counts in homes.values()} == {(0, 3), (3, 0)}
    engine.close()


def test_requests_of_a_lost_replica_go_to_others(services: list[LocalService]) -> None:
    engine = engines(services, max_new_tokens=200)
    engine.submit([Request(key, PROMPT, key) for key in range(8)])
    services[0].lose("it was killed")
    with pytest.warns(UserWarning, match=r"left gets no work until it takes new weights. the local service is gone"):
        done = finish(engine, 8)
    assert {one.key for one in done} == set(range(8))
    assert {one.finish_reason for one in done} <= {FinishReason.LENGTH, FinishReason.STOP}
    assert list(engine.left_out) == ["left"]
    services[1].lose("it was killed, too")
    with pytest.warns(UserWarning, match="right gets no work"):
        (one,) = engine.generate([Request(0, PROMPT, 0)])
    assert isinstance(one.error, EngineLostError)
    assert "no replica is left. left: " in str(one.error)
    engine.close()


def test_a_replica_that_did_not_take_weights_gets_no_work_until_it_does(services: list[LocalService]) -> None:
    engine = engines(services, max_new_tokens=3)
    services[0].broken = True
    with pytest.warns(UserWarning, match=r"left gets no work .* has not taken the weights of version 1"):
        engine.update_weights(lively(1))
    assert engine.version == 1
    done = engine.generate([Request(key, PROMPT, key) for key in range(4)])
    assert {int(version) for one in done for version in one.versions} == {1}
    assert used(services)[0] == 0
    services[0].broken = False
    engine.update_weights(lively(2))
    assert engine.left_out == {}
    done = engine.generate([Request(key, PROMPT, key) for key in range(4)])
    assert {int(version) for one in done for version in one.versions} == {2}
    assert used(services)[0] == 2
    for one in services:
        one.broken = True
    nobody = pytest.raises(EngineLostError, match="no replica has taken the weights of version 3")
    with pytest.warns(UserWarning, match="gets no work"), nobody:
        engine.update_weights(lively(1))
    engine.close()


def test_replicas_that_differ_are_refused(services: list[LocalService]) -> None:
    with pytest.raises(ValueError, match="engines: expected at least one"):
        Replicas([])
    ways = [Sampling(max_new_tokens=3), Sampling(max_new_tokens=4)]
    both = [AsyncEngine(one, sampling=how) for one, how in zip(services, ways, strict=True)]
    with pytest.raises(ValueError, match="engines: expected equal sampling"):
        Replicas(both)
