"""BaseCollector: what every collector can do, wherever its environments run."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from tensordict import TensorDictBase

from rollwright.collectors.attribute_paths import resolve
from rollwright.collectors.profiling import ProfileConfig
from rollwright.collectors.weights.receiving import WeightDoor

__all__ = ["BaseCollector"]

PreHook = Callable[[], None]
PostHook = Callable[[TensorDictBase], None]


class BaseCollector(WeightDoor, ABC):
    """Iterates over batches of experience.

    A collector is an iterable (each ``iter()`` goes on where the last one stopped), an iterator through
    :meth:`next`, and a context manager that shuts down on the way out.
    """

    _pre_collect_hook: PreHook | None = None
    _post_collect_hook: PostHook | None = None
    _worker_idx: int | None = None
    _profile_config: ProfileConfig | None = None
    _iterating: Iterator[TensorDictBase | None] | None = None
    _started: bool = False

    # Iteration --------------------------------------------------------------------------------

    @abstractmethod
    def iterator(self) -> Iterator[TensorDictBase | None]:
        """Yield batches until ``total_frames`` are delivered."""

    def __iter__(self) -> Iterator[TensorDictBase | None]:
        return self.iterator()

    def next(self) -> TensorDictBase | None:
        """The next batch, or None when all are delivered.

        With a replay buffer, batches go there and None is returned each time; ``stats()["completed"]`` tells the end,
        as does ``next(collector)``, which raises ``StopIteration``.
        """
        return next(self, None)

    def __next__(self) -> TensorDictBase | None:
        iterating = self.iterator() if self._iterating is None else self._iterating
        self._iterating = None  # stays None at the end, and after an error, which ends a generator for good
        batch = next(iterating)
        self._iterating = iterating
        return batch

    @abstractmethod
    def __len__(self) -> int:
        """Number of batches in all."""

    # Control ----------------------------------------------------------------------------------

    @abstractmethod
    def shutdown(self, timeout: float | None = None, close_env: bool = True, raise_on_error: bool = True) -> None:
        """Release environments and workers. May be called again."""

    def async_shutdown(self, timeout: float | None = None, close_env: bool = True) -> None:
        """Same as :meth:`shutdown`, for a collector that runs in the background."""
        self.shutdown(timeout=timeout, close_env=close_env)

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Keep a collector that runs in the background from stepping inside the ``with`` block."""
        yield

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.shutdown(raise_on_error=error is None)

    @abstractmethod
    def set_seed(self, seed: int, static_seed: bool = False) -> int:
        """Seed environments and torch; returns the seed of the last environment."""

    @abstractmethod
    def state_dict(self) -> OrderedDict[str, Any]:
        """What :meth:`load_state_dict` needs to go on."""

    @abstractmethod
    def load_state_dict(self, state_dict: Mapping[str, Any], **kwargs: Any) -> None:
        """Go on from a saved state."""

    @abstractmethod
    def stats(self) -> dict[str, Any]:
        """A snapshot of counts, rates and episodes that ``json.dumps`` takes."""

    # Hooks ------------------------------------------------------------------------------------

    @property
    def pre_collect_hook(self) -> PreHook | None:
        """Called without arguments before each rollout; may be set at any time."""
        return self._pre_collect_hook

    @pre_collect_hook.setter
    def pre_collect_hook(self, hook: PreHook | None) -> None:
        self._pre_collect_hook = _checked_hook("pre_collect_hook", hook)

    @property
    def post_collect_hook(self) -> PostHook | None:
        """Called with each batch just before it is delivered; may be set at any time."""
        return self._post_collect_hook

    @post_collect_hook.setter
    def post_collect_hook(self, hook: PostHook | None) -> None:
        self._post_collect_hook = _checked_hook("post_collect_hook", hook)

    def set_pre_collect_hook(self, hook: PreHook | None) -> None:
        """Set :attr:`pre_collect_hook`."""
        self.pre_collect_hook = hook

    def set_post_collect_hook(self, hook: PostHook | None) -> None:
        """Set :attr:`post_collect_hook`."""
        self.post_collect_hook = hook

    # Reaching in ------------------------------------------------------------------------------

    @property
    def worker_idx(self) -> int:
        """Index of this collector among its siblings.

        Raises:
            RuntimeError: it was never set.
        """
        if self._worker_idx is None:
            raise RuntimeError("worker_idx is not set. Pass worker_idx= to the collector, or assign it.")
        return self._worker_idx

    @worker_idx.setter
    def worker_idx(self, value: int | None) -> None:
        self._worker_idx = value

    def cascade_execute(self, attr_path: str, *args: Any, **kwargs: Any) -> Any:
        """Call what a path leads to, such as ``"env.transform[0].set_extra_state"``.

        Raises:
            AttributeError: the path does not exist.
            TypeError: what it leads to cannot be called.
        """
        found = resolve(self, attr_path)
        if not callable(found):
            raise TypeError(f"attr_path: {attr_path!r} leads to {type(found).__name__}, which cannot be called.")
        return found(*args, **kwargs)

    def get_distant_attr(self, attr: str) -> Any:
        """What a path leads to, such as ``"env.batch_size"``."""
        return resolve(self, attr)

    def map_fn(
        self,
        method_name: str,
        list_of_args: Sequence[Sequence[Any]] | None = None,
        list_of_kwargs: Sequence[Mapping[str, Any]] | None = None,
    ) -> Any:
        """Call a method of the collector, once for each set of arguments.

        Returns:
            The value of the call; a list of values where several sets of arguments are given.
        """
        count = max(len(list_of_args or ()), len(list_of_kwargs or ()), 1)
        all_args = list_of_args if list_of_args is not None else [()] * count
        all_kwargs = list_of_kwargs if list_of_kwargs is not None else [{}] * count
        if len(all_args) != len(all_kwargs):
            raise ValueError(
                f"list_of_args has {len(all_args)} entries, list_of_kwargs {len(all_kwargs)}. Give one of each a call."
            )
        call = resolve(self, method_name)
        values = [call(*args, **kwargs) for args, kwargs in zip(all_args, all_kwargs, strict=True)]
        return values[0] if len(values) == 1 else values

    # Profiling --------------------------------------------------------------------------------

    def enable_profile(
        self,
        *,
        workers: list[int] | None = None,
        num_rollouts: int = 3,
        warmup_rollouts: int = 1,
        save_path: str | Path | None = None,
        activities: list[str] | None = None,
        record_shapes: bool = True,
        profile_memory: bool = False,
        with_stack: bool = True,
        with_flops: bool = False,
        on_trace_ready: Callable[[Any], None] | None = None,
    ) -> None:
        """Trace the first rollouts; see :class:`~rollwright.collectors.ProfileConfig` for the arguments.

        Raises:
            RuntimeError: iteration has begun.
            ValueError: ``num_rollouts`` does not exceed ``warmup_rollouts``.
        """
        if self._started:
            raise RuntimeError("enable_profile must be called before iteration begins. Call it on a new collector.")
        self._profile_config = ProfileConfig(
            workers=[0] if workers is None else list(workers),
            num_rollouts=num_rollouts,
            warmup_rollouts=warmup_rollouts,
            save_path=save_path,
            activities=["cpu", "cuda"] if activities is None else list(activities),
            record_shapes=record_shapes,
            profile_memory=profile_memory,
            with_stack=with_stack,
            with_flops=with_flops,
            on_trace_ready=on_trace_ready,
        )

    def disable_profile(self) -> None:
        """Trace no (further) rollouts; what was recorded is written."""
        self._profile_config = None

    @property
    def profile_config(self) -> ProfileConfig | None:
        """What is traced, or None."""
        return self._profile_config


def _checked_hook(name: str, hook: Any) -> Any:
    if hook is not None and not callable(hook):
        raise TypeError(f"{name}: expected a callable or None, got {type(hook).__name__}: {hook!r}.")
    return hook
