"""The two protocols on a connection: Hypercorn's, with their faults cured.

HTTP/1.1: body chunks are framed here instead of in h11 (cheaper), and what is not valid HTTP gets OpenAI's
error body too. HTTP/2 is served to clients with prior knowledge only; an upgrade is not offered.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from http import HTTPStatus
from typing import Any

import h11
import trio
from hypercorn.events import Event, RawData, Updated
from hypercorn.protocol import ProtocolWrapper
from hypercorn.protocol.events import Body, Response
from hypercorn.protocol.events import Event as StreamEvent
from hypercorn.protocol.h2 import BUFFER_LOW_WATER, H2Protocol, StreamBuffer
from hypercorn.protocol.h11 import H2ProtocolAssumedError, H11Protocol

from pyserve.errors import InvalidRequest
from pyserve.http.context import new_id
from pyserve.http.errors import error_body

ReadAhead = Callable[[], Awaitable[None]]


class Protocol(ProtocolWrapper):
    """Starts as our HTTP/1.1, may become our HTTP/2 (prior knowledge only)."""

    def __init__(self, *args: Any, read_ahead: ReadAhead) -> None:
        super().__init__(*args)
        self._args = args
        self.protocol = _H11(*args)
        self.protocol.can_read = _Paused(read_ahead)

    async def handle(self, event: Event) -> None:
        """Feeds the protocol in use, and changes it where the client opens with HTTP/2's preface."""
        try:
            await self.protocol.handle(event)
        except H2ProtocolAssumedError as switch:
            self.protocol = _H2(*self._args)
            await self.protocol.initiate()
            await self.protocol.send(Updated(idle=True))  # the preface is not a request
            await self.protocol.handle(RawData(switch.data))


class _Paused:
    """What an HTTP/1.1 connection waits on while a request is pipelined behind the one being answered.

    Hypercorn's event, but the socket is still read meanwhile: only so is a client seen to leave.
    """

    def __init__(self, read_ahead: ReadAhead) -> None:
        self._read_ahead = read_ahead
        self._event = trio.Event()

    async def clear(self) -> None:
        self._event = trio.Event()

    async def set(self) -> None:
        self._event.set()

    def is_set(self) -> bool:
        return self._event.is_set()

    async def wait(self) -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._read_ahead)
            await self._event.wait()
            nursery.cancel_scope.cancel()


class _H11(H11Protocol):
    """HTTP/1.1 with body chunks framed here, and protocol errors that have OpenAI's body too."""

    _version = ""
    _chunked = False

    async def _create_stream(self, request: h11.Request) -> None:
        self._version = request.http_version.decode("ascii")
        await super()._create_stream(request)

    async def _check_protocol(self, event: h11.Request) -> None:
        if event.method == b"PRI":
            await super()._check_protocol(
                event
            )  # an "Upgrade: h2c" is ignored: HTTP/1.1 answers it

    async def stream_send(self, event: StreamEvent) -> None:
        if isinstance(event, Body) and self._chunked and self.connection.our_state is h11.SEND_BODY:
            data = event.data
            await self.send(RawData(b"%x\r\n%b\r\n" % (len(data), data)))
            return
        if isinstance(event, Response):
            names = {name.lower() for name, _ in event.headers}
            framed = names & {b"content-length", b"transfer-encoding"}
            self._chunked = self._version == "1.1" and not framed
        await super().stream_send(event)

    async def _send_error_response(self, status_code: int) -> None:
        try:
            phrase = HTTPStatus(status_code).phrase
        except ValueError:
            phrase = "Bad Request"
        body = error_body(_ProtocolFault(f"not valid HTTP: {phrase}"))
        headers = [
            (b"content-type", b"application/json"),
            (b"content-length", b"%d" % len(body)),
            (b"connection", b"close"),
            (b"x-request-id", new_id("req").encode("ascii")),
        ]
        await self._send_h11_event(h11.Response(status_code=status_code, headers=headers))
        await self._send_h11_event(h11.Data(data=body))
        await self._send_h11_event(h11.EndOfMessage())


class _ProtocolFault(InvalidRequest):
    code = "invalid_http"


class _H2(H2Protocol):
    """HTTP/2 whose writers wait while the client's window is used up."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.stream_buffers = _StreamBuffers()


class _StreamBuffer(StreamBuffer):
    """Hypercorn's, with back-pressure that holds: it resumes when little is *left*, not *sent*."""

    async def pop(self, max_length: int) -> bytes:
        length = min(len(self.buffer), max_length)
        data = bytes(self.buffer[:length])
        del self.buffer[:length]
        if len(self.buffer) < BUFFER_LOW_WATER:
            await self._paused.set()
        if not self.buffer:
            await self._is_empty.set()
        return data


class _StreamBuffers(dict[int, StreamBuffer]):
    """Makes every stream's buffer one of ours as it is filed."""

    def __setitem__(self, stream_id: int, buffer: StreamBuffer) -> None:
        buffer.__class__ = _StreamBuffer
        super().__setitem__(stream_id, buffer)
