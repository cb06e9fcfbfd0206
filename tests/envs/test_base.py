"""EnvBase: flags, what a step and a reset keep, objects and ragged data, seeds, closing."""

from __future__ import annotations

import itertools
import pickle
from typing import Any

import pytest
import torch
from tensordict import NonTensorData, TensorDict, TensorDictBase

from rollwright.data import Binary, Composite, NonTensor, Unbounded
from rollwright.envs import EnvBase, StepCounter, TransformedEnv, check_env_specs
from rollwright.errors import EnvError, EnvKeyError
from rollwright.testing.mocking_classes import (
    CountingBatchedEnv,
    CountingEnv,
    CountingEnvCountPolicy,
    CountingEnvWithString,
    EnvWithDynamicSpec,
    EnvWithMetadata,
    HeterogeneousCountingEnv,
    MultiAgentCountingEnv,
    MultiKeyCountingEnv,
    NestedCountingEnv,
    StateLessCountingEnv,
)


class Scripted(EnvBase):
    """Returns what it is told to, as ``observation`` (zeros) and the entries of ``outcome``."""

    def __init__(
        self, outcome: dict[str, Any], first: dict[str, Any] | None = None, truncated: bool = False, **kwargs: Any
    ) -> None:
        super().__init__(**kwargs)
        batch = self.batch_size
        self.observation_spec = Composite(observation=Unbounded((*batch, 2)), shape=batch)
        self.action_spec = Binary(1, shape=(*batch, 1))
        self.outcome, self.first, self.truncated = outcome, first or {}, truncated

    def _finalize(self) -> None:
        super()._finalize()
        if self.truncated:
            self.add_truncated_keys()

    def _observe(self, entries: dict[str, Any]) -> TensorDict:
        seen = {"observation": torch.zeros((*self.batch_size, 2))}
        return TensorDict({**seen, **entries}, self.batch_size)

    def _reset(self, tensordict: TensorDictBase | None = None, **kwargs: Any) -> TensorDictBase:
        return self._observe(self.first)

    def _step(self, tensordict: TensorDictBase) -> TensorDictBase:
        return self._observe({"reward": torch.zeros((*self.batch_size, 1)), **self.outcome})

    def _set_seed(self, seed: int | None) -> None:
        pass


# Flags --------------------------------------------------------------------------------------------

# done, terminated, truncated as returned -> as completed; None where the environment leaves one out.
COMPLETED = [
    ((True, None, None), (True, True, False)),
    ((False, None, None), (False, False, False)),
    ((None, True, None), (True, True, False)),
    ((None, False, None), (False, False, False)),
    ((None, None, True), (True, False, True)),
    ((None, None, False), (False, False, False)),
    ((True, True, None), (True, True, False)),
    ((True, False, None), (True, False, True)),
    ((False, False, None), (False, False, False)),
    ((True, None, True), (True, False, True)),
    ((True, None, False), (True, True, False)),
    ((False, None, False), (False, False, False)),
    ((None, True, True), (True, True, True)),
    ((None, True, False), (True, True, False)),
    ((None, False, True), (True, False, True)),
    ((None, False, False), (False, False, False)),
    ((True, True, True), (True, True, True)),
]
NAMES = ("done", "terminated", "truncated")


def flags_of(td: TensorDictBase, names: tuple[str, ...] = NAMES) -> tuple[bool, ...]:
    return tuple(td[name].item() for name in names)


@pytest.mark.parametrize(("returned", "completed"), COMPLETED)
def test_flags_are_completed_from_one_another(returned: tuple[Any, ...], completed: tuple[bool, ...]) -> None:
    given = {name: torch.tensor([flag]) for name, flag in zip(NAMES, returned, strict=True) if flag is not None}
    env = Scripted(given, truncated=True)
    assert flags_of(env.rand_step()["next"]) == completed
    assert flags_of(Scripted({}, given, truncated=True, allow_done_after_reset=True).reset()) == completed


