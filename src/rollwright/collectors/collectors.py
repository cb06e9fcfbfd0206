"""SyncDataCollector: the collector under its legacy name, with its legacy defaults; and the others, at this path."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Unpack

from tensordict import TensorDictBase

from rollwright._options import with_options
from rollwright.collectors.base import BaseCollector
from rollwright.collectors.collector import Collector
from rollwright.collectors.multi import AsyncCollector, MultiAsyncCollector, MultiCollector, MultiSyncCollector
from rollwright.collectors.options import CollectorOptions
from rollwright.collectors.rollout.environment import EnvMaker
from rollwright.data.layout import MASK
from rollwright.envs.utils import ExplorationType
from rollwright.modules import RandomPolicy

if TYPE_CHECKING:
    from rollwright.collectors.keywords import CollectorKeywords

__all__ = [
    "AsyncCollector",
    "BaseCollector",
    "Collector",
    "MultiAsyncCollector",
    "MultiCollector",
    "MultiSyncCollector",
    "RandomPolicy",
    "SyncDataCollector",
]


@with_options(CollectorOptions)
class SyncDataCollector(Collector):
    """:class:`~rollwright.collectors.Collector` as older programs know it.

    What differs:

    - ``total_frames`` must be a multiple of ``frames_per_batch``.
    - ``storing_device`` defaults to ``"cpu"``.
    - ``split_trajs=None`` splits when ``max_frames_per_traj`` is set, with a warning, unless ``trajs_per_batch`` or
      ``replay_buffer`` is. A split batch also has the entries ``"mask"``,
      ``"reward"`` and ``("collector", "step_count")`` where older programs look for them (the same tensors as
      ``("collector", "mask")``, ``("next", "reward")`` and ``"step_count"``).
    - ``exploration_mode``, a string, is accepted for ``exploration_type``.

    Example:
        >>> import warnings
        >>> from rollwright.envs import GymEnv
        >>> with warnings.catch_warnings(action="ignore"):  # splitting is advised against
        ...     collector = SyncDataCollector(
        ...         lambda: GymEnv("Pendulum-v1"), frames_per_batch=200, total_frames=2000, max_frames_per_traj=50
        ...     )
        >>> batch = collector.next()
        >>> batch.shape, batch["mask"].shape, batch["collector", "step_count"][0, :3]
        (torch.Size([4, 50]), torch.Size([4, 50]), tensor([0, 1, 2]))
        >>> collector.shutdown()
    """

    def __init__(
        self,
        create_env_fn: EnvMaker,
        policy: Callable[..., Any] | None = None,
        *,
        exploration_mode: str | None = None,
        **options: Unpack[CollectorKeywords],
    ) -> None:
        if exploration_mode is not None:
            if "exploration_type" in options:
                raise ValueError("exploration_mode is the older form of exploration_type. Pass the latter alone.")
            try:
                options["exploration_type"] = ExplorationType[exploration_mode.upper()]
            except KeyError:
                modes = ", ".join(repr(member.name.lower()) for member in ExplorationType)
                raise ValueError(f"exploration_mode: expected one of {modes}, got {exploration_mode!r}.") from None
        options.setdefault("storing_device", "cpu")
        parsed = CollectorOptions.parse(options, type(self))
        if parsed.total_frames != -1 and parsed.total_frames % parsed.frames_per_batch:
            whole = -(-parsed.total_frames // parsed.frames_per_batch) * parsed.frames_per_batch
            raise ValueError(
                f"total_frames: expected a multiple of frames_per_batch={parsed.frames_per_batch}, got "
                f"{parsed.total_frames}. Pass {whole}, or use Collector, which rounds up."
            )
        if parsed.split_trajs is None:
            whole = parsed.trajs_per_batch is not None or parsed.replay_buffer is not None
            options["split_trajs"] = (parsed.max_frames_per_traj or 0) > 0 and not whole
        super().__init__(create_env_fn, policy, **options)

    def _split(self, batch: TensorDictBase) -> TensorDictBase:
        batch = super()._split(batch)
        batch.set("mask", batch.get(MASK))
        reward = batch.get(("next", "reward"), None)
        if reward is not None:
            batch.set("reward", reward)
        count = batch.get("step_count", None)
        if count is not None:
            batch.set(("collector", "step_count"), count.squeeze(-1))
        return batch
