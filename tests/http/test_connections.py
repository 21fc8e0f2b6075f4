"""Clients that misbehave on the socket, and the end of the server."""

from __future__ import annotations

import json
import resource
from typing import Any

import pytest
import trio

from pyserve.errors import PyserveError
from pyserve.http.config import HttpConfig
from pyserve.http.server import serve_http
from pyserve.testing.streams import open_wire_client
from tests.http.serving import Serving, serving
from tests.http.test_generation import endless, slowly


def post(path: str, body: object) -> bytes:
    content = json.dumps(body).encode()
    return (
        b"POST %b HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%b"
        % (path.encode(), len(content), content)
    )


STREAM = {"prompt": "abc", "stream": True, "max_tokens": 4000}


async def test_idle_connection_is_closed_after_keep_alive() -> None:
    async with (
        serving(keep_alive_s=0.05) as server,
        open_wire_client("127.0.0.1", server.port) as client,
    ):
        await client.send(b"GET /livez HTTP/1.1\r\nhost: x\r\n\r\n")
        assert (await client.read_until(b"}")).startswith(b"HTTP/1.1 200")
        assert await client.read_to_end() == b""


async def test_silent_connection_is_closed() -> None:
    async with (
        serving(keep_alive_s=0.05) as server,
        open_wire_client("127.0.0.1", server.port) as client,
    ):
        assert await client.read_to_end() == b""


async def test_trickled_head_is_cut_off_though_keep_alive_is_long() -> None:
    async with (
        serving(keep_alive_s=600, header_timeout_s=0.05) as server,
        open_wire_client("127.0.0.1", server.port) as client,
    ):
        with pytest.raises(trio.BrokenResourceError):
            await client.trickle(b"GET /livez HTTP/1.1\r\nx: " + b"y" * 10_000, every_s=0.01)


async def test_slow_body_is_a_408() -> None:
    async with (
        serving(body_timeout_s=0.05) as server,
        open_wire_client("127.0.0.1", server.port) as client,
    ):
        await client.send(post("/v1/completions", {"prompt": "abc"})[:-4])
        answer = await client.read_to_end()
        assert answer.startswith(b"HTTP/1.1 408")
        assert b'"code":"request_timeout"' in answer


@pytest.mark.parametrize("chunked", [False, True])
async def test_large_body_is_a_413(chunked: bool) -> None:
    async with (
        serving(body_limit=1000) as server,
        open_wire_client("127.0.0.1", server.port) as client,
    ):
        head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
        if chunked:
            await client.send(head + b"transfer-encoding: chunked\r\n\r\n3e9\r\n" + b"x" * 1001)
        else:
            await client.send(head + b"content-length: 1001\r\n\r\n")
        answer = await client.read_until(b"}}")
        assert answer.startswith(b"HTTP/1.1 413")
        assert b'"code":"body_too_large"' in answer


async def test_what_is_not_http_gets_openais_error_body() -> None:
    async with serving() as server, open_wire_client("127.0.0.1", server.port) as client:
        await client.send(b"not http at all\r\n\r\n")
        answer = await client.read_to_end()
        assert answer.startswith(b"HTTP/1.1 400")
        assert b'"code":"invalid_http"' in answer
        assert b"x-request-id: req-" in answer


async def test_huge_head_is_refused() -> None:
    async with serving() as server, open_wire_client("127.0.0.1", server.port) as client:
        await client.send(b"GET / HTTP/1.1\r\nhost: x\r\ny: " + b"z" * 20_000)
        assert (await client.read_until(b"}}")).startswith(b"HTTP/1.1 431")


async def test_vanished_client_cancels_its_stream() -> None:
    async with (
        serving(engine={"reply": endless, "pace": slowly}) as server,
        open_wire_client("127.0.0.1", server.port) as client,
    ):
        await client.send(post("/v1/completions", STREAM))
        await client.read_until(b"data: ")
        client.vanish()
        await server.engine.until_idle()
        assert len(server.engine.abandoned) == 1


async def test_half_closed_client_counts_as_gone() -> None:
    async with (
        serving(engine={"reply": endless, "pace": slowly}) as server,
        open_wire_client("127.0.0.1", server.port) as client,
    ):
        await client.send(post("/v1/completions", STREAM))
        await client.half_close()
        await server.engine.until_open()
        await server.engine.until_idle()


