"""A causal language model of transformers, called with tensors."""

from __future__ import annotations

import inspect
from functools import cached_property
from typing import Any

import torch
from torch import nn

from rollwright.modules.llm.caches import CacheKind


class CausalLM:
    """What an engine needs of a model.

    Args:
        model: a causal language model of transformers, or one that is called as they are.
        tokenizer: its tokenizer; None: there is none.
        max_length: tokens that prompt and response have room for; None: what the model's configuration says.

    Attributes:
        model: the same.
        device: of its inputs.
        vocab_size: rows of its table of embeddings.
        num_logits: of each token; as many, or a few more or less.
        max_length: see the argument; None: the configuration does not say.
        end_ids: tokens that end a response: of its configurations and of the tokenizer.

    Raises:
        TypeError: it is no causal language model, or its configuration has no vocabulary.
        ValueError: ``max_length`` is too small, or the model is on the device ``"meta"``.
    """

    def __init__(self, model: Any, tokenizer: Any = None, max_length: int | None = None) -> None:
        config: Any = getattr(model, "config", None)
        if not isinstance(model, nn.Module) or config is None:
            raise TypeError(
                f"model: expected a causal language model of transformers, got {type(model).__name__}. "
                "Pass what AutoModelForCausalLM.from_pretrained or .from_config returns."
            )
        lm: Any = model  # what a module has beside its parameters is not typed
        if getattr(config, "is_encoder_decoder", False):
            raise TypeError(
                f"model: expected one that continues its prompt, got {type(model).__name__}, an encoder and a decoder. "
                "Pass what AutoModelForCausalLM returns."
            )
        text = config.get_text_config(decoder=True) if hasattr(config, "get_text_config") else config
        self.model = model
        self.device: torch.device = next(model.parameters()).device
        if self.device.type == "meta":
            raise ValueError(
                "model: its parameters are on the device 'meta', and hold no values. Load it onto a device: "
                "from_pretrained(..., device_map='cpu'), or model.to_empty(device='cpu') and weights."
            )
        self.vocab_size = _vocab_size(model, text)
        head = lm.get_output_embeddings() if hasattr(lm, "get_output_embeddings") else None
        self.num_logits: int = getattr(head, "out_features", None) or self.vocab_size
        positions = getattr(text, "max_position_embeddings", None)
        if max_length is not None and max_length < 2:
            raise ValueError(f"max_length: expected at least 2 (a prompt and a response), got {max_length}.")
        self.max_length: int | None = positions if max_length is None else max_length
        self.end_ids = _end_ids(model, text, tokenizer)
        base = lm.get_base_model() if hasattr(lm, "get_base_model") else lm  # of an adapter
        accepted = inspect.signature(base.forward).parameters
        self._takes_positions = "position_ids" in accepted
        self._base, self._text_config = base, text
        self._next_only: dict[str, Any] = {"use_cache": True}
        if "logits_to_keep" in accepted:
            self._next_only["logits_to_keep"] = 1

    @cached_property
    def caches(self) -> CacheKind:
        """What it caches while it generates.

        Raises:
            TypeError: it takes no cache, or one whose rows cannot be moved.
        """
        return CacheKind(self._base, self._text_config)

    def next_logits(
        self, ids: torch.Tensor, mask: torch.Tensor | None, positions: torch.Tensor, cache: Any
    ) -> torch.Tensor:
        """Logits of the token after the last one, ``[n, vocab]``; the cache grows by ``ids``.

        Args:
            ids: int64 ``[n, length]``.
            mask: int64 ``[n, cached + length]``, 0 at padding; None: there is no padding.
            positions: int64 ``[n, length]``.
            cache: of what came before.
        """
        self._next_only[self.caches.argument] = cache
        if mask is not None and not self.caches.attends and mask.shape[1] > ids.shape[1]:
            mask = None  # of tokens in the cache, which nothing attends to
        if self._takes_positions:
            found = self.model(input_ids=ids, attention_mask=mask, position_ids=positions, **self._next_only)
        else:
            found = self.model(input_ids=ids, attention_mask=mask, **self._next_only)
        return self._logits(found).select(1, -1)

    def logits(self, ids: torch.Tensor, mask: torch.Tensor | None, positions: torch.Tensor) -> torch.Tensor:
        """Logits after each token, ``[n, length, vocab]``, with gradients where they are enabled."""
        kwargs = {"position_ids": positions} if self._takes_positions else {}
        return self._logits(self.model(input_ids=ids, attention_mask=mask, use_cache=False, **kwargs))

    def _logits(self, output: Any) -> torch.Tensor:
        logits: torch.Tensor | None = getattr(output, "logits", None)
        if logits is None:
            raise TypeError(
                f"model: expected one that returns logits, got {type(self.model).__name__}, which returns "
                f"{type(output).__name__}. Pass what AutoModelForCausalLM returns."
            )
        return logits


def _vocab_size(model: Any, config: Any) -> int:
    table = model.get_input_embeddings() if hasattr(model, "get_input_embeddings") else None
    size = getattr(table, "num_embeddings", None) or getattr(config, "vocab_size", None)
    if not isinstance(size, int):
        raise TypeError(f"model: the configuration of {type(model).__name__} has no vocab_size. Set it.")
    return size


def _end_ids(model: nn.Module, config: Any, tokenizer: Any) -> tuple[int, ...]:
    found: set[int] = set()
    for holder, name in (
        (getattr(model, "generation_config", None), "eos_token_id"),
        (config, "eos_token_id"),
        (tokenizer, "eos_token_id"),
    ):
        ids = getattr(holder, name, None)
        found.update([ids] if isinstance(ids, int) else ids or [])
    return tuple(sorted(found))
