"""GRPO on a tiny language model: it learns to say which letters follow in the alphabet.

The model, of 250,000 parameters, and its tokenizer are made on the spot: nothing is downloaded. Each prompt is
answered by a group of samples; an answer's advantage is its reward within the group (arXiv:2402.03300, section 4.1.2).
The reward is the share of letters that are right.

    python examples/grpo_tiny.py --seed 0 --plot grpo_curve.png

Mean reward of the first and of the last 10 of 150 updates. Processors round differently, and learning makes much of
that: the end is 0.50, 0.80 and 0.70 on one of them, and 0.50, 0.76 and 0.57 on another. It takes half a minute to three
minutes on two cores.

    seed   start   end, at least
       0    0.06            0.45
       1    0.06            0.70
       2    0.06            0.50
"""

from __future__ import annotations

import argparse
import time

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from rollwright.collectors.llm import LLMCollector
from rollwright.data.llm import group_advantages, padded
from rollwright.envs.llm import LLMEnv
from rollwright.modules.llm import TransformersWrapper

LETTERS = "abcdefghij"
ANSWER = 4  # letters
ENTROPY = 0.03


def make_tokenizer() -> PreTrainedTokenizerFast:
    """One token for each character."""
    vocabulary = {token: number for number, token in enumerate(["<pad>", "<end>", *LETTERS, *"0123456789=+? "])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>", pad_token="<pad>")


def make_model(vocabulary: int) -> Qwen3ForCausalLM:
    """Random weights."""
    config = Qwen3Config(
        vocab_size=vocabulary,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=32,
        tie_word_embeddings=False,
    )
    return Qwen3ForCausalLM(config)


def following(letter: str) -> str:
    """The right answer."""
    start = LETTERS.index(letter)
    return "".join(LETTERS[(start + i) % len(LETTERS)] for i in range(1, ANSWER + 1))


def share_of_right_letters(prompts: list[str], completions: list[str], **columns: object) -> list[float]:
    """The reward."""
    pairs = [(following(prompt[0]), completion) for prompt, completion in zip(prompts, completions, strict=True)]
    return [sum(a == b for a, b in zip(right, said, strict=False)) / ANSWER for right, said in pairs]


def loss_of(model: Qwen3ForCausalLM, batch) -> torch.Tensor:
    """The clipped policy gradient of the sampled tokens; without the entropy, seed 0 stops at a reward of 0.32."""
    tokens, mask = padded(batch, "tokens"), padded(batch, "assistant_mask").bool()
    logits = model(tokens, attention_mask=padded(batch, "attention_mask")).logits[:, :-1]
    policy = logits.log_softmax(-1)
    log_probs = policy.gather(-1, tokens[:, 1:, None]).squeeze(-1)[mask[:, 1:]]
    entropy = -(policy.exp() * policy).sum(-1)[mask[:, 1:]].mean()
    sampled = torch.cat([*batch.get("log_probs", as_list=True)])
    lengths = mask.sum(-1)
    advantage = batch["advantage"].reshape(-1).repeat_interleave(lengths)
    ratio = (log_probs - sampled).exp()
    return -torch.min(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage).mean() - ENTROPY * entropy


def train(seed: int, updates: int, prompts: int = 16, samples: int = 8, progress: bool = True) -> list[float]:
    """Returns the mean reward of each batch."""
    torch.manual_seed(seed)
    torch.set_num_threads(1)
    tokenizer = make_tokenizer()
    model = make_model(len(tokenizer))
    policy = TransformersWrapper(model, tokenizer=tokenizer, generate_kwargs={"max_new_tokens": ANSWER})
    env = LLMEnv.from_dataloader(
        [{"text": f"{letter}="} for letter in LETTERS],
        tokenizer=tokenizer,
        batch_size=prompts * samples,
        repeats=samples,
        reward_functions=share_of_right_letters,
        shuffle=True,
        seed=seed,
    )
    collector = LLMCollector(
        env, policy=policy, groups_per_batch=prompts, total_dialog_turns=updates * prompts * samples
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.0)
    rewards, begun = [], time.perf_counter()
    try:
        for batch in collector:
            rewards.append(batch["next", "reward"].mean().item())
            loss = loss_of(model, group_advantages(batch))
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            collector.update_policy_weights_()
            if progress and len(rewards) % 10 == 0:
                seconds = time.perf_counter() - begun
                print(f"update {len(rewards):3}  reward {sum(rewards[-10:]) / 10:.2f}  {seconds:.0f} s", flush=True)
    except KeyboardInterrupt:
        print("interrupted", flush=True)
    collector.shutdown()
    return rewards


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--updates", type=int, default=150)
    parser.add_argument("--plot", help="where to save the curve")
    arguments = parser.parse_args()
    rewards = train(arguments.seed, arguments.updates)
    if len(rewards) >= 10:
        print(f"reward: {sum(rewards[:10]) / 10:.3f} -> {sum(rewards[-10:]) / 10:.3f}")
    if arguments.plot:
        from matplotlib import pyplot

        pyplot.plot(rewards)
        pyplot.xlabel("update")
        pyplot.ylabel("mean reward")
        pyplot.savefig(arguments.plot)


if __name__ == "__main__":
    main()
