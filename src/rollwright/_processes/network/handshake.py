"""Handshakes: addresses and secrets, the proof that both ends know the secret, and who listens for it."""

from __future__ import annotations

import contextlib
import hmac
import json
import os
import secrets
import select
import socket
import sys
import time
import weakref
from collections.abc import Callable
from importlib.metadata import version
from ipaddress import ip_address
from typing import Any

from rollwright._processes.files import is_file_limit, raise_file_limit
from rollwright._processes.network.channel import Keys, NetworkChannel

SECRET = "ROLLWRIGHT_SECRET"
"""The environment variable that holds the secret of a run."""


def parse_address(name: str, value: object) -> tuple[str, int]:
    """Host and port of ``"HOST:PORT"``.

    Raises:
        ValueError: it is something else.

    Example:
        >>> parse_address("address", "10.0.0.1:29400")
        ('10.0.0.1', 29400)
    """
    host, colon, port = str(value).rpartition(":")
    if not isinstance(value, str) or not colon or not host or not port.isdecimal() or int(port) > 65535:
        raise ValueError(f"{name}: expected 'HOST:PORT', such as '10.0.0.1:29400', got {value!r}.")
    return host.strip("[]"), int(port)


def checked_address(name: str, value: object) -> object:
    """The value, if it is an address.

    Raises:
        ValueError: it is something else.
    """
    parse_address(name, value)
    return value


def checked_secret(name: str, value: object) -> object:
    """The value, if it is a text that is long enough.

    Raises:
        ValueError: it is something else.
    """
    if not isinstance(value, str) or len(value) < 16:
        raise ValueError(
            f"{name}: expected a text of at least 16 characters that nobody can guess, got {type(value).__name__}"
            f"{f' of {len(value)}' if isinstance(value, str) else ''}. Pass for example secrets.token_hex(16)."
        )
    return value


def secret_of(given: str | None) -> str | None:
    """The secret of a run: the one given, or that of the environment variable; None: there is neither.

    Raises:
        ValueError: the variable is empty, or too short.
    """
    if given is None and SECRET in os.environ:
        given = os.environ[SECRET]
        checked_secret(SECRET, given)
    return given


_MARK = b"rollwright 3\n"
_NONCE, _PROOF, _SIZE = 32, 32, 4
_LONGEST = 1 << 14
_TIMEOUT_S = 20.0


class HandshakeRefused(ConnectionError):
    """The other side does not know the secret, or must not take part; the message says why."""


class RefusedForNow(HandshakeRefused):
    """There is no place, or the other side is too busy to answer; both may change."""


def software_versions() -> dict[str, str]:
    """What must be equal on both sides of a connection that carries pickles."""
    return {
        "python": "{}.{}".format(*sys.version_info[:2]),
        "torch": version("torch").partition("+")[0],
        "tensordict": version("tensordict").partition("+")[0],
        "rollwright": str(sys.modules["rollwright"].__version__),
    }


