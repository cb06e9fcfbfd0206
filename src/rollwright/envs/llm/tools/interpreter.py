"""PythonInterpreter: a tool that runs Python code in a process of its own, with limits."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from rollwright.envs.llm.tools.core import Tool, ToolSession

_MARGIN_S = 10.0  # for the process to start, and for this one to kill it
_START_S = 30.0

# What runs in the process. It keeps the line to this one for itself; what code writes to descriptors 1 and 2 is lost.
_SERVE = r"""
import ast, io, json, os, resource, signal, struct, sys, traceback
memory, most, limit = (int(argument) for argument in sys.argv[1:4])
sys.argv = [""]
requests, answers = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
nowhere = os.open(os.devnull, os.O_RDWR)
for number in (0, 1, 2):
    os.dup2(nowhere, number)
resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
if memory:
    resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
class Output(io.TextIOBase):
    def __init__(self):
        self.parts, self.left = [], most
    def writable(self):
        return True
    def write(self, text):
        if self.left > 0:
            self.parts.append(text[: self.left])
            if len(text) > self.left:
                self.parts.append(f"\n[output cut after {most} characters]")
        self.left -= len(text)
        return len(text)
scope = {"__name__": "__main__"}
def run(code):
    tree = ast.parse(code, "<code>")
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    exec(compile(tree, "<code>", "exec"), scope)
    if last is not None:
        value = eval(compile(ast.Expression(last.value), "<code>", "eval"), scope)
        if value is not None:
            print(repr(value))
def answer(text):
    body = json.dumps(text).encode()
    answers.write(struct.pack("!I", len(body)) + body)
    answers.flush()
answer("ready")
while len(head := requests.read(4)) == 4:
    code = json.loads(requests.read(struct.unpack("!I", head)[0]))
    output = sys.stdout = sys.stderr = Output()
    signal.alarm(limit)  # if the process that asked is gone
    try:
        run(code)
    except BaseException as error:
        frames = traceback.extract_tb(error.__traceback__)
        frames = [frame for frame in frames if frame.filename == "<code>"]
        lines = ["Traceback (most recent call last):\n", *traceback.format_list(frames)] if frames else []
        output.write("".join([*lines, *traceback.format_exception_only(error)]))
    finally:
        signal.alarm(0)
    answer("".join(output.parts))
"""


class PythonInterpreter(Tool):
    r"""Runs Python code, each conversation in a process of its own, which ends with the conversation.

    Variables last from call to call. The result is what the code prints, the value of its last expression, and the
    traceback of what it raises. The limits guard against accidents. They are no sandbox: the code may do whatever this
    user may do.

    Args:
        timeout_s: seconds that a call may take. Then the process is killed, and the next call finds a new one.
        memory_bytes: of the process, as ``RLIMIT_AS``; None: no limit.
        output_chars: of a result; more is cut off.
        name: of the tool.

    Example:
        >>> session = PythonInterpreter(timeout_s=20.0).begin()
        >>> session.function("x = 20")
        ''
        >>> session.function("print('x is', x); x + 1")
        'x is 20\n21\n'
        >>> session.close()
    """

    has_state = True

    def __init__(
        self,
        *,
        timeout_s: float = 10.0,
        memory_bytes: int | None = 2**30,
        output_chars: int = 10_000,
        name: str = "python",
    ) -> None:
        if timeout_s <= 0 or output_chars < 1:
            raise ValueError(
                f"timeout_s and output_chars: expected more than 0, got {timeout_s} and {output_chars}. Give limits."
            )
        if memory_bytes is not None and memory_bytes < 2**26:
            raise ValueError(f"memory_bytes: expected at least {2**26}, which Python needs itself, got {memory_bytes}.")
        self.name, self._limits = name, (timeout_s, memory_bytes, output_chars)
        self.timeout_s = timeout_s + _MARGIN_S + _START_S  # the session keeps the limit of a call itself
        described = "Run Python code. Variables last from call to call. Returns what it prints, and its last value."
        code = {"type": "string", "description": "The code to run."}
        parameters = {"type": "object", "properties": {"code": code}, "required": ["code"]}
        self.schema: Mapping[str, Any] = {
            "type": "function",
            "function": {"name": name, "description": described, "parameters": parameters},
        }

    def begin(self) -> ToolSession:
        """See :meth:`Tool.begin`; the process starts with the first call."""
        return InterpreterSession(*self._limits)


class InterpreterSession(ToolSession):
    """The process of one conversation."""

    def __init__(self, timeout_s: float, memory_bytes: int | None, output_chars: int) -> None:
        self._timeout_s, self._memory, self._most = timeout_s, memory_bytes, output_chars
        self._process: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()
        self._closed = False

    @property
    def function(self) -> Callable[..., str]:
        """Runs code and returns its output."""
        return self.run

    @property
    def pid(self) -> int | None:
        """Of the process; None: there is none now."""
        return None if self._process is None else self._process.pid

    def run(self, code: str) -> str:
        """Run code.

        Raises:
            TimeoutError: it took longer than the limit, and was killed.
            RuntimeError: its process has ended; it may have been out of memory.
        """
        if not isinstance(code, str):
            raise TypeError(f"code: expected a string, got {type(code).__name__}.")
        process = self._started()
        body = json.dumps(code).encode()
        stdin = process.stdin
        assert stdin is not None
        try:
            stdin.write(struct.pack("!I", len(body)) + body)
            stdin.flush()
            return self._answer(process, self._timeout_s)
        except TimeoutError:
            self._end()
            raise TimeoutError(
                f"took longer than {self._timeout_s:g} seconds and was stopped; variables are lost"
            ) from None
        except (BrokenPipeError, EOFError):
            status = self._end()
            raise RuntimeError(f"the interpreter ended with status {status}; variables are lost") from None

    def _started(self) -> subprocess.Popen[bytes]:
        with self._lock:
            if self._closed:
                raise RuntimeError("the conversation is over")
            if self._process is None:
                limit = int(self._timeout_s + _MARGIN_S) + 1
                arguments = [str(self._memory or 0), str(self._most), str(limit)]
                self._process = subprocess.Popen(
                    [sys.executable, "-I", "-c", _SERVE, *arguments],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.DEVNULL,
                    start_new_session=True,
                )
                fresh = True
            else:
                fresh = False
            process = self._process
        if fresh:
            self._answer(process, _START_S)
        return process

    @staticmethod
    def _answer(process: subprocess.Popen[bytes], limit_s: float) -> str:
        assert process.stdout is not None
        fd, until, held = process.stdout.fileno(), time.monotonic() + limit_s, b""
        poll = select.poll()  # which takes descriptors of any number
        poll.register(fd, select.POLLIN)
        while len(held) < 4 or len(held) < 4 + struct.unpack("!I", held[:4])[0]:
            if not poll.poll(max(0.0, until - time.monotonic()) * 1e3):
                raise TimeoutError
            part = os.read(fd, 1 << 16)
            if not part:
                raise EOFError
            held += part
        return str(json.loads(held[4:]))

    def _end(self) -> int | None:
        """Kill the process, and what it has started."""
        with self._lock:
            process, self._process = self._process, None
        if process is None:
            return None
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        status = process.wait()
        for pipe in (process.stdin, process.stdout):
            with contextlib.suppress(OSError):
                if pipe is not None:
                    pipe.close()
        return status

    def close(self) -> None:
        """The conversation is over."""
        self._closed = True
        self._end()
