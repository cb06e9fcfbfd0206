"""Saves the inner state of environments, and restores it in environments of the same make.

A pickle that quietly leaves something out is worse than none. So what pickles without its state is refused
instead of pickled, and arrays that share memory go on sharing it.
"""

from __future__ import annotations

import ctypes
import io
import pickle
import re
import sys
from bisect import bisect_right
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from copy import deepcopy
from itertools import zip_longest
from multiprocessing.shared_memory import SharedMemory
from types import FunctionType
from typing import Any, NamedTuple

import cloudpickle  # type: ignore[import-untyped]
import gymnasium
import numpy as np
import torch
from gymnasium.vector import AsyncVectorEnv, VectorEnv
from numpy.lib.array_utils import byte_bounds
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from rollwright._foreign import is_torchrl_transform
from rollwright._keys import key_str
from rollwright.data.specs import Composite, TensorSpec
from rollwright.data.specs.discrete import DiscreteSpec
from rollwright.envs.base import EnvBase
from rollwright.envs.libs.gym import GymWrapper
from rollwright.envs.transforms import Transform, TransformedEnv
from rollwright.envs.transforms.foreign import ForeignTransform
from rollwright.errors import EnvError

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
    "rollwright.collectors.rollout.paths.dialogs": "rollwright.collectors.rollout.paths.conversations.dialogs",
    "rollwright.data.specs.base": "rollwright.data.specs.spec",
    "rollwright.data.specs.binary": "rollwright.data.specs.numeric",
    "rollwright.data.specs.gymspaces": "rollwright.data.specs.conversion",
    "rollwright.data.specs.nontensor": "rollwright.data.specs.leaf",
    "rollwright.data.specs.spaces": "rollwright.data.specs.shapes",
    "rollwright.data.specs.stacks.stacked": "rollwright.data.specs.stacks",
    "rollwright.data.specs.stacks.stackedcomposite": "rollwright.data.specs.stacks",
    "rollwright.envs._checks": "rollwright.envs._results",
    "rollwright.envs._partial_reset": "rollwright.envs._results",
    "rollwright.envs.batched.async_processes": "rollwright.envs.batched.async_slots",
    "rollwright.envs.batched.async_threads": "rollwright.envs.batched.async_slots",
    "rollwright.envs.batched.batch_arrays": "rollwright.envs.batched.base",
    "rollwright.envs.batched.hosting.answers": "rollwright.envs.batched.messages",
    "rollwright.envs.batched.hosting.calls": "rollwright.envs.batched.host",
    "rollwright.envs.batched.hosting.host": "rollwright.envs.batched.host",
    "rollwright.envs.batched.hosting.input_layouts": "rollwright.envs.batched.messages",
    "rollwright.envs.batched.hosting.messages": "rollwright.envs.batched.messages",
    "rollwright.envs.batched.hosting.outcomes": "rollwright.envs.batched.processes",
    "rollwright.envs.batched.hosting.processes": "rollwright.envs.batched.processes",
    "rollwright.envs.batched.hosting.rows": "rollwright.envs.batched.rows",
    "rollwright.envs.batched.hosting.shared_rows": "rollwright.envs.batched.messages",
    "rollwright.envs.batched.ignored": "rollwright.envs.batched.base",
    "rollwright.envs.batched.remote": "rollwright.envs.batched.parallel",
    "rollwright.envs.batched.views": "rollwright.envs.batched.base",
    "rollwright.envs.checkpoint.snapshot": "rollwright.envs.checkpoint",
    "rollwright.envs.checkpoint.state": "rollwright.envs.checkpoint",
    "rollwright.envs.libs._codecs": "rollwright.envs.libs.codecs",
    "rollwright.envs.libs._gym_rows": "rollwright.envs.libs.gym_rows",
    "rollwright.envs.libs._info": "rollwright.envs.libs.gym_rows",
    "rollwright.envs.libs._make": "rollwright.envs.libs.building",
    "rollwright.envs.libs._registered": "rollwright.envs.libs.building",
    "rollwright.envs.libs.backend": "rollwright.envs.libs.building",
    "rollwright.envs.libs.dm_control.adapter": "rollwright.envs.libs.dm_control",
    "rollwright.envs.libs.dm_control.env": "rollwright.envs.libs.dm_control",
    "rollwright.envs.libs.foreign": "rollwright.envs.foreign",
    "rollwright.envs.libs.keywords": "rollwright.envs.libs.building",
    "rollwright.envs.libs.pettingzoo.agents": "rollwright.envs.libs.pettingzoo",
    "rollwright.envs.libs.pettingzoo.env": "rollwright.envs.libs.pettingzoo",
    "rollwright.envs.libs.pettingzoo.groups": "rollwright.envs.libs.pettingzoo",
    "rollwright.envs.libs.torchrl.masks": "rollwright.envs.libs.torchrl",
    "rollwright.envs.libs.torchrl.steps": "rollwright.envs.libs.torchrl",
    "rollwright.envs.libs.torchrl.transforms": "rollwright.envs.transforms.foreign",
    "rollwright.envs.libs.torchrl.translation": "rollwright.envs.libs.torchrl_translation",
    "rollwright.envs.libs.torchrl.watch": "rollwright.envs.transforms.foreign",
    "rollwright.envs.libs.torchrl.wrapper": "rollwright.envs.libs.torchrl",
    "rollwright.envs.libs.vector.batched": "rollwright.envs.libs.vector",
    "rollwright.envs.libs.vector.episodes": "rollwright.envs.libs.vector",
    "rollwright.envs.libs.vector.in_turn": "rollwright.envs.libs.vector",
    "rollwright.envs.libs.vector.parts": "rollwright.envs.libs.vector",
    "rollwright.envs.libs.vector.tensors": "rollwright.envs.libs.vector_tensors",
    "rollwright.envs.llm.pooled": "rollwright.envs.llm.slot_row",
    "rollwright.envs.on_arrays.chain": "rollwright.envs.transforms.forms",
    "rollwright.envs.on_arrays.columns": "rollwright.envs.columns",
    "rollwright.envs.on_arrays.steps": "rollwright.envs.tensordicts_on_arrays",
    "rollwright.envs.on_arrays.tensordicts": "rollwright.envs.tensordicts_on_arrays",
    "rollwright.envs.own.arrays": "rollwright.envs.own_arrays",
    "rollwright.envs.own.tensors": "rollwright.envs.own_tensors",
    "rollwright.envs.recreation.arrays": "rollwright.envs.recreation",
    "rollwright.envs.recreation.env": "rollwright.envs.recreation",
    "rollwright.envs.recreation.policy": "rollwright.envs.recreation",
    "rollwright.envs.recreation.rows": "rollwright.envs.batched.rows",
    "rollwright.envs.serial_arrays": "rollwright.envs.serial",
    "rollwright.envs.transforms.entries.actions": "rollwright.envs.transforms.actions",
    "rollwright.envs.transforms.entries.bounds": "rollwright.envs.transforms.values",
    "rollwright.envs.transforms.entries.indices": "rollwright.envs.transforms.actions",
    "rollwright.envs.transforms.entries.joining": "rollwright.envs.transforms.entries",
    "rollwright.envs.transforms.entries.pixels": "rollwright.envs.transforms.images",
    "rollwright.envs.transforms.entries.renaming": "rollwright.envs.transforms.entries",
    "rollwright.envs.transforms.entries.running": "rollwright.envs.transforms.vecnorm",
    "rollwright.envs.transforms.entries.selection": "rollwright.envs.transforms.entries",
    "rollwright.envs.transforms.entries.shapes": "rollwright.envs.transforms.entries",
    "rollwright.envs.transforms.entries.stateful": "rollwright.envs.transforms.frames",
    "rollwright.envs.transforms.entries.vecnorm_v2": "rollwright.envs.transforms.vecnorm",
    "rollwright.envs.transforms.episodes.inner": "rollwright.envs.transforms.episodes",
    "rollwright.envs.transforms.episodes.lives": "rollwright.envs.transforms.episodes",
    "rollwright.envs.transforms.episodes.noops": "rollwright.envs.transforms.episodes",
    "rollwright.envs.transforms.episodes.pooling": "rollwright.envs.transforms.frames",
    "rollwright.envs.transforms.episodes.skipping": "rollwright.envs.transforms.episodes",
    "rollwright.envs.transforms.episodes.targets": "rollwright.envs.transforms.bookkeeping",
    "rollwright.envs.transforms.episodes.truncation": "rollwright.envs.transforms.episodes",
    "rollwright.envs.transforms.forms.arrays": "rollwright.envs.transforms.forms",
    "rollwright.envs.transforms.forms.tensors": "rollwright.envs.transforms.forms",
    "rollwright.envs.transforms.frame_slices": "rollwright.envs.transforms.frames",
    "rollwright.envs.transforms.functions": "rollwright.envs.transforms.compose",
    "rollwright.envs.transforms.masks": "rollwright.envs.transforms.actions",
    "rollwright.envs.transforms.recorder": "rollwright.envs.transforms.images",
    "rollwright.envs.transforms.scaling": "rollwright.envs.transforms.values",
    "rollwright.envs.wrapper": "rollwright.envs.base",
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


