"""Environments of PettingZoo on arrays: the bits of the plain path."""

from __future__ import annotations

import os

os.environ.setdefault("SDL_VIDEODRIVER", "dummy")

import pytest
import torch
from tensordict.nn import ProbabilisticTensorDictModule, TensorDictModule, TensorDictSequential
from tests.envs.libs.test_pettingzoo import ENVS, Leaving, made
from tests.variants import in_turn
from torch import distributions as D
from torch import nn

from rollwright.collectors import Collector
from rollwright.data import Composite, Unbounded
from rollwright.envs import (
    ActionMask,
    CatFrames,
    Compose,
    DoubleToFloat,
    FlattenObservation,
    InitTracker,
    PettingZooEnv,
    PettingZooWrapper,
    RandomTruncationTransform,
    RewardSum,
    SerialEnv,
    StepCounter,
    TensorDictPrimer,
    TimeMaxPool,
    Transform,
    TransformedEnv,
    VecNorm,
    VecNormV2,
)
from rollwright.envs.arrays import array_form
from rollwright.errors import EnvError, NotNative
from rollwright.modules import MaskedCategorical

pytest.importorskip("pettingzoo")


def leaving(**options):
    return PettingZooWrapper(Leaving(), use_mask=True, **options)


CASES = {
    "agents of two groups": lambda: made("simple_tag"),
    "turns and allowed actions": lambda: made("tictactoe"),
    "pixels": lambda: made("pistonball"),
    "agents that leave": lambda: leaving(done_on_any=False),
    "the first that leaves": leaving,
    "one-hot": lambda: leaving(categorical_actions=False, done_on_any=False),
    "its state": lambda: PettingZooWrapper(made("simple_spread").pettingzoo_env, return_state=True),
    "on a device": lambda: leaving(device="cpu"),
    "in turn": lambda: SerialEnv(2, lambda: leaving(done_on_any=False)),
    "turns of several": lambda: SerialEnv(2, lambda: made("tictactoe")),
}


def counted(env):
    return TransformedEnv(env, StepCounter(max_steps=3)).append_transform(RewardSum())


def batches(env, policy=None, num=3, **options):
    torch.manual_seed(0)
    collector = Collector(env, policy, frames_per_batch=20, total_frames=20 * num, **options)
    try:
        collector.set_seed(1)
        return [batch.clone() for batch in collector], collector.stats()["paths"]
    finally:
        collector.shutdown()


def assert_equal(ours, theirs):
    """Entries, dtypes, batch sizes of groups; what is empty is left out of account."""
    assert set(ours.keys(True, True)) == set(theirs.keys(True, True))
    assert ours.batch_size == theirs.batch_size
    for key in ours.keys(True):
        one, other = ours.get(key), theirs.get(key)
        if isinstance(one, torch.Tensor):
            assert one.dtype == other.dtype, key
            assert torch.equal(one, other), key
        else:
            assert one.batch_size == other.batch_size, key


def assert_paths_agree(make, policy=None, **options):
    ours, path = batches(make(), policy, **options)
    theirs, plain = batches(make(), policy, **options, use_buffers=False)
    assert path["env"].startswith("native")
    assert plain["env"].startswith("plain")
    for one, other in zip(ours, theirs, strict=True):
        assert_equal(one, other)
    return ours


def bare(env):
    return env


@pytest.mark.parametrize(("name", "wrap"), in_turn(CASES, [bare, counted]))
def test_frames_are_those_of_the_plain_path(name, wrap):
    frames = torch.cat(assert_paths_agree(lambda: wrap(CASES[name]())))
    assert frames["next", "done"].sum() >= (0 if name == "pixels" and wrap is not counted else 3)


@pytest.mark.parametrize("name", [name for name in ENVS if "knights" in name or "spread" in name])
def test_frames_of_other_environments_are_those_of_the_plain_path(name):
    assert_paths_agree(lambda: made(name), num=2)


@pytest.mark.parametrize("wrap", [lambda env: env, counted], ids=["bare", "transforms"])
def test_random_actions_keep_to_the_mask(wrap):
    for frames in (*assert_paths_agree(lambda: wrap(made("tictactoe"))), wrap(made("tictactoe")).rollout(9)):
        for player in ("player_1", "player_2"):
            allowed = frames[player, "action_mask"].gather(-1, frames[player, "action"].unsqueeze(-1))
            assert allowed.all()


