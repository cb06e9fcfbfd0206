"""Child: processes that serve a channel, what ends them, and what they tell when they fail."""

import contextlib
import os
import signal
import subprocess
import sys
import textwrap
import time

import pytest
import torch
from tests.patience import patient

from rollwright._memory.segment import Segment
from rollwright._processes import child as processes
from rollwright._processes.channel import ChannelClosed
from rollwright._processes.child import Child, _is_stopped, echo, sleep
from rollwright._processes.connection import ExceptionInfo
from rollwright.errors import RemoteTraceback, WorkerError

LIMIT_S = 100.0  # for what comes at once, on a busy machine too


def raising(channel, make_error):
    raise make_error()


def reporting(channel):
    channel.send((os.environ.get("ROLLWRIGHT_TEST"), os.getcwd(), torch.get_num_threads(), os.getppid()))


def deaf(channel, blocks_term):
    if blocks_term:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    channel.send("ready")
    while True:
        signal.pause()


def writing(channel, segment):
    segment.map(0, 8)[:] = b"12345678"
    channel.send("done")


def nesting(channel):
    inner = Child(echo, name="inner")
    inner.channel.send(os.getpid())
    channel.send((inner.channel.recv(LIMIT_S), os.getpid(), inner.pid))
    with contextlib.suppress(ChannelClosed):
        channel.recv(LIMIT_S)


class OddError(Exception):
    def __init__(self, one, two):
        super().__init__(one, two)


@pytest.fixture(params=["forkserver", "spawn", "fork"])
def method(request):
    return request.param


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_what_is_sent_comes_back_in_every_start_method(method):
    child = Child(echo, name="echo", start_method=method)
    for message in ({"a": 1}, b"x" * 3_000_000, None):
        child.channel.send(message)
        assert child.channel.recv(LIMIT_S) == message
    child.channel.close()
    assert child.end(LIMIT_S) == "ended"
    assert child.how_it_ended() == "exited with status 0"
    assert not child.alive


def test_the_process_has_todays_environment_folder_and_threads(monkeypatch, tmp_path):
    Child(echo, name="first").channel.close()  # the server runs from here on
    monkeypatch.setenv("ROLLWRIGHT_TEST", "today")
    monkeypatch.chdir(tmp_path)
    child = Child(reporting, name="report", num_threads=3)
    environ, folder, threads, _ = child.channel.recv(LIMIT_S)
    assert (environ, folder, threads) == ("today", str(tmp_path), 3)


def test_an_exception_arrives_whole():
    child = Child(raising, lambda: ValueError("no good"), name="raising")
    failure = child.channel.recv(LIMIT_S)
    assert isinstance(failure, ExceptionInfo)
    error = failure.error("worker 2", 2)
    with pytest.raises(ValueError, match=r"^worker 2: ValueError: no good$"):
        raise error
    assert isinstance(error, WorkerError)
    assert (error.worker, error.remote_type) == (2, "ValueError")
    assert isinstance(error.__cause__, RemoteTraceback)
    assert "in raising" in str(error.__cause__)
    assert child.end(LIMIT_S) == "ended"
    assert child.how_it_ended() == "exited with status 1"


@pytest.mark.parametrize("kind", [KeyError, OSError, OddError, UnicodeError, StopIteration, RuntimeError])
def test_an_exception_of_any_class_can_be_raised_here(kind):
    error = ExceptionInfo.of(kind("one", "two") if kind is OddError else kind("one")).error("worker 0")
    assert isinstance(error, kind)
    assert isinstance(error, WorkerError)
    assert str(error).startswith(f"worker 0: {kind.__name__}: ")


def test_what_cannot_be_unpickled_there_is_a_failure_too():
    class Refusing:
        def __reduce__(self):
            return (int, ("no number",))

    child = Child(raising, Refusing(), name="refusing")
    with pytest.raises(ValueError, match="invalid literal"):
        raise child.channel.recv(LIMIT_S).error("worker 0")
    child.end(LIMIT_S)


@pytest.mark.parametrize(("blocks_term", "how"), [(False, "terminated"), (True, "killed")])
def test_a_deaf_process_is_ended_in_time(blocks_term, how):
    child = Child(deaf, blocks_term, name="deaf")
    assert child.channel.recv(LIMIT_S) == "ready"
    begun = time.monotonic()
    assert child.end(0.1) == how
    assert time.monotonic() - begun < patient(5.0)
    assert not child.alive
    assert child.how_it_ended() == f"was killed by {'SIGKILL' if blocks_term else 'SIGTERM'}"


def test_a_killed_process_is_heard_of_at_once():
    child = Child(echo, name="victim")
    child.channel.send(1)
    child.channel.recv(LIMIT_S)
    child.kill()
    with pytest.raises(ChannelClosed, match="the other end is gone"):
        child.channel.recv(LIMIT_S)
    assert child.wait(LIMIT_S)
    assert child.how_it_ended() == "was killed by SIGKILL"
    assert child.end(0.0) == "ended"


