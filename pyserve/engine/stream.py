"""One request as its owner sees it: events to receive, merged while it looks away, and its timings.

The router pushes (synchronously, on the Trio thread), the owner receives. The buffer needs no limit of its
own: a request can produce at most ``n * max_tokens`` tokens and a handful of other events.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import trio

from pyserve.core.events import ChoiceFinished, Embedding, Event, Failed, Finished, Started, Token
from pyserve.core.spec import RequestSpec
from pyserve.errors import RequestError

StreamEvent = Started | Token | Embedding | ChoiceFinished


@dataclass(frozen=True, slots=True)
class RequestMetrics:
    """Where a request's time went; seconds on the engine's clock, None while it has not happened yet.

    ``queue_s`` arrival to first scheduled, ``prefill_s`` from there to the first result, ``ttft_s`` both
    together; ``total_s`` arrival to the end. ``batch_size`` is the largest number of sequences that shared
    a step with it, ``mean_batch_size`` the mean over its output tokens.
    """

    queue_s: float | None = None
    prefill_s: float | None = None
    ttft_s: float | None = None
    total_s: float | None = None
    cached_tokens: int = 0
    output_tokens: int = 0
    batch_size: int = 0
    mean_batch_size: float = 0.0


class RequestStream:
    """The receiving end of one request. One task at a time may receive."""

    def __init__(
        self, spec: RequestSpec, arrival_s: float, stop_choice: Callable[[str, int], None]
    ) -> None:
        self.spec = spec
        self.arrival_s = arrival_s
        self._stop_choice = stop_choice
        self._buffer: list[StreamEvent] = []
        self._end: Finished | Failed | None = None
        self._wakeup = trio.Event()
        self._receiving = False
        self._started_s: float | None = None
        self._first_s: float | None = None
        self._ended_s: float | None = None
        self._cached_tokens = 0
        self._output_tokens = 0
        self._batch_size = 0
        self._batch_sum = 0

    @property
    def request_id(self) -> str:
        """The spec's ``request_id``."""
        return self.spec.request_id

    @property
    def ended(self) -> bool:
        """True once the engine has released everything the request held."""
        return self._end is not None

    @property
    def started(self) -> bool:
        """True once the request has left the waiting line for the first time."""
        return self._started_s is not None

    @property
    def metrics(self) -> RequestMetrics:
        """A snapshot; complete after the end."""
        arrival, started, first = self.arrival_s, self._started_s, self._first_s
        return RequestMetrics(
            queue_s=None if started is None else started - arrival,
            prefill_s=None if started is None or first is None else first - started,
            ttft_s=None if first is None else first - arrival,
            total_s=None if self._ended_s is None else self._ended_s - arrival,
            cached_tokens=self._cached_tokens,
            output_tokens=self._output_tokens,
            batch_size=self._batch_size,
            mean_batch_size=self._batch_sum / max(1, self._output_tokens),
        )

    async def receive(self) -> list[StreamEvent]:
        """Waits for at least one event and returns all that are pending, in order. A checkpoint.

        Raises :class:`trio.EndOfChannel` after the last event of a request that finished, and the request's
        own :class:`~pyserve.errors.RequestError` after the last event of one that failed; either again on
        every further call. Cancelling it loses no event.
        """
        if self._receiving:
            raise trio.BusyResourceError("another task is receiving from this request")
        self._receiving = True
        try:
            await trio.lowlevel.checkpoint()
            while not self._buffer and self._end is None:
                self._wakeup = trio.Event()
                await self._wakeup.wait()
        finally:
            self._receiving = False
        if self._buffer:
            events, self._buffer = self._buffer, []
            return events
        if isinstance(self._end, Failed):
            raise self._end.error
        raise trio.EndOfChannel

    def __aiter__(self) -> RequestStream:
        """Iterates over lists of events until the request is complete; raises its error where it failed."""
        return self

    async def __anext__(self) -> list[StreamEvent]:
        """:meth:`receive`, in an iterator's words."""
        try:
            return await self.receive()
        except trio.EndOfChannel:
            raise StopAsyncIteration from None

    def stop_choice(self, index: int) -> None:
        """Ends choice ``index`` with reason "stop" at the next step boundary. Idempotent.

        Tokens sampled before that boundary still arrive; whoever stops a choice ignores them.
        """
        if self._end is None:
            self._stop_choice(self.request_id, index)

    def push(self, event: Event, at_s: float) -> None:
        """Called by the router on the Trio thread, never by owners: files one event."""
        if self._end is not None:
            raise RuntimeError(f"request {self.request_id} got {event!r} after its end")
        match event:
            case Finished() | Failed():
                self._end = event
                self._ended_s = at_s
            case Started():
                self._started_s = self.arrival_s + event.queue_s
                self._cached_tokens = event.cached_tokens
                self._buffer.append(event)
            case Token():
                self._first_s = at_s if self._first_s is None else self._first_s
                self._output_tokens += 1
                self._batch_size = max(self._batch_size, event.batch_size)
                self._batch_sum += event.batch_size
                self._buffer.append(event)
            case Embedding():
                self._first_s = at_s
                self._buffer.append(event)
            case ChoiceFinished():
                self._buffer.append(event)
        self._wakeup.set()

    def fail(self, error: RequestError, at_s: float) -> None:
        """Called by the engine when it stops: ends the stream with ``error`` unless it has ended."""
        if self._end is None:
            self.push(Failed(self.request_id, error), at_s)
