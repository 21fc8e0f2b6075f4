"""The misbehaving clients do misbehave, seen from a plain Trio server on loopback."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from pyserve.testing.streams import WireClient, open_wire_client


@asynccontextmanager
async def pair(
    receive_buffer: int | None = None,
) -> AsyncIterator[tuple[WireClient, trio.SocketStream]]:
    [listener] = await trio.open_tcp_listeners(0, host="127.0.0.1")
    async with listener:
        port = listener.socket.getsockname()[1]
        async with (
            open_wire_client("127.0.0.1", port, receive_buffer=receive_buffer) as client,
            await listener.accept() as server,
        ):
            yield client, server


async def test_read_until_returns_up_to_the_mark_and_keeps_the_rest() -> None:
    async with pair() as (client, server):
        await server.send_all(b"head\r\n\r\nbody")
        assert await client.read_until(b"\r\n\r\n") == b"head\r\n\r\n"
        await server.aclose()
        assert await client.read_to_end() == b"body"


async def test_read_until_raises_when_the_server_closes_first() -> None:
    async with pair() as (client, server):
        await server.send_all(b"he")
        await server.aclose()
        with pytest.raises(EOFError, match="closed before"):
            await client.read_until(b"\r\n")


async def test_half_closed_client_still_reads() -> None:
    async with pair() as (client, server):
        await client.half_close()
        assert await server.receive_some() == b""
        await server.send_all(b"still here")
        assert await client.read_some() == b"still here"


async def test_vanished_client_is_a_reset() -> None:
    async with pair() as (client, server):
        client.vanish()
        with pytest.raises(trio.BrokenResourceError):
            await server.receive_some()


async def test_client_that_does_not_read_blocks_its_server() -> None:
    finished = False

    async def pour(server: trio.SocketStream) -> None:
        nonlocal finished
        await server.send_all(bytes(2**26))
        finished = True

    async with pair(receive_buffer=4096) as (_, server), trio.open_nursery() as nursery:
        nursery.start_soon(pour, server)
        await wait_all_tasks_blocked()
        assert not finished
        nursery.cancel_scope.cancel()
