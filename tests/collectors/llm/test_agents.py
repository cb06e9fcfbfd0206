"""Agents that own their loop: records of all their calls, token by token."""

from __future__ import annotations

import itertools
import json
import queue
import warnings
from functools import partial

import pytest
import torch
from tests import llm_models
from tests.collectors.llm.fakes import FakePolicy
from tests.envs.llm.agents.client import Client, edits, side_by_side, talks
from tests.envs.llm.agents.scripted import ScriptedEngine, collector, records
from tests.patience import patient

from rollwright.collectors.llm import LLMCollector
from rollwright.data.llm import training_sequences
from rollwright.envs.llm import AgentEnv
from rollwright.errors import EnvError
from rollwright.modules.llm import Sampling, TransformersWrapper

pytestmark = pytest.mark.llm
ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Adds two numbers.",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}},
    },
}


@pytest.fixture(autouse=True)
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


class Noting:
    """Notes what an engine is asked for, and what it writes."""

    def __init__(self, engine):
        self.prompts, self.answers, self._submit, self._results = {}, {}, engine.submit, engine.results
        engine.submit, engine.results = self.submit, self.results

    def submit(self, requests):
        self._submit(requests)
        self.prompts |= {request.key: request.prompt.tolist() for request in requests}

    def results(self, timeout=None):
        found = self._results(timeout)
        self.answers |= {each.key: (each.tokens.tolist(), each.log_probs.tolist()) for each in found}
        return found

    @property
    def calls(self):
        return sorted((self.prompts[key], *answer) for key, answer in self.answers.items())


def everything(row, base_url, api_key):
    """All that the other agents do."""
    edits(row, base_url, api_key)
    side_by_side(row, base_url, api_key)
    return talks(row, base_url, api_key)


@pytest.mark.parametrize("streams", [True, False])
def test_records_of_32_agents_are_what_the_engine_sampled(streams):
    model, tokenizer = llm_models.model(), llm_models.tokenizer()
    policy = TransformersWrapper(model, tokenizer=tokenizer, generate_kwargs={"max_new_tokens": 6})
    noted = Noting(policy.engine)
    rows = [{"question": f"What is {number}?", "number": number} for number in range(32)]
    env = AgentEnv.from_dataloader(rows, everything, batch_size=32, epochs=1)
    with LLMCollector(env, policy, trajs_per_batch=32, async_envs=streams) as made:
        found = records(made)
    assert [len(turns) for turns in found.values()] == [11] * 32
    every = list(itertools.chain(*found.values()))
    kept = []
    for one in every:
        prompt, response = one["tokens", "prompt"].tolist(), one["tokens", "response"].tolist()
        kept.append((prompt, response, one["log_probs", "response"].tolist()))
        assert one["tokens", "full"].tolist() == prompt + response
    assert sorted(kept) == noted.calls
    tokens = [one["tokens", "full"] for one in every]
    padded = torch.nn.utils.rnn.pad_sequence(tokens, batch_first=True)
    mask = torch.nn.utils.rnn.pad_sequence([torch.ones_like(each) for each in tokens], batch_first=True)
    with torch.no_grad():
        scores = model(padded, attention_mask=mask).logits.log_softmax(-1)
    for place, one in enumerate(every):
        size, begin = len(tokens[place]), len(one["tokens", "prompt"])
        again = scores[place, begin - 1 : size - 1].gather(-1, tokens[place][begin:, None]).squeeze(-1)
        torch.testing.assert_close(one["log_probs", "response"], again, atol=1e-4, rtol=0)
    for number, turns in found.items():
        # edits() has two sequences of two turns, side_by_side() two in some order, talks() one of three
        sequences = [int(one["sequence"]) for one in turns]
        assert sequences[:4] == [0, 0, 1, 1]
        assert sorted(sequences[4:8]) == [2, 2, 3, 3]
        assert sequences[8:] == [4, 4, 4]
        assert [bool(one["next", "done"]) for one in turns] == [False] * 10 + [True]
        assert turns[-1]["next", "reward"].item() == number
        united = training_sequences(turns)
        assert len(united) == 5
        assert sum(int(each["assistant_mask"].sum()) for each in united) == sum(
            len(a["tokens", "response"]) for a in turns
        )


@pytest.mark.parametrize("streams", [True, False])
def test_an_edited_history_is_another_sequence_and_no_token_is_trained_on_twice(streams):
    made, engine = collector(edits, trajs_per_batch=2, async_envs=streams)
    with made:
        found = records(made)
    assert len(found) == 4
    for turns in found.values():
        assert [int(one["sequence"]) for one in turns] == [0, 0, 1, 1]
        assert turns[1]["tokens", "prompt"][: len(turns[0]["tokens", "full"])].equal(turns[0]["tokens", "full"])
        assert turns[1]["next", "tokens", "prompt"].equal(turns[2]["tokens", "prompt"])
        assert turns[1]["next", "history"].prompt.to_chats() == turns[2]["history"].prompt.to_chats()
        first, second = training_sequences(turns)
        for own, pair in ((first, turns[:2]), (second, turns[2:])):
            assert own["tokens"][own["assistant_mask"]].tolist() == [
                token for one in pair for token in one["tokens", "response"].tolist()
            ]
    assert sum(map(len, engine.wrote)) == sum(
        int(each["assistant_mask"].sum()) for turns in found.values() for each in training_sequences(turns)
    )


