"""Which way a collector takes its steps: on arrays where environment and policy allow it, else on TensorDicts."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar, cast

import numpy as np
import torch

from rollwright._keys import NestedKey, as_tuple, key_str, unravel
from rollwright.collectors.core import Path
from rollwright.collectors.rollout import policy as policies
from rollwright.collectors.rollout.paths import stages
from rollwright.collectors.rollout.paths.actors import Actor, FlatActor, TensorDictActor
from rollwright.collectors.rollout.paths.arrays import ArrayPath
from rollwright.collectors.rollout.paths.groups import AlternatingPath
from rollwright.collectors.rollout.paths.plain import PlainPath
from rollwright.envs.arrays import FLAGS, ArrayEnv, Entry, array_form
from rollwright.envs.base import EnvBase
from rollwright.envs.recreation.env import RecreatedEnv
from rollwright.envs.transforms import TransformedEnv
from rollwright.errors import NotNative
from rollwright.modules import RandomPolicy
from rollwright.policies import FlatPolicy, flatten
from rollwright.policies.program import RandomActions

if TYPE_CHECKING:
    from rollwright.collectors.rollout.rollout import RolloutCore

__all__ = ["arrays_of", "choose_path", "plain_path"]

T = TypeVar("T")


def choose_path(core: RolloutCore) -> Path:
    """The fastest path that gives the bits of the plain one; ``path.how`` says what was chosen, and why."""
    against: dict[str, str] = {}
    arrays = _tried(against, "env", lambda: arrays_of(core))
    random = None if arrays is None else _tried(against, "env", lambda: _random(core, arrays))
    if arrays is None or random is None:
        return plain_path(core, against)
    entries = _roots(arrays)
    flat = _tried(against, "policy", lambda: _flat(core, arrays, core._policy_call))
    actor: Actor | None
    if flat is not None:
        actor = FlatActor(flat, entries)
    else:
        actor = _tried(against, "env", lambda: _on_tensordicts(core, entries, against["policy"]))
    if actor is None:
        return plain_path(core, against)
    common = {
        "env": core.env,
        "arrays": arrays,
        "random": FlatActor(random, entries),
        "device": core.storing_device,
        "acts_device": _acts_device(core),
        "give_up": core._give_up,
        "carrier_device": None if core._carrier_has_no_device else core.env.device,
        **_shared(core),
    }
    how = {"env": "native: NumPy arrays", "policy": actor.how}
    number = core.options.env_groups
    if number > 1 and flat is not None:
        groups = _tried(against, "env", lambda: _groups(arrays, number))
        acting = None if groups is None else _tried(against, "policy", lambda: _acting(core, groups, flat, actor))
        if groups is not None and acting is not None:
            how["env"] += f", in {number} groups that take turns"
            return AlternatingPath(groups=groups, policies=acting, timer=core._timer, how=how, **common)
    _note_one_group(core, against)
    return ArrayPath(policy=actor, how=how, **common)


def _roots(arrays: ArrayEnv) -> dict[NestedKey, Entry]:
    """What a carrier holds before the policy has acted."""
    flag = Entry((*arrays.batch, 1), np.dtype(np.bool_), True)
    return {**arrays.entries, **dict.fromkeys(cast("tuple[NestedKey, ...]", FLAGS), flag)}


def _groups(arrays: ArrayEnv, number: int) -> list[ArrayEnv]:
    """Parts of a batch that hold what the whole does, in fewer rows."""
    try:
        groups = arrays.groups(number)
    except ValueError as error:  # of a transform that is bound to the size of the batch
        raise NotNative(str(error)) from error
    for group in groups:
        for key, entry in group.entries.items():
            if (whole := arrays.entries[key]).shape[1:] != entry.shape[1:]:
                raise NotNative(
                    f"{key!r} of shape {list(whole.shape)} would be {list(entry.shape)} in a group of {group.batch[0]}"
                )
    return groups


def _acting(core: RolloutCore, groups: list[ArrayEnv], flat: FlatPolicy, whole: Actor) -> list[Actor]:
    """A policy for each group; random actions are drawn for all of them at once."""
    if isinstance(flat, RandomActions):
        return [whole] * len(groups)
    return [FlatActor(_flat(core, group, core._policy_call), _roots(group)) for group in groups]


def _note_one_group(core: RolloutCore, against: dict[str, str]) -> None:
    """Say why there are no groups of environments, where the user has asked for some.

    Raises:
        ValueError: at construction.
    """
    number = core.options.env_groups
    if number == 1:
        return
    why = "; ".join(f"{'policy' if part == 'policy' else 'environment'}: {reason}" for part, reason in against.items())
    if core.closed:
        raise ValueError(
            f"env_groups: {number} groups cannot take turns ({why}). Use a ParallelEnv of at least {number} "
            "environments on arrays, and a policy that runs on arrays, or leave env_groups out."
        )
    warnings.warn(
        f"env_groups: environments are stepped in one group from now on ({why}).", RuntimeWarning, stacklevel=2
    )


def plain_path(core: RolloutCore, against: dict[str, str]) -> PlainPath:
    """The path that takes any environment and any policy.

    Args:
        core: the collector.
        against: why environment and policy do not run on arrays, as far as known.
    """
    _note_one_group(core, against)
    how = {
        part: f"plain: {against[part]}" if part in against else f"plain, because the {other} is"
        for part, other in (("env", "policy"), ("policy", "environment"))
    }
    call, fresh = policies.accelerate(core._policy_call, core.options)
    return PlainPath(
        core.env,
        core.policy,
        call,
        fresh_outputs=fresh,
        devices=core.devices,
        syncs=(core._sync_policy, core._sync_env),
        how=how,
        **_shared(core),
    )


def _on_tensordicts(core: RolloutCore, entries: dict[NestedKey, Entry], why: str) -> Actor:
    """The policy as it is, on TensorDicts made of arrays."""
    options, env = core.options, core.env
    if options.cudagraph_policy or (options.compile_policy and options.compile_policy is not True):
        raise NotNative("torch compiles the policy as a whole")
    if any(device is not None and device.type != "cpu" for device in (core.policy_device, core.storing_device)):
        raise NotNative("policy and batches are not on the CPU")
    stale = stages.stale_actions(env, core.policy)
    act = stages.build_act(core._policy_call, lambda td: td, stages.action_check(env), fresh_outputs=True, stale=stale)
    if options.track_policy_version:
        act = stages.tag_act(act, lambda: core._policy_version, env.batch_size)
    return TensorDictActor(
        act,
        entries,
        rewards=env.reward_keys,
        batch=tuple(env.batch_size),
        device=None if core._carrier_has_no_device else env.device,
        reads_ids=options.track_traj_ids,
        why=why,
    )


def _acts_device(core: RolloutCore) -> torch.device | None:
    """Where the policy's outputs are delivered, if not with the rest: without a device for batches, where they come."""
    device = core.policy_device
    return device if core.storing_device is None and device is not None and device.type == "cuda" else None


