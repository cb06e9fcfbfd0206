"""What a collector is between two batches, saved and put back, so that the next batch has the bits it would have."""

from __future__ import annotations

import random
import warnings
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from types import BuiltinFunctionType, FunctionType
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase
from torch import nn

from rollwright._keys import key_str
from rollwright.collectors.arguments import checked_state
from rollwright.collectors.rollout.devices import module_device
from rollwright.collectors.rollout.paths.stages import IDS, VERSION
from rollwright.envs.checkpoint import load_env, save_env
from rollwright.envs.checkpoint.snapshot import dump
from rollwright.envs.checkpoint.snapshot import load as undump
from rollwright.modules import RandomPolicy

if TYPE_CHECKING:
    from rollwright.collectors._delivering import DeliveringCore

__all__ = ["load", "save", "td_from", "td_state"]

GENERATORS = (np.random.Generator, np.random.RandomState, random.Random, torch.Generator)


def save(core: DeliveringCore) -> OrderedDict[str, Any]:
    """The state of a collector between two batches: tensors, numbers, strings, and dictionaries and lists of them.

    Nothing of it changes when the collector goes on, but for ``policy_state_dict`` and ``env_state_dict``: these are
    live, as everywhere in torch.
    """
    checkpoint = save_env(core.env)
    trajectories, objects = (None, []) if checkpoint.unsaved else _trajectories(core)
    state: OrderedDict[str, Any] = OrderedDict()
    if isinstance(core.policy, nn.Module):
        state["policy_state_dict"] = core.policy.state_dict()
    state["env_state_dict"] = core.env.state_dict()
    state.update(frames=core._frames, iter=core._iter, policy_version=core._policy_version)
    state["traj_pool"] = core._traj_pool.state_dict()
    state["env_checkpoint"] = checkpoint.state
    state["trajectories"] = trajectories
    state["held"], unheld = _held(core)
    state["episodes"] = core._episodes.state_dict()
    state["streams"] = _streams(core)
    state["unsaved"] = [*checkpoint.unsaved, *objects, *unheld, *_kept_by_policy(core.policy)]
    return state


def load(core: DeliveringCore, state: Mapping[str, Any], **kwargs: Any) -> None:
    """Put back what :func:`save` saved.

    Args:
        core: a collector of the same make.
        state: of :func:`save`; what it lacks begins anew.
        **kwargs: go to ``load_state_dict`` of policy and environment.
    """
    if "env_state_dict" not in checked_state(state):
        raise KeyError(f"state_dict: expected 'env_state_dict' among its entries, got {sorted(state)}.")
    # Frames that this collector has delivered may have the saved ids, on other trajectories.
    ids_are_free = not core._stepped or _is_there(core, state)
    core._path.carrier = core._fresh_ids = None
    if "policy_state_dict" in state and isinstance(core.policy, nn.Module):
        core.policy.load_state_dict(state["policy_state_dict"], **kwargs)
    core.env.load_state_dict(state["env_state_dict"], **kwargs)
    core._frames = int(state.get("frames", 0))
    core._iter = int(state.get("iter", 0))
    core._policy_version = int(state.get("policy_version", 0))
    core._version_loaded()
    if "traj_pool" in state:
        core._traj_pool.load_state_dict(state["traj_pool"])
    goes_on = _load_env(core, state) and state["trajectories"] is not None
    if "episodes" in state:
        core._episodes.load_state_dict(_placed(state["episodes"]), goes_on=goes_on)
    if goes_on:
        _load_trajectories(core, state["trajectories"], ids_are_free)
    _load_held(core, state, goes_on, ids_are_free)
    if "streams" in state:
        _load_streams(state["streams"])


def _is_there(core: DeliveringCore, state: Mapping[str, Any]) -> bool:
    """Whether the collector stands where the state was saved, and has delivered nothing that it does not know of."""
    if core._frames != state.get("frames") or core._traj_pool.state_dict() != state.get("traj_pool"):
        return False
    return _equal(_trajectories(core)[0], state.get("trajectories"))


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        return one.keys() == other.keys() and all(_equal(one[key], other[key]) for key in one)
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return one.device == other.device and torch.equal(one, other)
    return type(one) is type(other) and bool(one == other)


