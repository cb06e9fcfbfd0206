"""AsyncEngine: an engine on a service, which generates by itself while its caller does other things."""

from __future__ import annotations

import asyncio
import threading
import time
import uuid
import weakref
from collections.abc import Hashable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import torch

from rollwright.data.llm.turns import FinishReason, Version
from rollwright.errors import EngineLostError
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
from rollwright.modules.llm.sampling import child_seed
from rollwright.modules.llm.serving.loop import LoopThread, shared_loop
from rollwright.modules.llm.serving.service import ABORTED, Order, Reply, Service, label_of, version_of
from rollwright.modules.llm.transformers_engine import check_requests, check_sampling

_AGAIN_S = 0.1  # after which an order that did not end is ended again
_CALL_LIMIT_S = 60.0  # for a service to pause, resume, or end a response
_LOAD_LIMIT_S = 1800.0  # for it to take weights
_PAUSE_LIMIT_S = 600.0
_REASONS = {"stop": FinishReason.STOP, "length": FinishReason.LENGTH, ABORTED: FinishReason.CANCELLED}


@dataclass(slots=True, eq=False)
class _Asked:
    """A request in progress.

    Attributes:
        request: of the caller.
        sink: takes its completion.
        id: of its order; each continuation has another.
        parts: replies so far, which are one response.
        cancelled: whether it is to end.
        again: whether it is to begin again, without what it has.
    """

    request: Request
    sink: list[Completion]
    id: str = ""
    parts: list[Reply] = field(default_factory=list)
    submitted: float = field(default_factory=time.perf_counter)
    begun: float = 0.0
    cancelled: bool = False
    again: bool = False


@dataclass(slots=True, eq=False)
class _Update:
    """Weights that are to be loaded.

    Attributes:
        weights: of :meth:`Service.carry`.
        version: theirs.
        mode, cache: see :meth:`Engine.update_weights`.
    """

    weights: Any
    version: Version
    mode: UpdateMode
    cache: CacheMode


