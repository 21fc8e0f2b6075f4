"""OpenVINO GenAI's ContinuousBatchingPipeline behind just enough of OpenAI's HTTP to be measured.

Runs in OpenVINO's environment, on the standard library and ``openvino_genai`` alone:
``python openvino_shim.py --model DIR_OR_GGUF --tokenizer GGUF --port N``. One thread steps the pipeline and
hands the tokens of a whole step to the event loop at once; the loop parses requests and writes events, one
for each token. Answers GET /health, GET /v1/models and POST /v1/completions (prompt: token ids; streamed,
greedy, ignoring end tokens, exactly max_tokens long). A benchmark's tool: it trusts its client.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import queue
import threading
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import openvino
import openvino_genai as genai

IDLE_S = 0.05  # how long the stepping thread waits for a first request before it looks for the end


@dataclass
class Request:
    """One completion on its way; ``tokens`` gets lists of ids, then None."""

    prompt: list[int]
    max_tokens: int
    tokens: asyncio.Queue[list[int] | None] = field(default_factory=asyncio.Queue)
    handle: Any = None


class Engine:
    """Steps the pipeline in a thread of its own for as long as there are requests."""

    def __init__(self, pipeline: genai.ContinuousBatchingPipeline) -> None:
        self._pipeline = pipeline
        self._arrivals: queue.SimpleQueue[Request] = queue.SimpleQueue()
        self._running: list[Request] = []
        self._next_id = 0

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        """Begin; results are handed over on ``loop``."""
        self._loop = loop
        threading.Thread(target=self._run, daemon=True).start()

    def submit(self, request: Request) -> None:
        """Queue one request; safe from any thread."""
        self._arrivals.put(request)

    def _run(self) -> None:
        while True:
            self._take_arrivals()
            if not self._running:
                continue
            self._pipeline.step()
            self._loop.call_soon_threadsafe(_deliver, self._collect())

    def _take_arrivals(self) -> None:
        try:
            request = self._arrivals.get(timeout=0 if self._running else IDLE_S)
            while True:
                self._add(request)
                request = self._arrivals.get_nowait()
        except queue.Empty:
            return

    def _add(self, request: Request) -> None:
        config = genai.GenerationConfig()
        config.max_new_tokens = request.max_tokens
        config.ignore_eos = True
        config.do_sample = False
        ids = openvino.Tensor(np.array([request.prompt], dtype=np.int64))
        request.handle = self._pipeline.add_request(self._next_id, ids, config)
        self._next_id += 1
        self._running.append(request)

    def _collect(self) -> list[tuple[Request, list[int], bool]]:
        news, still = [], []
        for request in self._running:
            ids: list[int] = []
            while request.handle.can_read():
                ids += next(iter(request.handle.read().values())).generated_ids
            ended = request.handle.get_status() != genai.GenerationStatus.RUNNING
            if ids or ended:
                news.append((request, ids, ended))
            if not ended:
                still.append(request)
        self._running = still
        return news


def _deliver(news: list[tuple[Request, list[int], bool]]) -> None:
    for request, ids, ended in news:
        if ids:
            request.tokens.put_nowait(ids)
        if ended:
            request.tokens.put_nowait(None)


class Server:
    """The HTTP side: one request a connection."""

    def __init__(self, engine: Engine, tokenizer: genai.Tokenizer, model: str) -> None:
        self._engine = engine
        self._tokenizer = tokenizer
        self._model = model
        self._pieces: dict[int, str] = {}

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer one request and close."""
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
            line, *headers = head.split("\r\n")
            method, path, _ = line.split(" ", 2)
            length = next(
                (int(h.split(":")[1]) for h in headers if h.lower().startswith("content-length:")),
                0,
            )
            body = await reader.readexactly(length)
            if (method, path) == ("POST", "/v1/completions"):
                await self._complete(json.loads(body), writer)
            else:
                answer = json.dumps({"object": "list", "data": [{"id": self._model}]}).encode()
                writer.write(_head("200 OK", "application/json") + answer)
            await writer.drain()
        except (ConnectionError, asyncio.IncompleteReadError):
            pass  # the client has gone
        finally:
            writer.close()

    async def _complete(self, body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        request = Request(body["prompt"], body["max_tokens"])
        self._engine.submit(request)
        writer.write(_head("200 OK", "text/event-stream"))
        generated = 0
        while (ids := await request.tokens.get()) is not None:
            generated += len(ids)
            for token in ids:
                writer.write(self._event([{"index": 0, "text": self._piece(token)}]))
            await writer.drain()
        usage = {"prompt_tokens": len(request.prompt), "completion_tokens": generated}
        writer.write(self._event([], usage) + b"data: [DONE]\n\n")

    def _event(self, choices: list[Any], usage: dict[str, int] | None = None) -> bytes:
        event = {"object": "text_completion", "model": self._model, "choices": choices}
        if usage is not None:
            event["usage"] = usage
        return b"data: " + json.dumps(event).encode() + b"\n\n"

    def _piece(self, token: int) -> str:
        """The token alone as text; never empty, for the client times contents."""
        if token not in self._pieces:
            self._pieces[token] = self._tokenizer.decode([token]) or " "
        return self._pieces[token]


def _head(status: str, kind: str) -> bytes:
    return f"HTTP/1.1 {status}\r\nContent-Type: {kind}\r\nConnection: close\r\n\r\n".encode()


def main() -> None:
    """Load and serve until killed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--model", required=True, help="directory with openvino_model.xml, or a GGUF"
    )
    parser.add_argument("--tokenizer", required=True, help="a GGUF whose tokenizer to use")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--property", action="append", default=[], metavar="NAME=VALUE")
    parser.add_argument("--max-num-seqs", type=int, default=64)
    parser.add_argument("--max-num-batched-tokens", type=int, default=512)
    parser.add_argument("--cache-gb", type=int, default=2)
    options = parser.parse_args()
    scheduler = genai.SchedulerConfig()
    scheduler.cache_size = options.cache_gb
    scheduler.max_num_seqs = options.max_num_seqs
    scheduler.max_num_batched_tokens = options.max_num_batched_tokens
    scheduler.enable_prefix_caching = False
    tokenizer = genai.Tokenizer(options.tokenizer)
    properties = dict(item.split("=", 1) for item in options.property)
    pipeline = genai.ContinuousBatchingPipeline(
        options.model, tokenizer, scheduler, "CPU", **properties
    )
    engine = Engine(pipeline)
    asyncio.run(_serve(engine, Server(engine, tokenizer, options.model), options.port))


async def _serve(engine: Engine, server: Server, port: int) -> None:
    engine.start(asyncio.get_running_loop())
    listener = await asyncio.start_server(server.handle, "127.0.0.1", port, backlog=512)
    async with listener:
        await listener.serve_forever()


if __name__ == "__main__":
    main()
