"""The end of many workers, from every state: bounded, more than once, and nothing is left."""

from __future__ import annotations

import gc
import os
import re
import shutil
import signal
import tempfile
import threading
import time
import weakref
from functools import partial

import pytest
from tests.collectors.workers import processes
from tests.collectors.workers.envs import Trouble, broken, failing, gain, makers, one_bad, tally
from tests.collectors.workers.processes import burn, gone, heard, wait_until
from tests.patience import patient
from tests.variants import in_turn, one_quick

from rollwright._processes.channel import ByValue
from rollwright.collectors.workers import messages
from rollwright.data import LazyTensorStorage, ReplayBuffer
from rollwright.errors import WorkerError

BOUND_S = 6.0  # of a shutdown that has nobody to kill, on a busy machine
pytestmark = pytest.mark.filterwarnings("ignore:.*It is replaced:RuntimeWarning")
KINDS = ["sync", "async"]


def pids(collector):
    return [worker["pid"] for worker in collector.stats()["workers"]]


def a_buffer():
    return ReplayBuffer(storage=LazyTensorStorage(100_000), shared=True)


def run(collector):
    for _ in range(1000):
        collector.next()


def until_failure(collector):
    with pytest.raises(WorkerError):
        run(collector)


# States ------------------------------------------------------------------------------------------------------------
# Each takes ``make`` and a kind, and returns a collector in that state.


def new(make, kind):
    return make(kind, makers(), gain(), frames_per_batch=20)


def in_the_middle(make, kind):
    collector = new(make, kind)
    for _ in collector:
        break
    return collector


def iterator_held(make, kind):
    collector = new(make, kind)
    collector.held = iter(collector)
    next(collector.held)
    return collector


def completed(make, kind):
    collector = make(kind, makers(), gain(), frames_per_batch=20, total_frames=60)
    list(collector)
    return collector


def full_queue(make, kind):
    collector = in_the_middle(make, kind)
    wait_until(lambda: all(worker["waiting_for"] for worker in collector.stats()["workers"]), 3.0)
    return collector


def batches_held(make, kind):
    collector = new(make, kind)
    collector.held = [collector.next() for _ in range(5)]
    return collector


def started(make, kind):
    collector = make(kind, makers(), gain(), frames_per_batch=20, replay_buffer=a_buffer())
    collector.start()
    return collector


def started_and_finished(make, kind):
    collector = make(kind, makers(), gain(), frames_per_batch=20, replay_buffer=a_buffer(), total_frames=40)
    collector.start()
    assert wait_until(lambda: collector.stats()["completed"])
    return collector


def paused(make, kind):
    collector = started(make, kind)
    collector.held = collector.pause()
    collector.held.__enter__()
    return collector


def pause_failed(make, kind):
    collector = started(make, kind)
    with pytest.raises(KeyError), collector.pause():
        raise KeyError("in the body")
    return collector


def env_raised(make, kind):
    collector = make(kind, one_bad(troubles={"trouble": Trouble("raise", 30)}), gain(), frames_per_batch=20)
    until_failure(collector)
    return collector


def policy_raised(make, kind):
    collector = make(kind, makers(), failing(Trouble("raise", 30)), frames_per_batch=20)
    until_failure(collector)
    return collector


def hook_raised(make, kind):
    collector = make(kind, makers(), gain(), frames_per_batch=20, pre_collect_hook=broken)
    with pytest.raises(LookupError):
        collector.next()
    return collector


def worker_killed(make, kind):
    collector = in_the_middle(make, kind)
    burn(pids(collector)[0])
    until_failure(collector)
    return collector


def all_killed_unseen(make, kind):
    collector = in_the_middle(make, kind)
    for pid in pids(collector):
        burn(pid)
    return collector


def killed_in_background_unseen(make, kind):
    collector = started(make, kind)
    burn(pids(collector)[1])
    return collector


def being_restarted(make, kind):
    options = {"on_worker_failure": "restart", "restart_delay": 30.0, "replay_buffer": a_buffer()}
    collector = make(kind, makers(), gain(), frames_per_batch=20, **options)
    collector.start()
    burn(pids(collector)[0])
    wait_until(lambda: collector.stats()["workers_alive"] < 2)
    return collector


