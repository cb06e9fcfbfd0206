"""Endpoint: an HTTP server on loopback that hands the requests of programs to their conversations."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import hmac
import itertools
import json
import math
import secrets
import threading
from collections.abc import Mapping
from typing import Any, Protocol

from rollwright.envs.llm.agents.protocol import (
    ChatRequest,
    Choice,
    Refusal,
    completion,
    events,
    read_object,
    read_request,
)

_MOST_HEAD, _MOST_BODY = 1 << 16, 1 << 28  # bytes
_BODY_S = 60.0  # for the rest of a request whose first line has come
_END_S = 5.0  # for the server to end
_REASONS = {200: "OK", 400: "Bad Request", 401: "Unauthorized", 404: "Not Found", 405: "Method Not Allowed"}
_REASONS |= {410: "Gone", 411: "Length Required", 413: "Content Too Large", 500: "Internal Server Error"}


class Call:
    """A request that waits for its answers.

    Attributes:
        request: what is asked for.
        choices: answers so far.
    """

    def __init__(self, number: str, request: ChatRequest, digest: bytes, loop: asyncio.AbstractEventLoop) -> None:
        self.request, self.choices = request, list[Choice]()
        self.number, self.digest, self._loop = number, digest, loop
        self.answered: asyncio.Future[None] = loop.create_future()
        self.reader: asyncio.StreamReader | None = None

    def take(self, choice: Choice) -> None:
        """Take an answer; when it is the last one, all are sent. Called by any thread."""
        self.choices.append(choice)
        if len(self.choices) == self.request.n:
            with contextlib.suppress(RuntimeError):  # the server has ended
                self._loop.call_soon_threadsafe(self._end, None)

    def refuse(self, refusal: Refusal) -> None:
        """Send an error; in the thread of the server."""
        self._end(refusal)

    def _end(self, refusal: Refusal | None) -> None:
        if self.answered.done():
            return
        if refusal is None:
            self.answered.set_result(None)
        else:
            self.answered.set_exception(refusal)
            self.answered.exception()  # whoever waits gets it; perhaps nobody does

    @property
    def is_lost(self) -> bool:
        """Whether who asked has hung up."""
        return self.reader is not None and self.reader.at_eof()


class Conversation(Protocol):
    """What an endpoint hands requests to, in its own thread."""

    ignored: tuple[str, ...]

    def receive(self, call: Call) -> None:
        """Take a request; answers go to :meth:`Call.take`."""

    def add_reward(self, reward: float) -> None:
        """Take a reward that was posted."""


class _Open:
    def __init__(self, conversation: Conversation, key: str) -> None:
        self.conversation, self.key = conversation, key
        self.calls: list[Call] = []


class Endpoint:
    """An HTTP server on a port of 127.0.0.1, in a thread: an address and a key for each conversation.

    ``POST {address}/chat/completions``, ``GET {address}/models`` and ``POST {address}/reward``. Without the key: 401. A
    conversation that has ended: 410. A request that comes again when its connection was lost waits for the same answer.

    Attributes:
        port: that it listens at.
    """

    def __init__(self) -> None:
        self._open: dict[int, _Open] = {}
        self._ids, self._numbers = itertools.count(), itertools.count()
        self._next = 0  # smaller ids have been conversations
        self._loop = asyncio.new_event_loop()
        self._connections: set[asyncio.Task[None]] = set()
        self._server = self._loop.run_until_complete(
            asyncio.start_server(self._connected, "127.0.0.1", 0, limit=_MOST_HEAD, backlog=1024)
        )
        self.port: int = self._server.sockets[0].getsockname()[1]
        self._thread = threading.Thread(target=self._run, daemon=True, name="rollwright-agents")
        self._thread.start()

    def _run(self) -> None:
        try:
            self._loop.run_forever()
        finally:
            for socket in self._server.sockets:  # a server that is closed cannot begin what it has accepted
                self._loop.remove_reader(socket.fileno())
            self._loop.run_until_complete(_turns())  # requests that wait are refused
            self._server.close()
            open_now = list(self._connections)
            for task in open_now:
                task.cancel()
            if open_now:
                self._loop.run_until_complete(asyncio.wait(open_now, timeout=_END_S))
            self._loop.run_until_complete(_turns())  # their sockets are closed
            self._loop.close()

    def open(self, conversation: Conversation) -> tuple[int, str, str]:
        """Begin a conversation: its number, address and key. Called by any thread."""
        number, key = next(self._ids), secrets.token_urlsafe(24)
        self._next = max(self._next, number + 1)
        self._open[number] = _Open(conversation, key)
        return number, f"http://127.0.0.1:{self.port}/{number}/v1", key

    def end(self, number: int) -> None:
        """End a conversation: its requests are refused from here on. Called by any thread; may be called again."""
        ended = self._open.pop(number, None)
        if ended is not None:
            with contextlib.suppress(RuntimeError):  # the server has ended
                self._loop.call_soon_threadsafe(self._refuse, ended)

    @staticmethod
    def _refuse(ended: _Open) -> None:
        for call in ended.calls:
            call.refuse(_gone())

    def close(self) -> None:
        """End all conversations and the server. May be called again."""
        for number in list(self._open):
            self.end(number)
        with contextlib.suppress(RuntimeError):  # it has ended
            self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(_END_S)

    # A connection -------------------------------------------------------------------------------------

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._connections.add(task)
        try:
            while await self._exchange(reader, writer):
                pass
        except (OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError, asyncio.CancelledError, TimeoutError):
            return  # it was closed, or what came is no request
        finally:
            self._connections.discard(task)
            writer.close()

    async def _exchange(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        """Answer a request; whether another one may follow."""
        lines = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
        method, _, rest = lines[0].partition(" ")
        path, _, version = rest.rpartition(" ")
        headers = {
            name.strip().lower(): value.strip() for name, _, value in (line.partition(":") for line in lines[1:])
        }
        stays = version == "HTTP/1.1" and headers.get("connection", "").lower() != "close"
        call: Call | None = None
        opened: _Open | None = None
        try:
            body = await asyncio.wait_for(_body(reader, writer, headers), _BODY_S)
            opened, name = self._found(path, headers)
            if (method, name) == ("POST", "chat/completions"):
                call = self._call(opened, body, reader)
                await asyncio.shield(call.answered)
                kind, answer = _written(call)
            else:
                kind, answer = "application/json", json.dumps(_aside(opened.conversation, method, name, body)).encode()
            status = 200
        except Refusal as refusal:
            kind, answer, status = "application/json", json.dumps(refusal.body).encode(), refusal.status
            stays = stays and status not in (411, 413)
        except TimeoutError:
            raise
        except Exception as error:  # of this package: the program reads what it was
            body = json.dumps(Refusal(500, f"{type(error).__name__}: {error}").body).encode()
            kind, answer, status = "application/json", body, 500
        head = f"HTTP/1.1 {status} {_REASONS[status]}\r\nContent-Type: {kind}\r\nContent-Length: {len(answer)}\r\n"
        writer.write(f"{head}Connection: {'keep-alive' if stays else 'close'}\r\n\r\n".encode() + answer)
        await writer.drain()
        if opened is not None and call in opened.calls and not call.is_lost:
            opened.calls.remove(call)
        return stays

    def _found(self, path: str, headers: Mapping[str, str]) -> tuple[_Open, str]:
        """The conversation of a request, and what is asked of it."""
        number, _, name = path.partition("?")[0].lstrip("/").partition("/v1/")
        if not number.isdecimal() or int(number) >= self._next:
            raise Refusal(404, f"there is nothing at {path!r}. Use the base_url that the program was given.")
        opened = self._open.get(int(number))
        if opened is None:
            raise _gone()
        scheme, _, key = headers.get("authorization", "").partition(" ")
        if scheme.lower() != "bearer" or not hmac.compare_digest(key.strip().encode(), opened.key.encode()):
            raise Refusal(
                401, "the key is not that of this conversation. Use the api_key given.", code="invalid_api_key"
            )
        return opened, name

    def _call(self, opened: _Open, body: bytes, reader: asyncio.StreamReader) -> Call:
        """The call of a request: a new one, or one whose connection was lost."""
        digest = hashlib.blake2b(body).digest()
        call = next((call for call in opened.calls if call.digest == digest and call.is_lost), None)
        if call is None:
            request = read_request(body, opened.conversation.ignored)
            call = Call(f"{next(self._numbers)}", request, digest, self._loop)
            opened.calls.append(call)
            opened.conversation.receive(call)
        call.reader = reader
        return call


async def _turns(count: int = 16) -> None:
    """Let what is ready run, and what follows from it."""
    for _ in range(count):
        await asyncio.sleep(0)


async def _body(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, headers: Mapping[str, str]) -> bytes:
    length = headers.get("content-length", "0")
    if "transfer-encoding" in headers or not length.isdecimal():
        raise Refusal(411, "send the body with a Content-Length.")
    if int(length) > _MOST_BODY:
        raise Refusal(413, f"the body has {length} bytes, more than {_MOST_BODY}. Send less.")
    if headers.get("expect", "").lower() == "100-continue":
        writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
    return await reader.readexactly(int(length))


def _written(call: Call) -> tuple[str, bytes]:
    if call.request.stream:
        return "text/event-stream", events(call.number, call.request, call.choices)
    return "application/json", json.dumps(completion(call.number, call.request, call.choices)).encode()


def _aside(conversation: Conversation, method: str, name: str, body: bytes) -> dict[str, Any]:
    """Answer what needs no model."""
    if (method, name) == ("GET", "models"):
        model = {"id": "policy", "object": "model", "created": 0, "owned_by": "rollwright"}
        return {"object": "list", "data": [model]}
    if (method, name) == ("POST", "reward"):
        reward = read_object(body).get("reward")
        if isinstance(reward, bool) or not isinstance(reward, int | float) or not math.isfinite(reward):
            raise Refusal(400, f"reward: expected a finite number, got {reward!r}.", param="reward")
        conversation.add_reward(float(reward))
        return {"reward": float(reward)}
    if name in ("models", "reward", "chat/completions"):
        raise Refusal(405, f"{method} is not answered at {name!r}.")
    raise Refusal(404, f"{name!r} is not supported here. Use chat/completions.")


def _gone() -> Refusal:
    return Refusal(
        410,
        "the conversation has ended: the program was over, a limit of turns, tokens or time was reached, or the "
        "collector was closed.",
        code="conversation_ended",
    )
