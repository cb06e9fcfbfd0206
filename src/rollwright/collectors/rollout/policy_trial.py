"""Calls of a policy outside of a rollout: what it writes, a batch of zeros like that, and what explains its errors."""

from __future__ import annotations

import builtins
import contextlib
import copy
import functools
import itertools
import random
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from types import FrameType, FunctionType, MethodType, TracebackType
from typing import Any, cast

import numpy as np
import torch
from tensordict import TensorDictBase
from tensordict.nn import (
    ProbabilisticTensorDictSequential,
    TensorDictModule,
    TensorDictModuleBase,
    TensorDictModuleWrapper,
    TensorDictSequential,
)
from torch import nn

from rollwright._keys import NestedKey, as_tuple, key_str, leaf_keys, unravel
from rollwright.collectors.core import Path
from rollwright.collectors.options import CollectorOptions
from rollwright.collectors.rollout.paths import stages
from rollwright.collectors.rollout.paths.actors import FlatActor, TensorDictActor
from rollwright.collectors.rollout.paths.plain import PlainPath
from rollwright.collectors.rollout.paths.stages import IDS, VERSION, changed_keys, entries_before, entry_keys
from rollwright.collectors.rollout.policy import Devices, never_copied_in
from rollwright.data.layout import TRAJ_IDS, blank_frame, mark_truncated
from rollwright.data.specs import NonTensor, TensorSpec
from rollwright.envs.base import EnvBase
from rollwright.envs.priming import may_write_indices
from rollwright.errors import PolicyError, PolicyKeyError, RollwrightError
from rollwright.modules import RandomPolicy
from rollwright.modules.signature import Call, SignaturePolicy
from rollwright.weight_update.policy_weights import is_never_copied, modules_in


class Trial:
    """Calls a policy on a copy of what it reads, and changes nothing else.

    A module is copied for that, but for its parameters, so that its buffers, counters and generators stay as they are,
    and modules that take shape at their first call do not take it here. A function, a bound method or another object is
    called itself, and so is what is never copied: the buffers of the modules in it are put back afterwards, and what
    else it changes stays changed. torch's, NumPy's and Python's global generators are put back.

    Args:
        call: the policy, on TensorDicts.
        policy: of the collector.
        env: of the collector.
        devices: of the collector.
        sync: to be called after a copy to the policy's device.
    """

    def __init__(self, call: Call, policy: Any, env: EnvBase, devices: Devices, sync: Callable[[], None]) -> None:
        self.call, self._policy, self._env = call, policy, env
        self._move = stages.mover(devices.policy if devices.cast_to_policy else None, sync)
        self._devices = {device for device in vars(devices).values() if isinstance(device, torch.device)}

    @contextmanager
    def _acting(self, *, checks: bool = True) -> Iterator[tuple[Any, stages.Stage]]:
        """What is called, and the stage that calls it."""
        env = self._env
        own, shared = _copied(self.call)
        stale = stages.stale_actions(env, self._policy)
        check = stages.action_check(env) if checks else _accept
        with _generators_kept(self._devices), _buffers_kept(shared), _uncompiled():
            yield own, stages.build_act(own, self._move, check, fresh_outputs=True, stale=stale)

    def give_shape(self) -> None:
        """Call a policy whose modules take shape at their first call, on zeros, so that an optimizer can be made.

        The modules themselves are called, not copies. Where zeros are not enough for that, the first step does it.
        """
        lazy = isinstance(self.call, nn.Module) and any(map(nn.parameter.is_lazy, self.call.parameters()))
        if not lazy or isinstance(self._policy, RandomPolicy):
            return
        act = stages.build_act(self.call, self._move, stages.action_check(self._env), fresh_outputs=True)
        with contextlib.suppress(Exception), torch.no_grad():
            act(self._zeros())

    def indices(self) -> list[NestedKey]:
        """One-hot actions that the policy writes as indices, as far as a call on zeros shows that.

        A policy that says what it writes is not called.
        """
        env = self._env
        unsaid = may_write_indices(env, self._policy)
        found: list[NestedKey] = []
        if unsaid:
            with contextlib.suppress(Exception), torch.no_grad(), self._acting(checks=False) as (_, act):
                acted = act(self._zeros())
                found = [key for key in unsaid if _is_index(acted.get(key, None), env.full_action_spec[key])]
        return found

    def _zeros(self) -> TensorDictBase:
        """All that a policy may read, as zeros."""
        env = self._env
        zeros = env.full_action_spec.zero().empty()
        for spec in (env.full_observation_spec, env.full_state_spec, env.full_done_spec):
            zeros.update(spec.zero())
        return zeros

    def outputs(self, current: TensorDictBase) -> TensorDictBase | None:
        """What the policy writes: its entries, all zero, or empty; see :func:`~rollwright.data.layout.blank_frame`.

        Args:
            current: real observations, ``[*env]``.

        Returns:
            The entries, ``[*env]``; None where random actions are all that the policy writes.
        """
        if isinstance(self._policy, RandomPolicy):
            return None
        with self._acting() as (_, act):
            given = current.clone()
            before = entries_before(given)
            acted = act(given)
        changed, actions = set(changed_keys(acted, before)), set(self._env.action_keys)
        written = [key for key in entry_keys(acted) if key not in (IDS, VERSION) and (key in actions or key in changed)]
        return blank_frame([acted.select(*written)])

    def failure(self, current: TensorDictBase) -> tuple[Any, Exception | None]:
        """The copy that was called, and what it raised."""
        with self._acting() as (own, act):
            try:
                act(current.clone())
            except Exception as error:
                return own, error
        return own, None


