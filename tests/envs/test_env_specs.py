"""EnvBase: specs and their keys, batch sizes, devices."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
import torch
from tensordict import TensorDict, TensorDictBase

from rollwright.collectors import Collector
from rollwright.data import Binary, Categorical, Composite, LazyTensorStorage, ListStorage, Unbounded
from rollwright.envs import (
    CatTensors,
    EnvBase,
    GymEnv,
    InitTracker,
    ParallelEnv,
    RewardSum,
    SerialEnv,
    StepCounter,
    TransformedEnv,
    check_env_specs,
)
from rollwright.errors import EnvError
from rollwright.modules import RandomPolicy
from rollwright.testing.mocking_classes import (
    CountingEnv,
    CountingEnvWithString,
    EnvWithMetadata,
    MockBatchedUnLockedEnv,
    MultiKeyCountingEnv,
    NestedCountingEnv,
    StateLessCountingEnv,
)


class Bare(EnvBase):
    """Sets the specs of its observation and of its action only."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        batch = self.batch_size
        self.observation_spec = Composite(observation=Unbounded((*batch, 2)), shape=batch)
        self.action_spec = Binary(1, shape=(*batch, 1))

    def _reset(self, tensordict: TensorDictBase | None = None, **kwargs: Any) -> TensorDictBase:
        return TensorDict({"observation": torch.zeros((*self.batch_size, 2))}, self.batch_size)

    def _step(self, tensordict: TensorDictBase) -> TensorDictBase:
        return self._reset().update(self.full_reward_spec.zero()).update(self.full_done_spec.zero())

    def _set_seed(self, seed: int | None) -> None:
        pass


# Specs and keys -----------------------------------------------------------------------------------


def test_specs_left_out_get_defaults() -> None:
    env = Bare(batch_size=[3])
    assert env.ndim == env.batch_dims == env.ndimension() == 1
    assert env.reward_spec == Unbounded((3, 1))
    assert env.done_spec["done"] == Categorical(2, shape=(3, 1), dtype=torch.bool)
    assert env.state_spec.is_empty()
    assert env.done_keys == ["done", "terminated"]


def test_specs_may_be_set_before_the_base_constructor() -> None:
    class Early(Bare):
        def __init__(self) -> None:
            self.reward_spec = Unbounded((1,), dtype=torch.float64)
            super().__init__(device="cpu")

    env = Early()
    assert env.reward_spec.dtype == torch.float64
    assert env.full_reward_spec.device == torch.device("cpu")
    check_env_specs(env)


NAMES = ("observation", "state", "action", "reward", "done")


@pytest.mark.parametrize("batch_size", [[], [2]])
def test_specs_may_be_read_before_they_are_set(batch_size: list[int]) -> None:
    class Curious(Bare):
        def __init__(self, **kwargs: Any) -> None:
            EnvBase.__init__(self, **kwargs)
            self.seen = {name: getattr(self, f"full_{name}_spec") for name in NAMES}
            self.full_state_spec["memory"] = Unbounded((*self.batch_size, 1))
            super().__init__(**kwargs)

    env = Curious(batch_size=batch_size)
    assert {name for name in NAMES if env.seen[name].is_empty()} == {"observation", "action"}
    assert env.state_keys == ["memory"]
    assert list(env.seen["done"].keys()) == ["done", "terminated"]
    assert env.action_keys == ["action"]
    check_env_specs(Bare(batch_size=batch_size))


def test_specs_read_before_the_base_constructor_are_named() -> None:
    class Early(Bare):
        def __init__(self) -> None:
            _ = self.full_action_spec

    with pytest.raises(EnvError, match=r"Early: full_action_spec was read before EnvBase\.__init__"):
        Early()


