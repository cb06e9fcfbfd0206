"""SerialEnv makes environments anew that raise, each alone, and their trajectories end honestly."""

from __future__ import annotations

import copy
import pickle
import warnings
from collections.abc import Callable
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.vector import SyncVectorEnv
from tensordict import TensorDict, TensorDictBase

from rollwright.data import Categorical, Composite, Unbounded
from rollwright.envs import EnvBase, GymWrapper, ParallelEnv, SerialEnv, StepCounter, TransformedEnv
from rollwright.envs.arrays import array_form
from rollwright.errors import EnvError
from rollwright.testing.mocking_classes import HeterogeneousCountingEnv


class Walk(gymnasium.Env):
    """Observes its steps in this episode, in all, and a random number; raises in one of its steps, or resets."""

    observation_space = spaces.Box(-1e9, 1e9, (3,), np.float32)
    action_space = spaces.Discrete(3)

    def __init__(self, step: int = -1, reset: int = -1, error: type[BaseException] = ValueError) -> None:
        self.fails, self.error, self.total, self.begun = (step, reset), error, 0, 0

    def _seen(self) -> np.ndarray:
        return np.array([self.count, self.total, self.np_random.random()], np.float32)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.count, self.begun = 0, self.begun + 1
        if self.begun == self.fails[1]:
            raise self.error("boom")
        return self._seen(), {}

    def step(self, action: Any) -> Any:
        self.count, self.total = self.count + 1, self.total + 1
        if self.total == self.fails[0]:
            raise self.error("boom")
        return self._seen(), 1.0, self.count >= 8, False, {}


def walk(*args: Any, **kwargs: Any) -> Callable[[], EnvBase]:
    return lambda: GymWrapper(Walk(*args, **kwargs), categorical_action_encoding=True)


def serial(*makers: Callable[[], EnvBase], **kwargs: Any) -> SerialEnv:
    return SerialEnv(len(makers), list(makers), on_env_failure="recreate", **kwargs)


def rollout(env: EnvBase, steps: int, *, native: bool) -> dict[str, np.ndarray]:
    """Steps with resets of what has ended: ``[steps, envs, *]`` of everything below ``"next"``."""
    frames: list[dict[str, Any]] = []
    if native:
        arrays = array_form(env)
        root = arrays.reset(None)
        for _ in range(steps):
            out = arrays.step({**root, "action": np.zeros(env.batch_size, np.int64)}, {})
            frames.append(dict(out))
            root, ended = out, out["done"]
            if ended.any():
                fresh = arrays.reset(ended)
                root = {key: np.where(ended[:, None], value, out[key]) for key, value in fresh.items()}
    else:
        for step in env.rollout(steps, break_when_any_done=False)["next"].unbind(-1):
            flags = ("reward", "done", "terminated", "truncated")
            frames.append({key: step[key].squeeze(-1).numpy() for key in flags})
            frames[-1]["observation"] = step["observation"].numpy()
    return {key: np.stack([frame[key] for frame in frames]) for key in frames[0]}


BOTH = pytest.mark.parametrize("native", [False, True])


# Steps and resets that raise -------------------------------------------------------------------------------


@BOTH
def test_environment_is_recreated_alone_and_its_trajectory_ends(native: bool) -> None:
    env = serial(walk(), walk(4), walk())
    with pytest.warns(RuntimeWarning, match=r"SerialEnv\[1\] was recreated, .* truncated: .*step: ValueError: boom\. "):
        data = rollout(env, 7, native=native)
    spared, hit = [1, 2, 3, 4, 5, 6, 7], [1, 2, 3, 3, 1, 2, 3]
    assert data["observation"][..., 0].T.tolist() == [spared, hit, spared]
    assert (data["observation"][3, 1] == data["observation"][2, 1]).all()
    assert data["observation"][4:, 1, 1].tolist() == [1, 2, 3]  # a new one, which has not lived before
    cut = np.zeros((7, 3), bool)
    cut[3, 1] = True
    assert np.array_equal(data["truncated"], cut)
    assert np.array_equal(data["done"], cut)
    assert not data["terminated"].any()
    assert np.array_equal(data["reward"], 1.0 - cut)
    assert env.recreations == [0, 1, 0]