def calls_a_tool(row, base_url, api_key, stream=False):
    client, messages = Client(base_url, api_key), [{"role": "user", "content": row["question"]}]
    (choice,) = client.chat(messages, tools=[ADD])
    call = choice["message"]["tool_calls"][0]
    assert choice["finish_reason"] == "tool_calls"
    arguments = json.loads(call["function"]["arguments"])
    result = {"role": "tool", "tool_call_id": call["id"], "content": str(arguments["a"] + arguments["b"])}
    messages += [choice["message"], result]
    last = client.say(messages, "So?", tools=[ADD])
    assert "tool_calls" not in last
    return float(last["content"] == "It is 3.")


def calls(prompt):
    if "<tool_response>\n3" in prompt:
        return "It is 3."
    return 'Well. <tool_call>{"name": "add", "arguments": {"a": 1, "b": 2}}</tool_call>' if "# Tools" in prompt else "?"


def test_tools_of_a_request_are_written_and_its_calls_are_read():
    made, engine = collector(calls_a_tool, script=calls, rows=1, slots=1, trajs_per_batch=1, async_envs=True)
    with made:
        (turns,) = records(made).values()
    assert [one["finish_reason"] for one in turns] == ["tool", "stop"]
    assert turns[-1]["next", "reward"].item() == 1.0
    assert [int(one["sequence"]) for one in turns] == [0, 0]
    assert '"name": "add"' in turns[0]["text", "prompt"]
    first = turns[0]["tokens", "full"]
    assert turns[1]["tokens", "prompt"][: len(first)].equal(first)  # not written again from its parts
    answer = turns[1]["history"].prompt.to_chats()[1]
    assert answer["content"] == "Well."
    assert answer["tool_calls"][0]["function"] == {"name": "add", "arguments": {"a": 1, "b": 2}}
    assert engine.tokenizer.decode(engine.wrote[0]).startswith("Well. <tool_call>")


def test_a_call_that_cannot_be_read_stays_in_the_text():
    seen = []

    def agent(row, base_url, api_key):
        seen.append(Client(base_url, api_key).chat([{"role": "user", "content": "?"}], tools=[ADD])[0])

    wrong = '<tool_call>{"name": "add", </tool_call>'
    made, _ = collector(agent, script=lambda prompt: wrong, rows=1, slots=1, trajs_per_batch=1)
    with made:
        assert len(list(made)) == 1
    assert seen[0]["message"] == {"role": "assistant", "content": wrong}
    assert seen[0]["finish_reason"] == "stop"


def test_what_a_request_says_of_sampling_holds_for_its_answer():
    found = {}

    def agent(row, base_url, api_key):
        ask = partial(Client(base_url, api_key).chat, [{"role": "user", "content": "Say."}])
        found["plain"] = ask()
        found["stopped"] = ask(stop=[" letters"], temperature=0.5, top_p=0.9, presence_penalty=0.1)
        found["short"] = ask(max_tokens=2)
        found["many"] = ask(n=3, seed=7)
        found["again"] = ask(n=1, seed=7)

    made, engine = collector(agent, rows=2, slots=1, trajs_per_batch=1)
    with made:
        turns = records(made)[1]
    asked = engine.requests[7:]
    assert [request.sampling for request in asked[:1]] == [None]
    assert asked[1].sampling == Sampling(
        max_new_tokens=64, stop=(" letters",), temperature=0.5, top_p=0.9, presence_penalty=0.1
    )
    assert found["stopped"][0]["message"]["content"] + " letters." == found["plain"][0]["message"]["content"]
    assert (found["short"][0]["finish_reason"], len(engine.wrote[2])) == ("stop", 2)
    assert [choice["index"] for choice in found["many"]] == [0, 1, 2]
    seeds = [request.seed for request in asked]
    assert len(set(seeds[:-1])) == 6
    assert seeds[3] == seeds[-1]  # the same seed in a conversation
    assert {request.seed for request in engine.requests[:7]}.isdisjoint(seeds)
    assert [int(one["sequence"]) for one in turns] == list(range(7))


def test_parameters_that_are_ignored_have_no_effect():
    def agent(row, base_url, api_key):
        hi = [{"role": "user", "content": "Hi."}]
        Client(base_url, api_key).chat(hi, temperature=0.0, seed=3, response_format={"type": "json_object"})

    options = {"ignore": ["temperature", "seed", "response_format"]}
    made, engine = collector(agent, rows=1, slots=1, env=options, trajs_per_batch=1)
    with made:
        assert len(list(made)) == 1
    assert engine.requests[0].sampling is None