def _shared(core: RolloutCore) -> dict[str, Any]:
    return {
        "options": core.options,
        "steps": core._counts.steps,
        "pool": core._traj_pool,
        "memory": core._memory,
        "version": lambda: core._policy_version,
    }


def _tried(against: dict[str, str], part: str, make: Callable[[], T]) -> T | None:
    try:
        return make()
    except NotNative as reason:
        against.setdefault(part, str(reason))
        return None


def arrays_of(core: RolloutCore) -> ArrayEnv:
    """The array form of the environment.

    Raises:
        NotNative: it has none, or an option rules it out.
    """
    options = core.options
    if not options.reset_when_done:
        raise NotNative("reset_when_done=False")
    if options.use_buffers is False:
        raise NotNative("use_buffers=False")
    return array_form(core.env)


def _flat(core: RolloutCore, arrays: ArrayEnv, policy: Any) -> FlatPolicy:
    if core.options.cudagraph_policy:
        raise NotNative("cudagraph_policy")
    env = core.env
    available = {*arrays.entries, *FLAGS}
    flat = flatten(
        policy,
        exploration_type=core.options.exploration_type,
        batch_shape=arrays.batch,
        available=available,
    )
    written = {unravel(key) for key in flat.out_keys}
    missing = [key for key in env.action_keys if key not in written]
    if missing:
        raise NotNative(f"it writes no {key_str(missing)}")
    clash = [key for key in written if key in available or not _lands(key, available)]
    if clash:
        raise NotNative(f"it writes {key_str(clash)}, beside what the environment has")
    return flat


def _lands(key: NestedKey, available: set[NestedKey]) -> bool:
    """Whether an entry below ``"next"`` is one that the environment's root has as well; others lie at the root."""
    path = as_tuple(key)
    return path[0] != "next" or unravel(path[1:]) in available


def _random(core: RolloutCore, arrays: ArrayEnv) -> FlatPolicy:
    """Random actions, as the environment would draw them."""
    env: EnvBase = core.env
    passing = (TransformedEnv.rand_action, RecreatedEnv.rand_action)
    while isinstance(env, TransformedEnv | RecreatedEnv) and type(env).rand_action in passing:
        env = env.base_env
    if type(env).rand_action is not EnvBase.rand_action:
        raise NotNative(f"{type(env).__name__} overrides rand_action")
    policy = RandomPolicy(core.env.full_action_spec)
    return _flat(core, arrays, policy)
