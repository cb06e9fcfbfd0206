"""RayCollector: a collector whose workers run in actors of a Ray cluster."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Unpack

from rollwright._options import with_options
from rollwright._processes.network.ray import leave_connected
from rollwright.collectors.distributed.generic import LEFT_OUT, GroupOptions, grouped
from rollwright.collectors.multi import MultiCollector
from rollwright.collectors.options import CollectorOptions
from rollwright.collectors.workers.options import WorkerOptions

if TYPE_CHECKING:
    from rollwright.collectors.keywords import GroupKeywords
    from rollwright.collectors.rollout.environment import EnvMakers

__all__ = ["RayCollector"]


@with_options(GroupOptions, WorkerOptions, CollectorOptions, leave_out=LEFT_OUT)
class RayCollector(MultiCollector):
    """Collects experience in actors of a Ray cluster: a :class:`MultiCollector` with ``backend="ray"``.

    Each actor runs ``num_workers_per_collector`` workers, each with an environment and a policy of its own. What they
    collect comes to this process by one connection for each actor. Ray is asked for actors, and told when one is not
    needed any more; it carries no data.

    ``backend_options`` takes others of :class:`~rollwright.collectors.workers.remote.ray.Options`, such as
    ``host_timeout``.

    Args:
        create_env_fn: makes an environment, in a worker; or a list of such functions, one for each actor.
        policy: as of :class:`Collector`; each worker acts with a copy, see :meth:`update_policy_weights_`.
        sync: whether a batch is of all workers; if False, batches are of one worker each, in the order in which they
            are finished.
        remote_configs: what Ray reserves for each actor, see
            :class:`~rollwright.collectors.workers.remote.ray.Options`.
        ray_init_config: arguments of ``ray.init``, if the program has not called it.
        **options: how many actors there are (groups), and those of
            :class:`~rollwright.collectors.workers.options.WorkerOptions` and of
            :class:`~rollwright.collectors.CollectorOptions`.

    Raises:
        MissingExtraError: Ray is not installed.
        ValueError, TypeError: an option is wrong, or no node has what actors ask for.
        ConnectionError: no cluster answers at the address.
        WorkerError: a worker could not make its environment or its policy.

    Example:
        >>> from rollwright.envs import GymEnv
        >>> collector = RayCollector(  # doctest: +SKIP
        ...     lambda: GymEnv("CartPole-v1"), num_collectors=2, frames_per_batch=200, total_frames=1000, sync=True
        ... )
        >>> [batch.shape for batch in collector][-1]  # doctest: +SKIP
        torch.Size([2, 100])
        >>> collector.shutdown()  # doctest: +SKIP
    """

    def __init__(
        self,
        create_env_fn: EnvMakers,
        policy: Callable[..., Any] | None = None,
        *,
        sync: bool = False,
        remote_configs: Mapping[str, Any] | Sequence[Mapping[str, Any]] | None = None,
        ray_init_config: Mapping[str, Any] | None = None,
        **options: Unpack[GroupKeywords],
    ) -> None:
        about = {"remote_configs": remote_configs, "ray_init_config": ray_init_config}
        given = {**options, "sync": sync}
        makers, given, self._updates = grouped(type(self).__name__, create_env_fn, "ray", about, given)
        self._construct(makers, policy, given)

    def shutdown(
        self,
        timeout: float | None = None,
        close_env: bool = True,
        raise_on_error: bool = True,
        shutdown_ray: bool = True,
    ) -> None:
        """See :meth:`MultiCollector.shutdown`; the actors end, too.

        Args:
            timeout: seconds for workers to end by themselves.
            close_env: let them close their environments.
            raise_on_error: if False, what went wrong before is not raised.
            shutdown_ray: if False, a cluster that was started for this collector goes on until the program ends. One
                that it has attached to goes on anyway.
        """
        if not shutdown_ray and not self.closed:
            leave_connected()
        super().shutdown(timeout=timeout, close_env=close_env, raise_on_error=raise_on_error)
