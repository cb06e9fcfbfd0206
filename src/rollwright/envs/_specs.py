"""The specs of an environment, their keys, its batch size and its device."""

from __future__ import annotations

import sys
from collections.abc import Callable, Hashable, Sequence
from typing import Any, Generic, Self, TypeVar, cast

import torch
from tensordict import TensorDictBase
from torch import nn

from rollwright._keys import NestedKey, as_tuple, unravel
from rollwright.data.layout import DoneGroup, done_groups
from rollwright.data.specs import Categorical, Composite, TensorSpec, Unbounded, register_as_torchrl
from rollwright.data.specs.shapes import usable_device
from rollwright.errors import EnvError

S = TypeVar("S", bound=TensorSpec)
T = TypeVar("T")

NAMES = ("observation", "state", "action", "reward", "done")
LEAVES = ("observation", "action", "reward", "done")  # may be set as a leaf, which goes under this key


class FullSpec:
    """Descriptor of ``full_<name>_spec``: a Composite; what is set may be a leaf, but for states."""

    def __init__(self, name: str, doc: str) -> None:
        self.name, self.__doc__ = name, doc

    def __get__(self, env: EnvSpecs | None, kind: Any = None) -> Composite:
        if env is None:
            return cast(Composite, self)
        if "torchrl.data.tensor_specs" in sys.modules:  # a program may import it when it has environments already
            register_as_torchrl()
        return env.full_spec(self.name)

    def __set__(self, env: EnvSpecs, spec: TensorSpec) -> None:
        env.set_full_spec(self.name, spec)


class ShortSpec(Generic[S]):
    """Descriptor of ``<name>_spec``: ``full_<name>_spec``, or the leaf of an only action or reward at its usual key."""

    def __init__(self, name: str, doc: str) -> None:
        self.name, self.__doc__ = name, doc

    def __get__(self, env: EnvSpecs | None, kind: Any = None) -> S:
        if env is None:
            return cast(S, self)
        spec = getattr(env, f"full_{self.name}_spec")
        is_leaf = self.name in ("action", "reward") and list(spec.leaves()) == [self.name]
        return cast(S, spec[self.name] if is_leaf else spec)

    def __set__(self, env: EnvSpecs, spec: TensorSpec) -> None:
        setattr(env, f"full_{self.name}_spec", spec)


class Keys:
    """Descriptor of ``<name>_keys``: keys of all leaves of a spec, the root's first."""

    def __init__(self, name: str, doc: str) -> None:
        self.name, self.__doc__ = name, doc

    def __get__(self, env: EnvSpecs | None, kind: Any = None) -> list[NestedKey]:
        if env is None:
            return cast("list[NestedKey]", self)
        keys = env._cache.get(self.name)
        if keys is None:
            keys = env._cache[self.name] = _sorted_keys(getattr(env, f"full_{self.name}_spec"))
        return cast("list[NestedKey]", keys)

    def __set__(self, env: EnvSpecs, keys: Any) -> None:
        raise AttributeError(f"{self.name}_keys: follow from {self.name}_spec. Set that.")