@pytest.mark.parametrize(("returned", "completed"), [case for case in COMPLETED if case[0][2] is None])
def test_flags_without_truncation_are_two(returned: tuple[Any, ...], completed: tuple[bool, ...]) -> None:
    given = {name: torch.tensor([flag]) for name, flag in zip(NAMES, returned, strict=True) if flag is not None}
    outcome = Scripted(given).rand_step()["next"]
    assert "truncated" not in outcome
    assert outcome["done"].item() == completed[0]
    assert outcome["terminated"].item() == (completed[0] if returned[1] is None else returned[1])


def test_completed_flags_share_no_memory() -> None:
    outcome = Scripted({"done": torch.tensor([False])}).rand_step()["next"]
    outcome["done"].fill_(True)
    assert not outcome["terminated"].item()


def test_flags_absent_at_reset_are_false() -> None:
    assert flags_of(Scripted({}, truncated=True).reset()) == (False, False, False)


@pytest.mark.parametrize("shape", [(), (1,), (1, 1)])
def test_trailing_ones_of_rewards_and_flags_are_mended(shape: tuple[int, ...]) -> None:
    outcome = {"reward": torch.full(shape, 2.0), "done": torch.zeros(shape, dtype=torch.bool)}
    td = Scripted(outcome).rand_step()["next"]
    assert {td[key].shape for key in ("reward", "done", "terminated")} == {(1,)}
    assert td["reward"].item() == 2.0


def test_batched_rewards_and_flags_may_lack_the_trailing_one() -> None:
    env = Scripted({"reward": torch.ones(3), "done": torch.tensor([True, False, True])}, batch_size=[3])
    td = env.rand_step()["next"]
    assert td["reward"].shape == (3, 1)
    assert td["terminated"].squeeze(-1).tolist() == [True, False, True]


def test_python_scalars_are_rewards_and_flags() -> None:
    td = Scripted({"reward": 1.5, "done": True}).rand_step()["next"]
    assert (td["reward"].tolist(), td["done"].tolist()) == ([1.5], [True])


def test_add_truncated_keys_reaches_every_group() -> None:
    env = MultiKeyCountingEnv(batch_size=[2])
    assert env.add_truncated_keys() is env
    assert env.done_keys_groups == [
        ["done", "terminated", "truncated"],
        [("nested_1", name) for name in NAMES],
        [("nested_2", name) for name in NAMES],
    ]
    td = env.rand_step()["next"]
    assert td["nested_1", "truncated"].shape == (2, 3, 1)
    assert not td["nested_2", "truncated"].any()
    check_env_specs(env)


def test_groups_of_flags_are_completed_each_by_itself() -> None:
    env = NestedCountingEnv(max_steps=0, has_root_done=True)
    assert env.done_keys == ["done", "terminated", ("data", "done"), ("data", "terminated")]
    assert env.reset_keys == ["_reset", ("data", "_reset")]
    td = env.step(env.reset().set(("data", "action"), torch.ones(3, 1, dtype=torch.int8)))["next"]
    assert td["terminated"].all()
    assert td["data", "terminated"].all()


def test_a_flag_of_another_name_stands_for_done_and_terminated() -> None:
    env = MultiAgentCountingEnv(1, max_steps=1)
    assert env.done_keys_groups[0] == ["env_done"]
    assert env.rollout(9)["next", "env_done"].flatten().tolist() == [False, True]
    assert env.any_done(env.rollout(9)[-1]["next"])


# Stepping -----------------------------------------------------------------------------------------


def test_step_returns_its_argument() -> None:
    env = CountingEnv()
    td = env.rand_action(env.reset())
    assert env.step(td) is td
    assert env(env.rand_action(env.reset()))["next", "reward"].shape == (1,)


