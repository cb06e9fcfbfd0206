"""From what the user passes as a policy to one callable on TensorDicts."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterable, Mapping
from typing import Any, cast

import torch
from tensordict import TensorDictBase
from tensordict.nn import CudaGraphModule, TensorDictModuleBase
from torch import nn

from rollwright._keys import NestedKey, as_tuple, key_str, unravel
from rollwright.collectors.options import CollectorOptions
from rollwright.collectors.rollout.devices import module_device
from rollwright.collectors.rollout.policy_errors import check_widths
from rollwright.data.layout import TRAJ_IDS
from rollwright.envs.base import EnvBase
from rollwright.errors import PolicyKeyError
from rollwright.modules import RandomPolicy
from rollwright.modules.signature import Call, speak_tensordict

__all__ = ["accelerate", "check_inputs", "check_policy", "entries_of", "make_policy", "place_policy", "wrap_policy"]


def make_policy(policy: Any, options: CollectorOptions, env: EnvBase) -> Any:
    """The policy object as the user means it: given, made by the factory, or random."""
    if options.policy_factory is not None:
        policy = options.policy_factory()
        if policy is None:
            raise TypeError("policy_factory: expected it to return a policy, got None.")
    if policy is None:
        return RandomPolicy(env.full_action_spec)
    if isinstance(policy, RandomPolicy):
        policy.set_action_spec_from_env(env)
    check_policy(policy)
    return policy


def check_policy(policy: Any) -> None:
    """Test that a policy can act, as far as that shows.

    Raises:
        TypeError: it cannot.
    """
    if not callable(policy):
        raise TypeError(
            f"policy: expected a callable on TensorDicts, a TensorDictModule, an nn.Module or None, got "
            f"{type(policy).__name__}: {policy!r}. Pass one of these."
        )
    if isinstance(policy, type):
        raise TypeError(f"policy: got the class {policy.__name__}. Pass an instance, {policy.__name__}(...).")


def place_policy(policy: Any, device: torch.device | None) -> tuple[Any, nn.Module | None]:
    """The policy on ``device``, and the original if that took a copy."""
    if device is None or not isinstance(policy, nn.Module) or module_device(policy) in (None, device):
        return policy, None
    with torch.no_grad():
        return copy.deepcopy(policy).to(device), policy


def wrap_policy(policy: Any, options: CollectorOptions, env: EnvBase) -> Call:
    """The policy as a callable on TensorDicts; see :func:`~rollwright.modules.signature.speak_tensordict`."""
    return cast(Call, policy) if options.trust_policy else speak_tensordict(policy, env)


def entries_of(env: EnvBase, options: CollectorOptions) -> list[NestedKey]:
    """The entries that specs announce of the data from which the first step is taken."""
    own = [TRAJ_IDS] if options.track_traj_ids else []
    return [*env.observation_keys, *env.state_keys, *env.done_keys, *own]


def check_inputs(policy: Any, available: Iterable[NestedKey], env: EnvBase) -> None:
    """Test that the environment has what the policy reads.

    Args:
        policy: only a TensorDict module says what it reads.
        available: entries, leaves of a nest; the policy may read a whole node.
        env: for the message.

    Raises:
        PolicyKeyError: an in_key of a TensorDict module is no entry of the environment.
        PolicyError: a layer that reads an entry has another width.
    """
    if not isinstance(policy, TensorDictModuleBase):
        return
    check_widths(policy, env)
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


def accelerate(call: Call, options: CollectorOptions) -> tuple[Call, bool]:
    """The policy compiled and captured as the options say, and whether its outputs are fresh at each call."""
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
        if self._proven:
            return self._call(td)
        before = td.copy()
        try:
            chosen = self._call(td)
        except Exception as error:
            # A wrong policy fails again below, with its own error and without the compiler's frames.
            chosen = self._plain(td.update(before))
            self._call = self._plain
            warnings.warn(
                f"compile_policy: the policy could not be compiled and runs uncompiled. {type(error).__name__}: "
                f"{str(error).splitlines()[0] if str(error) else ''}",
                stacklevel=2,
            )
        self._proven = True
        return chosen