def after_commands(make, kind):
    collector = in_the_middle(make, kind)
    collector.state_dict()
    collector.update_policy_weights_(gain(2.0))
    collector.get_distant_attr("env.batch_size")
    return collector


def exception_in_the_loop(make, kind):
    collector = new(make, kind)
    with pytest.raises(ZeroDivisionError), collector:
        1 / len(next(iter(collector))["action"][:0])
    return collector


def after_reset(make, kind):
    collector = in_the_middle(make, kind)
    collector.reset()
    collector.set_seed(3)
    return collector


def profiling(make, kind):
    collector = new(make, kind)
    folder = tempfile.mkdtemp()
    weakref.finalize(collector, shutil.rmtree, folder)
    collector.enable_profile(num_rollouts=50, activities=["cpu"], save_path=f"{folder}/trace.json")
    collector.next()
    return collector


STATES = [
    new,
    in_the_middle,
    iterator_held,
    completed,
    full_queue,
    batches_held,
    started,
    started_and_finished,
    paused,
    pause_failed,
    env_raised,
    policy_raised,
    hook_raised,
    worker_killed,
    all_killed_unseen,
    killed_in_background_unseen,
    being_restarted,
    after_commands,
    exception_in_the_loop,
    after_reset,
    profiling,
]


@pytest.mark.parametrize(("state", "kind"), in_turn(STATES, KINDS))
def test_shutdown_from_every_state(make, state, kind):
    collector = state(make, kind)
    running = [pid for pid in pids(collector) if pid]
    begun = time.monotonic()
    error = heard(collector.shutdown, WorkerError)
    assert error is None or state in (all_killed_unseen, killed_in_background_unseen)  # what nobody has heard yet
    assert time.monotonic() - begun < patient(BOUND_S)
    assert gone(running, 1.0)
    assert processes.left_behind(1.0) == []
    collector.shutdown()
    collector.async_shutdown(timeout=0.5)
    assert collector.stats()["workers_alive"] == 0
    with pytest.raises(RuntimeError):
        collector.next()


# Stuck workers -----------------------------------------------------------------------------------------------------


def stuck(make, kind, struck, *, policy=None, **options):
    """A collector that collects in the background, and has a worker that is stuck."""
    envs = makers() if policy is not None else one_bad(troubles={"trouble": Trouble("sleep", 25, struck)})
    if "envs" in options:
        envs = options.pop("envs")
    policy = gain() if policy is None else policy
    collector = make(kind, envs, policy, frames_per_batch=20, replay_buffer=a_buffer(), **options)
    collector.start()
    assert wait_until(lambda: os.path.exists(struck))
    return collector


STUCK = {
    "in a step": lambda struck: {},
    "in a reset": lambda struck: {"envs": one_bad(troubles={"on_reset": Trouble("sleep", 4, struck)})},
    "in the policy": lambda struck: {"policy": failing(Trouble("sleep", 25, struck))},
    "stopped": lambda struck: {"envs": one_bad(troubles={"trouble": Trouble("stop", 25, struck)})},
}


def test_shutdown_when_nobody_reads_what_workers_are_told(make, tmp_path):
    """The lines of three stopped workers are full, and threads are busy telling them more."""
    collector = make("async", makers(3), gain(), frames_per_batch=20)
    collector.next()
    running = pids(collector)
    for pid in running:
        burn(pid, signal.SIGSTOP)
    hook = Cargo(bytes(4_000_000))
    raised, threads = [], []
    for call in (partial(_set, collector, hook), collector.state_dict):
        threads.append(threading.Thread(target=lambda call=call: raised.append(heard(call, Exception))))
        threads[-1].start()
        assert wait_until(lambda: collector._group.workers[0].connection.behind)
    begun = time.monotonic()
    collector.shutdown(timeout=0.5, raise_on_error=False)
    assert time.monotonic() - begun < patient(0.5 + BOUND_S)
    for thread in threads:
        thread.join(patient(BOUND_S))
        assert not thread.is_alive()
    assert [type(error) for error in raised] == [RuntimeError] * 2
    assert gone(running, 1.0)
    assert len(collector.stats()["forced"]) == 3