@pytest.mark.parametrize("batch_size", [[], [2], [2, 3]])
def test_specs_of_one_environment_are_expanded_to_the_batch(batch_size: list[int]) -> None:
    class OfOne(Bare):
        def __init__(self, **kwargs: Any) -> None:
            EnvBase.__init__(self, **kwargs)
            self.observation_spec_unbatched = Composite(observation=Unbounded((2,)))
            self.action_spec_unbatched = Binary(1, shape=(1,))
            self.reward_spec_unbatched = Unbounded(())
            self.full_done_spec_unbatched = Composite(done=Categorical(2, shape=(1,), dtype=torch.bool))

    env, other = OfOne(batch_size=batch_size), Bare(batch_size=batch_size)
    assert env.specs == other.specs
    assert env.rollout(3)["action"].shape == (*batch_size, 3, 1)
    for name in NAMES:
        spec = getattr(env, f"full_{name}_spec_unbatched")
        assert spec.shape == ()
        assert spec.expand(env.batch_size) == getattr(env, f"full_{name}_spec")
    assert env.action_spec_unbatched == Binary(1, shape=(1,))
    check_env_specs(env)
    with pytest.raises(AttributeError, match="those of a TransformedEnv follow from its base environment"):
        TransformedEnv(env).action_spec_unbatched = Binary(1, shape=(1,))


def test_specs_set_early_are_checked_against_the_batch_size() -> None:
    class Early(Bare):
        def __init__(self) -> None:
            self.state_spec = Composite(state=Unbounded((1,)))
            super().__init__(batch_size=[2])

    with pytest.raises(ValueError, match=r"state_spec: expected a shape that begins with .*\[2\], got \[\]"):
        Early()


def test_specs_are_copied_when_set() -> None:
    spec = Composite(observation=Unbounded((2,)))
    env = Bare(device="cpu")
    env.observation_spec = spec
    env.full_observation_spec["more"] = Unbounded((1,))
    assert list(spec.keys()) == ["observation"]


def test_specs_without_a_default_key_must_name_their_entries() -> None:
    with pytest.raises(TypeError, match=r"state_spec: expected a Composite .* got Unbounded"):
        Bare().state_spec = Unbounded((2,))  # type: ignore[assignment]


def test_leaf_specs_get_their_usual_key() -> None:
    env = Bare()
    env.observation_spec = Unbounded(())  # type: ignore[assignment]
    assert env.observation_spec == Composite(observation=Unbounded(()))
    env.action_spec = Unbounded((4,))
    env.reward_spec = Unbounded(())
    env.done_spec = Unbounded((), dtype=torch.bool)
    assert (env.action_key, env.reward_key, env.done_keys) == ("action", "reward", ["done", "terminated"])
    assert env.reward_spec.shape == (1,)
    assert env.full_done_spec["terminated"].shape == (1,)


@pytest.mark.parametrize("wrap", [lambda env: env, TransformedEnv], ids=["env", "TransformedEnv"])
def test_locked_specs_are_set_as_a_whole_only(wrap: Any) -> None:
    env = wrap(Bare(spec_locked=True))
    if env.is_spec_locked:
        env = wrap(pickle.loads(pickle.dumps(env)))
    env.set_spec_lock_()
    for spec in (env.full_observation_spec, env.output_spec, env.input_spec["full_action_spec"]):
        with pytest.raises(RuntimeError, match="locked"):
            spec["more"] = Unbounded((1,))
    getattr(env, "base_env", env).observation_spec = Composite(other=Unbounded((1,)))
    assert env.add_truncated_keys().done_keys == ["done", "terminated", "truncated"]
    for spec in (env.full_observation_spec, env.full_done_spec):
        with pytest.raises(RuntimeError, match="locked"):
            spec["more"] = Unbounded((1,))
    assert env.observation_keys  # remembered
    assert env.set_spec_lock_(False) is env
    assert not env.is_spec_locked
    env.full_observation_spec["zero"] = Unbounded((1,))
    assert env.set_spec_lock_().observation_keys[-1] == "zero"


def test_specs_are_locked_when_the_constructor_has_run() -> None:
    class Grows(Bare):
        def __init__(self) -> None:
            super().__init__(spec_locked=True)
            self.full_action_spec["more"] = Unbounded((1,))

    env = Grows()
    assert env.is_spec_locked
    with pytest.raises(RuntimeError, match="locked"):
        del env.full_action_spec["more"]
    assert not Bare().is_spec_locked


