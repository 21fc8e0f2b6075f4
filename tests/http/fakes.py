"""A small engine and tokenizer with the interfaces of the real ones, all under the test's control."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import trio
import trio.lowlevel

from pyserve.backends.base import ModelInfo
from pyserve.core.events import (
    ChoiceFinished,
    Embedding,
    Finished,
    FinishReason,
    Started,
    Token,
    TokenLogprobs,
)
from pyserve.core.spec import RequestSpec, Task
from pyserve.engine.stream import RequestStream
from pyserve.errors import Cancelled, QueueFull, RequestError, Unavailable


class CharTokenizer:
    """One character, one token: its code point. 3 ends a text."""

    vocab_size = 0x110000
    chat_template: Any = None

    def __init__(self) -> None:
        self.chat_template = self

    def encode(self, text: Any, **options: Any) -> list[int]:
        if isinstance(text, str):
            return [ord(char) for char in text]
        turns = [f"<{message['role']}>{message['content']}" for message in text]
        if options.get("add_generation_prompt", True):
            turns.append("<assistant>")
        return [ord(char) for char in "".join(turns)]

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        return "".join(self.token_text(i) for i in ids)

    def token_text(self, id_: int) -> str:
        return chr(id_) if not 0xD800 <= id_ < 0xE000 else "\ufffd"

    def token_bytes(self, id_: int) -> bytes:
        return self.token_text(id_).encode()


@dataclass(frozen=True)
class FakeTextDelta:
    text: str
    tokens: tuple[Token, ...]
    offsets: tuple[int, ...]
    stopped: str | None = None


class FakeAssembler:
    """Text of characters, with stop strings held back."""

    def __init__(self, tokenizer: CharTokenizer, **options: Any) -> None:
        self._tokenizer = tokenizer
        self._stop: tuple[str, ...] = options.get("stop", ())
        self._include = options.get("include_stop", False)
        self._held: list[Token] = []
        self._released = 0

    def push(self, tokens: Sequence[Token]) -> FakeTextDelta:
        self._held.extend(tokens)
        text = self._tokenizer.decode([token.token for token in self._held])
        for stop in self._stop:
            if (at := text.find(stop)) >= 0:
                end = at + len(stop) if self._include else at
                out, self._held = self._held[:end], []
                return self._delta(out, stop)
        keep = max(
            (n for stop in self._stop for n in range(1, len(stop)) if text.endswith(stop[:n])),
            default=0,
        )
        cut = len(text) - keep
        out, self._held = self._held[:cut], self._held[cut:]
        return self._delta(out)

    def finish(self, reason: Any) -> FakeTextDelta:
        out, self._held = self._held, []
        return self._delta(out)

    def _delta(self, out: Sequence[Token], stopped: str | None = None) -> FakeTextDelta:
        offsets = tuple(range(self._released, self._released + len(out)))
        self._released += len(out)
        text = self._tokenizer.decode([token.token for token in out])
        return FakeTextDelta(text, tuple(out), offsets, stopped)


def echo_reply(spec: RequestSpec) -> str:
    """What the fake model says unless told otherwise: the prompt, upper case."""
    return "".join(chr(i) for i in spec.prompt).upper()


@dataclass
class FakeEngine:
    """Answers each request with ``reply(spec)``, one token per ``pace()``."""

    nursery: trio.Nursery
    reply: Callable[[RequestSpec], str] = echo_reply
    pace: Callable[[], Any] = trio.lowlevel.checkpoint
    gate: trio.Event | None = None
    fail_with: RequestError | None = None
    fail_after: int = 0
    refuse: RequestError | None = None
    context_length: int = 4096
    draining: bool = False
    tokens: int = 0
    stalled: bool = False
    open: dict[str, trio.CancelScope] = field(default_factory=dict)
    streams: dict[str, RequestStream] = field(default_factory=dict)
    seen: list[RequestSpec] = field(default_factory=list)
    abandoned: list[str] = field(default_factory=list)
    max_open: int = 10**6
    changed: trio.Event = field(default_factory=trio.Event)

    @property
    def info(self) -> ModelInfo:
        return ModelInfo(
            name="fake-model",
            vocab_size=0x110000,
            context_length=self.context_length,
            hidden_size=4,
            eos_token_ids=(3,),
            dtype="float32",
            quantization="none",
            num_parameters=1,
            weight_bytes=4,
            kv_bytes_per_token=4,
        )

    @property
    def ready(self) -> bool:
        return not self.draining and not self.stalled

    def now(self) -> float:
        return trio.current_time()

    def statistics(self) -> Any:
        return self

    def begin_drain(self) -> None:
        self.draining = True

    async def drained(self, timeout_s: float) -> bool:
        with trio.move_on_after(timeout_s):
            while self.open:
                await self.changed.wait()
        return not self.open

    def cancel_all(self, error: RequestError) -> None:
        for request_id in list(self.open):
            self._end(request_id, error)

    def _end(self, request_id: str, error: RequestError) -> None:
        self.streams[request_id].fail(error, self.now())
        self.open.pop(request_id).cancel()
        self._wake()

    def _wake(self) -> None:
        self.changed.set()
        self.changed = trio.Event()

    async def until_idle(self) -> None:
        """Returns once nothing is open."""
        while self.open:
            await self.changed.wait()

    async def until_tokens(self, count: int) -> None:
        """Returns once ``count`` tokens have been made."""
        while self.tokens < count:
            await trio.lowlevel.checkpoint()

    async def until_open(self, count: int = 1) -> None:
        """Returns once ``count`` requests are open."""
        while len(self.open) < count:
            await self.changed.wait()

    @asynccontextmanager
    async def request(self, spec: RequestSpec) -> AsyncIterator[RequestStream]:
        if self.draining:
            raise Unavailable("the server is shutting down", retry_after_s=5.0)
        if self.refuse is not None:
            raise self.refuse
        if len(self.open) >= self.max_open:
            raise QueueFull("the queue is full", retry_after_s=2.5)
        self.seen.append(spec)
        stream = RequestStream(spec, self.now(), self._stop_choice)
        scope = trio.CancelScope()
        self.open[spec.request_id], self.streams[spec.request_id] = scope, stream
        self._wake()
        self.nursery.start_soon(self._generate, spec, stream, scope)
        try:
            await trio.lowlevel.checkpoint()
            yield stream
        finally:
            if spec.request_id in self.open:
                self.abandoned.append(spec.request_id)
                self._end(spec.request_id, Cancelled("cancelled"))

    def _stop_choice(self, request_id: str, index: int) -> None:
        self.stopped.setdefault(request_id, set()).add(index)

    stopped: dict[str, set[int]] = field(default_factory=dict)

    async def _generate(
        self, spec: RequestSpec, stream: RequestStream, scope: trio.CancelScope
    ) -> None:
        with scope:
            await trio.lowlevel.checkpoint()
            if self.gate is not None:
                await self.gate.wait()
            request_id = spec.request_id
            stream.push(Started(request_id, 0.0, 0), self.now())
            if self.fail_with is not None and self.fail_after == 0:
                self._end(request_id, self.fail_with)
                return
            if spec.task is Task.EMBED:
                stream.push(Embedding(request_id, (3.0, 0.0, 4.0, 0.0)), self.now())
            else:
                await self._tokens(spec, stream)
            del self.open[request_id]
            stream.push(Finished(request_id), self.now())
            self._wake()

    async def _tokens(self, spec: RequestSpec, stream: RequestStream) -> None:
        request_id = spec.request_id
        text = [ord(char) for char in self.reply(spec)]
        live = set(range(spec.n))
        for position in range(spec.sampling.max_tokens):
            await self.pace()
            if self.fail_with is not None and position == self.fail_after:
                self._end(request_id, self.fail_with)
                await trio.sleep_forever()
            self.tokens += len(live)
            for index in sorted(live):
                if index in self.stopped.get(request_id, ()):
                    live.discard(index)
                    continue
                token = text[position] if position < len(text) else 3
                logprobs = None
                if spec.sampling.logprobs is not None:
                    top = ((token, -0.25), (65, -2.0))[: spec.sampling.logprobs]
                    logprobs = TokenLogprobs(-0.25, top)
                stream.push(Token(request_id, index, token, logprobs, spec.n), self.now())
                ended = token == 3 and not spec.sampling.ignore_eos
                if ended:
                    end = ChoiceFinished(request_id, index, FinishReason.STOP, 3)
                elif position == spec.sampling.max_tokens - 1:
                    end = ChoiceFinished(request_id, index, FinishReason.LENGTH)
                else:
                    continue
                live.discard(index)
                stream.push(end, self.now())
            if not live:
                return
