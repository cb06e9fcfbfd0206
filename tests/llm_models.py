"""Tokenizers that are trained on the spot, and tiny models of random weights: nothing is downloaded.

``tokenizer(kind)`` for kinds of :data:`TEMPLATES` and ``"plain"`` (no chat template, padded with its end token, as
GPT-2's); ``model(kind)`` for ``"qwen3"``, ``"llama"`` and ``"gpt2"``.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

__all__ = ["END", "MODELS", "TEMPLATES", "THINK", "model", "tokenizer"]

MODELS = ("qwen3", "llama", "gpt2")

THINK = ("<think>", "</think>")  # tokens of the vocabulary that are not special, as those of Qwen3
_CALLS = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")

_CHATML_TOOLS = """\
{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0].role == 'system' %}{{- messages[0].content + '\\n\\n' }}{%- endif %}
    {{- '# Tools\\n' }}
    {%- for tool in tools %}{{- tool | tojson + '\\n' }}{%- endfor %}
    {{- '<|im_end|>\\n' }}
{%- elif messages[0].role == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
"""
_CHATML_TOOL_MESSAGE = """\
        {%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{- '<|im_start|>user' }}{%- endif %}
        {{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
        {%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{- '<|im_end|>\\n' }}{%- endif %}
"""
_CHATML_ANSWER = """\
        {{- '<|im_start|>assistant\\n' + text }}
        {%- for call in message.tool_calls or [] %}
            {%- set call = call.function or call %}
            {{- '\\n<tool_call>\\n{"name": "' + call.name + '", "arguments": ' + call.arguments | tojson }}
            {{- '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
"""
_CHATML_LOOP = (
    """\
    {%- if message.role == 'user' or (message.role == 'system' and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
    {%- elif message.role == 'assistant' %}
        {%- set text = message.content or '' %}
        THINKING
"""
    + _CHATML_ANSWER
    + "    {%- elif message.role == 'tool' %}\n"
    + _CHATML_TOOL_MESSAGE
    + """\
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""
)
# As Qwen's: a newline follows the end of each turn, and results of tools that follow each other share a turn.
_QWEN = _CHATML_TOOLS + "{%- for message in messages %}\n" + _CHATML_LOOP.replace("THINKING", "")
# As Qwen3's: the reasoning of answers before the last user's message is dropped.
_QWEN3 = (
    _CHATML_TOOLS
    + "{%- set ns = namespace(last=0) %}\n"
    + "{%- for message in messages %}{%- if message.role == 'user' %}{%- set ns.last = loop.index0 %}{%- endif %}"
    + "{%- endfor %}\n{%- for message in messages %}\n"
    + _CHATML_LOOP.replace(
        "THINKING",
        "{%- if '</think>' in text and loop.index0 < ns.last %}"
        "{%- set text = text.split('</think>')[-1].lstrip('\\n') %}{%- endif %}",
    )
)
# As Llama 3's: content is trimmed, nothing follows the end of a turn, tools speak as "ipython".
_LLAMA = """\
{{- bos_token }}
{%- for message in messages %}
    {%- set role = 'ipython' if message.role == 'tool' else message.role %}
    {{- '<|start_header_id|>' + role + '<|end_header_id|>\\n\\n' + message.content | trim + '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{%- endif %}
"""
# As Gemma's: no system, the assistant is "model", roles alternate.
_GEMMA = """\
{{- bos_token }}
{%- if messages[0].role == 'system' %}{{- raise_exception('System role not supported') }}{%- endif %}
{%- for message in messages %}
    {%- if (message.role == 'assistant') != (loop.index0 % 2 == 1) %}
        {{- raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}
    {%- endif %}
    {%- set role = 'model' if message.role == 'assistant' else message.role %}
    {{- '<start_of_turn>' + role + '\\n' + message.content | trim + '<end_of_turn>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<start_of_turn>model\\n' }}{%- endif %}
"""
# Made up: text before and after an answer's end, and an end that is not the end-of-sequence token.
_MADE_UP = """\
{%- for message in messages %}
    {{- '~' + message.role + ' says: [' + message.content + ']' }}
    {%- if message.role == 'assistant' %}{{- '<over>(' + loop.index | string + ')' }}{%- endif %}
    {{- '\\n\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '~assistant says: [' }}{%- endif %}
"""

TEMPLATES: dict[str, str] = {
    "qwen": _QWEN,
    "qwen3": _QWEN3,
    "llama": _LLAMA,
    "gemma": _GEMMA,
    "made-up": _MADE_UP,
}

END: dict[str, str] = {  # the token that ends an answer
    "qwen": "<|im_end|>",
    "qwen3": "<|im_end|>",
    "llama": "<|eot_id|>",
    "gemma": "<end_of_turn>",
    "made-up": "<stop>",
    "plain": "<|endoftext|>",
}

_SPECIAL: dict[str, tuple[str, ...]] = {
    "qwen": ("<|endoftext|>", "<|im_start|>", "<|im_end|>"),
    "qwen3": ("<|endoftext|>", "<|im_start|>", "<|im_end|>"),
    "llama": ("<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
    "gemma": ("<pad>", "<eos>", "<bos>", "<start_of_turn>", "<end_of_turn>"),
    "made-up": ("<stop>", "<over>", "<pad>"),
    "plain": ("<|endoftext|>",),
}
_NAMED: dict[str, dict[str, str]] = {
    "qwen": {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"},
    "qwen3": {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"},
    "llama": {"bos_token": "<|begin_of_text|>", "eos_token": "<|eot_id|>", "pad_token": "<|end_of_text|>"},
    "gemma": {"bos_token": "<bos>", "eos_token": "<end_of_turn>", "pad_token": "<pad>"},
    "made-up": {"eos_token": "<stop>", "pad_token": "<pad>"},
    "plain": {"eos_token": "<|endoftext|>", "pad_token": "<|endoftext|>"},
}

_TEXT = """\
What is two plus three? The answer is five. Write a number from one to ten, then stop. 0 1 2 3 4 5 6 7 8 9
user assistant system tool model ipython says add subtract multiply (2, 3) = 5; 12 + 30 = 42; 7 * 6 = 42.
{"name": "add", "arguments": {"a": 2, "b": 3}} You are a helpful assistant. Think step by step, and answer.
The quick brown fox jumps over the lazy dog. Hello, how are you today? I am well, thank you very much!
"""


@functools.cache
def _trained(kind: str, vocab_size: int) -> str:
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

    special = list(_SPECIAL[kind])
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # type: ignore[assignment]
    backend.decoder = decoders.ByteLevel()  # type: ignore[assignment]
    backend.train_from_iterator(_TEXT.splitlines() * 4, trainer)
    if kind.startswith("qwen"):
        backend.add_tokens([AddedToken(token, normalized=False, special=False) for token in (*_CALLS, *THINK)])
    text: str = backend.to_str()
    return text


def tokenizer(kind: str = "qwen", vocab_size: int = 400) -> Any:
    """A byte-level BPE tokenizer with the chat template of ``kind``; a new object at each call.

    Args:
        kind: a key of :data:`TEMPLATES`, or ``"plain"``.
        vocab_size: tokens at most, special ones among them; at least 270.
    """
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(_trained(kind, vocab_size)),
        chat_template=TEMPLATES.get(kind),
        clean_up_tokenization_spaces=False,
        model_max_length=1024,
        **_NAMED[kind],
    )


def model(kind: str = "qwen3", vocab_size: int = 512, seed: int = 0, **changes: Any) -> Any:
    """A causal language model of random weights, float32 on the CPU, in eval mode.

    Args:
        kind: one of :data:`MODELS`.
        vocab_size: more than the ids of the tokenizer, as is common.
        seed: of the weights.
        **changes: of the configuration.
    """
    import transformers as hf

    sizes: dict[str, Any] = {"vocab_size": vocab_size, "bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        if kind == "gpt2":
            config = hf.GPT2Config(**sizes | {"n_positions": 512, "n_embd": 32, "n_layer": 2, "n_head": 4} | changes)
            return hf.GPT2LMHeadModel(config).eval()
        sizes |= {
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": 512,
            "head_dim": 8,
        }
        if kind == "qwen3":
            return hf.Qwen3ForCausalLM(hf.Qwen3Config(**sizes | changes)).eval()
        if kind == "llama":
            return hf.LlamaForCausalLM(hf.LlamaConfig(**sizes | changes)).eval()
    raise ValueError(f"kind must be one of {', '.join(MODELS)}; got {kind!r}")
