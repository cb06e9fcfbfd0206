"""Every frame that was stepped is delivered, once, from the memory that it was written to."""

from __future__ import annotations

import contextlib
import itertools
import signal

import pytest
import torch
from tensordict import TensorDict
from tensordict.nn import TensorDictModuleBase
from tests.collectors.workers.envs import IDS, STEP, VERSION, Gain, gain, makers, pixels, sampling, tallies
from tests.collectors.workers.frames import check
from tests.collectors.workers.processes import in_shared_memory, wait_until
from tests.interrupts import EverywhereOnce, pressed
from tests.variants import in_turn, one_quick

from rollwright.collectors.workers import strategies
from rollwright.collectors.workers.counters import Count, WorkerState

KINDS = ["sync", "async"]


def everyone_waits(collector):
    return all(worker["waiting_for"] for worker in collector.stats()["workers"])


@pytest.mark.parametrize("maker", [None, tallies], ids=["one", "three"])
def test_a_consumer_that_sleeps_gets_every_frame(make, maker):
    options = {} if maker is None else {"make": maker}
    collector = make("async", makers(3, **options), gain(), frames_per_batch=12, total_frames=1200)
    batches = []
    for number, batch in enumerate(collector):
        batches.append(batch)
        if number % 25 == 0:
            assert wait_until(lambda: everyone_waits(collector) or collector.stats()["completed"], 5.0)
    found = check(batches)
    assert found.frames == 1200
    assert found.gaps == 0


@pytest.mark.parametrize("kind", KINDS)
def test_big_batches_do_not_wait_to_be_read(make, kind):
    """Workers hand over hundreds of trajectories, and rest, while nobody reads: no line is full for them."""
    options = {"trajs_per_batch": 200, "traj_format": "cat"}
    collector = make(kind, makers(), gain(), frames_per_batch=2000, total_frames=6000, **options)
    members = collector._group.workers
    collector._schedule.strategy.ask()
    assert wait_until(
        lambda: all(m.counters.counts[Count.BATCHES] and m.counters.state is WorkerState.WAITING for m in members), 40
    )
    assert all(member.runs for member in members)  # nothing of it was read here
    assert check(list(collector), whole=True).frames > 4000


def test_what_was_stepped_was_delivered(make):
    """Of an asynchronous collector that ends, nothing is left over."""
    collector = make("async", makers(), gain(), frames_per_batch=20, total_frames=400)
    delivered = sum(batch.numel() for batch in collector)
    assert delivered == 400
    assert collector.stats()["frames"] == 400


@pytest.mark.parametrize(("longer", "kind"), in_turn([(), (3,)], KINDS))
def test_entries_that_are_empty_arrive_as_in_one_process(make, kind, longer):
    def with_empty(batch):
        return batch.set("empty", TensorDict({}, [*batch.batch_size, *longer]))

    collector = make(kind, makers(), gain(), frames_per_batch=20, postproc=with_empty)
    for _ in range(3):
        batch = collector.next()
        assert batch["empty"].is_empty()
        assert batch["empty"].batch_size == (*batch.batch_size, *longer)


class AtTheSecond:
    """A postproc that does something in its second call."""

    def __init__(self, act):
        self.act, self.calls = act, 0

    def __call__(self, batch):
        self.calls += 1
        if self.calls == 2:
            self.act()
        return batch


def steps_by_id(batch):
    """The steps of each trajectory of a batch that is split."""
    taken = batch["collector", "mask"]
    rows = zip(batch[IDS], batch["observation"], taken, strict=True)
    return {int(ids[0]): seen[mask][:, STEP].int().tolist() for ids, seen, mask in rows}


def test_a_batch_whose_shaping_is_interrupted_comes_with_the_next_call(make):
    interrupt = AtTheSecond(lambda: signal.raise_signal(signal.SIGINT))
    options = {"split_trajs": True, "postproc": interrupt}
    with pytest.warns(UserWarning, match="split_trajs"):
        collector = make("sync", makers(length=100), gain(), frames_per_batch=20, total_frames=80, **options)
    collector.next()
    with pytest.raises(KeyboardInterrupt):
        collector.next()
    state = collector.state_dict()
    assert steps_by_id(collector.next()) == {0: list(range(10, 20)), 1: list(range(10, 20))}
    assert steps_by_id(collector.next()) == {0: list(range(20, 30)), 1: list(range(20, 30))}
    collector.load_state_dict(state)  # it is part of the state, too
    assert steps_by_id(collector.next()) == {0: list(range(10, 20)), 1: list(range(10, 20))}
    assert collector.stats()["frames"] == 40