class AsyncEngine(Engine):
    """An engine on a service: requests join as they come, and each completion comes when it ends.

    It is safe in threads. That a seed gives the same tokens beside other requests is not promised: these services batch
    as requests come, and sums in another order round differently.

    Args:
        service: generates.
        sampling: how tokens are sampled; None: ``Sampling()``.
        version: of the weights; None: that of the service.
        loop: where the service runs; None: that of all engines.
    """

    def __init__(
        self,
        service: Service,
        *,
        sampling: Sampling | None = None,
        version: Version | None = None,
        loop: LoopThread | None = None,
    ) -> None:
        self._service, self._loop = service, loop or shared_loop()
        self.tokenizer, self.vocab_size, self.max_length = service.tokenizer, service.vocab_size, service.max_length
        self.sample_with(sampling or Sampling(), new=True)
        self._asked: dict[Hashable, _Asked] = {}
        self._ready: list[Completion] = []
        self._changed = threading.Condition()
        self._closed = self._paused = False
        self._refused: EngineLostError | None = None  # why the weights are unknown
        self._update: _Update | None = None  # that came last, and is not loaded
        self._running: set[_Asked] = set()  # that the service has orders for
        weakref.finalize(self, service.close)  # also where nobody closes it before the process ends
        self._updating, self._gate, self._ended = self._call(_in_loop(), "begin")
        if version is None:
            self._version = version_of(self._call(service.label(), "say its version"))
        else:
            self._version = version
            self._call(service.set_label(label_of(version)), "label its weights")

    def sample_with(self, sampling: Sampling, *, new: bool = False) -> None:
        """Sample in this way from now on.

        Raises:
            ValueError: the service cannot.
            RuntimeError: requests are in progress.
        """
        if not new and self._asked:
            raise RuntimeError(f"sampling: {len(self._asked)} requests are in progress. Set it before they begin.")
        self._check(sampling)
        self.sampling = sampling
        self.end_ids = tuple(sorted({*self._service.end_ids, *sampling.stop_token_ids}))

    def _check(self, sampling: Sampling, of_request: str = "") -> None:
        check_sampling(sampling, sampling.stop_token_ids, self.vocab_size, self.tokenizer, of_request)
        self._service.check(sampling)

    # Requests -----------------------------------------------------------------------------------------

    @property
    def in_progress(self) -> int:
        """Requests whose completion is not ready yet."""
        return len(self._asked)

    def submit(self, requests: Sequence[Request]) -> None:
        """Accept requests. See :meth:`TransformersEngine.submit` for what is raised."""
        self._accept(requests, self._ready)

    def _accept(self, requests: Sequence[Request], sink: list[Completion]) -> None:
        with self._changed:
            if self._closed:
                raise RuntimeError("engine: it is closed, and takes no requests. Make another one.")
            check_requests(requests, self, self._asked)
            for request in requests:
                if request.sampling is not None:
                    self._check(request.sampling, f" of request {request.key!r}")
            for request in requests:
                asked = self._asked[request.key] = _Asked(request, sink)
                self._loop.start(self._answer(asked))

    def results(self, timeout: float | None = None) -> list[Completion]:
        """Completions since the last call. See :meth:`Engine.results`.

        Raises:
            TimeoutError: the engine has been paused for ten minutes, and ``timeout`` is None.
        """
        self._wait(timeout, lambda: bool(self._ready) or not self._asked)
        with self._changed:
            ready, self._ready[:] = list(self._ready), []
        return ready

    def generate(self, requests: Sequence[Request]) -> list[Completion]:
        """Answer requests and wait; completions in the order of the requests. Others in progress go on beside them.

        Raises:
            ValueError: as in :meth:`submit`.
            TimeoutError: the engine has been paused for ten minutes.
        """
        done: list[Completion] = []
        self._accept(requests, done)
        self._wait(None, lambda: len(done) == len(requests))
        by_key = {completion.key: completion for completion in done}
        return [by_key[request.key] for request in requests]

    def _wait(self, timeout: float | None, until: Any) -> None:
        deadline = None if timeout is None else time.monotonic() + timeout
        paused_until = time.monotonic() + _PAUSE_LIMIT_S
        with self._changed:
            while not until():
                if not self._paused:
                    paused_until = time.monotonic() + _PAUSE_LIMIT_S
                left = 1.0 if deadline is None else deadline - time.monotonic()
                if left <= 0:
                    return
                self._changed.wait(min(left, 1.0))
                if self._paused and deadline is None and time.monotonic() > paused_until:
                    raise TimeoutError(
                        f"engine: {len(self._asked)} requests waited {_PAUSE_LIMIT_S:g} s while it was paused. "
                        "Call resume()."
                    )

    def cancel(self, keys: Sequence[Hashable]) -> None:
        """End responses now; keys that are not in progress are passed over. See :meth:`Engine.cancel`."""
        with self._changed:
            ended = [self._asked[key] for key in keys if key in self._asked]
            for asked in ended:
                asked.cancelled = True
        if ended:
            self._call(self._cancel(ended), "end responses")

    async def _cancel(self, asked: Sequence[_Asked]) -> None:
        await self._interrupt(asked)
        for one in asked:  # those that had no order
            self._deliver(one, FinishReason.CANCELLED)

    async def _interrupt(self, asked: Sequence[_Asked]) -> None:
        """End the orders of requests; again where the service did not know them yet."""
        while running := [one for one in asked if one in self._running]:
            await self._service.abort([one.id for one in running])
            self._ended.clear()
            with suppress(TimeoutError):
                await asyncio.wait_for(self._ended.wait(), _AGAIN_S)

    async def _answer(self, asked: _Asked) -> None:
        """Have a request answered, in several orders where an update ends them."""
        try:
            while True:
                await self._gate.wait()
                if asked.cancelled:
                    return self._deliver(asked, FinishReason.CANCELLED)
                if self._refused is not None:
                    raise self._refused
                reply = await self._order(asked)
                if reply.reason != ABORTED or asked.cancelled:
                    asked.parts.append(reply)
                    return self._deliver(asked, _REASONS[reply.reason])
                if asked.again:
                    self.tokens_discarded += len(reply.tokens) + sum(len(part.tokens) for part in asked.parts)
                    asked.parts.clear()
                else:
                    asked.parts.append(reply)
                asked.again = False
        except Exception as error:
            self._deliver(asked, FinishReason.ERROR, error)

    async def _order(self, asked: _Asked) -> Reply:
        request, written = asked.request, [token for part in asked.parts for token in part.tokens]
        sampling = request.sampling or self.sampling
        limit = request.max_new_tokens or sampling.max_new_tokens
        if self.max_length is not None:
            limit = min(limit, self.max_length - len(request.prompt))
        asked.begun = asked.begun or time.perf_counter()
        asked.id = uuid.uuid4().hex
        order = Order(
            asked.id,
            [*request.prompt.tolist(), *written],
            sampling,
            limit - len(written),
            tuple({*self._service.end_ids, *sampling.stop_token_ids}),
            child_seed(request.seed, len(asked.parts)),
            label_of(self._version),
        )
        self._running.add(asked)
        try:
            return await self._service.answer(order)
        finally:
            self._running.discard(asked)
            self._ended.set()

    def _deliver(self, asked: _Asked, reason: FinishReason, error: BaseException | None = None) -> None:
        now = time.perf_counter()
        begun = asked.begun or now
        tokens = torch.tensor([token for part in asked.parts for token in part.tokens], dtype=torch.int64)
        log_probs = torch.tensor([value for part in asked.parts for value in part.log_probs], dtype=torch.float32)
        if error is None and not bool(torch.isfinite(log_probs).all()):
            reason = FinishReason.ERROR
            error = ValueError(f"request {asked.request.key!r}: log-probabilities are not finite. Check the weights.")
        seconds = {"queue": begun - asked.submitted, "generation": now - begun}
        with self._changed:
            if self._asked.get(asked.request.key) is not asked:
                return  # it was delivered before
            del self._asked[asked.request.key]
            asked.sink.append(
                Completion(asked.request.key, tokens, log_probs, _stamps(asked.parts), reason, seconds, error=error)
            )
            self._changed.notify_all()

    # The model ----------------------------------------------------------------------------------------

    def pause(self) -> None:
        """Sample no token until :meth:`resume`; returns when the token in progress is sampled."""
        if not self._paused:
            self._paused = True
            self._call(self._pause(), "pause")

    def resume(self) -> None:
        """Go on after :meth:`pause`."""
        if self._paused:
            self._call(self._resume(), "resume")
            with self._changed:
                self._paused = False
                self._changed.notify_all()

    async def _pause(self) -> None:
        if not self._service.freezes:
            self._gate.clear()
        await self._service.pause()

    async def _resume(self) -> None:
        await self._service.resume()
        self._gate.set()

    @property
    def version(self) -> Version:
        """Of the weights that sample the next token."""
        return self._version

    @version.setter
    def version(self, version: Version) -> None:
        if (update := self._update) is not None:
            update.version = version
        elif version != self._version:
            self._call(self._service.set_label(label_of(version)), "set the version")
            self._version = version

    def carry(self, weights: Any, *, keep: bool) -> Any:
        """Weights as this engine and others like it take them, brought to where they are read; see :class:`Service`."""
        return self._service.carry(weights, keep=keep)

    def update_weights(
        self, weights: Any, version: Version | None = None, *, mode: UpdateMode = "in_flight", cache: CacheMode = "keep"
    ) -> None:
        """Load weights, and count or set their version; see :meth:`Engine.update_weights`.

        Args:
            weights: a module, a TensorDict, a ``state_dict``, or the path of a folder with files of safetensors, by the
                names of transformers.
            version: theirs; None: the next number, or another UUID.
            mode: when they are loaded.
            cache: of responses in progress.

        Raises:
            TypeError: ``weights`` is none of these.
            ValueError: names or shapes differ, or ``mode`` or ``cache`` is unknown; the old weights stay.
            EngineLostError: the service has not taken them. It generates nothing until it takes others.
        """
        check_update(mode, cache)
        carried = self.carry(weights, keep=mode == "between_turns")
        with self._changed:
            if version is None:
                version = next_version(self._version if self._update is None else self._update.version)
            update = self._update = _Update(carried, version, mode, cache)
        if mode == "between_turns":
            self._loop.start(self._take(update))
        else:
            self._call(self._take(update), "load weights", _LOAD_LIMIT_S)

    async def _take(self, update: _Update) -> None:
        async with self._updating:
            try:
                await self._clear_way(update.mode)
                if self._update is update:  # else there are newer ones
                    await self._service.pause()
                    await self._service.load(
                        update.weights, label_of(update.version), rebuild=update.cache == "rebuild"
                    )
                    self._version, self._refused = update.version, None
            except Exception as error:
                self._refused = _refusal(self._service.name, update.version, error)
                raise self._refused from error
            finally:
                if self._update is update:
                    self._update = None
                if not self._paused:
                    await self._service.resume()
                    if self._update is None:  # newer weights may wait for the gate to be closed
                        self._gate.set()
                if self._refused is not None:
                    await self._interrupt(list(self._running))

    async def _clear_way(self, mode: UpdateMode) -> None:
        """Wait for responses in progress, or interrupt them, as an update says."""
        if mode == "in_flight" and self._service.freezes:
            return
        self._gate.clear()
        if mode in ("in_flight", "resubmit"):
            running = list(self._running)
            for asked in running:
                asked.again = mode == "resubmit"
            await self._interrupt(running)
        while self._running:
            self._ended.clear()
            await self._ended.wait()

    # The end ------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Cancel what is in progress, and end what the engine has started; completions can still be fetched."""
        with self._changed:
            if self._closed:
                return
            self._closed = True
            asked = list(self._asked.values())
            for one in asked:
                one.cancelled = True
        try:
            if asked:
                self._call(self._cancel(asked), "end responses")
        except (EngineLostError, TimeoutError):
            for one in asked:
                self._deliver(one, FinishReason.CANCELLED)
        finally:
            self._service.close()

    def _call(self, coroutine: Any, what: str, limit_s: float = _CALL_LIMIT_S) -> Any:
        return self._loop.run(coroutine, limit_s, f"have {self._service.name} {what}")


async def _in_loop() -> tuple[asyncio.Lock, asyncio.Event, asyncio.Event]:
    """For updates one after the other; open where orders may begin; set where an order has ended."""
    gate = asyncio.Event()
    gate.set()
    return asyncio.Lock(), gate, asyncio.Event()


def _refusal(name: str, version: Version, error: Exception) -> EngineLostError:
    if isinstance(error, EngineLostError):
        return error
    return EngineLostError(
        f"{name} has not taken the weights of version {version}, and generates nothing until it takes others. "
        f"{type(error).__name__}: {error}"
    )


def _stamps(parts: Sequence[Reply]) -> torch.Tensor | list[str]:
    """Versions of the tokens of a response: int64 ``[response]``, or UUIDs."""
    versions: list[Version] = []
    for part in parts:
        first = 0
        for label, end in part.spans:
            versions += [version_of(label)] * (end - first)
            first = end
    if all(isinstance(version, int) for version in versions):
        return torch.tensor(versions, dtype=torch.int64)
    return [str(version) for version in versions]