def test_memory_is_shared_with_the_process():
    segment = Segment()
    segment.grow(8)
    child = Child(writing, segment, name="writing")
    assert child.channel.recv(LIMIT_S) == "done"
    assert bytes(segment.map(0, 8)) == b"12345678"


def test_a_child_starts_children_of_its_own_by_the_same_server():
    begun = time.monotonic()
    child = Child(nesting, name="nesting")
    told, pid, _ = child.channel.recv(LIMIT_S)
    assert told == pid == child.pid
    child.channel.close()
    assert child.end(LIMIT_S) == "ended"
    assert time.monotonic() - begun < patient(LIMIT_S)


def test_a_message_that_nobody_reads_has_a_limit():
    child = Child(deaf, False, name="deaf")
    assert child.channel.recv(LIMIT_S) == "ready"
    with pytest.raises(TimeoutError, match=r"waited 0\.1 s for the other process to read a message"):
        child.channel.send(b"x" * 30_000_000, timeout_s=0.1)
    assert child.end(0.0) == "terminated"


def test_an_unknown_start_method_is_refused():
    with pytest.raises(ValueError, match="start_method: expected one of"):
        Child(echo, name="echo", start_method="magic")


def test_a_process_that_a_signal_has_stopped(monkeypatch):
    child = Child(echo, name="echo")
    child.channel.send(1)
    assert child.channel.recv(LIMIT_S) == 1
    now = time.monotonic()
    monkeypatch.setattr("rollwright._processes.child.time.monotonic", lambda: now)

    def look(after_s):
        nonlocal now
        now += after_s
        return child.stopped_s()

    assert look(2.0) == 0.0
    os.kill(child.pid, signal.SIGSTOP)
    while not _is_stopped(child.pid):
        pass
    assert look(0.5) == 0.0  # too soon to look again
    assert [look(2.0), look(2.0)] == [2.5, 4.5]
    assert look(3600.0) == 9.5  # this process may have been stopped, too
    os.kill(child.pid, signal.SIGCONT)
    while _is_stopped(child.pid):
        pass
    assert look(2.0) == 0.0
    monkeypatch.undo()
    assert child.end(0.0) == "terminated"
    assert not _is_stopped(child.pid)


PROGRAM = """
import rollwright._processes.preload  # as the fork server does, for speed
import os, signal, sys, time
from rollwright._processes.channel import ChannelClosed
from rollwright._processes.child import Child, _is_stopped, echo

def main():
    child = Child(echo, name="child")
    child.channel.send(1)
    child.channel.recv(20.0)
    print(child.pid, flush=True)
    {end}

main()  # without a guard
"""


@pytest.mark.parametrize(
    ("end", "status"),
    [("", 0), ("raise RuntimeError('end')", 1), ("os.kill(os.getpid(), signal.SIGKILL)", -9)],
)
def test_nothing_is_left_when_the_program_ends(programs, end, status):
    program = textwrap.dedent(PROGRAM).format(end=end)
    if status:  # the fork server is not the program's own
        done = programs.run("-c", program, timeout=patient(60))
    else:
        done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=patient(60))
    assert done.returncode == status, done.stderr
    pid = int(done.stdout)
    until = time.monotonic() + patient(LIMIT_S)
    while os.path.exists(f"/proc/{pid}"):
        assert time.monotonic() < until, "the child outlives its parent"
        time.sleep(0.01)


def stuck(channel):
    """Be stuck, and end half a second after the parent, which otherwise takes ten."""
    processes._ALONE_S = 0.5
    sleep(channel, 60.0)


STUCK = """
import os, signal
from rollwright._processes.channel import ChannelClosed
from rollwright._processes.child import Child
from tests.processes.test_child import stuck

child = Child(stuck, name="stuck")
child.channel.recv(20.0)
print(child.pid, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_stuck_process_ends_when_its_parent_was_killed(programs):
    done = programs.run("-c", STUCK, timeout=patient(60))
    assert done.returncode == -signal.SIGKILL
    pid = int(done.stdout)
    until = time.monotonic() + patient(LIMIT_S)
    while os.path.exists(f"/proc/{pid}"):
        assert time.monotonic() < until, "the child outlives its parent"
        time.sleep(0.01)


def test_a_spawned_program_without_a_guard_is_told_last_what_to_do(tmp_path):
    program = tmp_path / "program.py"
    program.write_text(
        "from rollwright._processes.child import Child, echo\n"
        "child = Child(echo, name='one', start_method='spawn')\n"
        "child.wait(100)\n"
        "raise SystemExit(child.how_it_ended())\n"
    )
    done = subprocess.run([sys.executable, program], capture_output=True, text=True, check=False, timeout=LIMIT_S)
    assert "bootstrapping" in done.stderr
    assert 'below `if __name__ == "__main__":`' in done.stderr.splitlines()[-1]
