"""Jobs in memory: bounded by number, size and age; the oldest finished jobs make room."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import msgspec

from pyserve.errors import QueueFull
from pyserve.jobs.job import Job, JobEvent, JobState
from pyserve.telemetry.stores import StoreStatistics

_OVERHEAD = 512  # bytes that one job or event costs beside its content, roughly


@dataclass(slots=True)
class _Entry:
    """A job, its events, and what both weigh."""

    job: Job
    size: int
    events: list[JobEvent] = field(default_factory=list)
    events_size: int = 0


class MemoryJobStore:
    """A :class:`~pyserve.jobs.store.JobStore` that forgets everything when the process ends."""

    def __init__(
        self,
        *,
        max_jobs: int = 4096,
        max_bytes: int = 256 * 2**20,
        ttl_s: float = 3600.0,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._max_jobs = max_jobs
        self._max_bytes = max_bytes
        self._ttl_s = ttl_s
        self._clock = clock
        self._entries: dict[str, _Entry] = {}
        self._bytes = 0
        self._evicted = 0

    async def insert(self, job: Job) -> None:
        """See :class:`~pyserve.jobs.store.JobStore`."""
        if job.id in self._entries:
            raise ValueError(f"job {job.id} exists")
        size = _size(job)
        self._make_room(1, size)
        if len(self._entries) >= self._max_jobs or self._bytes + size > self._max_bytes:
            raise QueueFull("the job store is full of unfinished jobs", retry_after_s=5.0)
        self._entries[job.id] = _Entry(job, size)
        self._bytes += size

    async def update(self, job: Job) -> None:
        """See :class:`~pyserve.jobs.store.JobStore`."""
        entry = self._entries[job.id]
        size = _size(job)
        self._bytes += size - entry.size
        entry.job, entry.size = job, size
        self._make_room(0, 0)

    async def remove(self, job_id: str) -> None:
        """See :class:`~pyserve.jobs.store.JobStore`."""
        entry = self._entries.pop(job_id, None)
        if entry is not None:
            self._bytes -= entry.size + entry.events_size

    async def get(self, job_id: str) -> Job | None:
        """See :class:`~pyserve.jobs.store.JobStore`."""
        self._make_room(0, 0)
        entry = self._entries.get(job_id)
        return None if entry is None else entry.job

    async def append(self, job_id: str, kind: str, data: bytes) -> JobEvent:
        """See :class:`~pyserve.jobs.store.JobStore`."""
        entry = self._entries[job_id]
        event = JobEvent(len(entry.events) + 1, kind, data)
        entry.events.append(event)
        weight = len(data) + _OVERHEAD // 4
        entry.events_size += weight
        self._bytes += weight
        return event

    async def events(self, job_id: str, after: int) -> Sequence[JobEvent]:
        """See :class:`~pyserve.jobs.store.JobStore`."""
        entry = self._entries.get(job_id)
        return () if entry is None else entry.events[max(0, after) :]

    async def page(
        self, owner: str, *, state: JobState | None, after: str | None, limit: int
    ) -> tuple[Sequence[Job], bool]:
        """See :class:`~pyserve.jobs.store.JobStore`."""
        found: list[Job] = []
        behind = after is None
        for entry in reversed(self._entries.values()):
            job = entry.job
            if not behind:
                behind = job.id == after
            elif job.owner == owner and (state is None or job.state is state):
                if len(found) == limit:
                    return found, True
                found.append(job)
        return found, False

    async def position(self, job: Job) -> int:
        """See :class:`~pyserve.jobs.store.JobStore`."""
        ahead = 0
        older = True
        for entry in self._entries.values():
            other = entry.job
            if other.id == job.id:
                older = False
            elif other.state is JobState.QUEUED:
                ahead += other.priority > job.priority or (older and other.priority == job.priority)
        return ahead

    def statistics(self) -> StoreStatistics:
        """See :class:`~pyserve.jobs.store.JobStore`."""
        return StoreStatistics(
            len(self._entries), self._max_jobs, self._bytes, self._max_bytes, self._evicted
        )

    def _make_room(self, jobs: int, size: int) -> None:
        """Drops finished jobs, oldest first, that are too old, and while ``jobs`` and ``size`` do not fit."""
        now = self._clock()
        oldest = next(iter(self._entries.values()), None)
        if oldest is None or not (self._crowded(jobs, size) or self._old(oldest, now)):
            return  # the usual case costs nothing: entries are in order of age
        for entry in list(self._entries.values()):
            crowded = self._crowded(jobs, size)
            if not crowded and not self._old(entry, now):
                return
            finished_at = entry.job.finished_at
            if finished_at is not None and (crowded or now - finished_at > self._ttl_s):
                self._entries.pop(entry.job.id)
                self._bytes -= entry.size + entry.events_size
                self._evicted += 1

    def _crowded(self, jobs: int, size: int) -> bool:
        return len(self._entries) + jobs > self._max_jobs or self._bytes + size > self._max_bytes

    def _old(self, entry: _Entry, now: float) -> bool:
        return now - entry.job.created_at > self._ttl_s


def _size(job: Job) -> int:
    content = (job.metadata, job.result, job.error)
    return _OVERHEAD + len(job.request) + sum(len(msgspec.json.encode(part)) for part in content)
