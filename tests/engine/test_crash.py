"""A step loop that fails takes the engine down, loudly, and leaves nobody waiting."""

from __future__ import annotations

from contextlib import suppress
from typing import Literal

import pytest
import trio

from pyserve.core.scheduler import Scheduler
from pyserve.engine.driver import EngineCrashed
from pyserve.engine.engine import Engine
from pyserve.errors import Unavailable
from pyserve.testing.engine import collect, make_spec, open_scripted_engine


class Broken(Exception):
    """What no step loop should raise."""


@pytest.fixture(params=["inline", "thread"])
def driver(request: pytest.FixtureRequest) -> Literal["inline", "thread"]:
    return request.param  # type: ignore[no-any-return]


@pytest.fixture
def broken_scheduler(monkeypatch: pytest.MonkeyPatch) -> None:
    def complete(*args: object) -> None:
        raise Broken("bookkeeping")

    monkeypatch.setattr(Scheduler, "complete", complete)


@pytest.mark.usefixtures("broken_scheduler")
async def test_crash_reaches_main_with_its_cause(driver: Literal["inline", "thread"]) -> None:
    with pytest.RaisesGroup(
        pytest.RaisesExc(EngineCrashed, check=lambda e: isinstance(e.__cause__, Broken))
    ):
        async with open_scripted_engine(driver=driver) as engine:
            with suppress(Unavailable):
                await collect(engine, make_spec())
            await trio.sleep_forever()


@pytest.mark.usefixtures("broken_scheduler")
async def test_open_streams_hear_of_the_crash_first(driver: Literal["inline", "thread"]) -> None:
    heard: list[Exception] = []

    async def client(engine: Engine) -> None:
        try:
            await collect(engine, make_spec())
        except Unavailable as error:
            heard.append(error)
            await trio.sleep(0.001)  # the owner still has time to tell its client
            heard.append(error)

    with pytest.RaisesGroup(EngineCrashed):
        async with open_scripted_engine(driver=driver) as engine, trio.open_nursery() as nursery:
            for _ in range(20):
                nursery.start_soon(client, engine)
    assert len(heard) >= 20


@pytest.mark.usefixtures("broken_scheduler")
async def test_nothing_is_admitted_after_a_crash(driver: Literal["inline", "thread"]) -> None:
    async def client(engine: Engine) -> None:
        with pytest.raises(Unavailable):
            await collect(engine, make_spec())
        assert not engine.ready
        with pytest.raises(Unavailable):
            await collect(engine, make_spec())

    with pytest.RaisesGroup(EngineCrashed):
        async with open_scripted_engine(driver=driver) as engine:
            await client(engine)


async def test_failure_to_route_is_a_crash_too(
    driver: Literal["inline", "thread"], monkeypatch: pytest.MonkeyPatch
) -> None:
    def route(*args: object) -> None:
        raise Broken("routing")

    monkeypatch.setattr(Engine, "_deliver", route)
    with pytest.RaisesGroup(EngineCrashed):
        async with open_scripted_engine(driver=driver) as engine:
            with suppress(Unavailable):
                await collect(engine, make_spec())
            await trio.sleep_forever()
