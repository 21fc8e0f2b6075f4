"""The engine from outside, on a scripted back-end and a mock clock: what its users can rely on."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
import trio
from trio.testing import MockClock

from pyserve.backends.scripted import ScriptedBackend, StepCost
from pyserve.core.events import FinishReason, Started, Token
from pyserve.core.spec import Task
from pyserve.engine.engine import Engine
from pyserve.errors import (
    Cancelled,
    ContextLengthExceeded,
    DeadlineExceeded,
    InvalidRequest,
    QueueFull,
    StepFailed,
    Unavailable,
)
from pyserve.testing.engine import Collected, collect, make_spec, open_scripted_engine
from pyserve.testing.scripted import expected_tokens

SECOND = StepCost(base_s=1.0, prefill_token_s=0.0, decode_sequence_s=0.0)


@pytest.fixture
def backend() -> ScriptedBackend:
    return ScriptedBackend(cost=SECOND, poison_tokens=[966], nan_tokens=[977])


@pytest.fixture
async def engine(backend: ScriptedBackend) -> AsyncIterator[Engine]:
    """Beside ``autojump_clock``, which pytest-trio takes only from a test's own arguments."""
    async with open_scripted_engine(backend) as engine:
        yield engine


async def collect_all(engine: Engine, *specs: object) -> list[Collected | Exception]:
    """Runs them at once; an error takes the place of the result."""
    results: list[Collected | Exception] = [Collected()] * len(specs)

    async def run(i: int) -> None:
        try:
            results[i] = await collect(engine, specs[i])  # type: ignore[arg-type]
        except Exception as error:
            results[i] = error

    async with trio.open_nursery() as nursery:
        for i in range(len(specs)):
            nursery.start_soon(run, i)
    return results


def assert_nothing_held(engine: Engine) -> None:
    statistics = engine.statistics()
    assert statistics.open_requests == 0
    assert statistics.unstarted_tokens == 0
    assert statistics.loop.scheduler.pool.owned == 0


async def test_request_gives_its_tokens_and_ends(autojump_clock: MockClock, engine: Engine) -> None:
    result = await collect(engine, make_spec([5, 6, 7], max_tokens=6))
    assert result.tokens == {0: expected_tokens([5, 6, 7], 6)}
    assert result.reasons == {0: FinishReason.LENGTH}
    assert isinstance(result.events[0], Started)
    assert_nothing_held(engine)


async def test_requests_share_steps(
    autojump_clock: MockClock, engine: Engine, backend: ScriptedBackend
) -> None:
    specs = [make_spec([i, 1, 2], max_tokens=5) for i in range(8)]
    results = await collect_all(engine, *specs)
    for spec, result in zip(specs, results, strict=True):
        assert isinstance(result, Collected)
        assert result.tokens[0] == expected_tokens(spec.prompt, 5)
        assert result.metrics.batch_size == 8
    assert backend.counters.forwards <= 6


async def test_prompt_longer_than_a_step_is_prefilled_in_chunks(
    autojump_clock: MockClock, engine: Engine, backend: ScriptedBackend
) -> None:
    prompt = list(range(1, 61)) + [3] * 30
    result = await collect(engine, make_spec(prompt, max_tokens=2))
    assert result.tokens[0] == expected_tokens(prompt, 2)
    assert backend.counters.max_tokens <= 32
    assert backend.counters.forwards == 4


async def test_logprobs_come_with_their_tokens(autojump_clock: MockClock, engine: Engine) -> None:
    result = await collect(engine, make_spec(max_tokens=3, logprobs=2))
    for event in result.events:
        if isinstance(event, Token):
            assert event.logprobs is not None
            assert event.logprobs.top[0] == (event.token, event.logprobs.logprob)
            assert len(event.logprobs.top) == 2


async def test_choices_share_the_prompt_and_end_separately(
    autojump_clock: MockClock, engine: Engine
) -> None:
    result = await collect(engine, make_spec([4] * 10, n=3, max_tokens=4, temperature=1.0, seed=3))
    assert {i: len(tokens) for i, tokens in result.tokens.items()} == {0: 4, 1: 4, 2: 4}
    assert len({tuple(tokens) for tokens in result.tokens.values()}) > 1
    assert_nothing_held(engine)