def test_step_keeps_what_the_policy_wrote_below_next() -> None:
    env = NestedCountingEnv()
    td = env.rand_action(env.reset())
    td["next", "hidden"] = torch.ones(4)
    td["next", "data"] = TensorDict({"memory": torch.ones(3, 2), "states": torch.full((3, 1), 9)}, [3])
    td["next", "word"] = NonTensorData("yes")
    outcome = env.step(td)["next"]
    assert outcome["hidden"].tolist() == [1.0] * 4
    assert outcome["data", "memory"].shape == (3, 2)
    assert outcome["word"] == "yes"
    assert outcome["data", "states"].dtype == torch.int32  # the environment's own entry wins


def test_presets_carry_over_to_the_next_root() -> None:
    env = CountingEnv(max_steps=9)

    def policy(td: TensorDictBase) -> TensorDictBase:
        td["action"] = env.action_spec.one()
        hidden = td.get("hidden", torch.zeros(1))
        return td.set(("next", "hidden"), hidden + 1)

    assert env.rollout(3, policy)["next", "hidden"].flatten().tolist() == [1, 2, 3]


def test_non_tensor_presets_do_not_replace_observations() -> None:
    env = EnvWithMetadata()
    td = env.rand_action(env.reset())
    td["next", "non_tensor"] = NonTensorData(99)
    assert env.step(td)["next", "non_tensor"] == 1


def test_stepping_twice_from_one_tensordict_overwrites_next() -> None:
    env = CountingEnv()
    td = env.reset().set("action", torch.ones(1, dtype=torch.int8))
    assert [env.step(td)["next", "observation"].item() for _ in range(2)] == [1, 2]


NESTED = [
    lambda: CountingEnv(max_steps=1, batch_size=[2]),
    lambda: NestedCountingEnv(max_steps=1, batch_size=[2], nest_reward=False),
    lambda: NestedCountingEnv(max_steps=1, batch_size=[2]),
    lambda: MultiAgentCountingEnv(2, max_steps=1, batch_size=[2]),
    lambda: MultiKeyCountingEnv(max_steps=1, batch_size=[2]),
]


@pytest.mark.parametrize("make_env", NESTED)
def test_the_root_of_the_next_step_shares_no_nest_with_the_step(make_env: Any) -> None:
    env = make_env()
    td = env.rand_action(env.reset())
    before = td.clone()
    frame, root = env.step_and_maybe_reset(td)
    outcome = frame["next"].clone()
    env.rand_action(root)
    for key in env.action_keys:
        root.set(key, torch.full_like(root[key], 7))
    assert (frame.exclude("next") == before).all()
    assert (frame["next"] == outcome).all()
    assert set(frame["next"].keys(True, True)) == set(outcome.keys(True, True))


def test_step_and_maybe_reset_keeps_the_last_observation() -> None:
    env = CountingBatchedEnv(max_steps=torch.tensor([0, 2]), batch_size=[2])
    policy = CountingEnvCountPolicy(env.action_spec)
    frame, root = env.step_and_maybe_reset(policy(env.reset()))
    assert frame["next", "observation"].flatten().tolist() == [1, 1]
    assert frame["next", "done"].flatten().tolist() == [True, False]
    assert root["observation"].flatten().tolist() == [0, 1]
    assert not root["done"].any()
    assert "_reset" not in root
    assert "reward" not in root


def test_maybe_reset_leaves_what_is_not_done_alone() -> None:
    env = CountingEnv(max_steps=9)
    td = env.reset()
    assert env.maybe_reset(td) is td


def test_maybe_reset_puts_the_reset_into_its_argument_and_writes_no_tensor() -> None:
    env = NestedCountingEnv(max_steps=0)
    td = env.reset()
    td["data", "action"] = torch.ones(3, 1, dtype=torch.int8)
    root = env._step_mdp(env.step(td))
    before, shared = root.clone(), root.copy()
    assert env.maybe_reset(root) is root
    assert set(root.keys(True, True)) == set(before.keys(True, True))
    assert (shared == before).all()
    assert before["data", "done"].all()
    assert not root["data", "done"].any()


