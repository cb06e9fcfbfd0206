"""Variants of a test: those that show a promise, and the rest, which run where tests may be slow."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import pytest

__all__ = ["in_turn", "one_quick"]


def in_turn(values: Iterable[Any], others: Sequence[Any]) -> list[Any]:
    """Each value with one of the others, which take turns, for ``parametrize``; all other pairs are slow."""
    return [
        pytest.param(value, other, id=f"{_name(value)}-{_name(other)}", marks=[] if quick else [pytest.mark.slow])
        for number, value in enumerate(values)
        for turn, other in enumerate(others)
        for quick in (turn == number % len(others),)
    ]


def one_quick(values: Iterable[Any], chosen: Any) -> list[Any]:
    """The values, for ``parametrize``; all but the chosen one are slow: the promise does not depend on them."""
    return [pytest.param(each, id=_name(each), marks=[] if each == chosen else [pytest.mark.slow]) for each in values]


def _name(value: Any) -> str:
    return str(getattr(value, "__name__", value))
