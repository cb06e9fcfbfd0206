"""What ``rollwright inspect --check`` finds: nothing in what a collector delivers; the first frame of what is wrong."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from rollwright.cli.reading import checks
from rollwright.cli.reading.checks import check_frames
from rollwright.collectors import Collector
from rollwright.data.datasets import load_dataset
from rollwright.data.layout import split_trajectories, trajectories
from rollwright.data.postprocs import MultiStep
from rollwright.envs import GymEnv, TransformedEnv
from rollwright.envs.transforms import Compose, InitTracker, StepCounter


def collect(batches=2, num_envs=3, before_each=lambda collector: None, **options):
    """Batches one behind the other along time, ``[3, 60 * batches]``."""
    torch.manual_seed(0)

    def make():
        return TransformedEnv(GymEnv("CartPole-v1", num_envs=num_envs), Compose(InitTracker(), StepCounter()))

    found = []
    with Collector(make, frames_per_batch=60 * num_envs, **options) as collector:
        collector.set_seed(0)
        for _ in range(batches):
            before_each(collector)
            found.append(collector.next().clone())
    return torch.cat(found, -1)


@pytest.fixture(scope="module")
def collected():
    return collect()


@pytest.fixture
def frames(collected):
    return collected.clone()


def inside(frames, row=1):
    """A time in the middle of a trajectory of a row, and the time of a trajectory's first frame, both after 5."""
    runs = trajectories(frames[row]).runs
    later = [(start, length) for start, length in zip(runs.starts.tolist(), runs.lengths.tolist(), strict=True)]
    start, length = next((s, n) for s, n in later if s > 5 and n > 8)
    return start + length // 2, start


def said(findings):
    return [str(finding) for finding in findings]


# What is right.


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"compact_obs": True},
        {"set_truncated": True},
        {"max_frames_per_traj": 7},
        {"track_policy_version": True},
        {"track_traj_ids": False},
    ],
    ids=str,
)
def test_nothing_is_wrong_with_what_a_collector_delivers(options):
    if "max_frames_per_traj" in options:  # it counts steps itself
        torch.manual_seed(0)
        with Collector(lambda: GymEnv("CartPole-v1", num_envs=3), frames_per_batch=180, **options) as collector:
            batch = collector.next()
    else:
        batch = collect(**options) if "compact_obs" not in options else collect(batches=1, **options)
    assert batch["next", "done"].any()
    assert check_frames(batch) == []


def test_what_is_left_unfinished_is_noted():
    frames = collect(before_each=lambda collector: collector.reset())
    (finding,) = check_frames(frames)
    assert not finding.is_error
    assert finding.frame[1] == 59
    assert 1 <= finding.num_frames <= 3
    assert str(finding).startswith("a trajectory was left unfinished (no done): first at frame [")


def test_padding_and_frames_that_were_not_taken_are_left_aside(frames):
    assert [finding.text for finding in check_frames(split_trajectories(frames)) if finding.is_error] == []
    frames[:, 100:].zero_()
    frames["collector", "traj_ids"][:, 100:] = -1
    assert check_frames(frames) == []


def test_sums_over_several_steps_are_not_compared_with_what_follows(frames):
    rewritten = MultiStep(0.9, 3)(frames)
    assert check_frames(rewritten) == []
    rewritten["step_count"][1, 3] = 77
    assert [finding.frame for finding in check_frames(rewritten)] == [(1, 3)]


# What is wrong.

