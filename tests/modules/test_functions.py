"""Functions from an observation to an action as policies."""

from __future__ import annotations

import gymnasium
import numpy as np
import pytest
import torch
from tensordict import TensorDict
from tests.variants import in_turn
from torch import nn

from rollwright.collectors import Collector
from rollwright.envs import GymEnv, SerialEnv, StepCounter, TransformedEnv
from rollwright.errors import PolicyError, PolicyKeyError

W = np.ones((3, 1), np.float32)


def collect(env, policy, **options):
    collector = Collector(env, policy, frames_per_batch=20, total_frames=20, **options)
    try:
        collector.set_seed(0)
        (batch,) = [found.clone() for found in collector]
        return batch
    finally:
        collector.shutdown()


def lean(batch):
    return (batch["observation"][..., 2] > 0).long()


LEANING = {
    "tensor": lambda x: (x[2] > 0).long(),
    "integer": lambda x: int(x[2] > 0),
    "boolean": lambda x: bool(x[2] > 0),
    "NumPy number": lambda x: np.int32(x[2] > 0),
    "array": lambda x: np.asarray(x[2] > 0),
    "list": lambda x: [int(x[2] > 0)],
    "by name": lambda observation: int(observation[2] > 0),
    "only NumPy": lambda x: x.astype(np.float64)[2] > 0,
    "of a TensorDict": lambda x: x.set("action", (x["observation"][2] > 0).long()),
    "of a TensorDict, named": lambda td: td.set("action", (td["observation"][2] > 0).long()),
}


@pytest.mark.parametrize("policy", LEANING)
def test_actions_are_what_the_function_returns(policy):
    batch = collect("CartPole-v1", LEANING[policy])
    assert torch.equal(batch["action"], lean(batch))
    assert 0 < batch["action"].sum() < 20


@pytest.mark.parametrize("policy", ["tensor", "integer", "array", "list", "by name", "only NumPy"])
def test_indices_become_one_hot(policy):
    batch = collect(GymEnv("CartPole-v1"), LEANING[policy])
    assert torch.equal(batch["action"].argmax(-1), lean(batch))
    assert torch.equal(batch["action"].sum(-1), torch.ones(20))


@pytest.mark.parametrize(
    "policy",
    [
        lambda x: (x[..., 2] > 0).long(),
        lambda x: np.asarray(x)[:, 2] > 0,
        lambda x: [int(row[2] > 0) for row in x],
    ],
    ids=["tensor", "array", "list"],
)
def test_batches(policy):
    batch = collect(lambda: gymnasium.make_vec("CartPole-v1", num_envs=2, vectorization_mode="sync"), policy)
    assert torch.equal(batch["action"], lean(batch))


@pytest.mark.parametrize("policy", [lambda x: np.tanh(x @ W), lambda x: W.T @ x, nn.Linear(3, 1)])
def test_continuous_actions_have_the_dtype_of_the_environment(policy):
    with torch.no_grad():
        batch = collect("Pendulum-v1", policy)
    assert batch["action"].dtype == torch.float32
    assert batch["action"].shape == (20, 1)


def test_an_annotation_decides():
    seen = []

    def of_array(x: np.ndarray) -> int:
        seen.append(type(x))
        return 0

    def of_tensordict(x: TensorDict) -> TensorDict:
        seen.append(type(x))
        return x.set("action", torch.tensor(1))

    collect("CartPole-v1", of_array)
    collect("CartPole-v1", of_tensordict)
    assert set(seen[:20]) == {np.ndarray}
    assert all(issubclass(kind, TensorDict) for kind in seen[20:])


def test_entries_that_transforms_add_do_not_count():
    env = TransformedEnv(GymEnv("CartPole-v1", categorical_action_encoding=True), StepCounter())
    batch = collect(env, LEANING["integer"])
    assert torch.equal(batch["action"], lean(batch))


def test_the_trial_of_the_first_call_draws_nothing():
    def named(observation):
        return torch.randint(2, ())

    given = [collect("CartPole-v1", policy)["action"] for policy in (named, lambda x: torch.randint(2, x.shape[:-1]))]
    assert torch.equal(*given)