def _placed(state: Any, device: torch.device | None = None) -> Any:
    """``state`` on ``device`` (None: CPU), wherever ``torch.load(..., map_location=...)`` has put it."""
    if isinstance(state, Mapping):
        return {key: _placed(value, device) for key, value in state.items()}
    if isinstance(state, list):
        return [_placed(value, device) for value in state]
    return state.to(device or "cpu") if isinstance(state, torch.Tensor) else state


def _load_env(core: DeliveringCore, state: Mapping[str, Any]) -> bool:
    """Put the environment back; False where it begins anew."""
    if "env_checkpoint" not in state:
        return False
    try:
        load_env(core.env, _placed(state["env_checkpoint"], core.env.device))
    except ValueError as error:
        warnings.warn(
            f"load_state_dict: the environment begins anew, with new trajectory ids. {error}", UserWarning, stacklevel=4
        )
        return False
    return True


# Trajectories under way -------------------------------------------------------------------------------


def _trajectories(core: DeliveringCore) -> tuple[dict[str, Any] | None, list[str]]:
    """The carrier and what belongs to it; or None, and why it cannot be saved."""
    try:
        carrier = td_state(core._path.carrier)
    except Exception as error:
        return None, [f"objects in the carrier: cannot be pickled: {type(error).__name__}: {error}"]
    fresh = core._fresh_ids
    found = {
        "carrier": carrier,
        "anew": torch.from_numpy(core._anew.copy()),
        "fresh_ids": None if fresh is None else fresh.clone(),
    }
    return found, []


def _load_trajectories(core: DeliveringCore, saved: Mapping[str, Any], ids_are_free: bool) -> None:
    core._anew[:] = saved["anew"].cpu().numpy()
    fresh, tracks = _placed(saved["fresh_ids"]), core.options.track_traj_ids
    carrier = td_from(saved["carrier"])
    if carrier is None:
        core._fresh_ids = fresh.clone() if fresh is not None and ids_are_free else None
        return
    device = None if core._carrier_has_no_device else core.env.device
    carrier = carrier if device is None else carrier.to(device)
    ids = carrier.get(IDS, None)
    ids = None if ids is None else ids.cpu()
    unasked = [*([] if tracks else ["collector"]), *([] if core.options.track_policy_version else [VERSION])]
    core._path.carrier = carrier.exclude(*unasked)
    if ids is None or not ids_are_free:
        ids = core._traj_pool.get_traj_and_increment(core.env.numel()).reshape(core.env.batch_size)
    if tracks:
        core._path.set_ids(ids)
    core._fresh_ids = None if fresh is None else ids


def _held(core: DeliveringCore) -> tuple[dict[str, Any] | None, list[str]]:
    """Frames of whole trajectories that are not delivered yet; or None, and why they cannot be saved."""
    assembler = core._delivery.assembler
    if assembler is None:
        return None, []
    held = assembler.state_dict()
    try:
        saved = {name: [td_state(td) for td in held[name]] for name in ("open", "complete")}
    except Exception as error:
        return None, [f"objects in held trajectories: cannot be pickled: {type(error).__name__}: {error}"]
    return {**held, **saved}, []


def _load_held(core: DeliveringCore, state: Mapping[str, Any], goes_on: bool, ids_are_free: bool) -> None:
    assembler, held = core._delivery.assembler, state.get("held")
    if assembler is None:
        return
    if held is None:
        assembler.drop()
        core._delivery.missed()  # trajectories that go on have begun elsewhere
        return
    loaded = {name: [td_from(td) for td in _placed(held[name])] for name in ("open", "complete")}
    carrier = core._path.carrier if goes_on else None
    ids = None if carrier is None else carrier.get(IDS).reshape(-1).cpu().numpy()
    saved = td_from(state["trajectories"]["carrier"]) if ids is not None else None
    saved_ids = None if saved is None else saved.get(IDS).reshape(-1).cpu().numpy()
    fresh = () if ids_are_free else core._traj_pool.take(len(loaded["complete"])).tolist()
    assembler.load_state_dict({**held, **loaded}, ids, fresh, saved_ids)


def td_state(carrier: TensorDictBase | None) -> dict[str, Any] | None:
    """A TensorDict as ``torch.load(..., weights_only=True)`` reads it; its tensors are copied."""
    if carrier is None:
        return None
    if _is_plain(carrier):
        return _node_state(carrier)
    return {"pickled": torch.frombuffer(bytearray(dump(carrier, {}, set())), dtype=torch.uint8)}