IS_INIT, COUNT = "is_init", "step_count"
BREAKS = {
    "next.done is not next.terminated | next.truncated": (
        lambda frames, t, _: frames["next", "truncated"][1, t].fill_(True),
        lambda t, first: (1, t),
    ),
    "a trajectory goes on after a frame that is done": (
        lambda frames, t, _: [frames["next", name][1, t].fill_(True) for name in ("done", "terminated")],
        lambda t, first: (1, t),
    ),
    "('next', 'observation') is not observation of the frame that follows": (
        lambda frames, t, _: frames["next", "observation"][1, t, 2].add_(1),
        lambda t, first: (1, t),
    ),
    "is_init is set inside a trajectory": (
        lambda frames, t, _: frames[IS_INIT][1, t].fill_(True),
        lambda t, first: (1, t),
    ),
    "is_init is not set at the first step of a trajectory": (
        lambda frames, _, first: frames[IS_INIT][1, first].fill_(False),
        lambda t, first: (1, first),
    ),
    "step_count does not go up by 1 inside a trajectory": (
        lambda frames, t, _: frames[COUNT][1, t].add_(5),
        lambda t, first: (1, t),
    ),
    "step_count is not 0 at the first step of a trajectory": (
        lambda frames, _, first: frames[COUNT][1, first].add_(5),
        lambda t, first: (1, first),
    ),
    "a trajectory id comes back after other trajectories, or in two environments": (
        lambda frames, _, first: frames["collector", "traj_ids"][1, first:].copy_(
            frames["collector", "traj_ids"][1, first:].masked_fill(
                frames["collector", "traj_ids"][1, first:] == frames["collector", "traj_ids"][1, first],
                frames["collector", "traj_ids"][0, 0],
            )
        ),
        lambda t, first: (1, first),
    ),
}


@pytest.mark.parametrize("pieces", [None, 3])
@pytest.mark.parametrize("text", list(BREAKS))
def test_the_first_frame_of_what_is_wrong_is_named(frames, text, pieces, monkeypatch):
    if pieces:  # of a few frames each
        monkeypatch.setattr(checks, "_PIECE_BYTES", 3 * pieces * 100)
    t, first = inside(frames)
    do, expected = BREAKS[text]
    do(frames, t, first)
    found = {finding.text: finding for finding in check_frames(frames)}
    assert found[text].frame == expected(t, first)
    assert found[text].is_error
    assert str(found[text]) == f"{text}: first at frame {list(expected(t, first))}, {found[text].num_frames} in all"


@pytest.mark.parametrize("num_bytes", [1, 700, 5_000, 10**9])
def test_pieces_find_what_the_whole_does(frames, num_bytes, monkeypatch):
    whole = []
    for do, _ in BREAKS.values():
        do(frames, *inside(frames))
    for size in (10**9, num_bytes):
        monkeypatch.setattr(checks, "_PIECE_BYTES", size)
        whole.append(said(check_frames(frames)))
    assert len(whole[0]) >= 6
    assert whole[0] == whole[1]


@pytest.mark.parametrize("num_bytes", [1, 700, 10**9])
def test_every_frame_is_counted_once(frames, num_bytes, monkeypatch):
    monkeypatch.setattr(checks, "_PIECE_BYTES", num_bytes)
    frames["next", "truncated"].logical_not_()
    (finding,) = [finding for finding in check_frames(frames) if "done is not" in finding.text]
    assert finding.num_frames + int(frames["next", "done"].sum()) == frames.numel()


def test_the_version_that_acted_may_change_from_step_to_step(frames):
    version = torch.arange(120).repeat(3, 1) // 7
    frames["policy_version"] = frames["next", "policy_version"] = version
    assert check_frames(frames) == []


def test_missing_frames_are_found(frames):
    t, _ = inside(frames)
    gap = torch.cat([frames[1, :t], frames[1, t + 1 :]])
    texts = {finding.text: finding.frame for finding in check_frames(gap)}
    assert texts["('next', 'observation') is not observation of the frame that follows"] == (t - 1,)
    assert texts["step_count does not go up by 1 inside a trajectory"] == (t,)


def test_doubled_frames_are_found(frames):
    t, _ = inside(frames)
    doubled = torch.cat([frames[1, : t + 1], frames[1, t:]])
    assert {finding.frame for finding in check_frames(doubled)} == {(t,), (t + 1,)}


def test_interleaved_writers_are_found(frames):
    """Two environments' frames, ten of one and ten of the other, in one row."""
    mixed = frames[:2].unflatten(1, (-1, 10)).transpose(0, 1).reshape(-1)
    texts = [finding.text for finding in check_frames(mixed)]
    assert "a trajectory id comes back after other trajectories, or in two environments" in texts


def test_not_a_number_is_itself(frames):
    t, _ = inside(frames)
    frames["observation"][1, t] = torch.nan
    frames["next", "observation"][1, t - 1] = torch.nan
    assert check_frames(frames) == []


