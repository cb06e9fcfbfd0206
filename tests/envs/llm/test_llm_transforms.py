"""Transforms of conversations: versions, reference models, thinking prompts, and their forms on turns."""

from __future__ import annotations

import uuid
from typing import Any

import pytest
import torch
from tensordict import LazyStackedTensorDict, TensorDict, TensorDictBase
from tests.llm_models import tokenizer

from rollwright.data.llm.records import RecordLayout, record
from rollwright.data.llm.turns import FinishReason, Origin, Turn
from rollwright.envs import Compose, EnvBase, RewardSum, StepCounter, TransformedEnv, check_env_specs
from rollwright.envs.llm import (
    AddThinkingPrompt,
    ChatEnv,
    KLRewardTransform,
    LLMEnv,
    PolicyVersion,
    RetrieveLogProb,
    Reward,
)
from rollwright.envs.llm.transforms import turn_hooks
from rollwright.errors import EnvError, NotNative, PolicyError

pytestmark = pytest.mark.llm

ROWS = [{"query": f"question {'x' * i}"} for i in range(6)]


def chat(**kwargs: Any) -> ChatEnv:
    return ChatEnv.from_dataloader(ROWS, tokenizer=tokenizer("qwen"), batch_size=2, **kwargs)


class Policy:
    """Writes answers of one to three tokens, with a log-probability of -1 each."""

    def __call__(self, td: TensorDictBase) -> TensorDictBase:
        rows = []
        for row in td.unbind(0):
            row = row.copy()
            prompt = row["tokens", "prompt"]
            response = torch.arange(1 + int(row["prompt_index"]) % 3) + 20
            zeros, ones = torch.zeros(len(prompt)), torch.ones(len(response))
            row["tokens"] = TensorDict({"prompt": prompt, "response": response, "full": torch.cat([prompt, response])})
            row["log_probs"] = TensorDict({"full": torch.cat([zeros, -ones]), "response": -ones})
            row["masks"] = TensorDict({"all_assistant_mask": torch.cat([zeros, ones]).bool()})
            rows.append(row)
        return LazyStackedTensorDict(*rows, stack_dim=0)


def reference(td: TensorDictBase) -> TensorDictBase:
    """Gives -3 to each token."""
    for row in td.unbind(0):
        row["log_probs"] = TensorDict({"full": torch.full(row["tokens", "full"].shape, -3.0)})
    return td


def test_log_probs_of_a_reference_model_are_written_on_sampled_tokens() -> None:
    env = TransformedEnv(chat(), RetrieveLogProb(reference))
    td = env.reset()
    assert td[0]["ref_log_probs", "full"].shape == (0,)
    for row in env.step(Policy()(td)).unbind(0):
        expected = -3.0 * row["masks", "all_assistant_mask"]
        assert torch.equal(row["next", "ref_log_probs", "full"], expected)
        assert row["log_probs", "full"].min() == -1.0


def test_the_divergence_from_a_reference_is_taken_off_the_reward() -> None:
    env = TransformedEnv(chat(), KLRewardTransform(reference, coef=0.5))
    frames = env.rollout(3, Policy(), break_when_any_done=False)
    sizes = 1 + frames["prompt_index"] % 3
    assert torch.equal(frames["next", "kl_penalty"].squeeze(-1), 2.0 * sizes)
    assert torch.equal(frames["next", "reward"].squeeze(-1), -1.0 * sizes)
    beside = TransformedEnv(chat(), KLRewardTransform(reference, add_to_reward=False))
    assert beside.rollout(1, Policy())["next", "reward"].sum() == 0.0


def test_a_penalty_is_taken_off_the_last_of_the_rewards_of_tokens() -> None:
    class EachToken:
        def __init__(self, row: Any) -> None:
            self.number = row["query"].count("x") % 3 + 1

        def reply(self, messages: Any) -> Any:
            return "", torch.ones(self.number), True

    env = TransformedEnv(chat(environment=EachToken), KLRewardTransform(reference, coef=0.5))
    for row in env.rollout(3, Policy(), break_when_any_done=False).reshape(-1).unbind(0):
        size = len(row["tokens", "response"])
        assert row["next", "reward"].flatten().tolist() == [1.0] * (size - 1) + [1.0 - size]


def test_flat_log_probs_of_the_response_will_do() -> None:
    def act(td: TensorDictBase) -> TensorDictBase:
        rows = [
            row.copy().update({"tokens_response": torch.arange(2), "log_probs": -torch.ones(2)}) for row in td.unbind(0)
        ]
        return LazyStackedTensorDict(*rows, stack_dim=0)

    def model(td: TensorDictBase) -> TensorDictBase:
        rows = [row.copy().update({"log_probs": -2 * torch.ones(2)}) for row in td.unbind(0)]
        return LazyStackedTensorDict(*rows, stack_dim=0)

    env = LLMEnv.from_dataloader(["a", "b"], tokenizer=tokenizer("plain"), batch_size=2)
    frames = TransformedEnv(env, KLRewardTransform(model)).rollout(1, act)
    assert frames["next", "reward"].flatten().tolist() == [-2.0, -2.0]


