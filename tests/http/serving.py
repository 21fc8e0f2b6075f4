"""A server on loopback for tests, with the fake engine behind it, and a client in front."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any

import httpx
import trio

from pyserve.http.auth import KeyRing
from pyserve.http.config import HttpConfig
from pyserve.http.server import serve_http
from pyserve.http.state import ServerState
from pyserve.telemetry.load import LoadSnapshot
from pyserve.telemetry.metrics import Metrics
from tests.http.fakes import CharTokenizer, FakeAssembler, FakeEngine


@dataclass
class Serving:
    """A running server."""

    url: str
    state: ServerState
    engine: FakeEngine
    client: httpx.AsyncClient
    nursery: trio.Nursery
    stopped: trio.Event
    scope: trio.CancelScope

    @property
    def port(self) -> int:
        return int(self.url.rpartition(":")[2])

    async def post(self, path: str, body: Any = None, **options: Any) -> httpx.Response:
        return await self.client.post(path, json=body, **options)

    async def get(self, path: str, **options: Any) -> httpx.Response:
        return await self.client.get(path, **options)


@asynccontextmanager
async def serving(
    *, keys: KeyRing | None = None, engine: Any = None, **limits: Any
) -> AsyncIterator[Serving]:
    """Serves on a free port; ``engine`` are fields of the fake one, ``limits`` of HttpConfig."""
    config = replace(HttpConfig(port=0, drain_timeout_s=5.0, close_timeout_s=0.2), **limits)
    async with trio.open_nursery() as nursery:
        fake = FakeEngine(nursery, **(engine or {}))
        state = ServerState(
            engine=fake,
            tokenizer=CharTokenizer(),
            assembler=FakeAssembler,
            keys=keys or KeyRing(),
            metrics=Metrics("fake-model"),
            context_length=fake.context_length,
            snapshot=lambda: LoadSnapshot(len(fake.open), 0, 0, 0.0, False),
        )
        stopped, scope = trio.Event(), trio.CancelScope()

        async def run(*, task_status: Any) -> None:
            with scope:
                await serve_http(state, config, task_status=task_status)
            stopped.set()

        urls = await nursery.start(run)
        async with httpx.AsyncClient(base_url=urls[0], timeout=30) as client:
            yield Serving(urls[0], state, fake, client, nursery, stopped, scope)
        state.shutdown.set()
        fake.cancel_all(_closing())
        await stopped.wait()
        nursery.cancel_scope.cancel()


def _closing() -> Any:
    from pyserve.errors import Unavailable

    return Unavailable("test is over")
