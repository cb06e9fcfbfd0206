"""Servers at an address as services: ``vllm serve``, and SGLang by its native endpoint."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rollwright.data.llm.turns import Version
from rollwright.errors import EngineLostError, require
from rollwright.modules.llm.engine import Sampling
from rollwright.modules.llm.serving.async_engine import AsyncEngine
from rollwright.modules.llm.serving.http import HttpClient, RefusedError
from rollwright.modules.llm.serving.loop import shared_loop
from rollwright.modules.llm.serving.service import ABORTED, Order, Reply, Service
from rollwright.modules.llm.serving.vllm_params import (
    VLLM_MODES,
    check_mode,
    check_prefill,
    ids_in,
    reply_of,
    sampling_params,
)
from rollwright.modules.llm.serving.weight_files import WeightFiles, shapes_in

_FIRST_S = 120.0  # for a server to describe itself


class Server(Service):
    """A server: what is known of its model is read from its files, which are those that the server names.

    Args:
        address: ``http://host:port``.
        tokenizer: None: that of the model's files.
        api_key: for its ``Authorization``.
        weights_folder: where new weights are written, which the server reads there; None: in memory of this machine.

    Raises:
        EngineLostError: nothing answers there.
        ValueError: the server lacks what an engine needs; names how it is to be started.
    """

    kind: str
    _HEALTH = "/health"

    def __init__(
        self,
        address: str,
        *,
        tokenizer: Any = None,
        api_key: str | None = None,
        weights_folder: str | Path | None = None,
    ) -> None:
        self._http = HttpClient(address, self.kind, api_key, health=self._HEALTH)
        self.name = self._http.name
        self.weights_folder = None if weights_folder is None else Path(weights_folder)
        model, positions = shared_loop().run(self._describe(), _FIRST_S, f"have {self.name} describe its model")
        purpose = f"an engine on {self.kind}"
        config = require("transformers", name="AutoConfig", extra="llm", purpose=purpose).from_pretrained(model)
        if tokenizer is None:
            auto = require("transformers", name="AutoTokenizer", extra="llm", purpose=purpose)
            tokenizer = auto.from_pretrained(model)
        text = config.get_text_config()
        self.tokenizer, self.vocab_size = tokenizer, int(text.vocab_size)
        self.max_length = positions or getattr(text, "max_position_embeddings", None)
        generation = require("transformers", name="GenerationConfig", extra="llm", purpose=purpose)
        try:
            ends = generation.from_pretrained(model).eos_token_id
        except OSError:  # it has none
            ends = None
        self.end_ids = ids_in(ends, text.eos_token_id, getattr(tokenizer, "eos_token_id", None))
        self.shapes = shapes_in(model)

    @abstractmethod
    async def _describe(self) -> tuple[str, int | None]:
        """Name or directory of the model, and tokens that prompt and response have room for."""

    def close(self) -> None:
        """See :class:`Service`. The server is its owner's."""


class VLLMServer(Server):
    """A ``vllm serve``, by tokens. See :class:`Server`."""

    kind = "vllm serve"
    _START = "Start it with: VLLM_SERVER_DEV_MODE=1 vllm serve MODEL --enable-scale-out --logprobs-mode {}"

    async def _describe(self) -> tuple[str, int | None]:
        (model, *_) = (await self._http.get("/v1/models"))["data"]
        self._model = model["id"]
        try:
            info = await self._http.get("/server_info?config_format=json")
        except RefusedError as error:
            raise ValueError(f"address: {self.name} takes no weights. {self._START.format('...')}") from error
        config = info["vllm_config"]
        self._mode = str(config["model_config"]["logprobs_mode"])
        divides = config.get("scheduler_config", {}).get("enable_chunked_prefill", False)
        check_prefill(config.get("device_config", {}).get("device_type", ""), divides)
        try:
            await self._http.post("/inference/v1/generate", {})
        except RefusedError as error:
            if error.status == 404:
                message = f"address: {self.name} takes no tokens. {self._START.format('...')}"
                raise ValueError(message) from error
        return model.get("root") or model["id"], model.get("max_model_len")

    def check(self, sampling: Sampling) -> None:
        """Check that the service can sample so."""
        remedy = self._START.format(VLLM_MODES[sampling.log_prob_mode])
        check_mode(sampling.log_prob_mode, self._mode, remedy)

    async def label(self) -> str:
        """Of the weights that it has now."""
        return str((await self._http.get("/weight_info"))["weight_version"])

    async def answer(self, order: Order) -> Reply:
        """Generate."""
        params = {name: value for name, value in sampling_params(order).items() if value is not None}
        body = {
            "request_id": order.id,
            "model": self._model,
            "token_ids": order.prompt,
            "sampling_params": params,
            "cache_salt": order.salt,
        }
        (found,) = _choices(await self._http.post("/inference/v1/generate", body), self.name)
        content = (found.get("logprobs") or {}).get("content") or []
        tokens = list(found.get("token_ids") or [])
        if [entry["token_id"] for entry in content] != tokens:
            raise EngineLostError(f"{self.name} sent log-probabilities of other tokens than those that it sampled.")
        spans = [(span["version"], span["end"]) for span in found.get("weight_versions") or []]
        return reply_of(order, tokens, [entry["logprob"] for entry in content], spans, found["finish_reason"])

    async def abort(self, ids: Sequence[str]) -> None:
        """End orders; their replies come with the tokens so far."""
        named = [f"generate-tokens-{one}" for one in ids]
        await self._http.post("/inference/v1/abort_requests", {"request_ids": named})

    async def pause(self) -> None:
        """Sample no further token."""
        await self._http.post("/pause?mode=keep&clear_cache=false")

    async def resume(self) -> None:
        """Go on."""
        await self._http.post("/resume")

    async def load(self, weights: WeightFiles, label: str, *, rebuild: bool) -> None:
        """Take weights, while paused."""
        kwargs = {"weights_path": str(weights.path)}
        await self._http.post("/collective_rpc", {"method": "reload_weights", "kwargs": kwargs})
        await self.set_label(label)
        if rebuild:
            await self._http.post("/reset_prefix_cache?reset_running_requests=true")

    async def set_label(self, label: str) -> None:
        """Label the weights that there are."""
        await self._http.post("/update_weight_version", {"new_version": label})


