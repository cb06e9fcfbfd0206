"""How processes start: forked by a server that has imported torch, spawned, or forked from this process.

A request to the fork server is one message on a pair of sockets that has no name anywhere, with descriptors attached.
The answer comes on a pipe of its own: the number of the new process, and when that has ended, its status.
"""

from __future__ import annotations

import contextlib
import errno
import gc
import importlib
import io
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import weakref
from collections.abc import Iterable, Iterator
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
from typing import Any, NamedTuple

from rollwright._files import unnamed_file
from rollwright._processes.channel import dumps

MAX_FDS = 250  # in one message; the system takes 253
_REQUEST = "fork"
_LONGEST = 1 << 16  # bytes of a message
line_of_fork = -1  # in a process that a server has forked: to ask that server by


class ForkRequest(NamedTuple):
    """A request to fork: what is imported before, and descriptors that the new process gets.

    Attributes:
        imports: names of modules that the new process will need.
        status: the answers are written there; the new process keeps it open as long as it lives.
        data: a file with two pickles: how to prepare, and the process object.
        lifeline: hangs up when the process that asks has ended.
        line: to ask this server by, for the new process.
        tracker: of the resource tracker.
        others: what the process object refers to, by place.
    """

    imports: tuple[str, ...]
    status: int
    data: int
    lifeline: int
    line: int
    tracker: int
    others: tuple[int, ...]

    @classmethod
    def of(cls, message: bytes, fds: list[int]) -> ForkRequest:
        """The request that came as this."""
        status, data, lifeline, line, tracker, *others = fds
        return cls(tuple(message.decode().split()[1:]), status, data, lifeline, line, tracker, tuple(others))

    def send(self, line: socket.socket) -> None:
        """Send it."""
        imports, *named, others = self
        socket.send_fds(line, [" ".join((_REQUEST, *imports)).encode()], [*named, *others])


def main(fd: int) -> None:
    """Serve the requests of a line until all who could ask are gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the program decides what Ctrl-C ends
    allow_interrupts()
    os.chdir(os.sep)  # torch does not compute in a folder that was deleted, and workers begin in that of the program
    _import(["rollwright._processes.preload"])
    util._close_stdin()  # type: ignore[attr-defined]
    with socket.socket(fileno=fd) as line:
        _Server(line).serve()


def _import(names: Iterable[str]) -> None:
    """Import modules once, so that forked processes need not."""
    lacking = [name for name in names if name not in sys.modules]
    if lacking:
        with contextlib.suppress(ImportError):  # which workers report
            for name in lacking:
                importlib.import_module(name)
            dumps(None)  # where all these modules lie is looked up once, and not by each process
        gc.freeze()  # a collection in a forked process would look through what is imported, and so copy its pages


def allow_interrupts() -> None:
    """Let SIGINT through, which processes start without: until they ignore it, it would end them with a traceback."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})


