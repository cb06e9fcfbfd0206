"""What an environment says of itself: its specs, their keys, its batch size and its device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Self, cast

import torch
from tensordict import TensorDictBase
from torch import nn

from rollwright._keys import NestedKey, as_tuple, unravel
from rollwright.data.layout import DoneGroup, done_groups
from rollwright.data.specs import Categorical, Composite, TensorSpec, Unbounded
from rollwright.data.specs.shapes import as_device
from rollwright.errors import EnvError

__all__ = ["EnvSpecs"]


def _unbatched(name: str) -> property:
    """A spec of a single environment of the batch, which is expanded to the batch where it is set."""

    def read(env: EnvSpecs) -> TensorSpec:
        spec: TensorSpec = getattr(env, name)
        return spec[(0,) * env.ndim] if env.ndim else spec

    def write(env: EnvSpecs, spec: TensorSpec) -> None:
        if "_modules" not in env.__dict__:
            raise EnvError(
                f"{type(env).__name__}: {name}_unbatched was set before EnvBase.__init__, which says the batch size. "
                "Call it first."
            )
        setattr(env, name, spec.expand((*env.batch_size, *spec.shape)) if env.ndim else spec)

    return property(read, write, doc=f":attr:`{name}` of one environment; what is set is expanded to the batch.")


class EnvSpecs(nn.Module):
    """The declarative half of :class:`~rollwright.envs.EnvBase`.

    There are five Composites, ``full_{observation,state,action,reward,done}_spec``. Each can also be read and
    set by its short name; a leaf set as ``action_spec``, ``reward_spec`` or ``done_spec`` goes under its usual key.
    """

    _device: torch.device | None
    _batch_size: torch.Size
    _full_specs: dict[str, Composite]
    _cache: dict[Any, Any]

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        """Let specs be set before ``EnvBase.__init__`` runs."""
        env = super().__new__(cls)
        env.__dict__.update(_device=None, _batch_size=torch.Size(()), _full_specs={}, _cache={})
        return env

    def __init__(self, *, device: torch.device | str | int | None, batch_size: Sequence[int] | None) -> None:
        super().__init__()
        self.__dict__["_device"] = as_device(device)
        self.__dict__["_batch_size"] = torch.Size(batch_size if batch_size is not None else ())

    def _finalize(self) -> None:
        """Fill in the specs that the constructor left open, and check those set before ``EnvBase.__init__``."""
        for name, spec in list(self._full_specs.items()):
            self._set_spec(name, spec, None)
        for name in ("observation", "state", "action", "reward", "done"):
            if name not in self._full_specs:
                self._default_spec(name)

    def _default_spec(self, name: str) -> None:
        """Set the spec that an environment has where its constructor sets none."""
        if name == "reward":
            self.reward_spec = Unbounded((*self.batch_size, 1), device=self.device)
        elif name == "done":
            self.done_spec = Categorical(2, shape=(*self.batch_size, 1), dtype=torch.bool, device=self.device)
        else:
            self._full_specs[name] = Composite(shape=self.batch_size, device=self.device)

    def _full_spec(self, name: str) -> Composite:
        if name not in self._full_specs:  # read before it was set
            if "_modules" not in self.__dict__:
                raise EnvError(
                    f"{type(self).__name__}: full_{name}_spec was read before EnvBase.__init__. Call it first."
                )
            self._default_spec(name)
        return self._full_specs[name]

    def _set_spec(self, name: str, spec: TensorSpec, default_key: str | None) -> None:
        if not isinstance(spec, Composite):
            if default_key is None:
                raise TypeError(
                    f"{name}_spec: expected a Composite that names each entry, got {type(spec).__name__}. "
                    f"Write Composite({name}=spec)."
                )
            spec = Composite({default_key: spec}, shape=self.batch_size)
        if spec.shape[: len(self.batch_size)] != self.batch_size:
            raise ValueError(
                f"{name}_spec: expected a shape that begins with the environment's batch size "
                f"{list(self.batch_size)}, got {list(spec.shape)}. Pass Composite(..., shape=env.batch_size)."
            )
        self._full_specs[name] = spec.clone().to(self.device)
        self._cache.clear()

    @property
    def full_observation_spec(self) -> Composite:
        """Composite of all observations."""
        return self._full_spec("observation")

    @full_observation_spec.setter
    def full_observation_spec(self, spec: Composite) -> None:
        self._set_spec("observation", spec, None)

    @property
    def full_state_spec(self) -> Composite:
        """Composite of what ``_step`` reads beside the action."""
        return self._full_spec("state")

    @full_state_spec.setter
    def full_state_spec(self, spec: Composite) -> None:
        self._set_spec("state", spec, None)

    @property
    def full_action_spec(self) -> Composite:
        """Composite of all actions."""
        return self._full_spec("action")

    @full_action_spec.setter
    def full_action_spec(self, spec: TensorSpec) -> None:
        self._set_spec("action", spec, "action")

    @property
    def full_reward_spec(self) -> Composite:
        """Composite of all rewards."""
        return self._full_spec("reward")

    @full_reward_spec.setter
    def full_reward_spec(self, spec: TensorSpec) -> None:
        if not isinstance(spec, Composite) and spec.shape == self.batch_size:
            spec = spec.unsqueeze(-1)
        self._set_spec("reward", spec, "reward")

    @property
    def full_done_spec(self) -> Composite:
        """Composite of all ``done``, ``terminated`` and ``truncated`` flags."""
        return self._full_spec("done")

    @full_done_spec.setter
    def full_done_spec(self, spec: TensorSpec) -> None:
        if not isinstance(spec, Composite) and spec.shape == self.batch_size:
            spec = spec.unsqueeze(-1)
        self._set_spec("done", spec, "done")
        self._complete_done_spec()

    def _complete_done_spec(self, *, truncated: bool = False) -> None:
        spec = self._full_specs["done"]
        for group in done_groups(spec.keys(True, True)):
            known = next(spec[key] for key in group.keys if key in spec)
            wanted: list[NestedKey] = [group.done, group.terminated]
            if truncated and as_tuple(group.done)[-1] == "done":  # a lone flag of another name has no companions
                wanted.append(unravel((*group.prefix, "truncated")))
            for key in wanted:
                if key not in spec:
                    spec.set(key, known.clone())
        self._cache.clear()

    def add_truncated_keys(self) -> Self:
        """Give every group of flags that has a ``done`` a ``truncated`` beside it; returns the environment."""
        self._complete_done_spec(truncated=True)
        return self

    @property
    def observation_spec(self) -> Composite:
        """Same as :attr:`full_observation_spec`."""
        return self.full_observation_spec

    @observation_spec.setter
    def observation_spec(self, spec: Composite) -> None:
        self.full_observation_spec = spec

    @property
    def state_spec(self) -> Composite:
        """Same as :attr:`full_state_spec`."""
        return self.full_state_spec

    @state_spec.setter
    def state_spec(self, spec: Composite) -> None:
        self.full_state_spec = spec

    @property
    def action_spec(self) -> TensorSpec:
        """The action's spec; the Composite where there are several."""
        return _single_leaf(self.full_action_spec)

    @action_spec.setter
    def action_spec(self, spec: TensorSpec) -> None:
        self.full_action_spec = spec

    @property
    def reward_spec(self) -> TensorSpec:
        """The reward's spec; the Composite where there are several."""
        return _single_leaf(self.full_reward_spec)

    @reward_spec.setter
    def reward_spec(self, spec: TensorSpec) -> None:
        self.full_reward_spec = spec

    @property
    def done_spec(self) -> TensorSpec:
        """Same as :attr:`full_done_spec` (there are always ``done`` and ``terminated``)."""
        return self.full_done_spec

    @done_spec.setter
    def done_spec(self, spec: TensorSpec) -> None:
        self.full_done_spec = spec

    observation_spec_unbatched = _unbatched("observation_spec")
    full_observation_spec_unbatched = _unbatched("full_observation_spec")
    state_spec_unbatched = _unbatched("state_spec")
    full_state_spec_unbatched = _unbatched("full_state_spec")
    action_spec_unbatched = _unbatched("action_spec")
    full_action_spec_unbatched = _unbatched("full_action_spec")
    reward_spec_unbatched = _unbatched("reward_spec")
    full_reward_spec_unbatched = _unbatched("full_reward_spec")
    done_spec_unbatched = _unbatched("done_spec")
    full_done_spec_unbatched = _unbatched("full_done_spec")

    @property
    def input_spec(self) -> Composite:
        """``full_action_spec`` and ``full_state_spec`` in one Composite."""
        return Composite(
            full_action_spec=self.full_action_spec, full_state_spec=self.full_state_spec, shape=self.batch_size
        )

    @property
    def output_spec(self) -> Composite:
        """``full_observation_spec``, ``full_reward_spec`` and ``full_done_spec`` in one Composite."""
        return Composite(
            full_observation_spec=self.full_observation_spec,
            full_reward_spec=self.full_reward_spec,
            full_done_spec=self.full_done_spec,
            shape=self.batch_size,
        )

    @property
    def specs(self) -> Composite:
        """``input_spec`` and ``output_spec`` in one Composite."""
        return Composite(input_spec=self.input_spec, output_spec=self.output_spec, shape=self.batch_size)

    def _keys_of(self, name: str) -> list[NestedKey]:
        keys = self._cache.get(name)
        if keys is None:
            spec = getattr(self, f"full_{name}_spec")
            keys = sorted(
                (unravel(key) for key in spec.keys(True, True)), key=lambda k: (len(as_tuple(k)), as_tuple(k))
            )
            self._cache[name] = keys
        return cast(list[NestedKey], keys)

    @property
    def observation_keys(self) -> list[NestedKey]:
        """Keys of all observations, the root's first."""
        return self._keys_of("observation")

    @property
    def state_keys(self) -> list[NestedKey]:
        """Keys of what ``_step`` reads beside actions."""
        return self._keys_of("state")

    @property
    def action_keys(self) -> list[NestedKey]:
        """Keys of all actions."""
        return self._keys_of("action")

    @property
    def reward_keys(self) -> list[NestedKey]:
        """Keys of all rewards."""
        return self._keys_of("reward")

    @property
    def done_keys(self) -> list[NestedKey]:
        """Keys of all flags."""
        return self._keys_of("done")

    @property
    def action_key(self) -> NestedKey:
        """The key of the action; an error where there are several."""
        return self._only("action")

    @property
    def reward_key(self) -> NestedKey:
        """The key of the reward; an error where there are several."""
        return self._only("reward")

    def _only(self, name: str) -> NestedKey:
        keys = self._keys_of(name)
        if len(keys) != 1:
            raise KeyError(f"{self} has {len(keys)} {name} keys, {keys}. Read {name}_keys instead of {name}_key.")
        return keys[0]

    @property
    def done_groups(self) -> list[DoneGroup]:
        """The flags, one group for each place that holds some."""
        groups = self._cache.get("done_groups")
        if groups is None:
            groups = self._cache["done_groups"] = done_groups(self.done_keys)
        return cast(list[DoneGroup], groups)

    _done_groups = done_groups

    @property
    def done_keys_groups(self) -> list[list[NestedKey]]:
        """The flags' keys, one list for each place that holds flags."""
        return [group.keys for group in self.done_groups]

    @property
    def reset_keys(self) -> list[NestedKey]:
        """The ``"_reset"`` key of each place that holds flags."""
        return [group.reset for group in self.done_groups]

    def fake_tensordict(self) -> TensorDictBase:
        """A step of zeros, with every entry that a step has.

        Returns:
            ``[*batch]``: observations, states, actions and flags at the root, and below ``"next"``
            observations, rewards and flags.
        """
        fake = self.full_observation_spec.zero()
        outcome = fake.clone().update(self.full_reward_spec.zero()).update(self.full_done_spec.zero())
        fake.update(self.full_state_spec.zero()).update(self.full_action_spec.zero()).update(self.full_done_spec.zero())
        return fake.set("next", outcome)

    # The object itself ------------------------------------------------------------------------

    @property
    def batch_size(self) -> torch.Size:
        """Shape of the batch of environments."""
        return self._batch_size

    @batch_size.setter
    def batch_size(self, value: torch.Size) -> None:
        self.__dict__["_batch_size"] = torch.Size(value)
        self._cache.clear()

    @property
    def shape(self) -> torch.Size:
        """Same as :attr:`batch_size`."""
        return self.batch_size

    @property
    def ndim(self) -> int:
        """Number of batch dimensions."""
        return len(self.batch_size)

    def numel(self) -> int:
        """Number of environments in the batch (1 for an unbatched one)."""
        return self.batch_size.numel()

    @property
    def device(self) -> torch.device | None:
        """Where the environment's tensors live, or None."""
        return self._device

    @device.setter
    def device(self, value: torch.device | str | None) -> None:
        self.to(value)

    def to(self, device: torch.device | str | int | None) -> Self:  # type: ignore[override]
        """Move specs, buffers and future data to a device; returns the environment."""
        if device is None:
            return self
        self.__dict__["_device"] = as_device(device)
        for name, spec in self._full_specs.items():
            self._full_specs[name] = spec.to(self._device)
        self._cache.clear()
        super().to(self._device)
        return self


def _single_leaf(spec: Composite) -> TensorSpec:
    leaves = list(spec.values(True, True))
    return leaves[0] if len(leaves) == 1 else spec
