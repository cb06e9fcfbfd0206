"""A service that generates with a model of transformers, in a thread: what vLLM is, without vLLM."""

from __future__ import annotations

import asyncio
import copy
import dataclasses
import threading
import time
from collections.abc import Sequence
from typing import Any

import torch
from safetensors.torch import load_file
from tests.llm_models import model, tokenizer

from rollwright.data.llm.turns import FinishReason
from rollwright.errors import EngineLostError
from rollwright.modules.llm.engine import Request, Sampling
from rollwright.modules.llm.serving.service import ABORTED, Order, Reply, Service
from rollwright.modules.llm.serving.weight_files import WeightFiles
from rollwright.modules.llm.transformers_engine import TransformersEngine

REASONS = {FinishReason.STOP: "stop", FinishReason.LENGTH: "length", FinishReason.CANCELLED: ABORTED}


def lively(seed: int = 0) -> Any:
    """A model whose logits differ by more than those of small random weights."""
    lm = model("qwen3", seed=seed)
    with torch.no_grad():
        for parameter in lm.parameters():
            if parameter.ndim > 1:
                parameter.mul_(4)
    return lm


class LocalService(Service):
    """Generates with a copy of a model; what is asked for, and in which state, is checked.

    Args:
        lm: of transformers.
        freezes: whether orders stay while it is paused.
    """

    name = "the local service"

    def __init__(self, lm: Any, *, freezes: bool = True) -> None:
        self.engine = TransformersEngine(
            copy.deepcopy(lm), tokenizer=tokenizer(), sampling=Sampling(max_new_tokens=10**6), version="default"
        )
        self.tokenizer, self.max_length, self.vocab_size = tokenizer(), self.engine.max_length, self.engine.vocab_size
        self.end_ids, self.freezes = self.engine.end_ids, freezes
        self.shapes = {name: tuple(value.shape) for name, value in lm.state_dict().items()}
        self.lost: str = ""
        self.loads = self.closed = self.answers = 0
        self.broken = False  # whether it takes no weights
        self._futures: dict[str, tuple[asyncio.AbstractEventLoop, asyncio.Future[Any]]] = {}
        self._work = threading.Event()
        self._paused = False
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self.closed:
            if not self._work.wait(0.05):
                continue
            if self._paused:
                time.sleep(0.001)
            self.engine.step()
            for done in self.engine.results(0):
                loop, future = self._futures.pop(done.key)  # type: ignore[arg-type]
                loop.call_soon_threadsafe(lambda f=future, d=done: f.done() or f.set_result(d))  # type: ignore[misc]
            if not self._futures:
                self._work.clear()

    def check(self, sampling: Sampling) -> None:
        if sampling.top_k == 99:
            raise ValueError("top_k: expected another than 99.")

    async def label(self) -> str:
        return str(self.engine.version)

    async def answer(self, order: Order) -> Reply:
        self._check()
        assert order.limit >= 1
        self.answers += 1
        sampling = dataclasses.replace(order.sampling, stop_token_ids=order.end_ids, max_new_tokens=order.limit)
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Any] = loop.create_future()
        self._futures[order.id] = loop, future
        self.engine.submit([Request(order.id, torch.tensor(order.prompt), order.seed, sampling=sampling)])
        self._work.set()
        done = await future
        self._check()
        spans: list[tuple[str, int]] = []
        for place, label in enumerate(done.versions):
            if spans and spans[-1][0] == label:
                spans.pop()
            spans.append((label, place + 1))
        assert done.error is None
        return Reply(done.tokens.tolist(), done.log_probs.tolist(), spans, REASONS[done.finish_reason])

    async def abort(self, ids: Sequence[str]) -> None:
        self._check()
        assert ids
        self.engine.cancel(ids)
        self._work.set()

    async def pause(self) -> None:
        self._check()
        self._paused = True
        self.engine.pause()
        if not self.freezes:
            self.engine.cancel(list(self._futures))

    async def resume(self) -> None:
        self._check()
        self._paused = False
        self.engine.resume()

    async def load(self, weights: WeightFiles, label: str, *, rebuild: bool) -> None:
        self._check()
        assert self._paused, "weights while it generates"
        self.loads += 1
        if self.broken:
            raise ValueError("no weights today")
        state = load_file(weights.path / "model.safetensors")
        self.engine.update_weights(state, label, cache="rebuild" if rebuild else "keep")

    async def set_label(self, label: str) -> None:
        self._check()
        self.engine.version = label

    def lose(self, why: str) -> None:
        """Be gone from now on."""
        self.lost = why
        self.engine.cancel(list(self._futures))
        self._work.set()

    def _check(self) -> None:
        if self.lost:
            raise EngineLostError(f"{self.name} is gone: {self.lost}.")

    def close(self) -> None:
        self.closed += 1
        self._thread.join(30)
