"""Specs of Gymnasium's spaces and of TorchRL's specs, and the way back; specs from an example of the data."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable
from functools import singledispatch
from typing import Any, NamedTuple

import gymnasium.spaces as gym_spaces
import numpy as np
import torch
from tensordict import LazyStackedTensorDict, NonTensorStack, is_non_tensor, is_tensor_collection

from rollwright._foreign import class_path, is_torchrl_spec, kind_in
from rollwright._keys import NestedKey, unravel
from rollwright._tensors import as_tensor
from rollwright.data.specs.composite import Composite
from rollwright.data.specs.discrete import Categorical, DiscreteSpec, OneHot
from rollwright.data.specs.leaf import NonTensor
from rollwright.data.specs.mapping import converts
from rollwright.data.specs.multi import MultiCategorical, MultiOneHot
from rollwright.data.specs.numeric import Binary, Bounded, Unbounded
from rollwright.data.specs.shapes import DeviceLike, ShapeLike, as_size
from rollwright.data.specs.spec import TensorSpec
from rollwright.data.specs.stacks import Stacked, StackedComposite, stack
from rollwright.errors import SpecError, require

Space = gym_spaces.Space[Any]

# torch has few operations on these: the next signed dtype that holds their numbers.
_WIDENED = {"uint16": torch.int32, "uint32": torch.int64, "uint64": torch.int64}


def torch_dtype(dtype: Any) -> torch.dtype:
    """The torch dtype of a NumPy dtype; uint16 and larger become signed and wider.

    >>> torch_dtype(np.float32), torch_dtype("uint16")
    (torch.float32, torch.int32)
    """
    name = np.dtype(dtype).name
    return _WIDENED[name] if name in _WIDENED else torch.from_numpy(np.empty(0, name)).dtype


def numpy_dtype(dtype: torch.dtype) -> Any:
    """The NumPy dtype of a torch dtype (float32 for bfloat16)."""
    return np.dtype(np.float32) if dtype == torch.bfloat16 else torch.empty(0, dtype=dtype, device="cpu").numpy().dtype


def from_gym_space(
    space: Space,
    *,
    device: DeviceLike = None,
    categorical_action_encoding: bool = False,
    batch_size: ShapeLike = (),
) -> TensorSpec:
    """The spec of a Gymnasium space.

    ============================== ==================================================================
    space                          spec
    ============================== ==================================================================
    ``Box``                        :class:`Bounded`; :class:`Unbounded` where no bound is finite;
                                   :class:`Binary` for bool
    ``Discrete``                   :class:`OneHot` (int64), or :class:`Categorical`
    ``MultiDiscrete``              :class:`MultiOneHot` (int64), or :class:`MultiCategorical`, always
                                   so for an ``nvec`` of several dimensions
    ``MultiBinary``                :class:`Binary`
    ``Dict``, ``Tuple``            :class:`Composite`; a tuple's keys are "0", "1", …
    ``Text``, ``Sequence``, others :class:`NonTensor`, with a sample as its example
    ============================== ==================================================================

    A ``start`` other than zero is kept: ``spec.encode`` and ``spec.to_numpy`` speak the
    environment's numbers.

    Args:
        space: the space of one environment, or of a batch (then its batch stands in its shape).
        device: device of the spec.
        categorical_action_encoding: numbers instead of one-hot vectors.
        batch_size: dimensions to put before the spec's shape.

    Raises:
        TypeError: ``space`` is no Gymnasium space.

    Example:
        >>> import gymnasium.spaces
        >>> from_gym_space(gymnasium.spaces.Discrete(3, start=1)).encode(3)
        tensor([0, 0, 1])
        >>> from_gym_space(gymnasium.spaces.Discrete(3), categorical_action_encoding=True, batch_size=(2,))
        Categorical(n=3, shape=[2], dtype=int64, device=cpu)
    """
    if not isinstance(space, gym_spaces.Space):
        raise TypeError(
            f"space: expected a gymnasium.spaces.Space, got {type(space).__module__}.{type(space).__name__}. "
            "Convert spaces of other packages to Gymnasium's first."
        )
    spec = _convert(space, device, categorical_action_encoding)
    batch = as_size(batch_size)
    return spec.expand((*batch, *spec.shape)) if batch else spec


def _convert(space: Any, device: DeviceLike, categorical: bool) -> TensorSpec:
    if isinstance(space, gym_spaces.Box):
        dtype = torch_dtype(space.dtype)
        if dtype == torch.bool:
            return Binary(None, space.shape, device, dtype)
        if not (np.isfinite(space.low).any() or np.isfinite(space.high).any()) and space.low.size:
            return Unbounded(space.shape, device, dtype)
        low, high = _clipped(space.low, dtype), _clipped(space.high, dtype)
        return Bounded(low, high, space.shape, device, dtype)
    if isinstance(space, gym_spaces.Discrete):
        start = int(space.start)
        if categorical:
            return Categorical(int(space.n), (), device, torch_dtype(space.dtype), start=start)
        return OneHot(int(space.n), None, device, torch.int64, start=start)
    if isinstance(space, gym_spaces.MultiDiscrete):
        nvec, starts = space.nvec.astype(np.int64), space.start.astype(np.int64)
        if categorical or nvec.ndim > 1:
            return MultiCategorical(nvec, None, device, torch_dtype(space.dtype), start=starts)
        return MultiOneHot(nvec.tolist(), None, device, torch.int64, start=starts)
    if isinstance(space, gym_spaces.MultiBinary):
        return Binary(None, space.shape, device, torch_dtype(space.dtype))
    if isinstance(space, gym_spaces.Dict):
        return Composite({key: _convert(sub, device, categorical) for key, sub in space.items()}, device=device)
    if isinstance(space, gym_spaces.Tuple):
        return Composite({str(i): _convert(sub, device, categorical) for i, sub in enumerate(space)}, device=device)
    example = copy.deepcopy(space)  # sampling must not disturb the environment's own generator
    example.seed(0)
    return NonTensor((), device, example_data=example.sample())


def _clipped(bound: Any, dtype: torch.dtype) -> Any:
    """A Box's bound as numbers that the dtype can hold."""
    if dtype.is_floating_point:
        return torch.from_numpy(np.array(bound))
    info = torch.iinfo(dtype)
    return torch.from_numpy(np.asarray(np.clip(bound, None, info.max), numpy_dtype(dtype)))


