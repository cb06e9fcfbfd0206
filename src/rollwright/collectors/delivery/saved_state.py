"""A collector between two batches, saved and restored: the next batch is bit-for-bit that of an uninterrupted run."""

from __future__ import annotations

import copy
import random
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from types import BuiltinFunctionType, FunctionType
from typing import Any, NamedTuple

import numpy as np
import torch
from tensordict import TensorDictBase
from torch import nn

from rollwright._keys import key_str
from rollwright._warnings import warn_user
from rollwright.collectors.core import checked_state
from rollwright.collectors.delivery.base import RolloutDelivery
from rollwright.collectors.rollout.policy import module_device, never_copied_in
from rollwright.collectors.rollout.rollout import Rollout
from rollwright.collectors.rollout.state import RolloutState, placed, td_from, td_state
from rollwright.envs.checkpoint import load_env, save_env, unchanged_if_it_raises
from rollwright.modules import RandomPolicy
from rollwright.weight_update.policy_weights import is_never_copied, weights_of

GENERATORS = (np.random.Generator, np.random.RandomState, random.Random, torch.Generator)


class SavedState:
    """Saves and restores a rollout, its delivery, its policy and the global generators.

    Args:
        rollout: to be saved.
        delivery: of its batches.
    """

    def __init__(self, rollout: Rollout, delivery: RolloutDelivery) -> None:
        self._rollout, self._delivery = rollout, delivery

    def save(self, *, engine_weights: bool = False) -> OrderedDict[str, Any]:
        """Tensors, numbers, strings, and dictionaries and lists of them.

        Args:
            engine_weights: also those of the policy's engine.

        Nothing of it changes when the collector goes on, but for weights (``policy_state_dict`` and
        ``engine_state_dict``): these are live, as everywhere in torch.
        """
        rollout = self._rollout
        own, now = rollout.cursor.state_dict(), rollout.state()
        state: OrderedDict[str, Any] = OrderedDict()
        if (weights := self._weights()) is not None:
            state["policy_state_dict"] = _own_state(weights)
        held, unheld = self._delivery.save_held()
        if own is None:
            checkpoint = save_env(rollout.env)
            trajectories, objects = (None, []) if checkpoint.unsaved else _trajectories(now)
            state["env_state_dict"] = copy.deepcopy(rollout.env.state_dict())  # statistics go on
            state["env_checkpoint"] = checkpoint.state
            unsaved = [*checkpoint.unsaved, *objects, *unheld]
        else:
            trajectories, unsaved = {**own[0], **_resets(now)}, [*own[1], *unheld]
            state["env_state_dict"] = {}
        unsaved += _kept_by_policy(rollout.policy) if rollout.path.calls_policy else []
        if engine_weights:
            state["engine_state_dict"] = rollout.acting.engine_state()
        state.update(frames=rollout.frames, iter=self._delivery.batches, policy_version=rollout.acting.version)
        state["traj_pool"] = rollout.ids.state_dict()
        state["trajectories"] = trajectories
        state["held"] = held
        state["episodes"] = rollout.episodes.state_dict()
        state["streams"] = generator_states(_cuda_devices(rollout))
        state["unsaved"] = unsaved
        return state

    def _weights(self) -> nn.Module | None:
        """The policy's module; None where nothing is saved: what is behind an engine has files of its own."""
        rollout = self._rollout
        saves = rollout.path.calls_policy and not is_never_copied(rollout.policy)
        return weights_of(rollout.policy) if saves else None

    def check(self, state: Mapping[str, Any], **kwargs: Any) -> None:
        """Raise what :meth:`load` would raise; nothing is changed."""
        self._read(state)
        with self._unchanged_if_it_raises(always=True), self._engine_unchanged_if_it_raises(state, always=True):
            self._load_modules(state, **kwargs)
            self._load_engine(state)

    def load(self, state: Mapping[str, Any], **kwargs: Any) -> None:
        """Restore what :meth:`save` saved; where it raises, all is as it was.

        Args:
            state: of :meth:`save`, of a collector of the same make.
            **kwargs: go to ``load_state_dict`` of policy and environment.
        """
        rollout, of_path = self._rollout, _is_of_path(state)
        read = self._read(state)
        # Frames that this collector has delivered may have the saved ids, on other trajectories.
        ids_are_free = not rollout.stepped or self._is_at(state)
        with self._engine_unchanged_if_it_raises(state):
            with self._unchanged_if_it_raises(always=True):  # a trial, before conversations in progress are dropped
                self._load_modules(state, **kwargs)
                self._load_engine(state)
            before, ids = rollout.cursor.state_dict(), rollout.ids.state_dict()
            rollout.forget_trajectories()
            with self._unchanged_if_it_raises():
                reason = self._load_modules(state, **kwargs)
                if "traj_pool" in state:
                    rollout.ids.load_state_dict(state["traj_pool"])
                if of_path:
                    self._load_path(read.trajectories, ids_are_free, before, ids)
        saved = read.trajectories if reason is None else None
        goes_on = saved is not None and (rollout.path.started or not of_path)
        rollout.frames, self._delivery.batches = int(state.get("frames", 0)), int(state.get("iter", 0))
        rollout.acting.version = int(state.get("policy_version", 0))
        if read.episodes is not None:
            rollout.episodes.load_state_dict(read.episodes, goes_on=goes_on)
        if saved is not None and goes_on and "anew" in saved:
            current = rollout.current if of_path else read.current
            now = RolloutState(current, saved["anew"].numpy(), saved["fresh_ids"])
            rollout.go_on_from(now, ids_are_free=ids_are_free)
        elif not of_path:
            rollout.start_over()  # what the environment was in begins again
        self._delivery.load_held(state.get("held"), saved, ids_are_free=ids_are_free)
        if state.get("streams") is not None:
            load_generators(state["streams"])
        if reason is not None:
            warn_user(f"load_state_dict: {reason}", UserWarning)

    def _read(self, state: Mapping[str, Any]) -> _Read:
        """Take a state apart, before anything is changed."""
        check_entries(state)
        if "policy_state_dict" not in state and self._weights() is not None:
            raise KeyError(
                f"state_dict: expected 'policy_state_dict' among its entries, as the policy has weights, got "
                f"{sorted(map(str, state))}. Pass the state of a collector with such a policy, whole."
            )
        saved, episodes, streams = placed(state.get("trajectories")), None, state.get("streams")
        if streams is not None:
            check_generators(streams)
        if "episodes" in state:
            episodes = placed(state["episodes"])
            self._rollout.episodes.copy().load_state_dict(episodes, goes_on=saved is not None)
        self._delivery.check_held(state.get("held"))
        if saved is None or _is_of_path(state):
            if saved is not None:
                self._rollout.cursor.check_state(saved)
            return _Read(saved, None, episodes)
        return _Read(saved, td_from(state["trajectories"]["carrier"]), episodes)

    @contextmanager
    def _unchanged_if_it_raises(self, *, always: bool = False) -> Iterator[None]:
        rollout = self._rollout
        with ExitStack() as stack:
            for part in (weights_of(rollout.policy), rollout.env):
                if part is not None and not is_never_copied(part):
                    stack.enter_context(unchanged_if_it_raises(part, always=always))
            yield

    @contextmanager
    def _engine_unchanged_if_it_raises(self, state: Mapping[str, Any], *, always: bool = False) -> Iterator[None]:
        acting = self._rollout.acting
        engine = acting.engine if "engine_state_dict" in state else None
        with ExitStack() as undo:
            if engine is not None:
                before = {name: value.clone() for name, value in acting.engine_state().items()}
                undo.callback(engine.update_weights, before, engine.version)
            yield
            if not always:
                undo.pop_all()

    def _load_engine(self, state: Mapping[str, Any]) -> None:
        if "engine_state_dict" in state:
            self._rollout.acting.update_engine(state["engine_state_dict"])

    def _load_modules(self, state: Mapping[str, Any], **kwargs: Any) -> str | None:
        """Load policy and environment; why the trajectories do not go on, None: they do."""
        rollout = self._rollout
        if "policy_state_dict" in state and (weights := weights_of(rollout.policy)) is not None:
            kept = weights.state_dict() if never_copied_in(rollout.policy) else {}
            weights.load_state_dict({**kept, **state["policy_state_dict"]}, **kwargs)
        return None if _is_of_path(state) else self._load_env(state, **kwargs)

    def _load_path(self, saved: Any, ids_are_free: bool, before: Any, ids: dict[str, int]) -> None:
        rollout = self._rollout
        try:
            rollout.cursor.load_state_dict(saved, ids_are_free=ids_are_free)
        except BaseException:
            rollout.ids.load_state_dict(ids)
            if before is not None:
                rollout.cursor.load_state_dict(before[0], ids_are_free=True)
            raise

    def _is_at(self, state: Mapping[str, Any]) -> bool:
        """Whether nothing was delivered that the saved state does not know of."""
        rollout = self._rollout
        if rollout.frames != state.get("frames") or rollout.ids.state_dict() != state.get("traj_pool"):
            return False
        own, now = rollout.cursor.state_dict(), rollout.state()
        saved = _trajectories(now)[0] if own is None else {**own[0], **_resets(now)}
        return _equal(saved, state.get("trajectories"))

    def _load_env(self, state: Mapping[str, Any], **kwargs: Any) -> str | None:
        """Restore the environment; why it is reset instead, None: it is not."""
        env, weights = self._rollout.env, state["env_state_dict"]
        if "env_checkpoint" not in state:
            env.load_state_dict(weights, **kwargs)
            lacking = sorted(_LATER - state.keys())
            return f"the state has no {lacking}. Weights and counters go on; the environment begins anew, with new ids."
        try:
            load_env(env, placed(state["env_checkpoint"], env.device), weights, **kwargs)
        except ValueError as error:
            env.load_state_dict(weights, **kwargs)
            return f"the environment begins anew, with new trajectory ids. {error}"
        return None