def packed(state: Any) -> torch.Tensor:
    """A pickle as uint8 ``[bytes]``."""
    return torch.frombuffer(bytearray(pickle.dumps(state, protocol=5)), dtype=torch.uint8)


def unpacked(state: torch.Tensor) -> Any:
    """What :func:`packed` has packed, also before its classes got other modules."""
    return load(state.cpu().numpy().tobytes(), {})


ENTRIES = ("makes", "tensors", "masks", "attributes")

# Not saved: what the constructor made and running does not change, and what refers to it.
_OF_MODULES = vars(nn.Module()).keys() - {"training"}
_OF_ENVS = {
    "_cache",
    "_device",
    "_full_specs",
    "_is_spec_locked",
    "_last_seen",
    "_locks_specs",
    "_num_uses",
    "is_closed",
}
_OF_TRANSFORMS = {"_containers", "_memo", "_parent"}
_OF_TORCHRL = {"_container", "_parent"}  # of its transforms


class EnvCheckpoint(NamedTuple):
    """The result of :func:`save_env`.

    Attributes:
        state: for :func:`load_env`: tensors, strings, numbers, None, and dictionaries and lists of them.
        unsaved: one line for each part of the environment that could not be saved, with the reason.
    """

    state: dict[str, Any]
    unsaved: list[str]


