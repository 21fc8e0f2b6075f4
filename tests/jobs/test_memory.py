from __future__ import annotations

from itertools import product

import pytest

from pyserve.errors import QueueFull
from pyserve.jobs.job import TRANSITIONS, Job, JobState
from pyserve.jobs.memory import MemoryJobStore


def job(name: str, *, priority: int = 0, created_at: float = 0.0, owner: str = "a") -> Job:
    return Job(name, owner, b"{}", priority, created_at)


def finished(entry: Job, at: float = 0.0) -> Job:
    return entry.to(JobState.SUCCEEDED, finished_at=at, result={"text": "x"})


@pytest.mark.parametrize(("before", "after"), list(product(JobState, JobState)))
def test_only_the_tables_transitions_are_possible(before: JobState, after: JobState) -> None:
    start = Job("j", "a", b"", 0, 0.0, state=before)
    if after in TRANSITIONS[before]:
        assert start.to(after).state is after
    else:
        with pytest.raises(RuntimeError, match="cannot become"):
            start.to(after)


async def test_unfinished_jobs_are_never_evicted() -> None:
    store = MemoryJobStore(max_jobs=2)
    await store.insert(job("1"))
    await store.insert(job("2"))
    with pytest.raises(QueueFull):
        await store.insert(job("3"))
    await store.update(finished(job("2")))
    await store.insert(job("3"))
    assert await store.get("2") is None
    assert await store.get("1") is not None
    assert store.statistics().evicted_total == 1


async def test_bytes_are_bounded_and_given_back() -> None:
    store = MemoryJobStore(max_bytes=4000)
    for name in "123":
        await store.insert(job(name))
        await store.append(name, "delta", b"x" * 600)
        await store.update(finished(job(name)))
    assert store.statistics().bytes <= 4000
    for name in "123":
        await store.remove(name)
    assert store.statistics().bytes == 0
    assert store.statistics().entries == 0


async def test_finished_jobs_age_out() -> None:
    now = 0.0
    store = MemoryJobStore(ttl_s=10, clock=lambda: now)
    await store.insert(job("1"))
    await store.update(finished(job("1"), at=5.0))
    now = 14.0
    assert await store.get("1") is not None
    now = 16.0
    assert await store.get("1") is None


async def test_events_count_without_gaps() -> None:
    store = MemoryJobStore()
    await store.insert(job("1"))
    for _ in range(3):
        await store.append("1", "delta", b"{}")
    assert [event.number for event in await store.events("1", 1)] == [2, 3]
    assert await store.events("none", 0) == ()


async def test_position_goes_by_priority_then_age() -> None:
    store = MemoryJobStore()
    for name, priority in (("old", 0), ("high", 1), ("new", 0)):
        await store.insert(job(name, priority=priority))
    assert [await store.position(job(n)) for n in ("old", "new")] == [1, 2]
    assert await store.position(job("high", priority=1)) == 0
