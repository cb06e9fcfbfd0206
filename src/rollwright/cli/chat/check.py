"""``rollwright chat-check``: an environment of conversations against a scripted model."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rollwright._progress import count
from rollwright.cli.errors import Failure, plain
from rollwright.cli.policies import load_object
from rollwright.testing.chat_checks import check_chat_env


def run(arguments: argparse.Namespace) -> int:
    """Check, and print what was found; returns the exit status."""
    env = load_object(arguments.env, "ENV", "my_envs:Guess")
    if not callable(env):
        raise Failure(
            f"ENV: expected a class with a method reply, or a function that makes a ChatEnv, got {arguments.env}, of "
            f"type {type(env).__name__}."
        )
    rows = [{"query": "2 + 2?"}] if arguments.data is None else _lines(arguments.data, "--data", dict)
    answers = [] if arguments.answers is None else _lines(arguments.answers, "--answers", str)
    try:
        report = check_chat_env(env, rows, answers=answers, max_turns=arguments.max_turns)
    except ValueError as error:
        raise Failure(plain(error).replace("env:", "ENV:", 1)) from error
    wrong = sum(finding.is_error for finding in report.findings)
    if arguments.json:
        print(json.dumps(asdict(report), indent=2))
        return int(wrong > 0)
    print(f"{count(report.conversations, 'conversation')}, {count(report.turns, 'turn')}{_rewards(report.rewards)}")
    for finding in sorted(report.findings, key=lambda found: not found.is_error):
        print(f"{'error' if finding.is_error else 'note'}: {plain(finding.text)}")
    print(f"{count(wrong, 'thing')} to correct" if wrong else "nothing is wrong")
    return int(wrong > 0)


def _rewards(rewards: list[float]) -> str:
    return f", rewards from {min(rewards):g} to {max(rewards):g}" if rewards else ""


def _lines(path: Path, option: str, kind: type) -> list[Any]:
    """The JSON values of a file, one a line."""
    try:
        values = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    except (OSError, ValueError) as error:
        raise Failure(f"{option}: {plain(error)}") from error
    if not values or not all(isinstance(value, kind) for value in values):
        name = "object" if kind is dict else "string"
        raise Failure(f"{option}: expected a JSON {name} in each line of {str(path)!r}, and at least one.")
    return values