def in_one_group():
    pytest.importorskip("pygame")
    players = {"players": ["player_1", "player_2"]}
    return PettingZooEnv("tictactoe_v3", parallel=False, use_mask=True, group_map=players)


def masked(env, *groups):
    return TransformedEnv(env, Compose(*(ActionMask((group, "action"), (group, "action_mask")) for group in groups)))


MASKED = {
    "agents": lambda: masked(SerialEnv(2, in_one_group), "players"),
    "groups": lambda: masked(SerialEnv(2, lambda: made("tictactoe")), "player_1", "player_2"),
    "batches": lambda: masked(SerialEnv(2, lambda: SerialEnv(2, in_one_group)), "players"),
}


@pytest.mark.parametrize("name", MASKED)
def test_masks_of_agents_follow_their_environment_through_partial_resets(name):
    groups = ("player_1", "player_2") if name == "groups" else ("players",)
    for frames in assert_paths_agree(MASKED[name], num=5):
        for group in groups:
            assert frames[group, "action_mask"].gather(-1, frames[group, "action"].unsqueeze(-1)).all()


BESIDE = {
    "frames": lambda: CatFrames(3, dim=-1, in_keys=[("players", "flat")], out_keys=[("players", "frames")]),
    "statistics": lambda: VecNorm(in_keys=[("players", "flat"), ("players", "reward")]),
    "statistics of each": lambda: VecNormV2(in_keys=[("players", "flat")], reduce_batch_dims=False),
    "the greatest": lambda: TimeMaxPool([("players", "flat")], T=2),
    "first steps": lambda: InitTracker(),
    "states": lambda: TensorDictPrimer({"players": Composite(state=Unbounded((2, 2, 4)), shape=(2, 2))}),
    "cuts": lambda: RandomTruncationTransform(max_horizon=5, min_horizon=2),
}


@pytest.mark.parametrize("name", BESIDE)
def test_transforms_of_agents_entries_on_arrays_as_on_tensordicts(name):
    def make():
        seen = ("players", "observation", "observation")
        flat = FlattenObservation(-3, -1, in_keys=[seen], out_keys=[("players", "flat")])
        return TransformedEnv(SerialEnv(2, in_one_group), Compose(flat, StepCounter(), RewardSum(), BESIDE[name]()))

    frames = torch.cat(assert_paths_agree(make, num=3))
    assert frames["next", "done"].sum() > 3


