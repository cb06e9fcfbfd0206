"""One recorded call on tensors, and where its arguments come from."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

Form = tuple[torch.Size, torch.dtype]


@dataclass(frozen=True)
class Slot:
    """A value of this step: one that is read, or the result of a call."""

    number: int


@dataclass(frozen=True, eq=False)
class Weight:
    """A parameter or buffer, read at each step from where its module keeps it."""

    owner: Mapping[str, Any]
    name: str

    def __call__(self) -> Tensor:
        """The tensor as it is now."""
        tensor: Tensor = self.owner[self.name]
        return tensor


Ref = Slot | Weight


@dataclass(frozen=True)
class Op:
    """A call of a function of torch.

    Attributes:
        function: as torch was asked for it.
        args: positional arguments, with a :class:`Slot` or :class:`Weight` in the place of each tensor.
        options: keyword arguments, likewise.
        writes: slots of the results.
        several: whether the result is a tuple of tensors.
        forms: shapes and dtypes of the results.
        roots: whose memory each result shares; None: it has memory of its own.
    """

    function: Callable[..., Any]
    args: tuple[Any, ...]
    options: dict[str, Any]
    writes: tuple[int, ...]
    several: bool
    forms: tuple[Form, ...]
    roots: tuple[Ref | None, ...]

    @property
    def name(self) -> str:
        """What torch calls it, without underscores around it: ``add`` for ``__add__``, ``add_`` in place."""
        return name_of(self.function)

    def refs(self) -> Iterator[Ref]:
        """The tensors that it reads."""
        return refs_in((self.args, self.options))


def name_of(function: Any) -> str:
    """The name of a function of torch; of a getter, that of the attribute."""
    name = str(getattr(function, "__name__", function))
    if name == "__get__":
        return str(getattr(function.__self__, "__name__", name))
    return name[2:-2] if name.startswith("__") and name.endswith("__") else name


def refs_in(value: Any) -> Iterator[Ref]:
    """What stands for tensors in nested arguments."""
    if isinstance(value, Slot | Weight):
        yield value
    elif isinstance(value, list | tuple | dict):
        for each in value.values() if isinstance(value, dict) else value:
            yield from refs_in(each)


def mapped(value: Any, kinds: type | tuple[type, ...], function: Callable[[Any], Any]) -> Any:
    """Nested arguments with ``function`` of each value of ``kinds`` in its place; lists, tuples and dictionaries."""
    if isinstance(value, kinds):
        return function(value)
    if isinstance(value, list | tuple) and not isinstance(value, torch.Size):
        return (list if isinstance(value, list) else tuple)(mapped(each, kinds, function) for each in value)
    if isinstance(value, dict):
        return {name: mapped(each, kinds, function) for name, each in value.items()}
    return value


def form_of(tensor: Tensor) -> Form:
    """Shape and dtype."""
    return tensor.shape, tensor.dtype
