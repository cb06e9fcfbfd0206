"""The lines to processes that host environments: what is sent, what is heard, and who is gone."""

from __future__ import annotations

import contextlib
import select
import time
from typing import NamedTuple

from rollwright._interrupts import uninterrupted
from rollwright._processes.channel import ChannelClosed
from rollwright._processes.child import STOPPED_S, Child
from rollwright._processes.failures import Failure
from rollwright.envs.batched.hosting.messages import Command
from rollwright.envs.batched.hosting.under_way import UnderWay

__all__ = ["ProcessLines"]


_NAP_S = 1.0


class _Watched(NamedTuple):
    process: int
    is_end: bool  # ready when the process has ended; otherwise, when it has sent something


class ProcessLines:
    """A line to each of several processes, which may be lost, and laid anew to another in its place.

    What is heard goes to ``under_way``, and nothing is heard by halves: Ctrl-C is held off until it is there.

    Args:
        num_processes: number of places.
        under_way: takes answers, and is told of processes that will not answer.

    Attributes:
        num_messages: sent and received so far.
    """

    def __init__(self, num_processes: int, under_way: UnderWay) -> None:
        self._under_way = under_way
        self._children: list[Child | None] = [None] * num_processes
        self._endings = ["has ended"] * num_processes
        self._poll = select.poll()
        self._watched: dict[int, _Watched] = {}  # by file descriptor
        self.num_messages = 0

    def lay(self, process: int, child: Child) -> None:
        """Let a child be the process of this place."""
        self._children[process] = child
        for fd, is_end in ((child.channel.fileno(), False), (child.sentinel, True)):
            self._watched[fd] = _Watched(process, is_end)
            self._poll.register(fd, select.POLLIN)

    def is_there(self, process: int) -> bool:
        """Whether a process was not lost, or another has its place."""
        return self._children[process] is not None

    def living(self) -> dict[int, Child]:
        """All that were not lost, by place."""
        return {process: child for process, child in enumerate(self._children) if child is not None}

    def send(self, process: int, message: Command) -> None:
        """Send a message, without waiting: what the line has no room for goes in :meth:`pump`."""
        child = self._children[process]
        if child is None:
            self.lose(process)
            return
        try:
            child.channel.post(message)
            self.num_messages += 1
        except ChannelClosed:
            self._hear_out(process, child)

    def see_off(self, limit_s: float) -> None:
        """Wait until all that was sent is on its way; a process that does not read it in time is killed."""
        until = time.monotonic() + limit_s
        while self._behind() and (rest := until - time.monotonic()) > 0:
            self.pump(rest)
        self.lose_deaf()

    def lose_deaf(self) -> None:
        """Kill those that have not read what they were sent: they are of no use."""
        for process in self._behind():
            self.lose(process, "did not read what it was sent")

    def _behind(self) -> list[int]:
        """Those with a line that had no room for all that was sent."""
        return [process for process, child in self.living().items() if child.channel.behind]

    def pump(self, timeout_s: float) -> bool:
        """Wait until something comes in, and take it; whether a command has got an answer, or never will.

        It may return before the time is over, with nothing.
        """
        for child in self._children:
            if child is not None and child.channel.behind:
                self._poll.register(child.channel.fileno(), select.POLLIN | select.POLLOUT)
        ready = self._poll.poll(min(timeout_s, _NAP_S) * 1e3)
        if not ready:
            return timeout_s > 0 and self._lose_stopped()
        advances = False
        with uninterrupted:
            for fd, events in ready:
                watched = self._watched.get(fd)
                child = None if watched is None else self._children[watched.process]
                if watched is None or child is None:
                    continue  # it was lost a moment ago
                if events & select.POLLOUT:
                    self._poll.register(fd, select.POLLIN)
                    with contextlib.suppress(ChannelClosed):  # heard below
                        child.channel.flush()
                listen = self._hear_out if watched.is_end else self._listen
                advances |= listen(watched.process, child)
        return advances

    def _lose_stopped(self) -> bool:
        """Kill those that a signal has stopped for long; see :meth:`pump`."""
        stopped = [process for process, child in self.living().items() if child.stopped_s() > STOPPED_S]
        advances = [
            self.lose(process, f"was stopped by a signal, did not go on for {STOPPED_S:g} s and was killed")
            for process in stopped
        ]
        return any(advances)

    def _listen(self, process: int, child: Child) -> bool:
        """Read the messages that are there, and ask for no more than can have come; see :meth:`pump`."""
        advances = False
        try:
            while child.channel.poll():
                advances |= self._take(process, child)
                if not self._under_way.owes(process):
                    break
        except ChannelClosed:
            advances |= self.lose(process)
        return advances

    def _hear_out(self, process: int, child: Child) -> bool:
        """Read the last messages of a process that has ended, and take leave of it; see :meth:`pump`."""
        advances = False
        with contextlib.suppress(ChannelClosed):
            while child.channel.poll():
                advances |= self._take(process, child)
        return self.lose(process) or advances

    def _take(self, process: int, child: Child) -> bool:
        message = child.channel.recv(0.0)
        self.num_messages += 1
        if isinstance(message, Failure):
            return self.lose(process, "has failed", message)
        return self._under_way.answer(process, message)

    def lose(self, process: int, how: str = "", failure: Failure | None = None) -> bool:
        """Take leave of a process, which gets killed if there is a phrase for ``how`` it was lost.

        Args:
            process: its place.
            how: why it is of no use; empty: it has ended.
            failure: its last words.

        Returns:
            Whether a command was waiting for it.
        """
        with uninterrupted:
            child, self._children[process] = self._children[process], None
            if child is not None:
                for fd in [fd for fd, watched in self._watched.items() if watched.process == process]:
                    self._poll.unregister(fd)
                    del self._watched[fd]
                if how:
                    child.kill()
                child.end(1.0)
                self._endings[process] = how or child.how_it_ended()
            return self._under_way.lose(process, self._endings[process], failure)

    def hang_up(self) -> None:
        """Forget all processes, which have ended."""
        self._children = [None] * len(self._children)
        self._watched.clear()
        self._poll = select.poll()
