"""DeliveringCore: from rollouts to what a collector yields or writes."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, Unpack

from tensordict import TensorDictBase, is_tensor_collection

from rollwright._keys import is_private
from rollwright.collectors.delivery.stored import choose_delivery
from rollwright.collectors.profiling import RolloutProfiler
from rollwright.collectors.rollout.environment import EnvMaker
from rollwright.collectors.rollout.rollout import RolloutCore
from rollwright.data.layout import split_trajectories

if TYPE_CHECKING:
    from rollwright.collectors.keywords import CollectorKeywords

__all__ = ["SPLITS", "DeliveringCore"]

SPLITS = (
    "{}: split_trajs=True pads trajectories, and cuts them where batches end. Take batches as they are (the default), "
    "which tell trajectories apart by ('collector', 'traj_ids'), or pass trajs_per_batch= for whole ones."
)


class DeliveringCore(RolloutCore):
    """The part of :class:`~rollwright.collectors.Collector` that delivers what was collected."""

    _profiler: RolloutProfiler | None = None
    _collector: int | None = None  # the thread that takes a rollout which will be delivered, while it does

    def __init__(
        self, create_env_fn: EnvMaker, policy: Callable[..., Any] | None = None, **options: Unpack[CollectorKeywords]
    ) -> None:
        super().__init__(create_env_fn, policy, **options)
        self._delivery = choose_delivery(self)
        if self.options.split_trajs:
            warnings.warn(
                SPLITS.format(type(self).__name__),
                UserWarning,
                stacklevel=2 if type(self).__init__ is DeliveringCore.__init__ else 3,
            )
        if self.options.postproc is not None and not self.options.extend_buffer:
            warnings.warn(
                f"{type(self).__name__}: postproc works on whole rollouts, and with extend_buffer=False is not called. "
                "Give the replay buffer a transform instead, or pass extend_buffer=True.",
                UserWarning,
                stacklevel=2 if type(self).__init__ is DeliveringCore.__init__ else 3,
            )

    def iterator(self) -> Iterator[TensorDictBase | None]:
        """Yield until ``total_frames`` are stepped, from wherever the collector stands.

        Batches; or, with a replay buffer, None for each rollout that was written there.
        """
        while True:
            self._check_idle("iteration")
            if not self._delivery.ready():
                self._delivery.ended()
                return
            self._delivery.await_room()
            yield self._delivery.next()

    @property
    def completed(self) -> bool:
        """Whether ``total_frames`` were stepped."""
        return self._frames >= self.total_frames

    def rollout(self) -> TensorDictBase:
        """See :meth:`RolloutCore.rollout`; trajectories that go on in it cannot be delivered whole any more."""
        if self._collecting:
            return super().rollout()
        self._check_idle("rollout")
        try:
            return super().rollout()
        finally:
            self._delivery.missed()

    @property
    def _collecting(self) -> bool:
        """Whether the caller is inside a rollout that will be delivered."""
        return self._collector == threading.get_ident()

    def _collect(self) -> TensorDictBase:
        """Take a rollout, and count its frames."""
        self._begun = False
        self._check_open()
        self._started = True
        self._start_profiler()
        self._collector = threading.get_ident()
        try:
            with self._timer.running():
                batch = self.rollout()
                self._frames += self._taken  # what was stepped, whatever becomes of it
                self._timer.frames += self._taken
        finally:
            self._collector = None
        return batch

    @contextmanager
    def _or_begin_anew(self) -> Iterator[None]:
        """Where the ``with`` block raises, nobody gets these steps: no trajectory goes on across the hole."""
        try:
            yield
        except BaseException:
            if self._begun:
                self._path.carrier = None
            raise

    def _hand_out(
        self, batch: TensorDictBase, store: Callable[[TensorDictBase], None] | None = None, *, count: bool = True
    ) -> TensorDictBase:
        """Shape a batch, count it, show it to the hook, and store it."""
        with self._timer.running():
            batch = self._shape(batch)
        self._iter += count
        if self._post_collect_hook is not None:
            self._post_collect_hook(batch)
        if store is not None:
            with self._timer.running():
                store(batch)
        return batch

    def _shape(self, batch: TensorDictBase) -> TensorDictBase:
        """Split, post-process, and drop private entries."""
        if self.options.split_trajs:
            batch = self._split(batch)
        if self.options.postproc is not None:
            batch = self.options.postproc(batch)
            if not is_tensor_collection(batch):
                raise TypeError(
                    f"postproc: expected it to return a TensorDict, got {type(batch).__name__}. Let it return one."
                )
            private = [key for key in batch.keys(True) if is_private(key)]
            batch = batch.exclude(*private) if private else batch
        return batch

    def _split(self, batch: TensorDictBase) -> TensorDictBase:
        return split_trajectories(batch, prefix="collector")

    def __len__(self) -> int:
        if self._delivery.num_batches is None:
            raise self._delivery.no_length
        return self._delivery.num_batches

    def reset(self, index: Any = None, **kwargs: Any) -> None:
        """See :meth:`RolloutCore.reset`; trajectories that are held (``trajs_per_batch``) are dropped.

        Args:
            index: anything that indexes the environment's batch; None for all.
            **kwargs: go to the environment's ``reset``.
        """
        with self._between_batches():
            super().reset(index, **kwargs)
            if index is None:
                self._delivery.forget()

    def set_seed(self, seed: int, static_seed: bool = False) -> int:
        """See :meth:`RolloutCore.set_seed`; trajectories that are held (``trajs_per_batch``) are dropped."""
        with self._between_batches():
            last = super().set_seed(seed, static_seed=static_seed)
            self._delivery.forget()
        return last

    # For the thread of a collector that runs in the background ------------------------------------

    @property
    def _in_background(self) -> bool:
        """Whether a thread collects, and others may look at the buffer meanwhile."""
        return False

    def _version_loaded(self) -> None:
        """The version of the weights was loaded: whoever counts on from it is told."""

    def _check_idle(self, what: str) -> None:
        """Raise where a thread collects, and this is not it."""

    def _between_batches(self) -> AbstractContextManager[None]:
        """Keep a thread that collects between two batches inside the ``with`` block."""
        return nullcontext()

    # Profiling ------------------------------------------------------------------------------------

    def _start_profiler(self) -> None:
        config = self._profile_config
        if config is not None and self._profiler is None:
            self._profiler = RolloutProfiler(config, self._worker_idx or 0)
        if self._profiler is not None:
            self._profiler.start()

    def _step_profiler(self) -> None:
        if self._profiler is not None:
            self._profiler.step()

    def disable_profile(self) -> None:
        """Trace no (further) rollouts; what was recorded is written."""
        super().disable_profile()
        if self._profiler is not None:
            self._profiler.stop()
            self._profiler = None
