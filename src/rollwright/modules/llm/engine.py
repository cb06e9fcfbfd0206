"""Engine: what a collector asks of a language model, wherever it runs."""

from __future__ import annotations

import uuid
from abc import ABC, abstractmethod
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from numbers import Integral, Real
from typing import Any, Literal, NoReturn, get_args

import torch

from rollwright.data.llm.turns import FinishReason, LogProbMode, Version

_NO_COPY = (
    "{} holds a language model and responses in progress, and cannot be copied or pickled. Pass policy_factory, a "
    "function that builds it where it is needed, in place of policy."
)
UpdateMode = Literal["in_flight", "wait", "between_turns", "resubmit"]
"""When new weights are loaded, and what becomes of responses in progress: see :meth:`Engine.update_weights`."""

CacheMode = Literal["keep", "rebuild"]
"""What becomes of the cache of responses in progress under new weights: it stays, or is computed again."""

_REALS = ("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")


@dataclass(frozen=True, slots=True)
class Sampling:
    """How tokens are sampled.

    Attributes:
        max_new_tokens: tokens of a response at most.
        temperature: divides the logits; 0: the most probable token.
        top_k: sample from the most probable ``top_k`` tokens; 0: from all.
        top_p: sample from the smallest set of tokens whose probability is at least ``top_p``.
        stop_token_ids: tokens that end a response, beside the end-of-sequence tokens of the model.
        log_prob_mode: ``"sampled"``: log-probabilities of the distribution that was sampled from, after all that is
            said here; ``"raw"``: of the softmax of the logits.
        min_p: sample from tokens that are at least ``min_p`` times as probable as the most probable one; 0: from all.
        repetition_penalty: divides positive logits of tokens that prompt or response have, and multiplies negative
            ones; 1: none.
        presence_penalty: is taken from the logits of tokens that the response has.
        frequency_penalty: the same, for each time that the response has them.
        stop: strings that end a response, at the token in which the first of them is complete. Tokens stay as they
            were sampled, so that the text of a response has the string, and what its last token wrote after it.
    """

    max_new_tokens: int = 128
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    stop_token_ids: tuple[int, ...] = ()
    log_prob_mode: LogProbMode = "sampled"
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    stop: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name, kind in (("max_new_tokens", Integral), ("top_k", Integral), *((name, Real) for name in _REALS)):
            value = getattr(self, name)
            if not isinstance(value, kind):
                expected = "a whole number" if kind is Integral else "a number"
                raise TypeError(f"{name}: expected {expected}, got {value!r}.")
        if not isinstance(self.stop, tuple) or not all(isinstance(one, str) and one for one in self.stop):
            raise TypeError(f"stop: expected a tuple of strings that are not empty, got {self.stop!r}.")
        infinity = float("inf")
        bounds = {
            "max_new_tokens": (self.max_new_tokens >= 1, "at least 1"),
            "temperature": (0 <= self.temperature < infinity, "0 or more (0: the most probable token)"),
            "top_k": (self.top_k >= 0, "0 or more (0: all tokens)"),
            "top_p": (0 < self.top_p <= 1, "more than 0 and at most 1"),
            "min_p": (0 <= self.min_p <= 1, "0 (all tokens) to 1"),
            "repetition_penalty": (0 < self.repetition_penalty < infinity, "more than 0 (1: none)"),
            "presence_penalty": (abs(self.presence_penalty) < infinity, "a finite number"),
            "frequency_penalty": (abs(self.frequency_penalty) < infinity, "a finite number"),
            "log_prob_mode": (self.log_prob_mode in ("sampled", "raw"), "'sampled' or 'raw'"),
        }
        for name, (holds, expected) in bounds.items():
            if not holds:
                raise ValueError(f"{name}: expected {expected}, got {getattr(self, name)!r}.")

    @property
    def distribution(self) -> tuple[float, ...]:
        """What the distribution of a token depends on, beside the logits; equal where the distributions are."""
        return (self.temperature, self.top_k, self.top_p, self.min_p, *self.penalties)

    @property
    def penalties(self) -> tuple[float, float, float]:
        """Of repetition, presence and frequency."""
        return self.repetition_penalty, self.presence_penalty, self.frequency_penalty

    @property
    def penalises(self) -> bool:
        """Whether the distribution of a token depends on which tokens came before, beside the logits."""
        return self.penalties != (1, 0, 0)


@dataclass(frozen=True, slots=True)
class Request:
    """A prompt to answer.

    Attributes:
        key: chosen by the caller, of no other request in progress.
        prompt: tokens, int64 ``[prompt]``; nobody writes them meanwhile.
        seed: of the generator of this response: the same seed and prompt give the same tokens, in any batch.
        max_new_tokens: fewer than :attr:`Sampling.max_new_tokens`; None: that many.
        sampling: how its tokens are sampled; None: as the engine says. Its ``log_prob_mode`` is that of the engine.
    """

    key: Hashable
    prompt: torch.Tensor
    seed: int
    max_new_tokens: int | None = None
    sampling: Sampling | None = None


