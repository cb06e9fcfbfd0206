"""How processes start: forked by a server that has imported torch, spawned, or forked from this process."""

from __future__ import annotations

import contextlib
import errno
import io
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import weakref
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from multiprocessing import (
    context,
    forkserver,
    popen_forkserver,
    popen_spawn_posix,
    process,
    resource_tracker,
    spawn,
    util,
)
from multiprocessing.context import reduction, set_spawning_popen  # type: ignore[attr-defined]
from typing import Any

from rollwright._files import unnamed_file
from rollwright._processes.start import server

START_METHODS = ("forkserver", "spawn", "fork")
SERVER_IMPORTS: list[str] = []  # modules that the server imports beside those of this package that a program has
_SERVER_S = 300.0  # for the server to import what it needs, and to fork


def check_start_method(name: str, value: Any) -> Any:
    """Test a choice of the start method, and return it; None is the fork server.

    Raises:
        ValueError: it is unknown.
    """
    if value is not None and value not in START_METHODS:
        raise ValueError(f"{name}: expected one of {START_METHODS} or None for the first, got {value!r}.")
    return value


def new_process(start_method: str | None, target: Any, args: tuple[Any, ...], name: str) -> Any:
    """A process that is not started yet, as of :mod:`multiprocessing`; None: the fork server.

    One that comes from the fork server does not import the program's main module: what is sent there must be pickled
    by value. SIGINT is blocked where it begins, until it sets how it handles that.
    """
    if start_method in (None, "forkserver"):
        return _Served(target=_in_fork, args=(dict(os.environ), target, args), name=name, daemon=False)
    kind: Any = {"spawn": _Spawned, "fork": _Forked}[start_method]
    return kind(target=target, args=args, name=name, daemon=False)


def _in_fork(environ: dict[str, str], target: Any, args: tuple[Any, ...]) -> None:
    global _line
    _line = _Line(socket.socket(fileno=server.line_of_fork))
    os.environ.clear()  # the server has those of the time when it started
    os.environ.update(environ)
    target(*args)


# The server -----------------------------------------------------------------------------------


class _Line:
    """A connection to the fork server; forked processes, and those that the server has forked, use it, too.

    Args:
        end: of a pair of sockets.
        pid: of the server, where this process has started it.
    """

    def __init__(self, end: socket.socket, pid: int | None = None) -> None:
        self._end, self._pid = end, pid
        weakref.finalize(self, end.close)

    def ask(self, data: int, lifeline: int, others: tuple[int, ...]) -> tuple[int, int]:
        """Have a process forked; its number, and the pipe on which its status will come.

        Raises:
            EOFError: the server has ended.
            OSError: it cannot fork, or does not answer.
        """
        answer, status = os.pipe()
        try:
            tracker = _tracker()
            try:
                request = server.ForkRequest(_imports(), status, data, lifeline, self._end.fileno(), tracker, others)
                request.send(self._end)
            except ConnectionError as error:
                raise EOFError from error
            finally:
                os.close(status)
            return self._pid_of_new(answer), answer
        except BaseException:
            os.close(answer)
            raise

    def _pid_of_new(self, answer: int) -> int:
        poll = select.poll()
        poll.register(answer, select.POLLIN)
        if not poll.poll(_SERVER_S * 1e3):
            raise TimeoutError(f"waited {_SERVER_S:g} s for the fork server to start a process")
        pid = int(forkserver.read_signed(answer))
        if pid < 0:
            advice = " Raise the limit (ulimit -n)." if -pid == errno.EMFILE else ""
            raise OSError(-pid, f"{os.strerror(-pid)}: the fork server cannot start a process.{advice}")
        return pid

    def bury(self) -> None:
        """Have done with a server that has ended."""
        if self._pid is not None:
            with contextlib.suppress(ChildProcessError):  # of another process, or ended already
                os.waitpid(self._pid, os.WNOHANG)


_line: _Line | None = None
_lock = threading.Lock()


def _imports() -> tuple[str, ...]:
    """What the server has to have imported: the packages of this library that this process has, and others."""
    own = {".".join(name.split(".")[:2]) for name in list(sys.modules) if name.startswith("rollwright.")}
    return (*SERVER_IMPORTS, *sorted(name for name in own if "._" not in name))


def _line_to_server(gone: _Line | None) -> _Line:
    """The line to a server, other than one that is gone."""
    global _line
    with _lock:
        if gone is not None and _line is gone:
            gone.bury()
            _line = None
        if _line is None:
            mine, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            with theirs:
                code = f"from rollwright._processes.start.server import main; main({theirs.fileno()})"
                _line = _Line(mine, _run_python(code, [theirs.fileno()]))
        return _line


