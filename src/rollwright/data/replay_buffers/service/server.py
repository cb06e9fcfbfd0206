"""The process of a replay service: connections, and requests, each carried out once, from those who may."""

from __future__ import annotations

import contextlib
import operator
import os
import pickle
import select
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch

from rollwright._memory import keep_freed_memory
from rollwright._processes.channel import ChannelClosed
from rollwright._processes.connection import ExceptionInfo
from rollwright._processes.network.channel import MessageForged, NetworkChannel
from rollwright._processes.network.handshake import IncomingHandshake, Listener
from rollwright.data.replay_buffers.buffer import ReplayBuffer
from rollwright.data.replay_buffers.service.dumps import Dumps, Journal
from rollwright.data.replay_buffers.service.messages import (
    Beat,
    Counts,
    Info,
    Ready,
    Reply,
    Request,
    WriterName,
    memory_for,
    pack,
    unpack,
)
from rollwright.data.replay_buffers.storages.storage import Storage

Answer = tuple[Reply, Sequence[memoryview]]
_LASTING = {"insert_transform", "set_sampler", "set_writer", "set_storage", "set_rng"}  # and no element
_REPLACING = {"empty", "loads", "load_state_dict", "set_storage"}  # all elements: the last dump holds none of these
_FORGET_S = 600.0  # after which replies for a client that is gone are dropped


@dataclass
class Record:
    """What is known of a client, whether it is connected or not.

    Attributes:
        writer: whose writes it sends.
        last: the highest number of its requests that was taken in.
        failed: numbers of those that raised.
        answers: to its requests, by number: those that it may not have received.
        seen_at: when it was heard of last, by ``time.monotonic()``.
    """

    writer: WriterName | None = None
    last: int = 0
    failed: set[int] = field(default_factory=set)
    answers: dict[int, Answer] = field(default_factory=dict)
    seen_at: float = field(default_factory=time.monotonic)


class _Waiting:
    """A sample that the limiter does not allow yet."""

    def __init__(self, client: str, request: Request, size: int, inserted: int) -> None:
        self.client, self.request, self.size = client, request, size
        self.inserted, self.since = inserted, time.monotonic()