def test_any_done_reads_flags_at_the_root() -> None:
    env = CountingEnv(batch_size=[2])
    td = env.reset()
    assert not env.any_done(td)
    assert env.any_done(td.set("done", torch.tensor([[False], [True]])))


def test_reset_hands_its_keywords_on() -> None:
    class Optional(Scripted):
        def _reset(self, tensordict: TensorDictBase | None = None, **kwargs: Any) -> TensorDictBase:
            return self._observe({"observation": torch.full((2,), float(kwargs["level"]))})

    assert Optional({}).reset(level=3)["observation"].tolist() == [3.0, 3.0]


def test_reset_keeps_what_else_the_data_holds() -> None:
    env = CountingEnv()
    td = TensorDict({"hidden": torch.ones(2), "next": TensorDict({"hidden": torch.zeros(2)})})
    assert env.reset(td) is td
    assert set(td.keys()) == {"hidden", "next", "observation", "done", "terminated"}
    assert td["next", "hidden"].tolist() == [0.0, 0.0]


def test_done_after_reset_is_refused_unless_allowed() -> None:
    first = {"done": torch.tensor([True])}
    with pytest.raises(EnvError, match=r"'done' is True right after reset.*allow_done_after_reset=True"):
        Scripted({}, first).reset()
    assert Scripted({}, first, allow_done_after_reset=True).reset()["terminated"].item()


def test_rand_action_writes_every_action() -> None:
    env = MultiKeyCountingEnv(batch_size=[2])
    td = env.reset()
    assert env.rand_action(td) is td
    assert env.full_action_spec.is_in(td)
    assert env.full_action_spec.is_in(env.rand_action())
    assert StateLessCountingEnv().rand_action(TensorDict({}, [5]))["action"].shape == (5, 1)


def test_rand_step_steps() -> None:
    env = CountingEnv()
    assert ("next", "observation") in env.rand_step().keys(True)
    td = env.reset()
    assert env.rand_step(td) is td


def test_type_checks_look_at_values_too() -> None:
    for checks in (False, True):
        env = Scripted({"done": False}, run_type_checks=checks)
        env.observation_spec = Composite(observation=Binary(2, shape=(2,), dtype=torch.float32))
        env.outcome["observation"] = torch.full((2,), 0.5)
        if not checks:
            env.rand_step()
            continue
        with pytest.raises(EnvError, match=r"step returned 'observation' = .* lies outside"):
            env.rand_step()


# Objects and ragged data ----------------------------------------------------------------------------


def test_objects_are_observations() -> None:
    env = CountingEnvWithString(max_steps=9)
    rollout = env.rollout(3)
    assert all(isinstance(word, str) for word in rollout["string"])
    assert rollout["next", "string"][:2] == rollout["string"][1:]
    check_env_specs(env)


def test_a_missing_object_is_named() -> None:
    class Forgets(Scripted):
        def __init__(self) -> None:
            super().__init__({})
            self.observation_spec = Composite(word=NonTensor(shape=(), example_data=""))

    with pytest.raises(EnvKeyError, match=r"Forgets.*reset returned no 'word'"):
        Forgets().reset()


def test_ragged_entries_are_checked_row_by_row() -> None:
    class Shrinks(HeterogeneousCountingEnv):
        def _observe(self) -> TensorDictBase:
            seen = super()._observe()
            seen["lazy"].tensordicts[1]["vector"] = torch.zeros(5)
            return seen

    with pytest.raises(EnvError, match=r"\('lazy', 'vector'\) with shape \[5\]; observation_spec says \[2\]"):
        Shrinks().reset()


def test_ragged_rows_are_counted() -> None:
    class Loses(HeterogeneousCountingEnv):
        def _observe(self) -> TensorDictBase:
            seen = super()._observe()
            return seen.set("lazy", seen["lazy"][:2])

    with pytest.raises(EnvError, match=r"2 rows in 'lazy'; observation_spec says 3"):
        Loses().reset()