def save_env(env: EnvBase) -> EnvCheckpoint:
    """Copy all that an environment is at this moment, to go on from there later, elsewhere.

    That is, for the environment and every module inside of it (workers of a ``SerialEnv``, base environments,
    transforms): parameters, buffers, masks of specs, and Python attributes, among them a gymnasium environment
    with its wrappers, its random generators and those of its spaces. ``env`` goes on as if nothing had been.

    Attributes are pickled. Where those of a part cannot be, that part's are left out and it is named in
    ``unsaved``: EnvPool, gymnasium's ``AsyncVectorEnv``, environments that pickle without their state
    (``EzPickle``: MuJoCo, Box2D, Atari), locks, open files. Not part of it: global generators (torch's, NumPy's,
    Python's) but for those of the processes of a ``ParallelEnv``, class attributes, global variables, what pygame
    draws with.

    Args:
        env: the environment.

    Returns:
        The state and what is not in it. ``torch.load(..., weights_only=True)`` reads the state.

    Example:
        >>> from rollwright.envs import GymEnv
        >>> env = GymEnv("CartPole-v1")
        >>> env.set_seed(0), env.reset()["observation"].shape
        (0, torch.Size([4]))
        >>> checkpoint = save_env(env)
        >>> checkpoint.unsaved
        []
        >>> again = GymEnv("CartPole-v1")
        >>> load_env(again, checkpoint.state)
        >>> bool((env.reset()["observation"] == again.reset()["observation"]).all())
        True
    """
    parts = dict(env.named_modules())
    attributes = {path: _attributes(part) for path, part in parts.items()}
    for own in attributes.values():
        for value in own.values():
            draw_generators(value)
    stateful = _stateful(parts)
    for path in stateful:
        attributes[path] = _picklable(parts, attributes[path])
    pickled, unsaved = _dump_all(parts, attributes)
    state: dict[str, Any] = {
        "makes": {path: _make(part) for path, part in parts.items()},
        "tensors": {name: _copied(tensor) for name, tensor in _tensors(parts) if tensor is None or not is_lazy(tensor)},
        "masks": {name: _copied(spec.mask) for name, spec in _choices(parts) if not spec.follows_mask},
        "attributes": torch.frombuffer(bytearray(pickled), dtype=torch.uint8),
    }
    if stateful:
        state["state_dicts"] = {path: packed(dict(holder.state_dict())) for path, holder in stateful.items()}
    for path, part in _elsewhere(parts):
        state.setdefault("elsewhere", {})[path], lines = part.save_remote()
        unsaved += lines
    return EnvCheckpoint(state, unsaved)


