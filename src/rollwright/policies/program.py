"""Policies on tensors: the steps of a graph, and random actions."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import torch
from tensordict.nn import InteractionType
from torch import Tensor, nn

from rollwright._keys import NestedKey, as_tuple, unravel
from rollwright.data import specs
from rollwright.errors import NotNative
from rollwright.modules import RandomPolicy
from rollwright.modules.random_policy import missing_batch
from rollwright.policies.base import TensorPolicy, WatchedPolicy, array_of
from rollwright.policies.draws.built import Built
from rollwright.policies.nodes import Ask, Own, Step, Values
from rollwright.policies.traced.node import settled
from rollwright.policies.walk import Walk


class Program(WatchedPolicy):
    """A graph of TensorDict modules as a list of steps over one list of values.

    Args:
        policy: the graph.
        exploration_type: how distributions give a value.
        batch_shape: of the entries.
        available: entries of the root.

    Raises:
        NotNative: the graph cannot be taken apart.
    """

    def __init__(
        self,
        policy: Any,
        exploration_type: InteractionType,
        batch_shape: tuple[int, ...],
        available: Collection[NestedKey],
    ) -> None:
        walk = Walk(exploration_type, batch_shape, available)
        walk.run(policy)
        super().__init__(walk.watch, batch_shape)
        self.policy = policy
        self.exploration_type = exploration_type
        self.nodes = walk.nodes
        self.in_keys, self.kept = list(walk.inputs), walk.kept
        self.out_keys = list(walk.written)
        self.finite_keys = [key for key in walk.checked if key in walk.written]
        self.in_slots = list(walk.inputs.values())
        self.out_slots = list(walk.written.values())
        self.blank: Values = [None] * walk.size
        self._settled = False
        self._arrange([node.checked_step() for node in self.nodes])

    def _arrange(self, steps: list[Step]) -> None:
        """Take over what follows from the nodes, with the steps that they are run by."""
        self._steps = steps
        whole = [f"{node.label} called whole ({node.why})" for node in self.nodes if node.why]
        built = [
            f"{node.label}, built at each step (register_distribution takes functions in its place)"
            for node in self.nodes
            if isinstance(node, Ask | Built)
        ]
        calls = f"{counted(sum(node.calls for node in self.nodes), 'call')} on tensors"
        self.how = ", and ".join([calls, *whole, *built])
        self.varies = not all(node.known for node in self.nodes)
        shared = {slot for node in self.nodes if isinstance(node, Own) for slot in node.writes}
        self._results = [(slot, slot in shared) for slot in self.out_slots]
        # The steps but for copies.
        self._apart = [step for node, step in zip(self.nodes, steps, strict=True) if not isinstance(node, Own)]
        # Inference mode is cheaper than no_grad(), in which policies run: by an eighth, on small tensors.
        transient = all(node.transient for node in self.nodes)
        self._mode: AbstractContextManager[Any] = torch.inference_mode() if transient else nullcontext()

    def settle(self, *inputs: Tensor) -> Program:
        """Itself, once it has taken a first step, in which modules are taken apart."""
        if not self._settled:
            self.tensors(*inputs)
        return self

    def tensors(self, *inputs: Tensor) -> Sequence[Tensor]:
        """The steps, one after another."""
        values = self.values(*inputs)
        outputs = [values[slot] for slot in self.out_slots]
        if not self._shapes_seen:
            self._check_shapes(outputs)
            if not self._settled:
                self._settled = True
                self.nodes = settled(self.nodes, self.out_slots)
                self._arrange([node.step() for node in self.nodes])
        return outputs

    def __call__(self, *inputs: np.ndarray) -> Sequence[np.ndarray]:
        """The steps; what they did not give memory of its own is copied as arrays, far cheaper than tensors."""
        if not self._settled or not self._shapes_seen:
            return super().__call__(*inputs)
        values = self.blank.copy()
        with self._mode:
            for slot, value in zip(self.in_slots, inputs, strict=True):
                values[slot] = torch.from_numpy(value)
            for step in self._apart:
                step(values)
        try:
            return [
                array_of(values[slot]).copy() if shared else values[slot].numpy()  # has memory of its own
                for slot, shared in self._results
            ]
        except TypeError as error:  # bfloat16, as a rule
            raise NotNative(f"NumPy has no such output: {error}") from error

    def values(self, *inputs: Tensor) -> Values:
        """All values of one call, by slot."""
        values = self.blank.copy()
        for slot, value in zip(self.in_slots, inputs, strict=True):
            values[slot] = value
        for step in self._steps:
            step(values)
        return values


class RandomActions(TensorPolicy):
    """Actions drawn from their specs, in the order of the plain path.

    Args:
        policy: its spec is read once.
        batch_shape: of the entries.

    Raises:
        NotNative: a spec holds objects, or parts of several shapes.
    """

    def __init__(self, policy: RandomPolicy, batch_shape: tuple[int, ...]) -> None:
        spec = policy.action_spec
        if spec is None:
            raise NotNative("the random policy has no spec yet")
        batch = torch.Size(batch_shape)
        if isinstance(spec, specs.Composite):
            expanded = spec if spec.shape == batch else spec.expand(batch)
            draws = [(unravel(key), leaf, torch.Size(())) for key, leaf in _leaves(expanded)]
        else:
            draws = [(policy.action_key, spec, missing_batch(spec, batch))]
        for key, leaf, _ in draws:
            if type(leaf) not in _DRAWN:
                raise NotNative(f"the spec of {key!r} is a {type(leaf).__name__}")
            if leaf.device is not None and leaf.device.type != "cpu":
                raise NotNative(f"the spec of {key!r} is on {leaf.device}")
        self.in_keys: list[NestedKey] = []
        self.out_keys = [key for key, _, _ in draws]
        self.finite_keys: list[NestedKey] = []
        self.how = f"{counted(len(draws), 'draw')} from specs"
        self._policy, self._spec = policy, spec
        self.varies = False
        self._draws = [(leaf.rand, shape) for _, leaf, shape in draws]

    def start(self, steps: int) -> None:
        """Prepare a rollout of ``steps`` calls."""
        if self._policy.action_spec is not self._spec:
            raise NotNative("the policy has changed (RandomPolicy)")

    def tensors(self, *inputs: Tensor) -> Sequence[Tensor]:
        """One draw per action."""
        return [draw(shape) for draw, shape in self._draws]


_DRAWN = (
    specs.Binary,
    specs.Bounded,
    specs.Categorical,
    specs.MultiCategorical,
    specs.MultiOneHot,
    specs.OneHot,
    specs.Unbounded,
)


def _leaves(spec: specs.Composite, place: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """The specs of single entries, in the order in which a Composite samples them."""
    for name, part in spec.items():
        path = (*place, *as_tuple(name))
        if type(part) is specs.Composite:
            yield from _leaves(part, path)
        elif part is not None:
            yield path, part


def parameters_of(policy: Any) -> list[Tensor]:
    """Parameters and buffers of a policy that is a module."""
    return [*policy.parameters(), *policy.buffers()] if isinstance(policy, nn.Module) else []


def counted(count: int, noun: str) -> str:
    """A number and its noun.

    >>> counted(1, "call"), counted(2, "call")
    ('1 call', '2 calls')
    """
    return f"{count} {noun}{'' if count == 1 else 's'}"
