"""A Ray cluster for tests: started once for all processes of a test run, and ended with the last of them.

It runs apart from the test process (Ray's own processes would be taken for what a test has left behind), in a daemon
that lives as long as somebody is connected to it.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import select
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

NUM_CPUS = 8
STORE_BYTES = 80 * 2**20
START_S = 120.0
_FIRST_S = 60.0


def attach() -> tuple[socket.socket, str]:
    """The address of the cluster, which is there until the connection is closed."""
    run = os.environ.get("PYTEST_XDIST_TESTRUNUID", str(os.getpid()))
    path = str(Path(tempfile.gettempdir()) / f"rollwright-ray-{run}")
    until = time.monotonic() + START_S
    while True:
        _start_if_alone(path)  # each time: one that is ending takes nobody any more
        line = socket.socket(socket.AF_UNIX)
        try:
            line.connect(f"{path}.sock")
            line.settimeout(START_S)
            address, token = line.recv(1000).decode().split()
            _use(token)
            return line, address
        except (OSError, ValueError):
            line.close()
            assert time.monotonic() < until, "the Ray cluster did not start"
            time.sleep(0.05)


@contextlib.contextmanager
def attached() -> Iterator[str]:
    """This process is connected to the cluster, whose address it is."""
    import ray

    line, address = attach()
    try:
        ray.init(address=address, log_to_driver=False, configure_logging=False)
        yield address
    finally:
        ray.shutdown()
        line.close()


def _start_if_alone(path: str) -> None:
    """Start the daemon, unless one holds the lock, which goes with it however it ends."""
    with open(f"{path}.lock", "w") as lock, contextlib.suppress(BlockingIOError):
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        _start(path, lock.fileno())


def _start(path: str, lock: int) -> None:
    command = [sys.executable, __file__, path]
    paths = [str(Path(__file__).parents[1] / "src"), *filter(None, [os.environ.get("PYTHONPATH")])]
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    subprocess.run(
        command, check=True, stdout=subprocess.DEVNULL, env=environ, start_new_session=True, pass_fds=(lock,)
    )


def _use(token: str) -> None:
    """Have Ray use a token, in this process and those that it starts."""
    os.environ.update(RAY_AUTH_MODE="token", RAY_AUTH_TOKEN=token)
    from ray._raylet import AuthenticationTokenLoader, Config

    Config.initialize("")  # it was read when ray was imported
    AuthenticationTokenLoader.instance().reset_cache()


def _serve(path: str) -> None:
    token = secrets.token_hex(32)
    _use(token)
    import ray

    listener = socket.socket(socket.AF_UNIX)
    context = ray.init(
        address="local",
        num_cpus=NUM_CPUS,
        object_store_memory=STORE_BYTES,
        include_dashboard=False,
        configure_logging=False,
        log_to_driver=False,
    )
    Path(f"{path}.sock").unlink(missing_ok=True)  # of one that was killed
    mask = os.umask(0o077)
    listener.bind(f"{path}.sock")
    os.umask(mask)
    listener.listen()
    lines: list[socket.socket] = []
    until = time.monotonic() + _FIRST_S
    while lines or time.monotonic() < until:
        ready, _, _ = select.select([listener, *lines], [], [], 1.0)
        for each in ready:
            if each is listener:
                line, _ = listener.accept()
                line.sendall(f"{context.address_info['address']} {token}".encode())
                lines.append(line)
                until = 0.0
            else:
                each.close()
                lines.remove(each)
    ray.shutdown()


if __name__ == "__main__":
    if os.fork():  # a child of nobody: not a descendant of the tests
        os._exit(0)
    path = sys.argv[1]
    try:
        _serve(path)
    finally:
        Path(f"{path}.sock").unlink(missing_ok=True)
