"""An engine that generates with a model of transformers, in the thread of its caller."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Container, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn

from rollwright.data.llm.codec import Codec
from rollwright.data.llm.turns import FinishReason, Version
from rollwright.modules.llm.causal_lm import CausalLM
from rollwright.modules.llm.decoding import Decoding, Generator, Row, StopStrings, completion_of
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
from rollwright.modules.llm.sampling import Sampler
from rollwright.modules.modes import in_eval_mode
from rollwright.weight_update.forms import flat_state, prepare

_TOKEN_LIMIT_S = 600.0  # for one token of all rows, or one pass over prompts
_PAUSE_LIMIT_S = 600.0


@dataclass(slots=True, eq=False)
class _Update:
    """Weights that wait until no response is in progress.

    Attributes:
        load: copies them into the model; None: they are the model's own.
        version: theirs.
    """

    load: Callable[[], None] | None
    version: Version


class TransformersEngine(Engine):
    """Generates with a causal language model of transformers.

    It has no thread of its own: tokens are sampled while :meth:`results`, :meth:`step` or :meth:`generate` runs, one
    token of each response at a time. Requests join those in progress at the next token, up to ``max_batch_size`` side
    by side; others wait in the order in which they came. A response that ends is handed out at once. Requests with
    equal prompts that begin together share one pass over the prompt.

    Padding is on the left, with attention mask and position ids made from lengths: which token pads, or whether it
    ends responses too, does not matter. For which tokens are sampled, see :mod:`rollwright.modules.llm.sampling`.

    Weights may be updated between two tokens of a response, or between two responses: see :meth:`update_weights`.

    All methods may be called by any thread; a call waits until the token in progress is sampled. Its parameters are
    those of the module that was passed: nothing is copied. The model is in eval mode while tokens are sampled; when the
    call returns or raises, each of its parts is in the mode of before. Mode and weights are those of the module, in all
    threads: to train the model in one while another one generates, pass the engine a copy, and update its weights; or
    call :meth:`pause` before the training step, and :meth:`resume` after it.

    Args:
        model: with attention layers, with or without sliding windows, layers of linear attention, convolutions or state
            spaces (Mamba), or both (Qwen3-Next, Jamba, Falcon-H1, ...). One with a cache of its own is refused.
        tokenizer: of the model; its end-of-sequence token ends responses.
        sampling: how tokens are sampled where a request says nothing else; None: ``Sampling()``. Not changed
            afterwards.
        max_batch_size: responses in progress at most.
        max_length: tokens that prompt and response have room for; None: the positions of the model's configuration.
        version: of the weights.

    Raises:
        TypeError: ``model`` is no such model.
        ValueError: ``max_batch_size`` or ``max_length`` is too small, or ``sampling`` does not suit the model.

    Example:
        >>> import torch, transformers
        >>> config = transformers.LlamaConfig(
        ...     vocab_size=32, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
        ...     eos_token_id=None,
        ... )
        >>> engine = TransformersEngine(transformers.LlamaForCausalLM(config), sampling=Sampling(max_new_tokens=4))
        >>> engine.submit([Request(key, torch.tensor([5, 6]), seed=key) for key in range(2)])
        >>> for completion in engine.results():
        ...     print(completion.key, completion.tokens.shape, completion.log_probs.dtype, completion.versions.dtype)
        0 torch.Size([4]) torch.float32 torch.int64
        1 torch.Size([4]) torch.float32 torch.int64
    """

    def __init__(
        self,
        model: Any,
        *,
        tokenizer: Any = None,
        sampling: Sampling | None = None,
        max_batch_size: int = 64,
        max_length: int | None = None,
        version: Version = 0,
    ) -> None:
        if max_batch_size < 1:
            raise ValueError(f"max_batch_size: expected at least 1, got {max_batch_size}.")
        self._lm = CausalLM(model, tokenizer, max_length)
        self._lm.caches  # noqa: B018 (a model whose cache is not known is refused now)
        self.tokenizer = tokenizer
        self.sampling = sampling or Sampling()
        self.max_length, self.vocab_size = self._lm.max_length, self._lm.vocab_size
        self.end_ids = tuple(sorted({*self._lm.end_ids, *self.sampling.stop_token_ids}))
        self._num_ids = max(self._lm.num_logits, self.vocab_size)
        check_sampling(self.sampling, self.end_ids, self._num_ids, tokenizer)
        self._generator = Generator(self._lm, Sampler(self.sampling, self._lm.device))
        self._ends: dict[Sampling, tuple[frozenset[int], StopStrings | None]] = {}  # what ends a response
        self._max_batch_size = max_batch_size
        self._version: Version = version
        self._update: _Update | None = None
        self._waiting: deque[Row] = deque()
        self._batch: Decoding | None = None
        self._rows: dict[Hashable, Row] = {}
        self._ready: list[Completion] = []
        self._running = threading.Event()
        self._running.set()
        self._closed = False
        self._lock = threading.RLock()
        self._wanted: list[None] = []  # one for each thread that waits for the lock: a step lets them go first

    @property
    def model(self) -> Any:
        """The module that generates."""
        return self._lm.model

    @property
    def in_progress(self) -> int:
        """Requests whose completion is not ready yet."""
        return len(self._rows)

    @property
    def version(self) -> Version:
        """Of the weights that sample the next token."""
        return self._version

    @version.setter
    def version(self, version: Version) -> None:
        with self._between_tokens("set the version"):
            if self._update is None:
                self._version = version
            else:
                self._update.version = version

    def submit(self, requests: Sequence[Request]) -> None:
        """Accept requests; they begin at the next token.

        Raises:
            ValueError: a prompt is empty, too long, or holds an id outside the vocabulary; a key is in progress;
                ``max_new_tokens`` is not from 1 to that of ``sampling``; ``sampling`` has another ``log_prob_mode``
                than that of the engine, or does not suit the model. Nothing was accepted.
            TypeError: a prompt is no int64 tensor on the CPU.
            RuntimeError: the engine is closed.
        """
        with self._between_tokens("submit requests"):
            self._accept(requests, self._ready)

    def results(self, timeout: float | None = None) -> list[Completion]:
        """Completions since the last call; generates until there is one. See :meth:`Engine.results`.

        Raises:
            TimeoutError: the engine has been paused for ten minutes, and ``timeout`` is None.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        while True:
            if self._ready:
                with self._between_tokens("hand out completions"):
                    ready, self._ready[:] = list(self._ready), []
                if ready:  # no other thread fetched them
                    return ready
            if timeout == 0 or not self._rows or (deadline is not None and time.monotonic() >= deadline):
                return []
            self._wait_and_step(deadline, lambda: bool(self._ready) or not self._rows)

    def step(self, tokens: int = 1) -> None:
        """Sample up to ``tokens`` tokens of each response in progress; nothing while the engine is paused."""
        for _ in range(tokens):
            if not self._rows or not self._running.is_set():
                return
            self._step(lambda: True)

    def generate(self, requests: Sequence[Request]) -> list[Completion]:
        """Answer requests and wait; completions in the order of the requests. Others in progress go on beside them.

        Raises:
            ValueError: as in :meth:`submit`.
            TimeoutError: the engine has been paused for ten minutes.
        """
        done: list[Completion] = []
        with self._between_tokens("submit requests"):
            self._accept(requests, done)
        while len(done) < len(requests):
            self._wait_and_step(None, lambda: len(done) == len(requests))
        by_key = {completion.key: completion for completion in done}
        return [by_key[request.key] for request in requests]

    def cancel(self, keys: Sequence[Hashable]) -> None:
        """End responses now; keys that are not in progress are passed over. See :meth:`Engine.cancel`."""
        with self._between_tokens("cancel requests"):
            self._end([self._rows[key] for key in keys if key in self._rows], FinishReason.CANCELLED)

    def pause(self) -> None:
        """Sample no token until :meth:`resume`; returns when the token in progress is sampled."""
        self._running.clear()
        with self._between_tokens("pause"):
            pass

    def resume(self) -> None:
        """Go on after :meth:`pause`."""
        self._running.set()

    def update_weights(
        self, weights: Any, version: Version | None = None, *, mode: UpdateMode = "in_flight", cache: CacheMode = "keep"
    ) -> None:
        """Copy weights into the model, and count or set their version; see :meth:`Engine.update_weights`.

        Args:
            weights: a module of the same structure, its ``state_dict``, or a (nested) TensorDict of its parameters; of
                the model, or of a module that holds it as ``model``. The model itself: only the version changes.
            version: theirs; None: the next number, or another UUID.
            mode: when they are loaded. ``"wait"`` samples what is left of the responses in progress.
            cache: of responses in progress.

        Raises:
            TypeError: ``weights`` is none of these.
            ValueError: names or shapes differ, or ``mode`` or ``cache`` is unknown; the old weights stay.
            TimeoutError: with ``"wait"``, the engine has been paused for ten minutes; the old weights stay.
        """
        check_update(mode, cache)
        weights = _of_model(weights, self.model)
        copy = None if weights is self.model else prepare(self.model, weights, "the engine")
        with self._between_tokens("update weights"):
            if version is None:
                version = next_version(self._version if self._update is None else self._update.version)
            if self._batch is None or mode in ("in_flight", "resubmit"):
                self._load(_Update(copy, version))
                if self._batch is not None and mode == "resubmit":
                    self._resubmit(self._batch)
                elif self._batch is not None and cache == "rebuild":
                    self._batch.cache_is_stale = True
                return
            if copy is not None and mode == "between_turns":
                state = {key: value.clone() for key, value in flat_state(weights, "the engine").items()}
                copy = prepare(self.model, state, "the engine")
            self._update = update = _Update(copy, version)
        if mode == "wait":
            self._wait_for(update)

    def _load(self, update: _Update) -> None:
        if update.load is not None:
            update.load()
        self._version, self._update = update.version, None

    def _resubmit(self, batch: Decoding) -> None:
        """Let responses in progress begin again, before those that wait."""
        self.tokens_discarded += batch.num_tokens
        begun = [row for row in batch.rows if not row.ended]
        for row in begun:
            row.start = 0
        self._waiting.extendleft(reversed(begun))
        self._batch = None

    def _wait_for(self, update: _Update) -> None:
        try:
            while self._update is update:
                self._wait_and_step(None, lambda: self._update is None)
        except BaseException:
            with self._between_tokens("take weights back"):
                if self._update is update:
                    self._update = None
            raise

    def close(self) -> None:
        """Cancel what is in progress and drop its cache; cancelled completions can still be fetched."""
        with self._between_tokens("close"):
            self._closed = True
            self._end(list(self._rows.values()), FinishReason.CANCELLED)
            self._batch = None
        self._running.set()

    @contextmanager
    def _between_tokens(self, what: str) -> Iterator[None]:
        self._wanted.append(None)
        try:
            if not self._lock.acquire(timeout=_TOKEN_LIMIT_S):
                raise TimeoutError(f"engine: waited {_TOKEN_LIMIT_S:g} s for the token in progress to {what}.")
        finally:
            self._wanted.pop()
        try:
            yield
        finally:
            self._lock.release()

    def _accept(self, requests: Sequence[Request], completions: list[Completion]) -> None:
        if self._closed:
            raise RuntimeError("engine: it is closed, and takes no requests. Make another one.")
        check_requests(requests, self, self._rows)
        for request in requests:
            if request.sampling is not None and request.sampling not in self._ends:
                ends = request.sampling.stop_token_ids
                check_sampling(request.sampling, ends, self._num_ids, self.tokenizer, f" of request {request.key!r}")

        def deliver(completion: Completion) -> None:
            del self._rows[completion.key]
            completions.append(completion)

        for request in requests:
            sampling = request.sampling or self.sampling
            limit = request.max_new_tokens or sampling.max_new_tokens
            if self.max_length is not None:
                limit = min(limit, self.max_length - request.prompt.shape[0])
            row = self._rows[request.key] = Row(request, limit, deliver, sampling, *self._ends_of(sampling))
            self._waiting.append(row)

    def _ends_of(self, sampling: Sampling) -> tuple[frozenset[int], StopStrings | None]:
        found = self._ends.get(sampling)
        if found is None:
            stops = StopStrings(Codec(self.tokenizer), sampling.stop) if sampling.stop else None
            found = self._ends[sampling] = frozenset({*self._lm.end_ids, *sampling.stop_token_ids}), stops
        return found

    def _wait_and_step(self, deadline: float | None, until: Callable[[], bool]) -> None:
        if not self._running.is_set():
            left = _PAUSE_LIMIT_S if deadline is None else deadline - time.monotonic()
            if not self._running.wait(max(left, 0.0)) and deadline is None:
                raise TimeoutError(
                    f"engine: {len(self._rows)} requests waited {_PAUSE_LIMIT_S:g} s while it was paused. "
                    "Call resume()."
                )
            return
        self._step(until if deadline is None else lambda: until() or time.monotonic() >= deadline)

    def _step(self, until: Callable[[], bool]) -> None:
        """Sample tokens, one of each row at least, until it is time to stop, or another thread waits for the lock.

        A token of those in progress comes first, then the first token of those that begin.
        """
        while self._wanted:
            time.sleep(0)  # they hold the lock for a moment each
        with self._between_tokens("sample the next one"), in_eval_mode(self.model.modules()):
            while self._running.is_set():
                version = self._version
                if self._batch is not None:
                    halts = partial(self._halts, version, until)
                    self._guarded(self._batch.rows, self._batch.step, version, halts)
                self._settle()
                if self._waiting and self._update is None:
                    self._begin()
                    self._settle()
                if self._wanted or until():
                    return

    def _settle(self) -> None:
        """Where no response is in progress, drop the batch, and load weights that have waited for that."""
        if self._batch is not None and not self._batch.num_active:
            self._batch = None
        if self._batch is None and self._update is not None:
            self._load(self._update)

    def _halts(self, version: Version, until: Callable[[], bool]) -> bool:
        """Whether the next token is to be sampled by another call of a batch."""
        changed = self._wanted or self._version is not version or not self._running.is_set()
        return bool(changed) or (bool(self._waiting) and self._has_room()) or until()

    def _has_room(self) -> bool:
        """Whether a request that waits could begin now."""
        active = 0 if self._batch is None else self._batch.num_active
        return self._update is None and active < self._max_batch_size

    def _begin(self) -> None:
        room = self._max_batch_size - (0 if self._batch is None else self._batch.num_active)
        rows = [self._waiting.popleft() for _ in range(min(room, len(self._waiting)))]
        if not rows:
            return
        now = time.perf_counter()
        for row in rows:
            row.begun = now
        begun = self._guarded(rows, Decoding, self._generator, rows, self._version)
        if begun is None or not begun.num_active:
            return
        if self._batch is None or not self._batch.num_active:
            self._batch = begun
        else:
            self._guarded([*self._batch.rows, *rows], self._batch.join, begun)

    def _guarded(self, rows: Sequence[Row], call: Callable[..., Any], *args: Any) -> Any:
        """Generate; what is raised ends the rows that it concerns."""
        try:
            return call(*args)
        except Exception as error:
            if self._batch is not None and any(row in self._batch.rows for row in rows):
                self._batch = None  # its rows may be out of step with their cache
            self._end([row for row in rows if not row.ended], FinishReason.ERROR, error)
            return None

    def _end(self, rows: Sequence[Row], reason: FinishReason, error: BaseException | None = None) -> None:
        in_batch = [] if self._batch is None else [row for row in rows if row in self._batch.rows]
        if self._batch is not None:
            self._batch.end(in_batch, reason, error)
        for row in rows:
            if row not in in_batch:
                row.ended = True
                empty = torch.zeros(0, dtype=torch.int64)
                row.deliver(completion_of(row, empty, torch.zeros(0), empty, reason, error))
        self._waiting = deque(row for row in self._waiting if not row.ended)
        self._settle()


