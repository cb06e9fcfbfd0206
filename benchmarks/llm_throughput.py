"""How many tokens does a second of processor time give, where answers have unequal lengths?

128 requests with prompts of 8 to 63 tokens and answers of 1 to 64, sampled with log-probabilities: our engine, which
takes requests in flight, beside continuous batching of transformers, which does, too. The sides take turns; a figure is
the best of all rounds, for others on the machine make it smaller, never larger.

With ``--waits``, another question: are tools and environments that take 50 ms hidden? 32 conversations, each of whose
answers is followed by one, over an engine without a model that takes 12 ms a step and 0.25 ms for each answer in it;
beside the same where they return at once::

    python -m benchmarks.llm_throughput --waits
"""

from __future__ import annotations

import argparse
import logging
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from benchmarks import llm_groups, report
from benchmarks.llm_cases import make_tokenizer
from rollwright.collectors.llm import LLMCollector
from rollwright.envs.llm import ChatEnv
from rollwright.envs.llm.tools import ParsedAnswer, ToolCall, ToolParser, Toolset
from rollwright.modules.llm import Request, Sampling, TransformersEngine

OURS, PEER = "TransformersEngine", "continuous batching of transformers"
TARGET = 1.4  # times the peer's
_LIMIT_S = 120.0  # for an answer of the peer
HIDDEN = 0.9  # of the throughput with tools and environments that return at once
STEP_S, ANSWER_S, WAIT_S, SLOTS, TURNS, LONGEST = 0.012, 0.00025, 0.05, 32, 3, 128
ENVIRONMENT, TOOL = "environment", "tool"
SIZES = {"0.04 M parameters": (32, 2), "3.4 M parameters": (256, 4)}  # width and layers


class Work(NamedTuple):
    """What is generated.

    Attributes:
        prompts: token ids.
        lengths: of the answers.
    """

    prompts: list[torch.Tensor]
    lengths: list[int]


def make_work(number: int, longest: int = 64, seed: int = 0) -> Work:
    """Prompts, and lengths of answers from 1 on."""
    generator = torch.Generator().manual_seed(seed)
    sizes = torch.randint(8, 64, (number,), generator=generator).tolist()
    lengths = torch.randint(1, longest + 1, (number,), generator=generator).tolist()
    return Work([torch.randint(0, 400, (size,), generator=generator) for size in sizes], lengths)


def make_model(width: int, layers: int) -> Any:
    """Random weights; no token ends an answer."""
    import transformers

    torch.manual_seed(0)
    none = dict.fromkeys(("eos_token_id", "pad_token_id", "bos_token_id"))
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": width // 4}
    sizes = {"hidden_size": width, "intermediate_size": 2 * width, "num_hidden_layers": layers}
    config = transformers.Qwen3Config(vocab_size=400, max_position_embeddings=256, **sizes, **heads, **none)
    return transformers.Qwen3ForCausalLM(config).eval()


def ours(model: Any, work: Work, batch: int) -> int:
    """Tokens that our engine generates."""
    engine = TransformersEngine(model, sampling=Sampling(max_new_tokens=max(work.lengths)), max_batch_size=batch)
    pairs = enumerate(zip(work.prompts, work.lengths, strict=True))
    engine.submit([Request(key, prompt, key, max_new_tokens=length) for key, (prompt, length) in pairs])
    tokens = 0
    while engine.in_progress:
        tokens += sum(len(done.tokens) for done in engine.results())
    return tokens


def theirs(model: Any, work: Work, batch: int) -> int:
    """Tokens that transformers generates."""
    from transformers import ContinuousBatchingConfig, GenerationConfig

    how = GenerationConfig(do_sample=True, eos_token_id=-1, pad_token_id=0, max_new_tokens=max(work.lengths))
    room = ContinuousBatchingConfig(
        page_size=32, num_blocks=2000, max_batch_tokens=2048, max_requests_per_batch=batch, return_logprobs=True
    )
    manager = model.init_continuous_batching(generation_config=how, continuous_batching_config=room)
    manager.start()
    try:
        for key, (prompt, length) in enumerate(zip(work.prompts, work.lengths, strict=True)):
            manager.add_request(prompt.tolist(), request_id=str(key), max_new_tokens=length)
        tokens, left = 0, len(work.lengths)
        while left:
            found = manager.get_result(timeout=_LIMIT_S)
            if found is None:
                raise TimeoutError(f"continuous batching: waited {_LIMIT_S:g} s for {left} answers")
            if found.is_finished():
                tokens, left = tokens + len(found.generated_tokens), left - 1
    finally:
        manager.stop(block=True)
    return tokens


def rates(sides: dict[str, Callable[[], int]], expected: int, rounds: int) -> dict[str, float]:
    """Tokens a second of processor time, the best of all rounds; the sides take turns.

    Raises:
        AssertionError: a side has generated another number of tokens.
    """
    best = dict.fromkeys(sides, 0.0)
    for _ in range(rounds):
        for name, call in sides.items():
            begun = time.process_time()
            tokens = call()
            seconds = time.process_time() - begun
            assert tokens == expected, (name, tokens, expected)
            best[name] = max(best[name], tokens / seconds)
    return best


