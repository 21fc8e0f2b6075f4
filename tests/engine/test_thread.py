"""The step loop on its own thread: Trio is never blocked, never flooded, and the thread is always joined."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from pyserve.backends.base import PackedStep
from pyserve.backends.scripted import ScriptedBackend
from pyserve.engine.thread import MAX_PENDING_HANDOVERS, SLICE_EVENTS
from pyserve.testing.engine import collect, make_spec, open_scripted_engine
from pyserve.testing.scripted import expected_tokens

PATIENCE_S = 30.0  # a test that waits so long has failed


class Gate:
    """Stops every forward until it is opened."""

    def __init__(self) -> None:
        self.entered = threading.Event()
        self._open = threading.Event()

    def __call__(self, packed: PackedStep) -> None:
        self.entered.set()
        assert self._open.wait(PATIENCE_S)

    def open(self) -> None:
        self._open.set()

    async def wait_entered(self) -> None:
        assert await trio.to_thread.run_sync(self.entered.wait, PATIENCE_S)


@pytest.fixture
def gate() -> Iterator[Gate]:
    gate = Gate()
    yield gate
    gate.open()


def engine_threads() -> list[threading.Thread]:
    return [t for t in threading.enumerate() if t.name == "pyserve-engine"]


async def test_same_tokens_as_alone() -> None:
    async with open_scripted_engine(driver="thread") as engine, trio.open_nursery() as nursery:

        async def client(i: int) -> None:
            result = await collect(engine, make_spec([i, 1, 2], max_tokens=10))
            assert result.tokens[0] == expected_tokens([i, 1, 2], 10)

        for i in range(30):
            nursery.start_soon(client, i)


async def test_thread_is_joined_and_the_backend_closed() -> None:
    backend = ScriptedBackend()
    async with open_scripted_engine(backend, driver="thread") as engine:
        await collect(engine, make_spec())
        assert len(engine_threads()) == 1
        assert not engine_threads()[0].daemon
    assert engine_threads() == []
    assert backend.closed


async def test_trio_goes_on_while_a_step_computes(gate: Gate) -> None:
    backend = ScriptedBackend(on_forward=gate)
    async with (
        open_scripted_engine(backend, driver="thread") as engine,
        engine.request(make_spec(max_tokens=2)) as stream,
    ):
        await gate.wait_entered()
        for _ in range(100):
            await trio.lowlevel.checkpoint()
        assert engine.statistics().open_requests == 1
        gate.open()
        async for _ in stream:
            pass


async def test_leaving_during_a_step_frees_everything_after_it(gate: Gate) -> None:
    backend = ScriptedBackend(on_forward=gate)
    async with open_scripted_engine(backend, driver="thread") as engine:
        async with engine.request(make_spec(max_tokens=50)):
            await gate.wait_entered()
        assert engine.statistics().closing_requests == 1
        gate.open()
        assert await engine.drained(PATIENCE_S)
        assert engine.statistics().abandoned_total == 1
    assert backend.counters.forwards == 1


async def test_thread_runs_two_handovers_ahead_and_no_further() -> None:
    entered = threading.Semaphore(0)
    backend = ScriptedBackend(on_forward=lambda packed: entered.release())
    async with open_scripted_engine(backend, driver="thread") as engine:
        async with engine.request(make_spec(max_tokens=50)):
            await wait_all_tasks_blocked()
            # From here to the end of the block Trio consumes nothing: this code never yields to it.
            while entered.acquire(timeout=0.05):
                pass
            assert engine.statistics().pending_handovers == MAX_PENDING_HANDOVERS
            before = backend.counters.forwards
        assert await engine.drained(PATIENCE_S)
    assert before < 50


async def test_wide_step_is_delivered_over_several_turns_of_the_loop(gate: Gate) -> None:
    clients = 5 * SLICE_EVENTS
    backend = ScriptedBackend(on_forward=gate)
    async with (
        open_scripted_engine(
            backend,
            driver="thread",
            num_blocks=4 * clients,
            max_batch_tokens=4 * clients,
            max_batch_requests=clients,
        ) as engine,
        trio.open_nursery() as nursery,
    ):
        for i in range(clients):
            nursery.start_soon(collect, engine, make_spec([i % 97, 1, 2], max_tokens=3))
        await gate.wait_entered()
        await wait_all_tasks_blocked()  # all have been submitted
        gate.open()
        seen, most = 0, 0
        while engine.statistics().open_requests:
            await trio.lowlevel.checkpoint()
            tokens = engine.statistics().output_tokens_total
            seen, most = tokens, max(most, tokens - seen)
        assert backend.counters.max_sequences > 2 * SLICE_EVENTS
        assert most <= 2 * SLICE_EVENTS  # two turns may pass between two looks


async def test_body_that_raises_still_joins_the_thread(gate: Gate) -> None:
    backend = ScriptedBackend(on_forward=gate)
    with pytest.RaisesGroup(ValueError):
        async with (
            open_scripted_engine(backend, driver="thread") as engine,
            engine.request(make_spec()),
        ):
            await gate.wait_entered()
            gate.open()
            raise ValueError("the body's own")
    assert engine_threads() == []
