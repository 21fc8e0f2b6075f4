"""pytest fixtures: ``pytest_plugins = ["pyserve.testing.fixtures"]`` (with pytest-trio)."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from pyserve.backends.scripted import ScriptedBackend
from pyserve.engine.engine import Engine
from pyserve.testing.engine import open_scripted_engine


@pytest.fixture
def scripted_backend() -> ScriptedBackend:
    """The back-end of ``scripted_engine``; override it for other costs, poison or an own continuation."""
    return ScriptedBackend()


@pytest.fixture
async def scripted_engine(scripted_backend: ScriptedBackend) -> AsyncIterator[Engine]:
    """An engine on Trio's own thread, whose steps take time on Trio's clock.

    The test asks for pytest-trio's ``autojump_clock`` beside it (fixtures cannot): then they take none.
    """
    async with open_scripted_engine(scripted_backend) as engine:
        yield engine


@pytest.fixture
async def threaded_engine(scripted_backend: ScriptedBackend) -> AsyncIterator[Engine]:
    """The same on its own thread and the real clock, for tests through a socket; steps take no time."""
    async with open_scripted_engine(scripted_backend, driver="thread") as engine:
        yield engine
