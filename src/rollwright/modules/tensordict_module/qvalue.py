"""QValueModule: picks the action of greatest value."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from tensordict import TensorDictBase
from tensordict.nn import TensorDictModuleBase, dispatch
from torch import Tensor

from rollwright._keys import NestedKey, as_tuple, unravel
from rollwright.data.specs import Composite, MultiOneHot, TensorSpec
from rollwright.modules.tensordict_module.safe import own_spec, project_outputs

_SPACES = {"OneHot": "one_hot", "MultiOneHot": "mult_one_hot", "Binary": "binary", "Categorical": "categorical"}
_NAMES = {
    "one_hot": "one_hot",
    "one-hot": "one_hot",
    "mult_one_hot": "mult_one_hot",
    "mult-one-hot": "mult_one_hot",
    "multi_one_hot": "mult_one_hot",
    "binary": "binary",
    "categorical": "categorical",
}


def action_space_of(action_space: str | None, spec: Any) -> tuple[str, Any]:
    """The name of an action space, and the spec as one of ours.

    Args:
        action_space: ``"one_hot"``, ``"mult_one_hot"``, ``"categorical"``; None: by the spec.
        spec: of the action, or a Composite with it; or None.

    Raises:
        ValueError: neither is given, they differ, or there is no such space.
        KeyError: a Composite without an action.
    """
    own = own_spec(spec)
    leaf = _action_of(own)
    by_spec = None if leaf is None else _SPACES.get(type(leaf).__name__)
    by_name = None if action_space is None else _NAMES.get(action_space)
    if by_name is None and by_spec is None:
        raise ValueError(
            f"action_space: expected one of {sorted(set(_NAMES.values()))}, or spec= of a discrete action, got "
            f"action_space={action_space!r} and spec={spec}."
        )
    if by_name is not None and by_spec is not None and by_name != by_spec:
        raise ValueError(f"action_space: expected that of the spec, {by_spec!r}, got {by_name!r}. Leave one out.")
    return by_name or by_spec or "", own


def _action_of(spec: TensorSpec | None) -> TensorSpec | None:
    """The spec of the action alone, of a Composite or of itself."""
    if not isinstance(spec, Composite):
        return spec
    keys = list(spec.keys(True, True))
    found = [key for key in keys if as_tuple(key)[-1] == "action"]
    found.sort(key=lambda key: key != "action")
    if not found:
        raise KeyError(f"spec: expected a Composite with 'action', got {keys}. Pass env.action_spec.")
    leaf: TensorSpec = spec[found[0]]
    return leaf


def _one_hot(values: Tensor) -> Tensor:
    return (values == values.max(-1, True)[0]).to(torch.long)


def best_action(space: str, values: Tensor, var_nums: Any = None) -> tuple[Tensor, Tensor]:
    """The action of greatest value, and its value ``[*batch, 1]``.

    Args:
        space: of the action.
        values: ``[*batch, n]``.
        var_nums: numbers of outcomes of each action, for ``"mult_one_hot"``.

    Returns:
        int64 ``[*batch]`` for ``"categorical"``, else ``[*batch, n]``.
    """
    if space == "categorical":
        index = values.argmax(-1)
        return index, values.gather(-1, index.unsqueeze(-1))
    if space == "one_hot":
        action = _one_hot(values)
    else:
        action = torch.cat([_one_hot(part) for part in values.split(var_nums, -1)], -1)
    return action, (action * values).sum(-1, True)


class QValueModule(TensorDictModuleBase):
    """Picks the action of greatest value.

    Args:
        action_space: ``"one_hot"``, ``"mult_one_hot"`` or ``"categorical"``; None: that of ``spec``.
        action_value_key: values ``[*batch, n]``; default ``"action_value"``.
        action_mask_key: bool ``[*batch, n]``, actions that are allowed.
        out_keys: of the action, the values, and the value of the action ``[*batch, 1]``.
        var_nums: numbers of outcomes of each action, for ``"mult_one_hot"``; default: those of ``spec``.
        spec: of the action, or a Composite.
        safe: project the action onto its spec.
        strict_shape: refuse actions of another shape than the spec's; ``"auto"``: reshape them; False: leave them.

    Raises:
        ValueError: no action space is given, or ``"mult_one_hot"`` without ``var_nums`` and ``spec``.
        RuntimeError: ``out_keys`` without ``action_value_key``, or ``safe`` without a spec.

    Example:
        >>> module = QValueModule("one_hot")
        >>> action, values, chosen = module(action_value=torch.tensor([1.0, 3.0]))
        >>> action, chosen
        (tensor([0, 1]), tensor([3.]))
    """

    in_keys: Any
    out_keys: Any

    def __init__(
        self,
        action_space: str | None = None,
        action_value_key: NestedKey | None = None,
        action_mask_key: NestedKey | None = None,
        out_keys: Sequence[NestedKey] | None = None,
        var_nums: int | Sequence[int] | None = None,
        spec: Any = None,
        safe: bool = False,
        strict_shape: Any = True,
    ) -> None:
        super().__init__()
        self.action_space, own = action_space_of(action_space, spec)
        if self.action_space == "binary":
            raise ValueError("action_space: values of binary actions have no best. Use 'one_hot' or 'categorical'.")
        if self.action_space == "mult_one_hot" and var_nums is None:
            leaf = _action_of(own)
            if not isinstance(leaf, MultiOneHot):
                raise ValueError(
                    "spec: 'mult_one_hot' needs the numbers of outcomes of each action. Pass env.action_spec, or to a "
                    "QValueModule var_nums=."
                )
            var_nums = list(leaf.nvec)
        self.var_nums: Any = var_nums
        self.strict_shape, self.safe = strict_shape, safe
        self.action_mask_key = action_mask_key
        values: NestedKey = "action_value" if action_value_key is None else action_value_key
        self.in_keys = [values, *([] if action_mask_key is None else [action_mask_key])]
        if out_keys is not None and values not in out_keys:
            raise RuntimeError(f"out_keys: expected the action_value_key {values!r} among them, got {list(out_keys)}.")
        self.out_keys = ["action", values, "chosen_action_value"] if out_keys is None else list(out_keys)
        if own is None:
            self._spec = Composite()
        else:
            self._spec = own if isinstance(own, Composite) else Composite({self.out_keys[0]: own})
        # Of a spec by itself, all dimensions but those of one action are a batch.
        self._is_single = own is not None and not isinstance(own, Composite) and self.action_space != "categorical"
        if safe:
            if not list(self._spec.leaves()):
                raise RuntimeError("spec: safe=True needs the spec onto which the action is projected. Pass spec=.")
            self.register_forward_hook(project_outputs)

    @property
    def action_value_key(self) -> NestedKey:
        """The entry with the values."""
        key: NestedKey = self.in_keys[0]
        return key

    @property
    def spec(self) -> Composite:
        """Specs of the outputs that have one."""
        return self._spec

    @dispatch(auto_batch_size=False)  # type: ignore[untyped-decorator, unused-ignore]
    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Write the action, the values and the value of the action.

        Raises:
            KeyError: the values or the mask are missing.
            RuntimeError: the action has another shape than its spec.
        """
        found = [tensordict.get(key, None) for key in self.in_keys]
        for key, entry in zip(self.in_keys, found, strict=True):
            if entry is None:
                raise KeyError(f"{key!r} is missing, of {sorted(map(str, tensordict.keys(True, True)))}.")
        return tensordict.update(dict(zip(self.out_keys, self.on_tensors(*found), strict=False)))

    def on_tensors(self, values: Tensor, mask: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """The action, the values (masked ones least), and the value of the action."""
        if mask is not None:
            values = torch.where(mask, values, torch.finfo(values.dtype).min)
        action, chosen = best_action(self.action_space, values, self.var_nums)
        return self._in_shape(action, values), values, chosen

    def _in_shape(self, action: Tensor, values: Tensor) -> Tensor:
        key = unravel(self.out_keys[0])
        if self.strict_shape is False or key not in self._spec.leaves():
            return action
        parent = self._spec[key[:-1]] if isinstance(key, tuple) else self._spec
        batch_ndim = self._spec[key].ndim - 1 if self._is_single else parent.ndim
        wanted = torch.Size([*values.shape[:-1], *self._spec[key].shape[batch_ndim:]])
        if action.shape == wanted:
            return action
        if self.strict_shape == "auto":
            return action.reshape(wanted)
        raise RuntimeError(
            f"spec: the action has shape {list(action.shape)}, and by its spec it would have {list(wanted)}. Pass "
            "strict_shape='auto' to reshape it."
        )