def test_the_last_batch_is_not_lost_when_its_shaping_is_interrupted(make):
    interrupt = AtTheSecond(lambda: signal.raise_signal(signal.SIGINT))
    options = {"split_trajs": True, "postproc": interrupt}
    with pytest.warns(UserWarning, match="split_trajs"):
        collector = make("sync", makers(length=100), gain(), frames_per_batch=20, total_frames=40, **options)
    collector.next()
    with pytest.raises(KeyboardInterrupt):
        collector.next()
    assert steps_by_id(collector.next()) == {0: list(range(10, 20)), 1: list(range(10, 20))}
    assert collector.next() is None


def test_what_an_interrupt_keeps_is_delivered_only_while_it_is_fresh(make):
    interrupt = AtTheSecond(lambda: signal.raise_signal(signal.SIGINT))
    options = {"split_trajs": True, "postproc": interrupt, "max_policy_lag": 1, "track_policy_version": True}
    with pytest.warns(UserWarning, match="split_trajs"):
        collector = make("sync", makers(length=100), gain(), frames_per_batch=20, **options)
    collector.next()
    with pytest.raises(KeyboardInterrupt):
        collector.next()
    for value in (2.0, 3.0, 4.0):
        collector.update_policy_weights_(gain(value))
    assert bool((collector.next()[VERSION][:, 0] == 3).all())
    assert collector.stats()["frames_stale"] == 20


def test_an_asynchronous_batch_that_could_not_be_shaped_is_tried_again(make, monkeypatch):
    """Its worker has gone on: without it, there would be a hole in a trajectory."""
    collector = make("async", makers(length=1000), gain(), frames_per_batch=10, total_frames=200)
    batches = [collector.next().clone()]
    with monkeypatch.context() as patch:
        patch.setattr(collector, "_shaped", lambda _: 1 / 0)
        for _ in range(3):
            with pytest.raises(ZeroDivisionError):
                collector.next()
    batches += [batch.clone() for batch in collector]
    found = check(batches)
    assert (found.frames, found.gaps) == (200, 0)


@pytest.mark.parametrize("kind", KINDS)
def test_ctrl_c_while_trajectories_come_in_loses_none(make, monkeypatch, kind):
    options = {"frames_per_batch": 30, "total_frames": 600, "trajs_per_batch": 3, "traj_format": "cat"}
    collector = make(kind, makers(), gain(), **options)
    deliver, interrupts = collector._schedule._deliver, iter([True, False, True])

    def interrupted(results):
        deliver(results)
        if next(interrupts, False):
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(collector._schedule, "_deliver", interrupted)
    batches = []
    while not (batches and batches[-1] is None):
        try:
            batches.append(collector.next())
        except KeyboardInterrupt:
            continue
    found = check(batches[:-1], whole=True)
    assert found.trajectories == 3 * (len(batches) - 1)


@pytest.mark.parametrize("kind", KINDS)
def test_ctrl_c_between_a_batch_and_its_consumer_loses_none(make, kind):
    """Interrupts come between any two calls: also after a batch has left the queue, before it is returned."""
    collector, batches = make(kind, makers(), gain(), frames_per_batch=10, total_frames=-1), []
    with pressed(0, 1e-3, switch_s=1e-6) as raising:
        for number in range(400):
            with contextlib.suppress(KeyboardInterrupt), raising:
                if number % 2:
                    batches.append(collector.next())
                for batch in collector:
                    batches.append(batch)
                    break
    assert raising.count > 20
    batches += [collector.next() for _ in range(4)]
    assert check(batches).gaps == 0


def in_a_loop(collector, batches):
    for batch in collector:
        batches.append(batch)
        break


def by_next(collector, batches):
    batches.append(collector.next())


