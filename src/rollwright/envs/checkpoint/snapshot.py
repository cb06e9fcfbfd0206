"""Pickles of parts of an environment, where other objects refer to the same parts.

A pickle that quietly leaves something out is worse than none. So what pickles without its state is refused
instead of pickled, and arrays that share memory go on sharing it.
"""

from __future__ import annotations

import ctypes
import io
import pickle
import sys
from bisect import bisect_right
from collections.abc import Iterator, Mapping
from multiprocessing.shared_memory import SharedMemory
from types import FunctionType
from typing import Any, NamedTuple

import cloudpickle  # type: ignore[import-untyped]
import gymnasium
import numpy as np
import torch
from gymnasium.vector import AsyncVectorEnv, VectorEnv
from numpy.lib.array_utils import byte_bounds
from torch import Tensor

__all__ = ["Drawn", "draw_generators", "dump", "gym_parts", "load"]

GYMNASIUM = (gymnasium.Env, VectorEnv)
WRAPPERS = (gymnasium.Wrapper, gymnasium.vector.VectorWrapper)
SPACES = ("action_space", "observation_space", "single_action_space", "single_observation_space")
PICKLING = {"__getstate__", "__reduce__", "__reduce_ex__"}
DRAWING = ("Clock", "Font", "Surface")  # pygame's, which an environment makes when it first draws


class Drawn:
    """Stands in a pickle where an environment had something that only draws."""


class SharedBytes(NamedTuple):
    """Bytes that several arrays share.

    Attributes:
        start: their address.
        stop: the address behind them.
        holder: a copy of them, or the live tensor that holds them.
    """

    start: int
    stop: int
    holder: Any


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    """Pickles live objects by name, and arrays over shared ``memories`` as views of them."""

    def __init__(
        self, file: io.BytesIO, names: Mapping[int, str], drawing: set[int], memories: list[SharedBytes]
    ) -> None:
        super().__init__(file, protocol=5)
        self._names = names
        self._drawing = drawing
        self._memories = memories
        self._starts = [memory.start for memory in memories]
        self.arrays: list[Any] = []

    def persistent_id(self, obj: Any) -> str | None:
        """The name of an object that is there when the pickle is loaded."""
        return self._names.get(id(obj))

    def reducer_override(self, obj: Any) -> Any:
        """How to pickle ``obj``; called for all but the simplest types."""
        reason = _lost(obj)
        if reason is not None:
            raise pickle.PicklingError(f"{type(obj).__name__} {reason}")
        if isinstance(obj, (type, FunctionType)) and _is_of_main(obj):
            return NotImplemented  # by name: the program that loads has its own, equal or newer
        if id(obj) in self._drawing:
            return _without_drawing(obj)
        if type(obj) is np.ndarray or type(obj) is Tensor:
            bounds = _bounds(obj)
            if bounds is not None:
                return self._array(obj, *bounds)
        return super().reducer_override(obj)

    def _array(self, array: Any, start: int, stop: int) -> Any:
        self.arrays.append(array)
        place = bisect_right(self._starts, start) - 1
        if place >= 0 and stop <= self._memories[place].stop:
            memory = self._memories[place]
            return _view, (memory.holder, start - memory.start, stop - start, *_layout(array))
        if isinstance(array, Tensor) and array.untyped_storage().nbytes() > stop - start and not array.requires_grad:
            return array.clone().__reduce_ex__(5)  # torch would write all of the memory that this is a part of
        return NotImplemented


_FORMER_MODULES = {  # in states that were saved before these had their names
    "rollwright.envs.checkpoint.snapshot": "rollwright.envs.checkpoint.snapshot",
    "rollwright.envs.libs._codecs": "rollwright.envs.libs.codecs",
    "rollwright.collectors.rollout.paths.dialogs": "rollwright.collectors.rollout.paths.conversations.dialogs",
}


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, objects: Mapping[str, Any]) -> None:
        super().__init__(file)
        self._objects = objects

    def find_class(self, module: str, name: str) -> Any:
        """A class or function, also where its module has another name by now."""
        return super().find_class(_FORMER_MODULES.get(module, module), name)

    def persistent_load(self, pid: str) -> Any:
        """The live object of that name."""
        return self._objects[pid]


def dump(content: Any, objects: Mapping[str, Any], drawing: set[int]) -> bytes:
    """Pickle ``content``.

    Args:
        content: anything.
        objects: by name: what is not pickled, but there when the pickle is loaded.
        drawing: ``id`` of the gymnasium environments to be pickled without what only draws.

    Raises:
        Exception: of any kind, where something cannot be pickled.
    """
    names = {id(obj): name for name, obj in objects.items()}
    file = io.BytesIO()
    first = _Pickler(file, names, drawing, [])
    first.dump(content)
    memories = _shared(first.arrays, [obj for obj in objects.values() if isinstance(obj, Tensor)])
    if memories:
        file = io.BytesIO()
        _Pickler(file, names, drawing, memories).dump(content)
    return file.getvalue()


def load(data: bytes, objects: Mapping[str, Any]) -> Any:
    """What :func:`dump` pickled, with ``objects`` by the same names."""
    return _Unpickler(io.BytesIO(data), objects).load()


# What a pickle would lose ---------------------------------------------------------------------------