def _is_plain(value: Any) -> bool:
    """Whether it is a tensor, or a TensorDict of nothing else; stacks of many shapes and objects are not."""
    if type(value) is TensorDict:
        return all(_is_plain(entry) for entry in value.values())
    return type(value) is torch.Tensor


def _node_state(td: Any) -> dict[str, Any]:
    entries = {key: value.clone() if _is_leaf(value) else _node_state(value) for key, value in td.items()}
    on_cpu = [key for key, value in td.items() if _is_leaf(value) and value.device.type == "cpu"]
    return {"batch_size": list(td.batch_size), "entries": entries, "on_cpu": on_cpu}


def _is_leaf(value: Any) -> bool:
    return isinstance(value, torch.Tensor)


def td_from(saved: Mapping[str, Any] | None) -> TensorDictBase | None:
    """The TensorDict that :func:`td_state` saved."""
    if saved is None:
        return None
    if "pickled" in saved:
        carrier: TensorDictBase = undump(saved["pickled"].cpu().numpy().tobytes(), {})
        return carrier
    return _node(saved)


def _node(saved: Mapping[str, Any]) -> TensorDict:
    entries: dict[str, Any] = {}
    for key, value in saved["entries"].items():
        entries[key] = value.clone() if _is_leaf(value) else _node(value)
        if key in saved["on_cpu"]:
            entries[key] = entries[key].cpu()
    return TensorDict(entries, saved["batch_size"])


# Random numbers -----------------------------------------------------------------------------------------


def _streams(core: DeliveringCore) -> dict[str, Any]:
    """The states of the global generators: torch's, those of the CUDA devices in use, NumPy's and Python's."""
    devices = {core.policy_device, core.env_device, core.storing_device, module_device(core.policy)}
    used = sorted({_index(device) for device in devices if device is not None and device.type == "cuda"})
    version, numbers, gauss = random.getstate()
    return {
        "torch": torch.get_rng_state(),
        "cuda": {index: torch.cuda.get_rng_state(index) for index in used},
        "numpy": _as_tensors(np.random.get_state(legacy=False)),
        "python": {"version": version, "numbers": list(numbers), "gauss": gauss},
    }


def _load_streams(saved: Mapping[str, Any]) -> None:
    torch.set_rng_state(saved["torch"].cpu())
    for index, stream in saved["cuda"].items():
        if index < torch.cuda.device_count():
            torch.cuda.set_rng_state(stream.cpu(), index)
    np.random.set_state(_as_arrays(saved["numpy"]))
    python = saved["python"]
    random.setstate((python["version"], tuple(python["numbers"]), python["gauss"]))


def _index(device: torch.device) -> int:
    return torch.cuda.current_device() if device.index is None else device.index


def _as_tensors(state: Any) -> Any:
    if isinstance(state, Mapping):
        return {key: _as_tensors(value) for key, value in state.items()}
    return torch.from_numpy(state.astype(np.int64)) if isinstance(state, np.ndarray) else state


def _as_arrays(state: Any) -> Any:
    if isinstance(state, Mapping):
        return {key: _as_arrays(value) for key, value in state.items()}
    return state.cpu().numpy() if isinstance(state, torch.Tensor) else state


# What a policy keeps to itself ------------------------------------------------------------------------------


def _kept_by_policy(policy: Any) -> list[str]:
    """What a policy has beside its ``state_dict()`` that its actions may depend on, one line."""
    if isinstance(policy, nn.Module):
        names = list(_generators(policy))
        held, remedy = "which state_dict() leaves out", "Return their states from get_extra_state()"
    else:
        owner = getattr(policy, "__self__", policy)  # of a bound method
        stateless = isinstance(owner, (RandomPolicy, FunctionType, BuiltinFunctionType))
        names = [] if stateless else list(getattr(owner, "__dict__", ()))
        held, remedy = "and is no nn.Module", "Make it an nn.Module if they change"
    if not names:
        return []
    return [f"policy ({type(policy).__name__}): it has {key_str(names)}, {held}. {remedy}"]


def _generators(policy: nn.Module) -> Iterator[str]:
    for path, part in policy.named_modules():
        if type(part).get_extra_state is nn.Module.get_extra_state:
            for name, value in vars(part).items():
                if isinstance(value, GENERATORS):
                    yield f"{path}.{name}" if path else name
