"""Checks AgentEnv with the client of OpenAI, which the other tests do not need: ``make test-openai`` runs it."""

from __future__ import annotations

import asyncio
import json
import time

import openai
import pytest
import torch
from tests import llm_models
from tests.collectors.llm.test_agents import ADD, Noting, calls
from tests.envs.llm.agents.scripted import collector, records

from rollwright.collectors.llm import LLMCollector
from rollwright.data.llm import training_sequences
from rollwright.envs.llm import AgentEnv
from rollwright.modules.llm import TransformersWrapper


def plain(row, base_url, api_key):
    """An agent of thirty lines that knows nothing of rollwright: turns, a stream, an edited history, refusals."""
    client = openai.OpenAI(base_url=base_url, api_key=api_key)
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": row["question"]}]
    first = client.chat.completions.create(model="policy", messages=messages)
    messages += [first.choices[0].message, {"role": "user", "content": [{"type": "text", "text": "Go on."}]}]
    text = ""
    for chunk in client.chat.completions.create(model="policy", messages=messages, stream=True):
        text += chunk.choices[0].delta.content or ""
    messages += [{"role": "assistant", "content": text}, {"role": "user", "content": "And now?"}]
    third = client.chat.completions.create(model="policy", messages=messages, logprobs=True, max_tokens=5)
    assert len(third.choices[0].logprobs.content) == third.usage.completion_tokens <= 5
    notes = [{"role": "user", "content": f"Notes: {text}"}]
    client.chat.completions.create(model="policy", messages=notes, temperature=0.5)
    assert [model.id for model in client.models.list()] == ["policy"]
    with pytest.raises(openai.BadRequestError, match="response_format: expected"):
        client.chat.completions.create(model="policy", messages=notes, response_format={"type": "json_object"})
    with pytest.raises(openai.AuthenticationError, match="the key is not that of this conversation"):
        openai.OpenAI(base_url=base_url, api_key="another").models.list()
    return row["number"]


async def side_by_side(row, base_url, api_key):
    """Two histories at a time."""
    client = openai.AsyncOpenAI(base_url=base_url, api_key=api_key)

    async def one(name):
        messages = []
        for turn in range(2):
            messages.append({"role": "user", "content": f"{name} {turn} {row['question']}"})
            answer = await client.chat.completions.create(model="policy", messages=messages)
            messages.append(answer.choices[0].message.model_dump())

    await asyncio.gather(one("a"), one("b"))
    await client.close()
    return row["number"]


def exact(agent, sequences, streams):
    """32 agents at a time: records are what the engine sampled, and their log-probs those of a forward pass."""
    model, tokenizer = llm_models.model(), llm_models.tokenizer()
    policy = TransformersWrapper(model, tokenizer=tokenizer, generate_kwargs={"max_new_tokens": 8})
    noted = Noting(policy.engine)
    rows = [{"question": f"What is {number}?", "number": number} for number in range(64)]
    env = AgentEnv.from_dataloader(rows, agent, batch_size=32, epochs=1)
    begun, cpu = time.perf_counter(), time.process_time()
    with LLMCollector(env, policy, trajs_per_batch=32, async_envs=streams) as made:
        found = records(made)
    seconds, cpu = time.perf_counter() - begun, time.process_time() - cpu
    every = [one for turns in found.values() for one in turns]
    kept = [tuple(one[key].tolist() for key in (("tokens", "prompt"), ("tokens", "response"))) for one in every]
    assert sorted(kept) == [(prompt, tokens) for prompt, tokens, _ in noted.calls]
    worst, number = 0.0, 0
    for one in every:
        tokens, begin = one["tokens", "full"], len(one["tokens", "prompt"])
        with torch.no_grad():
            scores = model(tokens[None]).logits[0].log_softmax(-1)
        again = scores[begin - 1 : -1].gather(-1, tokens[begin:, None]).squeeze(-1)
        if one["turn"] != 3 or agent is side_by_side:  # the other one has a temperature of its own
            worst, number = max(worst, float((one["log_probs", "response"] - again).abs().max())), number + len(again)
    assert worst < 1e-4
    for turns in found.values():
        united = training_sequences(turns)
        assert len(united) == sequences
        trained = sum(int(each["assistant_mask"].sum()) for each in united)
        assert trained == sum(len(one["tokens", "response"]) for one in turns)
    print(
        f"{agent.__name__}, async_envs={streams}: {len(found)} agents, {len(every)} calls equal to what was sampled, "
        f"{number} log-probs within {worst:.1e}; {seconds:.1f} s, {1e3 * cpu / len(every):.1f} ms of processor a call"
    )


def tools(row, base_url, api_key):
    """A call of a tool, in a stream, and its result."""
    client = openai.OpenAI(base_url=base_url, api_key=api_key)
    messages = [{"role": "user", "content": row["question"]}]
    with client.chat.completions.stream(model="policy", messages=messages, tools=[ADD]) as stream:
        message = stream.get_final_completion().choices[0].message
    call = message.tool_calls[0]
    arguments = json.loads(call.function.arguments)
    messages += [message, {"role": "tool", "tool_call_id": call.id, "content": str(arguments["a"] + arguments["b"])}]
    last = client.chat.completions.create(model="policy", messages=messages, tools=[ADD])
    assert last.choices[0].message.content == "It is 3."


def main():
    torch.set_num_threads(1)
    for streams in (True, False):
        exact(plain, 2, streams)
        exact(side_by_side, 2, streams)
    made, _ = collector(tools, script=calls, rows=2, slots=2, trajs_per_batch=2)
    with made:
        for turns in records(made).values():
            assert [one["finish_reason"] for one in turns] == ["tool", "stop"]
            assert [int(one["sequence"]) for one in turns] == [0, 0]
    print(f"tools: calls in a stream, and their results; openai {openai.__version__}")


if __name__ == "__main__":
    main()
