"""``rollwright chat-collect``: conversations of a language model about prompts, into a folder."""

from __future__ import annotations

import argparse
import json
import os
import random
import time
from collections.abc import Mapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.text import Text

from rollwright._progress import count
from rollwright.cli.chat.view import READ, SAMPLED
from rollwright.cli.console import Console
from rollwright.cli.errors import Failure, brief, plain
from rollwright.cli.interrupts import SignalInterrupts
from rollwright.cli.policies import load_object
from rollwright.collectors.llm import LLMCollector
from rollwright.envs.llm import ChatEnv
from rollwright.modules.llm import TransformersWrapper, vLLMWrapper

_SAMPLED = ("model", "engine", "max_new_tokens", "temperature")
_ASKED = ("data", "data_key", "text", "system_prompt", "reward", "env", "tool", "max_turns", "repeats", "seed")
_SETTINGS = (*_SAMPLED, *_ASKED)  # what a run that goes on must share with the one before
_RUN, _STATE = "run.json", "state.pt"
_SECONDS_BETWEEN_SAVES = 2.0
_LINES_BELOW = 8


def run(arguments: argparse.Namespace) -> int:
    """Collect as the arguments specify; returns the exit status."""
    console, interrupts = Console(arguments.quiet or arguments.json), SignalInterrupts()
    folder: Path = arguments.output
    with console.warnings_as_lines(), ExitStack() as stack:
        settings = _settings(arguments)
        total = _count_rows(arguments.data) * arguments.repeats
        console.line(f"loading {settings['model'] or settings['engine']}")
        collector = _make(settings, arguments)
        stack.callback(lambda: collector.shutdown(timeout=1.0 if interrupts.hurried else None, raise_on_error=False))
        stack.enter_context(interrupts)
        before = _resume(collector, folder)
        where = "this process" if not arguments.workers else count(arguments.workers, "worker")
        verb = "going on with" if before else "collecting"
        console.line(f"{verb} {count(total, 'conversation')} in {where} (seed {settings['seed']}) into {folder}")
        run = _Run(collector, folder, total, before)
        error = run.collect(console, interrupts)
        if error is not None and arguments.debug:
            raise error
    if arguments.json:
        print(json.dumps({"path": str(folder), **run.numbers(), "error": error and brief(error)}, indent=2))
    if error is not None:
        console.alert(f"rollwright chat-collect: {brief(error)}")
        console.alert(run.outcome)
        return 1
    if interrupts.signum is not None:
        console.alert(f"interrupted: {run.outcome}; the same command goes on")
        return interrupts.exit_status
    console.line(f"{run.outcome} ({run.seconds:.1f} s)")
    if run.failed:
        kinds = ", ".join(f"{name}: {number}" for name, number in sorted(run.failed.items()))
        failed = count(sum(run.failed.values()), "conversation")
        console.alert(f"rollwright chat-collect: {failed} failed ({kinds}); rollwright inspect {folder} shows why")
        return 1
    console.line(f"look at them: rollwright inspect {folder}")
    return 0


# What to collect ----------------------------------------------------------------------------------------


def _settings(arguments: argparse.Namespace) -> dict[str, Any]:
    """The settings of the run, written down in its folder; those of before, where it goes on."""
    if arguments.model is None and arguments.engine in ("transformers", "vllm"):
        raise Failure(f"--model: expected a folder or a name, for --engine {arguments.engine}. Pass --model DIR.")
    given = {name: getattr(arguments, name) for name in _SETTINGS}
    given["data"] = str(given["data"].resolve())
    path = arguments.output / _RUN
    if path.is_file():
        saved: dict[str, Any] = json.loads(path.read_text())
        given["seed"] = saved.get("seed") if given["seed"] is None else given["seed"]
        differs = [name for name in _SETTINGS if saved.get(name) != given[name]]
        if differs:
            was = ", ".join(f"--{name.replace('_', '-')} {saved.get(name)!r}" for name in differs)
            raise Failure(
                f"--output: {str(arguments.output)!r} holds a run with {was}. Pass the same to go on with it, or "
                "another folder."
            )
        return given
    if arguments.output.exists() and any(arguments.output.iterdir()):
        raise Failure(f"--output: {str(arguments.output)!r} holds something else. Pass a new folder.")
    if given["seed"] is None:
        given["seed"] = random.SystemRandom().randrange(2**31)
    for option in ("reward", "tool"):  # errors of names are errors of this process
        for name in given[option]:
            load_object(name, f"--{option}", f"my_{option}s:{option}")
    _count_rows(arguments.data)
    arguments.output.mkdir(parents=True, exist_ok=True)
    _replace(path, json.dumps(given, indent=2).encode())
    return given


def _count_rows(path: Path) -> int:
    try:
        with path.open(encoding="utf-8") as file:
            number = sum(1 for line in file if line.strip())
    except OSError as error:
        raise Failure(f"--data: {plain(error)}") from error
    if not number:
        raise Failure(f"--data: {str(path)!r} has no lines. Write a JSON object a line, with the prompt as 'query'.")
    return number


def make_env(settings: Mapping[str, Any], batch: int) -> ChatEnv:
    """The environment of a run; called where it is needed."""
    load = {
        name: [load_object(text, f"--{name}", f"my_{name}s:{name}") for text in settings[name]]
        for name in ("reward", "tool")
    }
    env = settings["env"] and load_object(settings["env"], "--env", "my_envs:Guess")
    return ChatEnv.from_dataloader(
        settings["data"],
        input_mode="text" if settings["text"] else "history",
        batch_size=batch,
        system_prompt=settings["system_prompt"],
        repeats=settings["repeats"],
        group_repeats=True,
        reward_functions=load["reward"] or None,
        tools=load["tool"] or None,
        environment=env or None,
        max_turns=settings["max_turns"],
        data_key=settings["data_key"],
        epochs=1,
        seed=settings["seed"],
    )


