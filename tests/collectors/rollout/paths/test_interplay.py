"""What users do between batches acts alike on both paths, or makes the collector leave the array path in time."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from gymnasium import spaces
from tensordict.nn import TensorDictModule, TensorDictSequential
from tests.variants import in_turn
from torch import nn

from rollwright.collectors import Collector
from rollwright.envs import GymEnv, GymWrapper, default_info_dict_reader
from rollwright.envs.transforms import Compose, RewardSum, StepCounter

ENVS = ["cartpole", "sync same step", "own disabled", "vector books", "transformed serial", "serial of vectors"]
BATCHED = ENVS[1:]
BOX = spaces.Box(-1.0, 1.0, (3,), np.float32)


def at(batch, act):
    """A script that acts before one batch."""
    return lambda collector, i: act(collector) if i == batch else None


@pytest.mark.parametrize("env", ENVS)
def test_reset_between_batches(both, lab, env):
    both(lab.envs[env], "one-hot", script=at(2, lambda c: c.reset()), batches=4)


@pytest.mark.parametrize("env", ENVS)
def test_reset_with_a_seed(both, lab, env):
    both(lab.envs[env], "one-hot", script=at(1, lambda c: c.reset(seed=11)), batches=3)


@pytest.mark.parametrize(("index", "env"), in_turn([0, -1, [0, 1], slice(None), [], [True, False]], BATCHED))
def test_reset_of_some(both, lab, env, index):
    def act(collector):
        rows = index
        if index == [True, False]:
            rows = torch.zeros(collector.env.batch_size, dtype=torch.bool)
            rows[..., 0] = True
        collector.reset(rows)

    both(lab.envs[env], "one-hot", script=at(2, act), batches=4)


@pytest.mark.parametrize("env", BATCHED)
def test_reset_of_some_before_the_first_batch(both, lab, env):
    both(lab.envs[env], "one-hot", script=at(0, lambda c: c.reset(0)), batches=2)


@pytest.mark.parametrize("env", ENVS)
def test_seed_in_the_middle(both, lab, env):
    first, _ = both(lab.envs[env], "one-hot", script=at(2, lambda c: c.set_seed(3)), batches=4)
    again, start = first.batches[2], first.batches[0]
    lab.assert_equal(again.exclude("collector"), start.exclude("collector"))


@pytest.mark.filterwarnings("ignore:.*somebody else has reset:UserWarning")
@pytest.mark.parametrize("env", ENVS)
def test_environment_reset_by_the_user(both, lab, env):
    both(lab.envs[env], "one-hot", script=at(1, lambda c: c.env.reset()), batches=3)


@pytest.mark.parametrize("env", ENVS)
def test_environment_stepped_by_the_user(both, lab, env):
    def act(collector):
        collector.env.rollout(3, break_when_any_done=False)
        collector.reset()

    both(lab.envs[env], "one-hot", script=at(1, act), batches=3)


@pytest.mark.parametrize("env", ENVS)
def test_saved_state_loaded_in_the_middle(both, lab, env):
    both(lab.envs[env], "one-hot", script=at(2, lambda c: c.load_state_dict(c.state_dict())), batches=4)


@pytest.mark.parametrize("env", ENVS)
def test_rollouts_that_are_not_delivered(both, lab, env):
    both(lab.envs[env], "one-hot", script=at(1, lambda c: c.rollout()), batches=3)


@pytest.mark.parametrize("option", ["postproc", "post_collect_hook", "pre_collect_hook"])
def test_batch_that_fails_on_its_way_to_the_user(both, lab, option):
    def options():
        calls = []

        def fails_at_second(*given):
            calls.append(given)
            if len(calls) == 2:
                raise ZeroDivisionError("in a function of the user")
            return given[0] if given else None

        return {option: fails_at_second}

    def script(collector, i):
        if i == 1:
            with pytest.raises(ZeroDivisionError):
                collector.next()

    for env in ENVS:
        both(lab.envs[env], "one-hot", script=script, options=options)


# Changes of the policy ---------------------------------------------------------------------------------------------


def hook(collector):
    collector.policy.register_forward_hook(lambda module, args, output: None)


def inner_hook(collector):
    part = next(m for m in collector.policy.modules() if isinstance(m, nn.Linear))
    part.register_forward_hook(lambda module, args, output: output + 1)


def swapped_layer(collector):
    sequence = next(m for m in collector.policy.modules() if type(m) is nn.Sequential)
    sequence[1] = nn.ReLU()


@pytest.mark.parametrize("change", [hook, inner_hook, swapped_layer], ids=lambda change: change.__name__)
@pytest.mark.parametrize("env", ["cartpole on cpu", "vector books", "transformed serial"])
def test_change_of_the_policy_acts_at_the_next_batch(both, lab, env, change):
    unchanged, _ = both(lab.envs[env], "one-hot", batches=4)
    changed, _ = both(lab.envs[env], "one-hot", script=at(2, change), batches=4)
    lab.assert_equal(changed.batches[1], unchanged.batches[1])
    if change is not hook:
        assert not torch.equal(changed.batches[2]["logits"], unchanged.batches[2]["logits"])


@pytest.mark.parametrize("env", ["cartpole", "vector books"])
def test_train_and_eval_switch(both, lab, env):
    def policy(made):
        built = lab.build(made, "one-hot")
        net = next(m for m in built.modules() if type(m) is nn.Sequential and len(m) == 3)
        net[1] = nn.Dropout(0.5)
        return built

    def script(collector, i):
        collector.policy.train(i % 2 == 0)

    both(lab.envs[env], policy, script=script, batches=4)


@pytest.mark.parametrize("env", ["cartpole", "vector books"])
def test_new_parameters_act_without_leaving_the_arrays(both, lab, env):
    def act(collector):
        for part in collector.policy.modules():
            if isinstance(part, nn.Linear):
                part.weight = nn.Parameter(part.weight.detach() * 2)

    first, _ = both(lab.envs[env], "one-hot", script=at(1, act), batches=3)
    assert "NumPy arrays" in first.then["env"]


def test_parameters_of_another_dtype(both, lab):
    class Head(nn.Module):
        def __init__(self):
            super().__init__()
            self.lin = nn.Linear(4, 2)

        def forward(self, observation):
            x = self.lin(observation.to(self.lin.weight.dtype))
            return nn.functional.one_hot(x.argmax(-1), 2), x

    first, _ = both(lab.envs["sync of 4"], lambda made: Head(), script=at(1, lambda c: c.policy.double()))
    assert [batch["output1"].dtype for batch in first.batches] == [torch.float32, torch.float64, torch.float64]


def test_policy_that_writes_into_its_input(both, lab):
    class InPlace(nn.Module):
        def __init__(self):
            super().__init__()
            self.lin = nn.Linear(3, 2)

        def forward(self, observation):
            return nn.functional.one_hot(self.lin(observation.mul_(3)).argmax(-1), 2), observation

    for env in ("reused buffer", "own same step", "serial", "vector all"):
        for compact in (False, True):
            both(lab.envs[env], lambda made: InPlace(), options=lambda compact=compact: {"compact_obs": compact})


@pytest.mark.parametrize("env", ["cartpole", "sync of 4"])
@pytest.mark.parametrize("kind", ["half", "text"])
def test_outputs_that_no_array_holds_are_delivered(both, lab, env, kind):
    class Odd(nn.Module):
        def __init__(self):
            super().__init__()
            self.lin = nn.Linear(4, 2).bfloat16()

        def forward(self, observation):
            x = self.lin(observation.bfloat16())
            return nn.functional.one_hot(x.argmax(-1), 2), x if kind == "half" else "a note"

    first, _ = both(lab.envs[env], lambda made: Odd())
    assert "NumPy arrays" not in first.then["env"]
    assert first.batches[0].get("output1", None) is not None


@pytest.mark.parametrize("env", ["cartpole", "sync of 4"])
@pytest.mark.parametrize("change", ["dtype", "shape"])
def test_output_that_changes_within_a_batch_is_delivered(both, lab, env, change):
    class Changing(nn.Module):
        calls = 0

        def forward(self, observation):
            self.calls += 1
            more = observation
            if self.calls >= 3:
                more = observation.double() if change == "dtype" else observation[..., :2]
            return nn.functional.one_hot((observation[..., 0] > 0).long(), 2), more

    both(lab.envs[env], lambda made: Changing())


def test_policy_that_remembers_what_it_saw(both, lab):
    class Difference(nn.Module):
        def __init__(self):
            super().__init__()
            self.lin, self.last = nn.Linear(3, 2), None

        def forward(self, observation):
            change = observation if self.last is None else observation - self.last
            self.last = observation
            return nn.functional.one_hot(self.lin(change).argmax(-1), 2), change

    for env in ("reused buffer", "own same step", "serial", "vector all", "async"):
        both(lab.envs[env], lambda made: Difference())


def test_policy_that_returns_one_buffer(both, lab):
    class Buffered(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("out", torch.zeros(2, dtype=torch.int64))
            self.count = 0

        def forward(self, observation):
            self.count += 1
            self.out.zero_()[self.count % 2] = 1
            return self.out, self.out.float().expand(*observation.shape[:-1], 2)

    both(lab.envs["cartpole"], lambda made: Buffered(), batches=4)


# Changes of the environment ------------------------------------------------------------------------------------------


def test_readers_of_info_are_read(both, lab):
    def make():
        return lab.toy()().set_info_dict_reader(default_info_dict_reader(["left"]))

    first, _ = both(make, "one-hot")
    assert bool((first.batches[0]["left"] != 0).any())


class Halved(GymEnv):
    """Takes its steps in another way."""

    def __init__(self):
        super().__init__("CartPole-v1")

    def _step(self, tensordict):
        return super()._step(tensordict).apply_(lambda x: x)


class Checked(StepCounter):
    """A transform that might do anything."""


REASONS = {
    "a subclass that steps": (Halved, {}, "Halved overrides _step"),
    "a transform of the user": (
        lambda: GymEnv("CartPole-v1").append_transform(Checked()),
        {},
        "Checked works on TensorDicts",
    ),
    "type checks": (lambda: GymEnv("CartPole-v1", run_type_checks=True), {}, "run_type_checks"),
    "no buffers": (lambda: GymEnv("CartPole-v1"), {"use_buffers": False}, "use_buffers=False"),
    "no reset, compact": (
        lambda: GymEnv("CartPole-v1", num_envs=2),
        {"reset_when_done": False, "compact_obs": True},
        "compact_obs=True with reset_when_done=False",
    ),
}


def writes(*keys):
    """A policy of two modules, the second of which writes more entries than the action."""

    def policy(env):
        act = TensorDictModule(lambda x: nn.functional.one_hot((x[..., 0] > 0).long(), 2), ["observation"], ["action"])
        return TensorDictSequential(act, TensorDictModule(lambda x: (x * 2,) * len(keys), ["observation"], list(keys)))

    return policy


POLICY_REASONS = {
    "writes observations": (writes("observation"), "it writes 'observation'"),
    "writes flags": (writes(("next", "done2")), "it writes ('next', 'done2')"),
    "reads ids": (
        lambda env: TensorDictModule(
            lambda x, ids: nn.functional.one_hot((x[..., 0] > 0).long() * (ids % 2), 2),
            ["observation", ("collector", "traj_ids")],
            ["action"],
        ),
        "it reads",
    ),
    "a function": (lambda env: lambda td: env.rand_action(td), "is no TensorDict module"),
}


@pytest.mark.parametrize("name", REASONS)
def test_what_arrays_cannot_do_takes_the_plain_path_and_says_why(both, name):
    env, options, reason = REASONS[name]
    both(env, "one-hot", options=lambda: dict(options), expect=reason)


@pytest.mark.parametrize("name", POLICY_REASONS)
def test_policy_that_must_see_tensordicts_takes_the_plain_path_and_says_why(both, lab, name):
    policy, reason = POLICY_REASONS[name]
    both(lab.envs["vector books"], policy, expect=reason)


def test_text_is_beside_the_rows(both, lab):
    seen = spaces.Dict(a=spaces.Box(-1, 1, (3,)), text=spaces.Text(5))
    both(lab.toy(seen), lambda made: None)


@pytest.mark.parametrize(
    "change",
    [
        lambda env: env.base_env.set_info_dict_reader(default_info_dict_reader(["left"])),
        lambda env: env.append_transform(StepCounter(max_steps=2)),
        lambda env: env.insert_transform(0, RewardSum()),
        lambda env: setattr(env, "transform", StepCounter(max_steps=2, step_count_key="n")),
        lambda env: setattr(env.transform[0], "max_steps", 2),
    ],
    ids=["info", "append", "insert", "replace", "setting"],
)
def test_change_of_the_environment_is_noticed(both, lab, change):
    def act(collector):
        change(collector.env)
        collector.reset()

    def make():
        return GymWrapper(lab.Toy(BOX, spaces.Discrete(2))).append_transform(Compose(StepCounter(step_count_key="n")))

    before, _ = both(make, "one-hot", batches=3)
    after, _ = both(make, "one-hot", script=at(1, act), batches=3)
    lab.assert_equal(before.batches[0], after.batches[0])
    assert before.stats["episodes"] != after.stats["episodes"] or len(after.batches[2].keys()) > len(
        before.batches[2].keys()
    )


def test_same_memory_is_used_again_after_leaving_the_arrays(lab):
    made = lab.envs["cartpole"]()
    collector = Collector(made, lab.build(made, "one-hot"), frames_per_batch=5, return_same_td=True)
    first = collector.next()
    second = collector.next()
    assert second is first
    collector.policy.register_forward_hook(lambda module, args, output: None)
    third = collector.next()
    assert "hooks" in collector.stats()["paths"]["policy"]
    assert collector.next() is third
    collector.shutdown()
