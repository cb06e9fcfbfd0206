"""Groups under everything at once: choice, oversampling, updates of the weights, and two replicas of unequal speed.

Each group that was begun is delivered, filtered with its reason, or still in progress at the end; and the lengths that
are delivered have the distribution of those that were begun (two-sample test of Kolmogorov and Smirnov)::

    python -m benchmarks.llm_groups --groups 2000
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from tensordict import TensorDictBase

from rollwright.collectors.llm import LLMCollector
from rollwright.data.llm import FinishReason
from rollwright.envs.llm import ChatEnv
from rollwright.modules.llm.engine import Completion, Engine, Request, Sampling


class Replicas(Engine):
    """Two replicas without a model: the second one is three times slower; answers are of 1 to 64 tokens."""

    def __init__(self) -> None:
        self.tokenizer, self.sampling = None, Sampling(max_new_tokens=64)
        self.max_length, self.vocab_size, self.end_ids = None, 100, ()
        self._open: dict[Any, list[Any]] = {}  # request, tokens, versions, whether it is the slow one's
        self._over: list[Completion] = []
        self._version = self._steps = 0
        self.lengths: list[int] = []

    def submit(self, requests: Sequence[Request]) -> None:
        for request in requests:
            draw = random.Random(request.seed)
            tokens = torch.tensor([draw.randrange(100) for _ in range(1 + int(63 * draw.random() ** 3))])
            self.lengths.append(len(tokens))
            self._open[request.key] = [request, tokens, [], len(self.lengths) % 2]

    def step(self, tokens: int = 1) -> None:
        self._steps += 1
        for _, text, versions, slow in self._open.values():
            if len(versions) < len(text) and (not slow or self._steps % 3 == 0):
                versions.append(self._version)
        for key in [key for key, (_, text, versions, _) in self._open.items() if len(versions) == len(text)]:
            self._end(key, FinishReason.STOP)

    def _end(self, key: Any, reason: FinishReason) -> None:
        _, text, versions, _ = self._open.pop(key)
        kept = text[: len(versions)]
        self._over.append(Completion(key, kept, -kept.float() / 100, torch.tensor(versions), reason))

    def results(self, timeout: float | None = None) -> list[Completion]:
        until = None if timeout is None else time.monotonic() + timeout
        while self._open and not self._over and (until is None or time.monotonic() < until):
            self.step()
        over, self._over = self._over, []
        return over

    def generate(self, requests: Sequence[Request]) -> list[Completion]:
        raise NotImplementedError

    def cancel(self, keys: Sequence[Any]) -> None:
        for key in keys:
            if key in self._open:
                self._end(key, FinishReason.CANCELLED)

    def pause(self) -> None: ...

    def resume(self) -> None: ...

    def update_weights(self, weights: Any, version: Any = None, **options: Any) -> None:
        self._version = self._version + 1 if version is None else version

    @property
    def version(self) -> int:
        return self._version

    @version.setter
    def version(self, version: Any) -> None:
        self._version = version

    def close(self) -> None: ...


class Policy:
    """What a collector takes for a policy with an engine."""

    def __init__(self) -> None:
        self.engine = Replicas()

    def __call__(self, td: TensorDictBase) -> TensorDictBase:
        raise AssertionError("the collector asks the engine")


def kept(group: TensorDictBase) -> bool | str:
    """Keeps about half of the groups, whatever their lengths."""
    return random.Random(int(group["group_id"][0])).random() < 0.5 or "drawn by lot"


def p_value(one: Sequence[int], other: Sequence[int]) -> float:
    """Of the two-sample test of Kolmogorov and Smirnov, asymptotic."""
    points = np.sort(np.concatenate([one, other]))
    of = [np.searchsorted(np.sort(each), points, side="right") / len(each) for each in (one, other)]
    distance = float(np.abs(of[0] - of[1]).max()) * np.sqrt(len(one) * len(other) / (len(one) + len(other)))
    return float(min(1.0, 2 * sum((-1) ** (k - 1) * np.exp(-2 * (k * distance) ** 2) for k in range(1, 100))))


def run(groups: int, slots: int, repeats: int, seed: int) -> dict[str, Any]:
    """Collect until so many groups were begun; what became of them."""
    draw, policy = random.Random(seed), Policy()
    rows = [{"tokens": [number % 100, 1]} for number in range(groups)]
    env = ChatEnv.from_dataloader(
        rows, input_mode="tokens", batch_size=slots, repeats=repeats, group_repeats=True, epochs=1, seed=seed
    )
    begun, delivered, seen = time.perf_counter(), [], set()
    with LLMCollector(env, policy, groups_per_batch=8, keep_group=kept) as collector:
        for batch in collector:
            seen |= set(batch["group_id"].tolist())
            delivered += [len(row["tokens", "response"]) for row in batch.unbind(0)]
            if draw.random() < 0.5:
                policy.engine.update_weights(None)
        stats = collector.stats()
    filtered = sum(stats["groups_filtered"].values())
    return {
        "groups": groups,
        "delivered": len(seen),
        "filtered": dict(stats["groups_filtered"]),
        "held at the end": groups - len(seen) - filtered,
        "conversations unfinished": len(set(stats["conversations_unfinished"])),
        "updates": policy.engine.version,
        "p": p_value(delivered, policy.engine.lengths),
        "seconds": time.perf_counter() - begun,
    }


def main() -> None:
    """Print what became of the groups."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--groups", type=int, default=2000)
    parser.add_argument("--slots", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=4)
    parser.add_argument("--seed", type=int, default=0)
    for name, value in run(**vars(parser.parse_args())).items():
        print(f"{name}: {value}")


if __name__ == "__main__":
    main()