@pytest.mark.parametrize("after_all_calls", [False, True], ids=["plain", "compiled"])
@pytest.mark.parametrize("take", [in_a_loop, by_next])
@pytest.mark.parametrize("kind", KINDS)
def test_ctrl_c_at_any_place_of_a_call_loses_no_batch_and_doubles_none(make, kind, take, after_all_calls):
    pressing = EverywhereOnce(after_all_calls=after_all_calls)
    collector, batches, missed = make(kind, makers(), gain(), frames_per_batch=10, total_frames=-1), [], 0
    while missed < 15:  # places in branches that are rare
        with contextlib.suppress(KeyboardInterrupt), pressing:
            take(collector, batches)
        missed = 0 if pressing.pressed else missed + 1
    assert len(pressing.places) > 60
    batches += [collector.next() for _ in range(4)]
    assert check(batches).gaps == 0


class InterruptedAtItsEnd(contextlib.AbstractContextManager):
    """A lock at whose release Ctrl-C is pressed, the second time and no more."""

    def __init__(self):
        self.times = 0

    def __exit__(self, *error):
        self.times += 1
        if self.times == 2:
            signal.raise_signal(signal.SIGINT)


def interrupted_at_the_end(collector):
    collector._taking = InterruptedAtItsEnd()


def interrupted_when_it_is_let_go(collector):
    schedule, times = collector._schedule, itertools.count()
    release = schedule._release

    def interrupted(results):
        if next(times) == 1:
            signal.raise_signal(signal.SIGINT)
        release(results)

    schedule._release = interrupted


@pytest.mark.parametrize("interrupt", [interrupted_at_the_end, interrupted_when_it_is_let_go])
@pytest.mark.parametrize("kind", KINDS)
def test_a_batch_that_ctrl_c_keeps_from_its_consumer_comes_with_the_next_call(make, kind, interrupt):
    collector = make(kind, makers(), gain(), frames_per_batch=30, total_frames=300)
    interrupt(collector)
    batches = [collector.next()]
    with pytest.raises(KeyboardInterrupt):
        collector.next()
    batches += list(collector)
    assert check(batches).frames == 300 == collector.stats()["frames"]
    assert collector.stats()["batches"] == len(batches)


@pytest.mark.parametrize("kind", KINDS)
def test_a_batch_that_ctrl_c_keeps_from_its_consumer_is_part_of_the_state(make, kind):
    options = {"frames_per_batch": 30, "total_frames": 300}
    collector = make(kind, makers(), gain(), **options)
    interrupted_at_the_end(collector)
    batches = [collector.next()]
    with pytest.raises(KeyboardInterrupt):
        collector.next()
    state = collector.state_dict()
    collector.shutdown()
    other = make(kind, makers(), gain(), **options)
    other.load_state_dict(state)
    assert sum(batch.numel() for batch in (*batches, *other)) == 300 == other.stats()["frames"]


@pytest.mark.parametrize("kind", KINDS)
def test_a_batch_that_ctrl_c_keeps_from_its_consumer_is_not_counted_after_a_reset(make, kind):
    collector = make(kind, makers(), gain(), frames_per_batch=30, total_frames=300)
    interrupted_at_the_end(collector)
    first = collector.next()
    with pytest.raises(KeyboardInterrupt):
        collector.next()
    collector.reset()
    assert sum(batch.numel() for batch in (first, *collector)) == 300


def test_no_trajectory_goes_on_across_a_batch_that_could_not_be_shaped(make):
    def refuse():
        raise ValueError("no such shape")

    options = {"split_trajs": True, "postproc": AtTheSecond(refuse)}
    with pytest.warns(UserWarning, match="split_trajs"):
        collector = make("sync", makers(length=100), gain(), frames_per_batch=20, total_frames=60, **options)
    collector.next()
    with pytest.raises(ValueError, match="no such shape"):
        collector.next()
    assert steps_by_id(collector.next()) == {2: list(range(10)), 3: list(range(10))}
    assert collector.next() is not None  # what was lost was not counted
    assert collector.next() is None


