"""Declared options: their checks follow from their types, and ``help()`` shows them.

A declaration is a frozen dataclass, whose docstring has a sentence for each field, or a class whose constructor names
every option. ``tests/typing/generate.py`` writes the same options for type checkers.
"""

from __future__ import annotations

import difflib
import inspect
import math
import re
import types
from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields, is_dataclass
from functools import cache, partial
from inspect import Parameter
from numbers import Integral, Real
from typing import Any, Literal, TypeVar, Union, cast, get_args, get_origin, get_type_hints

__all__ = ["PER_WORKER", "Check", "check_fields", "names_of", "refuse_unknown", "seconds", "whole", "with_options"]

C = TypeVar("C", bound=type)

PER_WORKER = "one for all workers, or a list with one for each"  # in the metadata of a field


@dataclass(frozen=True)
class Check:
    """Metadata of a field: what is called with its name and value, and returns the value to keep."""

    call: Callable[[str, Any], object]


def check_fields(options: Any) -> None:
    """Check every field of a frozen dataclass by its type: None, True or False, a choice, a callable, a ``Check``.

    Raises:
        TypeError, ValueError: a value does not fit its field.
    """
    for name, check, optional in _checks(options.__class__):
        given = getattr(options, name)
        kept = None if optional and given is None else check(name, given)
        if kept is not given:
            object.__setattr__(options, name, kept)


@cache
def _checks(declaration: Any) -> list[tuple[str, Callable[[str, Any], object], bool]]:
    hints = get_type_hints(declaration, include_extras=True)
    found = [(field.name, *_check_of(hints[field.name])) for field in fields(declaration)]
    return [(name, check, optional) for name, check, optional in found if check is not None]


def _check_of(hint: Any) -> tuple[Callable[[str, Any], object] | None, bool]:
    """The check of a field, and whether it may be None."""
    metadata = getattr(hint, "__metadata__", ())
    plain = get_args(hint)[0] if metadata else hint
    kinds = get_args(plain) if get_origin(plain) in (Union, types.UnionType) else (plain,)
    given = [kind for kind in kinds if kind is not type(None)]
    special = next((each.call for each in metadata if isinstance(each, Check)), None)
    return special or _check_of_kind(given[0] if len(given) == 1 else None), len(given) < len(kinds)


def _check_of_kind(kind: object) -> Callable[[str, Any], object] | None:
    if kind is bool:
        return _flag
    if get_origin(kind) is Literal:
        return partial(_choice, get_args(kind))
    return _callable if get_origin(kind) is Callable else None


def _flag(name: str, value: object) -> object:
    if not isinstance(value, bool):
        raise TypeError(f"{name}: expected True or False, got {type(value).__name__}: {value!r}.")
    return value


def _choice(known: tuple[object, ...], name: str, value: object) -> object:
    if value not in known:
        raise ValueError(f"{name}: expected {' or '.join(map(repr, known))}, got {value!r}.")
    return value


def _callable(name: str, value: object) -> object:
    if not callable(value):
        raise TypeError(f"{name}: expected a callable or None, got {type(value).__name__}: {value!r}.")
    return value


def whole(least: int | None = None, *, floats: bool = False) -> Check:
    """A check of integers; ``floats``: also of floats without a fraction, such as ``1e6``."""
    wanted = "an integer" if least is None else f"an integer of at least {least}"
    kinds: Any = Real if floats else Integral

    def check(name: str, value: Any) -> int:
        if not isinstance(value, kinds) or isinstance(value, bool) or value != value // 1:
            raise TypeError(f"{name}: expected {wanted}, got {type(value).__name__}: {value!r}.")
        if least is not None and value < least:
            raise ValueError(f"{name}: expected {wanted}, got {int(value)}.")
        return int(value)

    return Check(check)


def seconds(*, positive: bool = False) -> Check:
    """A check of seconds; ``positive``: not 0."""
    least = "more than 0 s (None: no limit)" if positive else "0 s or more"

    def check(name: str, value: object) -> object:
        if not isinstance(value, Real) or isinstance(value, bool):
            raise TypeError(f"{name}: expected a number of seconds, got {type(value).__name__}: {value!r}.")
        if not 0 <= float(value) < math.inf or (positive and not value):
            raise ValueError(f"{name}: expected {least}, got {value!r}.")
        return value

    return Check(check)