def test_rewards_are_returned_posted_and_of_functions():
    def agent(row, base_url, api_key):
        client, messages = Client(base_url, api_key), []
        client.say(messages, "one")
        client.reward(0.25)
        client.reward(0.5)
        client.say(messages, "two")
        client.say([{"role": "user", "content": "other"}], "three")
        client.reward(2)
        return torch.tensor(4.0)

    def function(prompts, completions, number, **columns):
        assert [message["content"] for message in prompts[0]] == ["one"]
        assert [message["role"] for message in completions[0]] == ["user", "user", "assistant"]
        return [10.0 for _ in number]

    options = {"reward_functions": function, "columns": ["number"]}
    made, _ = collector(agent, rows=2, slots=2, env=options, trajs_per_batch=2)
    with made:
        for number, turns in records(made).items():
            assert [one["next", "reward"].item() for one in turns] == [0.75, 0.0, 16.0]
            assert [one["next", "rewards", "function"].item() for one in turns] == [0.0, 0.0, 10.0]
            assert [one["columns", "number"] for one in turns] == [number] * 3


@pytest.mark.parametrize("streams", [True, False])
def test_a_limit_of_turns_or_tokens_truncates_and_further_requests_are_refused(streams):
    refused = queue.SimpleQueue()

    def agent(row, base_url, api_key):
        client, messages = Client(base_url, api_key), []
        try:
            while True:
                client.say(messages, "Go on.")
        except Exception as error:
            refused.put(getattr(error, "status", error))

    made, _ = collector(agent, rows=2, slots=2, env={"max_turns": 3}, trajs_per_batch=2, async_envs=streams)
    with made:
        for turns in records(made).values():
            assert [bool(one["next", "truncated"]) for one in turns] == [False, False, True]
    engine = ScriptedEngine()
    engine.max_length = 120
    made, _ = collector(agent, rows=2, slots=2, engine=engine, trajs_per_batch=2, async_envs=streams)
    with made:
        for turns in records(made).values():
            assert [bool(one["next", "truncated"]) for one in turns] == [False] * (len(turns) - 1) + [True]
            assert len(turns[-1]["tokens", "prompt"]) < 120
    assert [refused.get(timeout=patient(20)) for _ in range(4)] == [410] * 4  # perhaps after their conversation


class Workers:
    """What is sent to a worker."""

    @staticmethod
    def policy():
        policy = FakePolicy()
        policy.engine = ScriptedEngine()
        policy.tokenizer = policy.engine.tokenizer
        return policy

    @staticmethod
    def env(agent):
        rows = [{"question": f"What is {number}?", "number": number} for number in range(6)]
        return AgentEnv.from_dataloader(rows, agent, tokenizer=llm_models.tokenizer(), batch_size=2, epochs=1)


def test_workers_serve_their_own_agents_with_the_tokens_of_one_process():
    one = LLMCollector(Workers.env(edits), policy_factory=Workers.policy, trajs_per_batch=2, async_envs=True)
    many = LLMCollector(
        partial(Workers.env, edits), policy_factory=Workers.policy, trajs_per_batch=2, async_envs=True, num_collectors=2
    )
    found = []
    for made in (one, many):
        with made:
            found.append(records(made))
    alone, shared = (
        {prompt: [turn["tokens", "full"].tolist() for turn in turns] for prompt, turns in each.items()}
        for each in found
    )
    assert len(alone) == 6
    assert shared == alone


def test_a_policy_without_an_engine_is_refused():
    env = AgentEnv.from_dataloader([{"question": "?"}], edits, tokenizer=llm_models.tokenizer())
    with pytest.raises(EnvError, match=r"AgentEnv: .* Use LLMCollector with a policy that has an engine"):
        env.reset()
    made = LLMCollector(env, lambda td: td, dialog_turns_per_batch=1)
    with made, pytest.raises(EnvError, match=r"AgentEnv: .* Use LLMCollector with a policy that has an engine"):
        made.next()


@pytest.mark.parametrize("streams", [True, False])
def test_a_saved_run_goes_on_with_each_row_once(streams):
    options = {"rows": 8, "slots": 3, "trajs_per_batch": 2, "async_envs": streams}
    made, _ = collector(edits, **options)
    with made:
        before = records([made.next()])
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            state = made.state_dict()
        assert all("begins again: EnvError: a program cannot be saved midway" in str(each.message) for each in caught)
    made, _ = collector(edits, **options)
    with made:
        made.load_state_dict(state)
        after = records(made)
    assert sorted([*before, *after]) == list(range(8))
    assert {len(turns) for turns in (*before.values(), *after.values())} == {4}
