"""Service: a model that generates by itself, as an engine needs it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from rollwright.data.llm.turns import Version
from rollwright.modules.llm.engine import Sampling
from rollwright.modules.llm.serving.weight_files import Shapes, WeightFiles

ABORTED = "abort"


@dataclass(frozen=True, slots=True)
class Order:
    """What a service is asked for.

    Attributes:
        id: of no other order.
        prompt: tokens.
        sampling: how they are sampled.
        limit: tokens at most.
        end_ids: tokens that end the response; the service knows no others.
        seed: of the generator.
        salt: orders share what they have in the prefix cache only if theirs are equal.
    """

    id: str
    prompt: list[int]
    sampling: Sampling
    limit: int
    end_ids: tuple[int, ...]
    seed: int
    salt: str


class Reply(NamedTuple):
    """What a service wrote.

    Attributes:
        tokens: as sampled.
        log_probs: of these tokens.
        spans: labels of weights, each with the number of tokens until its end; together they are all tokens.
        reason: ``"stop"``, ``"length"`` or :data:`ABORTED`.
    """

    tokens: list[int]
    log_probs: list[float]
    spans: list[tuple[str, int]]
    reason: str


class Service(ABC):
    """A model that generates by itself. Coroutines run in the loop of engines.

    Attributes:
        name: for messages: "vLLM's engine process", "vllm serve at http://...".
        tokenizer: of the model, or None.
        max_length: tokens that prompt and response have room for; None: unknown.
        vocab_size: token ids are less.
        end_ids: tokens that end a response, of model, generation config and tokenizer.
        shapes: of the weights by name; None: unknown.
        weights_folder: where files of weights are written for it; None: in memory of this machine.
        freezes: whether :meth:`pause` keeps orders in progress; where not, they end as :data:`ABORTED`.
    """

    name: str
    tokenizer: Any
    max_length: int | None
    vocab_size: int
    end_ids: tuple[int, ...]
    shapes: Shapes | None = None
    weights_folder: Path | None = None
    freezes: bool = True

    @abstractmethod
    def check(self, sampling: Sampling) -> None:
        """Check that the service can sample so.

        Raises:
            ValueError: it cannot; names the remedy.
        """

    @abstractmethod
    async def label(self) -> str:
        """Of the weights that it has now."""

    @abstractmethod
    async def answer(self, order: Order) -> Reply:
        """Generate.

        Raises:
            EngineLostError: the service is gone.
        """

    @abstractmethod
    async def abort(self, ids: Sequence[str]) -> None:
        """End orders; their replies come with the tokens so far."""

    @abstractmethod
    async def pause(self) -> None:
        """Sample no further token."""

    @abstractmethod
    async def resume(self) -> None:
        """Go on."""

    def carry(self, weights: Any, *, keep: bool) -> Any:
        """Check weights, and bring them to where :meth:`load` takes them.

        Args:
            weights: see :meth:`WeightFiles.of`.
            keep: they may change before they are loaded.

        Raises:
            TypeError, ValueError: they do not fit.
        """
        return WeightFiles.of(weights, self.name, self.shapes, self.weights_folder)

    @abstractmethod
    async def load(self, weights: Any, label: str, *, rebuild: bool) -> None:
        """Take weights, while paused.

        Args:
            weights: of :meth:`carry`.
            label: theirs, which spans of tokens have from now on.
            rebuild: compute the cache of orders in progress again.
        """

    @abstractmethod
    async def set_label(self, label: str) -> None:
        """Label the weights that there are."""

    @abstractmethod
    def close(self) -> None:
        """End what the service owns; returns when no process is left."""


def label_of(version: Version) -> str:
    """The label of weights of a version.

    >>> label_of(3), label_of("7d9f")
    ('3', '7d9f')
    """
    return str(version)


def version_of(label: str) -> Version:
    """The version of a label; weights that nobody labelled have 0.

    >>> version_of("3"), version_of("7d9f"), version_of("default")
    (3, '7d9f', 0)
    """
    return int(label) if label.isdecimal() else 0 if label == "default" else label