def load_env(
    env: EnvBase, state: Mapping[str, Any], state_dict: Mapping[str, Any] | None = None, **kwargs: Any
) -> None:
    """Make an environment what another one of the same make was when it was saved.

    Parts that were not saved stay as they are. References to objects inside of ``env`` that were taken before,
    such as its gymnasium environment, are out of date afterwards; modules, parameters, buffers and specs are
    written in place.

    .. warning:: The state holds pickles, and loading a pickle can run any code. Load only what you trust.

    Args:
        env: constructed as the one that was saved, in this process or another.
        state: of :func:`save_env`.
        state_dict: what ``env.state_dict()`` returned then: for parts that could not be saved.
        **kwargs: go to ``env.load_state_dict``.

    Raises:
        ValueError: ``state`` is no such state, or that of another kind of environment.
        EnvError: a class or function that the state names is not there; ``env`` is as it was.
    """
    with unchanged_if_it_raises(env):
        _load(env, state, state_dict, kwargs)
        for part in env.modules():
            if isinstance(part, EnvBase):
                part.forget_last_seen()


@contextmanager
def unchanged_if_it_raises(module: nn.Module, *, always: bool = False) -> Iterator[None]:
    """Make a module, such as an environment, what it was before where the ``with`` block raises.

    Restored are parameters, buffers, masks of specs, extra state, attributes (the objects that they were, not what was
    changed inside of these), and environments in other processes.

    Args:
        module: that the block loads a state into.
        always: also where the block does not raise, for a trial.
    """
    parts = dict(module.named_modules())
    owns: list[dict[str, Any]] = [own for part in parts.values() for own in (part.__dict__, *_own_tensors(part))]
    before = [(own, dict(own)) for own in owns]
    made = [tensor for _, tensor in _tensors(parts) if tensor is not None and not is_lazy(tensor)]
    tensors = [(tensor, tensor.data, tensor.detach().clone()) for tensor in made]
    masks = [spec.held_mask() for _, spec in _choices(parts)]
    extra = [(part, deepcopy(part.get_extra_state())) for part in parts.values() if _has_extra_state(part)]
    stateful = [(holder, deepcopy(dict(holder.state_dict()))) for holder in _stateful(parts).values()]
    remote = [(part, part.save_remote()[0]) for _, part in _elsewhere(parts)]
    failed = True
    try:
        yield
        failed = always
    finally:
        if failed:
            for own, was in before:
                own.clear()
                own.update(was)
            for tensor, data, value in tensors:
                tensor.data = data.copy_(value)
            for put_back in masks:
                put_back()
            for part, state in extra:
                part.set_extra_state(state)
            for holder, state in stateful:
                holder.load_state_dict(state)
            for part, state in remote:
                part.load_remote(state)


def _has_extra_state(part: nn.Module) -> bool:
    return type(part).get_extra_state is not nn.Module.get_extra_state


def _load(env: EnvBase, state: Mapping[str, Any], state_dict: Mapping[str, Any] | None, kwargs: dict[str, Any]) -> None:
    if not isinstance(state, Mapping) or not set(ENTRIES) <= state.keys():
        found = key_str(state.keys()) if isinstance(state, Mapping) else type(state).__name__
        raise ValueError(f"state: expected the state of save_env, with {key_str(ENTRIES)}, got {found}.")
    parts = dict(env.named_modules())
    _check_same(env, state["makes"], {path: _make(part) for path, part in parts.items()})
    _put_tensors(parts, state["tensors"])
    if state_dict is not None:
        env.load_state_dict(state_dict, **kwargs)
        _put_tensors(parts, state["tensors"])  # a state_dict is live: it may be of a later time
    _put_masks(parts, state["masks"])
    try:
        content = load(state["attributes"].cpu().numpy().tobytes(), _by_name(parts))
    except Exception as error:
        raise EnvError(
            f"state: what was saved of {env} cannot be read here: {type(error).__name__}: {error}. Define its "
            "classes and functions under the names that they had, and make a new environment."
        ) from error
    stateful = _stateful(parts)
    for path, attributes in content.items():
        if path in stateful:
            parts[path].__dict__.update(attributes)
        else:
            _put_attributes(parts[path], attributes)
    for path, holder in stateful.items():
        holder.load_state_dict(unpacked(state["state_dicts"][path]))
    for path, part in _elsewhere(parts):
        part.load_remote(state["elsewhere"][path])


