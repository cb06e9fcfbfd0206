"""A tokenizer with its chat template: messages to text, text to tokens, tokens to text."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rollwright.data.llm.codec import Codec
from rollwright.data.llm.skeleton import Skeletons
from rollwright.data.llm.turns import Message
from rollwright.data.llm.verbatim import written_verbatim
from rollwright.errors import require

_MOST_CHANGED = 64  # templates with other arguments that are kept


class ChatTemplate:
    """A tokenizer of transformers with its chat template.

    Text of messages cannot become control tokens: the special tokens of the tokenizer, and the tokens that the
    template itself writes, such as ``</tool_response>``, are ordinary text where a user's or a tool's message spells
    them. In messages of system and assistant only special tokens are.

    Args:
        tokenizer: of transformers.
        arguments: of the template: ``tools``, ``chat_template`` (text, or the name of one of the tokenizer's), and what
            the template itself knows, such as ``enable_thinking``.

    Attributes:
        tokenizer: the same.
        source: the text of the template.
        codec: text to tokens and back.
        skeletons: what it writes between messages.

    Raises:
        ValueError: there is no chat template, or it is not written in Jinja.
        MissingExtraError: transformers is not installed.
    """

    def __init__(self, tokenizer: Any, arguments: Mapping[str, Any] | None = None) -> None:
        options = dict(arguments or {})
        self._given, self._changed = dict(options), dict[str, ChatTemplate]()
        self._base: ChatTemplate = self
        tools = options.pop("tools", None)
        chosen = options.pop("chat_template", None)
        if tokenizer is None:
            raise ValueError(
                "chat messages are written as tokens by a tokenizer; got none; pass the model's (tokenizer=)"
            )
        if chosen is None and getattr(tokenizer, "chat_template", None) is None:
            raise ValueError(
                f"the tokenizer {getattr(tokenizer, 'name_or_path', '') or type(tokenizer).__name__!r} has no chat "
                "template, so that chat messages cannot be written as tokens; give one (tokenizer.chat_template = "
                "'...', or template_kwargs={'chat_template': '...'} of the environment), or use an environment of text "
                "or tokens (input_mode='text')"
            )
        self.tokenizer = tokenizer
        self.source: str = tokenizer.get_chat_template(chosen, tools)
        utilities = require("transformers.utils.chat_template_utils", extra="llm", purpose="chat templates")
        self._render: Callable[..., tuple[list[str], Any]] = utilities.render_jinja_template
        self._arguments = {**tokenizer.special_tokens_map, **options}
        self._tools = _schemas(tools, utilities)
        self.codec = Codec(tokenizer, self.source)
        self.skeletons = Skeletons(self.render, self.source, written_verbatim(self.source))
        self._check_syntax()

    def _check_syntax(self) -> None:
        jinja2 = require("jinja2", extra="llm", purpose="chat templates")
        try:
            self.render([{"role": "user", "content": "?"}])
        except ValueError as error:  # it may not accept the message
            if isinstance(error.__cause__, jinja2.TemplateSyntaxError):
                raise ValueError(
                    f"the chat template is not written in Jinja: line {error.__cause__.lineno}: {error.__cause__}; "
                    "give another one (template_kwargs={'chat_template': '...'} of the environment)"
                ) from error

    def changed(self, arguments: Mapping[str, Any]) -> ChatTemplate:
        """The same template with other arguments over those that it was given; one object for equal arguments.

        Raises:
            ValueError: the template does not accept them.
        """
        base = self._base
        if not arguments:
            return base
        name = json.dumps(arguments, sort_keys=True, default=repr)
        if name not in base._changed:
            if len(base._changed) >= _MOST_CHANGED:
                del base._changed[next(iter(base._changed))]
            found = base._changed[name] = ChatTemplate(base.tokenizer, {**base._given, **arguments})
            found._base = base
        return base._changed[name]

    def render(self, messages: Sequence[Message], add_generation_prompt: bool = True) -> str:
        """Messages as text.

        Raises:
            ValueError: the template does not accept them.
        """
        try:
            texts, _ = self._render(
                conversations=[messages],
                tools=self._tools,
                chat_template=self.source,
                add_generation_prompt=add_generation_prompt,
                **self._arguments,
            )
        except Exception as error:
            roles = ", ".join(str(message.get("role")) for message in messages)
            raise ValueError(
                f"the chat template does not accept messages with the roles {roles}: {error}; change the messages, or "
                "give another template (template_kwargs={'chat_template': '...'} of the environment)"
            ) from error
        return str(texts[0])


def _schemas(tools: Any, utilities: Any) -> list[Any] | None:
    """JSON schemas of tools, functions among them; made once."""
    return (
        None
        if tools is None
        else [tool if isinstance(tool, dict) else utilities.get_json_schema(tool) for tool in tools]
    )
