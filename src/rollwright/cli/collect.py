"""``rollwright collect``: from an environment and a policy to a dataset."""

from __future__ import annotations

import argparse
import json
import random
import re
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

from tensordict import TensorDictBase

from rollwright._keys import key_str
from rollwright._progress import count
from rollwright.cli import minari, workers
from rollwright.cli.console import Console
from rollwright.cli.errors import Failure, brief, plain
from rollwright.cli.interrupts import SignalInterrupts
from rollwright.cli.policies import load_policy
from rollwright.collectors import Collector, MultiCollector
from rollwright.data.datasets import DatasetWriter, describe_dataset
from rollwright.data.datasets.description import check_target
from rollwright.data.layout import TRAJ_IDS
from rollwright.envs import GymEnv
from rollwright.errors import RollwrightError

_MOST_FRAMES_PER_BATCH = 500  # of a process: small enough to see progress, large enough that writing costs little


def run(arguments: argparse.Namespace) -> int:
    """Collect as the arguments specify; returns the exit status."""
    console = Console(arguments.quiet or arguments.json)
    if arguments.seed is None:
        arguments.seed = random.SystemRandom().randrange(2**31)
    if arguments.sync is not None and not arguments.workers:
        raise Failure(f"--{'sync' if arguments.sync else 'async'}: says how workers collect. Add --workers N.")
    ended: list[int] = []  # the exit status, once what was saved was reported
    with console.warnings_as_lines(), ExitStack() as stack:
        stack.push(lambda kind, *_: bool(ended) and kind is KeyboardInterrupt)  # Ctrl-C during the shutdown
        export = _export_plan(arguments)
        folder = _folder(arguments) if export is None else export.frames
        _or_failure(lambda: check_target(folder, overwrite=arguments.overwrite))
        env = _or_failure(lambda: _make_env(arguments))
        stack.callback(env.close, raise_if_closed=False)
        if export is not None:
            export.check(env, categorical=arguments.categorical_actions)
        interrupts = SignalInterrupts()
        if arguments.workers:
            console.line(f"starting {count(arguments.workers, 'worker')}")
        collector = _make_collector(arguments, env, interrupts)
        stack.enter_context(interrupts)
        stack.callback(_shut_down, collector, interrupts)
        size = _size(arguments, env, collector)
        source = _source(arguments, collector)
        writer = _or_failure(
            lambda: DatasetWriter(
                folder, steps=size.steps, source=source, overwrite=arguments.overwrite, leave_out_objects=True
            )
        )
        place = f"{folder}" if export is None else f"the Minari dataset {export.dataset_id} in {export.root}"
        console.line(
            f"collecting {size.frames:,} frames of {arguments.env_id} in {_where(arguments)} "
            f"(policy {arguments.policy}, seed {arguments.seed}) into {place}"
        )
        seconds, error = _collect(collector, writer, size, interrupts, console)
        saved = _outcome(writer, size.frames, None if export is not None else folder)
        status = _report(saved, seconds, error, interrupts, console)
        counts = describe_dataset(writer.path) if writer.frames else {"frames": 0}
        if writer.left_out:
            console.line(f"note: left out, since they are no tensors: {key_str(writer.left_out)}")
        if export is not None and writer.frames:
            with interrupts.saving():
                export.run(env, arguments, console, lambda: interrupts.hurried)
        elif writer.frames:
            console.line(f"look at it: rollwright inspect {folder}")
        if arguments.json:
            target = {"path": str(folder)} if export is None else {"dataset_id": export.dataset_id}
            print(json.dumps({**target, **counts, "seconds": seconds, "error": error and brief(error)}, indent=2))
        if error is not None and arguments.debug:
            raise error
        ended.append(status)
    return ended[0]


