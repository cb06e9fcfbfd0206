"""An engine on vLLM's offline ``LLM.generate``."""

from __future__ import annotations

import importlib
import math
import time
from collections.abc import Hashable, Sequence
from typing import Any

import torch

from rollwright.data.llm.turns import FinishReason, Version
from rollwright.errors import MissingExtraError
from rollwright.modules.llm.engine import (
    CacheMode,
    Completion,
    Engine,
    Request,
    Sampling,
    UpdateMode,
    check_update,
    next_version,
)
from rollwright.modules.llm.transformers_engine import check_requests
from rollwright.weight_update.forms import flat_state


def import_vllm() -> Any:
    """The package vllm.

    Raises:
        MissingExtraError: it is not installed; names the command.
    """
    try:
        return importlib.import_module("vllm")
    except ModuleNotFoundError as error:
        if error.name != "vllm":
            raise
        raise MissingExtraError(
            "vLLMWrapper needs the package 'vllm', which is not installed. Install it with: pip install vllm "
            "(Linux, with a GPU). On other machines, use rollwright.modules.TransformersWrapper."
        ) from error


class VLLMEngine(Engine):
    """Generates with ``vllm.LLM``, in the thread of its caller.

    Requests that wait are generated together by one call of ``LLM.generate``, in :meth:`results`: all of its
    completions come when the longest is done, and requests that are submitted meanwhile wait for the next call. vLLM
    samples with the seed of each request; that its tokens do not depend on the batch is not guaranteed.

    Args:
        llm: a ``vllm.LLM``. Log-probabilities of the mode ``"sampled"`` need
            ``LLM(logprobs_mode="processed_logprobs")``; its default gives those of the mode ``"raw"``.
        sampling: how tokens are sampled.
        tokenizer: None: that of ``llm``.
        version: of the weights.
    """

    def __init__(
        self, llm: Any, *, sampling: Sampling | None = None, tokenizer: Any = None, version: Version = 0
    ) -> None:
        self._vllm = import_vllm()
        if not hasattr(llm, "generate") or not hasattr(llm, "get_tokenizer"):
            raise TypeError(f"llm: expected a vllm.LLM, got {type(llm).__name__}.")
        self._llm = llm
        self.tokenizer = llm.get_tokenizer() if tokenizer is None else tokenizer
        self.sampling = sampling or Sampling()
        config = llm.llm_engine.model_config
        self.max_length, self.vocab_size = int(config.max_model_len), int(config.get_vocab_size())
        _check_mode(self.sampling.log_prob_mode, getattr(config, "logprobs_mode", "raw_logprobs"))
        end = getattr(self.tokenizer, "eos_token_id", None)
        self.end_ids = tuple(sorted({*self.sampling.stop_token_ids, *([end] if isinstance(end, int) else [])}))
        self._version: Version = version
        self._waiting: dict[Hashable, tuple[Request, float]] = {}
        self._ready: list[Completion] = []
        self._paused = self._closed = False

    @property
    def version(self) -> Version:
        """Of the weights that sample the next token."""
        return self._version

    @version.setter
    def version(self, version: Version) -> None:
        self._version = version

    def submit(self, requests: Sequence[Request]) -> None:
        """Accept requests. See :meth:`TransformersEngine.submit` for what is raised."""
        if self._closed:
            raise RuntimeError("engine: it is closed, and takes no requests. Make another one.")
        check_requests(requests, self, self._waiting)
        now = time.perf_counter()
        self._waiting.update((request.key, (request, now)) for request in requests)

    def results(self, timeout: float | None = None) -> list[Completion]:
        """Completions since the last call. A call of vLLM is not interrupted, and may take longer than ``timeout``.

        Raises:
            RuntimeError: the engine is paused, and ``timeout`` is None.
        """
        if not self._ready and self._waiting and timeout != 0:
            if self._paused and timeout is None:
                raise RuntimeError("engine: it is paused, and nobody else can resume it. Call resume() first.")
            if not self._paused:
                waiting, self._waiting = self._waiting, {}
                self._ready += self._generated(list(waiting.values()))
        ready, self._ready = self._ready, []
        return ready

    def generate(self, requests: Sequence[Request]) -> list[Completion]:
        """Answer requests and wait; completions in the order of the requests."""
        others, self._waiting = self._waiting, {}
        try:
            self.submit(requests)
            asked, self._waiting = self._waiting, {}
        finally:
            self._waiting = others
        return self._generated(list(asked.values()))

    def cancel(self, keys: Sequence[Hashable]) -> None:
        """End requests that wait. See :meth:`Engine.cancel`."""
        for key in keys:
            if self._waiting.pop(key, None) is not None:
                none = torch.zeros(0, dtype=torch.int64)
                self._ready.append(Completion(key, none, torch.zeros(0), none, FinishReason.CANCELLED))

    def pause(self) -> None:
        """Generate nothing until :meth:`resume`."""
        self._paused = True

    def resume(self) -> None:
        """Go on after :meth:`pause`."""
        self._paused = False

    def update_weights(
        self, weights: Any, version: Version | None = None, *, mode: UpdateMode = "in_flight", cache: CacheMode = "keep"
    ) -> None:
        """Load weights into vLLM's model, and count or set their version. Responses are never in progress then.

        Args:
            weights: a module, a ``state_dict`` or a TensorDict, by the names of transformers.
            version: theirs; None: the next one.
            mode: all are the same here.
            cache: of prefixes; it is always dropped.
        """
        check_update(mode, cache)
        state = flat_state(weights, "vLLM")
        self._llm.apply_model(lambda model: model.load_weights(iter(state.items())))
        if hasattr(self._llm, "reset_prefix_cache"):
            self._llm.reset_prefix_cache()  # it was computed by the old weights
        self._version = next_version(self._version) if version is None else version

    def close(self) -> None:
        """Cancel what waits. The ``LLM`` is its owner's."""
        self._closed = True
        self.cancel(list(self._waiting))

    def _generated(self, rows: Sequence[tuple[Request, float]]) -> list[Completion]:
        begun = time.perf_counter()
        prompts = [{"prompt_token_ids": request.prompt.tolist()} for request, _ in rows]
        params = [self._params(request) for request, _ in rows]
        try:
            outputs = self._llm.generate(prompts, params, use_tqdm=False)
        except Exception as error:
            none = torch.zeros(0, dtype=torch.int64)
            return [
                Completion(request.key, none, torch.zeros(0), none, FinishReason.ERROR, error=error)
                for request, _ in rows
            ]
        took = time.perf_counter() - begun
        return [
            self._completion(request, output.outputs[0], {"queue": begun - submitted, "generation": took})
            for (request, submitted), output in zip(rows, outputs, strict=True)
        ]

    def _params(self, request: Request) -> Any:
        how = request.sampling or self.sampling
        limit = request.max_new_tokens or how.max_new_tokens
        return self._vllm.SamplingParams(
            n=1,
            temperature=how.temperature,
            top_p=how.top_p,
            top_k=how.top_k or -1,
            min_p=how.min_p,
            repetition_penalty=how.repetition_penalty,
            presence_penalty=how.presence_penalty,
            frequency_penalty=how.frequency_penalty,
            stop=list(how.stop),
            max_tokens=min(limit, (self.max_length or math.inf) - len(request.prompt)),
            stop_token_ids=list(how.stop_token_ids),
            seed=request.seed,
            logprobs=0,  # of the token that was sampled, and no others
            detokenize=bool(how.stop),
        )

    def _completion(self, request: Request, output: Any, seconds: dict[str, float]) -> Completion:
        tokens = torch.tensor(list(output.token_ids), dtype=torch.int64)
        values = [step[token].logprob for step, token in zip(output.logprobs, output.token_ids, strict=True)]
        version = self._version
        versions = [version] * len(tokens) if isinstance(version, str) else torch.full_like(tokens, version)
        reason = FinishReason.STOP if output.finish_reason == "stop" else FinishReason.LENGTH
        log_probs = torch.tensor(values, dtype=torch.float32)
        return Completion(request.key, tokens, log_probs, versions, reason, seconds)


def _check_mode(mode: str, given: Any) -> None:
    wanted = {"sampled": "processed_logprobs", "raw": "raw_logprobs"}[mode]
    if str(given) != wanted:
        raise ValueError(
            f"log_prob_mode: {mode!r} needs vllm.LLM(..., logprobs_mode={wanted!r}), got one with {str(given)!r}."
        )
