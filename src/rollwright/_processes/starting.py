"""How processes start: forked by a server that has imported torch, spawned, or forked from this process."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from multiprocessing import context, forkserver, popen_forkserver, process, util
from multiprocessing.context import reduction, set_spawning_popen  # type: ignore[attr-defined]
from typing import Any

__all__ = ["START_METHODS", "check_start_method", "new_process"]

START_METHODS = ("forkserver", "spawn", "fork")

_inside = False  # whether this process was forked by such a server itself
_server: Any = None


def check_start_method(name: str, value: Any) -> None:
    """Test a choice of the start method; None is the fork server.

    Raises:
        ValueError: it is unknown.
    """
    if value is not None and value not in START_METHODS:
        raise ValueError(f"{name}: expected one of {START_METHODS} or None for the first, got {value!r}.")


def new_process(start_method: str | None, target: Any, args: tuple[Any, ...], name: str) -> Any:
    """A process that is not started yet, as of :mod:`multiprocessing`; None: the fork server.

    One that comes from the fork server does not import the program's main module: what is sent there must be pickled
    by value.
    """
    if start_method in (None, "forkserver"):
        return _Served(target=_in_fork, args=(dict(os.environ), target, args), name=name, daemon=False)
    kind: Any = {"spawn": _Spawned, "fork": _Forked}[start_method]
    return kind(target=target, args=args, name=name, daemon=False)


def _in_fork(environ: dict[str, str], target: Any, args: tuple[Any, ...]) -> None:
    global _inside
    _inside = True
    server: Any = forkserver._forkserver
    if server._forkserver_address:  # it would start another, for all that it says
        server.ensure_running = _is_running
    os.environ.clear()  # the server has those of the time when it started
    os.environ.update(environ)
    target(*args)


def _is_running() -> None:
    """For a process that the server has forked: the server lives as long as any of them."""


def _running_server() -> Any:
    """The server of this program; a process that it has forked uses it too."""
    global _server
    if _inside:
        return forkserver._forkserver
    if _server is None:
        _server = forkserver.ForkServer()
        _server.set_forkserver_preload(["rollwright._processes.preload"])
    return _server


@contextmanager
def _importing_from(path: Sequence[str]) -> Iterator[None]:
    """Let a program that is started in the ``with`` block import from the places that this one imports from."""
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join(entry or os.getcwd() for entry in path)
    try:
        yield
    finally:
        if before is None:
            del os.environ["PYTHONPATH"]
        else:
            os.environ["PYTHONPATH"] = before


class _Popen(popen_forkserver.Popen):
    """Starts a process by the server, without the program's main module."""

    sentinel: int
    pid: int

    def _launch(self, process_obj: Any) -> None:
        data = {
            "name": process_obj.name,
            "authkey": bytes(process.current_process().authkey),
            "sys_path": [entry or os.getcwd() for entry in sys.path],
            "sys_argv": sys.argv,
            "orig_dir": process.ORIGINAL_DIR,  # type: ignore[attr-defined]
            "dir": os.getcwd(),
        }
        buffer = io.BytesIO()
        set_spawning_popen(self)
        try:
            reduction.dump(data, buffer)
            reduction.dump(process_obj, buffer)
        finally:
            set_spawning_popen(None)
        server = _running_server()
        with _importing_from(sys.path):
            server.ensure_running()
        self.sentinel, writer = server.connect_to_new_process(self._fds)  # type: ignore[attr-defined]
        mine = os.dup(writer)  # as long as it is open, the process knows that this one lives
        self.finalizer = util.Finalize(self, util.close_fds, (mine, self.sentinel))  # type: ignore[attr-defined]
        with open(writer, "wb", closefd=True) as pipe:
            pipe.write(buffer.getbuffer())
        self.pid = forkserver.read_signed(self.sentinel)


class _Unlisted:
    """A process that :mod:`multiprocessing` does not wait for when this one ends, and that a daemonic one may start.

    It ends with this one by itself, see :class:`~rollwright._processes.child.Child`.
    """

    def start(self: Any) -> None:
        """Start the process."""
        self._popen = self._Popen(self)
        self._sentinel = self._popen.sentinel
        del self._target, self._args, self._kwargs  # which may refer to it


class _Served(_Unlisted, process.BaseProcess):
    _start_method = "forkserver"

    @staticmethod
    def _Popen(process_obj: Any) -> Any:
        return _Popen(process_obj)


class _Spawned(_Unlisted, context.SpawnProcess):
    pass


class _Forked(_Unlisted, context.ForkProcess):
    pass
