"""AgentEnv: conversations of programs that own their loop, with the model behind an OpenAI-compatible address."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch

from rollwright.data.llm.chat_template import ChatTemplate
from rollwright.data.specs import Composite
from rollwright.envs.llm.agents.programs import Command, check_agent
from rollwright.envs.llm.agents.session import AgentHost
from rollwright.envs.llm.conversations import DatasetConversations
from rollwright.envs.llm.env import ConversationEnv
from rollwright.envs.llm.envs import batch_of
from rollwright.envs.llm.replies import Dialogue
from rollwright.envs.llm.sources import DatasetSource
from rollwright.envs.llm.tools.core import ToolParser
from rollwright.envs.llm.tools.parsers import parser_of


class AgentEnv(ConversationEnv):
    """Conversations of programs that call the model themselves, at an OpenAI-compatible address.

    For each row of the data a program runs, which is given an address on this machine and a key. Its requests for chat
    completions are answered by the policy of the collector; an answer is a turn, with its tokens as they were sampled.
    Make it with :meth:`from_dataloader`; collect it with :class:`~rollwright.collectors.llm.LLMCollector`, and a policy
    with an engine.

    A request whose messages begin with those of an earlier one and its answer goes on with the tokens of that sequence.
    Any other begins one: ``sequence`` of its record is the next number. Requests that come at the same time are
    answered one after another. The conversation ends with its program. Its reward is the sum of what the program
    returns, of what it posts to ``{base_url}/reward`` as ``{"reward": number}``, which belongs to the last answer, and
    of the reward functions.
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

    def _use(self, tokenizer: Any) -> None:
        host: Any = self.conversations.dialogue.environment
        host.tokenizer = tokenizer
        super()._use(tokenizer)

    @classmethod
    def from_dataloader(
        cls,
        dataloader: Any,
        agent: Callable[..., Any] | Command,
        *,
        tokenizer: Any = None,
        batch_size: int | tuple[int, ...] | torch.Size | None = None,
        repeats: int | None = None,
        group_repeats: bool = True,
        reward_functions: Any = None,
        parser: str | ToolParser = "template",
        reasoning: tuple[str, str] | None = ("<think>", "</think>"),
        ignore: Collection[str] = (),
        max_turns: int | None = 100,
        reply_timeout_s: float = 60.0,
        template_kwargs: Mapping[str, Any] | None = None,
        shuffle: bool = False,
        epochs: int | None = None,
        seed: int = 0,
        primers: Composite | None = None,
        columns: Sequence[str] = (),
        device: torch.device | str | None = None,
    ) -> AgentEnv:
        """An environment on a dataset.

        Args:
            dataloader: rows or batches of them; see :class:`DatasetSource` for all that it may be.
            agent: called for each conversation as ``agent(row=..., base_url=..., api_key=...)``, in a thread, or in an
                event loop where it is a coroutine function; returns its reward, or None. Or a :class:`Command`.
            tokenizer: of the policy's model, with a chat template; None: that of the policy.
            batch_size: programs side by side; None: the dataloader's, or 1.
            repeats: conversations for each row: a group; None: 1.
            group_repeats: the repeats of a row follow each other; False: the rows of a batch take turns.
            reward_functions: functions or :class:`Reward`, called at the end of a conversation: ``prompts`` are the
                messages of the first request, ``completions`` what the last request and its answer have beyond these.
            parser: of calls in answers to requests with ``tools``: ``"template"``, ``"xml"``, ``"json"``, or a
                :class:`ToolParser`.
            reasoning: marks of a model's reasoning, in which nothing is a call; None: there is none.
            ignore: parameters of requests that have no effect, such as ``"temperature"``: the engine's hold.
            max_turns: answers that a conversation may have; the last one truncates it. None: no limit.
            reply_timeout_s: seconds that a program may take from an answer to its next request, or to its end.
            template_kwargs: for the chat template.
            shuffle: another order in each epoch, for map-style datasets.
            epochs: how often the dataset is read; None: without an end.
            seed: of order and samples; ``set_seed`` replaces it.
            primers: specs of columns of the dataset that are observations and parts of records, as tensors.
            columns: of the dataset, that observations and records have at ``("columns", name)``, as they are.
            device: of the tensors.

        Raises:
            TypeError: ``agent`` is neither a function of ``row``, ``base_url`` and ``api_key`` nor a command.
            ValueError: an argument is out of range, the dataset is empty, or the tokenizer has no chat template.

        Example:
            >>> def agent(row, base_url, api_key):
            ...     client = openai.OpenAI(base_url=base_url, api_key=api_key)
            ...     messages = [{"role": "user", "content": row["question"]}]
            ...     answer = client.chat.completions.create(model="policy", messages=messages)
            ...     return float(answer.choices[0].message.content == row["answer"])
            >>> env = AgentEnv.from_dataloader([{"question": "2 + 2?", "answer": "4"}], agent, batch_size=32)
            >>> env.batch_size
            torch.Size([32])
            >>> env.close()
        """
        check_agent(agent)
        if isinstance(ignore, str) or not all(isinstance(name, str) for name in ignore):
            raise TypeError(f"ignore: expected names of parameters, got {ignore!r}. Pass ['temperature'], for example.")
        size = batch_of(batch_size, dataloader)
        source = DatasetSource(
            dataloader,
            repeats=1 if repeats is None else repeats,
            epochs=epochs,
            shuffle=shuffle,
            seed=seed,
            interleave=1 if group_repeats else batch_of(None, dataloader, 1),
        )
        host = AgentHost(agent, parser=parser_of(parser), reasoning=reasoning, ignored=tuple(ignore))
        conversations = DatasetConversations(
            source,
            size,
            template=template_kwargs,
            rewards=reward_functions,
            dialogue=Dialogue(host, max_turns, reply_timeout_s, opens=True),
            columns=columns,
        )
        return cls(conversations, tokenizer, primers=primers, device=device)
