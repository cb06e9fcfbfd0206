"""Environments of conversations with transforms: on turns where that can be, with what TensorDicts would hold."""

from __future__ import annotations

import pytest
import torch
from tests import llm_models
from tests.collectors.llm.test_plain import PROMPTS, Talks, answer, chats, copied, same, texts, turns, wrapper

from rollwright.collectors.llm import LLMCollector
from rollwright.envs import RewardSum, StepCounter, TransformedEnv
from rollwright.envs.llm import AddThinkingPrompt, ChatEnv, KLRewardTransform, PolicyVersion, RetrieveLogProb
from rollwright.envs.transforms import Compose, Transform
from rollwright.errors import EnvError

pytestmark = [pytest.mark.llm, pytest.mark.usefixtures("_one_thread")]


@pytest.fixture
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


VERSION = PolicyVersion("uuid").version


def numbered():
    version = PolicyVersion("uuid")
    version.version = VERSION
    return version


ON_TURNS = {
    "StepCounter": StepCounter,
    "max_steps": lambda: StepCounter(max_steps=2),
    "RewardSum": RewardSum,
    "PolicyVersion": numbered,
    "all": lambda: Compose(StepCounter(), RewardSum(), PolicyVersion()),
}


@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("name", ON_TURNS)
def test_transforms_on_turns_give_what_they_give_on_tensordicts(name, whole):
    options = {"trajs_per_batch": 2, "async_envs": False} if whole else {"dialog_turns_per_batch": 6}
    found = []
    for plain in (False, True):
        policy = wrapper()
        acting = (lambda td, policy=policy: policy(td)) if plain else policy
        env = chats(prompts=5, transform=ON_TURNS[name]())
        with LLMCollector(env, acting, **options) as collector:
            assert collector.stats()["paths"]["env"].startswith("plain" if plain else "native")
            found.append(list(collector))
    assert len(found[0]) == len(found[1]) > 1
    for native, plain in zip(*found, strict=True):
        same(native, plain)
    row = found[0][0].reshape(-1)[0]
    keys = {
        "StepCounter": "step_count",
        "max_steps": "step_count",
        "RewardSum": "episode_reward",
        "PolicyVersion": "policy_version",
    }
    assert all(row.get(("next", keys[each])) is not None for each in keys if name in (each, "all"))
    if name == "max_steps":
        longest = max(int(row["turn"]) for batch in found[0] for row in batch.reshape(-1).unbind(0))
        assert longest == 1  # of the four turns that one would have


class Unchanged(Transform):
    """Changes nothing, on TensorDicts."""


@pytest.mark.parametrize("mode", ["history", "text", "tokens"])
def test_tokens_that_end_an_answer_for_the_policy_do_so_for_the_environment(mode):
    def lengths(completions, **columns):
        return [float(len(str(completion))) for completion in completions]

    rows = [{"text": "x" * (1 + number), "tokens": [7] * (1 + number), "turns": number % 3} for number in range(6)]
    found = []
    for plain in (False, True):
        options = {"input_mode": mode, "environment": Talks, "reward_functions": lengths, "epochs": 1, "batch_size": 3}
        own = None if mode == "tokens" else llm_models.tokenizer()
        env = ChatEnv.from_dataloader(rows, tokenizer=own, data_key="tokens" if mode == "tokens" else None, **options)
        policy = wrapper(generate_kwargs={"max_new_tokens": 6, "stop_token_ids": list(range(100, 250))})
        with LLMCollector(TransformedEnv(env, Unchanged()) if plain else env, policy, trajs_per_batch=1) as collector:
            assert collector.stats()["paths"]["env"].startswith("plain" if plain else "native")
            records = [record for batch in collector for record in batch.unbind(0)]
        keys = ("prompt_index", "turn")
        found.append(
            {
                tuple(int(one[key]) for key in keys): (one["tokens", "full"].tolist(), float(one["next", "reward"]))
                for one in records
            }
        )
    assert len(found[0]) == 12
    assert found[0] == found[1]


def test_transforms_around_transforms_work_on_turns_in_their_order():
    inside = chats(prompts=3, transform=StepCounter())
    env = TransformedEnv(inside, RewardSum(), auto_unwrap=False)
    with LLMCollector(env, wrapper(), dialog_turns_per_batch=6, async_envs=True) as collector:
        assert collector.stats()["paths"]["env"].startswith("native")
        for batch in collector:
            for row in batch.unbind(0):
                assert int(row["next", "step_count"]) == int(row["turn"]) + 1
                assert float(row["next", "episode_reward"]) == float(row["episode_reward"] + row["next", "reward"])


