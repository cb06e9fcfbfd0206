"""Calls to an environment in its host process, besides steps and resets."""

from __future__ import annotations

import pickle
import random
from collections.abc import Mapping
from typing import Any, NamedTuple, cast

import cloudpickle  # type: ignore[import-untyped]
import numpy as np
import torch

from rollwright._keys import NestedKey
from rollwright.data.specs import Composite
from rollwright.envs.arrays import Entry
from rollwright.envs.batched.batch_arrays import ArrayFacts
from rollwright.envs.batched.hosting.host import Hosted

METHOD = "a method"  # stands for what can be called, which stays where it is
ITSELF = "the environment itself"


class Sign(NamedTuple):
    """Stands for an object that is not sent."""

    what: str


class EnvFacts(NamedTuple):
    """Facts from which a batch is constructed; named as in :class:`~rollwright.envs.EnvBase`."""

    batch_size: torch.Size
    device: torch.device | None
    allow_done_after_reset: bool
    full_observation_spec: Composite
    full_state_spec: Composite
    full_action_spec: Composite
    full_reward_spec: Composite
    full_done_spec: Composite
    text: str

    def full_spec(self, name: str) -> Composite:
        """``full_<name>_spec``."""
        return cast(Composite, getattr(self, f"full_{name}_spec"))


def describe(hosted: Hosted) -> EnvFacts:
    """What is to be known of an environment."""
    env = hosted.env
    return EnvFacts(
        env.batch_size,
        env.device,
        env.allow_done_after_reset,
        env.full_observation_spec,
        env.full_state_spec,
        env.full_action_spec,
        env.full_reward_spec,
        env.full_done_spec,
        repr(hosted.inner),
    )


def array_facts(hosted: Hosted) -> ArrayFacts:
    """Make the array form; raises ``NotNative`` where there is none."""
    return ArrayFacts.of(hosted.array_form(rebuild=True))


def check_arrays(hosted: Hosted) -> None:
    """See :meth:`~rollwright.envs.arrays.ArrayEnv.check`."""
    hosted.array_form().check()


def see_roots(hosted: Hosted, forms: Mapping[NestedKey, Entry]) -> None:
    """See :meth:`~rollwright.envs.arrays.ArrayEnv.see_roots`."""
    hosted.array_form().see_roots(forms)


def set_seed(hosted: Hosted, seed: int | None, static_seed: bool) -> int | None:
    """See :meth:`~rollwright.envs.EnvBase.set_seed`."""
    return hosted.env.set_seed(seed, static_seed)


def move(hosted: Hosted, device: Any) -> EnvFacts:
    """Move an environment to a device."""
    hosted.env.to(device)
    return describe(hosted)


# Attributes -----------------------------------------------------------------------------------------


def look_up(hosted: Hosted, name: str) -> Any:
    """The value of an attribute; a :class:`Sign` for a method."""
    value = getattr(hosted.inner, name)
    return Sign(METHOD) if callable(value) else value


def fetch(hosted: Hosted, name: str) -> Any:
    """The value of an attribute, whatever it is."""
    return getattr(hosted.inner, name)


def call(hosted: Hosted, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call a method; a :class:`Sign` where it returns the environment."""
    value = getattr(hosted.inner, name)(*args, **kwargs)
    return Sign(ITSELF) if value is hosted.inner else value


def pickled(hosted: Hosted) -> bytes:
    """The environment."""
    data: bytes = cloudpickle.dumps(hosted.env, 5)
    return data


# State ----------------------------------------------------------------------------------------------


def state(hosted: Hosted) -> dict[str, Any]:
    """What ``state_dict()`` returns."""
    return dict(hosted.inner.state_dict())


def load_state(hosted: Hosted, states: Mapping[int, Mapping[str, Any]]) -> tuple[list[str], list[str], str]:
    """Load a ``state_dict()``: missing keys, unexpected keys, and what went wrong."""
    try:
        missing, unexpected = hosted.inner.load_state_dict(dict(states[hosted.row]), strict=False)
    except RuntimeError as error:
        return [], [], str(error)
    return list(missing), list(unexpected), ""


def checkpoint(hosted: Hosted) -> tuple[dict[str, Any], list[str]]:
    """All that the environment is, and the global generators of its process; and what could not be saved."""
    from rollwright.envs.checkpoint import save_env

    saved, unsaved = save_env(hosted.env)
    others = pickle.dumps((np.random.get_state(), random.getstate()))
    streams = {"torch": torch.get_rng_state(), "others": torch.frombuffer(bytearray(others), dtype=torch.uint8)}
    return {**saved, "streams": streams}, unsaved


def load_checkpoint(hosted: Hosted, states: Mapping[int, Mapping[str, Any]]) -> None:
    """Go on from what :func:`checkpoint` returned."""
    from rollwright.envs.checkpoint import load_env

    saved = dict(states[hosted.row])
    streams = saved.pop("streams")
    load_env(hosted.env, saved)
    torch.set_rng_state(streams["torch"].cpu())
    numbers, others = pickle.loads(streams["others"].cpu().numpy().tobytes())
    np.random.set_state(numbers)
    random.setstate(others)