def make_policy(settings: Mapping[str, Any]) -> Any:
    """The policy of a run; called where it is needed."""
    engine = settings["engine"]
    address = engine.startswith(("http://", "https://"))
    if engine not in ("transformers", "vllm") and not address:
        return load_object(engine, "--engine", "my_policies:make")()
    kwargs = {"max_new_tokens": settings["max_new_tokens"], "temperature": settings["temperature"]}
    mode: Any = "text" if settings["text"] else "history"
    if engine == "vllm" or address:
        return vLLMWrapper(engine if address else settings["model"], input_mode=mode, generate_kwargs=kwargs)
    return TransformersWrapper(settings["model"], input_mode=mode, generate_kwargs=kwargs)


def _make(settings: Mapping[str, Any], arguments: argparse.Namespace) -> Any:
    many = {} if not arguments.workers else {"num_collectors": arguments.workers}
    try:
        collector = LLMCollector(
            partial(make_env, settings, arguments.batch),
            policy_factory=partial(make_policy, settings),
            trajs_per_batch=1,
            async_envs=True,
            trace=arguments.output,
            on_error=arguments.on_error,
            **many,
        )
        collector.set_seed(settings["seed"])
    except Failure:
        raise
    except Exception as error:
        if arguments.debug:
            raise
        raise Failure(brief(error)) from error
    return collector


def _resume(collector: Any, folder: Path) -> int:
    """Go on where the run in the folder was; returns how many conversations it has."""
    path = folder / _STATE
    if not path.is_file():
        return 0
    saved = torch.load(path, weights_only=True)
    collector.load_state_dict(saved["collector"])
    return int(saved["conversations"])


def _replace(path: Path, content: bytes) -> None:
    """Write a file whole, or not at all."""
    new = path.with_suffix(".new")
    new.write_bytes(content)
    os.replace(new, path)


# The collection -----------------------------------------------------------------------------------------


class _Run:
    """Takes conversations, and saves the place in the data now and then.

    Args:
        collector: of conversations, one at a time.
        folder: of the run.
        total: conversations in all.
        before: those that were collected before.

    Attributes:
        seconds: that it took.
        failed: conversations that have failed, by class of what was raised.
    """

    def __init__(self, collector: Any, folder: Path, total: int, before: int) -> None:
        self._collector, self._folder, self._total, self._done = collector, folder, total, before
        self._returns: list[float] = []
        self._last: Any = None
        self._saved_at = 0.0
        self.seconds = 0.0
        self.tokens = 0
        self.failed: dict[str, int] = {}

    def collect(self, console: Console, interrupts: SignalInterrupts) -> Exception | None:
        """Collect until all are there, a signal comes or something fails; returns what failed."""
        failed: Exception | None = None
        start = time.perf_counter()
        try:
            with console.progress(self._total, self._below, _state):
                for batch in self._collector:
                    with interrupts.saving():
                        self._take(batch, time.perf_counter() - start)
                        if time.perf_counter() - self._saved_at > _SECONDS_BETWEEN_SAVES:
                            self._save()
                    console.update(self._stats())
                    if interrupts.collection_stopped():
                        break
        except KeyboardInterrupt:  # the second signal
            pass
        except Exception as error:
            failed = error
        self.seconds = time.perf_counter() - start
        with interrupts.saving():
            try:
                self.failed = dict(self._collector.stats()["conversations_failed"])
                self._save()
            except Exception as error:
                failed = failed or error
        return failed

    def _take(self, batch: Any, seconds: float) -> None:
        self._done += 1
        self.seconds = seconds
        self._returns.append(float(sum(row["next", "reward"].sum() for row in batch.unbind(0))))
        self.tokens += sum(len(row["tokens", "response"]) for row in batch.unbind(0))
        self._last = batch[-1]

    def _save(self) -> None:
        path = self._folder / _STATE
        new = path.with_suffix(".new")
        torch.save({"collector": self._collector.state_dict(), "conversations": self._done}, new)
        os.replace(new, path)
        self._saved_at = time.perf_counter()

    def _stats(self) -> dict[str, Any]:
        return {
            "frames": self._done,
            "tokens_per_second": self.tokens / max(self.seconds, 1e-9),
            "mean_return": sum(self._returns) / max(len(self._returns), 1),
        }

    def _below(self) -> Text:
        """The last conversation, on a terminal."""
        row = self._last
        if row is None:
            return Text()
        text = Text()
        text.append(row["text", "prompt"][-600:], style=READ)
        text.append(row["text", "response"], style=SAMPLED)
        lines = text.split("\n")
        return Text("\n").join(lines[-_LINES_BELOW:])

    def numbers(self) -> dict[str, Any]:
        """What there is now, in numbers; returns and seconds are those of this run alone."""
        mean = sum(self._returns) / len(self._returns) if self._returns else None
        counts = {"conversations": self._done, "total": self._total, "new": len(self._returns), "mean_reward": mean}
        return {**counts, "tokens": self.tokens, "failed": self.failed, "seconds": self.seconds}

    @property
    def outcome(self) -> str:
        """What there is now."""
        mean = f", mean reward {sum(self._returns) / len(self._returns):.4g}" if self._returns else ""
        return f"{self._done:,} of {count(self._total, 'conversation')}, {len(self._returns):,} of them new{mean}"


def _state(stats: Mapping[str, Any], total: int, short: bool) -> str:
    noun = "" if short else " conversations"
    rate, mean = stats["tokens_per_second"], stats["mean_return"]
    return f"{stats['frames']:,} / {total:,}{noun}, {rate:,.0f} tokens/s, mean reward {mean:.4g}"