def acting(env):
    """A policy for each group of tictactoe, which keeps to what is allowed."""

    class Board(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = nn.Linear(18, 9)

        def forward(self, board):
            return self.net(board.float().flatten(-3))

    torch.manual_seed(0)
    modules = []
    for group in env.group_map:
        logits, action = (group, "logits"), (group, "action")
        draw = ProbabilisticTensorDictModule(
            {"logits": logits, "mask": (group, "action_mask")},
            [action],
            distribution_class=MaskedCategorical,
            return_log_prob=True,
            log_prob_key=(group, "log_prob"),
        )
        modules += [TensorDictModule(Board(), [(group, "observation", "observation")], [logits]), draw]
    return TensorDictSequential(*modules)


@pytest.mark.parametrize("on", ["tensors", "TensorDicts"])
def test_policies_of_groups_act_as_on_the_plain_path(on):
    policy = acting(made("tictactoe"))
    given = policy if on == "tensors" else lambda td: policy(td)
    ours = assert_paths_agree(lambda: made("tictactoe"), given)
    played = ours[0]["player_1", "action_mask"].gather(-1, ours[0]["player_1", "action"].unsqueeze(-1))
    assert played.all()
    assert ours[0]["player_1"].batch_size == ours[0]["next", "player_2"].batch_size == (20, 1)


def test_a_policy_on_tensordicts_sees_groups_as_the_environment_has_them():
    seen = set()

    def policy(td):
        seen.add(td["one"].batch_size)
        return td.set(("one", "action"), torch.zeros(3, dtype=torch.int64)).set(("one", "n"), td["one", "observation"])

    frames = assert_paths_agree(lambda: leaving(done_on_any=False), policy)[0]
    assert seen == {torch.Size([3])}
    assert frames["one"].batch_size == (20, 3)


@pytest.mark.parametrize(
    "options",
    [
        {"compact_obs": True},
        {"set_truncated": True},
        {"return_same_td": True},
        {"init_random_frames": 20},
        {"reset_at_each_iter": True},
        {"track_traj_ids": False},
    ],
    ids=str,
)
def test_options_give_the_bits_of_the_plain_path(options):
    plain = {key: value for key, value in options.items() if key != "return_same_td"}
    policy = acting(made("tictactoe"))
    ours, path = batches(made("tictactoe"), policy, **options)
    theirs, _ = batches(made("tictactoe"), policy, **plain, use_buffers=False)
    assert path["env"].startswith("native")
    for one, other in zip(ours, theirs, strict=True):
        assert_equal(one, other)


@pytest.mark.parametrize("saved_by", [None, False])
def test_a_restored_collector_goes_on_with_the_same_bits(saved_by):
    policy = TensorDictSequential(
        TensorDictModule(nn.Linear(1, 2), [("one", "observation")], [("one", "logits")]),
        ProbabilisticTensorDictModule(
            {"logits": ("one", "logits")}, [("one", "action")], distribution_class=D.Categorical
        ),
    )

    def make(use_buffers):
        env = counted(leaving(done_on_any=False))
        return Collector(env, policy, frames_per_batch=8, total_frames=40, use_buffers=use_buffers)

    collector = make(saved_by)
    collector.set_seed(4)
    iterator = iter(collector)
    next(iterator)
    state = collector.state_dict()
    expected = next(iterator).clone()
    assert not expected[0]["one", "mask"].all()  # in the middle of a trajectory
    for use_buffers in (None, False):
        other = make(use_buffers)
        other.load_state_dict(state)
        assert_equal(next(iter(other)), expected)
        assert other.stats()["paths"]["env"].startswith("native" if use_buffers is None else "plain")
        other.shutdown()
    collector.shutdown()


class Ending(Leaving):
    """An agent is missing right after a reset."""

    def reset(self, seed=None, options=None):
        seen, infos = super().reset(seed, options)
        if getattr(self, "has_begun", False):
            del seen["one_0"]
        self.has_begun = True
        return seen, infos


def test_what_is_done_right_after_a_reset_is_an_error_on_both_paths():
    for use_buffers in (None, False):
        env = PettingZooWrapper(Ending(), use_mask=True)
        with pytest.raises(EnvError, match="is True right after reset"):
            batches(env, use_buffers=use_buffers)


def test_errors_are_those_of_the_plain_path():
    def policy(td):
        return td.set(("one", "action"), torch.full((3,), 7))

    said = []
    for use_buffers in (None, False):
        with pytest.raises(Exception, match=r"'action' must lie in 0 \.\. 1, got 7") as raised:
            batches(leaving(), policy, use_buffers=use_buffers)
        said.append((type(raised.value), str(raised.value)))
    assert said[0] == said[1]


class Slower(PettingZooWrapper):
    def _step(self, tensordict):
        return super()._step(tensordict)


def test_what_has_no_array_form_says_why():
    with pytest.raises(NotNative, match="Slower overrides _step"):
        array_form(Slower(Leaving(), use_mask=True))
    env = leaving()
    form = array_form(env)
    env.observation_spec = env.observation_spec.clone()
    with pytest.raises(NotNative, match="its specs have changed"):
        form.check()
    with pytest.raises(NotNative, match="its flags are"):
        array_form(TransformedEnv(leaving(), StepCounter(3, truncated_key="cut")))
    assert array_form(TransformedEnv(made("simple_spread"), DoubleToFloat())).flags


class Halved(Transform):
    def _apply_transform(self, obs):
        assert obs.shape[0] == 3
        return obs / 2

    def _reset(self, tensordict, tensordict_reset):
        return self._call(tensordict_reset)


def test_transforms_on_tensordicts_see_groups_as_they_are():
    def make():
        return TransformedEnv(leaving(done_on_any=False), Halved([("one", "observation")]))

    ours, theirs = batches(make()), batches(make(), use_buffers=False)
    assert ours[1]["env"].startswith("plain: Halved works on TensorDicts")
    for one, other in zip(ours[0], theirs[0], strict=True):
        assert_equal(one, other)