def _elsewhere(parts: Mapping[str, nn.Module]) -> list[tuple[str, Any]]:
    """Parts whose environments are in other processes."""
    return [(path, part) for path, part in parts.items() if hasattr(type(part), "load_remote")]


def _stateful(parts: Mapping[str, nn.Module]) -> dict[str, ForeignTransform]:
    """Transforms of TorchRL that say themselves what their state is, by the paths of the parts that have it."""
    held = ((path, part) for path, part in parts.items() if isinstance(part, ForeignTransform))
    return {f"{path}.{part.inner_name}": part for path, part in held if part.has_own_state}


# Attributes -----------------------------------------------------------------------------------------


def _picklable(parts: Mapping[str, nn.Module], attributes: dict[str, Any]) -> dict[str, Any]:
    objects = _by_name(parts)
    return {name: value for name, value in attributes.items() if _can_dump(value, objects, set())}


def _attributes(part: nn.Module) -> dict[str, Any]:
    left_out = _left_out(part)
    return {name: value for name, value in vars(part).items() if name not in left_out}


def _left_out(part: nn.Module) -> set[str]:
    own = _OF_ENVS if isinstance(part, EnvBase) else _OF_TRANSFORMS if isinstance(part, Transform) else set()
    own = _OF_TORCHRL if is_torchrl_transform(part) else own
    return own | _OF_MODULES | set(getattr(type(part), "_not_saved", ()))


def _dump_all(parts: Mapping[str, nn.Module], attributes: dict[str, dict[str, Any]]) -> tuple[bytes, list[str]]:
    """Pickle the attributes of all parts that can be; the others, one line each."""
    objects = _by_name(parts)
    drawing = {id(one) for own in attributes.values() for value in own.values() for one in gym_parts(value)}
    with suppress(Exception):  # in one pickle: parts may share objects, such as a random generator
        return dump(attributes, objects, drawing), []
    unsaved = []
    saved = dict(attributes)
    for path, own in attributes.items():
        try:
            dump(own, objects, drawing)
        except Exception as error:
            guilty = [name for name, value in own.items() if not _can_dump(value, objects, drawing)]
            unsaved.append(_line(path, parts[path], error, guilty))
            del saved[path]
    try:
        return dump(saved, objects, drawing), unsaved
    except Exception as error:  # none of them is to blame alone
        return dump({}, objects, drawing), [*unsaved, _line("", parts[""], error, [])]


def _can_dump(value: Any, objects: Mapping[str, Any], drawing: set[int]) -> bool:
    try:
        dump(value, objects, drawing)
    except Exception:
        return False
    return True


def _line(path: str, part: nn.Module, error: Exception, guilty: list[str]) -> str:
    name = f"{type(part).__name__}({part.env_name})" if isinstance(part, GymWrapper) else type(part).__name__
    steps = [re.sub(r"^worker(\d+)$", r"worker \1", step) for step in path.split(".")]
    place = " ".join(step for step in steps if step not in ("", "base_env", "transforms"))
    where = f" [{place}]" if place else ""
    blamed = f" (attribute {', '.join(guilty)})" if guilty else ""
    return f"{name}{where}: cannot be pickled: {type(error).__name__}: {error}{blamed}"


def _put_attributes(part: nn.Module, attributes: dict[str, Any]) -> None:
    own, left_out = vars(part), _left_out(part)
    for name in [name for name in own if name not in left_out and name not in attributes]:
        del own[name]
    for name, value in attributes.items():
        for old, new in zip_longest(gym_parts(own.get(name)), gym_parts(value)):
            _draw_with(getattr(old, "__dict__", {}), getattr(new, "__dict__", {}))
    own.update(attributes)


def _draw_with(old: dict[str, Any], new: dict[str, Any]) -> None:
    """Give a gymnasium environment the generator that it has already; one without makes its own."""
    for name in [name for name, value in new.items() if value is Drawn]:
        if name in old:
            new[name] = old[name]
        else:
            del new[name]


# Tensors and specs ----------------------------------------------------------------------------------