def names_of(declaration: type, *, marked: str | None = None) -> list[str]:
    """Names of the fields of a dataclass; ``marked``: of those with this in their metadata."""
    names = [field.name for field in fields(declaration)]
    if marked is None:
        return names
    hints = get_type_hints(declaration, include_extras=True)
    return [name for name in names if marked in getattr(hints[name], "__metadata__", ())]


def refuse_unknown(given: Iterable[str], known: list[str], owner: str | type) -> None:
    """Test names of options.

    Args:
        given: the names.
        known: those that are right.
        owner: what has the options; of a class, the message lists what its signature shows.

    Raises:
        TypeError: one is unknown; the message has all names, the most similar first.
    """
    for name in given:
        if name not in known:
            listed = known if isinstance(owner, str) else _keywords(owner) or known
            near = difflib.get_close_matches(name, listed, 1)
            hint = f" Did you mean {near[0]!r}?" if near else ""
            title = owner if isinstance(owner, str) else owner.__name__
            names = ", ".join(sorted(listed, key=lambda each: -difflib.SequenceMatcher(None, name, each).ratio()))
            raise TypeError(f"{title} has no option {name!r}.{hint} Its options, the most similar first: {names}.")


def _keywords(owner: type) -> list[str]:
    """The keyword arguments in the signature of a class; none where it takes any."""
    parameters = inspect.signature(owner).parameters.values()
    if any(p.kind is Parameter.VAR_KEYWORD for p in parameters):
        return []
    return [p.name for p in parameters if p.kind is Parameter.KEYWORD_ONLY]


# What people see ------------------------------------------------------------------------------


def with_options(
    *declarations: type, only: Iterable[str] | None = None, leave_out: Iterable[str] = ()
) -> Callable[[C], C]:
    """Decorate a class whose constructor takes ``**options``: its signature and its help list them one by one."""

    def decorate(owner: C) -> C:
        cls = cast(Any, owner)
        own = list(inspect.signature(cls.__init__).parameters.values())[1:]
        named = {p.name: p for p in own if p.kind is not Parameter.VAR_KEYWORD}
        shown: dict[str, str] = {}
        for declaration in declarations:
            added = [p for p in _parameters(declaration) if p.name not in {*named, *leave_out}]
            added = [p for p in added if only is None or p.name in only]
            described = _sentences(declaration)
            named.update((p.name, p) for p in added)
            shown.update((p.name, described[p.name]) for p in added if p.name in described)
        cls.__signature__ = _Signature(cls.__init__, inspect.Signature(list(named.values())))
        if cls.__doc__:
            lines = "\n".join(shown.values()).replace("\n", "\n    ")
            cls.__doc__ = re.sub(
                r"    \*\*options: .*?(?=\n\n|\s*\Z)", lambda _: lines, cls.__doc__, count=1, flags=re.S
            )
        return owner

    return decorate


class _Signature:
    """A class attribute that :func:`inspect.signature` reads; subclasses with a constructor of their own show that."""

    def __init__(self, init: Any, signature: inspect.Signature) -> None:
        self._init, self._signature = init, signature

    def __get__(self, instance: Any, owner: Any) -> inspect.Signature:
        if instance is not None:
            raise AttributeError("__signature__")
        if owner.__init__ is self._init:
            return self._signature
        return inspect.signature(partial(owner.__init__, None))


def _parameters(declaration: type) -> list[Parameter]:
    if is_dataclass(declaration):
        hints = get_type_hints(declaration)
        made = Parameter.KEYWORD_ONLY
        return [Parameter(f.name, made, default=f.default, annotation=hints[f.name]) for f in fields(declaration)]
    own = inspect.signature(declaration).parameters.values()
    return [p for p in own if p.kind is Parameter.KEYWORD_ONLY]


def _sentences(declaration: type) -> dict[str, str]:
    """The text of the docstring for each option, by name."""
    found: dict[str, list[str]] = {}
    current: list[str] = []
    inside, section = False, "Attributes:" if is_dataclass(declaration) else "Args:"
    for line in inspect.cleandoc(declaration.__doc__ or "").splitlines():
        if not line.startswith(" "):
            inside = line == section
        elif inside:
            match = re.match(r"    (\w+): ", line)
            if match:
                current = found.setdefault(match[1], [])
            current.append(line)
    return {name: "\n".join(lines) for name, lines in found.items()}
