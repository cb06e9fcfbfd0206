"""The weights of a policy: those of the module that it is, and of modules that its functions and objects read."""

from __future__ import annotations

import dis
import functools
import inspect
import weakref
from collections.abc import Iterator, Mapping, Set
from enum import Enum
from types import CellType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from tensordict import TensorDictBase
from torch import nn

_DEPTH = 6  # containers, objects and functions around a module
_LONGEST = 10_000  # elements of a list that is searched for modules
_OF_MODULES = vars(nn.Module()).keys()
_HOLD_NOTHING = (str, int, float, bytes, type(None), type, Enum, ModuleType, torch.dtype, torch.device)
_LIBRARIES = ("torch.", "torchrl.", "tensordict.", "numpy.", "gymnasium.", "functools.", "rollwright.modules.")


def is_never_copied(thing: Any) -> bool:
    """Whether an object is to act itself wherever it is used, and never a copy of it.

    Its class says so: ``never_copied = True``. Such is an engine of a language model, which takes new weights by itself
    between two tokens. It is neither copied for a thread, nor sent to a process, nor part of a saved state.
    """
    return getattr(type(thing), "never_copied", False) is True


def weights_of(policy: Any, *, leave_out: Set[int] = frozenset()) -> nn.Module | None:
    """The module whose weights are those of a policy; None if nothing in it has weights.

    That is the policy itself, where it is a module that reads no others. Modules may also be behind a bound method, a
    ``functools.partial``, the variables that a function reads (of its closure, its defaults, its module), attributes of
    objects, lists and dictionaries. Where the weights of one of them are all that there are, it is the result, so that
    weights have the names that they have in this module. Else all are joined: the policy's own weights have their
    names, and those of another module follow the attributes and variables that lead to it, as if it were a submodule.
    Leaf tensors that require a gradient are weights, too.

    Args:
        policy: any object.
        leave_out: ids of tensors; a module whose weights are all among them is left out.

    >>> class Agent:
    ...     def __init__(self):
    ...         self.net = nn.Linear(2, 1, bias=False)
    ...     def act(self, observation):
    ...         return self.net(observation)
    >>> agent = Agent()
    >>> weights_of(agent.act) is agent.net
    True
    >>> head = nn.Linear(1, 1, bias=False)
    >>> list(weights_of(lambda observation: head(agent.act(observation))).state_dict())
    ['head.weight', 'agent.net.weight']
    """
    if isinstance(policy, nn.Module) and is_never_copied(policy):
        return policy
    found = _with_weights(policy)
    modules = [(path, thing) for path, thing in found if isinstance(thing, nn.Module)]
    held = {id(tensor) for _, module in modules for tensor in tensors_of(module)}
    alone = [(path, thing) for path, thing in found if isinstance(thing, torch.Tensor) and id(thing) not in held]
    modules += [_holder(path, thing) for path, thing in alone if path]
    if leave_out:
        modules = [(path, module) for path, module in modules if not _is_within(module, leave_out)]
    if not modules:
        stateless = isinstance(policy, nn.Module) and not leave_out and not _calls_functions(policy)
        return policy if stateless else None
    return modules[0][1] if len(modules) == 1 else JoinedWeights(modules)


def leads_to_weights(thing: Any) -> bool:
    """Whether an object is, or reads, anything that has weights."""
    return any(_stateful(one) for _, one in things_in(thing))


def modules_in(policy: Any) -> list[nn.Module]:
    """The outermost modules with weights that a policy is, or reads, each once."""
    return [thing for _, thing in _with_weights(policy) if isinstance(thing, nn.Module)]


