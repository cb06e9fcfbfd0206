"""Partial resets: only marked rows begin anew, in whatever shape their data comes."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tensordict import LazyStackedTensorDict, NonTensorData, TensorDict, TensorDictBase, lazy_stack

from rollwright.collectors import Collector
from rollwright.data import Binary, Composite, Unbounded
from rollwright.envs import (
    AsyncEnvPool,
    Compose,
    EnvBase,
    GymEnv,
    InitTracker,
    ParallelEnv,
    RewardSum,
    SerialEnv,
    StepCounter,
    TransformedEnv,
    VecNorm,
)
from rollwright.envs.checkpoint import load_env, save_env
from rollwright.errors import EnvError
from rollwright.testing.mocking_classes import (
    CountingBatchedEnv,
    CountingEnv,
    CountingEnvCountPolicy,
    CountingEnvWithString,
    HeterogeneousCountingEnv,
    HeterogeneousCountingEnvPolicy,
    MockNestedResetEnv,
    MultiAgentCountingEnv,
    MultiKeyCountingEnv,
    MultiKeyCountingEnvPolicy,
    NestedCountingEnv,
)


def after(env: EnvBase, policy: Any, steps: int) -> TensorDictBase:
    """The root after some steps."""
    td = env.reset()
    for _ in range(steps):
        td = env._step_mdp(env.step(policy(td)))
    return td


def counting(batch_size: list[int]) -> tuple[CountingEnv, TensorDictBase]:
    env = CountingEnv(max_steps=99, batch_size=batch_size)
    return env, after(env, CountingEnvCountPolicy(env.action_spec), 3)


MASKS = {
    "none": [False, False, False],
    "some": [True, False, True],
    "all": [True, True, True],
}


@pytest.mark.parametrize("name", MASKS)
def test_only_marked_rows_begin_anew(name: str) -> None:
    mask = torch.tensor(MASKS[name]).unsqueeze(-1)
    env, td = counting([3])
    fresh = env.reset(td.set("_reset", mask))
    expected = [0 if marked else 3 for marked in MASKS[name]]
    assert fresh["observation"].flatten().tolist() == expected
    assert env.count.flatten().tolist() == expected
    outcome = env.step(fresh.set("action", env.action_spec.one()))["next"]
    assert outcome["observation"].flatten().tolist() == [count + 1 for count in expected]


@pytest.mark.parametrize("marked", [True, False])
def test_an_environment_without_a_batch_is_reset_or_not(marked: bool) -> None:
    env, td = counting([])
    fresh = env.reset(td.set("_reset", torch.tensor([marked])))
    assert fresh["observation"].item() == (0 if marked else 3)
    assert env.count.item() == (0 if marked else 3)


def test_nothing_marked_touches_nothing() -> None:
    class Raises(CountingEnv):
        def _reset(self, tensordict: TensorDictBase | None = None, **kwargs: Any) -> TensorDictBase:
            if tensordict is not None:
                raise RuntimeError("asked to reset nothing")
            return super()._reset(tensordict)

    env = Raises(batch_size=[2])
    td = env.reset()
    fresh = env.reset(td.set("_reset", torch.zeros(2, 1, dtype=torch.bool)))
    assert fresh is td
    assert set(fresh.keys()) == {"observation", "done", "terminated"}


def test_a_reset_is_put_into_its_argument_and_writes_no_tensor() -> None:
    env = NestedCountingEnv(max_steps=99, batch_size=[2])
    td = after(env, CountingEnvCountPolicy(env.full_action_spec[env.action_key], env.action_key), 2)
    td["data", "_reset"] = torch.tensor([True, False]).reshape(2, 1, 1).expand(2, 3, 1)
    shared, before = td.copy(), td.clone()
    assert env.reset(td) is td
    assert set(td.keys(True, True)) == set(before.keys(True, True)) - {("data", "_reset")}
    assert (shared == before).all()
    assert td["data", "states"][:, 0].tolist() != before["data", "states"][:, 0].tolist()


def test_masks_are_gone_after_a_reset_and_other_entries_stay() -> None:
    env, td = counting([2])
    td["next"] = last = td.clone()
    for mask in (torch.tensor([[True], [False]]), torch.tensor([[True], [True]]), torch.tensor([[False], [False]])):
        assert env.reset(td.set("_reset", mask)) is td
        assert "_reset" not in td
        assert (td["next"] == last).all()


def test_what_cannot_be_written_is_left_alone() -> None:
    env, td = counting([2])
    td = td.set("_reset", torch.tensor([[True], [False]])).lock_()
    fresh = env.reset(td)
    assert fresh is not td
    assert "_reset" in td
    assert fresh["observation"].tolist() == [[0], td["observation"][1].tolist()]


def test_a_lazy_stack_takes_the_reset_row_by_row() -> None:
    env, td = counting([2])
    stack = lazy_stack([row.clone() for row in td.unbind(0)], 0)
    rows = stack.tensordicts
    assert env.reset(stack.set("_reset", torch.tensor([[True], [False]]))) is stack
    assert stack["observation"].tolist() == [[0], td["observation"][1].tolist()]
    assert stack.tensordicts[0] is rows[0]
    assert "_reset" not in rows[0]


def test_entries_that_the_environment_does_not_return_stay_in_all_rows() -> None:
    env, td = counting([2])
    td["hidden"] = torch.ones(2, 4)
    fresh = env.reset(td.set("_reset", torch.tensor([[True], [False]])))
    assert (fresh["hidden"] == 1).all()


def test_masks_of_two_batch_dimensions() -> None:
    env, td = counting([2, 2])
    mask = torch.tensor([[True, False], [False, True]]).unsqueeze(-1)
    assert env.reset(td.set("_reset", mask))["observation"].squeeze(-1).tolist() == [[0, 3], [3, 0]]


@pytest.mark.parametrize("shape", [(3,), (3, 1, 1)])
def test_masks_may_lack_or_add_a_trailing_one(shape: tuple[int, ...]) -> None:
    env, td = counting([3])
    mask = torch.tensor([True, False, False]).reshape(shape)
    assert env.reset(td.set("_reset", mask))["observation"].flatten().tolist() == [0, 3, 3]


@pytest.mark.parametrize(
    ("mask", "message"),
    [
        (torch.ones(3, 2, dtype=torch.bool), r"'_reset' has shape \[3, 2\], expected \[3, 1\]"),
        (torch.ones(3, 1), r"'_reset' is torch.float32, expected a bool tensor"),
        (torch.ones(3, 1, dtype=torch.int64), r"'_reset' is torch.int64, expected a bool tensor"),
        (NonTensorData("yes", batch_size=[3]), r"'_reset' is .*, expected a bool tensor"),
    ],
)
def test_masks_of_another_kind_are_refused(mask: Any, message: str) -> None:
    env, td = counting([3])
    with pytest.raises(EnvError, match=rf"CountingEnv.*{message}"):
        env.reset(td.set("_reset", mask))


@pytest.mark.parametrize("marked", [True, False])
def test_a_marked_row_must_not_be_done_and_another_may(marked: bool) -> None:
    class StaysDone(CountingEnv):
        def _reset(self, tensordict: TensorDictBase | None = None, **kwargs: Any) -> TensorDictBase:
            fresh = super()._reset(tensordict)
            return fresh if tensordict is None else fresh.set("done", torch.tensor([[True], [False]]))

    env = StaysDone(batch_size=[2])
    td = env.reset().set("_reset", torch.tensor([[marked], [True]]))
    if marked:
        with pytest.raises(EnvError, match="'done' is True right after reset"):
            env.reset(td)
    else:
        assert not env.reset(td)["done"].any()


# Episodes of different lengths ------------------------------------------------------------------------


def test_each_row_restarts_by_itself_over_a_long_run() -> None:
    limits = torch.tensor([0, 1, 2, 4])
    env = CountingBatchedEnv(max_steps=limits, batch_size=[4])
    rollout = env.rollout(60, CountingEnvCountPolicy(env.action_spec), break_when_any_done=False)
    steps = torch.arange(60)
    for row, limit in enumerate(limits.tolist()):
        assert torch.equal(rollout["observation"][row].flatten(), (steps % (limit + 1)).int())
        assert torch.equal(rollout["next", "observation"][row].flatten(), (steps % (limit + 1) + 1).int())


# Objects, nests, agents ---------------------------------------------------------------------------------


def test_objects_of_unmarked_rows_stay() -> None:
    env = CountingEnvWithString(max_steps=99, batch_size=[2])
    td = env.reset()
    old = td.get("string").tolist()
    fresh = env.reset(td.set("_reset", torch.tensor([[True], [False]])))
    new = fresh.get("string").tolist()
    assert new[1] == old[1]
    assert new[0] != old[0]


def test_nested_flags_reset_their_nest() -> None:
    env = NestedCountingEnv(max_steps=99, batch_size=[2])
    td = after(env, CountingEnvCountPolicy(env.full_action_spec[env.action_key], env.action_key), 2)
    mask = torch.zeros(2, 3, 1, dtype=torch.bool)
    mask[1] = True
    fresh = env.reset(td.set(("data", "_reset"), mask))
    assert fresh["data", "states"].squeeze(-1).tolist() == [[2, 2, 2], [0, 0, 0]]
    assert ("data", "_reset") not in fresh.keys(True)


class TwoAgents(EnvBase):
    """Two agents that count and end each by themselves, and a clock beside them."""

    def __init__(self) -> None:
        super().__init__(batch_size=[2])
        nest = [2, 2]
        self.observation_spec = Composite(
            agents=Composite(count=Unbounded((2, 2, 1)), shape=nest), clock=Unbounded((2, 1)), shape=[2]
        )
        self.action_spec = Composite(agents=Composite(action=Binary(1, shape=(2, 2, 1)), shape=nest), shape=[2])
        self.reward_spec = Composite(agents=Composite(reward=Unbounded((2, 2, 1)), shape=nest), shape=[2])
        flag = Unbounded((2, 2, 1), dtype=torch.bool)
        self.done_spec = Composite(agents=Composite(done=flag, shape=nest), shape=[2])
        self.count = torch.zeros(2, 2, 1)

    def _seen(self) -> TensorDict:
        agents = TensorDict({"count": self.count.clone()}, [2, 2])
        return TensorDict({"agents": agents, "clock": self.count.sum(1)}, [2])

    def _reset(self, tensordict: TensorDictBase | None = None, **kwargs: Any) -> TensorDictBase:
        mask = None if tensordict is None else tensordict.get(("agents", "_reset"), None)
        self.count = torch.zeros(2, 2, 1) if mask is None else self.count.masked_fill(mask, 0)
        return self._seen()

    def _step(self, tensordict: TensorDictBase) -> TensorDictBase:
        self.count = self.count + tensordict["agents", "action"]
        outcome = self._seen()
        outcome["agents"].update({"reward": self.count.clone(), "done": self.count >= 2})
        return outcome

    def _set_seed(self, seed: int | None) -> None:
        pass


def test_agents_are_reset_each_by_itself() -> None:
    env = TwoAgents()
    td = env.reset()
    action = torch.tensor([[1, 1], [1, 0]], dtype=torch.int8).unsqueeze(-1)
    actions = [action, torch.tensor([[1, 0], [0, 0]], dtype=torch.int8).unsqueeze(-1)]
    for action in actions:
        td = env._step_mdp(env.step(td.set(("agents", "action"), action)))
    assert td["agents", "done"].squeeze(-1).tolist() == [[True, False], [False, False]]
    fresh = env.maybe_reset(td)
    assert fresh["agents", "count"].squeeze(-1).tolist() == [[0, 1], [1, 0]]
    # An entry beside the agents is taken anew where any agent of the environment begins anew.
    assert fresh["clock"].flatten().tolist() == [1, 1]


def test_the_root_mask_governs_every_nest() -> None:
    env = MultiKeyCountingEnv(max_steps=99, batch_size=[2])
    td = after(env, MultiKeyCountingEnvPolicy(env.full_action_spec, deterministic=True), 2)
    fresh = env.reset(td.set("_reset", torch.tensor([[False], [True]])))
    for key in env.observation_keys:
        assert (fresh[key][0] == 2).all()
        assert (fresh[key][1] == 0).all()


def test_flags_of_agents_are_left_when_the_root_decides() -> None:
    env = MockNestedResetEnv(num_steps=3, done_at_root=True)
    rollout = env.rollout(4, break_when_any_done=False)
    assert rollout["agent_1", "done"].flatten().tolist() == [False, True, True, False]


def test_a_flag_of_another_name_resets_its_row() -> None:
    env = MultiAgentCountingEnv(2, max_steps=1, batch_size=[2])
    env.count.copy_(torch.tensor([[0], [1]]))
    td = TensorDict({"env_done": torch.zeros(2, 1, dtype=torch.bool)}, [2])
    _, root = env.step_and_maybe_reset(env.rand_action(td))
    assert env.count.flatten().tolist() == [1, 0]
    assert not root["env_done"].any()


# Lazily stacked data --------------------------------------------------------------------------------------


def test_unlike_agents_are_merged_row_by_row() -> None:
    env = HeterogeneousCountingEnv(max_steps=99, batch_size=[3])
    td = after(env, HeterogeneousCountingEnvPolicy(env.full_action_spec), 2)
    mask = torch.zeros(3, 3, 1, dtype=torch.bool)
    mask[1] = True
    fresh = env.reset(td.set(("lazy", "_reset"), mask))
    assert fresh["state"][:, 0, 0, 0].tolist() == [2, 0, 2]
    for agent in range(3):
        assert fresh["lazy"][:, agent]["vector"][:, 0].tolist() == [2, 0, 2]
    assert isinstance(fresh["lazy"], LazyStackedTensorDict)
    assert fresh["lazy"].stack_dim == td["lazy"].stack_dim
    assert ("lazy", "_reset") not in fresh.keys(True)


def test_unlike_agents_end_and_go_on() -> None:
    env = HeterogeneousCountingEnv(max_steps=3, batch_size=[2])
    env.count[1] = 2
    start = env.reset()
    env.count[1] = 2
    policy = HeterogeneousCountingEnvPolicy(env.full_action_spec)
    rollout = env.rollout(6, policy, auto_reset=False, tensordict=start, break_when_any_done=False)
    assert rollout["next", "state"][:, :, 0, 0, 0].tolist() == [[1, 2, 3, 4, 1, 2], [3, 4, 1, 2, 3, 4]]
    assert rollout["next", "lazy", "done"][1, :, 0, 0].tolist() == [False, True, False, False, False, True]


class Ragged(EnvBase):
    """A batch of two unlike environments, lazily stacked at the root: each sees its count, at its own width."""

    def __init__(self) -> None:
        super().__init__(batch_size=[2])
        specs = [Composite(seen=Unbounded((width,))) for width in (2, 3)]
        self.observation_spec = torch.stack(specs, 0)
        self.action_spec = Binary(1, shape=(2, 1))
        self.count = torch.zeros(2)

    def _seen(self) -> TensorDictBase:
        rows = [TensorDict({"seen": self.count[i].repeat(i + 2)}) for i in range(2)]
        return LazyStackedTensorDict.lazy_stack(rows, 0)

    def _reset(self, tensordict: TensorDictBase | None = None, **kwargs: Any) -> TensorDictBase:
        mask = None if tensordict is None else tensordict.get("_reset", None)
        self.count = torch.zeros(2) if mask is None else self.count.masked_fill(mask.squeeze(-1), 0)
        return self._seen()

    def _step(self, tensordict: TensorDictBase) -> TensorDictBase:
        self.count = self.count + 1
        done = (self.count >= torch.tensor([2, 3])).unsqueeze(-1)
        return self._seen().update({"reward": torch.zeros(2, 1), "done": done})

    def _set_seed(self, seed: int | None) -> None:
        pass


def test_unlike_environments_are_reset_each_by_itself() -> None:
    rollout = Ragged().rollout(6, break_when_any_done=False)
    assert rollout.batch_size == (2, 6)
    for row, cycle in enumerate(([1, 2, 1, 2, 1, 2], [1, 2, 3, 1, 2, 3])):
        assert [step["next", "seen"].tolist() for step in rollout[row]] == [[float(n)] * (row + 2) for n in cycle]
    assert rollout["next", "done"].squeeze(-1).int().tolist() == [[0, 1, 0, 1, 0, 1], [0, 0, 1, 0, 0, 1]]


def test_unlike_environments_are_checked_each_by_itself() -> None:
    env = Ragged()
    env._seen = lambda: LazyStackedTensorDict.lazy_stack([TensorDict({"seen": torch.zeros(2)})] * 2, 0)  # type: ignore[method-assign]
    with pytest.raises(EnvError, match=r"Ragged.*'seen' with shape \[2\]; observation_spec says \[3\]"):
        env.reset()


class Growing(EnvBase):
    """Two rows that see as many ones as they have taken steps, stacked lazily: sizes of one spec that vary."""

    def __init__(self) -> None:
        super().__init__(batch_size=[2], run_type_checks=True)
        self.observation_spec = Composite(seen=Unbounded((2, -1)), shape=[2])
        self.action_spec = Binary(1, shape=(2, 1))
        self.count = torch.zeros(2, dtype=torch.int64)

    def _seen(self) -> TensorDictBase:
        rows = [TensorDict({"seen": torch.ones(int(count) + 1)}) for count in self.count]
        return LazyStackedTensorDict.lazy_stack(rows, 0)

    def _reset(self, tensordict: TensorDictBase | None = None, **kwargs: Any) -> TensorDictBase:
        mask = None if tensordict is None else tensordict.get("_reset", None)
        rows = torch.ones(2, dtype=torch.bool) if mask is None else mask.squeeze(-1)
        self.count = self.count.masked_fill(rows, 0)
        return self._seen()

    def _step(self, tensordict: TensorDictBase) -> TensorDictBase:
        self.count = self.count + 1
        done = (self.count >= torch.tensor([2, 3])).unsqueeze(-1)
        return self._seen().update({"reward": torch.zeros(2, 1), "done": done})

    def _set_seed(self, seed: int | None) -> None:
        pass


def test_growing_rows_are_reset_each_by_itself() -> None:
    rollout = Growing().rollout(6, break_when_any_done=False)
    assert rollout.batch_size == (2, 6)
    sizes = [[len(step["next", "seen"]) for step in row.unbind(0)] for row in rollout.unbind(0)]
    assert sizes == [[2, 3, 2, 3, 2, 3], [2, 3, 4, 2, 3, 4]]


# Marks alone ----------------------------------------------------------------------------------------------


def cartpole() -> EnvBase:
    return GymEnv("CartPole-v1")


def counted(env: EnvBase) -> EnvBase:
    return TransformedEnv(env, Compose(StepCounter(), RewardSum(), InitTracker(), VecNorm(in_keys=["observation"])))


BATCHES: dict[str, Callable[[], EnvBase]] = {
    "serial": lambda: SerialEnv(2, cartpole),
    "serial on TensorDicts": lambda: SerialEnv(2, lambda: counted(cartpole()), on_env_failure="recreate"),
    "parallel": lambda: ParallelEnv(2, cartpole, num_processes=1),
    "pool": lambda: AsyncEnvPool([cartpole] * 2),
    "vector": lambda: GymEnv("CartPole-v1", num_envs=2),
    "agents": lambda: NestedCountingEnv(max_steps=99, batch_size=[2]),
    "unlike": lambda: HeterogeneousCountingEnv(max_steps=99, batch_size=[2]),
    "view": lambda: SerialEnv(3, cartpole)[1:],
    "serial, transformed": lambda: counted(SerialEnv(2, cartpole)),
    "vector, transformed": lambda: counted(GymEnv("CartPole-v1", num_envs=2)),
}


def marks_alone(env: EnvBase) -> TensorDictBase:
    """Marks of the first row, and nothing else."""
    (reset,) = env.reset_keys
    flags = env.full_done_spec.zero()
    mask = flags.get(env.done_keys[0]).clone()
    mask[0] = True
    return flags.empty(recurse=True).set(reset, mask)


@pytest.mark.parametrize("name", BATCHES)
def test_rows_without_a_mark_show_their_last_data_where_marks_come_alone(name: str) -> None:
    env = BATCHES[name]()
    env.set_seed(0)
    td = env.reset()
    for _ in range(2):
        for _ in range(3):
            td = env.step_mdp(env.step(env.rand_action(td)))
        last, begun = td, env.reset(marks_alone(env))
        keys = [*env.observation_keys, *env.done_keys]
        same = begun.select(*keys) == last.select(*keys)
        assert bool(same[1].all())
        assert not bool(same[0].all())
        td = begun
    env.close()


def test_the_data_of_rows_without_a_mark_are_an_error_where_nobody_knows_them() -> None:
    env = SerialEnv(2, cartpole)
    mask = torch.tensor([[True], [False]])
    missing = r"SerialEnv.*marks for some rows, and no 'done', 'observation', 'terminated', 'truncated'"
    with pytest.raises(EnvError, match=missing):
        env.reset(TensorDict({"_reset": mask}, [2]))
    td = env.step_mdp(env.step(env.rand_action(env.reset())))
    env[1].step(env[1].rand_action(td[1:].clone()))
    with pytest.raises(EnvError, match=missing):
        env.reset(TensorDict({"_reset": mask}, [2]))
    assert torch.equal(env.reset(td.clone().set("_reset", mask))["observation"][1], td["observation"][1])
    collector = Collector(env, None, frames_per_batch=4, total_frames=4)
    collector.next()
    with pytest.raises(EnvError, match=missing):
        env.reset(TensorDict({"_reset": mask}, [2]))
    copy = pickle.loads(pickle.dumps(env))
    with pytest.raises(EnvError, match=missing):
        copy.reset(TensorDict({"_reset": mask}, [2]))
    td = env.step(env.rand_action(env.reset()))
    load_env(env, save_env(env).state)
    with pytest.raises(EnvError, match=missing):
        env.reset(TensorDict({"_reset": mask}, [2]))
    collector.shutdown()


def test_flags_of_rows_without_a_mark_follow_from_others_that_are_given() -> None:
    env = SerialEnv(2, cartpole)
    flags = {"done": torch.tensor([[False], [True]]), "_reset": torch.tensor([[True], [False]])}
    begun = env.reset(TensorDict({"observation": torch.ones(2, 4), **flags}, [2]))  # nobody has reset it before
    assert begun["observation"][1].tolist() == [1.0] * 4
    assert begun["done"].flatten().tolist() == begun["terminated"].flatten().tolist() == [False, True]
    assert not bool(begun["truncated"].any())


def test_environments_of_a_pool_that_are_sent_to_alone_leave_nothing_to_go_on_with() -> None:
    env = AsyncEnvPool([cartpole] * 2)
    env.async_step_send(env.rand_action(env.reset())[:1], env_index=[0])
    env.async_step_recv()
    with pytest.raises(EnvError, match="no 'done', 'observation'"):
        env.reset(TensorDict({"_reset": torch.tensor([[True], [False]])}, [2]))
    env.close()
    env = AsyncEnvPool([lambda: CountingEnv(max_steps=9, batch_size=[2])] * 2)
    env.reset()
    env.async_reset_send(TensorDict({"_reset": torch.tensor([[True], [False]])}, [2]), env_index=0)
    with pytest.raises(EnvError, match="no 'done', 'observation'"):
        env.async_reset_recv()
    env.close()
