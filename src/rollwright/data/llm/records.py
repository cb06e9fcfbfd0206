"""Turns as TensorDicts: one record a turn, nested or flat."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from tensordict import LazyStackedTensorDict, NonTensorData, TensorDict, TensorDictBase

from rollwright._keys import NestedKey, as_tuple, unravel
from rollwright.data.entries import MadeEntries, unchecked_td
from rollwright.data.llm.history import ChatHistory, History, message_columns
from rollwright.data.llm.turns import Origin, Turn


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
        leave_out: keys of further entries that there are not to be.

    Raises:
        ValueError: a flat record with messages.
    """

    nested: bool = True
    history: bool = False
    text: bool = True
    log_probs: bool = True
    leave_out: tuple[NestedKey, ...] = ()

    def __post_init__(self) -> None:
        if self.history and not self.nested:
            raise ValueError(
                "history=True needs nested=True: a flat record has no place for messages; got nested=False"
            )


def record(turn: Turn, layout: RecordLayout, traj_id: int | None = None) -> TensorDict:
    """The record of a turn, of batch size ``[]``; each entry is made when it is read.

    Tokens, versions and the log-probabilities of the response are views of those of the turn. ``("log_probs", "full")``
    is 0 but for the response. The masks are bool ``[tokens]``: ``all_assistant_mask`` is True on the tokens that were
    sampled in this turn, and on nothing else; on none where its conversation has failed.

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
    source = RecordSource(turn, layout, traj_id)
    result = MadeEntries.td(source, "flat" if not layout.nested else "nested")
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


def origins_in(records: TensorDictBase, seed: int = 0) -> list[Origin]:
    """Where the conversations of records come from, one for each; the seed is not among their entries."""
    keys = ("prompt_index", "epoch", "repeat", "group_id")
    columns: list[list[int]] = [records.get(key).reshape(-1).tolist() for key in keys]
    rows = zip(*columns, strict=True)
    return [Origin(index, epoch, repeat, group, seed) for index, epoch, repeat, group in rows]


def empty_record(like: TensorDict) -> TensorDict:
    """A record of no turn, with the entries of ``like``: text and ragged tensors are empty, numbers 0, flags False.

    Args:
        like: a record, of batch size ``[]``.
    """
    return unchecked_td({key: _emptied(key, value) for key, value in like.items()}, nested=False)


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


class RecordSource:
    """What the entries of a record are made of; see :class:`~rollwright.data.entries.MadeEntries`.

    Args:
        turn: of a conversation.
        layout: which entries, and under which keys.
        traj_id: id of the conversation; None: it has none.
    """

    __slots__ = ("layout", "marks", "traj_id", "turn")

    def __init__(self, turn: Turn, layout: RecordLayout, traj_id: int | None) -> None:
        self.turn, self.layout, self.traj_id = turn, layout, traj_id
        self.marks = turn.placed()

    def __reduce__(self) -> Any:
        return RecordSource, (self.turn, self.layout, self.traj_id)

    def makers(self, kind: str) -> dict[str, Any]:
        """The function for each entry of a part of the record: ``"nested"`` or ``"flat"``, ``"tokens"`` and so on."""
        found = _makers(kind, self.layout, log_probs=self.turn.log_probs is not None, traj_ids=self.traj_id is not None)
        return found if isinstance(self.turn, Turn) else _growing(found)

    # Parts --------------------------------------------------------------------------------------------

    def _tokens(self) -> TensorDict:
        return MadeEntries.td(self, "tokens")

    def _masks(self) -> TensorDict:
        return MadeEntries.td(self, "masks")

    def _log_probs(self) -> TensorDict:
        return MadeEntries.td(self, "log_probs")

    def _text(self) -> TensorDict:
        return MadeEntries.td(self, "text")

    def _seconds(self) -> TensorDict:
        return MadeEntries.td(self, "seconds")

    def _collector(self) -> TensorDict:
        return MadeEntries.td(self, "collector")

    def _next(self) -> TensorDict:
        return MadeEntries.td(self, "next" if self.layout.nested else "next flat")

    def _next_tokens(self) -> TensorDict:
        return MadeEntries.td(self, "next tokens")

    def _next_text(self) -> TensorDict:
        return MadeEntries.td(self, "next text")

    # What grows with the conversation -------------------------------------------------------------------

    def _all(self) -> torch.Tensor:
        return self.marks.answer.read()

    def _prompt(self) -> torch.Tensor:
        return self.marks.prompt.read()

    def _following(self) -> torch.Tensor:
        return self.marks.following.read()

    def _ones(self) -> torch.Tensor:
        return torch.ones(self.marks.answer.tokens, dtype=torch.bool)

    def _ones_int(self) -> torch.Tensor:
        return torch.ones(self.marks.answer.tokens, dtype=torch.int64)

    def _sampled(self) -> torch.Tensor:
        mask = torch.zeros(self.marks.answer.tokens, dtype=torch.bool)
        mask[self.marks.prompt.tokens :] = not self.turn.masked
        return mask

    def _log_probs_full(self) -> torch.Tensor:
        assert self.turn.log_probs is not None
        response = self.turn.log_probs
        full = response.new_zeros(self.marks.answer.tokens)
        full[self.marks.prompt.tokens :] = response
        return full

    def _prompt_text(self) -> NonTensorData:
        return NonTensorData(str(self.marks.prompt.text))

    def _full_text(self) -> NonTensorData:
        return NonTensorData(str(self.marks.prompt.text) + self.turn.response_text)

    def _following_text(self) -> NonTensorData:
        return NonTensorData(str(self.marks.following.text))

    def _history(self) -> ChatHistory:
        prompt, stop = self.marks.prompt, self.marks.prompt.messages + 1
        columns = message_columns([*prompt.chat, self.marks.answer.chat[prompt.messages]])
        parts = {"prompt": (0, stop - 1), "response": (stop - 1, stop), "full": (0, stop)}
        return ChatHistory.of({key: History.of_columns(columns, *ends) for key, ends in parts.items()})

    def _next_history(self) -> ChatHistory:
        chat = self.marks.following.chat
        return ChatHistory.of({"prompt": History.of_columns(message_columns(chat), 0, len(chat))})

    # What is of the turn alone --------------------------------------------------------------------------

    def _response(self) -> torch.Tensor:
        return self.marks.answer.read()[self.marks.prompt.tokens :]

    def _log_probs_response(self) -> torch.Tensor:
        assert self.turn.log_probs is not None
        return self.turn.log_probs

    def _versions(self) -> Any:
        versions = self.turn.versions
        return versions if isinstance(versions, torch.Tensor) else NonTensorData(list(versions))

    def _response_text(self) -> NonTensorData:
        return NonTensorData(self.turn.response_text)

    def _finish_reason(self) -> NonTensorData:
        return NonTensorData(str(self.turn.finish_reason))

    def _log_prob_mode(self) -> NonTensorData:
        return NonTensorData(self.turn.log_prob_mode)

    def _reward(self) -> torch.Tensor:
        reward = self.turn.reward
        if isinstance(reward, torch.Tensor) and reward.ndim:
            return reward.to(torch.float32).unsqueeze(-1)
        return torch.tensor([float(reward)])

    def _false(self) -> torch.Tensor:
        return torch.tensor([False])

    def _terminated(self) -> torch.Tensor:
        return torch.tensor([self.turn.terminated])

    def _truncated(self) -> torch.Tensor:
        return torch.tensor([self.turn.truncated])

    def _done(self) -> torch.Tensor:
        return torch.tensor([self.turn.done])

    def _traj_ids(self) -> torch.Tensor:
        return torch.tensor(self.traj_id)

    def _policy_version(self) -> Any:
        version = self.turn.version
        return torch.tensor(version) if isinstance(version, int) else NonTensorData(str(version))

    def _oldest_policy_version(self) -> Any:
        versions = self.turn.versions  # they rise
        if not len(versions):
            return self._policy_version()
        return versions[0] if isinstance(versions, torch.Tensor) else NonTensorData(str(versions[0]))

    def _group_id(self) -> torch.Tensor:
        return torch.tensor(self.turn.origin.group)

    def _repeat(self) -> torch.Tensor:
        return torch.tensor(self.turn.origin.repeat)

    def _prompt_index(self) -> torch.Tensor:
        return torch.tensor(self.turn.origin.index)

    def _epoch(self) -> torch.Tensor:
        return torch.tensor(self.turn.origin.epoch)

    def _turn(self) -> torch.Tensor:
        return torch.tensor(self.turn.number)

    def _sequence(self) -> torch.Tensor:
        return torch.tensor(self.turn.sequence)

    def _stage(self, name: str) -> torch.Tensor:
        return torch.tensor(self.turn.seconds.get(name, 0.0), dtype=torch.float32)

    def _queue(self) -> torch.Tensor:
        return self._stage("queue")

    def _generation(self) -> torch.Tensor:
        return self._stage("generation")

    def _tool(self) -> torch.Tensor:
        return self._stage("tool")

    def _of_reward(self) -> torch.Tensor:
        return self._stage("reward")


_S = RecordSource
_FLAGS = {"done": _S._false, "terminated": _S._false, "truncated": _S._false}
_AFTER = {"reward": _S._reward, "done": _S._done, "terminated": _S._terminated, "truncated": _S._truncated}
_REST = {
    **_FLAGS,
    "next": _S._next,
    "group_id": _S._group_id,
    "repeat": _S._repeat,
    "prompt_index": _S._prompt_index,
    "epoch": _S._epoch,
    "turn": _S._turn,
    "sequence": _S._sequence,
    "policy_version": _S._policy_version,
    "oldest_policy_version": _S._oldest_policy_version,
    "collector": _S._collector,
    "seconds": _S._seconds,
    "finish_reason": _S._finish_reason,
    "log_prob_mode": _S._log_prob_mode,
}
_ALL: dict[str, dict[str, Any]] = {  # by part of a record
    "nested": {
        "history": _S._history,
        "text": _S._text,
        "tokens": _S._tokens,
        "log_probs": _S._log_probs,
        "masks": _S._masks,
        **_REST,
    },
    "flat": {
        "tokens": _S._all,
        "tokens_response": _S._response,
        "tokens_policy_version": _S._versions,
        "attention_mask": _S._ones_int,
        "assistant_mask": _S._sampled,
        "text": _S._prompt_text,
        "text_response": _S._response_text,
        "log_probs": _S._log_probs_response,
        **_REST,
    },
    "text": {"prompt": _S._prompt_text, "response": _S._response_text, "full": _S._full_text},
    "tokens": {
        "prompt": _S._prompt,
        "response": _S._response,
        "full": _S._all,
        "policy_version": _S._versions,
    },
    "log_probs": {"response": _S._log_probs_response, "full": _S._log_probs_full},
    "masks": {"all_attention_mask": _S._ones, "all_assistant_mask": _S._sampled},
    "collector": {"traj_ids": _S._traj_ids},
    "seconds": {"queue": _S._queue, "generation": _S._generation, "tool": _S._tool, "reward": _S._of_reward},
    "next": {"history": _S._next_history, "text": _S._next_text, "tokens": _S._next_tokens, **_AFTER},
    "next flat": {"tokens": _S._following, "text": _S._following_text, **_AFTER},
    "next tokens": {"prompt": _S._following},
    "next text": {"prompt": _S._following_text},
}


@cache
def _makers(kind: str, layout: RecordLayout, *, log_probs: bool, traj_ids: bool) -> dict[str, Any]:
    """The functions for the entries of a part of records, by key."""
    without = set()
    if not layout.history:
        without.add("history")
    if not layout.text:
        without |= {"text", "text_response"}
    if not layout.log_probs or not log_probs:
        without.add("log_probs")
    if not traj_ids:
        without.add("collector")
    without |= {as_tuple(key)[-1] for key in layout.leave_out if as_tuple(key)[:-1] == _PLACES.get(kind, (kind,))}
    return {key: maker for key, maker in _ALL[kind].items() if key not in without}


def _growing(makers: dict[str, Any]) -> dict[str, Any]:
    """Those of entries that grow with the conversation, and of parts that hold such."""
    return {key: maker for key, maker in makers.items() if maker in GROWING or maker in PARTS}


GROWING = frozenset(
    (
        *(_S._all, _S._prompt, _S._response, _S._following, _S._ones, _S._ones_int, _S._sampled, _S._log_probs_full),
        *(_S._prompt_text, _S._full_text, _S._following_text, _S._history, _S._next_history),
    )
)
PARTS = frozenset((_S._tokens, _S._masks, _S._log_probs, _S._text, _S._next, _S._next_tokens, _S._next_text))


def checked_left_out(name: str, value: object) -> object:
    """Entries that records are not to have.

    Raises:
        TypeError: it is no list of keys.
        ValueError: an entry is unknown, or one that conversations are told apart by, or read as whole.
    """
    if isinstance(value, str) or not isinstance(value, Sequence):
        raise TypeError(f"{name}: expected a list of keys, got {type(value).__name__}: {value!r}. Pass ['text'].")
    known = [unravel((*_PLACES.get(kind, (kind,)), key)) for kind, makers in _ALL.items() for key in makers]
    may_be = [key for key in dict.fromkeys(known) if key not in _NEEDED]
    for key in value:
        if unravel(as_tuple(key)) not in may_be:
            raise ValueError(
                f"{name}: {key!r} is no entry of a record, or one that records are told apart by, or are made whole "
                f"by. Expected some of {', '.join(map(repr, may_be))}."
            )
    return tuple(unravel(as_tuple(key)) for key in value)


_PLACES: dict[str, tuple[str, ...]] = {
    "nested": (),
    "flat": (),
    "next flat": ("next",),
    "next tokens": ("next", "tokens"),
    "next text": ("next", "text"),
}
_NEEDED: set[NestedKey] = {
    *("tokens", "tokens_response", ("tokens", "full"), ("tokens", "response"), "next", "collector"),
    *("group_id", "repeat", "prompt_index", "epoch", "turn", "sequence", ("collector", "traj_ids")),
    *("masks", ("masks", "all_assistant_mask"), "assistant_mask", "finish_reason"),
    *_FLAGS,
    *(("next", key) for key in _AFTER),
}


def _set(target: TensorDict, key: NestedKey, value: Any) -> None:
    entry: Any = value if isinstance(value, torch.Tensor) else NonTensorData(value)
    target.set(key, entry)