class Keeper:
    """Carries out requests, each once, from those who may.

    A client numbers its requests. One that comes again, because a connection broke before its reply arrived, is not
    carried out again: the reply is sent again. A writer that was given up is refused.

    Args:
        buffer: what the requests are about.
        dumps: saves it now and then; None: nothing does.
        journal: of what no dump has; None: there is none.

    Attributes:
        buffer: see above.
        records: of clients, by id.
        least: by the name of a writer: the generations below are given up.
    """

    def __init__(self, buffer: ReplayBuffer, dumps: Dumps | None = None, journal: Journal | None = None) -> None:
        self.buffer, self._dumps, self._journal = buffer, dumps, journal
        self.records: dict[str, Record] = {}
        self.least: dict[str, int] = {}
        self._waiting: list[_Waiting] = []
        changes = [] if journal is None else journal.requests
        before = 0 if dumps is None or journal is None else dumps.num_changes(journal.run)
        self._redo(changes[:before])  # elements and states are loaded into the parts that they were saved with
        if dumps is not None:
            last, answers = dumps.restore(buffer)
            for client, number in last.items():
                record = self.records.setdefault(client, Record())
                record.last = number
                for done, value in answers.get(client, {}).items():
                    body, parts = pack(value)
                    record.answers[done] = Reply(done, body), parts
        self._redo(changes[before:])
        if journal is not None:
            self.least = {name: generation + 1 for name, generation in journal.given_up.items()}
            buffer.storage.ledger.raise_ids(journal.ids_end)
        self.info = Info.of(buffer)

    def refusal(self, writer: WriterName | None) -> str | None:
        """Why a writer may not take part, as a phrase; None: it may."""
        if writer is None or writer.generation >= self.least.get(writer.name, 0):
            return None
        return f"writer {writer.name} of generation {writer.generation} was given up, and nothing of it is stored"

    def met(self, client: str, writer: WriterName | None) -> None:
        """A client has connected."""
        record = self.records.setdefault(client, Record())
        record.writer, record.seen_at = writer, time.monotonic()

    # Requests -----------------------------------------------------------------------------------------

    def take(self, client: str, request: Request, pieces: Sequence[memoryview]) -> Answer | None:
        """Carry out a request, unless it was before; None: the reply comes from :meth:`tend`."""
        record = self.records[client]
        record.seen_at = time.monotonic()
        for number in [number for number in record.answers if number < request.received]:
            del record.answers[number]
        if request.number <= record.last or request.number in record.answers:
            return record.answers.get(request.number)  # or it waits, or the client has had the reply
        record.last = request.number
        refused = self.refusal(record.writer)
        if refused is not None:
            return self._failed(client, request.number, PermissionError(f"{refused}."))
        try:
            given = unpack(request.body, pieces)
        except Exception as error:  # whatever a class does that the service lacks, or has in another version
            return self._failed(client, request.number, error)
        if request.what == "draw_batch":
            size, limiter = given[0][0] or self.buffer.batch_size or 1, self.buffer.limiter
            if limiter is not None and not limiter.may_draw(size):
                self._waiting.append(_Waiting(client, request, size, self.buffer.write_count))
                return None
        replaces = request.what in _REPLACING
        return self._answered(client, request.number, lambda: self._carry_out(client, request, given, pieces), replaces)

    def _carry_out(self, client: str, request: Request, given: Any, pieces: Sequence[memoryview]) -> Any:
        """Do what is asked, and write down what holds from now on and is in no dump, before there is one."""
        value, journal = self._do(client, request.what, given), self._journal
        if journal is None:
            return value
        if request.what in _LASTING:
            journal.note_request(client, request, pieces)
        elif request.what in ("storage.ledger.take_ids", "give_up") and self._dumps is not None:
            try:
                self.note_promises()
            except OSError as error:  # who asks has nothing to do with the disk, and goes on
                self._dumps.failed(error)
        return value

    def note_promises(self) -> None:
        """Write down which ids were given out, and which writers given up, as far as that is not done.

        Raises:
            OSError: the disk is full, or fails.
        """
        if self._journal is not None:
            self._journal.note_ids(self.buffer.storage.ledger.next_id)
            for name, least in self.least.items():
                self._journal.note_given_up(name, least - 1)

    def _redo(self, changes: Sequence[tuple[str, Request, Sequence[memoryview]]]) -> None:
        """Change parts as the service before this one did; who has no reply yet gets it when asking again."""
        for client, request, pieces in changes:
            body, parts = pack(self._do(client, request.what, unpack(request.body, pieces)))
            self.records.setdefault(client, Record()).answers[request.number] = Reply(request.number, body), parts

    @property
    def changes(self) -> tuple[str, int]:
        """By whom parts were changed, and how often."""
        return ("", 0) if self._journal is None else (self._journal.run, self._journal.num_requests)

    def _answered(self, client: str, number: int, do: Callable[[], Any], replaces: bool = False) -> Answer:
        before = self.buffer.write_count
        try:
            body, pieces = pack(do())
            answer: Answer = (Reply(number, body), pieces)
        except Exception as error:
            return self._failed(client, number, error)
        self.records[client].answers[number] = answer
        if self._dumps is not None and (replaces or self.buffer.write_count != before):
            self._dumps.save(self, replaced=replaces)
        return answer

    def _failed(self, client: str, number: int, error: Exception) -> Answer:
        record = self.records[client]
        record.failed.add(number)
        answer: Answer = (Reply(number, b"", ExceptionInfo.of(error)), ())
        record.answers[number] = answer
        return answer

    def _do(self, client: str, what: str, given: Any) -> Any:
        args, options = given
        match what:
            case "info":
                return Info.of(self.buffer)
            case "give_up":
                return self._give_up(*args)
            case "was_done":
                asked, number = args
                record = self.records.get(asked)
                return record is not None and record.last >= number and number not in record.failed
            case "finish":
                return self.finish()
            case "cancel":
                return self._cancel(client, *args)
        value = operator.attrgetter(what)(self.buffer)(*args, **options)
        return None if value is self.buffer else value

    def _give_up(self, name: str, generation: int) -> None:
        """Refuse writers of this generation and of earlier ones from now on."""
        self.least[name] = max(self.least.get(name, 0), generation + 1)

    # Samples that wait --------------------------------------------------------------------------------

    def tend(self) -> list[tuple[str, Answer]]:
        """Carry out what may be carried out now; the clients and what they are sent. Save again what could not be."""
        if self.dump_failure is not None and self._dumps is not None:
            self._dumps.save(self)
        done: list[tuple[str, Answer]] = []
        for waiting in list(self._waiting):
            limiter, now = self.buffer.limiter, time.monotonic()
            client, number = waiting.client, waiting.request.number
            if limiter is None or limiter.may_draw(waiting.size):
                answer = self._answered(client, number, partial(self.buffer.draw_batch, waiting.size))
            elif self.buffer.write_count != waiting.inserted:
                waiting.inserted, waiting.since = self.buffer.write_count, now
                continue
            elif now - waiting.since > limiter.timeout_s:
                why = (
                    f"waited {limiter.timeout_s:g} s: {limiter.lacks(waiting.size)}, and nothing was inserted meanwhile"
                )
                answer = self._failed(client, number, TimeoutError(f"{why}. Collect more, or faster."))
            else:
                continue
            self._waiting.remove(waiting)
            done.append((client, answer))
        return done

    @property
    def num_waiting(self) -> int:
        """Samples that wait."""
        return len(self._waiting)

    def _cancel(self, client: str, number: int) -> None:
        """The client wants no reply to a request any more."""
        self._waiting = [w for w in self._waiting if (w.client, w.request.number) != (client, number)]

    def forget(self, connected: set[str]) -> None:
        """Drop replies and samples for clients that have been gone for long."""
        now = time.monotonic()
        for client, record in self.records.items():
            if client in connected:
                record.seen_at = now
            elif now - record.seen_at > _FORGET_S:
                record.answers.clear()
                self._waiting = [w for w in self._waiting if w.client != client]

    @property
    def dump_failure(self) -> str | None:
        """Why the buffer could not be saved the last time; None: it could."""
        return None if self._dumps is None else self._dumps.failure

    def finish(self) -> None:
        """Save what was written since the last dump.

        Raises:
            OSError: it cannot be saved.
        """
        if self._dumps is None:
            return
        try:
            self._dumps.finish(self)
        except Exception as error:
            raise OSError(f"what the buffer holds could not be saved, and its last dump is older: {error}") from error


