"""DistributedCollector: a collector whose batches and weights move over process groups of torch.distributed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Literal, Unpack

from rollwright._options import with_options
from rollwright.collectors.clusters.groups import GroupOptions, grouped
from rollwright.collectors.multi import MultiCollector
from rollwright.collectors.options import CollectorOptions
from rollwright.collectors.workers.options import WorkerOptions

if TYPE_CHECKING:
    from rollwright.collectors.keywords import GroupKeywords
    from rollwright.collectors.rollout.environment import EnvMakers


_LEFT_OUT = ("backend", "num_workers", "update_at_each_batch")  # said otherwise here


@with_options(GroupOptions, WorkerOptions, CollectorOptions, leave_out=_LEFT_OUT)
class DistributedCollector(MultiCollector):
    """Collects experience in groups of workers, each a rank of its own: ``backend="distributed"``.

    Every group makes a process group of two with this process: one that dies is replaced
    (``on_worker_failure="restart"``), and the others do not notice. ``DistributedDataCollector`` is the same class.

    ``backend_options`` takes others of :class:`~rollwright.collectors.workers.remote.distributed.Options`, such as
    ``host_timeout``.

    Args:
        create_env_fn: makes an environment, in a worker; or a list of such functions, one for each group.
        policy: as of :class:`Collector`; each worker acts with a copy, see :meth:`update_policy_weights_`.
        sync: whether a batch is of all workers; if False, batches are of one worker each, in the order in which they
            are finished.
        backend: of the process groups: ``"gloo"``, or ``"nccl"`` where torch and all machines have it.
        launcher: what starts groups: ``"submitit"``: jobs of Slurm, or of submitit's executor for one machine;
            ``"mp"``: processes of this machine; ``"torchrun"``: they are the other ranks of this program; ``"join"``:
            somebody, by ``rollwright join HOST:PORT``.
        slurm_kwargs: parameters of jobs, such as ``slurm_partition``, ``gpus_per_node``, ``timeout_min``.
        tcp_port: where this process listens; None: at any port that is free.
        **options: how many groups there are, and those of
            :class:`~rollwright.collectors.workers.options.WorkerOptions` and of
            :class:`~rollwright.collectors.CollectorOptions`.

    Raises:
        MissingExtraError: submitit is not installed.
        ValueError, TypeError: an option is wrong, or torch lacks what it asks for.
        WorkerError: a worker could not make its environment or its policy.

    Example:
        >>> from rollwright.envs import GymEnv
        >>> with DistributedCollector(
        ...     lambda: GymEnv("CartPole-v1"),
        ...     num_collectors=2,
        ...     launcher="mp",
        ...     sync=True,
        ...     frames_per_batch=200,
        ...     total_frames=400,
        ... ) as collector:
        ...     print([batch.shape for batch in collector])
        [torch.Size([2, 100]), torch.Size([2, 100])]
    """

    def __init__(
        self,
        create_env_fn: EnvMakers,
        policy: Callable[..., Any] | None = None,
        *,
        sync: bool = False,
        backend: Literal["gloo", "nccl", "mpi"] = "gloo",
        launcher: Literal["mp", "submitit", "torchrun", "join"] = "submitit",
        slurm_kwargs: Mapping[str, Any] | None = None,
        tcp_port: int | None = None,
        **options: Unpack[GroupKeywords],
    ) -> None:
        self.closed = True
        about = _about(backend, launcher, slurm_kwargs, tcp_port)
        made = grouped(type(self).__name__, create_env_fn, "distributed", about, {**options, "sync": sync})
        self._updates = made.updates
        self._construct(made.makers, policy, made.options)


@with_options(DistributedCollector, leave_out=["sync", "max_weight_update_interval"])
class DistributedSyncCollector(MultiCollector):
    """A :class:`DistributedCollector` whose batches are of all workers, each with the newest weights.

    ``DistributedSyncDataCollector`` is the same class.

    Args:
        create_env_fn: as of :class:`DistributedCollector`.
        policy: as of :class:`DistributedCollector`.
        update_interval: batches after which the weights of ``policy`` are read again, and published; without a policy
            that has weights, nothing is.
        **options: those of :class:`DistributedCollector`.

    Raises:
        ValueError, TypeError: an option is wrong.

    Example:
        >>> from rollwright.envs import GymEnv
        >>> with DistributedSyncCollector(
        ...     [lambda: GymEnv("CartPole-v1")] * 2, launcher="mp", frames_per_batch=200, total_frames=200
        ... ) as collector:
        ...     print([batch.shape for batch in collector])
        [torch.Size([2, 100])]
    """

    _sync = True

    def __init__(
        self,
        create_env_fn: EnvMakers,
        policy: Callable[..., Any] | None = None,
        *,
        update_interval: int = 1,
        **options: Any,
    ) -> None:
        self.closed = True
        if isinstance(update_interval, bool) or not isinstance(update_interval, int) or update_interval < 1:
            raise ValueError(f"update_interval: expected an integer of at least 1, got {update_interval!r}.")
        for name, why in (("sync", "it is True here"), ("max_weight_update_interval", "pass update_interval=")):
            if name in options:
                raise TypeError(f"{type(self).__name__} has no option {name!r}: {why}.")
        if hasattr(policy, "parameters"):
            options["max_weight_update_interval"] = update_interval
        about = _about(*(options.pop(name, default) for name, default in _LAUNCH.items()))
        made = grouped(type(self).__name__, create_env_fn, "distributed", about, {**options, "sync": True})
        self._updates = made.updates
        self._construct(made.makers, policy, made.options)


_LAUNCH = {"backend": "gloo", "launcher": "submitit", "slurm_kwargs": None, "tcp_port": None}


def _about(backend: str, launcher: str, slurm_kwargs: Any, tcp_port: int | None) -> dict[str, Any]:
    """Options of the backend, under its own names, as far as they are given."""
    about = {"process_group_backend": backend, "launcher": launcher, "slurm_kwargs": slurm_kwargs, "port": tcp_port}
    return {name: value for name, value in about.items() if value is not None}


DistributedDataCollector = DistributedCollector
DistributedSyncDataCollector = DistributedSyncCollector
