"""The policy that acts: prepared, copied, on its device; and the devices that data are copied between."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from types import CellType, FunctionType
from typing import Any, NamedTuple, cast

import torch
from tensordict import TensorDictBase
from tensordict.nn import CudaGraphModule, TensorDictModule
from torch import nn

from rollwright._warnings import warn_user
from rollwright.collectors.options import CollectorOptions
from rollwright.data.specs.shapes import as_device
from rollwright.envs.base import EnvBase
from rollwright.modules import RandomPolicy, set_exploration_modules_spec_from_env
from rollwright.modules.llm.engine import Engine
from rollwright.modules.signature import Call, speak_tensordict
from rollwright.weight_update.forms import Description, describe
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


@dataclass(frozen=True)
class Devices:
    """The devices of a collector, resolved once.

    Attributes:
        policy: where the policy computes; None when it is not known (no parameters, no option).
        env: where the environment's data live; None for an environment without a device.
        storing: where batches are delivered; None when their entries share no device by promise.
    """

    policy: torch.device | None
    env: torch.device | None
    storing: torch.device | None

    @classmethod
    def resolve(cls, options: CollectorOptions, env: torch.device | None, policy: torch.device | None) -> Devices:
        """Fill in what the options leave open.

        Args:
            options: of the collector.
            env: the environment's device, once ``env_device`` was applied to it.
            policy: the device of the policy's parameters, if they have one.
        """
        policy_device = options.policy_device or options.device
        if policy_device is None and policy is not None and policy != (env or torch.device("cpu")):
            policy_device = policy  # the policy stays where it is, and data must go there
        storing = options.storing_device or options.device
        if storing is None and policy_device == env:
            storing = env
        return cls(as_device(policy_device), env, as_device(storing))

    @property
    def cast_to_policy(self) -> bool:
        """Whether data are copied to the policy's device before it reads them."""
        return self.policy is not None and self.policy != self.env

    @property
    def cast_to_env(self) -> bool:
        """Whether data are copied to the environment's device before it reads them."""
        return self.env is not None and (self.policy != self.env or self.storing != self.env)

    @property
    def current_has_no_device(self) -> bool:
        """Whether the current TensorDict has entries on several devices, or on none that was declared."""
        return self.env is None or self.policy != self.env


class Syncs(NamedTuple):
    """Functions to call after a copy to the policy's device, to the environment's, to that of batches."""

    policy: Callable[[], None]
    env: Callable[[], None]
    storage: Callable[[], None]

    @classmethod
    def of(cls, devices: Devices, *, skip: bool) -> Syncs:
        """For some devices; ``skip``: nothing is called."""
        made = [nothing if skip else sync_function(device) for device in (devices.policy, devices.env, devices.storing)]
        return cls(*made)


def module_device(policy: object) -> torch.device | None:
    """The one device of a policy's parameters and buffers; None when there is none, or several."""
    module = weights_of(policy)
    if module is None:
        return None
    devices = {tensor.device for tensor in (*module.parameters(), *module.buffers())}
    return devices.pop() if len(devices) == 1 else None


def nothing() -> None:
    """The synchronisation that no copy to this device needs."""


def sync_function(device: torch.device | None) -> Callable[[], None]:
    """What to call after a non-blocking copy *to* ``device`` before its result may be read.

    ======================================  =============================
    destination                             call
    ======================================  =============================
    CUDA                                    nothing: the stream orders it
    not CUDA, where CUDA is in use          ``torch.cuda.synchronize``
    not CUDA, where MPS is available        ``torch.mps.synchronize``
    not CUDA, where an NPU is available     ``torch.npu.synchronize``
    CPU alone, or no device                 nothing
    ======================================  =============================
    """
    if device is None or device.type == "cuda":
        return nothing
    if torch.cuda.is_available():
        return _synchronize_cuda
    if torch.backends.mps.is_available():
        return torch.mps.synchronize
    npu = getattr(torch, "npu", None)
    if npu is not None and npu.is_available():
        return npu.synchronize  # type: ignore[no-any-return]
    return nothing


def _synchronize_cuda() -> None:
    if torch.cuda.is_initialized():  # a forked worker that never touched CUDA must not start now
        torch.cuda.synchronize()


@contextmanager
def making_policy(policy: Any, options: CollectorOptions, env: EnvBase) -> Iterator[Any]:
    """The policy object as the user means it: given, made by the factory, or random.

    An engine that the factory made is closed if the block raises.
    """
    made = _made(policy, options, env)
    try:
        yield made
    except BaseException:
        engine = getattr(made, "engine", None)
        if options.policy_factory is not None and isinstance(engine, Engine):
            with suppress(Exception):  # the error that is under way matters
                engine.close()
        raise


