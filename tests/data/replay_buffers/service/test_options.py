"""What programs ask of a buffer is asked of one in a service, too."""

from __future__ import annotations

from functools import partial

import torch
from tensordict import TensorDict

from rollwright.data import LazyTensorStorage, ReplayBuffer, RoundRobinWriter, TensorDictPrioritizedReplayBuffer


def frames(n: int, start: int = 0) -> TensorDict:
    return TensorDict({"obs": torch.arange(start, start + n), "value": torch.zeros(n)}, [n])


def plus_one(data):
    return data.set("obs", data["obs"] + 1)


def test_structures_come_back_as_they_were(serve):
    buffer = serve(ReplayBuffer, storage=partial(LazyTensorStorage, 10), batch_size=4)
    buffer.extend({"obs": torch.arange(6), "next": (torch.arange(6),)})
    buffer.add({"obs": torch.tensor(6), "next": (torch.tensor(6),)})
    batch = buffer.sample()
    assert torch.equal(batch["obs"], batch["next"][0])
    assert buffer[6]["next"] == (torch.tensor(6),)
    assert len(buffer) == 7


def test_the_options_of_writing_and_sampling_arrive(serve):
    buffer = serve(
        TensorDictPrioritizedReplayBuffer, alpha=1.0, beta=1.0, storage=partial(LazyTensorStorage, 10), batch_size=64
    )
    buffer.append_transform(plus_one, invert=True)
    buffer.extend(frames(4).set("td_error", torch.tensor([0.0, 0.0, 1.0, 0.0])), update_priority=False)
    batch = buffer.sample(include_info=False)
    assert set(batch["obs"].tolist()) == {1, 2, 3, 4}
    assert "index" not in batch.keys()  # noqa: SIM118
    buffer.empty(empty_write_count=True)
    assert (len(buffer), buffer.write_count) == (0, 0)


def test_elements_that_were_overwritten_stay(serve):
    buffer = serve(
        TensorDictPrioritizedReplayBuffer,
        alpha=1.0,
        beta=1.0,
        eps=1e-12,
        storage=partial(LazyTensorStorage, 4),
        writer=partial(RoundRobinWriter, track_generations=True),
        batch_size=32,
    )
    buffer.extend(frames(4))
    batch = buffer.sample()
    buffer.extend(frames(2, 4))
    result = buffer.update_if_present(
        index=batch["index"], generation=batch["index_generation"], patch={"value": torch.ones(32)}
    )
    assert torch.equal(result.updated, batch["index"] >= 2)
    buffer.update_tensordict_priority(batch.set("td_error", torch.zeros(32)))
    assert set(buffer.sample()["obs"].tolist()) == {4, 5}


def test_each_element_is_drawn_once(serve):
    buffer = serve(ReplayBuffer, storage=partial(LazyTensorStorage, 10), batch_size=3, consume_after_n_samples=1)
    buffer.extend(frames(7))
    assert sorted(torch.cat([batch["obs"] for batch in buffer]).tolist()) == list(range(7))
    assert len(buffer) == 0
