"""Which way a collector takes its steps: on arrays where environment and policy allow it, else on TensorDicts."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

from rollwright._keys import NestedKey, as_tuple, key_str, unravel
from rollwright.collectors import policy as policies
from rollwright.collectors._path import Path
from rollwright.collectors._plain import PlainPath
from rollwright.collectors._rows import ArrayPath
from rollwright.collectors.flat import FlatPolicy, flatten
from rollwright.envs.arrays import FLAGS, ArrayEnv, array_form
from rollwright.envs.base import EnvBase
from rollwright.envs.transforms import TransformedEnv
from rollwright.errors import NotNative
from rollwright.modules import RandomPolicy

if TYPE_CHECKING:
    from rollwright.collectors._core import RolloutCore

__all__ = ["choose_path", "plain_path"]

T = TypeVar("T")


def choose_path(core: RolloutCore) -> Path:
    """The fastest path that gives the bits of the plain one; ``path.how`` says what was chosen, and why."""
    against: dict[str, str] = {}
    arrays = _tried(against, "env", lambda: _arrays(core))
    flat = _tried(against, "policy", lambda: _flat(core, arrays, core._policy_call))
    random = _tried(against, "env", lambda: _random(core, arrays))
    if arrays is None or flat is None or random is None:
        return plain_path(core, against)
    how = {"env": "NumPy arrays", "policy": flat.how}
    return ArrayPath(
        core.env,
        arrays,
        flat,
        random,
        device=core.storing_device,
        carrier_device=None if core._carrier_has_no_device else core.env.device,
        how=how,
        **_shared(core),
    )


def plain_path(core: RolloutCore, against: dict[str, str]) -> Path:
    """The path that takes any environment and any policy.

    Args:
        core: the collector.
        against: why environment and policy do not run on arrays, as far as known.
    """
    how = {
        part: f"TensorDict: {against.get(part, f'as the {other}')}"
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


def _arrays(core: RolloutCore) -> ArrayEnv:
    options = core.options
    if not options.reset_when_done:
        raise NotNative("reset_when_done=False")
    if options.use_buffers is False:
        raise NotNative("use_buffers=False")
    return array_form(core.env)


def _flat(core: RolloutCore, arrays: ArrayEnv | None, policy: Any) -> FlatPolicy:
    if core.options.cudagraph_policy:
        raise NotNative("cudagraph_policy")
    env = core.env
    available = (
        {*env.observation_keys, *env.state_keys, *env.done_keys} if arrays is None else {*arrays.entries, *FLAGS}
    )
    flat = flatten(
        policy,
        exploration_type=core.options.exploration_type,
        batch_shape=tuple(env.batch_size),
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


def _random(core: RolloutCore, arrays: ArrayEnv | None) -> FlatPolicy:
    """Random actions, as the environment would draw them."""
    env: EnvBase = core.env
    while isinstance(env, TransformedEnv) and type(env).rand_action is TransformedEnv.rand_action:
        env = env.base_env
    if type(env).rand_action is not EnvBase.rand_action:
        raise NotNative(f"{type(env).__name__} overrides rand_action")
    policy = RandomPolicy(core.env.full_action_spec)
    return _flat(core, arrays, policy)
