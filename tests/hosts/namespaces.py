"""Hosts on one machine: network namespaces on a bridge, each with an address of its own, which can be cut off.

Each namespace belongs to a process that ends with this one, however this one ends; with it go its links. Nothing has a
name outside, and this machine's own network is not touched.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Self

__all__ = ["Host", "Network", "enter", "why_not"]

ROOT = Path(__file__).parents[2]
CLONE_NEWNET = 0x40000000
TOOLS = ("ip", "nsenter", "unshare")
LIMIT_S = 20.0  # of a command


def why_not() -> str | None:
    """Why there can be no hosts here; None: there can."""
    missing = [tool for tool in TOOLS if shutil.which(tool) is None]
    if missing:
        return f"hosts need {', '.join(missing)}"
    try:
        with Network(1):
            return None
    except (OSError, subprocess.SubprocessError) as error:
        return f"network namespaces may not be made here: {error}"


class Namespace:
    """A network namespace, and a process that keeps it."""

    def __init__(self) -> None:
        self._keeper = subprocess.Popen(
            ["unshare", "-n", "cat"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
        assert self._keeper.stdin is not None
        assert self._keeper.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            self._keeper.stdin.write(b"\n")
            self._keeper.stdin.flush()
        if not self._keeper.stdout.readline():  # it is there when the line comes back
            _, why = self._keeper.communicate(timeout=LIMIT_S)
            raise OSError(why.decode().strip())

    @property
    def pid(self) -> int:
        """Of the process that keeps it."""
        return self._keeper.pid

    @property
    def path(self) -> str:
        """Of the namespace."""
        return f"/proc/{self.pid}/ns/net"

    def command(self, *command: str) -> list[str]:
        """What runs a command in it."""
        return ["nsenter", f"--net={self.path}", "--", *command]

    def run(self, *command: str) -> None:
        """Run a command in it.

        Raises:
            OSError: it failed.
        """
        done = subprocess.run(self.command(*command), capture_output=True, text=True, timeout=LIMIT_S)
        if done.returncode:
            raise OSError(f"{' '.join(command)}: {done.stderr.strip()}")

    def processes(self) -> list[int]:
        """All that run in it, but for the one that keeps it."""
        found, mine = [], os.stat(self.path).st_ino
        for entry in filter(str.isdigit, os.listdir("/proc")):
            with contextlib.suppress(OSError):
                if int(entry) != self.pid and os.stat(f"/proc/{entry}/ns/net").st_ino == mine:
                    found.append(int(entry))
        return found

    def kill_all(self) -> None:
        """End all processes in it at once."""
        until = time.monotonic() + LIMIT_S
        while (found := [pid for pid in self.processes() if pid != os.getpid()]) and time.monotonic() < until:
            for pid in found:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.02)

    def close(self) -> None:
        """End what runs in it; it is gone then."""
        self.kill_all()
        self._keeper.kill()
        self._keeper.communicate(timeout=LIMIT_S)


class Host(Namespace):
    """One host.

    Attributes:
        name: of it.
        address: of it, in the network.
    """

    def __init__(self, switch: Namespace, number: int) -> None:
        super().__init__()
        self._switch, self._port = switch, f"port{number}"
        self._started: list[subprocess.Popen[str]] = []
        self.name, self.address = f"host{number}", f"10.77.0.{number + 1}"
        switch.run("ip", "link", "add", self._port, "type", "veth", "peer", "name", "eth0", "netns", str(self.pid))
        switch.run("ip", "link", "set", self._port, "master", "bridge", "up")
        self.run("ip", "addr", "add", f"{self.address}/24", "dev", "eth0")
        self.run("ip", "link", "set", "eth0", "up")
        self.run("ip", "link", "set", "lo", "up")

    def cut(self) -> None:
        """Take its port out of the bridge: nothing passes, and neither side sees why."""
        self._switch.run("ip", "link", "set", self._port, "nomaster")

    def heal(self) -> None:
        """Put its port back."""
        self._switch.run("ip", "link", "set", self._port, "master", "bridge")

    def start(self, *command: str, env: Mapping[str, str] | None = None) -> subprocess.Popen[str]:
        """Start a program on it; its output can be read."""
        paths = os.pathsep.join([str(ROOT / "src"), str(ROOT)])
        process = subprocess.Popen(
            self.command(*command),
            env={**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1", **(env or {})},
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        self._started.append(process)
        return process

    @contextlib.contextmanager
    def entered(self) -> Iterator[None]:
        """Sockets that this thread makes inside the block are on this host; so are programs that it starts."""
        with open(f"/proc/self/task/{threading.get_native_id()}/ns/net") as before:
            enter(self.path)
            try:
                yield
            finally:
                enter(f"/proc/self/fd/{before.fileno()}")

    def num_bytes(self) -> tuple[int, int]:
        """That have left it, and that have reached it, since it is there."""
        text = subprocess.run(
            self.command("cat", "/proc/net/dev"), capture_output=True, text=True, timeout=LIMIT_S, check=True
        ).stdout
        words = next(line for line in text.splitlines() if "eth0:" in line).partition(":")[2].split()
        return int(words[8]), int(words[0])

    def close(self) -> None:
        """End it."""
        super().close()
        for process in self._started:
            process.kill()  # one that had not yet entered the network was not found there
            process.communicate(timeout=LIMIT_S)


class Network:
    """Hosts on a bridge, in a ``with`` block; at its end they are gone, with all that runs on them.

    Args:
        num_hosts: how many there are at first.

    Attributes:
        hosts: all.
    """

    def __init__(self, num_hosts: int) -> None:
        self._num_hosts = num_hosts
        self.hosts: list[Host] = []

    def __enter__(self) -> Self:
        self._switch = Namespace()
        try:
            self._switch.run("ip", "link", "add", "bridge", "type", "bridge")
            self._switch.run("ip", "link", "set", "bridge", "up")
            for _ in range(self._num_hosts):
                self.add()
        except BaseException:
            self.close()
            raise
        return self

    def add(self) -> Host:
        """One more."""
        self.hosts.append(Host(self._switch, len(self.hosts)))
        return self.hosts[-1]

    def close(self) -> None:
        """End all."""
        while self.hosts:
            self.hosts.pop().close()
        self._switch.close()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def enter(path: str) -> None:
    """Put this thread, and what it starts from now on, into a network namespace."""
    libc = ctypes.CDLL(None, use_errno=True)
    with open(path) as namespace:
        if libc.setns(namespace.fileno(), CLONE_NEWNET):
            number = ctypes.get_errno()
            raise OSError(number, f"setns: {os.strerror(number)}")