def test_what_a_model_lacks_is_named() -> None:
    with pytest.raises(PolicyError, match=r"model: it wrote no \('log_probs', 'full'\)"):
        TransformedEnv(chat(), RetrieveLogProb(lambda td: td.exclude("log_probs"))).rollout(1, Policy())
    with pytest.raises(PolicyError, match=r"policy: it wrote no .* Let it return log-probabilities"):
        TransformedEnv(chat(), KLRewardTransform(reference)).rollout(1, lambda td: Policy()(td).exclude("log_probs"))
    with pytest.raises(TypeError, match="model: expected a wrapper"):
        RetrieveLogProb(3)  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", ["int", "uuid", int, uuid.UUID])
def test_versions_are_written_and_counted(kind: Any) -> None:
    version = PolicyVersion(kind)
    env = TransformedEnv(chat(), version)
    check_env_specs(env)
    first = version.version
    td = env.reset()
    second = version.increment_version()
    assert second == version.version != first
    assert [row["policy_version"] for row in td.unbind(0)] == [first] * 2
    stepped = env.step(Policy()(td))
    assert [row["next", "policy_version"] for row in stepped.unbind(0)] == [second] * 2
    again = PolicyVersion(kind)
    again.load_state_dict(version.state_dict())
    assert again.version == second
    with pytest.raises(ValueError, match="version_type: expected 'int' or 'uuid'"):
        PolicyVersion("float")  # type: ignore[arg-type]


def test_a_thinking_prompt_follows_the_answer_and_the_next_one_ends() -> None:
    calls = []

    def last(completions: list[Any]) -> list[float]:
        calls.append([message["role"] for message in completions[0]])
        return [1.0]

    env: EnvBase = TransformedEnv(
        chat(reward_functions=last), AddThinkingPrompt(lambda td: int(td["prompt_index"]) == 1, "Sure?")
    )
    td = env.reset()
    first = env.step(Policy()(td))
    assert first["next", "done"].flatten().tolist() == [True, False]
    assert first["next", "reward"].flatten().tolist() == [1.0, 0.0]
    row = first[1]
    full = row["tokens", "full"]
    assert torch.equal(row["next", "tokens", "prompt"][: len(full)], full)
    assert row["next", "text", "prompt"].endswith("Sure?<|im_end|>\n<|im_start|>assistant\n")
    td = env.maybe_reset(env.step_mdp(first))
    assert td["prompt_index"].tolist() == [2, 1]
    second = env.step(Policy()(td))
    assert second["next", "done"].flatten().tolist() == [True, True]
    assert second["next", "reward"].flatten().tolist() == [1.0, 1.0]
    assert ["assistant", "user", "assistant"] in calls
    check_env_specs(env)


def test_a_thinking_prompt_that_cannot_be_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"role: .* an answer is never edited"):
        AddThinkingPrompt(lambda td: True, role="assistant")
    grouped = chat(reward_functions=Reward(lambda completions: [1.0], per="group"))
    with pytest.raises(EnvError, match="its group has its rewards and cannot go on"):
        TransformedEnv(grouped, AddThinkingPrompt(lambda td: True)).rollout(1, Policy())


def test_thinking_prompts_are_drawn() -> None:
    said = set()
    env = TransformedEnv(chat(), AddThinkingPrompt(lambda td: True, random_prompt=True, undo_done=True))
    torch.manual_seed(0)
    for _ in range(8):
        for row in env.step(Policy()(env.reset()))["next"].unbind(0):
            said.add(row["text", "prompt"].rsplit("<|im_start|>user\n", 1)[1])
    assert len(said) == 3


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"edit_last_turn": True}, "edit_last_turn: expected False, got True"),
        ({"undo_done": False}, "undo_done: expected True, got False"),
        ({"prompt": "Sure?", "random_prompt": True}, "prompt: expected None with random_prompt=True, got 'Sure"),
    ],
)
def test_options_of_thinking_prompts_that_cannot_be_are_errors(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        AddThinkingPrompt(lambda td: True, **options)


def test_a_reference_model_is_made_by_its_factory() -> None:
    made: list[int] = []

    def make() -> Any:
        made.append(1)
        return reference

    transform = KLRewardTransform(ref_model_factory=make, coef=0.5)
    first = TransformedEnv(chat(), transform)
    second = TransformedEnv(chat(), KLRewardTransform(reference, coef=0.5))
    rewards = [env.step(Policy()(env.reset()))["next", "reward"] for env in (first, second)]
    assert torch.equal(*rewards)
    assert made == [1]
    for options in ({}, {"ref_model": reference, "ref_model_factory": make}):
        with pytest.raises(TypeError, match=r"ref_model: expected it or ref_model_factory, got (none|both)"):
            KLRewardTransform(**options)


def test_transforms_on_turns_write_what_they_write_on_tensordicts() -> None:
    hooks = turn_hooks(Compose(StepCounter(), RewardSum(), PolicyVersion()))
    memory: dict[str, Any] = {}
    for number in range(3):
        turn = Turn(
            Origin(0, 0, 0, 0, 0), number, 0, [], {}, "", "", torch.tensor([1, 2]), 1, None, "raw",
            torch.tensor([0]), 0, FinishReason.STOP, reward=0.5,
        )  # fmt: skip
        for hook in hooks:
            hook(turn, memory)
        td = record(turn, RecordLayout())
        assert td["step_count"].tolist() == [number]
        assert td["next", "step_count"].tolist() == [number + 1]
        assert td["episode_reward"].tolist() == [0.5 * number]
        assert td["next", "episode_reward"].tolist() == [0.5 * (number + 1)]
    with pytest.raises(NotNative):
        turn_hooks(RetrieveLogProb(reference))
