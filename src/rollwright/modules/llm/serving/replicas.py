"""Replicas: several engines behind one, with equal models."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from rollwright._warnings import warn_user
from rollwright.data.llm.turns import FinishReason, Version
from rollwright.errors import EngineLostError, text_of
from rollwright.modules.llm.engine import CacheMode, Completion, Engine, Request, UpdateMode, check_update, next_version
from rollwright.modules.llm.serving.async_engine import AsyncEngine
from rollwright.modules.llm.transformers_engine import check_requests

_POLL_S = 0.5  # of the threads that fetch completions, while requests are in progress
_UNEQUAL = 8  # requests that a conversation's replica may have more than another, before the conversation moves
_REMEMBERED = 100_000  # conversations whose replica is known


@dataclass(slots=True, eq=False)
class _Replica:
    """An engine, and what it is asked.

    Attributes:
        name: for messages.
        engine: of it.
        asked: requests in progress, by key.
        work: set while there are some.
        left_out: why it gets no work; empty: it does.
    """

    name: str
    engine: Engine
    asked: dict[Hashable, _Asked] = field(default_factory=dict)
    work: threading.Event = field(default_factory=threading.Event)
    left_out: str = ""


@dataclass(slots=True, eq=False)
class _Asked:
    request: Request
    sink: list[Completion]
    cancelled: bool = False
    tries: int = 0


class Replicas(Engine):
    """Several engines with equal models, as one.

    A conversation stays where its prefix is, unless that replica has much more to do than another. Where a replica is
    lost, its requests go to others. One that did not take new weights gets no work, with a warning that names it, until
    it takes others; so does one that was lost, and is there again.

    Args:
        engines: with equal sampling and vocabulary; they are closed with it.
        names: of each, for messages; None: their place.

    Raises:
        ValueError: there is none, or they differ.

    Attributes:
        left_out: replicas that get no work, and why, by name.
    """

    def __init__(self, engines: Sequence[Engine], names: Sequence[str] | None = None) -> None:
        if not engines:
            raise ValueError("engines: expected at least one, got none.")
        first = engines[0]
        for engine in engines:
            for what in ("sampling", "vocab_size", "end_ids"):
                if getattr(engine, what) != getattr(first, what):
                    raise ValueError(
                        f"engines: expected equal {what}, got {getattr(first, what)} and {getattr(engine, what)}. Make "
                        "them of one model, in one way."
                    )
        self.tokenizer, self.sampling = first.tokenizer, first.sampling
        self.vocab_size, self.end_ids = first.vocab_size, first.end_ids
        lengths = [engine.max_length for engine in engines if engine.max_length is not None]
        self.max_length = min(lengths, default=None)
        named = names or [f"replica {place}" for place in range(len(engines))]
        self._replicas = [_Replica(name, engine) for name, engine in zip(named, engines, strict=True)]
        self._ready: list[Completion] = []
        self._changed = threading.Condition()
        self._closed = False
        self._latest: Version = first.version
        self._homes = _Homes()
        self._unsaid: list[str] = []  # warnings, for the thread of the caller
        self._threads = [threading.Thread(target=self._fetch, args=(one,), daemon=True) for one in self._replicas]
        for thread in self._threads:
            thread.start()

    @property
    def left_out(self) -> dict[str, str]:
        """Replicas that get no work, and why."""
        return {one.name: one.left_out for one in self._replicas if one.left_out}

    @property
    def tokens_discarded(self) -> int:  # type: ignore[override]
        """Tokens of responses that began again under new weights."""
        return sum(one.engine.tokens_discarded for one in self._replicas)

    @property
    def in_progress(self) -> int:
        """Requests whose completion is not ready yet."""
        return sum(len(one.asked) for one in self._replicas)

    # Requests -----------------------------------------------------------------------------------------

    def submit(self, requests: Sequence[Request]) -> None:
        """Accept requests. See :meth:`TransformersEngine.submit` for what is raised."""
        self._accept(requests, self._ready)

    def _accept(self, requests: Sequence[Request], sink: list[Completion]) -> None:
        with self._changed:
            if self._closed:
                raise RuntimeError("engine: it is closed, and takes no requests. Make another one.")
            check_requests(requests, self, {key for one in self._replicas for key in one.asked})
            for request in requests:
                self._give(_Asked(request, sink))

    def _give(self, asked: _Asked) -> None:
        """Give a request to a replica; under the lock."""
        while True:
            able = [one for one in self._replicas if not one.left_out]
            if not able:
                reasons = "; ".join(f"{name}: {why}" for name, why in self.left_out.items())
                error = EngineLostError(f"engine: no replica is left. {reasons}")
                return self._deliver(asked, _failed(asked.request, error))
            replica = min(able, key=lambda one: len(one.asked))
            home = self._homes.find(asked.request.prompt)
            if home in able and len(home.asked) < len(replica.asked) + _UNEQUAL:
                replica = home
            try:
                replica.engine.submit([asked.request])
            except (RuntimeError, EngineLostError) as error:
                self._leave_out(replica, text_of(error))
                continue
            except ValueError as error:  # of this engine alone
                return self._deliver(asked, _failed(asked.request, error))
            replica.asked[asked.request.key] = asked
            replica.work.set()
            return None

    def _fetch(self, replica: _Replica) -> None:
        """Take completions of a replica, as long as this engine is open."""
        while not self._closed or replica.asked:
            if not replica.work.wait(_POLL_S):
                continue
            try:
                found = replica.engine.results(_POLL_S)
            except Exception as error:
                found = []
                with self._changed:
                    self._leave_out(replica, text_of(error))
            with self._changed:
                for completion in found:
                    self._take(replica, completion)
                if not replica.asked:
                    replica.work.clear()

    def _take(self, replica: _Replica, completion: Completion) -> None:
        asked = replica.asked.pop(completion.key, None)
        if asked is None:
            return None
        again = completion.finish_reason is FinishReason.CANCELLED and not asked.cancelled and not self._closed
        if isinstance(completion.error, EngineLostError):
            self._leave_out(replica, text_of(completion.error))
            again = not asked.cancelled and not self._closed
        if again:
            return self._give(asked)
        if completion.error is None:
            self._homes.keep(torch.cat([asked.request.prompt, completion.tokens]), replica)
        return self._deliver(asked, completion)

    def _leave_out(self, replica: _Replica, why: str) -> None:
        """Give a replica no work until it takes new weights; its requests go to others. Under the lock."""
        if replica.left_out:
            return
        replica.left_out = why
        self._unsaid.append(f"{replica.name} gets no work until it takes new weights. {why}")
        moved, replica.asked = list(replica.asked.values()), {}
        replica.work.clear()
        for asked in moved:
            self._give(asked)

    def _warn(self) -> None:
        while self._unsaid:
            warn_user(self._unsaid.pop(0))

    def _deliver(self, asked: _Asked, completion: Completion) -> None:
        asked.sink.append(completion)
        self._changed.notify_all()

    def results(self, timeout: float | None = None) -> list[Completion]:
        """Completions since the last call. See :meth:`Engine.results`."""
        self._wait(timeout, lambda: bool(self._ready) or not self.in_progress)
        self._warn()
        with self._changed:
            ready, self._ready[:] = list(self._ready), []
        return ready

    def generate(self, requests: Sequence[Request]) -> list[Completion]:
        """Answer requests and wait; completions in the order of the requests. Others in progress go on beside them."""
        done: list[Completion] = []
        self._accept(requests, done)
        self._wait(None, lambda: len(done) == len(requests))
        self._warn()
        by_key = {completion.key: completion for completion in done}
        return [by_key[request.key] for request in requests]

    def _wait(self, timeout: float | None, until: Callable[[], bool]) -> None:
        deadline = None if timeout is None else time.monotonic() + timeout
        with self._changed:
            while not until():
                left = 1.0 if deadline is None else deadline - time.monotonic()
                if left <= 0:
                    return
                self._changed.wait(min(left, 1.0))

    def cancel(self, keys: Sequence[Hashable]) -> None:
        """End responses now; keys that are not in progress are passed over. See :meth:`Engine.cancel`."""
        with self._changed:
            found = [[key for key in keys if key in one.asked] for one in self._replicas]
            for one, own in zip(self._replicas, found, strict=True):
                for key in own:
                    one.asked[key].cancelled = True
        for one, own in zip(self._replicas, found, strict=True):
            if own:
                self._try(one, lambda engine, own=own: engine.cancel(own))  # type: ignore[misc]

    # The models ---------------------------------------------------------------------------------------

    def _try(self, replica: _Replica, call: Callable[[Engine], None]) -> bool:
        """Call an engine; one that is lost gets no more work."""
        try:
            call(replica.engine)
        except (EngineLostError, TimeoutError) as error:
            with self._changed:
                self._leave_out(replica, text_of(error))
            return False
        return True

    def _all(self, call: Callable[[Engine], None], replicas: Sequence[_Replica]) -> list[bool]:
        """Call engines side by side; whether each did it."""
        with ThreadPoolExecutor(max(len(replicas), 1)) as threads:
            return list(threads.map(lambda one: self._try(one, call), replicas))

    def pause(self) -> None:
        """Sample no token until :meth:`resume`."""
        self._all(lambda engine: engine.pause(), [one for one in self._replicas if not one.left_out])

    def resume(self) -> None:
        """Go on after :meth:`pause`."""
        self._all(lambda engine: engine.resume(), [one for one in self._replicas if not one.left_out])

    @property
    def version(self) -> Version:
        """Of the weights that sample the next token; the oldest that a replica has, where they are loaded later."""
        able = [one.engine.version for one in self._replicas if not one.left_out]
        waiting = [version for version in able if version != self._latest]
        return waiting[0] if waiting else self._latest

    @version.setter
    def version(self, version: Version) -> None:
        self._latest = version

        def set_version(engine: Engine) -> None:
            engine.version = version

        self._all(set_version, [one for one in self._replicas if not one.left_out])

    def update_weights(
        self, weights: Any, version: Version | None = None, *, mode: UpdateMode = "in_flight", cache: CacheMode = "keep"
    ) -> None:
        """Load weights in all replicas, side by side; see :meth:`Engine.update_weights`.

        Raises:
            TypeError, ValueError: the weights do not fit, or ``mode`` or ``cache`` is unknown.
            EngineLostError: no replica has taken them.
        """
        check_update(mode, cache)
        version = next_version(self._latest) if version is None else version
        first = self._replicas[0].engine
        if isinstance(first, AsyncEngine) and all(isinstance(one.engine, AsyncEngine) for one in self._replicas):
            weights = first.carry(weights, keep=mode == "between_turns")  # once, for all
        taken = self._all(lambda e: e.update_weights(weights, version, mode=mode, cache=cache), self._replicas)
        self._latest = version
        with self._changed:
            for replica, did in zip(self._replicas, taken, strict=True):
                if did:
                    replica.left_out = ""
        self._warn()
        if not any(taken):
            reasons = "; ".join(f"{name}: {why}" for name, why in self.left_out.items())
            raise EngineLostError(f"engine: no replica has taken the weights of version {version}. {reasons}")

    def close(self) -> None:
        """Cancel what is in progress, and close the engines."""
        with self._changed:
            if self._closed:
                return
            self._closed = True
            for one in self._replicas:
                for asked in one.asked.values():
                    asked.cancelled = True
        self._all(lambda engine: engine.close(), self._replicas)
        for thread in self._threads:
            thread.join(10 * _POLL_S)
        with self._changed:
            for one in self._replicas:
                for asked in one.asked.values():
                    self._deliver(asked, _failed(asked.request, None))
                one.asked.clear()


class _Homes:
    """Which replica has the tokens of a conversation in its cache."""

    def __init__(self) -> None:
        self._known: OrderedDict[tuple[int, int], _Replica] = OrderedDict()  # by number and hash of tokens
        self._lengths: dict[int, int] = {}  # how many are known of each number
        self._factors = np.zeros(0, np.uint64)

    def _sums(self, tokens: torch.Tensor) -> Any:
        """A hash of each prefix; equal hashes of unequal prefixes only send a conversation elsewhere."""
        if len(self._factors) < len(tokens):
            generator = np.random.default_rng(0)
            self._factors = generator.integers(1, 2**63, 2 * len(tokens), np.uint64)
        return np.cumsum((tokens.numpy().astype(np.uint64) + np.uint64(1)) * self._factors[: len(tokens)])

    def keep(self, tokens: torch.Tensor, replica: _Replica) -> None:
        """Remember that a replica has tokens."""
        key = len(tokens), int(self._sums(tokens)[-1])
        if key not in self._known:
            self._lengths[len(tokens)] = self._lengths.get(len(tokens), 0) + 1
        self._known[key] = replica
        if len(self._known) > _REMEMBERED:
            self._forget(next(iter(self._known)))

    def find(self, prompt: torch.Tensor) -> _Replica | None:
        """The replica that has the longest prefix of a prompt; None: none is known."""
        lengths = sorted((length for length in self._lengths if length <= len(prompt)), reverse=True)
        sums = self._sums(prompt) if lengths else ()
        for length in lengths:
            if (key := (length, int(sums[length - 1]))) in self._known:
                found = self._known[key]
                self._forget(key)  # the conversation is longer from now on
                return found
        return None

    def _forget(self, key: tuple[int, int]) -> None:
        del self._known[key]
        self._lengths[key[0]] -= 1
        if not self._lengths[key[0]]:
            del self._lengths[key[0]]


def _failed(request: Request, error: BaseException | None) -> Completion:
    none = torch.zeros(0, dtype=torch.int64)
    reason = FinishReason.CANCELLED if error is None else FinishReason.ERROR
    return Completion(request.key, none, torch.zeros(0), none, reason, {"queue": 0.0, "generation": 0.0}, error=error)
