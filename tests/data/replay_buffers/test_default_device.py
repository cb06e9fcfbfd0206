"""Buffers of the CPU while torch's default device is another one: ``meta``, whose tensors hold no numbers."""

from __future__ import annotations

import pytest
import torch
from tensordict import TensorDict
from tests.variants import in_turn

from rollwright.data import (
    ConsumingSampler,
    LazyMemmapStorage,
    LazyTensorStorage,
    ListStorage,
    PrioritizedSampler,
    PrioritizedSliceSampler,
    RaggedStorage,
    RandomSampler,
    ReplayBufferEnsemble,
    RoundRobinWriter,
    SamplerWithoutReplacement,
    SliceSampler,
    SliceSamplerWithoutReplacement,
    StalenessAwareSampler,
    TensorDictMaxValueWriter,
    TensorDictReplayBuffer,
)

STORAGES = {
    "tensors": lambda: LazyTensorStorage(60),
    "mapped": lambda: LazyMemmapStorage(60),
    "list": lambda: ListStorage(60),
    "ragged": lambda: RaggedStorage(60),
    "rows of two": lambda: LazyTensorStorage(60, ndim=2),
}
TRUNCATED = ("next", "truncated")
SAMPLERS = {
    "random": RandomSampler,
    "without replacement": SamplerWithoutReplacement,
    "consuming": lambda: ConsumingSampler(3),
    "prioritized": lambda: PrioritizedSampler(60, 0.7, 0.5),
    "staleness": lambda: StalenessAwareSampler(version_key="version"),
    "slices": lambda: SliceSampler(slice_len=3, truncated_key=TRUNCATED),
    "padded": lambda: SliceSampler(slice_len=6, pad_output=True, span=True),
    "slices without replacement": lambda: SliceSamplerWithoutReplacement(slice_len=3),
    "prioritized slices": lambda: PrioritizedSliceSampler(60, 0.7, 0.5, slice_len=3),
}


@pytest.fixture(autouse=True)
def _default_device():
    torch.set_default_device("meta")
    yield
    torch.set_default_device(None)


def frames(n: int = 24) -> TensorDict:
    with torch.device("cpu"):
        flags = {name: torch.zeros(n, 1, dtype=torch.bool) for name in ("done", "terminated", "truncated")}
        data = {
            "obs": torch.arange(float(n)),
            "version": torch.arange(n),
            "collector": {"traj_ids": torch.arange(n) // 6},
            "next": {"reward": torch.arange(float(n))[:, None], **flags},
        }
        return TensorDict(data, [n])


def check(batch) -> None:
    for key, value in batch.items(True, True):
        assert value.device.type == "cpu", key


@pytest.mark.parametrize(("sampler", "storage"), in_turn(SAMPLERS, list(STORAGES)))
def test_batches_lie_on_the_cpu(storage, sampler, tmp_path):
    buffer = TensorDictReplayBuffer(
        storage=STORAGES[storage](),
        sampler=SAMPLERS[sampler](),
        writer=RoundRobinWriter(track_generations=True),
        batch_size=12,
    )
    is_flat, data = buffer.storage.ndim == 1, frames()
    buffer.extend(data if is_flat else data.reshape(4, 6))
    buffer.add(data[0] if is_flat else data[:4].reshape(4))
    for _ in range(2):
        batch = buffer.sample()
        check(batch)
    batch["td_error"] = torch.ones(len(batch), device="cpu")
    buffer.update_tensordict_priority(batch)
    buffer.update_priority(batch["index"], 2.0)
    buffer.mark_update(batch["index"])
    for index in (slice(3), 0, [0, 1]) if is_flat else ():
        check(buffer[index])
    if storage in ("tensors", "mapped"):
        buffer.set_at_("obs", 1.0, [1])
        patch, generation = {"obs": [0.0] * len(batch)}, batch["index_generation"]
        buffer.update_if_present(index=batch["index"], generation=generation, patch=patch)
    buffer.load_state_dict(buffer.state_dict())
    buffer.dumps(tmp_path / "dump")
    buffer.loads(tmp_path / "dump")
    check(buffer.sample())
    buffer.empty()


def test_writers_that_rank_and_buffers_that_others_share():
    ranked = TensorDictReplayBuffer(
        storage=LazyTensorStorage(10), writer=TensorDictMaxValueWriter(("next", "reward")), batch_size=4
    )
    assert ranked.extend(frames()).device.type == "cpu"
    check(ranked.sample())
    shared = TensorDictReplayBuffer(storage=LazyTensorStorage(60), batch_size=4, shared=True)
    shared.extend(frames())
    check(shared.sample())


@pytest.mark.parametrize("options", [{"p": [0.25, 0.75]}, {"num_buffer_sampled": 3}, {"sample_from_all": True}])
def test_ensembles(options):
    members = [TensorDictReplayBuffer(storage=LazyTensorStorage(60)) for _ in range(2)]
    for member in members:
        member.extend(frames())
    check(ReplayBufferEnsemble(*members, batch_size=12, **options).sample())


def test_services():
    buffer = TensorDictReplayBuffer(
        storage=lambda: LazyTensorStorage(60),
        sampler=lambda: PrioritizedSampler(60, 0.7, 0.5),
        batch_size=6,
        service_backend="process",
    )
    buffer.extend(frames())
    batch = buffer.sample()
    check(batch)
    buffer.update_priority(batch["index"], 1.0)
    buffer.shutdown()
