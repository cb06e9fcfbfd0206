"""Recorder: notes the calls on tensors that a module makes in its first step, and where their arguments come from."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import count
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from rollwright.errors import NotNative
from rollwright.policies.traced.code import CONSTANTS
from rollwright.policies.watch import ModuleSnapshot

_ABOUT = {"dim", "element_size", "get_device", "is_complex", "is_conj", "is_contiguous", "is_floating_point", "is_neg"}
_ABOUT |= {"is_same_size", "is_signed", "is_tensor", "len", "ndimension", "nelement", "numel", "size", "stride"}
_ABOUT |= {"storage_offset", "_set_grad_enabled"}
_slots = count(10**6)  # of results: beyond those of policies, and never the same
_DETACHED = ("data", "grad")
_SIZED_BY_VALUES = {"argwhere", "bincount", "masked_select", "nonzero", "unique", "unique_consecutive"}
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


class Recorder(TorchFunctionMode):
    """Runs nothing by itself: the functions of torch that are called in its context go on, and are noted.

    Args:
        inputs: tensors by slot.
        weights: parameters and buffers, by the ids of their tensors.

    Attributes:
        ops: the calls.
        why: what was called that cannot be repeated; empty: nothing.
    """

    def __init__(self, inputs: Mapping[int, Tensor], weights: Mapping[int, Weight]) -> None:
        super().__init__()
        self.ops: list[Op] = []
        self.why = ""
        self._weights = weights
        self._alive: list[Tensor] = []  # so that no other tensor gets the id of one
        self._known: dict[int, Slot] = {}
        self._roots: dict[int, Ref] = {weight().untyped_storage()._cdata: weight for weight in weights.values()}
        for slot, tensor in inputs.items():
            self._note(tensor, Slot(slot))

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call, and note the call."""
        options = kwargs or {}
        result = func(*args, **options)
        if not self.why:
            try:
                self._record(func, tuple(args), options, result)
            except Exception as error:  # such as of a tensor without a storage; the module goes on
                self.why = str(error)
        return result

    def ref(self, tensor: Any) -> Ref:
        """What stands for a tensor.

        Raises:
            NotNative: it came from elsewhere.
        """
        found = self._known.get(id(tensor)) or self._weights.get(id(tensor))
        if found is None:
            raise NotNative("it uses a tensor that is no input, parameter or buffer of it, and no result of torch's")
        return found

    def _argument(self, value: Any) -> Any:
        """What stands for an argument of a function: a reference for a tensor; else itself, if it cannot change."""
        if isinstance(value, Tensor):
            return self.ref(value)
        if isinstance(value, list | tuple) and not isinstance(value, torch.Size):
            return (list if isinstance(value, list) else tuple)(map(self._argument, value))
        for each in (value.start, value.stop, value.step) if isinstance(value, slice) else (value,):
            if not isinstance(each, CONSTANTS):
                raise NotNative(f"it passes a {type(each).__name__} to a function of torch")
        return value

    def _record(self, function: Any, args: tuple[Any, ...], options: Mapping[str, Any], result: Any) -> None:
        name = name_of(function)
        several = isinstance(result, tuple | list) and not isinstance(result, torch.Size)
        tensors = tuple(result) if several else (result,)
        if not tensors or not all(isinstance(each, Tensor) for each in tensors):
            if name in _ABOUT or getattr(function, "__name__", "") == "__get__":
                return  # of shapes and types, which are the same at each step
            raise NotNative(f"what it does depends on values of tensors ({name})")
        masked = name == "getitem" and any(_is_mask(each) for each in args[1:])
        if name in _DETACHED or name in _SIZED_BY_VALUES or masked or "out" in options:
            raise NotNative(f"it uses {name} in a way that is not repeated")
        own_args, own_options = self._argument(args), {name: self._argument(each) for name, each in options.items()}
        roots = tuple(self._roots.get(each.untyped_storage()._cdata) for each in tensors)
        slots = tuple(next(_slots) for _ in tensors)
        self.ops.append(
            _simplified(Op(function, own_args, own_options, slots, several, tuple(map(form_of, tensors)), roots))
        )
        for slot, tensor in zip(slots, tensors, strict=True):
            self._note(tensor, Slot(slot))

    def _note(self, tensor: Tensor, slot: Slot) -> None:
        self._alive.append(tensor)
        self._known[id(tensor)] = slot
        self._roots.setdefault(tensor.untyped_storage()._cdata, slot)


def _simplified(op: Op) -> Op:
    """The same function without what ``torch.nn.functional`` does around it."""
    if op.function is F.relu:
        return replace(op, function=torch.relu_ if op.options.get("inplace") else torch.relu, options={})
    function: Any = {F.softmax: torch.softmax, F.log_softmax: torch.log_softmax}.get(op.function)
    dim = op.options.get("dim")
    if function is not None and dim is not None and op.options.get("dtype") is None and len(op.args) == 1:
        return replace(op, function=function, args=(*op.args, dim), options={})
    return op


def _is_mask(index: Any) -> bool:
    parts: Sequence[Any] = index if isinstance(index, tuple | list) else (index,)
    return any(isinstance(each, Tensor) and each.dtype in (torch.bool, torch.uint8) for each in parts)


def weights_of(modules: Iterable[nn.Module], watch: ModuleSnapshot) -> dict[int, Weight]:
    """Where the tensors of modules are kept, by their ids: parameters, buffers, and attributes.

    Args:
        modules: the modules.
        watch: is given that a tensor which two of them keep is one.
    """
    found: dict[int, Weight] = {}
    for module in modules:
        fields = vars(module)
        for owner in (fields, fields["_buffers"], fields["_parameters"]):
            for name in [name for name, value in owner.items() if isinstance(value, Tensor)]:
                weight = Weight(owner, name)
                first = found.setdefault(id(weight()), weight)
                if first is not weight:
                    watch.read(partial(_are_one, first, weight))
    return found


def _are_one(one: Weight, other: Weight) -> bool:
    return one.owner.get(one.name) is other.owner.get(other.name)