@pytest.mark.parametrize(("kind", "name"), [("sync", "joined"), ("async", "batch_of")])
def test_what_cannot_be_put_together_is_not_counted_and_leaves_no_block_behind(make, monkeypatch, kind, name):
    def fail(*_):
        raise MemoryError("no room")

    collector = make(kind, makers(length=1000), gain(), frames_per_batch=20, total_frames=200)
    batches = [collector.next().clone()]
    with monkeypatch.context() as patch:
        patch.setattr(strategies, name, fail)
        for _ in range(3):
            with pytest.raises(MemoryError):
                collector.next()
    batches += [batch.clone() for batch in collector]
    assert check(batches, gaps=True).frames == 200
    blocks = list(collector._schedule.store._blocks())
    assert blocks
    assert all(block.free for block in blocks)


def test_workers_do_not_run_ahead_without_bound(make):
    """Back-pressure: a consumer that takes nothing stops its workers, and they say why."""
    collector = make("async", makers(), gain(), frames_per_batch=20)
    collector.next()

    def frames():
        return sum(worker["frames"] for worker in collector.stats()["workers"])

    def are_stopped():
        """They may wait for a moment and go on; stopped, they have no more frames after a while."""
        before = frames()
        assert before <= 400
        return everyone_waits(collector) and not wait_until(lambda: frames() > before, 0.3)

    assert wait_until(are_stopped, 10.0)
    waiting = collector.stats()["workers"][0]["waiting_for"]
    assert isinstance(waiting, str)
    assert collector.stats()["workers_alive"] == 2


# Memory ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_held_is_never_overwritten(make, kind):
    collector = make(kind, makers(make=tallies), gain(), frames_per_batch=24, total_frames=24 * 60)
    kept, tensors = [], []
    for number, batch in enumerate(collector):
        if number % 3 == 0:
            kept.append((batch, batch.clone()))
        elif number % 3 == 1:
            tensors.append((batch["next", "observation"], batch["next", "observation"].clone()))
        else:
            tensors.append((batch["observation"][..., 1:, :2], batch["observation"][..., 1:, :2].clone()))
        del batch
    for held, copy in kept:
        assert bool((held == copy).all())
    for held, copy in tensors:
        assert torch.equal(held, copy)
    collector.shutdown()
    for held, copy in kept:
        assert bool((held == copy).all())  # and not unmapped


@pytest.mark.parametrize("kind", KINDS)
def test_keeping_everything_is_allowed(make, kind):
    collector = make(kind, makers(), gain(), frames_per_batch=20, total_frames=20 * 100)
    batches = list(collector)
    assert len(batches) == 100
    assert check(batches).frames == 2000
    pointers = {batch["observation"].data_ptr() for batch in batches}
    assert len(pointers) == 100


@pytest.mark.parametrize("kind", KINDS)
def test_memory_comes_back_when_the_last_tensor_dies(make, kind):
    collector = make(kind, makers(), gain(), frames_per_batch=20)
    pointers = []
    for _ in range(40):
        batch = collector.next()
        pointers.append(batch["observation"].data_ptr())
        assert in_shared_memory(pointers[-1])
        assert in_shared_memory(batch["next", "reward"].data_ptr())
        del batch
    assert len(set(pointers)) <= (2 if kind == "sync" else 8)
    assert collector.stats()["leases"]["held"] == 0  # nothing here keeps the last one


def test_a_stack_is_one_piece_of_memory(make):
    batch = make("sync", makers(3), gain(), frames_per_batch=30).next()
    seen = batch["observation"]
    rows = [row["observation"] for row in batch.unbind(0)]
    for worker, row in enumerate(rows):
        assert row.data_ptr() == seen[worker].data_ptr()
        assert in_shared_memory(row.data_ptr())


@pytest.mark.parametrize("cat_results", ["stack", 0])
@pytest.mark.parametrize("kind", KINDS)
def test_nothing_is_stacked_or_copied_in_this_process(make, monkeypatch, kind, cat_results):
    options = {"cat_results": cat_results} if kind == "sync" else {}
    collector = make(kind, [pixels] * 2, frames_per_batch=20, **options)
    collector.next()

    def refuse(*args, **kwargs):
        raise AssertionError("the batch is copied")

    for owner, names in ((torch, ("stack", "cat")), (torch.Tensor, ("clone", "copy_", "contiguous"))):
        for name in names:
            monkeypatch.setattr(owner, name, refuse)
    batches = [collector.next() for _ in range(3)]
    monkeypatch.undo()
    assert all(batch["observation"].dtype == torch.uint8 for batch in batches)