def _lost(obj: Any) -> str | None:
    """Why a pickle of ``obj`` would lack something, though pickling it raises nothing."""
    if isinstance(obj, io.IOBase) and not isinstance(obj, (io.BytesIO, io.StringIO)):
        return None if obj is sys.stdout or obj is sys.stderr else "is an open file"
    if isinstance(obj, AsyncVectorEnv):
        return "has its environments in other processes"
    if isinstance(obj, SharedMemory):
        return "is shared with other processes"
    deciding = next(cls for cls in type(obj).__mro__ if PICKLING & vars(cls).keys())
    if deciding.__name__ == "EzPickle":  # gymnasium's, and those of packages that copied it
        return "is pickled by the arguments of its constructor (EzPickle), without its state"
    return None


def _is_of_main(obj: Any) -> bool:
    """Whether ``__main__`` has it by its name; cloudpickle would write out its code."""
    if getattr(obj, "__module__", None) != "__main__":
        return False
    found: Any = sys.modules["__main__"]
    for name in obj.__qualname__.split("."):
        found = getattr(found, name, None)
    return found is obj


def _without_drawing(env: Any) -> Any:
    reduced = env.__reduce_ex__(5)
    if not isinstance(reduced, tuple) or len(reduced) < 3 or type(reduced[2]) is not dict:
        return reduced
    state = {name: Drawn if _draws(value) else value for name, value in reduced[2].items()}
    return *reduced[:2], state, *reduced[3:]


def _draws(value: Any) -> bool:
    if isinstance(value, (list, tuple, dict)):
        return any(map(_draws, value.values() if isinstance(value, dict) else value))
    return type(value).__module__.split(".")[0] == "pygame" and type(value).__name__ in DRAWING


def gym_parts(env: Any) -> Iterator[Any]:
    """A gymnasium environment and those inside of it; nothing for other objects."""
    if isinstance(env, GYMNASIUM):
        yield env
        inside = getattr(env, "__dict__", {})
        for one in (inside.get("env"), *inside.get("envs", ())):
            yield from gym_parts(one)


def draw_generators(env: Any) -> None:
    """Let gymnasium environments that were never reset have the generators that their first reset would make.

    They would be seeded by chance then; what is saved has to have that chance in it.
    """
    for one in gym_parts(env):
        if not isinstance(one, WRAPPERS) and getattr(one, "_np_random", False) is None:
            _ = one.np_random
        for name in SPACES:
            _draw_of_space(vars(one).get(name))


def _draw_of_space(space: Any) -> None:
    if isinstance(space, gymnasium.Space):
        _ = space.np_random
        inside = getattr(space, "spaces", ())
        for one in inside.values() if isinstance(inside, Mapping) else inside:
            _draw_of_space(one)


# Arrays that share memory ---------------------------------------------------------------------------


def _bounds(array: Any) -> tuple[int, int] | None:
    """Addresses of the first byte and behind the last; None for what is left to the array's own pickling."""
    if isinstance(array, np.ndarray):
        return None if array.dtype.hasobject or not array.size else byte_bounds(array)
    if array.device.type != "cpu" or array.layout is not torch.strided or not array.numel():
        return None
    last = sum((size - 1) * stride for size, stride in zip(array.shape, array.stride(), strict=True))
    return array.data_ptr(), array.data_ptr() + (last + 1) * array.element_size()


def _shared(arrays: list[Any], live: list[Tensor]) -> list[SharedBytes]:
    """The stretches of memory that more than one array looks at, in order of their addresses."""
    owners: list[tuple[Any, Tensor | None]] = [*((array, None) for array in arrays), *((one, one) for one in live)]
    placed = [(bounds, owner) for array, owner in owners if (bounds := _bounds(array)) is not None]
    groups: list[tuple[int, int, list[Tensor | None]]] = []
    for (start, stop), tensor in sorted(placed, key=lambda place: place[0]):
        if groups and start < groups[-1][1]:
            first, end, members = groups[-1]
            groups[-1] = first, max(end, stop), [*members, tensor]
        else:
            groups.append((start, stop, [tensor]))
    return [
        SharedBytes(start, stop, _holder(start, stop, members))
        for start, stop, members in groups
        if len(members) > 1 and None in members
    ]


def _holder(start: int, stop: int, members: list[Tensor | None]) -> Any:
    live = [tensor for tensor in members if tensor is not None]
    for tensor in live:
        if _bounds(tensor) == (start, stop) and tensor.is_contiguous():
            return tensor
    if live:
        raise pickle.PicklingError("an array shares memory with a parameter or buffer, but reaches beyond it")
    return bytearray(ctypes.string_at(start, stop - start))


def _layout(array: Any) -> tuple[Any, ...]:
    if isinstance(array, np.ndarray):
        first = array.__array_interface__["data"][0] - byte_bounds(array)[0]  # not 0 with negative strides
        return array.dtype, first, array.shape, array.strides, array.flags.writeable
    return array.dtype, 0, tuple(array.shape), array.stride(), array.requires_grad


def _view(holder: Any, offset: int, size: int, dtype: Any, first: int, shape: Any, strides: Any, flag: bool) -> Any:
    """An array over ``size`` bytes of the memory of ``holder``: the opposite of ``_Pickler._array``."""
    data = holder.detach().reshape(-1).view(torch.uint8).numpy() if isinstance(holder, Tensor) else holder
    if isinstance(dtype, torch.dtype):
        flat = torch.frombuffer(data, dtype=dtype, offset=offset, count=size // dtype.itemsize)
        return flat.as_strided(shape, strides).requires_grad_(flag)
    array: Any = np.ndarray(shape, dtype, data, offset + first, strides)
    array.flags.writeable = flag
    return array