def _made(policy: Any, options: CollectorOptions, env: EnvBase) -> Any:
    if options.policy_factory is not None:
        policy = options.policy_factory()
        if policy is None:
            raise TypeError("policy_factory: expected it to return a policy, got None.")
    if policy is None:
        return RandomPolicy(env.full_action_spec)
    if isinstance(policy, RandomPolicy):
        policy.set_action_spec_from_env(env)
        policy = policy.with_masks_of(env)
    check_policy(policy)
    set_exploration_modules_spec_from_env(policy, env)
    return policy


def check_policy(policy: Any) -> None:
    """Test that a policy can act, as far as that shows.

    Raises:
        TypeError: it cannot.
    """
    if not callable(policy):
        raise TypeError(
            "policy: expected a callable on TensorDicts or on observations, a TensorDictModule, an nn.Module or None, "
            f"got {type(policy).__name__}: {policy!r}. Pass one of these."
        )
    if isinstance(policy, type):
        raise TypeError(f"policy: got the class {policy.__name__}. Pass an instance, {policy.__name__}(...).")


def check_shaped(policy: Any) -> None:
    """Test that a policy which workers copy has all its parameters.

    Raises:
        ValueError: some take shape at the first call, and each copy would draw numbers of its own for them.
    """
    if (weights := weights_of(policy)) is not None:
        lacking = [name for name, own in weights.named_parameters() if nn.parameter.is_lazy(own)]
        if lacking:
            raise ValueError(
                f"policy: expected parameters with numbers, which all workers share, got {lacking[0]!r}, which takes "
                "shape at its first call. Call the policy once before, such as policy(env.reset())."
            )


class ActingPolicy:
    """The policy that acts, and where its weights come from.

    Args:
        made: of :func:`making_policy`.
        given: by the user, beside a ``policy_factory``: read by updates without weights.
        options: of the collector.
        env: what it acts in.

    Attributes:
        policy: the object that acts: the user's, or a copy of it on another device or for another thread.
        call: calls it on TensorDicts.
        source: where updates without weights read them; None: the weights that act are the user's own.
        engine: that generates for the policy, or None.
        has_no_weights: whether there is nothing in it that could be updated.
    """

    def __init__(self, made: Any, given: Any, options: CollectorOptions, env: EnvBase) -> None:
        self.policy, original = _placed(made, as_device(options.policy_device or options.device))
        self.call = _on_tensordicts(self.policy, options, env)
        self.source: nn.Module | None = given if options.policy_factory is not None else original
        self.has_no_weights = False
        self._target: nn.Module | None = None
        found = getattr(self.policy, "engine", None)
        self.engine: Engine | None = found if isinstance(found, Engine) else None
        # An engine need not know of modes that nobody asks for.
        self._update_how = {
            name: value
            for name in ("mode", "cache")
            if (value := getattr(options, f"weight_update_{name}", None)) not in (None, "in_flight", "keep")
        }
        self._owns_engine = options.policy_factory is not None
        self._tracker: Any = None
        self._coming: int | None = None  # the version of the weights that are taken now
        stamped = 0 if self.engine is None else self.engine.version
        self._version = stamped if isinstance(stamped, int) else 0

    @property
    def version(self) -> int:
        """Of the weights that act; an engine stamps tokens with it."""
        return self._version

    @version.setter
    def version(self, version: int) -> None:
        rises, self._version = version > self._version, version
        if hasattr(self._tracker, "count"):
            self._tracker.count(version)
        elif rises and self._tracker is not None:
            self._tracker.increment_version()
        if self.engine is not None:
            self.engine.version = version if self._tracker is None else self._tracker.version

    @property
    def stamp(self) -> int | str:
        """What turns are stamped with: the version, or that of the tracker, which may be a UUID."""
        tracked = None if self._tracker is None else self._tracker.version
        return tracked if isinstance(tracked, str) else self._version

    def use_tracker(self, tracker: Any) -> None:
        """Stamp tokens with the versions of a ``PolicyVersion``, which counts from here on."""
        self._tracker = tracker
        self.version = self._version

    def take(self, updates: Sequence[Callable[[], None]], version: int) -> None:
        """Act with new weights, which have a version; it may be several above the one before."""
        self._coming = version
        try:
            for update in updates:
                update()
        finally:
            self._coming = None
        self.version = version

    def update_engine(self, weights: Any) -> None:
        """Give the engine new weights, as the options say; their version is counted next.

        Raises:
            ValueError: there is no engine.
        """
        if self.engine is None:
            raise ValueError(
                f"weights of an engine: the policy ({type(self.policy).__name__}) has none. Pass one with an engine."
            )
        number = self._version + 1 if self._coming is None else self._coming
        version = self._tracker.at(number) if hasattr(self._tracker, "at") else number
        self.engine.update_weights(weights, version, **self._update_how)

    def engine_state(self) -> dict[str, Any]:
        """The weights of the engine's model, live.

        Raises:
            TypeError: there is no engine, or its weights are not in this process.
        """
        model = getattr(self.engine, "model", None)
        if not isinstance(model, nn.Module):
            what = "a policy without an engine" if self.engine is None else type(self.engine).__name__
            raise TypeError(
                f"engine_weights=True: expected an engine whose model is an nn.Module, got {what}. Save its weights "
                "where they are, and leave engine_weights out."
            )
        return dict(model.state_dict())

    def describe_engine(self) -> Description | None:
        """What the model of the engine takes; None: the engine alone knows."""
        model = getattr(self.engine, "model", None)
        return Description(*describe(model, "policy")[:3], part="model") if isinstance(model, nn.Module) else None

    def close(self) -> None:
        """Close an engine that was made for this collector alone."""
        if self.engine is not None and self._owns_engine:
            self.engine.close()

    @property
    def target(self) -> Any:
        """What takes new weights."""
        return self.policy if self._target is None else self._target

    @target.setter
    def target(self, module: nn.Module) -> None:
        self._target = module

    def act_with_copy(self, options: CollectorOptions, env: EnvBase) -> bool:
        """Act with a copy, unless it is one already, or has no weights; whether modules act that were not copied."""
        if self.source is not None or self.engine is not None or isinstance(self.policy, RandomPolicy):
            return False  # an engine takes new weights between two tokens by itself
        copied = copied_policy(self.policy)
        self.source, self._target = copied.source, copied.target if copied.shares_modules else None
        self.has_no_weights = copied.source is None and not copied.shares_modules
        if copied.policy is not self.policy:
            self.policy = copied.policy
            self.call = _on_tensordicts(copied.policy, options, env)
        return copied.shares_modules


