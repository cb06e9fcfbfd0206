"""ChatEnv and DatasetChatEnv: conversations of several turns, as messages."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from tensordict import LazyStackedTensorDict, TensorDictBase, is_non_tensor

from rollwright.data.llm.chat_template import ChatTemplate
from rollwright.data.llm.history import History
from rollwright.data.llm.turns import InputMode
from rollwright.data.specs import Composite
from rollwright.envs.llm.conversations import DatasetConversations
from rollwright.envs.llm.core import Opening
from rollwright.envs.llm.env import ConversationEnv
from rollwright.envs.llm.envs import batch_of
from rollwright.envs.llm.opening import PromptFormat
from rollwright.envs.llm.replies import Dialogue
from rollwright.envs.llm.sources import NO_QUERY, DatasetSource, QuerySource
from rollwright.errors import EnvError


class ChatEnv(ConversationEnv):
    """Conversations of several turns, under nested keys.

    Prompts come from a dataset, with :meth:`from_dataloader`; or they are given at a reset, as ``query``: a string, a
    list of messages, or a :class:`~rollwright.data.llm.History`, for each environment. Given prompts are messages that
    the chat template writes; ``input_mode`` says which entries the environment has. Without an ``environment``, a
    conversation of given prompts goes on after each answer, until ``max_turns`` or a transform ends it: append messages
    to ``("history", "prompt")`` to answer. A collector takes the prompts of :meth:`add_queries`, each once.

    The root holds ``("text", "prompt")``, ``("tokens", "prompt")`` and, in history mode, ``("history", "prompt")``. A
    policy writes ``("tokens", "response")`` (or ``("text", "response")``). Tools that the answer calls run, and the
    model goes on; else the environment of the conversation replies; else the conversation is over. For all of its
    entries see :class:`ConversationEnv`.

    Args:
        conversations: in slots; None: prompts are given.
        tokenizer: of the policy's model; None: that of the policy, in history mode.
        batch_size: conversations side by side; None: 1. This and what follows: for given prompts.
        input_mode: ``"history"``: prompts are messages, text and tokens; ``"text"`` and ``"tokens"``: text and tokens.
        system_prompt: content of a first message.
        template_kwargs: for the chat template.
        system_role, user_role: of messages that are made of strings.
        data_key: of the prompts; None: ``"query"``.
        reward_functions: functions or :class:`Reward`, called at the end of a conversation.
        tools: functions, tools, or a :class:`Toolset`.
        environment: makes the environment of a conversation from ``{data_key: prompt}``, see :class:`Environment`.
        max_turns: answers that a conversation may have; the last one truncates it.
        primers: specs of columns of the dataset that are observations, too.
        device: of the tensors.

    Raises:
        ValueError: the tokenizer has no chat template; or there is none, and prompts are given in text or tokens mode;
            or arguments for given prompts stand beside ``conversations``.

    Example:
        >>> from tensordict import TensorDict
        >>> env = ChatEnv(batch_size=(1,), system_prompt="Be brief.")
        >>> td = env.reset(TensorDict({"query": ["2 + 2?"]}, [1]))
        >>> td["history"].prompt[0].to_chats()
        [{'role': 'system', 'content': 'Be brief.'}, {'role': 'user', 'content': '2 + 2?'}]
        >>> env.close()
        >>> class Sums:
        ...     def __init__(self, row):
        ...         self.right = row["answer"]
        ...
        ...     def reply(self, messages):
        ...         right = messages[-1]["content"] == self.right
        ...         return "No. Try again.", float(right), right
        >>> rows = [{"query": "2 + 2?", "answer": "4"}]
        >>> env = ChatEnv.from_dataloader(rows, input_mode="text", environment=Sums, max_turns=3)
        >>> td = env.reset()
        >>> td["text", "response"] = ["5"]
        >>> list(env.step(td)["next", "text", "prompt"])
        ['2 + 2?5No. Try again.']
        >>> env.close()
    """

    _data_key: str | None = None  # of environments that were saved before there was one

    def __init__(
        self,
        conversations: DatasetConversations | None = None,
        tokenizer: Any = None,
        *,
        batch_size: int | tuple[int, ...] | torch.Size | None = None,
        input_mode: InputMode = "history",
        system_prompt: str | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
        system_role: str = "system",
        user_role: str = "user",
        data_key: str | None = None,
        reward_functions: Any = None,
        tools: Any = None,
        environment: Callable[[Mapping[str, Any]], Any] | None = None,
        max_turns: int | None = None,
        primers: Composite | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        data_key = "query" if data_key is None and conversations is None else data_key
        self._data_key = data_key if conversations is None else None
        if conversations is None:
            if input_mode not in ("history", "text", "tokens"):
                raise ValueError(f"input_mode: expected 'history', 'text' or 'tokens', got {input_mode!r}.")
            if tokenizer is None and input_mode != "history":
                raise ValueError(
                    f"tokenizer: expected one with input_mode={input_mode!r}, to write prompts that are given by its "
                    "chat template, got None. Pass that of the policy's model."
                )
            conversations = DatasetConversations(
                QuerySource(),
                batch_of(batch_size, None),
                prompts=PromptFormat("history", data_key, system_prompt, system_role, user_role),
                template=template_kwargs,
                rewards=reward_functions,
                tools=tools,
                dialogue=Dialogue(environment, max_turns, goes_on=True),
            )
        elif batch_size is not None or system_prompt is not None:
            raise ValueError(
                "conversations: batch_size and system_prompt are theirs, got them beside it. Leave them out, or leave "
                "conversations out and give prompts at a reset."
            )
        if conversations.template is not None and tokenizer is not None:
            ChatTemplate(tokenizer, conversations.template)  # one without a chat template is an error now
        given = self._data_key is not None
        self.read_at_reset = () if self._data_key is None else (self._data_key,)
        super().__init__(
            conversations,
            tokenizer,
            nested=True,
            columns=primers,
            writes=input_mode if given else None,
            changes=given,
            device=device,
        )

    def reset(self, tensordict: TensorDictBase | None = None, **kwargs: Any) -> TensorDictBase:
        """Begin new conversations; ``tensordict`` may hold prompts, see the class.

        Raises:
            EnvError: there is no prompt, or one is neither a string nor messages.
        """
        has_prompts = tensordict is not None and any(key in tensordict for key in self.read_at_reset)
        if tensordict is not None and has_prompts and tensordict.batch_size == self.batch_size:
            rows = tensordict.unbind(0)  # whose prompts are of unequal lengths
            tensordict = LazyStackedTensorDict(*(row.copy() for row in rows), stack_dim=0)
        return super().reset(tensordict, **kwargs)

    def add_queries(self, queries: Iterable[Any]) -> None:
        """Add prompts, for conversations that begin without one: in a collector, or at a reset.

        Args:
            queries: strings, lists of messages, or histories. Each is asked once; a collector ends with the last one.

        Raises:
            RuntimeError: the environment has a dataset.
        """
        source = self.conversations.source
        if self._data_key is None or not isinstance(source, QuerySource):
            raise RuntimeError(
                "add_queries: this environment has a dataset. Add rows to it, or make a ChatEnv without."
            )
        source.add([{self._data_key: _as_prompt(query)} for query in queries])

    def _given(self, tensordict: TensorDictBase | None) -> list[Opening]:
        key, source = self._data_key, self.conversations.source
        if tensordict is None or key is None or key not in tensordict or not isinstance(source, QuerySource):
            return []
        prompts = self.conversations.prompts
        rows = [{key: _as_prompt(row.get(key))} for row in tensordict.unbind(0)]
        return [source.give(row, prompts.opening) for row in rows]

    def _check_data(self) -> None:
        if self._data_key is not None and self.is_over:
            raise EnvError(NO_QUERY.replace("'query'", repr(self._data_key)))
        super()._check_data()

    @classmethod
    def from_dataloader(
        cls,
        dataloader: Any,
        *,
        tokenizer: Any = None,
        input_mode: InputMode = "history",
        batch_size: int | tuple[int, ...] | torch.Size | None = None,
        system_prompt: str | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
        repeats: int | None = None,
        group_repeats: bool = False,
        reward_functions: Any = None,
        tools: Any = None,
        environment: Callable[[Mapping[str, Any]], Any] | None = None,
        max_turns: int | None = None,
        reply_timeout_s: float = 60.0,
        history: Any = "keep",
        data_key: str | None = None,
        shuffle: bool = False,
        epochs: int | None = None,
        seed: int = 0,
        primers: Composite | None = None,
        columns: Sequence[str] = (),
        device: torch.device | str | None = None,
    ) -> ChatEnv:
        """An environment on a dataset.

        Args:
            dataloader: rows or batches of them; see :class:`DatasetSource` for all that it may be.
            tokenizer: of the policy's model, with a chat template in history mode; None: that of the policy, in a
                collector and in ``rollout()``. Where there is neither, the prompt is messages, or text, alone.
            input_mode: ``"history"``: the prompt is a string or a list of messages, written by the chat template.
                ``"text"``, ``"tokens"``: it is read as it is, and replies are appended as they are.
            batch_size: conversations side by side; None: the dataloader's, or 1.
            system_prompt: content of a first message, in history mode.
            template_kwargs: for the chat template, such as ``chat_template`` and ``enable_thinking``.
            repeats: conversations that begin with each prompt: a group; None: 1.
            group_repeats: the repeats of a prompt follow each other; False: the prompts of a batch take turns.
            reward_functions: functions or :class:`Reward`, called at the end of a conversation.
            tools: functions, tools, or a :class:`Toolset`.
            environment: makes the environment of a conversation from its row, see :class:`Environment`.
            max_turns: answers that a conversation may have; the last one truncates it.
            reply_timeout_s: seconds that a reply of the environment may take.
            history: ``"keep"`` or ``"rewrite"``, see :class:`Dialogue`.
            data_key: column of the prompt.
            shuffle: another order in each epoch, for map-style datasets.
            epochs: how often the dataset is read; None: without an end.
            seed: of order and samples; ``set_seed`` replaces it.
            primers: specs of columns of the dataset that are observations and parts of records, as tensors.
            columns: of the dataset, that observations and records have at ``("columns", name)``, as they are.
            device: of the tensors.

        Raises:
            ValueError: an argument is out of range, the dataset is empty, or the tokenizer has no chat template.
        """
        size = batch_of(batch_size, dataloader)
        source = DatasetSource(
            dataloader,
            repeats=1 if repeats is None else repeats,
            epochs=epochs,
            shuffle=shuffle,
            seed=seed,
            interleave=1 if group_repeats else batch_of(None, dataloader, 1),
        )
        conversations = DatasetConversations(
            source,
            size,
            prompts=PromptFormat(input_mode, data_key, system_prompt),
            template=template_kwargs,
            rewards=reward_functions,
            tools=tools,
            dialogue=Dialogue(environment, max_turns, reply_timeout_s, history=history),
            columns=columns,
        )
        return cls(conversations, tokenizer, primers=primers, device=device)


def _as_prompt(value: Any) -> Any:
    """A string, or a list of messages, from what a TensorDict holds."""
    if isinstance(value, History):
        return [value.to_chats()] if not value.batch_dims else value.to_chats()
    if is_non_tensor(value):
        value = value.tolist()
    return (
        [dict(message) if isinstance(message, Mapping) else message for message in value]
        if isinstance(value, list)
        else value
    )


class DatasetChatEnv(ChatEnv):
    """A :class:`ChatEnv` whose constructor takes the dataset: a base for environments of one dataset.

    Args:
        dataset: rows, a path of JSON lines, or what else :class:`DatasetSource` takes.
        num_envs: conversations side by side.
        **kwargs: of :meth:`ChatEnv.from_dataloader`.

    Example:
        >>> env = DatasetChatEnv([{"query": "2 + 2?"}], num_envs=2, input_mode="text")
        >>> list(env.reset()["text", "prompt"])
        ['2 + 2?', '2 + 2?']
        >>> env.close()
    """

    def __init__(self, dataset: Any, *, num_envs: int = 1, **kwargs: Any) -> None:
        made = ChatEnv.from_dataloader(dataset, batch_size=num_envs, **{"shuffle": False, **kwargs})
        super().__init__(made.conversations, made.tokenizer, primers=kwargs.get("primers"), device=kwargs.get("device"))
