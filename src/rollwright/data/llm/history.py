"""Chat histories as tensor classes: messages of conversations, of equal or unequal lengths."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from tensordict import LazyStackedTensorDict, NonTensorData, NonTensorStack, TensorClass, lazy_stack

from rollwright._keys import NestedKey
from rollwright.data.entries import unchecked_td
from rollwright.data.llm.content import plain_messages, text_of
from rollwright.data.llm.parsing import messages_of
from rollwright.data.llm.turns import Message
from rollwright.data.specs import Composite, NonTensor

__all__ = ["ChatHistory", "History", "message_columns"]

_OPTIONAL = ("tool_calls", "tool_call_id", "tool_responses", "name", "reasoning_content")
_FIELDS = ("role", "content", *_OPTIONAL, "is_complete")
_Columns = dict[str, list[NonTensorData]]
_NoCast: Any = TensorClass["nocast"]  # type: ignore[misc]


class History(_NoCast):  # type: ignore[misc]
    """Chat messages: one, a chat ``[messages]``, or chats ``[batch, messages]`` (lazily stacked: of unequal lengths).

    Attributes:
        role: who speaks: ``"system"``, ``"user"``, ``"assistant"``, ``"tool"``.
        content: what is said: a string. Parts of text (``[{"type": "text", "text": ...}]``) are joined to one where a
            history is made or read; others (images) are refused.
        is_complete: False for an answer that was cut by its length; None: all messages are complete.
        tool_calls: of an assistant's message: a list of dictionaries; None where there are none.
        tool_responses: results of tools, where they are apart from ``content``.
        tool_call_id: which call a tool's message answers.
        name: of the speaker or the tool.
        reasoning_content: reasoning that was taken out of ``content``.

    Example:
        >>> history = History.from_chats([{"role": "user", "content": "2 + 3?"}, {"role": "assistant", "content": "5"}])
        >>> history.batch_size, list(history.role)
        (torch.Size([2]), ['user', 'assistant'])
        >>> history.append(History(role="user", content="Sure?", batch_size=())).to_chats()[-1]
        {'role': 'user', 'content': 'Sure?'}
    """

    role: Any
    content: Any
    is_complete: Any = None
    tool_calls: Any = None
    tool_responses: Any = None
    tool_call_id: Any = None
    name: Any = None
    reasoning_content: Any = None

    @classmethod
    def from_chats(cls, chats: Sequence[Any]) -> History:
        """A history from messages.

        Args:
            chats: the messages of a chat, or chats, at any depth.

        Returns:
            Of batch size ``[messages]`` or ``[chats, messages]``; chats are stacked lazily, and may be of unequal
            lengths.

        Raises:
            TypeError: something is no message.
            ValueError: a message has no role, a key that histories do not know, or content that is no text.
        """
        if not isinstance(chats, Sequence) or isinstance(chats, str):
            raise TypeError(f"chats must be a list of messages, or of chats; got {type(chats).__name__}")
        if not chats or isinstance(chats[0], Mapping):
            return cls.of_columns(message_columns(chats), 0, len(chats))
        stacked: History = lazy_stack([cls.from_chats(chat) for chat in chats])
        return stacked

    @classmethod
    def from_text(
        cls,
        text: str | Sequence[str],
        chat_template_name: str | None = None,
        chat_template: str | None = None,
        tokenizer: Any = None,
    ) -> History:
        r"""A history from text that a chat template has written.

        Args:
            text: of a chat, or of several chats.
            chat_template_name: ``"chatml_format"`` or ``"qwen"``: ``<|im_start|>role``, content, ``<|im_end|>``; the
                default.
            chat_template: the text of another template.
            tokenizer: of transformers, whose chat template is to be used.

        Returns:
            Of batch size ``[messages]`` or ``[chats, messages]``. ``is_complete`` is False for a message whose end is
            missing. Tool calls are part of the content.

        Raises:
            ValueError: the text is not of that template.

        Example:
            >>> text = "<|im_start|>user\n2 + 3?<|im_end|>\n<|im_start|>assistant\n5"
            >>> history = History.from_text(text)
            >>> history.to_chats()[-1]
            {'role': 'assistant', 'content': '5', 'is_complete': False}
        """
        if isinstance(text, str):
            return cls.from_chats(
                messages_of(text, name=chat_template_name, template=chat_template, tokenizer=tokenizer)
            )
        each = [cls.from_text(one, chat_template_name, chat_template, tokenizer) for one in text]
        stacked: History = lazy_stack(each)
        return stacked

    @classmethod
    def of_columns(cls, columns: _Columns, start: int, stop: int) -> History:
        """The messages ``start`` to ``stop`` of :func:`message_columns`; histories may share them."""
        batch = torch.Size((stop - start,))
        source: Any = {
            key: _stack(values[start:stop])
            for key, values in columns.items()
            if key in ("role", "content") or stop > start
        }
        history: History = cls._from_tensordict(unchecked_td(source, batch))
        return history

    @classmethod
    def default_spec(cls, shape: Sequence[int] = (-1,)) -> Composite:
        """Spec of a history; ``shape`` is its batch size, -1 where it varies. Its samples are histories."""
        size = torch.Size(shape)
        return _SpecOf(
            History,
            {
                "role": NonTensor(size, example_data="user", batched=True),
                "content": NonTensor(size, example_data="", batched=True),
            },
            shape=size,
        )

    def to_chats(self) -> Any:
        """The messages as dictionaries: one, a list of them, or a list of lists, as :meth:`from_chats` takes them."""
        if not self.batch_dims:
            return _message(self)
        data = self._tensordict
        if self.batch_dims > 1 or isinstance(data, LazyStackedTensorDict):
            return [part.to_chats() for part in self.unbind(0)]
        columns = {key: value.tolist() for key, value in data.items()}
        return [_clean({key: column[row] for key, column in columns.items()}) for row in range(self.batch_size[0])]

    def append(self, history: History, *, inplace: bool = True, dim: int = -1) -> History:
        """Add one message at the end.

        Args:
            history: the message, of one batch dimension less.
            inplace: change this history; False: leave it, and return another.
            dim: dimension of the messages.

        Returns:
            The history with the message.
        """
        place = self._dimension(dim)
        if history.batch_dims != self.batch_dims - 1:
            raise ValueError(
                f"history must have {self.batch_dims - 1} batch dimensions, one less than this one; got "
                f"{history.batch_dims}; use extend() for several messages"
            )
        return self.extend(history.unsqueeze(place), inplace=inplace, dim=dim)

    def extend(self, history: History, *, inplace: bool = True, dim: int = -1) -> History:
        """Add messages at the end.

        Args:
            history: the messages, of as many batch dimensions.
            inplace: change this history; False: leave it, and return another.
            dim: dimension of the messages.

        Returns:
            The history with the messages.
        """
        place = self._dimension(dim)
        if history.batch_dims != self.batch_dims:
            raise ValueError(
                f"history must have {self.batch_dims} batch dimensions, as this one; got {history.batch_dims}; use "
                "append() for one message"
            )
        result = _joined(self, history, place)
        if not inplace:
            return result
        self.__dict__["_tensordict"] = result._tensordict
        return self

    def apply_chat_template(
        self,
        *,
        tokenizer: Any,
        add_generation_prompt: bool = True,
        tools: Any = None,
        tokenize: bool = False,
        chat_template: str | None = None,
        **kwargs: Any,
    ) -> Any:
        """Write the messages by a chat template.

        Args:
            tokenizer: of transformers.
            add_generation_prompt: end where an assistant's answer begins.
            tools: schemas or functions, for the template.
            tokenize: return tokens instead of text.
            chat_template: instead of the tokenizer's own.
            **kwargs: passed on to the tokenizer's method of this name.

        Returns:
            Text, or what the tokenizer returns for ``tokenize=True``; a list of it for a batch of chats.

        Raises:
            ValueError: there is no chat template.
        """
        chats = self.to_chats()
        return tokenizer.apply_chat_template(
            [chats] if isinstance(chats, Mapping) else chats,
            add_generation_prompt=add_generation_prompt,
            tools=tools,
            tokenize=tokenize,
            chat_template=chat_template,
            **kwargs,
        )

    def _dimension(self, dim: int) -> int:
        place = dim + self.batch_dims if dim < 0 else dim
        if not 0 <= place < self.batch_dims:
            raise ValueError(f"dim must be a batch dimension of the history, of {self.batch_dims}; got {dim}")
        return place


class ChatHistory(_NoCast):  # type: ignore[misc]
    """What a model read and wrote in a turn.

    Attributes:
        prompt: the messages that it read.
        response: the message that it wrote, ``[1]``.
        full: both.

    Example:
        >>> prompt = History.from_chats([{"role": "user", "content": "2 + 3?"}])
        >>> chat = ChatHistory(prompt=prompt, batch_size=())
        >>> chat.prompt.to_chats(), chat.response
        ([{'role': 'user', 'content': '2 + 3?'}], None)
    """

    prompt: Any = None
    response: Any = None
    full: Any = None

    @classmethod
    def of(cls, histories: dict[str, History]) -> ChatHistory:
        """Of batch size ``[]``, from histories by name; fields that are not given are not in it."""
        made: ChatHistory = cls._from_tensordict(unchecked_td(histories, nested=False))
        return made

    @classmethod
    def default_spec(cls, shape: Sequence[int] = ()) -> Composite:
        """Spec of a chat history; ``shape`` is its batch size, without the dimension of the messages.

        Its samples are chat histories.
        """
        size = torch.Size(shape)
        return _SpecOf(
            ChatHistory,
            {key: History.default_spec((*size, -1)) for key in ("prompt", "response", "full")},
            shape=size,
        )


class _SpecOf(Composite):
    """A Composite whose samples are of a tensor class.

    Args:
        kind: the tensor class.
        specs: of its fields.
        shape: batch size.
    """

    def __init__(self, kind: Any, specs: Mapping[str, Any], *, shape: torch.Size) -> None:
        super().__init__(specs, shape=shape)
        self.kind = kind

    def _sample(self, shape: Any, draw: Any) -> Any:
        return self.kind.from_tensordict(super()._sample(shape, draw))

    def is_in(self, val: Any) -> bool:
        """Whether every entry is there and lies in its spec; other entries of ``val`` do not matter."""
        return super().is_in(val.to_tensordict(retain_none=False) if isinstance(val, self.kind) else val)

    def assert_is_in(self, val: Any, key: NestedKey | None = None) -> None:
        """Raise :class:`SpecError` that names the first entry that is missing or not in its spec."""
        super().assert_is_in(val.to_tensordict(retain_none=False) if isinstance(val, self.kind) else val, key)


def message_columns(messages: Iterable[Message]) -> _Columns:
    """The fields of messages, one list for each field that one of them has; see :meth:`History.of_columns`.

    Raises:
        TypeError: something is no message.
        ValueError: a message has no role, a key that histories do not know, or content that is no text.
    """
    rows = plain_messages(messages)
    used = {"role", "content"}
    for row in rows:
        if not isinstance(row, Mapping):
            raise TypeError(f"a message must be a mapping with the keys role and content; got {row!r}")
        if "role" not in row:
            raise ValueError(f"a message must have the key 'role'; got the keys {', '.join(map(repr, row))}")
        used.update(key for key, value in row.items() if value is not None)
    unknown = used.difference(_FIELDS)
    if unknown:
        raise ValueError(f"messages may have the keys {', '.join(_FIELDS)}; got {', '.join(sorted(unknown))}")
    columns: _Columns = {}
    for key in _FIELDS:
        if key in used:
            default = True if key == "is_complete" else "" if key == "content" else None
            columns[key] = cells([default if (value := row.get(key)) is None else value for row in rows])
    return columns


def cells(values: Sequence[Any]) -> list[NonTensorData]:
    """Values as entries of TensorDicts of batch size ``[]``; strings are wrapped together, which costs half."""
    if values and all(type(value) is str for value in values):
        return list(NonTensorStack(*values).tensordicts)
    return [NonTensorData(value) for value in values]


def _stack(cells: list[NonTensorData]) -> NonTensorStack:
    return NonTensorStack(*cells) if cells else NonTensorStack(batch_size=(0,))


def _message(history: History) -> dict[str, Any]:
    data = history._tensordict
    return _clean({key: _plain(data.get(key)) for key in data.keys()})  # noqa: SIM118


def _plain(value: Any) -> Any:
    return value.tolist() if isinstance(value, NonTensorStack) else getattr(value, "data", value)


def _clean(row: dict[str, Any]) -> dict[str, Any]:
    """A message without the fields that say nothing."""
    if isinstance(row.get("content"), list | tuple):
        row["content"] = text_of(row["content"])
    return {
        key: list(value) if key == "tool_calls" else value
        for key in _FIELDS
        if (value := row.get(key)) is not None and not (key == "is_complete" and value is True)
    }


def _joined(first: History, second: History, dim: int) -> History:
    """The elements of both along a batch dimension."""
    stacked: History
    if first.batch_dims == 1:
        columns = message_columns([*first.to_chats(), *second.to_chats()])
        return History.of_columns(columns, 0, first.batch_size[0] + second.batch_size[0])
    if dim == 0:
        stacked = lazy_stack([*first.unbind(0), *second.unbind(0)])
    else:  # of unequal lengths, perhaps
        pairs = zip(first.unbind(0), second.unbind(0), strict=True)
        stacked = lazy_stack([_joined(one, two, dim - 1) for one, two in pairs])
    return stacked
