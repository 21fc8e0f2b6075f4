"""One streamed completion, timed: a plain HTTP/1.1 client, so that the client's own CPU stays small."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import h11
import msgspec
import trio

RECEIVE_BYTES = 65536


@dataclass(slots=True)
class Outcome:
    """What one request came to. Times in seconds; ``start_s`` on Trio's clock, ``queue_s`` in the client.

    ``ttft_s`` is first content - send, ``latency_s`` last content - send, ``itl_s`` the gaps between
    contents (vLLM's definitions). ``status`` is 0 where no answer came; ``error`` is empty for success.
    ``left``: the client closed on purpose. ``group``: the work's.
    """

    prompt_tokens: int
    start_s: float = 0.0
    queue_s: float = 0.0
    ttft_s: float = 0.0
    latency_s: float = 0.0
    itl_s: list[float] = field(default_factory=list)
    output_tokens: int = 0
    text: str = ""
    status: int = 0
    code: str = ""
    error: str = ""
    ended: bool = False
    left: bool = False
    group: str = ""
    server: dict[str, Any] = field(default_factory=dict)

    @property
    def ok(self) -> bool:
        """Whether a whole answer came."""
        return not self.error and not self.left

    @property
    def tpot_s(self) -> float:
        """Mean time of an output token after the first; 0 for at most one token."""
        return (
            (self.latency_s - self.ttft_s) / (self.output_tokens - 1)
            if self.output_tokens > 1
            else 0.0
        )


async def measure(
    url: str,
    body: Mapping[str, object],
    headers: Mapping[str, str],
    outcome: Outcome,
    *,
    leave_after: int | None = None,
    stall_s: float = 0.0,
) -> None:
    """POST ``body`` (with ``stream`` set) to ``url`` and fill ``outcome``; never raises for a bad answer.

    After ``leave_after`` pieces of content nothing is read for ``stall_s``, and the connection closed.
    """
    outcome.start_s = last = trio.current_time()
    finished = False
    try:
        async with aclosing(_events(url, msgspec.json.encode(body), headers, outcome)) as events:
            async for data in events:
                if data == b"[DONE]":
                    finished = True
                    continue
                last = _take(outcome, msgspec.json.decode(data), last)
                if outcome.error:
                    return
                if (
                    leave_after is not None
                    and outcome.ttft_s
                    and len(outcome.itl_s) + 1 >= leave_after
                ):
                    await trio.sleep(stall_s)
                    outcome.left = True
                    return
        if not outcome.error and not finished:
            outcome.error = "the answer ended before [DONE]"
    except (OSError, trio.BrokenResourceError, h11.ProtocolError, msgspec.MsgspecError) as error:
        outcome.error = f"{type(error).__name__}: {error}"


def _take(outcome: Outcome, event: Mapping[str, Any], last: float) -> float:
    """Add one event that has just arrived; returns when the last content came."""
    if "error" in event:
        _fail(outcome, event["error"])
        return last
    if usage := event.get("usage"):
        outcome.output_tokens = usage.get("completion_tokens", outcome.output_tokens)
        outcome.prompt_tokens = usage.get("prompt_tokens", outcome.prompt_tokens)
    outcome.server = event.get("metrics") or outcome.server
    text = _content(event)
    if not text:
        return last
    now = trio.current_time()
    outcome.text += text
    if outcome.ttft_s == 0.0:
        outcome.ttft_s = now - outcome.start_s
    else:
        outcome.itl_s.append(now - last)
    outcome.latency_s = now - outcome.start_s
    return now


def _content(event: Mapping[str, Any]) -> str:
    text = ""
    for choice in event.get("choices") or ():
        text += choice.get("text") or (choice.get("delta") or {}).get("content") or ""
    return text


def _fail(outcome: Outcome, error: object) -> None:
    if isinstance(error, dict):
        outcome.code = str(error.get("code") or "")
        outcome.error = str(error.get("message") or error)
    else:
        outcome.error = str(error)


async def _events(
    url: str, payload: bytes, headers: Mapping[str, str], outcome: Outcome
) -> AsyncGenerator[bytes, None]:
    """The ``data:`` of each event; an answer that is not 200 fills ``outcome`` and yields nothing."""
    parts = urlsplit(url)
    host, port = parts.hostname or "127.0.0.1", parts.port or 80
    connection = h11.Connection(h11.CLIENT)
    request = h11.Request(
        method="POST",
        target=parts.path,
        headers=[
            ("Host", f"{host}:{port}"),
            ("Content-Type", "application/json"),
            ("Content-Length", str(len(payload))),
            *headers.items(),
        ],
    )
    async with await trio.open_tcp_stream(host, port) as stream:
        await stream.send_all(
            (connection.send(request) or b"")
            + (connection.send(h11.Data(data=payload)) or b"")
            + (connection.send(h11.EndOfMessage()) or b"")
        )
        buffered = b""
        while True:
            match connection.next_event():
                case h11.Response(status_code=status):
                    outcome.status = status
                case h11.Data(data=data):
                    *lines, buffered = (buffered + bytes(data)).split(b"\n")
                    for line in lines if outcome.status == 200 else ():
                        if line.startswith(b"data:"):
                            yield line[5:].strip()
                    if outcome.status != 200:
                        buffered = b"\n".join((*lines, buffered))
                case h11.EndOfMessage() | h11.ConnectionClosed():
                    break
                case h11.NEED_DATA:
                    connection.receive_data(await stream.receive_some(RECEIVE_BYTES))
    if outcome.status != 200:
        _refused(outcome, buffered)


def _refused(outcome: Outcome, body: bytes) -> None:
    try:
        _fail(outcome, msgspec.json.decode(body)["error"])
    except (msgspec.MsgspecError, KeyError, TypeError):
        _fail(outcome, body[:200].decode(errors="replace") or f"status {outcome.status}")
