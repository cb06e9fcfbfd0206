"""Recognises transforms of other libraries, which must not be called as functions."""

from __future__ import annotations

from typing import Any

__all__ = ["foreign_transform"]

_HOOKS = ("transform_observation_spec", "transform_input_spec")


def foreign_transform(thing: Any) -> str | None:
    """The name of an object that is a transform of another library; None for ours, and for anything else.

    A function is called and no more. Such a transform does something at resets, to specs, or in the inverse, and if it
    was called it would do a part of it, or nothing, without an error.

    Args:
        thing: what is neither one of our transforms nor a type.
    """
    if isinstance(thing, type) or not any(callable(getattr(type(thing), hook, None)) for hook in _HOOKS):
        return None
    return f"{type(thing).__module__}.{type(thing).__qualname__}"
