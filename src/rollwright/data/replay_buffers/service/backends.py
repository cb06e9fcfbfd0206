"""Backends of replay services, by name."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any

from rollwright._options import names_of, refuse_unknown

BACKENDS = {
    "process": "rollwright.data.replay_buffers.service.process",
    "ray": "rollwright.data.replay_buffers.service.ray",
}
"""By name, the module: it has ``Options``, ``DEFAULT_ADDRESS`` and ``host(recipe, options, before)``."""


def backend_module(name: object) -> Any:
    """The module of a backend.

    Raises:
        ValueError: there is none of this name.
    """
    if name not in BACKENDS:
        raise ValueError(f"service_backend: expected {' or '.join(map(repr, BACKENDS))}, got {name!r}.")
    return importlib.import_module(BACKENDS[str(name)])


def options_of(name: object, given: Mapping[str, Any] | None) -> Any:
    """The options of a backend.

    Raises:
        TypeError, ValueError: one is unknown, or wrong.
    """
    declared = backend_module(name).Options
    if given is not None and not isinstance(given, Mapping):
        raise TypeError(f"service_backend_options: expected a dictionary, got {type(given).__name__}: {given!r}.")
    owner = f"service_backend_options of service_backend={name!r}"
    refuse_unknown([str(key) for key in given or ()], names_of(declared), owner)
    return declared(**(given or {}))