@pytest.mark.parametrize("value", [0.7, np.float64(0.7), torch.tensor(0.7), float("nan")])
def test_a_fraction_is_no_choice(value):
    with pytest.raises(PolicyError, match="whole number"):
        collect("CartPole-v1", lambda x: value)


def test_an_index_out_of_range_is_named():
    with pytest.raises(PolicyError, match="from 0 to 1, got 3"):
        collect(GymEnv("CartPole-v1"), lambda x: 3)


@pytest.mark.parametrize("value", [torch.tensor([1]), torch.tensor(1, dtype=torch.int32), torch.tensor(1.0)])
def test_tensors_get_the_dtype_and_shape_of_the_action(value):
    batch = collect("CartPole-v1", lambda x: value)
    assert batch["action"].dtype == torch.int64
    assert batch["action"].tolist() == [1] * 20


def test_it_acts_in_workers():
    batch = collect("CartPole-v1", LEANING["integer"], num_collectors=2)
    assert torch.equal(batch["action"], lean(batch))


def test_a_fault_of_the_function_is_told_with_what_it_was_given():
    with pytest.raises(PolicyError) as caught:
        collect("CartPole-v1", lambda x: 1 / 0)
    assert isinstance(caught.value, ZeroDivisionError)


def test_what_is_no_action_is_named():
    with pytest.raises((PolicyError, TypeError), match=r"returned str, expected an action"):
        collect("CartPole-v1", lambda x: "left")


def test_a_function_of_a_tensordict_that_writes_nothing():
    with pytest.raises(PolicyKeyError, match="action"):
        collect("CartPole-v1", lambda td: td)


def test_several_observations_need_names():
    env = GymEnv("CartPole-v1", from_pixels=True, pixels_only=False, categorical_action_encoding=True)
    try:
        with pytest.raises(TypeError, match=r"obsrvation.*Did you mean 'observation'"):
            collect(env, lambda obsrvation: 0)
        assert collect(env, lambda observation: 1)["action"].sum() == 20
    finally:
        env.close(raise_if_closed=False)


def paths(env, policy, **options):
    """The batches that a collector gives, and how its policy ran."""
    torch.manual_seed(0)
    np.random.seed(0)
    collector = Collector(env, policy, frames_per_batch=16, total_frames=48, **options)
    try:
        collector.set_seed(0)
        return torch.cat([batch.clone() for batch in collector], -1), collector.stats()["paths"]["policy"]
    finally:
        collector.shutdown()


def of_tensor(x: torch.Tensor):
    return (x[..., 2] > 0).long()


def of_array(x: np.ndarray):
    return x[..., 2] > 0


FUNCTIONS = {
    "tensor": (lambda x: (x[..., 2] > 0).long(), "tensors"),
    "int32": (lambda x: (x[..., 2] > 0).int(), "tensors"),
    "array": (lambda x: x.astype(np.float64)[..., 2] > 0, "arrays"),
    "list": (lambda x: (x[..., 2] > 0).tolist(), "tensors"),
    "random": (lambda x: torch.randint(2, x.shape[:-1]), "tensors"),
    "random array": (lambda x: np.random.randint(2, size=x.astype(np.int64).shape[:-1]), "arrays"),
    "annotated tensor": (of_tensor, "tensors"),
    "annotated array": (of_array, "arrays"),
}
ENVS = {
    "one": lambda: GymEnv("CartPole-v1", categorical_action_encoding=True),
    "one-hot": lambda: GymEnv("CartPole-v1"),
    "two": lambda: SerialEnv(2, lambda: GymEnv("CartPole-v1", categorical_action_encoding=True)),
}


