"""Language models as policies: TensorDict in, TensorDict out, around an engine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import torch
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import TensorDictModuleBase

from rollwright._keys import NestedKey
from rollwright.data.entries import unchecked_td
from rollwright.data.llm.chain import TokenChain
from rollwright.data.llm.records import RecordLayout, record
from rollwright.data.llm.turns import InputMode, LayoutName, Message, Origin, Turn
from rollwright.modules.llm._rows import entry, rows_of, stacked, tokens_of, write
from rollwright.modules.llm.engine import Completion, Engine, Request, Sampling
from rollwright.modules.llm.sampling import child_seed

_MODES: tuple[InputMode, ...] = ("history", "text", "tokens")
_NOWHERE = Origin(0, 0, 0, 0, 0)
_CHATML = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@dataclass(frozen=True, slots=True)
class Keys:
    """Where a wrapper reads and writes.

    Attributes:
        input: of the prompt; None: that of the input mode.
        attention_mask: of padded tokens, False or 0 at padding.
        history, text, tokens, masks, log_probs: of the nested entries.
        seed: of the generator of each row, int64.
    """

    input: NestedKey | None = None
    attention_mask: NestedKey = "attention_mask"
    history: str = "history"
    text: str = "text"
    tokens: str = "tokens"
    masks: str = "masks"
    log_probs: str = "log_probs"
    seed: NestedKey = "seed"


class Prompt(NamedTuple):
    """What a row asks.

    Attributes:
        tokens: int64 ``[prompt]``.
        text: the same as a string, or empty.
        messages: the same as messages; none where it came as text or tokens.
    """

    tokens: torch.Tensor
    text: str
    messages: Sequence[Message]


def template_of(kwargs: Mapping[str, Any] | None, template: str | None, name: str | None) -> dict[str, Any]:
    """Arguments of the chat template of a wrapper.

    Args:
        kwargs: its ``chat_template_kwargs``.
        template: the text of a template.
        name: ``"chatml_format"``, or ``"qwen"`` for that of the tokenizer; None: no name.

    Raises:
        ValueError: the name is unknown, or there are several templates.
    """
    if name not in (None, "chatml_format", "qwen"):
        raise ValueError(
            f"chat_template_name: expected 'chatml_format' or 'qwen', got {name!r}. Pass chat_template= for another."
        )
    found = dict(kwargs or {})
    given = [found.get("chat_template"), template, _CHATML if name == "chatml_format" else None]
    texts = [text for text in given if text is not None]
    if len(texts) > 1:
        raise ValueError(
            "chat_template: expected one template, got several, of chat_template, chat_template_name and "
            "chat_template_kwargs. Pass one of them."
        )
    return {**found, "chat_template": texts[0]} if texts else found


class EngineWrapper(TensorDictModuleBase):
    """What wrappers of all engines share: reads prompts, asks the engine, and writes the entries of a record."""

    tokenizer: Any

    def __init__(
        self,
        *,
        tokenizer: Any,
        input_mode: InputMode | None,
        keys: Keys,
        record_layout: LayoutName | None,
        return_log_probs: bool,
        pad_output: bool,
        num_samples: int | None,
        inplace: bool,
        template: Mapping[str, Any],
        sampling: Sampling,
    ) -> None:
        super().__init__()
        if input_mode is not None and input_mode not in _MODES:
            raise ValueError(
                f"input_mode: expected 'history', 'text', 'tokens' or None (what there is), got {input_mode!r}."
            )
        if record_layout not in (None, "nested", "flat"):
            raise ValueError(f"record_layout: expected 'nested', 'flat' or None, got {record_layout!r}.")
        if record_layout == "flat" and input_mode == "history":
            raise ValueError("record_layout: 'flat' has no place for the messages of input_mode='history'.")
        if num_samples is not None and num_samples < 1:
            raise ValueError(f"num_samples: expected at least 1, got {num_samples}.")
        if num_samples is not None and inplace:
            raise ValueError("inplace: expected False with num_samples, whose results have a dimension more.")
        if input_mode in ("history", "text") and tokenizer is None:
            raise ValueError(f"tokenizer: input_mode={input_mode!r} needs one. Pass that of the model.")
        self.tokenizer, self.input_mode, self.keys = tokenizer, input_mode, keys
        self.record_layout, self.return_log_probs, self.pad_output = record_layout, return_log_probs, pad_output
        self.num_samples, self.inplace, self.template, self.sampling = num_samples, inplace, dict(template), sampling
        self._chains: dict[str, TokenChain] = {}

    @property
    def engine(self) -> Engine | None:
        """What generates; None where nothing is generated. Collectors use it directly."""
        raise NotImplementedError

    @property
    def layout(self) -> RecordLayout | None:
        """How collectors write records of it; None: as their environment does."""
        if self.record_layout is None:
            return None
        nested = self.record_layout == "nested"
        return RecordLayout(
            nested=nested,
            history=nested and self.input_mode in (None, "history"),
            text=self.tokenizer is not None,
            log_probs=self.return_log_probs,
        )

    def set_keys(self) -> None:
        """Set ``in_keys`` and ``out_keys``, once there is an engine or there is to be none."""
        if self.input_mode == "history":
            self._chain("history")  # a tokenizer without a chat template is an error now
        names, flat = self.keys, self.record_layout == "flat"
        read: list[Any] = []
        if self.engine is None:
            read = [names.tokens if flat else (names.tokens, "full")]
        elif self.input_mode is not None and (self.record_layout is not None or len(self._places()) == 1):
            read = [self._places()[-1 if flat else 0][2]]  # else it reads either, whichever there is
        self.in_keys = read
        self.out_keys = [names.log_probs] if self.engine is None else self._written_keys(nested=not flat)

    def _written_keys(self, nested: bool) -> list[Any]:
        names = self.keys
        if not nested:
            return [*(name for name in _FLAT if name != "log_probs" or self.return_log_probs), "seconds"]
        left_out = {
            *(() if self.input_mode in (None, "history") else ("history",)),
            *(() if self.tokenizer is not None else ("text",)),
            *(() if self.return_log_probs else ("log_probs",)),
        }
        return [*(getattr(names, name, name) for name in _NESTED if name not in left_out), "seconds"]

    def answer(self, td: TensorDictBase) -> TensorDictBase:
        """Generate a response to each row of ``td``; see the class."""
        engine = self.engine
        assert engine is not None
        rows = rows_of(td)
        nested, prompts = self._prompts(rows)
        repeats = self.num_samples or 1
        seeds = [child_seed(seed, place) for seed in self._seeds(rows) for place in range(repeats)]
        asked = [prompt for prompt in prompts for _ in range(repeats)]
        requests = [Request(object(), prompt.tokens, seed) for prompt, seed in zip(asked, seeds, strict=True)]
        completions = engine.generate(requests)
        written = []
        for prompt, completion in zip(asked, completions, strict=True):
            if completion.error is not None:
                raise completion.error
            written.append(self._record(prompt, completion, nested))
        if self.num_samples is None:
            target = td if self.inplace else td.copy()
            return write(target, written, td.batch_size, self._pad_value if self.pad_output else None)
        shape = (*td.batch_size, repeats)
        copies = [row.copy() for row in rows for _ in range(repeats)]
        if self.pad_output:
            target = cast("TensorDictBase", torch.stack(cast("Any", copies))).reshape(shape)
        else:
            target = stacked(copies, shape)
        return write(target, written, shape, self._pad_value if self.pad_output else None)

    def _prompts(self, rows: Sequence[TensorDictBase]) -> tuple[bool, list[Prompt]]:
        """Whether entries are nested, and the prompt of each row."""
        found = self._found(rows[0])
        if found is None:
            places = " or ".join(repr(key) for _, _, key in self._places())
            raise KeyError(
                f"{type(self).__name__}: found no prompt for input_mode={self.input_mode!r} in the TensorDict. "
                f"Expected {places}, got {sorted(map(str, rows[0].keys()))}."
            )
        mode, nested, key = found
        if self.record_layout is not None:
            nested = self.record_layout == "nested"
        return nested, [self._prompt(row, mode, key) for row in rows]

    def _places(self) -> list[tuple[InputMode, bool, NestedKey]]:
        """Where a prompt may stand: mode, whether it is nested, key."""
        keys, chosen = self.keys, self.input_mode
        names = {"history": keys.history, "text": keys.text, "tokens": keys.tokens}
        if keys.input is not None:
            mode: InputMode = next(known for known in _MODES if known == (chosen or "history"))
            return [(mode, not isinstance(keys.input, str), keys.input)]
        nested: list[tuple[InputMode, bool, NestedKey]] = [(mode, True, (names[mode], "prompt")) for mode in _MODES]
        flat: list[tuple[InputMode, bool, NestedKey]] = [(mode, False, names[mode]) for mode in _MODES[1:]]
        return [place for place in [*nested, *flat] if chosen in (None, place[0])]

    def _found(self, row: TensorDictBase) -> tuple[InputMode, bool, NestedKey] | None:
        for mode, nested, key in self._places():
            value = entry(row, key)
            wanted = {"history": hasattr(value, "to_chats"), "text": isinstance(value, str)}
            if wanted.get(mode, isinstance(value, torch.Tensor)):
                return mode, nested, key
        return None

    def _prompt(self, row: TensorDictBase, mode: InputMode, key: NestedKey) -> Prompt:
        names = self.keys
        if mode == "tokens":
            tokens = tokens_of(row, key, [names.attention_mask])
            assert tokens is not None
            text = "" if self.tokenizer is None else self._chain("text").decode(tokens)
            return Prompt(tokens, text, self._messages(row))
        value = entry(row, key)
        given = value if mode == "text" else value.to_chats()
        messages = self._messages(row) if mode == "text" else given
        told = entry(row, "num_messages")  # of which the tokens are that the environment keeps
        if isinstance(told, torch.Tensor) and messages and int(told) != len(messages):
            chain = self._chain("history")
            return Prompt(chain.open(messages).clone(), chain.text, messages)
        # Tokens that an environment keeps are the prompt as it was; those beside a response are of a turn before.
        if entry(row, (names.tokens, "response")) is None:
            kept = tokens_of(row, (names.tokens, "prompt"), [])
            if kept is not None and len(kept):
                text = given if mode == "text" else entry(row, (names.text, "prompt"))
                return Prompt(kept, text if isinstance(text, str) else self._chain("text").decode(kept), messages)
        chain = self._chain(mode)
        return Prompt(chain.open(given).clone(), chain.text, messages)

    def _messages(self, row: TensorDictBase) -> Sequence[Message]:
        """Those that an environment keeps beside a prompt of text or tokens; those of a turn before are none."""
        if entry(row, (self.keys.tokens, "response")) is not None:
            return ()
        history = entry(row, (self.keys.history, "prompt"))
        return history.to_chats() if hasattr(history, "to_chats") else ()

    def _chain(self, mode: InputMode) -> TokenChain:
        """Writes prompts as tokens, as collectors do."""
        if mode not in self._chains:
            ends = () if self.engine is None else self.engine.end_ids
            self._chains[mode] = TokenChain(
                self.tokenizer, self.template if mode == "history" else None, end_token_ids=ends
            )
        return self._chains[mode]

    def _seeds(self, rows: Sequence[TensorDictBase]) -> list[int]:
        given = entry(rows[0], self.keys.seed)
        if not isinstance(given, torch.Tensor):
            return torch.randint(2**63 - 1, (len(rows),)).tolist()
        return [int(row.get(self.keys.seed)) for row in rows]

    def _record(self, prompt: Prompt, completion: Completion, nested: bool) -> TensorDict:
        """The entries that an engine knows of."""
        has_text = self.tokenizer is not None
        text = self._chain("text").decode(completion.tokens) if has_text else ""
        versions = completion.versions
        turn = Turn(
            origin=_NOWHERE,
            number=0,
            sequence=0,
            prompt=prompt.messages,
            response={"role": "assistant", "content": text},
            prompt_text=prompt.text,
            response_text=text,
            tokens=torch.cat([prompt.tokens, completion.tokens]),
            num_prompt=len(prompt.tokens),
            log_probs=completion.log_probs if self.return_log_probs else None,
            log_prob_mode=self.sampling.log_prob_mode,
            versions=versions,
            version=versions[-1] if not isinstance(versions, torch.Tensor) else int(versions[-1]),
            finish_reason=completion.finish_reason,
            seconds=completion.seconds,
        )
        history = nested and bool(prompt.messages)
        layout = RecordLayout(nested=nested, history=history, text=has_text, log_probs=self.return_log_probs)
        entries = record(turn, layout)
        names = self.keys
        renamed = {name: getattr(names, name) for name in ("history", "text", "tokens", "masks", "log_probs")}
        kept = _NESTED if nested else _FLAT
        chosen = {
            (renamed.get(name, name) if nested else name): value for name, value in entries.items() if name in kept
        }
        chosen["seconds"] = entries["seconds"].select(*completion.seconds)
        result = unchecked_td(chosen)
        for name, value in completion.extras.items():
            result.set((names.tokens, name) if nested else name, value)
        return result

    def _pad_value(self, path: tuple[str, ...]) -> Any:
        if path[-1] in ("policy_version", "oldest_policy_version", "tokens_policy_version"):
            return -1
        if path[0] in (self.keys.tokens, "tokens_response"):
            pad = getattr(self.tokenizer, "pad_token_id", None)
            return 0 if pad is None else pad
        return 0

    def __reduce_ex__(self, protocol: Any) -> Any:
        if self.engine is not None:
            raise TypeError(
                f"{type(self).__name__} holds an engine, which is never copied or pickled. Pass policy_factory, a "
                "function that builds it where it is needed, in place of policy; or copy its model."
            )
        return super().__reduce_ex__(protocol)


_NESTED = (
    "history",
    "text",
    "tokens",
    "masks",
    "log_probs",
    "policy_version",
    "oldest_policy_version",
    "finish_reason",
    "log_prob_mode",
)
_FLAT = (
    "text_response",
    "tokens",
    "tokens_response",
    "tokens_policy_version",
    "attention_mask",
    "assistant_mask",
    "log_probs",
    "policy_version",
    "oldest_policy_version",
    "finish_reason",
    "log_prob_mode",
)
