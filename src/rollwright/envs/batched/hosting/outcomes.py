"""TensorDicts that are sent to environments in other processes, and received from them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import torch
from tensordict import LazyStackedTensorDict, TensorDictBase, is_non_tensor, is_tensor_collection

from rollwright._keys import NestedKey, as_tuple, unravel
from rollwright._processes.channel import ByValue
from rollwright.data.specs import Composite, NonTensor, StackedComposite
from rollwright.envs.base import EnvBase
from rollwright.envs.batched.hosting.messages import AHEAD, OutcomeStructure, Reply
from rollwright.envs.batched.hosting.processes import EnvProcesses
from rollwright.envs.batched.hosting.shared_rows import SharedRows
from rollwright.envs.batched.hosting.td_rows import Nests, dense_leaves, nested

Shapes = dict[NestedKey, tuple[tuple[int, ...], torch.dtype]]


def shareable(specs: Iterable[Composite]) -> Shapes:
    """The entries of stacked specs that have one shape and dtype in all environments."""
    found: Shapes = {}

    def walk(spec: Composite, above: tuple[str, ...]) -> None:
        if isinstance(spec, StackedComposite):
            return
        for name, leaf in spec.items():
            key = (*above, str(name))
            if isinstance(leaf, Composite):
                walk(leaf, key)
            elif leaf is None or leaf.dtype is None or isinstance(leaf, NonTensor):
                continue
            elif -1 not in leaf.shape:
                found[unravel(key)] = tuple(leaf.shape), leaf.dtype

    for spec in specs:
        walk(spec, ())
    return found


def overwritten(td: TensorDictBase, other: TensorDictBase) -> TensorDictBase:
    """``td`` with the values that ``other`` has of its entries."""
    if isinstance(td, LazyStackedTensorDict) and not is_non_tensor(td):
        for one, another in zip(td.tensordicts, other.unbind(td.stack_dim), strict=True):
            overwritten(one, another)
        return td
    for key in list(td.keys()):
        value, new = td.get(key), other.get(key, None)
        if new is None:
            continue
        td.set(key, overwritten(value, new) if is_tensor_collection(value) and not is_non_tensor(value) else new)
    return td


class Sent(NamedTuple):
    """Data written for environments to read; see :class:`~rollwright.envs.batched.hosting.messages.StepRows`."""

    layout: int
    nests: Nests
    rest: list[TensorDictBase] | None

    def rest_of(self, rows: Iterable[int]) -> ByValue | None:
        """What has no place in shared memory."""
        return None if self.rest is None else ByValue({row: self.rest[row] for row in rows})


def send_rows(processes: EnvProcesses, td: TensorDictBase) -> Sent:
    """Write the tensors of ``td``, ``[rows, *]``, where environments find them."""
    leaves, nests, complete = dense_leaves(td)
    number, shared = processes.inputs(tuple((key, tuple(value.shape), value.dtype) for key, value in leaves.items()))
    for key, value in leaves.items():
        shared.tensors[key].copy_(value.detach())
    rest = None if complete else [row.detach() for row in td.exclude(*leaves).unbind(0)]
    return Sent(number, {path: size[1:] for path, size in nests.items()}, rest)


class Outcomes:
    """Return values of environments, in shared rows and beside them.

    Args:
        shared: rows that the processes write.
        structures: what outcomes consist of, by call and row.
        default: entries of a step, where no environment has reported any.
        batch_size: of each environment.
    """

    def __init__(
        self,
        shared: SharedRows,
        structures: Mapping[tuple[str, int], OutcomeStructure],
        default: OutcomeStructure,
        batch_size: torch.Size,
    ) -> None:
        self.shared = shared
        self._structures = structures
        self._default = default
        self._batch_size = batch_size

    @staticmethod
    def beside(replies: Iterable[Reply]) -> dict[int, TensorDictBase]:
        """By row: what is not in shared rows."""
        rest: dict[int, TensorDictBase] = {}
        for reply in replies:
            if reply.rest is not None:
                rest.update(reply.rest.value)
        return rest

    def common_form(self, call: str, rows: Iterable[int]) -> OutcomeStructure | None:
        """The form of all ``rows``; None where they differ."""
        structures = [self._structures.get((call, row)) for row in rows]
        known = [form for form in structures if form is not None]
        if not known:
            return self._default
        return known[0] if all(form == known[0] for form in known) else None

    def dense(self, form: OutcomeStructure, num_rows: int) -> TensorDictBase:
        """All rows as one TensorDict of new tensors."""
        leaves = {key: self.shared.tensors[key].clone() for key in form.keys}
        nests = {path: (num_rows, *size) for path, size in form.nests.items()}
        return nested(leaves, nests, (num_rows, *self._batch_size))

    def row(self, call: str, row: int, rest: dict[int, TensorDictBase]) -> TensorDictBase:
        """One row as a TensorDict of new tensors."""
        form = self._structures.get((call, row), self._default)
        td = nested({key: self.shared.tensors[key][row].clone() for key in form.keys}, form.nests, self._batch_size)
        beside: Any = rest.get(row)
        if beside is None:
            return td
        return td.update(beside) if form.keys else beside  # a lazy stack cannot be read as a whole


def lay_out_outcomes(env: EnvBase, processes: EnvProcesses, *, ahead: bool = False) -> Outcomes:
    """Give the outcomes of a batch of environments their places in shared memory.

    Args:
        env: the batch, whose specs list what there is.
        processes: that host the environments.
        ahead: whether first values of trajectories have places of their own, below ``AHEAD``.
    """
    entries = shareable([env.full_observation_spec, env.full_state_spec, env.full_reward_spec, env.full_done_spec])
    returned = dict.fromkeys([*env.observation_keys, *env.reward_keys, *env.done_keys])
    form = OutcomeStructure(tuple(key for key in returned if key in entries), {})
    if ahead:
        entries.update({(AHEAD, *as_tuple(key)): entries[key] for key in env.observation_keys if key in entries})
    return Outcomes(processes.lay_outcomes(entries), processes.structures, form, env.batch_size[1:])