class JoinedWeights(nn.Module):
    """Modules whose states are one: each has names that follow its own path.

    Args:
        joined: path and module. Paths are changed where names would be those of another module.

    Example:
        >>> joined = JoinedWeights([("", nn.Linear(1, 1, bias=False)), ("agent.head", nn.Linear(1, 1, bias=False))])
        >>> list(joined.state_dict())
        ['weight', 'agent.head.weight']
    """

    def __init__(self, joined: list[tuple[str, nn.Module]]) -> None:
        super().__init__()
        self._joined: list[tuple[str, nn.Module]] = []
        taken: set[str] = set()
        for path, module in joined:
            while taken & (names := {_join(path, name) for name in module.state_dict()}):
                path += "_"
            taken |= names
            self._joined.append((path, module))

    def forward(self, *_: Any) -> Any:
        """Raise: these modules share nothing but a state."""
        raise NotImplementedError("JoinedWeights: it holds weights, and is not called. Call the policy.")

    def named_children(self) -> Iterator[tuple[str, nn.Module]]:
        """The modules, by path."""
        yield from self._joined

    def named_modules(
        self, memo: set[nn.Module] | None = None, prefix: str = "", remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Module]]:
        """The modules and their submodules, by path; not this one."""
        memo = set() if memo is None else memo
        for path, module in self._joined:
            yield from module.named_modules(memo, _join(prefix, path), remove_duplicate)

    def state_dict(self, *, destination: Any = None, prefix: str = "", keep_vars: bool = False) -> Any:
        """The states of all, in one dictionary."""
        state: Any = {} if destination is None else destination
        for path, module in self._joined:
            inner = f"{_join(prefix.removesuffix('.'), path)}."
            module.state_dict(destination=state, prefix=inner.removeprefix("."), keep_vars=keep_vars)
        return state

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Load a state into each of them; see :meth:`torch.nn.Module.load_state_dict`."""
        shares: list[dict[str, Any]] = [{} for _ in self._joined]
        places = [(f"{path}." if path else "", index) for index, (path, _) in enumerate(self._joined)]
        owner = {_join(path, name): i for i, (path, module) in enumerate(self._joined) for name in module.state_dict()}
        for name, value in state_dict.items():
            likely = max((place for place in places if name.startswith(place[0])), default=("", 0))
            index = owner.get(name, likely[1])
            shares[index][name.removeprefix(places[index][0])] = value
        lacking, unknown = [], []
        for (path, module), share in zip(self._joined, shares, strict=True):
            left = module.load_state_dict(share, strict=strict, assign=assign)
            lacking += [_join(path, name) for name in left.missing_keys]
            unknown += [_join(path, name) for name in left.unexpected_keys]
        return nn.modules.module._IncompatibleKeys(lacking, unknown)


# The search ---------------------------------------------------------------------------------------------------------


def things_in(policy: Any, *, never_copied: bool = False) -> Iterator[tuple[str, Any]]:
    """All that a policy is or reads, each once, with the path that leads there; of modules the outermost ones.

    Args:
        policy: any object.
        never_copied: with what is never copied.
    """
    yield from _walk(policy, "", _DEPTH, set(), never_copied)


def _with_weights(policy: Any) -> list[tuple[str, Any]]:
    """Modules with weights and tensors that are learned; without modules whose weights are all in one of the others."""
    held = [(path, thing) for path, thing in things_in(policy) if isinstance(thing, nn.Module | torch.Tensor)]
    found = [(path, thing, own) for path, thing in held if (own := _stateful(thing))]
    kept = []
    for index, (path, thing, own) in enumerate(found):
        others = [other for at, (_, _, other) in enumerate(found) if own < other or (own == other and at < index)]
        if not others:
            kept.append((path, thing))
    return kept


def _stateful(thing: Any) -> set[int]:
    """Ids of modules that have weights or extra state themselves, or of a tensor that is learned."""
    if isinstance(thing, nn.Module):
        return {
            id(part)
            for part in thing.modules()
            if any(True for one in (part.parameters(recurse=False), part.buffers(recurse=False)) for _ in one)
            or type(part).get_extra_state is not nn.Module.get_extra_state
            or type(part).state_dict is not nn.Module.state_dict
        }
    learned = isinstance(thing, torch.Tensor) and thing.requires_grad and thing.is_leaf
    return {id(thing)} if learned else set()


def _walk(thing: Any, path: str, depth: int, seen: set[int], never_copied: bool) -> Iterator[tuple[str, Any]]:
    kind = type(thing)
    if id(thing) in seen or kind in weakref.ProxyTypes or (hasattr(kind, "step") and _is_env(thing)):
        return
    seen.add(id(thing))
    acts_itself = getattr(kind, "never_copied", False) is True  # is_never_copied(), at each of many things
    if never_copied or not acts_itself:
        yield path, thing
    if acts_itself:
        return
    if isinstance(thing, nn.Module):
        seen.update(map(id, thing.modules()))
    if depth:
        for name, part in parts(thing):
            if not isinstance(part, _HOLD_NOTHING):
                below = f"{path}.{name}" if path and name else path or name
                yield from _walk(part, below, depth - 1, seen, never_copied)


def parts(thing: Any) -> Iterator[tuple[str, Any]]:
    """What an object holds or reads, by name; ``""`` for what goes by the name of the object.

    Of a module, that is all that is no submodule. Environments and optimizers are not searched.
    """
    if isinstance(thing, nn.Module):
        kinds = set()
        for path, module in thing.named_modules():
            if getattr(type(module), "never_copied", False) is not True:
                held = vars(module).items()
                above = f"{path}." if path else ""
                yield from ((above + name, value) for name, value in held if name not in _OF_MODULES)
                if type(module) not in kinds:
                    kinds.add(type(module))
                    yield from ((path, function) for function in _methods(type(module), "forward"))
    elif isinstance(thing, FunctionType):
        yield from _read_by(thing)
    elif isinstance(thing, MethodType):
        yield "", thing.__self__
        yield from (("", function) for function in _methods(type(thing.__self__), thing.__func__))
    elif isinstance(thing, functools.partial):
        yield "", thing.func
        yield from ((str(index), value) for index, value in enumerate(thing.args))
        yield from thing.keywords.items()
    elif isinstance(thing, TensorDictBase | dict):
        yield from ((str(key), value) for key, value in thing.items())
    elif isinstance(thing, list | tuple) or (isinstance(thing, set | frozenset) and len(thing) == 1):
        yield from ((str(index), value) for index, value in enumerate(thing) if len(thing) <= _LONGEST)
    elif not isinstance(thing, type | ModuleType | torch.Tensor | torch.optim.Optimizer):
        yield from list(getattr(thing, "__dict__", {}).items())
        for slots in [vars(kind).get("__slots__", ()) for kind in type(thing).__mro__]:
            names = [slots] if isinstance(slots, str) else slots
            yield from ((name, getattr(thing, name)) for name in names if name[:2] != "__" and hasattr(thing, name))
        yield from (("", function) for function in _methods(type(thing), "__call__"))


def _read_by(function: FunctionType) -> Iterator[tuple[str, Any]]:
    """The variables that a function reads."""
    code = function.__code__
    for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
        if cell != CellType():
            yield name, cell.cell_contents
    defaults = function.__defaults__ or ()
    yield from zip(code.co_varnames[code.co_argcount - len(defaults) : code.co_argcount], defaults, strict=True)
    yield from (function.__kwdefaults__ or {}).items()
    yield from vars(function).items()
    if not is_of_library(function):
        variables = function.__globals__
        yield from ((name, variables[name]) for name in globals_read(code) if name in variables)


@functools.lru_cache(maxsize=1024)
def globals_read(code: CodeType) -> tuple[str, ...]:
    """Names of the global variables that a function, and those within it, may read."""
    own = [step.argval for step in dis.get_instructions(code) if step.opname in ("LOAD_GLOBAL", "LOAD_NAME")]
    inner = [name for one in code.co_consts if isinstance(one, CodeType) for name in globals_read(one)]
    return tuple(dict.fromkeys([*own, *inner]))


def _methods(kind: type, method: Any) -> list[FunctionType]:
    """A method, and those of its class that it names: they may read variables. Without methods of libraries."""
    first = inspect.getattr_static(kind, method, None) if isinstance(method, str) else method
    if not isinstance(first, FunctionType):
        return []
    named = [inspect.getattr_static(kind, name, None) for name in first.__code__.co_names]
    return [one for one in (first, *named) if isinstance(one, FunctionType) and not is_of_library(one)]


def is_of_library(function: FunctionType) -> bool:
    """Whether a function is of torch or another library that has no policies of its own."""
    return f"{function.__globals__.get('__name__')}.".startswith(_LIBRARIES)


def _is_env(thing: Any) -> bool:
    """Whether an object that has a ``step`` is an environment."""
    kind = type(thing)
    held = getattr(thing, "__dict__", ())
    return hasattr(kind, "reset") and any(
        hasattr(kind, name) or name in held for name in ("action_space", "action_spec")
    )


def _calls_functions(module: nn.Module) -> bool:
    """Whether a module calls functions of a user that are no modules, and whose weights, if any, nobody knows."""
    called = [vars(part).get(name) for part in module.modules() for name in ("module", "func")]
    functions = [getattr(one, "func", getattr(one, "__func__", one)) for one in called]
    return any(isinstance(one, FunctionType) and not is_of_library(one) for one in functions)


def _holder(path: str, tensor: torch.Tensor) -> tuple[str, nn.Module]:
    """A module with a tensor that is in none."""
    before, _, name = path.rpartition(".")
    holder = nn.Module()
    if isinstance(tensor, nn.Parameter):
        holder.register_parameter(name, tensor)
    else:
        holder.register_buffer(name, tensor)
    return before, holder


def tensors_of(module: nn.Module) -> list[torch.Tensor]:
    """Parameters and buffers of a module."""
    return [*module.parameters(), *module.buffers()]


def _is_within(module: nn.Module, tensors: Set[int]) -> bool:
    own = {id(tensor) for tensor in tensors_of(module)}
    return bool(own) and own <= tensors


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path and name else path or name
