"""Actors in an environment on arrays: policies on arrays, and policies on TensorDicts."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from tensordict import TensorDict, TensorDictBase

from rollwright._keys import NestedKey, as_tuple, place
from rollwright._memory import in_numpy
from rollwright.collectors.core import Actor
from rollwright.collectors.rollout.paths import stages
from rollwright.collectors.rollout.paths.outputs import entries_or_rows
from rollwright.collectors.rollout.paths.stages import IDS, VERSION
from rollwright.data.entries import unchecked_td
from rollwright.envs.arrays import Entry, Values
from rollwright.envs.base import EnvBase
from rollwright.errors import NotNative
from rollwright.modules.signature import Call
from rollwright.policies import ArrayPolicy, compile_policy
from rollwright.policies.base import TensorPolicy


class FlatActor(Actor):
    """A policy on arrays.

    Args:
        policy: the policy.
        entries: what the current TensorDict holds.
    """

    def __init__(self, policy: ArrayPolicy, entries: Mapping[NestedKey, Entry]) -> None:
        self._policy, self._entries = policy, entries
        self.finite_keys, self.frozen = policy.finite_keys, policy.frozen
        columns = {key: entry for key, entry in entries.items() if entry.column}
        self._in_rows = [(key, columns.get(key)) for key in policy.in_keys]
        self._kept = policy.kept
        self._keys = policy.out_keys

    def start(self, steps: int) -> None:
        """See :meth:`Actor.start`."""
        self._policy.start(steps)
        self.varies = self._policy.varies

    @property
    def how(self) -> str:  # type: ignore[override]
        """See :class:`Actor`; a first call may show it."""
        return f"native: {self._policy.how}"

    def __call__(self, root: Values, ids: NDArray[Any]) -> Values:
        """See :class:`Actor`."""
        if self._kept:
            root = self._with_kept(root)
        inputs = [root[key] if column is None else full(root[key], column) for key, column in self._in_rows]
        outputs = self._policy(*inputs)
        if len(outputs) != len(self._keys):  # those of a module by signature are complete after its first call
            self._keys = self._policy.out_keys
        return dict(zip(self._keys, outputs, strict=True))

    def _with_kept(self, root: Values) -> Values:
        if all(key in root for key in self._kept):
            return root
        return {**{key: value.copy() for key, value in self._kept.items()}, **root}

    def compiled(self, arguments: Mapping[str, Any], root: Values) -> Actor:
        """See :meth:`Actor.compiled`."""
        root = self._with_kept(root)
        example = {key: root[key] if column is None else full(root[key], column) for key, column in self._in_rows}
        return FlatActor(compile_policy(self._policy, arguments=arguments, example=example), self._entries)


class TensorActor(Actor):
    """A policy on tensors.

    Args:
        policy: the policy; one on arrays is given those over the tensors' memory, on the CPU.
    """

    def __init__(self, policy: ArrayPolicy) -> None:
        self._policy, self._kept = policy, policy.kept
        self.finite_keys, self.frozen = policy.finite_keys, policy.frozen
        self._call = policy.tensors if isinstance(policy, TensorPolicy) else self._over_arrays

    def _over_arrays(self, *inputs: torch.Tensor) -> list[torch.Tensor]:
        return [torch.from_numpy(value) for value in self._policy(*[value.numpy() for value in inputs])]

    def start(self, steps: int) -> None:
        """See :meth:`Actor.start`."""
        self._policy.start(steps)
        self.varies = self._policy.varies

    @property
    def how(self) -> str:  # type: ignore[override]
        """See :class:`Actor`; a first call may show it."""
        return f"native: {self._policy.how}"

    def __call__(self, root: Values, ids: NDArray[Any]) -> Values:
        """See :class:`Actor`."""
        outputs = self._call(*self._inputs(root))
        return dict(zip(self._policy.out_keys, outputs, strict=True))

    def _inputs(self, root: Values) -> list[torch.Tensor]:
        if self._kept and not all(key in root for key in self._kept):
            root = {**{key: torch.from_numpy(value.copy()) for key, value in self._kept.items()}, **root}
        return [root[key] for key in self._policy.in_keys]

    def compiled(self, arguments: Mapping[str, Any], root: Values) -> Actor:
        """See :meth:`Actor.compiled`."""
        if any(not value.is_cpu for value in root.values()):
            raise NotNative("its entries are on another device.")
        example = {key: value.numpy() for key, value in zip(self._policy.in_keys, self._inputs(root), strict=True)}
        return TensorActor(compile_policy(self._policy, arguments=arguments, example=example))


class EnvActions(TensorPolicy):
    """Random actions, drawn by an environment's own ``rand_action``, which reads nothing of the root.

    Args:
        env: the environment.
    """

    how = "drawn by the environment"
    varies = False

    def __init__(self, env: EnvBase) -> None:
        self.in_keys: list[NestedKey] = []
        self.out_keys = list(env.action_keys)
        self.finite_keys: list[NestedKey] = []
        self._env, self._batch = env, env.batch_size

    def start(self, steps: int) -> None:
        """See :class:`~rollwright.policies.ArrayPolicy`."""

    def __call__(self, *inputs: NDArray[Any]) -> Sequence[NDArray[Any]]:
        """See :class:`~rollwright.policies.ArrayPolicy`."""
        return [value.numpy() for value in self.tensors()]

    def tensors(self, *inputs: torch.Tensor) -> Sequence[torch.Tensor]:
        """See :class:`~rollwright.policies.base.TensorPolicy`."""
        drawn = self._env.rand_action(TensorDict({}, batch_size=self._batch, device=self._env.device))
        return [drawn.get(key) for key in self.out_keys]


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
        self.forms: dict[NestedKey, tuple[tuple[int, ...], Any]] = {}

    def start(self, steps: int) -> None:
        """See :meth:`Actor.start`."""
        self._actor.start(steps)

    def __call__(self, root: Values, ids: NDArray[Any]) -> Values:
        """See :class:`Actor`."""
        outputs = self._actor(root, ids)
        for key, (shape, dtype) in self.forms.items():
            value = outputs[key]
            outputs[key] = (value.to(dtype) if isinstance(value, torch.Tensor) else value.astype(dtype)).reshape(shape)
        return outputs

    def compiled(self, arguments: Mapping[str, Any], root: Values) -> Actor:
        """See :meth:`Actor.compiled`."""
        raise NotNative("Random actions are not compiled.")


class TensorDictActor(Actor):
    """A policy on TensorDicts, given the current TensorDict as one.

    Args:
        act: of :func:`~rollwright.collectors.rollout.paths.stages.build_act`.
        entries: what the current TensorDict holds: forms of arrays, or keys of tensors.
        rewards: what a step leaves beside them, which no policy sees.
        stale: what the policy wrote in the step before and does not see: it must not repeat it in silence.
        batch: the environment's batch size.
        nests: see :class:`~rollwright.envs.arrays.ArrayEnv`.
        device: of the current TensorDict.
        reads_ids: whether it is to be given the trajectory ids, which roots of arrays do not have.
        why: why the policy is not taken apart.
        read: makes an output of a tensor that it writes.
        compiles: whether it is still to be compiled where that is wanted.
    """

    def __init__(
        self,
        act: stages.Stage,
        entries: Mapping[NestedKey, Any],
        *,
        rewards: Collection[NestedKey],
        stale: Collection[NestedKey],
        batch: tuple[int, ...],
        nests: Mapping[str, tuple[int, ...]],
        device: torch.device | None,
        reads_ids: bool,
        why: str,
        read: Callable[[Any], Any],
        compiles: bool,
    ) -> None:
        self._read, self._compiles = read, compiles
        self._act, self._entries, self._batch = act, entries, torch.Size(batch)
        self._device, self._reads_ids = device, reads_ids
        self._nests = [(name, torch.Size([*batch, *size])) for name, size in nests.items()]
        self.how, self.finite_keys = f"plain, called on a TensorDict: {why}", []
        self._why = why
        self._left_out = {*rewards, *stale}

    def start(self, steps: int) -> None:
        """See :meth:`Actor.start`."""

    def __call__(self, root: Values, ids: NDArray[Any]) -> Values:
        """See :class:`Actor`."""
        nested: dict[str, Any] = {}
        given: dict[NestedKey, torch.Tensor] = {}
        entries, left_out = self._entries, self._left_out
        for key, value in root.items():
            if key in entries:
                given[key] = tensor = (
                    value if type(value) is torch.Tensor else torch.from_numpy(full(value, entries[key]))
                )
            elif key in left_out or as_tuple(key)[0] == "next":
                continue
            else:  # what it wrote, until it writes it again
                tensor = value if type(value) is torch.Tensor else torch.from_numpy(value)
            if type(key) is str:
                nested[key] = tensor
            else:
                place(nested, key, tensor)
        if self._reads_ids:
            place(nested, IDS, torch.from_numpy(np.array(ids)))
        for name, size in self._nests:
            nested[name] = unchecked_td(nested[name], size, device=self._device)
        # All that is in it has been in a TensorDict of this batch size, or comes from the environment.
        current = self._act(unchecked_td(nested, self._batch, device=self._device))
        return {
            key: self._read(value)
            for key, value in entries_or_rows(current)
            if given.get(key) is not value and key not in (IDS, VERSION)
        }

    def compiled(self, arguments: Mapping[str, Any], root: Values) -> Actor:
        """See :meth:`Actor.compiled`."""
        if not self._compiles:
            return self
        raise NotNative(self._why[:1].upper() + self._why[1:] + ".")


class UndecidedActor(Actor):
    """A policy whose first call shows what it takes: on TensorDicts until then, on arrays from then on if it can be.

    Args:
        actor: on TensorDicts.
        decided: the actor to go on with; None: the first call has not been.
    """

    def __init__(self, actor: Actor, decided: Callable[[], Actor | None]) -> None:
        self._actor, self._decided, self._steps = actor, decided, 0
        self._is_decided = False
        self.varies, self.frozen = actor.varies, actor.frozen

    @property
    def how(self) -> str:  # type: ignore[override]
        """That of the actor of now."""
        return self._actor.how

    @property
    def finite_keys(self) -> list[NestedKey]:  # type: ignore[override]
        """Those of the actor of now."""
        return self._actor.finite_keys

    def start(self, steps: int) -> None:
        """See :meth:`Actor.start`."""
        self._steps = steps
        self._actor.start(steps)

    def __call__(self, root: Values, ids: NDArray[Any]) -> Values:
        """See :class:`Actor`."""
        if self._is_decided:
            return self._actor(root, ids)
        outputs = self._actor(root, ids)
        if (actor := self._decided()) is not None:
            self._is_decided = True
            if actor is not self._actor:
                actor.start(self._steps)
                self._actor = actor
        return outputs

    def compiled(self, arguments: Mapping[str, Any], root: Values) -> Actor:
        """See :meth:`Actor.compiled`."""
        return self._actor.compiled(arguments, root)


def full(value: Any, entry: Entry) -> NDArray[Any]:
    """A value in row form as an array of the tensor's shape."""
    return np.array(value, entry.dtype).reshape(entry.shape) if entry.column else value


