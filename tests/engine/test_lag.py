"""The loop-lag statistic."""

from __future__ import annotations

import trio

from pyserve.engine.lag import LoopLag
from pyserve.testing.clock import run_mocked


def test_quantiles_of_recent_samples() -> None:
    lag = LoopLag(samples=100)
    assert lag.quantile(0.99) == 0.0
    for late_ms in range(200):
        lag.record(late_ms / 1000)
    assert lag.quantile(0.0) == 0.1
    assert lag.quantile(0.99) == 0.199


def test_early_wakeups_count_as_on_time() -> None:
    lag = LoopLag()
    lag.record(-0.001)
    assert lag.quantile(0.5) == 0.0


def test_samples_once_an_interval() -> None:
    lag = LoopLag(interval_s=1.0)

    async def main() -> None:
        with trio.move_on_after(10.5):
            await lag.run()

    run_mocked(main)
    assert lag.samples == 10
