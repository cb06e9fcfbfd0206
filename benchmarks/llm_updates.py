"""Is anything lost, or wrong, where weights change while conversations run?

32 conversations take their turns in a background collector, while the weights are replaced at random moments. Then each
record is checked: every conversation has each of its turns once; each prompt begins with the tokens of the turn before
it; the loss mask is of the tokens
that were sampled in it; and the log-probability of each token is that of a forward pass under
the version that the token says. With the cache of keys and values kept, that last one differs, and is printed::

    python -m benchmarks.llm_updates                       # transformers
    python -m benchmarks.llm_updates --engine vllm         # needs vllm
"""

from __future__ import annotations

import argparse
import copy
import os
import random
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks import report
from benchmarks.llm_cases import make_tokenizer
from rollwright.collectors.llm import LLMCollector
from rollwright.data import RaggedStorage, ReplayBuffer
from rollwright.envs.llm import ChatEnv
from rollwright.modules.llm import AsyncVLLM, Sampling, TransformersWrapper, token_log_probs, vLLMWrapper

NEW, TURNS, SLOTS = 12, 4, 32
TOLERANCE = 1e-4  # of log-probabilities, where the cache was rebuilt
LIMIT_S = 900.0
VLLM = {"dtype": "float32", "enforce_eager": True, "max_model_len": 512, "block_size": 32}


class User:
    """Asks for more."""

    def __init__(self, row: Any) -> None: ...

    def reply(self, messages: Any) -> Any:
        return "more?", 1.0, False


def make_models(tokenizer: Any, count: int = 2) -> list[Any]:
    """Of one structure; their logits tell one from the other."""
    import transformers

    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 64}
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "max_position_embeddings": 512}
    ends = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id, "bos_token_id": None}
    config = transformers.Qwen3Config(vocab_size=len(tokenizer), initializer_range=0.1, **sizes, **heads, **ends)
    models = []
    for seed in range(count):
        torch.manual_seed(seed)
        models.append(transformers.Qwen3ForCausalLM(config).eval())
    return models


def on_transformers(models: Sequence[Any], tokenizer: Any) -> Any:
    """A policy that samples in this process."""
    how = {"generate_kwargs": {"max_new_tokens": NEW}, "input_mode": "history", "max_batch_size": SLOTS}
    return TransformersWrapper(copy.deepcopy(models[0]), tokenizer=tokenizer, **how)


def on_vllm(llm: Any) -> Any:
    """A policy over vLLM: a folder with a model, or an engine of it that runs."""
    engine = AsyncVLLM(llm, **VLLM) if isinstance(llm, str) else AsyncVLLM(llm)
    return vLLMWrapper(engine, generate_kwargs={"max_new_tokens": NEW}, input_mode="history")


