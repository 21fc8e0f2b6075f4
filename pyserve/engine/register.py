"""The Trio side's books: which requests are open, how far each has come, and what has been counted.

An entry lives from admission until the step loop says that everything the request held is free, which is
later than its owner leaving: so what admission counts is what the engine really has to carry.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import trio

from pyserve.core.events import Embedding, Event, Failed, Finished, Started, Token
from pyserve.engine.stream import RequestStream


@dataclass(slots=True)
class Entry:
    """One open request. ``submitted``: the step loop knows of it; ``closing``: its owner has left."""

    stream: RequestStream
    submitted: bool = False
    closing: bool = False
    unstarted: bool = True


@dataclass(slots=True)
class Counters:
    """Totals since the start. Every accepted request ends up in exactly one of finished, failed and
    abandoned (its owner left before the end).
    """

    accepted: int = 0
    rejected: int = 0
    finished: int = 0
    failed: int = 0
    abandoned: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0


class Register:
    """Open requests by id."""

    def __init__(self) -> None:
        self.count = Counters()
        self.unstarted_requests = 0
        self.unstarted_tokens = 0
        self.empty = trio.Event()
        self.empty.set()
        self._entries: dict[str, Entry] = {}

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._entries

    def __iter__(self) -> Iterator[Entry]:
        """Over a copy: entries may be removed meanwhile."""
        return iter(list(self._entries.values()))

    @property
    def closing(self) -> int:
        """How many have lost their owner and wait for the step boundary."""
        return sum(entry.closing for entry in self._entries.values())

    def add(self, stream: RequestStream) -> Entry:
        """Opens an entry for an admitted request. Raises KeyError where the id is open already."""
        if stream.request_id in self._entries:
            raise KeyError(stream.request_id)
        if not self._entries:
            self.empty = trio.Event()
        entry = self._entries[stream.request_id] = Entry(stream)
        self.count.accepted += 1
        self.count.prompt_tokens += len(stream.spec.prompt)
        self.unstarted_requests += 1
        self.unstarted_tokens += len(stream.spec.prompt)
        return entry

    def route(self, event: Event, at_s: float) -> None:
        """Files one event with the request it belongs to. Raises KeyError for a request not open."""
        entry = self._entries[event.request_id]
        entry.stream.push(event, at_s)
        match event:
            case Started():
                self.count.cached_tokens += event.cached_tokens
                self._leave_line(entry)
            case Token():
                self.count.output_tokens += 1
            case Finished() | Failed():
                self._count_end(entry, event)
                self.remove(entry)
            case Embedding() | _:
                pass

    def remove(self, entry: Entry) -> None:
        """Closes the entry: the request holds nothing any more."""
        self._leave_line(entry)
        del self._entries[entry.stream.request_id]
        if not self._entries:
            self.empty.set()

    def _count_end(self, entry: Entry, end: Finished | Failed) -> None:
        if entry.closing:
            self.count.abandoned += 1
        elif isinstance(end, Failed):
            self.count.failed += 1
        else:
            self.count.finished += 1

    def _leave_line(self, entry: Entry) -> None:
        if entry.unstarted:
            entry.unstarted = False
            self.unstarted_requests -= 1
            self.unstarted_tokens -= len(entry.stream.spec.prompt)