@dataclass(slots=True)
class Completion:
    """The answer to a request.

    Attributes:
        key: of the request.
        tokens: as they were sampled, the end-of-sequence token included, int64 ``[response]``, on the CPU.
        log_probs: of these tokens, float32 ``[response]``.
        versions: of the weights that sampled each of them, int64 ``[response]``, or a list of UUIDs.
        finish_reason: why it ended; with ``ERROR``, ``error`` says what went wrong.
        seconds: ``queue`` and ``generation``.
        extras: further entries for each token, ``[response, ...]``, by name.
        error: what was raised.
    """

    key: Hashable
    tokens: torch.Tensor
    log_probs: torch.Tensor
    versions: torch.Tensor | Sequence[str]
    finish_reason: FinishReason
    seconds: dict[str, float] = field(default_factory=dict)
    extras: dict[str, torch.Tensor] = field(default_factory=dict)
    error: BaseException | None = None


class Engine(ABC):
    """Generates responses to prompts. It is never copied and never pickled.

    Attributes:
        tokenizer: of the model; a tokenizer of transformers, or None where prompts come as tokens only.
        sampling: how tokens are sampled where a request says nothing else.
        max_length: tokens that prompt and response have room for; None: no limit.
        vocab_size: token ids are less.
        never_copied: collectors use the object itself: they neither copy it, send it to a process, nor save its state.
        end_ids: tokens that end a response where its request says nothing else.
        tokens_discarded: tokens of responses that began again under new weights.
    """

    never_copied = True

    tokenizer: Any
    sampling: Sampling
    max_length: int | None
    vocab_size: int
    end_ids: tuple[int, ...]
    tokens_discarded: int = 0

    @abstractmethod
    def submit(self, requests: Sequence[Request]) -> None:
        """Accept requests.

        Raises:
            ValueError: a prompt is empty, too long, or holds an id outside the vocabulary; nothing was accepted.
        """

    @abstractmethod
    def results(self, timeout: float | None = None) -> list[Completion]:
        """Completions since the last call, in the order in which they ended; waits until there is one.

        Args:
            timeout: seconds to wait at most; 0: only those that are ready; None: as long as requests are in progress.

        Returns:
            Empty where no request is in progress, or the time is over.
        """

    def step(self, tokens: int = 1) -> None:  # noqa: B027 (most engines have nothing to do)
        """Generate up to ``tokens`` tokens of each response, and return.

        An engine that generates in the caller's thread does it here and in :meth:`results` only. One that generates by
        itself does nothing here.
        """

    @abstractmethod
    def generate(self, requests: Sequence[Request]) -> list[Completion]:
        """Answer requests and wait; completions in the order of the requests. Others in progress go on beside them.

        Raises:
            ValueError: as in :meth:`submit`.
        """

    @abstractmethod
    def cancel(self, keys: Sequence[Hashable]) -> None:
        """End responses now: they come as completions with ``CANCELLED`` and the tokens so far."""

    @abstractmethod
    def pause(self) -> None:
        """Sample no token until :meth:`resume`."""

    @abstractmethod
    def resume(self) -> None:
        """Go on after :meth:`pause`."""

    @abstractmethod
    def update_weights(
        self, weights: Any, version: Version | None = None, *, mode: UpdateMode = "in_flight", cache: CacheMode = "keep"
    ) -> None:
        """Take new weights. Each token is sampled with one version, and no request is lost.

        Args:
            weights: a module, a TensorDict or a state dict of the model.
            version: theirs; None: the next one.
            mode: ``"in_flight"``: load them now, between two tokens; responses in progress go on with them.
                ``"wait"``: no new response begins, those in progress end, then load, then return.
                ``"between_turns"``: the same, but return at once, with a copy of the weights.
                ``"resubmit"``: load them now; responses in progress begin again, and the tokens that they had count as
                :attr:`tokens_discarded`.
            cache: of responses in progress, in flight: ``"keep"``: new weights read of the tokens before what old ones
                wrote; ``"rebuild"``: it is computed again, so that each log-probability is that of a forward pass.

        Newer weights replace those that have not been loaded yet.

        Raises:
            ValueError: ``mode`` or ``cache`` is unknown, or the weights do not fit; nothing was changed.
        """

    @property
    @abstractmethod
    def version(self) -> Version:
        """Of the weights that sample the next token. Set it: that of the weights which came last, loaded or not."""

    @version.setter
    @abstractmethod
    def version(self, version: Version) -> None: ...

    @abstractmethod
    def close(self) -> None:
        """Cancel what is in progress, and release what the engine holds. May be called again."""

    def __copy__(self) -> NoReturn:
        raise TypeError(_NO_COPY.format(type(self).__name__))

    def __deepcopy__(self, memo: dict[int, Any]) -> NoReturn:
        raise TypeError(_NO_COPY.format(type(self).__name__))

    def __reduce__(self) -> NoReturn:
        raise TypeError(_NO_COPY.format(type(self).__name__))


def check_update(mode: str, cache: str) -> None:
    """Check how weights are to be updated.

    Raises:
        ValueError: ``mode`` or ``cache`` is unknown.
    """
    for name, value, known in (("mode", mode, UpdateMode), ("cache", cache, CacheMode)):
        if value not in get_args(known):
            raise ValueError(
                f"{name} of update_weights: expected {' or '.join(map(repr, get_args(known)))}, got {value!r}."
            )


def next_version(version: Version) -> Version:
    """The version after one: the next number, or another UUID."""
    return version + 1 if isinstance(version, int) else str(uuid.uuid4())