@singledispatch
def to_gym_space(spec: TensorSpec) -> Space:
    """The Gymnasium space of a spec, whose batch dimensions stay in the space's shape.

    It inverts :func:`from_gym_space`, except that a tuple becomes a ``Dict``. One-hot specs
    become spaces of numbers, as ``spec.to_numpy`` returns them; masks are left out, since Gymnasium
    takes them with each sample.

    Args:
        spec: any spec but :class:`NonTensor` and stacks of unlike specs.

    Raises:
        ValueError: there is no such space.

    Example:
        >>> to_gym_space(Bounded(-1.0, 1.0, (2,)))
        Box(-1.0, 1.0, (2,), float32)
        >>> to_gym_space(OneHot(4))
        Discrete(4)
    """
    raise ValueError(
        f"spec: expected one of numbers or of choices, or a Composite of them, got {spec!r}. "
        "Gymnasium has no space for it: leave it out, or write the space by hand."
    )


@to_gym_space.register
def _(spec: Bounded) -> Space:
    low, high = (bound.cpu().float() if spec.dtype == torch.bfloat16 else bound.cpu() for bound in spec.space)
    return gym_spaces.Box(low.numpy(), high.numpy(), tuple(spec.shape), numpy_dtype(spec.dtype))


@to_gym_space.register
def _(spec: Unbounded) -> Space:
    if spec.dtype == torch.bool:
        return _bits(spec.shape)
    if spec.dtype.is_floating_point:
        return gym_spaces.Box(-np.inf, np.inf, tuple(spec.shape), numpy_dtype(spec.dtype))
    info = torch.iinfo(spec.dtype)
    return gym_spaces.Box(info.min, info.max, tuple(spec.shape), numpy_dtype(spec.dtype))


@to_gym_space.register
def _(spec: Categorical) -> Space:
    if spec.dtype == torch.bool:
        return _bits(spec.shape) if spec.ndim else gym_spaces.Discrete(2)
    return _choices(spec, tuple(spec.shape), numpy_dtype(spec.dtype))


@to_gym_space.register
def _(spec: OneHot) -> Space:
    return _choices(spec, tuple(spec.shape[:-1]), np.dtype(np.int64))


def _choices(spec: Categorical | OneHot, shape: tuple[int, ...], dtype: Any) -> Space:
    if not shape:
        return gym_spaces.Discrete(spec.n, start=spec.start, dtype=dtype)
    return gym_spaces.MultiDiscrete(np.full(shape, spec.n), dtype=dtype, start=np.full(shape, spec.start))


@to_gym_space.register
def _(spec: MultiCategorical) -> Space:
    return gym_spaces.MultiDiscrete(
        spec.nvec.cpu().numpy(), dtype=numpy_dtype(spec.dtype), start=spec.start.cpu().numpy()
    )


@to_gym_space.register
def _(spec: MultiOneHot) -> Space:
    return to_gym_space(spec.to_categorical_spec())


@to_gym_space.register
def _(spec: Binary) -> Space:
    return _bits(spec.shape)


