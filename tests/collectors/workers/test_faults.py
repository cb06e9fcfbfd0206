"""What goes wrong in a worker reaches the caller, whole and soon, or is mended when that was asked for."""

from __future__ import annotations

import os
import signal
import threading
import time
from functools import partial

import pytest
import torch
from tests.collectors.workers.envs import (
    EPISODE,
    IDENT,
    IDS,
    INSTANCE,
    STEP,
    Boom,
    Trouble,
    broken,
    failing,
    gain,
    makers,
    one_bad,
    perishing,
    tallies,
    tally,
)
from tests.collectors.workers.frames import check
from tests.collectors.workers.processes import burn, gone, heard, wait_until
from tests.patience import patient
from tests.variants import in_turn, one_quick

from rollwright.collectors.workers import memory
from rollwright.errors import EnvError, PolicyError, WorkerError

pytestmark = pytest.mark.filterwarnings("ignore:.*It is replaced:RuntimeWarning")
KINDS = ["sync", "async"]
SECONDS = 8.0  # within which a failure must be known


def run(collector, limit=2000):
    """Iterate until something is raised, or the limit."""
    batches = []
    for _ in range(limit):
        batch = collector.next()
        if batch is None:
            break
        batches.append(batch)
    return batches


def pids(collector):
    return [worker["pid"] for worker in collector.stats()["workers"]]


# Errors in a worker ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_an_environment_that_raises(make, kind):
    collector = make(kind, one_bad(3, troubles={"trouble": Trouble("raise", 37)}), gain(), frames_per_batch=30)
    begun = time.monotonic()
    with pytest.raises(WorkerError, match=r"worker 1.*boom at call 37") as caught:
        run(collector)
    assert time.monotonic() - begun < patient(SECONDS)
    error = caught.value
    assert isinstance(error, EnvError)
    assert error.worker == 1
    assert error.remote_type
    remote = str(error.__cause__)
    assert "Traceback" in remote
    assert "ValueError: boom at call 37" in remote
    assert "in strike" in remote


@pytest.mark.parametrize("kind", one_quick(KINDS, "sync"))
def test_the_index_of_the_environment_is_named(make, kind):
    envs = one_bad(make=tallies, troubles={"trouble": Trouble("raise", 20)})
    with pytest.raises(WorkerError, match=r"worker 1.*SerialEnv\[2\].*boom") as caught:
        run(make(kind, envs, gain(), frames_per_batch=24))
    assert caught.value.worker == 1


@pytest.mark.parametrize("kind", one_quick(KINDS, "async"))
def test_a_policy_that_raises_an_error_of_the_users(make, kind):
    collector = make(kind, makers(), failing(Trouble("raise own", 25)), frames_per_batch=20)
    with pytest.raises(WorkerError, match=r"worker [01].*boom 25 because") as caught:
        run(collector)
    assert isinstance(caught.value, Boom | PolicyError)
    assert "boom 25 because" in str(caught.value.__cause__)


@pytest.mark.parametrize(("what", "kind"), in_turn(["pre_collect_hook", "post_collect_hook", "postproc"], KINDS))
def test_hooks_that_raise(make, kind, what):
    def hook(*args):
        raise LookupError(f"{what} fails")

    with pytest.raises(LookupError, match=rf"worker [01].*{what} fails"):
        make(kind, makers(), gain(), frames_per_batch=20, **{what: hook}).next()


@pytest.mark.parametrize("kind", one_quick(KINDS, "sync"))
def test_resets_that_raise(make, kind):
    envs = one_bad(troubles={"on_reset": Trouble("raise", 6)})
    with pytest.raises(WorkerError, match=r"worker 1.*boom at call 6"):
        run(make(kind, envs, gain(), frames_per_batch=20))


ENDS = {"exit": "status 3", "kill": "SIGKILL", "sys.exit": "SystemExit|4"}


@pytest.mark.parametrize(("trouble", "kind"), in_turn(ENDS, KINDS))
def test_workers_that_end(make, kind, trouble):
    envs = one_bad(troubles={"trouble": Trouble(trouble, 30)})
    collector = make(kind, envs, gain(), frames_per_batch=20)
    begun = time.monotonic()
    with pytest.raises(WorkerError, match=rf"worker 1.*({ENDS[trouble]})") as caught:
        run(collector)
    assert time.monotonic() - begun < patient(SECONDS)
    assert caught.value.worker == 1


CALLS = ["next", "pause", "update", "state_dict", "shutdown"]


