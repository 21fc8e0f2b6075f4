"""Running Trio on a clock that jumps whenever everyone sleeps."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TypeVar

import trio
from trio.testing import MockClock

T = TypeVar("T")


def run_mocked(async_fn: Callable[..., Awaitable[T]], *args: object) -> T:
    """``trio.run`` under an autojumping mock clock: sleeps take no time, and deadlines fire in order.

    For synchronous tests such as hypothesis's. Not with the thread driver: the clock would jump while the
    engine's thread is computing.
    """
    return trio.run(async_fn, *args, clock=MockClock(autojump_threshold=0))
