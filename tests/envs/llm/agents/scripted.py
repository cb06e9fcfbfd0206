"""An engine that writes what a function says, and collectors of agents on it."""

from __future__ import annotations

from typing import Any

import torch
from tests import llm_models
from tests.collectors.llm.fakes import FakeEngine, FakePolicy

from rollwright.collectors.llm import LLMCollector
from rollwright.envs.llm import AgentEnv
from rollwright.modules.llm import Sampling


class ScriptedEngine(FakeEngine):
    """Writes ``script(text of the prompt)``, one token each step."""

    def __init__(self, script: Any = None, **options: Any) -> None:
        super().__init__(**options)
        self.tokenizer = llm_models.tokenizer("qwen")
        self.sampling, self.vocab_size = Sampling(max_new_tokens=64), 512
        self.end_ids = (self.tokenizer.eos_token_id,)
        self.script = script or (lambda prompt: f"I read {len(prompt)} letters.")
        self.requests: list[Any] = []
        self.wrote: list[Any] = []

    def submit(self, requests):
        super().submit(requests)
        for request in requests:
            self.requests.append(request)
            text = self.script(self.tokenizer.decode(request.prompt))
            tokens = [*self.tokenizer(text, add_special_tokens=False)["input_ids"], *self.end_ids]
            most = (request.sampling or self.sampling).max_new_tokens
            self._open[request.key][1] = torch.tensor(tokens[:most])
            self.wrote.append(self._open[request.key][1])


def collector(agent, *, rows=4, slots=4, script=None, env=None, engine=None, of=None, **options):
    """A collector of an agent, and its engine."""
    questions = [{"question": f"What is {number} + 1?", "number": number} for number in range(rows)]
    made = of or AgentEnv.from_dataloader(questions, agent, batch_size=slots, **{"epochs": 1, **(env or {})})
    policy = FakePolicy()
    policy.engine = engine or ScriptedEngine(script)
    policy.tokenizer = policy.engine.tokenizer
    return LLMCollector(made, policy, **options), policy.engine


def records(batches):
    """Those of all conversations, by prompt, in order of turns."""
    found: dict[int, list[Any]] = {}
    for batch in batches:
        for one in batch.reshape(-1).unbind(0):
            mask = one.get(("collector", "mask"), None)
            if mask is None or bool(mask):
                found.setdefault(int(one["prompt_index"]), []).append(one)
    return {key: sorted(turns, key=lambda one: int(one["turn"])) for key, turns in sorted(found.items())}
