"""Options of replay services, and their backends by name."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from rollwright._options import Check, check_fields, names_of, refuse_unknown, seconds, whole
from rollwright._processes.network.handshake import checked_address, checked_secret, secret_of
from rollwright.data.replay_buffers.service.serving.dumps import DUMP_FILE


def _checked_path(name: str, value: Any) -> object:
    if not isinstance(value, str | Path):
        raise TypeError(f"{name}: expected a folder, got {type(value).__name__}: {value!r}.")
    return str(Path(value).expanduser().absolute())


@dataclass(frozen=True, kw_only=True)
class ServiceOptions:
    """Options of a buffer in a process of its own.

    Attributes:
        address: where the service listens, ``"HOST:PORT"``; port 0: any that is free. Clients connect to it as it is
            written, so writers on other machines need a host name or an address that they reach. None: the backend
            chooses.
        secret: that whoever connects has to know; None: the environment variable ``ROLLWRIGHT_SECRET``, or one that is
            made up. Clients carry it along. What is sent after the proof is not encrypted.
        host_timeout: seconds without a sign of life after which the service counts as lost. A shorter silence costs
            time only.
        start_timeout: seconds for the service to start.
        path: folder where the service saves the buffer, and from which it is started again when it has died; None:
            what it holds is lost with it.
        dump_every: elements written between two dumps to ``path``: as many acknowledged elements can be lost at most.
            None: it is saved at the end alone.
        resume: begin with what an earlier service has left in ``path``.
        max_restarts: how often the service is started again.
    """

    address: Annotated[str | None, Check(checked_address)] = None
    secret: Annotated[str | None, Check(checked_secret)] = None
    host_timeout: Annotated[float, seconds(positive=True)] = 30.0
    start_timeout: Annotated[float, seconds(positive=True)] = 120.0
    path: Annotated[str | Path | None, Check(_checked_path)] = None
    dump_every: Annotated[int | None, whole(1)] = None
    resume: bool = False
    max_restarts: Annotated[int, whole(0)] = 3

    def __post_init__(self) -> None:
        check_fields(self)
        secret_of(self.secret)  # that of the environment is checked, too
        if self.path is None and (self.dump_every is not None or self.resume):
            name = "resume" if self.resume else "dump_every"
            raise ValueError(f"{name}: there is no folder to save the buffer in. Pass path= with it.")
        if self.path is not None and not self.resume and (Path(self.path) / DUMP_FILE).exists():
            raise FileExistsError(
                f"path: {str(self.path)!r} holds what an earlier service has saved. Pass resume=True to begin with it, "
                "or name another folder."
            )


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