def _bits(shape: torch.Size) -> Space:
    return gym_spaces.MultiBinary(shape[0] if len(shape) == 1 else list(shape))


@to_gym_space.register
def _(spec: Composite) -> Space:
    return gym_spaces.Dict({str(name): to_gym_space(child) for name, child in spec.items() if child is not None})


def to_gym_value(spec: TensorSpec, space: Space, val: Any) -> Any:
    """What an environment of that space takes: as ``spec.to_numpy``, with tuples where the space has them.

    Args:
        spec: the spec that :func:`from_gym_space` made of ``space``.
        space: the space.
        val: a member of the spec.

    Example:
        >>> import gymnasium.spaces
        >>> space = gymnasium.spaces.Tuple([gymnasium.spaces.Discrete(2), gymnasium.spaces.Discrete(3)])
        >>> spec = from_gym_space(space)
        >>> tuple(int(part) for part in to_gym_value(spec, space, spec.encode((1, 2))))
        (1, 2)
    """
    if isinstance(spec, Composite) and isinstance(space, gym_spaces.Dict):
        return {key: to_gym_value(spec[key], sub, val.get(key)) for key, sub in space.items()}
    if isinstance(spec, Composite) and isinstance(space, gym_spaces.Tuple):
        return tuple(to_gym_value(spec[str(i)], sub, val.get(str(i))) for i, sub in enumerate(space))
    return spec.to_numpy(val)


# The entries of a space


class Leaf(NamedTuple):
    """One entry of a space: its key, its path inside the raw value, its space and spec (unbatched)."""

    key: NestedKey
    path: tuple[Any, ...]
    space: Space
    spec: TensorSpec


def leaves_of(space: Space, root: str, categorical: bool) -> list[Leaf]:
    """The entries of a space.

    A Dict gives its own keys; what is not a Dict is called ``root``; the elements of a Tuple are
    called ``"0"``, ``"1"``, … below the Tuple's name.

    Args:
        space: of one environment.
        root: the key of a space that has no name of its own.
        categorical: discrete entries as integers instead of one-hot.
    """
    return list(_walk(space, root, categorical, (), ()))


def _walk(space: Space, root: str, categorical: bool, names: tuple[str, ...], path: tuple[Any, ...]) -> list[Leaf]:
    children: list[tuple[Any, tuple[str, ...], Space]]
    if isinstance(space, gym_spaces.Dict):
        children = [(name, (*names, str(name)), child) for name, child in space.spaces.items()]
    elif isinstance(space, gym_spaces.Tuple):
        names = names or (root,)
        children = [(i, (*names, str(i)), child) for i, child in enumerate(space.spaces)]
    else:
        spec = from_gym_space(space, device="cpu", categorical_action_encoding=categorical)
        return [Leaf(unravel(names or (root,)), path, space, spec)]
    return [leaf for index, below, child in children for leaf in _walk(child, root, categorical, below, (*path, index))]


def make_composite_from_td(data: Any, *, unsqueeze_null_shapes: bool = True, dynamic_shape: bool = False) -> Composite:
    """The Composite of data of which one example is there: shapes, dtypes and devices, without bounds.

    Args:
        data: a TensorDict or tensorclass; one that is lazily stacked gives a stack of Composites.
        unsqueeze_null_shapes: describe numbers without a dimension as of shape ``[1]``.
        dynamic_shape: let the last size of each entry vary, if it is no batch dimension.

    Returns:
        A Composite of the batch size of ``data``.

    Raises:
        TypeError: it is neither.

    Example:
        >>> from tensordict import TensorDict
        >>> make_composite_from_td(TensorDict({"x": torch.zeros(3), "n": {"y": torch.tensor([True])}}))
        Composite(
            x: Unbounded(shape=[3], dtype=float32, device=cpu),
            n: Composite(
                y: Unbounded(shape=[1], dtype=bool, device=cpu),
                shape=[], device=None),
            shape=[], device=None)
    """
    if not is_tensor_collection(data) or is_non_tensor(data):
        raise TypeError(f"data: expected a TensorDict, got {type(data).__name__}: {data!r}. Put it under a key of one.")
    options = {"unsqueeze_null_shapes": unsqueeze_null_shapes, "dynamic_shape": dynamic_shape}
    if isinstance(data, LazyStackedTensorDict):
        return stack([make_composite_from_td(part, **options) for part in data.tensordicts], data.stack_dim)
    entries: dict[str, TensorSpec] = {}
    for name, value in data.items():
        if is_non_tensor(value):
            entries[name] = _of_objects(value)
        elif is_tensor_collection(value):
            entries[name] = make_composite_from_td(value, **options)
        else:
            shape = value.shape or torch.Size((1,) if unsqueeze_null_shapes else ())
            if dynamic_shape and len(value.shape) > data.ndim:
                shape = torch.Size((*shape[:-1], -1))
            entries[name] = Unbounded(shape, value.device, value.dtype)
    return Composite(entries, shape=data.batch_size, device=data.device)