class IncomingHandshake:
    """A connection that was accepted, until its other side has proved what it must. Nothing here waits.

    Args:
        end: the accepted socket.
        secret: of the run.

    Attributes:
        began_at, expires_at: by ``time.monotonic()``.
    """

    def __init__(self, end: socket.socket, secret: bytes) -> None:
        end.setblocking(False)
        self.end, self._secret = end, secret
        self.began_at = time.monotonic()
        self.expires_at = self.began_at + _TIMEOUT_S
        self._nonce, self._theirs = secrets.token_bytes(_NONCE), b""
        self._is_local = False
        self._read = bytearray()
        with contextlib.suppress(OSError):  # read() finds out
            end.send(_MARK + self._nonce)

    @property
    def peer(self) -> str:
        """Address of the other side, for messages."""
        with contextlib.suppress(OSError):
            return str(self.end.getpeername()[0])
        return "a connection"

    def read(self) -> dict[str, Any] | None:
        """What the other side says of itself, once it is complete and proved; None: not yet.

        Raises:
            HandshakeRefused: it is not proved, or does not fit; the other side was sent the reason.
        """
        try:
            got = self.end.recv(_LONGEST)
        except (BlockingIOError, InterruptedError):
            return None
        except OSError as error:
            raise HandshakeRefused(f"it hung up: {error}") from error
        if not got:
            raise HandshakeRefused("it hung up")
        self._read += got
        if len(self._read) < _SIZE:
            return None
        size = int.from_bytes(self._read[:_SIZE], "big")
        if not _NONCE + _PROOF < size <= _LONGEST:
            raise HandshakeRefused("it does not speak as a host of rollwright does")
        if len(self._read) < _SIZE + size:
            return None
        content = bytes(self._read[_SIZE : _SIZE + size])
        self._theirs, proof, text = content[:_NONCE], content[_NONCE : _NONCE + _PROOF], content[_NONCE + _PROOF :]
        if not hmac.compare_digest(proof, _prove(self._secret, b"join", self._nonce, self._theirs, text)):
            why = "it does not know the secret of this run"
            self._answer({"refused": why}, proof=bytes(_PROOF))  # a code keyed by the secret would help to guess it
            raise HandshakeRefused(why)
        about: dict[str, Any] = json.loads(text)
        self._is_local = bool(about.get("is_local")) and _is_local(self.end)
        self._check_versions(about)
        return about

    def _check_versions(self, about: dict[str, Any]) -> None:
        theirs = about.get("versions", {})
        other = [
            f"{name} {mine} here and {theirs.get(name, 'none')} on {about.get('host')}"
            for name, mine in software_versions().items()
            if theirs.get(name) != mine
        ]
        if other:
            self.refuse(f"both sides need the same versions, and found {', '.join(other)}")

    def accept(self) -> NetworkChannel:
        """Let the other side in; the channel is the caller's."""
        channel = NetworkChannel(self.end, None if self._is_local else _keys(self._secret, self._nonce, self._theirs))
        self._answer({"accepted": True, "is_local": self._is_local})
        return channel

    def refuse(self, why: str, *, for_now: bool = False) -> None:
        """Send the other side away.

        Args:
            why: the reason.
            for_now: whether it may be let in when it asks again.

        Raises:
            HandshakeRefused: always.
        """
        self._answer({"refused": why, "for_now": for_now})
        raise HandshakeRefused(why)

    def _answer(self, verdict: dict[str, Any], proof: bytes | None = None) -> None:
        text = json.dumps(verdict).encode()
        proof = proof or _prove(self._secret, b"answer", self._theirs, self._nonce, text)
        with contextlib.suppress(OSError):  # who has hung up is noticed later
            self.end.send((_PROOF + len(text)).to_bytes(_SIZE, "big") + proof + text)


