"""Returns over several steps: sums, what follows the last step, and boundaries of every kind."""

from __future__ import annotations

import itertools
import pickle

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import LazyStackedTensorDict, TensorDict

from rollwright.collectors import Collector
from rollwright.data import LazyTensorStorage, SliceSampler, TensorDictReplayBuffer
from rollwright.data.layout import join_trajectories, split_trajectories
from rollwright.data.postprocs import MultiStep
from rollwright.envs import GymEnv

T, F = True, False


def frames(rewards, terminated=(), truncated=(), ids=None, first=None):
    """A batch in which the observation is the time, and that after a step half a unit later."""
    rewards = torch.as_tensor(rewards, dtype=torch.float32)
    flags = {}
    for name, places in {"terminated": terminated, "truncated": truncated}.items():
        flags[name] = torch.zeros(*rewards.shape, 1, dtype=torch.bool)
        for place in places:
            flags[name][place] = True
    time = torch.arange(float(rewards.numel())).reshape(*rewards.shape, 1)
    outcome = {
        "observation": time + 0.5,
        "reward": rewards.unsqueeze(-1),
        "done": flags["terminated"] | flags["truncated"],
        **flags,
    }
    batch = TensorDict({"observation": time, "next": outcome}, rewards.shape)
    if ids is not None:
        batch["collector"] = TensorDict({"traj_ids": torch.as_tensor(ids)}, rewards.shape)
    if first is not None:
        batch["is_init"] = torch.as_tensor(first).unsqueeze(-1)
    return batch


def listed(batch, key):
    value = batch[key]
    return (value.squeeze(-1) if value.ndim > batch.ndim else value).tolist()


# Equal to TorchRL 0.14.1 on the same data; flags apart, which it leaves where they were.
PEER_BATCH = {
    "rewards": (torch.arange(16.0).reshape(2, 8) * 3 % 7) - 2,
    "terminated": [(0, 2), (1, 6)],
    "truncated": [(1, 0)],
}
PEER = {
    (0.5, 3): {
        ("next", "reward"): [
            [-0.5, 3.0, 4.0, 1.25, 3.0, -0.5, 1.0, -2.0],
            [1.0, 4.75, 1.25, 3.0, -0.5, 1.0, -2.0, 1.0],
        ],
        ("next", "observation"): [
            [2.5, 2.5, 2.5, 5.5, 6.5, 7.5, 7.5, 7.5],
            [8.5, 11.5, 12.5, 13.5, 14.5, 14.5, 14.5, 15.5],
        ],
        "steps_to_next_obs": [[3, 2, 1, 3, 3, 3, 2, 1], [1, 3, 3, 3, 3, 2, 1, 1]],
        "gamma": [
            [0.125, 0.25, 0.5, 0.125, 0.125, 0.125, 0.25, 0.5],
            [0.5, 0.125, 0.125, 0.125, 0.125, 0.25, 0.5, 0.5],
        ],
        "nonterminal": [[T, T, F, T, T, T, T, F], [F, T, T, T, T, T, F, F]],
    },
    (0.9, 4): {
        ("next", "reward"): [
            [2.14, 4.6, 4.0, 3.348, 2.262, -0.82, 0.2, -2.0],
            [1.0, 5.701, 3.348, 2.262, -0.82, 0.2, -2.0, 1.0],
        ],
        ("next", "observation"): [
            [2.5, 2.5, 2.5, 6.5, 7.5, 7.5, 7.5, 7.5],
            [8.5, 12.5, 13.5, 14.5, 14.5, 14.5, 14.5, 15.5],
        ],
        "steps_to_next_obs": [[3, 2, 1, 4, 4, 3, 2, 1], [1, 4, 4, 4, 3, 2, 1, 1]],
        "gamma": [
            [0.729, 0.81, 0.9, 0.6561, 0.6561, 0.729, 0.81, 0.9],
            [0.9, 0.6561, 0.6561, 0.6561, 0.729, 0.81, 0.9, 0.9],
        ],
        "nonterminal": [[T, T, F, T, T, T, T, F], [F, T, T, T, T, T, F, F]],
    },
}


@pytest.mark.parametrize(("gamma", "n_steps"), list(PEER))
def test_equal_to_torchrl(gamma, n_steps):
    out = MultiStep(gamma, n_steps)(frames(**PEER_BATCH))
    for key, expected in PEER[gamma, n_steps].items():
        torch.testing.assert_close(torch.tensor(listed(out, key)), torch.tensor(expected))
    assert listed(out, ("next", "original_reward")) == PEER_BATCH["rewards"].tolist()