def collect(policy: Any, models: Sequence[Any], tokenizer: Any, updates: int, turns: int, cache: Any) -> list[Any]:
    """The records of a run whose weights were replaced at random moments.

    Raises:
        TimeoutError: it took too long.
    """
    rows = [{"query": f"{number}?"} for number in range(turns // TURNS)]
    total = TURNS * len(rows)
    env = ChatEnv.from_dataloader(
        rows, tokenizer=tokenizer, batch_size=SLOTS, epochs=1, max_turns=TURNS, environment=User, input_mode="history"
    )
    buffer = ReplayBuffer(storage=RaggedStorage(total + 1))
    draw, pause = random.Random(0), threading.Event()
    until = time.monotonic() + LIMIT_S
    moments = sorted(draw.randrange(total - SLOTS) for _ in range(updates))  # turns that are in the buffer
    policy.engine.update_weights(models[0], 0)
    options = {"dialog_turns_per_batch": 1, "async_envs": True, "weight_update_cache": cache, "replay_buffer": buffer}
    with LLMCollector(env, policy, **options, track_policy_version=True) as collector:
        collector.start()
        for number, moment in enumerate(moments, 1):
            while len(buffer) < moment:
                _wait(pause, 0.001, until, len(buffer), total)
            pause.wait(0.005 * draw.random())
            collector.update_policy_weights_(models[number % len(models)])
        seen, stands = -1, time.monotonic()
        while len(buffer) < total and time.monotonic() < stands + 60.0:  # else some are lost
            _wait(pause, 0.01, until, len(buffer), total)
            if len(buffer) != seen:
                seen, stands = len(buffer), time.monotonic()
        pause.wait(0.2)  # for any that come twice
        return [buffer[place] for place in range(len(buffer))]


def _wait(pause: threading.Event, seconds: float, until: float, done: int, total: int) -> None:
    pause.wait(seconds)
    if time.monotonic() > until:
        raise TimeoutError(f"waited {LIMIT_S:g} s for {total} turns; {done} have come")


def check(records: Sequence[Any], models: Sequence[Any], conversations: int) -> dict[str, float]:
    """What was found; see the module."""
    by_turn: dict[tuple[int, int], list[Any]] = {}
    for record in records:
        by_turn.setdefault((int(record["prompt_index"]), int(record["turn"])), []).append(record)
    expected = {(row, turn) for row in range(conversations) for turn in range(TURNS)}
    drifted = masks = several = boundaries = tokens = 0
    worst = 0.0
    for (row, turn), (record, *_) in by_turn.items():
        full, response = record["tokens", "full"], record["tokens", "response"]
        before = by_turn.get((row, turn - 1))
        if before is not None:
            whole = before[0]["tokens", "full"]
            boundaries += 1
            drifted += record["tokens", "prompt"][: len(whole)].tolist() != whole.tolist()
        sampled = torch.arange(len(full)) >= len(record["tokens", "prompt"])
        masks += not torch.equal(record["masks", "all_assistant_mask"], sampled)
        versions = record["tokens", "policy_version"]
        several += len(set(versions.tolist())) > 1
        tokens += len(response)
        for number, model in enumerate(models):
            mine = versions % len(models) == number
            if bool(mine.any()):
                with torch.no_grad():
                    logits = model(full[None]).logits[0, len(full) - len(response) - 1 : -1]
                wanted = token_log_probs(logits, response, Sampling())
                worst = max(worst, float((record["log_probs", "response"] - wanted).abs()[mine].max()))
    return {
        "turns": len(records),
        "lost": len(expected - by_turn.keys()),
        "twice": len(records) - len(by_turn),
        "boundaries": boundaries,
        "drifted": drifted,
        "wrong masks": masks,
        "turns of several versions": several,
        "newest version": max(int(record["policy_version"]) for record in records),
        "difference": worst,
    }


def run(
    policy: Any, models: Sequence[Any], tokenizer: Any, *, updates: int = 200, turns: int = 1360, cache: Any = "rebuild"
) -> dict[str, float]:
    """Collect, and check."""
    begun = time.perf_counter()
    records = collect(policy, models, tokenizer, updates, turns, cache)
    seconds = time.perf_counter() - begun
    return {"updates": updates, **check(records, models, turns // TURNS), "seconds": seconds}


def wrong(found: dict[str, float], cache: str) -> list[str]:
    """What is not as it must be."""
    names = [name for name in ("lost", "twice", "drifted", "wrong masks") if found[name]]
    if cache == "rebuild" and not found["difference"] < TOLERANCE:
        names.append("difference")
    return names


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--engine", choices=("transformers", "vllm"), default="transformers")
    add("--updates", type=int, default=200)
    add("--turns", type=int, default=1360)
    add("--out", type=Path, default=report.RESULTS, metavar="DIR")
    arguments = parser.parse_args(argv)
    torch.set_num_threads(1)
    tokenizer = make_tokenizer()
    models = make_models(tokenizer)
    with tempfile.TemporaryDirectory() as folder:
        make: Callable[[], Any] = partial(on_transformers, models, tokenizer)
        if arguments.engine == "vllm":
            os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
            models[0].save_pretrained(folder)
            tokenizer.save_pretrained(folder)
            make = partial(on_vllm, folder)
        rows: list[list[str]] = []
        faults: list[str] = []
        for cache in ("rebuild", "keep"):
            policy = make()
            found = run(policy, models, tokenizer, updates=arguments.updates, turns=arguments.turns, cache=cache)
            policy.engine.close()
            faults += [f"{cache}: {name}" for name in wrong(found, cache)]
            header = list(found)
            rows.append(
                [cache, *(f"{value:.2g}" if name == "difference" else f"{value:,.0f}" for name, value in found.items())]
            )
            print(dict(zip(header, rows[-1][1:], strict=True)), flush=True)
    report.write(
        arguments.out,
        f"llm_updates_{arguments.engine}.md",
        f"Updates of the weights at random moments, {SLOTS} conversations side by side, on {arguments.engine}",
        "Difference: the largest one of a log-probability to a forward pass under the version of its token; below "
        f"{TOLERANCE:g} where the cache is rebuilt. No turn is lost, comes twice, drifts or has a wrong mask.",
        report.markdown_table(("cache", *header), rows),
    )
    if faults:
        raise SystemExit(f"wrong: {', '.join(faults)}")


if __name__ == "__main__":
    main()
