"""RPCCollector: a collector whose batches and weights move by calls of torch.distributed.rpc."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
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
class RPCCollector(MultiCollector):
    """Collects experience in groups of workers, each a member of a group of RPC: ``backend="rpc"``.

    A worker that dies is replaced (``on_worker_failure="restart"``); a member that dies cannot be, which is an error:
    torch lets no other join. :class:`DistributedCollector` replaces both. ``RPCDataCollector`` is the same class.

    ``backend_options`` takes others of :class:`~rollwright.collectors.workers.remote.rpc.Options`, such as
    ``host_timeout``.

    Args:
        create_env_fn: makes an environment, in a worker; or a list of such functions, one for each group.
        policy: as of :class:`Collector`; each worker acts with a copy, see :meth:`update_policy_weights_`.
        sync: whether a batch is of all workers; if False, batches are of one worker each, in the order in which they
            are finished.
        launcher: what starts groups, see :class:`DistributedCollector`.
        slurm_kwargs: parameters of jobs, such as ``slurm_partition``, ``gpus_per_node``, ``timeout_min``.
        tcp_port: where this process listens; None: at any port that is free.
        tensorpipe_options: arguments of ``torch.distributed.rpc.TensorPipeRpcBackendOptions`` for this process: device
            maps and so on. Groups are members ``"group-0"``, ``"group-1"``, ...
        visible_devices: devices that calls of this process may bring tensors to, and take them from.
        **options: how many groups there are, and those of
            :class:`~rollwright.collectors.workers.options.WorkerOptions` and of
            :class:`~rollwright.collectors.CollectorOptions`.

    Raises:
        MissingExtraError: submitit is not installed.
        RuntimeError: this process is in a group of RPC already.
        ValueError, TypeError: an option is wrong.
        WorkerError: a worker could not make its environment or its policy.

    Example:
        >>> import warnings
        >>> from rollwright.envs import GymEnv
        >>> with warnings.catch_warnings(action="ignore"):  # torch keeps RPC in maintenance
        ...     collector = RPCCollector(
        ...         lambda: GymEnv("CartPole-v1"),
        ...         num_collectors=2,
        ...         launcher="mp",
        ...         sync=True,
        ...         frames_per_batch=200,
        ...         total_frames=400,
        ...     )
        >>> [batch.shape for batch in collector]
        [torch.Size([2, 100]), torch.Size([2, 100])]
        >>> collector.shutdown()
    """

    def __init__(
        self,
        create_env_fn: EnvMakers,
        policy: Callable[..., Any] | None = None,
        *,
        sync: bool = False,
        launcher: Literal["mp", "submitit", "torchrun", "join"] = "submitit",
        slurm_kwargs: Mapping[str, Any] | None = None,
        tcp_port: int | None = None,
        tensorpipe_options: Mapping[str, Any] | None = None,
        visible_devices: Sequence[Any] | None = None,
        **options: Unpack[GroupKeywords],
    ) -> None:
        self.closed = True
        if visible_devices is not None:
            if "devices" in (tensorpipe_options or {}):
                raise ValueError("visible_devices: got it as 'devices' in tensorpipe_options, too. Pass it once.")
            tensorpipe_options = {**(tensorpipe_options or {}), "devices": list(visible_devices)}
        about: dict[str, Any] = {"launcher": launcher, "slurm_kwargs": slurm_kwargs, "port": tcp_port}
        about["tensorpipe_options"] = tensorpipe_options
        about = {name: value for name, value in about.items() if value is not None}
        made = grouped(type(self).__name__, create_env_fn, "rpc", about, {**options, "sync": sync})
        self._updates = made.updates
        self._construct(made.makers, policy, made.options)


RPCDataCollector = RPCCollector