class Paced(llm_groups.Replicas):
    """An engine without a model whose steps take time, more of it where more answers are in progress."""

    def __init__(self) -> None:
        super().__init__()
        self.tokenizer, self._until = make_tokenizer(), 0.0
        self.sampling, self.end_ids = Sampling(max_new_tokens=LONGEST), (self.tokenizer.eos_token_id,)

    def submit(self, requests: Sequence[Request]) -> None:
        if not self._open:
            self._until = time.monotonic()
        for request in requests:
            draw = torch.Generator().manual_seed(request.seed)
            length = int(torch.randint(1, LONGEST + 1, (), generator=draw))
            tokens = torch.randint(3, 100, (length,), generator=draw)
            self._open[request.key] = [request, tokens, [], 0]

    def step(self, tokens: int = 1) -> None:
        self._until = max(self._until, time.monotonic() - STEP_S) + STEP_S + ANSWER_S * len(self._open)
        time.sleep(max(self._until - time.monotonic(), 0.0))  # what a GPU computes: the processor is free
        super().step(tokens)


class PacedPolicy(llm_groups.Policy):
    """A policy over :class:`Paced`."""

    def __init__(self) -> None:
        self.engine = Paced()


class Calls(ToolParser):
    """Reads the call of a tool in each answer."""

    def parse(self, text: str) -> ParsedAnswer:
        return ParsedAnswer(text, (ToolCall("look_up", {}),))


def waiting(kind: str, wait_s: float, conversations: int) -> float:
    """Seconds that conversations take, each of whose answers is followed by a tool or by its environment."""

    class User:
        def __init__(self, row: Any) -> None: ...

        def reply(self, messages: Any) -> Any:
            time.sleep(wait_s)
            return "Go on.", 0.0, False

    def look_up() -> str:
        time.sleep(wait_s)
        return "42"

    follows: dict[str, Any] = {"environment": User}
    if kind == TOOL:
        follows = {"tools": Toolset([look_up], parser=Calls(), max_rounds=TURNS)}
    rows, tokenizer = [{"query": f"What is {number}?"} for number in range(1000)], make_tokenizer()
    env = ChatEnv.from_dataloader(rows, tokenizer=tokenizer, batch_size=SLOTS, epochs=None, max_turns=TURNS, **follows)
    turns, total = 0, TURNS * conversations
    how = {"dialog_turns_per_batch": SLOTS, "total_dialog_turns": total, "async_envs": True}
    with LLMCollector(env, PacedPolicy(), **how) as collector:
        begun = time.perf_counter()
        for batch in collector:
            turns += len(batch)
        seconds = time.perf_counter() - begun
    assert turns == total, (turns, total)
    return seconds


def hidden(kind: str, conversations: int, rounds: int) -> list[str]:
    """A row of the table: turns a second with and without waits, the best of all rounds, which take turns."""
    best = dict.fromkeys((0.0, WAIT_S), 0.0)
    for _ in range(rounds):
        for wait_s in best:
            best[wait_s] = max(best[wait_s], TURNS * conversations / waiting(kind, wait_s, conversations))
    at_once, with_waits = best.values()
    times = with_waits / at_once
    return [kind, f"{at_once:.1f}", f"{with_waits:.1f}", f"{times:.2f}", "yes" if times >= HIDDEN else "no"]


def rows_of(name: str, batch: int, found: dict[str, float]) -> Sequence[str]:
    """A row of the table."""
    times = found[OURS] / found[PEER]
    kept = "yes" if times >= TARGET else "no"
    return [f"{name}, batch {batch}", f"{found[OURS]:,.0f}", f"{found[PEER]:,.0f}", f"{times:.2f}", kept]


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--requests", type=int, default=128)
    parser.add_argument("--batch", type=int, action="append", help="answers side by side (default: 64 and 128)")
    parser.add_argument("--waits", action="store_true", help="measure how tools and environments are hidden")
    parser.add_argument("--out", type=Path, default=report.RESULTS, metavar="DIR")
    arguments = parser.parse_args(argv)
    torch.set_num_threads(1)
    if arguments.waits:
        report.write(
            arguments.out,
            "llm_waits.md",
            f"Tools and environments of {1e3 * WAIT_S:g} ms, {SLOTS} conversations side by side",
            f"Turns a second; answers of 1 to {LONGEST} tokens, a step of {1e3 * STEP_S:g} ms and "
            f"{1e3 * ANSWER_S:g} ms for each answer. Promised: at least {HIDDEN} of the turns with those that return "
            "at once.",
            report.markdown_table(
                ("after each answer", "at once", f"{1e3 * WAIT_S:g} ms", "times", "kept"),
                [hidden(kind, arguments.requests, arguments.rounds) for kind in (ENVIRONMENT, TOOL)],
            ),
        )
        return
    logging.disable(logging.WARNING)
    work, rows = make_work(arguments.requests), []
    for name, (width, layers) in SIZES.items():
        model, peer = make_model(width, layers), make_model(width, layers)
        peer.set_attn_implementation("paged|sdpa")
        for batch in arguments.batch or [64, 128]:

            def own(model: Any = model, batch: int = batch) -> int:
                return ours(model, work, batch)

            def other(peer: Any = peer, batch: int = batch) -> int:
                return theirs(peer, work, batch)

            rows.append(rows_of(name, batch, rates({OURS: own, PEER: other}, sum(work.lengths), arguments.rounds)))
            print(rows[-1], flush=True)
    logging.disable(logging.NOTSET)
    report.write(
        arguments.out,
        "llm_throughput.md",
        "Tokens a second of processor time, of answers of 1 to 64 tokens",
        f"{arguments.requests} requests. Promised: at least {TARGET} times {PEER}.",
        report.markdown_table(("model", OURS, PEER, "times", "kept"), rows),
    )


if __name__ == "__main__":
    main()
