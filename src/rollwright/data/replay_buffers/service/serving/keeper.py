"""Keeper: carries out requests on the buffer of a replay service, each once, from those who may."""

from __future__ import annotations

import operator
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from rollwright._processes.failures import ExceptionInfo
from rollwright.data.replay_buffers.buffer import ReplayBuffer
from rollwright.data.replay_buffers.service.messages import Info, Reply, Request, WriterName
from rollwright.data.replay_buffers.service.packing import pack, unpack
from rollwright.data.replay_buffers.service.serving.dumps import Dumps, Journal

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
