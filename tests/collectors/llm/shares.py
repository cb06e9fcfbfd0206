"""A count of every turn that workers deliver, while they are killed."""

from __future__ import annotations

import collections
import os
import random
import signal
import time
import warnings
from functools import partial

from tests.collectors.llm.fakes import FakeEnv, FakePolicy

from rollwright.collectors.llm import LLMCollector
from rollwright.data import RaggedStorage, ReplayBuffer
from rollwright.envs import AsyncEnvPool, StepCounter, TransformedEnv
from rollwright.envs.llm import ChatEnv

KEYS = ("prompt_index", "epoch", "repeat", "turn")
COUNTED = tuple[int, ...]


class Talks:
    """Replies up to three times."""

    def __init__(self, row):
        self.left = row["turns"]

    def reply(self, messages):
        self.left -= 1
        return [{"role": "user", "content": "again"}], float(len(messages)), self.left < 0

    def state_dict(self):
        return {"left": self.left}

    def load_state_dict(self, state):
        self.left = state["left"]


def chats(slots: int, *, prompts: int, repeats: int):
    """An environment on TensorDicts, of text."""
    rows = [{"text": "x" * (1 + number), "turns": number * 7 % 4} for number in range(prompts)]
    options = {"input_mode": "text", "environment": Talks, "repeats": repeats, "epochs": 1}
    env = ChatEnv.from_dataloader(rows, batch_size=slots, group_repeats=True, **options)
    return TransformedEnv(env, StepCounter())


def answers(delay_s: float):
    """A policy without an engine, whose answer shows what it has read."""

    def answer(td):
        time.sleep(delay_s)
        td["text", "response"] = [f"{len(prompt)} letters" for prompt in td["text", "prompt"]]
        return td

    return answer


def pool(slots: int, **options):
    """A pool of environments on TensorDicts, each with a part of the data."""
    return AsyncEnvPool([partial(part_of_chats, number, slots, **options) for number in range(slots)], stack="lazy")


def part_of_chats(number: int, count: int, *, prompts: int, repeats: int):
    """An environment of one slot that has every ``count``-th prompt."""
    rows = [{"text": "x" * (1 + each), "turns": each * 7 % 4} for each in range(number, prompts, count)]
    options = {"input_mode": "text", "environment": Talks, "repeats": repeats, "epochs": 1}
    return ChatEnv.from_dataloader(rows, batch_size=1, **options)


def make(num_collectors: int = 2, *, env=None, delay_s: float = 0.0005, plain: bool | str = False, **options):
    """A collector of fakes, with workers that are replaced; ``plain``: TensorDicts pass; ``"pool"``: of a pool."""
    given = {"prompts": 30, "repeats": 4, **(env or {})}
    how = {"on_worker_failure": "restart", "max_restarts": 1000, "restart_delay": 0.0} if num_collectors else {}
    count = {"num_collectors": num_collectors} if num_collectors else {}
    if plain:
        env = partial(pool if plain == "pool" else chats, given.pop("slots", 5), **given)
        return LLMCollector(env, policy_factory=partial(answers, delay_s), **count, **how, **options)
    kind = FakeEnv.rewarded if given.pop("rewarded", False) else FakeEnv
    env = partial(kind, given.pop("slots", 5), **given)
    return LLMCollector(env, policy_factory=partial(FakePolicy, delay_s=delay_s), **count, **how, **options)


def buffer(size: int = 5000) -> ReplayBuffer:
    return ReplayBuffer(storage=RaggedStorage(size), shared=True)


def turns(batch) -> list[COUNTED]:
    """Names of the turns of a batch."""
    found = []
    for row in batch.reshape(-1).unbind(0):
        if row["collector", "traj_ids"] >= 0:
            found.append(tuple(int(row[key]) for key in KEYS))
    return found


_EXPECTED: dict[str, collections.Counter] = {}


def expected(**options) -> collections.Counter:
    """Turns that one process delivers; the same options are run once."""
    options.pop("replay_buffer", None)
    key = repr(sorted(options.items()))
    if key not in _EXPECTED:
        with make(0, delay_s=0.0, **options) as collector:
            _EXPECTED[key] = collections.Counter(name for batch in collector for name in turns(batch))
    return _EXPECTED[key].copy()


def kill_one(collector, draw: random.Random) -> int:
    """Kill a worker that runs; how many were killed."""
    pids = [worker["pid"] for worker in collector.stats()["workers"] if worker["alive"] and worker["pid"]]
    if not pids:
        return 0
    try:
        os.kill(draw.choice(pids), signal.SIGKILL)
    except ProcessLookupError:  # it was killed before, which the collector has not seen yet
        return 0
    return 1


def tally(found: collections.Counter, wanted: collections.Counter) -> str:
    skipped, twice = wanted - found, found - wanted
    return f"{sum(wanted.values())} turns, skipped {sum(skipped.values())}, twice {sum(twice.values())}"


def delivered_under_kills(kills: int, seed: int, *, stored: bool = False, every: float = 0.15, **options):
    """What is delivered while workers are killed at random, and how many were."""
    draw, killed, found = random.Random(seed), 0, collections.Counter()
    if stored:
        options["replay_buffer"] = buffer()
    with warnings.catch_warnings():
        warnings.filterwarnings("always" if os.environ.get("SHOW") else "ignore", ".*It is replaced", RuntimeWarning)
        with make(**options) as collector:
            for batch in collector:
                if batch is not None:
                    found.update(turns(batch))
                if killed < kills and draw.random() < every:
                    killed += kill_one(collector, draw)
            if stored:
                found.update(turns(options["replay_buffer"][:]))
    return found, killed
