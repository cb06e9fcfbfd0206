"""Backend "tcp" over hosts of their own: collect, publish, cut, cut for long, kill, heal, add."""

from __future__ import annotations

import contextlib
import threading
import time
from functools import partial

import pytest
import torch
from tests.collectors.workers.processes import burn, gone, wait_until
from tests.hosts.namespaces import Network, why_not
from tests.interrupts import pressed
from tests.patience import patient

from rollwright.errors import WorkerError
from rollwright.testing.transports import frames as of
from rollwright.testing.transports.frames import VERSION

KINDS = ["sync", "async"]
MIXED = [
    pytest.param("sync", False, id="sync-frames"),
    pytest.param("async", True, id="async-trajectories"),
    pytest.param("sync", True, id="sync-trajectories", marks=pytest.mark.slow),
    pytest.param("async", False, id="async-frames", marks=pytest.mark.slow),
]
pytestmark = [pytest.mark.timeout(120), pytest.mark.usefixtures("replacing")]


def ended(program, pids, limit_s=10.0):
    """Whether a group ends by itself, with its workers."""
    return wait_until(lambda: program.poll() is not None, limit_s) and gone(pids)


def test_hosts_collect_and_take_weights(site):
    site = site(2)
    collector = site.build("sync", policy=of.constant(0.0), track_policy_version=True)
    on = [site.workers_on(host) for host in site.hosts]
    assert sorted(on) == [[0, 1], [2, 3]]
    for version in range(3):
        batch = collector.next()
        assert batch[VERSION].unique().tolist() == [version]
        assert batch["action"].unique().tolist() == [float(version)]
        collector.update_policy_weights_(of.constant(version + 1.0))
    with pytest.raises(WorkerError, match=r"worker 0 on host[12].*no_such"):
        collector.map_fn("no_such")
    pids = [pid for host in site.hosts for pid in site.pids_on(host)]
    collector.shutdown()
    assert len(pids) == 4
    assert all(ended(program, pids) for program in site.joined.values())
    assert [program.returncode for program in site.joined.values()] == [0, 0]


def newer(batch, workers):
    """Whether one of these workers has collected it with the weights that were published during the cut."""
    return bool(workers & set(batch["observation"][..., 0][batch[VERSION] == 2].tolist()))


CUTS = [
    pytest.param(1.5, 8.0, id="1.5 s"),
    pytest.param(10.0, 20.0, id="10 s", marks=pytest.mark.slow),
    pytest.param(13.5, 30.0, id="13.5 s", marks=pytest.mark.slow),  # 16 s from Linux 6.15 on
]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("cut_s", "most_s"), CUTS)
def test_a_short_cut_costs_time_only(site, run, later, kind, cut_s, most_s):
    site = site(2)
    run = run(site.build(kind, policy=of.constant(0.0), track_policy_version=True))
    run.collector.update_policy_weights_(of.constant(0.0))  # the first one asks a worker for what it has
    run.take_some()
    host = site.hosts[0]
    host.cut()
    healed = later(cut_s, host.heal)
    run.collector.update_policy_weights_(of.constant(1.0))
    run.take(lambda: not healed.is_alive())
    mine = set(site.workers_on(host))
    came = len(run.batches)
    run.take(lambda: any(newer(batch, mine) for batch in run.batches[came:]))
    run.take_some()
    print(f"\n{kind}, cut of {cut_s:g} s: longest wait {run.longest_s:.1f} s, {len(run.batches)} batches")
    assert run.collector.stats()["restarts"] == 0
    of.no_episode_missing(of.whole_trajectories(run.batches))
    assert run.longest_s > 0.8 * cut_s or kind == "async"
    assert run.longest_s < max(most_s, patient(most_s) if cut_s < 10 else 0.0)


def test_a_long_cut_is_an_error_that_names_the_host(site, run):
    site = site(2)
    run = run(site.build("async", host_timeout=2.0))
    run.take_some()
    host = site.hosts[1]
    lost, pids = site.workers_on(host), site.pids_on(host)
    host.cut()
    begun = time.monotonic()
    with pytest.raises(WorkerError, match=r"worker \d on host2 was lost: host2 .*host_timeout=2 s") as caught:
        run.take(lambda: False)
    assert time.monotonic() - begun < patient(2.0 + 5.0)
    assert caught.value.worker in lost
    assert ended(site.joined[host.name], pids)  # it finds out by itself
    of.no_episode_missing(of.whole_trajectories(run.batches))


@pytest.mark.parametrize(("kind", "trajectories"), MIXED)
def test_another_host_takes_the_place_of_one_that_is_cut_off(site, run, kind, trajectories):
    """And what the former one has collected meanwhile is not delivered when it comes back."""
    site = site(2)
    options = {"trajs_per_batch": 3, "traj_format": "cat"} if trajectories else {}
    options |= {"on_worker_failure": "restart", "restart_delay": 0.0}
    run = run(site.build(kind, host_timeout=2.0, **options))
    run.take_some()
    former = site.hosts[0]
    workers, program, pids = site.workers_on(former), site.joined[former.name], site.pids_on(former)
    former.cut()
    added, over = site.network.add(), threading.Event()
    joining = threading.Thread(target=site.join_when_there_is_room, args=(added, over))
    joining.start()
    try:
        begun = time.monotonic()
        run.take(lambda: site.workers_on(added) == workers and run.collector.stats()["workers_alive"] == 4)
        took_s = time.monotonic() - begun
        former.heal()
        run.take_some(10)
    finally:
        over.set()
        joining.join()
    print(f"\nreplaced after {took_s:.1f} s")
    assert took_s < patient(2.0 + 5.0)
    assert ended(program, pids)
    of.whole_trajectories(run.batches, ended=trajectories)


