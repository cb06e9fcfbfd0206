"""A conversation of two turns with a tool: the model calls a calculator, reads the result, and answers.

The model, of 100,000 parameters, and its tokenizer are made on the spot: nothing is downloaded. A random model calls no
tool, so it first imitates dialogues that are written here (supervised, a few seconds). Then it speaks for itself: an
``LLMCollector`` samples its answers, and what follows is printed: a record of each turn, and both turns as one training
sequence, in which the loss mask is True on the tokens that the model sampled and on nothing else.

    python examples/tool_two_turns.py --seed 0
"""

from __future__ import annotations

import argparse

import torch
from tensordict import TensorDictBase
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from rollwright.collectors.llm import LLMCollector
from rollwright.data.llm import TokenChain, training_sequences
from rollwright.envs.llm import ChatEnv, Toolset
from rollwright.modules.llm import TransformersWrapper

CONTROL = ["<|pad|>", "<|end|>", "<|user|>", "<|assistant|>", "<|tool|>"]
TEMPLATE = """\
{%- for message in messages %}
    {{- '<|' + message.role + '|>' + (message.content or '') }}
    {%- for call in message.tool_calls or [] %}
        {{- '<tool_call>' + {'name': call.function.name, 'arguments': call.function.arguments} | tojson }}
        {{- '</tool_call>' }}
    {%- endfor %}
    {{- '<|end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|assistant|>' }}{%- endif %}
"""


def calculator(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


def call_of(a: int, b: int) -> str:
    """What the model writes to call the calculator."""
    return f'<tool_call>{{"name": "calculator", "arguments": {{"a": {a}, "b": {b}}}}}</tool_call>'


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Byte pairs, trained on a few texts; digits are tokens of their own."""
    backend = Tokenizer(models.BPE())
    digits = pre_tokenizers.Split(Regex("[0-9]"), "isolated")
    backend.pre_tokenizer = pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(False, use_regex=False)])
    backend.decoder = decoders.ByteLevel()
    options = {"initial_alphabet": pre_tokenizers.ByteLevel.alphabet(), "show_progress": False}
    trainer = trainers.BpeTrainer(vocab_size=400, special_tokens=CONTROL, **options)
    backend.train_from_iterator([call_of(2, 3), "What is 2 + 3?", "2 + 3 = 5", "\n"] * 4, trainer)
    named = {"eos_token": "<|end|>", "pad_token": "<|pad|>", "chat_template": TEMPLATE}
    return PreTrainedTokenizerFast(tokenizer_object=backend, **named)


def make_model(vocabulary: int) -> Qwen3ForCausalLM:
    """Random weights."""
    sizes = {"hidden_size": 64, "intermediate_size": 128, "head_dim": 16, "max_position_embeddings": 128}
    heads = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 4}
    return Qwen3ForCausalLM(Qwen3Config(vocab_size=vocabulary, **sizes, **heads))


def dialogue(tokenizer: PreTrainedTokenizerFast, a: int, b: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The tokens of a dialogue to imitate, and which of them are the assistant's."""
    texts = (call_of(a, b), f"{a} + {b} = {a + b}")
    call, answer = (tokenizer(text + "<|end|>", return_tensors="pt").input_ids[0] for text in texts)
    chain = TokenChain(tokenizer, {})
    first = len(chain.open([{"role": "user", "content": f"What is {a} + {b}?"}]))
    chain.answer(call)
    second = len(chain.follow([{"role": "tool", "content": str(a + b)}]))
    tokens = chain.answer(answer)
    place = torch.arange(len(tokens))
    return tokens, ((place >= first) & (place < first + len(call))) | (place >= second)


def imitate(model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, steps: int) -> float:
    """Train on all sums of two digits; returns the last loss."""
    rows = [dialogue(tokenizer, a, b) for a in range(10) for b in range(10)]
    tokens, mask = (torch.nn.utils.rnn.pad_sequence(column, batch_first=True) for column in zip(*rows, strict=True))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(steps):
        few = torch.randint(len(rows), (32,))
        logits = model(tokens[few]).logits[:, :-1]
        chosen = mask[few][:, 1:]
        loss = torch.nn.functional.cross_entropy(logits[chosen], tokens[few][:, 1:][chosen])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return loss.item()


def right(completions: list, a: list[int], b: list[int]) -> list[float]:
    """The reward: whether the last message has the sum."""
    return [float(said[-1]["content"].endswith(f"= {x + y}")) for said, x, y in zip(completions, a, b, strict=True)]


def converse(seed: int, steps: int, conversations: int) -> TensorDictBase:
    """Train, then collect whole conversations: the records of their turns, ``[turns]``."""
    torch.manual_seed(seed)
    torch.set_num_threads(1)
    tokenizer = make_tokenizer()
    model = make_model(len(tokenizer))
    print(f"imitated for {steps} steps, loss {imitate(model, tokenizer, steps):.4f}")
    env = ChatEnv.from_dataloader(
        [{"query": f"What is {a} + {b}?", "a": a, "b": b} for a in range(10) for b in range(10)],
        tokenizer=tokenizer,
        batch_size=8,
        tools=Toolset([calculator], max_rounds=2),
        reward_functions=right,
        shuffle=True,
        seed=seed,
    )
    policy = TransformersWrapper(model.eval(), tokenizer=tokenizer, generate_kwargs={"max_new_tokens": 24})
    with LLMCollector(env, policy=policy, trajs_per_batch=conversations) as collector:
        return collector.next()


def show(batch: TensorDictBase) -> None:
    """Print the records of the first conversation, and both turns as one training sequence."""
    sequence = training_sequences(batch)[0]
    for record in batch[batch["collector", "traj_ids"] == sequence["collector", "traj_ids"]].unbind(0):
        tokens, mask = record["tokens", "full"], record["masks", "all_assistant_mask"]
        print(f"turn {record['turn']}: {record['finish_reason']}, reward {record['next', 'reward'].item()}")
        print(f"  read  {record['text', 'prompt']!r}")
        print(f"  wrote {record['text', 'response']!r}")
        print(f"  {len(tokens)} tokens, {mask.sum()} of them sampled in this turn")
    tokens, mask, turns = sequence["tokens"], sequence["assistant_mask"], sequence["turn"]
    print(f"training sequence: {len(tokens)} tokens, {mask.sum()} of them sampled; by turn: {turns.tolist()}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=150, help="of imitation")
    parser.add_argument("--conversations", type=int, default=16)
    given = parser.parse_args()
    batch = converse(given.seed, given.steps, given.conversations)
    show(batch)
    rewards, done = batch["next", "reward"], batch["next", "done"]
    print(f"{len(batch)} turns, {done.sum()} conversations, mean reward {rewards[done].mean():.2f}")


if __name__ == "__main__":
    main()
