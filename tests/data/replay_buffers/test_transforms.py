"""Transforms of buffers: a filter of old data, next observations, sums of rewards."""

from __future__ import annotations

import warnings

import pytest
import torch
from tensordict import TensorDict

from rollwright.data import (
    DensifyReward,
    LazyTensorStorage,
    ListStorage,
    NextStateReconstructor,
    PolicyAgeFilter,
    PrioritizedSampler,
    RaggedStorage,
    ReplayBuffer,
    RewardToGo,
    SliceSampler,
    SliceSamplerWithoutReplacement,
    TensorDictReplayBuffer,
)
from rollwright.envs import Compose, ObservationNorm, RewardClipping, SignTransform

# The age of policies ------------------------------------------------------------------------------


def versions(*values: int) -> TensorDict:
    return TensorDict({"policy_version": torch.tensor(values), "obs": torch.arange(len(values))}, [len(values)])


@pytest.mark.parametrize("truncated_key", [None, ("next", "truncated")])
@pytest.mark.parametrize("padded", [False, True])
def test_what_is_left_of_slices_is_marked(truncated_key, padded):
    """No recurrent state goes from one stretch of steps to another, whichever steps are missing."""
    sampler = SliceSamplerWithoutReplacement(slice_len=4, shuffle=False, truncated_key=truncated_key, pad_output=padded)
    buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(20), sampler=sampler, batch_size=8)
    version = torch.tensor([1, 1, 0, 1, 0, 0, 1, 1])
    buffer.extend(
        TensorDict(
            {
                "step": torch.arange(8),
                "policy_version": version,
                "collector": {"traj_ids": torch.arange(8) // 4},
                "next": {"done": torch.zeros(8, 1, dtype=torch.bool)},
            },
            [8],
        )
    )
    buffer.append_transform(PolicyAgeFilter(1, max_policy_lag=0))
    batch = buffer.sample()
    assert batch["step"].tolist() == batch["index"].tolist() == [0, 1, 3, 6, 7]
    assert batch["is_init"].flatten().tolist() == [True, False, True, True, False]
    if truncated_key is not None:
        assert batch[truncated_key].flatten().tolist() == [False, True, True, False, True]


@pytest.mark.parametrize("storage", [LazyTensorStorage, ListStorage, RaggedStorage])
def test_old_data_neither_enter_nor_leave(storage):
    now = [3]
    buffer = TensorDictReplayBuffer(
        storage=storage(100), transform=PolicyAgeFilter(lambda: now[0], max_policy_lag=1), batch_size=50
    )
    assert buffer.extend(versions(0, 2, 2, 3)).tolist() == [0, 1, 2]
    batch = buffer.sample()
    assert len(batch) == 50
    now[0] = 4
    batch = buffer.sample()
    assert 0 < len(batch) < 50
    assert set(batch["policy_version"].tolist()) == {3}
    assert set(batch["index"].tolist()) == {2}
    now[0] = 9
    assert len(buffer.sample()) == 0


def test_nothing_is_stored_where_nothing_is_left():
    buffer = ReplayBuffer(storage=LazyTensorStorage(100), transform=PolicyAgeFilter(5, 0))
    assert buffer.extend(versions(1, 2)).tolist() == []
    assert buffer.add(versions(1)[0]).tolist() == []
    assert buffer.extend_pieces([versions(1), versions(2)]).tolist() == []
    assert (len(buffer), buffer.write_count) == (0, 0)
    assert buffer.extend_pieces([versions(1), versions(5, 2)]).tolist() == [0]
    assert buffer.add(versions(5)[0]) == 1
    assert buffer.extend([versions(3)[0], versions(5)[0]]).tolist() == [2]


def test_an_element_of_several_frames_is_as_old_as_its_oldest():
    data = TensorDict({"policy_version": torch.tensor([[5, 5], [4, 5]])}, [2, 2])
    assert PolicyAgeFilter(5, 0)(data).batch_size == (1, 2)
    assert PolicyAgeFilter(5, 0)(TensorDict({"policy_version": torch.tensor([[5], [4]])}, [2])).batch_size == (1,)


@pytest.mark.parametrize("frames", [(), (3,)], ids=["one", "several"])
@pytest.mark.parametrize("now", [4, 9])
def test_what_the_sampler_returned_is_that_of_the_elements_that_are_left(frames, now):
    age = [0]
    keep = PolicyAgeFilter(lambda: age[0], 2)
    buffer = ReplayBuffer(
        storage=LazyTensorStorage(100),
        transform=Compose(keep),
        batch_size=30,
        sampler=PrioritizedSampler(100, 1.0, 1.0),
    )
    numbers = torch.arange(5).reshape(5, *[1] * len(frames)).expand(5, *frames)
    buffer.extend(TensorDict({"policy_version": numbers, "x": numbers}, [5, *frames]))
    age[0] = now
    batch, info = buffer.sample(return_info=True, include_info=True)
    assert len(batch) < 30
    assert torch.equal(info["index"], batch["x"].reshape(len(batch), -1)[:, 0] if len(batch) else torch.zeros(0).long())
    assert torch.equal(batch["index"], batch["x"])
    assert len(info["priority_weight"]) == len(batch)
    assert set(buffer.sample().keys()) == {"policy_version", "x"}


@pytest.mark.parametrize("chain", [Compose, lambda keep: Compose(Compose(keep), SignTransform(["obs"]))])
def test_in_a_chain_they_neither_enter_nor_leave(chain):
    buffer = ReplayBuffer(storage=LazyTensorStorage(100), transform=chain(PolicyAgeFilter(9, 1)), batch_size=50)
    assert buffer.extend(versions(7, 8, 9, 1)).tolist() == [0, 1]
    assert len(buffer.extend(versions(1, 2))) == 0
    assert buffer.extend(list(versions(8, 3))).tolist() == [2]
    assert len(buffer) == 3


@pytest.mark.parametrize("storage", [LazyTensorStorage, ListStorage, RaggedStorage])
def test_inverses_of_lists(storage):
    """A list of elements is changed on its way in as a batch is, of several lengths one by one."""
    shrink = ObservationNorm(0.0, 2.0, in_keys=["obs"], in_keys_inv=["obs"])
    buffer = ReplayBuffer(storage=storage(100), transform=shrink, batch_size=1)
    buffer.extend([TensorDict({"obs": torch.full((2,), float(i))}) for i in range(3)])
    assert [element["obs"].tolist() for element in buffer.storage] == [[0, 0], [0.5, 0.5], [1, 1]]
    if storage is not LazyTensorStorage:
        buffer.extend([TensorDict({"obs": torch.ones(1)}), TensorDict({"obs": torch.ones(2)})])
        assert [buffer.storage[i]["obs"].tolist() for i in (3, 4)] == [[0.5], [0.5, 0.5]]


def test_data_without_a_version():
    data = TensorDict({"obs": torch.arange(3)}, [3])
    with pytest.raises(KeyError, match=r"no entry 'policy_version'.*'obs'.*track_policy_version"):
        PolicyAgeFilter(1, 0, strict=True)(data)
    keep = PolicyAgeFilter(1, 0)
    with pytest.warns(UserWarning, match="let through"):
        assert keep(data) is data
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert keep.inv(data) is data
    with pytest.raises(TypeError, match="expected numbers"):
        keep(TensorDict({"policy_version": ["a", "b"]}, [2]))


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (("new", 1), TypeError, "current_version"),
        ((1, 0.5), TypeError, "max_policy_lag"),
        ((1, -1), ValueError, "max_policy_lag: expected an integer of at least 0"),
    ],
)
def test_ages_that_are_wrong(arguments, error, message):
    with pytest.raises(error, match=message):
        PolicyAgeFilter(*arguments)