def test_names_shapes_and_types():
    batch = frames(**PEER_BATCH)
    batch.names = [None, "time"]
    out = MultiStep(0.5, 3)(batch)
    assert out.shape == batch.shape
    assert out.names == out["next"].names == [None, "time"]
    added = {"steps_to_next_obs", "gamma", "nonterminal", ("next", "original_reward")}
    assert set(out.keys(True, True)) == set(batch.keys(True, True)) | added
    found = {key: (out[key].shape, out[key].dtype) for key in added}
    assert found == {
        "steps_to_next_obs": ((2, 8), torch.int64),
        "gamma": ((2, 8), torch.float32),
        "nonterminal": ((2, 8), torch.bool),
        ("next", "original_reward"): ((2, 8, 1), torch.float32),
    }


def test_the_batch_is_left_as_it_is():
    batch = frames(**PEER_BATCH)
    before = batch.clone()
    out = MultiStep(0.5, 3)(batch)
    assert set(batch.keys(True, True)) == set(before.keys(True, True))
    assert (batch == before).all()
    out["next"].apply_(torch.zeros_like)
    assert (batch["next", "observation"] == before["next", "observation"]).all()
    assert out["observation"].data_ptr() == batch["observation"].data_ptr()


# Boundaries.


@pytest.mark.parametrize("flag", ["terminated", "truncated"])
def test_flags_are_those_of_the_last_step(flag):
    """The third frame ends its trajectory: a sum that reaches it must not bootstrap after a termination."""
    out = MultiStep(0.5, 3)(frames([1.0] * 6, **{flag: [2]}))
    ends = [T, T, T, F, F, F]
    assert listed(out, ("next", "done")) == ends
    assert listed(out, ("next", flag)) == ends
    assert not out["next", {"terminated": "truncated", "truncated": "terminated"}[flag]].any()
    assert listed(out, ("next", "reward")) == [1.75, 1.5, 1.0, 1.75, 1.5, 1.0]
    assert listed(out, "nonterminal") == [T, T, F, T, T, F]


@pytest.mark.parametrize(
    "boundary", [{"terminated": [2]}, {"ids": [4, 4, 4, 7, 7, 7]}, {"first": [F, F, F, T, F, F], "ids": [4] * 6}]
)
def test_boundaries_by_flag_by_id_and_by_first_step(boundary):
    out = MultiStep(1.0, 10)(frames([1.0, 2.0, 4.0, 8.0, 16.0, 32.0], **boundary))
    assert listed(out, ("next", "reward")) == [7.0, 6.0, 4.0, 56.0, 48.0, 32.0]
    assert listed(out, ("next", "observation")) == [2.5, 2.5, 2.5, 5.5, 5.5, 5.5]
    assert listed(out, "steps_to_next_obs") == [3, 2, 1, 3, 2, 1]


def test_done_ends_a_sum_inside_one_id():
    """An environment that is not reset goes on under its id, done at every step."""
    out = MultiStep(1.0, 4)(frames([1.0] * 4, terminated=[1, 2, 3], ids=[0] * 4))
    assert listed(out, ("next", "reward")) == [2.0, 1.0, 1.0, 1.0]


def test_environments_do_not_mix():
    """The last frame of one row and the first of the next have one id here."""
    out = MultiStep(1.0, 3)(frames([[1.0, 1.0], [5.0, 5.0]], ids=[[0, 0], [0, 0]]))
    assert listed(out, ("next", "reward")) == [[2.0, 1.0], [10.0, 5.0]]
    assert listed(out, "nonterminal") == [[T, F], [T, F]]


def test_several_dimensions_of_environments_laid_out_time_first():
    rewards = torch.arange(24.0).reshape(4, 2, 3).permute(1, 2, 0)
    out = MultiStep(1.0, 2)(frames(rewards))
    expected = rewards.clone()
    expected[..., :-1] += rewards[..., 1:]
    assert (out["next", "reward"].squeeze(-1) == expected).all()
    assert (out["next", "observation"][..., :-1, :] == out["observation"][..., 1:, :] + 0.5).all()