def test_shutdown_while_much_is_on_its_way(make):
    """Worker 0 is stopped, and keeps nobody: the other one reads what it is told to its end, and ends."""
    collector = make("sync", makers(), gain(), frames_per_batch=20)
    collector.next()
    stopped, other = pids(collector)
    burn(stopped, signal.SIGSTOP)
    call = messages.Call(10**6, "post_collect_hook", ByValue(((bytes(10_000_000),), {})), False, False)
    for worker in collector._group.workers:
        worker.send(call, attention=True)
    assert all(worker.connection.behind for worker in collector._group.workers)
    thread = threading.Thread(target=partial(collector.shutdown, timeout=BOUND_S, raise_on_error=False))
    thread.start()
    assert gone([other], 0.5 * BOUND_S)
    burn(stopped, signal.SIGCONT)
    thread.join()
    assert collector.stats()["forced"] == []


class Cargo:
    """A hook that is large."""

    def __init__(self, load):
        self.load = load

    def __call__(self, batch):
        """Do nothing."""


def _set(collector, hook):
    collector.post_collect_hook = hook


@pytest.mark.parametrize(("where", "kind"), in_turn(STUCK, KINDS))
def test_shutdown_of_a_stuck_worker_is_bounded(make, tmp_path, kind, where):
    struck = str(tmp_path / "struck")
    collector = stuck(make, kind, struck, **STUCK[where](struck))
    running = pids(collector)
    begun = time.monotonic()
    collector.shutdown(timeout=0.5)
    assert time.monotonic() - begun < patient(0.5 + BOUND_S)
    assert gone(running, 1.0)
    [forced] = collector.stats()["forced"]
    assert re.search(r"worker [01] .*(terminated|killed) after 0\.5 s", forced)


def test_shutdown_while_an_environment_does_not_close_is_bounded(make):
    collector = make("async", one_bad(troubles={"on_close": Trouble("sleep", 0)}), gain(), frames_per_batch=20)
    collector.next()
    begun = time.monotonic()
    collector.shutdown(timeout=0.5)
    assert time.monotonic() - begun < patient(0.5 + BOUND_S)
    assert "worker 1" in collector.stats()["forced"][0]


def test_the_timeout_given_at_construction(make, tmp_path):
    collector = stuck(make, "async", str(tmp_path / "struck"), shutdown_timeout=0.5)
    begun = time.monotonic()
    collector.shutdown()
    assert "after 0.5 s" in collector.stats()["forced"][0]
    assert time.monotonic() - begun < patient(0.5 + BOUND_S)


@pytest.mark.parametrize("kind", one_quick(KINDS, "async"))
def test_errors_of_close_are_raised_unless_told_otherwise(make, kind):
    for silent in (False, True):
        collector = make(kind, one_bad(troubles={"on_close": Trouble("raise", 0)}), gain(), frames_per_batch=20)
        collector.next()
        if silent:
            collector.shutdown(raise_on_error=False)
        else:
            with pytest.raises(WorkerError, match=r"worker 1.*boom"):
                collector.shutdown()


# Others ------------------------------------------------------------------------------------------------------------


def test_shutdown_from_another_thread_wakes_who_waits(make, tmp_path):
    struck = str(tmp_path / "struck")
    envs = one_bad(troubles={"trouble": Trouble("sleep", 25, struck)})
    collector = make("sync", envs, gain(), frames_per_batch=200)
    raised = []
    thread = threading.Thread(target=lambda: raised.append(heard(collector.next, Exception)))
    thread.start()
    assert wait_until(lambda: os.path.exists(struck))
    begun = time.monotonic()
    collector.shutdown(timeout=0.5, raise_on_error=False)
    thread.join(patient(BOUND_S))
    assert not thread.is_alive()
    assert time.monotonic() - begun < patient(0.5 + 2 * BOUND_S)
    assert isinstance(raised[0], RuntimeError)


