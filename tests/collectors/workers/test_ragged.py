"""Text, ragged tensors and tensorclass entries from workers: the same frames as from one process."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from tensordict import LazyStackedTensorDict
from tests.collectors.dialogs import Answers, Dialog, Words, frames_of

from rollwright.collectors import Collector, MultiSyncCollector
from rollwright.data import LazyTensorStorage, ReplayBuffer

T, ROWS = 6, 2
ENVS = [partial(Dialog, (ROWS,), messages=True, first_row=first) for first in (0, ROWS)]


def policy():
    return Answers("new", messages=True)


def alone(env, batches, **options):
    """Frames of each batch of a collector in this process, without the ids of their trajectories."""
    collector = Collector(env, policy(), frames_per_batch=T * ROWS, total_frames=T * ROWS * batches, **options)
    try:
        return [plain(batch) for batch in collector]
    finally:
        collector.shutdown()


def plain(batch):
    return [{key: value for key, value in frame.items() if key != "collector"} for frame in frames_of(batch)]


@pytest.mark.parametrize("join", ["stack", 0, -1])
def test_a_batch_of_all_workers_holds_the_frames_of_one_process(make, join):
    collector = make("sync", ENVS, policy(), frames_per_batch=2 * T * ROWS, total_frames=4 * T * ROWS, cat_results=join)
    expected = [alone(env, 2) for env in ENVS]
    shape = {"stack": (2, ROWS, T), 0: (2 * ROWS, T), -1: (ROWS, 2 * T)}[join]
    for number, batch in enumerate(collector):
        assert isinstance(batch, LazyStackedTensorDict)
        assert batch.shape == shape
        assert batch.names[-1] == "time"
        parts = {"stack": batch.unbind, 0: partial(batch.split, ROWS), -1: partial(batch.split, T)}[join]
        for part, own in zip(parts(0 if join != -1 else -1), expected, strict=True):
            assert plain(part) == own[number]
        assert isinstance(batch["message"], Words)
        ids = torch.stack([frame["collector", "traj_ids"] for frame in batch.reshape(-1).unbind(0)])
        assert int(ids.min()) >= 0
    assert number == 1


def test_batches_of_single_workers(make):
    collector = make("async", ENVS, policy(), frames_per_batch=T * ROWS, total_frames=6 * T * ROWS)
    found = [plain(batch) for batch in collector]
    assert len(found) == 6
    for env in ENVS:
        rows = [batch for batch in found if batch[0]["text"].split()[1] == alone(env, 1)[0][0]["text"].split()[1]]
        assert rows == alone(env, len(rows))


@pytest.mark.parametrize("form", ["cat", "padded"])
def test_whole_trajectories(make, form):
    collector = make(
        "sync",
        ENVS,
        policy(),
        frames_per_batch=2 * T * ROWS,
        total_frames=4 * T * ROWS,
        trajs_per_batch=3,
        traj_format=form,
    )
    count = 0
    for batch in collector:
        real = batch[batch["collector", "mask"]] if form == "padded" else batch
        for frame in plain(real):
            assert frame["answer"] == frame["text"].upper()
            assert frame["answer_tokens"] == frame["tokens"] * 2
            assert frame["next"]["message"][1] == frame["next"]["text"]
        assert sum(frame["next"]["done"][0] for frame in plain(real)) == 3
        count += 1
    assert count >= 3


def test_a_saved_state_holds_ragged_records(make):
    def build():
        return make("sync", ENVS, policy(), frames_per_batch=2 * T * ROWS, total_frames=-1, trajs_per_batch=2)

    collector = build()
    collector.next()
    with pytest.warns(UserWarning, match=r"not all can be saved, .*worker1: policy \(Answers\)"):  # of no module
        state = collector.state_dict()
    expected = [frames_of(batch) for batch in (collector.next(), collector.next())]
    other = build()
    other.load_state_dict(state)
    assert [frames_of(batch) for batch in (other.next(), other.next())] == expected


def test_text_for_a_shared_buffer_of_tensors_is_an_error_that_names_it():
    buffer = ReplayBuffer(storage=LazyTensorStorage(100), shared=True)
    with pytest.raises(Exception, match=r"tensors only.*'text'.*'next', 'text'"):
        MultiSyncCollector(ENVS, policy(), frames_per_batch=2 * T * ROWS, total_frames=48, replay_buffer=buffer)
