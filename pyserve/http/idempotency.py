"""``Idempotency-Key``: the same key and body is done once; who asks again gets the same answer.

A repeated request attaches to the first while that runs (also to its stream, from the beginning) and gets
its recorded answer afterwards. The same key with another body is a 409. Only success is remembered: after an
error, or when the first one's client left, the next one starts afresh. The store is bounded by entries, bytes
and age; an answer too large to keep is a 409 that says so, never a second run.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

import trio

from pyserve.errors import InvalidRequest, QueueFull
from pyserve.http.context import Message, RequestContext, Responder, is_event_stream
from pyserve.http.errors import Conflict, InternalError
from pyserve.telemetry.stores import StoreStatistics

Handler = Callable[[RequestContext, Responder], Awaitable[None]]
_MAX_KEY = 255


@dataclass(slots=True, eq=False)
class Recording:
    """An answer as it is made. ``done`` True: complete; ``broken``: it will never be."""

    fingerprint: bytes
    created_s: float
    start: Message | None = None
    chunks: list[bytes] = field(default_factory=list)
    size: int = 0
    done: bool = False
    broken: bool = False
    dropped: bool = False
    changed: trio.Event = field(default_factory=trio.Event)

    def wake(self) -> None:
        """Lets everybody who follows look again."""
        self.changed.set()
        self.changed = trio.Event()


class Idempotency:
    """The recorded answers of one server, on ``clock`` (seconds)."""

    def __init__(
        self, clock: Callable[[], float], *, entries: int, max_bytes: int, ttl_s: float
    ) -> None:
        self._clock = clock
        self._entries = entries
        self._max_bytes = max_bytes
        self._ttl_s = ttl_s
        self._bytes = 0
        self._evicted = 0
        self._records: OrderedDict[tuple[str, str, str], Recording] = OrderedDict()

    def statistics(self) -> StoreStatistics:
        """What is held and what may be held."""
        return StoreStatistics(
            len(self._records), self._entries, self._bytes, self._max_bytes, self._evicted
        )

    async def once(self, context: RequestContext, responder: Responder, handler: Handler) -> None:
        """Runs ``handler`` unless this key has its answer already, which is then sent instead.

        Raises :class:`Conflict` for another body, and whatever ``handler`` raises.
        """
        key = context.header(b"idempotency-key")
        if not key:
            await handler(context, responder)
            return
        if len(key) > _MAX_KEY or not key.isprintable():
            raise InvalidRequest(f"Idempotency-Key: at most {_MAX_KEY} printable characters")
        identity = (context.key.name, context.path, key)
        fingerprint = hashlib.sha256(context.body).digest()
        while True:
            record = self._find(identity)
            if record is None:
                await self._record(identity, fingerprint, context, responder, handler)
                return
            if record.fingerprint != fingerprint:
                raise Conflict("this Idempotency-Key was used with another body")
            if await _follow(record, context, responder):
                return

    async def _record(
        self,
        identity: tuple[str, str, str],
        fingerprint: bytes,
        context: RequestContext,
        responder: Responder,
        handler: Handler,
    ) -> None:
        self._make_room()
        record = self._records[identity] = Recording(fingerprint, self._clock())
        try:
            await handler(context, _Recorder(self, record, responder))
        finally:
            status = record.start["status"] if record.start else 0
            record.done = responder.finished and 200 <= status < 300
            if not record.done:
                record.broken = True
                self._forget(identity)
            record.wake()

    def keep(self, record: Recording, data: bytes) -> None:
        """Adds to a recording while the store has room; drops its content where it has none."""
        if record.dropped or not data:
            return
        record.chunks.append(data)
        record.size += len(data)
        self._bytes += len(data)
        self._expire(lambda: self._bytes > self._max_bytes)
        if self._bytes > self._max_bytes:
            self._bytes -= record.size
            record.size = 0
            record.dropped = True
            record.chunks.clear()

    def _find(self, identity: tuple[str, str, str]) -> Recording | None:
        self._expire(lambda: False)
        return self._records.get(identity)

    def _make_room(self) -> None:
        self._expire(lambda: len(self._records) >= self._entries)
        if len(self._records) >= self._entries:
            raise QueueFull(
                "too many requests with an Idempotency-Key are running", retry_after_s=1.0
            )

    def _expire(self, crowded: Callable[[], bool]) -> None:
        """Forgets complete answers that are too old, and the oldest ones while it is ``crowded``."""
        oldest_allowed_s = self._clock() - self._ttl_s
        oldest = next(iter(self._records.values()), None)
        if oldest is None or not (crowded() or oldest.created_s < oldest_allowed_s):
            return  # the usual case costs nothing: records are in order of age
        for identity, record in list(self._records.items()):
            if record.created_s >= oldest_allowed_s and not crowded():
                return
            if record.done:
                self._forget(identity)
                self._evicted += 1

    def _forget(self, identity: tuple[str, str, str]) -> None:
        self._bytes -= self._records.pop(identity).size


class _Recorder(Responder):
    """A responder whose answer is recorded as it is sent."""

    def __init__(self, store: Idempotency, record: Recording, inner: Responder) -> None:
        self._store = store
        self._record = record
        self._inner = inner
        self.status = None
        self.finished = False
        self._streaming = False

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            self._streaming = is_event_stream(message)
            self._record.start = {**message, "headers": list(message.get("headers", ()))}
        else:
            self._store.keep(self._record, message.get("body", b""))
        self._record.wake()
        await self._inner.send(message)
        self.finished = self._inner.finished


async def _follow(record: Recording, context: RequestContext, responder: Responder) -> bool:
    """Sends the recorded answer, as far as it is and as it grows; False where it broke before it began."""
    sent = 0
    while True:
        if record.dropped and record.done:
            raise Conflict("the answer to this Idempotency-Key was too large to keep")
        if record.start is not None and (record.done or is_event_stream(record.start)):
            if responder.status is None:
                context.headers.append((b"x-pyserve-idempotent-replay", b"true"))
                await responder.send(dict(record.start))
            while sent < len(record.chunks):
                body = b"".join(record.chunks[sent:])
                sent = len(record.chunks)
                await responder.send(
                    {"type": "http.response.body", "body": body, "more_body": True}
                )
        if record.done and sent >= len(record.chunks):
            await responder.send({"type": "http.response.body", "body": b"", "more_body": False})
            return True
        if record.broken or (record.dropped and responder.status is not None):
            if responder.status is None:
                return False
            raise InternalError("the request that this one had joined ended early")
        await record.changed.wait()
