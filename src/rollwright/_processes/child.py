"""Child: a process that serves a channel, from its start to its end."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import select
import signal
import threading
import time
import weakref
from collections.abc import Callable
from multiprocessing.connection import wait
from typing import Any

from rollwright._processes.channel import ByValue, Channel, ChannelClosed
from rollwright._processes.connection import ExceptionInfo, end_all
from rollwright._processes.files import raise_file_limit
from rollwright._processes.forks import ExitStage, call_at_exit
from rollwright._processes.start import allow_interrupts, check_start_method, new_process

STOPPED_S = 120.0  # that a process which a signal has stopped is waited for, by default

_EXIT_S = 1.0  # for all children together, when this process ends
_LAST_BREATH_S = 2.0
_LOOK_S, _LONGEST_GAP_S = 1.0, 5.0  # whether a process is stopped
_ALONE_S = 10.0  # for a process to end by itself when its parent has hung up


class Child:
    """Runs ``serve(channel, *args)`` in a new process of this machine, and is the connection to it.

    ``serve`` returns when it is asked to, or when its channel raises ``ChannelClosed``: its parent has closed it, or
    has ended. What else it raises is its last message, an :class:`~rollwright._processes.connection.ExceptionInfo`.
    Ctrl-C does not reach it: its parent decides. One that is stuck ends ten seconds after its parent has closed the
    channel, or has ended.

    Args:
        serve: a function of a module.
        *args: for it; pickled by value.
        name: of the process, for messages.
        start_method: ``"forkserver"`` (None), ``"spawn"`` or ``"fork"``.
        num_threads: that torch uses there.

    Attributes:
        channel: to it.
        host: None: this machine.

    Example:
        >>> from rollwright._processes.child import echo
        >>> child = Child(echo, name="parrot")
        >>> child.channel.send("hello")
        >>> child.channel.recv(10.0)
        'hello'
        >>> child.channel.close()
        >>> child.end(10.0), child.how_it_ended()
        ('ended', 'exited with status 0')
    """

    host: str | None = None

    def __init__(
        self,
        serve: Callable[..., None],
        *args: Any,
        name: str,
        start_method: str | None = None,
        num_threads: int = 1,
    ) -> None:
        check_start_method("start_method", start_method)
        raise_file_limit()
        self.name = name
        self._home: int | None = None  # in a forked process: the one that this child is of
        self.channel, theirs = Channel.pair()
        self.post, self.flush, self.take = self.channel.post, self.channel.flush, self.channel.take
        payload = args if start_method == "fork" else ByValue(args)
        self._imports_main = start_method == "spawn"
        self._process = new_process(start_method, _main, (theirs, serve, payload, num_threads), name)
        call_at_exit(_end_all, ExitStage.PROCESSES)
        _orphans[:] = [process for process in _orphans if process.is_alive()]
        _living.add(self)
        try:
            self._process.start()
        except BaseException:
            _living.discard(self)
            self.channel.close()
            raise
        finally:
            theirs.close()
        self._looked_at, self._stopped_s = time.monotonic(), 0.0
        self._unwatch = weakref.finalize(self, _orphans.append, self._process)
        self._unwatch.atexit = False

    @property
    def pid(self) -> int:
        """Of the process."""
        return int(self._process.pid)

    @property
    def sentinel(self) -> int:
        """A file descriptor that is ready to be read when the process has ended."""
        return int(self._process.sentinel)

    def clock(self) -> float:
        """Of this machine, in seconds."""
        return time.monotonic()

    # Messages, see Connection --------------------------------------------------------------------

    def filenos(self) -> tuple[int, ...]:
        """The channel, and the sentinel."""
        return self.channel.fileno(), self.sentinel

    @property
    def behind(self) -> bool:
        """Whether something was posted that there was no room for."""
        return self.channel.behind

    def close(self) -> None:
        """Close the channel, which asks the process to end; forget it if it has ended."""
        self.channel.close()
        if not self.alive:
            self._unwatch.detach()
            _living.discard(self)

    # Its end --------------------------------------------------------------------------------------

    @property
    def alive(self) -> bool:
        """Whether the process has not ended, and is a child of this one."""
        return self._home is None and bool(self._process.is_alive())

    def hang_up(self) -> Any:
        """Close the channel, on which the process ends by itself; returns the process."""
        self.channel.close()
        return self._process

    def disown(self) -> None:
        """In a forked process: hang up; the child is one of the process that this one was forked from."""
        self.channel.close()
        self._home = os.getppid()

    def stopped_s(self) -> float:
        """For how long the process has been seen stopped by a signal (SIGSTOP); to be asked now and then.

        It looks once a second. A longer time between two looks counts for five seconds at most: this process may have
        been stopped itself, with its children.
        """
        now = time.monotonic()
        if now - self._looked_at >= _LOOK_S:
            gap, self._looked_at = min(now - self._looked_at, _LONGEST_GAP_S), now
            self._stopped_s = self._stopped_s + gap if _is_stopped(self.pid) else 0.0
        return self._stopped_s

    def how_it_ended(self) -> str:
        """A phrase for messages."""
        if self._home is not None:
            return f"is a child of process {self._home}, which this one was forked from: use it there"
        status = self._process.exitcode
        if status is None:
            return "is alive"
        if status and self._imports_main and not self.channel.has_received:
            return (
                f"exited with status {status} (its error is printed above; with start_method='spawn' it imports the "
                'program\'s main module: write what starts processes below `if __name__ == "__main__":`)'
            )
        if status >= 0:
            return f"exited with status {status}"
        try:
            return f"was killed by {signal.Signals(-status).name}"
        except ValueError:
            return f"was killed by signal {-status}"

    def wait(self, timeout_s: float) -> bool:
        """Wait until the process has ended; whether it has."""
        if not self.alive:
            return True
        if not wait([self.sentinel], max(0.0, timeout_s)):
            return False
        until = time.monotonic() + _LAST_BREATH_S
        while self.alive and time.monotonic() < until:  # its files are closed a moment before it has ended
            time.sleep(1e-3)
        return not self.alive

    def terminate(self) -> None:
        """Ask the process to end, by SIGTERM."""
        self._signal(signal.SIGTERM)

    def kill(self) -> None:
        """End the process at once."""
        self._signal(signal.SIGKILL)

    def _signal(self, number: int) -> None:
        if self.alive:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def end(self, timeout_s: float) -> str:
        """Wait until the process has ended, and make it end if it does not. The caller has asked it to, before.

        Args:
            timeout_s: for the process to end by itself. After it, there is a second more until SIGTERM turns into
                SIGKILL.

        Returns:
            ``"ended"``, ``"terminated"``, or ``"killed"``.
        """
        [how] = end_all([self], timeout_s)
        return how


def _is_stopped(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return file.read().rpartition(b")")[2].split()[:1] == [b"T"]
    except OSError:  # it has ended; or this system has no such files
        return False


def _main(channel: Channel, serve: Callable[..., None], payload: Any, num_threads: int) -> None:
    """What the process runs."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    allow_interrupts()
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    import torch  # not in a process that only starts others

    torch.set_num_threads(num_threads)
    watch = threading.Thread(target=_end_when_alone, args=(channel.fileno(),), name="rollwright-watch", daemon=True)
    watch.start()
    try:
        serve(channel, *(payload.value if isinstance(payload, ByValue) else payload))
    except ChannelClosed:
        raise SystemExit(0) from None  # whoever would receive it is gone
    except BaseException as error:
        with contextlib.suppress(ChannelClosed, TimeoutError, OSError):
            channel.send(ExceptionInfo.of(error))
        raise SystemExit(1) from None
    finally:
        channel.close()