def as_array(value: Any) -> Any:
    """The array over a tensor's memory; what NumPy does not know, and a list of ragged rows, stay as they are."""
    return value.detach().numpy() if type(value) is torch.Tensor and in_numpy(value.dtype) else value


def as_tensor(value: Any) -> Any:
    """A tensor without its gradient; what is none stays as it is."""
    return value.detach() if type(value) is torch.Tensor and value.requires_grad else value


class OnEntries:
    """A policy on tensors, called on TensorDicts: it reads and writes entries, and no module is called.

    Where that does not give what the modules give, they are called, from that step on.

    Args:
        flat: the policy.
        plain: the same on TensorDicts.
    """

    def __init__(self, flat: TensorPolicy, plain: Call) -> None:
        self._flat, self._plain, self._fits, self._is_proven = flat, plain, True, False

    def __call__(self, td: TensorDictBase) -> TensorDictBase | None:
        """Write the outputs; they have memory of their own."""
        flat = self._flat
        if not self._fits or type(td) is not TensorDict:
            return self._plain(td)
        inputs = [td.get(key, None) for key in flat.in_keys]
        if not all(type(value) is torch.Tensor for value in inputs):
            return self._plain(td)
        numbers = None if self._is_proven else torch.get_rng_state()
        try:
            outputs = flat.tensors(*inputs)
        except NotNative:
            self._fits = False
            if numbers is not None:
                torch.set_rng_state(numbers)
            return self._plain(td)
        self._is_proven = True
        for key, value in zip(flat.out_keys, outputs, strict=True):
            td.set(key, value)
        return td
