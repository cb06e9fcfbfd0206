"""TransformedEnv: an environment with transforms around it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Self

import gymnasium
import torch
from gymnasium.vector import VectorEnv
from tensordict import TensorDictBase

from rollwright._keys import leaf_keys
from rollwright.data.specs import Composite, TensorSpec
from rollwright.data.specs.discrete import MaskOf, choices
from rollwright.envs.arrays import ArrayEnv
from rollwright.envs.base import EnvBase, WrapperEnv, register_extension
from rollwright.envs.foreign import as_env, as_maker, remedy_for
from rollwright.envs.own_tensors import OwnTensors
from rollwright.envs.transforms.base import Transform
from rollwright.envs.transforms.compose import Compose, TransformLike, as_chain
from rollwright.envs.transforms.forms import TransformedArrays, TransformedTensors
from rollwright.errors import EnvError

OUTPUTS, INPUTS = ("observation", "reward", "done"), ("action", "state")


class TransformedEnv(WrapperEnv):
    """Applies a transform to the data of an environment.

    Attributes that it lacks are those of ``base_env``. Its ``state_dict()`` has the state of the transform below
    ``"transform."``, and that of the base environment below ``"base_env."``.

    Args:
        base_env: the environment. If it is a ``TransformedEnv``, its transforms are shared, before ``transform``, and
            ``base_env`` becomes the environment inside it (``auto_unwrap=False`` nests them).
        transform: a transform; or a function on TensorDicts that is called on what steps and resets return; None for
            an empty chain. Assign to ``env.transform`` to replace it.
        cache_specs: compute specs once. If False, compute them at each use, for transforms whose specs vary.
        device: move the environment there first.
        auto_unwrap: see ``base_env``.
        policy: see :class:`~rollwright.envs.EnvBase`.

    Raises:
        TypeError: ``base_env`` is no environment, or ``transform`` is no transform or function.
        RuntimeError: ``transform`` belongs to another environment.

    Example:
        >>> from rollwright.envs.transforms import StepCounter
        >>> from rollwright.testing.mocking_classes import CountingEnv
        >>> env = TransformedEnv(CountingEnv(), StepCounter(max_steps=3))
        >>> env.rollout(10)["next", "step_count"].squeeze(-1)
        tensor([1, 2, 3])
    """

    transform: Transform
    _of_base = ("run_type_checks", "allow_done_after_reset", "is_closed")
    returns_copies = True  # what the base environment returned was copied already

    def __init__(
        self,
        base_env: str | EnvBase | gymnasium.Env[Any, Any] | VectorEnv[Any, Any, Any],
        transform: TransformLike | None = None,
        cache_specs: bool = True,
        *,
        device: torch.device | str | int | None = None,
        auto_unwrap: bool = True,
        policy: Callable[..., Any] | None = None,
    ) -> None:
        base_env = as_env(as_maker(base_env)()) if isinstance(base_env, str) else as_env(base_env)
        if not isinstance(base_env, EnvBase):
            got = (
                f"the class {base_env.__name__}"
                if isinstance(base_env, type)
                else f"{type(base_env).__name__}: {base_env!r}"
            )
            raise TypeError(f"base_env: expected an environment of rollwright, got {got}. {remedy_for(base_env)}")
        if not isinstance(cache_specs, bool):
            raise TypeError(
                f"cache_specs: expected True or False, got {type(cache_specs).__name__}. Of several transforms, make a "
                "chain: Compose(first, second)."
            )
        transform = Compose() if transform is None else as_chain(transform)
        transform.check_free()
        if auto_unwrap and type(base_env) is TransformedEnv and type(self) is TransformedEnv:
            # The environment unwrapped keeps its transforms too: freezing one there freezes it here.
            inner, chain = base_env.transform, Compose()
            for part in inner if isinstance(inner, Compose) else [inner]:
                chain.share(part)
            chain.append(transform)
            base_env, transform = base_env.base_env, chain
        super().__init__(base_env if device is None else base_env.to(device))
        self.cache_specs = cache_specs
        self.transform = transform

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "transform":
            self._set_transform(as_chain(value))
            return
        super().__setattr__(name, value)
        if name == "base_env" and "transform" in self._modules:
            self.empty_cache()

    def _set_transform(self, transform: Transform) -> None:
        transform.check_free()
        old = self._modules.get("transform")
        if isinstance(old, Transform) and old.holder is self:
            old.reset_parent()
        if self.base_env.device is not None:
            transform.to(self.base_env.device)
        transform.set_container(self)
        transform.eval()
        self._modules["transform"] = self.__dict__["transform"] = transform
        self.empty_cache()

    def append_transform(self, transform: TransformLike) -> TransformedEnv:
        """Add a transform after those that there are; returns this environment."""
        self._chain().append(transform)
        return self

    def insert_transform(self, index: int, transform: TransformLike) -> TransformedEnv:
        """Add a transform before the one at ``index``; returns this environment."""
        self._chain().insert(index, transform)
        return self

    def _chain(self) -> Compose:
        if not isinstance(self.transform, Compose):
            single = self.transform
            single.reset_parent()
            self.transform = Compose(single)
        return self.transform

    def with_only(self, transforms: Sequence[Transform]) -> TransformedEnv:
        """The base environment with clones of ``transforms``, some of this environment's."""
        chain = Compose(*(transform.clone() for transform in transforms))
        env = TransformedEnv(self.base_env, chain, self.cache_specs, auto_unwrap=False)
        for transform, clone in zip(transforms, chain, strict=True):
            # Without this, each clone would build environments for those before it, and they theirs.
            clone.set_parent(transform.parent)
        return env

    # Stepping ---------------------------------------------------------------------------------

    @property
    def sets_own_flags(self) -> bool:
        """Whether flags may be set without ``done``; ``StepCounter(update_done=False)`` leaves it out on purpose."""
        parts = list(self.transform) if isinstance(self.transform, Compose) else [self.transform]
        if not all(getattr(part, "update_done", True) for part in parts):
            return False
        return super().sets_own_flags or any(not type(part).__module__.startswith("rollwright.") for part in parts)

    def _step(self, tensordict: TensorDictBase) -> TensorDictBase:
        if not self.cache_specs:
            self._cache.clear()
        inverts = self.remember("inverts", lambda: self.transform.inverts)
        given = self.transform.inv(tensordict) if inverts else tensordict
        outcome = self.base_env.step_outcome(given)
        preset = tensordict.get("next", None)
        if preset is not None:  # recurrent states that the policy wrote: transforms must see them
            outcome.update(preset.exclude(*leaf_keys(outcome)))
        return self.transform.transform_step(given, outcome)

    def _reset(self, tensordict: TensorDictBase | None = None, **kwargs: Any) -> TensorDictBase:
        if not self.cache_specs:
            self._cache.clear()
        base = self.base_env
        tensordict = self.transform.transform_reset_input(tensordict)
        given = None
        if tensordict is not None:
            given = tensordict.select(*base.reset_keys, *base.state_keys, *base.read_at_reset, strict=False)
        fresh = base.reset_outcome(given, **kwargs)
        return self.transform.transform_reset(fresh.empty() if tensordict is None else tensordict, fresh)

    def trim_frame(self, frame: TensorDictBase, following: TensorDictBase) -> None:
        """Change a frame after the next step was taken from it: first the transforms, then the base environment."""
        self.transform.trim_frame(frame, following)
        self.base_env.trim_frame(frame, following)

    def fake_tensordict(self) -> TensorDictBase:
        """A step of zeros with every entry that a step has."""
        return self.transform.complete_fake(super().fake_tensordict())

    def _array_form(self) -> ArrayEnv:
        return TransformedArrays(self, TransformedEnv)

    def _tensor_form(self) -> OwnTensors:
        return TransformedTensors(self, TransformedEnv)

    def rand_action(self, tensordict: TensorDictBase | None = None) -> TensorDictBase:
        """Write random actions, by the base environment's own method where it has one that still fits."""
        base = self.base_env
        overrides = type(base).rand_action is not EnvBase.rand_action
        if overrides and base.full_action_spec == self.full_action_spec:
            return base.rand_action(tensordict)
        return super().rand_action(tensordict)

    def set_seed(self, seed: int | None = None, static_seed: bool = False) -> int | None:
        """Seed the base environment, see :meth:`EnvBase.set_seed`."""
        return self.base_env.set_seed(seed, static_seed)

    def close(self, *, raise_if_closed: bool = True) -> None:
        """Close the base environment and the transform."""
        self.base_env.close(raise_if_closed=raise_if_closed)
        self.transform.close()

    def _reopen(self) -> None:
        self.base_env.reopen()

    # Specs ------------------------------------------------------------------------------------

    def full_spec(self, name: str) -> Composite:
        """A spec with all of its entries, computed from that of the base environment when it is first needed."""
        spec = self._full_specs.get(name)
        if spec is None or not self.cache_specs:
            self._compute_specs(OUTPUTS if name in OUTPUTS else INPUTS)
            spec = self._full_specs[name]
        return spec

    def _compute_specs(self, names: tuple[str, ...]) -> None:
        kind = "output_spec" if names is OUTPUTS else "input_spec"
        try:
            changed = getattr(self.transform, f"transform_{kind}")(getattr(self.base_env, kind).clone())
        except AttributeError as error:
            # Left alone, it would make Python look for the spec in the base environment.
            raise EnvError(f"{self}: transform_{kind} raised AttributeError: {error}") from error
        self._full_specs.update({name: changed[f"full_{name}_spec"] for name in names})
        if names is not OUTPUTS:
            self._follow_masks()
        if self.is_spec_locked:
            for name in names:
                self._full_specs[name].lock_()

    def _follow_masks(self) -> None:
        """Let actions that are the base environment's have the masks that it sets with each step."""
        own = self._full_specs.get("action")
        theirs = {} if own is None else choices(self.base_env.full_spec("action"))
        for key, leaf in theirs.items():
            mine: Any = None if own is None else own.get(key, None)
            if mine == leaf:
                mine.follow_mask(MaskOf(partial(self.base_env.full_spec, "action"), key))

    def set_full_spec(self, name: str, spec: TensorSpec) -> None:
        """An error: specs follow from the base environment and the transform."""
        raise AttributeError(
            f"{name}_spec: those of a TransformedEnv follow from its base environment and its transform. "
            f"Set env.base_env.{name}_spec and call env.empty_cache(), or write a transform."
        )

    def add_truncated_keys(self) -> TransformedEnv:
        """Give every group of the base environment's flags a ``truncated`` one; returns this environment."""
        self.base_env.add_truncated_keys()
        self.empty_cache()
        return self

    def fit_policy(self, policy: Any) -> bool:
        """Take from a policy what the environment lacks."""
        if not super().fit_policy(policy):
            return False
        self.empty_cache()
        return True

    def empty_cache(self) -> None:
        """Forget specs; needed when those of the base environment were changed."""
        self._full_specs.clear()
        self._cache.clear()
        self.transform.empty_cache()

    # What belongs to the base environment -----------------------------------------------------

    @property
    def remedy_when_closed(self) -> str:  # type: ignore[override]
        """What an error suggests after :meth:`close`; that of the base environment."""
        return self.base_env.remedy_when_closed

    @property
    def is_closed(self) -> bool:  # type: ignore[override]
        """Whether the base environment was closed."""
        return self.base_env.is_closed

    def to(self, device: torch.device | str | int | None) -> Self:  # type: ignore[override]
        """Move the base environment and the transform; returns this environment."""
        if device is not None:
            self.base_env.to(device)
            self.transform.to(device)
            self.empty_cache()
        return self

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self.transform.set_container(self)
        self._follow_masks()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.base_env!r}, {self.transform!r})"


register_extension("append_transform", TransformedEnv)