def test_growing_shapes_fit_a_spec_with_minus_one() -> None:
    env = EnvWithDynamicSpec()
    assert env.rollout(2)[1]["next", "observation"].shape == (3, 3, 2)
    check_env_specs(env)


# Seeds ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("make_env", [CountingEnvWithString, lambda: MultiAgentCountingEnv(2)])
def test_one_seed_one_stream(make_env: Any) -> None:
    env, twin = make_env(), make_env()
    streams = []
    for instance in (env, twin, env):
        instance.set_seed(7)
        streams.append(instance.rollout(5, break_when_any_done=False))
    assert (streams[0] == streams[1]).all()
    assert (streams[0] == streams[2]).all()
    env.set_seed(8)
    assert not (env.rollout(5, break_when_any_done=False) == streams[0]).all()


def test_set_seed_returns_the_last_seed_used() -> None:
    class Seeded(Scripted):
        def _set_seed(self, seed: int | None) -> int | None:
            return None if seed is None else seed + 3

    assert Seeded({}).set_seed(4) == 7
    assert Scripted({}).set_seed(4) == 4
    assert Scripted({}).set_seed() is None


def test_set_seed_seeds_torch() -> None:
    env = CountingEnv()
    drawn = []
    for _ in range(2):
        env.set_seed(1)
        drawn.append(torch.rand(3))
    assert torch.equal(*drawn)


# The object itself ----------------------------------------------------------------------------------


def test_close_twice() -> None:
    env = CountingEnv()
    env.close()
    assert env.is_closed
    env.close()
    env.close(raise_if_closed=False)
    assert env.is_closed


def test_use_after_close() -> None:
    env = CountingEnv()
    td = env.rand_action(env.reset())
    env.close()
    for use in (env.reset, lambda: env.step(td), lambda: env.rollout(2), lambda: env.step_and_maybe_reset(td)):
        with pytest.raises(EnvError, match=r"CountingEnv.*(reset|step) after close\(\)"):
            use()


def test_repr_says_class_batch_and_device() -> None:
    assert repr(CountingEnv(batch_size=[2], device="cpu")) == "CountingEnv(batch_size=[2], device=cpu)"


def test_environments_are_modules_with_state() -> None:
    env = CountingEnv(max_steps=9)
    env.rollout(3, CountingEnvCountPolicy(env.action_spec))
    other = CountingEnv(max_steps=9)
    other.load_state_dict(env.state_dict())
    assert other.count.item() == 3


def test_environments_can_be_pickled() -> None:
    env = CountingEnv(max_steps=2, batch_size=[2])
    twin = pickle.loads(pickle.dumps(env))
    assert twin.full_done_spec == env.full_done_spec
    assert twin.rollout(3).batch_size == (2, 3)


@pytest.mark.parametrize("missing", ["_reset", "_step", "_set_seed"])
def test_methods_that_a_subclass_forgot_are_named(missing: str) -> None:
    methods = {
        name: getattr(Scripted, name) for name in ("_reset", "_step", "_set_seed", "_observe") if name != missing
    }
    bare = type("Bare", (EnvBase,), {**methods, "outcome": {}, "first": {}})
    env = bare()
    env.action_spec = Binary(1)
    with pytest.raises(EnvError, match=rf"Bare has no {missing}: define `{missing}\("):
        _ = env.set_seed(0), env.rand_step()


def test_rand_step_goes_on_where_the_environment_is() -> None:
    env = CountingEnv(max_steps=99)
    seen = [int(env.rand_step()["next", "observation"]) for _ in range(20)]
    assert seen[0] <= 1
    assert all(0 <= now - before <= 1 for before, now in itertools.pairwise(seen))
    assert seen[-1] > 1
    env = TransformedEnv(CountingEnv(), StepCounter())  # which reads the count of the step before
    assert [int(env.rand_step()["next", "step_count"]) for _ in range(3)] == [1, 1, 1]
