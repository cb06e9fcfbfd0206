"""What does a turn of a conversation cost, beside the generation itself?

Milliseconds of processor time a turn over the same generation by hand (prefill, decode with a cache, sampling and
log-probabilities, under inference mode), which takes its turns in the same process. All sides give the model the same
work (its calls are counted); time within it is left out of the difference, for its noise is larger than the rest. Each
figure is the least of all rounds: others on the machine make it larger, never smaller.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks import report
from benchmarks.counts import OperationCounter
from benchmarks.llm_cases import (
    CASES,
    CHAT,
    HAND,
    Case,
    Figures,
    ModelClock,
    check_lengths,
    cpu_ms,
    generate,
    make_model,
    make_tokenizer,
    prompts_of,
    questions,
)
from benchmarks.peers.protocol import ROOT, PeerError, run_once
from rollwright.collectors.llm import LLMCollector
from rollwright.data import RaggedStorage, ReplayBuffer
from rollwright.envs.llm import ChatEnv, LLMEnv
from rollwright.modules.llm import TransformersWrapper

NATIVE, STORED, PLAIN, TORCHRL = "native", "native, into a ragged buffer", "TensorDicts", "TorchRL"
LIMIT_MS = {1: 2.0}  # by batch size; else 1 ms
PEER_LIMIT_S = 1800.0
_ROOM = 10_000  # turns in the buffer


@contextmanager
def collecting(case: Case, side: str, model: Any, tokenizer: Any) -> Iterator[Callable[[], Any]]:
    """A function that collects a batch of one turn of each conversation."""
    rows = [{"query" if case.env == CHAT else "text": text} for text in questions(case.batch)]
    kind: Any = ChatEnv if case.env == CHAT else LLMEnv
    env = kind.from_dataloader(rows, tokenizer=tokenizer, batch_size=case.batch)
    wrapper = TransformersWrapper(
        model,
        tokenizer=tokenizer,
        input_mode="history" if case.env == CHAT else None,
        generate_kwargs={"max_new_tokens": case.new},
    )
    policy: Any = (lambda td: wrapper(td)) if side == PLAIN else wrapper  # an engine that nobody sees
    buffer = ReplayBuffer(storage=RaggedStorage(_ROOM)) if side == STORED else None
    collector = LLMCollector(env, policy=policy, dialog_turns_per_batch=case.batch, replay_buffer=buffer)
    batches = iter(collector)
    key = ("tokens", "response") if case.env == CHAT else "tokens_response"

    try:
        first = next(batches)
        first = first if buffer is None else buffer[:]
        check_lengths(first.reshape(-1).get(key, as_list=True), case)
        yield lambda: next(batches)
    finally:
        collector.shutdown()


def measure(case: Case, model: Any, clock: ModelClock, tokenizer: Any, rounds: int) -> dict[str, Figures]:
    """Milliseconds of processor time a turn of our sides and by hand, one figure a round."""
    prompts = prompts_of(case, tokenizer)
    with (
        collecting(case, NATIVE, model, tokenizer) as native,
        collecting(case, STORED, model, tokenizer) as stored,
        collecting(case, PLAIN, model, tokenizer) as plain,
    ):
        hand = partial(generate, model, prompts, case.new)
        return cpu_ms({HAND: hand, NATIVE: native, STORED: stored, PLAIN: plain}, clock, case.batch, rounds)


def bytes_a_token(case: Case, model: Any, tokenizer: Any) -> float:
    """Bytes that tensor operations move for a token of an answer, those of generation itself left out."""
    counted = []
    prompts = prompts_of(case, tokenizer)
    with collecting(case, NATIVE, model, tokenizer) as collect:
        for call in (collect, lambda: generate(model, prompts, case.new)):
            call()
            counter = OperationCounter()
            with counter:
                call()
            counted.append(counter.bytes_moved)
    return (counted[0] - counted[1]) / (case.batch * case.new)


def rows_of(
    case: Case, own: Mapping[str, Figures], peer: Mapping[str, Figures] | None, missing: str
) -> list[list[str]]:
    """Rows of the table."""
    rows = []
    for name, figures, side in ((case.name, own, NATIVE), ("", own, STORED), ("", own, PLAIN), ("", peer, TORCHRL)):
        if figures is None:
            rows.append([name, side, f"not measured: {missing}", "", "", "", ""])
            continue
        total = min(figures[side].total)
        over = min(figures[side].outside) - min(figures[HAND].outside)
        limit = LIMIT_MS.get(case.batch, 1.0)
        kept = ("yes" if over <= limit else "no") if side in (NATIVE, STORED) else ""
        rows.append(
            [
                name,
                side,
                f"{min(figures[HAND].total):.2f}",
                f"{total:.2f}",
                f"{figures[side].calls}",
                f"{over:.2f}",
                kept,
            ]
        )
    return rows


def ask_peer(python: Path, cases: list[Case], rounds: int) -> tuple[Mapping[str, dict[str, Figures]], str]:
    """Figures of TorchRL by name of the case; or why there are none."""
    arguments = (str(rounds), json.dumps(cases))
    try:
        found = run_once(python, "benchmarks.peers.torchrl_llm", *arguments, limit_s=PEER_LIMIT_S)
    except PeerError as error:
        return {}, str(error)
    return {name: {side: Figures(*of) for side, of in sides.items()} for name, sides in found.items()}, ""


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--rounds", type=int, default=40, help="batches of each side")
    add("--batch", type=int, action="append", help="one of the batch sizes (may be repeated; default: all)")
    add("--quick", action="store_true", help="see that everything runs: batch 1, 1 round")
    add("--no-peers", action="store_true", help="measure no other packages")
    add("--torchrl-python", type=Path, default=ROOT / ".venv-bench-torchrl/bin/python", metavar="PATH")
    add("--out", type=Path, default=report.RESULTS, metavar="DIR")
    arguments = parser.parse_args(argv)
    if arguments.quick:
        arguments.rounds, arguments.batch = 1, arguments.batch or [1]
    torch.set_num_threads(1)
    cases = [case for case in CASES if not arguments.batch or case.batch in arguments.batch]
    tokenizer = make_tokenizer()
    model = make_model(tokenizer)
    clock = ModelClock(model)
    own = {}
    for case in cases:
        print(f"{case.name} ...", flush=True)
        own[case.name] = measure(case, model, clock, tokenizer, arguments.rounds)
    peers, missing = (
        ({}, "--no-peers") if arguments.no_peers else ask_peer(arguments.torchrl_python, cases, arguments.rounds)
    )
    moved = [[case.name, f"{bytes_a_token(case, model, tokenizer):.0f}"] for case in cases]
    arguments.out.mkdir(parents=True, exist_ok=True)
    (arguments.out / "llm.json").write_text(json.dumps({"rollwright": own, "torchrl": peers}, indent=1))
    report.write(
        arguments.out,
        "llm.md",
        "Processor time of a turn of a conversation",
        f"Milliseconds, the least of {arguments.rounds} batches; the sides take turns. 'Over by hand' is "
        "what is spent outside the model, less what generation by hand spends there. Promised: at most "
        "1 ms a turn over generation by hand from batch 8 on, 2 ms at batch 1.",
        report.markdown_table(
            ("case", "", "by hand", "collector", "model calls", "over by hand", "kept"),
            [row for case in cases for row in rows_of(case, own[case.name], peers.get(case.name), missing)],
        ),
        "Bytes that tensor operations move for a token of an answer, beside those of generation: prompts, masks and "
        "all entries of the record among them.",
        report.markdown_table(("case", "bytes"), moved),
    )


if __name__ == "__main__":
    main()
