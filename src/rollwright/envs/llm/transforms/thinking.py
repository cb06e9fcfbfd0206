"""AddThinkingPrompt: ask the model to think again about its answer."""

from __future__ import annotations

from collections.abc import Callable

import torch
from tensordict import LazyStackedTensorDict, TensorDictBase

from rollwright.envs.llm.env import ConversationEnv
from rollwright.envs.transforms import Transform
from rollwright.errors import EnvError

PROMPTS = (  # the first is the one that is sent unless another is asked for
    "Check your answer step by step, correct it where it is wrong, and answer again.",
    "This answer may be wrong. Go through it once more, and give your final answer.",
    "Solve it another way, compare the two results, and answer again.",
)


class AddThinkingPrompt(Transform):
    """Goes on with a conversation that has ended, by a message that asks for another answer.

    The answer stays as it was sampled; the message follows it, and the next answer ends the conversation again.

    Args:
        cond: from the step of one conversation, with ``"next"``, to whether the model is to think again.
        prompt: content of the message.
        random_prompt: draw the message from several each time, in place of ``prompt``, by torch's global generator.
        role: of the message.
        zero_reward: the turn that is followed by the message has no reward.
        max_prompts: messages that a conversation may get.
        edit_last_turn, undo_done: as in other packages: False and True, which is what it does.

    Raises:
        ValueError: ``role`` is ``"assistant"``, ``max_prompts`` is below 1, or an argument is of no use here.

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
        prompt: str | None = None,
        random_prompt: bool = False,
        *,
        role: str = "user",
        zero_reward: bool = True,
        max_prompts: int = 1,
        edit_last_turn: bool = False,
        undo_done: bool = True,
    ) -> None:
        super().__init__()
        if random_prompt and prompt is not None:
            raise ValueError(f"prompt: expected None with random_prompt=True, got {prompt!r}. Drop one of the two.")
        if edit_last_turn or not undo_done:
            name, given = ("edit_last_turn", True) if edit_last_turn else ("undo_done", False)
            raise ValueError(
                f"{name}: expected {not given}, got {given}: a message follows the answer, whose tokens stay those "
                "that were sampled, and the conversation goes on. Leave it out."
            )
        if role == "assistant":
            raise ValueError(
                "role: expected 'user' or another that may follow an answer, got 'assistant': an answer is never "
                "edited, so that its tokens are those that were sampled. Pass role='user'."
            )
        if max_prompts < 1:
            raise ValueError(f"max_prompts: expected at least 1, got {max_prompts}.")
        self.cond, self.role = cond, role
        self.prompts = PROMPTS if random_prompt else (PROMPTS[0] if prompt is None else prompt,)
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
            prompts = self.prompts
            prompt = prompts[0] if len(prompts) == 1 else prompts[int(torch.randint(len(prompts), (), device="cpu"))]
            fresh = env.resume(slot, [{"role": self.role, "content": prompt}])
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
