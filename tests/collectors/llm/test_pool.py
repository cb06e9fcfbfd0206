"""Pools of a user's own environments: turns come in the order in which environments are ready."""

from __future__ import annotations

import threading
from contextlib import suppress

import pytest
import torch
from tensordict import NonTensorData, TensorDict, lazy_stack

from rollwright.collectors.llm import LLMCollector
from rollwright.data import Composite, NonTensor, Unbounded
from rollwright.data.replay_buffers import LazyStackStorage, ReplayBuffer
from rollwright.envs import AsyncEnvPool, EnvBase, StepCounter, TransformedEnv
from rollwright.envs.llm import PolicyVersion
from rollwright.errors import EnvError


class Chat(EnvBase):
    """Writes text, and ends after ``turns`` answers; ``gate``: waits for it in each step."""

    def __init__(self, number, turns=3, gate=None, fails_at=None):
        super().__init__(batch_size=[])
        self.number, self.turns, self.gate, self.fails_at = number, turns, gate, fails_at
        self.talks = self.said = 0
        self.observation_spec = Composite(text=NonTensor(()), number=Unbounded((1,)))
        self.action_spec = Composite(text_response=NonTensor(()))
        self.reward_spec = Unbounded((1,))

    def _td(self, **entries):
        text = NonTensorData(f"{self.number}.{self.talks}.{self.said}")
        return TensorDict({"text": text, "number": torch.tensor([float(self.number)]), **entries})

    def _reset(self, tensordict=None, **kwargs):
        self.talks, self.said = self.talks + 1, 0
        return self._td()

    def _step(self, tensordict):
        if self.gate is not None:
            assert self.gate.wait(30)
        assert tensordict["text_response"] == f"to {self.number}.{self.talks}.{self.said}"
        self.said += 1
        if self.fails_at == (self.talks, self.said):
            raise OSError("no connection")
        done = torch.tensor([self.said == self.turns])
        return self._td(reward=torch.ones(1), terminated=done, done=done.clone())

    def _set_seed(self, seed):
        pass


class Answers:
    """Answers each prompt, and notes how many it was given at a time."""

    def __init__(self):
        self.sizes = []

    def __call__(self, td):
        rows = [row.copy().set("text_response", NonTensorData(f"to {row['text']}")) for row in td.unbind(0)]
        self.sizes.append(len(rows))
        return lazy_stack(rows, 0)


def pool(*turns, **options):
    return AsyncEnvPool([lambda n=n, t=t: Chat(n, t, **options) for n, t in enumerate(turns)], stack="lazy")


def check(rows):
    """Turns of each environment follow one another; those of a trajectory have one id, which no other one has."""
    ids = {}
    for row in rows:
        number, talk, said = row["text"].split(".")
        assert row["text_response"] == f"to {row['text']}"
        ids.setdefault((number, talk), set()).add(int(row["collector", "traj_ids"]))
        assert row["next", "text"] == f"{number}.{talk}.{int(said) + 1}"
    assert all(len(each) == 1 for each in ids.values())
    assert len({number for each in ids.values() for number in each}) == len(ids)


def test_a_pool_collects_in_the_order_in_which_environments_are_ready():
    gate = threading.Event()
    makers = [lambda: Chat(0, gate=gate), lambda: Chat(1)]
    with LLMCollector(AsyncEnvPool(makers, stack="lazy"), Answers(), dialog_turns_per_batch=7) as collector:
        assert "by themselves" in collector.stats()["paths"]["env"]
        first = collector.next()
        assert first.batch_size == (7,)
        assert {row["text"][0] for row in first.unbind(0)} == {"1"}  # the other one waits
        assert collector.stats()["environments_busy"]
        gate.set()
        rows = list(first.unbind(0))
        while not any(row["text"][0] == "0" for row in rows):
            rows += collector.next().unbind(0)
    check(rows)


