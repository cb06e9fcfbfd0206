"""Turns as TensorDicts: one record a turn, nested or flat."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from tensordict import LazyStackedTensorDict, NonTensorData, TensorDict

from rollwright._keys import NestedKey
from rollwright.data.llm.history import ChatHistory, History, cells, message_columns
from rollwright.data.llm.turns import Turn
from rollwright.data.unchecked import unchecked_td

STAGES = ("queue", "generation", "tool", "reward")
_NUMBERS = ("group_id", "repeat", "prompt_index", "epoch", "turn", "sequence")
_BATCH = torch.Size(())
_Entries = dict[str, Any]


@dataclass(frozen=True, slots=True)
class RecordLayout:
    """Which entries a record has, and under which keys.

    Attributes:
        nested: ``("text", "prompt")``, ``("tokens", "response")``, ``("masks", "all_assistant_mask")`` and so on.
            False: ``text``, ``text_response``, ``tokens`` (prompt and response), ``tokens_response``,
            ``attention_mask``, ``assistant_mask``; ``log_probs`` and
            ``tokens_policy_version`` of the response.
        history: ``("history", "prompt" / "response" / "full")``: the messages; nested records only.
        text: prompt and response as strings.
        log_probs: of the response, where the engine gave them.

    Raises:
        ValueError: a flat record with messages.
    """

    nested: bool = True
    history: bool = False
    text: bool = True
    log_probs: bool = True

    def __post_init__(self) -> None:
        if self.history and not self.nested:
            raise ValueError(
                "history=True needs nested=True: a flat record has no place for messages; got nested=False"
            )


def record(turn: Turn, layout: RecordLayout, traj_id: int | None = None) -> TensorDict:
    """The record of a turn, of batch size ``[]``.

    Tokens and versions are views of those of the turn. The log-probabilities of the response are a view of
    ``("log_probs", "full")``, into which they are copied, and which is 0 elsewhere. The masks are bool ``[tokens]``:
    ``all_assistant_mask`` is True on the tokens that were sampled in this turn, and on nothing else; on none where its
    conversation has failed.

    ``("next", ...)`` holds the prompt of the next turn (text and tokens are empty where there is none; the history has
    the messages that ended the conversation), ``reward`` (float32 ``[1]``, or ``[response, 1]``, one for each
    token), ``done``, ``terminated`` and ``truncated`` (bool ``[1]``).

    Args:
        turn: of a conversation.
        layout: which entries, and under which keys.
        traj_id: id of the conversation, for ``("collector", "traj_ids")``.

    Example:
        >>> import torch
        >>> from rollwright.data.llm import FinishReason, Origin, Turn
        >>> origin = Origin(index=0, epoch=0, repeat=0, group=0, seed=0)
        >>> answer = {"role": "assistant", "content": "5"}
        >>> turn = Turn(
        ...     origin, 0, 0, [], answer, "2 + 3 = ", "5", torch.tensor([4, 5, 6]), 2, torch.tensor([-0.5]), "raw",
        ...     torch.tensor([1]), 1, FinishReason.STOP, reward=1.0, terminated=True,
        ... )
        >>> td = record(turn, RecordLayout())
        >>> td["text", "response"], td["tokens", "response"], td["masks", "all_assistant_mask"]
        ('5', tensor([6]), tensor([False, False,  True]))
        >>> td["next", "reward"], td["next", "done"]
        (tensor([1.]), tensor([True]))
    """
    strings = [str(turn.finish_reason), turn.log_prob_mode]
    if layout.text:
        strings += [turn.prompt_text, turn.response_text, turn.next_prompt_text]
        if layout.nested:
            strings.append(turn.prompt_text + turn.response_text)
    finish_reason, log_prob_mode, *texts = cells(strings)
    entries, following = (_nested if layout.nested else _flat)(turn, layout, texts)
    start, terminated, truncated, done = _flags(turn)
    *seconds, reward = _floats(turn)
    following |= {"reward": reward, "done": done, "terminated": terminated, "truncated": truncated}
    entries |= {"done": start[0], "terminated": start[1], "truncated": start[2], "next": _td(following)}
    origin = turn.origin
    numbers = [origin.group, origin.repeat, origin.index, origin.epoch, turn.number, turn.sequence]
    version = turn.version
    if isinstance(version, int):
        numbers.append(version)
    else:
        entries["policy_version"] = NonTensorData(str(version))
    if traj_id is not None:
        numbers.append(traj_id)
    values = torch.from_numpy(np.array(numbers, np.int64)).unbind()  # NumPy reads a list in a third of the time
    entries.update(zip(_NUMBERS, values, strict=False))
    if isinstance(version, int):
        entries["policy_version"] = values[len(_NUMBERS)]
    if traj_id is not None:
        entries["collector"] = _td({"traj_ids": values[-1]})
    entries["seconds"] = _td(dict(zip(STAGES, seconds, strict=True)))
    entries["finish_reason"] = finish_reason
    entries["log_prob_mode"] = log_prob_mode
    result = _td(entries)
    for key, value in turn.extras.items():
        _set(result, key, value)
    return result


def records(
    rows: Sequence[Sequence[Turn]],
    layout: RecordLayout,
    traj_ids: Sequence[int] | None = None,
) -> LazyStackedTensorDict:
    """The records of turns, lazily stacked: ``[rows, turns]``.

    Rows of fewer turns are filled up with :func:`empty_record`; ``("collector", "mask")`` is then True on turns.

    Args:
        rows: the turns of each row.
        layout: which entries, and under which keys.
        traj_ids: id of the conversation of each row, for ``("collector", "traj_ids")``.

    Raises:
        ValueError: there are no turns.
    """
    length = max(map(len, rows), default=0)
    if not length:
        raise ValueError(f"rows must hold at least one turn; got {len(rows)} rows without turns")
    ids: Sequence[int | None] = [None] * len(rows) if traj_ids is None else traj_ids
    table = [[record(turn, layout, row_id) for turn in row] for row, row_id in zip(rows, ids, strict=True)]
    if any(len(row) < length for row in rows):
        like = next(row[0] for row in table if row)
        for row in table:
            taken = len(row)
            row.extend(empty_record(like) for _ in range(length - taken))
            for place, one in enumerate(row):
                one["collector", "mask"] = torch.tensor(place < taken)
    return stack_records(table)


def stack_records(table: Sequence[Sequence[TensorDict]]) -> LazyStackedTensorDict:
    """Records ``[rows][turns]`` as a lazy stack ``[rows, turns]``, stacked along turns."""
    columns = [LazyStackedTensorDict(*column, stack_dim=0) for column in zip(*table, strict=True)]
    return LazyStackedTensorDict(*columns, stack_dim=1)


def empty_record(like: TensorDict) -> TensorDict:
    """A record of no turn, with the entries of ``like``: text and ragged tensors are empty, numbers 0, flags False.

    Args:
        like: a record, of batch size ``[]``.
    """
    return _td({key: _emptied(key, value) for key, value in like.items()})


def _emptied(key: str, value: Any) -> Any:
    if isinstance(value, History):
        return History.from_chats([])
    if isinstance(value, ChatHistory):
        names = value.keys()
        return ChatHistory.of({name: History.from_chats([]) for name in names})
    if isinstance(value, TensorDict):
        return empty_record(value)
    if isinstance(value, torch.Tensor):
        flag = value.dtype == torch.bool and value.shape == (1,) and key in ("done", "terminated", "truncated")
        if not value.ndim or flag or (key == "reward" and value.shape == (1,)):
            return torch.zeros_like(value)
        return value.new_zeros((0, *value.shape[1:]))
    data = value.data
    return NonTensorData("" if isinstance(data, str) else type(data)() if isinstance(data, list | dict) else None)


def _nested(turn: Turn, layout: RecordLayout, texts: Sequence[NonTensorData]) -> tuple[_Entries, _Entries]:
    tokens, split = turn.tokens, turn.num_prompt
    size = tokens.shape[0]
    prompt, response = tokens.split_with_sizes((split, size - split))
    entries: _Entries = {}
    following: _Entries = {}
    if layout.history:
        entries["history"], following["history"] = _histories(turn)
    if layout.text:
        entries["text"] = _td({"prompt": texts[0], "response": texts[1], "full": texts[3]})
        following["text"] = _td({"prompt": texts[2]})
    entries["tokens"] = _td({"prompt": prompt, "response": response, "full": tokens, "policy_version": _versions(turn)})
    following["tokens"] = _td({"prompt": _next_prompt(turn)})
    if layout.log_probs and turn.log_probs is not None:
        full = turn.log_probs.new_zeros(size)
        part = full[split:]
        part.copy_(turn.log_probs)
        entries["log_probs"] = _td({"response": part, "full": full})
    attention, assistant = _masks(size, size if turn.masked else split)
    entries["masks"] = _td({"all_attention_mask": attention, "all_assistant_mask": assistant})
    return entries, following


def _flat(turn: Turn, layout: RecordLayout, texts: Sequence[NonTensorData]) -> tuple[_Entries, _Entries]:
    tokens, split = turn.tokens, turn.num_prompt
    size = tokens.shape[0]
    _, assistant = _masks(size, size if turn.masked else split)
    entries: _Entries = {
        "tokens": tokens,
        "tokens_response": tokens[split:],
        "tokens_policy_version": _versions(turn),
        "attention_mask": torch.ones(size, dtype=torch.int64),
        "assistant_mask": assistant,
    }
    following: _Entries = {"tokens": _next_prompt(turn)}
    if layout.text:
        entries["text"], entries["text_response"], following["text"] = texts
    if layout.log_probs and turn.log_probs is not None:
        entries["log_probs"] = turn.log_probs
    return entries, following


def _histories(turn: Turn) -> tuple[ChatHistory, ChatHistory]:
    prompt = len(turn.prompt)
    columns = message_columns([*turn.prompt, turn.response, *turn.added])
    end = prompt + 1 + len(turn.added)
    full = History.of_columns(columns, 0, prompt + 1)
    now = {
        "prompt": History.of_columns(columns, 0, prompt),
        "response": History.of_columns(columns, prompt, prompt + 1),
        "full": full,
    }
    then = {"prompt": History.of_columns(columns, 0, end)}
    if turn.next_messages is not None:
        others = message_columns(turn.next_messages)
        then = {"prompt": History.of_columns(others, 0, len(turn.next_messages))}
    return ChatHistory.of(now), ChatHistory.of(then)


def _masks(size: int, split: int) -> tuple[torch.Tensor, torch.Tensor]:
    both = np.ones((2, size), np.bool_)
    both[1, :split] = False
    attention, assistant = torch.from_numpy(both).unbind()
    return attention, assistant


def _flags(turn: Turn) -> tuple[tuple[torch.Tensor, ...], torch.Tensor, torch.Tensor, torch.Tensor]:
    """done, terminated and truncated before the turn, and those after it."""
    values = [[False], [False], [False], [turn.terminated], [turn.truncated], [turn.terminated or turn.truncated]]
    flags = torch.from_numpy(np.array(values, np.bool_)).unbind()
    return flags[:3], flags[3], flags[4], flags[5]


def _floats(turn: Turn) -> tuple[torch.Tensor, ...]:
    """Seconds of each stage, and the reward."""
    reward, seconds = turn.reward, turn.seconds
    per_token = isinstance(reward, torch.Tensor) and reward.ndim > 0
    values = [seconds.get(stage, 0.0) for stage in STAGES]
    floats = torch.from_numpy(np.array([*values, 0.0 if per_token else float(reward)], np.float32))
    last = reward.to(torch.float32).unsqueeze(-1) if isinstance(reward, torch.Tensor) and per_token else floats[-1:]
    return (*floats[:-1].unbind(), last)


def _versions(turn: Turn) -> Any:
    return turn.versions if isinstance(turn.versions, torch.Tensor) else NonTensorData(list(turn.versions))


def _next_prompt(turn: Turn) -> torch.Tensor:
    return turn.tokens[:0] if turn.next_prompt is None else turn.next_prompt


def _set(target: TensorDict, key: NestedKey, value: Any) -> None:
    entry: Any = value if isinstance(value, torch.Tensor) else NonTensorData(value)
    target.set(key, entry)


def _td(entries: Any) -> TensorDict:
    return unchecked_td(entries, nested=False)
