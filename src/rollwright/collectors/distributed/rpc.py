"""RPCCollector: a collector of groups on a cluster, under the name that programs for torch's RPC know."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, Unpack

from rollwright._options import with_options
from rollwright.collectors.distributed.generic import LEFT_OUT, GroupOptions, grouped
from rollwright.collectors.multi import MultiCollector
from rollwright.collectors.options import CollectorOptions
from rollwright.collectors.workers.options import WorkerOptions

if TYPE_CHECKING:
    from rollwright.collectors.keywords import GroupKeywords
    from rollwright.collectors.rollout.environment import EnvMakers

__all__ = ["RPCCollector", "RPCDataCollector"]


@with_options(GroupOptions, WorkerOptions, CollectorOptions, leave_out=LEFT_OUT)
class RPCCollector(MultiCollector):
    """Collects experience in groups of workers on other machines: ``backend="rpc"``.

    It does what :class:`DistributedCollector` does: batches and weights go by one authenticated connection for each
    group, and a group that dies is replaced (``on_worker_failure="restart"``). No call of torch's RPC is made.
    ``RPCDataCollector`` is the same class.

    ``backend_options`` takes others of :class:`~rollwright.collectors.workers.remote.launching.Options`, such as
    ``host_timeout``.

    Args:
        create_env_fn: makes an environment, in a worker; or a list of such functions, one for each group.
        policy: as of :class:`Collector`; each worker acts with a copy, see :meth:`update_policy_weights_`.
        sync: whether a batch is of all workers; if False, batches are of one worker each, in the order in which they
            are finished.
        launcher: what starts groups, see :class:`DistributedCollector`.
        slurm_kwargs: parameters of jobs, such as ``slurm_partition``, ``gpus_per_node``, ``timeout_min``.
        tcp_port: where this process listens; None: at any port that is free.
        tensorpipe_options, visible_devices: of torch's RPC, for programs that name them: none is used.
        **options: how many groups there are, and those of
            :class:`~rollwright.collectors.workers.options.WorkerOptions` and of
            :class:`~rollwright.collectors.CollectorOptions`.

    Raises:
        MissingExtraError: submitit is not installed.
        ValueError, TypeError: an option is wrong.
        WorkerError: a worker could not make its environment or its policy.

    Example:
        >>> from rollwright.envs import GymEnv
        >>> with RPCCollector(
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
        launcher: Literal["mp", "submitit", "torchrun", "join"] = "submitit",
        slurm_kwargs: Mapping[str, Any] | None = None,
        tcp_port: int | None = None,
        tensorpipe_options: Mapping[str, Any] | None = None,
        visible_devices: Sequence[Any] | None = None,
        **options: Unpack[GroupKeywords],
    ) -> None:
        if visible_devices is not None:
            if "devices" in (tensorpipe_options or {}):
                raise ValueError("visible_devices: got it as 'devices' in tensorpipe_options, too. Pass it once.")
            tensorpipe_options = {**(tensorpipe_options or {}), "devices": list(visible_devices)}
        about = {"launcher": launcher, "slurm_kwargs": slurm_kwargs, "port": tcp_port}
        about["tensorpipe_options"] = tensorpipe_options
        given = {**options, "sync": sync}
        makers, given, self._updates = grouped(type(self).__name__, create_env_fn, "rpc", about, given)
        self._construct(makers, policy, given)


RPCDataCollector = RPCCollector
