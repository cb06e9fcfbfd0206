"""Flags that an environment or a transform of a user's sets: none ends a trajectory in part."""

from __future__ import annotations

import pytest
import torch
from tensordict import TensorDict, TensorDictBase

from rollwright import Collector, GymEnv
from rollwright.data import Categorical, Composite, Unbounded
from rollwright.envs import Compose, EnvBase, StepCounter, Transform, TransformedEnv
from rollwright.errors import EnvError


class Countdown(EnvBase):
    """Ends by itself after ten steps; ``flags(t)`` are what it returns of its own."""

    def __init__(self, flags, *, announces: bool = False) -> None:
        super().__init__()
        self.flags, self.t = flags, 0
        self.observation_spec = Composite(left=Unbounded((1,), dtype=torch.int64))
        self.action_spec = Categorical(2, shape=())
        if announces:
            self.add_truncated_keys()

    def _reset(self, tensordict: TensorDictBase | None = None, **kwargs) -> TensorDictBase:
        self.t = 0
        return TensorDict({"left": torch.tensor([10])})

    def _step(self, tensordict: TensorDictBase) -> TensorDictBase:
        self.t += 1
        flags = {key: torch.tensor([value]) for key, value in self.flags(self.t).items()}
        return TensorDict({"left": torch.tensor([10 - self.t]), "reward": torch.ones(1), **flags})

    def _set_seed(self, seed: int | None) -> None:
        pass


def ends(batch) -> list[int]:
    return batch["next", "done"].flatten().int().tolist()


def test_truncated_without_a_spec_is_an_error_that_says_how_to_announce_it():
    env = Countdown(lambda t: {"terminated": t == 10, "truncated": t == 4})
    said = r"step returned 'truncated', which done_spec does not announce.*add_truncated_keys\(\)"
    with Collector(env, frames_per_batch=8) as collector, pytest.raises(EnvError, match=said):
        collector.next()


def test_truncated_with_a_spec_ends_the_trajectory():
    env = Countdown(lambda t: {"terminated": t == 10, "truncated": t == 4}, announces=True)
    with Collector(env, frames_per_batch=8) as collector:
        batch = collector.next()
    assert ends(batch) == [0, 0, 0, 1] * 2
    assert batch["collector", "traj_ids"].tolist() == [0] * 4 + [1] * 4


def test_flags_that_contradict_one_another_end_the_trajectory():
    env = Countdown(lambda t: {"terminated": t == 3, "done": False})
    with Collector(env, frames_per_batch=6) as collector:
        assert ends(collector.next()) == [0, 0, 1] * 2


class Limit(Transform):
    """A time limit as a user writes it."""

    def _call(self, tensordict: TensorDictBase) -> TensorDictBase:
        return tensordict.set("truncated", tensordict["truncated"] | (tensordict["step_count"] >= 4))


def limited(counter):
    return TransformedEnv(GymEnv("Pendulum-v1"), Compose(counter, Limit()))


def test_transforms_that_are_no_chain_are_refused():
    with pytest.raises(TypeError, match=r"cache_specs: expected True or False, got Limit.*Compose\(first, second\)"):
        TransformedEnv(GymEnv("Pendulum-v1"), StepCounter(), Limit())  # type: ignore[arg-type]


def test_a_transform_that_sets_truncated_alone_ends_the_trajectory():
    with Collector(limited(StepCounter()), frames_per_batch=8) as collector:
        batch = collector.next()
    assert ends(batch) == [0, 0, 0, 1] * 2
    assert batch["collector", "traj_ids"].unique().numel() == 2


def test_a_counter_that_is_to_leave_done_alone_does():
    counter = StepCounter(4, update_done=False)
    with Collector(limited(counter), frames_per_batch=8) as collector:
        assert ends(collector.next()) == [0] * 8
