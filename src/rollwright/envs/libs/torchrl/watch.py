"""Watch: notices that an object of TorchRL was changed after it was translated."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch

from rollwright._foreign import class_path
from rollwright.errors import EnvError

__all__ = ["Itself", "Watch"]


class Itself(NamedTuple):
    """An object, equal to itself alone; shown by its class."""

    thing: object

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Itself) and other.thing is self.thing

    def __hash__(self) -> int:
        return id(self.thing)

    def __repr__(self) -> str:
        return class_path(self.thing)


class Watch:
    """What a translation of an object depends on.

    Args:
        theirs: the object.
        read: from it to values by name.
    """

    def __init__(self, theirs: Any, read: Callable[[Any], Mapping[str, Any]]) -> None:
        self._theirs, self._read = theirs, read
        self._then = _copied(read(theirs))

    def check(self) -> None:
        """Test that the object is what was translated.

        Raises:
            EnvError: it was changed.
        """
        now = _copied(self._read(self._theirs))
        if now != self._then:
            name = next(name for name, value in now.items() if value != self._then[name])
            raise EnvError(
                f"{class_path(self._theirs)}: expected {name} as it was when the collector was made, "
                f"{self._then[name]!r}, got {now[name]!r}. TorchRL's environments are translated when a collector is "
                "made: change them before, or make another collector; with use_buffers=False, TorchRL steps them."
            )


def _copied(value: Any) -> Any:
    """A copy that ``==`` compares."""
    if isinstance(value, torch.Tensor):
        return value.dtype, value.tolist()
    if isinstance(value, Mapping):
        return {key: _copied(part) for key, part in value.items()}
    return list(value) if isinstance(value, list) else value