_NAP_S, _BUSY_S = 0.5, 0.01  # without anything to do; while samples wait


class _Guest:
    """A connection to a client."""

    def __init__(self, client: str, channel: NetworkChannel, *, is_owner: bool) -> None:
        self.client, self.channel, self.is_owner = client, channel, is_owner
        self.fd = channel.fileno()


class Server:
    """Listens, lets those in who know the secret, and hands their requests to a keeper; one thread does all of it.

    Args:
        keeper: carries out requests.
        address: host and port to listen at.
        secret: of the run.
        beat_s: between two signs of life.
        silence_s: after which a client's machine counts as gone.

    Attributes:
        address: where it listens.

    Raises:
        OSError: the address cannot be listened at.
    """

    def __init__(
        self, keeper: Keeper, address: tuple[str, int], secret: bytes, *, beat_s: float, silence_s: float
    ) -> None:
        self._keeper, self._listener = keeper, Listener(address, secret, self._admit)
        self.address = self._listener.address
        self._beat_s, self._silence_s = beat_s, silence_s
        self._poll = select.epoll()
        self._readers: dict[int, Callable[[], None]] = {}
        self._guests: dict[str, _Guest] = {}  # by client
        self._outbox: list[tuple[str, Answer]] = []
        self._sent_counts: Counts | None = None
        self._closed = threading.Event()
        self.watch(self._listener.fileno(), self._listener.read)
        threading.Thread(target=self._show_life, name="rollwright-beat", daemon=True).start()

    def watch(self, fd: int, read: Callable[[], None]) -> None:
        """Call ``read()`` whenever a file descriptor is ready."""
        self._poll.register(fd, select.EPOLLIN)
        self._readers[fd] = read

    def _unwatch(self, fd: int) -> None:
        self._readers.pop(fd, None)
        with contextlib.suppress(OSError, ValueError):
            self._poll.unregister(fd)

    def run_once(self) -> None:
        """Wait for something to do, for half a second at most, and do it."""
        for fd, _ in self._poll.poll(_BUSY_S if self._keeper.num_waiting else _NAP_S):
            if fd in self._readers:
                self._readers[fd]()
        self._outbox += self._keeper.tend()
        self._send_replies()
        self._listener.read()  # those who say nothing
        self._keeper.forget(set(self._guests))

    def _show_life(self) -> None:
        """Show that the service is there, where a dump takes long."""
        while not self._closed.wait(self._beat_s):
            for guest in list(self._guests.values()):
                if not guest.channel.behind:
                    with contextlib.suppress(ChannelClosed):  # the other thread finds out
                        guest.channel.post(Beat())

    # Clients that connect -----------------------------------------------------------------------------

    def _admit(self, greeting: IncomingHandshake, about: dict[str, Any]) -> None:
        writer = None if about.get("writer") is None else WriterName(*about["writer"])
        client, is_owner = str(about["client"]), bool(about.get("owner"))
        if (refused := self._keeper.refusal(writer)) is not None:
            greeting.refuse(refused)
        if client in self._guests:  # over a connection that has broken, as this end does not know yet
            self._lose(self._guests[client])
        channel = greeting.accept()
        channel.give_up_after(self._silence_s)
        guest = self._guests[client] = _Guest(client, channel, is_owner=is_owner)
        self._keeper.met(client, writer)
        self.watch(guest.fd, partial(self._read, guest))
        self._post(guest, self._counts())

    def _lose(self, guest: _Guest) -> None:
        self._unwatch(guest.fd)
        guest.channel.close()
        if self._guests.get(guest.client) is guest:
            del self._guests[guest.client]

    # Requests and replies -----------------------------------------------------------------------------

    def _read(self, guest: _Guest) -> None:
        try:
            guest.channel.read(lambda message, sizes: memory_for(sizes), partial(self._received, guest))
        except ChannelClosed:
            self._lose(guest)
        except MessageForged as error:
            with contextlib.suppress(ChannelClosed):
                guest.channel.post(ExceptionInfo.of(error))
            self._lose(guest)

    def _received(self, guest: _Guest, request: Request, pieces: Sequence[memoryview]) -> None:
        answer = self._keeper.take(guest.client, request, pieces)
        if answer is not None:
            self._outbox.append((guest.client, answer))

    def _counts(self) -> Counts:
        return Counts(self._keeper.buffer.write_count, len(self._keeper.buffer), self._keeper.dump_failure)

    def _send_replies(self) -> None:
        """Send what was done; the owner hears of writes before they are acknowledged."""
        reported = None if self._sent_counts is None else self._sent_counts.dump_failure
        if not self._outbox and self._keeper.dump_failure == reported:
            return
        outbox, self._outbox = self._outbox, []
        counts = self._counts()
        if counts != self._sent_counts:
            self._sent_counts = counts
            for guest in list(self._guests.values()):
                if guest.is_owner:
                    self._post(guest, counts)
        for client, (reply, pieces) in outbox:
            if client in self._guests:  # or it asks again when it is back
                self._post(self._guests[client], reply, pieces)

    def _post(self, guest: _Guest, message: Any, pieces: Sequence[memoryview] = ()) -> None:
        try:
            guest.channel.post(message, pieces)
        except ChannelClosed:
            self._lose(guest)

    def close(self) -> None:
        """Close all connections."""
        self._closed.set()
        for guest in list(self._guests.values()):
            self._lose(guest)
        self._listener.close()
        self._poll.close()


