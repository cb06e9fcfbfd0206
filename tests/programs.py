"""Python programs of tests, forked from a process that has imported what they need: they start within milliseconds.

A program runs as ``python -c``, ``python -m`` or ``python FILE`` would run it: with its own ``__main__``, folder,
environment, streams and signals, and its end is that of an interpreter. All share the server that forks rollwright's
workers, which runs already: what a worker writes to standard error is in :meth:`Program.worker_errors`. A test of what
a fresh interpreter imports, or of a server of the program's own, starts an interpreter instead.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import types
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

__all__ = ["IMPORTED_BY_WORKERS", "Program", "Programs"]

ROOT = Path(__file__).parents[1]
IMPORTED = ("rollwright._processes.preload", "rollwright.collectors", "rollwright.modules", "rollwright.cli")
IMPORTED += ("torch._dynamo", "matplotlib.pyplot")  # by optimizers, and where a curve is drawn
IMPORTED_BY_WORKERS = ("pytest",)  # by most, once by the server that forks them: it takes longer than most tests
MAX_REQUEST = 1 << 16


class Program:
    """A program that was started, with what a test needs of ``subprocess.Popen``."""

    def __init__(
        self, line: socket.socket, stdout: IO[str] | None, stderr: IO[str] | None, worker_errors: IO[str]
    ) -> None:
        self._line, self.stdout, self.stderr, self._worker_errors = line, stdout, stderr, worker_errors
        self.returncode: int | None = None
        self.pid = self._answer()

    def _answer(self) -> int:
        answer = self._line.recv(8)
        assert answer, f"the process that starts programs is gone: {self.worker_errors()}"
        return int.from_bytes(answer, "big", signed=True)

    def worker_errors(self) -> str:
        """What workers, of all programs, have written to standard error since the last time."""
        return self._worker_errors.read()

    def poll(self) -> int | None:
        """The exit status, negative for a signal, or None while it runs."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.wait(0)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Wait for its end; the exit status."""
        if self.returncode is None:
            poll = select.poll()  # which takes descriptors of any number
            poll.register(self._line, select.POLLIN)
            if not poll.poll(None if timeout is None else timeout * 1e3):
                raise subprocess.TimeoutExpired(f"program {self.pid}", timeout or 0.0)
            self.returncode = self._answer()
        return self.returncode

    def send_signal(self, number: int) -> None:
        """Send a signal, if it has not ended."""
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):  # it has ended since
                os.kill(self.pid, number)

    def interrupt_all(self) -> None:
        """Ctrl-C as a terminal sends it: to this program, its workers, and all others that run now."""
        os.killpg(os.getpgid(self.pid), signal.SIGINT)

    def kill(self) -> None:
        """End it at once."""
        self.send_signal(signal.SIGKILL)

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        """What is left in its streams, once it has ended. After ``timeout`` seconds it is killed."""
        until = None if timeout is None else time.monotonic() + timeout
        texts = {"stdout": "", "stderr": ""}

        def read(name: str, stream: IO[str]) -> None:
            with stream:
                texts[name] = stream.read()

        streams = [(name, stream) for name in texts if (stream := getattr(self, name)) and not stream.closed]
        readers = [threading.Thread(target=read, args=each, daemon=True) for each in streams]
        for reader in readers:
            reader.start()
        try:
            for reader in readers:
                reader.join(None if until is None else max(0.0, until - time.monotonic()))
            if any(reader.is_alive() for reader in readers):
                raise subprocess.TimeoutExpired(f"program {self.pid}", timeout or 0.0)
            self.wait(None if until is None else max(0.0, until - time.monotonic()))
        except subprocess.TimeoutExpired as error:
            self.kill()
            raise AssertionError(f"{error}; so far: {texts}") from None
        return texts["stdout"], texts["stderr"]

    def close(self) -> None:
        """End it, if it runs, and close its streams."""
        self.kill()
        self.wait()
        self._line.close()
        for stream in (self.stdout, self.stderr):
            if stream is not None:
                stream.close()


