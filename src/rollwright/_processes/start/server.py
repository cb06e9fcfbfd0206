"""The fork server: a process that has imported what workers need, and forks them on request.

A request is one message on a pair of sockets that has no name anywhere, with descriptors attached. The answer comes on
a pipe of its own: the number of the new process, and when that has ended, its status.
"""

from __future__ import annotations

import contextlib
import errno
import gc
import importlib
import os
import select
import signal
import socket
import sys
from collections.abc import Iterable
from multiprocessing import forkserver, resource_tracker, spawn, util
from typing import Any, NamedTuple

from rollwright._processes.pickling import dumps

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
    _import(["rollwright._processes.start.preload"])
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