class _Read(NamedTuple):
    """What a state holds, once it is taken apart."""

    trajectories: Any
    current: TensorDictBase | None
    episodes: Any


def _is_of_path(state: Mapping[str, Any]) -> bool:
    return "row_ids" in (state.get("trajectories") or ())


def check_entries(state: Any, name: str = "") -> None:
    """Test that a state has all that :meth:`SavedState.save` writes.

    Args:
        state: of one collector, or of one worker.
        name: of the worker.

    Raises:
        TypeError: it is no dictionary.
        KeyError: entries are missing. A state that has none of trajectories and generators is one of an older version,
            or of another package; it loads with a warning.
    """
    needed = _FIRST if not _LATER & checked_state(state).keys() else _FIRST | _COUNTS | _LATER
    if needed > _FIRST and _is_of_path(state):
        needed -= {"env_checkpoint"}
    where = f"state_dict[{name!r}]" if name else "state_dict"
    if missing := sorted(needed - state.keys()):
        unexpected = sorted(map(str, state.keys() - _FIRST - _COUNTS - _LATER - _MAY_BE))
        others = f", and {unexpected}, which no collector saves" if unexpected else ""
        raise KeyError(
            f"{where}: expected {missing} among its entries, got {sorted(map(str, state))}{others}. Pass what "
            "state_dict() of such a collector returned, whole."
        )


