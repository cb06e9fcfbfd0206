"""Engines on servers: the contract of engines over HTTP, servers that misbehave, and those that lack something."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.llm_models import tokenizer
from tests.modules.llm.serving.fake_servers import FakeServer, FakeSGLang, FakeVLLM
from tests.modules.llm.serving.services import lively

from rollwright.errors import EngineLostError
from rollwright.modules.llm import AsyncSGLang, AsyncVLLM, Request, Sampling, SGLangWrapper, vLLMWrapper
from rollwright.modules.llm.serving import http
from rollwright.testing.engines import ENGINE_CHECKS, EngineCase

pytestmark = pytest.mark.llm
PROMPT = torch.tensor([9, 8, 7])
SERVERS = {"vllm": (FakeVLLM, AsyncVLLM.connect), "sglang": (FakeSGLang, AsyncSGLang.connect)}
CHECKS = ("cancel", "ends", "limits", "pause", "updates_in_flight", "updates_that_wait", "versions", "wrong_weights")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("model")
    lively().save_pretrained(made)
    tokenizer().save_pretrained(made)
    return made


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http, "_WAITS_S", (0.01, 0.02))


@pytest.fixture
def server(folder: Path) -> Iterator[FakeVLLM]:
    made = FakeVLLM(lively(), folder)
    yield made
    made.close()


@pytest.mark.parametrize("kind", SERVERS)
@pytest.mark.parametrize("name", CHECKS)
def test_the_contract_of_engines(name: str, kind: str, folder: Path) -> None:
    lm = lively()
    made, connect = SERVERS[kind]
    server: FakeServer = made(lm, folder)
    options: dict[str, Any] = {"updates": 2, "max_length": 32}
    case = EngineCase(lambda sampling: connect(server.address, sampling=sampling, version=0), lm, lively(1), **options)
    ENGINE_CHECKS[name](case)
    server.close()


@pytest.mark.parametrize("fault", [500, "close", "half"])
def test_a_fault_is_tried_again_and_a_server_that_keeps_it_is_gone(server: FakeVLLM, fault: Any) -> None:
    engine = AsyncVLLM.connect(server.address, sampling=Sampling(max_new_tokens=3))
    server.faults["/inference/v1/generate"] = [fault, fault]
    (done,) = engine.generate([Request(0, PROMPT, 0)])
    assert done.error is None
    assert len(done.tokens) == 3
    server.faults["/inference/v1/generate"] = [fault] * 3
    (done,) = engine.generate([Request(0, PROMPT, 0)])
    assert isinstance(done.error, EngineLostError)
    assert f"vllm serve at {server.address} does not answer POST /inference/v1/generate, 3 times" in str(done.error)
    engine.close()


def test_a_server_that_hangs_is_gone_where_it_shows_no_health(
    server: FakeVLLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {"_LOOK_S": 0.05, "_HEALTH_S": 0.2, "_WAITS_S": ()}.items():
        monkeypatch.setattr(http, name, value)
    engine = AsyncVLLM.connect(server.address, sampling=Sampling(max_new_tokens=400))
    server.faults["/health"] = [500] * 1000
    server.service.engine.pause()  # it answers nothing, and nobody knows
    begun = time.monotonic()
    (done,) = engine.generate([Request(0, PROMPT, 0)])
    assert "GET /health failed 3 times" in str(done.error)
    assert time.monotonic() - begun < 20
    server.service.engine.resume()
    engine.close()


def test_what_a_server_lacks_is_named_before_anything_is_asked(server: FakeVLLM) -> None:
    with pytest.raises(EngineLostError, match=r"vllm serve at http://127.0.0.1:9 does not answer GET /v1/models"):
        AsyncVLLM.connect("http://127.0.0.1:9")
    with pytest.raises(ValueError, match=r"address: expected http://host:port, got 'localhost'"):
        AsyncVLLM.connect("localhost")
    with pytest.raises(ValueError, match="addresses: expected at least one"):
        AsyncVLLM.connect()
    with pytest.raises(ValueError, match=r"needs logprobs_mode='raw_logprobs', got 'processed_logprobs'. Start"):
        AsyncVLLM.connect(server.address, sampling=Sampling(log_prob_mode="raw"))
    server.server_info = None  # type: ignore[assignment]
    with pytest.raises(ValueError, match=r"takes no weights. Start it with: VLLM_SERVER_DEV_MODE=1 vllm serve"):
        AsyncVLLM.connect(server.address)
    del server.server_info
    server.inference_generate = None  # type: ignore[assignment]
    with pytest.raises(ValueError, match=r"takes no tokens. Start it with"):
        AsyncVLLM.connect(server.address)


def test_wrappers_take_addresses(folder: Path, server: FakeVLLM) -> None:
    wrapper = vLLMWrapper(server.address, generate_kwargs={"max_new_tokens": 2})
    assert len(wrapper.engine.generate([Request(0, PROMPT, 0)])[0].tokens) == 2
    other = FakeSGLang(lively(), folder)
    policy = SGLangWrapper(other.address, generate_kwargs={"max_new_tokens": 2})
    assert len(policy.engine.generate([Request(0, PROMPT, 0)])[0].tokens) == 2
    with pytest.raises(ValueError, match="SGLang gives log-probabilities before top_k"):
        SGLangWrapper(other.address, generate_kwargs={"top_k": 5})
    other.close()


def test_a_server_that_divides_prompts_on_a_cpu_is_refused(server: FakeVLLM) -> None:
    server.divides = True
    with pytest.raises(ValueError, match=r"enable_chunked_prefill: expected False on a CPU.*--no-enable-chunked-pre"):
        AsyncVLLM.connect(server.address)
    server.device = "cuda"
    AsyncVLLM.connect(server.address).close()
