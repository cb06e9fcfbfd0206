"""AddThinkingPrompt: ask the model to think again about its answer."""

from __future__ import annotations

from collections.abc import Callable

import torch
from tensordict import LazyStackedTensorDict, TensorDictBase

from rollwright.envs.llm.env import ConversationEnv
from rollwright.envs.transforms import Transform
from rollwright.errors import EnvError

__all__ = ["AddThinkingPrompt"]

PROMPT = "Check your answer step by step, correct it where it is wrong, and answer again."


class AddThinkingPrompt(Transform):
    """Goes on with a conversation that has ended, by a message that asks for another answer.

    The answer stays as it was sampled; the message follows it, and the next answer ends the conversation again.

    Args:
        cond: from the step of one conversation, with ``"next"``, to whether the model is to think again.
        prompt: content of the message.
        role: of the message.
        zero_reward: the turn that is followed by the message has no reward.
        max_prompts: messages that a conversation may get.

    Raises:
        ValueError: ``role`` is ``"assistant"``, or ``max_prompts`` is below 1.

    Example:
        >>> from rollwright.envs import TransformedEnv
        >>> from rollwright.envs.llm.chat import ChatEnv
        >>> def right(completions, **columns):
        ...     return [float(text.endswith("4")) for text in completions]
        >>> env = ChatEnv.from_dataloader([{"query": "2 + 2?"}], input_mode="text", reward_functions=right)
        >>> env = TransformedEnv(env, AddThinkingPrompt(lambda td: td["next", "reward"] < 1, prompt=" Sure?"))
        >>> td = env.reset()
        >>> td["text", "response"] = ["5"]
        >>> td = env.step(td)
        >>> td["next", "done"].item(), list(td["next", "text", "prompt"])
        (False, ['2 + 2?5 Sure?'])
        >>> env.close()
    """

    def __init__(
        self,
        cond: Callable[[TensorDictBase], bool | torch.Tensor],
        prompt: str = PROMPT,
        *,
        role: str = "user",
        zero_reward: bool = True,
        max_prompts: int = 1,
    ) -> None:
        super().__init__()
        if role == "assistant":
            raise ValueError(
                "role: expected 'user' or another that may follow an answer, got 'assistant': an answer is never "
                "edited, so that its tokens are those that were sampled. Pass role='user'."
            )
        if max_prompts < 1:
            raise ValueError(f"max_prompts: expected at least 1, got {max_prompts}.")
        self.cond, self.prompt, self.role = cond, prompt, role
        self.zero_reward, self.max_prompts = zero_reward, max_prompts

    def _step(self, tensordict: TensorDictBase, next_tensordict: TensorDictBase) -> TensorDictBase:
        env = self._conversations()
        rows = list(next_tensordict.unbind(0))
        changed = False
        begun = env.openings
        for slot, (root, row) in enumerate(zip(tensordict.unbind(0), rows, strict=True)):
            if begun[slot] is None or not bool(row.get("done").any()) or env.resumed(slot) >= self.max_prompts:
                continue
            if not bool(self.cond(root.exclude("next").set("next", row))):
                continue
            fresh = env.resume(slot, [{"role": self.role, "content": self.prompt}])
            if self.zero_reward:
                fresh.set("reward", torch.zeros_like(row.get("reward")))
            rows[slot] = row.exclude(*fresh.keys()).update(fresh)
            changed = True
        return LazyStackedTensorDict(*rows, stack_dim=0) if changed else next_tensordict

    def _conversations(self) -> ConversationEnv:
        env = self.parent
        base = None if env is None else env.base_env
        if not isinstance(base, ConversationEnv):
            raise EnvError(
                f"AddThinkingPrompt follows an LLMEnv or a ChatEnv, not {base}. Put it directly on such an environment."
            )
        return base