class _Server:
    def __init__(self, line: socket.socket) -> None:
        self._line = line
        self._statuses: dict[int, int] = {}  # of processes
        self._ended, self._notes = os.pipe()
        for end in (self._ended, self._notes):
            os.set_blocking(end, False)
        signal.signal(signal.SIGCHLD, _do_nothing)  # the next line does
        signal.set_wakeup_fd(self._notes)

    def serve(self) -> None:
        poll = select.poll()
        poll.register(self._line, select.POLLIN)
        poll.register(self._ended, select.POLLIN)
        while True:
            ready = {fd for fd, _ in poll.poll()}
            if self._ended in ready:
                os.read(self._ended, 1 << 12)
                self._reap()
            if self._line.fileno() not in ready:
                continue
            message, fds, flags, _ = socket.recv_fds(self._line, _LONGEST, MAX_FDS)
            if not message:
                return
            for fd in fds:
                os.set_inheritable(fd, False)
            if flags & socket.MSG_CTRUNC:  # there is no room for the rest
                self._send(fds[0], -errno.EMFILE)
            else:
                self._fork(ForkRequest.of(message, fds))
            for fd in fds:
                if fd not in self._statuses.values():
                    os.close(fd)

    def _reap(self) -> None:
        with contextlib.suppress(ChildProcessError):
            while (found := os.waitpid(-1, os.WNOHANG))[0]:
                pid, status = found
                self._send(self._statuses[pid], os.waitstatus_to_exitcode(status))
                os.close(self._statuses.pop(pid))

    def _send(self, to: int, number: int) -> None:
        with contextlib.suppress(BrokenPipeError):  # nobody waits any more
            forkserver.write_signed(to, number)

    def _fork(self, request: ForkRequest) -> None:
        _import(request.imports)
        ends: tuple[int, ...] = ()
        try:
            reader, writer = ends = os.pipe()
            pid = os.fork()
        except OSError as error:
            for end in ends:
                os.close(end)
            self._send(request.status, -(error.errno or errno.EAGAIN))
            return
        if not pid:
            os.close(writer)
            self._become(request, reader)
        os.close(reader)
        self._statuses[pid] = request.status
        self._send(request.status, pid)
        os.write(writer, b"1")
        os.close(writer)

    def _become(self, request: ForkRequest, reader: int) -> None:
        """In the new process: do what it is for, and end."""
        status = 1
        try:
            if not os.read(reader, 1):
                return  # the server was killed before it was ready: another one will be asked
            os.close(reader)
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            self._line.close()
            for fd in (self._ended, self._notes, *self._statuses.values()):
                os.close(fd)
            global line_of_fork
            line_of_fork = request.line
            server: Any = forkserver._forkserver
            server._inherited_fds = list(request.others)  # where pickled descriptors are looked up
            status = run(request.data, request.lifeline, request.tracker)
        except BaseException:
            sys.excepthook(*sys.exc_info())
            sys.stderr.flush()
        finally:
            os._exit(status)


def run(data: int, lifeline: int, tracker: int) -> int:
    """Be the process that is pickled in a file; its status."""
    resource_tracker._resource_tracker._fd = tracker  # type: ignore[attr-defined]
    return int(spawn._main(data, lifeline))


def _do_nothing(*_: object) -> None:
    pass


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
    global _fork_server
    _fork_server = _ForkServer(socket.socket(fileno=line_of_fork))
    os.environ.clear()  # the server has those of the time when it started
    os.environ.update(environ)
    target(*args)


# The server -----------------------------------------------------------------------------------


class _ForkServer:
    """The fork server, by a pair of sockets; forked processes, and those that the server has forked, use it, too.

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
                request = ForkRequest(_imports(), status, data, lifeline, self._end.fileno(), tracker, others)
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

    def reap(self) -> None:
        """Have done with a server that has ended."""
        if self._pid is not None:
            with contextlib.suppress(ChildProcessError):  # of another process, or ended already
                os.waitpid(self._pid, os.WNOHANG)


_fork_server: _ForkServer | None = None
_lock = threading.Lock()


def _imports() -> tuple[str, ...]:
    """What the server has to have imported: the packages of this library that this process has, and others."""
    own = {".".join(name.split(".")[:2]) for name in list(sys.modules) if name.startswith("rollwright.")}
    return (*SERVER_IMPORTS, *sorted(name for name in own if "._" not in name))


def _server_other_than(gone: _ForkServer | None) -> _ForkServer:
    """A server, other than one that is gone."""
    global _fork_server
    with _lock:
        if gone is not None and _fork_server is gone:
            gone.reap()
            _fork_server = None
        if _fork_server is None:
            mine, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            with theirs:
                code = f"from rollwright._processes.start import main; main({theirs.fileno()})"
                _fork_server = _ForkServer(mine, _run_python(code, [theirs.fileno()]))
        return _fork_server


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
            server = _server_other_than(None)
            try:
                self.pid, self.sentinel = server.ask(data, lifeline, tuple(others))
            except EOFError:  # it was killed; another one has no reason to end
                os.lseek(data, 0, os.SEEK_SET)
                try:
                    self.pid, self.sentinel = _server_other_than(server).ask(data, lifeline, tuple(others))
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
            code = f"from rollwright._processes.start import run; sys.exit(run({data}, {lifeline}, {tracker}))"
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