@pytest.mark.parametrize(("call", "trouble"), in_turn(CALLS, ["raise", "kill"]))
def test_failures_in_the_background_are_raised_at_the_next_call(make, buffer, trouble, call):
    rb = buffer()
    envs = one_bad(troubles={"trouble": Trouble(trouble, 200)})
    collector = make("async", envs, gain(), frames_per_batch=20, replay_buffer=rb)
    collector.start()

    assert wait_until(lambda: bool(collector.stats()["background"]["error"]), SECONDS)
    calls = {
        "next": collector.next,
        "pause": lambda: collector.pause().__enter__(),
        "update": lambda: collector.update_policy_weights_(gain(2.0)),
        "state_dict": collector.state_dict,
        "shutdown": collector.async_shutdown,
    }
    with pytest.raises(WorkerError, match=r"worker 1.*(boom|SIGKILL)"):
        calls[call]()
    found = check(rb[:], gaps=True)
    assert found.instances.keys() <= {0, 1}
    assert 1 in found.instances


def test_a_failure_in_the_background_is_logged_for_who_only_watches_the_buffer(make, buffer, caplog):
    envs = one_bad(troubles={"trouble": Trouble("raise", 200)})
    collector = make("async", envs, gain(), frames_per_batch=20, replay_buffer=buffer())
    collector.start()
    ended = "collection in the background ended. The next call of the collector, or of its buffer, raises WorkerError"
    assert wait_until(lambda: ended in caplog.text, SECONDS)
    assert "boom" in caplog.text
    with pytest.raises(WorkerError, match="boom"):
        collector.async_shutdown()


def test_who_only_counts_what_is_written_does_not_wait_for_ever(make, buffer):
    rb = buffer()
    envs = one_bad(troubles={"trouble": Trouble("raise", 200)})
    collector = make("async", envs, gain(), frames_per_batch=20, replay_buffer=rb)
    collector.start()
    with pytest.raises(WorkerError, match="boom"):
        wait_until(lambda: rb.write_count > 1 << 40, SECONDS)
    assert len(rb) > 0
    collector.shutdown()


@pytest.mark.parametrize("kind", KINDS)
def test_what_shutdown_is_not_to_raise_the_buffer_does_not_raise_either(make, buffer, kind, caplog):
    rb = buffer()
    envs = one_bad(troubles={"trouble": Trouble("raise", 200)})
    collector = make(kind, envs, gain(), frames_per_batch=20, replay_buffer=rb)
    collector.start()
    assert wait_until(lambda: "collection in the background ended" in caplog.text, SECONDS)
    collector.shutdown(raise_on_error=False)
    assert len(rb) >= 0
    assert rb.write_count >= 0


def test_siblings_go_on_and_what_they_wrote_stays(make, buffer):
    rb = buffer()
    collector = make("async", makers(), gain(), frames_per_batch=20, replay_buffer=rb)
    collector.start()
    assert wait_until(lambda: rb.write_count > 200)
    burn(pids(collector)[1])
    assert wait_until(lambda: collector.stats()["workers_alive"] == 1, SECONDS)
    assert wait_until(lambda: bool(collector.stats()["background"]["error"]), SECONDS)  # the collector knows, too
    with pytest.raises(WorkerError, match=r"worker 1.*SIGKILL"):
        collector.async_shutdown()
    check(rb[:], gaps=True)


@pytest.mark.parametrize("kind", KINDS)
def test_batches_outlive_a_failure(make, kind):
    collector = make(kind, makers(), gain(), frames_per_batch=20)
    kept = [collector.next() for _ in range(3)]
    copies = [batch.clone() for batch in kept]
    burn(pids(collector)[0])
    with pytest.raises(WorkerError, match="worker 0"):
        run(collector)
    collector.shutdown(raise_on_error=False)
    for batch, copy in zip(kept, copies, strict=True):
        assert bool((batch == copy).all())


@pytest.mark.parametrize("kind", one_quick(KINDS, "async"))
def test_a_failed_collector_says_so_again(make, kind):
    collector = make(kind, makers(), gain(), frames_per_batch=20)
    collector.next()
    burn(pids(collector)[0])
    with pytest.raises(WorkerError):
        run(collector)
    with pytest.raises(RuntimeError):
        run(collector)
    assert collector.stats()["workers_alive"] <= 1


# Killed from outside -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_a_killed_worker_is_an_error(make, kind):
    collector = make(kind, makers(3), gain(), frames_per_batch=30)
    collector.next()
    burn(pids(collector)[2])
    begun = time.monotonic()
    with pytest.raises(WorkerError, match=r"worker 2.*SIGKILL") as caught:
        run(collector)
    assert caught.value.worker == 2
    assert time.monotonic() - begun < patient(SECONDS)