def _accept(current: TensorDictBase) -> None:
    """Take all actions."""


def _is_index(value: Any, spec: TensorSpec) -> bool:
    """Whether an action is an index of what a spec has as one-hot."""
    if not isinstance(value, torch.Tensor) or value.is_floating_point() or value.dtype == torch.bool:
        return False
    return value.shape == spec.shape[:-1] and value.numel() != spec.shape.numel()


def _copied(call: Any) -> tuple[Any, list[Any]]:
    """A module with the same parameters and everything else of its own; and what it calls that was not copied."""
    if not isinstance(call, nn.Module) or is_never_copied(call):
        return call, [call]
    memo: dict[int, Any] = {id(own): own for own in call.parameters() if not nn.parameter.is_lazy(own)}
    memo |= {id(part): part for part in never_copied_in(call)}
    around = [module for module in call.modules() if type(vars(module).get("module")) in (FunctionType, MethodType)]
    functions = [vars(module)["module"] for module in around]
    shared = [getattr(function, "__self__", function) for function in functions]
    memo |= {id(one): one for one in shared if not isinstance(one, nn.Module)}  # an agent, with all that it has
    try:
        for module in around:  # which tensordict would pickle, with all that the function reaches
            memo[id(module)] = copied = object.__new__(type(module))
            copied.__dict__ = {name: copy.deepcopy(value, memo) for name, value in vars(module).items()}
        return copy.deepcopy(call, memo), shared
    except Exception:  # an object may refuse to be copied in any way it likes
        return call, [call, *shared]


def _uncompiled() -> AbstractContextManager[Any]:
    """What ``torch.compile`` returned runs as it was written: a copy would be compiled by itself."""
    if "torch._dynamo" not in sys.modules:  # which takes seconds to import
        return contextlib.nullcontext()
    return cast(AbstractContextManager[Any], torch.compiler.set_stance("force_eager"))


@contextmanager
def _generators_kept(devices: set[torch.device]) -> Iterator[None]:
    """Give the global generators the states back that they had."""
    indices = sorted({torch.cuda.current_device() if d.index is None else d.index for d in devices if d.type == "cuda"})
    numbers, python = np.random.get_state(), random.getstate()
    try:
        with torch.random.fork_rng(indices):
            yield
    finally:
        np.random.set_state(numbers)
        random.setstate(python)


@contextmanager
def _buffers_kept(shared: list[Any]) -> Iterator[None]:
    """Give the buffers of the modules in some objects the values back that they had."""
    held = [
        (module, name, buffer, buffer.clone())
        for one in shared
        for outermost in modules_in(one)
        for module in outermost.modules()
        for name, buffer in module.named_buffers(recurse=False, remove_duplicate=False)
    ]
    try:
        yield
    finally:
        with torch.no_grad():
            for owner, name, buffer, value in held:
                buffer.copy_(value)
                setattr(owner, name, buffer)


def blank_batch(
    env: EnvBase,
    trial: Trial,
    options: CollectorOptions,
    *,
    steps: int,
    version: int | str,
    device: torch.device | None,
) -> TensorDictBase:
    """Frames of zeros with the entries of a batch, as far as specs and one call of the policy tell them.

    Boundaries of compact batches, which storages do not hold, are left out.

    Args:
        env: of the rollout.
        trial: calls the policy.
        options: of the collector.
        steps: T.
        version: of the policy, where batches hold it.
        device: of the batch.

    Returns:
        ``[*env, T]``, the last dimension named ``"time"``; true is only what ``set_truncated`` marks at the end.

    Raises:
        ValueError: frames vary in shape.
    """
    frame = _blank_frame(env, trial, options, version)
    frame = frame if device is None else frame.to(device)
    time = env.ndim
    batch = frame.unsqueeze(time).expand(*env.batch_size, steps).clone()
    batch.names = [*[None] * time, "time"]
    if options.set_truncated:
        mark_truncated(env.done_groups, batch[..., -1].get("next"), time)
    return batch


