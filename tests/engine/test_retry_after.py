"""What a refused client is told about when to come back, on simulated time."""

from __future__ import annotations

import pytest
import trio
from trio.testing import MockClock

from pyserve.backends.scripted import ScriptedBackend, StepCost
from pyserve.errors import QueueFull
from pyserve.testing.engine import collect, make_spec, open_scripted_engine


async def test_retry_after_is_true_after_a_change_of_load(autojump_clock: MockClock) -> None:
    backend = ScriptedBackend(cost=StepCost(base_s=0.05))
    async with open_scripted_engine(
        backend, max_batch_requests=2, max_waiting_requests=2
    ) as engine:
        for number in range(40):  # short ones, which start at once
            await collect(engine, make_spec([number, 1], max_tokens=2))
        async with trio.open_nursery() as nursery:
            for number in range(4):
                spec = make_spec([number, 2, 3], max_tokens=100)
                nursery.start_soon(collect, engine, spec)
                await trio.sleep(0.2)  # the first two start
            with pytest.raises(QueueFull) as caught:
                await collect(engine, make_spec([9, 9]))
            refused_s = engine.now()
            while engine.statistics().unstarted_requests == 2:  # noqa: ASYNC110 -- simulated time
                await trio.sleep(0.01)
            wait_s = engine.now() - refused_s
            assert wait_s > 4.0
            assert caught.value.retry_after_s == pytest.approx(wait_s, rel=0.25)
