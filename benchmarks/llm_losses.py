"""Does TorchRL train on our batches as they are?

A batch of whole groups, of conversations with two turns, goes to TorchRL in a process of its own: each record as nested
dictionaries, every entry under its key but the messages, which are of a class of ours. Its ``GRPOLoss`` computes the
log-probabilities of the policy that has sampled, hence a ratio of 1; its ``MCAdvantage`` computes the advantages again.
"""

from __future__ import annotations

import argparse
import math
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from tensordict import TensorDictBase

from benchmarks import report
from benchmarks.llm_cases import make_model, make_tokenizer, questions
from benchmarks.peers.protocol import ROOT, PeerError, run_once
from rollwright.collectors.llm import LLMCollector
from rollwright.data.llm import group_advantages
from rollwright.envs.llm import ChatEnv
from rollwright.modules.llm import TransformersWrapper

GROUPS, SAMPLES = 4, 4


class AsksAgain:
    """An environment of one more question."""

    def __init__(self, row: Mapping[str, Any]) -> None:
        self.turns = 0

    def reply(self, messages: list[dict[str, Any]]) -> tuple[list[dict[str, str]], float, bool]:
        self.turns += 1
        reward = len(messages[-1]["content"]) / 16
        return ([{"role": "user", "content": "And then?"}] if self.turns < 2 else []), reward, self.turns == 2


def collect() -> TensorDictBase:
    """Whole groups, with advantages."""
    tokenizer = make_tokenizer()
    policy = TransformersWrapper(
        make_model(tokenizer, ends=True), tokenizer=tokenizer, generate_kwargs={"max_new_tokens": 16}
    )
    rows = [{"query": text} for text in questions(GROUPS)]
    env = ChatEnv.from_dataloader(
        rows,
        tokenizer=tokenizer,
        batch_size=GROUPS * SAMPLES,
        repeats=SAMPLES,
        group_repeats=True,
        environment=AsksAgain,
    )
    collector = LLMCollector(env, policy=policy, groups_per_batch=GROUPS)
    try:
        batch: TensorDictBase = next(iter(collector))
        return batch
    finally:
        collector.shutdown()


def saved_rows(batch: TensorDictBase) -> list[dict[str, Any]]:
    """Records as nested dictionaries of tensors and texts; without messages."""
    return [row.exclude("history", ("next", "history")).to_dict() for row in batch.reshape(-1).unbind(0)]


def ask(python: Path, batch: TensorDictBase) -> dict[str, Any]:
    """What TorchRL makes of a batch.

    Raises:
        PeerError: it fails.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "batch.pt"
        torch.save(saved_rows(batch), path)
        return run_once(python, "benchmarks.peers.torchrl_losses", str(path), str(SAMPLES))


def largest_difference(batch: TensorDictBase, theirs: list[list[float]], trajectory_return: Any) -> float:
    """Between our advantages and theirs, over all records."""
    ours = {}
    for row in group_advantages(batch, trajectory_return=trajectory_return).reshape(-1).unbind(0):
        ours[tuple(int(row[key]) for key in ("group_id", "repeat", "turn"))] = float(row["advantage"])
    if len(theirs) != len(ours):
        raise RuntimeError(f"expected {len(ours)} advantages, got {len(theirs)}")
    return max(abs(ours[int(group), int(repeat), int(turn)] - value) for group, repeat, turn, value in theirs)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--torchrl-python", type=Path, default=ROOT / ".venv-bench-torchrl/bin/python", metavar="PATH")
    parser.add_argument("--out", type=Path, default=report.RESULTS, metavar="DIR")
    arguments = parser.parse_args(argv)
    torch.set_num_threads(1)
    batch = group_advantages(collect())
    try:
        found = ask(arguments.torchrl_python, batch)
    except PeerError as error:
        report.write(arguments.out, "llm_losses.md", "TorchRL's losses on our batches", f"Not measured: {error}")
        return
    grpo = found["grpo"]
    rows = [[f"GRPOLoss, {way}: {name}", f"{value:.6g}"] for way, of in grpo.items() for name, value in of.items()]
    rows += [
        [f"advantage, {name}: largest difference", f"{largest_difference(batch, found[key], value):.2e}"]
        for name, key, value in (("of steps", "steps", None), ("of conversations", "sum", "sum"))
    ]
    report.write(
        arguments.out,
        "llm_losses.md",
        "TorchRL's losses on our batches",
        f"{batch.numel()} records of {GROUPS} groups of {SAMPLES} conversations with two turns.",
        report.markdown_table(("", ""), rows),
    )
    if not all(is_sound(of) for of in grpo.values()):
        raise SystemExit("a loss or a gradient is missing or not finite")


def is_sound(figures: Mapping[str, float]) -> bool:
    """Whether loss and gradients of all parameters are finite."""
    whole = figures["gradients"] == figures["parameters"]
    return whole and bool(figures["finite"]) and math.isfinite(figures["loss"])


if __name__ == "__main__":
    main()
