"""Where jobs are kept: the interface that every store fills, in memory or durable."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from pyserve.jobs.job import Job, JobEvent, JobState
from pyserve.telemetry.stores import StoreStatistics


class JobStore(Protocol):
    """Keeps jobs and their events. Every method is atomic: it happens, or it raises and nothing did."""

    async def insert(self, job: Job) -> None:
        """A new job; raises :class:`~pyserve.errors.QueueFull` where no room can be made."""

    async def update(self, job: Job) -> None:
        """Replaces the job of the same id; raises KeyError where there is none."""

    async def remove(self, job_id: str) -> None:
        """Forgets a job and its events; no error where there is none."""

    async def get(self, job_id: str) -> Job | None:
        """The job, or None."""

    async def append(self, job_id: str, kind: str, data: bytes) -> JobEvent:
        """Adds an event with the next number; raises KeyError where there is no such job."""

    async def events(self, job_id: str, after: int) -> Sequence[JobEvent]:
        """The events with numbers beyond ``after``, in order; empty where there is no such job."""

    async def page(
        self, owner: str, *, state: JobState | None, after: str | None, limit: int
    ) -> tuple[Sequence[Job], bool]:
        """``owner``'s jobs, newest first, beginning behind job ``after``; and whether there are more."""

    async def position(self, job: Job) -> int:
        """How many queued jobs go before ``job``: higher priority, or the same and older."""

    def statistics(self) -> StoreStatistics:
        """A snapshot."""
