"""VecNormV2: averages, batches, state."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from tensordict import TensorDict

from rollwright.envs import (
    Compose,
    GymEnv,
    ObservationNorm,
    SerialEnv,
    StepCounter,
    TransformedEnv,
    VecNorm,
    VecNormV2,
    check_env_specs,
)
from rollwright.testing.mocking_classes import NestedCountingEnv


def push(td):
    return td.set("action", torch.full((*td.batch_size, 1), 0.5))


def norm(**options):
    return VecNormV2(["observation", "reward"], ["o", "r"], **options)


# TorchRL 0.14.1 gives these numbers; with decay < 1, it rounds 1 - decay ** n to single precision.

FIRST = {
    1.0: [
        [0.0, 0.0, 0.0],
        [-1.000747799873352, 1.0000028610229492, -1.0000085830688477],
        [-1.1808902025222778, 1.2406736612319946, -1.1329138278961182],
        [-1.2032580375671387, 1.3653128147125244, -1.0643880367279053],
        [-1.1162309646606445, 1.4341397285461426, -0.7749423980712891],
    ],
    0.9: [
        [0.0, 0.0, 0.0],
        [-0.006682842969894409, 0.121275395154953, -0.05925335735082626],
        [-0.012002705596387386, 0.2980121970176697, -0.08985501527786255],
        [-0.01504125539213419, 0.5347519516944885, -0.09146618843078613],
        [-0.015237627550959587, 0.8084670901298523, -0.06235944479703903],
    ],
    0.9999: [
        [0.0, 0.0, 0.0],
        [-0.006268857978284359, 0.11477979272603989, -0.05639693886041641],
        [-0.011126242578029633, 0.2707749605178833, -0.08361083269119263],
        [-0.013518898747861385, 0.47092145681381226, -0.08373880386352539],
        [-0.013462059199810028, 0.7078635692596436, -0.0582975372672081],
    ],
}
REWARDS = {
    1.0: [0.0, -1.0000395774841309, -1.2374268770217896, -1.3583030700683594],
    0.9: [0.0, -0.020766187459230423, -0.04386863484978676, -0.06792148947715759],
    0.9999: [0.0, -0.01966739632189274, -0.040442079305648804, -0.060597751289606094],
}


@pytest.mark.parametrize("decay", FIRST)
def test_values_are_those_of_torchrl(seeded, decay):
    td = seeded("Pendulum-v1", norm(decay=decay)).rollout(4, push)
    close = {"atol": 1e-3, "rtol": 1e-3} if decay < 1 else {"atol": 1e-3, "rtol": 0}
    torch.testing.assert_close(td["o"], torch.tensor(FIRST[decay][:4]), **close)
    torch.testing.assert_close(td["next", "o"], torch.tensor(FIRST[decay][1:]), **close)
    torch.testing.assert_close(td["next", "r"].flatten(), torch.tensor(REWARDS[decay]), **close)


@pytest.mark.parametrize(
    ("reduced", "decay", "expected", "loc"),
    [
        (
            False,
            0.5,
            [[0.0, 0.0], [0.348155, -0.704361], [0.680217, 0.66682]],
            [3.5714285373687744, 2.4285714626312256],
        ),
        (False, 1.0, [[0.0, 0.0], [1.0, -1.0], [1.372813, 0.92582]], [2.6666667461395264, 2.0]),
        (True, 0.5, [[-0.707107, 0.707107], [0.774597, -1.161895], [0.744508, 0.205382]], [3.6190476417541504]),
        (True, 1.0, [[-1.0, 1.0], [0.507093, -1.521278], [1.352247, 0.845154]], [2.3333332538604736]),
    ],
)
def test_rows_of_a_batch_are_those_of_torchrl(reduced, decay, expected, loc):
    transform = VecNormV2(["x"], decay=decay, reduce_batch_dims=reduced)
    for values, result in zip([[1.0, 3.0], [2.0, -1.0], [5.0, 4.0]], expected, strict=True):
        td = transform(TensorDict({"x": torch.tensor(values).unsqueeze(-1)}, [2]))
        torch.testing.assert_close(td["x"].flatten(), torch.tensor(result), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(transform.loc["x"].flatten(), torch.tensor(loc))


@pytest.mark.parametrize("reduced", [False, True])
def test_rows_that_go_on_are_not_counted_again(ladder, do_nothing, reduced):
    env = TransformedEnv(ladder([2, 3, 9]), VecNormV2(["rung"], decay=1.0, reduce_batch_dims=reduced))
    check_env_specs(env)
    env = TransformedEnv(ladder([2, 3, 9]), VecNormV2(["rung"], decay=1.0, reduce_batch_dims=reduced))
    raw = ladder([2, 3, 9]).rollout(5, do_nothing, break_when_any_done=False)
    env.rollout(5, do_nothing, break_when_any_done=False)
    first = torch.ones(3, 5, dtype=torch.bool)
    first[:, 1:] = raw["next", "done"].squeeze(-1)[:, :-1]
    rows = [torch.cat([raw["rung"][i][first[i]], raw["next", "rung"][i]]) for i in range(3)]
    if reduced:
        torch.testing.assert_close(env.transform.loc["rung"], torch.cat(rows).mean(0))
        torch.testing.assert_close(env.transform.scale["rung"], torch.cat(rows).std(0, correction=0))
    else:
        torch.testing.assert_close(env.transform.loc["rung"], torch.stack([row.mean(0) for row in rows]))
        assert env.transform.averages(0).number.flatten().tolist() == [len(row) for row in rows]


def test_agents_count_for_themselves():
    env = TransformedEnv(NestedCountingEnv(max_steps=2, batch_size=[2]), VecNormV2([("data", "states")]))
    check_env_specs(env)
    td = env.reset()
    count = env.transform.count_0.clone()
    mask = torch.zeros(2, 3, 1, dtype=torch.bool)
    mask[0, 1] = True
    env.reset(td.set(("data", "_reset"), mask))
    assert torch.equal((env.transform.count_0 - count).bool().reshape(2, 3), mask.squeeze(-1))


def test_what_hardly_varies_stays_finite():
    transform = VecNormV2(["x"], decay=1.0)
    for value in (1000.0, 1000.0001, 1000.0) * 20:
        td = transform(TensorDict({"x": torch.tensor([value])}))
        assert td["x"].isfinite().all()


def test_frozen_and_back(seeded):
    env = seeded("Pendulum-v1", norm(decay=0.9))
    env.rollout(4, push)
    frozen = env.transform[0].frozen_copy()
    loc, scale = frozen.loc["observation"], frozen.scale["observation"]
    td = env.rollout(3, push)
    assert torch.equal(frozen.loc["observation"], loc)
    assert not torch.equal(env.transform[0].loc["observation"], loc)
    again = frozen(td.select("observation", "reward", strict=False).set("reward", td["next", "reward"]))
    torch.testing.assert_close(again["o"], (td["observation"] - loc) / scale)
    fixed = frozen.to_observation_norm()
    assert isinstance(fixed, Compose)
    assert isinstance(fixed[0], ObservationNorm)
    torch.testing.assert_close(fixed(again.clone())["o"], again["o"])
    back = frozen.denorm(again.exclude("observation"))
    torch.testing.assert_close(back["observation"], td["observation"])


def test_the_averages_are_state(seeded):
    env, other = (seeded("Pendulum-v1", norm(decay=0.9)) for _ in range(2))
    env.rollout(4, push)
    other.transform.load_state_dict(copy.deepcopy(env.transform.state_dict()))
    assert torch.equal(other.transform[0].loc["reward"], env.transform[0].loc["reward"])
    clone = pickle.loads(pickle.dumps(env.transform[0]))
    assert torch.equal(clone.var_0, env.transform[0].var_0)


def test_the_older_one_makes_it():
    assert type(VecNorm(["x"], decay=0.9, new_api=True)) is VecNormV2
    assert type(VecNorm(["x"], new_api=False)) is VecNorm
    assert type(pickle.loads(pickle.dumps(VecNorm(["x"])))) is VecNorm


MAKERS = {
    "one": lambda: TransformedEnv(GymEnv("CartPole-v1"), Compose(norm(decay=0.99), StepCounter(9))),
    "vector": lambda: TransformedEnv(GymEnv("CartPole-v1", num_envs=8), norm()),
    "shared": lambda: TransformedEnv(GymEnv("CartPole-v1", num_envs=3), norm(decay=1.0, reduce_batch_dims=True)),
    "cheetah": lambda: TransformedEnv(
        GymEnv("HalfCheetah-v5", max_episode_steps=9), VecNormV2(["observation"], decay=0.99999, eps=1e-2)
    ),
    "several": lambda: TransformedEnv(SerialEnv(3, lambda: GymEnv("CartPole-v1")), norm(decay=0.5)),
}


@pytest.mark.parametrize("name", MAKERS)
def test_on_arrays_as_on_tensordicts(name, both_paths):
    td = both_paths(MAKERS[name], frames=96)
    assert td["next", "done"].sum() > 3


def test_data_of_another_number_of_rows():
    each, one = VecNormV2(in_keys=["obs"]), VecNormV2(in_keys=["obs"], reduce_batch_dims=True)
    for norm_of in (each, one):
        norm_of(TensorDict({"obs": torch.randn(4, 3)}, [4]))
    with pytest.raises(
        ValueError, match=r"VecNormV2: expected data of shape \[4, 3\], .*got \[2, 3\].*reduce_batch_dims"
    ):
        each(TensorDict({"obs": torch.randn(2, 3)}, [2]))
    assert one(TensorDict({"obs": torch.randn(2, 3)}, [2]))["obs"].shape == (2, 3)


def test_mistakes_are_named():
    with pytest.raises(ValueError, match="decay: expected a number above 0 and at most 1, got 2"):
        VecNormV2(["x"], decay=2)
    with pytest.raises(ValueError, match="stateful: expected True, got False"):
        VecNormV2(["x"], stateful=False)
    with pytest.raises(RuntimeError, match="has seen no 'x' yet"):
        VecNormV2(["x"]).to_observation_norm()
