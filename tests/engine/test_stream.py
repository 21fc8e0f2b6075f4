"""A request's stream by itself: what is pushed can be received, merged, once, and then the end."""

from __future__ import annotations

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from pyserve.core.events import ChoiceFinished, Finished, FinishReason, Started, Token
from pyserve.core.spec import RequestSpec
from pyserve.engine.stream import RequestStream
from pyserve.errors import DeadlineExceeded

START = Started("r", queue_s=0.5, cached_tokens=16)


def token(value: int, batch_size: int = 1) -> Token:
    return Token("r", 0, value, None, batch_size)


@pytest.fixture
def stops() -> list[tuple[str, int]]:
    return []


@pytest.fixture
def stream(stops: list[tuple[str, int]]) -> RequestStream:
    spec = RequestSpec("r", (1, 2, 3))
    return RequestStream(spec, arrival_s=10.0, stop_choice=lambda rid, i: stops.append((rid, i)))


async def test_receive_merges_what_came_while_nobody_looked(stream: RequestStream) -> None:
    events = [START, token(1), token(2)]
    for event in events:
        stream.push(event, 11.0)
    assert await stream.receive() == events


async def test_receive_waits_for_the_first_event(stream: RequestStream) -> None:
    got = []

    async def receive() -> None:
        got.append(await stream.receive())

    async with trio.open_nursery() as nursery:
        nursery.start_soon(receive)
        await wait_all_tasks_blocked()
        assert got == []
        stream.push(token(7), 11.0)
    assert got == [[token(7)]]


async def test_end_comes_after_the_events_and_stays(stream: RequestStream) -> None:
    last = ChoiceFinished("r", 0, FinishReason.LENGTH)
    stream.push(last, 11.0)
    stream.push(Finished("r"), 11.0)
    assert await stream.receive() == [last]
    for _ in range(2):
        with pytest.raises(trio.EndOfChannel):
            await stream.receive()


async def test_failure_is_raised_after_the_events_and_stays(stream: RequestStream) -> None:
    error = DeadlineExceeded("too late")
    stream.push(token(1), 11.0)
    stream.fail(error, 11.0)
    stream.fail(RuntimeError("never the second one"), 12.0)  # type: ignore[arg-type]
    assert await stream.receive() == [token(1)]
    for _ in range(2):
        with pytest.raises(DeadlineExceeded):
            await stream.receive()


async def test_iteration_ends_with_the_request(stream: RequestStream) -> None:
    stream.push(token(1), 11.0)
    stream.push(Finished("r"), 11.0)
    assert [events async for events in stream] == [[token(1)]]


async def test_cancelled_receive_loses_nothing(stream: RequestStream) -> None:
    stream.push(token(1), 11.0)
    with trio.CancelScope() as scope:
        scope.cancel()
        await stream.receive()
    assert scope.cancelled_caught
    assert await stream.receive() == [token(1)]


async def test_two_receivers_at_once_are_refused(stream: RequestStream) -> None:
    async with trio.open_nursery() as nursery:
        nursery.start_soon(stream.receive)
        await wait_all_tasks_blocked()
        with pytest.raises(trio.BusyResourceError):
            await stream.receive()
        stream.push(token(1), 11.0)


async def test_event_after_the_end_is_a_bug(stream: RequestStream) -> None:
    stream.push(Finished("r"), 11.0)
    with pytest.raises(RuntimeError, match="after its end"):
        stream.push(token(1), 11.0)


async def test_metrics_add_up(stream: RequestStream) -> None:
    assert stream.metrics.ttft_s is None
    stream.push(START, 11.5)
    stream.push(token(1, batch_size=4), 12.0)
    stream.push(token(2, batch_size=2), 13.0)
    stream.push(Finished("r"), 13.0)
    metrics = stream.metrics
    assert (metrics.queue_s, metrics.prefill_s, metrics.ttft_s) == (0.5, 1.5, 2.0)
    assert metrics.total_s == 3.0
    assert (metrics.cached_tokens, metrics.output_tokens) == (16, 2)
    assert (metrics.batch_size, metrics.mean_batch_size) == (4, 3.0)


async def test_stop_choice_is_passed_on_until_the_end(
    stream: RequestStream, stops: list[tuple[str, int]]
) -> None:
    stream.stop_choice(1)
    stream.push(Finished("r"), 11.0)
    stream.stop_choice(0)
    assert stops == [("r", 1)]
