"""Answers in OpenAI's shapes: one renderer for each endpoint, whole or as stream events.

A stream event is a prebuilt JSON frame around the few values that change, each encoded by msgspec.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import msgspec

from pyserve.core.events import Token
from pyserve.http.generate import Delta, Outcome
from pyserve.http.interfaces import TokenizerLike
from pyserve.http.logprobs import chat_logprobs, completion_logprobs
from pyserve.http.shapes import (
    ChatChoice,
    ChatCompletion,
    ChatMessage,
    Completion,
    CompletionChoice,
    CompletionLogprobs,
)

DONE = b"data: [DONE]\n\n"
_encode = msgspec.json.encode


@dataclass(slots=True)
class Collected:
    """Everything one choice has said."""

    text: list[str] = field(default_factory=list)
    tokens: list[Token] = field(default_factory=list)
    offsets: list[int] = field(default_factory=list)
    finish_reason: Any = None
    stop_reason: str | int | None = None


class Collector:
    """Gathers deltas of ``choices`` choices for an answer in one piece."""

    def __init__(self, choices: int) -> None:
        self.choices = [Collected() for _ in range(choices)]

    def add(self, deltas: Sequence[Delta]) -> None:
        """Files one batch of deltas."""
        for delta in deltas:
            choice = self.choices[delta.index]
            choice.text.append(delta.text)
            choice.tokens.extend(delta.tokens)
            choice.offsets.extend(delta.offsets)
            if delta.finish_reason is not None:
                choice.finish_reason, choice.stop_reason = delta.finish_reason, delta.stop_reason


class Renderer(Protocol):
    """How one endpoint's answer looks."""

    def events(self, deltas: Sequence[Delta]) -> bytes:
        """Stream events of one batch of deltas."""

    def last(self, outcome: Outcome) -> bytes:
        """The events after the last delta: usage where it was asked for, then the end mark."""

    def whole(self, collected: Collector, outcome: Outcome) -> ChatCompletion | Completion:
        """The answer in one piece."""


class _Frame:
    """What the events of one stream have in common."""

    def __init__(self, kind: str, answer_id: str, model: str, include_usage: bool) -> None:
        self.created = int(time.time())
        self.answer_id = answer_id
        self.model = model
        self.include_usage = include_usage
        head = _encode({"id": answer_id, "object": kind, "created": self.created, "model": model})
        self._head = b"data: " + head[:-1] + b',"choices":['
        self._tail = b'],"usage":null}\n\n' if include_usage else b"]}\n\n"

    def event(self, choice: bytes) -> bytes:
        """One event with one choice."""
        return self._head + choice + self._tail

    def last(self, outcome: Outcome) -> bytes:
        """The usage event, if asked for, and the end mark."""
        if not self.include_usage:
            return DONE
        fields = b'],"usage":%b,"metrics":%b}\n\n' % (
            _encode(outcome.usage),
            _encode(outcome.timings),
        )
        return self._head + fields + DONE


def _ending(delta: Delta) -> bytes:
    if delta.finish_reason is None:
        return b',"finish_reason":null}'
    reason, stop = _encode(delta.finish_reason), _encode(delta.stop_reason)
    return b',"finish_reason":%b,"stop_reason":%b}' % (reason, stop)


class ChatRenderer:
    """``/v1/chat/completions``."""

    def __init__(
        self,
        tokenizer: TokenizerLike,
        answer_id: str,
        model: str,
        *,
        logprobs: bool = False,
        include_usage: bool = False,
    ) -> None:
        self._tokenizer = tokenizer
        self._logprobs = logprobs
        self._frame = _Frame("chat.completion.chunk", answer_id, model, include_usage)
        self._opened: set[int] = set()

    def events(self, deltas: Sequence[Delta]) -> bytes:
        """The role opens each choice, text and log-probabilities follow, a finish reason alone ends it."""
        out = []
        for delta in deltas:
            if delta.index not in self._opened:
                self._opened.add(delta.index)
                opening = b'{"index":%d,"delta":{"role":"assistant","content":""},"logprobs":null'
                out.append(self._frame.event(opening % delta.index + b',"finish_reason":null}'))
            if delta.text or (self._logprobs and delta.tokens):
                out.append(self._frame.event(self._content(delta)))
            if delta.finish_reason is not None:
                head = b'{"index":%d,"delta":{},"logprobs":null' % delta.index
                out.append(self._frame.event(head + _ending(delta)))
        return b"".join(out)

    def _content(self, delta: Delta) -> bytes:
        logprobs = b"null"
        if self._logprobs and delta.tokens:
            logprobs = _encode(chat_logprobs(self._tokenizer, delta.tokens))
        content = b'{"index":%d,"delta":{"content":%b},"logprobs":%b,"finish_reason":null}'
        return content % (delta.index, _encode(delta.text), logprobs)

    def last(self, outcome: Outcome) -> bytes:
        """The usage event, if asked for, and the end mark."""
        return self._frame.last(outcome)

    def whole(self, collected: Collector, outcome: Outcome) -> ChatCompletion:
        """The answer in one piece."""
        choices = [
            ChatChoice(
                index=index,
                message=ChatMessage("assistant", "".join(choice.text)),
                logprobs=chat_logprobs(self._tokenizer, choice.tokens) if self._logprobs else None,
                finish_reason=choice.finish_reason,
                stop_reason=choice.stop_reason,
            )
            for index, choice in enumerate(collected.choices)
        ]
        return ChatCompletion(
            id=self._frame.answer_id,
            created=self._frame.created,
            model=self._frame.model,
            choices=choices,
            usage=outcome.usage,
            metrics=outcome.timings,
        )


class CompletionRenderer:
    """``/v1/completions``. ``logprobs``: how many of the likeliest tokens to show (None: none at all)."""

    def __init__(
        self,
        tokenizer: TokenizerLike,
        answer_id: str,
        model: str,
        *,
        logprobs: int | None = None,
        include_usage: bool = False,
    ) -> None:
        self._tokenizer = tokenizer
        self._logprobs = logprobs
        self._frame = _Frame("text_completion", answer_id, model, include_usage)

    def events(self, deltas: Sequence[Delta]) -> bytes:
        """One event a choice with news."""
        return b"".join(self._frame.event(self._choice(delta)) for delta in deltas)

    def _choice(self, delta: Delta) -> bytes:
        logprobs = b"null"
        if self._logprobs is not None and delta.tokens:
            logprobs = _encode(self._shown(delta.tokens, delta.offsets, self._logprobs))
        head = b'{"index":%d,"text":%b,"logprobs":%b'
        return head % (delta.index, _encode(delta.text), logprobs) + _ending(delta)

    def _shown(
        self, tokens: Sequence[Token], offsets: Sequence[int], top: int
    ) -> CompletionLogprobs:
        return completion_logprobs(self._tokenizer, tokens, offsets, top)

    def last(self, outcome: Outcome) -> bytes:
        """The usage event, if asked for, and the end mark."""
        return self._frame.last(outcome)

    def whole(self, collected: Collector, outcome: Outcome) -> Completion:
        """The answer in one piece."""
        choices = []
        for index, choice in enumerate(collected.choices):
            shown = None
            if self._logprobs is not None:
                shown = self._shown(choice.tokens, choice.offsets, self._logprobs)
            text = "".join(choice.text)
            choices.append(
                CompletionChoice(index, text, shown, choice.finish_reason, choice.stop_reason)
            )
        return Completion(
            id=self._frame.answer_id,
            created=self._frame.created,
            model=self._frame.model,
            choices=choices,
            usage=outcome.usage,
            metrics=outcome.timings,
        )
