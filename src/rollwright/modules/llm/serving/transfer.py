"""Weights from GPU to GPU, by vLLM's own transfer."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Coroutine, Iterator, Mapping
from typing import Any

import torch

from rollwright.errors import require

_PURPOSE, _PLACE = "vLLM's transfer of weights", "vllm.distributed.weight_transfer"


class WeightTransfer:
    """Sends weights to the workers of an ``AsyncLLM`` that was made with a ``weight_transfer_config``.

    It drives vLLM's trainer side, and is the client that this asks to call the other side.

    Args:
        llm: the ``AsyncLLM``.
        backend: ``"ipc"``: trainer and vLLM share a GPU; ``"nccl"``: each has its own.

    Raises:
        ValueError: a backend of another name.
    """

    def __init__(self, llm: Any, backend: str) -> None:
        if backend not in ("ipc", "nccl"):
            raise ValueError(
                f"weight_transfer_config: expected the backend 'ipc' or 'nccl', got {backend!r}. Leave it out, and "
                "weights go by file."
            )
        self._llm, self._backend = llm, backend
        self._state: Mapping[str, torch.Tensor] = {}
        self._trainer: Any = None
        self._loop: asyncio.AbstractEventLoop | None = None

    async def send(self, state: Mapping[str, torch.Tensor]) -> None:
        """Send weights, while vLLM is paused."""
        self._loop = asyncio.get_running_loop()
        self._state = {name: value.cuda() for name, value in state.items()}
        try:
            await asyncio.to_thread(self._send)
        finally:
            self._state = {}

    def _send(self) -> None:
        if self._trainer is None:
            factory = require(f"{_PLACE}.factory", name="WeightTransferTrainerFactory", extra="llm", purpose=_PURPOSE)
            self._trainer = factory.trainer_init(self._init_info(), client=self, source=_source_of(self))
        self._trainer.send_weights()

    def _init_info(self) -> Any:
        if self._backend == "ipc":
            kind = require(f"{_PLACE}.ipc_engine", name="IPCTrainerInitInfo", extra="llm", purpose=_PURPOSE)
            return kind(rank=0, packed=True)
        kind = require(f"{_PLACE}.nccl_engine", name="NCCLTrainerInitInfo", extra="llm", purpose=_PURPOSE)
        with socket.socket() as probe:
            probe.bind(("", 0))
            port = probe.getsockname()[1]
        size = self._llm.vllm_config.parallel_config.world_size_across_dp + 1
        host = socket.gethostbyname(socket.gethostname())
        return kind(master_address=host, master_port=port, world_size=size, rank=0)

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """What is sent, by name."""
        yield from self._state.items()

    # What vLLM's trainer side calls, in a thread --------------------------------------------------------

    def _call(self, call: Coroutine[Any, Any, Any]) -> None:
        assert self._loop is not None
        asyncio.run_coroutine_threadsafe(call, self._loop).result()

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        """Have the workers join."""
        kind = require(f"{_PLACE}.base", name="WeightTransferInitRequest", extra="llm", purpose=_PURPOSE)
        self._call(self._llm.init_weight_transfer_engine(kind(init_info=init_info)))

    def start_weight_update(self) -> None:
        """Begin."""
        self._call(self._llm.start_weight_update())

    def update_weights(self, update_info: Any) -> None:
        """Have the workers take a part."""
        kind = require(f"{_PLACE}.base", name="WeightTransferUpdateRequest", extra="llm", purpose=_PURPOSE)
        self._call(self._llm.update_weights(kind(update_info=update_info)))

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        """End."""
        self._call(self._llm.finish_weight_update(weight_version))

    def shutdown_weight_transfer_engine(self) -> None:
        """Have the workers leave."""
        self._call(self._llm.shutdown_weight_transfer_engine())


def _source_of(transfer: WeightTransfer) -> Any:
    """The weights in the form in which vLLM reads them; its classes are there only where vLLM is."""
    base = require(f"{_PLACE}.base", extra="llm", purpose=_PURPOSE)

    class Source(base.WeightSource):  # type: ignore[misc,name-defined]
        def metadata(self) -> list[Any]:
            return [base.ParamMeta(name, value.dtype, tuple(value.shape)) for name, value in transfer.tensors()]

        def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
            return transfer.tensors()

    return Source()
