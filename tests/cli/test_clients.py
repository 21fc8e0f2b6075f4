"""chat and complete against a server of canned answers on loopback."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from click.testing import CliRunner, Result

from pyserve.cli.main import pyserve

Events = list[dict]


class Canned(ThreadingHTTPServer):
    """Answers each POST with ``events`` and keeps what was asked."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.events: Events = []
        self.asked: list[tuple[str, str | None, dict]] = []
        self.done = True

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class Handler(BaseHTTPRequestHandler):
    server: Canned

    def do_GET(self) -> None:
        self._send(200, "application/json", json.dumps({"data": [{"id": "tiny"}]}))

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        self.server.asked.append((self.path, self.headers["authorization"], body))
        if body.get("max_tokens") == 0:
            error = {"error": {"message": "max_tokens: at least 1"}}
            return self._send(400, "application/json", json.dumps(error))
        lines = [": comment", *(f"data: {json.dumps(event)}" for event in self.server.events)]
        if self.server.done:
            lines.append("data: [DONE]")
        return self._send(200, "text/event-stream", "\n\n".join(lines) + "\n\n")

    def _send(self, status: int, kind: str, text: str) -> None:
        data = text.encode()
        self.send_response(status)
        self.send_header("content-type", kind)
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *args: object) -> None:
        pass


@pytest.fixture
def server() -> Iterator[Canned]:
    with Canned() as canned:
        thread = threading.Thread(target=canned.serve_forever, args=(0.01,))
        thread.start()
        yield canned
        canned.shutdown()
        thread.join()


def run(server: Canned, *arguments: str, text: str | None = None) -> Result:
    return CliRunner().invoke(pyserve, [*arguments, "--url", server.url], input=text)


def text_events(*parts: str) -> Events:
    return [{"choices": [{"text": part}]} for part in parts]


def delta_events(*parts: str) -> Events:
    return [{"choices": [{"delta": {"content": part}}]} for part in (None, *parts)]


def test_complete_prints_the_text_and_nothing_else(server: Canned) -> None:
    server.events = text_events("on a", " mat\u00e9")
    result = run(server, "complete", "The cat", "--seed", "7", "--stop", ".", "--api-key", "k")
    assert result.output == "on a mat\u00e9\n"
    path, authorization, body = server.asked[0]
    assert (path, authorization) == ("/v1/completions", "Bearer k")
    assert body == {
        "prompt": "The cat", "seed": 7, "temperature": 0.2, "stop": ["."], "stream": True,
        "model": "tiny",
    }  # fmt: skip


def test_complete_reads_standard_input(server: Canned) -> None:
    server.events = text_events("x")
    run(server, "complete", text="piped")
    assert server.asked[0][2]["prompt"] == "piped"


def test_complete_without_prompt_is_a_usage_error(server: Canned) -> None:
    assert run(server, "complete", text="").exit_code == 2


def test_error_answer_shows_its_message(server: Canned) -> None:
    result = run(server, "complete", "x", "--max-tokens", "0")
    assert result.exit_code == 1
    assert str(result.exception) == "400: max_tokens: at least 1"


def test_error_event_in_a_stream_is_an_error(server: Canned) -> None:
    server.events = [*text_events("half"), {"error": {"message": "shutting down"}}]
    result = run(server, "complete", "x")
    assert result.output == "half"
    assert str(result.exception) == "shutting down"


def test_stream_cut_short_is_an_error(server: Canned) -> None:
    server.events, server.done = text_events("half"), False
    assert "before the answer was complete" in str(run(server, "complete", "x").exception)


def test_no_server_says_how_to_start_one(server: Canned) -> None:
    result = CliRunner().invoke(pyserve, ["complete", "x", "--url", "http://127.0.0.1:9"])
    assert "pyserve serve" in str(result.exception)


def test_chat_answers_one_message(server: Canned) -> None:
    server.events = delta_events("Hel", "lo [bold]")
    result = run(server, "chat", "Hi", "--system", "Be brief.")
    assert result.output == "Hello [bold]\n"
    assert server.asked[0][2]["messages"] == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hi"},
    ]


def test_chat_keeps_the_conversation_until_reset(server: Canned) -> None:
    server.events = delta_events("one")
    run(server, "chat", text="a\n\nb\n/reset\nc\n/quit\nd\n")
    asked = [[m["content"] for m in body["messages"]] for _, _, body in server.asked]
    assert asked == [["a"], ["a", "one", "b"], ["c"]]


def test_failed_question_is_taken_back(server: Canned) -> None:
    server.events = [{"error": {"message": "busy"}}]
    result = run(server, "chat", text="a\nb\n")
    assert result.output.count("busy") == 2
    assert [len(body["messages"]) for _, _, body in server.asked] == [1, 1]
