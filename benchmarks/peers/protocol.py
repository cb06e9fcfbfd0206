"""How the benchmarks talk to a peer: a process of the peer's own Python that answers lines with lines of JSON."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from threading import Thread
from typing import Any

ROOT = Path(__file__).parents[2]
START_LIMIT_S = 180.0  # imports of a cold installation take long
ROUND_LIMIT_S = 60.0


class PeerError(Exception):
    """A peer could not be started, or stopped answering; the message gives the reason, in a line."""


def serve(make: Callable[[str, str], Callable[[], int]], unmeasured: int = 0) -> None:
    """Answer the benchmarks until they hang up.

    Args:
        make: from the names of a case and a side to a function that collects a batch and returns its number of frames.
        unmeasured: batches to collect before each measurement: what was collected in the meantime is not counted.
    """
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what packages print is not an answer
    collect = make(*sys.argv[1:3])
    collect()  # what happens once, happens here
    for seconds in _requests(answers):
        for _ in range(unmeasured):
            collect()
        frames, start = 0, time.perf_counter()
        while (elapsed := time.perf_counter() - start) < seconds:
            frames += collect()
        print(json.dumps({"frames": frames, "seconds": elapsed}), file=answers, flush=True)


def run_once(python: Path, module: str, *arguments: str, limit_s: float = START_LIMIT_S) -> dict[str, Any]:
    """What a module prints in its last line, as JSON, when it is run in a process of its own.

    Raises:
        PeerError: it fails, or does not end within ``limit_s`` seconds.
    """
    if not python.exists():
        raise PeerError(f"there is no {python.name} at {_shown(python)}")
    command = [str(python), "-m", module, *arguments]
    try:
        done = subprocess.run(
            command, cwd=ROOT, env=_environment(), capture_output=True, text=True, timeout=limit_s, check=False
        )
    except subprocess.TimeoutExpired:
        raise PeerError(f"did not end within {limit_s:.0f} s") from None
    if done.returncode != 0:
        lines = [line.strip() for line in done.stderr.splitlines() if line.strip()]
        raise PeerError(lines[-1] if lines else f"ended with status {done.returncode}")
    answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return answer


def _environment() -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "PYTHONPATH": ""}


def _requests(answers):
    print(json.dumps({"ready": True}), file=answers, flush=True)
    for line in sys.stdin:
        yield float(line)


class Peer:
    """A running peer, stopped with all its processes but in its turns: the workers of some go on for long.

    Args:
        python: of the environment that the peer is installed in.
        module: the peer's module, such as ``"benchmarks.peers.torchrl_loop"``.
        case: name of the case.
        side: name of the side.

    Raises:
        PeerError: it does not start.
    """

    def __init__(self, python: Path, module: str, case: str, side: str) -> None:
        if not python.exists():
            raise PeerError(f"there is no {python.name} at {_shown(python)}")
        self._process = subprocess.Popen(
            [str(python), "-m", module, case, side],
            cwd=ROOT,
            env=_environment(),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        self._errors: deque[str] = deque(maxlen=20)
        self._reader = Thread(target=self._read_errors, daemon=True)  # a full pipe would stop the peer
        self._reader.start()
        try:
            self._answer(START_LIMIT_S)
        except PeerError:
            self.close()
            raise
        self._signal(signal.SIGSTOP)

    def _signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, number)

    def rate(self, seconds: float) -> float:
        """Frames per second over at least so many seconds.

        Raises:
            PeerError: it does not answer.
        """
        self._signal(signal.SIGCONT)
        try:
            print(seconds, file=self._process.stdin, flush=True)
            answer = self._answer(ROUND_LIMIT_S + seconds)
        except BrokenPipeError:
            raise PeerError(self._last_error()) from None
        finally:
            self._signal(signal.SIGSTOP)
        return answer["frames"] / answer["seconds"]

    def close(self) -> None:
        """Let it end, and make it end where it does not."""
        self._signal(signal.SIGCONT)
        for pipe in (self._process.stdin, self._process.stdout):
            pipe.close()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(10)

    def _answer(self, limit_s: float) -> dict[str, float]:
        ready, *_ = select.select([self._process.stdout], [], [], limit_s)
        if not ready:
            raise PeerError(f"no answer within {limit_s:.0f} s")
        line = self._process.stdout.readline()
        if not line:
            raise PeerError(self._last_error())
        return json.loads(line)

    def _read_errors(self) -> None:
        with self._process.stderr as stream:
            self._errors.extend(line.strip() for line in stream if line.strip())

    def _last_error(self) -> str:
        self._process.wait(10)
        self._reader.join(10)  # its last output is read
        return self._errors[-1] if self._errors else f"ended with status {self._process.returncode}"


def _shown(path: Path) -> str:
    try:
        return str(path.relative_to(ROOT))
    except ValueError:
        return str(path)
