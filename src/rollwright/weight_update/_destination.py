"""Destination: a module that takes the same kind of weights again and again."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from rollwright.weight_update._slot import copy_all
from rollwright.weight_update._tables import EntrySpec
from rollwright.weight_update.forms import is_extra, prepare

__all__ = ["Destination"]

_LOADS_PLAINLY = (nn.Module._load_from_state_dict, _NormBase._load_from_state_dict)


class Destination:
    """Copies weights into a module, as ``load_state_dict`` does.

    What weights of the same names and shapes need is found once, and again when the module has changed: where its
    parameters and buffers lie. A module that loads in a way of its own (hooks, extra state) is given
    copies of the weights for its ``load_state_dict``, once they are known to be whole.

    Args:
        target: the module.
        specs: of the weights to come.
        tensors: some that are like them.
        name: what the module is, for messages.

    Raises:
        TypeError, ValueError: as :func:`~rollwright.weight_update.forms.prepare`.
    """

    def __init__(self, target: Any, specs: tuple[EntrySpec, ...], tensors: dict[str, torch.Tensor], name: str) -> None:
        prepare(target, tensors, name)
        self._target, self._specs, self._name = target, specs, name
        self._parts = list(target.named_modules())
        self._children = [
            (part._modules, key, child) for _, part in self._parts for key, child in part._modules.items()
        ]
        self._num_children = [(part._modules, len(part._modules)) for _, part in self._parts]
        self._places = _places(target, specs) if all(_is_plain(part) for _, part in self._parts) else None
        self._shapes = [shape for _, shape, _ in specs]

    @property
    def is_plain(self) -> bool:
        """Whether copying tensors is all that ``load_state_dict`` does."""
        return self._places is not None

    def fits(self, target: Any, specs: tuple[EntrySpec, ...]) -> bool:
        """Whether the module is this one, made of the same parts as before, and the weights are of the same kind."""
        if target is not self._target or (specs is not self._specs and specs != self._specs):
            return False
        for parts, count in self._num_children:
            if len(parts) != count:
                return False
        return all(parts.get(key) is child for parts, key, child in self._children)

    def copy(self, tensors: dict[str, torch.Tensor]) -> bool:
        """Copy weights in place, in the order of the specs; False where the module must load them (nothing is done)."""
        if self._places is None:
            return False
        into = [place[key] for place, key in self._places]
        for tensor, shape in zip(into, self._shapes, strict=True):
            if tensor.shape != shape:
                return False
        with torch.no_grad():
            copy_all(into, list(tensors.values()))
        return True

    def load(self, weights: dict[str, Any]) -> None:
        """Give weights, tensors and extra state that nobody else writes, to the module's ``load_state_dict``."""
        prepare(self._target, weights, self._name)()


def _is_plain(part: nn.Module) -> bool:
    kind = type(part)
    return (
        kind._load_from_state_dict in _LOADS_PLAINLY
        and kind.load_state_dict is nn.Module.load_state_dict
        and kind.state_dict is nn.Module.state_dict
        and kind.get_extra_state is nn.Module.get_extra_state
        and not part._load_state_dict_pre_hooks
        and not part._load_state_dict_post_hooks
        and not part._state_dict_hooks
        and not part._state_dict_pre_hooks
        and not hasattr(part, "parametrizations")
    )


def _places(target: nn.Module, specs: tuple[EntrySpec, ...]) -> list[tuple[dict[str, Any], str]] | None:
    """The dictionary and the key where each weight is kept; a module may put another tensor there at any time."""
    parts = dict(target.named_modules(remove_duplicate=False))
    places: list[tuple[dict[str, Any], str]] = []
    for name, _, _ in specs:
        path, _, key = name.rpartition(".")
        part = parts.get(path)
        held = None
        if part is not None and not is_extra(name):
            held = next((kept for kept in (part._parameters, part._buffers) if kept.get(key) is not None), None)
        if held is None:
            return None
        places.append((held, key))
    return places