@pytest.mark.parametrize("stream", [False, True])
async def test_client_that_pipelined_and_left_is_seen_to_leave(stream: bool) -> None:
    async with (
        serving(engine={"reply": endless, "pace": slowly}) as server,
        open_wire_client("127.0.0.1", server.port) as client,
    ):
        more = b"GET /livez HTTP/1.1\r\nhost: x\r\n\r\n"
        await client.send(post("/v1/completions", {**STREAM, "stream": stream}) + more)
        await server.engine.until_open()
        client.vanish()
        await server.engine.until_idle()
        assert len(server.engine.abandoned) == 1


async def test_pipelined_requests_are_answered_in_order() -> None:
    async with serving() as server, open_wire_client("127.0.0.1", server.port) as client:
        close = b"GET /livez HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n"
        texts = ("ab", "cd" * 40_000, "ef")  # one that is longer than what is read ahead
        bodies = [{"prompt": text[:2], "user": text} for text in texts]
        await client.send(b"".join(post("/v1/completions", body) for body in bodies) + close)
        answer = await client.read_to_end()
        assert answer.count(b"HTTP/1.1 200") == 4
        places = [answer.index(b'"text":"%b"' % text) for text in (b"AB", b"CD", b"EF")]
        assert places == sorted(places)


async def test_http2_connection_that_asks_for_nothing_is_closed() -> None:
    async with (
        serving(keep_alive_s=0.05) as server,
        open_wire_client("127.0.0.1", server.port) as client,
    ):
        await client.send(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n")
        await client.read_to_end()


BULKY = {"prompt": "abc", "stream": True, "max_tokens": 4000, "n": 64}


async def test_client_that_stops_reading_is_cut_off_and_its_request_cancelled() -> None:
    async with (
        serving(engine={"reply": endless}, write_timeout_s=0.1) as server,
        open_wire_client("127.0.0.1", server.port, receive_buffer=4096) as client,
    ):
        await client.send(post("/v1/completions", BULKY))
        await server.engine.until_open()
        await server.engine.until_idle()
        assert len(server.engine.abandoned) == 1
        assert (await server.get("/livez")).status_code == 200


async def test_shutdown_does_not_wait_for_writes_that_are_stuck() -> None:
    """The engine is done and the client reads nothing: the answer can never leave."""
    body = {**STREAM, "n": 16, "logprobs": 1}
    async with (
        serving(engine={"reply": endless}, write_timeout_s=600) as server,
        open_wire_client("127.0.0.1", server.port, receive_buffer=4096) as client,
    ):
        await client.send(post("/v1/completions", body))
        await server.engine.until_open()
        await server.engine.until_idle()
        server.state.shutdown.set()
        await server.stopped.wait()


async def test_clients_that_do_not_read_stop_neither_server_nor_shutdown() -> None:
    """As many as file descriptors allow, up to 256 (``ulimit -n``); a thousand only take longer."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 4096), hard))
    count = min(256, (min(hard, 4096) - 256) // 2)
    try:
        async with serving(write_timeout_s=600, drain_timeout_s=0.01) as server:
            async with trio.open_nursery() as clients:
                gate = server.engine.gate = trio.Event()
                for _ in range(count):
                    clients.start_soon(stall, server)
                await server.engine.until_open(count)
                assert (await server.get("/livez")).status_code == 200
                gate.set()
                server.state.shutdown.set()
                await server.stopped.wait()
                clients.cancel_scope.cancel()
            assert not server.engine.open
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


async def stall(server: Serving) -> None:
    async with open_wire_client("127.0.0.1", server.port, receive_buffer=4096) as client:
        await client.send(post("/v1/completions", STREAM))
        await trio.sleep_forever()


async def test_shutdown_lets_streams_finish_and_takes_nothing_new() -> None:
    async with serving(engine={"gate": trio.Event()}) as server:
        answers: list[str] = []

        async def ask() -> None:
            answer = await server.post("/v1/completions", {"prompt": "abc", "stream": True})
            answers.append(answer.text)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(ask)
            await server.engine.until_open()
            server.state.shutdown.set()
            while not server.engine.draining:
                await trio.lowlevel.checkpoint()
            with pytest.raises(OSError, match="attempts to connect"):
                await trio.open_tcp_stream("127.0.0.1", server.port)
            assert server.engine.gate is not None
            server.engine.gate.set()
        await server.stopped.wait()
        assert answers[0].endswith("data: [DONE]\n\n")


async def test_shutdown_ends_what_outlasts_the_drain_with_an_error_event() -> None:
    engine = {"reply": endless, "pace": slowly}
    async with serving(engine=engine, drain_timeout_s=0.05) as server:
        async with server.client.stream("POST", "/v1/completions", json=STREAM) as answer:
            lines = answer.aiter_lines()
            await anext(lines)
            server.state.shutdown.set()
            *_, last = [line async for line in lines if line]
            assert json.loads(last.removeprefix("data: "))["error"]["code"] == "unavailable"
        await server.stopped.wait()


async def test_server_that_is_cancelled_tells_every_client_and_waits_for_none() -> None:
    """A crash, or a second signal: also with a client that never reads, whatever the write time-out."""
    engine = {"reply": endless, "pace": slowly}
    async with serving(engine=engine, write_timeout_s=600) as server:
        answers: dict[str, tuple[int, str]] = {}

        async def ask(name: str, path: str, body: dict[str, Any] | None = None) -> None:
            answer = await server.client.request("GET" if body is None else "POST", path, json=body)
            answers[name] = (answer.status_code, answer.text)

        job = (await server.post("/submit", {"prompt": "abc", "max_tokens": 4000})).json()["id"]
        async with trio.open_nursery() as clients:
            reader = await clients.start(stuck, server)
            clients.start_soon(ask, "whole", "/v1/completions", {**STREAM, "stream": False})
            clients.start_soon(ask, "stream", "/v1/completions", STREAM)
            clients.start_soon(ask, "poll", f"/v1/jobs/{job}?wait=60")
            clients.start_soon(ask, "events", f"/v1/jobs/{job}/events")
            await server.engine.until_open(4)
            await server.engine.until_tokens(10_000)
            server.scope.cancel()
            await server.stopped.wait()
            reader.cancel()
        for name, status in (("whole", 503), ("poll", 503), ("stream", 200), ("events", 200)):
            assert answers[name][0] == status
            assert '"code":"unavailable"' in answers[name][1]


async def stuck(server: Serving, *, task_status: Any) -> None:
    """A client that asks for more than the sockets hold and reads nothing."""
    with trio.CancelScope() as scope:
        async with open_wire_client("127.0.0.1", server.port, receive_buffer=4096) as client:
            await client.send(post("/v1/completions", BULKY))
            task_status.started(scope)
            await trio.sleep_forever()


async def test_draining_server_answers_503_on_kept_connections() -> None:
    async with serving() as server:
        await server.get("/livez")
        server.engine.draining = True
        answer = await server.post("/v1/completions", {"prompt": "abc"})
        assert (answer.status_code, answer.headers["retry-after"]) == (503, "5")
        answer = await server.get("/readyz")
        assert (answer.status_code, answer.json()["status"]) == (503, "draining")
        assert (await server.get("/livez")).status_code == 200


async def test_stalled_engine_is_not_ready() -> None:
    async with serving(engine={"stalled": True}) as server:
        assert (await server.get("/readyz")).json()["status"] == "unavailable"
        assert (await server.get("/health")).status_code == 503


async def test_connections_are_bounded() -> None:
    async with (
        serving(max_connections=1) as server,
        open_wire_client("127.0.0.1", server.port) as first,
        open_wire_client("127.0.0.1", server.port) as second,
    ):
        await first.send(b"GET /livez HTTP/1.1\r\nhost: x\r\n\r\n")
        await first.read_until(b"}")
        assert (await second.read_to_end()).startswith(b"HTTP/1.1 503")


async def test_exposure_without_keys_is_refused() -> None:
    async with serving() as server:
        with pytest.raises(PyserveError, match="without API keys"):
            await serve_http(server.state, HttpConfig(host="0.0.0.0", port=0))
