"""Destination: a module that repeatedly receives the same kind of weights."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from rollwright.weight_update._slot import copy_all
from rollwright.weight_update._tables import EntrySpec
from rollwright.weight_update.forms import is_extra, prepare
from rollwright.weight_update.policy_weights import weights_of

__all__ = ["Destination"]

# What gives a module its own loading. Torch has no public names for most of these.
_METHODS = ("_load_from_state_dict", "load_state_dict", "state_dict", "get_extra_state")
_HOOKS = (
    "_load_state_dict_pre_hooks",
    "_load_state_dict_post_hooks",
    "_state_dict_hooks",
    "_state_dict_pre_hooks",
)


class Destination:
    """Copies weights into a module, as ``load_state_dict`` does.

    What weights of the same names and shapes need is found once, and again when the module has changed: where its
    parameters and buffers lie. A module that has its own loading (hooks, extra state) is given
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
        self._module = weights_of(target)
        self._parts = _parts(self._module)
        self._places = _places(self._parts, specs) if all(map(_is_plain, self._parts.values())) else None
        self._shapes = [shape for _, shape, _ in specs]

    @property
    def is_plain(self) -> bool:
        """Whether copying tensors is all that ``load_state_dict`` does."""
        return self._places is not None

    def fits(self, target: Any, specs: tuple[EntrySpec, ...]) -> bool:
        """Whether the module is this one, made of the same parts as before, and the weights are of the same kind."""
        if target is not self._target or (specs is not self._specs and specs != self._specs):
            return False
        # a search for what functions read takes longer than a copy of the weights
        parts = _parts(target if target is self._module else weights_of(target))
        return parts.keys() == self._parts.keys() and all(parts[name] is part for name, part in self._parts.items())

    def copy(self, tensors: dict[str, torch.Tensor]) -> bool:
        """Copy weights in place, in the order of the specs; False where the module must load them (nothing is done)."""
        if self._places is None:
            return False
        into = [getattr(part, key) for part, key in self._places]
        for tensor, shape in zip(into, self._shapes, strict=True):
            if tensor.shape != shape:
                return False
        with torch.no_grad():
            copy_all(into, list(tensors.values()))
        return True

    def load(self, weights: dict[str, Any]) -> None:
        """Give weights, tensors and extra state that nobody else writes, to the module's ``load_state_dict``."""
        prepare(self._target, weights, self._name)()


def _parts(module: nn.Module | None) -> dict[str, nn.Module]:
    return {} if module is None else dict(module.named_modules(remove_duplicate=False))


def _is_plain(part: nn.Module) -> bool:
    kind = type(part)
    usual = (nn.Module, _NormBase)  # batch norm loads numbers of batches that old states lack, and is plain otherwise
    return (
        all(any(getattr(kind, name) is getattr(base, name) for base in usual) for name in _METHODS)
        and not any(vars(part)[hooks] for hooks in _HOOKS)
        and not hasattr(part, "parametrizations")
    )


def _places(parts: dict[str, nn.Module], specs: tuple[EntrySpec, ...]) -> list[tuple[nn.Module, str]] | None:
    """The module and the name where each weight is kept; another tensor may be put there at any time."""
    places: list[tuple[nn.Module, str]] = []
    for name, _, _ in specs:
        path, _, key = name.rpartition(".")
        part = parts.get(path)
        if part is None or is_extra(name) or not isinstance(getattr(part, key, None), torch.Tensor):
            return None
        places.append((part, key))
    return places
