"""A language model of transformers as a policy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch
from tensordict import TensorDict, TensorDictBase

from rollwright._keys import NestedKey
from rollwright.data.llm.turns import InputMode, LayoutName, LogProbMode, Version
from rollwright.errors import require
from rollwright.modules.llm._rows import entry, rows_of, tokens_of, write
from rollwright.modules.llm.causal_lm import CausalLM
from rollwright.modules.llm.distribution import TokenDistribution
from rollwright.modules.llm.engine import Engine
from rollwright.modules.llm.sampling import NO_PENALTIES, sampling_of
from rollwright.modules.llm.transformers_engine import TransformersEngine
from rollwright.modules.llm.wrapper import EngineWrapper, Keys, template_of

Side = Literal["left", "right"]  # of padding


class TransformersWrapper(EngineWrapper):
    """A causal language model of transformers: generates responses, or gives log-probabilities of given tokens.

    With ``generate=True`` it reads a prompt from each row of a TensorDict and writes what it generates: the entries of
    a record of :mod:`rollwright.data.llm`. Nested: ``("text" / "tokens", "prompt" / "response" / "full")``,
    ``("tokens", "policy_version")``, ``("masks", "all_attention_mask" / "all_assistant_mask")``,
    ``("log_probs", "response" / "full")``, and ``("history", ...)`` where the prompt is chat messages. Flat:
    ``text_response``, ``tokens`` (prompt and response), ``tokens_response``, ``tokens_policy_version``,
    ``attention_mask``, ``assistant_mask``, ``log_probs`` (of the response). And ``policy_version``, ``finish_reason``,
    ``log_prob_mode``, ``("seconds", "queue" / "generation")``. Entries are ragged.

    A row's tokens depend on its prompt and its seed only: int64 at ``"seed"``, or drawn from torch's global generator
    where there is none. Where an environment keeps the tokens of a conversation (``("tokens", "prompt")`` without a
    ``("tokens", "response")`` beside it), they are the prompt; nothing is tokenised again.

    With ``generate=False`` it reads ``("tokens", "full")`` (or flat ``"tokens"``, or text or history in full) and
    writes ``("log_probs", "full")``: of each token given those before, 0 for the first one; and
    ``("log_probs", "response")`` where ``("tokens", "response")`` says how many tokens the response has. Gradients flow
    to the model where they are enabled. See :meth:`get_dist` and :meth:`log_prob`, too.

    The engine is never copied: ``copy.deepcopy`` and ``pickle`` of a wrapper that generates are errors.
    ``state_dict()`` has the model's weights, as that of each module, and nothing of the engine.

    Args:
        model: of transformers, or the name or directory of one for ``AutoModelForCausalLM.from_pretrained``.
        tokenizer: of transformers, or a name or directory; None: that of the model where ``model`` is a name; else
            none, and prompts must be tokens.
        input_mode: what the prompt is: ``"history"``, ``"text"``, ``"tokens"``; None: what the TensorDict has, in this
            order.
        generate: generate responses; False: log-probabilities of given tokens.
        return_log_probs: write log-probabilities of generated tokens.
        log_prob_mode: ``"sampled"``: of the distribution that is sampled from, after temperature, top-k and top-p;
            ``"raw"``: of the model's.
        generate_kwargs: ``max_new_tokens`` (or ``max_tokens``; 128), ``temperature`` (1.0), ``top_k`` (all), ``top_p``
            (1.0), ``min_p``, ``repetition_penalty``, ``presence_penalty``, ``frequency_penalty``, ``do_sample`` (True;
            False: the most probable token), ``stop_token_ids``, ``stop`` (strings); see :class:`Sampling`. No others,
            and the model's ``generation_config`` counts for its end-of-sequence tokens only.
        chat_template_kwargs: arguments of the chat template: ``tools``, ``chat_template``, ``enable_thinking``, ...
        chat_template: that of ``chat_template_kwargs``.
        chat_template_name: a template by name, in its place: ``"chatml_format"``; ``"qwen"`` is the tokenizer's own.
        tokenizer_kwargs: arguments of ``AutoTokenizer.from_pretrained`` where ``tokenizer`` is a name.
        pad_output: write padded tensors (on the right; with the tokenizer's padding token, 0 for log-probabilities and
            masks, -1 for versions), in place of ragged ones.
        num_samples: responses to each prompt, along a last dimension of the batch; they share the pass over the
            prompt. None: one, without such a dimension.
        inplace: write into the TensorDict that was passed, where it can hold the entries; None: unless ``num_samples``.
        device: to move the model to; None: where it is.
        record_layout: ``"nested"`` or ``"flat"``; None: as the prompt is.
        keys: other keys to read and write.
        max_batch_size: responses in progress at most.
        max_length: tokens that prompt and response have room for; None: the positions of the model's configuration.
        policy_version: of the weights.

    Raises:
        TypeError, ValueError: an argument is of the wrong type, or has no such value.
        MissingExtraError: ``model`` is a name, and transformers is not installed.

    Example:
        >>> import torch, transformers
        >>> from tensordict import TensorDict
        >>> config = transformers.LlamaConfig(
        ...     vocab_size=32, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
        ...     eos_token_id=None,
        ... )
        >>> model = transformers.LlamaForCausalLM(config)
        >>> policy = TransformersWrapper(model, input_mode="tokens", generate_kwargs={"max_new_tokens": 4})
        >>> td = TensorDict({"tokens": {"prompt": torch.tensor([[5, 6], [7, 8]])}, "seed": torch.arange(2)}, [2])
        >>> td = policy(td)
        >>> td["tokens", "full"].shape, td["log_probs", "response"].shape
        (torch.Size([2, 6]), torch.Size([2, 4]))
        >>> trained = TransformersWrapper(model, input_mode="tokens", generate=False)
        >>> log_probs = trained.log_prob(td)
        >>> bool(torch.allclose(log_probs[:, 2:], td["log_probs", "response"], atol=1e-4)), log_probs.requires_grad
        (True, True)
    """

    def __init__(
        self,
        model: Any,
        *,
        tokenizer: Any = None,
        input_mode: InputMode | None = None,
        generate: bool = True,
        return_log_probs: bool = True,
        log_prob_mode: LogProbMode = "sampled",
        generate_kwargs: Mapping[str, Any] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        chat_template: str | None = None,
        chat_template_name: str | None = None,
        tokenizer_kwargs: Mapping[str, Any] | None = None,
        pad_output: bool = False,
        num_samples: int | None = None,
        inplace: bool | None = None,
        device: torch.device | str | None = None,
        record_layout: LayoutName | None = None,
        keys: Keys | None = None,
        max_batch_size: int = 64,
        max_length: int | None = None,
        policy_version: Version = 0,
    ) -> None:
        kwargs = dict(generate_kwargs or {})
        wanted = kwargs.pop("num_return_sequences", kwargs.pop("n", None))
        if num_samples is not None and wanted not in (None, num_samples):
            raise ValueError(f"num_samples: got {num_samples}, and {wanted} in generate_kwargs. Drop one of them.")
        if num_samples is None and wanted not in (None, 1):
            num_samples = wanted
        if not generate and not return_log_probs:
            raise ValueError("return_log_probs: expected True with generate=False, which does nothing else.")
        if isinstance(model, str):
            tokenizer = model if tokenizer is None else tokenizer
            auto = require("transformers", name="AutoModelForCausalLM", extra="llm", purpose="a model by name")
            model = auto.from_pretrained(model)
        if isinstance(tokenizer, str):
            auto = require("transformers", name="AutoTokenizer", extra="llm", purpose="a tokenizer by name")
            tokenizer = auto.from_pretrained(tokenizer, **(tokenizer_kwargs or {}))
        elif tokenizer_kwargs:
            raise ValueError("tokenizer_kwargs: expected only with the name of a tokenizer, got a tokenizer beside it.")
        if device is not None:
            model.to(device)
        super().__init__(
            tokenizer=tokenizer,
            input_mode=input_mode,
            keys=keys or Keys(),
            record_layout=record_layout,
            return_log_probs=return_log_probs,
            pad_output=pad_output,
            num_samples=num_samples,
            inplace=num_samples is None if inplace is None else inplace,
            template=template_of(chat_template_kwargs, chat_template, chat_template_name),
            sampling=sampling_of(kwargs, log_prob_mode=log_prob_mode),
        )
        if not generate and self.sampling.penalises and log_prob_mode == "sampled":
            raise ValueError(NO_PENALTIES.format("generate_kwargs"))
        self.generate = generate
        self._lm = CausalLM(model, tokenizer, max_length)
        self._engine: TransformersEngine | None = None
        if generate:
            self._engine = TransformersEngine(
                model,
                tokenizer=tokenizer,
                sampling=self.sampling,
                max_batch_size=max_batch_size,
                max_length=max_length,
                version=policy_version,
            )
        self.model = model
        self.set_keys()

    @property
    def engine(self) -> Engine | None:
        """What generates; None with ``generate=False``. Collectors use it directly."""
        return self._engine

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Generate, or give log-probabilities; see the class.

        Args:
            tensordict: of any batch size.

        Returns:
            The same TensorDict with the entries; another one with ``inplace=False``, or where ragged tensors stand at
            the root and ``tensordict`` is no lazy stack.

        Raises:
            KeyError: there is nothing to read.
            ValueError: a prompt is empty, longer than the model's positions, or holds an id outside the vocabulary.
        """
        if self.generate:
            return self.answer(tensordict)
        rows = rows_of(tensordict)
        nested, sequences = self._sequences(rows)
        tokens, mask = _padded(sequences, "right")
        log_probs = self._dist(tokens, mask).log_prob(tokens)
        names, written = self.keys, []
        for row, sequence, values in zip(rows, sequences, log_probs, strict=True):
            values = values[: len(sequence)]
            place: NestedKey = (names.tokens, "response") if nested else "tokens_response"
            response = entry(row, place)
            part = None if response is None else values[len(values) - len(response) :]
            if nested:
                inside = {"full": values} if part is None else {"full": values, "response": part}
                entries: dict[str, Any] = {names.log_probs: TensorDict(inside)}
            else:
                entries = {names.log_probs: values if part is None else part}
            written.append(TensorDict(entries))
        target = tensordict if self.inplace else tensordict.copy()
        return write(target, written, tensordict.batch_size, self._pad_value if self.pad_output else None)

    def get_dist(
        self, tensordict: TensorDictBase, *, mask_key: NestedKey | None = None, padding_side: Side = "left"
    ) -> TokenDistribution:
        """The distributions of the tokens of each row, with gradients where they are enabled.

        Args:
            tensordict: of any batch size, with tokens in full.
            mask_key: of a mask of the tokens, such as ``("masks", "all_assistant_mask")``; None: all count.
            padding_side: ``"left"`` or ``"right"``.

        Returns:
            Of batch shape ``[*batch, tokens]``. ``log_prob`` takes the tokens, padded on the same side with anything:
            ``tensordict.get(("tokens", "full"), as_padded_tensor=True, padding_side=padding_side)``.
        """
        return self._dist_of(tensordict, mask_key, padding_side)[0]

    def log_prob(
        self, tensordict: TensorDictBase, *, mask_key: NestedKey | None = None, padding_side: Side = "right"
    ) -> torch.Tensor:
        """Log-probabilities of the tokens of each row, with gradients where they are enabled.

        Args:
            tensordict: of any batch size, with tokens in full.
            mask_key: of a mask of the tokens, such as ``("masks", "all_assistant_mask")``; None: all count.
            padding_side: ``"left"`` or ``"right"``.

        Returns:
            float32 ``[*batch, tokens]``, 0 at padding, at the first token, and where the mask is False.
        """
        dist, tokens = self._dist_of(tensordict, mask_key, padding_side)
        return dist.log_prob(tokens)

    def _dist_of(
        self, td: TensorDictBase, mask_key: NestedKey | None, side: Side
    ) -> tuple[TokenDistribution, torch.Tensor]:
        if side not in ("left", "right"):
            raise ValueError(f"padding_side: expected 'left' or 'right', got {side!r}.")
        rows = rows_of(td)
        _, sequences = self._sequences(rows)
        tokens, mask = _padded(sequences, side)
        dist = self._dist(tokens, mask)
        if mask_key is not None:
            masks = [tokens_of(row, mask_key, []) for row in rows]
            if any(m is None or len(m) != len(s) for m, s in zip(masks, sequences, strict=True)):
                raise KeyError(f"mask_key: expected a mask of the size of the tokens at {mask_key!r} in each row.")
            counts, _ = _padded([m for m in masks if m is not None], side)
            dist.mask &= counts.bool().to(dist.mask.device)
        shape = (*td.batch_size, tokens.shape[-1])
        dist = TokenDistribution(dist.logits.reshape(*shape, -1), dist.mask.reshape(shape), self.sampling)
        return dist, tokens.reshape(shape)

    def _dist(self, tokens: torch.Tensor, mask: torch.Tensor) -> TokenDistribution:
        device = self._lm.device = next(self.model.parameters()).device
        tokens, mask = tokens.to(device), mask.to(device)
        positions = (mask.long().cumsum(-1) - 1).clamp_(min=0)
        padding = None if bool(mask.all()) else mask.long()
        logits = self._lm.logits(tokens, padding, positions)
        shifted = torch.cat([logits[:, :1], logits[:, :-1]], 1)  # those of a token are after the one before
        return TokenDistribution(shifted, mask & (positions > 0), self.sampling)

    def _sequences(self, rows: Sequence[TensorDictBase]) -> tuple[bool, list[torch.Tensor]]:
        """Whether entries are nested, and the tokens of each row."""
        names = self.keys
        nested_mask: NestedKey = (names.masks, "all_attention_mask")
        nested_full: NestedKey = (names.tokens, "full")
        masks = [nested_mask, names.attention_mask]
        nested = self.record_layout != "flat"
        places = [nested_full, names.tokens] if names.input is None else [names.input]
        for key in places:
            found = [tokens_of(row, key, masks) for row in rows]
            tokens = [one for one in found if one is not None]
            if len(tokens) == len(rows):
                flat = isinstance(key, str) and self.record_layout is None
                return nested and not flat, [self._checked(one, place) for place, one in enumerate(tokens)]
        if self.tokenizer is None:
            raise KeyError(
                f"TransformersWrapper: found no tokens in the TensorDict. Expected {(names.tokens, 'full')!r} or "
                f"{names.tokens!r}, got {sorted(map(str, rows[0].keys()))}."
            )
        return nested, [self._checked(self._encoded(row), place) for place, row in enumerate(rows)]

    def _encoded(self, row: TensorDictBase) -> torch.Tensor:
        history = entry(row, (self.keys.history, "full"))
        text = entry(row, (self.keys.text, "full"))
        if hasattr(history, "to_chats") and self.input_mode in (None, "history"):
            template = {**self.template, "add_generation_prompt": False}
            written = self.tokenizer.apply_chat_template(history.to_chats(), tokenize=False, **template)
            ids = self.tokenizer(written, add_special_tokens=False)["input_ids"]
            return torch.tensor(ids, dtype=torch.int64)
        if isinstance(text, str):
            return self._chain("text").open(text).clone()
        raise KeyError(
            "TransformersWrapper: found no sequence in the TensorDict. Expected tokens, text or history in full, such "
            f"as {(self.keys.tokens, 'full')!r}; got {sorted(map(str, row.keys()))}."
        )

    def _checked(self, tokens: torch.Tensor, place: int) -> torch.Tensor:
        most, vocab = self._lm.max_length, self._lm.vocab_size
        if not len(tokens) or (most is not None and len(tokens) > most):
            raise ValueError(
                f"tokens of row {place}: expected 1 to {most or 'any number of'} tokens, got {len(tokens)}."
            )
        if int(tokens.min()) < 0 or int(tokens.max()) >= vocab:
            raise ValueError(
                f"tokens of row {place}: expected ids in [0, {vocab}), got {tokens.min()} to {tokens.max()}."
            )
        return tokens


def _padded(sequences: Sequence[torch.Tensor], side: Side) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens ``[rows, longest]``, padded with 0, and which of them are no padding."""
    width = max(map(len, sequences), default=0)
    tokens = torch.zeros(len(sequences), width, dtype=torch.int64)
    mask = torch.zeros(len(sequences), width, dtype=torch.bool)
    for line, kept, sequence in zip(tokens, mask, sequences, strict=True):
        place = slice(0, len(sequence)) if side == "right" else slice(width - len(sequence), width)
        line[place], kept[place] = sequence, True
    return tokens, mask