async def test_embedding(
    autojump_clock: MockClock, engine: Engine, backend: ScriptedBackend
) -> None:
    result = await collect(engine, make_spec([1, 2, 3], task=Task.EMBED))
    assert result.embedding is not None
    assert len(result.embedding) == backend.info.hidden_size
    again = await collect(engine, make_spec([1, 2, 3], task=Task.EMBED))
    assert again.embedding == result.embedding
    assert_nothing_held(engine)


async def test_metrics_follow_the_clock(autojump_clock: MockClock, engine: Engine) -> None:
    result = await collect(engine, make_spec(max_tokens=4))
    metrics = result.metrics
    assert (metrics.queue_s, metrics.ttft_s, metrics.total_s) == (0.0, 1.0, 4.0)
    assert metrics.output_tokens == 4


async def test_slow_owner_gets_everything_at_once(
    autojump_clock: MockClock, engine: Engine
) -> None:
    async with engine.request(make_spec(max_tokens=6)) as stream:
        await trio.sleep(20)
        events = await stream.receive()
        assert sum(isinstance(e, Token) for e in events) == 6
        with pytest.raises(trio.EndOfChannel):
            await stream.receive()


async def test_leaving_while_streaming_frees_everything_at_the_next_boundary(
    autojump_clock: MockClock,
    engine: Engine,
) -> None:
    async with engine.request(make_spec(max_tokens=100)) as stream:
        await stream.receive()
        assert engine.statistics().loop.scheduler.pool.owned > 0
    assert engine.statistics().closing_requests == 1
    await trio.sleep(1.01)
    assert_nothing_held(engine)
    assert engine.statistics().abandoned_total == 1


async def test_leaving_before_the_engine_has_seen_it_leaves_no_trace(
    autojump_clock: MockClock, engine: Engine, backend: ScriptedBackend
) -> None:
    with trio.CancelScope() as scope:
        scope.cancel()
        async with engine.request(make_spec()):
            pytest.fail("cancelled before it was submitted")
    await trio.sleep(5)
    assert backend.counters.forwards == 0
    assert_nothing_held(engine)


async def test_leaving_while_queued_does_not_disturb_the_line(
    autojump_clock: MockClock, engine: Engine
) -> None:
    async with trio.open_nursery() as nursery:
        nursery.start_soon(collect_all, engine, *[make_spec([i], max_tokens=5) for i in range(8)])
        await trio.sleep(0.5)
        async with engine.request(make_spec()) as stream:
            await trio.sleep(1)
            assert not stream.started
    await trio.sleep(2)
    assert_nothing_held(engine)


async def test_stopped_choice_ends_with_reason_stop(
    autojump_clock: MockClock, engine: Engine
) -> None:
    async with engine.request(make_spec(max_tokens=50)) as stream:
        await stream.receive()
        stream.stop_choice(0)
        reasons = [e.reason async for events in stream for e in events if hasattr(e, "reason")]
    assert reasons == [FinishReason.STOP]
    assert_nothing_held(engine)


async def test_request_id_in_use_is_refused(autojump_clock: MockClock, engine: Engine) -> None:
    async with engine.request(make_spec(request_id="same")):
        with pytest.raises(InvalidRequest, match="in use"):
            async with engine.request(make_spec(request_id="same")):
                pass
    assert engine.statistics().rejected_total == 1


async def test_too_long_for_the_context_is_refused(
    autojump_clock: MockClock, engine: Engine
) -> None:
    with pytest.raises(ContextLengthExceeded):
        await collect(engine, make_spec([1] * 128, max_tokens=8))


async def test_deadline_runs_out_in_line(autojump_clock: MockClock, engine: Engine) -> None:
    specs = [make_spec([i], max_tokens=20) for i in range(8)]
    late = make_spec([9], deadline_s=engine.now() + 3.5)
    *_, last = await collect_all(engine, *specs, late)
    assert isinstance(last, DeadlineExceeded)
    assert_nothing_held(engine)


