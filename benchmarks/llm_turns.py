"""Does a turn cost more, the more turns its conversation has behind it?

Milliseconds of processor time and bytes for a turn, by its number, over an engine that answers at once: delivered in
process, stored in a ragged buffer, and sent by a worker. Each figure is the least of all rounds: others on the machine
make it larger, never smaller. Of the worker, the time is that of the collector's process, which opens what it sends.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from benchmarks import report
from benchmarks.llm_cases import make_tokenizer
from rollwright.collectors.llm import LLMCollector
from rollwright.collectors.workers import schedule
from rollwright.data import RaggedStorage, ReplayBuffer
from rollwright.data.encoding import Encoded
from rollwright.data.llm import FinishReason
from rollwright.envs.llm import ChatEnv
from rollwright.modules.llm.engine import Completion, Engine, Request, Sampling

TURNS, NEW = 100, 40
SHOWN = (1, 10, 50, 99)  # the hundredth ends its conversation, and begins another one
IN_PROCESS, STORED, WORKER = "in process", "into a ragged buffer", "from a worker"
LIMIT_MS = {1: 0.5, 8: 0.3}


class InstantEngine(Engine):
    """Answers with the same tokens, at once."""

    version = 0

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer, self.sampling = tokenizer, Sampling(max_new_tokens=NEW)
        self.max_length, self.vocab_size, self.end_ids = None, len(tokenizer), (tokenizer.eos_token_id,)
        self._tokens, self._log_probs = torch.arange(NEW) % 50 + 100, -torch.ones(NEW)
        self._versions = torch.zeros(NEW, dtype=torch.int64)
        self._over: list[Completion] = []

    def submit(self, requests: Sequence[Request]) -> None:
        for request in requests:
            seconds = {"queue": 0.0, "generation": 0.0}
            parts = (self._tokens.clone(), self._log_probs, self._versions, FinishReason.STOP, seconds)  # decoded anew
            self._over.append(Completion(request.key, *parts))

    def results(self, timeout: float | None = None) -> list[Completion]:
        over, self._over = self._over, []
        return over

    def generate(self, requests: Sequence[Request]) -> list[Completion]:
        self.submit(requests)
        return self.results()

    def cancel(self, keys: Sequence[Any]) -> None: ...

    def pause(self) -> None: ...

    def resume(self) -> None: ...

    def update_weights(self, weights: Any, version: Any = None, **how: Any) -> None: ...

    def close(self) -> None: ...


class InstantPolicy:
    """What a collector takes for a policy with an engine."""

    def __init__(self) -> None:
        self.tokenizer = make_tokenizer()
        self.engine = InstantEngine(self.tokenizer)

    def __call__(self, td: Any) -> Any:
        raise AssertionError("the engine is called")


class User:
    """Goes on for 100 turns."""

    def __init__(self, row: Any) -> None:
        self.turns = 0

    def reply(self, messages: Any) -> Any:
        self.turns += 1
        return "Go on with the next one, please.", 0.0, self.turns >= TURNS

    def state_dict(self) -> dict[str, int]:
        return {"turns": self.turns}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.turns = state["turns"]


def make_env(batch: int) -> ChatEnv:
    rows = [{"query": f"What is {number}?"} for number in range(1000)]
    return ChatEnv.from_dataloader(rows, tokenizer=make_tokenizer(), batch_size=batch, environment=User)


@contextmanager
def counted() -> Iterator[list[int]]:
    """Bytes that a worker's messages and a buffer's elements have, one after another."""
    sizes: list[int] = []
    unpack, write = schedule.unpack, Encoded.write

    def unpacked(packed: Any, *rest: Any) -> Any:
        sizes.append(packed.num_bytes)
        return unpack(packed, *rest)

    def written(self: Encoded, memory: Any) -> None:
        sizes.append(self.num_bytes)
        write(self, memory)

    with mock.patch.object(schedule, "unpack", unpacked), mock.patch.object(Encoded, "write", written):
        yield sizes


def collecting(side: str, batch: int) -> LLMCollector:
    options: dict[str, Any] = {"dialog_turns_per_batch": batch}
    if side == WORKER:
        return LLMCollector(partial(make_env, batch), policy_factory=InstantPolicy, num_collectors=1, **options)
    if side == STORED:
        options["replay_buffer"] = ReplayBuffer(storage=RaggedStorage(20 * TURNS * batch))
    return LLMCollector(make_env(batch), policy=InstantPolicy(), **options)


def measure(side: str, batch: int, rounds: int) -> dict[int, tuple[float, float]]:
    """Milliseconds and bytes of a turn, by its number."""
    least: dict[int, float] = {}
    with counted() as sizes, collecting(side, batch) as collector:
        batches = iter(collector)
        take: Callable[[], Any] = partial(next, batches)
        for number in range((rounds + 1) * TURNS):  # the templates of the first conversations are rendered once
            start = time.process_time()
            take()
            spent = 1e3 * (time.process_time() - start) / batch
            turn = number % TURNS + 1
            least[turn] = min(least.get(turn, spent), spent) if number >= TURNS else spent
    each = len(sizes) // ((rounds + 1) * TURNS)  # elements of a batch; of a worker one message, perhaps some ahead
    last = rounds * TURNS
    moved = {turn: sum(sizes[(last + turn - 1) * each : (last + turn) * each]) / batch for turn in SHOWN}
    return {turn: (least[turn], moved[turn]) for turn in SHOWN}


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--rounds", type=int, default=20, help="conversations one after another")
    add("--quick", action="store_true", help="see that everything runs: batch 1, 1 round")
    add("--out", type=Path, default=report.RESULTS, metavar="DIR")
    arguments = parser.parse_args(argv)
    torch.set_num_threads(1)
    rounds, sizes = (1, (1,)) if arguments.quick else (arguments.rounds, (1, 8))
    rows, found = [], {}
    for batch in sizes:
        for side in (IN_PROCESS, STORED, WORKER):
            print(f"{side}, batch {batch} ...", flush=True)
            figures = found[f"{side}, batch {batch}"] = measure(side, batch, rounds)
            rows.append([side, str(batch), *(f"{ms:.2f}" for ms, _ in figures.values())])
            rows[-1] += [f"{size:,.0f}" if size else "" for _, size in figures.values()]
    arguments.out.mkdir(parents=True, exist_ok=True)
    (arguments.out / "llm_turns.json").write_text(json.dumps(found, indent=1))
    report.write(
        arguments.out,
        "llm_turns.md",
        "What a turn costs, by its number in the conversation",
        f"Milliseconds of processor time over an engine that answers at once ({NEW} tokens), and bytes; of a buffer "
        "those of its elements, of a worker those of its messages. Wanted: the same at every turn, and at most "
        f"{LIMIT_MS[1]} ms at batch 1, {LIMIT_MS[8]} ms at batch 8, in process.",
        report.markdown_table(
            ("", "batch", *(f"ms, turn {n}" for n in SHOWN), *(f"bytes, turn {n}" for n in SHOWN)), rows
        ),
    )


if __name__ == "__main__":
    main()
