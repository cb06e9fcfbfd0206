"""Pool: connections of any kind, calls, losses, and the end."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
from tests.patience import patient
from tests.processes.forked import forked
from tests.programs import Programs

from rollwright._processes.channel import Channel, ChannelClosed
from rollwright._processes.child import Child, echo
from rollwright._processes.connection import NOTHING, Connection, ExceptionInfo, ExitReason
from rollwright._processes.pool import Answer, Pool


class Scripted:
    """A connection to nothing: it answers by a function, as soon as it is asked, and ends when it is closed."""

    name, pid = "scripted", None

    def __init__(self, answer: Any = lambda message: message) -> None:
        self._answer = answer
        self._arrived: list[Any] = []
        self._ready, self._bell = os.pipe()
        self.gone = self.closed = False
        self.forced: list[str] = []
        self.deaf = False
        self.behind = False
        self.stopped = 0.0
        self.stubborn = False

    def arrive(self, message: Any) -> None:
        self._arrived.append(message)
        os.write(self._bell, b"1")

    def vanish(self) -> None:
        self.gone = True
        os.write(self._bell, b"1")

    def filenos(self) -> tuple[int, ...]:
        return (self._ready,)

    def post(self, message: Any) -> None:
        if self.gone:
            raise ChannelClosed
        if self.deaf:
            self.behind = True
        elif (answer := self._answer(message)) is not NOTHING:
            self.arrive(answer)

    def flush(self) -> None: ...

    def take(self) -> Any:
        if self._arrived:
            os.read(self._ready, 1)
            return self._arrived.pop(0)
        if self.gone or self.closed:
            raise ChannelClosed
        return NOTHING

    def close(self) -> None:
        self.closed = True
        self.gone = self.gone or not self.stubborn

    def stopped_s(self) -> float:
        return self.stopped

    def wait(self, timeout_s: float) -> bool:
        if not self.gone:
            time.sleep(max(0.0, min(timeout_s, 0.01)))
        return self.gone

    def terminate(self) -> None:
        self.forced.append("terminate")

    def kill(self) -> None:
        self.forced.append("kill")
        self.gone = True

    def how_it_ended(self) -> str:
        return "has left"


def answers(place: int, message: Any) -> Answer:
    return Answer(message, place)


def pool_of(*connections: Connection, **options: Any) -> Pool:
    pool = Pool(len(connections), options.pop("received", answers), **options)
    for place, connection in enumerate(connections):
        pool.add(place, connection)
    return pool


def ask(pool: Pool, *places: int) -> int:
    ticket = pool.calls.open()
    for place in places:
        pool.calls.ask(ticket, place, f"note {place}")
        pool.send(place, ticket)
    return ticket


def settle(pool: Pool, ticket: int, seconds: float = 20.0) -> Any:
    until = time.monotonic() + patient(seconds)
    while pool.calls[ticket].due:
        assert time.monotonic() < until
        pool.run_once(0.1)
    return pool.calls.close(ticket)


@pytest.fixture
def children() -> Iterator[list[Child]]:
    made = [Child(echo, name=f"parrot-{i}") for i in range(2)]
    yield made
    for child in made:
        child.close()
        child.kill()
        child.end(1.0)


# Any connection ---------------------------------------------------------------------------------


def test_question_goes_to_several_and_each_answers() -> None:
    pool = pool_of(Scripted(), Scripted())
    call = settle(pool, ask(pool, 0, 1))
    assert call.answers == {0: 0, 1: 1}
    assert call.losses == {}
    assert pool.num_messages == 4


def test_who_is_gone_owes_nothing_and_is_named_with_the_reason() -> None:
    seen = []
    one, other = Scripted(), Scripted(lambda message: NOTHING)
    pool = pool_of(one, other, lost=lambda place, loss: seen.append((place, loss)))
    ticket = ask(pool, 0, 1)
    other.vanish()
    call = settle(pool, ticket)
    assert call.answers == {0: 0}
    assert call.losses == {1: (ExitReason("has left"), "note 1")}
    assert seen == [(1, ExitReason("has left"))]
    assert pool.by_place[1] is None
    assert settle(pool, ask(pool, 1)).losses == {1: (ExitReason("has left"), "note 1")}  # asked later
    assert seen == [(1, ExitReason("has left"))]


def test_another_takes_the_place_of_one_that_was_lost() -> None:
    first = Scripted()
    pool = pool_of(first)
    first.vanish()
    pool.run_once(1.0)
    assert pool.connections == {}
    pool.add(0, Scripted())
    assert settle(pool, ask(pool, 0)).answers == {0: 0}


def test_what_a_process_has_raised_is_its_last_message() -> None:
    one = Scripted(lambda message: ExceptionInfo.of(ValueError("too much")))
    pool = pool_of(one)
    [(loss, _)] = settle(pool, ask(pool, 0)).losses.values()
    assert (loss.how, loss.failure.text) == ("has failed", "too much")


def test_one_that_is_dropped_is_killed_and_nobody_is_called() -> None:
    one = Scripted(lambda message: NOTHING)
    pool = pool_of(one, lost=lambda place, loss: pytest.fail("it was dropped"))
    ticket = ask(pool, 0)
    pool.drop(0, "did not come back")
    assert settle(pool, ticket).losses[0][0] == ExitReason("did not come back")
    assert "kill" in one.forced


def test_one_that_does_not_read_is_dropped_when_all_is_to_be_on_its_way() -> None:
    one = Scripted()
    one.deaf = True
    pool = pool_of(one)
    ticket = ask(pool, 0)
    pool.flush(0.1)
    assert settle(pool, ticket).losses[0][0] == ExitReason("did not read what it was sent")


def test_those_that_do_not_run_are_named() -> None:
    one, other = Scripted(), Scripted()
    other.stopped = 5.0
    assert pool_of(one, other).stopped(4.0) == [1]


def test_answers_that_nobody_waits_for_are_dropped() -> None:
    one = Scripted()
    pool = pool_of(one)
    ticket = ask(pool, 0)
    pool.calls.close(ticket)
    pool.run_once(1.0)
    assert settle(pool, ask(pool, 0)).answers == {0: 0}


def test_end_takes_in_what_is_sent_until_connections_close_and_may_be_called_again() -> None:
    seen: list[Any] = []
    one = Scripted()
    pool = pool_of(one, received=lambda place, message: seen.append(message))
    pool.send(0, "last words")
    one.vanish()
    found = pool.end(lambda: time.monotonic() + 5.0)
    assert found[0] == ("ended", None)
    assert seen == ["last words"]
    assert pool.end(lambda: time.monotonic() + 5.0) == {}


def test_end_makes_those_end_that_do_not() -> None:
    one, other = Scripted(), Scripted()
    one.stubborn = True
    until = time.monotonic() + 0.2
    found = pool_of(one, other).end(lambda: until, hang_up=True)
    assert [found[0].how, found[1].how] == ["killed", "ended"]
    assert one.forced == ["terminate", "kill"]


# Processes of this machine ----------------------------------------------------------------------


def test_a_killed_process_is_lost_in_seconds(children: list[Child]) -> None:
    pool = pool_of(*children)
    assert settle(pool, ask(pool, 0, 1)).answers == {0: 0, 1: 1}
    os.kill(children[0].pid, signal.SIGKILL)
    begun = time.monotonic()
    assert settle(pool, ask(pool, 0, 1)).losses[0][0].how == "was killed by SIGKILL"
    assert time.monotonic() - begun < patient(5.0)


def test_a_process_that_is_stopped_is_named_and_can_be_dropped(children: list[Child]) -> None:
    pool = pool_of(*children)
    os.kill(children[1].pid, signal.SIGSTOP)
    ticket, until = ask(pool, 0, 1), time.monotonic() + patient(20.0)
    while not (stopped := pool.stopped(1.0)):
        pool.run_once(0.1)
        assert time.monotonic() < until
    assert stopped == [1]
    pool.drop(1, "was stopped")
    assert settle(pool, ticket).losses[1][0].how == "was stopped"
    assert not children[1].alive


def raising(channel: Channel) -> None:
    while not channel.poll(1.0):
        pass
    raise KeyError(channel.recv(0.0))


def test_a_process_that_raises_says_so() -> None:
    pool = pool_of(Child(raising, name="raising"))
    [(loss, _)] = settle(pool, ask(pool, 0)).losses.values()
    assert loss.how == "has failed"
    assert loss.failure.kind == "KeyError"


def test_end_of_processes_is_bounded(children: list[Child]) -> None:
    os.kill(children[1].pid, signal.SIGSTOP)
    begun = time.monotonic()
    found = pool_of(*children).end(lambda: begun + 0.5, hang_up=True)
    assert found[1].how == "killed"
    assert time.monotonic() - begun < patient(5.0)
    assert not any(child.alive for child in children)


def test_ctrl_c_ends_a_wait_and_loses_no_answer(children: list[Child]) -> None:
    pool = pool_of(*children)
    os.kill(children[0].pid, signal.SIGSTOP)
    ticket = ask(pool, 0, 1)
    threading.Timer(0.3, signal.pthread_kill, (threading.main_thread().ident, signal.SIGINT)).start()
    with pytest.raises(KeyboardInterrupt):
        settle(pool, ticket)
    os.kill(children[0].pid, signal.SIGCONT)
    assert settle(pool, ticket).answers == {0: 0, 1: 1}


def test_ctrl_c_in_the_end_which_goes_on_when_it_is_called_again(children: list[Child]) -> None:
    pool = pool_of(*children)
    os.kill(children[0].pid, signal.SIGSTOP)
    threading.Timer(0.3, signal.pthread_kill, (threading.main_thread().ident, signal.SIGINT)).start()
    with pytest.raises(KeyboardInterrupt):
        pool.end(lambda: time.monotonic() + 100.0, hang_up=True)
    found = pool.end(lambda: 0.0)
    assert found[0].how == "killed"
    assert not any(child.alive for child in children)


def test_in_a_forked_process_there_is_nobody_to_ask(children: list[Child]) -> None:
    pool = pool_of(*children)
    how = forked(lambda: settle(pool, ask(pool, 0)).losses[0][0].how)
    assert how == f"is a child of process {os.getpid()}, which this one was forked from: use it there"
    assert settle(pool, ask(pool, 0, 1)).answers == {0: 0, 1: 1}


def test_nothing_is_left_behind_by_a_program_that_ends_without_a_word(programs: Programs) -> None:
    code = (
        "from rollwright._processes.child import Child, echo\n"
        "from rollwright._processes.pool import Pool\n"
        "pool = Pool(1, lambda place, message: None)\n"
        "pool.add(0, Child(echo, name='parrot'))\n"
        "print(pool.by_place[0].pid, flush=True)\n"
    )
    made = programs.run("-c", code, timeout=patient(60.0))
    assert made.stderr == ""
    until = time.monotonic() + patient(15.0)
    with contextlib.suppress(ProcessLookupError):
        while time.monotonic() < until:
            os.kill(int(made.stdout), 0)
            time.sleep(0.05)
        pytest.fail("it lives")
