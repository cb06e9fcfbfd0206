"""Checks of arguments of collectors' methods, for one process and for many."""

from __future__ import annotations

from collections.abc import Mapping
from numbers import Integral
from typing import Any, Literal, get_args

#: What ``stats()`` takes as ``workers``.
WorkerStats = bool | Literal["aggregate", "per_worker", "both"]

_LEAST, _MOST = -(2**63), 2**64 - 1  # that torch takes


def checked_seed(seed: Any) -> int:
    """A seed as an integer.

    Raises:
        TypeError: it is none.
        ValueError: torch cannot be seeded with it.
    """
    if not isinstance(seed, Integral) or isinstance(seed, bool):
        raise TypeError(f"seed: expected an integer, got {type(seed).__name__}: {seed!r}. Pass for example 0.")
    if not _LEAST <= int(seed) <= _MOST:
        raise ValueError(f"seed: expected an integer of -2**63 to 2**64 - 1, got {seed}. Pass a smaller one.")
    return int(seed)


def checked_state(state_dict: Any) -> Mapping[str, Any]:
    """A collector's state.

    Raises:
        TypeError: it is no dictionary.
    """
    if not isinstance(state_dict, Mapping):
        raise TypeError(
            f"state_dict: expected a dictionary, got {type(state_dict).__name__}: {state_dict!r}. Pass what "
            "state_dict() of a collector returned."
        )
    return state_dict


def check_worker_stats(workers: Any) -> None:
    """Test the argument ``workers`` of ``stats()``.

    Raises:
        ValueError: it is none of what is taken.
    """
    if not isinstance(workers, bool) and workers not in get_args(get_args(WorkerStats)[1]):
        raise ValueError(
            f"stats: expected workers=True, False, 'aggregate', 'per_worker' or 'both', got {workers!r}. Pass True, "
            "the default, for a list with an entry for each worker."
        )
