"""TorchRL's GRPOLoss and MCAdvantage on records that another package has collected."""

from __future__ import annotations

import json
import sys
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase, lazy_stack
from torchrl.modules.llm import TransformersWrapper
from torchrl.objectives.llm import GRPOLoss, MCAdvantage

from benchmarks.llm_cases import make_model, make_tokenizer


def grpo(batch: TensorDictBase, strategy: str) -> dict[str, float]:
    """Loss, diagnostics and gradients of the policy that has sampled the batch."""
    tokenizer = make_tokenizer()
    model = make_model(tokenizer, ends=True)
    policy = TransformersWrapper(model, tokenizer=tokenizer, input_mode="tokens", generate=False)
    loss = GRPOLoss(policy, masking_strategy=strategy)
    found = loss(batch)
    total = found.loss_objective + found.loss_entropy
    total.backward()
    gradients = [parameter.grad for parameter in model.parameters()]
    return {
        "loss": float(found.loss_objective.detach()),
        "entropy": float(found.entropy),
        "kl_approx": float(found.kl_approx),
        "ESS": float(found.ESS),
        "clip_fraction": float(found.clip_fraction),
        "gradients": len([gradient for gradient in gradients if gradient is not None]),
        "parameters": len(gradients),
        "finite": float(all(bool(gradient.isfinite().all()) for gradient in gradients if gradient is not None)),
        "gradient_norm": float(torch.stack([g.norm() for g in gradients if g is not None]).norm()),
    }


def advantages(batch: TensorDictBase, samples: int, trajectory_return: str | None) -> list[list[float]]:
    """Group, repeat, turn and advantage of each record."""
    transform = MCAdvantage(grpo_size=samples, prompt_key="group_id", trajectory_return=trajectory_return)
    found = transform.inv(batch.exclude("advantage"))
    names = [[int(row[key]) for key in ("group_id", "repeat", "turn")] for row in found.unbind(0)]
    return [[*name, float(row["advantage"])] for name, row in zip(names, found.unbind(0), strict=True)]


def main() -> None:
    torch.set_num_threads(1)
    saved: list[dict[str, Any]] = torch.load(sys.argv[1], weights_only=True)
    samples = int(sys.argv[2])
    batch = lazy_stack([TensorDict.from_dict(row, auto_batch_size=False) for row in saved])
    losses = {strategy: grpo(batch, strategy) for strategy in ("rlhf", "sft")}
    found = {"grpo": losses, "steps": advantages(batch, samples, None), "sum": advantages(batch, samples, "sum")}
    print(json.dumps(found))


if __name__ == "__main__":
    main()