def check_sampling(
    sampling: Sampling, end_ids: Sequence[int], num_ids: int, tokenizer: Any, of_request: str = ""
) -> None:
    """Check that a model can be sampled from so.

    Raises:
        ValueError: a token that ends responses is outside the vocabulary, or there are stop strings and no tokenizer.
    """
    if outside := [token for token in end_ids if not 0 <= token < num_ids]:
        raise ValueError(
            f"stop_token_ids{of_request}: expected ids of a vocabulary of {num_ids}, got {outside}. Pass the tokenizer "
            "of the model."
        )
    if sampling.stop and tokenizer is None:
        raise ValueError(f"stop{of_request}: strings {sampling.stop!r} need a tokenizer, got none. Pass tokenizer=.")


def check_requests(requests: Sequence[Request], engine: Engine, in_progress: Container[Hashable]) -> None:
    """Check requests against what an engine takes.

    Raises:
        ValueError, TypeError: as in :meth:`TransformersEngine.submit`.
    """
    keys: set[Hashable] = set()
    for request in requests:
        key, limit, sampling = request.key, request.max_new_tokens, request.sampling or engine.sampling
        _check_prompt(request.prompt, key, engine.max_length)
        if sampling.log_prob_mode != engine.sampling.log_prob_mode:
            raise ValueError(
                f"sampling of request {key!r}: expected log_prob_mode={engine.sampling.log_prob_mode!r}, that of the "
                f"engine; got {sampling.log_prob_mode!r}."
            )
        if limit is not None and not 1 <= limit <= sampling.max_new_tokens:
            raise ValueError(
                f"max_new_tokens of request {key!r}: expected 1 to {sampling.max_new_tokens}, the limit of sampling; "
                f"got {limit}."
            )
        if key in in_progress or key in keys:
            raise ValueError(f"key of request {key!r}: a request with this key is in progress. Choose another.")
        keys.add(key)
    _check_ids(requests, engine.vocab_size)


