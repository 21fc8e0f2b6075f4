from __future__ import annotations

import io
import json
import logging
from collections.abc import Iterator

import pytest
import structlog

from pyserve.telemetry.logs import setup_logging
from tests.http.serving import serving


@pytest.fixture(autouse=True)
def _as_it_was() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)
    structlog.reset_defaults()


def lines(out: io.StringIO) -> list[dict[str, object]]:
    return [json.loads(line) for line in out.getvalue().splitlines()]


async def test_access_line_has_the_request_id_and_what_became_of_the_request() -> None:
    out = io.StringIO()
    setup_logging("json", "info", out)
    async with serving() as server:
        body = {"prompt": "abc", "stream": True}
        await server.post("/v1/completions", body, headers={"x-request-id": "mine"})
    (line,) = lines(out)
    assert line["event"] == "access"
    assert line["request_id"] == "mine"
    assert (line["status"], line["finish_reason"]) == (200, "stop")
    assert (line["prompt_tokens"], line["output_tokens"]) == (3, 4)
    assert line["queue_ms"] == 0.0
    assert "ttft_ms" in line


async def test_a_500_has_a_log_line_with_the_same_request_id() -> None:
    out = io.StringIO()
    setup_logging("json", "error", out)

    def broken(_spec: object) -> str:
        raise ZeroDivisionError

    async with serving() as server:
        server.state.tokenizer.encode = broken  # type: ignore[method-assign,assignment]
        headers = {"x-request-id": "mine"}
        answer = await server.post("/v1/completions", {"prompt": "abc"}, headers=headers)
        assert answer.status_code == 500
        assert answer.json()["error"]["code"] == "internal_error"
    (line,) = lines(out)
    assert line["request_id"] == "mine"


def test_standard_library_warnings_take_the_same_way() -> None:
    out = io.StringIO()
    setup_logging("json", "info", out)
    logging.getLogger("elsewhere").warning("careful")
    assert lines(out)[0]["event"] == "careful"


def test_console_is_text() -> None:
    out = io.StringIO()
    setup_logging("console", "info", out)
    structlog.get_logger().info("hello", a=1)
    assert "hello" in out.getvalue()
    assert "a=1" in out.getvalue()


def test_unknown_level_is_refused() -> None:
    with pytest.raises(ValueError, match="loud"):
        setup_logging("json", "loud")
