"""Prepares the environment that a user passes to a collector."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch import nn

from rollwright._keys import as_tuple, key_str
from rollwright.collectors.options import CollectorOptions
from rollwright.data.llm.turns import Origin
from rollwright.envs.base import EnvBase, closed_on_error
from rollwright.envs.batched.async_pool import AsyncEnvPool
from rollwright.envs.factories import EnvFunction, GymnasiumEnv
from rollwright.envs.foreign import as_env, as_maker, check_maker, is_around, makers_in, remedy_for
from rollwright.envs.llm.core import Conversations
from rollwright.envs.llm.transforms import PolicyVersion, TurnHook, turn_hooks
from rollwright.envs.recreation import RecreatedEnv, RecreationWarning
from rollwright.envs.transforms import Compose, StepCounter, TransformedEnv
from rollwright.errors import EnvError, NotNative

EnvMaker = str | EnvBase | GymnasiumEnv | EnvFunction | Sequence[str | EnvFunction]
EnvMakers = EnvMaker | Sequence[str | EnvBase | GymnasiumEnv | EnvFunction]  # one, or one for each worker


@contextmanager
def making_env(create_env_fn: EnvMaker, options: CollectorOptions) -> Iterator[EnvBase]:
    """The environment, on its device, with the transforms that options ask for; closed if the block raises.

    A failed construction leaves nothing running: what a function made is closed; a user's own instance is not.

    Raises:
        TypeError: ``create_env_fn`` is not, or does not make, an environment.
        ValueError: options do not fit it.
    """
    made = _made(create_env_fn, options)
    listed = makers_in(create_env_fn)
    given = [create_env_fn] if listed is None else listed
    with closed_on_error([] if any(is_around(made, each) for each in given) else [made]):
        yield _fitted(made, options)


def _made(create_env_fn: EnvMaker, options: CollectorOptions) -> EnvBase:
    made: Any = create_env_fn
    if (listed := makers_in(made)) is not None:
        if len(listed) != 1:
            raise ValueError(
                f"create_env_fn: a collector of one process takes one environment, got {len(listed)} factories. "
                "Wrap them in SerialEnv, or pass num_collectors= for a worker each."
            )
        made = listed[0]
    made = as_maker(made)
    if isinstance(made, EnvBase):
        if options.create_env_kwargs:
            raise ValueError("create_env_kwargs: got arguments for an environment that is made. Pass a callable.")
        if options.on_env_failure == "recreate":
            raise ValueError(
                "create_env_fn: on_env_failure='recreate' expected a function that makes the environment, got "
                f"{type(made).__name__}: {made!r}. Pass for example lambda: GymEnv('CartPole-v1')."
            )
    elif callable(made) and not isinstance(made, nn.Module):  # an environment of another library is not called
        check_maker("create_env_fn", made, options.create_env_kwargs)
        maker = partial(made, **(options.create_env_kwargs or {}))
        made = as_env(maker())
        if options.on_env_failure == "recreate" and isinstance(made, EnvBase):
            notice = RecreationWarning('stats()["env_recreations"]')
            with closed_on_error([made]):
                made = RecreatedEnv(made, maker, None, partial(notice.warn, "create_env_fn: the environment"))
    if not isinstance(made, EnvBase):
        raise TypeError(
            "create_env_fn: expected the name of a registered environment, an environment of rollwright, gymnasium or "
            "TorchRL, or a callable that returns one, got "
            f"{type(made).__module__}.{type(made).__qualname__}: {made!r}. {remedy_for(made)}"
        )
    return made


def _fitted(made: EnvBase, options: CollectorOptions) -> EnvBase:
    if made.is_closed:
        made.reopen()
    if made.is_closed:
        raise EnvError(f"create_env_fn: {made} is closed. {made.remedy_when_closed}.")
    _check_names(made, options)
    if not made.action_keys:
        raise EnvError(
            f"create_env_fn: expected an environment with an action, got {made}, whose action_spec is empty. Set it in "
            "the constructor, for example self.action_spec = Categorical(2, shape=())."
        )
    _share_data(made, options)
    device = options.env_device or options.device
    env = made if device is None else made.to(device)
    if options.max_frames_per_traj is not None and options.max_frames_per_traj > 0:
        env = _limit_trajectories(env, options.max_frames_per_traj)
    if options.set_truncated and any(group.truncated is None for group in env.done_groups):
        env = env.add_truncated_keys()
        alone = [group.done for group in env.done_groups if group.truncated is None]
        if alone:
            raise ValueError(
                f"set_truncated: {env} ends trajectories by {key_str(alone)}, which cannot tell a cut from an end. "
                "Name the environment's flag 'done', or leave set_truncated out."
            )
    return env


def conversations_of(env: EnvBase) -> tuple[Conversations, list[TurnHook]] | None:
    """The conversations that an environment is made of, and what its transforms do with a turn.

    None: it is none of the kind, or a transform works on TensorDicts alone.
    """
    hooks: list[TurnHook] = []
    while isinstance(env, TransformedEnv):
        try:
            hooks = turn_hooks(env.transform) + hooks
        except NotNative:
            return None
        env = env.base_env
    found = getattr(env, "conversations", None)
    return (found, hooks) if isinstance(found, Conversations) else None


def inner_conversations(env: Any) -> Conversations | None:
    """The conversations of an environment, whatever its transforms do with them; None: it has none."""
    while (inside := vars(env).get("base_env", getattr(env, "_modules", {}).get("base_env"))) is not None:
        env = inside
    found = getattr(env, "conversations", None)
    return found if isinstance(found, Conversations) else None


def note_waits(env: Any, note: Callable[[Sequence[tuple[Origin, int]]], None]) -> None:
    """Have the conversations of an environment call ``note``, see :attr:`Conversations.on_wait`, if it has any."""
    if (found := inner_conversations(env)) is not None:
        found.on_wait = note


def _share_data(env: EnvBase, options: CollectorOptions) -> None:
    """Leave the other workers their part of the prompts."""
    if options.num_shards <= 1:
        return
    found = getattr(env, "conversations", None)
    if isinstance(found, Conversations):
        found.source.shard(options.worker_idx or 0, options.num_shards)
    elif isinstance(env, AsyncEnvPool) and hasattr(env, "share_data"):
        env.share_data(options.worker_idx or 0, options.num_shards)


def _check_names(env: EnvBase, options: CollectorOptions) -> None:
    """Test that no entry of the environment has the name of one that the collector writes."""
    tracks = options.track_policy_version and version_of(env) is None
    written = {"collector", *(["policy_version"] if tracks else [])}
    entries = (*env.observation_keys, *env.state_keys, *env.action_keys, *env.reward_keys)
    taken = sorted(written & {key if isinstance(key, str) else key[0] for key in entries})
    if taken:
        raise ValueError(
            f"create_env_fn: {env} has an entry {key_str(taken)}, and the collector writes one of that name. Rename it."
        )


def version_of(env: EnvBase) -> PolicyVersion | None:
    """The ``PolicyVersion`` among the transforms of an environment; None: there is none."""
    while isinstance(env, TransformedEnv):
        parts: Any = env.transform if isinstance(env.transform, Compose) else [env.transform]
        for part in parts:
            if isinstance(part, PolicyVersion):
                return part
        env = env.base_env
    return None


def _limit_trajectories(env: EnvBase, max_frames: int) -> EnvBase:
    if any("step_count" in as_tuple(key) for key in (*env.observation_keys, *env.state_keys)):
        raise ValueError(
            f"max_frames_per_traj={max_frames}: {env} counts its steps already ('step_count' is among its entries). "
            "Leave max_frames_per_traj out, or take the StepCounter out of the environment."
        )
    return TransformedEnv(env, StepCounter(max_steps=max_frames))
