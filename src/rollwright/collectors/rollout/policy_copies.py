"""Copies of a policy for a collector's thread, and the sources of their weights."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from types import CellType, FunctionType
from typing import Any, NamedTuple

import torch
from tensordict.nn import TensorDictModule
from torch import nn

from rollwright.weight_update.policy_weights import (
    globals_read,
    is_never_copied,
    is_of_library,
    leads_to_weights,
    tensors_of,
    things_in,
    weights_of,
)


class PolicyCopy(NamedTuple):
    """A policy that acts in place of another one.

    Attributes:
        policy: the copy; the policy itself where it cannot be copied, or never is.
        source: whose weights are published: those that were copied; None: there are none.
        target: those of the copy that take them.
        shares_modules: whether modules act that could not be copied, hence with weights that others may write.
    """

    policy: Any
    source: nn.Module | None
    target: nn.Module | None
    shares_modules: bool


def never_copied_in(policy: Any) -> list[Any]:
    """The objects that a policy is, or holds, and that are never copied, each once."""
    if is_never_copied(policy):
        return [policy]
    found = {}
    for _, thing in things_in(policy, never_copied=True):
        inner = thing.modules() if isinstance(thing, nn.Module) else [thing]
        found.update({id(part): part for part in inner if is_never_copied(part)})
    return list(found.values())


def copied_policy(policy: Any) -> PolicyCopy:
    """Copy a policy, with the modules and the functions in it that have weights, but for what is never copied.

    A function is copied with those of its variables that lead to weights. It shares the others with the original.

    Args:
        policy: a module, a function, a bound method, a partial, or any callable object.

    Raises:
        TypeError: it cannot be copied.
    """
    if is_never_copied(policy):
        return PolicyCopy(policy, None, None, False)
    kept = never_copied_in(policy)
    try:
        copied = _copied(policy, kept, with_functions=True)
    except Exception:  # a function may be around anything; then it acts itself, with what it reads
        try:
            copied = _copied(policy, kept, with_functions=False)
        except Exception as error:
            raise TypeError(
                f"policy: it acts as a copy (in the thread of start(), on another device), and {type(policy).__name__} "
                f"cannot be copied: {type(error).__name__}: {error}. Pass policy_factory=, which makes one there."
            ) from error
    engines = {id(one) for part in kept if isinstance(part, nn.Module) for one in tensors_of(part)}
    shared = (_ids(policy) & _ids(copied)) - engines
    if not shared:
        return PolicyCopy(copied, weights_of(policy), weights_of(copied), False)
    return PolicyCopy(copied, weights_of(policy, leave_out=shared), weights_of(copied, leave_out=shared), True)


def _ids(policy: Any) -> set[int]:
    weights = weights_of(policy)
    return set() if weights is None else {id(tensor) for tensor in tensors_of(weights)}


def _copied(policy: Any, kept: list[Any], *, with_functions: bool) -> Any:
    memo: dict[int, Any] = {id(part): part for part in kept}
    things = [thing for _, thing in things_in(policy)]
    functions = [thing for thing in things if isinstance(thing, FunctionType)] if with_functions else []
    around = [part for thing in things if isinstance(thing, nn.Module) for part in thing.modules() if _is_around(part)]
    led = [(function, leading) for function in functions if (leading := _leading(function)) is not None]
    copies = [(function, leading, _shell(function, leading)) for function, leading in led]
    memo |= {id(function): shell for function, _, shell in copies}
    memo |= {id(module): object.__new__(type(module)) for module in around}  # tensordict would copy each by itself
    with torch.no_grad():
        for function, leading, shell in copies:
            _fill(shell, function, leading, memo)
        for module in around:
            memo[id(module)].__dict__ = {name: copy.deepcopy(value, memo) for name, value in vars(module).items()}
        return copy.deepcopy(policy, memo)


def _is_around(module: nn.Module) -> bool:
    """Whether it calls something else than a module, which it pickles by itself."""
    return isinstance(module, TensorDictModule) and not isinstance(module.module, nn.Module)


class _Leading(NamedTuple):
    """Names of a function's variables that lead to weights."""

    cells: list[str]
    defaults: bool
    variables: list[str]


def _leading(function: FunctionType) -> _Leading | None:
    """None: no variable of it leads to weights."""
    cells = [name for name, value in _cells(function) if leads_to_weights(value)]
    names = () if is_of_library(function) else globals_read(function.__code__)
    read = function.__globals__
    variables = [name for name in names if name in read and leads_to_weights(read[name])]
    defaults = any(map(leads_to_weights, (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values())))
    return _Leading(cells, defaults, variables) if cells or variables or defaults else None


def _cells(function: FunctionType) -> Iterator[tuple[str, Any]]:
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        if cell != CellType():
            yield name, cell.cell_contents


class _Variables(dict[str, Any]):
    """Variables of a module, some of them replaced; the others as they are there when they are read."""

    def __init__(self, module: dict[str, Any]) -> None:
        super().__init__(__builtins__=module["__builtins__"])
        self._module = module

    def __missing__(self, name: str) -> Any:
        return self._module[name]


def _shell(function: FunctionType, leading: _Leading) -> FunctionType:
    """A function like another, still without what leads to weights."""
    cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
    closure = tuple(CellType() if name in leading.cells else cell for name, cell in cells)
    variables = _Variables(function.__globals__) if leading.variables else function.__globals__
    shell = FunctionType(function.__code__, variables, function.__name__, None, closure)
    shell.__module__, shell.__qualname__ = function.__module__, function.__qualname__
    shell.__annotations__, shell.__doc__ = function.__annotations__, function.__doc__
    return shell


def _fill(shell: FunctionType, function: FunctionType, leading: _Leading, memo: dict[int, Any]) -> None:
    names = function.__code__.co_freevars
    for name, new, old in zip(names, shell.__closure__ or (), function.__closure__ or (), strict=True):
        if name in leading.cells:
            new.cell_contents = copy.deepcopy(old.cell_contents, memo)
    for name in leading.variables:
        shell.__globals__[name] = copy.deepcopy(function.__globals__[name], memo)
    given = function.__defaults__, function.__kwdefaults__
    shell.__defaults__, shell.__kwdefaults__ = copy.deepcopy(given, memo) if leading.defaults else given
    shell.__dict__.update({name: copy.deepcopy(value, memo) for name, value in vars(function).items()})
