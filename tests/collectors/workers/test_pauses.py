"""What is called inside a pause: nothing is written for it, and all workers answer where they rest."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
from tests.collectors.workers.envs import gain, makers
from tests.collectors.workers.frames import check
from tests.collectors.workers.processes import wait_until
from tests.patience import patient

from rollwright.collectors.workers.counters import Count

KINDS = ["sync", "async"]
WRITTEN = "replay_buffer.write_count"


def beats(collector):
    return [worker.counters.counts[Count.BEAT] for worker in collector._group.workers]


@pytest.fixture
def in_a_rollout(make, buffer):
    """``in_a_rollout(kind)``: a collector that runs, all workers in the middle of a second rollout, and its buffer."""

    def build(kind, **options):
        rb = buffer(400_000)
        size = 200_000 if kind == "sync" else 100_000
        collector = make(kind, makers(), gain(), frames_per_batch=size, replay_buffer=rb, **options)
        collector.start()
        assert wait_until(lambda: min(beats(collector)) > 20)
        return collector, rb

    return build


@pytest.mark.parametrize("kind", KINDS)
def test_workers_answer_where_they_rest(in_a_rollout, kind):
    collector, rb = in_a_rollout(kind)
    with collector.pause():
        steps = beats(collector)
        assert collector.map_fn("get_distant_attr", [(WRITTEN,)] * 2) == [0, 0]
        assert collector.get_distant_attr(WRITTEN) == [0, 0]
        assert collector.cascade_execute("env.rand_action") is not None
        assert [found["frames"] for found in collector.map_fn("stats")] == [0, 0]
        assert collector.stats()["workers"][1]["frames"] == 0
        assert collector.update_policy_weights_(gain(2.0)) == 1
        collector.pre_collect_hook = print
        collector.pre_collect_hook = None
        with collector.pause():  # the inner one ends, and the outer one goes on
            pass
        assert collector.map_fn("get_distant_attr", [("worker_idx",)] * 2) == [0, 1]
        assert beats(collector) == steps
        assert rb.write_count == 0
    assert wait_until(lambda: min(map(int.__sub__, beats(collector), steps)) > 20)
    collector.async_shutdown()
    found = check(rb[:])
    assert found.gaps == 0
    assert found.frames == rb.write_count >= sum(steps)


@pytest.mark.parametrize("kind", KINDS)
def test_what_has_to_wait_for_the_end_of_a_rollout_is_refused(in_a_rollout, kind):
    collector, rb = in_a_rollout(kind)
    with collector.pause():
        for method in ("reset", "state_dict", "next", "rollout"):
            with pytest.raises(RuntimeError, match=rf"worker 0.*{method} has to wait.*after the pause"):
                collector.map_fn(method)
        with pytest.raises(RuntimeError, match="set_seed has to wait"):
            collector.map_fn("set_seed", [(1,), (2,)])
        assert rb.write_count == 0
        assert "worker1" in collector.state_dict()  # itself, it ends the rollouts
        assert rb.write_count == sum(beats(collector))
        count = rb.write_count
        assert collector.map_fn("get_distant_attr", [(WRITTEN,)] * 2) == [count, count]
        with pytest.raises(RuntimeError, match="rollout has to wait"):
            collector.map_fn("rollout")
        assert rb.write_count == count
    assert len(collector.map_fn("state_dict")) == 2
    collector.async_shutdown()
    assert check(rb[:]).gaps == 0


def test_a_pause_ends_in_whichever_thread_leaves_it(make):
    """As the garbage collector does with a block that was entered and never left."""
    collector = make("sync", makers(), gain(), frames_per_batch=20)
    collector.next()
    pause = collector.pause()
    pause.__enter__()
    with ThreadPoolExecutor(1) as pool:
        pool.submit(pause.__exit__, None, None, None).result(patient(10.0))
    collector.next()
    collector.set_seed(1)  # which is an error inside a pause