class Programs:
    """Starts programs. The process that they are forked from starts with the first one."""

    def __init__(self) -> None:
        self._line: socket.socket | None = None
        self._started: list[Program] = []

    def start(
        self, *command: object, cwd: Path | None = None, env: Mapping[str, str] | None = None, stdout: int | None = None
    ) -> Program:
        """Start what ``python *command`` would start; ``-W error`` may come first.

        Without ``stdout``, a descriptor, there is a pipe to read. Of ``env``, only what differs counts.
        """
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        out, err = ((None, stdout) if stdout is not None else os.pipe()), os.pipe()
        where = {"cwd": str(cwd or os.getcwd()), "env": {**os.environ, **(env or {})}}
        message = json.dumps({"command": [*map(str, command)], **where}).encode()
        assert len(message) <= MAX_REQUEST
        socket.send_fds(self._connected(), [message], [theirs.fileno(), out[1], err[1]])
        theirs.close()
        os.close(err[1])
        if stdout is None:
            os.close(out[1])
        self._errors.read()
        stdout_file = None if out[0] is None else os.fdopen(out[0])
        self._started.append(Program(ours, stdout_file, os.fdopen(err[0]), self._errors))
        return self._started[-1]

    def run(self, *command: object, timeout: float = 100, **options: Any) -> subprocess.CompletedProcess[str]:
        """Start a program and wait for its end."""
        program = self.start(*command, **options)
        out, err = program.communicate(timeout)
        return subprocess.CompletedProcess(command, program.wait(), out, err)

    def close(self) -> None:
        """End the programs that still run."""
        while self._started:
            self._started.pop().close()

    def stop(self) -> None:
        """End all."""
        self.close()
        if self._line is not None:
            self._line.close()
            self._errors.close()

    def _connected(self) -> socket.socket:
        if self._line is None:
            self._line, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            self._errors: IO[str] = tempfile.NamedTemporaryFile("r", suffix=".stderr")  # noqa: SIM115
            paths = [str(ROOT / "src"), str(ROOT), os.environ.get("PYTHONPATH", "")]
            with theirs, open(self._errors.name, "a") as stderr:
                subprocess.run(  # which forks the process off, and ends
                    [sys.executable, __file__, str(theirs.fileno())],
                    env={**os.environ, "PYTHONPATH": os.pathsep.join(paths).rstrip(os.pathsep), "OMP_NUM_THREADS": "1"},
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=stderr,
                    pass_fds=[theirs.fileno()],
                    cwd=ROOT,
                    start_new_session=True,
                    check=True,
                )
        return self._line


# In the process that programs are forked from ------------------------------------------------------------------


def serve(line: socket.socket) -> dict[str, Any] | None:
    """Fork a process for each request. In that process: the request; here: None at the end."""
    while True:
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        message, fds, *_ = socket.recv_fds(line, MAX_REQUEST, 3)
        if not message:
            return None
        if os.fork() == 0:
            line.close()
            if report_child(fds[0]):
                os._exit(0)
            os.close(fds[0])
            for number, fd in enumerate(fds[1:], 1):
                os.dup2(fd, number)
                os.close(fd)
            return json.loads(message)
        for fd in fds:
            os.close(fd)


def report_child(line: int) -> bool:
    """Fork; in the parent, report the number of the child, and its status when it has ended; whether this is that."""
    pid = os.fork()
    if not pid:
        return False
    os.closerange(0, line)
    os.closerange(line + 1, 256)
    with contextlib.suppress(OSError):
        os.write(line, pid.to_bytes(8, "big"))
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        os.write(line, status.to_bytes(8, "big", signed=True))
    return True


def become(command: list[str], cwd: str, env: dict[str, str]) -> None:
    """Be ``python *command``."""
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(env)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.stdout = os.fdopen(1, "w", closefd=False, buffering=1 if os.isatty(1) else -1)
    sys.stderr = os.fdopen(2, "w", closefd=False, buffering=1)
    sys.modules["numpy"].random.seed()  # the other generators begin by themselves
    if command[0] == "-W":
        warnings.simplefilter(command[1])
        sys.warnoptions.append(command[1])
        command = command[2:]
    kind, *arguments = command
    if kind == "-m":
        sys.argv, sys.path[0] = arguments, cwd
        runpy.run_module(arguments[0], run_name="__main__", alter_sys=True)
        return
    main = types.ModuleType("__main__")
    main.__dict__["__builtins__"] = __builtins__
    sys.modules["__main__"] = main
    if kind == "-c":
        program, sys.argv, sys.path[0] = arguments[0], ["-c", *arguments[1:]], ""
        code = compile(program, "<string>", "exec")
    else:
        sys.argv, sys.path[0], main.__file__ = command, str(Path(kind).parent), kind
        code = compile(Path(kind).read_text(), kind, "exec")
    exec(code, main.__dict__)


def prepare() -> None:
    """Import all, and start the server of workers."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if os.fork():
        os._exit(0)  # this process is nobody's child
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for name in IMPORTED:
            importlib.import_module(name)
    sys.modules["rollwright._processes.start"].SERVER_IMPORTS.extend(IMPORTED_BY_WORKERS)
    processes = sys.modules["rollwright._processes.child"]
    child = processes.Child(processes.echo, name="the first")
    child.channel.close()
    child.end(60.0)
    assert len(os.listdir("/proc/self/task")) == 1, "threads do not survive a fork"
    gc.freeze()  # what is imported need not be looked through at the end of each program


if __name__ == "__main__":
    prepare()
    requested = serve(socket.socket(fileno=int(sys.argv[1])))
    if requested is not None:
        become(**requested)
