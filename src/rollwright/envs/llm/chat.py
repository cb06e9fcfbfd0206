"""ChatEnv and DatasetChatEnv: conversations of several turns, as messages."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from rollwright.data.llm.chat_template import ChatTemplate
from rollwright.data.llm.turns import InputMode
from rollwright.data.specs import Composite
from rollwright.envs.llm.conversations import DatasetConversations
from rollwright.envs.llm.env import ConversationEnv
from rollwright.envs.llm.envs import batch_of
from rollwright.envs.llm.opening import PromptFormat
from rollwright.envs.llm.replies import Dialogue
from rollwright.envs.llm.sources import DatasetSource

__all__ = ["ChatEnv", "DatasetChatEnv"]


class ChatEnv(ConversationEnv):
    """Conversations of several turns about the prompts of a dataset, under nested keys.

    The root holds ``("text", "prompt")``, ``("tokens", "prompt")`` and, in history mode, ``("history", "prompt")``. A
    policy writes ``("tokens", "response")`` (or ``("text", "response")``). Tools that the answer calls run, and the
    model goes on; else the environment of the conversation replies; else the conversation is over. For all of its
    entries see :class:`ConversationEnv`. Make it with :meth:`from_dataloader`.

    Example:
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

    def __init__(
        self,
        conversations: DatasetConversations,
        tokenizer: Any = None,
        *,
        primers: Composite | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        if conversations.template is not None and tokenizer is not None:
            ChatTemplate(tokenizer, conversations.template)  # one without a chat template is an error now
        super().__init__(conversations, tokenizer, nested=True, columns=primers, device=device)

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
            primers: specs of columns of the dataset that are observations, too.
            device: of the tensors.

        Raises:
            ValueError: an argument is out of range, the dataset is empty, or the tokenizer has no chat template.
        """
        size = batch_of(batch_size, dataloader)
        source = DatasetSource(
            dataloader,
            repeats=repeats or 1,
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
            dialogue=Dialogue(environment, max_turns, reply_timeout_s, history),
        )
        return cls(conversations, tokenizer, primers=primers, device=device)


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
