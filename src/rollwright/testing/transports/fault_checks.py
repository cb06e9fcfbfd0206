"""Checks of what goes wrong in a worker, of Ctrl-C, and of the end."""

from __future__ import annotations

import signal
import threading
import time
import warnings
from typing import Any

from rollwright.errors import WorkerError
from rollwright.testing.transports import frames as of
from rollwright.testing.transports.frames import expect
from rollwright.testing.transports.trial import Resources, Trial

_DIES_AT = 50
_END_S = 20.0


def raising_worker(trial: Trial) -> None:
    """What an environment raises is raised here, with the worker and the traceback."""
    for kind in ("sync", "async"):
        envs = of.factories(trial.num_workers)
        envs[1] = of.factories(trial.num_workers, raises_at=25)[1]
        collector = trial.collector(kind, envs, of.constant(), each=20)
        error = _error_of(collector, trial)
        expect(error.worker == 1, f"{kind}: expected worker 1 to have raised, got {error.worker}: {error}")
        expect("worker 1" in str(error), f"{kind}: expected an error that names worker 1, got: {error}")
        expect("raises in step 25" in str(error), f"{kind}: expected the message of the environment, got: {error}")
        expect("in step\n" in str(error.__cause__), f"{kind}: expected the traceback as the cause of: {error}")


def cannot_start(trial: Trial) -> None:
    """An environment that cannot be made ends the construction, with the worker and the traceback."""
    envs = of.factories(trial.num_workers)
    envs[1] = _no_environment
    try:
        trial.collector("sync", envs, of.constant(), each=20)
    except WorkerError as error:
        expect(error.worker == 1, f"expected an error of worker 1, got one of {error.worker}: {error}")
        expect("no environment for you" in str(error), f"expected the message of the factory, got: {error}")
        expect("in _no_environment\n" in str(error.__cause__), f"expected the traceback as the cause of: {error}")
        return
    raise AssertionError("expected the error of a factory at construction, got none")


def _no_environment() -> Any:
    raise LookupError("no environment for you")


def cannot_send(trial: Trial) -> None:
    """What cannot be pickled is named at construction."""
    lock = threading.Lock()
    envs = [lambda: (lock, of.numbered())[1]] * trial.num_workers
    try:
        trial.collector("sync", envs, of.constant(), each=20)
    except TypeError as error:
        expect("create_env_fn" in str(error), f"expected an error that names create_env_fn, got: {error}")
        return
    raise AssertionError("expected a TypeError: an environment's factory holds a lock, which cannot be sent")


def killed_worker(trial: Trial) -> None:
    """A worker whose process is killed is an error soon, which names it."""
    for kind in ("sync", "async"):
        envs = of.factories(trial.num_workers, step_s=2e-3)
        envs[1] = of.factories(trial.num_workers, step_s=2e-3, dies_at=_DIES_AT)[1]
        collector = trial.collector(kind, envs, of.constant(), each=20)
        begun = time.monotonic()
        error = _error_of(collector, trial)
        took = time.monotonic() - begun
        expect(error.worker == 1, f"{kind}: expected worker 1 to be lost, got {error.worker}: {error}")
        expect("worker 1" in str(error), f"{kind}: expected an error that names worker 1, got: {error}")
        expect(took < trial.settings.failure_s, f"{kind}: the error took {took:.1f} s")


def _error_of(collector: Any, trial: Trial) -> WorkerError:
    """What iteration raises, within a generous number of batches."""
    try:
        for _ in range(10_000):
            collector.next()
    except WorkerError as error:
        return error
    except Exception as error:
        if trial.expired is None:
            raise AssertionError(f"expected a WorkerError, got {type(error).__name__}: {error}") from error
        raise
    raise AssertionError("expected the failure of a worker to be an error, and the collector went on")


def replaced_worker(trial: Trial) -> None:
    """With ``on_worker_failure="restart"``, killed workers are replaced, and every frame is delivered once."""
    _replace(trial, "sync", {})
    _replace(trial, "async", {"trajs_per_batch": 2, "traj_format": "cat"})


def _replace(trial: Trial, kind: str, options: dict[str, Any]) -> None:
    envs = of.factories(trial.num_workers, dies_at=_DIES_AT)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # that each is replaced
        collector = trial.collector(
            kind,
            envs,
            of.constant(),
            each=10,
            on_worker_failure="restart",
            restart_delay=0.0,
            max_restarts=1000,
            **options,
        )
        batches = []
        while collector.stats()["restarts"] < 3:
            batches.append(collector.next().clone())
    of.whole_trajectories(batches, ended=bool(options))
    ids = [number for batch in batches for number in batch[of.IDS].unique().tolist()]
    expect(min(ids) >= 0, "expected trajectory ids")
    collector.shutdown()


# Ctrl-C and the end -----------------------------------------------------------------------------------


def interrupt(trial: Trial) -> None:
    """Ctrl-C while the program waits for a batch is a KeyboardInterrupt at once, and the collector goes on."""
    if threading.current_thread() is not threading.main_thread():
        raise RuntimeError("the check 'interrupt' sends SIGINT, which the main thread handles: run it there.")
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        for kind in ("sync", "async"):
            _interrupt(trial, kind)
    finally:
        signal.signal(signal.SIGINT, before)


def _interrupt(trial: Trial, kind: str) -> None:
    envs = of.factories(trial.num_workers, step_s=0.05)
    collector = trial.collector(kind, envs, of.constant(), each=20)
    pressed: list[float] = []

    def press() -> None:
        pressed.append(time.monotonic())
        signal.pthread_kill(main, signal.SIGINT)

    main = threading.get_ident()
    timer = threading.Timer(0.3, press)
    timer.start()
    took = float("inf")
    try:
        collector.next()
    except KeyboardInterrupt:
        took = time.monotonic() - pressed[0]
    finally:
        timer.join()
    limit_s = trial.settings.interrupt_s
    expect(took < limit_s, f"{kind}: expected a KeyboardInterrupt within {limit_s:g} s of Ctrl-C, it took {took:.1f} s")
    batch = collector.next()
    wanted = 20 * (trial.num_workers if kind == "sync" else 1)
    expect(batch.numel() == wanted, f"{kind}: expected a batch of {wanted} frames after Ctrl-C, got {batch.numel()}")
    begun = time.monotonic()
    collector.shutdown()
    took = time.monotonic() - begun
    expect(took < _END_S, f"{kind}: shutdown took {took:.1f} s")


def shutdown(trial: Trial) -> None:
    """After ``shutdown``, no process, thread, descriptor or shared memory is left; it may be called again."""
    _run_once(trial, "sync")  # a server that starts workers may stay
    before = Resources.now(trial.settings.stays)
    for kind in ("sync", "async"):
        _run_once(trial, kind)
    left = Resources.left_since(before, trial.settings.gone_s)
    expect(not left, f"two collectors were shut down, and this is left: {'; '.join(left)}")


def _run_once(trial: Trial, kind: str) -> None:
    envs = of.factories(trial.num_workers)
    collector = trial.collector(kind, envs, of.constant(), each=20)
    collector.next()
    collector.update_policy_weights_(of.constant(2.0))
    collector.next()
    begun = time.monotonic()
    collector.shutdown()
    took = time.monotonic() - begun
    expect(took < _END_S, f"shutdown took {took:.1f} s")
    collector.shutdown()
    trial.forget(collector)
