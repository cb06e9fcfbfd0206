"""PolicyVersion: the version of the policy's weights, as numbers or UUIDs."""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from typing import Any, Literal

import torch
from tensordict import NonTensorData, NonTensorStack, TensorDictBase

from rollwright.data.specs import Composite, NonTensor, Unbounded
from rollwright.envs.transforms import Transform


class PolicyVersion(Transform):
    """Counts versions of the policy's weights, and writes the current one into what resets and steps return.

    A collector with ``track_policy_version=PolicyVersion(...)`` calls :meth:`increment_version` with each update of
    the weights, and its engine stamps tokens with :attr:`version`.

    Args:
        version_type: ``"int"`` (or ``int``): numbers from 0. ``"uuid"`` (or ``uuid.UUID``): UUIDs, as strings.

    Attributes:
        version: of the weights now.

    Raises:
        ValueError: ``version_type`` is something else.

    Example:
        >>> version = PolicyVersion("int")
        >>> version.version, version.increment_version(), version.version
        (0, 1, 1)
        >>> len(PolicyVersion("uuid").version)
        36
    """

    def __init__(self, version_type: Literal["int", "uuid"] | type = "int") -> None:
        super().__init__()
        if version_type not in ("int", int, "uuid", uuid.UUID):
            raise ValueError(f"version_type: expected 'int' or 'uuid', got {version_type!r}.")
        self.version_type: str = "int" if version_type in ("int", int) else "uuid"
        self.version: int | str = 0 if self.version_type == "int" else str(uuid.uuid4())
        self._first, self._updates = self.version, 0

    def increment_version(self) -> int | str:
        """Begin the next version; returns it."""
        self._updates += 1
        self.version = self.at(self._updates)
        return self.version

    def at(self, updates: int) -> int | str:
        """The version after a number of updates: that number; or a UUID, made of the first one and the number."""
        if isinstance(self._first, int):
            return self._first + updates
        return str(uuid.uuid5(uuid.UUID(self._first), str(updates))) if updates else self._first

    def count(self, updates: int) -> int | str:
        """Go to the version after a number of updates; returns it."""
        self._updates, self.version = updates, self.at(updates)
        return self.version

    def _write(self, td: TensorDictBase) -> TensorDictBase:
        if isinstance(self.version, int):
            value: Any = torch.full(td.batch_size, self.version, dtype=torch.int64, device=td.device)
        elif td.ndim:
            value = NonTensorStack.from_list(_nested(self.version, td.batch_size))
        else:
            value = NonTensorData(self.version)
        td.set("policy_version", value)
        return td

    def _call(self, next_tensordict: TensorDictBase) -> TensorDictBase:
        return self._write(next_tensordict)

    def _reset(self, tensordict: TensorDictBase, tensordict_reset: TensorDictBase) -> TensorDictBase:
        return self._write(tensordict_reset)

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Write the version into data."""
        return self._write(tensordict)

    def transform_observation_spec(self, observation_spec: Composite) -> Composite:
        """Announce the version."""
        spec = observation_spec.clone()
        if self.version_type == "int":
            spec.set("policy_version", Unbounded(spec.shape, dtype=torch.int64, device=spec.device))
        else:
            spec.set("policy_version", NonTensor(spec.shape, example_data="", batched=True))
        return spec

    def get_extra_state(self) -> Any:
        """Part of ``state_dict()``: the version."""
        return {"version": self.version, "first": self._first, "updates": self._updates}

    def set_extra_state(self, state: Any) -> None:
        """Go on from a saved version.

        Raises:
            TypeError, KeyError: it is the state of something else.
        """
        if not isinstance(state, Mapping):
            raise TypeError(f"state: expected that of a PolicyVersion, a dictionary, got {type(state).__name__}.")
        if "version" not in state:
            raise KeyError(f"state: expected 'version' among the entries of a PolicyVersion, got {sorted(state)}.")
        self.version = state["version"]
        self._first, self._updates = state.get("first", self.version), state.get("updates", 0)

    def __repr__(self) -> str:
        return f"PolicyVersion(version={self.version!r})"


def _nested(value: str, size: torch.Size) -> Any:
    return [_nested(value, size[1:]) if len(size) > 1 else value for _ in range(size[0])]