def test_flags_of_agents_end_the_sums_of_agents():
    done = torch.zeros(4, 2, 1, dtype=torch.bool)
    done[1, 1] = True
    agents = TensorDict({"reward": torch.tensor([[1.0, 10.0]] * 4).unsqueeze(-1), "done": done}, [4, 2])
    batch = TensorDict({"next": {"agents": agents}}, [4])
    out = MultiStep(1.0, 3, reward_keys=("agents", "reward"))(batch)
    assert listed(out["next", "agents"], "reward") == [[2.0, 20.0], [1.0, 10.0], [2.0, 20.0], [1.0, 10.0]]
    assert out["next", "agents", "original_reward"].shape == (4, 2, 1)
    assert out["next", "agents"].shape == (4, 2)


def test_padding_stays_as_it_is():
    split = split_trajectories(frames([1.0, 2.0, 4.0, 8.0], ids=[0, 0, 0, 1]))
    out = MultiStep(1.0, 2)(split)
    assert listed(out, ("next", "reward")) == [[3.0, 6.0, 4.0], [8.0, 0.0, 0.0]]
    assert listed(out, ("next", "observation")) == [[1.5, 2.5, 2.5], [3.5, 0.0, 0.0]]
    assert listed(out, "nonterminal") == [[T, T, F], [F, F, F]]
    assert listed(out, "steps_to_next_obs") == [[2, 2, 1], [1, 1, 1]]


def test_frames_that_were_not_taken_are_summed_by_none():
    out = MultiStep(1.0, 3)(frames([1.0, 1.0, 0.0, 0.0], ids=[3, 3, -1, -1]))
    assert listed(out, ("next", "reward")) == [2.0, 1.0, 0.0, 0.0]
    assert listed(out, "nonterminal") == [T, F, F, F]


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_what_is_not_finite_stays_on_its_side_of_a_boundary(bad):
    out = MultiStep(0.5, 3)(frames([1.0, 1.0, bad, 1.0], terminated=[1]))
    assert listed(out, ("next", "reward"))[:2] == [1.5, 1.0]
    assert listed(out, ("next", "reward"))[3] == 1.0


def by_hand(rewards, ends, gamma, n_steps):
    """Sums, last steps and counts of one row, frame by frame."""
    out = []
    for t in range(len(rewards)):
        total, last = 0.0, t
        for k in range(n_steps):
            last = t + k
            total += gamma**k * rewards[last]
            if ends[last] or last == len(rewards) - 1:
                break
        out.append((total, last, last - t + 1))
    return out


@settings(max_examples=80, deadline=None)
@given(
    st.lists(st.lists(st.tuples(st.integers(1, 7), st.sampled_from("tri")), min_size=1, max_size=5), max_size=4),
    st.integers(1, 9),
    st.sampled_from([0.3, 0.9, 1.0]),
)
def test_equal_to_a_loop(rows, n_steps, gamma):
    """Rows of trajectories that end by termination, by truncation, or by a change of id alone."""
    rows = rows or [[(3, "t")]]
    length = min(sum(n for n, _ in row) for row in rows)
    fresh = itertools.count()
    ends, places, ids = [], {"t": [], "r": [], "i": []}, []
    for i, row in enumerate(rows):
        ids.append([one for n, _ in row for one in [next(fresh)] * n][:length])
        stops = [(stop - 1, kind) for stop, (_, kind) in zip(itertools.accumulate(n for n, _ in row), row, strict=True)]
        ends.append([any(stop == t for stop, _ in stops) for t in range(length)])
        for stop, kind in stops:
            if stop < length:
                places[kind].append((i, stop))
    torch.manual_seed(0)
    rewards = torch.randn(len(rows), length)
    batch = frames(rewards, terminated=places["t"], truncated=places["r"], ids=ids)
    out = MultiStep(gamma, n_steps)(batch)
    for i in range(len(rows)):
        expected = by_hand(rewards[i].tolist(), ends[i], gamma, n_steps)
        sums, last, counts = (torch.tensor(column) for column in zip(*expected, strict=True))
        torch.testing.assert_close(out["next", "reward"][i].squeeze(-1), sums.float(), rtol=1e-5, atol=1e-5)
        assert (out["steps_to_next_obs"][i] == counts).all()
        for key in ("observation", "done", "terminated", "truncated"):
            assert (out["next", key][i] == batch["next", key][i, last]).all()
    assert (out["gamma"] == gamma ** out["steps_to_next_obs"]).all()
    flat = MultiStep(gamma, n_steps)(batch.reshape(-1))  # ids tell the rows apart
    assert (flat == out.reshape(-1)).all()


