"""Backend "process": a replay service in a process of this machine."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from rollwright._options import whole
from rollwright._processes.channel import Channel, ChannelClosed
from rollwright._processes.child import Child
from rollwright._processes.connection import ExceptionInfo, end_all
from rollwright.data.replay_buffers.service.buffer import ServiceOptions
from rollwright.data.replay_buffers.service.messages import Ready
from rollwright.data.replay_buffers.service.server import Recipe, Service
from rollwright.errors import WorkerError

DEFAULT_ADDRESS = "127.0.0.1:0"


@dataclass(frozen=True, kw_only=True)
class Options(ServiceOptions):
    """Options of ``service_backend="process"``, besides those of :class:`ServiceOptions`.

    Attributes:
        num_threads: that torch uses in the service.
    """

    num_threads: Annotated[int, whole(1)] = 1


class _ProcessHost:
    """The process of this machine in which a service runs."""

    def __init__(self, child: Child) -> None:
        self._child = child
        self._raised: str | None = None  # what it has sent at its end, which is read once

    @property
    def pid(self) -> int:
        """Of the process."""
        return self._child.pid

    def await_ready(self, timeout_s: float) -> Ready:
        """Wait until the service listens."""
        try:
            found = self._child.channel.recv(timeout_s)
        except ChannelClosed:
            self._child.wait(1.0)
            raise WorkerError(f"the replay service {self._child.how_it_ended()} before it was ready.") from None
        except TimeoutError:
            raise TimeoutError(f"waited start_timeout={timeout_s:g} s for the replay service to be ready.") from None
        if isinstance(found, ExceptionInfo):
            raise found.error("the replay service")
        ready: Ready = found
        return ready

    def how_it_ended(self) -> str | None:
        """A phrase that says how it ended; None: it runs, as far as is known."""
        if self._child.alive:
            return None
        if self._raised is None:
            try:
                found = self._child.take()
            except ChannelClosed:
                found = None
            self._raised = f", it had raised {found.kind}: {found.text}" if isinstance(found, ExceptionInfo) else ""
        return self._child.how_it_ended() + self._raised

    def end(self, timeout_s: float) -> None:
        """Make it end, if it does not by itself in time."""
        self._child.channel.close()
        end_all([self._child], timeout_s)


def host(recipe: Recipe, options: Options, before: _ProcessHost | None) -> _ProcessHost:
    """Start a service; ``before``: in place of one that has died."""
    return _ProcessHost(Child(_serve, recipe, name="rollwright-replay", num_threads=options.num_threads))


def _serve(channel: Channel, recipe: Recipe) -> None:
    service = Service(recipe)
    channel.send(service.ready)

    def look() -> None:
        if channel.poll():
            channel.recv(0.0)  # nothing is sent: the program has hung up, or has ended

    service.watch(channel.fileno(), look)
    service.serve(lambda: False)