def _blank_frame(env: EnvBase, trial: Trial, options: CollectorOptions, version: int | str) -> TensorDictBase:
    specs = (env.full_observation_spec, env.full_state_spec, env.full_action_spec, env.full_reward_spec)
    if varying := [key for spec in specs for key in spec.leaves() if -1 in spec[key].shape]:
        raise ValueError(
            f"fake_tensordict: the shape of {key_str(varying)} varies from frame to frame, and no batch has the "
            "form of all. Take the first batch of the collector as an example instead."
        )
    frame = env.fake_tensordict()
    outputs = trial.outputs(frame.exclude("next", *env.action_keys))
    if outputs is not None:
        frame = frame.exclude(*env.action_keys).update(outputs)
    if options.compact_obs:
        frame = frame.exclude(*(("next", *as_tuple(key)) for key in stages.next_keys(env)))
    if options.track_policy_version:
        tag = stages.version_tag(version, env.batch_size)
        frame.set(VERSION, tag).set(("next", VERSION), tag)
    if options.track_traj_ids:
        frame.set(IDS, torch.zeros(env.batch_size, dtype=torch.int64, device="cpu"))
    return frame


_KINDS = (ArithmeticError, AssertionError, AttributeError, LookupError, NameError, RuntimeError, TypeError, ValueError)
_CALLS = {FlatActor.__call__.__code__, FlatActor.compiled.__code__, TensorDictActor.__call__.__code__}
_SEQUENCES = (TensorDictSequential.forward, ProbabilisticTensorDictSequential.forward)
_RANDOM = PlainPath.at_random.__code__


def entries_of(env: EnvBase, options: CollectorOptions) -> list[NestedKey]:
    """The entries that specs announce of the data from which the first step is taken."""
    own = [TRAJ_IDS] if options.track_traj_ids else []
    return [*env.observation_keys, *env.state_keys, *env.done_keys, *own]


def check_inputs(policy: Any, available: Iterable[NestedKey], env: EnvBase) -> None:
    """Test that the environment has what the policy reads.

    Args:
        policy: only a TensorDict module lists what it reads.
        available: entries, leaves of a nest; the policy may read a whole node.
        env: for the message.

    Raises:
        PolicyKeyError: an in_key of a TensorDict module is no entry of the environment.
        PolicyError: a layer that reads an entry has another width.
    """
    if not isinstance(policy, TensorDictModuleBase):
        return
    _check_widths(policy, env)
    written = getattr(policy, "out_keys", None)
    if written is None:  # what it writes will show when it acts, and so will what it lacks
        return
    leaves = [as_tuple(key) for key in available]
    known = {leaf[:n] for leaf in leaves for n in range(1, len(leaf) + 1)}
    own = {unravel(key) for key in written}  # what it writes itself, it can do without at first
    reads = [unravel(key) for key in getattr(policy, "in_keys", ())]
    missing = [key for key in reads if key not in own and as_tuple(key) not in known]
    if missing:
        raise PolicyKeyError(
            f"policy: {type(policy).__name__} reads {key_str(missing)}, which {env} does not provide; it has "
            f"{key_str([unravel(leaf) for leaf in leaves])}. Change in_keys, or append a transform (such as "
            "TensorDictPrimer or InitTracker) that writes the entry. What an environment returns beside its specs "
            "must be named in observation_spec."
        )


def explained(error: BaseException, trial: Trial, path: Path) -> PolicyError | None:
    """An error to raise in place of one that a policy raised; it is of the class of that one, too.

    An exception of a class that is not Python's own stays as it is, and gets a note. A policy that runs on arrays is
    called once more, on TensorDicts, to see which module raises.

    Args:
        error: raised in a rollout.
        trial: calls a copy of the policy.
        path: has what the policy was given.

    Returns:
        None: ``error`` is to be raised, because it is none of the policy's, or because its class is the user's.
    """
    of_policy = isinstance(error, Exception) and _is_of_policy(error.__traceback__)
    if not of_policy or isinstance(error, RollwrightError):
        return None
    try:
        text = _found_out(error, trial, path.current)
    except Exception:  # whatever went wrong here, the policy's error is what the user has to see
        return None
    kind = type(error)
    if isinstance(error, StopIteration):  # raised again, it would end the caller's loop in silence
        return PolicyError(text)
    if not isinstance(error, _KINDS) or kind is not getattr(builtins, kind.__name__, None):
        error.add_note(text)
        return None
    if issubclass(PolicyError, kind):
        return PolicyError(text)
    return _both(kind)(text)


