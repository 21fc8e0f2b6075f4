"""A job: submitted now, collected later. Its states, and the one table of how they change."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any


class JobState(StrEnum):
    """Where a job is; the last four are final."""

    QUEUED = "queued"
    RUNNING = "running"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    CANCELLED = "cancelled"
    EXPIRED = "expired"

    @property
    def final(self) -> bool:
        """True where nothing can follow."""
        return not TRANSITIONS[self]


TRANSITIONS: Mapping[JobState, frozenset[JobState]] = {
    JobState.QUEUED: frozenset(
        (
            JobState.RUNNING,
            JobState.SUCCEEDED,
            JobState.FAILED,
            JobState.CANCELLED,
            JobState.EXPIRED,
        )
    ),
    JobState.RUNNING: frozenset(
        (JobState.SUCCEEDED, JobState.FAILED, JobState.CANCELLED, JobState.EXPIRED)
    ),
    JobState.SUCCEEDED: frozenset(),
    JobState.FAILED: frozenset(),
    JobState.CANCELLED: frozenset(),
    JobState.EXPIRED: frozenset(),
}


@dataclass(frozen=True, slots=True)
class Job:
    """One job as a store keeps it. Times are Unix seconds; ``request`` is the body as it was sent (JSON).

    ``owner`` is the API key's name. ``result`` is the answer as JSON-ready values once succeeded, ``error``
    OpenAI's error object once failed, cancelled or expired.
    """

    id: str
    owner: str
    request: bytes
    priority: int
    created_at: float
    metadata: Mapping[str, Any] | None = None
    state: JobState = JobState.QUEUED
    started_at: float | None = None
    finished_at: float | None = None
    output_tokens: int = 0
    batch_size: int | None = None
    result: Mapping[str, Any] | None = None
    error: Mapping[str, Any] | None = None

    def to(self, state: JobState, **changes: Any) -> Job:
        """The job in its next state; raises RuntimeError for a step that the table does not have."""
        if state not in TRANSITIONS[self.state]:
            raise RuntimeError(f"job {self.id}: {self.state} cannot become {state}")
        return replace(self, state=state, **changes)


@dataclass(frozen=True, slots=True)
class JobEvent:
    """Something that happened to a job; ``number`` counts from 1 without gaps, ``data`` is JSON."""

    number: int
    kind: str
    data: bytes = field(repr=False)
