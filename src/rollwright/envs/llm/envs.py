"""LLMEnv: prompts of a dataset and one answer to each."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import torch

from rollwright.data.specs import Composite
from rollwright.envs.llm.conversations import DatasetConversations
from rollwright.envs.llm.env import ConversationEnv
from rollwright.envs.llm.opening import PromptFormat
from rollwright.envs.llm.sources import DatasetSource


class LLMEnv(ConversationEnv):
    """Prompts of a dataset, as they are, and one answer to each, under flat keys.

    The root holds ``text`` (with a tokenizer, or ``from_text``), ``tokens`` (int64 ``[slots, prompt]``, ragged) and
    ``attention_mask`` (ones). A policy writes ``tokens_response`` or ``text_response``; then the conversation is over.
    Make it with :meth:`from_dataloader`. For messages, tools and further turns, see :class:`ChatEnv`; for all of its
    entries see :class:`ConversationEnv`.

    Example:
        >>> def length(completions, **columns):
        ...     return [float(len(text)) for text in completions]
        >>> env = LLMEnv.from_dataloader([{"text": "one"}, {"text": "two"}], batch_size=2, reward_functions=[length])
        >>> td = env.reset()
        >>> list(td["text"])
        ['one', 'two']
        >>> td["text_response"] = ["1", "22"]
        >>> env.step(td)["next", "reward"].squeeze(-1), td["next", "done"].squeeze(-1)
        (tensor([1., 2.]), tensor([True, True]))
        >>> env.close()
    """

    def __init__(
        self,
        conversations: DatasetConversations,
        tokenizer: Any = None,
        *,
        eos_token_id: int | Collection[int] | None = None,
        primers: Composite | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        ends = () if eos_token_id is None else (eos_token_id,) if isinstance(eos_token_id, int) else eos_token_id
        super().__init__(conversations, tokenizer, nested=False, end_token_ids=ends, columns=primers, device=device)

    @classmethod
    def from_dataloader(
        cls,
        dataloader: Any,
        *,
        tokenizer: Any = None,
        from_text: bool = True,
        batch_size: int | tuple[int, ...] | torch.Size | None = None,
        repeats: int | None = None,
        group_repeats: bool = True,
        reward_functions: Any = None,
        data_key: str | None = None,
        shuffle: bool = False,
        epochs: int | None = None,
        seed: int = 0,
        eos_token_id: int | Collection[int] | None = None,
        primers: Composite | None = None,
        columns: Sequence[str] = (),
        device: torch.device | str | None = None,
        str2str: bool | None = None,
    ) -> LLMEnv:
        """An environment on a dataset.

        Args:
            dataloader: rows or batches of them; see :class:`DatasetSource` for all that it may be.
            tokenizer: of the policy's model; None: prompts have no tokens, or no text.
            from_text: the prompt is a string, ``text``; False: tokens, ``tokens`` or ``input_ids``.
            batch_size: conversations side by side; None: the dataloader's, or 1.
            repeats: conversations that begin with each prompt: a group; None: 1.
            group_repeats: the repeats of a prompt follow each other; False: the prompts of a batch take turns.
            reward_functions: functions or :class:`Reward`; the reward is their sum, or 0.
            data_key: column of the prompt.
            shuffle: another order in each epoch, for map-style datasets.
            epochs: how often the dataset is read; None: without an end.
            seed: of order and samples; ``set_seed`` replaces it.
            eos_token_id: tokens that end an answer, beside the tokenizer's.
            primers: specs of columns of the dataset that are observations and parts of records, as tensors.
            columns: of the dataset, that observations and records have at ``("columns", name)``, as they are.
            device: of the tensors.
            str2str: the same as ``from_text=True`` without a tokenizer.

        Raises:
            ValueError: an argument is out of range, the dataset is empty, or ``from_text=False`` and ``str2str``.
        """
        if str2str:
            if not from_text:
                raise ValueError("str2str: expected from_text=True with it, got False. Pass one of them.")
            tokenizer = None
        size = batch_of(batch_size, dataloader)
        source = DatasetSource(
            dataloader,
            repeats=1 if repeats is None else repeats,
            epochs=epochs,
            shuffle=shuffle,
            seed=seed,
            interleave=1 if group_repeats else batch_of(None, dataloader, size),
        )
        prompts = PromptFormat("text" if from_text else "tokens", data_key)
        conversations = DatasetConversations(source, size, prompts=prompts, rewards=reward_functions, columns=columns)
        return cls(conversations, tokenizer, eos_token_id=eos_token_id, primers=primers, device=device)


def batch_of(batch_size: Any, dataloader: Any, default: int = 1) -> int:
    """The number of conversations side by side: as given, else the batch size of the dataloader.

    Raises:
        ValueError: it is not at least 1, or of more than one dimension.
    """
    if batch_size is None:
        batch_size = getattr(dataloader, "batch_size", None) or default
    size = batch_size
    if isinstance(batch_size, (tuple, list)) and len(batch_size) <= 1:
        size = batch_size[0] if batch_size else 1
    if not isinstance(size, int) or size < 1:
        raise ValueError(f"batch_size: expected one number, at least 1, got {batch_size!r}. Pass batch_size=8.")
    return size
