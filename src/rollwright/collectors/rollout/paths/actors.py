"""Actors in an environment on arrays: policies on arrays, and policies on TensorDicts."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from tensordict import TensorDict

from rollwright._keys import NestedKey, as_tuple, place
from rollwright._memory import in_numpy
from rollwright.collectors.core import Actor
from rollwright.collectors.rollout.paths import stages
from rollwright.collectors.rollout.paths.outputs import entries_or_rows
from rollwright.collectors.rollout.paths.stages import IDS, VERSION
from rollwright.envs.arrays import Entry, Values
from rollwright.errors import NotNative
from rollwright.policies import ArrayPolicy, compile_policy

__all__ = ["CastActor", "FlatActor", "TensorDictActor", "as_array"]


class FlatActor(Actor):
    """A policy on arrays.

    Args:
        policy: the policy.
        entries: what the current TensorDict holds.
    """

    def __init__(self, policy: ArrayPolicy, entries: Mapping[NestedKey, Entry]) -> None:
        self._policy, self._entries = policy, entries
        self.how, self.finite_keys = f"native: {policy.how}", policy.finite_keys
        self.varies, self.frozen = policy.varies, policy.frozen
        self._in_rows = [(key, entries[key] if entries[key].column else None) for key in policy.in_keys]
        self._keys = policy.out_keys

    def start(self, steps: int) -> None:
        """See :meth:`Actor.start`."""
        self._policy.start(steps)

    def __call__(self, root: Values, ids: NDArray[Any]) -> Values:
        """See :class:`Actor`."""
        outputs = self._policy(*self._inputs(root))
        if len(outputs) != len(self._keys):  # those of a module by signature are complete after its first call
            self._keys = self._policy.out_keys
        return dict(zip(self._keys, outputs, strict=True))

    def _inputs(self, root: Values) -> list[NDArray[Any]]:
        return [root[key] if column is None else full(root[key], column) for key, column in self._in_rows]

    def compiled(self, arguments: Mapping[str, Any], root: Values) -> Actor:
        """See :meth:`Actor.compiled`."""
        example = dict(zip(self._policy.in_keys, self._inputs(root), strict=True))
        return FlatActor(compile_policy(self._policy, arguments=arguments, example=example), self._entries)


class CastActor(Actor):
    """An actor, some of whose outputs are converted.

    Args:
        actor: acts.

    Attributes:
        forms: shape and dtype of the outputs to convert.
    """

    def __init__(self, actor: Actor) -> None:
        self._actor = actor
        self.how, self.finite_keys = actor.how, actor.finite_keys
        self.varies, self.frozen = actor.varies, actor.frozen
        self.forms: dict[NestedKey, tuple[tuple[int, ...], np.dtype[Any]]] = {}

    def start(self, steps: int) -> None:
        """See :meth:`Actor.start`."""
        self._actor.start(steps)

    def __call__(self, root: Values, ids: NDArray[Any]) -> Values:
        """See :class:`Actor`."""
        outputs = self._actor(root, ids)
        for key, (shape, dtype) in self.forms.items():
            outputs[key] = outputs[key].astype(dtype).reshape(shape)
        return outputs

    def compiled(self, arguments: Mapping[str, Any], root: Values) -> Actor:
        """See :meth:`Actor.compiled`."""
        raise NotNative("Random actions are not compiled.")


class TensorDictActor(Actor):
    """A policy on TensorDicts, given the current TensorDict as one.

    Args:
        act: of :func:`~rollwright.collectors.rollout.paths.stages.build_act`.
        entries: what the current TensorDict holds.
        rewards: what a step leaves beside them, which no policy sees.
        batch: the environment's batch size.
        device: of the current TensorDict.
        reads_ids: whether there are trajectory ids.
        why: why the policy does not run on arrays.
    """

    def __init__(
        self,
        act: stages.Stage,
        entries: Mapping[NestedKey, Entry],
        *,
        rewards: Collection[NestedKey],
        batch: tuple[int, ...],
        device: torch.device | None,
        reads_ids: bool,
        why: str,
    ) -> None:
        self._act, self._entries, self._batch = act, entries, torch.Size(batch)
        self._device, self._reads_ids = device, reads_ids
        self.how, self.finite_keys = f"plain, called on a TensorDict of the arrays: {why}", []
        self._why = why
        self._rewards = set(rewards)

    def start(self, steps: int) -> None:
        """See :meth:`Actor.start`."""

    def __call__(self, root: Values, ids: NDArray[Any]) -> Values:
        """See :class:`Actor`."""
        nested: dict[str, Any] = {}
        given: dict[NestedKey, torch.Tensor] = {}
        for key, value in root.items():
            if key in self._entries:
                given[key] = tensor = torch.from_numpy(full(value, self._entries[key]))
                place(nested, key, tensor)
            elif key not in self._rewards and as_tuple(key)[0] != "next":  # what it wrote, until it writes it again
                place(nested, key, torch.from_numpy(value))
        if self._reads_ids:
            place(nested, IDS, torch.from_numpy(np.array(ids)))
        current = self._act(TensorDict(nested, batch_size=self._batch, device=self._device))
        return {
            key: as_array(value)
            for key, value in entries_or_rows(current)
            if given.get(key) is not value and key not in (IDS, VERSION)
        }

    def compiled(self, arguments: Mapping[str, Any], root: Values) -> Actor:
        """See :meth:`Actor.compiled`."""
        raise NotNative(self._why[:1].upper() + self._why[1:] + ".")


def full(value: Any, entry: Entry) -> NDArray[Any]:
    """A value in row form as an array of the tensor's shape."""
    return np.array(value, entry.dtype).reshape(entry.shape) if entry.column else value


def as_array(value: Any) -> Any:
    """The array over a tensor's memory; what NumPy does not know, and a list of ragged rows, stay as they are."""
    return value.detach().numpy() if type(value) is torch.Tensor and in_numpy(value.dtype) else value