def test_flags_of_agents():
    done = torch.zeros(4, 2, 1, dtype=torch.bool)
    agents = TensorDict({"done": done, "terminated": done.clone(), "truncated": done.clone()}, [4, 2])
    frames = TensorDict({"next": {"agents": agents}}, [4])
    assert check_frames(frames) == []
    agents["truncated"][2, 1] = True
    assert said(check_frames(frames)) == [
        "next.agents.done is not next.agents.terminated | next.agents.truncated: first at frame [2], 1 in all"
    ]


# A ring buffer.


def test_rows_in_the_order_of_a_ring(frames):
    """The oldest frames were overwritten, and the newest are in front."""
    flat = frames[1]
    ring = torch.cat([flat[83:100], flat[17:83]])
    order = np.concatenate([np.arange(17, 83), np.arange(17)])
    assert check_frames(ring, order) == []
    assert check_frames(ring) != []
    ring["step_count"][4] = 0
    assert 4 in [finding.frame[0] for finding in check_frames(ring, order)]


def test_trajectories_whose_heads_were_overwritten(frames):
    runs = trajectories(frames[1]).runs
    first = int(runs.starts[1])
    cut = torch.cat([frames[1, :first], frames[1, first + 2 :]])
    assert len(check_frames(cut)) == 2
    assert check_frames(cut, has_heads=False) == []


# What cannot be tested.


def test_frames_that_nothing_tells_apart():
    with pytest.raises(ValueError, match=r"expected .*traj_ids.* or \('next', 'done'\)"):
        check_frames(TensorDict({"x": torch.zeros(3)}, [3]))
    with pytest.raises(ValueError, match=r"got batch size \[\]"):
        check_frames(TensorDict({"x": torch.zeros(3)}))
    nested = split_trajectories(
        TensorDict({"next": {"done": torch.tensor([[True], [False], [False]])}}, [3]), as_nested=True
    )
    with pytest.raises(ValueError, match=r"got batch size \[2, -1\]"):
        check_frames(nested)


def test_no_frames_at_all(frames):
    assert check_frames(frames[:, :0]) == []
    assert check_frames(frames[:, :1]) == []


# The command.


@pytest.fixture
def dataset(run, tmp_path):
    out = tmp_path / "out"
    assert run("collect", "CartPole-v1", "--frames", 600, "--num-envs", 3, "--seed", 0, "--output", out).status == 0
    return out


def test_a_dataset_passes(run, dataset):
    result = run("inspect", dataset, "--check")
    assert (result.status, result.err) == (0, "")
    assert result.out.splitlines()[-1] == "check      passed"
    assert json.loads(run("inspect", dataset, "--check", "--json").out)["findings"] == []
    assert "findings" not in json.loads(run("inspect", dataset, "--json").out)


def test_a_damaged_dataset_fails(run, dataset):
    load_dataset(dataset)["next", "observation"][2, 10] += 1.0
    result = run("inspect", dataset, "--check")
    assert (result.status, result.err) == (1, "")
    text = "('next', 'observation') is not observation of the frame that follows"
    assert result.out.splitlines()[-2:] == [
        "check      FAILED",
        f"  error: {text}: first at frame [2, 10], 1 in all",
    ]
    result = run("inspect", dataset, "--check", "--json")
    assert result.status == 1
    (finding,) = json.loads(result.out)["findings"]
    assert (finding["frame"], finding["num_frames"], finding["is_error"]) == ([2, 10], 1, True)
    assert run("inspect", dataset).status == 0


def test_a_note_is_no_failure(run, tmp_path):
    torch.save(collect(before_each=lambda collector: collector.reset()), tmp_path / "frames.pt")
    result = run("inspect", tmp_path / "frames.pt", "--check")
    assert result.status == 0
    assert "check      passed\n  note: a trajectory was left unfinished" in result.out


def test_frames_that_cannot_be_tested(run, tmp_path):
    torch.save(TensorDict({"x": torch.zeros(3)}, [3]), tmp_path / "frames.pt")
    result = run("inspect", tmp_path / "frames.pt", "--check")
    assert result.status == 1
    assert "--check: frames: expected ('collector', 'traj_ids') or ('next', 'done')" in result.err
