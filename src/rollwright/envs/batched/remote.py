"""Environments in other processes as one object: their attributes, seeds, state and end."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, Self

import torch

from rollwright._warnings import warn_user
from rollwright.envs.batched.hosting import calls
from rollwright.envs.batched.hosting.calls import EnvFacts, Sign
from rollwright.envs.batched.hosting.processes import SHORT_CLOSE_S, EnvProcesses
from rollwright.envs.batched.hosting.rows import HostedRows
from rollwright.envs.batched.views import IndexedEnvs
from rollwright.errors import EnvError


class RemoteEnvs(IndexedEnvs):
    """All of :class:`~rollwright.envs.batched.parallel.ParallelEnv` but steps and resets."""

    _not_saved = ("_launch", "openings", "_hosted", "_facts")

    _hosted: HostedRows
    _facts: list[EnvFacts]
    _options: dict[str, Any]  # of the constructor, for copies
    _ended = False

    @property
    def _processes(self) -> EnvProcesses:
        return self._hosted.processes

    @property
    def recreations(self) -> list[int]:
        """How many environments were in each place before."""
        return self._processes.recreations

    @property
    def num_recreated(self) -> int:
        """How many environments were recreated, those inside of them included."""
        return self._processes.num_recreated

    # The environments together ------------------------------------------------------------------

    def _ask(self, function: Callable[..., Any], *args: Any, rows: Iterable[int] | None = None) -> dict[int, Any]:
        """See :meth:`HostedRows.call`."""
        return self._hosted.call(function, *args, rows=rows)

    def call_in_hosts(self, function: Callable[..., object]) -> None:
        """See :class:`BatchedEnv`."""
        self._ask(function)

    def seed_rows(self, rows: Sequence[int], seed: int | None, static_seed: bool) -> int | None:
        """See :class:`IndexedEnvs`."""
        last = None
        self._hosted.num_seedings += 1
        for row in rows:
            last = self._ask(calls.set_seed, seed, static_seed, rows=[row])[row]
            if seed is not None and last is not None and not static_seed:
                seed = last + 1
        return last

    def to(self, device: torch.device | str | int | None) -> Self:  # type: ignore[override]
        """Move the environments and the batch; returns the environment."""
        if device is not None:
            self._facts[:] = self._ask(calls.move, device).values()
        super().to(device)
        return self

    def close(self, *, raise_if_closed: bool = True) -> None:
        """Close all environments and end their processes, within seconds. A second call raises by default.

        A call that follows an interrupted one ends what is left, and waits no more than a second for environments.

        Warns:
            RuntimeWarning: a process did not end by itself.
        """
        hurries = self.is_closed and not self._ended  # the call before was interrupted
        super().close(raise_if_closed=raise_if_closed and not hurries)
        if self._ended:
            return
        self._hosted.is_closed = True
        raised, forced = self._processes.end(SHORT_CLOSE_S if hurries else None)
        self._ended = True
        if forced:
            warn_user(f"{type(self).__name__}: {'; '.join(forced)}.", RuntimeWarning)
        for one in raised:
            raise one.failure.error(f"{type(self).__name__}[{one.row}]")

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if "_hosted" not in self.__dict__ or name.startswith("_") or self.is_closed:
                raise
        return self.look_up(name, range(self.num_workers))

    def look_up(self, name: str, rows: Sequence[int]) -> Any:
        """See :class:`IndexedEnvs`."""
        values = self._ask(calls.look_up, name, rows=rows)
        methods = [isinstance(value, Sign) for value in values.values()]
        if all(methods):
            return partial(self._call, name, rows)
        values = self._ask(calls.fetch, name, rows=rows) if any(methods) else values
        return [values[row] for row in rows]

    def _call(self, method: str, rows: Sequence[int], /, *args: Any, **kwargs: Any) -> list[Any]:
        answers = self._ask(calls.call, method, args, kwargs, rows=rows)
        values = [answers[row] for row in rows]
        return [self if isinstance(value, Sign) else value for value in values]

    # State ------------------------------------------------------------------------------------

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        for row, state in self._ask(calls.state).items():
            destination.update({f"{prefix}worker{row}.{key}": value for key, value in state.items()})

    def _load_from_state_dict(
        self,
        state_dict: dict[str, Any],
        prefix: str,
        local_metadata: Any,
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        places = [f"{prefix}worker{row}." for row in range(self.num_workers)]
        mine: dict[int, dict[str, Any]] = {row: {} for row in range(self.num_workers)}
        others = {}
        for key, value in state_dict.items():
            row = next((row for row, place in enumerate(places) if key.startswith(place)), None)
            if row is None:
                others[key] = value
            else:
                mine[row][key[len(places[row]) :]] = value
        for row, (missing, unexpected, error) in self._ask(calls.load_state, mine).items():
            missing_keys += [places[row] + key for key in missing]
            unexpected_keys += [places[row] + key for key in unexpected] if strict else []
            error_msgs += [f"{places[row]}: {error}"] if error else []
        super()._load_from_state_dict(others, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs)

    def save_remote(self) -> tuple[list[dict[str, Any]], list[str]]:
        """All that the environments are, one state each; and what of them could not be saved."""
        saved = self._ask(calls.checkpoint)
        waiting = self._hosted.recreation.due(range(self.num_workers))
        unsaved = [
            f"{type(self).__name__} [worker {row}] {line}" for row, (_, lines) in saved.items() for line in lines
        ]
        return [{**state, "waits": row in waiting} for row, (state, _) in saved.items()], unsaved

    def load_remote(self, states: Sequence[dict[str, Any]]) -> None:
        """Let the environments be what :meth:`save_remote` has saved."""
        self._ask(calls.load_checkpoint, dict(enumerate(states)))
        self._hosted.recreation.load(row for row, state in enumerate(states) if state.get("waits"))

    def __reduce__(self) -> tuple[Any, ...]:
        """Copies have copies of the environments, in processes of their own."""
        if self.is_closed:
            raise EnvError(f"{self} is closed, and has no environments to copy. Copy it before close().")
        makers = [partial(pickle.loads, data) for data in self._ask(calls.pickled).values()]
        state = {name: value for name, value in vars(self).items() if name not in self._not_saved}
        return _again, (type(self), makers, self._options), state

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}(num_workers={self.num_workers}, env={self._facts[0].text}, "
            f"batch_size={list(self.batch_size)}, device={self.device})"
        )


def _again(cls: Any, makers: list[Any], options: dict[str, Any]) -> Any:
    return cls(len(makers), makers, **options)