def _of_objects(value: Any) -> NonTensor:
    first = value
    while first.ndim and isinstance(first, NonTensorStack):
        first = first[0]
    return NonTensor(value.batch_size, value.device, first.data, batched=isinstance(value, NonTensorStack))


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
        if kind in _KINDS:
            return _read(kind, spec)
    raise SpecError(
        f"spec: {class_path(spec)} has no counterpart in rollwright.data; there are {', '.join(sorted(_KINDS))}. "
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
        if kind in _KINDS.values():
            return _written(getattr(library, kind.__name__), spec)
    raise SpecError(f"spec: {class_path(spec)} has no counterpart in torchrl.data. Convert a spec of rollwright.data.")


def register_as_torchrl() -> None:
    """Have TorchRL's own ``isinstance`` take our specs for its specs of the same name, as abstract base classes allow.

    So its losses and modules read the specs of our environments. Nothing happens where the program has not imported
    TorchRL, or has done so before: it is called where a spec of an environment is read.
    """
    library = sys.modules.get(_SPECS_OF_TORCHRL)
    if library is None or library in _registered:
        return
    if not all(hasattr(library, name) for name in _KINDS):  # it is being imported
        return
    names = getattr(sys.modules.get(_UTILS_OF_TORCHRL), "ACTION_SPACE_MAP", {})  # which its losses look classes up in
    for name, ours in _KINDS.items():
        their = getattr(library, name)
        their.register(ours)
        if their in names:
            names[ours] = names[their]
    _registered.append(library)


_SPECS_OF_TORCHRL, _UTILS_OF_TORCHRL = "torchrl.data.tensor_specs", "torchrl.data.utils"
_registered: list[Any] = []


# By the names that classes have in both libraries.
_NUMBERS = (Bounded, Unbounded, Binary, MultiCategorical, MultiOneHot, Categorical, OneHot)
_KINDS: dict[str, Any] = {kind.__name__: kind for kind in (StackedComposite, Stacked, Composite, *_NUMBERS, NonTensor)}


def _read(kind: str, spec: Any) -> TensorSpec:
    if kind == "Composite":
        return Composite(_entries(spec, from_torchrl), shape=spec.shape, device=spec.device)
    if kind in ("Stacked", "StackedComposite"):
        children: list[TensorSpec] = [from_torchrl(each) for each in spec.unbind(spec.dim)]
        return stack(children, spec.dim)
    made: TensorSpec = _KINDS[kind](**_arguments(kind, spec))
    return made


def _written(kind: Any, spec: Any) -> Any:
    if isinstance(spec, Stacked | StackedComposite):
        return kind(*map(to_torchrl, spec.specs), dim=spec.dim)
    if isinstance(spec, Composite):
        return kind(_entries(spec, to_torchrl), shape=spec.shape, device=spec.device)
    if isinstance(spec, DiscreteSpec) and as_tensor(spec.start).any():
        raise SpecError(
            f"spec: {spec!r} begins at {spec.start}, and outcomes of TorchRL's specs begin at 0. Let the environment "
            "count from 0."
        )
    options = {"remove_singleton": False} if isinstance(spec, MultiCategorical) else {}
    return kind(**_arguments(kind.__name__, spec), **options)


def _entries(spec: Any, convert: Callable[[Any], Any]) -> dict[str, Any]:
    return {name: None if child is None else convert(child) for name, child in spec.items()}


def _arguments(kind: str, spec: Any) -> dict[str, Any]:
    """What a spec of either library is made of, by the names that arguments have in both."""
    if kind == "NonTensor":
        batched = bool(getattr(spec, "batched", False))
        return {"shape": spec.shape, "device": spec.device, "example_data": spec.example_data, "batched": batched}
    found = {"shape": spec.shape, "device": spec.device, "dtype": spec.dtype}
    if kind == "Bounded":
        return {**found, "low": spec.space.low.clone(), "high": spec.space.high.clone()}
    if kind in ("Unbounded", "Binary"):
        return found
    if kind in ("Categorical", "OneHot"):
        found["n"] = int(spec.space.n)
    else:
        nvec = as_tensor(spec.nvec)
        found["nvec"] = nvec if kind == "MultiCategorical" else nvec.reshape(-1, nvec.shape[-1])[0].tolist()
    mask = getattr(spec, "mask", None)
    return {**found, "mask": None if mask is None else mask.clone()}


converts(is_torchrl_spec, from_torchrl)
