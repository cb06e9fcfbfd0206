"""Records as a storage keeps them: what is of the turn alone, and what its conversation has more than before."""

from __future__ import annotations

import random
from typing import Any, NamedTuple, cast

import torch
from tensordict import NonTensorData, TensorDict

from rollwright.data.entries import MadeEntries, unchecked_td
from rollwright.data.llm.records import GROWING, PARTS, RecordLayout, RecordSource
from rollwright.data.llm.turns import Marks
from rollwright.data.transcript import Growth, Mark, Transcript

GROWTH = "_transcript"  # key of what is stored of the transcript
_START = (0, 0, 0)
_LAYOUT = ("nested", "history", "text", "log_probs")


class StoredTurn(NamedTuple):
    """What the entries of a record that was stored are made of, beside those that are stored.

    Attributes:
        response_text: of the answer.
        log_probs: of its tokens.
        marks: where it is in its transcript.
        masked: whether none of its tokens is trained on.
    """

    response_text: str
    log_probs: torch.Tensor | None
    marks: Marks
    masked: bool

    def placed(self) -> Marks:
        """Where it is in a transcript; in one of its own, where it is in none."""
        return self.marks


def transcript_of(item: Any) -> Transcript | None:
    """The transcript that a record refers to; None: it is none, or refers to two."""
    entries = MadeEntries.of(item)
    source = None if entries is None else entries.source
    if not isinstance(source, RecordSource):
        return None
    first, *others = (mark.transcript for mark in source.marks[:3])
    return first if all(other is first for other in others) else None


def end_of(item: Any) -> tuple[int, int, int]:
    """How much of its transcript a record refers to."""
    entries = MadeEntries.of(item)
    assert entries is not None
    _, answer, following, _ = cast(RecordSource, entries.source).marks
    return (
        max(answer.tokens, following.tokens),
        max(answer.texts, following.texts),
        max(answer.messages, following.messages),
    )


def stored(item: TensorDict, start: tuple[int, int, int] = _START) -> TensorDict:
    """A record with what its transcript has more than at ``start``, in place of all that grows with the conversation.

    Args:
        item: a record of which :func:`transcript_of` is not None.
        start: what is stored already; it may be more than the record refers to.
    """
    entries = MadeEntries.of(item)
    assert entries is not None
    source, end = cast(RecordSource, entries.source), end_of(item)
    gone: list[list[str]] = []
    td = _own(item, (), gone)
    transcript, layout, turn = source.marks.prompt.transcript, source.layout, source.turn
    about = {
        "layout": [getattr(layout, name) for name in _LAYOUT],
        "leave_out": [list(key) if isinstance(key, tuple) else key for key in layout.leave_out],
        "log_probs": turn.log_probs is not None,
        "response_text": turn.response_text,
        "masked": turn.masked,
        "traj_id": source.traj_id,
        "gone": gone,
    }
    growth = {
        "about": NonTensorData(about),
        "marks": torch.tensor([mark[1:] for mark in source.marks[:3]]),
        "start": torch.tensor(start),
        "tokens": transcript.tokens(end[0])[start[0] :],
        "texts": NonTensorData(transcript.texts[start[1] : end[1]]),
        "messages": NonTensorData([dict(message) for message in transcript.messages[start[2] : end[2]]]),
        "link": torch.tensor([-1, random.getrandbits(62)]),  # where what it refers to lies; and its own number
    }
    td.set(GROWTH, unchecked_td(growth))
    return td


def growth_of(stored_growth: Any) -> Growth:
    """What :func:`stored` has put of a transcript, from the entry :data:`GROWTH`."""
    start = tuple(stored_growth["start"].tolist())
    return Growth(
        cast(Any, start), stored_growth["tokens"], stored_growth.get("texts").data, stored_growth.get("messages").data
    )


def restored(td: TensorDict, transcript: Transcript) -> TensorDict:
    """The record that :func:`stored` has given.

    Args:
        td: what it gave.
        transcript: that the record refers to, at least as far as it does.
    """
    growth: Any = td.pop(GROWTH)
    about: Any = growth.get("about").data
    prompt, answer, following = (Mark(transcript, *each) for each in growth["marks"].tolist())
    marks = Marks(prompt, answer, following)
    left_out = tuple(tuple(key) if isinstance(key, list) else key for key in about["leave_out"])
    layout = RecordLayout(**dict(zip(_LAYOUT, about["layout"], strict=True)), leave_out=left_out)
    key: Any = ("log_probs", "response") if layout.nested else "log_probs"
    log_probs = td.get(key, None) if about["log_probs"] else None
    turn: Any = StoredTurn(about["response_text"], log_probs, marks, about["masked"])
    made = MadeEntries.td(RecordSource(turn, layout, about["traj_id"]), "nested" if layout.nested else "flat")
    _lay(made, td)
    for path in about["gone"]:
        made.del_(tuple(path))
    return made


def _own(td: TensorDict, path: tuple[str, ...], gone: list[list[str]]) -> TensorDict:
    """All entries but those that grow with the conversation, as they are; and paths of entries that are gone."""
    entries = MadeEntries.of(td)
    assert entries is not None
    source, makers = entries.source, entries.source.makers(entries.kind)
    changed, missing = entries.changes()
    gone += [[*path, key] for key in missing if makers[key] in GROWING | PARTS]
    found: dict[str, Any] = {}
    for key in entries:
        if makers.get(key) in GROWING and key not in changed:
            continue
        value = entries[key]
        nested = MadeEntries.of(value)
        found[key] = value if nested is None or nested.source is not source else _own(value, (*path, key), gone)
    return unchecked_td(found, nested=False)


def _lay(target: TensorDict, source: TensorDict) -> None:
    """Set entries, within parts that are there as well."""
    entries = MadeEntries.of(target)
    assert entries is not None
    for key, value in source.items():
        part = entries.get(key)
        if MadeEntries.of(part) is not None and type(value) is TensorDict:
            _lay(cast(TensorDict, part), value)
        else:
            entries[key] = value