def _or_failure(call: Callable[[], Any]) -> Any:
    """The value of ``call``; errors with a remedy for the user end the command."""
    try:
        return call()
    except Failure:
        raise
    except RollwrightError as error:  # that of a worker may be an OSError, too
        raise Failure(plain(error)) from error
    except FileExistsError as error:
        text = plain(error).removeprefix("path: ").replace("overwrite=True", "--overwrite")
        raise Failure(f"--output: {text}") from error
    except TimeoutError as error:
        raise Failure(plain(error), status=1) from error
    except OSError as error:
        raise Failure(f"--output: {plain(error)}") from error
    except (TypeError, ValueError) as error:
        raise Failure(plain(error)) from error


# What to collect, and where to ---------------------------------------------------------------------


def _folder(arguments: argparse.Namespace) -> Path:
    if arguments.dataset_id is not None:
        raise Failure("--dataset-id: names a Minari dataset; add --format minari, or use --output.")
    if arguments.output is not None:
        return Path(arguments.output)
    return Path("rollwright-data") / re.sub(r"[^\w.-]+", "-", arguments.env_id)


def _export_plan(arguments: argparse.Namespace) -> minari.Export | None:
    if arguments.format != "minari":
        return None
    return minari.Export.plan(
        arguments.env_id, arguments.policy, arguments.dataset_id, arguments.output, overwrite=arguments.overwrite
    )


def _make_env(arguments: argparse.Namespace) -> GymEnv:
    options: dict[str, Any] = {"categorical_action_encoding": arguments.categorical_actions}
    if arguments.num_envs > 1:
        options["num_envs"] = arguments.num_envs
    for name in ("categorical_action_encoding", "num_envs", "device"):
        if name in arguments.env_kwargs:
            raise Failure(f"--env-kwargs: {name!r} has an option of its own, see rollwright collect --help.")
    return GymEnv(arguments.env_id, **options, **arguments.env_kwargs)


def _make_collector(
    arguments: argparse.Namespace, env: GymEnv, interrupts: SignalInterrupts
) -> Collector | MultiCollector:
    def make() -> Collector | MultiCollector:
        policy = load_policy(arguments.policy, env)  # with workers only to see that it is one
        if arguments.workers:
            return workers.make_collector(arguments, _make_env, _frames_of_workers(arguments, env.numel()))
        collector: Collector = Collector(
            env,
            policy,
            frames_per_batch=arguments.frames_per_batch or _frames_per_batch(arguments.frames, env.numel()),
            total_frames=arguments.frames,
            max_frames_per_traj=arguments.max_frames_per_traj,
            device=arguments.device,
            interruptor=interrupts,
        )
        collector.set_seed(arguments.seed)
        return collector

    collector: Collector | MultiCollector = _or_failure(make)
    return collector


class _Size(NamedTuple):
    """Size of the dataset to collect: ``steps`` of each row, ``frames`` in all."""

    steps: int
    frames: int