def _run_python(code: str, fds: list[int]) -> int:
    """Run code in a new process that imports from where this one does, and takes no SIGINT yet; its number."""
    entries = (entry or _folder() for entry in sys.path)
    code = f"import sys; sys.path[:] = {[entry for entry in entries if isinstance(entry, str)]!r}; {code}"
    executable: Any = spawn.get_executable()
    resource_tracker.ensure_running()  # which lets SIGINT through
    flags = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]
    with _no_interrupts():
        arguments = [executable, *flags, "-c", code]
        return int(util.spawnv_passfds(executable, arguments, fds))


def _tracker() -> int:
    """Descriptor of the resource tracker of :mod:`multiprocessing`, which all processes of a program share."""
    found: Any = resource_tracker.getfd()
    return int(found)


@contextmanager
def _no_interrupts() -> Iterator[None]:
    """Block SIGINT inside the ``with`` block, and in processes that begin there."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _folder() -> str | None:
    """The working directory; None if it was deleted."""
    try:
        return os.getcwd()
    except FileNotFoundError:
        return None


def _begin_fork() -> None:
    global _lock
    _lock = threading.Lock()


os.register_at_fork(after_in_child=_begin_fork)


# Processes ------------------------------------------------------------------------------------


def _lay_open(popen: Any, preparation: dict[str, Any], process_obj: Any, fds: ExitStack) -> tuple[int, int]:
    """Write what a process begins with into a file without a name, and lay the line that shows it that this one lives.

    Returns:
        Descriptors of the file and of the line, for the new process; they are closed with the stack.
    """
    buffer = io.BytesIO()
    set_spawning_popen(popen)
    try:
        reduction.dump(preparation, buffer)
        reduction.dump(process_obj, buffer)
    finally:
        set_spawning_popen(None)
    data = unnamed_file()
    fds.callback(os.close, data)
    with open(data, "wb", closefd=False) as file:
        file.write(buffer.getbuffer())
    os.lseek(data, 0, os.SEEK_SET)
    lifeline, mine = os.pipe()
    fds.callback(os.close, lifeline)
    weakref.finalize(popen, os.close, mine).atexit = False
    return data, lifeline


class _ServedPopen(popen_forkserver.Popen):
    """Starts a process by the server, without the program's main module."""

    sentinel: int
    pid: int

    def _launch(self, process_obj: Any) -> None:
        preparation = {
            "name": process_obj.name,
            "authkey": bytes(process.current_process().authkey),
            "sys_path": [entry or _folder() or "" for entry in sys.path],
            "sys_argv": sys.argv,
            "orig_dir": process.ORIGINAL_DIR,  # type: ignore[attr-defined]
        }
        folder = _folder()
        if folder is not None:
            preparation["dir"] = folder
        with ExitStack() as fds:
            data, lifeline = _lay_open(self, preparation, process_obj, fds)
            others: Any = self._fds  # type: ignore[attr-defined]
            line = _line_to_server(None)
            try:
                self.pid, self.sentinel = line.ask(data, lifeline, tuple(others))
            except EOFError:  # it was killed; another one has no reason to end
                os.lseek(data, 0, os.SEEK_SET)
                try:
                    self.pid, self.sentinel = _line_to_server(line).ask(data, lifeline, tuple(others))
                except EOFError:
                    raise OSError(
                        "The fork server ended before it had started a process, twice. Look for what ends it (memory, "
                        "a signal), or pass start_method='spawn'."
                    ) from None
        weakref.finalize(self, os.close, self.sentinel).atexit = False


class _SpawnPopen(popen_spawn_posix.Popen):
    """Runs a new interpreter, which imports the program's main module."""

    sentinel: int
    pid: int

    def _launch(self, process_obj: Any) -> None:
        if _folder() is None:
            raise FileNotFoundError(
                "start_method='spawn': the working directory of this program was deleted. Change to one that exists "
                "(os.chdir), or use the fork server."
            )
        preparation = spawn.get_preparation_data(process_obj.name)
        with ExitStack() as fds:
            data, lifeline = _lay_open(self, preparation, process_obj, fds)
            self.sentinel, held = os.pipe()  # by the process, as long as it lives
            weakref.finalize(self, os.close, self.sentinel).atexit = False
            fds.callback(os.close, held)
            tracker = _tracker()
            code = f"from rollwright._processes.start.server import run; sys.exit(run({data}, {lifeline}, {tracker}))"
            others: Any = self._fds  # type: ignore[attr-defined]
            self.pid = _run_python(code, [*others, data, lifeline, tracker, held])


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
    _Popen = staticmethod(_ServedPopen)


class _Spawned(_Unlisted, context.SpawnProcess):
    _Popen = staticmethod(_SpawnPopen)


class _Forked(_Unlisted, context.ForkProcess):
    @staticmethod
    def _Popen(process_obj: Any) -> Any:
        with _no_interrupts():
            return context.ForkProcess._Popen(process_obj)
