"""WorkerCalls: calls methods of the collectors in workers, between two rollouts or inside a pause."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from rollwright.collectors.workers.group import WorkerGroup

Arguments = tuple[Sequence[Any], dict[str, Any]]  # positional ones, and named ones
_SAMPLES = {"list_of_args": "(3,)", "list_of_kwargs": "{'key': 3}"}


class WorkerCalls:
    """Calls what a path leads to, from the collector of each worker.

    Args:
        group: the workers.
        num_workers: how many.
        stored: whether rollouts are written into a replay buffer: then one in progress may be cut short for a call.
        check: raises if the collector was shut down, or failed.
    """

    def __init__(self, group: WorkerGroup, num_workers: int, *, stored: bool, check: Callable[[], None]) -> None:
        self._group, self._num, self._stored, self._check = group, num_workers, stored, check
        self._pausers: list[int] = []  # threads inside pause()

    def between(
        self, path: str, calls: Sequence[Arguments], workers: Sequence[int] | None = None, *, again: bool = True
    ) -> list[Any]:
        """Call something in workers, not in the middle of a rollout; ``again``: if one dies of it, in the next one."""
        self._check()
        return self._group.call(path, calls, workers=workers, between_batches=True, cut=self._stored, again=again)

    def any_time(self, path: str, calls: Sequence[Arguments], workers: Sequence[int] | None = None) -> list[Any]:
        """Call something in workers between two rollouts; inside a pause of this thread, where they rest."""
        if not self.pauses_here:
            return self.between(path, calls, workers, again=False)
        self._check()
        return self._group.call(path, calls, workers=workers)

    def in_all(self, path: str, *args: Any, **kwargs: Any) -> list[Any]:
        """:meth:`any_time`, in all workers, with the same arguments."""
        return self.any_time(path, [(args, kwargs)] * self._num)

    def map(
        self,
        path: str,
        list_of_args: Sequence[Sequence[Any]] | None,
        list_of_kwargs: Sequence[Mapping[str, Any]] | None,
    ) -> list[Any]:
        """:meth:`any_time`, in all workers, with arguments for each.

        Raises:
            TypeError, ValueError: there are not as many, or they are no arguments.
        """
        self._check_list("list_of_args", list_of_args, (list, tuple))
        self._check_list("list_of_kwargs", list_of_kwargs, (Mapping,))
        args = [()] * self._num if list_of_args is None else list_of_args
        kwargs = [{}] * self._num if list_of_kwargs is None else list_of_kwargs
        return self.any_time(path, [(tuple(a), dict(k)) for a, k in zip(args, kwargs, strict=True)])

    def _check_list(self, name: str, given: Any, kinds: tuple[type, ...]) -> None:
        if given is None:
            return
        if not (isinstance(given, Sequence) and all(isinstance(one, kinds) for one in given)):
            raise TypeError(
                f"{name}: expected a list with a {'tuple' if name == 'list_of_args' else 'dictionary'} for each of "
                f"{self._num} workers, got {given!r}. Pass for example [{_SAMPLES[name]}] * {self._num}."
            )
        if len(given) != self._num:
            raise ValueError(f"{name}: expected an entry for each of {self._num} workers, got {len(given)}.")

    def read(self, path: str) -> list[Any]:
        """What a path leads to in each worker, read between two steps."""
        return self._group.call(path, [None] * self._num, again=True)

    # Pauses -----------------------------------------------------------------------------------

    @property
    def pauses_here(self) -> bool:
        """Whether this thread is inside :meth:`pausing`."""
        return threading.get_ident() in self._pausers

    @contextmanager
    def pausing(self) -> Iterator[None]:
        """Keep all workers between two steps inside the ``with`` block."""
        self._check()
        here = threading.get_ident()  # another thread may be the one that collects a block that was never left
        self._pausers.append(here)
        try:
            with self._group.pausing():
                yield
        finally:
            self._pausers.remove(here)