@pytest.mark.parametrize(("name", "env"), in_turn(FUNCTIONS, list(ENVS)))
def test_functions_run_on_arrays_with_the_bits_of_the_plain_path(name, env):
    policy, takes = FUNCTIONS[name]
    (fast, how), (plain, _) = paths(ENVS[env](), policy), paths(ENVS[env](), policy, use_buffers=False)
    assert how.startswith("native: ")
    assert how.endswith(f"called on {takes}")
    assert set(fast.keys(True, True)) == set(plain.keys(True, True))
    for key in fast.keys(True, True):
        assert fast[key].dtype == plain[key].dtype
        assert torch.equal(fast[key], plain[key]), key


@pytest.mark.parametrize(
    "policy", [lambda x: np.tanh(x @ W), lambda x: torch.tanh(x.sum(-1)).double(), lambda x: [0.3]]
)
def test_continuous_actions_have_the_bits_of_the_plain_path(policy):
    fast, plain = paths("Pendulum-v1", policy)[0], paths("Pendulum-v1", policy, use_buffers=False)[0]
    assert fast["action"].dtype == plain["action"].dtype
    assert torch.equal(fast["action"], plain["action"])
    assert torch.equal(fast["next", "observation"], plain["next", "observation"])


def test_random_frames_before_a_function_are_as_on_the_plain_path():
    found = [
        paths("CartPole-v1", FUNCTIONS["array"][0], init_random_frames=16, **options)[0]
        for options in ({}, {"use_buffers": False})
    ]
    assert torch.equal(found[0]["action"], found[1]["action"])


def test_a_function_of_a_tensordict_goes_on_being_one():
    batch, how = paths("CartPole-v1", lambda x: x.set("action", (x["observation"][2] > 0).long()))
    assert torch.equal(batch["action"], lean(batch))
    assert how.startswith("plain")


@pytest.mark.parametrize(
    ("hint", "kind"),
    [(np.ndarray, np.ndarray), ("np.typing.NDArray[np.float32]", np.ndarray), ("torch.Tensor | None", torch.Tensor)],
)
def test_annotations_of_any_form_decide(hint, kind):
    seen = []

    def policy(x):
        seen.append(type(x))
        return 0

    policy.__annotations__["x"] = hint
    collect("CartPole-v1", policy)
    assert set(seen) == {kind}


def several():
    boxes = {"place": gymnasium.spaces.Box(-1, 1, (2,)), "speed": gymnasium.spaces.Box(-1, 1, (1,))}
    values = {"place": np.zeros(2, np.float32), "speed": np.zeros(1, np.float32)}
    return gymnasium.wrappers.TransformObservation(
        gymnasium.make("CartPole-v1"), lambda x: values, gymnasium.spaces.Dict(boxes)
    )


@pytest.mark.parametrize("policy", [lambda obs: 0, lambda obs: int(obs[0] > 0)], ids=["returns", "raises"])
def test_several_observations_are_named_where_one_was_expected(policy):
    with pytest.raises((PolicyError, TypeError)) as caught:
        collect(several(), policy)
    errors = [caught.value, caught.value.__cause__]
    told = " ".join(note for error in errors for note in (str(error), *getattr(error, "__notes__", [])))
    assert "'place', 'speed'" in told
    assert "name the arguments after" in told


def test_a_function_of_a_tensordict_with_several_observations():
    batch = collect(several(), lambda x: x.set("action", (x["speed"][0] > 0).long()))
    assert batch["action"].tolist() == [0] * 20


@pytest.mark.parametrize("found", [(1, None), (np.array([1]), None), [1, "left"]], ids=["state", "arrays", "text"])
def test_an_action_with_something_beside_it_is_no_action(found):
    with pytest.raises(PolicyError, match=r"expected an action, got a (tuple|list) of 2 \(.*Return the action alone"):
        collect(lambda: GymEnv("CartPole-v1"), lambda seen: found)


def test_actions_of_bfloat16_reach_the_environment():
    net = nn.Linear(3, 1).bfloat16()
    batch = collect(lambda: GymEnv("Pendulum-v1"), lambda observation: net(observation.bfloat16()))
    assert batch["action"].dtype == torch.float32
    assert batch["action"].unique().numel() > 1