def test_what_transforms_remember_is_part_of_the_state():
    def make():
        return LLMCollector(chats(transform=Compose(StepCounter(), RewardSum())), wrapper(), dialog_turns_per_batch=6)

    with make() as first, make() as second:
        first.next()
        second.load_state_dict(copied(first.state_dict()))
        while (batch := first.next()) is not None:
            same(batch, second.next())


def test_a_transform_that_comes_later_is_obeyed():
    env = chats(prompts=20, transform=StepCounter())
    with LLMCollector(env, wrapper(), dialog_turns_per_batch=3) as collector:
        collector.next()
        env.append_transform(RewardSum())
        collector.reset()
        assert ("next", "episode_reward") in collector.next().keys(True)
        env.append_transform(lambda td: td.set("mark", torch.ones(3, 1)))
        collector.reset()
        assert ("next", "mark") in collector.next().keys(True)
        assert collector.stats()["paths"]["env"].startswith("plain")


def reference(td):
    policy = wrapper(generate=False)
    return policy(td)


ON_TENSORDICTS = {
    "RetrieveLogProb": lambda: RetrieveLogProb(reference),
    "KLRewardTransform": lambda: KLRewardTransform(reference),
    "AddThinkingPrompt": lambda: AddThinkingPrompt(lambda td: td["turn"] < 2),
    "StepCounter": lambda: StepCounter(max_steps=2, truncated_key="cut"),
}


@pytest.mark.parametrize("name", ON_TENSORDICTS)
def test_transforms_on_tensordicts_follow_the_data_to_its_end(name):
    def make():
        return LLMCollector(chats(prompts=5, transform=ON_TENSORDICTS[name]()), wrapper(), dialog_turns_per_batch=3)

    collector, found = make(), {}
    while (batch := collector.next()) is not None:
        new = turns(batch)
        assert not new.keys() & found.keys()
        found |= new
        state = copied(collector.state_dict())
        assert not state["unsaved"]
        assert collector.stats()["paths"]["env"].startswith("plain")
        collector.shutdown()
        collector = make()
        collector.load_state_dict(state)
    collector.shutdown()
    assert {name[0] for name in found} == set(range(5))


@pytest.mark.parametrize("tracks", [True, "transform", "given"])
@pytest.mark.parametrize("native", [False, True])
def test_uuids_are_stamped_on_both_paths(native, tracks):
    version = PolicyVersion("uuid")
    env = texts() if tracks == "given" else TransformedEnv(texts(), version)
    given = True if tracks is True else version
    with LLMCollector(
        env, wrapper() if native else answer_text, dialog_turns_per_batch=3, track_policy_version=given
    ) as collector:
        for _ in range(2):
            batch = collector.next()
            assert {row["policy_version"] for row in batch.reshape(-1).unbind(0)} == {version.version}
            assert collector.policy_version == version.version
            before = version.version
            collector.increment_version()
            assert version.version != before


def answer_text(td):
    td["text_response"] = ["yes" for _ in td["text"]]
    return td


def test_numbers_are_stamped_on_the_plain_path():
    with LLMCollector(chats(), answer, dialog_turns_per_batch=3, track_policy_version=PolicyVersion()) as collector:
        collector.increment_version()
        assert collector.next()["policy_version"].unique().tolist() == [1]


class Passed(Transform):
    """Works on TensorDicts alone."""

    def _call(self, next_tensordict):
        return next_tensordict


@pytest.mark.parametrize(
    "options",
    [
        {"dialog_turns_per_batch": 6},
        {"trajs_per_batch": 1, "async_envs": False},
        {"groups_per_batch": 1, "async_envs": False},
    ],
)
def test_no_conversation_is_lost_where_the_path_changes_in_the_middle_of_a_run(options):
    found, paths = [], []
    with LLMCollector(chats(transform=StepCounter()), policy=wrapper(), **options) as collector:
        while (batch := collector.next()) is not None:
            found += list(turns(batch))
            paths.append(collector.stats()["paths"]["env"].split(":")[0])
            if len(paths) == 1:
                collector.env.append_transform(Passed())
                collector.reset()  # which looks at the transforms again
            dropped = collector.stats()["conversations_dropped"]
    assert {"native", "plain"} == set(paths)
    assert len(found) == len(set(found))
    whole = {name[0] for name in found if name[3] == name[0] * 7 % 4}
    assert len(whole) == PROMPTS - dropped
    assert dropped < PROMPTS


@pytest.mark.parametrize(("given", "kind"), [(None, EnvError), (True, ValueError)])
def test_a_change_that_needs_tensordicts_is_refused_where_conversations_are_taken_as_they_end(given, kind):
    options = {"groups_per_batch": 1, "async_envs": given}
    with LLMCollector(chats(transform=StepCounter()), policy=wrapper(), **options) as collector:
        collector.next()
        collector.env.append_transform(Passed())
        with pytest.raises(kind, match="async_envs"):
            collector.reset()