def test_a_host_that_loses_power_is_an_error(site, run):
    site = site(2)
    run = run(site.build("sync", host_timeout=2.0))
    run.take_some()
    site.power_off(site.hosts[0])
    begun = time.monotonic()
    with pytest.raises(WorkerError, match="on host1 was lost: host1 has given no sign"):
        run.take(lambda: False)
    assert time.monotonic() - begun < patient(2.0 + 5.0)


def test_a_group_that_is_killed_is_an_error_at_once(site, run):
    site = site(2)
    run = run(site.build("async", host_timeout=60.0))
    run.take_some()
    burn(site.joined[site.hosts[0].name].pid)
    begun = time.monotonic()
    with pytest.raises(WorkerError, match="on host1 was lost: host1 has hung up"):
        run.take(lambda: False)
    assert time.monotonic() - begun < patient(2.0)


def test_hosts_end_when_the_learner_is_cut_off(site, run):
    site = site(2)
    run = run(site.build("async", host_timeout=2.0))
    run.take_some()
    pids = [pid for host in site.hosts for pid in site.pids_on(host)]
    site.learner.cut()
    assert all(ended(program, pids, 15.0) for program in site.joined.values())


def late(ident, folder):
    """An environment that takes long to be made."""
    (folder / str(ident)).touch()
    time.sleep(3.0)
    return of.numbered(ident)


def test_a_host_that_is_cut_off_while_it_starts_is_an_error(site, tmp_path):
    site = site(2)

    def cut():
        if wait_until(lambda: len(list(tmp_path.iterdir())) == 4):
            site.hosts[0].cut()

    cutting = threading.Thread(target=cut)
    cutting.start()
    try:
        with pytest.raises(
            WorkerError, match=r"worker \d on host1 was lost: host1 has given no sign .* while starting"
        ):
            site.build("sync", host_timeout=2.0, envs=of.factories(4, late, folder=tmp_path), start_timeout=60.0)
    finally:
        cutting.join()


def test_shutdown_waits_no_longer_for_a_host_that_is_cut_off(site, run):
    site = site(2)
    run = run(site.build("async", shutdown_timeout=1.0))
    run.take_some()
    host = site.hosts[0]
    lost, pids = site.workers_on(host), site.pids_on(host)
    host.cut()
    begun = time.monotonic()
    run.collector.shutdown()
    assert time.monotonic() - begun < patient(5.0)
    forced = run.collector.stats()["forced"]
    assert [line.partition(" is ")[0] for line in forced] == [f"worker {index} on host1" for index in lost]
    host.heal()
    assert ended(site.joined[host.name], pids)


@pytest.mark.parametrize("kind", KINDS)
def test_ctrl_c_at_random_moments_loses_no_frame(site, kind):
    site = site(2)
    collector, batches = site.build(kind), []
    with pressed(2e-4, 2e-2) as raising:
        for number in range(150):
            with contextlib.suppress(KeyboardInterrupt), raising:
                if number % 3 == 0:
                    collector.update_policy_weights_(of.constant(2.0))
                batches.append(collector.next())
    assert raising.count > 20
    batches += [collector.next() for _ in range(4)]
    of.whole_trajectories(batches)


SIZES = [pytest.param(2, id="8 MB"), pytest.param(25, id="100 MB", marks=pytest.mark.slow)]


@pytest.mark.parametrize("num_weights", SIZES)
def test_weights_cross_the_network_once_for_each_host(site, num_weights):
    """8 workers in 2 groups; and no step acts with a mixture."""
    site = site(2)
    size = 1_000_000
    collector = site.build(
        "sync",
        per=4,
        each=2,
        policy_factory=partial(of.uniform, num_weights, size),
        track_policy_version=True,
        start_timeout=patient(60.0),
    )
    policy = of.uniform(num_weights, size)
    collector.next()
    num_bytes = 4 * num_weights * size
    for version in (1, 2):
        before = site.learner.num_bytes()[0]
        policy.module.fill(version)
        collector.update_policy_weights_(policy)
        batch = collector.next()
        low, high, tag = (batch[key].flatten().long() for key in ("low", "high", VERSION))
        assert torch.equal(low, high)
        assert torch.equal(low, tag)
        assert tag.unique().tolist() == [version]
        sent = site.learner.num_bytes()[0] - before
        print(f"\n{num_bytes / 1e6:g} MB of weights to 8 workers: {sent / 1e6:.1f} MB on the line")
        assert 2 * num_bytes < sent < 2.2 * num_bytes


def test_a_network_is_gone_whatever_happens():
    if (why := why_not()) is not None:
        pytest.skip(why)
    made = []

    def fail():
        with Network(2) as network:
            made.extend([*network.hosts, *(host.start("sleep", "100") for host in network.hosts)])
            raise RuntimeError("in the middle")

    with pytest.raises(RuntimeError, match="in the middle"):
        fail()
    assert all(process.poll() is not None for process in made[2:])
    assert all(host._keeper.poll() is not None for host in made[:2])
