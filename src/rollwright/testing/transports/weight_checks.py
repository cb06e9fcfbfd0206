"""Checks of what a transport brings to workers: weights, calls, hooks, and states."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from tensordict import TensorDictBase

from rollwright.errors import WorkerError
from rollwright.testing.comparison import differing_key
from rollwright.testing.transports import frames as of
from rollwright.testing.transports.frames import VERSION, expect
from rollwright.testing.transports.trial import Trial


def weights_by_version(trial: Trial) -> None:
    """A synchronous batch acts with what was published before it was asked for, and says so."""
    envs = of.factories(trial.num_workers)
    collector = trial.collector("sync", envs, of.constant(0.0), each=10, track_policy_version=True)
    for version in range(5):
        batch = collector.next()
        acted, tags = batch["action"].unique().tolist(), batch[VERSION].unique().tolist()
        expect(acted == [float(version)], f"version {version} was published, and the weights that act are {acted}")
        expect(tags == [version], f"version {version} acts, and frames are tagged {tags}")
        expect(collector.update_policy_weights_(of.constant(version + 1.0)) == version + 1, "versions count on")


def weights_by_worker(trial: Trial) -> None:
    """Weights for one worker reach that one, and no other."""
    envs = of.factories(trial.num_workers)
    collector = trial.collector("sync", envs, of.constant(1.0), each=10)
    values = [1.0] * trial.num_workers
    for worker in range(trial.num_workers):
        values[worker] = 5.0 + worker
        collector.update_policy_weights_(of.constant(values[worker]), worker_ids=[worker])
        batch = collector.next()
        acted = [row["action"].unique().tolist() for row in batch.unbind(0)]
        expect(acted == [[value] for value in values], f"weights of the workers: expected {values}, got {acted}")


def weights_whole(trial: Trial) -> None:
    """While a thread publishes all the time, each frame is acted by one version, which is its tag."""
    for kind in ("sync", "async"):
        policy = of.uniform()
        envs, total = of.factories(trial.num_workers, step_s=1e-3), 300 * trial.num_workers
        collector = trial.collector(kind, envs, policy, each=20, total_frames=total, track_policy_version=True)

        def publish(version: int, collector: Any = collector, policy: Any = policy) -> None:
            policy.module.fill(version)
            collector.update_policy_weights_()

        seen = set()
        with _publishing(publish, every_s=2e-3):
            for batch in collector:
                low, high, tag = (batch[key].flatten().long() for key in ("low", "high", VERSION))
                torn = int((low != high).sum())
                expect(not torn, f"{kind}: {torn} frames were acted by a mixture of versions")
                expect(torch.equal(low, tag), f"{kind}: weights of version {low.unique()} are tagged {tag.unique()}")
                seen |= set(tag.tolist())
        expect(len(seen) > 2, f"{kind}: expected weights of several versions to act, got {sorted(seen)}")


def weights_in_rollout(trial: Trial) -> None:
    """Weights act in the middle of a rollout, however long it is."""
    envs = of.factories(trial.num_workers, step_s=2e-3)
    collector = trial.collector("async", envs, of.constant(0.0), each=600, track_policy_version=True)
    with _publishing(lambda version: collector.update_policy_weights_(of.constant(float(version))), every_s=0.1):
        batch = collector.next()
    tags = batch[VERSION].unique().tolist()
    expect(len(tags) > 2, f"a rollout took more than a second, weights were published ten times: acted {tags}")
    expect(torch.equal(batch["action"].flatten().long(), batch[VERSION].flatten()), "frames are tagged wrongly")


@contextmanager
def _publishing(publish: Callable[[int], Any], *, every_s: float) -> Iterator[None]:
    """Call ``publish(version)`` in a thread, now and then, inside the ``with`` block."""
    over, errors = threading.Event(), []

    def run() -> None:
        try:
            for version in itertools.count(1):
                if over.wait(every_s):
                    return
                publish(version)
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
    if errors:
        raise errors[0]


def calls(trial: Trial) -> None:
    """Calls are answered by each worker, in order; what they raise comes with the worker and the traceback."""
    envs, count = of.factories(trial.num_workers), trial.num_workers
    collector = trial.collector("async", envs, of.constant(), each=20)
    collector.next()
    found = collector.get_distant_attr("worker_idx")
    expect(found == list(range(count)), f"worker_idx: expected {list(range(count))}, got {found}")
    seeds = [[100 * worker] for worker in range(count)]
    found = collector.map_fn("env.set_seed", seeds)
    wanted = [of.numbered().set_seed(seed) for (seed,) in seeds]
    expect(found == wanted, f"map_fn('env.set_seed', {seeds}): expected {wanted}, got {found}")
    with collector.pause():
        found = collector.get_distant_attr("env.batch_size")
        expect(found == [torch.Size([])] * count, f"in pause(): expected an answer of each worker, got {found}")
    try:
        collector.map_fn("env.no_such_method")
    except WorkerError as error:
        expect("worker 0" in str(error) and "no_such_method" in str(error), f"expected worker and name, got: {error}")
        expect("Traceback" in str(error.__cause__), "expected the traceback of the worker as the cause of the error")
    else:
        raise AssertionError("expected the error of a call in the workers, got none")
    collector.next()


def hooks(trial: Trial) -> None:
    """``init_fn`` and hooks run in each worker; ``postproc`` changes what it delivers."""
    options = {"init_fn": _prepare, "pre_collect_hook": _before, "post_collect_hook": _after, "postproc": _mark}
    envs = of.factories(trial.num_workers)
    collector = trial.collector("sync", envs, of.constant(), each=10, **options)
    for number in range(1, 4):
        marks = collector.next()["mark"]
        wanted = [[1, number, number - 1]] * trial.num_workers
        found = [row.reshape(-1, 3)[0].tolist() for row in marks.unbind(0)]
        expect(found == wanted, f"calls of init_fn, hook before, hook after: expected {wanted}, got {found}")


_called = {"init": 0, "before": 0, "after": 0}


def _prepare() -> None:
    _called.update(init=1, before=0, after=0)


def _before(*_: Any) -> None:
    _called["before"] += 1


def _after(*_: Any) -> None:
    _called["after"] += 1


def _mark(batch: TensorDictBase) -> TensorDictBase:
    marks = torch.tensor(list(_called.values()))
    return batch.set("mark", marks.expand(*batch.shape, 3).clone())


def saved_state(trial: Trial) -> None:
    """A collector that is restored goes on with the bits of the one that was not interrupted."""
    envs = of.factories(trial.num_workers, life=0)
    first = trial.collector("sync", envs, of.sampling(), each=14)
    first.set_seed(3)
    for _ in range(2):
        first.next()
    state = first.state_dict()
    expected = [first.next().clone() for _ in range(3)]
    second = trial.collector("sync", envs, of.sampling(), each=14)
    second.load_state_dict(state)
    for number, batch in enumerate(expected):
        found = second.next()
        unequal = differing_key(found, batch)
        if unequal is not None:
            raise AssertionError(
                f"batch {number} after load_state_dict: {unequal!r} differs from that of the uninterrupted collector: "
                f"expected {batch.get(unequal, None)}, got {found.get(unequal, None)}"
            )
