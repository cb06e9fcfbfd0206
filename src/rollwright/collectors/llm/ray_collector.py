"""RayLLMCollector: dialogues from actors of a Ray cluster."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Unpack

from rollwright._options import with_options
from rollwright.collectors.llm.options import LLMOptions
from rollwright.collectors.llm.workers import MultiLLMCollector, with_worker_count
from rollwright.collectors.workers.options import BackendOptions, WorkerOptions

if TYPE_CHECKING:
    from rollwright.collectors.keywords import LLMKeywords
    from rollwright.collectors.rollout.environment import EnvMakers

_INSTEAD = {
    "backend": "its class says where the workers are. Drop it.",
    "num_workers": "pass num_collectors=, and backend_options={'num_workers_per_collector': n}.",
    "sync": "here it is called sync_iter.",
}


@with_options(LLMOptions, BackendOptions, WorkerOptions, leave_out=list(_INSTEAD))
class RayLLMCollector(MultiLLMCollector):
    """Collects dialogues in actors of a Ray cluster: ``LLMCollector(num_collectors=N, backend="ray")``.

    Each actor has an environment and an engine of its own, which ``policy_factory`` makes there, and takes the
    conversations of each N-th group. What they collect comes to this process by one connection for each actor.

    Args:
        env: makes an environment, in an actor; or a list of such functions, one for each.
        policy: sent to each actor; an engine cannot be sent: pass ``policy_factory``.
        sync_iter: True: actors rest between two batches, and a batch has what all of them took, along the first
            dimension. False: they collect the next batches meanwhile, and each is of one actor.
        remote_config: what Ray reserves for each actor, see
            :class:`~rollwright.collectors.workers.remote.ray.Options`; a dictionary, or a list with one for each.
        ray_init_config: arguments of ``ray.init``, if the program has not called it.
        num_cpus: of each actor; None: what ``remote_config`` says, or one for each worker.
        num_gpus: of each actor; None: what ``remote_config`` says.
        **options: how many actors there are (``num_collectors``, 1 by default), those of
            :class:`~rollwright.collectors.llm.options.LLMOptions` and of
            :class:`~rollwright.collectors.workers.options.WorkerOptions`.

    Raises:
        MissingExtraError: Ray is not installed.
        ValueError, TypeError: an option is wrong, or no node has what actors ask for.
        ConnectionError: no cluster answers at the address.
        WorkerError: an actor could not make its environment or its policy.
    """

    def __init__(
        self,
        env: EnvMakers | None = None,
        policy: Callable[..., Any] | None = None,
        *,
        sync_iter: bool = True,
        remote_config: Mapping[str, Any] | Sequence[Mapping[str, Any]] | None = None,
        ray_init_config: Mapping[str, Any] | None = None,
        num_cpus: float | None = None,
        num_gpus: float | None = None,
        **options: Unpack[LLMKeywords],
    ) -> None:
        self.closed = True
        given = dict[str, Any](options)
        for name, instead in _INSTEAD.items():
            if name in given:
                raise TypeError(f"RayLLMCollector has no option {name!r}: {instead}")
        if not isinstance(sync_iter, bool):
            raise TypeError(f"sync_iter: expected True or False, got {type(sync_iter).__name__}: {sync_iter!r}.")
        configs = _reserving(remote_config, {"num_cpus": num_cpus, "num_gpus": num_gpus})
        about = {"remote_configs": configs, "ray_init_config": ray_init_config}
        for name in given.get("backend_options") or {}:
            if name in about:
                raise ValueError(
                    f"backend_options: got {name!r}, which is said by {name.removesuffix('s')}=. Pass it there."
                )
        given["backend_options"] = {**about, **(given.get("backend_options") or {})}
        if sync_iter:
            given.setdefault("cat_results", 0)
        super().__init__(env, policy, **with_worker_count(env, {**given, "backend": "ray", "sync": sync_iter}))


def _reserving(remote_config: Any, asked: Mapping[str, float | None]) -> Any:
    """What Ray reserves for each actor.

    Raises:
        ValueError: something is said twice, with two values.
    """
    own = {name: value for name, value in asked.items() if value is not None}
    if not own or not isinstance(remote_config, Mapping | list | tuple | None):
        return remote_config  # of another type: its check says so
    each = remote_config if isinstance(remote_config, list | tuple) else [remote_config or {}]
    for config in each:
        for name, value in own.items():
            if isinstance(config, Mapping) and config.get(name, value) != value:
                raise ValueError(
                    f"{name}: got {value!r}, and {config[name]!r} in remote_config. Pass it in one of the two."
                )
    made = [{**config, **own} if isinstance(config, Mapping) else config for config in each]
    return made if isinstance(remote_config, list | tuple) else made[0]
