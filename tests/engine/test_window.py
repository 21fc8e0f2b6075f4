"""The batch window in the running engine: it fires by timer, waits for company, never delays a busy one."""

from __future__ import annotations

import trio
from trio.testing import MockClock

from pyserve.backends.scripted import ScriptedBackend, StepCost
from pyserve.engine.engine import Engine
from pyserve.testing.engine import Collected, collect, make_spec, open_scripted_engine

COST = StepCost(base_s=1.0, prefill_token_s=0.0, decode_sequence_s=0.0)
WINDOW = {"window_min_s": 5.0, "window_max_s": 8.0}


async def test_lone_request_starts_when_the_window_closes(autojump_clock: MockClock) -> None:
    """Nobody else ever arrives: only the timer can start it."""
    async with open_scripted_engine(ScriptedBackend(cost=COST), **WINDOW) as engine:
        result = await collect(engine, make_spec(max_tokens=2))
    assert result.metrics.queue_s == 5.0
    assert result.metrics.ttft_s == 6.0


async def test_company_that_arrives_within_the_window_shares_the_first_step(
    autojump_clock: MockClock,
) -> None:
    results: list[Collected] = []

    async def client(engine: Engine, after_s: float) -> None:
        await trio.sleep(after_s)
        results.append(await collect(engine, make_spec(max_tokens=2)))

    backend = ScriptedBackend(cost=COST)
    async with open_scripted_engine(backend, **WINDOW) as engine, trio.open_nursery() as nursery:
        for after_s in (0.0, 2.0, 4.5):
            nursery.start_soon(client, engine, after_s)
    assert [r.metrics.batch_size for r in results] == [3, 3, 3]
    assert sorted(r.metrics.queue_s or 0.0 for r in results) == [0.5, 3.0, 5.0]
    assert backend.counters.forwards == 2


async def test_full_batch_does_not_wait(autojump_clock: MockClock) -> None:
    results: list[Collected] = []

    async def client(engine: Engine) -> None:
        results.append(await collect(engine, make_spec(max_tokens=1)))

    backend = ScriptedBackend(cost=COST)
    async with open_scripted_engine(backend, **WINDOW) as engine, trio.open_nursery() as nursery:
        for _ in range(8):
            nursery.start_soon(client, engine)
    assert [r.metrics.queue_s for r in results] == [0.0] * 8


async def test_busy_engine_takes_newcomers_at_its_next_step(autojump_clock: MockClock) -> None:
    backend = ScriptedBackend(cost=COST)
    async with open_scripted_engine(backend, **WINDOW) as engine, trio.open_nursery() as nursery:
        nursery.start_soon(collect, engine, make_spec(max_tokens=30))
        await trio.sleep(10.5)
        late = await collect(engine, make_spec(max_tokens=1))
    assert late.metrics.queue_s == 0.5


async def test_window_grows_when_batches_do_not_fill_and_is_a_statistic(
    autojump_clock: MockClock,
) -> None:
    async with open_scripted_engine(ScriptedBackend(cost=COST), **WINDOW) as engine:
        seen = []
        for _ in range(7):
            await collect(engine, make_spec(max_tokens=1))
            seen.append(engine.statistics().loop.scheduler.window.window_s)
    assert seen == sorted(seen)
    assert seen[0] > 5.0
    assert seen[-1] == 8.0


async def test_leaving_within_the_window_closes_it(autojump_clock: MockClock) -> None:
    backend = ScriptedBackend(cost=COST)
    async with open_scripted_engine(backend, **WINDOW) as engine:
        with trio.move_on_after(2):
            await collect(engine, make_spec())
        await trio.sleep(20)
        assert backend.counters.forwards == 0
        assert engine.statistics().open_requests == 0
