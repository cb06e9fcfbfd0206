"""ReplayEngine: answers as a recorded run did, without a model."""

from __future__ import annotations

import os
from collections.abc import Hashable, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch

from rollwright.data.llm.trace import Trace, TracedConversation
from rollwright.data.llm.turns import FinishReason, Origin, Turn, Version
from rollwright.modules.llm.engine import Completion, Engine, Request, Sampling


class ReplayEngine(Engine):
    """Answers each request with the tokens, log-probabilities and versions that were recorded for it.

    A request is found by its seed, which is made of the run's seed, prompt, epoch, repeat and turn, so that order,
    batches and workers may be others; where a program makes requests side by side, by its prompt within the
    conversation. Weights are taken, and change nothing.

    Args:
        folder: that a collector with ``trace=`` has written.
        tokenizer: of the model; None: that of the environment.

    Raises:
        ValueError: there is no trace in the folder.
    """

    def __init__(self, folder: str | os.PathLike[str], tokenizer: Any = None) -> None:
        trace = Trace.read(folder)
        self._folder = os.fspath(folder)
        self._turns: dict[int, tuple[Turn, TracedConversation]] = {}
        for found in trace.conversations:
            for turn, seed in zip(found.turns, found.seeds, strict=True):
                self._turns[seed] = turn, found
        facts = trace.engine
        self.tokenizer = tokenizer
        self.sampling = Sampling(log_prob_mode=facts.get("log_prob_mode", "sampled"))
        self.max_length, self.vocab_size = facts.get("max_length"), int(facts.get("vocab_size", 2**31))
        self.end_ids = tuple(facts.get("end_ids", ()))
        self._version: Version = 0
        self._ready: list[Completion] = []
        self._answered: set[tuple[Origin, int]] = set()

    def submit(self, requests: Sequence[Request]) -> None:
        """See :meth:`Engine.submit`.

        Raises:
            ValueError: a request was not recorded, or with another prompt.
        """
        self._ready += [self._answer(request) for request in requests]

    def _answer(self, request: Request) -> Completion:
        if request.seed not in self._turns:
            raise ValueError(
                f"replay: expected a turn that was recorded, got one that {self._folder!r} does not have. Replay with "
                "the data, the seed and the environment of the recorded run."
            )
        turn, found = self._turns[request.seed]
        if not _asks(turn, request):
            turn = self._same_prompt(found, request) or turn
        self._answered.add((found.origin, turn.number))
        prompt = turn.tokens[: turn.num_prompt]
        if not _asks(turn, request):
            size = min(len(prompt), len(request.prompt))
            differs = (prompt[:size] != request.prompt[:size]).nonzero()
            place = int(differs[0]) if len(differs) else size
            raise ValueError(
                f"replay: expected the prompt that was recorded, of {len(prompt)} tokens, got one of "
                f"{len(request.prompt)} that differs from token {place} on. Replay with the data, the chat template, "
                "the tools and the environment of the recorded run."
            )
        reason = turn.finish_reason
        response = turn.tokens[turn.num_prompt :]
        failed = reason is FinishReason.ERROR and not len(response)
        if reason in (FinishReason.TOOL, FinishReason.ERROR) and not failed:  # what followed has said so
            reason = FinishReason.STOP
        return Completion(
            request.key,
            response,
            torch.zeros(len(response)) if turn.log_probs is None else turn.log_probs,
            turn.versions,
            reason,
            {name: turn.seconds.get(name, 0.0) for name in ("queue", "generation")},
            error=RuntimeError(found.why or "the engine failed in the recorded run") if failed else None,
        )

    def _same_prompt(self, found: TracedConversation, request: Request) -> Turn | None:
        """The turn of a conversation that answers the prompt; one that was not answered yet, if there is one."""
        turns = [turn for turn in found.turns if _asks(turn, request)]
        left = (turn for turn in turns if (found.origin, turn.number) not in self._answered)
        return next(left, turns[0] if turns else None)

    def results(self, timeout: float | None = None) -> list[Completion]:
        """See :meth:`Engine.results`; all are there at once."""
        ready, self._ready = self._ready, []
        return ready

    def generate(self, requests: Sequence[Request]) -> list[Completion]:
        """Answer requests and wait; completions in the order of the requests."""
        return [self._answer(request) for request in requests]

    def cancel(self, keys: Sequence[Hashable]) -> None:
        """End responses now: they come as completions with ``CANCELLED`` and the tokens so far."""
        for completion in self._ready:
            if completion.key in keys:
                completion.finish_reason = FinishReason.CANCELLED

    def pause(self) -> None:
        """Sample no token until :meth:`resume`."""

    def resume(self) -> None:
        """Go on after :meth:`pause`."""

    def update_weights(self, weights: Any, version: Version | None = None, **how: Any) -> None:
        """Count a version; tokens keep those that were recorded."""
        if version is None:
            version = self._version + 1 if isinstance(self._version, int) else self._version
        self._version = version

    @property
    def version(self) -> Version:
        """Of the weights that sample the next token."""
        return self._version

    @version.setter
    def version(self, version: Version) -> None:
        self._version = version

    def close(self) -> None:
        """Cancel what is in progress, and release what the engine holds. May be called again."""
        self._ready.clear()


def _asks(turn: Turn, request: Request) -> bool:
    return torch.equal(turn.tokens[: turn.num_prompt], request.prompt)


class ReplayPolicy:
    """A policy whose engine is a :class:`ReplayEngine`.

    Args:
        folder: that a collector with ``trace=`` has written.
        like: the policy that was recorded, for its tokenizer and the layout of records; None: they are those of the
            environment.
    """

    num_samples = None
    pad_output = False

    def __init__(self, folder: str | os.PathLike[str], like: Any = None) -> None:
        self.tokenizer = getattr(like, "tokenizer", None) or getattr(getattr(like, "engine", None), "tokenizer", None)
        self.record_layout = getattr(like, "record_layout", None)
        self.return_log_probs = getattr(like, "return_log_probs", None) is not False
        self.engine = ReplayEngine(folder, self.tokenizer)

    def __call__(self, td: Any) -> Any:
        """Refuse TensorDicts: what was recorded is tokens.

        Raises:
            TypeError: always.
        """
        raise TypeError(
            "replay: expected conversations (LLMEnv, ChatEnv) whose messages and tokens pass without TensorDicts. Take "
            "out what needs TensorDicts, as when the run was recorded."
        )


def replaying(folder: str | os.PathLike[str], policy: Any, factory: Any) -> Any:
    """What makes the policy of a run that is replayed, wherever it is needed; a list of it for a list of factories.

    Args:
        folder: that a collector with ``trace=`` has written.
        policy: that was recorded, or None.
        factory: that made it, or None.

    Raises:
        ValueError: there is no trace in the folder.
    """
    if not Trace.is_in(folder):
        raise ValueError(
            f"replay: expected a folder that LLMCollector(trace=...) has written, got {os.fspath(folder)!r}. Pass the "
            "folder of a run."
        )
    if isinstance(factory, list | tuple):
        return [partial(_made, folder, None, each) for each in factory]
    like = None if policy is None else SimpleNamespace(**{name: getattr(policy, name, None) for name in _LIKE})
    if like is not None:
        like.tokenizer = like.tokenizer or getattr(getattr(policy, "engine", None), "tokenizer", None)
    return partial(_made, folder, like, factory)


_LIKE = ("tokenizer", "record_layout", "return_log_probs")


def _made(folder: str | os.PathLike[str], like: Any, factory: Any) -> ReplayPolicy:
    return ReplayPolicy(folder, like if factory is None else factory())