@pytest.mark.parametrize(
    "make",
    [
        lambda **options: GymEnv("CartPole-v1", **options),
        lambda **options: SerialEnv(2, lambda: GymEnv("CartPole-v1"), **options),
        lambda **options: TransformedEnv(GymEnv("CartPole-v1"), StepCounter(), **options),
    ],
    ids=["GymEnv", "SerialEnv", "TransformedEnv"],
)
def test_every_constructor_says_whether_specs_are_locked(make: Any) -> None:
    env = make(spec_locked=True)
    assert env.is_spec_locked
    with pytest.raises(RuntimeError, match="locked"):
        env.full_observation_spec["more"] = Unbounded((*env.batch_size, 1))
    env.rollout(2)
    assert not make(spec_locked=False).is_spec_locked


def test_a_constructor_may_have_an_argument_of_that_name_for_itself() -> None:
    class Own(Bare):
        def __init__(self, spec_locked: str) -> None:
            super().__init__()
            self.given = spec_locked

    env = Own(spec_locked="mine")
    assert env.given == "mine"
    assert not env.is_spec_locked


def test_cardinality_is_that_of_the_actions() -> None:
    assert GymEnv("CartPole-v1").cardinality() == 2


def test_input_output_and_all_specs_hold_the_five() -> None:
    env = NestedCountingEnv(batch_size=[2])
    assert set(env.input_spec.keys()) == {"full_action_spec", "full_state_spec"}
    assert set(env.output_spec.keys()) == {"full_observation_spec", "full_reward_spec", "full_done_spec"}
    assert env.specs["output_spec", "full_reward_spec", "data", "reward"] == env.full_reward_spec["data", "reward"]


def test_only_a_leaf_at_its_usual_key_is_an_action_spec_or_a_reward_spec() -> None:
    env = NestedCountingEnv(batch_size=[2])
    assert env.action_spec["data", "action"] == env.full_action_spec[env.action_key]
    assert env.reward_spec["data", "reward"] == env.full_reward_spec[env.reward_key]
    assert isinstance(env.action_spec_unbatched, Composite)
    assert env.action_spec.is_in(env.rand_action())
    drawn = env.rollout(3, RandomPolicy(env.action_spec))
    assert env.action_key in drawn.keys(True)
    env.full_reward_spec = Composite(gain=Unbounded((2, 1)), shape=(2,))
    assert list(env.reward_spec.keys()) == ["gain"]


def test_policies_by_signature_write_the_one_action_wherever_it_is() -> None:
    env = NestedCountingEnv()
    rollout = env.rollout(3, lambda td: td.set(("data", "action"), env.full_action_spec["data", "action"].zero() + 1))
    assert rollout["data", "action"].all()


def test_several_action_and_reward_keys() -> None:
    env = MultiKeyCountingEnv()
    assert env.action_keys == ["action", ("nested_1", "action"), ("nested_2", "azione")]
    assert isinstance(env.action_spec, Composite)
    assert isinstance(env.reward_spec, Composite)
    with pytest.raises(KeyError, match="has 3 action keys"):
        _ = env.action_key
    with pytest.raises(KeyError, match="Read reward_keys instead"):
        _ = env.reward_key
    rollout = env.rollout(3)
    assert all(key in rollout.keys(True) for key in env.action_keys)
    assert ("nested_1", "gift") not in rollout.keys(True)
    assert ("next", "nested_1", "gift") in rollout.keys(True)


@pytest.mark.parametrize(
    "make_env",
    [
        lambda: CountingEnv(batch_size=[2, 3]),
        lambda: NestedCountingEnv(batch_size=[2], has_root_done=True),
        lambda: MultiKeyCountingEnv(batch_size=[2]),
        EnvWithMetadata,
        CountingEnvWithString,
    ],
)
def test_fake_tensordict_has_what_a_step_has(make_env: Any) -> None:
    env = make_env()
    fake, real = env.fake_tensordict(), env.rand_step()
    assert fake.batch_size == env.batch_size
    assert set(fake.keys(True)) == set(real.keys(True))
    for key, value in fake.items(True, True):
        assert (value.shape, value.dtype) == (real[key].shape, real[key].dtype)
        assert not value.any()


# Batches and devices -----------------------------------------------------------------------------