@BOTH
def test_the_same_as_in_other_processes(native: bool) -> None:
    makers = [walk(), walk(4), walk(reset=2)]
    found = []
    for env in (serial(*makers), ParallelEnv(3, makers, num_processes=1, on_env_failure="recreate")):
        env.set_seed(1)
        with pytest.warns(RuntimeWarning, match="recreated"):
            found.append(rollout(env, 12, native=native))
        assert env.recreations == [0, 3, 1]
        env.close()
    assert found[0].keys() == found[1].keys()
    assert all(np.array_equal(found[0][key], found[1][key]) for key in found[0])


@BOTH
def test_failure_in_a_reset(native: bool) -> None:
    env = serial(walk(), walk(reset=2))
    with pytest.warns(RuntimeWarning, match=r"SerialEnv\[1\] was recreated, .*raised in reset"):
        data = rollout(env, 10, native=native)
    assert data["observation"][7:, 1, :2].tolist() == [[8, 8], [1, 1], [2, 2]]
    assert data["terminated"][7].all()  # their real ends
    assert not data["truncated"].any()
    assert env.recreations == [0, 1]


@BOTH
def test_first_is_told_and_all_are_counted(native: bool) -> None:
    env = serial(walk(3), walk(4))
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        rollout(env, 12, native=native)
    assert [str(one.message).split(" was")[0] for one in told] == ["SerialEnv[0]"]
    assert env.recreations == [4, 3]


@pytest.mark.parametrize("where", [{"step": 1}, {"reset": 1}])
@BOTH
def test_environment_that_always_fails_is_an_error(native: bool, where: dict[str, int]) -> None:
    sound: list[Callable[[], EnvBase]] = []
    env = serial(walk(), lambda: sound[0]() if sound else walk(**where)())
    with (
        pytest.warns(RuntimeWarning),
        pytest.raises(EnvError, match=r"SerialEnv\[1\]: recreated 3 times without a step in between: .*boom") as caught,
    ):
        rollout(env, 20, native=native)
    errors = [caught.value]
    while errors[-1].__cause__ is not None:
        errors.append(errors[-1].__cause__)  # type: ignore[arg-type]
    assert isinstance(errors[-1], ValueError)
    assert env.recreations == [0, 3]
    env._envs[1].base_env._env.unwrapped.fails = (-1, -1)  # it goes on where the trouble is over
    assert rollout(env, 3, native=native)["observation"][:, 1, 0].tolist() == [1, 2, 3]


def test_factory_that_fails_is_an_error_until_it_does_not() -> None:
    made = []

    def make() -> EnvBase:
        made.append(1)
        if len(made) in (2, 3):
            raise OSError("no more licences")
        return walk(2 if len(made) == 1 else -1)()

    env = serial(make, walk())
    message = r"SerialEnv\[0\]: create_env_fn of worker 0 raised OSError: no more licences"
    with pytest.raises(EnvError, match=message):
        rollout(env, 4, native=True)
    with pytest.raises(EnvError, match=message):
        env.reset()
    assert rollout(env, 4, native=True)["observation"][:, 0, 0].tolist() == [1, 2, 3, 4]


@pytest.mark.parametrize("kind", ["other", "same"])
def test_factory_that_makes_something_else_is_an_error(kind: str) -> None:
    kept = walk(2)()
    others: list[EnvBase] = [kept]

    def make() -> EnvBase:
        if kind == "same":
            return kept
        return others.pop() if others else TransformedEnv(walk()(), StepCounter())

    message = {"other": r"differs in .*step_count.*of one kind", "same": "once more.*make another environment"}
    with pytest.raises(EnvError, match=message[kind]):
        rollout(serial(make), 3, native=False)


