"""Policies on tensors: the steps of a graph, a module called by signature, and random actions."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import Any

import torch
from tensordict.nn import InteractionType
from torch import Tensor, nn

from rollwright._keys import NestedKey, as_tuple, key_str, unravel
from rollwright.data import specs
from rollwright.errors import NotNative, PolicyError
from rollwright.modules import RandomPolicy
from rollwright.modules.random_policy import missing_batch
from rollwright.modules.signature import SignaturePolicy
from rollwright.policies.base import TensorPolicy
from rollwright.policies.nodes import Ask, Values, as_tensor
from rollwright.policies.walk import Walk
from rollwright.policies.watch import ModuleSnapshot, check_globals, is_special

__all__ = ["CalledModule", "Program", "RandomActions"]


class _WatchedPolicy(TensorPolicy):
    """A policy made of modules, which notices that they have changed, and tests the shapes of its outputs."""

    def __init__(self, watch: ModuleSnapshot, batch_shape: tuple[int, ...]) -> None:
        self.batch_shape = torch.Size(batch_shape)
        self._watch = watch
        self._shapes_seen = False

    def start(self, steps: int) -> None:
        """See :class:`~rollwright.policies.ArrayPolicy`."""
        self._watch.check()
        self._shapes_seen = False

    def _check_shapes(self, values: Sequence[Tensor]) -> None:
        """Test, once a rollout, that outputs begin with the batch size, as entries of a TensorDict must."""
        batch = self.batch_shape
        for key, value in zip(self.out_keys, values, strict=True):
            if value.shape[: len(batch)] != batch:
                raise PolicyError(
                    f"policy: it wrote {key!r} with shape {list(value.shape)}, which must begin with the batch size of "
                    f"the environment, {list(batch)}. Keep the leading dimensions."
                )
        self._shapes_seen = True


class Program(_WatchedPolicy):
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
        self.in_keys = list(walk.inputs)
        self.out_keys = list(walk.written)
        self.finite_keys = [key for key in walk.checked if key in walk.written]
        self.in_slots = list(walk.inputs.values())
        self.out_slots = list(walk.written.values())
        built = [f", and {node.label}, built at each step" for node in walk.nodes if isinstance(node, Ask)]
        self.how = "".join([f"{counted(sum(node.calls for node in walk.nodes), 'call')} on tensors", *built])
        self.varies = not all(node.known for node in walk.nodes)
        self._steps, self._compared = [node.checked_step() for node in walk.nodes], False
        self.blank: Values = [None] * walk.size

    def tensors(self, *inputs: Tensor) -> Sequence[Tensor]:
        """The steps, one after another."""
        values = self.values(*inputs)
        outputs = [values[slot] for slot in self.out_slots]
        if not self._shapes_seen:
            self._check_shapes(outputs)
            if not self._compared:
                self._steps, self._compared = [node.step() for node in self.nodes], True
        return outputs

    def values(self, *inputs: Tensor) -> Values:
        """All values of one call, by slot."""
        values = self.blank.copy()
        for slot, value in zip(self.in_slots, inputs, strict=True):
            values[slot] = value
        for step in self._steps:
            step(values)
        return values


class CalledModule(_WatchedPolicy):
    """A module that takes entries of the environment by name.

    Its further outputs, ``output1`` and so on, are known after the first call.

    Args:
        policy: the module, wrapped by its signature.
        batch_shape: of the entries.
        available: entries of the root.

    Raises:
        NotNative: the wrapper has hooks, or an entry is missing.
    """

    def __init__(self, policy: SignaturePolicy, batch_shape: tuple[int, ...], available: Collection[NestedKey]) -> None:
        check_globals()
        special = is_special(policy)
        if special is not None:
            raise NotNative(special)
        self._names: list[str] = list(policy.in_keys)
        self.in_keys = list(self._names)
        missing = [key for key in self._names if key not in {unravel(key) for key in available}]
        if missing:
            raise NotNative(f"it reads {key_str(missing)}, which is no tensor of the environment")
        super().__init__(ModuleSnapshot(), batch_shape)
        self._watch.add(policy)
        self.policy = policy
        self.call = policy.module
        self.finite_keys: list[NestedKey] = []
        self.how = f"{type(policy.module).__name__} called on tensors"

    @property
    def out_keys(self) -> list[NestedKey]:  # type: ignore[override]
        """The policy's own list, which its first call completes."""
        return [unravel(key) for key in self.policy.out_keys]

    def tensors(self, *inputs: Tensor) -> Sequence[Tensor]:
        """One call of the module, with keyword arguments."""
        policy = self.policy
        outputs = self.call(**dict(zip(self._names, inputs, strict=True)))
        if not isinstance(outputs, tuple):
            outputs = (outputs,)
        for i in range(len(policy.out_keys), len(outputs)):
            policy.out_keys.append(f"output{i}")
        if len(outputs) != len(policy.out_keys):
            raise ValueError(
                f"policy: {type(policy.module).__name__} returned {len(outputs)} outputs after {len(policy.out_keys)} "
                "before. Return the same number at each call."
            )
        owner = type(policy.module).__name__
        # It may return memory that it uses again.
        values = [as_tensor(value, self.batch_shape, owner).detach().clone() for value in outputs]
        if not self._shapes_seen:
            self._check_shapes(values)
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
        """See :class:`~rollwright.policies.ArrayPolicy`."""
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
        else:
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
