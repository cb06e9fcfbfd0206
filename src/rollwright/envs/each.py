"""One environment among several: its part of the arguments of a reset, and its place in errors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rollwright.errors import EnvError, RollwrightError

EACH = "list_of_kwargs"  # among the arguments of a reset: those of one worker each


def own_kwargs(kwargs: Mapping[str, Any], worker: int) -> dict[str, Any]:
    """The arguments of a reset for one worker: those of all, and its own out of ``list_of_kwargs``, which win."""
    common = dict(kwargs)
    each = common.pop(EACH, None)
    return common if each is None else {**common, **each[worker]}


def renamed(place: str, error: RollwrightError) -> RollwrightError:
    """The error with its place in front; subclasses from elsewhere may take other arguments."""
    kind = type(error) if type(error).__module__ == RollwrightError.__module__ else EnvError
    return kind(f"{place}: {error}")