def _check_prompt(prompt: Any, key: Hashable, max_length: int | None) -> None:
    if not isinstance(prompt, torch.Tensor):
        raise TypeError(
            f"prompt of request {key!r}: expected an int64 tensor [prompt] on the CPU, got {type(prompt).__name__}."
        )
    if prompt.dtype != torch.int64 or prompt.ndim != 1 or not prompt.is_cpu:
        raise TypeError(
            f"prompt of request {key!r}: expected an int64 tensor [prompt] on the CPU, got {prompt.dtype} "
            f"{list(prompt.shape)} on {prompt.device}."
        )
    length = prompt.shape[0]
    if not length:
        raise ValueError(
            f"prompt of request {key!r}: it is empty. Begin it with a token, such as the tokenizer's bos_token_id."
        )
    if max_length is not None and length >= max_length:
        raise ValueError(
            f"prompt of request {key!r}: it has {length} tokens, and the model has {max_length} positions for prompt "
            f"and response. Shorten it to {max_length - 1} tokens at most, or use a model with more positions (a "
            "larger max_length, where one was passed)."
        )


def _check_ids(requests: Sequence[Request], vocab_size: int) -> None:
    """Check that all ids are of the vocabulary."""
    prompts = [request.prompt.numpy() for request in requests]
    ids = prompts[0] if len(prompts) == 1 else np.concatenate(prompts) if prompts else np.zeros(1, np.int64)
    if np.maximum.reduce(ids.view(np.uint64)) < vocab_size:  # as uint64, negative ids are large
        return
    for request in requests:
        prompt = request.prompt
        wrong = prompt[(prompt < 0) | (prompt >= vocab_size)].unique().tolist()
        if wrong:
            raise ValueError(
                f"prompt of request {request.key!r}: token ids {wrong[:8]} are outside the vocabulary of {vocab_size}. "
                "Use the tokenizer that belongs to the model."
            )


def _of_model(weights: Any, model: nn.Module) -> Any:
    """Weights by the model's names, where they come from a module that holds the model as ``model``."""
    if weights is model or getattr(weights, "model", None) is model:
        return model
    state = flat_state(weights, "the engine")
    inner = {key.removeprefix("model."): value for key, value in state.items() if key.startswith("model.")}
    return inner if model.state_dict().keys() <= inner.keys() else state
