"""Starting processes: by a server that nothing but sockets leads to, wherever, and whatever becomes of the server."""

from __future__ import annotations

import errno
import importlib
import multiprocessing
import os
import signal
import socket
import sys
import tempfile
import threading
from multiprocessing import forkserver

import pytest

from rollwright._processes import start as starting
from rollwright._processes.child import Child, echo
from rollwright._processes.start import ForkRequest, _Server

LIMIT_S = 60.0


def answers(child):
    child.channel.send("hello")
    assert child.channel.recv(LIMIT_S) == "hello"
    child.channel.close()
    return child.end(LIMIT_S)


@pytest.fixture
def own_server(monkeypatch):
    """The test has a server of its own, and leaves that of the others alone."""
    monkeypatch.setattr(starting, "_fork_server", None)


def server_pid():
    return starting._server_other_than(None)._pid


def test_a_server_that_is_killed_while_it_is_asked_is_replaced(own_server, monkeypatch):
    pid = server_pid()
    os.kill(pid, signal.SIGSTOP)
    send = ForkRequest.send

    def send_and_kill(self, line):
        send(self, line)
        if server_pid() == pid:
            os.kill(pid, signal.SIGKILL)

    monkeypatch.setattr(ForkRequest, "send", send_and_kill)
    assert answers(Child(echo, name="echo")) == "ended"


def test_workers_outlive_their_server_which_is_replaced(own_server):
    child = Child(echo, name="echo")
    child.channel.send("hello")
    assert child.channel.recv(LIMIT_S) == "hello"
    pid = server_pid()
    os.kill(pid, signal.SIGKILL)
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    assert answers(Child(echo, name="echo")) == "ended"
    assert server_pid() != pid
    assert child.alive
    assert answers(child) == "ended"


def tell_modules(channel, *names):
    """Send which of these modules this process began with."""
    channel.send([name for name in names if name in sys.modules])


def began_with(*names):
    child = Child(tell_modules, *names, name="teller")
    found = child.channel.recv(LIMIT_S)
    child.channel.close()
    child.end(LIMIT_S)
    return found


def test_a_server_imports_what_each_program_has_imported_by_then(own_server, monkeypatch):
    """Nothing else: it knows of no package above this one."""
    importlib.import_module("rollwright.collectors")
    assert began_with("rollwright.collectors") == ["rollwright.collectors"]
    pid, packages = server_pid(), ("rollwright.envs", "rollwright.collectors")
    monkeypatch.setattr(starting, "_fork_server", None)
    with monkeypatch.context() as patch:
        above = ("rollwright.collectors", "rollwright.testing")
        for name in [name for name in sys.modules if name.startswith(above)]:
            patch.delitem(sys.modules, name)
        assert began_with(*packages) == ["rollwright.envs"]
        own = server_pid()
    assert began_with(*packages) == list(packages)
    assert server_pid() == own != pid


@pytest.fixture
def answering(monkeypatch):
    """``answering(number)``: a server that answers each request with that number; None: it goes instead."""
    threads, lines = [], []

    def replace(number):
        def serve(theirs):
            _, fds, _, _ = socket.recv_fds(theirs, 4, 250)
            if number is not None:
                forkserver.write_signed(fds[0], number)
            for fd in fds:
                os.close(fd)
            theirs.close()

        def server_other_than(gone):
            mine, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            threads.append(threading.Thread(target=serve, args=(theirs,)))
            threads[-1].start()
            lines.append(starting._ForkServer(mine))
            return lines[-1]

        monkeypatch.setattr(starting, "_server_other_than", server_other_than)

    yield replace
    for thread in threads:
        thread.join(LIMIT_S)


def test_a_server_without_room_says_so(answering):
    answering(-errno.EMFILE)
    with pytest.raises(OSError, match=r"Too many open files: the fork server cannot.*Raise the limit \(ulimit -n\)"):
        Child(echo, name="echo")


def test_a_server_that_ends_each_time_is_an_error(answering):
    answering(None)
    with pytest.raises(OSError, match="fork server ended before it had started a process, twice"):
        Child(echo, name="echo")


def test_a_new_server_hears_no_interrupt_and_puts_nothing_where_temporary_files_go(
    own_server, monkeypatch, tmp_path, capfd
):
    folder = tmp_path / ("x" * 150)
    folder.mkdir()
    monkeypatch.setenv("TMPDIR", str(folder))
    monkeypatch.setattr(tempfile, "tempdir", None)
    pid = server_pid()
    os.kill(pid, signal.SIGINT)
    child = Child(echo, name="echo")
    assert not [name for name in os.listdir(folder) if not name.startswith("torch")]
    assert answers(child) == "ended"
    assert server_pid() == pid
    assert capfd.readouterr().err == ""


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_forked_and_daemonic_processes_start_children_by_the_server_of_their_parent():
    assert answers(Child(echo, name="echo")) == "ended"

    def use():
        before = server_pid()
        assert answers(Child(echo, name="echo")) == "ended"
        assert server_pid() == before

    process = multiprocessing.get_context("fork").Process(target=use, daemon=True)
    process.start()
    process.join(LIMIT_S)
    assert process.exitcode == 0


def test_a_deleted_working_directory(monkeypatch, tmp_path):
    folder = tmp_path / "folder"
    folder.mkdir()
    monkeypatch.chdir(folder)
    folder.rmdir()
    assert answers(Child(echo, name="echo")) == "ended"
    with pytest.raises(FileNotFoundError, match=r"start_method='spawn': the working directory.*was deleted.*os\.chdir"):
        Child(echo, name="echo", start_method="spawn")


@pytest.mark.parametrize("method", ["forkserver", "spawn", "fork"])
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_an_interrupt_does_not_reach_a_process_that_starts(method, capfd):
    child = Child(echo, name="echo", start_method=method)
    os.kill(child.pid, signal.SIGINT)
    assert answers(child) == "ended"
    assert capfd.readouterr().err == ""


def test_a_server_that_cannot_fork_says_so_and_keeps_no_pipe(monkeypatch):
    def no_fork() -> int:
        raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))

    monkeypatch.setattr(os, "fork", no_fork)
    answer, status = os.pipe()
    before = os.listdir("/proc/self/fd")
    asked: _Server = _Server.__new__(_Server)  # without the signals of the process
    asked._fork(ForkRequest((), status, -1, -1, -1, -1, ()))
    assert os.listdir("/proc/self/fd") == before
    assert forkserver.read_signed(answer) == -errno.EAGAIN
    os.close(answer)
    os.close(status)
