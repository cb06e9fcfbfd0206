"""TensorDict modules that know the specs of what they write, and can project their outputs onto them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

from tensordict import TensorDictBase, is_tensor_collection
from tensordict.nn import (
    ProbabilisticTensorDictModule,
    ProbabilisticTensorDictSequential,
    TensorDictModule,
    TensorDictSequential,
)
from torch import nn

from rollwright._foreign import is_torchrl_spec
from rollwright._keys import NestedKey, unravel
from rollwright.data.specs import Composite, TensorSpec
from rollwright.data.specs.conversion import from_torchrl


def own_spec(spec: Any) -> TensorSpec | None:
    """A spec as one of ours; TorchRL's are converted.

    Raises:
        TypeError: it is no spec.
    """
    if is_torchrl_spec(spec):
        spec = from_torchrl(spec)
    if spec is not None and not isinstance(spec, TensorSpec):
        raise TypeError(f"spec: expected a TensorSpec or None, got {type(spec).__name__}. Pass env.action_spec.")
    return spec


def specs_of(spec: Any, out_keys: Sequence[NestedKey]) -> Composite:
    """The specs of a module's outputs.

    Args:
        spec: of the only output, or a Composite of some of them.
        out_keys: the outputs.

    Raises:
        TypeError: it is no spec.
        RuntimeError: there are several outputs and it is of one; or it names what is no output.
    """
    own = own_spec(spec)
    if own is None:
        return Composite()
    if not isinstance(own, Composite):
        if len(out_keys) > 1:
            raise RuntimeError(
                f"spec: expected a Composite for the outputs {list(out_keys)}, got a {type(own).__name__}. Pass "
                f"Composite({{{out_keys[0]!r}: spec}})."
            )
        return Composite({out_keys[0]: own})
    unknown = {unravel(key) for key in own.keys(True, True)} - {unravel(key) for key in out_keys}
    if unknown:
        names = sorted(map(str, unknown))
        raise RuntimeError(f"spec: expected specs of {list(out_keys)}, also got {names}.")
    return own.clone()


def project_outputs(module: Any, inputs: Any, result: Any) -> Any:
    """A forward hook: bring each output of a module into its spec."""
    known = {unravel(key): spec for key, spec in module.spec.leaves().items()}
    if is_tensor_collection(result):
        for key, spec in known.items():
            value = result.get(key, None)
            if value is not None:
                result.set(key, spec.project(value))
        return None
    several = isinstance(result, tuple)  # the module was called on tensors
    pairs = zip(module.out_keys, result if several else (result,), strict=True)
    values = tuple(known[unravel(key)].project(value) if unravel(key) in known else value for key, value in pairs)
    return values if several else values[0]


class _WithSpec(nn.Module):
    """What modules with specs of their outputs have in common."""

    _spec: Composite

    def register_spec(self, safe: bool, spec: Any) -> None:
        """Set the specs of the outputs, and whether outputs are projected onto them.

        Raises:
            RuntimeError: ``safe`` without a spec.
        """
        self._spec, self.safe = specs_of(spec, cast(Any, self).out_keys), safe
        if safe:
            if not list(self._spec.leaves()):
                raise RuntimeError("spec: safe=True needs the spec onto which outputs are projected. Pass spec=.")
            self.register_forward_hook(project_outputs)

    @property
    def spec(self) -> Composite:
        """Specs of the outputs that have one."""
        return self._spec

    @spec.setter
    def spec(self, spec: Composite) -> None:
        if not isinstance(spec, Composite):
            raise RuntimeError(f"spec: expected a Composite, got {type(spec).__name__}. Pass Composite({{key: spec}}).")
        self._spec = spec

    def random(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Write a random value of the first output's spec."""
        key = cast(Any, self).out_keys[0]
        return tensordict.set(key, self.spec[key].rand(tensordict.batch_size))

    random_sample = random


class SafeModule(TensorDictModule, _WithSpec):
    """A ``TensorDictModule`` that knows the specs of its outputs.

    Args:
        module: called on the entries ``in_keys``.
        in_keys: entries that it reads.
        out_keys: entries that it writes.
        spec: of the only output, or a Composite.
        safe: project outputs onto their specs.
        inplace: see ``TensorDictModule``.

    Raises:
        TypeError: ``spec`` is no spec.
        RuntimeError: ``spec`` is of one output and there are several; or ``safe`` without a spec.

    Example:
        >>> import torch
        >>> from rollwright.data import Bounded
        >>> module = SafeModule(nn.Identity(), ["x"], ["action"], spec=Bounded(-1, 1, shape=(2,)), safe=True)
        >>> module(x=torch.tensor([0.5, 3.0]))
        tensor([0.5000, 1.0000])
    """

    def __init__(
        self, module: Any, in_keys: Any, out_keys: Any, spec: Any = None, safe: bool = False, inplace: bool | str = True
    ) -> None:
        super().__init__(module, in_keys, out_keys, inplace=inplace)
        self.register_spec(safe, spec)


class SafeProbabilisticModule(ProbabilisticTensorDictModule, _WithSpec):
    """A ``ProbabilisticTensorDictModule`` that knows the specs of its outputs.

    Args:
        in_keys: parameters of the distribution.
        out_keys: samples.
        spec: of the only sample, or a Composite.
        safe: project samples onto their specs.
        options: of ``ProbabilisticTensorDictModule``.

    Raises:
        TypeError: ``spec`` is no spec.
        RuntimeError: ``spec`` is of one output and there are several; or ``safe`` without a spec.

    Example:
        >>> import torch
        >>> from rollwright.modules import IndependentNormal
        >>> sample = SafeProbabilisticModule(["loc", "scale"], ["action"], distribution_class=IndependentNormal)
        >>> sample(loc=torch.zeros(2), scale=torch.ones(2))
        tensor([0., 0.])
    """

    def __init__(
        self, in_keys: Any, out_keys: Any = None, spec: Any = None, *, safe: bool = False, **options: Any
    ) -> None:
        super().__init__(in_keys, out_keys, **options)
        self.register_spec(safe, spec)


class _Gathered:
    """The specs of the parts of a sequence."""

    @property
    def spec(self) -> Composite:
        """Specs of the outputs that have one."""
        found = Composite()
        for part in cast(Any, self).module:
            if isinstance(spec := getattr(part, "spec", None), Composite):
                found.update(spec)
        return found


class SafeSequential(_Gathered, TensorDictSequential):
    """A ``TensorDictSequential`` that knows the specs of what its parts write.

    Args:
        modules: called one after another.
        options: of ``TensorDictSequential``.

    Example:
        >>> sequence = SafeSequential(SafeModule(nn.Tanh(), ["x"], ["y"]), SafeModule(nn.Tanh(), ["y"], ["action"]))
        >>> sequence.out_keys
        ['y', 'action']
    """


class SafeProbabilisticTensorDictSequential(_Gathered, ProbabilisticTensorDictSequential):
    """A ``ProbabilisticTensorDictSequential`` that knows the specs of what its parts write.

    Args:
        modules: called one after another; the last makes a distribution.
        options: of ``ProbabilisticTensorDictSequential``.
    """