# Kinds of data.


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.int64, torch.bool])
def test_rewards_of_other_types(dtype):
    batch = frames([1.0, 1.0, 0.0])
    batch["next", "reward"] = batch["next", "reward"].to(dtype)
    out = MultiStep(0.5, 2)(batch)
    assert listed(out, ("next", "reward")) == [1.5, 1.0, 0.0]
    assert out["next", "reward"].dtype == out["gamma"].dtype == (dtype if dtype.is_floating_point else torch.float32)
    assert out["next", "original_reward"].dtype == dtype


def test_rewards_without_a_dimension_of_their_own_and_several_of_them():
    batch = frames([1.0, 2.0])
    batch["next", "cost"] = torch.tensor([3.0, 4.0])
    out = MultiStep(1.0, 2, reward_keys=["reward", "cost"])(batch)
    assert out["next", "cost"].tolist() == [7.0, 4.0]
    assert out["next", "original_cost"].tolist() == [3.0, 4.0]
    assert listed(out, ("next", "reward")) == [3.0, 2.0]


def test_words_and_shapes_that_vary():
    batch = frames([1.0, 2.0, 4.0])
    batch["next", "word"] = ["a", "b", "c"]
    assert MultiStep(1.0, 2)(batch)["next", "word"] == ["b", "c", "c"]
    steps = [frame.clone() for frame in frames([1.0, 2.0, 4.0]).unbind(0)]
    for t, step in enumerate(steps):
        step["next", "ragged"] = torch.full((t + 1,), t)
    out = MultiStep(1.0, 2)(LazyStackedTensorDict.lazy_stack(steps, 0))
    assert [step["next", "ragged"].tolist() for step in out.unbind(0)] == [[1, 1], [2, 2, 2], [2, 2, 2]]
    assert listed(out, ("next", "reward")) == [3.0, 6.0, 4.0]
    assert [step["next", "reward"].item() for step in steps] == [1.0, 2.0, 4.0]


# In a collector.


@pytest.mark.parametrize("num_envs", [None, 3])
def test_as_postproc(num_envs):
    def collect(**options):
        torch.manual_seed(0)
        make = lambda: GymEnv("CartPole-v1", **({} if num_envs is None else {"num_envs": num_envs}))  # noqa: E731
        with Collector(make, frames_per_batch=90, total_frames=180, **options) as collector:
            collector.set_seed(0)
            return [batch.clone() for batch in collector]

    for raw, rewritten in zip(collect(), collect(postproc=MultiStep(0.5, 3)), strict=True):
        assert raw["next", "done"].any()
        assert (MultiStep(0.5, 3)(raw) == rewritten).all()
        one = MultiStep(0.5, 1)(raw)
        assert (one.select(*raw.keys(True, True)) == raw).all()
        inside = rewritten["steps_to_next_obs"] == 3
        assert (rewritten["next", "reward"][inside] == 1.75).all()


def test_sampled_slices():
    """Slices of one trajectory may lie one behind the other."""
    torch.manual_seed(0)
    raw = frames(torch.ones(60), terminated=[19, 39, 59], ids=[0] * 20 + [1] * 20 + [2] * 20)
    buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(60), sampler=SliceSampler(slice_len=8), batch_size=80)
    buffer.extend(raw)
    slices = buffer.sample()
    neighbours = slices["collector", "traj_ids"][7:-1:8] == slices["collector", "traj_ids"][8::8]
    assert neighbours.any()
    rewritten = MultiStep(1.0, 3)(slices)
    assert listed(rewritten, ("next", "reward")) == [3.0, 3.0, 3.0, 3.0, 3.0, 3.0, 2.0, 1.0] * 10
    assert (
        rewritten["next", "observation"] == slices["observation"] + rewritten["steps_to_next_obs"][:, None] - 0.5
    ).all()


def test_batches_without_next_observations_are_refused():
    with (
        Collector(lambda: GymEnv("CartPole-v1"), frames_per_batch=20, compact_obs=True) as collector,
        pytest.raises(ValueError, match=r"compact_obs=True.*restore_next"),
    ):
        MultiStep(0.9, 3)(collector.next())