@pytest.mark.parametrize("kind", KINDS)
def test_a_collector_that_nobody_holds_ends(kind):
    from rollwright import collectors

    cls = collectors.MultiSyncCollector if kind == "sync" else collectors.MultiAsyncCollector
    collector = cls(makers(), gain(), frames_per_batch=20)
    collector.next()
    running = pids(collector)
    del collector
    gc.collect()
    assert gone(running, BOUND_S)


FAILED = {
    "an environment": ([tally, broken], {}, LookupError),
    "after the workers are ready": (makers(), {"weight_updater": 3}, TypeError),
}


@pytest.mark.parametrize(("why", "kind"), in_turn(FAILED, KINDS))
def test_failed_constructions_leave_nothing(make, kind, why):
    envs, options, error = FAILED[why]
    kept = []  # and with them, through their tracebacks, what was made
    for _ in range(2):
        with pytest.raises(error) as caught:
            make(kind, envs, gain(), frames_per_batch=20, **options)
        kept.append(caught.value)
    assert processes.left_behind(2.0) == []


def used(kind):
    """A collector that has done everything, shut down and gone."""
    from rollwright import collectors

    cls = collectors.MultiSyncCollector if kind == "sync" else collectors.MultiAsyncCollector
    collector = cls(makers(), gain(), frames_per_batch=20)
    collector.next()
    collector.update_policy_weights_(gain(2.0))
    collector.state_dict()
    collector.shutdown()
    with cls(makers(), gain(), frames_per_batch=20, replay_buffer=a_buffer()) as collector:
        collector.start()
        with collector.pause():
            collector.update_policy_weights_(gain(2.0))


@pytest.mark.parametrize("kind", KINDS)
def test_neither_descriptors_nor_threads_nor_mappings_nor_names_are_left(kind):
    counts, names = [], processes.shm_entries()
    for _ in range(3):
        used(kind)
        gc.collect()
        counts.append((processes.num_fds(), threading.active_count(), processes.num_shared_mappings()))
    assert counts[-1] == counts[1], counts
    assert wait_until(lambda: processes.shm_entries() <= names)  # other programs come and go there, too


def test_a_batch_can_be_read_after_shutdown(make):
    collector = make("async", makers(), gain(), frames_per_batch=20)
    batch = collector.next()
    total = float(batch["observation"].sum())
    collector.shutdown()
    gc.collect()
    assert float(batch["observation"].sum()) == total


def test_statistics_and_state_can_be_read_after_shutdown(make):
    collector = make("sync", makers(), gain(), frames_per_batch=20)
    collector.next()
    collector.shutdown()
    assert collector.stats()["frames"] == 20
    assert "Multi" in repr(collector)


def test_a_control_c_while_it_waits_leaves_a_collector_that_shuts_down(make, tmp_path):
    struck = str(tmp_path / "struck")
    envs = one_bad(troubles={"trouble": Trouble("sleep", 25, struck)})
    collector = make("sync", envs, gain(), frames_per_batch=200)

    def press():
        if wait_until(lambda: os.path.exists(struck)):
            os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=press)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        collector.next()
    thread.join()
    begun = time.monotonic()
    collector.shutdown(timeout=0.5, raise_on_error=False)
    assert time.monotonic() - begun < patient(0.5 + BOUND_S)


@pytest.mark.parametrize("backend", ["process", "tcp"])
def test_several_threads_at_once(make, backend):
    collector = make("async", makers(2, step_s=0.5), gain(), frames_per_batch=20, backend=backend)
    errors = []
    waiting = threading.Thread(target=heard, args=(collector.next, RuntimeError))
    waiting.start()
    assert wait_until(lambda: collector.stats()["workers"][0]["state"] == "collecting")

    def end():
        errors.append(heard(collector.shutdown, Exception))

    threads = [threading.Thread(target=end) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in (*threads, waiting):
        thread.join(patient(20))
    assert errors == [None] * 3
    assert processes.left_behind() == []
