"""Sample-to-insert ratios: either side waits, none for ever, and who waits says for what."""

from __future__ import annotations

import copy
import math
import os
import pickle
import random
import signal
import threading
import time
import warnings
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from tests.patience import patient

from rollwright._processes.child import Child
from rollwright.data import (
    LazyTensorStorage,
    ListStorage,
    PrioritizedReplayBuffer,
    ReplayBuffer,
    ReplayBufferEnsemble,
    SamplerWithoutReplacement,
    SampleToInsertRatio,
    SliceSampler,
    TensorDictPrioritizedReplayBuffer,
    TensorDictReplayBuffer,
)

LIMIT = 20.0


def frames(n: int, start: int = 0) -> TensorDict:
    step = torch.arange(start, start + n)
    return TensorDict({"step": step, "collector": {"traj_ids": step // 3}}, [n])


def limited(ratio=2.0, *, margin=16.0, min_size=4, timeout_s=60.0, kind=ReplayBuffer, size=100, **options):
    limiter = SampleToInsertRatio(ratio, margin=margin, min_size=min_size, timeout_s=timeout_s)
    return kind(**{"storage": LazyTensorStorage(size), "batch_size": 8, "limiter": limiter, **options}), limiter


@pytest.fixture
def company():
    """Another thread, which could do something and does not: waits are not known to be in vain."""
    over = threading.Event()
    thread = threading.Thread(target=over.wait, name="company")
    thread.start()
    yield thread
    over.set()
    thread.join(LIMIT)


def when_waiting(limiter: SampleToInsertRatio, act) -> threading.Thread:
    """Run ``act()`` in a thread, once somebody waits."""

    def run() -> None:
        until = time.monotonic() + patient(LIMIT)
        while not limiter.stats()["waiting"]:
            assert time.monotonic() < until
            threading.Event().wait(0.001)
        act()

    thread = threading.Thread(target=run)
    thread.start()
    return thread


# The equation --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (ReplayBuffer, {}),
        (TensorDictReplayBuffer, {"prefetch": 2}),
        (PrioritizedReplayBuffer, {"alpha": 0.5, "beta": 0.5}),
        (TensorDictPrioritizedReplayBuffer, {"alpha": 0.5, "beta": 0.5}),
        (ReplayBuffer, {"storage": ListStorage()}),
        (ReplayBuffer, {"shared": True}),
    ],
)
def test_what_may_be_drawn_and_inserted_follows_from_the_balance(kind, options, company):
    buffer, limiter = limited(2.0, margin=16, min_size=10, timeout_s=0.02, kind=kind, **options)
    assert limiter.may_insert(10_000)  # nothing waits before min_size are there
    buffer.extend(frames(9))
    with pytest.raises(TimeoutError, match=r"until 1 more are inserted \(9 inserted, 0 drawn"):
        buffer.sample()
    buffer.add(frames(1, 9)[0])
    assert limiter.balance == 0
    assert [limiter.may_insert(n) for n in (8, 9)] == [True, False]
    for _ in range(2):
        buffer.sample()
    assert (limiter.sampled, limiter.balance) == (16, -16)
    with pytest.raises(TimeoutError, match="until 4 more are inserted"):
        buffer.sample()
    assert (limiter.sampled, limiter.balance) == (16, -16)
    assert [limiter.may_insert(n) for n in (16, 17)] == [True, False]
    buffer.extend(frames(4, 10))
    assert len(buffer.sample()) == 8
    assert limiter.balance == -16
    buffer.shutdown()


@pytest.mark.parametrize("seed", range(10))
def test_neither_side_waits_for_the_other_for_ever_where_the_margin_is_the_least_allowed(seed):
    """Whoever may do something does it, in any order; the balance stays within the margin."""
    dice = random.Random(seed)
    ratio = dice.choice([0.1, 0.5, 1.0, 3.0, 7.5])
    batch, rollout, min_size = dice.randint(1, 60), dice.randint(1, 40), dice.randint(1, 50)
    margin = (batch + ratio * rollout) / 2
    buffer, limiter = limited(ratio, margin=margin, min_size=min_size, batch_size=batch)
    limiter.check(frames=rollout)
    done = {"insert": 0, "sample": 0}
    for _ in range(300):
        moved = False
        for side in dice.sample(["insert", "sample"], 2):
            if side == "insert" and limiter.may_insert(rollout):
                buffer.extend(frames(rollout))
                moved = True
            elif side == "sample" and not _is_refused(buffer):
                moved = True
            done[side] += moved
            if moved:
                break
        assert moved
        if limiter.sampled:
            assert -margin <= limiter.balance <= max(margin, ratio * rollout)
    assert min(done.values()) > 0
    assert limiter.sampled == pytest.approx(ratio * (buffer.write_count - min_size), abs=margin + ratio * rollout)


def _is_refused(buffer: ReplayBuffer) -> bool:
    try:
        buffer.sample()
    except RuntimeError:  # this is the only thread
        return True
    return False


def test_short_slices_count_as_what_came():
    buffer, limiter = limited(1.0, margin=100, sampler=SliceSampler(slice_len=6), batch_size=12)
    buffer.extend(frames(9))  # trajectories of three frames
    assert len(buffer.sample()) == 6
    assert limiter.sampled == 6


def test_a_draw_that_fails_does_not_count():
    buffer, limiter = limited(margin=50, sampler=SamplerWithoutReplacement(drop_last=True), batch_size=16)
    buffer.extend(frames(8))
    with pytest.raises(ValueError, match="batch_size"):
        buffer.sample()
    assert limiter.sampled == 0


def test_iteration_is_limited_too():
    buffer, limiter = limited(margin=16)
    buffer.extend(frames(4))
    batches = iter(buffer)
    next(batches), next(batches)
    with pytest.raises(RuntimeError, match="only thread"):
        next(batches)
    assert limiter.sampled == 16


# Waiting -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("prefetch", [None, 3])
def test_sampling_waits_for_another_thread(prefetch):
    buffer, limiter = limited(prefetch=prefetch)
    thread = when_waiting(limiter, lambda: buffer.extend(frames(4)))
    assert len(buffer.sample()) == 8
    thread.join(LIMIT)
    assert limiter.stats() == {"inserted": 4, "sampled": 8, "balance": -8.0, "margin": 16.0, "waiting": []}
    buffer.shutdown()


def test_inserting_waits_for_another_thread():
    buffer, limiter = limited()
    buffer.extend(frames(12))
    thread = when_waiting(limiter, buffer.sample)
    assert limiter.await_insert(4)
    thread.join(LIMIT)
    assert limiter.balance == 8
    assert not limiter.await_insert(5, stop=lambda: True)


def test_threads_that_sample_at_once_do_not_pass_the_margin():
    buffer, limiter = limited(1.0, margin=400, min_size=1, timeout_s=0.05)
    buffer.extend(frames(1))
    drawn = []

    def sample() -> None:
        while True:
            try:
                drawn.append(len(buffer.sample()))
            except TimeoutError:
                return

    threads = [threading.Thread(target=sample) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LIMIT)
    assert sum(drawn) == 400
    assert limiter.sampled == 400


@pytest.mark.parametrize("prefetch", [None, 2])
def test_a_wait_can_be_interrupted(prefetch):
    buffer, limiter = limited(prefetch=prefetch)
    thread = when_waiting(limiter, lambda: os.kill(os.getpid(), signal.SIGINT))
    with pytest.raises(KeyboardInterrupt):
        buffer.sample()
    thread.join(LIMIT)
    assert limiter.sampled == 0
    buffer.extend(frames(4))
    assert len(buffer.sample()) == 8
    buffer.shutdown()


@pytest.mark.parametrize("prefetch", [None, 2])
def test_the_only_thread_does_not_wait_for_itself(prefetch):
    buffer, limiter = limited(prefetch=prefetch)
    with pytest.raises(RuntimeError, match=r"sample\(\) waits to draw 8 items until 4 more are inserted .*start\(\)"):
        buffer.sample()
    buffer.extend(frames(20))
    buffer.sample()
    with pytest.raises(RuntimeError, match=r"the learner waits to insert 9 items until 26 more are drawn"):
        limiter.await_insert(9, whom="the learner")
    buffer.shutdown()


@pytest.mark.parametrize("name", ["rollwright-engines", "tqdm_monitor"])
def test_threads_that_write_into_no_buffer_are_no_company(name):
    over = threading.Event()
    thread = threading.Thread(target=over.wait, args=(60,), name=name, daemon=True)
    thread.start()
    buffer, _ = limited()
    try:
        with pytest.raises(RuntimeError, match="this is the only thread"):
            buffer.sample()
    finally:
        over.set()
        thread.join()
        buffer.shutdown()


def test_who_waits_in_vain_says_for_whom_and_what_to_do(company):
    buffer, limiter = limited(timeout_s=0.02)
    with pytest.raises(TimeoutError, match=r"waited 0\.02 s .* 4 more are inserted .*no collector runs.*larger"):
        buffer.sample()
    buffer.extend(frames(20))
    with pytest.raises(
        TimeoutError, match=r"the collector waits to insert 8 items until 32 more are drawn.*balance=32"
    ):
        limiter.await_insert(8)


def test_the_limit_is_on_the_time_without_a_sign_of_the_other_side():
    buffer, _ = limited(timeout_s=0.5, min_size=12)
    over = threading.Event()

    def insert_slowly() -> None:
        for n in range(12):
            over.wait(0.08)
            buffer.extend(frames(1, n))

    thread = threading.Thread(target=insert_slowly)
    thread.start()
    begun = time.monotonic()
    assert len(buffer.sample()) == 8
    assert time.monotonic() - begun > 0.8
    thread.join(LIMIT)


def test_time_that_stop_takes_is_no_time_of_waiting(company):
    buffer, limiter = limited(timeout_s=0.2)
    buffer.extend(frames(30))
    calls = iter([0.5, 0.0, 0.0])

    def stop() -> bool:
        seconds = next(calls, None)
        return seconds is None or threading.Event().wait(seconds)

    assert not limiter.await_insert(5, stop=stop)


def test_who_waits_learns_what_became_of_those_who_insert(company):
    buffer, limiter = limited(timeout_s=0.05)
    leave = limiter.add_inserter(lambda: "worker 3 is asleep")
    with pytest.raises(TimeoutError, match="worker 3 is asleep"):
        buffer.sample()
    leave()

    def dead() -> str:
        raise ZeroDivisionError("in worker 3")

    limiter.add_inserter(dead)
    with pytest.raises(ZeroDivisionError, match="in worker 3"):
        buffer.sample()


def test_a_schedule_is_told_when_to_ask_again():
    buffer, limiter = limited()
    told = []
    leave = limiter.on_change(lambda: told.append(limiter.sampled))
    buffer.extend(frames(4))
    buffer.sample()
    assert told[-1] == 8
    leave()
    leave()
    count = len(told)
    buffer.sample()
    assert len(told) == count


# Processes -----------------------------------------------------------------------------------------------------


def extend_when_told(channel, buffer: ReplayBuffer) -> None:
    assert buffer.limiter is None
    assert buffer.insert_limiter is None
    channel.recv(LIMIT)
    buffer.extend(frames(6))


def test_what_another_process_writes_counts():
    buffer, limiter = limited(shared=True)
    child = Child(extend_when_told, buffer, name="writer")
    thread = when_waiting(limiter, lambda: child.channel.send("now"))
    assert len(buffer.sample()) == 8  # nobody here inserts, and this is not known to be in vain
    assert limiter.inserted == 6
    thread.join(LIMIT)
    child.channel.close()
    assert child.end(LIMIT) == "ended"


def test_copies_have_none():
    buffer, limiter = limited()
    buffer.extend(frames(4))
    for twin in (copy.deepcopy(buffer), pickle.loads(pickle.dumps(buffer))):
        for _ in range(5):
            twin.sample()
        assert twin.limiter is None
    assert limiter.sampled == 0


def test_a_fork_does_not_wait():
    buffer, limiter = limited(shared=True)
    buffer.extend(frames(50))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of forking beside threads
        with limiter.progress.changed:  # as another thread may hold it at that moment
            pid = os.fork()
            if not pid:
                signal.alarm(30)
                buffer.extend(frames(5))
                os._exit(0 if limiter.await_insert(100) and len(buffer.sample()) == 8 else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert limiter.inserted == 55


# Ensembles -----------------------------------------------------------------------------------------------------


def ensemble(count=2, **options):
    limiter = SampleToInsertRatio(1.0, margin=20, min_size=6)
    members = [TensorDictReplayBuffer(storage=LazyTensorStorage(50)) for _ in range(count)]
    return ReplayBufferEnsemble(*members, batch_size=8, limiter=limiter, **options), limiter


def test_an_ensemble_has_one_for_all_members():
    buffers, limiter = ensemble()
    assert buffers.insert_limiter is buffers[0].insert_limiter is buffers[1].insert_limiter is limiter
    assert buffers[0].limiter is None
    buffers.extend(frames(8), member=0)
    with pytest.raises(RuntimeError, match="every member holds some"):
        buffers.sample()
    buffers.extend(frames(1), member=1)
    assert limiter.balance == 3
    batch, _ = buffers.sample(return_info=True)
    assert batch.shape == (2, 4)
    assert (limiter.sampled, limiter.balance) == (8, -5)
    buffers.sample()
    with pytest.raises(RuntimeError, match="until 1 more are inserted"):
        buffers.sample()
    buffers[0].sample(5)  # of a member alone: not limited, not counted
    assert limiter.sampled == 16


def test_a_member_that_is_never_drawn_may_be_empty():
    buffers, _ = ensemble(p=[1.0, 0.0])
    buffers.extend(frames(8), member=0)
    assert buffers.sample().shape == (2, 4)


def test_slices_of_an_ensemble_count_as_what_came():
    limiter = SampleToInsertRatio(1.0, margin=50, min_size=6)
    members = [ReplayBuffer(storage=LazyTensorStorage(50), sampler=SliceSampler(slice_len=8)) for _ in range(2)]
    buffers = ReplayBufferEnsemble(*members, batch_size=16, sample_from_all=True, limiter=limiter)
    for member in range(2):
        buffers.extend(frames(9), member=member)
    assert [len(row) for row in buffers.sample().unbind(0)] == [3, 3]
    assert limiter.sampled == 6


def test_members_have_none_of_their_own():
    buffer, limiter = limited()
    other = SampleToInsertRatio(1.0, margin=20)
    with pytest.raises(ValueError, match="members without one"):
        ReplayBufferEnsemble(buffer, limiter=other)
    with pytest.raises(ValueError, match="limits another"):
        ReplayBufferEnsemble(ReplayBuffer(), limiter=limiter)


# State ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["state_dict", "files"])
@pytest.mark.parametrize("make", [limited, ensemble])
def test_a_restored_buffer_goes_on_with_the_counts(how, make, tmp_path):
    first, limiter = make()
    second, restored = make()
    for buffer in getattr(first, "members", [first]):
        buffer.extend(frames(9))
    first.sample()
    if how == "files":
        first.dumps(tmp_path)
        second.loads(tmp_path)
    else:
        second.load_state_dict(first.state_dict())
    assert restored.balance == limiter.balance != 0
    assert restored.sampled == 8
    assert restored.may_insert(3) == limiter.may_insert(3)


def test_what_was_there_before_is_balanced():
    buffer, limiter = limited(min_size=10)
    plain = ReplayBuffer(storage=LazyTensorStorage(100))
    plain.extend(frames(30))
    buffer.load_state_dict(plain.state_dict())  # of a buffer without a limiter
    assert (limiter.inserted, limiter.balance) == (30, 0)
    begun = SampleToInsertRatio(2.0, margin=16, min_size=10)
    ReplayBuffer(storage=plain.storage, limiter=begun)
    assert begun.balance == 0


def test_an_emptied_buffer_is_filled_up_to_min_size_again():
    buffer, limiter = limited(min_size=10)
    buffer.extend(frames(14))
    buffer.sample()
    buffer.empty()
    assert limiter.may_insert(10_000)
    buffer.extend(frames(10))
    assert limiter.balance == 0
    buffer.sample()
    assert limiter.balance == -8


# Bad input -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"samples_per_insert": 0}, ValueError, "samples_per_insert: expected a finite number above 0, got 0"),
        ({"samples_per_insert": "2"}, TypeError, "samples_per_insert: expected a number above 0, got str"),
        ({"margin": math.nan}, ValueError, "margin"),
        ({"margin": True}, TypeError, "margin"),
        ({"timeout_s": math.inf}, ValueError, "timeout_s"),
        ({"min_size": 0}, ValueError, "min_size"),
        ({"min_size": 1.5}, TypeError, "min_size"),
        ({"margin": 1.4}, ValueError, r"margin: expected at least .*\(1 \+ 2 \* 1\) / 2 = 1\.5, got 1\.4.*margin=2"),
    ],
)
def test_bad_numbers(arguments, error, message):
    with pytest.raises(error, match=message):
        SampleToInsertRatio(**{"samples_per_insert": 2.0, "margin": 10, **arguments})