def _sorted_keys(spec: Composite) -> list[NestedKey]:
    paths = sorted(map(as_tuple, spec.leaves()), key=lambda path: (len(path), path))
    return [path[0] if len(path) == 1 else path for path in paths]


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
    set by its short name; a leaf set as ``observation_spec``, ``action_spec``, ``reward_spec`` or ``done_spec`` goes
    under its usual key.
    """

    _device: torch.device | None
    _batch_size: torch.Size
    _full_specs: dict[str, Composite]
    _cache: dict[Any, Any]
    _locks_specs: bool

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        """Let specs be set before ``EnvBase.__init__`` runs."""
        env = super().__new__(cls)
        env.__dict__.update(_device=None, _batch_size=torch.Size(()), _full_specs={}, _cache={}, _is_spec_locked=False)
        return env

    def __init__(
        self,
        *,
        device: torch.device | str | int | None,
        batch_size: Sequence[int] | None,
        spec_locked: bool = False,
    ) -> None:
        super().__init__()
        self.__dict__["_locks_specs"] = spec_locked  # once the constructor has run
        self.__dict__["_device"] = usable_device("device", device)
        self.__dict__["_batch_size"] = torch.Size(batch_size if batch_size is not None else ())

    def _finalize(self) -> None:
        """Fill in the specs that the constructor left open, and check those set before ``EnvBase.__init__``."""
        for name in NAMES:
            spec = self._full_specs.get(name)
            if spec is None:
                self._default_spec(name)
            elif spec.device != self._device or spec.shape[: len(self._batch_size)] != self._batch_size:
                self.set_full_spec(name, spec)
            elif name == "done":
                self._complete_done_spec()
        if self._locks_specs:
            self.set_spec_lock_()

    def _default_spec(self, name: str) -> None:
        """Set the spec that an environment has where its constructor sets none."""
        full, where = f"full_{name}_spec", "_input_spec" if name in ("action", "state") else "_output_spec"
        whole = getattr(self, where, None)  # of a class, or set in its __new__, as programs of the field do
        if isinstance(whole, Composite) and (spec := whole.get(full, None)) is not None:
            self.set_full_spec(name, spec)
        elif name == "reward":
            self.reward_spec = Unbounded((*self.batch_size, 1), device=self.device)
        elif name == "done":
            self.done_spec = Categorical(2, shape=(*self.batch_size, 1), dtype=torch.bool, device=self.device)
        else:
            self._full_specs[name] = Composite(shape=self.batch_size, device=self.device)

    def remember(self, name: Hashable, find: Callable[[], T]) -> T:
        """``find()``, called once until specs change."""
        if name not in self._cache:
            self._cache[name] = find()
        return cast(T, self._cache[name])

    @property
    def known_specs(self) -> dict[str, Composite]:
        """The five Composites by name, those that were set or asked for; not a copy."""
        return self._full_specs

    def full_spec(self, name: str) -> Composite:
        """``full_<name>_spec``, of ``"observation"``, ``"state"``, ``"action"``, ``"reward"`` or ``"done"``."""
        if name not in self._full_specs:  # read before it was set
            if "_modules" not in self.__dict__:
                raise EnvError(
                    f"{type(self).__name__}: full_{name}_spec was read before EnvBase.__init__. Call it first."
                )
            self._default_spec(name)
        return self._full_specs[name]

    def set_full_spec(self, name: str, spec: TensorSpec) -> None:
        """Set ``full_<name>_spec``.

        Raises:
            TypeError: states are given as a leaf.
            ValueError: its shape does not begin with the batch size.
        """
        if not isinstance(spec, Composite):
            if name not in LEAVES:
                raise TypeError(
                    f"{name}_spec: expected a Composite that names each entry, got {type(spec).__name__}. "
                    f"Write Composite({name}=spec)."
                )
            if name in ("reward", "done") and spec.shape == self._batch_size:
                spec = spec.unsqueeze(-1)
            spec = Composite({name: spec}, shape=self._batch_size)
        if spec.shape[: len(self._batch_size)] != self._batch_size:
            raise ValueError(
                f"{name}_spec: expected a shape that begins with the environment's batch size "
                f"{list(self.batch_size)}, got {list(spec.shape)}. Pass Composite(..., shape=env.batch_size)."
            )
        self._full_specs[name] = spec.clone().to(self._device)
        if name == "done":
            self._complete_done_spec()
        if self.is_spec_locked:
            self._full_specs[name].lock_()
        self._cache.clear()

    @property
    def is_spec_locked(self) -> bool:
        """Whether specs cannot be changed in place, see :meth:`set_spec_lock_`."""
        return cast(bool, self.__dict__["_is_spec_locked"])

    def set_spec_lock_(self, mode: bool = True) -> Self:
        """Let specs not be changed in place, or let them; returns the environment.

        They may be set as a whole at any time. Call it after a change in place: what follows from specs is remembered.
        """
        self.__dict__["_is_spec_locked"] = mode
        for spec in self._full_specs.values():
            spec.lock_() if mode else spec.unlock_()
        self._cache.clear()
        return self

    def _complete_done_spec(self, *, truncated: bool = False) -> None:
        spec = self.full_spec("done").unlock_()
        leaves, present = spec.leaves(), spec.keys(True)
        for group in done_groups(leaves):
            known = next(leaves[key] for key in group.keys if key in leaves)
            wanted: list[NestedKey] = [group.done, group.terminated]
            if truncated and as_tuple(group.done)[-1] == "done":  # a lone flag of another name has no companions
                wanted.append(unravel((*group.prefix, "truncated")))
            for key in wanted:
                if key not in present:
                    spec.set(key, known.clone())
        if self.is_spec_locked:
            spec.lock_()
        self._cache.clear()

    def add_truncated_keys(self) -> Self:
        """Give every group of flags that has a ``done`` a ``truncated`` beside it; returns the environment."""
        self._complete_done_spec(truncated=True)
        return self

    full_observation_spec = FullSpec("observation", "Composite of all observations.")
    full_state_spec = FullSpec("state", "Composite of what ``_step`` reads beside the action.")
    full_action_spec = FullSpec("action", "Composite of all actions.")
    full_reward_spec = FullSpec("reward", "Composite of all rewards.")
    full_done_spec = FullSpec("done", "Composite of all ``done``, ``terminated`` and ``truncated`` flags.")

    observation_spec = ShortSpec[Composite]("observation", "Same as :attr:`full_observation_spec`.")
    state_spec = ShortSpec[Composite]("state", "Same as :attr:`full_state_spec`.")
    action_spec = ShortSpec[TensorSpec](
        "action", 'The spec of an only action ``"action"``; else, of several or of another key, the Composite.'
    )
    reward_spec = ShortSpec[TensorSpec](
        "reward", 'The spec of an only reward ``"reward"``; else, of several or of another key, the Composite.'
    )
    done_spec = ShortSpec[TensorSpec](
        "done", "Same as :attr:`full_done_spec`: there are always ``done`` and ``terminated``."
    )

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

    def _joined_specs(self, *names: str) -> Composite:
        full = {f"full_{name}_spec": getattr(self, f"full_{name}_spec") for name in names}
        spec = Composite(full, shape=self.batch_size)
        return spec.lock_() if self.is_spec_locked else spec

    @property
    def input_spec(self) -> Composite:
        """``full_action_spec`` and ``full_state_spec`` in one Composite."""
        return self._joined_specs("action", "state")

    @property
    def output_spec(self) -> Composite:
        """``full_observation_spec``, ``full_reward_spec`` and ``full_done_spec`` in one Composite."""
        return self._joined_specs("observation", "reward", "done")

    input_spec_unbatched = _unbatched("input_spec")
    output_spec_unbatched = _unbatched("output_spec")

    @property
    def specs(self) -> Composite:
        """``input_spec`` and ``output_spec`` in one Composite."""
        return Composite(input_spec=self.input_spec, output_spec=self.output_spec, shape=self.batch_size)

    observation_keys = Keys("observation", "Keys of all observations, the root's first.")
    state_keys = Keys("state", "Keys of what ``_step`` reads beside actions.")
    action_keys = Keys("action", "Keys of all actions.")
    reward_keys = Keys("reward", "Keys of all rewards.")
    done_keys = Keys("done", "Keys of all flags.")

    @property
    def action_key(self) -> NestedKey:
        """The key of the action; an error where there are several."""
        return self._only("action")

    @property
    def reward_key(self) -> NestedKey:
        """The key of the reward; an error where there are several."""
        return self._only("reward")

    def cardinality(self, tensordict: TensorDictBase | None = None) -> int | float:
        """Number of possible actions, infinity where they cannot be enumerated.

        Args:
            tensordict: for environments that override this: where the environment is.
        """
        return self.full_action_spec.cardinality()

    def _only(self, name: str) -> NestedKey:
        keys: list[NestedKey] = getattr(self, f"{name}_keys")
        if len(keys) != 1:
            raise KeyError(f"{self} has {len(keys)} {name} keys, {keys}. Read {name}_keys instead of {name}_key.")
        return keys[0]

    @property
    def done_groups(self) -> list[DoneGroup]:
        """The flags, one group for each place that holds some."""
        groups = self._cache.get("done_groups")
        if groups is None:
            groups = self._cache["done_groups"] = done_groups(self.done_keys)
        return cast("list[DoneGroup]", groups)

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

    @property
    def batch_dims(self) -> int:
        """Same as :attr:`ndim`."""
        return self.ndim

    def ndimension(self) -> int:
        """Same as :attr:`ndim`."""
        return self.ndim

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
        self.__dict__["_device"] = usable_device("device", device)
        for name, spec in self._full_specs.items():
            self._full_specs[name] = spec.to(self._device)
        self._cache.clear()
        super().to(self._device)
        return self
