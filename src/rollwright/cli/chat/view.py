"""Traces of conversations on a terminal: what the model wrote, in colour."""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from rich.console import Console as RichConsole
from rich.text import Text

from rollwright._progress import count
from rollwright.cli.errors import Failure, plain
from rollwright.data.llm.trace import Trace, TracedConversation
from rollwright.data.llm.turns import FinishReason, Turn

SAMPLED, MASKED, READ = "bold green", "red", "dim"  # what the loss is of; what it leaves out; what the model read


def inspect_trace(arguments: argparse.Namespace) -> int:
    """Print what a trace holds, and some of its conversations; returns the exit status."""
    for option in ("check", "plot"):
        if getattr(arguments, option):
            raise Failure(f"--{option}: is for datasets, and {str(arguments.path)!r} is a trace of conversations.")
    try:
        trace = Trace.read(arguments.path)
    except ValueError as error:
        raise Failure(plain(error), status=1) from error
    chosen = [each for each in trace.conversations if arguments.prompt in (None, each.origin.index)]
    if arguments.prompt is not None and not chosen:
        raise Failure(f"--prompt: expected a prompt of the trace, got {arguments.prompt}, which it has no turn of.")
    report = summary(trace)
    if arguments.json:
        print(json.dumps({"path": str(arguments.path), **report}, indent=2))
        return 0
    console = RichConsole(file=sys.stdout, highlight=False, markup=False, emoji=False, soft_wrap=True)
    for line in _lines(report):
        console.print(line)
    for conversation in chosen[: arguments.conversations]:
        console.print()
        console.print(shown(conversation))
    if len(chosen) > arguments.conversations:
        console.print(f"\n{len(chosen) - arguments.conversations:,} more: --conversations N, --prompt N")
    return 0


def summary(trace: Trace) -> dict[str, Any]:
    """What a trace holds, in numbers."""
    ended = [each for each in trace.conversations if each.end in ("terminated", "truncated")]
    turns = [turn for each in trace.conversations for turn in each.turns]
    rewards: dict[str, list[float]] = {}
    for each in ended:
        for name, value in _rewards(each):
            rewards.setdefault(name, []).append(value)
    versions = [turn.version for turn in turns if isinstance(turn.version, int)]
    return {
        "conversations": len(trace.conversations),
        "ends": dict(Counter(each.end or "in progress" for each in trace.conversations)),
        "torn_lines": trace.num_torn,
        "turns": len(turns),
        "tokens_sampled": sum(len(turn.tokens) - turn.num_prompt for turn in turns),
        "finish_reasons": dict(Counter(str(turn.finish_reason) for turn in turns)),
        "policy_versions": [min(versions), max(versions)] if versions else None,
        "reward": _distribution([each.total for each in ended]),
        "rewards": {name: _distribution(values) for name, values in rewards.items()},
    }


def _rewards(conversation: TracedConversation) -> Iterator[tuple[str, float]]:
    for key, value in conversation.turns[-1].extras.items() if conversation.turns else ():
        if isinstance(key, tuple) and key[:2] == ("next", "rewards"):
            yield str(key[2]), float(value)


def _distribution(values: Sequence[float]) -> dict[str, float] | None:
    numbers = np.asarray(values, np.float64)
    numbers = numbers[np.isfinite(numbers)]
    if not len(numbers):
        return None
    return {"mean": float(numbers.mean()), "min": float(numbers.min()), "max": float(numbers.max())}


def _lines(report: dict[str, Any]) -> list[str]:
    ends = ", ".join(f"{number:,} {name}" for name, number in report["ends"].items())
    lines = [
        f"trace           {count(report['conversations'], 'conversation')}{f': {ends}' if ends else ''}",
        f"turns           {report['turns']:,} ({', '.join(f'{n:,} {k}' for k, n in report['finish_reasons'].items())})",
        f"tokens sampled  {report['tokens_sampled']:,}",
    ]
    if report["torn_lines"]:
        lines.append(f"cut off         {count(report['torn_lines'], 'line')}, by a kill; left out")
    if report["policy_versions"]:
        lines.append(f"versions        {report['policy_versions'][0]} to {report['policy_versions'][1]}")
    for name, found in (
        ("reward", report["reward"]),
        *((f"  {name}", each) for name, each in report["rewards"].items()),
    ):
        if found is not None:
            lines.append(f"{name:<15} mean {found['mean']:.4g}, from {found['min']:.4g} to {found['max']:.4g}")
    return lines


def shown(conversation: TracedConversation) -> Text:
    """A conversation, with what the model wrote in colour."""
    origin = conversation.origin
    why = f" ({plain(conversation.why)})" if conversation.why else ""
    text = Text()
    text.append(
        f"--- {origin.name}, group {origin.group}: {conversation.end or 'in progress'}{why}, reward "
        f"{conversation.total:.4g}, {count(len(conversation.turns), 'turn')}\n",
        style="bold",
    )
    known = ""
    for turn in conversation.turns:
        text.append_text(turn_text(turn, known))
        known = turn.prompt_text + turn.response_text
    return text


def turn_text(turn: Turn, known: str = "") -> Text:
    """A turn, with what the model wrote in colour.

    Args:
        turn: of a conversation.
        known: text that was shown before it.
    """
    text = Text()
    masked = turn.finish_reason is FinishReason.ERROR
    if turn.prompt_text or turn.response_text:
        goes_on = turn.prompt_text.startswith(known)
        text.append("" if goes_on else "\n[written anew]\n", style="italic")
        text.append(turn.prompt_text[len(known) :] if goes_on else turn.prompt_text, style=READ)
        text.append(turn.response_text, style=MASKED if masked else SAMPLED)
    else:
        text.append(f"\n{turn.tokens[: turn.num_prompt].tolist()} ", style=READ)
        text.append(f"{turn.tokens[turn.num_prompt :].tolist()}", style=MASKED if masked else SAMPLED)
    if turn.finish_reason not in (FinishReason.STOP, FinishReason.TOOL):
        text.append(f" [{turn.finish_reason}]", style="italic")
    return text