def _end_when_alone(line: int) -> None:
    """End this process when its parent has hung up or ended, even if it is stuck: nobody else would."""
    poll = select.poll()
    poll.register(line, 0)  # a hang-up is always reported
    parent = multiprocessing.parent_process()
    if parent is not None:
        poll.register(parent.sentinel, select.POLLIN)  # somebody else may have inherited the other end of the line
    poll.poll()
    time.sleep(_ALONE_S)  # to end by itself, with ChannelClosed
    os._exit(1)


def echo(channel: Channel) -> None:
    """Send back each message, until the other end hangs up."""
    with contextlib.suppress(ChannelClosed):
        while True:
            if channel.poll(1.0):
                channel.send(channel.recv(0.0))


def sleep(channel: Channel, seconds: float) -> None:
    """Send ``"asleep"``, and read nothing for a while."""
    channel.send("asleep")
    time.sleep(seconds)


_living: weakref.WeakSet[Child] = weakref.WeakSet()
_orphans: list[Any] = []  # processes whose Child is gone: they have got ChannelClosed, and end, unless they are stuck


def _forget_all() -> None:
    """In a forked process, whose copies of open ends would keep its siblings from getting ``ChannelClosed``."""
    for child in list(_living):
        child.disown()
    _living.clear()
    _orphans.clear()


os.register_at_fork(after_in_child=_forget_all)


def _end_all() -> None:
    """End what still runs."""
    processes = [child.hang_up() for child in list(_living) if child.alive]
    processes += [process for process in _orphans if process.is_alive()]
    for number in (None, signal.SIGTERM, signal.SIGKILL):
        processes = [process for process in processes if process.is_alive()]
        for process in processes:
            if number is not None:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process.pid, number)
        until = time.monotonic() + _EXIT_S
        for process in processes:
            process.join(max(1e-3, until - time.monotonic()))
