"""Paths to nested attributes, such as ``env.transform[0]`` or ``_schemes['policy'].weights``."""

from __future__ import annotations

import re
from typing import Any

__all__ = ["resolve"]

_PART = re.compile(r"""\.?(?P<name>[A-Za-z_]\w*)|\[(?P<index>-?\d+)\]|\[(?P<quote>['"])(?P<key>.*?)(?P=quote)\]""")


def resolve(root: Any, path: str) -> Any:
    """The object that ``path`` leads to from ``root``.

    Raises:
        ValueError: the path cannot be read.
        AttributeError: a part of it does not exist; the message names the part.

    Example:
        >>> from types import SimpleNamespace as Box
        >>> resolve(Box(a=[Box(b={"k": 3})]), "a[0].b['k']")
        3
    """
    position, found = 0, root
    while position < len(path):
        part = _PART.match(path, position)
        if part is None or (position == 0 and part.group(0).startswith(".")):
            raise ValueError(
                f"path: expected names, [numbers] and ['keys'] joined by dots, got {path!r}, which cannot be read "
                f"from position {position}."
            )
        try:
            if part["name"] is not None:
                found = getattr(found, part["name"])
            else:
                found = found[int(part["index"]) if part["index"] is not None else part["key"]]
        except (AttributeError, IndexError, KeyError, TypeError) as error:
            raise AttributeError(
                f"path: {path!r} stops at {path[: part.end()]!r}: {type(found).__name__} has no {part.group(0)!r}."
            ) from error
        position = part.end()
    return found