def _placed(policy: Any, device: torch.device | None) -> tuple[Any, nn.Module | None]:
    """The policy on ``device``, and the original's weights if that took a copy."""
    if device is None or module_device(policy) in (None, device):
        return policy, None
    if never_copied_in(policy):  # an engine is where it is, and takes tokens from anywhere
        return policy, None
    copied = copied_policy(policy)
    if copied.shares_modules or copied.target is None:
        return policy, None
    with torch.no_grad():
        copied.target.to(device)
    return copied.policy, copied.source


def _on_tensordicts(policy: Any, options: CollectorOptions, env: EnvBase) -> Call:
    """The policy as a callable on TensorDicts; see :func:`~rollwright.modules.signature.speak_tensordict`."""
    return cast(Call, policy) if options.trust_policy else speak_tensordict(policy, env)


def accelerate(call: Call, options: CollectorOptions) -> tuple[Call, bool]:
    """The policy compiled and captured as the options specify, and whether its outputs are fresh at each call."""
    fresh = True
    if options.compile_policy:
        arguments = options.compile_policy if isinstance(options.compile_policy, Mapping) else {}
        call = CompiledPolicy(call, arguments)
        fresh = False
    if options.cudagraph_policy:
        arguments = options.cudagraph_policy if isinstance(options.cudagraph_policy, Mapping) else {}
        call = cast(Call, CudaGraphModule(cast(Any, call), **arguments))
        fresh = False
    return call, fresh


class CompiledPolicy:
    """A policy through ``torch.compile``, which goes on uncompiled (with a warning) where that fails."""

    def __init__(self, policy: Call, arguments: Mapping[str, Any]) -> None:
        self._plain = policy
        self._call = torch.compile(policy, **arguments)
        self._proven = False

    def __call__(self, td: TensorDictBase) -> TensorDictBase | None:
        """Act."""
        if self._proven:
            return self._call(td)
        before = td.copy()
        try:
            chosen = self._call(td)
        except Exception as error:
            # A wrong policy fails again below, with its own error and without the compiler's frames.
            chosen = self._plain(td.update(before))
            self._call = self._plain
            warn_user(
                f"compile_policy: the policy could not be compiled and runs uncompiled. {type(error).__name__}: "
                f"{str(error).splitlines()[0] if str(error) else ''}",
            )
        self._proven = True
        return chosen