def _by_name(parts: Mapping[str, nn.Module]) -> dict[str, Any]:
    """What is not pickled: modules, their tensors, and the specs that constructors made."""
    objects: dict[str, Any] = {f"module {path}": part for path, part in parts.items()}
    objects |= {f"tensor {name}": tensor for name, tensor in _tensors(parts) if tensor is not None}
    for name, spec in _specs(parts):
        if not isinstance(parts[name.split(":")[0]], TransformedEnv):  # theirs are made when asked for
            objects[f"spec {name}"] = spec
    return objects


def _tensors(parts: Mapping[str, nn.Module]) -> Iterator[tuple[str, Tensor | None]]:
    for path, part in parts.items():
        for own in _own_tensors(part):
            for name, tensor in own.items():
                yield f"{path}.{name}", tensor


def _own_tensors(part: nn.Module) -> tuple[dict[str, Any], dict[str, Any]]:
    """Parameters and buffers, those included that are None so far."""
    return part._parameters, part._buffers


def _specs(parts: Mapping[str, nn.Module]) -> Iterator[tuple[str, TensorSpec]]:
    for path, part in parts.items():
        for kind, composite in part.known_specs.items() if isinstance(part, EnvBase) else ():
            yield f"{path}:{kind}", composite
            for key, spec in composite.leaves().items():
                yield f"{path}:{kind}:{key!r}", spec


def _choices(parts: Mapping[str, nn.Module]) -> Iterator[tuple[str, DiscreteSpec]]:
    """Specs that may have a mask, by name."""
    return ((name, spec) for name, spec in _specs(parts) if isinstance(spec, DiscreteSpec))


def _put_masks(parts: Mapping[str, nn.Module], saved: Mapping[str, Tensor | None]) -> None:
    """Set masks; one that follows that of another spec goes on to, unless it was set to something else."""
    found = [(spec, saved[name], spec.follows_mask) for name, spec in _choices(parts) if name in saved]
    for spec, mask, follows in sorted(found, key=lambda each: each[2]):  # in older states, all are saved
        now = spec.mask if follows and mask is not None else None
        if not follows or not (mask is None or (now is not None and torch.equal(now.cpu(), mask.cpu()))):
            spec.mask = _copied(mask)


def _copied(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.detach().clone()


def _put_tensors(parts: Mapping[str, nn.Module], saved: Mapping[str, Tensor | None]) -> None:
    for name in saved.keys() - dict(_tensors(parts)).keys():  # of a buffer that is made late, and was not here yet
        path, _, own_name = name.rpartition(".")
        parts[path]._buffers[own_name] = None
    for path, part in parts.items():
        for name in [name for name in part._buffers if f"{path}.{name}" not in saved]:
            del part._buffers[name]  # was made later than what was saved
        for own in _own_tensors(part):
            for name, live in own.items():
                if f"{path}.{name}" not in saved:
                    continue
                value = saved[f"{path}.{name}"]
                if live is None or value is None:
                    own[name] = _copied(value)
                elif live.shape == value.shape and live.dtype == value.dtype:
                    with torch.no_grad():
                        live.copy_(value)  # in place: others may share it
                else:
                    live.data = value.detach().clone().to(live.device)


# The make -------------------------------------------------------------------------------------------


def _make(part: nn.Module) -> list[str]:
    """What two modules must have in common for one to take the other's state."""
    facts = [type(part).__qualname__]
    if isinstance(part, EnvBase):
        facts += [f"batch size {list(part.batch_size)}", f"device {part.device}"]
        if not isinstance(part, TransformedEnv):
            specs = [(name, spec) for name, spec in _specs({"": part}) if not isinstance(spec, Composite)]
            facts += sorted(f"spec {name[1:]} {list(spec.shape)} {spec.dtype}" for name, spec in specs)
    if isinstance(part, GymWrapper):
        facts[1:1] = [str(part.gym_env), str(part.gym_env.spec)]
    return [re.sub(r" at 0x[0-9a-f]+", "", fact) for fact in facts]


def _check_same(env: EnvBase, saved: Mapping[str, list[str]], live: Mapping[str, list[str]]) -> None:
    for path in sorted(saved.keys() | live.keys()):
        facts = zip_longest(saved.get(path, ["nothing"]), live.get(path, ["nothing"]), fillvalue="nothing")
        for was, now in facts:
            if was != now:
                raise ValueError(
                    f"state: expected that of an environment of the same make as {env}; {path or 'the environment'} "
                    f"was <{was}> when it was saved, and is <{now}> here. Construct it as the one that was saved."
                )
