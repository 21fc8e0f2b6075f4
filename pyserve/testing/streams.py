"""Clients that misbehave, on a real TCP socket: slow to send, slow to read, half-closed, vanished."""

from __future__ import annotations

import socket
import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import trio


class WireClient:
    """A raw TCP client whose every move the test decides. Made by :func:`open_wire_client`."""

    def __init__(self, stream: trio.SocketStream) -> None:
        self._stream = stream
        self._received = bytearray()

    @property
    def received(self) -> bytes:
        """What has been read and not returned yet."""
        return bytes(self._received)

    async def send(self, data: bytes) -> None:
        """Sends all of it. Raises :class:`trio.BrokenResourceError` where the server has hung up."""
        await self._stream.send_all(data)

    async def trickle(self, data: bytes, *, every_s: float, chunk: int = 1) -> None:
        """Sends ``chunk`` bytes, then waits ``every_s``, again and again: slow-loris."""
        for start in range(0, len(data), chunk):
            await self.send(data[start : start + chunk])
            await trio.sleep(every_s)

    async def read_some(self, limit: int = 65536) -> bytes:
        """What is there, at least a byte; ``b""`` once the server has closed."""
        if self._received:
            data = bytes(self._received[:limit])
            del self._received[:limit]
            return data
        return bytes(await self._stream.receive_some(limit))

    async def read_until(self, mark: bytes) -> bytes:
        """Everything up to and with ``mark``. Raises EOFError where the server closes before it."""
        while (at := self._received.find(mark)) < 0:
            data = await self._stream.receive_some()
            if not data:
                raise EOFError(f"closed before {mark!r}, after {bytes(self._received)!r}")
            self._received += data
        end = at + len(mark)
        data, self._received = bytes(self._received[:end]), self._received[end:]
        return data

    async def read_to_end(self) -> bytes:
        """Everything until the server closes."""
        async for data in self._stream:
            self._received += data
        data, self._received = bytes(self._received), bytearray()
        return data

    async def half_close(self) -> None:
        """Sends FIN and goes on reading."""
        await self._stream.send_eof()

    def vanish(self) -> None:
        """Resets the connection: what is in flight is lost, the server's next write fails."""
        raw = self._stream.socket
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        raw.close()

    async def aclose(self) -> None:
        """Closes it as a well-behaved client does."""
        await self._stream.aclose()


@asynccontextmanager
async def open_wire_client(
    host: str, port: int, *, receive_buffer: int | None = None
) -> AsyncIterator[WireClient]:
    """Connects; closes on the way out.

    ``receive_buffer``: bytes that the kernel takes in for a client that does not read (``SO_RCVBUF``, set
    before connecting so that the window is small from the start): with 4096, a server that streams to a
    client that never reads is blocked soon.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        if receive_buffer is not None:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        raw = trio.socket.from_stdlib_socket(probe.dup())
    try:
        await raw.connect((host, port))
        client = WireClient(trio.SocketStream(raw))
        yield client
        await client.aclose()
    finally:
        raw.close()