# Bad input.


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ((0.0, 3), ValueError, r"gamma: expected 0 < gamma <= 1, got 0.0"),
        ((1.01, 3), ValueError, "gamma: expected 0 < gamma <= 1, got 1.01"),
        ((float("nan"), 3), ValueError, "gamma: .* got nan"),
        (("0.9", 3), TypeError, "gamma: expected a number, got '0.9'"),
        ((True, 3), TypeError, "gamma: expected a number"),
        ((0.9, 0), ValueError, "n_steps: expected at least 1, got 0"),
        ((0.9, -1), ValueError, "n_steps: expected at least 1"),
        ((0.9, 2.0), TypeError, "n_steps: expected a whole number, got 2.0"),
        ((0.9, True), TypeError, "n_steps: expected a whole number"),
    ],
)
def test_wrong_arguments(arguments, error, message):
    with pytest.raises(error, match=message):
        MultiStep(*arguments)


def test_no_rewards_named():
    with pytest.raises(ValueError, match="reward_keys: expected at least one"):
        MultiStep(0.9, 3, reward_keys=[])


def test_batches_that_cannot_be_rewritten():
    multistep = MultiStep(0.9, 3)
    with pytest.raises(KeyError, match=r"expected 'reward' below 'next', which has 'done'"):
        multistep(TensorDict({"next": {"done": torch.zeros(3, 1, dtype=torch.bool)}}, [3]))
    with pytest.raises(KeyError, match="which has nothing"):
        multistep(TensorDict({"x": torch.zeros(3)}, [3]))
    with pytest.raises(KeyError, match=r"neither .*traj_ids.* nor"):
        multistep(TensorDict({"next": {"reward": torch.zeros(3, 1)}}, [3]))
    with pytest.raises(ValueError, match="time dimension"):
        multistep(frames([1.0])[0])
    with pytest.raises(ValueError, match="sums already"):
        multistep(multistep(frames([1.0])))


def test_it_travels_to_other_processes():
    copy = pickle.loads(pickle.dumps(MultiStep(0.5, 3)))
    assert repr(copy) == "MultiStep(gamma=0.5, n_steps=3)"
    batch = frames(**PEER_BATCH)
    assert (copy(batch) == MultiStep(0.5, 3)(batch)).all()


# Masks, and modules ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("key", ["mask", ("collector", "mask")])
@pytest.mark.parametrize("columns", [(), (1,)])
def test_a_mask_may_have_a_column(key, columns):
    batch = frames(torch.ones(2, 4))
    batch[key] = torch.tensor([[T, T, T, F], [T, T, T, T]]).reshape(2, 4, *columns)
    out = MultiStep(0.5, 3)(batch)
    assert out["steps_to_next_obs"].tolist() == [[3, 2, 1, 1], [3, 3, 2, 1]]
    rows = split_trajectories(batch, as_nested=True)
    assert [len(row) for row in rows] == [3, 4]
    if not columns or key == "mask":
        assert len(join_trajectories(batch, mask_key=key)) == 7


def test_a_mask_of_another_form_is_refused_where_there_can_be_no_other():
    for mask in (torch.ones(2, 4, 3, dtype=torch.bool), torch.ones(2, 4), torch.ones(2, 4, 1, dtype=torch.int64)):
        batch = frames(torch.ones(2, 4))
        batch["collector", "mask"] = mask
        with pytest.raises(ValueError, match=r"'mask'.*expected bool \[2, 4\] or \[2, 4, 1\].*got torch\."):
            MultiStep(0.5, 3)(batch)
        batch = frames(torch.ones(2, 4))
        batch["mask"] = mask  # of actions
        assert MultiStep(0.5, 3)(batch)["steps_to_next_obs"].tolist() == [[3, 3, 2, 1]] * 2


class Halved(torch.nn.Module):
    def forward(self, batch):
        return batch.set(("next", "reward"), batch["next", "reward"] / 2)


def test_it_is_a_module():
    steps = MultiStep(0.5, 2)
    assert isinstance(steps, torch.nn.Module)
    both = torch.nn.Sequential(steps, Halved()).to(torch.float64).eval()
    copied = pickle.loads(pickle.dumps(both))
    for module in (both, copied):
        assert module(frames([1.0, 1.0]))["next", "reward"].flatten().tolist() == [0.75, 0.5]
    assert not list(both.parameters())
    assert not both.state_dict()
    assert repr(steps) == "MultiStep(gamma=0.5, n_steps=2)"
    with Collector(lambda: GymEnv("CartPole-v1"), frames_per_batch=8, postproc=both) as collector:
        assert "steps_to_next_obs" in collector.next()
