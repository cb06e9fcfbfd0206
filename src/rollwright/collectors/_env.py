"""From what the user passes as an environment to one that can be stepped."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from rollwright._keys import as_tuple, key_str
from rollwright.collectors.options import CollectorOptions
from rollwright.envs._renewable import RenewableEnv
from rollwright.envs._succession import Notice
from rollwright.envs.base import EnvBase
from rollwright.envs.transforms import StepCounter, TransformedEnv

__all__ = ["EnvMaker", "ResetUndo", "make_env"]

Buffers = dict[str, torch.Tensor | None]
EnvMaker = EnvBase | Callable[..., EnvBase] | Sequence[Callable[..., EnvBase]]


def make_env(create_env_fn: EnvMaker, options: CollectorOptions) -> EnvBase:
    """The environment, on its device, with the transforms that options ask for.

    Raises:
        TypeError: ``create_env_fn`` is not, or does not make, an environment.
        ValueError: options do not fit it.
    """
    made: Any = create_env_fn
    if isinstance(made, Sequence) and not isinstance(made, str):
        if len(made) != 1:
            raise ValueError(
                f"create_env_fn: a collector of one process takes one environment, got {len(made)} factories. "
                "Wrap them in SerialEnv."
            )
        made = made[0]
    if isinstance(made, EnvBase):
        if options.create_env_kwargs:
            raise ValueError("create_env_kwargs: got arguments for an environment that is made. Pass a callable.")
        if options.on_env_failure == "recreate":
            raise ValueError(
                "create_env_fn: on_env_failure='recreate' expected a function that makes the environment, got "
                f"{type(made).__name__}: {made!r}. Pass for example lambda: GymEnv('CartPole-v1')."
            )
    elif callable(made):
        maker = partial(made, **(options.create_env_kwargs or {}))
        made = maker()
        if options.on_env_failure == "recreate" and isinstance(made, EnvBase):
            notice = Notice('stats()["env_recreations"]')
            made = RenewableEnv(made, maker, None, partial(notice.tell, "create_env_fn: the environment"))
    if not isinstance(made, EnvBase):
        raise TypeError(
            f"create_env_fn: expected an EnvBase or a callable that returns one, got {type(made).__name__}: "
            f"{made!r}. Wrap a gymnasium environment in GymWrapper."
        )
    _check_names(made, options)
    device = options.env_device or options.device
    env = made if device is None else made.to(device)
    if options.max_frames_per_traj is not None and options.max_frames_per_traj > 0:
        env = _limit_trajectories(env, options.max_frames_per_traj)
    if options.set_truncated and any(group.truncated is None for group in env._done_groups):
        env = env.add_truncated_keys()
        alone = [group.done for group in env._done_groups if group.truncated is None]
        if alone:
            raise ValueError(
                f"set_truncated: {env} ends trajectories by {key_str(alone)}, which cannot tell a cut from an end. "
                "Name the environment's flag 'done', or leave set_truncated out."
            )
    return env


def _check_names(env: EnvBase, options: CollectorOptions) -> None:
    """Test that no entry of the environment has the name of one that the collector writes."""
    written = {"collector", *(["policy_version"] if options.track_policy_version else [])}
    entries = (*env.observation_keys, *env.state_keys, *env.action_keys, *env.reward_keys)
    taken = sorted(written & {as_tuple(key)[0] for key in entries})
    if taken:
        raise ValueError(
            f"create_env_fn: {env} has an entry {key_str(taken)}, and the collector writes one of that name. Rename it."
        )


def _limit_trajectories(env: EnvBase, max_frames: int) -> EnvBase:
    if any("step_count" in as_tuple(key) for key in (*env.observation_keys, *env.state_keys)):
        raise ValueError(
            f"max_frames_per_traj={max_frames}: {env} counts its steps already ('step_count' is among its entries). "
            "Leave max_frames_per_traj out, or take the StepCounter out of the environment."
        )
    return TransformedEnv(env, StepCounter(max_steps=max_frames))


class ResetUndo:
    """Takes back what a reset does to the buffers of an environment and its transforms, such as running statistics.

    Made before the reset; buffers that were changed once more since :meth:`seen` keep what they hold.
    """

    def __init__(self, env: EnvBase) -> None:
        self._env = env
        self._before = self._after = self._buffers()
        modules: list[Any] = [module for module in env.modules() if hasattr(type(module), "_undo_of_reset")]
        self._elsewhere = [module._undo_of_reset() for module in modules]  # of environments in other processes

    def _buffers(self) -> list[tuple[Buffers, Buffers]]:
        return [(module._buffers, _copied(module._buffers)) for module in self._env.modules()]

    def seen(self) -> None:
        """Note what the reset has done."""
        self._after = self._buffers()
        for remote in self._elsewhere:
            remote.seen()

    def state_dict(self) -> dict[str, Any]:
        """Copies of the buffers before the reset, and of those after it."""
        state: dict[str, Any] = {"before": _copies(self._before), "after": _copies(self._after)}
        if self._elsewhere:
            state["elsewhere"] = [remote.state_dict() for remote in self._elsewhere]
        return state

    def load_state_dict(self, state_dict: Mapping[str, Any] | None) -> ResetUndo | None:
        """Take another reset's place, of an environment of the same make; None: there is none to take back."""
        if state_dict is None:
            return None
        live = [named for named, _ in self._before]
        before, after = state_dict["before"], state_dict["after"]
        self._before, self._after = (
            [(named, _copied(held)) for named, held in zip(live, saved, strict=True)] for saved in (before, after)
        )
        for remote, saved in zip(self._elsewhere, state_dict.get("elsewhere", ()), strict=True):
            remote.load_state_dict(saved)
        return self

    def undo(self) -> None:
        """Give buffers the values from before; those that were not there are taken away again."""
        for (named, old), (_, new) in zip(self._before, self._after, strict=True):
            for name, value in old.items():
                now = named[name]
                if _equal(value, new[name]) or not _equal(now, new[name]):
                    continue
                if value is None or now is None or now.shape != value.shape:
                    named[name] = value
                else:
                    now.copy_(value)  # in place: clones may share it
        for remote in self._elsewhere:
            remote.undo()


def _copied(named: Mapping[str, torch.Tensor | None]) -> Buffers:
    return {name: None if buffer is None else buffer.clone() for name, buffer in named.items()}


def _copies(pairs: list[tuple[Buffers, Buffers]]) -> list[Buffers]:
    return [_copied(held) for _, held in pairs]


def _equal(one: torch.Tensor | None, other: torch.Tensor | None) -> bool:
    return one is other if one is None or other is None else torch.equal(one, other)