@functools.cache
def _both(kind: type[Exception]) -> type[PolicyError]:
    """A class of policy errors that are caught as those of one of Python's classes are, too."""
    made: Any = type(f"PolicyError({kind.__name__})", (PolicyError, kind), {"__init__": _init, "__str__": _str})
    found: type[PolicyError] = made
    return found


def _init(self: Exception, text: str) -> None:
    Exception.__init__(self, text)  # some of Python's exceptions take other arguments


def _str(self: Exception) -> str:
    return str(self.args[0])


def _is_of_policy(trace: TracebackType | None) -> bool:
    codes = [frame.f_code for frame in _frames(trace)]
    calls = [code in _CALLS or code.co_qualname == "build_act.<locals>.act" for code in codes]
    return any(calls) and _RANDOM not in codes


def _frames(trace: TracebackType | None) -> Iterator[FrameType]:
    while trace is not None:
        yield trace.tb_frame
        trace = trace.tb_next


def _found_out(error: BaseException, trial: Trial, current: TensorDictBase | None) -> str:
    frames, root = list(_frames(error.__traceback__)), trial.call
    if current is not None and isinstance(root, nn.Module):
        copied, found = trial.failure(current)
        if found is not None:
            frames, root = list(_frames(found.__traceback__)), copied
    return _told(error, frames, root, current)


def _told(error: BaseException, frames: list[FrameType], root: Any, current: TensorDictBase | None) -> str:
    raised = f"{type(error).__name__}: {error}".rstrip(".")
    modules = [frame for frame in frames if isinstance(frame.f_locals.get("self"), nn.Module)]
    if not modules:
        seen = "" if current is None else f" It was given {_shapes(current, leaf_keys(current))}."
        return f"policy: {_name(root)} raised {raised}.{seen}"
    module = modules[-1].f_locals["self"]
    paths = {id(part): path for path, part in root.named_modules()} if isinstance(root, nn.Module) else {}
    path = paths.get(id(module))
    keys = _read(frames, root, path, current)
    if path and isinstance(root, SignaturePolicy):
        path = path.removeprefix("module").removeprefix(".")
    what = f"policy: {repr(path) + ' ' if path else ''}({_name(module)})"
    given = [value for value in _arguments(modules[-1]) if isinstance(value, torch.Tensor)]
    name, dim = _width(module)
    for tensor in given[:1] if dim else []:
        size, expected = tensor.shape[dim] if tensor.ndim >= -dim else None, getattr(module, name)
        if size not in (None, expected):
            return (
                f"{what} expected {expected} {name.removeprefix('in_')} in dimension {dim} of its input, got {size}: "
                f"shape {list(tensor.shape)}.{keys} Make it with {name}={size}. {raised}."
            )
    weight = getattr(module, "weight", None)
    if isinstance(weight, torch.Tensor) and given and _differ(weight.dtype, given[0].dtype):
        return f"{what} {_other_dtype(weight.dtype, given[0].dtype)}{keys} {raised}."
    shapes = ", ".join(f"{list(tensor.shape)} {_dtype(tensor)}" for tensor in given)
    return f"{what} raised {raised}.{f' Its input: {shapes}.' if given else ''}{keys}"


def _read(frames: list[FrameType], root: Any, path: str | None, current: TensorDictBase | None) -> str:
    """What the TensorDict module reads that a module is in."""
    parts = {} if path is None else dict(root.named_modules())
    places = [] if path is None else ["", *itertools.accumulate(path.split("."), "{}.{}".format)]
    owners = [part for place in places if isinstance(part := parts.get(place), TensorDictModuleBase)]
    keys = list(map(unravel, getattr(owners[-1], "in_keys", ()))) if owners else []
    given = [frame for frame in frames if owners and frame.f_locals.get("self") is owners[-1]]
    tds = [value for frame in given for value in _arguments(frame) if isinstance(value, TensorDictBase)]
    td = tds[-1] if tds else current
    known = [] if td is None else [key for key in keys if td.get(key, None) is not None]
    return f" The module reads {_shapes(td, known)}." if td is not None and known else ""


