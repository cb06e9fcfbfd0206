"""Copies of a policy for a collector's thread, and the sources of their weights."""

from __future__ import annotations

import copy
import functools
from collections.abc import Iterator, Mapping
from types import CellType, FunctionType, MethodType, ModuleType
from typing import Any, NamedTuple

import torch
from torch import nn

__all__ = ["PolicyCopy", "copied_policy", "is_never_copied", "modules_in", "never_copied_in"]

_DEPTH = 4  # containers, objects and functions around a module
_OF_MODULES = vars(nn.Module()).keys()


class PolicyCopy(NamedTuple):
    """A policy that acts in place of another one.

    Attributes:
        policy: the copy; the policy itself where it is a function, or never copied.
        source: whose weights are published: the modules that were copied; None: there are none.
        target: those of the copy that take them.
        shares_modules: whether modules act that could not be copied, hence with weights that others may write.
    """

    policy: Any
    source: nn.Module | None
    target: nn.Module | None
    shares_modules: bool


def is_never_copied(thing: Any) -> bool:
    """Whether an object is to act itself wherever it is used, and never a copy of it.

    Its class says so: ``never_copied = True``. Such is an engine of a language model, which takes new weights by itself
    between two tokens. It is neither copied for a thread, nor sent to a process, nor part of a saved state.
    """
    return getattr(type(thing), "never_copied", False) is True


def never_copied_in(policy: Any) -> list[Any]:
    """The objects that a policy is, or holds, and that are never copied, each once."""
    return list(_never_copied_in(policy, _DEPTH, set()))


def _never_copied_in(thing: Any, depth: int, seen: set[int]) -> Iterator[Any]:
    if id(thing) in seen:
        return
    seen.add(id(thing))
    if is_never_copied(thing):
        yield thing
    elif isinstance(thing, nn.Module):
        for module in thing.modules():
            inside = [] if module is thing else [module]
            others = [value for name, value in vars(module).items() if name not in _OF_MODULES]
            for part in (*inside, *others):
                yield from _never_copied_in(part, depth - 1 if depth else 0, seen)
    elif depth:
        for part in _parts(thing):
            yield from _never_copied_in(part, depth - 1, seen)


def copied_policy(policy: Any) -> PolicyCopy:
    """Copy a policy, with the modules in it, but for what is never copied.

    Args:
        policy: a module, a function, a bound method, a partial, or any callable object.

    Raises:
        TypeError: it cannot be copied.
    """
    if is_never_copied(policy):
        return PolicyCopy(policy, None, None, False)
    found = modules_in(policy)
    if isinstance(policy, FunctionType):
        return PolicyCopy(policy, None, None, bool(found))
    memo: dict[int, Any] = {id(part): part for part in never_copied_in(policy)}
    try:
        with torch.no_grad():
            copied = copy.deepcopy(policy, memo)
    except Exception as error:
        raise TypeError(
            f"policy: the thread of start() acts with a copy, and {type(policy).__name__} cannot be copied: "
            f"{type(error).__name__}: {error}. Pass policy_factory=, which makes one for the thread."
        ) from error
    if isinstance(policy, nn.Module):
        return PolicyCopy(copied, policy, copied, False)
    own = [module for module in found if memo.get(id(module), module) is not module]
    copies = [memo[id(module)] for module in own]
    return PolicyCopy(copied, _as_one(own), _as_one(copies), len(own) < len(found))


def _as_one(modules: list[nn.Module]) -> nn.Module | None:
    return nn.ModuleList(modules) if len(modules) > 1 else modules[0] if modules else None


def modules_in(policy: Any) -> list[nn.Module]:
    """The outermost modules with weights that a policy holds, each once."""
    return list(_modules_in(policy, _DEPTH, set()))


def _modules_in(thing: Any, depth: int, seen: set[int]) -> Iterator[nn.Module]:
    if id(thing) in seen:
        return
    seen.add(id(thing))
    if is_never_copied(thing):
        return
    if isinstance(thing, nn.Module):
        if thing.state_dict():
            yield thing
    elif depth:
        for part in _parts(thing):
            yield from _modules_in(part, depth - 1, seen)


def _parts(thing: Any) -> list[Any]:
    if isinstance(thing, FunctionType):
        cells = [cell.cell_contents for cell in thing.__closure__ or () if cell != CellType()]
        names = [thing.__globals__.get(name) for name in thing.__code__.co_names]
        return [*cells, *(thing.__defaults__ or ()), *(thing.__kwdefaults__ or {}).values(), *names]
    if isinstance(thing, MethodType):
        return [thing.__self__, thing.__func__]
    if isinstance(thing, functools.partial):
        return [thing.func, *thing.args, *thing.keywords.values()]
    if isinstance(thing, Mapping):
        return list(thing.values()) if isinstance(thing, dict) else []
    if isinstance(thing, list | tuple | set | frozenset):
        return list(thing)
    if isinstance(thing, type | ModuleType | torch.Tensor):
        return []
    return list(getattr(thing, "__dict__", {}).values())