def connect_to(
    address: tuple[str, int],
    secret: bytes,
    about: dict[str, Any],
    timeout_s: float = _TIMEOUT_S,
    *,
    listens_within_s: float | None = None,
    role: str = "collector",
) -> NetworkChannel:
    """Connect to a collector or another listener, and prove to each other that both know the secret.

    Args:
        address: host and port.
        secret: of the run.
        about: what is said of this side, beside its versions; ``json.dumps`` takes it.
        timeout_s: for each message; until the collector listens, for the connection.
        listens_within_s: for the collector to listen, if that is another time.
        role: what is to answer, for messages.

    Returns:
        A channel, whose messages are authenticated unless both sides say that they are on one machine.

    Raises:
        HandshakeRefused: the collector has refused, or what answers is none; RefusedForNow: it may be asked again, or
            has hung up.
        ConnectionError, TimeoutError: nothing answers there.
    """
    end = _connected(address, timeout_s if listens_within_s is None else listens_within_s, role)
    try:
        end.settimeout(timeout_s)
        peer = f"what answers at {_str(address)}"
        theirs = _exactly(end, len(_MARK) + _NONCE, peer)
        if not theirs.startswith(_MARK):
            raise HandshakeRefused(f"{peer} is no {role} of rollwright.")
        nonce, mine = theirs[len(_MARK) :], secrets.token_bytes(_NONCE)
        mine_is = {"host": socket.gethostname(), "pid": os.getpid(), "is_local": _is_local(end)}
        text = json.dumps({"versions": software_versions(), **mine_is, **about})
        proof = _prove(secret, b"join", nonce, mine, text.encode())
        content = mine + proof + text.encode()
        with contextlib.suppress(ConnectionError):  # reading finds out
            end.sendall(len(content).to_bytes(_SIZE, "big") + content)
        answer = _exactly(end, int.from_bytes(_exactly(end, _SIZE, peer), "big") % _LONGEST, peer)
        proof, text_back = answer[:_PROOF], answer[_PROOF:]
        if not hmac.compare_digest(proof, _prove(secret, b"answer", mine, nonce, text_back)):
            raise HandshakeRefused(
                f"the {role} at {_str(address)} has another secret. Pass the secret that it was started with."
            )
        verdict = json.loads(text_back)
        if "refused" in verdict:
            kind = RefusedForNow if verdict.get("for_now") else HandshakeRefused
            raise kind(f"the {role} at {_str(address)} has refused: {verdict['refused']}.")
        return NetworkChannel(end, None if verdict["is_local"] else Keys(*reversed(_keys(secret, nonce, mine))))
    except BaseException:
        end.close()
        raise


def _connected(address: tuple[str, int], timeout_s: float, role: str) -> socket.socket:
    until, nap_s = time.monotonic() + timeout_s, 0.05
    while True:
        try:
            return socket.create_connection(address, timeout=max(0.1, until - time.monotonic()))
        except ConnectionRefusedError as error:
            if time.monotonic() + nap_s > until:
                raise ConnectionRefusedError(
                    f"nothing listens at {_str(address)}: {error}. Start the {role} first, and see that the port "
                    "can be reached."
                ) from error
            time.sleep(nap_s)
            nap_s = min(1.0, 2 * nap_s)
        except OSError as error:
            raise type(error)(f"{_str(address)} cannot be reached: {error}.") from error


def _exactly(end: socket.socket, count: int, peer: str) -> bytes:
    found = b""
    while len(found) < count:
        got = b""
        with contextlib.suppress(ConnectionError):
            got = end.recv(count - len(found))
        if not got:
            raise RefusedForNow(
                f"{peer} has hung up before it has answered: it is none of rollwright's, or more connect to it at once "
                "than it can greet. Try again."
            )
        found += got
    return found


def _prove(secret: bytes, role: bytes, *parts: bytes) -> bytes:
    return hmac.digest(secret, role + b"".join(parts), "sha256")


def _is_local(end: socket.socket) -> bool:
    """Whether a connection does not leave this machine, as this side sees it."""
    with contextlib.suppress(OSError):  # it has gone again, which whoever reads finds out
        return ip_address(end.getpeername()[0]).is_loopback
    return False


def _keys(secret: bytes, nonce: bytes, theirs: bytes) -> Keys:
    """Keys of a connection, for the side that was connected to."""
    return Keys(*(_prove(secret, role, nonce, theirs) for role in (b"from listener", b"from who joins")))


def _str(address: tuple[str, int]) -> str:
    return f"{address[0]}:{address[1]}"


_MOST_PENDING = 64
_LEAST_S = 1.0  # that each has to prove what it must, though others wait
_FULL_S = 1.0  # until it accepts again, where this process has too many open files
_BACKLOG = 1024  # connections that the system keeps until they are accepted; its own limit may be lower