def test_counts_are_exact_and_nothing_is_rounded():
    with LLMCollector(pool(1, 2, 3), Answers(), dialog_turns_per_batch=5, total_dialog_turns=20) as collector:
        batches = list(collector)
        assert [tuple(batch.batch_size) for batch in batches] == [(5,)] * 4
        check([row for batch in batches for row in batch.unbind(0)])
        ended = sum(int(batch["next", "done"].sum()) for batch in batches)
        assert collector.stats()["episodes"] == ended
        assert collector.stats()["frames"] == 20


@pytest.mark.parametrize("stored", [False, True])
def test_whole_conversations(stored):
    options = {"replay_buffer": ReplayBuffer(storage=LazyStackStorage(100), batch_size=2)} if stored else {}
    with LLMCollector(pool(1, 2, 3), Answers(), trajs_per_batch=2, **options) as collector:
        if stored:
            while len(options["replay_buffer"]) < 12:
                collector.next()
            rows = list(options["replay_buffer"][:].unbind(0))
        else:
            batches = [collector.next() for _ in range(6)]
            assert all(int(batch["next", "done"].sum()) == 2 for batch in batches)
            rows = [row for batch in batches for row in batch.unbind(0)]
    check(rows)
    lengths = {}
    for row in rows:
        lengths[int(row["collector", "traj_ids"])] = lengths.get(int(row["collector", "traj_ids"]), 0) + 1
        assert row["next", "text"][-1] == str(lengths[int(row["collector", "traj_ids"])])
    assert all(
        count == 1 + int(row["number"]) for row in rows for count in [lengths[int(row["collector", "traj_ids"])]]
    )


def test_a_pool_gives_the_turns_that_all_together_give():
    found = []
    for async_envs in (False, None):
        policy = Answers()
        with LLMCollector(pool(1, 2, 3), policy, dialog_turns_per_batch=12, async_envs=async_envs) as collector:
            rows = [row for _ in range(3) for row in collector.next().reshape(-1).unbind(0)]
        assert async_envs is None or policy.sizes == [3] * 12
        found.append({row["text"]: row.exclude(("collector", "traj_ids"), "env_index") for row in rows})
    together, alone = found
    common = together.keys() & alone.keys()
    assert len(common) >= 12
    for text in common:
        assert set(together[text].keys(True, True)) == set(alone[text].keys(True, True))
        for key in ("text_response", ("next", "text")):
            assert together[text][key] == alone[text][key]
        for key in ("number", ("next", "reward"), ("next", "done"), ("next", "terminated")):
            assert torch.equal(together[text][key], alone[text][key])


def test_an_environment_that_fails_is_named_and_all_begin_again():
    with LLMCollector(pool(3, 3, fails_at=(2, 1)), Answers(), dialog_turns_per_batch=2) as collector:
        with pytest.raises((EnvError, OSError), match="no connection"):
            [collector.next() for _ in range(20)]
        with suppress(EnvError):  # the other one fails at the same place, now or with the next call
            collector.next()
        check(collector.next().unbind(0))


def test_reset_state_and_versions():
    version = PolicyVersion("uuid")
    with LLMCollector(pool(99, 99), Answers(), dialog_turns_per_batch=4, track_policy_version=version) as collector:
        assert {row["policy_version"] for row in collector.next().unbind(0)} == {version.version}
        collector.reset()
        assert {row["text"] for row in collector.next().unbind(0)} >= {"0.2.0", "1.2.0"}
        collector.reset([1])
        seen = [row["text"] for _ in range(4) for row in collector.next().unbind(0)]
        assert "1.3.0" in seen
        with pytest.warns(UserWarning, match="steps are in progress"):
            state = collector.state_dict()
        collector.load_state_dict(state)
        seen = [row["text"] for _ in range(4) for row in collector.next().unbind(0)]
        assert "0.3.0" in seen


def test_a_pool_with_transforms_and_other_environments_are_an_error_that_says_what_to_do():
    env = TransformedEnv(pool(1), StepCounter())
    with pytest.raises(ValueError, match=r"async_envs=True: .* an AsyncEnvPool without transforms.*Leave async"):
        LLMCollector(env, Answers(), dialog_turns_per_batch=1, async_envs=True)
    env.close()
