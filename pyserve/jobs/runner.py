"""Runs jobs: each in a task of its own, whose scope holds everything the job holds.

The runner knows nothing of models or HTTP: an :class:`Executor` does the work and reports through the
callbacks of :class:`Progress`. Every job that was accepted reaches exactly one final state.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import msgspec
import structlog
import trio

from pyserve.errors import Cancelled, DeadlineExceeded, RequestError
from pyserve.jobs.job import Job, JobEvent, JobState
from pyserve.jobs.store import JobStore

_log = structlog.get_logger("pyserve.jobs")


@dataclass(frozen=True, slots=True)
class JobResult:
    """What an executor returns: the answer as JSON-ready values, and the largest step it was part of."""

    answer: Mapping[str, Any]
    output_tokens: int
    batch_size: int


class Progress(Protocol):
    """What an executor tells while it works."""

    async def admitted(self) -> None:
        """The engine has taken it: an error from here on is the job's, before that the submitter's."""

    async def started(self) -> None:
        """It has left the waiting line."""

    async def event(self, kind: str, data: bytes, output_tokens: int) -> None:
        """News for those who follow (JSON), and the tokens so far."""


class Executor(Protocol):
    """Does the work of a job."""

    async def run(self, job: Job, progress: Progress) -> JobResult:
        """Raises :class:`~pyserve.errors.RequestError` where it cannot be done."""


@dataclass(slots=True)
class _Live:
    """A job that is not final yet. ``finished`` once its final state is stored."""

    job: Job
    scope: trio.CancelScope
    admitted: bool = False
    changed: trio.Event = field(default_factory=trio.Event)
    finished: trio.Event = field(default_factory=trio.Event)

    def wake(self) -> None:
        self.changed.set()
        self.changed = trio.Event()


class JobRunner:
    """The jobs of one server; their tasks live in ``nursery``. ``clock`` gives Unix seconds."""

    def __init__(
        self,
        store: JobStore,
        executor: Executor,
        nursery: trio.Nursery,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.store = store
        self._executor = executor
        self._nursery = nursery
        self._clock = clock
        self._live: dict[str, _Live] = {}

    async def submit(self, job: Job) -> Job:
        """Accepts ``job``, or raises what its submitter should be told (nothing is kept then)."""
        await self.store.insert(job)
        refused: RequestError | None = await self._nursery.start(self._run, job)
        if refused is not None:
            raise refused
        return job

    async def cancel(self, job_id: str) -> None:
        """Cancels a job and returns once it is final; no error where it is final already."""
        live = self._live.get(job_id)
        if live is not None:
            live.scope.cancel()
            await live.finished.wait()

    async def wait(self, job_id: str, timeout_s: float) -> None:
        """Returns once the job is final, or after ``timeout_s``."""
        live = self._live.get(job_id)
        if live is not None:
            with trio.move_on_after(timeout_s):
                await live.finished.wait()

    async def next_events(
        self, job_id: str, after: int, timeout_s: float
    ) -> tuple[Sequence[JobEvent], bool]:
        """Events beyond ``after``, waiting up to ``timeout_s`` for one; and whether they are the last."""
        live = self._live.get(job_id)
        if live is not None:
            changed = live.changed
            events = await self.store.events(job_id, after)
            if not events:
                with trio.move_on_after(timeout_s):
                    await changed.wait()
        over = job_id not in self._live  # looked at before the events are: none can follow
        return await self.store.events(job_id, after), over

    async def _run(self, job: Job, *, task_status: trio.TaskStatus[RequestError | None]) -> None:
        live = self._live[job.id] = _Live(job, trio.CancelScope())
        progress = _Progress(self, live, task_status)
        error: RequestError = Cancelled("cancelled")
        result: JobResult | None = None
        try:
            with live.scope:
                try:
                    result = await self._executor.run(job, progress)
                except RequestError as failure:
                    error = failure
                except Exception as failure:
                    _log.exception("job failed", job=job.id, error=repr(failure))
                    error = RequestError("internal error; see the server's log")
        finally:
            with trio.CancelScope(shield=True):
                await self._finish(live, result, error)
            if not live.admitted:
                task_status.started(error)

    async def _finish(self, live: _Live, result: JobResult | None, error: RequestError) -> None:
        job_id = live.job.id
        if live.admitted:
            final = self._final(live.job, result, error)
            await self.store.update(final)
            outcome = {"status": final.state, "result": final.result, "error": final.error}
            await self.store.append(job_id, final.state.value, msgspec.json.encode(outcome))
        else:
            await self.store.remove(job_id)
        del self._live[job_id]
        live.wake()
        live.finished.set()

    def _final(self, job: Job, result: JobResult | None, error: RequestError) -> Job:
        now = self._clock()
        if result is not None:
            return job.to(
                JobState.SUCCEEDED,
                finished_at=now,
                result=result.answer,
                output_tokens=result.output_tokens,
                batch_size=result.batch_size,
            )
        state = JobState.FAILED
        if isinstance(error, Cancelled):
            state = JobState.CANCELLED
        elif isinstance(error, DeadlineExceeded):
            state = JobState.EXPIRED
        described = {
            "message": error.message,
            "type": error.type,
            "param": error.param,
            "code": error.code,
        }
        return job.to(state, finished_at=now, error=described)

    async def _changed(self, live: _Live, job: Job, kind: str, data: bytes) -> None:
        live.job = job
        await self.store.update(job)
        await self.store.append(job.id, kind, data)
        live.wake()

    @property
    def now(self) -> float:
        """Unix seconds."""
        return self._clock()


class _Progress:
    """The callbacks of one running job."""

    def __init__(
        self, runner: JobRunner, live: _Live, task_status: trio.TaskStatus[RequestError | None]
    ) -> None:
        self._runner = runner
        self._live = live
        self._task_status = task_status

    async def admitted(self) -> None:
        """See :class:`Progress`."""
        self._live.admitted = True
        await self._runner._changed(self._live, self._live.job, "queued", b"{}")
        self._task_status.started(None)

    async def started(self) -> None:
        """See :class:`Progress`."""
        job = self._live.job.to(JobState.RUNNING, started_at=self._runner.now)
        await self._runner._changed(self._live, job, "started", b"{}")

    async def event(self, kind: str, data: bytes, output_tokens: int) -> None:
        """See :class:`Progress`."""
        job = replace(self._live.job, output_tokens=output_tokens)
        await self._runner._changed(self._live, job, kind, data)