class Listener:
    """Listens, and greets whoever connects, a limited number at a time; the others wait in the system's backlog.

    Where all of those being greeted are silent, the oldest has to leave. Nothing here waits, and there is no thread.

    Args:
        address: host and port; port 0: any that is free.
        secret: of the run.
        proved: takes each connection whose other side has proved that it knows the secret, and what it says of itself;
            from then on it belongs to whoever called. What it raises as one of the errors below is a refusal.
        refused: takes the peer's address and why a connection was closed.

    Raises:
        OSError: the address cannot be listened at.
    """

    def __init__(
        self,
        address: tuple[str, int],
        secret: bytes,
        proved: Callable[[IncomingHandshake, dict[str, Any]], None],
        refused: Callable[[str, str], None] = lambda peer, why: None,
    ) -> None:
        raise_file_limit()
        self._secret, self._proved, self._refused = secret, proved, refused
        self._socket = socket.create_server(address, backlog=_BACKLOG)
        self._socket.setblocking(False)
        self.address: tuple[str, int] = self._socket.getsockname()[:2]
        self._pending: dict[int, IncomingHandshake] = {}  # by file descriptor, the oldest first
        self._poll = select.epoll()
        self._accepts, self._full_until = True, 0.0
        self._poll.register(self._socket.fileno(), select.EPOLLIN)
        for close in (self._socket.close, self._poll.close):
            weakref.finalize(self, close).atexit = False

    def fileno(self) -> int:
        """Ready when :meth:`read` has something to do, but for what only time brings; -1: closed."""
        return -1 if self._poll.closed else self._poll.fileno()

    def read(self) -> None:
        """Greet who connects, and take in what those say. Call it now and then, too, for those who say nothing."""
        if self._poll.closed:
            return
        ready = [fd for fd, _ in self._poll.poll(0)]
        for fd in ready:
            if fd in self._pending:
                self._greet(fd)
        for fd, greeting in list(self._pending.items()):
            if time.monotonic() > greeting.expires_at:
                self._drop(fd, "said nothing in time")
        self._accept()

    def _accept(self) -> None:
        """Take in who waits, as far as there is room."""
        try:
            while not self._poll.closed and self._has_room():
                end, _ = self._socket.accept()
                self._pending[end.fileno()] = IncomingHandshake(end, self._secret)
                self._poll.register(end.fileno(), select.EPOLLIN)
        except (BlockingIOError, InterruptedError, ConnectionError):
            return
        except OSError as error:
            if not is_file_limit(error):
                raise
            self._full_until = time.monotonic() + _FULL_S
            self._has_room()
            self._refused("a connection", "waits, since this process has too many open files (raise ulimit -n)")

    def _has_room(self) -> bool:
        if len(self._pending) >= _MOST_PENDING:
            fd, oldest = next(iter(self._pending.items()))
            if time.monotonic() - oldest.began_at > _LEAST_S and self._is_anyone_waiting():
                self._drop(fd, "said nothing while others waited")
        has_room = len(self._pending) < _MOST_PENDING and time.monotonic() > self._full_until
        if has_room is not self._accepts:  # a socket that is ready and not read would keep whoever polls busy
            self._accepts = has_room
            self._poll.modify(self._socket.fileno(), select.EPOLLIN if has_room else 0)
        return has_room

    def _is_anyone_waiting(self) -> bool:
        poll = select.poll()
        poll.register(self._socket.fileno(), select.POLLIN)
        return bool(poll.poll(0))

    def _greet(self, fd: int) -> None:
        greeting = self._pending[fd]
        try:
            about = greeting.read()
            if about is None:
                return
            del self._pending[fd]
            self._poll.unregister(fd)
            self._proved(greeting, about)
        except (OSError, ValueError, TypeError, AttributeError, KeyError) as error:
            self._pending.setdefault(fd, greeting)
            self._drop(fd, str(error))

    def _drop(self, fd: int, why: str) -> None:
        greeting = self._pending.pop(fd)
        with contextlib.suppress(OSError):
            self._poll.unregister(fd)
        self._refused(greeting.peer, why)
        greeting.end.close()

    def close(self) -> None:
        """Close the connections of all that have not proved anything. May be called again."""
        for greeting in self._pending.values():
            greeting.end.close()
        self._pending.clear()
        self._socket.close()
        self._poll.close()
