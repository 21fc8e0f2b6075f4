from __future__ import annotations

import errno
import resource
import socket
from typing import Any

import pytest
import trio
import trio.testing

from pyserve.http.listen import accept_all, allow_files
from pyserve.testing.streams import open_wire_client
from tests.http.serving import serving


async def test_all_connections_that_wait_are_taken_in_one_turn() -> None:
    (listener,) = await trio.open_tcp_listeners(0, host="127.0.0.1")
    address = listener.socket.getsockname()
    clients = [socket.create_connection(address) for _ in range(10)]
    served: list[trio.SocketStream] = []

    async with trio.open_nursery() as nursery:
        nursery.start_soon(accept_all, listener, served.append)
        await trio.testing.wait_all_tasks_blocked()
        assert len(served) == 10
        nursery.cancel_scope.cancel()
    for client in clients:
        client.close()
    for stream in served:
        await stream.aclose()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(address)


async def test_a_server_out_of_file_descriptors_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    accept, failures = socket.socket.accept, [errno.EMFILE, errno.ECONNABORTED]

    def failing(self: socket.socket) -> Any:
        if failures:
            raise OSError(failures.pop(), "not now")
        return accept(self)

    monkeypatch.setattr(socket.socket, "accept", failing)
    async with serving() as server, open_wire_client("127.0.0.1", server.port) as client:
        await client.send(b"GET /livez HTTP/1.1\r\nhost: x\r\n\r\n")
        assert (await client.read_until(b"}")).startswith(b"HTTP/1.1 200")
    assert not failures


def test_limit_of_open_files_is_raised_as_far_as_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    limits = (100, 1000)
    monkeypatch.setattr(resource, "getrlimit", lambda what: limits)
    seen: list[tuple[int, int]] = []
    monkeypatch.setattr(resource, "setrlimit", lambda what, new: seen.append(new))
    for wanted in (50, 500, 5000):
        allow_files(wanted)
    assert seen == [(500, 1000), (1000, 1000)]
