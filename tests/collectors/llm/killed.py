"""A program that collects groups, and saves what it has and the collector's state together, until it is killed."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch

from rollwright.collectors.llm import LLMCollector


def main(folder: str, async_envs: bool) -> None:
    from tests.collectors.llm.fakes import FakeEnv, FakePolicy

    path = Path(folder) / "saved.pt"
    env = FakeEnv(5, prompts=40, repeats=4, most_turns=3)
    collector = LLMCollector(env, FakePolicy(longest=16, delay_s=0.0005), groups_per_batch=1, async_envs=async_envs)
    done = []
    if path.exists():
        saved = torch.load(path, weights_only=True)
        collector.load_state_dict(saved["collector"])
        done = saved["done"]
    print("running", flush=True)
    for batch in collector:
        done.append([batch[key].tolist() for key in ("group_id", "repeat", "turn")])
        torch.save({"collector": collector.state_dict(), "done": done}, f"{path}.new")
        os.replace(f"{path}.new", path)
    print("over", flush=True)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2] == "stream")
