"""Prepares the policy that a user passes as one callable on TensorDicts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any, cast

import torch
from tensordict import TensorDictBase
from tensordict.nn import CudaGraphModule
from torch import nn

from rollwright._warnings import warn_user
from rollwright.collectors.options import CollectorOptions
from rollwright.collectors.rollout.devices import module_device
from rollwright.collectors.rollout.policy_copies import copied_policy, never_copied_in
from rollwright.data.specs.shapes import as_device
from rollwright.envs.base import EnvBase
from rollwright.modules import RandomPolicy, set_exploration_modules_spec_from_env
from rollwright.modules.llm.engine import Engine
from rollwright.modules.signature import Call, speak_tensordict
from rollwright.weight_update.forms import Description, describe
from rollwright.weight_update.policy_weights import weights_of


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

    def update_engine(self, weights: Any) -> None:
        """Give the engine new weights, as the options say; their version is counted next.

        Raises:
            ValueError: there is no engine.
        """
        if self.engine is None:
            raise ValueError(
                f"weights of an engine: the policy ({type(self.policy).__name__}) has none. Pass one with an engine."
            )
        number = self._version + 1
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