def _shapes(td: TensorDictBase, keys: Iterable[NestedKey]) -> str:
    found = []
    for key in keys:
        value = td.get(key, None)
        form = f"{list(value.shape)} {_dtype(value)}" if isinstance(value, torch.Tensor) else type(value).__name__
        found.append(f"{key!r} {form}")
    return ", ".join(found)


def _arguments(frame: FrameType) -> Iterator[Any]:
    """The values of a function's arguments, those of a tuple one by one."""
    code = frame.f_code
    count = code.co_argcount + code.co_kwonlyargcount + bool(code.co_flags & 4)
    for name in code.co_varnames[:count]:
        value = frame.f_locals.get(name)
        yield from value if isinstance(value, tuple) else (value,)


def _width(module: nn.Module) -> tuple[str, int]:
    """The attribute that holds how wide a layer's input has to be, and in which dimension; 0: unknown."""
    if isinstance(module, nn.Linear):
        return "in_features", -1
    if isinstance(module, nn.Conv1d | nn.Conv2d | nn.Conv3d):
        return "in_channels", -1 - len(module.kernel_size)
    return "", 0


def _differ(weights: torch.dtype, given: torch.dtype) -> bool:
    return weights is not given and weights.is_floating_point and given.is_floating_point


def _other_dtype(weights: torch.dtype, given: torch.dtype) -> str:
    """What is wrong with a layer's dtype, and what to do."""
    or_else = ", or append DoubleToFloat() to the environment" if given is torch.float64 else ""
    return (
        f"expected {_dtype(weights)} input, as its weights are, got {_dtype(given)}. Call policy.to({given}){or_else}."
    )


def _name(thing: Any) -> str:
    """A layer as torch prints it, anything larger by its class."""
    if isinstance(thing, nn.Module) and not isinstance(thing, TensorDictModuleBase) and not list(thing.children()):
        return repr(thing)
    return getattr(thing, "__qualname__", type(thing).__name__)


def _dtype(of: torch.Tensor | torch.dtype) -> str:
    return str(of.dtype if isinstance(of, torch.Tensor) else of).removeprefix("torch.")


# At construction --------------------------------------------------------------------------------------------


def _check_widths(policy: nn.Module, env: EnvBase) -> None:
    """Test that layers which read an entry of the environment as it is fit its spec.

    Raises:
        PolicyError: one does not, or has weights of another precision.
    """
    for path, module, key in _first_readers(policy, "", set()):
        layer = module.module
        while type(layer) is nn.Sequential and len(layer):
            path, layer = f"{path}.0", layer[0]
        hooked = getattr(layer, "_forward_pre_hooks", None) or getattr(module.module, "_forward_pre_hooks", None)
        spec = next(
            (s[key] for s in (env.full_observation_spec, env.full_state_spec) if key in s.keys(True, True)), None
        )
        if type(layer) is not nn.Linear or hooked or spec is None or isinstance(spec, NonTensor):
            continue
        shape = spec.shape[env.ndim :]
        if len(shape) and shape[-1] not in (-1, layer.in_features):
            raise PolicyError(
                f"policy: {path!r} ({layer}) reads {key!r} and expected {layer.in_features} features in its last "
                f"dimension, got shape {list(shape)} from {env}. Make it with in_features={shape[-1]}."
            )
        weights, read = layer.weight.dtype, spec.dtype
        if read is not None and {weights, read} == {torch.float32, torch.float64}:  # autocast changes neither
            raise PolicyError(f"policy: {path!r} ({layer}) reads {key!r} of {env} and {_other_dtype(weights, read)}")


def _first_readers(
    module: Any, path: str, written: set[NestedKey]
) -> Iterator[tuple[str, TensorDictModule, NestedKey]]:
    """TensorDict modules of one input that no module before them has written."""
    inside = f"{path}." if path else ""
    if isinstance(module, TensorDictModuleWrapper) and type(module).forward is TensorDictModuleWrapper.forward:
        yield from _first_readers(module.td_module, f"{inside}td_module", written)
    elif type(module).forward in _SEQUENCES and isinstance(module.module, nn.ModuleList):
        for i, part in enumerate(module.module):
            yield from _first_readers(part, f"{inside}module.{i}", written)
    elif isinstance(module, TensorDictModule) and type(module).forward is TensorDictModule.forward:
        keys = list(map(unravel, module.in_keys))
        if len(keys) == 1 and keys[0] not in written and module.method is None:
            yield f"{inside}module", module, keys[0]
    written.update(map(unravel, getattr(module, "out_keys", ())))