@pytest.mark.parametrize("batch_size", [[], [1], [3], [2, 3]])
def test_batch_sizes(batch_size: list[int]) -> None:
    env = CountingEnv(batch_size=batch_size)
    assert (env.batch_size, env.shape, env.ndim) == (tuple(batch_size), tuple(batch_size), len(batch_size))
    assert env.numel() == torch.Size(batch_size).numel()
    assert env.rollout(3).batch_size == (*batch_size, 3)
    assert env.rand_step()["next", "reward"].shape == (*batch_size, 1)


def test_specs_must_begin_with_the_batch_size() -> None:
    env = CountingEnv(batch_size=[2])
    with pytest.raises(ValueError, match=r"observation_spec: .* batch size \[2\], got \[3\]"):
        env.observation_spec = Composite(observation=Unbounded((3, 1)), shape=[3])


@pytest.mark.parametrize("batch_size", [[], [4], [2, 2]])
def test_unlocked_environments_take_the_batch_of_their_data(batch_size: list[int]) -> None:
    for env in (StateLessCountingEnv(), MockBatchedUnLockedEnv()):
        td = env.reset(TensorDict({}, batch_size))
        assert td["done"].shape == (*batch_size, 1)
        td = env.rand_step(td)
        assert td["next", "reward"].shape == (*batch_size, 1)
        assert td["next"].batch_size == tuple(batch_size)
        start = env.reset(TensorDict({}, batch_size))
        rollout = env.rollout(3, tensordict=start, auto_reset=False, break_when_any_done=False)
        assert rollout.batch_size == (*batch_size, 3)


def test_an_unlocked_batch_is_reset_row_by_row() -> None:
    env = StateLessCountingEnv()
    td = env.reset(TensorDict({}, [3])).set("max_count", torch.tensor([[1], [5], [1]], dtype=torch.int32))
    td["action"] = torch.ones(3, 1, dtype=torch.int32)
    frame, root = env.step_and_maybe_reset(td)
    assert frame["next", "count"].flatten().tolist() == [1, 1, 1]
    assert root["count"].flatten().tolist() == [0, 1, 0]
    assert root["max_count"][1].item() == 5
    assert (root["max_count"][::2] >= 10).all()


def test_without_a_device_tensors_stay_where_they_are_made() -> None:
    env = CountingEnv()
    assert env.device is None
    assert env.reset().device is None
    assert env.rollout(2).device is None


def test_with_a_device_data_and_specs_are_there() -> None:
    env = CountingEnv(device="cpu")
    cpu = torch.device("cpu")
    assert env.device == env.reset().device == env.rollout(2).device == cpu
    assert env.rand_step()["next"].device == cpu
    assert env.full_action_spec.device == cpu


def test_to_moves_specs_and_data() -> None:
    env = CountingEnv()
    assert env.to(None) is env
    assert env.device is None
    assert env.to("cpu") is env
    assert env.device == env.reset().device == torch.device("cpu")
    assert env.full_done_spec.device == torch.device("cpu")