@pytest.mark.parametrize("kind", KINDS)
def test_a_killed_worker_is_replaced(make, kind):
    collector = make(
        kind, makers(3), gain(), frames_per_batch=30, on_worker_failure="restart", track_policy_version=True
    )
    batches = [collector.next() for _ in range(4)]
    collector.update_policy_weights_(gain(2.0))
    before = pids(collector)
    burn(before[1])
    begun = time.monotonic()
    while collector.stats()["restarts"] < 1 or not _from_new(batches[-1:], before[1]):
        batches.append(collector.next())
        assert time.monotonic() - begun < patient(20)
    for _ in range(6):
        batches.append(collector.next())
    found = check(batches, gaps=True)
    assert [len(found.instances[worker]) for worker in range(3)] == [1, 2, 1]
    after = pids(collector)
    assert (before[0], before[2]) == (after[0], after[2])
    assert before[1] != after[1]
    assert gone([before[1]])
    stats = collector.stats()
    assert stats["frames"] >= found.frames
    assert stats["episodes"] >= found.whole
    assert stats["restarts"] == stats["workers"][1]["restarts"] == 1
    assert stats["workers_alive"] == 3
    assert bool((batches[-1]["action"] == 2.0).all())  # the new one has the newest weights
    assert bool((batches[-1]["policy_version"] == 1).all())