def test_what_is_no_failure_of_the_environment_passes() -> None:
    env = serial(walk(2, error=KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        rollout(env, 3, native=True)
    assert env.recreations == [0]
    env.close()
    assert env._envs[0].base_env.is_closed
    with pytest.raises(EnvError, match="after close"):
        env.rand_step(env.fake_tensordict())
    assert env.recreations == [0]


def test_bad_arguments() -> None:
    with pytest.raises(ValueError, match=r"on_env_failure: expected one of .*, got 'ignore'"):
        SerialEnv(2, walk(), on_env_failure="ignore")

    class Finished(Batch):
        def __init__(self) -> None:
            super().__init__()
            self.done_spec = Composite(finished=Categorical(2, (2, 1), dtype=torch.bool), shape=(2,))

    with pytest.raises(ValueError, match="'finished', which cannot tell a cut from an end"):
        serial(Finished)


# Batches and unlike environments ---------------------------------------------------------------------------


class Batch(EnvBase):
    """Two environments that count; those whose action is 2 have ended; raises in one of its partial resets."""

    def __init__(self, fails: int = -1) -> None:
        super().__init__(batch_size=(2,))
        self.fails, self.resets = fails, 0
        self.observation_spec = Composite(count=Unbounded((2, 1)), shape=(2,))
        self.action_spec = Categorical(3, (2,))
        self.register_buffer("total", torch.zeros(()))

    def _reset(self, tensordict: TensorDictBase | None = None, **kwargs: Any) -> TensorDictBase:
        everywhere = torch.ones(2, 1, dtype=torch.bool)
        rows = everywhere if tensordict is None else tensordict.get("_reset", everywhere)
        if not rows.all():
            self.resets += 1
            if self.resets == self.fails:
                raise ValueError("boom")
        self.count = torch.where(rows, 0.0, getattr(self, "count", torch.zeros(2, 1)))
        return TensorDict({"count": self.count}, [2])

    def _step(self, tensordict: TensorDictBase) -> TensorDictBase:
        self.count = self.count + 1
        self.total += 1
        done = (tensordict["action"] == 2).unsqueeze(-1)
        return TensorDict({"count": self.count, "reward": torch.ones(2, 1), "done": done}, [2])

    def _set_seed(self, seed: int | None) -> None: ...


def test_failure_in_a_partial_reset_ends_what_was_under_way() -> None:
    env = serial(lambda: Batch(1), Batch)

    def step(td: TensorDictBase, *actions: int) -> tuple[TensorDictBase, TensorDictBase]:
        return env.step_and_maybe_reset(td.set("action", torch.tensor(actions).reshape(2, 2)))

    td = step(env.reset(), 0, 0, 0, 0)[1]
    with pytest.warns(RuntimeWarning, match=r"SerialEnv\[0\] was recreated"):
        frame, td = step(td, 0, 2, 0, 0)  # its reset fails, and the one beside it was under way
    assert frame["next", "terminated"].flatten().tolist() == [False, True, False, False]
    assert td["count"].flatten().tolist() == [2, 0, 2, 2]
    frame, td = step(td, 0, 0, 0, 0)
    assert frame["next", "truncated"].flatten().tolist() == [True, True, False, False]
    assert frame["next", "count"].flatten().tolist() == [2, 0, 3, 3]
    assert frame["next", "reward"].flatten().tolist() == [0, 0, 1, 1]
    assert td["count"].flatten().tolist() == [0, 0, 3, 3]
    frame, td = step(td, 0, 0, 0, 0)
    assert not frame["next", "done"].any()
    assert td["count"].flatten().tolist() == [1, 1, 4, 4]


def test_failure_in_a_partial_reset_on_arrays() -> None:
    class Stops(Walk):
        def step(self, action: Any) -> Any:
            out = super().step(action)
            return (*out[:2], action == 2, *out[3:])

    def make(**fails: int) -> EnvBase:
        both = SyncVectorEnv([lambda: Stops(**fails), Stops])
        return GymWrapper(both, categorical_action_encoding=True)

    makers = [lambda: make(reset=2), make]
    env = serial(lambda: makers.pop(0)())
    arrays = array_form(env)
    root = arrays.reset(None)

    def step(*actions: int) -> Any:
        return arrays.step({**root, "action": np.array([actions])}, {})

    ended = step(2, 0)["done"]
    assert ended.tolist() == [[True, False]]
    with pytest.warns(RuntimeWarning, match="recreated"):
        fresh = arrays.reset(ended)
    assert fresh["observation"][0, 0, :2].tolist() == [0, 0]
    out = step(0, 0)  # no step: the second one's environment is gone
    assert out["truncated"].tolist() == [[True, True]]
    assert out["observation"][0, :, 0].tolist() == [0, 1]
    assert arrays.reset(out["done"])["observation"][0, :, 0].tolist() == [0, 0]
    out = step(0, 0)
    assert not out["done"].any()
    assert out["observation"][0, :, :2].tolist() == [[1, 1], [1, 1]]


def test_stays_ended_until_it_is_reset() -> None:
    env = serial(walk(), walk(2))
    with pytest.warns(RuntimeWarning):
        data = env.rollout(8, break_when_all_done=True)
    assert data["next", "observation"][..., 0].tolist() == [[1, 2, 3, 4, 5, 6, 7, 8], [1] * 8]
    assert data["next", "truncated"][1, :, 0].tolist() == [False] + [True] * 7
    assert env.recreations == [0, 1]


def test_unlike_environments() -> None:
    class Failing(HeterogeneousCountingEnv):
        def _step(self, tensordict: Any) -> Any:
            self.steps = getattr(self, "steps", 0) + 1
            if self.steps == 2:
                raise ValueError("boom")
            return super()._step(tensordict)

    env = serial(HeterogeneousCountingEnv, Failing)
    with pytest.warns(RuntimeWarning, match="boom"):
        data = env.rollout(3, break_when_any_done=False)
    row, group = data[1]["next"], env.done_groups[0]
    assert bool(row[1].get(group.done).all())
    assert bool(row[1].get(group.truncated).all())
    assert not bool(data[0]["next"][1].get(group.done).any())
    flags = ("done", "terminated", "truncated")
    before, after = (row[t].get("lazy").tensordicts[0].exclude(*flags) for t in (0, 1))
    assert (before["camera"] == 1).all()  # the only step that it took
    assert (before == after).all()


def test_transforms_inside_are_recreated_and_those_outside_stay() -> None:
    def doubled(td: TensorDictBase) -> TensorDictBase:
        return td.set("observation", td["observation"] * 2)

    env = TransformedEnv(serial(lambda: TransformedEnv(walk(3)(), StepCounter(step_count_key="inside"))), doubled)
    env.append_transform(StepCounter())
    with pytest.warns(RuntimeWarning):
        data = env.rollout(5, break_when_any_done=False)["next"][0]
    assert data["observation"][:, 0].tolist() == [2, 4, 4, 2, 4]
    assert data["inside"].flatten().tolist() == [1, 2, 2, 1, 2]
    assert data["step_count"].flatten().tolist() == [1, 2, 3, 1, 2]


# Seeds and state ---------------------------------------------------------------------------------------------


def test_new_environments_are_seeded_by_the_old_seeds() -> None:
    def numbers(seed: int) -> list[float]:
        env.set_seed(seed)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            data = rollout(env, 9, native=True)["observation"][..., 2]
        assert torch.equal(torch.rand(1), torch.rand(1, generator=torch.Generator().manual_seed(seed)))
        return data.T.flatten().tolist()

    env = serial(walk(3), walk(3))
    first = numbers(5)
    begun = [first[0], first[3], first[6], first[9], first[12], first[15]]  # first steps of six environments
    assert len(set(begun)) == 6
    assert numbers(5) == first
    assert numbers(6) != first


def test_state_has_the_names_that_it_has_without() -> None:
    env, plain = serial(Batch, Batch), SerialEnv(2, Batch)
    env.rollout(3, break_when_any_done=False)
    assert env.state_dict().keys() == plain.state_dict().keys()
    plain.load_state_dict(env.state_dict())
    assert plain.worker1.total == 3
    again = serial(Batch, Batch)
    again.load_state_dict(plain.state_dict())
    assert again.worker1.total == 3


@pytest.mark.parametrize("twin_of", [copy.deepcopy, lambda env: pickle.loads(pickle.dumps(env))])
def test_copies_go_their_own_way(twin_of: Any) -> None:
    env = serial(walk(3))
    env.set_seed(0)
    twin = twin_of(env)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        first, second = (rollout(each, 6, native=True) for each in (env, twin))
    assert np.array_equal(first["observation"], second["observation"])
    assert env.recreations == twin.recreations == [2]


def test_moved_environments_are_moved_when_recreated() -> None:
    env = serial(walk(2)).to("cpu")
    with pytest.warns(RuntimeWarning):
        assert env.rollout(4, break_when_any_done=False).device == torch.device("cpu")
    assert env._envs[0].base_env.device == torch.device("cpu")


def test_nothing_is_around_environments_without_the_option() -> None:
    env = SerialEnv(2, walk())
    assert {type(each) for each in env._envs} == {GymWrapper}
    assert env.recreations == [0, 0]