def _size(arguments: argparse.Namespace, env: GymEnv, collector: Collector | MultiCollector) -> _Size:
    if arguments.sync is False:  # one row of complete episodes, of which the last is cut
        return _Size(arguments.frames, arguments.frames)
    frames = int(collector.total_frames)
    return _Size(frames // (env.numel() * (arguments.workers or 1)), frames)


def _where(arguments: argparse.Namespace) -> str:
    envs = count(arguments.num_envs, "environment")
    if not arguments.workers:
        return envs
    return f"{count(arguments.workers, 'worker')} of {envs}, {_pace(arguments)}"


def _pace(arguments: argparse.Namespace) -> str:
    return "async" if arguments.sync is False else "sync"


def _frames_of_workers(arguments: argparse.Namespace, num_envs: int) -> int:
    if arguments.frames_per_batch:
        return int(arguments.frames_per_batch)
    if arguments.sync is False:  # of each worker
        return max(1, _MOST_FRAMES_PER_BATCH // num_envs) * num_envs
    return _frames_per_batch(arguments.frames, arguments.workers * num_envs, arguments.workers)


def _frames_per_batch(frames: int, num_envs: int, processes: int = 1) -> int:
    """A batch of moderate size of which whole ones make up ``frames``, where there is such a size.

    >>> _frames_per_batch(10_000, 8), _frames_per_batch(300, 1), _frames_per_batch(10_007, 1)
    (400, 300, 477)
    """
    steps = -(-frames // num_envs)
    most = max(1, min(steps, processes * _MOST_FRAMES_PER_BATCH // num_envs))
    batches = -(-steps // most)
    return num_envs * next((size for size in range(most, most // 2, -1) if steps % size == 0), -(-steps // batches))


def _source(arguments: argparse.Namespace, collector: Collector | MultiCollector) -> dict[str, Any]:
    pace = {"workers": arguments.workers, "pace": _pace(arguments)} if arguments.workers else {}
    return {
        "env": arguments.env_id,
        "env_kwargs": arguments.env_kwargs,
        "num_envs": arguments.num_envs,
        "categorical_actions": arguments.categorical_actions,
        "max_frames_per_traj": arguments.max_frames_per_traj,
        "policy": arguments.policy,
        "seed": arguments.seed,
        "frames": arguments.frames,
        "frames_per_batch": collector.frames_per_batch,
        "device": arguments.device,
        **pace,
    }


# The collection ------------------------------------------------------------------------------------


def _collect(
    collector: Collector | MultiCollector,
    writer: DatasetWriter,
    size: _Size,
    interrupts: SignalInterrupts,
    console: Console,
) -> tuple[float, Exception | None]:
    """Write batches until all are there, a signal comes or something fails; then finish the dataset.

    Returns:
        Seconds that it took, and the error that ended it.
    """
    below = None if isinstance(collector, Collector) else lambda: workers.table(collector.stats())
    failed: Exception | None = None
    start = time.perf_counter()
    try:
        with console.progress(size.frames, below):
            for batch in map(workers.rows_of, collector):
                with interrupts.saving():
                    writer.write(batch, steps=min(_steps_taken(batch), size.steps - writer.steps))
                console.update({**collector.stats(), "frames": writer.frames})
                if interrupts.collection_stopped() or writer.steps == size.steps:
                    break
    except KeyboardInterrupt:  # the second signal: the current step is lost, what was written is not
        pass
    except Exception as error:
        failed = error
    with interrupts.saving():
        try:
            writer.close(lambda: interrupts.hurried)
        except OSError as error:
            failed = failed or error
    return time.perf_counter() - start, failed


def _shut_down(collector: Collector | MultiCollector, interrupts: SignalInterrupts) -> None:
    collector.shutdown(timeout=1.0 if interrupts.hurried else None, raise_on_error=False)


def _steps_taken(batch: TensorDictBase) -> int:
    """Steps that an interrupted rollout took; all of them in any other."""
    ids = batch.get(TRAJ_IDS)
    return int((ids.reshape(-1, batch.batch_size[-1])[0] >= 0).sum())


def _outcome(writer: DatasetWriter, total: int, folder: Path | None) -> str:
    """What there is now, as it stands on disk, whatever failed."""
    if not writer.frames:
        return "nothing was collected, nothing was written"
    counts = describe_dataset(writer.path)
    of_all = "" if counts["complete"] else f" of {total:,}"
    place = "" if folder is None else f", in {folder}"
    verb = "collected" if folder is None else "saved"
    episodes = count(counts["episodes"]["count"], "complete episode")
    return f"{verb} {counts['frames']:,}{of_all} frames, {episodes}{place}"


def _report(saved: str, seconds: float, error: Exception | None, interrupts: SignalInterrupts, console: Console) -> int:
    """Say how it ended; returns the exit status."""
    if error is not None:
        text = brief(error)
        hint = " With --categorical-actions, actions are integers." if "one-hot" in text else ""
        console.alert(f"rollwright collect: {text}{hint}")
        console.alert(saved)
        return 1
    if interrupts.signum is not None:
        console.alert(f"interrupted: {saved}")
        return interrupts.exit_status
    console.line(f"{saved} ({seconds:.1f} s)")
    return 0