_FIRST = {"env_state_dict"}
_COUNTS = {"frames", "iter", "policy_version", "traj_pool"}  # other packages save some
_LATER = {"env_checkpoint", "episodes", "held", "streams", "trajectories", "unsaved"}
_MAY_BE = {"engine_state_dict", "in_parts", "policy_state_dict", "queue", "version_tracker"}


def warn_of_unsaved(states: Mapping[str, Mapping[str, Any]]) -> bool:
    """Warn of what could not be saved; returns whether there was any.

    Args:
        states: of :meth:`SavedState.save`, by name of the worker; ``""`` where there are none.
    """
    found = {name: state for name, state in states.items() if state["unsaved"]}
    if not found:
        return False
    resets = any(state["trajectories"] is None for state in found.values())
    reset = "begins its environment anew, with new trajectory ids"
    lines = [f"{name}: {line}" if name else line for name, state in found.items() for line in state["unsaved"]]
    warn_user(
        f"state_dict: not all can be saved, and a {'worker' if '' not in found else 'collector'} that loads this state "
        f"{reset if resets else 'goes on without it'}. {'; '.join(lines)}.",
        UserWarning,
    )
    return True


def _trajectories(now: RolloutState) -> tuple[dict[str, Any] | None, list[str]]:
    """The current TensorDict and what belongs to it; or None, and why it cannot be saved."""
    try:
        current = td_state(now.current)
    except Exception as error:
        return None, [f"objects in the carrier: cannot be pickled: {type(error).__name__}: {error}"]
    return {"carrier": current, **_resets(now)}, []


