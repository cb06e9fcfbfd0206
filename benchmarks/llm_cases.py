"""Cases of the benchmark of language models: model, tokenizer, prompts, and generation by hand.

Imports no rollwright, for other packages use it, too.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn import functional

FLAT, CHAT = "LLMEnv, flat", "ChatEnv, nested, with history"
HAND = "by hand"
_TEMPLATE = (
    "{%- for message in messages %}{{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}"
    "{%- endfor %}{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"
)
_TEXT = "What is 12 + 30? user assistant system 0 1 2 3 4 5 6 7 8 9 The answer is forty-two. Write a number, then stop."


class Case(NamedTuple):
    """What is measured.

    Attributes:
        env: kind of environment.
        batch: conversations side by side.
        new: tokens of each answer.
    """

    env: str
    batch: int
    new: int

    @property
    def name(self) -> str:
        return f"{self.env}: batch {self.batch}, {self.new} new tokens"


CASES = tuple(Case(env, batch, new) for env in (FLAT, CHAT) for batch in (1, 8, 32) for new in (16, 64))


def make_tokenizer() -> Any:
    """A byte-level BPE tokenizer of some hundred tokens with a chat template, trained on the spot."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=320, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    backend.train_from_iterator([_TEXT] * 4, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        chat_template=_TEMPLATE,
        clean_up_tokenization_spaces=False,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
    )


def make_model(tokenizer: Any, *, ends: bool = False) -> Any:
    """A model of two layers and random weights.

    Args:
        tokenizer: of it.
        ends: let it write the end of an answer; else it writes no special token, hence answers of full length.
    """
    import transformers

    torch.manual_seed(0)
    size = len(tokenizer)
    config = transformers.Qwen3Config(
        vocab_size=size,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=512,
        tie_word_embeddings=False,
        eos_token_id=None,
        pad_token_id=None,
        bos_token_id=None,
    )
    model = transformers.Qwen3ForCausalLM(config).eval()
    head = nn.Linear(32, size)
    with torch.no_grad():
        head.weight.copy_(model.lm_head.weight)
        head.bias.zero_()
        head.bias[tokenizer.all_special_ids] = -1e9
        if ends:
            head.bias[tokenizer.eos_token_id] = 3.0
    model.lm_head = head
    return model


def questions(number: int) -> list[str]:
    """Prompts of unequal lengths."""
    return [f"What is {7 ** (i % 5)} + {i}?" for i in range(number)]


def prompts_of(case: Case, tokenizer: Any) -> list[list[int]]:
    """The prompts of a batch as the model reads them."""
    texts = questions(case.batch)
    if case.env == CHAT:
        texts = [
            tokenizer.apply_chat_template(
                [{"role": "user", "content": text}], tokenize=False, add_generation_prompt=True
            )
            for text in texts
        ]
    return [tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts]


@torch.inference_mode()
def generate(model: Any, prompts: Sequence[Sequence[int]], new: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Generation as one would write it: prefill, then sample and decode with a cache.

    Returns:
        Sampled tokens, int64 ``[n, new]``, and their log-probabilities, float32 ``[n, new]``.
    """
    from transformers import DynamicCache

    width = max(map(len, prompts))
    ids = torch.tensor([[0] * (width - len(prompt)) + list(prompt) for prompt in prompts])
    mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    mask = functional.pad(mask, (0, new), value=1)
    padded = bool((mask == 0).any())
    positions = (mask[:, :width].cumsum(-1) - 1).clamp_(min=0)
    cache = DynamicCache()
    tokens, log_probs = [], []
    for step in range(new):
        logits = model(
            input_ids=ids,
            attention_mask=mask[:, : width + step] if padded else None,
            position_ids=positions,
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=1,
        ).logits[:, -1]
        of_all = logits.log_softmax(-1)
        ids = of_all.exp().multinomial(1)
        tokens.append(ids)
        log_probs.append(of_all.gather(-1, ids))
        positions = positions[:, -1:] + 1
    return torch.cat(tokens, 1), torch.cat(log_probs, 1)


def check_lengths(answers: Sequence[Any], case: Case) -> None:
    """Check that a batch is what the case says.

    Raises:
        RuntimeError: there are fewer answers, or shorter ones.
    """
    lengths = [len(answer) for answer in answers]
    if lengths != [case.new] * case.batch:
        raise RuntimeError(f"{case.name}: expected {case.batch} answers of {case.new} tokens, got {lengths}")


class ModelClock:
    """Processor time within calls of a model.

    Args:
        model: its ``forward`` is timed from now on.

    Attributes:
        seconds: so far.
        calls: so far.
    """

    def __init__(self, model: Any) -> None:
        self.seconds, self.calls = 0.0, 0
        forward = model.forward

        @functools.wraps(forward)
        def timed(*args: Any, **kwargs: Any) -> Any:
            self.calls += 1
            start = time.process_time()
            try:
                return forward(*args, **kwargs)
            finally:
                self.seconds += time.process_time() - start

        model.forward = timed


class Figures(NamedTuple):
    """Milliseconds of processor time a turn, one figure a round.

    Attributes:
        total: of all.
        outside: of what is not within the model.
        calls: of the model for a batch.
    """

    total: list[float]
    outside: list[float]
    calls: int


def cpu_ms(calls: dict[str, Callable[[], object]], clock: ModelClock, turns: int, rounds: int) -> dict[str, Figures]:
    """Measure sides in turns.

    Args:
        calls: by side: collects a batch.
        clock: of the model that all sides call.
        turns: of a batch.
        rounds: batches of each side.
    """
    found = {}
    for side, call in calls.items():
        clock.calls = 0
        call()  # what happens once, happens here
        found[side] = Figures([], [], clock.calls)
    for number in range(rounds):
        for side in list(calls)[:: -1 if number % 2 else 1]:
            clock.seconds, start = 0.0, time.process_time()
            calls[side]()
            seconds = time.process_time() - start
            found[side].total.append(1e3 * seconds / turns)
            found[side].outside.append(1e3 * (seconds - clock.seconds) / turns)
    return found