def test_settings_that_would_wait_for_ever_are_refused():
    limiter = SampleToInsertRatio(2.0, margin=16, min_size=200)
    with pytest.raises(ValueError, match=r"min_size: expected at most 100, .* got 200"):
        ReplayBuffer(storage=LazyTensorStorage(100), limiter=limiter)
    limiter = SampleToInsertRatio(2.0, margin=16)
    with pytest.raises(ValueError, match=r"\(64 \+ 2 \* 1\) / 2 = 33, got 16: .*wait for one another.*margin=33"):
        ReplayBuffer(storage=LazyTensorStorage(100), batch_size=64, limiter=limiter)
    buffer, limiter = limited()
    with pytest.raises(ValueError, match=r"\(8 \+ 2 \* 13\) / 2 = 17, got 16"):
        limiter.check(frames=13)
    limiter.check(frames=12)
    buffer.extend(frames(10))
    with pytest.raises(ValueError, match=r"\(31 \+ 2 \* 12\)"):
        buffer.sample(31)
    assert limiter.sampled == 0


def test_a_limiter_is_of_one_buffer():
    _, limiter = limited()
    with pytest.raises(ValueError, match="limits another"):
        ReplayBuffer(limiter=limiter)
    with pytest.raises(TypeError, match="limiter: expected a SampleToInsertRatio, got float"):
        ReplayBuffer(limiter=2.0)
    with pytest.raises(TypeError, match="limiter: expected a SampleToInsertRatio, got float"):
        ReplayBufferEnsemble(ReplayBuffer(), limiter=2.0)
    assert repr(limiter) == "SampleToInsertRatio(2, margin=16, min_size=4, timeout_s=60)"


