"""The engines of vLLM on a real vLLM, in process and served; ``make test-vllm`` makes an environment for them.

They start processes that take a minute each on two cores. Figures are printed at the end.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.llm_models import model, tokenizer

from benchmarks import llm_updates
from rollwright.data.llm.turns import FinishReason
from rollwright.errors import EngineLostError
from rollwright.modules.llm import AsyncVLLM, Replicas, Request, Sampling
from rollwright.testing.engines import ENGINE_CHECKS, EngineCase

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]
ARGS: dict[str, Any] = {"dtype": "float32", "enforce_eager": True, "max_model_len": 128, "block_size": 32}
ENV = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "OMP_NUM_THREADS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_SERVER_DEV_MODE": "1",
}
FIGURES: dict[str, dict[str, float]] = {}
PROMPT = torch.tensor([9, 8, 7])


def _lively(seed: int) -> Any:
    lm = model("qwen3", seed=seed, head_dim=64, hidden_size=64, intermediate_size=128)
    with torch.no_grad():
        for parameter in lm.parameters():
            if parameter.ndim > 1:
                parameter.mul_(4)
    return lm


@pytest.fixture(scope="module")
def models() -> list[Any]:
    return [_lively(seed) for seed in range(2)]


@pytest.fixture(scope="module")
def folder(models: list[Any], tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    os.environ.update(ENV)
    made = tmp_path_factory.mktemp("model")
    models[0].generation_config.eos_token_id = [3, 7]
    models[0].save_pretrained(made)
    tokenizer().save_pretrained(made)
    yield str(made)
    for name, figures in FIGURES.items():
        for what, value in figures.items():
            print(f"\n{name}: {what}: {value:.3g}", end="")


@pytest.fixture(scope="module")
def llm(folder: str) -> Iterator[Any]:
    from vllm import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    rest = {"disable_log_stats": True, "use_tqdm_on_load": False, "enable_chunked_prefill": False}
    made = AsyncLLM.from_engine_args(AsyncEngineArgs(model=folder, logprobs_mode="processed_logprobs", **ARGS, **rest))
    yield made
    made.shutdown()


@pytest.fixture(scope="module")
def address(folder: str) -> Iterator[str]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    arguments = ["--dtype", "float32", "--enforce-eager", "--max-model-len", "128", "--block-size", "32"]
    arguments += ["--no-enable-chunked-prefill"]
    arguments += [
        "--enable-scale-out",
        "--logprobs-mode",
        "processed_logprobs",
        "--host",
        "127.0.0.1",
        "--port",
        str(port),
    ]
    program = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", folder, *arguments]
    server = subprocess.Popen(program, env={**os.environ, **ENV}, start_new_session=True)
    try:
        deadline = time.monotonic() + 600
        while True:
            assert server.poll() is None, "the server has ended"
            assert time.monotonic() < deadline, "waited 600 s for the server"
            try:
                socket.create_connection(("127.0.0.1", port), 1).close()
                break
            except OSError:
                time.sleep(1)
        yield f"http://127.0.0.1:{port}"
    finally:
        os.killpg(server.pid, signal.SIGTERM)
        server.wait(60)


def _check(name: str, kind: str, case: EngineCase) -> None:
    case.figures = FIGURES.setdefault(kind, {})
    ENGINE_CHECKS[name](case)


@pytest.mark.parametrize("name", ENGINE_CHECKS)
def test_in_process(name: str, llm: Any, models: list[Any]) -> None:
    _check(name, "in process", EngineCase(lambda how: AsyncVLLM(llm, sampling=how), *models, updates=200))


@pytest.mark.parametrize("name", ENGINE_CHECKS)
def test_served(name: str, address: str, models: list[Any]) -> None:
    case = EngineCase(lambda how: AsyncVLLM.connect(address, sampling=how, version=0), *models, updates=50)
    _check(name, "served", case)


def test_raw_log_probs_and_a_process_that_is_killed(folder: str, models: list[Any]) -> None:
    import psutil

    engine = AsyncVLLM(folder, sampling=Sampling(max_new_tokens=100, log_prob_mode="raw"), **ARGS)
    assert {3, 7} <= set(engine.end_ids)
    case = EngineCase(lambda how: engine, *models, log_prob_mode="raw")
    closing, engine.close = engine.close, lambda: None  # type: ignore[method-assign]
    _check("log_probs", "raw", case)
    engine.submit([Request(key, PROMPT, key) for key in range(8)])
    cores = [each for each in psutil.Process().children() if "EngineCore" in each.name()]
    core = max(cores, key=lambda each: each.create_time())  # of the engine that was started last
    core.kill()
    done = [one for _ in range(60) for one in engine.results(1.0)]
    assert len(done) == 8
    assert {one.finish_reason for one in done} == {FinishReason.ERROR}
    assert all(isinstance(one.error, EngineLostError) and "is gone" in str(one.error) for one in done)
    for call in (engine.pause, lambda: engine.update_weights(models[1])):
        with pytest.raises(EngineLostError, match="is gone"):
            call()
    closing()


def test_a_program_that_is_killed_leaves_no_process(folder: str) -> None:
    import psutil

    program = f"""
import os, psutil, signal, torch
from rollwright.modules.llm import AsyncVLLM, Request, Sampling
if __name__ == "__main__":
    engine = AsyncVLLM({folder!r}, sampling=Sampling(max_new_tokens=100), **{ARGS!r})
    engine.submit([Request(0, torch.tensor([5]), 0)])
    print("pids", *(each.pid for each in psutil.Process().children(recursive=True)), flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
"""
    path = Path(folder).parent / "killed.py"
    path.write_text(program)
    done = subprocess.run([sys.executable, str(path)], stdout=subprocess.PIPE, text=True, timeout=600, check=False)
    pids = [int(pid) for line in done.stdout.splitlines() if line.startswith("pids") for pid in line.split()[1:]]
    assert len(pids) >= 2
    deadline = time.monotonic() + 60
    while left := [pid for pid in pids if psutil.pid_exists(pid)]:
        assert time.monotonic() < deadline, f"processes that are left: {left}"
        time.sleep(0.5)


@pytest.mark.parametrize(("cache", "updates", "turns"), [("rebuild", 200, 1360), ("keep", 50, 160)])
def test_nothing_is_lost_where_weights_change_while_conversations_run(
    llm: Any, models: list[Any], cache: str, updates: int, turns: int
) -> None:
    policy = llm_updates.on_vllm(llm)
    found = llm_updates.run(policy, models, tokenizer(), updates=updates, turns=turns, cache=cache)
    FIGURES[f"collected, cache={cache!r}"] = found
    assert llm_updates.wrong(found, cache) == []
    assert found["boundaries"] == turns - turns // 4
    assert found["turns of several versions"] > 0


def test_prompts_that_may_be_divided_are_refused_on_a_cpu(folder: str) -> None:
    with pytest.raises(ValueError, match="enable_chunked_prefill: expected False on a CPU"):
        AsyncVLLM(folder, enable_chunked_prefill=True, **ARGS)


def test_replicas_of_unequal_kind(llm: Any, address: str, models: list[Any]) -> None:
    how = Sampling(max_new_tokens=16)
    both = [AsyncVLLM(llm, sampling=how), AsyncVLLM.connect(address, sampling=how)]
    engine = Replicas(both, ["in process", "served"])
    engine.update_weights(models[1], 5)
    done = engine.generate([Request(key, PROMPT, key) for key in range(16)])
    assert {int(version) for one in done for version in one.versions} == {5}
    assert engine.left_out == {}
    engine.close()