def test_transforms_are_found_by_place():
    one, two, three = PolicyAgeFilter(1, 0), RewardClipping(-1.0, 1.0), SignTransform(["reward"])
    buffer = ReplayBuffer(storage=LazyTensorStorage(10), transform=one)
    buffer.append_transform(Compose(two, three))
    assert [part is expected for part, expected in zip(buffer.transform, (one, two, three), strict=True)] == [True] * 3
    assert ReplayBuffer().transform == ()


# Next observations --------------------------------------------------------------------------------


def trajectories(n: int = 40, length: int = 8) -> TensorDict:
    steps = torch.arange(n)
    return TensorDict(
        {
            "observation": torch.stack([steps, -steps], -1).float(),
            "collector": {"traj_ids": steps // length},
            "next": {"done": (steps % length == length - 1).unsqueeze(-1)},
        },
        [n],
    )


def test_slices_get_their_next_observations_back():
    buffer = TensorDictReplayBuffer(
        storage=LazyTensorStorage(100),
        sampler=SliceSampler(slice_len=4),
        batch_size=80,
        transform=NextStateReconstructor(),
    )
    buffer.extend(trajectories())
    batch = buffer.sample()
    known = ~batch["next", "observation"].isnan().any(-1)
    last = torch.cat([batch["is_init"].squeeze(-1)[1:], torch.tensor([True])])
    assert torch.equal(known, ~last)
    assert torch.equal(batch["next", "observation"][known], batch["observation"][known] + torch.tensor([1.0, -1.0]))


def test_padding_follows_no_step():
    """The last real step of a slice that was cut short knows no next observation: its padding repeats it."""
    buffer = ReplayBuffer(
        storage=LazyTensorStorage(20),
        sampler=SliceSampler(slice_len=4, pad_output=True),
        transform=NextStateReconstructor(done_key=None),
        batch_size=8,
    )
    ids = torch.tensor([0, 0, 1, 1, 1])
    buffer.extend(TensorDict({"observation": torch.arange(5.0), "collector": {"traj_ids": ids}}, [5]))
    batch = buffer.sample()
    following = torch.tensor([1.0, torch.nan, 3.0, 4.0, torch.nan])[batch["observation"].long()]
    following[~batch["collector", "mask"]] = torch.nan
    torch.testing.assert_close(batch["next", "observation"], following, equal_nan=True)


def test_each_mark_ends_a_trajectory():
    data = trajectories(6, 3)

    def next_of(**options) -> list[float]:
        found = NextStateReconstructor(fill_value=-9, **options)(data.clone())
        return found["next", "observation"][:, 0].tolist()

    assert next_of() == [1, 2, -9, 4, 5, -9]
    assert next_of(done_key=None) == next_of(traj_key=None) == [1, 2, -9, 4, 5, -9]
    assert next_of(traj_key=None, done_key=None) == [1, 2, 3, 4, 5, -9]
    data["count"] = torch.tensor([0, 1, 5, 6, 0, 1])
    assert next_of(traj_key=None, done_key=None, step_count_key="count") == [1, -9, 3, -9, 5, -9]


def test_several_entries_and_environments():
    data = torch.stack([trajectories(6, 3), trajectories(6, 6)])
    data["agent", "x"] = torch.arange(12).reshape(2, 6)
    out = NextStateReconstructor(["observation", ("agent", "x")], fill_value=-1)(data)
    assert out["next", "agent", "x"].tolist() == [[1, 2, -1, 4, 5, -1], [7, 8, 9, 10, 11, -1]]


def test_entries_that_are_missing():
    data = trajectories()
    with pytest.raises(KeyError, match=r"keys: there is no entry 'pixels'.*'observation'"):
        NextStateReconstructor("pixels")(data)
    with pytest.raises(KeyError, match=r"traj_key: there is no entry 'episode'.*traj_key=None.*strict=False"):
        NextStateReconstructor(traj_key="episode")(data)
    assert NextStateReconstructor(traj_key="episode", strict=False)(data)["next", "observation"].shape == (40, 2)
    with pytest.raises(ValueError, match="fill_value=0"):
        NextStateReconstructor(("collector", "traj_ids"))(data)
    with pytest.raises(ValueError, match="dimension of time"):
        NextStateReconstructor()(data[0])


# Sums of rewards ----------------------------------------------------------------------------------


def by_hand(reward: torch.Tensor, done: torch.Tensor, gamma: float) -> torch.Tensor:
    sums, total = torch.zeros_like(reward), 0.0
    for t in reversed(range(len(reward))):
        total = float(reward[t]) + gamma * total * float(not done[t])
        sums[t] = total
    return sums


def rewards(reward, done, **more) -> TensorDict:
    reward, done = torch.as_tensor(reward), torch.as_tensor(done)
    return TensorDict({"next": {"reward": reward, "done": done}, **more}, done.shape)


@pytest.mark.parametrize("n", [1, 2, 7, 64, 1000])
@pytest.mark.parametrize("gamma", [1.0, 0.9, 0.0])
def test_sums_are_those_of_a_loop(n, gamma):
    reward, done = torch.randn(n), torch.rand(n) < 0.1
    done[-1] = True
    data = rewards(reward, done)
    out = RewardToGo(gamma, out_keys="to_go").inv(data)
    assert torch.allclose(out["to_go"], by_hand(reward, done, gamma), atol=1e-5)
    assert torch.equal(out["next", "reward"], reward)
    assert "to_go" not in data.keys()  # noqa: SIM118
    done[-1] = False
    dense = DensifyReward(discount=gamma)(rewards(reward, done))["next", "reward"]
    assert torch.allclose(dense, by_hand(reward, done, gamma), atol=1e-5)


def test_environments_ids_and_trailing_dimensions_count():
    reward, done = torch.ones(2, 4, 1), torch.tensor([[0, 1, 0, 1], [0, 0, 0, 1]]).bool().unsqueeze(-1)
    data = TensorDict({"next": {"reward": reward, "done": done}}, [2, 4])
    assert RewardToGo().inv(data)["next", "reward"].squeeze(-1).tolist() == [[2, 1, 2, 1], [4, 3, 2, 1]]
    flat = rewards(
        torch.ones(4), torch.tensor([False, False, False, True]), collector={"traj_ids": torch.tensor([0, 0, 1, 1])}
    )
    assert RewardToGo().inv(flat)["next", "reward"].tolist() == [2, 1, 2, 1]
    counted = rewards(torch.tensor([1, 2]), torch.tensor([False, True]))
    assert RewardToGo().inv(counted)["next", "reward"].tolist() == [3.0, 2.0]


def test_what_lies_behind_an_end_has_no_influence():
    data = rewards(torch.tensor([1.0, 2.0, float("inf"), float("nan")]), torch.tensor([False, True, False, True]))
    assert RewardToGo().inv(data)["next", "reward"][:2].tolist() == [3.0, 2.0]


def test_a_buffer_writes_the_sums_and_draws_them_as_they_are():
    buffer = ReplayBuffer(storage=LazyTensorStorage(10), transform=RewardToGo(0.5), batch_size=4)
    buffer.extend(rewards(torch.ones(3), torch.tensor([False, False, True])))
    assert buffer[:]["next", "reward"].tolist() == [1.75, 1.5, 1.0]
    assert set(buffer.sample()["next", "reward"].tolist()) <= {1.75, 1.5, 1.0}


def test_sums_that_could_not_be_made():
    with pytest.raises(ValueError, match=r"end of a trajectory in each environment.*trajs_per_batch"):
        RewardToGo().inv(rewards(torch.ones(3), torch.zeros(3, dtype=torch.bool)))
    with pytest.raises(KeyError, match=r"reward \('next', 'other'\)"):
        RewardToGo(in_keys=[("next", "other")]).inv(rewards(torch.ones(1), torch.tensor([True])))
    with pytest.raises(KeyError, match=r"done_key.*\('next', 'ended'\)"):
        DensifyReward(done_key="ended")(rewards(torch.ones(1), torch.tensor([True])))
    with pytest.raises(ValueError, match="0 <= gamma <= 1"):
        RewardToGo(1.5)
    with pytest.raises(TypeError, match="discount: expected a number"):
        DensifyReward(discount="all")
    with pytest.raises(ValueError, match="out_keys: expected one for each"):
        RewardToGo(out_keys=["a", "b"])
    with pytest.raises(ValueError, match="dimension of time"):
        DensifyReward()(rewards(torch.ones(1), torch.tensor([True]))[0])


def test_sums_go_where_they_are_asked_to():
    out = DensifyReward(reward_key_out="dense")(rewards(torch.tensor([0.0, 3.0]), torch.tensor([False, True])))
    assert out["next", "dense"].tolist() == [3.0, 3.0]
    assert out["next", "reward"].tolist() == [0.0, 3.0]


def test_a_batch_that_is_locked_may_lose_elements():
    def collated(batch):
        return (torch.stack(batch) if isinstance(batch, list) else batch).lock_()

    now = [5]
    age = PolicyAgeFilter(lambda: now[0], max_policy_lag=1)
    buffer = ReplayBuffer(storage=LazyTensorStorage(10), transform=age, collate_fn=collated, batch_size=50)
    buffer.extend(TensorDict({"policy_version": torch.tensor([5, 4] * 5), "number": torch.arange(10)}, [10]))
    now[0] = 6
    batch, info = buffer.sample(return_info=True)
    assert set(batch["number"].tolist()) == {0, 2, 4, 6, 8}
    assert torch.equal(torch.as_tensor(info["index"]), batch["number"])
