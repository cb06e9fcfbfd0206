"""TorchRL's LLMCollector and TransformersWrapper, beside the same generation by hand in the same process."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from functools import partial

os.environ.setdefault("LIST_TO_STACK", "1")

import torch
from tensordict import TensorDict, lazy_stack, set_list_to_stack
from torch.utils.data import DataLoader
from torchrl.collectors.llm import LLMCollector
from torchrl.envs import StepCounter
from torchrl.envs.llm import ChatEnv
from torchrl.modules.llm import TransformersWrapper

from benchmarks.llm_cases import (
    CHAT,
    HAND,
    Case,
    ModelClock,
    check_lengths,
    cpu_ms,
    generate,
    make_model,
    make_tokenizer,
    prompts_of,
    questions,
)

TORCHRL = "TorchRL"


def make_collector(case: Case, model, tokenizer) -> Callable[[], object]:
    """Its ChatEnv, in history or in text mode, with one answer to each prompt."""
    mode = "history" if case.env == CHAT else "text"
    rows = [{"query": text} for text in questions(case.batch)]
    loader = DataLoader(
        rows, batch_size=case.batch, collate_fn=lambda rows: lazy_stack([TensorDict(row) for row in rows])
    )
    env = ChatEnv.from_dataloader(
        dataloader=loader,
        batch_size=(case.batch,),
        repeats=None,
        tokenizer=tokenizer,
        input_mode=mode,
        data_key="query",
    )
    env = env.append_transform(StepCounter(max_steps=1))
    policy = TransformersWrapper(
        model,
        tokenizer=tokenizer,
        input_mode=mode,
        generate=True,
        pad_output=False,
        return_log_probs=True,
        generate_kwargs={"max_new_tokens": case.new, "do_sample": True, "temperature": 1.0},
    )
    collector = LLMCollector(env, policy=policy, dialog_turns_per_batch=case.batch, total_dialog_turns=-1)
    batches = iter(collector)

    check_lengths(next(batches).reshape(-1).get(("tokens", "response"), as_list=True), case)
    return lambda: next(batches)


def main() -> None:
    rounds, cases = int(sys.argv[1]), [Case(*row) for row in json.loads(sys.argv[2])]
    set_list_to_stack(True).set()
    torch.set_num_threads(1)
    tokenizer = make_tokenizer()
    model = make_model(tokenizer)
    clock = ModelClock(model)
    found = {}
    for case in cases:
        prompts = prompts_of(case, tokenizer)
        sides = {
            HAND: partial(generate, model, prompts, case.new),
            TORCHRL: make_collector(case, model, tokenizer),
        }
        found[case.name] = cpu_ms(sides, clock, case.batch, rounds)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
