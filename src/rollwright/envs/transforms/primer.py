"""TensorDictPrimer: entries that a policy carries along, with their first values."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any, cast

import torch
from tensordict import TensorDictBase

from rollwright._foreign import kind_in
from rollwright._keys import NestedKey, key_str, unravel
from rollwright.data.specs import Composite, NonTensor, TensorSpec
from rollwright.data.specs.conversion import from_torchrl
from rollwright.envs.arrays import ArrayEnv, ArrayTransform, entries_of
from rollwright.envs.columns import Columns
from rollwright.envs.transforms.base import Transform, kept
from rollwright.errors import NotNative
from rollwright.modules.primers import register_primer


class TensorDictPrimer(Transform):
    """Gives entries of the policy's own (recurrent states) a first value at each reset.

    A step carries an entry from the root to ``"next"``, unless the policy wrote it there. Rows that are
    reset get first values, others keep theirs.

    Args:
        primers: specs by key; ``Composite`` or a mapping.
        random: draw first values from the specs.
        default_value: the first value otherwise: a number; a function without arguments that returns a
            tensor; or a mapping with one of these for each key.
        reset_key: the ``"_reset"`` entry that decides; None: that of the environment, or of the group of
            agents that an entry belongs to.
        expand_specs: True: specs describe one environment's entry and get the batch dimensions of the
            environment in front, unless they are in a Composite of that shape. False: they have them already.
            None: put there where they are missing.
        single_default_value: ``default_value`` is a function that makes all entries at once: called as
            ``default_value(reset=rows)``, bool ``[*batch]``, it returns a TensorDict with one row for each
            that is marked, or for each of the batch.
        **kwargs: more specs by name.

    Raises:
        TypeError: a primer is no spec.
        ValueError: arguments that exclude one another, or keys that do not match.

    Example:
        >>> from rollwright.data import Unbounded
        >>> from rollwright.envs.transforms import TransformedEnv
        >>> from rollwright.testing.mocking_classes import CountingEnv
        >>> env = TransformedEnv(CountingEnv(batch_size=[2]), TensorDictPrimer(hidden=Unbounded((3,))))
        >>> env.reset()["hidden"].shape
        torch.Size([2, 3])
    """

    def __init__(
        self,
        primers: Mapping[Any, TensorSpec] | Composite | None = None,
        random: bool = False,
        default_value: Any = None,
        reset_key: NestedKey | None = None,
        expand_specs: bool | None = None,
        single_default_value: bool = False,
        **kwargs: TensorSpec,
    ) -> None:
        super().__init__()
        if primers is not None and kwargs:
            raise ValueError(f"primers: expected them or keyword arguments, got both ({sorted(kwargs)}).")
        self.primers = primers if isinstance(primers, Composite) else Composite(primers or kwargs)
        self.random = bool(random)
        self.default_value = 0.0 if default_value is None else default_value
        self.reset_key = None if reset_key is None else unravel(reset_key)
        self.expand_specs = expand_specs
        self.single_default_value = single_default_value
        self._check(default_value)
        values = self.default_value.values() if isinstance(self.default_value, dict) else [self.default_value]
        self.resets_by_mask = not self.random and not any(map(callable, values))

    def _check(self, default_value: Any) -> None:
        if self.random and default_value is not None:
            raise ValueError("default_value: expected None with random=True, which draws values. Drop one.")
        if self.single_default_value and not callable(default_value):
            raise ValueError(
                f"default_value: expected a function with single_default_value=True, got {default_value!r}. "
                "Pass a function from reset= to a TensorDict."
            )
        keys = set(self._keys)
        if isinstance(default_value, Mapping):
            self.default_value = {unravel(key): value for key, value in default_value.items()}
            if self.default_value.keys() != keys:
                raise ValueError(
                    f"default_value: expected one for each primer ({key_str(keys)}), got them for "
                    f"{key_str(self.default_value)}. Give each key one."
                )

    @property
    def _keys(self) -> list[NestedKey]:
        return [unravel(key) for key in self.primers.keys(True, True)]

    def _placed(self, batch: torch.Size) -> dict[NestedKey, TensorSpec]:
        """The specs of the entries of a batch."""
        name = f"specs{tuple(batch)}"
        return self._remember(name, lambda: {key: self.placed(key, batch) for key in self._keys})

    def placed(self, key: NestedKey, batch: torch.Size) -> TensorSpec:
        """The spec of an entry of a batch."""
        spec = self.primers[key]
        has_batch = spec.shape[: len(batch)] == batch
        is_placed = bool(batch) and self.primers.shape == batch
        if (self.expand_specs and not is_placed) or (self.expand_specs is None and not has_batch):
            return cast(TensorSpec, spec.expand(*batch, *spec.shape))
        if not has_batch:
            raise ValueError(
                f"TensorDictPrimer: expected a spec for {key!r} that begins with the batch size "
                f"{list(batch)} (expand_specs=False), got {spec}. Pass expand_specs=True."
            )
        return cast(TensorSpec, spec)

    # Data -------------------------------------------------------------------------------------

    _reads_root = True

    def _change(self, kind: Any, root: Columns, out: Columns) -> None:
        for key in self._remember("keys", lambda: self._keys):
            if out.get(key, None) is None:
                out[key] = self._carried(root, key)

    def _begin(self, kind: Any, given: Columns, fresh: Columns) -> None:
        specs = self._placed(kind.batch)
        if self.single_default_value:
            fresh.update(self._at_once(kind, given, specs))
            return
        for key, spec in specs.items():
            value = self._value(key, spec)
            value = kind.whole(value.detach().to(kind.device)) if isinstance(value, torch.Tensor) else value
            fresh[key] = value if self.reset_key is None else kept(given, self.reset_key, key, value)

    def _value(self, key: NestedKey, spec: TensorSpec) -> Any:
        """The first value of an entry, for the whole batch."""
        if self.random:
            return spec.rand()
        default = self.default_value
        default = default[key] if isinstance(default, dict) else default
        value = default() if callable(default) else default
        if isinstance(spec, NonTensor):
            return spec.zero() if isinstance(value, float) and value == 0 else value
        if not isinstance(value, torch.Tensor) or (value.ndim == 0 and not callable(default)):
            return torch.full_like(spec.zero(), value)
        try:
            value = value.expand(spec.shape) if -1 not in spec.shape else value
        except RuntimeError as error:
            raise ValueError(
                f"default_value: expected a tensor that broadcasts to {list(spec.shape)} for {key!r}, got "
                f"shape {list(value.shape)}. Return one of the primer's shape."
            ) from error
        spec.assert_is_in(value, key)
        return value.clone()

    def _at_once(self, kind: Any, given: Columns, specs: dict[NestedKey, TensorSpec]) -> dict[Any, Any]:
        """First values of all entries, by one call."""
        batch, mask = kind.batch, given.get(self.reset_key or self._groups[0].reset, None)
        device = kind.device or next((spec.device for spec in specs.values()), None)
        rows = torch.ones(batch, dtype=torch.bool, device=device) if mask is None else mask.reshape(*batch, -1).any(-1)
        make = cast(Callable[..., TensorDictBase], self.default_value)
        parameters = inspect.signature(make).parameters.values()
        takes_rows = any(p.name == "reset" or p.kind is p.VAR_KEYWORD for p in parameters)
        made = make(reset=rows) if takes_rows else make()
        missing = [key for key in specs if made.get(key, None) is None]
        if missing:
            raise ValueError(f"default_value: expected it to return all primers, got none for {key_str(missing)}.")
        made = made.select(*specs)
        if made.batch_size != batch:
            values = Composite(specs, shape=batch, device=kind.device).zero()
            values[rows] = made
            made = values
        for key, spec in specs.items():
            spec.assert_is_in(made.get(key), key)
        return {key: made.get(key) for key in specs}

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Write first values into data of any batch size."""
        return self._reset(tensordict.empty(), tensordict)

    # Arrays -----------------------------------------------------------------------------------

    def on_arrays(self, env: ArrayEnv) -> ArrayTransform:
        """The form of this transform for steps on NumPy arrays; see :meth:`Transform.on_arrays`."""
        if self.single_default_value or self.reset_key is not None:
            raise NotNative("TensorDictPrimer has a reset_key, or one default value for all")
        specs = self._placed(torch.Size(env.batch))
        entries = entries_of(self.transform_observation_spec(self.primers.empty().expand(env.batch)), len(env.batch))
        return self._on_rows(env, entries=entries, reads=list(specs))

    # Specs ------------------------------------------------------------------------------------

    def transform_observation_spec(self, observation_spec: Composite) -> Composite:
        """Announce the entries."""
        observation_spec = observation_spec.clone()
        for key, spec in self._placed(observation_spec.shape).items():
            observation_spec.set(key, spec.clone())
        return observation_spec

    def transform_state_spec(self, state_spec: Composite) -> Composite:
        """A step reads the entries."""
        return self.transform_observation_spec(state_spec)

    def __repr__(self) -> str:
        return f"TensorDictPrimer({key_str(self._keys)})"


def as_primer(primer: Any) -> TensorDictPrimer:
    """A primer of this library: ``primer`` itself, or what one of TorchRL announces.

    Raises:
        SpecError: TorchRL's announces an entry whose spec has no counterpart here.
    """
    if "TensorDictPrimer" not in kind_in("torchrl", primer):
        return cast(TensorDictPrimer, primer)
    default = primer.default_value
    return TensorDictPrimer(
        from_torchrl(primer.primers),
        random=bool(primer.random),
        default_value=None if primer.random else default,
        reset_key=None,
        expand_specs=primer.expand_specs,
        single_default_value=bool(primer.single_default_value),
    )


register_primer(TensorDictPrimer)