@pytest.mark.parametrize("kind", KINDS)
def test_the_same_batch_when_that_was_asked_for(make, kind):
    """Recreated only where its entries are others: one comes, and goes again, and random frames lack none."""
    options = {"frames_per_batch": 20, "init_random_frames": 40, "return_same_td": True, "postproc": Fleeting(4)}
    collector = make(kind, makers(1), sampling(), **options)
    names, batches = [], []
    for _ in range(6):
        batches.append(collector.next())
        names.append({"loc", "fleeting"} & set(batches[-1].keys()))
    assert names == [{"loc"}, {"loc"}, {"loc"}, {"loc", "fleeting"}, {"loc"}, {"loc"}]
    assert [one is other for one, other in itertools.pairwise(batches)] == [True, True, False, False, True]


class Fleeting:
    """Adds an entry to one batch."""

    def __init__(self, number):
        self.number = number

    def __call__(self, batch):
        self.number -= 1
        return batch.set("fleeting", batch["action"]) if self.number == 0 else batch


# Forms that change -------------------------------------------------------------------------------------------------


class Wide(TensorDictModuleBase):
    """Writes, after 80 steps, two of the numbers that it saw, in a type of few bits, and many sevens."""

    in_keys, out_keys = ["observation"], ["action"]

    def __init__(self):
        super().__init__()
        self.gain, self.steps = Gain(), 0

    def forward(self, td):
        observation, self.steps = td["observation"], self.steps + 1
        if self.steps > 80:
            td["few"], td["extra"] = observation[..., 3:].bfloat16(), observation.new_full((300,), 7.0)
        return td.set("action", self.gain(observation))


@pytest.mark.parametrize("kind", KINDS)
def test_a_form_that_changes_spoils_no_rollout_that_was_asked_for_before(make, kind):
    """After some time there is more in a frame than the blocks have room for that were given out ahead."""
    collector = make(kind, makers(), Wide(), frames_per_batch=40, total_frames=800)
    batches, copies = [], []
    for number, batch in enumerate(collector):
        batches.append(batch)
        copies.append(batch.clone())
        if number in (1, 5):  # let workers run ahead
            assert wait_until(lambda: everyone_waits(collector), 20)
    assert check([batch.select("observation", "next", IDS) for batch in batches]).frames == 800
    for batch, copy in zip(batches, copies, strict=True):
        assert bool((batch == copy).all())
    late = [batch for batch in batches if "extra" in batch]
    assert len(batches) - len(late) == 4
    for batch in late:
        assert bool((batch["extra"] == 7).all())
        assert torch.equal(batch["few"], batch["observation"][..., 3:].bfloat16())


def test_a_consumer_that_holds_many_is_told_that_it_gets_copies(make):
    collector = make("async", makers(), gain(), frames_per_batch=20, max_batches_held=3)
    held = [collector.next() for _ in range(3)]
    leases = collector.stats()["leases"]
    assert leases["held"] == 3 == leases["most"]
    assert "copied" in leases["message"]
    held += [collector.next() for _ in range(3)]
    assert collector.stats()["leases"]["batches_copied"] == 3
    assert [in_shared_memory(batch["observation"].data_ptr()) for batch in held] == [True] * 3 + [False] * 3
    del held
    assert collector.stats()["leases"]["message"] is None


def broken_hook(batch):
    raise LookupError("hook")


@pytest.mark.parametrize("kind", one_quick(KINDS, "sync"))
def test_a_hook_that_raised_is_forgotten_with_it(make, kind):
    collector = make(kind, makers(), gain(), frames_per_batch=20, post_collect_hook=broken_hook)
    with pytest.raises(LookupError, match="hook"):
        collector.next()
    collector.set_post_collect_hook(None)
    for _ in range(3):
        assert collector.next().numel() == 20
