r"""Conversations on disk as they happen: written turn by turn, and read back.

A trace is a folder of files of JSON lines. Each process writes a file of its own, and a line is written whole, when a
turn is complete: what a killed process has written is there, and a last line that was cut off is left out. A line has
what its turn adds to the one before it, so that a conversation of any length is written once.

Lines: ``{"trace": 1, "engine": {...}}`` begins a file; ``{"turn": n, "origin": [...], ...}``; ``{"end": "terminated",
"origin": [...], ...}`` behind the last turn of a conversation. One that begins again replaces what was written of it.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from tensordict import TensorDict

from rollwright.data.llm.records import RecordLayout, record
from rollwright.data.llm.turns import FinishReason, Message, Origin, Turn, turn_seed

_FORMAT = 1
_SUFFIX = ".trace.jsonl"


class _Prompt(NamedTuple):
    """What a model reads, in its three forms; without tokens: there is no prompt."""

    messages: list[Message]
    text: str
    tokens: torch.Tensor | None


class TraceWriter:
    """Writes conversations into a folder, in a file of its own.

    Used by one thread. A run that goes on from a saved state may write into the same folder.

    Args:
        folder: is made, if there is none.
        engine: what :class:`ReplayEngine` needs to know of the engine.
        name: of the writer, in the name of its file.

    Raises:
        ValueError: the folder cannot be written.

    Example:
        >>> import tempfile
        >>> from rollwright.data.llm import FinishReason, Origin, Turn
        >>> turn = Turn(
        ...     Origin(0, 0, 0, 0, 0), 0, 0, [], {"role": "assistant", "content": "5"}, "2 + 3 = ", "5",
        ...     torch.tensor([4, 5, 6]), 2, torch.tensor([-0.5]), "raw", torch.tensor([1]), 1, FinishReason.STOP,
        ...     reward=1.0, terminated=True,
        ... )
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     TraceWriter(folder, {}).turn(turn, traj_id=7, total=1.0)
        ...     [found] = Trace.read(folder).conversations
        >>> found.end, found.total, found.turns[0].response_text
        ('terminated', 1.0, '5')
    """

    def __init__(self, folder: str | os.PathLike[str], engine: Mapping[str, Any], name: str = "") -> None:
        self._folder, self._engine, self._name = Path(folder), dict(engine), name
        self._file: int | None = None
        self._last: dict[Origin, tuple[int, _Prompt]] = {}  # the prompt behind the last turn, and its number
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ValueError(f"trace: expected a folder, got {str(folder)!r}: {error}. Pass another one.") from error
        if not os.access(self._folder, os.W_OK):
            raise ValueError(f"trace: expected a folder that can be written, got {str(folder)!r}. Pass another one.")

    def turn(
        self,
        turn: Turn,
        traj_id: int,
        *,
        seed: int | None = None,
        total: float | None = None,
        masked: Sequence[int] = (),
    ) -> None:
        """Write a turn that is complete; and the end of its conversation, if it is the last one.

        Args:
            turn: of a conversation.
            traj_id: of the conversation.
            seed: of the request that the turn answers; None: that of its number.
            total: sum of the rewards of a conversation that has ended.
            masked: numbers of turns before it that are not trained on either.
        """
        lines = [self._line_of(turn, traj_id, turn_seed(turn.origin, turn.number) if seed is None else seed)]
        if turn.masked:
            lines[0]["masked"] = [*masked, turn.number]
        if turn.done:
            failed = turn.finish_reason is FinishReason.ERROR
            how = "failed" if failed else "terminated" if turn.terminated else "truncated"
            lines.append(self._end_of(turn.origin, how, "", total))
        self._write(lines)

    def end(self, origin: Origin, how: str, why: str = "") -> None:
        """Write that a conversation has ended otherwise than with a turn, or that nobody gets it.

        Args:
            origin: of the conversation.
            how: ``"failed"``, ``"dropped"``, ``"filtered"``.
            why: in words.
        """
        self._write([self._end_of(origin, how, why, None)])

    def close(self) -> None:
        """Close the file. May be called again."""
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def _line_of(self, turn: Turn, traj_id: int, seed: int) -> dict[str, Any]:
        number, before = self._last.get(turn.origin, (-1, _NOTHING))
        if number != turn.number - 1:
            before = _NOTHING
        prompt = _Prompt(list(turn.prompt), turn.prompt_text, turn.tokens[: turn.num_prompt])
        response = turn.tokens[turn.num_prompt :]
        here = _Prompt([*prompt.messages, turn.response], turn.prompt_text, turn.tokens)
        behind = [*here.messages, *turn.added] if turn.next_messages is None else list(turn.next_messages)
        following = _Prompt(behind, turn.next_prompt_text, turn.next_prompt)
        self._last[turn.origin] = turn.number, following
        numbers = None if turn.log_probs is None else [float(f"{value:.9g}") for value in turn.log_probs.tolist()]
        versions = turn.versions
        return {
            "turn": turn.number,
            "origin": astuple(turn.origin),
            "id": traj_id,
            "seed": seed,
            "sequence": turn.sequence,
            "prompt": _added(before, prompt),
            "response": dict(turn.response),
            "text": turn.response_text,
            "tokens": response.tolist(),
            "log_probs": numbers,
            "log_prob_mode": turn.log_prob_mode,
            "versions": versions.tolist() if isinstance(versions, torch.Tensor) else list(versions),
            "version": turn.version,
            "finish_reason": str(turn.finish_reason),
            "added": None if turn.next_messages is not None else [dict(message) for message in turn.added],
            "next": _added(here, following),
            "reward": turn.reward.tolist() if isinstance(turn.reward, torch.Tensor) else turn.reward,
            "terminated": turn.terminated,
            "truncated": turn.truncated,
            "seconds": turn.seconds,
            "extras": [[key, _encoded(value)] for key, value in turn.extras.items()],
        }

    def _end_of(self, origin: Origin, how: str, why: str, total: float | None) -> dict[str, Any]:
        self._last.pop(origin, None)
        return {"end": how, "origin": astuple(origin), "why": why, "total": total}

    def _write(self, lines: Sequence[Mapping[str, Any]]) -> None:
        text = "".join(json.dumps(line, separators=(",", ":"), default=str) + "\n" for line in lines).encode()
        try:
            if self._file is None:
                name = f"{time.time_ns():020d}-{os.getpid()}{self._name and '-'}{self._name}{_SUFFIX}"
                head = json.dumps({"trace": _FORMAT, "engine": self._engine}, default=str) + "\n"
                flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND
                self._file, text = os.open(self._folder / name, flags, 0o644), head.encode() + text
            while text:
                text = text[os.write(self._file, text) :]
        except BaseException:
            self.close()  # a line may be there in part: the next one begins another file
            raise


_NOTHING = _Prompt([], "", torch.zeros(0, dtype=torch.int64))


def _added(before: _Prompt, prompt: _Prompt) -> dict[str, Any] | None:
    """A prompt as what it keeps of another one, and what it adds."""
    if prompt.tokens is None:
        return {"messages": _kept(before.messages, prompt.messages), "text": [0, ""], "tokens": None}
    tokens, known = prompt.tokens, before.tokens
    keeps = known is not None and len(known) <= len(tokens) and torch.equal(known, tokens[: len(known)])
    kept = len(known) if known is not None and keeps else 0
    return {
        "messages": _kept(before.messages, prompt.messages),
        "text": _kept(before.text, prompt.text),
        "tokens": [kept, tokens[kept:].tolist()],
    }


def _kept(before: Any, now: Any) -> list[Any]:
    kept = len(before) if now[: len(before)] == before else 0
    more = now[kept:]
    return [kept, [dict(message) for message in more] if isinstance(more, list) else more]


def _encoded(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return {"dtype": str(value.dtype).removeprefix("torch."), "value": value.tolist()}
    return {"value": value}


def _decoded(saved: Mapping[str, Any]) -> Any:
    if "dtype" in saved:
        return torch.tensor(saved["value"], dtype=getattr(torch, saved["dtype"]))
    return saved["value"]


@dataclass
class TracedConversation:
    """A conversation in a trace.

    Attributes:
        origin: where it comes from.
        id: of its trajectory.
        turns: of it.
        seeds: of the requests that they answer.
        end: ``"terminated"``, ``"truncated"``, ``"failed"``, ``"dropped"`` or ``"filtered"``; empty where it has none.
        why: in words, where it failed or was left out.
        total: sum of its rewards.
    """

    origin: Origin
    id: int = -1
    turns: list[Turn] = field(default_factory=list)
    seeds: list[int] = field(default_factory=list)
    end: str = ""
    why: str = ""
    total: float = 0.0

    def records(self, layout: RecordLayout) -> list[TensorDict]:
        """Its turns as a collector delivers them."""
        return [record(turn, layout, self.id) for turn in self.turns]


@dataclass(frozen=True)
class Trace:
    """What was read from a folder.

    Attributes:
        engine: what is known of the engine that answered.
        conversations: in the order in which they ended; those that have not are the last ones.
        num_torn: last lines of files that were cut off, and are left out.
    """

    engine: Mapping[str, Any]
    conversations: Sequence[TracedConversation]
    num_torn: int = 0

    @staticmethod
    def is_in(folder: str | os.PathLike[str]) -> bool:
        """Whether there is one in a folder."""
        return any(line.startswith('{"trace":') for path in _files(folder) for line in _first_line(path))

    @classmethod
    def read(cls, folder: str | os.PathLike[str]) -> Trace:
        """Read a trace.

        Raises:
            ValueError: there is none in the folder, or a line of it cannot be read.
        """
        paths = _files(folder)
        if not paths:
            raise ValueError(
                f"trace: expected a folder that LLMCollector(trace=...) has written, got {str(folder)!r}, which has no "
                f"{_SUFFIX} files. Pass the folder of a run."
            )
        engine: Mapping[str, Any] = {}
        readers: dict[Origin, _Reader] = {}
        torn = 0
        for path in paths:
            for line in _lines(path):
                if line is None:
                    torn += 1
                elif "trace" in line:
                    engine = line["engine"]
                else:
                    origin = Origin(*line["origin"])
                    reader = readers.pop(origin, None) or _Reader(TracedConversation(origin))
                    readers[origin] = reader  # the last one
                    reader.turn(line) if "turn" in line else reader.end(line)
        found = [reader.found for reader in readers.values()]
        return cls(engine, sorted(found, key=lambda conversation: not conversation.end), torn)


class _Reader:
    """Puts the turns of a conversation together."""

    def __init__(self, found: TracedConversation) -> None:
        self.found = found
        self._tokens = _Tokens()
        self._before = _NOTHING

    def turn(self, line: Mapping[str, Any]) -> None:
        number, found = line["turn"], self.found
        kept = sum(turn.number < number for turn in found.turns)  # it may have begun again, or gone on from there
        del found.turns[kept:], found.seeds[kept:]
        found.end, found.why, found.total = "", "", 0.0
        prompt = self._prompt(self._before, line["prompt"])
        assert prompt.tokens is not None
        num_prompt = len(prompt.tokens)
        tokens = self._tokens.after(num_prompt, line["tokens"])
        here = _Prompt([*prompt.messages, line["response"]], prompt.text, tokens)
        following = self._prompt(here, line["next"])
        values, reward = line["log_probs"], line["reward"]
        versions, added = line["versions"], line["added"]
        turn = Turn(
            origin=found.origin,
            number=number,
            sequence=line["sequence"],
            prompt=prompt.messages,
            response=line["response"],
            prompt_text=prompt.text,
            response_text=line["text"],
            tokens=tokens,
            num_prompt=num_prompt,
            log_probs=None if values is None else torch.tensor(values, dtype=torch.float32),
            log_prob_mode=line["log_prob_mode"],
            versions=versions if isinstance(line["version"], str) else torch.tensor(versions, dtype=torch.int64),
            version=line["version"],
            finish_reason=FinishReason(line["finish_reason"]),
            added=() if added is None else tuple(added),
            next_prompt=following.tokens,
            next_prompt_text=following.text,
            next_messages=following.messages if added is None else None,
            reward=torch.tensor(reward, dtype=torch.float32) if isinstance(reward, list) else reward,
            terminated=line["terminated"],
            truncated=line["truncated"],
            seconds=line["seconds"],
            extras={_key(key): _decoded(value) for key, value in line["extras"]},
        )
        found.id = line["id"]
        found.turns.append(turn)
        found.seeds.append(line["seed"])
        for each in found.turns:
            each.masked |= each.number in line.get("masked", ())
        self._before = following

    def end(self, line: Mapping[str, Any]) -> None:
        found = self.found
        found.end, found.why = line["end"], line["why"]
        found.total = found.total if line["total"] is None else line["total"]

    def _prompt(self, before: _Prompt, saved: Mapping[str, Any]) -> _Prompt:
        (messages, more), (letters, text) = saved["messages"], saved["text"]
        tokens = None if saved["tokens"] is None else self._tokens.after(*saved["tokens"])
        return _Prompt([*before.messages[:messages], *more], before.text[:letters] + text, tokens)


class _Tokens:
    """The tokens of a conversation in one memory, as long as they extend one another."""

    def __init__(self) -> None:
        self._buffer = torch.empty(256, dtype=torch.int64)
        self._size = 0

    def after(self, kept: int, more: list[int]) -> torch.Tensor:
        """The first ``kept`` tokens of what was returned last, and more: a view."""
        size = kept + len(more)
        if kept < self._size or size > len(self._buffer):  # what was returned before keeps its memory
            buffer = torch.empty(max(256, 2 * size), dtype=torch.int64)
            buffer[:kept] = self._buffer[:kept]
            self._buffer = buffer
        self._buffer[kept:size] = torch.tensor(more, dtype=torch.int64)
        self._size = size
        return self._buffer[:size]


def _key(key: Any) -> Any:
    return tuple(key) if isinstance(key, list) else key


def _files(folder: str | os.PathLike[str]) -> list[Path]:
    place = Path(folder)
    return sorted(place.glob(f"*{_SUFFIX}")) if place.is_dir() else []


def _first_line(path: Path) -> list[str]:
    with path.open(encoding="utf-8", errors="replace") as file:
        return [file.readline()]


def _lines(path: Path) -> Iterator[dict[str, Any] | None]:
    """The lines of a file; None: the last one, if it was cut off."""
    with path.open("rb") as file:
        for number, text in enumerate(file, 1):
            if not text.endswith(b"\n"):
                yield None
                return
            try:
                line = json.loads(text)
                if "trace" in line and line["trace"] != _FORMAT:
                    raise ValueError(f"format {line['trace']} is not known")
            except (ValueError, TypeError) as error:
                raise ValueError(
                    f"trace: expected JSON in line {number} of {str(path)!r}, got {text[:60]!r}: {error}. Take the "
                    "file out of the folder, or read the trace with the version that has written it."
                ) from error
            yield line
