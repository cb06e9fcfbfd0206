"""Caches of all kinds: what is generated side by side, joined and rebuilt, is that of a forward pass."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import transformers as hf

from rollwright.modules.llm import TransformersWrapper
from rollwright.modules.llm.engine import Completion, Request, Sampling
from rollwright.modules.llm.sampling import token_log_probs
from rollwright.modules.llm.transformers_engine import TransformersEngine

pytestmark = pytest.mark.llm
HOW = Sampling(max_new_tokens=14, stop_token_ids=tuple(range(6)))
BASE: dict[str, Any] = {"vocab_size": 96, "bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
SIZES = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4}
HEADS = {**SIZES, "num_key_value_heads": 2, "max_position_embeddings": 256}
WIDE = {**HEADS, "head_dim": 8}
LINEAR = {
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_conv_kernel_dim": 4,
}
STATES = {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 8, "mamba_chunk_size": 16}
MAMBA = {"hidden_size": 32, "state_size": 8, "num_hidden_layers": 2}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
WINDOW = {**WIDE, "sliding_window": 8}

KINDS: dict[str, Callable[[], Any]] = {
    "Qwen3-Next": lambda: hf.Qwen3NextForCausalLM(
        hf.Qwen3NextConfig(**BASE, **WIDE, **LINEAR, **EXPERTS, shared_expert_intermediate_size=16)
    ),
    "Qwen3.5": lambda: hf.Qwen3_5ForCausalLM(hf.Qwen3_5TextConfig(**BASE, **WIDE, **LINEAR)),
    "Mamba": lambda: hf.MambaForCausalLM(hf.MambaConfig(**BASE, **MAMBA)),
    "Mamba 2": lambda: hf.Mamba2ForCausalLM(
        hf.Mamba2Config(**BASE, **MAMBA, num_heads=8, head_dim=8, expand=2, n_groups=2, chunk_size=16)
    ),
    "Jamba": lambda: hf.JambaForCausalLM(
        hf.JambaConfig(
            **BASE,
            **HEADS,
            attn_layer_period=2,
            attn_layer_offset=1,
            num_experts=2,
            num_experts_per_tok=1,
            use_mamba_kernels=False,
            mamba_d_state=8,
        )
    ),
    "Falcon-H1": lambda: hf.FalconH1ForCausalLM(
        hf.FalconH1Config(**BASE, **WIDE, **STATES | {"mamba_n_heads": 4}, mamba_d_ssm=32)
    ),
    "LFM2": lambda: hf.Lfm2ForCausalLM(hf.Lfm2Config(**BASE, **HEADS, layer_types=["conv", "full_attention"] * 2)),
    "Zamba 2": lambda: hf.Zamba2ForCausalLM(
        hf.Zamba2Config(
            **BASE,
            **SIZES,
            layers_block_type=["mamba", "hybrid"] * 2,
            mamba_d_state=8,
            n_mamba_heads=8,
            mamba_headdim=8,
            chunk_size=16,
        )
    ),
    "Gemma 3, sliding windows": lambda: hf.Gemma3ForCausalLM(hf.Gemma3TextConfig(**BASE, **WINDOW)),
    "Mistral, sliding windows": lambda: hf.MistralForCausalLM(hf.MistralConfig(**BASE, **WINDOW)),
    "Gemma 3n, shared layers": lambda: hf.Gemma3nForCausalLM(
        hf.Gemma3nTextConfig(
            **BASE,
            **WINDOW,
            vocab_size_per_layer_input=96,
            hidden_size_per_layer_input=8,
            num_kv_shared_layers=2,
            layer_types=["sliding_attention", "full_attention"] * 2,
            laurel_rank=8,
            altup_num_inputs=2,
        )
    ),
}
REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "RWKV": (
        lambda: hf.RwkvForCausalLM(
            hf.RwkvConfig(**BASE, hidden_size=32, attention_hidden_size=32, num_hidden_layers=2, context_length=64)
        ),
        "RwkvForCausalLM takes no cache",
    ),
    "MiniMax": (
        lambda: hf.MiniMaxForCausalLM(
            hf.MiniMaxConfig(**BASE, **WIDE, num_local_experts=2, num_experts_per_tok=1, block_size=16)
        ),
        "MiniMaxForCausalLM has a cache of its own",
    ),
    "xLSTM": (
        lambda: hf.xLSTMForCausalLM(hf.xLSTMConfig(**BASE, hidden_size=32, num_blocks=2, num_heads=4)),
        "xLSTMForCausalLM has a cache of its own",
    ),
    "RecurrentGemma": (
        lambda: hf.RecurrentGemmaForCausalLM(
            hf.RecurrentGemmaConfig(**BASE, **SIZES, lru_width=32, attention_window_size=8)
        ),
        "RecurrentGemmaForCausalLM keeps states outside of its cache",
    ),
    "DeepSeek V3.2": (
        lambda: hf.DeepseekV32ForCausalLM(hf.DeepseekV32Config(**BASE, **SIZES)),
        "DeepseekV32ForCausalLM caches DynamicIndexedLayer",
    ),
}


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def _model(make: Callable[[], Any]) -> Any:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        lm = make().eval()
    with torch.no_grad():
        for name, parameter in lm.named_parameters():
            if parameter.ndim > 1 and "embed" not in name:
                parameter.mul_(3)  # logits of random weights differ by little
    return lm


def _requests() -> list[Request]:
    generator = torch.Generator().manual_seed(1)
    lengths = torch.randint(1, 25, (12,), generator=generator).tolist()
    prompts = [torch.randint(6, 96, (length,), generator=generator) for length in lengths]
    prompts[5] = prompts[4].clone()  # shares a pass
    return [Request(key, prompt, key) for key, prompt in enumerate(prompts)]


@pytest.mark.parametrize("kind", KINDS)
def test_log_probs_are_those_of_a_forward_pass(kind: str) -> None:
    lm = _model(KINDS[kind])
    engine = TransformersEngine(lm, sampling=HOW, max_batch_size=5)
    engine.submit(_requests())
    done: dict[Any, Completion] = {}
    while engine.in_progress:
        engine.step(3)
        engine.update_weights(lm, cache="rebuild")
        done |= {found.key: found for found in engine.results(0)}
    for request in _requests():
        tokens = done[request.key].tokens
        with torch.no_grad():
            logits = lm(torch.cat([request.prompt, tokens])[None], use_cache=False).logits[0]
        expected = token_log_probs(logits[len(request.prompt) - 1 : -1], tokens, HOW)
        assert (done[request.key].log_probs - expected).abs().max() < 1e-5
    alone = TransformersEngine(lm, sampling=HOW)
    for request in _requests()[3:6]:
        assert alone.generate([request])[0].tokens.tolist() == done[request.key].tokens.tolist()


@pytest.mark.parametrize("kind", REFUSED)
def test_models_whose_rows_cannot_be_moved_are_refused_by_name(kind: str) -> None:
    make, message = REFUSED[kind]
    lm = make()
    with pytest.raises(TypeError, match=f"model: {message}; expected keys and values of attention layers, or states"):
        TransformersEngine(lm)
    TransformersWrapper(lm, input_mode="tokens", generate=False)  # nothing is cached
