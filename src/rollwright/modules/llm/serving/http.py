"""A client of HTTP for JSON, in the loop of engines, with limits on what is waited for."""

from __future__ import annotations

import asyncio
import json
import ssl
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import Any
from urllib.parse import urlsplit

from rollwright.errors import EngineLostError

_CONNECT_S, _HEALTH_S, _LOOK_S = 10.0, 10.0, 5.0
_FAILURES = 3  # of looking whether the server lives, before it counts as gone
_WAITS_S = (0.1, 0.5, 2.0)  # between tries of a request


class RefusedError(ValueError):
    """A server refused a request (a status of 400 to 499)."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class HttpClient:
    """Sends JSON to a server, and receives JSON.

    A server that does not answer, answers with a status from 500, closes the line, or sends half an answer, is asked
    again a few times, and counts as gone then. While an answer is awaited, it is looked whether the server lives.

    Args:
        address: ``http://host:port`` or ``https://...``, perhaps with a path.
        name: of the server, for messages.
        api_key: for its ``Authorization``; None: none is sent.
        health: where it is looked whether the server lives.

    Raises:
        ValueError: it is no such address.
    """

    def __init__(self, address: str, name: str, api_key: str | None = None, *, health: str = "/health") -> None:
        parts = urlsplit(address)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"address: expected http://host:port, got {address!r}.")
        self._host, self._ssl = parts.hostname, ssl.create_default_context() if parts.scheme == "https" else None
        self._port = parts.port or (443 if self._ssl else 80)
        self._base = parts.path.rstrip("/")
        self.name = f"{name} at {address}"
        self._headers = {"Host": parts.netloc, "Accept": "application/json", "Connection": "close"}
        if api_key is not None:
            self._headers["Authorization"] = f"Bearer {api_key}"
        self._health = health
        self._looked, self._failures = 0.0, 0
        self._looking: asyncio.Lock | None = None

    async def get(self, path: str) -> Any:
        """The answer to a GET. See :meth:`post`."""
        return await self._asked("GET", path, None)

    async def post(self, path: str, body: Mapping[str, Any] | None = None) -> Any:
        """The answer to a POST; None where it is empty.

        Raises:
            EngineLostError: the server is gone.
            RefusedError: it refused.
        """
        return await self._asked("POST", path, json.dumps(body or {}).encode())

    async def _asked(self, method: str, path: str, body: bytes | None) -> Any:
        problem: Any = None
        for wait in (0.0, *_WAITS_S):
            await asyncio.sleep(wait)
            try:
                status, answer = await self._watched(method, path, body)
            except (OSError, EOFError, ValueError, TimeoutError) as error:  # of asyncio and of wrong answers
                problem = f"{type(error).__name__}: {error}"
                continue
            if status < 400:
                return answer
            text = answer if isinstance(answer, str) else json.dumps(answer)
            if status < 500:
                raise RefusedError(status, f"{self.name} refused {method} {path}: {status} {text[:500]}")
            problem = f"{status} {text[:500]}"
        raise EngineLostError(f"{self.name} does not answer {method} {path}, {len(_WAITS_S) + 1} times: {problem}")

    async def _watched(self, method: str, path: str, body: bytes | None) -> tuple[int, Any]:
        """An exchange, ended where the server is gone meanwhile."""
        exchange = asyncio.ensure_future(self._exchange(method, path, body))
        try:
            while not (await asyncio.wait([exchange], timeout=_LOOK_S))[0]:
                if not await self._lives():
                    raise TimeoutError(f"GET {self._health} failed {_FAILURES} times")
            return exchange.result()
        finally:
            exchange.cancel()

    async def _lives(self) -> bool:
        """Whether the server lives; all that wait share one look."""
        self._looking = self._looking or asyncio.Lock()
        async with self._looking:
            if time.monotonic() - self._looked > _LOOK_S:
                status = 500
                with suppress(OSError, EOFError, ValueError, TimeoutError):
                    status, _ = await asyncio.wait_for(self._exchange("GET", self._health, None), _HEALTH_S)
                self._failures = 0 if status < 500 else self._failures + 1
                self._looked = time.monotonic()
            return self._failures < _FAILURES

    async def _exchange(self, method: str, path: str, body: bytes | None) -> tuple[int, Any]:
        opening = asyncio.open_connection(self._host, self._port, ssl=self._ssl)
        reader, writer = await asyncio.wait_for(opening, _CONNECT_S)
        try:
            headers = dict(self._headers)
            if body is not None:
                headers |= {"Content-Type": "application/json", "Content-Length": str(len(body))}
            lines = [f"{method} {self._base}{path} HTTP/1.1", *(f"{name}: {value}" for name, value in headers.items())]
            writer.write("\r\n".join([*lines, "", ""]).encode() + (body or b""))
            await writer.drain()
            return await _answer(reader)
        finally:
            writer.close()
            with suppress(OSError):
                await writer.wait_closed()


async def _answer(reader: asyncio.StreamReader) -> tuple[int, Any]:
    """Status and JSON of an answer; text where it is none.

    Raises:
        EOFError, ValueError: it is not whole, or no answer of HTTP.
    """
    first, *lines = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
    status = int(first.split(" ", 2)[1])
    headers = {name.strip().lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    if "chunked" in headers.get("transfer-encoding", ""):
        content = b""
        while size := int((await reader.readline()).split(b";")[0], 16):
            content += await reader.readexactly(size)
            await reader.readexactly(2)
    elif "content-length" in headers:
        content = await reader.readexactly(int(headers["content-length"]))
    else:
        content = await reader.read()
    text = content.decode()
    if "json" in headers.get("content-type", ""):
        return status, json.loads(text)
    return status, text or None
