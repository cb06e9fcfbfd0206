"""Programs that begin with torch and rollwright imported, and with the server that starts workers: they start at once.

They are forked from a process that is not a child of this one and ends with it. Their end is that of an interpreter.
What a program that starts cold does (its own fork server, which ends with it) is for tests that start it cold.
"""

from __future__ import annotations

import atexit
import gc
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from typing import IO, Any

__all__ = ["Program", "run", "serve", "start"]

ROOT = Path(__file__).parents[1]
_SERVE = "from tests.programs_with_workers import serve; exec(serve({fd}), globals())"
_server: _Server | None = None


def start(code: str | Path, *args: str, warnings: str = "", cwd: str | Path | None = None) -> Program:
    """Start a program.

    Args:
        code: what it executes as ``__main__``: source, or the path of a file.
        args: ``sys.argv`` from its second entry on.
        warnings: "error": warnings are errors in it.
        cwd: its working directory, that of this process by default.
    """
    global _server
    if _server is None or _server.pid != os.getpid():
        _server = _Server()
    return _server.start(code, args, warnings, cwd)


def run(code: str | Path, *args: str, timeout: float, **options: Any) -> subprocess.CompletedProcess[str]:
    """:func:`start` a program and wait for it: its status and what it wrote.

    Raises:
        subprocess.TimeoutExpired: it did not end in time, and was killed.
    """
    program = start(code, *args, **options)
    try:
        out, err = program.communicate(timeout)
    except subprocess.TimeoutExpired:
        program.kill()
        raise
    return subprocess.CompletedProcess([str(code), *args], int(program.returncode or 0), out, err)


class Program:
    """A program that runs, as of :class:`subprocess.Popen`.

    Attributes:
        pid: of its process.
        returncode: None until :meth:`communicate` has returned.
    """

    def __init__(self, pid: int, out: int, err: int, status: IO[bytes], worker_errors: IO[str]) -> None:
        self.pid, self.returncode = pid, None
        self.stdout, self.stderr = open(out, encoding="utf-8"), open(err, encoding="utf-8")  # noqa: SIM115
        self._status, self._worker_errors = status, worker_errors

    def communicate(self, timeout: float) -> tuple[str, str]:
        """What it writes until it ends.

        Raises:
            subprocess.TimeoutExpired: it does not end in time.
        """
        found: dict[str, str] = {}

        def read() -> None:
            other = threading.Thread(target=lambda: found.update(err=self.stderr.read()), daemon=True)
            other.start()
            found["out"] = self.stdout.read()
            other.join()
            found["status"] = self._status.readline().decode()

        reader = threading.Thread(target=read, daemon=True)
        reader.start()
        reader.join(timeout)
        if reader.is_alive():
            raise subprocess.TimeoutExpired("a program", timeout)
        self.returncode = os.waitstatus_to_exitcode(int(found["status"]))
        for file in (self.stdout, self.stderr, self._status):
            file.close()
        return found["out"], found["err"]

    def worker_errors(self) -> str:
        """What workers have written to standard error since the last time."""
        return self._worker_errors.read()

    def send_signal(self, number: int) -> None:
        """Send it a signal."""
        os.kill(self.pid, number)

    def interrupt_all(self) -> None:
        """Ctrl-C as a terminal sends it: to this program, its workers, and all others that run now."""
        os.killpg(os.getpgid(self.pid), signal.SIGINT)

    def kill(self) -> None:
        """End it at once."""
        os.kill(self.pid, signal.SIGKILL)


# The server ----------------------------------------------------------------------------------------------------


class _Server:
    """The end of the server that asks."""

    def __init__(self) -> None:
        self.pid = os.getpid()
        self._line, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        errors = tempfile.NamedTemporaryFile("r", encoding="utf-8", suffix=".stderr")  # noqa: SIM115
        self._errors = errors
        atexit.register(self._close)
        source = str(ROOT / "src")
        with theirs, open(errors.name, "a") as stderr:
            subprocess.run(  # which forks the server off, and ends
                [sys.executable, "-c", _SERVE.format(fd=theirs.fileno())],
                env={**os.environ, "PYTHONPATH": os.pathsep.join([source, str(ROOT)]), "OMP_NUM_THREADS": "1"},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=stderr,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
                check=True,
            )

    def start(self, code: str | Path, args: tuple[str, ...], warnings: str, cwd: str | Path | None) -> Program:
        self._errors.read()
        name, source = (str(code), code.read_text()) if isinstance(code, Path) else ("<string>", code)
        request = {"name": name, "source": source, "argv": [name, *args], "warnings": warnings}
        request |= {"cwd": str(cwd or os.getcwd()), "environ": dict(os.environ), "path": [str(ROOT / "src"), str(ROOT)]}
        (out, to_out), (err, to_err), (status, to_status) = os.pipe(), os.pipe(), os.pipe()
        with tempfile.TemporaryFile() as file:
            file.write(json.dumps(request).encode())
            file.seek(0)
            socket.send_fds(self._line, [b"run"], [file.fileno(), to_out, to_err, to_status])
        for end in (to_out, to_err, to_status):
            os.close(end)
        statuses = open(status, "rb")  # noqa: SIM115
        pid = int(statuses.readline() or self._failed())
        return Program(pid, out, err, statuses, self._errors)

    def _close(self) -> None:
        self._line.close()
        if self.pid == os.getpid():
            self._errors.close()

    def _failed(self) -> int:
        raise RuntimeError(f"the server of programs has ended: {self._errors.read()}")


def serve(fd: int) -> Any:
    """Fork programs on request; returns in each of them, with the code to execute."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if os.fork():
        os._exit(0)  # the server is nobody's child
    from rollwright import _preload  # noqa: F401
    from rollwright._processes.child import Child, echo

    child = Child(echo, name="the first")  # rollwright's server runs from here on
    child.channel.close()
    child.end(60.0)
    gc.freeze()  # what is imported need not be looked through at the end of each program
    assert len(os.listdir("/proc/self/task")) == 1, "threads do not survive a fork"
    line = socket.socket(fileno=fd)
    while True:
        _, fds, _, _ = socket.recv_fds(line, 16, 4)
        if not fds:
            os._exit(0)
        request, out, err, status = fds
        if os.fork():  # to the process that waits for the program
            for end in fds:
                os.close(end)
            os.wait()
            continue
        if os.fork():
            os._exit(0)
        line.close()
        pid = os.fork()
        if pid:
            for end in (request, out, err):
                os.close(end)
            os.write(status, f"{pid}\n".encode())
            os.write(status, f"{os.waitpid(pid, 0)[1]}\n".encode())
            os._exit(0)
        os.close(status)
        return _become(request, out, err)


def _become(request: int, out: int, err: int) -> Any:
    """In the new program: begin as an interpreter does."""
    os.dup2(out, 1)
    os.dup2(err, 2)
    for end in (out, err):
        os.close(end)
    with open(request) as file:
        wanted = json.load(file)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ.clear()
    os.environ.update(wanted["environ"])
    os.chdir(wanted["cwd"])
    sys.argv[:] = wanted["argv"]
    if wanted["warnings"]:
        import warnings

        warnings.simplefilter(wanted["warnings"])
    main = sys.modules["__main__"]
    for name in ("serve",):
        delattr(main, name)
    if wanted["name"] != "<string>":
        main.__file__ = wanted["name"]
    return compile(wanted["source"], wanted["name"], "exec", dont_inherit=True)
