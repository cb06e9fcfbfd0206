"""AsyncCollector: one worker that collects while the consumer trains."""

from __future__ import annotations

import pytest

from rollwright.collectors import AsyncCollector, MultiCollector
from rollwright.envs import GymEnv


def test_it_collects_in_one_worker():
    collector = AsyncCollector(lambda: GymEnv("CartPole-v1"), frames_per_batch=20, total_frames=60)
    try:
        assert isinstance(collector, MultiCollector)
        assert [batch.shape for batch in collector] == [(20,)] * 3
        assert len(collector.stats()["workers"]) == 1
    finally:
        collector.shutdown()


@pytest.mark.parametrize(
    ("env", "options"), [("CartPole-v1", {"num_workers": 2}), (["CartPole-v1", "CartPole-v1"], {})]
)
def test_several_workers_are_refused(env, options):
    with pytest.raises(ValueError, match=r"num_workers: AsyncCollector has one worker|each of the 1 workers, got 2"):
        AsyncCollector(env, frames_per_batch=20, **options)
