"""WrapperEnv: an environment around another one, whose attributes it has."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Self

import torch

from rollwright._keys import NestedKey
from rollwright.envs.arrays import ArrayEnv, Entry
from rollwright.envs.base import EnvBase


class WrapperEnv(EnvBase):
    """An environment around another one; attributes that it does not have itself are those of ``base_env``.

    Args:
        base_env: the environment.
    """

    base_env: EnvBase
    _of_base: ClassVar[tuple[str, ...]] = ("run_type_checks", "allow_done_after_reset")  # are set there

    def __init__(self, base_env: EnvBase) -> None:
        super().__init__()
        self.base_env = base_env

    def _finalize(self) -> None:
        """Specs come from the base environment, when they are first asked for."""

    def __setattr__(self, name: str, value: Any) -> None:
        if name in self._of_base:
            if "base_env" in self.__dict__:  # not yet while EnvBase sets its defaults
                setattr(self.base_env, name, value)
            return
        super().__setattr__(name, value)
        if name == "base_env":
            # Also a plain attribute: modules are looked up in a slow way, and each step does so often.
            self.__dict__[name] = value
            self._cache.clear()

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            base_env = self.__dict__.get("base_env")
            # Where a property of this class raised, the base environment's value would be a wrong one.
            if base_env is None or name.startswith("__") or hasattr(type(self), name):
                raise
        return getattr(base_env, name)

    @property
    def stand_ins(self) -> Mapping[NestedKey, NestedKey]:  # type: ignore[override]
        """See :attr:`EnvBase.stand_ins`."""
        return self.base_env.stand_ins

    @property
    def ends_with_step(self) -> tuple[str, ...]:  # type: ignore[override]
        """See :attr:`EnvBase.ends_with_step`."""
        return self.base_env.ends_with_step

    @property
    def read_at_reset(self) -> tuple[str, ...]:  # type: ignore[override]
        """See :attr:`EnvBase.read_at_reset`."""
        return self.base_env.read_at_reset

    @property
    def has_token_rewards(self) -> bool:  # type: ignore[override]
        """See :attr:`EnvBase.has_token_rewards`."""
        return self.base_env.has_token_rewards

    @property
    def batch_size(self) -> torch.Size:
        """Shape of the batch of environments."""
        return self.base_env.batch_size

    @batch_size.setter
    def batch_size(self, value: Sequence[int]) -> None:
        raise AttributeError(f"batch_size: that of a {type(self).__name__} is its base environment's. Set it there.")

    @property
    def device(self) -> torch.device | None:
        """Where the environment's tensors live, or None."""
        return self.base_env.device

    @device.setter
    def device(self, value: torch.device | str | None) -> None:
        self.to(value)

    @property
    def batch_locked(self) -> bool:  # type: ignore[override]
        """As for the base environment."""
        return self.base_env.batch_locked

    def moment(self) -> object:
        """See :meth:`EnvBase.moment`."""
        return self.num_uses, self.base_env.moment()

    def set_spec_lock_(self, mode: bool = True) -> Self:
        """See :class:`EnvBase`; the base environment's specs too."""
        self.base_env.set_spec_lock_(mode)
        return super().set_spec_lock_(mode)

    def fit_policy(self, policy: Any) -> bool:
        """See :meth:`EnvBase.fit_policy`."""
        return self.base_env.fit_policy(policy)

    @property
    def run_type_checks(self) -> bool:  # type: ignore[override]
        """As for the base environment."""
        return self.base_env.run_type_checks

    @property
    def allow_done_after_reset(self) -> bool:  # type: ignore[override]
        """As for the base environment."""
        return self.base_env.allow_done_after_reset


class WrapperArrays(ArrayEnv):
    """The array form of an environment around another one.

    Args:
        base: the array form of that one.
    """

    def __init__(self, base: ArrayEnv) -> None:
        self._base = base
        self.batch, self.entries, self.rewards, self.reads = base.batch, base.entries, base.rewards, base.reads
        self.flags, self.nests, self.held_back = base.flags, base.nests, base.held_back
        self.root_flags, self.done_follows, self.may_be_unfit = base.root_flags, base.done_follows, base.may_be_unfit

    def see_roots(self, forms: Mapping[NestedKey, Entry]) -> None:
        """See :meth:`ArrayEnv.see_roots`."""
        self._base.see_roots(forms)

    @property
    def resets_ahead(self) -> bool:
        """See :class:`ArrayEnv`."""
        return self._base.resets_ahead

    @resets_ahead.setter
    def resets_ahead(self, value: bool) -> None:
        self._base.resets_ahead = value