def test_a_cuda_device_has_an_index_as_that_of_data_has(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    env = EnvBase.__new__(EnvBase)
    EnvBase.__init__(env, device="cuda")
    assert env.device == torch.device("cuda", 0)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
@pytest.mark.parametrize("name", ["cuda", "cuda:1"])
def test_a_cuda_device_where_there_is_none(name: str) -> None:
    for cause in (
        lambda: CountingEnv(device=name),
        lambda: CountingEnv().to(name),
        lambda: SerialEnv(2, CountingEnv, device=name),
        lambda: TransformedEnv(CountingEnv(), device=name),
        lambda: LazyTensorStorage(10, device=name),
        lambda: ListStorage(10, device=name),
    ):
        with pytest.raises(ValueError, match=f"device: got '{name}', and torch sees no CUDA device. Pass 'cpu'"):
            cause()


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("device", ["cuda", "cuda:0"])
@pytest.mark.parametrize("make_env", [CountingEnv, NestedCountingEnv, MultiKeyCountingEnv])
def test_environments_on_cuda(make_env: Any, device: str) -> None:
    env = make_env(device=device, batch_size=[2], max_steps=2)
    check_env_specs(env)
    rollout = env.rollout(9, break_when_any_done=False)
    assert rollout.device == torch.device("cuda:0")
    assert all(value.is_cuda for value in rollout.values(True, True))


def test_states_may_come_back_without_being_observations() -> None:
    class Remembers(CountingEnv):
        def __init__(self) -> None:
            super().__init__()
            self.state_spec = Composite(memory=Unbounded((2,)))

        def _counted(self) -> TensorDictBase:
            return super()._counted().set("memory", torch.zeros(2))

    check_env_specs(Remembers())


def test_the_check_is_a_method_too() -> None:
    CountingEnv().check_env_specs(seed=0)
    with pytest.raises(TypeError, match="sead"):
        CountingEnv().check_env_specs(sead=0)


# Entries of which only the key is known -----------------------------------------------------------


def partly_known() -> GymEnv:
    """An environment whose specs have a key more, without a spec."""
    env = GymEnv("CartPole-v1")
    for name in ("action", "observation", "state", "reward", "done"):
        env.full_spec(name)["more", name] = None
    return env


def test_keys_are_those_of_entries_that_have_a_spec() -> None:
    env, plain = partly_known(), GymEnv("CartPole-v1")
    for name in ("action", "observation", "state", "reward", "done"):
        assert getattr(env, f"{name}_keys") == getattr(plain, f"{name}_keys")
    assert env.full_action_spec["more", "action"] is None
    stepped = [set(one.rand_step(one.reset()).keys(True, True)) for one in (env, plain)]
    assert stepped[0] == stepped[1]
    check_env_specs(env)


@pytest.mark.parametrize("options", [{}, {"use_buffers": False}, {"compact_obs": True}], ids=str)
@pytest.mark.parametrize(
    "wrap",
    [
        lambda make: make(),
        lambda make: SerialEnv(2, make),
        lambda make: ParallelEnv(2, make),
        lambda make: (
            TransformedEnv(make(), StepCounter()).append_transform(RewardSum()).append_transform(InitTracker())
        ),
        lambda make: TransformedEnv(make(), CatTensors()),
    ],
    ids=["alone", "serial", "parallel", "counted", "joined"],
)
def test_collectors_leave_entries_without_a_spec_out(wrap: Any, options: dict[str, Any]) -> None:
    keys = []
    for make in (partly_known, lambda: GymEnv("CartPole-v1")):
        collector = Collector(wrap(make), frames_per_batch=8, total_frames=8, **options)
        keys += [set(batch.keys(True, True)) for batch in collector]
    assert keys[0] == keys[1]


class InNew(CountingEnv):
    """Sets all of its specs where it is created, as mocks of the field do."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        cls._output_spec = Composite(
            full_observation_spec=Composite(seen=Unbounded((3,))),
            full_reward_spec=Composite(gain=Unbounded((1,))),
            full_done_spec=Composite(done=Categorical(2, shape=(1,), dtype=torch.bool)),
        )
        cls._input_spec = Composite(full_action_spec=Composite(move=Binary(2)), full_state_spec=Composite())
        return super().__new__(cls, *args, **kwargs)

    def __init__(self) -> None:
        EnvBase.__init__(self)

    def _reset(self, tensordict: TensorDictBase | None = None, **kwargs: Any) -> TensorDictBase:
        return TensorDict({"seen": torch.zeros(3)})

    def _step(self, tensordict: TensorDictBase) -> TensorDictBase:
        return TensorDict({"seen": tensordict["move"].sum().expand(3).float(), "gain": torch.ones(1), "done": False})


def test_specs_that_a_class_sets_where_it_is_created_count() -> None:
    env = InNew()
    keys = [getattr(env, f"{name}_keys") for name in ("observation", "reward", "action", "state", "done")]
    assert keys == [["seen"], ["gain"], ["move"], [], ["done", "terminated"]]
    check_env_specs(env)
    env.observation_spec["seen"] = Unbounded((3,), dtype=torch.float64)
    assert InNew().observation_spec["seen"].dtype == torch.float32
    assert SerialEnv(2, InNew).rollout(3)["move"].shape == (2, 3, 2)
