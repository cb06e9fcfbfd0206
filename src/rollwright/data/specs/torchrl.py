"""Specs of TorchRL as specs of this library, and the other way round."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from rollwright._foreign import class_path, is_torchrl_spec, kind_in
from rollwright._tensors import as_tensor
from rollwright.data.specs.base import TensorSpec
from rollwright.data.specs.binary import Binary
from rollwright.data.specs.composite import Composite
from rollwright.data.specs.discrete import Categorical, OneHot
from rollwright.data.specs.mapping import converts
from rollwright.data.specs.multi import MultiCategorical, MultiOneHot
from rollwright.data.specs.nontensor import NonTensor
from rollwright.data.specs.numeric import Bounded, Unbounded
from rollwright.data.specs.stacks.stack import stack
from rollwright.data.specs.stacks.stacked import Stacked
from rollwright.data.specs.stacks.stackedcomposite import StackedComposite
from rollwright.errors import SpecError, require


def from_torchrl(spec: Any) -> Any:
    """A spec of TorchRL as one of this library; masks are copied.

    TorchRL need not be importable here: what counts is the object.

    Args:
        spec: of TorchRL; one of this library is returned as it is.

    Returns:
        The spec of the same class name, shape, dtype, device and domain.

    Raises:
        TypeError: it is no spec.
        SpecError: there is no such spec in this library.
    """
    if isinstance(spec, TensorSpec):
        return spec
    if not is_torchrl_spec(spec):
        raise TypeError(f"spec: expected a spec of TorchRL, got {class_path(spec)}: {spec!r}. Pass env.action_spec.")
    for kind in kind_in("torchrl", spec):
        if kind in _READ:
            return _READ[kind](spec)
    raise SpecError(
        f"spec: {class_path(spec)} has no counterpart in rollwright.data; there are {', '.join(sorted(_READ))}. "
        "Let the environment announce one of these."
    )


def to_torchrl(spec: TensorSpec) -> Any:
    """A spec of this library as one of TorchRL, which has to be installed; masks are copied.

    Args:
        spec: of this library; one of TorchRL is returned as it is.

    Returns:
        The spec of the same class name, shape, dtype, device and domain.

    Raises:
        TypeError: it is no spec.
        SpecError: TorchRL has none of the same domain.
        ImportError: TorchRL is not installed.
    """
    if is_torchrl_spec(spec):
        return spec
    if not isinstance(spec, TensorSpec):
        raise TypeError(f"spec: expected a spec of rollwright.data, got {class_path(spec)}: {spec!r}.")
    library = require("torchrl.data", extra="torchrl", purpose="to_torchrl")
    for kind in type(spec).__mro__:
        if kind in _WRITTEN:
            return _WRITTEN[kind](spec, library)
    raise SpecError(f"spec: {class_path(spec)} has no counterpart in torchrl.data. Convert a spec of rollwright.data.")


def register_as_torchrl() -> None:
    """Have TorchRL's own ``isinstance`` take our specs for its specs of the same name, as abstract base classes allow.

    So its losses and modules read the specs of our environments. Nothing happens where the program has not imported
    TorchRL, or has done so before: it is called where a spec of an environment is read.
    """
    library = sys.modules.get(_SPECS_OF_TORCHRL)
    if library is None or library in _registered:
        return
    if not all(hasattr(library, kind.__name__) for kind in _WRITTEN):  # it is being imported
        return
    names = getattr(sys.modules.get(_UTILS_OF_TORCHRL), "ACTION_SPACE_MAP", {})  # which its losses look classes up in
    for ours in _WRITTEN:
        their = getattr(library, ours.__name__)
        their.register(ours)
        if their in names:
            names[ours] = names[their]
    _registered.append(library)


_SPECS_OF_TORCHRL, _UTILS_OF_TORCHRL = "torchrl.data.tensor_specs", "torchrl.data.utils"
_registered: list[Any] = []


# From TorchRL -----------------------------------------------------------------------------------


def _common(spec: Any) -> dict[str, Any]:
    return {"shape": spec.shape, "device": spec.device, "dtype": spec.dtype}


def _masked(spec: Any) -> dict[str, Any]:
    mask = getattr(spec, "mask", None)
    return {**_common(spec), "mask": None if mask is None else mask.clone()}


def _composite(spec: Any) -> Composite:
    entries = {name: None if child is None else from_torchrl(child) for name, child in spec.items()}
    return Composite(entries, shape=spec.shape, device=spec.device)


def _numbers(spec: Any) -> list[int]:
    return [int(n) for n in as_tensor(spec.nvec).reshape(-1, as_tensor(spec.nvec).shape[-1])[0]]


def _stacked(spec: Any) -> TensorSpec:
    children: list[TensorSpec] = [from_torchrl(each) for each in spec.unbind(spec.dim)]
    return stack(children, spec.dim)


_READ: dict[str, Callable[[Any], TensorSpec]] = {
    "Composite": _composite,
    "StackedComposite": _stacked,
    "Stacked": _stacked,
    "Bounded": lambda spec: Bounded(spec.space.low, spec.space.high, **_common(spec)),
    "Unbounded": lambda spec: Unbounded(**_common(spec)),
    "Binary": lambda spec: Binary(**_common(spec)),
    "Categorical": lambda spec: Categorical(int(spec.space.n), **_masked(spec)),
    "OneHot": lambda spec: OneHot(int(spec.space.n), **_masked(spec)),
    "MultiCategorical": lambda spec: MultiCategorical(spec.nvec, **_masked(spec)),
    "MultiOneHot": lambda spec: MultiOneHot(_numbers(spec), **_masked(spec)),
    "NonTensor": lambda spec: NonTensor(
        spec.shape, spec.device, spec.example_data, batched=bool(getattr(spec, "batched", False))
    ),
}


# To TorchRL -------------------------------------------------------------------------------------


def _no_start(spec: Any) -> None:
    if as_tensor(spec.start).any():
        raise SpecError(
            f"spec: {spec!r} begins at {spec.start}, and outcomes of TorchRL's specs begin at 0. Let the environment "
            "count from 0."
        )


def _write_composite(spec: Composite, library: Any) -> Any:
    entries = {name: None if child is None else to_torchrl(child) for name, child in spec.items()}
    return library.Composite(entries, shape=spec.shape, device=spec.device)


def _write_bounded(spec: Bounded, library: Any) -> Any:
    return library.Bounded(low=spec.low.clone(), high=spec.high.clone(), **_common(spec))


def _write_discrete(name: str) -> Callable[[Any, Any], Any]:
    def write(spec: Any, library: Any) -> Any:
        _no_start(spec)
        outcomes = spec.n if hasattr(spec, "n") else spec.nvec
        options = _masked(spec)
        if name == "MultiCategorical":
            options["remove_singleton"] = False
        return getattr(library, name)(outcomes, **options)

    return write


def _write_stacked(spec: Any, library: Any) -> Any:
    kind = library.StackedComposite if isinstance(spec, StackedComposite) else library.Stacked
    return kind(*[to_torchrl(each) for each in spec.specs], dim=spec.dim)


def _write_objects(spec: NonTensor, library: Any) -> Any:
    return library.NonTensor(shape=spec.shape, device=spec.device, example_data=spec.example_data, batched=spec.batched)


_WRITTEN: dict[type, Callable[[Any, Any], Any]] = {
    StackedComposite: _write_stacked,
    Stacked: _write_stacked,
    Composite: _write_composite,
    Bounded: _write_bounded,
    Unbounded: lambda spec, library: library.Unbounded(**_common(spec)),
    Binary: lambda spec, library: library.Binary(**_common(spec)),
    MultiCategorical: _write_discrete("MultiCategorical"),
    MultiOneHot: _write_discrete("MultiOneHot"),
    Categorical: _write_discrete("Categorical"),
    OneHot: _write_discrete("OneHot"),
    NonTensor: _write_objects,
}

converts(is_torchrl_spec, from_torchrl)
