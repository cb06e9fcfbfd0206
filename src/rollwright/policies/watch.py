"""ModuleSnapshot: detects that modules have changed since they were converted."""

from __future__ import annotations

from collections.abc import Callable
from operator import is_
from typing import Any

import torch
from tensordict.nn import skip_existing
from torch import nn
from torch.nn.modules import module as torch_module

from rollwright.errors import NotNative

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_GLOBAL_HOOKS = (
    "_global_forward_hooks",
    "_global_forward_pre_hooks",
    "_global_backward_hooks",
    "_global_backward_pre_hooks",
)


def is_special(module: nn.Module, hooks: bool = True) -> str | None:
    """Why a call of the module is more than its type's ``forward``, or None.

    Args:
        module: any module.
        hooks: whether hooks count.
    """
    fields = vars(module)
    name = type(module).__name__
    if hooks and any(fields.get(hooks) for hooks in _HOOKS):
        return f"it has hooks ({name})"
    if "forward" in fields:
        return f"forward was replaced on an instance ({name})"
    if fields.get("_compiled_call_impl") is not None:
        return f"a part was compiled ({name})"
    return None


def check_globals() -> None:
    """Test for settings that act on every module.

    Raises:
        NotNative: torch has hooks for all modules, or tensordict skips entries that exist.
    """
    for name in _GLOBAL_HOOKS:
        if getattr(torch_module, name, None):
            raise NotNative("torch has global module hooks")
    if skip_existing():
        raise NotNative("set_skip_existing is on")
    if torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda"):
        raise NotNative("autocast is on")


class ModuleSnapshot:
    """The objects that a policy on arrays was made of, as they were.

    A change is an attribute that holds another object, a child or a hook that came or went, another value of what the
    code reads, another shape or dtype of a parameter or buffer. New values of these are none: they are read at each
    call.
    """

    def __init__(self) -> None:
        self._seen: list[tuple[Any, type, list[Any], dict[str, Any], list[Any], list[Any], list[Any]]] = []
        self._read: list[tuple[Callable[[], Any], list[Any]]] = []

    def add(self, thing: Any) -> None:
        """Remember an object (a module, or any other with attributes)."""
        children = vars(thing).get("_modules", {})
        special = _specialties(thing)
        parts = list(children.values())
        self._seen.append(
            (thing, type(thing), list(vars(thing).values()), children, parts, _tensors(vars(thing)), special)
        )

    def read(self, getter: Callable[[], Any]) -> None:
        """Remember what a function gives, such as a global of the code."""
        self._read.append((getter, _with_items(getter())))

    def update(self, other: ModuleSnapshot) -> None:
        """Remember what another does, as it was for that."""
        self._seen += other._seen
        self._read += other._read

    def check(self) -> None:
        """Compare all that was remembered with what is.

        Raises:
            NotNative: something changed.
        """
        check_globals()
        for thing, kind, fields, children, parts, tensors, special in self._seen:
            now = vars(thing)
            if (
                type(thing) is not kind
                or len(now) != len(fields)
                or not all(map(is_, now.values(), fields))
                or len(children) != len(parts)
                or not all(map(is_, children.values(), parts))
                or _tensors(now) != tensors
                or _specialties(thing) != special
            ):
                raise NotNative(f"the policy has changed ({kind.__name__})")
        for getter, before in self._read:
            values = _with_items(getter())
            if len(values) != len(before) or not all(map(is_, values, before)):
                raise NotNative("the policy has changed (what its code reads)")


def _tensors(fields: dict[str, Any]) -> list[Any]:
    """Names, shapes and dtypes of parameters and buffers."""
    items = [*fields.get("_parameters", {}).items(), *fields.get("_buffers", {}).items()]
    return items and [(name, each if each is None else (each.shape, each.dtype)) for name, each in items]


def _with_items(value: Any) -> list[Any]:
    """A value, and what it holds where it is a container."""
    if not isinstance(value, list | tuple | set | frozenset | dict):
        return [value]
    items = [*value, *value.values()] if isinstance(value, dict) else value
    return [value, *(each for item in items for each in _with_items(item))]


def _specialties(thing: Any) -> list[Any]:
    """What a call of a module does beside ``forward``: the reason, and its hooks."""
    if not isinstance(thing, nn.Module):
        return []
    fields = vars(thing)
    hooks = [key for name in _HOOKS for key in fields.get(name) or ()]
    return [is_special(thing), *hooks]