def _resets(now: RolloutState) -> dict[str, Any]:
    return {"anew": torch.from_numpy(now.reset_envs), "fresh_ids": now.unused_ids}


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        return one.keys() == other.keys() and all(_equal(one[key], other[key]) for key in one)
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(_equal, one, other))
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return one.device == other.device and torch.equal(one, other)
    return type(one) is type(other) and bool(one == other)


# Random numbers -----------------------------------------------------------------------------------------


def _cuda_devices(rollout: Rollout) -> list[int]:
    """Those in use."""
    devices = {*vars(rollout.devices).values(), module_device(rollout.policy)}
    return sorted({_index(device) for device in devices if device is not None and device.type == "cuda"})


def generator_states(cuda: Iterable[int]) -> dict[str, Any]:
    """The states of the global generators of this process: torch's, NumPy's and Python's.

    Args:
        cuda: indices of the devices whose generators are saved, too.
    """
    version, numbers, gauss = random.getstate()
    return {
        "torch": torch.get_rng_state(),
        "cuda": {index: torch.cuda.get_rng_state(index) for index in cuda},
        "numpy": _as_tensors(np.random.get_state(legacy=False)),
        "python": {"version": version, "numbers": list(numbers), "gauss": gauss},
    }


def load_generators(saved: Mapping[str, Any]) -> None:
    """Go on from :func:`generator_states`."""
    torch.set_rng_state(saved["torch"].cpu())
    for index, stream in saved["cuda"].items():
        if index < torch.cuda.device_count():
            torch.cuda.set_rng_state(stream.cpu(), index)
    np.random.set_state(_as_arrays(saved["numpy"]))
    python = saved["python"]
    random.setstate((python["version"], tuple(python["numbers"]), python["gauss"]))


def check_generators(saved: Mapping[str, Any]) -> None:
    """Test that generators take states, with others than the global ones."""
    torch.Generator().set_state(saved["torch"].cpu())
    np.random.RandomState().set_state(_as_arrays(saved["numpy"]))
    python = saved["python"]
    random.Random().setstate((python["version"], tuple(python["numbers"]), python["gauss"]))
    _ = [stream.cpu() for stream in saved["cuda"].values()]


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


def _own_state(policy: nn.Module) -> dict[str, Any]:
    """The state of a policy, less that of the engines in it."""
    state: dict[str, Any] = policy.state_dict()
    engines = {id(part) for part in never_copied_in(policy)}
    inside = tuple(f"{path}." for path, module in policy.named_modules() if id(module) in engines)
    return {key: value for key, value in state.items() if not key.startswith(inside)} if inside else state


def _kept_by_policy(policy: Any) -> list[str]:
    """What a policy has beside its ``state_dict()`` that its actions may depend on, one line."""
    if isinstance(policy, nn.Module):
        names = list(_generators(weights_of(policy) or policy))
        held, remedy = "which state_dict() leaves out", "Return their states from get_extra_state()"
    else:
        owner = getattr(policy, "__self__", policy)  # of a bound method
        stateless = isinstance(owner, (RandomPolicy, FunctionType, BuiltinFunctionType))
        stateless = stateless or is_never_copied(owner)
        kept = {} if stateless else getattr(owner, "__dict__", {})
        names = [
            name for name, value in kept.items() if not isinstance(value, nn.Module) and not is_never_copied(value)
        ]
        held, remedy = "and is no nn.Module", "Make it an nn.Module if they change"
    if not names:
        return []
    return [f"policy ({type(policy).__name__}): it has {key_str(names)}, {held}. {remedy}"]


def _generators(policy: nn.Module) -> Iterator[str]:
    engines = {id(part) for part in never_copied_in(policy)}
    for path, part in policy.named_modules():
        if id(part) in engines:
            continue
        if type(part).get_extra_state is nn.Module.get_extra_state:
            for name, value in vars(part).items():
                if isinstance(value, GENERATORS):
                    yield f"{path}.{name}" if path else name
