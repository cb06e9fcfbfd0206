"""The options of collectors with workers, declared and checked here, once; and which options ask for workers."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from numbers import Real
from typing import Annotated, Any, Literal

import torch

from rollwright._foreign import class_path, is_torchrl_buffer
from rollwright._keys import key_str
from rollwright._options import PER_WORKER, Check, check_fields, names_of, refuse_unknown, seconds, whole
from rollwright._processes.start import check_start_method
from rollwright.collectors.options import DEVICES, CollectorOptions, is_service
from rollwright.collectors.workers.handles import START_S
from rollwright.collectors.workers.memory import Join
from rollwright.collectors.workers.messages import Ready
from rollwright.collectors.workers.transports import (
    Backend,
    check_backend,
    known_backend,
    num_workers_of,
    shares_memory,
)
from rollwright.data.specs.shapes import as_device, usable_device
from rollwright.envs.base import EnvBase
from rollwright.envs.foreign import as_maker, makers_in, remedy_for

_JOINS: dict[Any, Join] = {"stack": "stack", 0: "first", -1: "time"}
_BY_WORKER = names_of(CollectorOptions, marked=PER_WORKER)
_LISTS = (list, tuple)


@dataclass(frozen=True, kw_only=True)
class WorkerOptions:
    """The options of a collector with workers, besides those of :class:`~rollwright.collectors.CollectorOptions`.

    Attributes:
        num_workers: number of workers; None: as many as there are functions in ``create_env_fn``.
        sync: True: a batch has one rollout of each worker, all with the same version of the weights. False: a batch
            has one rollout of one worker, in the order in which they are finished.
        cat_results: how a synchronous batch is put together. ``"stack"`` (the default): ``[W, *env, T]``; ``0``: along
            the first dimension; ``-1``: along time. Workers write it in this shape, so nothing is copied. With
            ``sync=False``, ``"stack"`` has no effect, and the others are refused.
        preemptive_threshold: share of the workers, in [0, 1], that a synchronous batch waits for. The others end their
            rollouts after the current step (and take at least one). ``("collector", "mask")`` says which frames were
            taken. 1.0 or None: wait for all.
        num_threads: threads of torch in this process, until shutdown; None: unchanged.
        num_sub_threads: threads of torch in each worker; None: workers share the cores that this process may use.
        update_at_each_batch: call ``update_policy_weights_()`` before each batch.
        start_method: how processes start. ``"forkserver"`` (None): a server that has imported torch, but not your
            main module, forks them. Or ``"spawn"``, ``"fork"``.
        init_fn: called first in each worker, without arguments.
        on_worker_failure: what to do if a worker raises or dies. ``"raise"``: the next call raises. ``"restart"``:
            another worker takes its place, with new trajectory ids.
        max_restarts: how often one worker is replaced before its failure is an error.
        restart_delay: seconds before the first replacement of a worker, and twice as long before each further one. It
            starts again at this value after a worker that ran for more than ten times its last delay.
        start_timeout: seconds for a worker to make its environment and its policy. On other machines, this includes the
            time to start it, which may be long in a queue or on a cluster that grows.
        env_step_timeout: seconds for one step, after which its worker counts as failed; None: no limit.
        max_policy_lag: how many versions of the weights may be published between the first weights that acted in a
            batch and its delivery (with a replay buffer: its write); None: any number.
        policy_lag: how to keep ``max_policy_lag``. ``"wait"``: workers are asked for no more rollouts than you take in
            time, judged by the most versions that you have published between two batches, and
            ``update_policy_weights_()`` of another thread waits for rollouts in progress. ``"drop"``: workers
            continue; rollouts that are too old are thrown away, counted in ``stats()["frames_stale"]``, and collected
            again in new trajectories. If you publish faster than before, ``"wait"`` may drop, too. An ``LLMCollector``
            in one process keeps both by the oldest token of a conversation, if you update once a batch: it begins no
            more conversations than it can deliver in time, and with ``"wait"`` a batch waits for those that would be
            too old in the next one. What is too old is counted in ``stats()["groups_filtered"]``. With workers,
            ``"drop"`` judges whole conversations by their oldest token, too, and ``"wait"`` rollouts.
        max_batches_held: batches that you may hold as views of shared memory (with ``sync=False``, batches of one
            worker). Further ones are copies.
        shutdown_timeout: seconds that workers have to end by themselves.
        backend: where workers run. ``"process"`` or ``"multiprocessing"``: in processes of this machine. ``"tcp"``: in
            groups that share no memory with this process, on any machine. ``"ray"``: in such groups in actors of a Ray
            cluster. ``"distributed"``, ``"rpc"``: like ``"tcp"``, under the names that programs of torch.distributed
            know; ``"submitit"``: in jobs of Slurm. ``"direct"``: in this process, without workers. None: chosen by the
            number of workers.
        backend_options: options of the backend; see
            :class:`~rollwright.collectors.workers.remote.transport.RemoteOptions`.
    """

    num_workers: Annotated[int | None, whole(1)] = None
    sync: bool | None = None
    cat_results: Literal["stack"] | int | None = None
    preemptive_threshold: float | None = None
    num_threads: Annotated[int | None, whole(1)] = None
    num_sub_threads: Annotated[int | None, whole(1)] = None
    update_at_each_batch: bool = False
    start_method: Annotated[Literal["forkserver", "spawn", "fork"] | None, Check(check_start_method)] = None
    init_fn: Callable[[], Any] | None = None
    on_worker_failure: Literal["raise", "restart"] = "raise"
    max_restarts: Annotated[int, whole(0)] = 3
    restart_delay: Annotated[float, seconds()] = 0.1
    start_timeout: Annotated[float, seconds(positive=True)] = START_S
    env_step_timeout: Annotated[float | None, seconds(positive=True)] = None
    max_policy_lag: Annotated[int | None, whole(0)] = None
    policy_lag: Literal["wait", "drop"] = "wait"
    max_batches_held: Annotated[int, whole(1)] = 8
    shutdown_timeout: Annotated[float, seconds()] = 10.0
    backend: Annotated[Backend | None, Check(known_backend)] = None
    backend_options: Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        check_fields(self)
        check_backend(self.transport, self.backend_options, start_method=self.start_method)
        self._check_batches()

    def _check_batches(self) -> None:
        how = self.cat_results
        if how is not None and (not isinstance(how, str | int) or isinstance(how, bool) or how not in _JOINS):
            raise ValueError(f"cat_results: expected 'stack', 0 or -1, got {how!r}. Drop it for 'stack'.")
        threshold = self.preemptive_threshold
        if threshold is not None and (
            not isinstance(threshold, Real) or isinstance(threshold, bool) or not 0 <= float(threshold) <= 1
        ):
            raise ValueError(f"preemptive_threshold: expected a number in [0, 1], got {threshold!r}.")
        if not self.sync:
            for name in ("cat_results", "preemptive_threshold"):
                if getattr(self, name) not in (None, "stack"):
                    raise ValueError(
                        f"{name}={getattr(self, name)!r} says how a batch of all workers is made, and with sync=False "
                        "each is of one worker. Drop it, or pass sync=True."
                    )

    @property
    def transport(self) -> str:
        """Name of the backend that starts the workers."""
        return "process" if self.backend is None else str(self.backend)

    @property
    def join(self) -> Join:
        """How batches are put together."""
        if not self.sync:
            return "alone"
        return _JOINS["stack" if self.cat_results is None else self.cat_results]

    def waits_for(self, num_workers: int) -> int:
        """How many of the workers a synchronous batch waits for."""
        return num_workers if self.preemptive_threshold is None else math.ceil(self.preemptive_threshold * num_workers)

    def threads_of(self, num_workers: int) -> int:
        """Threads of each worker."""
        if self.num_sub_threads is not None:
            return self.num_sub_threads
        return max(1, len(os.sched_getaffinity(0)) // num_workers)

    @classmethod
    def split(
        cls, options: Mapping[str, Any], owner: str | type, others: type = CollectorOptions
    ) -> tuple[WorkerOptions, dict[str, Any]]:
        """Those options that are of workers, and the others, which the class ``others`` declares.

        Raises:
            TypeError: for an unknown name, with the most similar ones first.
        """
        mine = names_of(cls)
        refuse_unknown(options, [*mine, *names_of(others)], owner)
        own = cls(**{name: value for name, value in options.items() if name in mine})
        return own, {name: value for name, value in options.items() if name not in mine}


def factories_of(create_env_fn: Any, own: WorkerOptions, owner: str) -> list[Any]:
    """The function that makes the environment of each worker, or an environment that each gets a copy of.

    Names have to be registered here, unless ``init_fn`` or another machine may register them.

    Raises:
        EnvError: a name is not registered.
        TypeError: one is neither.
        ValueError: there are more or fewer than workers.
    """
    num_workers, given = own.num_workers, makers_in(create_env_fn)
    if given is None:
        if num_workers is None:
            raise ValueError(
                f"num_workers: {owner} got one create_env_fn and no number of workers. Pass num_workers=, or a list "
                "with a function for each worker."
            )
        given = [create_env_fn] * num_workers
    elif not given:
        raise ValueError("create_env_fn: expected at least one function, got an empty list.")
    elif num_workers is not None and num_workers != len(given):
        raise ValueError(
            f"create_env_fn: expected one function for each of the {num_workers} workers, got {len(given)}. Change "
            "num_workers (num_collectors), or pass a single function for all."
        )
    here = own.init_fn is None and shares_memory(own.transport)
    given = [as_maker(maker, registered=here) for maker in given]
    for maker in given:
        if not isinstance(maker, EnvBase) and not callable(maker):
            raise TypeError(
                f"create_env_fn: expected functions that make an environment in a worker, got {type(maker).__name__}: "
                f"{maker!r}. {remedy_for(maker)}"
            )
    return given


def check_join(own: WorkerOptions, ready: Sequence[Ready]) -> None:
    """Test that rollouts of the workers can be joined as asked.

    Raises:
        ValueError: they cannot.
    """
    how, first = own.cat_results, ready[0]
    if how not in (0, -1):
        return
    steps = [answer.frames_per_batch // answer.num_envs for answer in ready]
    if how == 0 and first.batch_size and len(set(steps)) > 1:
        raise ValueError(
            "cat_results=0: expected rollouts of one length, which are joined along the first dimension of the "
            f"environments, got {steps} steps. Pass one number as frames_per_batch, or cat_results=-1, which joins "
            "along time."
        )
    for worker, answer in enumerate(ready):
        for key in {**first.shapes, **answer.shapes}:
            expected, got = first.shapes.get(key), answer.shapes.get(key)
            if expected != got:
                raise ValueError(
                    f"cat_results={how}: expected environments with the same entries, which are joined, got "
                    f"{key_str([key])} of shape {expected} in worker 0 and {got} in worker {worker}. Pass "
                    "cat_results='stack', the default, or sync=False."
                )


def options_of_workers(
    given: Mapping[str, Any], num_workers: int, own: WorkerOptions, kind: type[CollectorOptions] = CollectorOptions
) -> tuple[CollectorOptions, list[CollectorOptions]]:
    """The options as they were given, checked, and those of each worker's collector: a ``kind`` each.

    For workers, lists are shared out and counts are divided.

    Raises:
        TypeError, ValueError: an option is wrong, or needs one process.
    """
    whole = dict(given)
    for name in _BY_WORKER:
        value = whole.get(name)
        if isinstance(value, _LISTS) and len(value) != num_workers:
            raise ValueError(
                f"{name}: expected one for each of the {num_workers} workers, got {len(value)}. Pass a single one "
                "for all."
            )
    if whole.get("interruptor") is not None:
        raise ValueError(
            "interruptor ends rollouts of this process, and the workers are others. Pass preemptive_threshold=."
        )
    buffer = whole.get("replay_buffer")
    if buffer is not None and not shares_memory(own.transport) and not is_service(buffer):
        raise ValueError(
            f"replay_buffer: lies in memory of this machine, which workers of backend={own.backend!r} do not share: "
            "each would fill a copy. Make the buffer with service_backend='process' and "
            "service_backend_options={'address': 'HOST:0'}, where HOST is an address of this machine that workers "
            "reach; or leave it out, and extend it with the batches that arrive."
        )
    if is_torchrl_buffer(whole.get("replay_buffer")):
        raise ValueError(
            f"replay_buffer: {class_path(whole['replay_buffer'])} cannot be written by several workers and read here "
            "at the same time. Leave it out, and extend it with the batches that arrive; or pass a "
            "rollwright.data.ReplayBuffer(storage=LazyTensorStorage(size), shared=True)."
        )
    if whole.get("worker_idx") is not None:
        raise ValueError("worker_idx is given to the workers by their collector. Drop it.")
    whole["worker_idx"] = 0
    checked = kind(**_of(whole, 0))
    split = own.sync and bool(whole.get("split_trajs"))
    whole.update(total_frames=-1, return_same_td=False, progress=False)
    whole.update(weight_sync_schemes=None, weight_recv_schemes=None, weight_updater=None)
    if checked.init_random_frames is not None and checked.init_random_frames > 0:
        whole["init_random_frames"] = -(-checked.init_random_frames // num_workers)
    if split:  # after rollouts are joined
        whole.update(split_trajs=False, postproc=None)
    if checked.trajs_per_batch is not None and checked.replay_buffer is None:
        whole.update(trajs_per_batch=1, traj_format="cat")
    if checked.groups_per_batch is not None:
        whole["groups_per_batch"] = 1
        whole["max_oversampling"] = checked.max_oversampling * checked.groups_per_batch
    if "num_shards" in names_of(kind):
        whole["num_shards"] = num_workers
    frames = whole.get("frames_per_batch", checked.frames_per_batch)
    if own.sync and frames is not None and not isinstance(frames, _LISTS):
        whole["frames_per_batch"] = math.ceil(checked.frames_per_batch / num_workers)
    each = [replace(checked, **{**_of(whole, i), "worker_idx": i}) for i in range(num_workers)]
    if shares_memory(own.transport):
        for one in each:
            one.check_devices()
    else:
        each = [_delivered_on_host(one) for one in each]
    return checked, each


def _delivered_on_host(options: CollectorOptions) -> CollectorOptions:
    """The options of a worker on another machine, whose devices are its own: what it sends lies in host memory."""
    usable_device("storing_device", options.storing_device)
    named = [as_device(getattr(options, name)) for name in DEVICES]
    return options if set(named) <= {None, torch.device("cpu")} else replace(options, storing_device="cpu")


def delivery_device(options: CollectorOptions) -> torch.device | None:
    """Where a collector with workers delivers its batches; None: where they arrive."""
    device = as_device(options.storing_device or options.device)
    return None if device is not None and device.type == "cuda" and not torch.cuda.is_available() else device


def _of(options: Mapping[str, Any], worker: int) -> dict[str, Any]:
    """The options of one worker."""
    return {k: v[worker] if k in _BY_WORKER and isinstance(v, _LISTS) else v for k, v in options.items()}


_makers: list[Callable[..., Any]] = []  # of collectors with workers


@dataclass(frozen=True, kw_only=True)
class BackendOptions:
    """The number of collectors, for ``Collector(...)``.

    Attributes:
        num_collectors: number of workers, each with an environment and a policy of its own. On other machines, number
            of groups of workers. None: collect in this process, unless ``backend`` names another place.
    """

    num_collectors: Annotated[int | None, whole(1)] = None

    def __post_init__(self) -> None:
        check_fields(self)


def wants_workers(options: Mapping[str, Any]) -> bool:
    """Whether options ask for a collector with workers.

    Raises:
        ValueError, TypeError: ``num_collectors`` or ``backend`` is wrong, or they contradict one another.
    """
    count = BackendOptions(num_collectors=options.get("num_collectors")).num_collectors
    backend = known_backend("backend", options.get("backend"))
    if count is not None and backend == "direct":
        raise ValueError(f"num_collectors={count} asks for processes, backend='direct' for none. Drop one of the two.")
    return count is not None or backend not in (None, "direct")


def num_in_each(options: Mapping[str, Any]) -> int:
    """Workers in each of those that ``num_collectors`` counts: groups of them on some backends."""
    return num_workers_of(options.get("backend") or "process", options.get("backend_options"))


def register_workers(make: Callable[..., Any]) -> None:
    """Let ``Collector(..., num_collectors=n)`` call ``make``, with ``num_workers`` in place of ``num_collectors``."""
    _makers[:] = [make]


def make_with_workers(args: Sequence[Any], options: Mapping[str, Any]) -> Any:
    """The collector with workers that options ask for; None: they ask for one in this process.

    Raises:
        ValueError, TypeError: they contradict one another.
    """
    if not wants_workers(options):
        return None
    given = {name: value for name, value in options.items() if name != "num_collectors"}
    count, in_each = options.get("num_collectors"), num_in_each(options)
    if count is not None and given.get("num_workers") is not None:
        raise ValueError(
            f"num_workers={given['num_workers']!r} and num_collectors={count} say the same twice. Drop one of the two."
        )
    makers = args[0] if args else options.get("create_env_fn")
    listed = makers_in(makers)
    if listed is not None and in_each > 1:  # one for each group
        given.pop("create_env_fn", None)
        args = (makers_of_workers(listed, count, in_each), *args[1:])
    if count is not None:
        given["num_workers"] = count * in_each
    elif listed is None:
        given.setdefault("num_workers", in_each)
    return _makers[0](*args, **given)


def makers_of_workers(create_env_fn: Any, num_collectors: int | None, in_each: int) -> list[Any]:
    """What makes the environment of each worker, in order of the collectors that they belong to.

    Raises:
        ValueError: a list has another length.
    """
    listed = makers_in(create_env_fn)
    given = [create_env_fn] * (num_collectors or 1) if listed is None else listed
    if num_collectors not in (None, len(given)):
        raise ValueError(
            f"create_env_fn: expected one function for each of the {num_collectors} collectors, got {len(given)}. "
            "Change num_collectors, or pass a single function for all."
        )
    return [maker for maker in given for _ in range(in_each)]


def local_options(options: Mapping[str, Any], owner: type) -> dict[str, Any]:
    """The options of a collector in this process, without those that select it.

    Args:
        options: as they were given.
        owner: class of the collector.

    Raises:
        ValueError, TypeError: one is for collectors with workers only.
    """
    if wants_workers(options):  # only the factory makes these
        name = "num_collectors" if options.get("num_collectors") is not None else "backend"
        known = next(kind.__name__ for kind in owner.__mro__ if kind.__module__.startswith("rollwright."))
        raise TypeError(
            f"{name}: {owner.__name__} collects in this process, and what it changes in {known} would be lost in "
            f"workers; got {name}={options[name]!r}. Call {known} itself, or subclass a collector with workers, such "
            "as MultiSyncCollector."
        )
    also: tuple[str, ...] = getattr(owner, "also_local", ())
    alien = [name for name in names_of(WorkerOptions) if name in options and name not in ("sync", "backend", *also)]
    if alien:
        raise TypeError(
            f"{alien[0]}: expected num_collectors= beside it, which makes the workers that it is for; got it for a "
            "collector in this process. Pass num_collectors=, or leave it out."
        )
    if options.get("sync") not in (None, True):
        raise ValueError(
            f"sync={options['sync']!r}: in one process a batch is collected while the caller waits. Pass "
            "num_collectors=, or call start() with a replay_buffer."
        )
    selecting = [*names_of(BackendOptions), "backend", "sync"]
    return {name: value for name, value in options.items() if name not in selecting}
