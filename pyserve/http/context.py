"""One HTTP request's own facts, and the one way to answer it.

Mutable state: a :class:`Responder` knows whether the answer has started; nothing else is kept.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Awaitable, Callable, Iterable, MutableMapping
from dataclasses import dataclass, field
from typing import Any

import structlog
import trio

from pyserve.errors import RequestError
from pyserve.http.auth import ANONYMOUS, ApiKey
from pyserve.http.errors import error_body, error_event, error_headers

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
Headers = list[tuple[bytes, bytes]]

SCOPE_KEY = "pyserve"
_log = structlog.get_logger("pyserve.http")
_SANE_ID = re.compile(r"[A-Za-z0-9._:/+=@-]{1,128}")


def new_id(prefix: str) -> str:
    """A fresh id, 128 random bits: ids at a clock's resolution collide."""
    return f"{prefix}-{secrets.token_hex(16)}"


def is_event_stream(start: Message) -> bool:
    """Whether the answer that begins so is a stream of server-sent events."""
    return any(
        name.lower() == b"content-type" and value.startswith(b"text/event-stream")
        for name, value in start["headers"]
    )


class ClientGone(Exception):
    """The client left before it was answered."""


@dataclass(slots=True)
class RequestContext:
    """What is known of a request. ``log`` are the fields of its access line, ``headers`` of its answer.

    ``arrival_s``: when all of it had been received, on the engine's clock.
    """

    request_id: str
    method: str
    path: str
    request_headers: dict[bytes, bytes]
    key: ApiKey = ANONYMOUS
    body: bytes = b""
    arrival_s: float = 0.0
    headers: Headers = field(default_factory=list)
    log: dict[str, object] = field(default_factory=dict)

    @classmethod
    def of(cls, scope: Scope) -> RequestContext:
        """From an ASGI scope; the client's own ``X-Request-Id`` is kept where it is sane."""
        headers = {name.lower(): value for name, value in scope["headers"]}
        given = headers.get(b"x-request-id", b"").decode("latin-1")
        request_id = given if _SANE_ID.fullmatch(given) else new_id("req")
        return cls(request_id, scope["method"], scope["path"], headers)

    def header(self, name: bytes) -> str:
        """A request header's value ("" where absent)."""
        return self.request_headers.get(name, b"").decode("latin-1")

    def ignored(self, fields: Iterable[str]) -> None:
        """Reports body fields that were accepted and ignored: debug log, and a header of at most 1 KiB."""
        names = ", ".join(fields)
        if names:
            _log.debug("fields ignored", path=self.path, fields=names[:1024])
            value = names.encode("unicode_escape")[:1024]
            self.headers.append((b"x-pyserve-ignored-fields", value))


class Responder:
    """Sends one answer: JSON at once, or an event stream piece by piece.

    The final send is shielded from cancellation, because Hypercorn re-arms its idle timer only after it, and
    bounded by ``write_timeout_s``, because HTTP/2 may wait for the client's window there.
    """

    def __init__(self, send: Send, context: RequestContext, write_timeout_s: float) -> None:
        self._send = send
        self._context = context
        self._write_timeout_s = write_timeout_s
        self.status: int | None = None
        self.finished = False
        self._streaming = False

    async def send(self, message: Message) -> None:
        """An ASGI ``send`` for inner apps, with the request's headers added."""
        if message["type"] == "http.response.start":
            self.status = message["status"]
            self._streaming = is_event_stream(message)
            extra = [(b"x-request-id", self._context.request_id.encode("ascii"))]
            message["headers"] = [*message.get("headers", ()), *extra, *self._context.headers]
            await self._send(message)
        elif message.get("more_body", False):
            await self._send(message)
        else:
            with trio.move_on_after(self._write_timeout_s, shield=True):
                await self._send(message)
            self.finished = True

    async def json(
        self, status: int, body: bytes, headers: Iterable[tuple[bytes, bytes]] = ()
    ) -> None:
        """The whole answer."""
        await self.whole(status, body, b"application/json", headers)

    async def whole(
        self, status: int, body: bytes, kind: bytes, headers: Iterable[tuple[bytes, bytes]] = ()
    ) -> None:
        """The whole answer, of media type ``kind``."""
        own = [(b"content-type", kind), (b"content-length", b"%d" % len(body)), *headers]
        await self.send({"type": "http.response.start", "status": status, "headers": own})
        await self.send({"type": "http.response.body", "body": body, "more_body": False})

    async def start_stream(self) -> None:
        """Begins a server-sent event stream, unless it has begun."""
        if self._streaming:
            return
        headers = [
            (b"content-type", b"text/event-stream; charset=utf-8"),
            (b"cache-control", b"no-cache"),
            (b"x-accel-buffering", b"no"),
        ]
        await self.send({"type": "http.response.start", "status": 200, "headers": headers})

    async def write(self, data: bytes) -> None:
        """More of the stream."""
        await self.send({"type": "http.response.body", "body": data, "more_body": True})

    async def end_stream(self) -> None:
        """The end of the stream."""
        await self.send({"type": "http.response.body", "body": b"", "more_body": False})

    async def fail(self, error: RequestError) -> None:
        """The error as a JSON answer, or as the last event of a stream that has begun."""
        if self.finished:
            return
        if self.status is None:
            await self.json(error.status, error_body(error), error_headers(error))
        elif self._streaming:
            await self.write(error_event(error))
            await self.end_stream()
