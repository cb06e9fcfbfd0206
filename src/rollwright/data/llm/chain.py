"""The tokens of a conversation, turn by turn: what the model wrote is never tokenised again."""

from __future__ import annotations

import copy
import functools
import itertools
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Literal

import torch

from rollwright.data.llm.chat_template import ChatTemplate
from rollwright.data.llm.codec import Codec
from rollwright.data.llm.content import plain_messages
from rollwright.data.llm.skeleton import Between
from rollwright.data.llm.turns import FinishReason, Message
from rollwright.data.transcript import Part, Text, Transcript

_ANSWER = "\ue000answer\ue001"  # stands where the model's answer would, to find what the template writes behind it


class TokenChain:
    """The tokens of one conversation: prompt, answer, prompt, answer, and so on.

    The prompt of turn n + 1 is the tokens of turn n, untouched, and what the template writes from the end of an
    assistant's message to the next answer::

        prompt[n + 1] == prompt[n] + answer[n] + between[n]

    ``between`` is rendered from the template, never from the model's tokens. It begins with the token that ends an
    answer, unless the model wrote that token itself: so an answer that was cut by its length is closed.

    All tokens are in one int64 tensor on the CPU that only grows. What the methods return are views of it, which stay
    valid and are never overwritten.

    Args:
        tokenizer: of transformers; None: prompts are tokens.
        template: arguments of the chat template, or a :class:`ChatTemplate`, which chains may share; None: prompts are
            texts or tokens as they are, without a template.
        history: what to do where the template writes earlier turns in another way than they were read and sampled (it
            drops their reasoning, say). ``"keep"``: the tokens stay as they were. ``"rewrite"``: a new sequence begins
            with the tokens of the whole conversation, as the template writes it.
        end_token_ids: tokens that end an answer, beside the end-of-sequence token of the tokenizer; they are not part
            of its text.
        reserve: tokens to have room for at once; more are made room for when they come.

    Attributes:
        messages: so far, the answers among them; empty without a template.
        transcript: tokens and text of the current sequence.
        sequence: number of the token sequence, from 0; it rises where a new one begins.
        rewritten: whether the template would have written an earlier turn of this sequence in another way.

    Raises:
        ValueError: the tokenizer has no chat template, or ``history`` is neither of the two.

    Example:
        >>> import torch
        >>> chain = TokenChain(None, template=None)
        >>> chain.open(torch.tensor([5, 6]))
        tensor([5, 6])
        >>> chain.answer(torch.tensor([7, 8]))
        tensor([5, 6, 7, 8])
        >>> chain.follow(torch.tensor([9]))
        tensor([5, 6, 7, 8, 9])
    """

    def __init__(
        self,
        tokenizer: Any,
        template: Mapping[str, Any] | ChatTemplate | None = None,
        *,
        history: Literal["keep", "rewrite"] = "keep",
        end_token_ids: Collection[int] = (),
        reserve: int = 512,
    ) -> None:
        if history not in ("keep", "rewrite"):
            raise ValueError(f"history must be 'keep' or 'rewrite'; got {history!r}")
        if isinstance(template, Mapping):
            template = ChatTemplate(tokenizer, template)
        self._template = template
        self._codec = template.codec if template is not None else Codec(tokenizer) if tokenizer is not None else None
        self._history = history
        end = getattr(tokenizer, "eos_token_id", None)
        self._end = frozenset(end_token_ids) | ({end} if isinstance(end, int) else set(end or ()))
        self._tokenizer = tokenizer
        self._reserve = max(reserve, 16)
        self.clear()

    def clear(self) -> None:
        """Begin again, without tokens and messages."""
        self.transcript = Transcript.reserved(self._reserve)
        self._num_prompt = 0
        self._protected: list[Message] = []  # what is rendered
        self._chat: int | None = 0  # its number, see Skeletons.number
        self._numbered = 0  # how many of its messages that is of
        self._rendered: list[str] = []  # the last prompt as the template wrote it, in pieces
        self._answered = False
        self._cut = False  # the answer has no end
        self._last: tuple[torch.Tensor, tuple[str, str]] | None = None  # decoded last
        self.messages: list[Message] = []
        self.sequence = 0
        self.rewritten = False

    def new(self, arguments: Mapping[str, Any] | None = None) -> TokenChain:
        """A chain with the same tokenizer, template and options, without tokens.

        Args:
            arguments: of the chat template, over those of the first chain; None: the same as here.

        Raises:
            ValueError: the template does not accept them, or there is none.
        """
        chain = copy.copy(self)
        if arguments is not None and self._template is not None:
            chain._template = self._template.changed(arguments)
        elif arguments:
            raise ValueError(f"arguments of a chat template need one; got {sorted(arguments)} without a template")
        chain.clear()
        return chain

    @property
    def tokens(self) -> torch.Tensor:
        """All tokens of the current sequence, int64 ``[tokens]``: a view."""
        return self.transcript.tokens(self.transcript.size)

    @property
    def text(self) -> str:
        """Of all tokens of the current sequence."""
        return self.transcript.text

    @property
    def num_prompt(self) -> int:
        """How many of them are the last prompt; an answer may follow."""
        return self._num_prompt

    def open(self, prompt: Sequence[Message] | str | torch.Tensor) -> torch.Tensor:
        """Begin a conversation.

        Args:
            prompt: messages; without a template a text (control tokens in it are control tokens) or tokens, int64
                ``[prompt]``.

        Returns:
            The first prompt, int64 ``[prompt]``: a view.

        Raises:
            ValueError: the template does not accept the messages, or the prompt is empty.
        """
        self.clear()
        if isinstance(prompt, torch.Tensor):
            if len(prompt) and (least := int(prompt.min())) < 0:
                raise ValueError(
                    f"token ids must be at least 0; got {least} in a prompt; take padding out, and use the tokenizer "
                    "that belongs to the model"
                )
            self._append(prompt, self._written(prompt))
        elif isinstance(prompt, str):
            self._append(self._codec_for("a text").encode_text(prompt), prompt)
        elif self._template is None:
            self._begin_plain(prompt)
        else:
            self.messages = plain_messages(prompt)
            self._protected = list(self._template.codec.protect(self.messages))
            self._write(self._template, self._template.render(self._protected))
        if not self.transcript.size:
            raise ValueError(
                "the prompt of a conversation must have at least one token; got none; take empty rows out of the "
                "dataset"
            )
        self._num_prompt = self.transcript.size
        return self.tokens

    def answer(
        self,
        tokens: torch.Tensor,
        finish_reason: FinishReason = FinishReason.STOP,
        message: Message | None = None,
    ) -> torch.Tensor:
        """Append what the model wrote.

        Args:
            tokens: as they were sampled, the token that ended the answer included, int64 ``[response]``.
            finish_reason: why it ended.
            message: the answer as a message, for :attr:`messages`; None: role and text.

        Returns:
            Prompt and answer, int64 ``[prompt + response]``: a view.

        Raises:
            RuntimeError: there is no prompt to answer.
        """
        if not self.transcript.size or self._answered:
            raise RuntimeError("answer() must follow open() or follow(); got an answer without a prompt")
        written, content = self._decoded(tokens)
        self._append(tokens, written)
        self._answered = True
        self._cut = finish_reason not in (FinishReason.STOP, FinishReason.TOOL)
        if self._template is not None:
            raw = {"role": "assistant", "content": content}
            self.messages.append(raw if message is None else message)
            self._protected.extend(self._template.codec.protect([raw]))
        return self.tokens

    def follow(self, messages: Sequence[Message] | str | torch.Tensor) -> torch.Tensor:
        """Append what follows an answer, to the prompt of the next turn.

        Args:
            messages: of the environment; without a template a text (as it is), tokens, or messages, whose contents are
                appended as texts without control tokens.

        Returns:
            The next prompt, int64 ``[prompt]``: a view. It extends the tokens before it, unless :attr:`sequence` rose.

        Raises:
            ValueError: the template does not accept the messages.
            RuntimeError: there is no answer to follow.
        """
        if not self._answered:
            raise RuntimeError("follow() must come after answer(); got no answer since the last prompt")
        if isinstance(messages, torch.Tensor):
            self._append(messages, self._written(messages))
        elif isinstance(messages, str) or self._template is None:
            codec = self._codec_for("a text")
            text = messages if isinstance(messages, str) else codec.protect_text(_joined(messages))
            self._append(codec.encode(text), Codec.plain(text))
        else:
            self._extend(self._template, plain_messages(messages))
        self._answered = False
        self._num_prompt = self.transcript.size
        return self.tokens

    def decode(self, tokens: torch.Tensor) -> str:
        """The text of an answer, without the token that ended it; control tokens within it are written out."""
        return self._decoded(tokens)[1]

    def state_dict(self) -> dict[str, Any]:
        """What the conversation needs to go on: its tokens, messages and texts."""
        return {**self.place(), "tokens": self.tokens.clone(), "text": self.text}

    def place(self) -> dict[str, Any]:
        """The same, as views, which stay as they are while the conversation goes on."""
        mark = self.transcript.mark()
        return {
            "tokens": mark.read(),
            "num_prompt": self._num_prompt,
            "messages": Part(self.messages, len(self.messages)),
            "protected": Part(self._protected, len(self._protected)),
            "rendered": Text(self._rendered, len(self._rendered)),
            "answered": self._answered,
            "cut": self._cut,
            "text": mark.text,
            "sequence": self.sequence,
            "rewritten": self.rewritten,
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go on with a conversation that was saved; the one in progress is dropped."""
        self.clear()
        self._append(state_dict["tokens"], str(state_dict["text"]))
        self._num_prompt = int(state_dict["num_prompt"])
        self.messages = list(state_dict["messages"])
        self._protected = list(state_dict["protected"])
        self._rendered = [str(state_dict["rendered"])]
        self._answered = bool(state_dict["answered"])
        self._cut = bool(state_dict["cut"])
        self.sequence = int(state_dict["sequence"])
        self.rewritten = bool(state_dict["rewritten"])

    def _extend(self, template: ChatTemplate, messages: Sequence[Message]) -> None:
        """Append what the template writes from the end of the answer on."""
        place = len(self._protected) - 1
        parsed = self.messages[-1]
        following = template.codec.protect(messages)
        self.messages.extend(messages)
        self._protected.extend(following)
        self._chat = functools.reduce(template.skeletons.number, self._protected[self._numbered :], self._chat)
        self._numbered = len(self._protected)
        known = template.skeletons.between(self._chat, self._protected, place)
        if known is None:
            between = self._rendered_between(template, place, parsed)
        elif known.unchanged or self.rewritten or self._history == "keep":
            between = known.text
            self.rewritten |= not known.unchanged
            if not self.rewritten:
                self._rendered += self._protected[place]["content"], between
        else:
            between = None
        if between is None:
            self._rewrite(template, template.render(self._protected))
        else:
            self._append_between(template, between)

    def _rendered_between(self, template: ChatTemplate, place: int, parsed: Message) -> str | None:
        """The same, rendered; None: a new sequence begins."""
        whole = self._protected
        if not self.rewritten:
            expected = "".join([*self._rendered, whole[place]["content"]])
            rendered = self._try(template, whole)
            if rendered is not None and rendered.startswith(expected):
                self._rendered = [rendered]
                between = Between(rendered[len(expected) :], True)
                template.skeletons.learn(self._chat, whole, place, between)
                return between.text
            if rendered is not None and self._history == "rewrite":
                return None
            self.rewritten = True
        between = Between(_between(template, whole, place, parsed), False)
        template.skeletons.learn(self._chat, whole, place, between)
        return between.text

    @staticmethod
    def _try(template: ChatTemplate, messages: Sequence[Message]) -> str | None:
        try:
            return template.render(messages)
        except ValueError:  # it may ask for the tool calls of the answer as data
            return None

    def _append_between(self, template: ChatTemplate, between: str) -> None:
        tokens = template.codec.encode(between)
        last = int(self.tokens[-1])
        ended = not self._cut or last in self._end or template.codec.is_control(last)
        if ended and tokens and tokens[0] == last:  # the model wrote the end itself
            end = template.codec.decode(tokens[:1])
            if between.startswith(end):
                tokens, between = tokens[1:], between[len(end) :]
        self._append(tokens, Codec.plain(between))

    def _rewrite(self, template: ChatTemplate, rendered: str) -> None:
        before, self.transcript = self.transcript, Transcript.reserved(self._reserve)
        self.transcript.messages.extend(before.messages)
        self._write(template, rendered)
        self.sequence += 1

    def _write(self, template: ChatTemplate, rendered: str) -> None:
        """Append a prompt as the template wrote it."""
        self._append(template.codec.encode(rendered), Codec.plain(rendered))
        self._rendered = [rendered]

    def _decoded(self, tokens: torch.Tensor) -> tuple[str, str]:
        """The text of an answer with the token that ended it, and without; that of the last one is kept."""
        if self._last is None or self._last[0] is not tokens:
            ids = tokens.tolist()
            written = self._codec.decode(ids) if self._codec is not None else ""
            content = written
            if ids and ids[-1] in self._end and self._codec is not None:
                content = self._codec.decode(ids[:-1])
            self._last = tokens, (written, content)
        return self._last[1]

    def _written(self, tokens: torch.Tensor) -> str:
        return self._codec.decode(tokens.tolist()) if self._codec is not None else ""

    def _begin_plain(self, messages: Sequence[Message]) -> None:
        codec = self._codec_for("a text")
        text = codec.protect_text(_joined(messages))
        self._append(codec.encode(text), Codec.plain(text))

    def _codec_for(self, what: str) -> Codec:
        if self._codec is None:
            raise ValueError(
                f"a prompt without a tokenizer must be tokens, int64 [prompt]; got {what}; give a tokenizer"
            )
        return self._codec

    def _append(self, tokens: torch.Tensor | list[int], text: str) -> None:
        self.transcript.append(tokens)
        self.transcript.texts.append(text)


def _joined(messages: Sequence[Message]) -> str:
    return "".join(str(message.get("content") or "") for message in plain_messages(messages))


def _between(template: ChatTemplate, messages: Sequence[Message], place: int, parsed: Message) -> str:
    """What the template writes behind the answer ``messages[place]``: found by a text that stands for the answer."""
    stand_in = {"role": "assistant", "content": _ANSWER}
    try:
        return _behind(template, template.render([*messages[:place], stand_in, *messages[place + 1 :]]))
    except ValueError:
        called = _with_calls([*messages[:place], parsed, *messages[place + 1 :]])
        if not called[place].get("tool_calls"):
            raise
    # Tools' results are accepted behind the tool calls only: what follows the end of such an answer is the same.
    end = _behind(template, template.render([*called[:place], stand_in], add_generation_prompt=False))
    answered = template.codec.protect(called[: place + 1])
    before = template.render(answered, add_generation_prompt=False)
    after = template.render([*answered, *messages[place + 1 :]])
    if not after.startswith(before):
        raise ValueError(
            "the chat template writes an answer in another way when messages follow it, and its end cannot be found; "
            "give another template (template_kwargs={'chat_template': '...'} of the environment)"
        )
    return end + after[len(before) :]


def _with_calls(messages: Sequence[Message]) -> list[Message]:
    """Messages whose answers have a call for each result of a tool: those that they have as text alone are made up."""
    found: list[Message] = []
    for place, message in enumerate(messages):
        results = list(itertools.takewhile(lambda each: each.get("role") == "tool", messages[place + 1 :]))
        calls = list(message.get("tool_calls") or ())
        if message.get("role") == "assistant" and len(calls) < len(results):
            for result in results[len(calls) :]:
                function = {"name": result.get("name", "tool"), "arguments": {}}
                calls.append({"id": result.get("tool_call_id", "call"), "type": "function", "function": function})
            message = {**message, "tool_calls": calls}
        found.append(message)
    return found


def _behind(template: ChatTemplate, rendered: str) -> str:
    _, found, behind = rendered.rpartition(_ANSWER)
    if not found:
        raise ValueError(
            "the chat template does not write the content of an assistant's message, so that the end of an answer "
            f"cannot be found; give another one (template_kwargs={{'chat_template': "
            f"'...'}} of the environment); got {template.source[:80]!r}"
        )
    return behind
