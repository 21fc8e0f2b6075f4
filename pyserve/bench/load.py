"""Drives a workload against a server: closed loop by concurrency, open loop by arrival rate, or both."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import trio

from pyserve.bench.stream import Outcome, measure
from pyserve.bench.workload import Work, arrival_times


@dataclass(frozen=True, slots=True)
class Target:
    """Where requests go. ``body`` holds fields that every request carries."""

    url: str
    model: str
    headers: Mapping[str, str]
    body: Mapping[str, object]


@dataclass(frozen=True, slots=True)
class Pace:
    """When requests go: at most ``concurrency`` at once (None: no bound), arriving at ``rate`` a second.

    After ``limit_s`` whatever still runs is given up, with an error of its own.
    """

    concurrency: int | None = None
    rate: float = float("inf")
    burstiness: float = 1.0
    seed: int = 0
    limit_s: float = float("inf")


@dataclass(frozen=True, slots=True)
class LoadResult:
    """``outcomes`` in the order of the work. CPU shares are of one core (client) and of all (machine)."""

    outcomes: list[Outcome]
    duration_s: float
    client_cpu_share: float
    machine_cpu_share: float | None


async def drive(
    target: Target, work: Sequence[Work], pace: Pace, on_done: Callable[[Outcome], None]
) -> LoadResult:
    """Send all ``work`` and wait for every answer; ``on_done`` is called as each one ends."""
    outcomes = [Outcome(prompt_tokens=len(item.prompt), group=item.group) for item in work]
    start_s, cpu_s, machine = trio.current_time(), time.process_time(), _machine_ticks()
    with trio.move_on_after(pace.limit_s):
        await _send_all(target, work, outcomes, pace, on_done)
    for outcome in outcomes:
        if not outcome.ended:
            outcome.error = f"given up {pace.limit_s:g} s after the start"
    duration_s = trio.current_time() - start_s
    return LoadResult(
        outcomes,
        duration_s,
        (time.process_time() - cpu_s) / duration_s,
        _busy_share(machine, _machine_ticks()),
    )


async def _send_all(
    target: Target,
    work: Sequence[Work],
    outcomes: Sequence[Outcome],
    pace: Pace,
    on_done: Callable[[Outcome], None],
) -> None:
    limiter = trio.CapacityLimiter(pace.concurrency or max(1, len(work)))
    start_s = trio.current_time()
    arrivals = arrival_times(len(work), pace.rate, pace.burstiness, pace.seed)
    async with trio.open_nursery() as nursery:
        for item, outcome, arrival_s in zip(work, outcomes, arrivals, strict=True):
            await trio.sleep_until(start_s + arrival_s)
            nursery.start_soon(_one, target, item, outcome, limiter, on_done)


async def _one(
    target: Target,
    item: Work,
    outcome: Outcome,
    limiter: trio.CapacityLimiter,
    on_done: Callable[[Outcome], None],
) -> None:
    arrived_s = trio.current_time()
    async with limiter:
        outcome.queue_s = trio.current_time() - arrived_s
        body = {
            **target.body,
            "model": target.model,
            "prompt": item.prompt,
            "max_tokens": item.output_tokens,
            "stream": True,
            "stream_options": {"include_usage": True},
            **item.fields,
        }
        headers = dict(target.headers)
        if item.api_key is not None:
            headers["Authorization"] = f"Bearer {item.api_key}"
        await measure(
            target.url, body, headers, outcome, leave_after=item.leave_after, stall_s=item.stall_s
        )
    outcome.ended = True
    on_done(outcome)


def _machine_ticks() -> tuple[int, int] | None:
    """(busy, all) clock ticks of all cores since boot; None where /proc/stat is not."""
    try:
        fields = Path("/proc/stat").read_text(encoding="ascii").split("\n", 1)[0].split()[1:9]
    except OSError:
        return None
    ticks = [int(value) for value in fields]
    return sum(ticks) - ticks[3] - ticks[4], sum(ticks)


def _busy_share(before: tuple[int, int] | None, after: tuple[int, int] | None) -> float | None:
    if before is None or after is None or after[1] == before[1]:
        return None
    return (after[0] - before[0]) / (after[1] - before[1])