def test_a_batch_that_an_interrupt_took_away_is_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    limiter = SampleToInsertRatio(1.0, margin=8, min_size=1)
    buffer = ReplayBuffer(storage=LazyTensorStorage(100), batch_size=4, limiter=limiter)
    buffer.extend(torch.arange(4))
    counted = limiter._taken

    def interrupted(*arguments: Any) -> bool:
        found = counted(*arguments)
        signal.raise_signal(signal.SIGINT)
        return found

    with monkeypatch.context() as patch:
        patch.setattr(limiter, "_taken", interrupted)
        with pytest.raises(KeyboardInterrupt):
            buffer.sample()
    assert limiter.stats()["sampled"] == 0
    buffer.sample()
    assert limiter.stats()["sampled"] == 4


def test_a_copy_has_the_numbers_and_limits_nothing_yet():
    _, limiter = limited(2.0, margin=16, min_size=10, timeout_s=3.0)
    for copied in (copy.deepcopy(limiter), pickle.loads(pickle.dumps(limiter))):
        assert repr(copied) == repr(limiter)
        limited_by_it = ReplayBuffer(storage=LazyTensorStorage(100), batch_size=8, limiter=copied)
        limited_by_it.extend(frames(10))
        assert copied.inserted == 10
    assert limiter.inserted == 0
