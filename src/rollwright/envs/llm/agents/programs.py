"""Programs: functions of this process and commands, each run once for a conversation, with limits."""

from __future__ import annotations

import contextlib
import inspect
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

_END_S = 2.0  # for what reads the output, and for the keeper
_ADDRESS, _KEY = "OPENAI_BASE_URL", "OPENAI_API_KEY"
_LIMITED = 'ulimit -v "$0" && exec "$@"'

# Kills the process groups that it was told of when the process that told it is gone.
_KEEP = r"""
import os, signal, sys
groups = set()
for line in sys.stdin:
    number = int(line)
    groups.add(number) if number > 0 else groups.discard(-number)
for group in groups:
    try:
        os.killpg(group, signal.SIGKILL)
    except OSError:
        pass
"""


class AgentError(Exception):
    """A program failed, or did something that it must not."""


@dataclass(frozen=True)
class Command:
    """A program to run for each conversation, in a process of its own.

    It finds the address and the key in ``OPENAI_BASE_URL`` and ``OPENAI_API_KEY``, where clients of OpenAI look for
    them, and the row of the data on its standard input, as JSON. Its conversation ends when it does. Its whole process
    group is killed then, at a limit, and when this process is killed. Status 0 is success.

    Args:
        args: the command; or a function of the row that returns it.
        env: further variables of its environment.
        cwd: its folder; None: that of this process.
        memory_bytes: of address space, for each of its processes (``ulimit -v``); None: no limit.
        output_bytes: of what it prints at its end, for messages about its failure; the rest is read and dropped.

    Raises:
        TypeError, ValueError: an argument is wrong.

    Example:
        >>> Command(["python", "agent.py"], memory_bytes=2**31).output_bytes
        4096
    """

    args: Sequence[str] | Callable[[Mapping[str, Any]], Sequence[str]]
    env: Mapping[str, str] | None = None
    cwd: str | os.PathLike[str] | None = None
    memory_bytes: int | None = None
    output_bytes: int = 4096

    def __post_init__(self) -> None:
        if not callable(self.args):
            self._checked(self.args)
        if self.memory_bytes is not None and self.memory_bytes < 2**20:
            raise ValueError(f"memory_bytes: expected at least {2**20}, or None for no limit, got {self.memory_bytes}.")
        if self.output_bytes < 1:
            raise ValueError(f"output_bytes: expected at least 1, got {self.output_bytes}.")

    @staticmethod
    def _checked(args: Any) -> list[str]:
        if isinstance(args, str) or not isinstance(args, Sequence) or not args:
            raise TypeError(
                f"args: expected a list of words, got {args!r}. Pass ['python', 'agent.py'], or a function of the row "
                "that returns such a list."
            )
        return [os.fspath(word) for word in args]

    def words(self, row: Mapping[str, Any]) -> list[str]:
        """What is run for a row."""
        words = self._checked(self.args(row) if callable(self.args) else self.args)
        if self.memory_bytes is None:
            return words
        return ["/bin/sh", "-c", _LIMITED, str(self.memory_bytes // 1024), *words]


class Program(Protocol):
    """A program for one conversation."""

    @property
    def function(self) -> Callable[[], Any]:
        """Runs it to its end, and returns its reward, or None; may be a coroutine function."""

    def stop(self) -> None:
        """End it, as far as that is possible. Called by any thread, before, while and after it runs."""


class CommandRun:
    """A command for one conversation.

    Args:
        command: what is run.
        row: of the data.
        address: of the endpoint.
        key: for it.
        keeper: ends it when this process is gone.
    """

    def __init__(self, command: Command, row: Mapping[str, Any], address: str, key: str, keeper: Keeper) -> None:
        self._command, self._row, self._keeper = command, row, keeper
        self._variables = {**os.environ, **(command.env or {}), _ADDRESS: address, _KEY: key}
        self._process: subprocess.Popen[bytes] | None = None
        self._lock, self._stopped = threading.Lock(), False
        self._tail = b""

    @property
    def function(self) -> Callable[[], Any]:
        """Runs it to its end, and returns its reward, or None; may be a coroutine function."""
        return self._run

    def _run(self) -> None:
        process = self._started()
        if process is None:
            return
        reads = threading.Thread(target=self._read, args=(process,), daemon=True, name="rollwright-agent-output")
        reads.start()
        assert process.stdin is not None
        with contextlib.suppress(OSError), process.stdin as stdin:  # it may not read its row
            stdin.write(json.dumps(dict(self._row), default=str).encode() + b"\n")
        if hasattr(os, "waitid"):  # its number is not free before the group is killed
            os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        else:
            process.wait()
        self._kill(process)
        status = process.wait()
        self._keeper.forget(process.pid)
        reads.join(_END_S)
        if status and not self._stopped:
            tail = self._tail.decode(errors="replace").strip()
            raise AgentError(f"ended with status {status}" + (f": {tail}" if tail else ""))

    def _started(self) -> subprocess.Popen[bytes] | None:
        with self._lock:
            if self._stopped:
                return None
            process = self._process = subprocess.Popen(
                self._command.words(self._row),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                env=self._variables,
                cwd=self._command.cwd,
                start_new_session=True,
            )
            self._keeper.keep(process.pid)
            return process

    def _read(self, process: subprocess.Popen[bytes]) -> None:
        assert process.stdout is not None
        with process.stdout as output:
            while part := output.read1(1 << 16):  # type: ignore[attr-defined]
                self._tail = (self._tail + part)[-self._command.output_bytes :]

    def _kill(self, process: subprocess.Popen[bytes]) -> None:
        with self._lock:
            self._process = None
            with contextlib.suppress(OSError):
                os.killpg(process.pid, signal.SIGKILL)

    def stop(self) -> None:
        """End it, as far as that is possible. Called by any thread, before, while and after it runs."""
        with self._lock:
            self._stopped = True
            if self._process is not None:
                with contextlib.suppress(OSError):
                    os.killpg(self._process.pid, signal.SIGKILL)


class FunctionRun:
    """A function for one conversation, in a thread, or in an event loop."""

    def __init__(self, agent: Callable[..., Any], row: Mapping[str, Any], address: str, key: str) -> None:
        self._agent = agent
        self._given = {"row": row, "base_url": address, "api_key": key}

    @property
    def function(self) -> Callable[[], Any]:
        """Runs it to its end, and returns its reward, or None; may be a coroutine function."""
        agent, given = self._agent, self._given
        called = getattr(agent, "__call__", None)  # noqa: B004
        if not inspect.iscoroutinefunction(agent) and not inspect.iscoroutinefunction(called):
            return lambda: agent(**given)

        async def run() -> Any:
            return await agent(**given)

        return run

    def stop(self) -> None:
        """See :meth:`Program.stop`: its next request is refused; a thread cannot be ended."""


class Keeper:
    """A process that kills the process groups of programs when this process is gone; it starts with the first one."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None
        self._lock = threading.Lock()

    def keep(self, group: int) -> None:
        """Kill it when this process is gone."""
        with self._lock:
            if self._process is None:
                command = [sys.executable, "-I", "-S", "-c", _KEEP]
                self._process = subprocess.Popen(command, stdin=subprocess.PIPE, text=True, start_new_session=True)
            self._write(self._process, group)

    def forget(self, group: int) -> None:
        """It has ended."""
        with self._lock:
            if self._process is not None:
                self._write(self._process, -group)

    @staticmethod
    def _write(process: subprocess.Popen[str], number: int) -> None:
        assert process.stdin is not None
        with contextlib.suppress(OSError):  # somebody killed it
            process.stdin.write(f"{number}\n")
            process.stdin.flush()

    def close(self) -> None:
        """End it, and what it was told of. May be called again."""
        with self._lock:
            process, self._process = self._process, None
        if process is None:
            return
        assert process.stdin is not None
        with contextlib.suppress(OSError):
            process.stdin.close()
        try:
            process.wait(_END_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def check_agent(agent: Any) -> None:
    """Check what is run for each conversation.

    Raises:
        TypeError: it is neither a command nor a function of row, base_url and api_key.
    """
    if isinstance(agent, Command):
        return
    if not callable(agent):
        raise TypeError(
            f"agent: expected a function of row, base_url and api_key, or Command(...), got {type(agent).__name__}. "
            "Pass Command(['python', 'agent.py']) for a program."
        )
    try:
        inspect.signature(agent).bind(row={}, base_url="", api_key="")
    except TypeError as error:
        raise TypeError(
            f"agent: the function is called with row=, base_url= and api_key=, and does not take them: {error}. Write "
            "def agent(row, base_url, api_key)."
        ) from None
    except ValueError:  # one of C has no signature
        return
