"""Weights in every form that users pass them, as flat states by name, and whether a model can take them."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Set
from functools import partial
from typing import Any, Literal, NamedTuple, cast

import torch
from tensordict import TensorDict, TensorDictBase
from torch import nn

from rollwright._keys import key_str
from rollwright.weight_update.policy_weights import JoinedWeights, weights_of

State = dict[str, Any]
"""Weights by name, as in a ``state_dict``: tensors, and extra state (any object) where :func:`is_extra`."""

Strategy = Literal["tensordict", "state_dict"]
"""What of a module is sent: parameters and buffers, or what ``state_dict()`` holds."""

Signature = dict[str, "tuple[torch.Size, torch.dtype] | None"]
"""What a model takes: shape and dtype by name; None for extra state. See :func:`signature_of`."""

_EXTRA = "_extra_state"
_ADAPTER = re.compile(r"(?:^|\.)(lora_\w+|modules_to_save)\.([^.]+)")  # in names: what, and whose


def is_extra(name: str) -> bool:
    """Whether a name in a ``state_dict`` is that of a ``get_extra_state``, which may be any object.

    >>> is_extra("norm._extra_state"), is_extra("norm.weight")
    (True, False)
    """
    return name.rpartition(".")[2] == _EXTRA


def unsaved_buffers(module: nn.Module) -> set[str]:
    """Names of buffers that a ``state_dict`` leaves out (``persistent=False``)."""
    return {
        f"{prefix}.{name}" if prefix else name
        for prefix, part in module.named_modules(remove_duplicate=False)
        for name in vars(part)["_non_persistent_buffers_set"]  # torch has no public name for it
        if getattr(part, name, None) is not None
    }


def flat_state(
    weights: Any, name: str, *, strategy: Strategy = "state_dict", optional: Set[str] = frozenset()
) -> State:
    """Weights in any form as a flat state; nothing is copied.

    Args:
        weights: a module or another policy (see :func:`~rollwright.weight_update.policy_weights.weights_of`), its
            ``state_dict``, or a (nested) TensorDict or dictionary.
        name: what takes them, for messages.
        strategy: ``"state_dict"``: of a module, what ``state_dict()`` gives, extra state included; ``"tensordict"``:
            its parameters and buffers, those too that a ``state_dict`` leaves out, and no extra state.
        optional: buffers that a ``state_dict`` leaves out, and that are taken of a module all the same.

    Raises:
        TypeError: ``weights`` is none of these.
    """
    if isinstance(weights, TensorDictBase):
        state = _flat(weights)
    elif isinstance(weights, Mapping):
        _check_names(weights, name)
        nested = any(
            isinstance(value, Mapping | TensorDictBase) and not is_extra(str(k)) for k, value in weights.items()
        )
        state = _flat(TensorDict(dict(weights))) if nested else dict(weights)
    elif (module := weights_of(weights)) is not None:
        state = module.state_dict() if strategy == "state_dict" else dict(_tensors_of(module))
        if optional:
            state |= {key: value for key, value in module.named_buffers(remove_duplicate=False) if key in optional}
    else:
        raise TypeError(
            f"weights for {name}: expected a module, a TensorDict or a state_dict, got {type(weights).__name__}."
        )
    if strategy != "state_dict":
        state = {key: value for key, value in state.items() if not is_extra(key)}
    return state


def _check_names(weights: Mapping[Any, Any], name: str) -> None:
    strange = [key for key in weights if not isinstance(key, str | tuple)]
    if strange:
        raise TypeError(
            f"weights for {name}: expected names of weights, got the keys {key_str(map(repr, strange))}. Pass either "
            "weights by name, or one dictionary from indices of workers to weights."
        )


def split_by_worker(given: Any, worker_ids: Any) -> Mapping[int, Any] | None:
    """Weights by worker, where they were given so; None where all who get them get the same.

    Args:
        given: weights in any form, or a dictionary of such from indices of workers.
        worker_ids: who gets them; None where the user named none.

    Raises:
        ValueError: ``worker_ids`` beside weights by worker.
    """
    # A TensorDict is a Mapping too, and has no truth value.
    plain = isinstance(given, Mapping) and not isinstance(given, TensorDictBase)
    if not plain or not given or not all(type(key) is int for key in given):
        return None
    if worker_ids is not None:
        raise ValueError("worker_ids: got it beside weights by worker. Drop one of them.")
    return cast("Mapping[int, Any]", given)


def signature_of(module: nn.Module) -> Signature:
    """What a module takes, to be checked where the module is not.

    >>> signature_of(nn.Linear(3, 1))
    {'weight': (torch.Size([1, 3]), torch.float32), 'bias': (torch.Size([1]), torch.float32)}
    """
    return {
        key: (value.shape, value.dtype) if isinstance(value, torch.Tensor) and not is_extra(key) else None
        for key, value in module.state_dict().items()
    }


class Description(NamedTuple):
    """What :func:`check_state` needs of a model.

    Attributes:
        kind: its class.
        signature: what it takes.
        optional: names that it takes beside those.
        part: the name of the model in modules that hold it, whose states it takes, too; None: it has none.
    """

    kind: str
    signature: Signature
    optional: set[str]
    part: str | None = None


def of_part(state: State, names: Set[str], part: str) -> State:
    """The weights of a module's part, where ``state`` is that of a module which holds it; else ``state``.

    >>> of_part({"model.weight": 1, "head.weight": 2}, {"weight"}, "model")
    {'weight': 1}
    """
    inner = {key.removeprefix(f"{part}."): value for key, value in state.items() if key.startswith(f"{part}.")}
    return inner if names <= inner.keys() else state


def of_adapter(state: State, names: Set[str]) -> State | None:
    """The weights of an adapter alone, by the names of a model that has it; None: ``state`` is none of such.

    Args:
        state: by the names of the model, or as ``get_peft_model_state_dict`` of peft names them.
        names: of the model.

    Raises:
        ValueError: several adapters of the model have these names.

    >>> names = {"layer.base_layer.weight", "layer.lora_A.default.weight"}
    >>> of_adapter({"layer.lora_A.weight": 1}, names)
    {'layer.lora_A.default.weight': 1}
    """
    full, adapters = dict[str, str](), set[str]()
    for name in names:
        if (found := _ADAPTER.search(name)) is not None:
            kind, adapter = found.groups()
            short = name[: found.start() if kind == "modules_to_save" else found.end(1)] + name[found.end() :]
            short = short.removeprefix(".")
            if kind == "lora_magnitude_vector":
                short = short.removesuffix(".weight")
            full |= {short: name, name: name}
            adapters.add(adapter)
    is_saved = not state.keys() <= names and state.keys() <= full.keys() | names  # perhaps with embeddings of the model
    if not state or not (is_saved or state.keys() <= full.keys()):
        return None
    if len(adapters) > 1 and is_saved:
        raise ValueError(
            f"weights of an adapter: the model has several, {', '.join(sorted(adapters))}, and they name none. Pass "
            "weights by the names that model.state_dict() has."
        )
    return {full.get(name, name): value for name, value in state.items()}


def describe(target: Any, name: str) -> Description:
    """What :func:`check_state` needs of a model.

    Args:
        target: the model.
        name: what it is, for messages.

    Raises:
        TypeError: it has no weights.
    """
    module = weights_of(target)
    if module is None:
        raise TypeError(
            f"{name}: {type(target).__name__} is no nn.Module, reads none, and takes no weights. "
            "Pass a module as policy, or do not update its weights."
        )
    return Description(type(target).__name__, signature_of(module), unsaved_buffers(module))


def check_state(state: State, model: Description, name: str) -> None:
    """Check that a model takes a state: all of it, or that of an adapter. Dtypes may differ: a copy casts.

    Args:
        state: of :func:`flat_state`.
        model: what takes it.
        name: what the model is, for messages.

    Raises:
        TypeError: no tensor where one is expected.
        ValueError: names or shapes differ.
    """
    signature = model.signature
    if model.part is not None:
        state = of_part(state, signature.keys(), model.part)
    needed = {key for key, expected in signature.items() if expected is not None}
    if (adapter := of_adapter(state, signature.keys())) is not None:
        own = {found[2] for key in adapter if (found := _ADAPTER.search(key))}
        state, needed = adapter, {key for key in needed if (found := _ADAPTER.search(key)) and found[2] in own}
    missing = needed - state.keys()
    unknown = state.keys() - signature.keys() - model.optional
    if missing or unknown:
        raise ValueError(
            f"weights for {name}: names differ from those of {model.kind}. "
            f"Missing: {key_str(missing) or 'none'}; unknown: {key_str(unknown) or 'none'}. Pass the "
            f"{name.removeprefix('the ')} itself, or weights with the names that it has, those of modules included "
            "that its functions read. Weights of an adapter go to a model that has it."
        )
    for key, expected in signature.items():
        if expected is None or key not in state:
            continue
        value = state[key]
        if not isinstance(value, torch.Tensor):
            raise TypeError(
                f"weights for {name}: expected a tensor at {key!r}, got {type(value).__name__}. "
                "Pass a module, its state_dict, or TensorDict.from_module(module)."
            )
        if value.shape != expected[0]:
            raise ValueError(
                f"weights for {name}: {key!r} has shape {list(value.shape)}, expected {list(expected[0])}."
            )
        check_copied(value, key, name)


def check_copied(value: torch.Tensor, key: str, name: str) -> None:
    """Check that a tensor can be copied into a module's.

    Raises:
        ValueError: it holds no numbers, or holds them in another layout.
    """
    if value.device.type == "meta":
        raise ValueError(f"weights for {name}: {key!r} is on the device 'meta', and holds no numbers.")
    if value.layout is not torch.strided:
        raise ValueError(f"weights for {name}: {key!r} is of {value.layout}. Pass its to_dense().")


def prepare(target: Any, weights: Any, name: str) -> Callable[[], None]:
    """Check weights against the module that takes them; returns the call that copies them.

    Args:
        target: the module, or another policy.
        weights: a module of the same structure, its ``state_dict``, or a (nested) TensorDict or dictionary.
        name: what the target is, for messages.

    Raises:
        TypeError: the target has no weights, or ``weights`` is none of these.
        ValueError: names or shapes differ.
    """
    model = describe(target, name)
    target, beside = weights_of(target), model.optional
    state = flat_state(weights, name, optional=beside)
    check_state(state, model, name)
    if (adapter := of_adapter(state, model.signature.keys())) is not None:
        return partial(target.load_state_dict, adapter, strict=False)
    buffers, own = [], dict(target.named_buffers(remove_duplicate=False)) if beside else {}
    for key in sorted(beside & state.keys()):
        buffer, value = own[key], state.pop(key)
        if not isinstance(value, torch.Tensor) or value.shape != buffer.shape:
            got = list(value.shape) if isinstance(value, torch.Tensor) else type(value).__name__
            raise ValueError(f"weights for {name}: {key!r} has shape {got}, expected {list(buffer.shape)}.")
        check_copied(value, key, name)
        buffers.append((buffer, value))
    full = {**target.state_dict(), **state}

    def copy() -> None:
        with torch.no_grad():
            target.load_state_dict(full)
            for buffer, value in buffers:
                buffer.copy_(value)

    return copy


def tensordict_of(policy: nn.Module) -> TensorDictBase:
    """Parameters and buffers of a policy, live, nested as its modules are."""
    module = weights_of(policy) or policy
    if isinstance(module, JoinedWeights):
        flat: TensorDictBase = TensorDict(dict(_tensors_of(module)))
        return cast(TensorDictBase, flat.unflatten_keys("."))
    return cast(TensorDictBase, TensorDict.from_module(module))


def _tensors_of(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    yield from module.named_parameters(remove_duplicate=False)
    yield from module.named_buffers(remove_duplicate=False)


def _flat(weights: TensorDictBase) -> State:
    return {key if isinstance(key, str) else ".".join(key): value for key, value in weights.items(True, True)}