async def test_poison_fails_alone(
    autojump_clock: MockClock, engine: Engine, backend: ScriptedBackend
) -> None:
    specs = [make_spec([i, 1], max_tokens=4) for i in range(7)]
    specs.insert(4, make_spec([4, 966], max_tokens=4))
    results = await collect_all(engine, *specs)
    for spec, result in zip(specs, results, strict=True):
        if 966 in spec.prompt:
            assert isinstance(result, StepFailed)
        else:
            assert isinstance(result, Collected)
            assert result.tokens[0] == expected_tokens(spec.prompt, 4)
    assert backend.counters.failed > 1
    assert_nothing_held(engine)


async def test_row_of_nan_fails_alone(autojump_clock: MockClock, engine: Engine) -> None:
    good, bad = make_spec([1, 2], max_tokens=4), make_spec([977, 2], max_tokens=4)
    results = await collect_all(engine, good, bad)
    assert isinstance(results[0], Collected)
    assert results[0].tokens[0] == expected_tokens([1, 2], 4)
    assert isinstance(results[1], StepFailed)
    assert_nothing_held(engine)


async def test_drain_finishes_what_is_open_and_admits_nothing(
    autojump_clock: MockClock, engine: Engine
) -> None:
    async with trio.open_nursery() as nursery:
        nursery.start_soon(collect, engine, make_spec(max_tokens=5))
        await trio.sleep(0.5)
        engine.begin_drain()
        assert engine.draining
        assert not engine.ready
        with pytest.raises(Unavailable):
            await collect(engine, make_spec())
        assert not await engine.drained(1.0)
        assert await engine.drained(10.0)
    assert engine.statistics().finished_total == 1


async def test_cancel_all_tells_every_stream(autojump_clock: MockClock, engine: Engine) -> None:
    async with trio.open_nursery() as nursery:
        nursery.start_soon(stop_after, engine, 2.5)
        results = await collect_all(engine, *[make_spec([i], max_tokens=50) for i in range(12)])
    assert all(isinstance(result, Cancelled) for result in results)
    assert_nothing_held(engine)


async def stop_after(engine: Engine, seconds: float) -> None:
    await trio.sleep(seconds)
    engine.cancel_all(Cancelled("the server is shutting down"))


async def test_full_line_is_refused(autojump_clock: MockClock) -> None:
    backend = ScriptedBackend(cost=SECOND)
    async with open_scripted_engine(backend, max_waiting_requests=4) as engine:
        specs = [make_spec([i], max_tokens=50) for i in range(20)]
        results = await collect_all(engine, *specs)
    refused = [r for r in results if isinstance(r, QueueFull)]
    assert len(refused) >= 8
    assert all(isinstance(r, Collected) for r in results if r not in refused)


async def test_engine_that_closes_tells_streams_of_other_tasks(
    autojump_clock: MockClock,
) -> None:
    results: list[Collected | Exception] = []

    async def client(engine: Engine) -> None:
        results.extend(await collect_all(engine, make_spec(max_tokens=50)))

    backend = ScriptedBackend(cost=SECOND)
    async with trio.open_nursery() as nursery, open_scripted_engine(backend) as engine:
        nursery.start_soon(client, engine)
        await trio.sleep(3)
    assert isinstance(results[0], Unavailable)


async def test_stalled_step_makes_it_not_ready(autojump_clock: MockClock) -> None:
    backend = ScriptedBackend(cost=StepCost(base_s=1000.0))
    async with open_scripted_engine(backend) as engine, trio.open_nursery() as nursery:
        nursery.start_soon(collect, engine, make_spec(max_tokens=2))
        await trio.sleep(30)
        assert engine.ready
        await trio.sleep(31)
        assert not engine.ready


async def test_slow_short_prompts_do_not_get_a_long_one_refused(autojump_clock: MockClock) -> None:
    cost = StepCost(base_s=0.05, prefill_token_s=0.0001)
    async with open_scripted_engine(ScriptedBackend(cost=cost)) as engine:
        await collect(
            engine, make_spec([1, 2], max_tokens=1)
        )  # 40 tokens/s, nearly all of it overhead
        spec = make_spec([3] * 100, max_tokens=1, deadline_s=engine.now() + 1.0)
        assert len((await collect(engine, spec)).tokens[0]) == 1
