"""The client measures streams as they arrive and reports every way in which they can end."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
import trio
import trio.testing

from pyserve.bench.load import Pace, Target, drive
from pyserve.bench.report import fate
from pyserve.bench.stream import Outcome
from pyserve.bench.workload import Work

OK = "HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nConnection: close\r\n\r\n"
WORK = Work((1, 2, 3), 2)


def events(*values: object) -> list[str]:
    return [f"data: {json.dumps(value)}\n\n" for value in values]


def text(value: str) -> dict:
    return {"choices": [{"text": value}]}


USAGE = {"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 2}, "metrics": {"a": 1}}


class Server:
    """Answers every request with ``pieces``, each in a packet of its own, and closes."""

    def __init__(self, pieces: list[str]) -> None:
        self.pieces = pieces
        self.requests: list[bytes] = []
        self.running = self.peak = 0

    async def handle(self, stream: trio.SocketStream) -> None:
        self.running += 1
        self.peak = max(self.peak, self.running)
        self.requests.append(await self._request(stream))
        for piece in self.pieces:
            await stream.send_all(piece.encode())
            await trio.testing.wait_all_tasks_blocked()
        self.running -= 1
        await stream.aclose()

    @staticmethod
    async def _request(stream: trio.SocketStream) -> bytes:
        data = b""
        while not data.rstrip().endswith(b"}"):
            data += await stream.receive_some()
        return data


@asynccontextmanager
async def serving(server: Server) -> AsyncIterator[Target]:
    async with trio.open_nursery() as nursery:
        listeners = await trio.open_tcp_listeners(0, host="127.0.0.1")
        nursery.start_soon(trio.serve_listeners, server.handle, listeners)
        port = listeners[0].socket.getsockname()[1]
        url = f"http://127.0.0.1:{port}/v1/completions"
        yield Target(url, "tiny", {"Authorization": "Bearer k"}, {"temperature": 0.0})
        nursery.cancel_scope.cancel()


async def one(pieces: list[str]) -> Outcome:
    server = Server(pieces)
    async with serving(server) as target:
        result = await drive(target, [WORK], Pace(1), lambda _: None)
    return result.outcomes[0]


async def test_stream_is_timed_and_counted() -> None:
    body = [*events(text("Hel"), text("lo"), USAGE), "data: [DONE]\n\n"]
    outcome = await one([OK, ": comment\n\n", *body])
    assert (outcome.ok, outcome.text, outcome.output_tokens) == (True, "Hello", 2)
    assert 0 < outcome.ttft_s < outcome.latency_s
    assert len(outcome.itl_s) == 1
    assert outcome.server == {"a": 1}
    assert outcome.tpot_s == outcome.latency_s - outcome.ttft_s


async def test_event_split_over_packets_is_one_event() -> None:
    whole = "".join([*events(text("a"), USAGE), "data: [DONE]\n\n"])
    outcome = await one([OK, *whole])
    assert (outcome.ok, outcome.text) == (True, "a")


async def test_refusal_keeps_status_code_and_message() -> None:
    body = json.dumps({"error": {"message": "queue is full", "code": "queue_full"}})
    head = f"HTTP/1.1 429 Too Many Requests\r\nContent-Length: {len(body)}\r\n\r\n"
    outcome = await one([head, body[:9], body[9:]])
    assert (outcome.status, outcome.code, outcome.error) == (429, "queue_full", "queue is full")


@pytest.mark.parametrize(
    ("pieces", "expected", "message"),
    [
        ([OK, *events({"error": {"message": "stop", "code": "cancelled"}})], "cancelled", "stop"),
        ([OK, *events(text("a"))], "failed", "before [DONE]"),
        ([OK, "data: {nonsense\n\n"], "failed", "DecodeError"),
        (["garbage\r\n\r\n"], "failed", "ProtocolError"),
        (["HTTP/1.1 500 Oops\r\nContent-Length: 4\r\n\r\noops"], "failed", "oops"),
        ([], "failed", ""),
    ],
)
async def test_every_bad_end_is_reported(pieces, expected: str, message: str) -> None:
    outcome = await one(pieces)
    assert fate(outcome) == expected
    assert message in outcome.error


async def test_server_that_is_not_there_is_a_failure() -> None:
    target = Target("http://127.0.0.1:9/v1/completions", "tiny", {}, {})
    result = await drive(target, [WORK], Pace(1), lambda _: None)
    assert fate(result.outcomes[0]) == "failed"


async def test_closed_loop_keeps_to_its_concurrency_and_reports_progress() -> None:
    server = Server([OK, *events(text("a"), USAGE), "data: [DONE]\n\n"])
    done: list[Outcome] = []
    async with serving(server) as target:
        result = await drive(target, [WORK] * 12, Pace(3), done.append)
    assert server.peak <= 3
    assert len(done) == len(result.outcomes) == 12
    request = server.requests[0]
    body = json.loads(request[request.index(b"\r\n\r\n") :])
    assert body == {
        "temperature": 0.0, "model": "tiny", "prompt": [1, 2, 3], "max_tokens": 2, "stream": True,
        "stream_options": {"include_usage": True},
    }  # fmt: skip
    assert b"Authorization: Bearer k" in request
