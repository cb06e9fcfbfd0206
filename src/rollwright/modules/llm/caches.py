"""Caches of models of transformers: keys and values of attention layers, and states of layers without attention."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch.nn import functional

from rollwright.errors import require

_PURPOSE = "generation by a model of transformers"
_ATTENTION = {"DynamicLayer", "DynamicSlidingWindowLayer", "DummyLayer"}
_STATES = {"LinearAttentionLayer"}
_BOTH = {"LinearAttentionAndFullAttentionLayer", "LinearAttentionAndSlidingWindowAttentionLayer"}
_EXPECTED = (
    "expected keys and values of attention layers, or states of convolutions and linear attention, in a DynamicCache "
    "of transformers. Use another model, or another engine."
)


class CacheKind:
    """What a model caches, and how it is called with it.

    Layers with a sliding window keep all keys and values, so that rows of unequal lengths have a common width; what a
    layer attends to follows from the model's mask. States of layers without attention have no width.

    Args:
        base: a causal language model of transformers, without an adapter around it.
        config: of its text.

    Attributes:
        argument: that the model takes the cache by.
        attends: whether there are attention layers; a model without any takes a mask of new tokens alone.

    Raises:
        TypeError: it takes no cache, or one whose rows cannot be moved.
    """

    def __init__(self, base: Any, config: Any) -> None:
        self._name, self._is_known = type(base).__name__, False
        accepted = inspect.signature(base.forward).parameters
        any_name = any(each.kind is inspect.Parameter.VAR_KEYWORD for each in accepted.values())
        names = [name for name in ("past_key_values", "cache_params") if name in accepted]
        if not names and (not any_name or "state" in accepted):
            raise TypeError(f"model: {self._name} takes no cache; {_EXPECTED}")
        self.argument = names[0] if names else "past_key_values"
        supports = getattr(base, "_supports_default_dynamic_cache", None)
        if supports is not None and not supports():
            raise TypeError(f"model: {self._name} has a cache of its own; {_EXPECTED}")
        self._layers = _layers_of(config, self._name)
        kinds = {type(layer).__name__ for layer in self._layers}
        if others := sorted(kinds - _ATTENTION - _STATES - _BOTH):
            raise TypeError(f"model: {self._name} caches {', '.join(others)}; {_EXPECTED}")
        self.attends = not kinds or kinds != _STATES
        self._is_plain = kinds <= _ATTENTION
        if hasattr(base, "_setup_cache") or (self._is_plain and getattr(base, "_is_stateful", False)):
            raise TypeError(f"model: {self._name} keeps states outside of its cache; {_EXPECTED}")

    def new(self) -> Any:
        """An empty cache."""
        cache = require("transformers", name="DynamicCache", extra="llm", purpose=_PURPOSE)()
        if not self._is_plain:
            cache.layer_class_to_replicate = None
            cache.layers = [_empty(layer) for layer in self._layers]
        return cache

    def check(self, cache: Any) -> None:
        """Check a cache that the model has filled; once.

        Raises:
            TypeError: it holds nothing, or something else than was expected.
        """
        if self._is_known:
            return
        kinds = {type(layer).__name__ for layer in cache.layers}
        others = sorted(kinds - _ATTENTION - _STATES - _BOTH)
        if others or not kinds:
            raise TypeError(f"model: {self._name} caches {', '.join(others) or 'nothing'}; {_EXPECTED}")
        left = [layer for layer in cache.layers if type(layer).__name__ in _STATES and not any(_filled(layer))]
        if left:
            raise TypeError(f"model: {self._name} leaves {len(left)} layers of its cache empty; {_EXPECTED}")
        self._is_known = True


def _layers_of(config: Any, name: str) -> list[Any]:
    """Layers of a cache, as the configuration asks for them; none where it does not say."""
    if not hasattr(config, "per_layer_config"):
        return []
    made = require("transformers", name="DynamicCache", extra="llm", purpose=_PURPOSE)
    try:
        return list(made(config=config).layers)
    except KeyError as error:
        raise TypeError(f"model: {name} has layers of the kind {error}; {_EXPECTED}") from error


def _empty(layer: Any) -> Any:
    """A layer like another one that is empty, without a window."""
    kinds = require("transformers.cache_utils", extra="llm", purpose=_PURPOSE)
    name = type(layer).__name__
    if name in _BOTH:
        return kinds.LinearAttentionAndFullAttentionLayer(number_of_states=layer.number_of_states)
    if name in _STATES:
        return kinds.LinearAttentionLayer(number_of_states=layer.number_of_states)
    return kinds.DummyLayer() if name == "DummyLayer" else kinds.DynamicLayer()


def select_rows(cache: Any, rows: torch.Tensor, surplus: int = 0) -> None:
    """Keep rows of a cache, in a given order, perhaps repeated.

    Args:
        cache: to change.
        rows: int64 ``[rows]``.
        surplus: columns to drop on the left.
    """
    for layer in cache.layers:
        if getattr(layer, "keys", None) is not None:
            layer.keys, layer.values = layer.keys[rows, :, surplus:], layer.values[rows, :, surplus:]
        for states in _states(layer):
            states.update({place: state[rows] for place, state in states.items() if state is not None})


def join_rows(cache: Any, other: Any, width: int) -> None:
    """Append the rows of another cache.

    Args:
        cache: to change.
        other: of the same model.
        width: columns of both together; padding is added on the left.
    """
    for own, others in zip(cache.layers, other.layers, strict=True):
        if getattr(own, "keys", None) is not None:
            own.keys = torch.cat([_wider(own.keys, width), _wider(others.keys, width)])
            own.values = torch.cat([_wider(own.values, width), _wider(others.values, width)])
        for states, joined in zip(_states(own), _states(others), strict=True):
            states.update(
                {place: torch.cat([state, joined[place]]) for place, state in states.items() if state is not None}
            )


def _states(layer: Any) -> list[dict[int, Any]]:
    return [layer.conv_states, layer.recurrent_states] if hasattr(layer, "conv_states") else []


def _filled(layer: Any) -> list[bool]:
    return [state is not None for states in _states(layer) for state in states.values()]


def _wider(states: torch.Tensor, width: int) -> torch.Tensor:
    return functional.pad(states, (0, 0, width - states.shape[-2], 0))