class SGLangServer(Server):
    """A server of SGLang, by its native endpoint. See :class:`Server`.

    It says one version for each answer. New weights therefore end answers in progress, which go on with what they have
    under the new ones.
    """

    kind = "SGLang"
    freezes = False
    _HEALTH = "/get_model_info"  # its /health generates, which it does not while it is paused

    async def _describe(self) -> tuple[str, int | None]:
        model = await self._http.get("/get_model_info")
        info = await self._http.get("/get_server_info")
        return model["model_path"], info.get("context_length") or info.get("max_context_length")

    def check(self, sampling: Sampling) -> None:
        """Check that the service can sample so."""
        restricts = sampling.top_k or sampling.top_p < 1 or sampling.min_p or sampling.penalises
        if sampling.log_prob_mode == "sampled" and restricts:
            raise ValueError(
                "sampling: SGLang gives log-probabilities before top_k, top_p and min_p, and counts penalties anew "
                "where an answer goes on under new weights. Leave these out, or use vLLM."
            )
        if sampling.log_prob_mode == "raw" and sampling.temperature != 1:
            raise ValueError("log_prob_mode: SGLang gives 'raw' at temperature=1 only. Use 'sampled', or vLLM.")

    async def label(self) -> str:
        """Of the weights that it has now."""
        return str((await self._http.get("/get_model_info")).get("weight_version", "default"))

    async def answer(self, order: Order) -> Reply:
        """Generate."""
        how = order.sampling
        params = {
            "temperature": how.temperature,
            "top_p": how.top_p,
            "top_k": how.top_k or -1,
            "min_p": how.min_p,
            "max_new_tokens": order.limit,
            "stop": list(how.stop) or None,
            "stop_token_ids": list(order.end_ids),
            "ignore_eos": True,
            "sampling_seed": order.seed % 2**31,
            "no_stop_trim": True,
        }
        body = {"rid": order.id, "input_ids": order.prompt, "sampling_params": params, "return_logprob": True}
        found = await self._http.post("/generate", body)
        meta = found["meta_info"]
        drawn = [(token, value) for value, token, *_ in meta.get("output_token_logprobs") or []]
        tokens = list(found.get("output_ids") or [token for token, _ in drawn])
        if [token for token, _ in drawn] != tokens:
            raise EngineLostError(f"{self.name} sent log-probabilities of other tokens than those that it sampled.")
        label = str(meta.get("weight_version", order.salt))
        reason = (meta.get("finish_reason") or {}).get("type", ABORTED)
        return reply_of(order, tokens, [value for _, value in drawn], [(label, len(tokens))], reason)

    async def abort(self, ids: Sequence[str]) -> None:
        """End orders; their replies come with the tokens so far."""
        for one in ids:
            await self._http.post("/abort_request", {"rid": one})

    async def pause(self) -> None:
        """Sample no further token."""
        await self._http.post("/pause_generation", {"mode": "abort"})

    async def resume(self) -> None:
        """Go on."""
        await self._http.post("/continue_generation")

    async def load(self, weights: WeightFiles, label: str, *, rebuild: bool) -> None:
        """See :class:`Service`. The cache of prefixes is always dropped."""
        body = {"model_path": str(weights.path), "weight_version": label, "flush_cache": True}
        done = await self._http.post("/update_weights_from_disk", body)
        if not done.get("success"):
            raise ValueError(f"{self.name} has not loaded {weights.path}: {done.get('message')}")

    async def set_label(self, label: str) -> None:
        """Label the weights that there are."""
        await self._http.post("/update_weight_version", {"new_version": label, "abort_all_requests": False})


class AsyncSGLang(AsyncEngine):
    """An engine on a server of SGLang, by tokens; its tests run it on a server that speaks SGLang's formats.

    Args:
        address: ``http://host:port``.
        sampling: how tokens are sampled; SGLang gives log-probabilities before top-k, top-p and min-p, so that these
            are refused with ``log_prob_mode="sampled"``.
        version: of the weights; None: that of the server.
        **options: of the server: ``tokenizer``, ``api_key``, ``weights_folder``.
    """

    def __init__(
        self, address: str, *, sampling: Sampling | None = None, version: Version | None = None, **options: Any
    ) -> None:
        super().__init__(SGLangServer(address, **options), sampling=sampling, version=version)

    @classmethod
    def connect(cls, address: str, **kwargs: Any) -> AsyncSGLang:
        """An engine on a server at an address."""
        return cls(address, **kwargs)


def _choices(answer: Any, name: str) -> list[Any]:
    if not isinstance(answer, dict) or len(answer.get("choices") or ()) != 1:
        raise EngineLostError(f"{name} sent an answer without a choice: {str(answer)[:200]}")
    return list(answer["choices"])