def _from_new(batches, pid):
    """Whether a frame of worker 1 is of another process."""
    for batch in batches:
        rows = batch["observation"].reshape(-1, 5)
        rows = rows[rows[:, IDENT] == 1]
        if len(rows) and bool((rows[:, 1] // 1000 != pid).any()):
            return True
    return False


def wrote(rb, pid):
    """Whether a buffer holds a frame of a process."""
    return len(rb) > 0 and bool((rb[:]["observation"][:, INSTANCE] // 1000 == pid).any())


def test_siblings_of_a_replaced_worker_have_no_hole(make, buffer):
    rb = buffer()
    collector = make(
        "async",
        makers(3),
        gain(),
        frames_per_batch=30,
        replay_buffer=rb,
        on_worker_failure="restart",
        restart_delay=0.01,
    )
    collector.start()
    for round_ in range(4):
        assert wait_until(lambda: collector.stats()["workers_alive"] == 3)
        pid = pids(collector)[1]
        assert wait_until(lambda pid=pid: wrote(rb, pid))
        if round_ < 3:
            burn(pid)
            assert wait_until(lambda round_=round_: collector.stats()["restarts"] == round_ + 1)
    collector.async_shutdown()
    data = rb[:]
    found = check(data, gaps=True)
    assert len(found.instances[1]) == 4
    siblings = data[data["observation"][:, IDENT] != 1]
    assert check(siblings).gaps == 0


@pytest.mark.parametrize("kind", KINDS)
def test_an_environment_that_raises_once_is_replaced(make, kind, tmp_path):
    once = str(tmp_path / "once")
    envs = one_bad(troubles={"trouble": Trouble("raise", 30, once)})
    collector = make(kind, envs, gain(), frames_per_batch=20, total_frames=400, on_worker_failure="restart")
    batches = run(collector)
    found = check(batches, gaps=True)
    assert found.frames == 400
    assert os.path.exists(once)
    assert len(found.instances[0]) == 1
    assert collector.stats()["restarts"] == 1


def test_a_replacement_is_announced(make):
    collector = make("sync", makers(), gain(), frames_per_batch=20, on_worker_failure="restart")
    collector.next()
    burn(pids(collector)[0])
    with pytest.warns(RuntimeWarning, match=r"worker 0 was killed by SIGKILL.*new ids"):
        run(collector, 5)


@pytest.mark.parametrize("kind", KINDS)
def test_the_budget_of_restarts_ends(make, kind):
    collector = make(
        kind,
        one_bad(troubles={"trouble": Trouble("raise", 5)}),
        gain(),
        frames_per_batch=20,
        on_worker_failure="restart",
        max_restarts=2,
        restart_delay=0.01,
    )
    with pytest.raises(WorkerError, match=r"worker 1.*boom at call 5"):
        run(collector)
    assert collector.stats()["workers"][1]["restarts"] == 2


def test_whole_trajectories_stay_whole_over_restarts(make, buffer):
    rb = buffer()
    collector = make(
        "async",
        makers(),
        gain(),
        frames_per_batch=20,
        replay_buffer=rb,
        trajs_per_batch=1,
        on_worker_failure="restart",
        restart_delay=0.01,
    )
    collector.start()
    for round_ in range(3):
        count = rb.write_count
        assert wait_until(lambda count=count: rb.write_count > count + 100)
        burn(pids(collector)[round_ % 2])
        assert wait_until(lambda round_=round_: collector.stats()["restarts"] == round_ + 1)
        assert wait_until(lambda: collector.stats()["workers_alive"] == 2)
    collector.async_shutdown()
    check(rb[:], whole=True, gaps=True)


@pytest.mark.parametrize("kind", KINDS)
def test_memory_that_is_not_to_be_had_costs_a_rollout(make, monkeypatch, kind):
    collector = make(kind, makers(), gain(), frames_per_batch=20)

    def full(*args, **options):
        monkeypatch.undo()
        raise OSError(12, "Cannot allocate memory")

    monkeypatch.setattr(memory.Block, "__init__", full)
    batches = []  # the other worker's may come before the error, and its trajectories go on
    with pytest.raises(WorkerError, match=r"worker [01]: MemoryError: .*Cannot allocate memory"):
        batches.extend(collector.next() for _ in range(4))
    check(batches + [collector.next() for _ in range(4)], gaps=True)
    assert collector.stats()["workers_alive"] == 2


# Construction ------------------------------------------------------------------------------------------------------


class Unlike(torch.nn.Module):
    """Reads entries that nobody writes."""

    def forward(self, nonsense, more):
        return nonsense + more


def no_policy():
    raise LookupError("no policy today")


def killing():
    os.kill(os.getpid(), signal.SIGKILL)


def unpicklable():
    lock = threading.Lock()
    return lambda: (lock, tally())[1]


CONSTRUCTIONS = {
    "factory raises": (lambda: ([tally, broken], gain()), {}, LookupError, r"worker 1.*no environment for 0"),
    "all raise": (lambda: ([broken] * 2, gain()), {}, LookupError, r"worker [01].*no environment for 0"),
    "no environment": (lambda: ([tally, dict], gain()), {}, TypeError, r"worker 1.*dict"),
    "killed": (lambda: ([tally, killing], gain()), {}, WorkerError, "worker 1.*SIGKILL"),
    "policy reads what is not there": (lambda: (makers(), Unlike()), {}, TypeError, "nonsense"),
    "policy factory raises": (lambda: (makers(), None), {"policy_factory": no_policy}, LookupError, "no policy today"),
    "init_fn raises": (lambda: (makers(), gain()), {"init_fn": no_policy}, LookupError, "worker [01].*no policy today"),
    "arguments": (
        lambda: (makers(), gain()),
        {"create_env_kwargs": {"nonsense": 1}},
        TypeError,
        r"worker [01].*nonsense",
    ),
    "unpicklable": (lambda: ([unpicklable()] * 2, gain()), {}, TypeError, "create_env_fn.*lock"),
    "frames that do not fit": (
        lambda: ([tally, partial(tallies, 1)], gain()),
        {"sync": True},
        ValueError,
        r"worker|shape|batch",
    ),
}


@pytest.mark.parametrize(("case", "kind"), in_turn(CONSTRUCTIONS, ["async", "sync"]))
def test_errors_of_construction_come_at_once_and_whole(make, kind, case):
    arguments, options, error, text = CONSTRUCTIONS[case]
    options = dict(options)
    if options.pop("sync", False) and kind == "async":
        pytest.skip("asynchronous batches need not fit together")
    begun = time.monotonic()
    with pytest.raises(error, match=text):
        make(kind, *arguments(), frames_per_batch=20, **options)
    assert time.monotonic() - begun < patient(15)


RESETS = {"raise": "boom at call 0", "kill": "SIGKILL"}


@pytest.mark.parametrize(("how", "kind"), in_turn(RESETS, KINDS))
def test_errors_of_the_first_reset_come_soon(make, kind, how):
    collector = make(kind, one_bad(troubles={"on_reset": Trouble(how, 0)}), gain(), frames_per_batch=20)
    begun = time.monotonic()
    with pytest.raises(WorkerError, match=f"worker 1.*{RESETS[how]}"):
        run(collector, 4 if kind == "sync" else 10_000)  # the other worker delivers until this one gets a core
    assert time.monotonic() - begun < patient(SECONDS)


# Control commands --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_commands_in_the_middle_of_iteration_take_nothing_away(make, kind):
    collector = make(kind, makers(), gain(), frames_per_batch=20, total_frames=800)
    batches = []
    for number, batch in enumerate(collector):
        batches.append(batch)
        if number % 4 == 0:
            assert "worker1" in collector.state_dict()
        elif number % 4 == 1:
            assert len(collector.get_distant_attr("env.batch_size")) == 2
        elif number % 4 == 2:
            collector.update_policy_weights_()
        else:
            collector.stats()
    assert check(batches).frames == 800


@pytest.mark.parametrize("kind", KINDS)
def test_commands_of_another_thread_take_nothing_away(make, kind):
    collector = make(kind, makers(), gain(0.0), frames_per_batch=20, total_frames=2000, track_policy_version=True)
    over, failures = threading.Event(), []

    def command():
        while not over.wait(0.002):
            update = partial(collector.update_policy_weights_, gain(collector.policy_version + 1))
            for call in (update, collector.stats, partial(collector.get_distant_attr, "env.batch_size")):
                failures.append(heard(call, Exception))

    thread = threading.Thread(target=command)
    thread.start()
    try:
        batches = run(collector)
    finally:
        over.set()
        thread.join()
    assert not any(failures), failures
    assert check(batches).frames == 2000
    for batch in batches:
        assert torch.equal(batch["action"][..., 0].long(), batch["policy_version"])


@pytest.mark.parametrize("call", ["state_dict", "getattr_policy"])
@pytest.mark.parametrize("kind", one_quick(KINDS, "sync"))
def test_the_worker_that_takes_another_s_place_answers_for_it(make, kind, call, tmp_path):
    policy = perishing(Trouble("kill", 0, str(tmp_path / "once")))
    collector = make(kind, makers(), policy, frames_per_batch=20, on_worker_failure="restart", restart_delay=0.01)
    batches = [collector.next() for _ in range(3)]
    if call == "state_dict":
        assert {"worker0", "worker1"} <= set(collector.state_dict())
    else:
        assert collector.getattr_policy("module.fate") == ["alive"] * 2
    assert collector.stats()["restarts"] == 1
    check([*batches, *[collector.next() for _ in range(4)]], gaps=True)


def test_what_may_have_been_done_is_not_done_again(make, tmp_path):
    policy = perishing(Trouble("kill", 0, str(tmp_path / "once")))
    collector = make("sync", makers(), policy, frames_per_batch=20, on_worker_failure="restart", restart_delay=0.01)
    with pytest.raises(WorkerError, match=r"worker [01] was killed by SIGKILL while called"):
        collector.map_fn("policy.module.perish")
    assert collector.map_fn("policy.module.perish") == ["alive"] * 2
    assert collector.next() is not None


@pytest.mark.parametrize("kind", KINDS)
def test_threads_that_iterate_at_once_share_the_batches(make, kind):
    collector = make(kind, makers(), gain(), frames_per_batch=20, total_frames=1200)
    found, failures = [], []
    threads = [
        threading.Thread(target=lambda: failures.append(heard(lambda: found.extend(collector.iterator()), Exception)))
        for _ in range(3)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert failures == [None] * 3
    found.sort(key=lambda batch: batch["observation"].flatten(0, -2)[0, [IDENT, INSTANCE, EPISODE, STEP]].tolist())
    assert check(found).frames == 1200  # threads may note their batches in another order than they got them


def test_a_stopped_worker_is_waited_for(make):
    collector = make("sync", makers(), gain(), frames_per_batch=20)
    first = collector.next()
    pid = pids(collector)[1]
    burn(pid, signal.SIGSTOP)
    timer = threading.Timer(0.7, burn, (pid, signal.SIGCONT))
    timer.start()
    batches = [collector.next() for _ in range(4)]
    timer.join()
    check([first, *batches])
    assert bool((batches[0][IDS] >= 0).all())


def test_a_loss_that_stats_found_out_is_warned_of_with_the_next_batch(make):
    collector = make("async", makers(), gain(), frames_per_batch=20, on_worker_failure="restart", restart_delay=0.0)
    first = int(collector.next()["observation"][0, IDENT])
    assert wait_until(lambda: collector.stats()["workers"][1 - first]["batches"] >= 1)
    os.kill(collector.stats()["workers"][first]["pid"], signal.SIGKILL)
    assert wait_until(lambda: collector.stats()["restarts"] == 1)
    with pytest.warns(RuntimeWarning, match="It is replaced"):
        collector.next()  # which is here already