_MOST_BEAT_S = 1.0


class Recipe(NamedTuple):
    """What a service is made of.

    Attributes:
        made_of: a pickle of the buffer's class and its options.
        address: where to listen.
        secret: of the run.
        seed: of random numbers.
        host_timeout: seconds without a sign after which somebody counts as gone.
        path: where to save the buffer; None: nowhere.
        dump_every: elements between two dumps.
        import_paths: where modules are looked for, after those of the process.
        run: name of the buffer, the same as long as its owner lives.
    """

    made_of: bytes
    address: tuple[str, int]
    secret: bytes
    seed: int
    host_timeout: float
    path: str | None
    dump_every: int | None
    import_paths: tuple[str, ...]
    run: str


class ServiceHost(Protocol):
    """The process of a service."""

    def await_ready(self, timeout_s: float) -> Ready:
        """Wait until the service listens.

        Raises:
            WorkerError: the buffer could not be made there, or the process has ended.
            TimeoutError: it takes too long.
        """

    def how_it_ended(self) -> str | None:
        """A phrase that says how it ended; None: it runs, as far as is known."""

    def end(self, timeout_s: float) -> None:
        """Make it end, if it does not by itself in time."""


class Service:
    """A buffer, and the server that others reach it by.

    Args:
        recipe: what it is made of.
    """

    def __init__(self, recipe: Recipe) -> None:
        keep_freed_memory()  # each request and each batch has memory of its own, of the same sizes
        sys.path.extend(path for path in recipe.import_paths if path not in sys.path)
        torch.manual_seed(recipe.seed)
        kind, options = pickle.loads(recipe.made_of)
        if isinstance(options.get("storage"), Storage):
            options["storage"].move_here()
        dumps = None if recipe.path is None else Dumps(recipe.path, recipe.dump_every)
        journal = None if recipe.path is None else Journal(recipe.path, recipe.run)
        self._keeper = Keeper(kind(**options), dumps, journal)
        self._server = _listening(self._keeper, recipe)
        host, port = recipe.address[0], self._server.address[1]
        shown = socket.gethostname() if host in ("0.0.0.0", "::") else host
        self.ready = Ready((shown, port), self._keeper.info, self._keeper.buffer.write_count)
        self.watch = self._server.watch

    def serve(self, stopping: Callable[[], bool]) -> None:
        """Serve until asked to stop, or until something raises; save what is fresh at the end."""
        try:
            while not stopping():
                self._server.run_once()
        finally:
            try:
                self._keeper.finish()
            finally:
                self._server.close()


def _listening(keeper: Keeper, recipe: Recipe) -> Server:
    address, beat_s = recipe.address, min(_MOST_BEAT_S, recipe.host_timeout / 4)
    try:
        return Server(keeper, address, recipe.secret, beat_s=beat_s, silence_s=recipe.host_timeout)
    except OSError as error:
        raise OSError(
            error.errno,
            f"service_backend_options['address']: cannot listen at {address[0]}:{address[1]}: "
            f"{os.strerror(error.errno or 0)}. Pass an address of the machine where the service runs, with a port that "
            "is free; port 0: any that is",
        ) from error
