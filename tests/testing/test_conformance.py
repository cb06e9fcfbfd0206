"""Each check of the conformance suite fails on an environment that breaks what it is about."""

from __future__ import annotations

import itertools
import random
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict, TensorDictBase

from rollwright.data import Bounded, Composite, Unbounded
from rollwright.envs import GymEnv, Transform, TransformedEnv
from rollwright.envs.arrays import ArrayEnv, ArrayTransform, Values
from rollwright.errors import EnvError
from rollwright.testing import CHECKS, EnvConformance, check_env
from rollwright.testing.mocking_classes import CountingEnv


class Sound(CountingEnv):
    """What the broken environments below are, but for one thing: it keeps the contract."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**{"max_steps": 3, "batch_size": [2], **kwargs})

    def _increment(self, tensordict: TensorDictBase) -> torch.Tensor:
        return torch.ones_like(self.count)


# One broken environment (or more) for each check ---------------------------------------------------


class AnnouncesTooMuch(Sound):
    def __init__(self) -> None:
        super().__init__()
        self.action_spec = Bounded(0, 1, (2, 1), dtype=torch.int8)
        self.state_spec = Composite(speed=Unbounded((2, 1)), shape=[2])


class ReturnsUnannounced(Sound):
    def _counted(self) -> TensorDictBase:
        return super()._counted().set("surprise", torch.zeros(2))


class LeavesItsDomain(Sound):
    def __init__(self) -> None:
        super().__init__()
        self.observation_spec = Composite(observation=Bounded(0, 1, (2, 1), dtype=torch.int32), shape=[2])


class RewardsAtReset(Sound):
    def _reset(self, tensordict: TensorDictBase | None = None, **kwargs: Any) -> TensorDictBase:
        return super()._reset(tensordict).set("reward", torch.zeros(2, 1))


class BeginsDone(Sound):
    def reset(self, tensordict: TensorDictBase | None = None, **kwargs: Any) -> TensorDictBase:
        return super().reset(tensordict).update({"done": torch.ones(2, 1, dtype=torch.bool)})


class ResetsIntoOneTensorDict(Sound):
    kept: TensorDictBase | None = None

    def reset(self, tensordict: TensorDictBase | None = None, **kwargs: Any) -> TensorDictBase:
        if self.kept is None:
            self.kept = super().reset(tensordict)
        return self.kept


class StepsInACopy(Sound):
    def step(self, tensordict: TensorDictBase) -> TensorDictBase:
        return super().step(tensordict.clone())


class WritesIntoItsArgument(Sound):
    def _step(self, tensordict: TensorDictBase) -> TensorDictBase:
        outcome = super()._step(tensordict)
        tensordict["observation"] += 1
        return outcome


class DoneForNoReason(Sound):
    def _step(self, tensordict: TensorDictBase) -> TensorDictBase:
        return super()._step(tensordict).set("terminated", torch.zeros(2, 1, dtype=torch.bool))


class DrawsFromPython(Sound):
    numbers = random.Random(0)

    def _step(self, tensordict: TensorDictBase) -> TensorDictBase:
        return super()._step(tensordict).update({"reward": torch.full((2, 1), self.numbers.random())})


class RemembersAcrossResets(Sound):
    def __init__(self) -> None:
        super().__init__()
        self.total = itertools.count()

    def _step(self, tensordict: TensorDictBase) -> TensorDictBase:
        return super()._step(tensordict).update({"reward": torch.full((2, 1), float(next(self.total)))})


class IgnoresItsSeed(Sound):
    def __init__(self) -> None:
        super().__init__()
        self.generator = torch.Generator()

    def _set_seed(self, seed: int | None) -> None:
        self.generator.manual_seed(0)

    def _step(self, tensordict: TensorDictBase) -> TensorDictBase:
        return super()._step(tensordict).update({"reward": torch.rand(2, 1, generator=self.generator)})


class ResetsEveryRow(Sound):
    def _reset(self, tensordict: TensorDictBase | None = None, **kwargs: Any) -> TensorDictBase:
        return super()._reset(None)


class MergesNothing(Sound):
    def reset(self, tensordict: TensorDictBase | None = None, **kwargs: Any) -> TensorDictBase:
        fresh = super().reset(tensordict)
        return fresh if tensordict is None else fresh.set("observation", torch.zeros(2, 1, dtype=torch.int32))


class ResetsByItself(Sound):
    """As a simulator that begins the next episode in the step that ends one."""

    def _step(self, tensordict: TensorDictBase) -> TensorDictBase:
        outcome = super()._step(tensordict)
        self.count.masked_fill_(outcome["done"], self.start_val)
        return outcome.set("observation", self.count.clone())


class LosesTheEndOnItsFastPath(Sound):
    def step_and_maybe_reset(self, tensordict: TensorDictBase) -> tuple[TensorDictBase, TensorDictBase]:
        frame, root = super().step_and_maybe_reset(tensordict)
        frame["next"].update(root.select(*self.observation_keys))
        return frame, root


class LeavesThePastInTheRoot(Sound):
    def step_and_maybe_reset(self, tensordict: TensorDictBase) -> tuple[TensorDictBase, TensorDictBase]:
        frame, root = super().step_and_maybe_reset(tensordict)
        return frame.set("observation", root["observation"]), root


class LendsItsMemory(Sound):
    returns_copies = True  # it does not

    def _counted(self) -> TensorDictBase:
        return super()._counted().set("observation", self.count)


class StaysOpen(Sound):
    def close(self, *, raise_if_closed: bool = True) -> None:
        pass


class StepsAfterClose(Sound):
    def step(self, tensordict: TensorDictBase) -> TensorDictBase:
        return tensordict.set("next", tensordict.clone())


class RoundsOnArrays(TransformedEnv):
    def __init__(self) -> None:
        super().__init__(GymEnv("Pendulum-v1"), _Rounded(["observation"]))


class _Rounded(Transform):
    """Rounds to the nearest on TensorDicts, and down on arrays."""

    def _apply_transform(self, value: torch.Tensor) -> torch.Tensor:
        return value.round()

    def on_arrays(self, env: ArrayEnv) -> ArrayTransform:
        def change(values: Values) -> None:
            values["observation"] = np.floor(values["observation"])

        return ArrayTransform({}, [], lambda root, out: change(out), change)


BROKEN = [
    ("specs", AnnouncesTooMuch, "Only in the specs: 'speed'"),
    ("specs", ReturnsUnannounced, "Only in the rollout: .*'surprise'"),
    ("specs", LeavesItsDomain, "(?s)'observation' = .* lies outside"),
    ("reset", RewardsAtReset, "reset returned 'reward'"),
    ("reset", BeginsDone, "'done' is True after reset"),
    ("reset", ResetsIntoOneTensorDict, "same TensorDict twice"),
    ("step", StepsInACopy, "step returned another TensorDict"),
    ("step", WritesIntoItsArgument, "step changed 'observation' at the root"),
    ("step", ReturnsUnannounced, "Not announced: 'surprise'"),
    ("flags", DoneForNoReason, "'done' is .* but 'terminated' together are"),
    ("same_seed", DrawsFromPython, r"\('next', 'reward'\) differs in step 0"),
    ("same_seed", RemembersAcrossResets, r"seeded again with seed 0, \('next', 'reward'\)"),
    ("different_seeds", Sound, "seeds 0 and 1 give the same data"),
    ("different_seeds", IgnoresItsSeed, "seeds 0 and 1 give the same data"),
    ("partial_reset", ResetsEveryRow, r"'(observation|done)' of the unmarked row \[1\]"),
    ("partial_reset", MergesNothing, r"right after a reset of other rows, 'observation' of the unmarked row"),
    ("last_observation", ResetsByItself, "observation in 'next' is the first of the new one"),
    ("last_observation", LosesTheEndOnItsFastPath, "'observation' of 'next' is not what"),
    ("last_observation", LeavesThePastInTheRoot, "'observation' of the root is not what"),
    ("aliasing", LendsItsMemory, "'observation', returned in step 0, was overwritten"),
    ("arrays", RoundsOnArrays, r"on arrays, 'observation' is not what it is on TensorDicts: at \[\d+, 0\] .* in place"),
    ("close", StaysOpen, "is_closed is False after"),
    ("close", StepsAfterClose, r"step\(\) after close\(\) raised no EnvError"),
]
ONE_EACH = list({check: (check, make_env, message) for check, make_env, message in BROKEN}.values())


@pytest.mark.parametrize(("check", "make_env", "message"), BROKEN, ids=lambda part: getattr(part, "__name__", None))
def test_each_check_fails_on_a_broken_environment(check: str, make_env: Any, message: str) -> None:
    with pytest.raises(EnvError, match=message) as caught:
        CHECKS[check](make_env, 0, 12)
    assert str(caught.value).startswith(f"{make_env.__name__}(")


@pytest.mark.parametrize(("check", "make_env", "message"), ONE_EACH, ids=lambda part: getattr(part, "__name__", None))
def test_check_env_runs_each_check(check: str, make_env: Any, message: str) -> None:
    others = [name for name in CHECKS if name != check]
    with pytest.raises(EnvError, match=message) as caught:
        check_env(make_env, num_steps=12, stochastic=True, skip=others)
    assert caught.value.__notes__ == [f"in the check {check!r} of check_env"]


def test_every_check_has_a_broken_environment() -> None:
    assert {check for check, _, _ in BROKEN} == set(CHECKS)


@pytest.mark.parametrize("batch_size", [[], [1], [3], [2, 2]])
def test_a_sound_environment_passes(batch_size: list[int]) -> None:
    check_env(lambda: Sound(batch_size=batch_size), seed=5, num_steps=9)


def test_skip_takes_names_of_checks_only() -> None:
    with pytest.raises(ValueError, match=r"skip: expected names among .*'aliasing'.* got \['speed'\]"):
        check_env(Sound, skip=["speed"])
    check_env(ResetsEveryRow, num_steps=4, skip=["partial_reset"])


def test_an_environment_in_place_of_a_function_is_refused() -> None:
    with pytest.raises(TypeError, match="make_env: expected a function that returns a new environment, got Sound"):
        check_env(Sound())  # type: ignore[arg-type]


def test_environments_are_closed_after_a_check() -> None:
    made: list[Sound] = []

    def make_env() -> Sound:
        made.append(Sound())
        return made[-1]

    check_env(make_env, num_steps=3)
    assert made
    assert all(env.is_closed for env in made)


# The mixin ----------------------------------------------------------------------------------------


class TestSoundEnvironment(EnvConformance):
    num_steps = 8

    def make_env(self) -> Sound:
        return Sound()


class TestMixinLeavesOut(EnvConformance):
    num_steps = 8
    test_partial_reset = None

    def make_env(self) -> ResetsEveryRow:
        return ResetsEveryRow()


def test_mixin_has_a_test_for_every_check() -> None:
    assert {name[len("test_") :] for name in vars(EnvConformance) if name.startswith("test_")} == set(CHECKS)


@pytest.mark.parametrize(("check", "make_env", "message"), ONE_EACH, ids=lambda part: getattr(part, "__name__", None))
def test_mixin_runs_each_check(check: str, make_env: Any, message: str) -> None:
    class Suite(EnvConformance):
        num_steps = 12
        stochastic = True

    Suite.make_env = lambda self: make_env()  # type: ignore[method-assign]
    with pytest.raises(EnvError, match=message):
        getattr(Suite(), f"test_{check}")()


def test_mixin_without_make_env_says_what_to_write() -> None:
    class TestNothing(EnvConformance):
        pass

    with pytest.raises(TypeError, match="TestNothing has no make_env: define"):
        TestNothing().test_step()


def test_state_is_compared_to_the_bit_and_nan_equals_nan() -> None:
    class Nan(Sound):
        def _step(self, tensordict: TensorDictBase) -> TensorDictBase:
            return super()._step(tensordict).set("reward", torch.full((2, 1), torch.nan))

    CHECKS["same_seed"](Nan, 0, 5)
    assert TensorDict({"a": torch.nan})["a"].isnan()
