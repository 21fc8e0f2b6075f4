"""Jobs on the wire: submit now, collect later.

``POST /submit`` is the same thing as ``POST /v1/jobs``. A job belongs to the API key that submitted it;
others see a 404.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable, Mapping

import msgspec
from quart import Blueprint, Response, request

from pyserve.errors import InvalidRequest
from pyserve.http.asgi import Endpoint
from pyserve.http.context import Receive, RequestContext, Responder, new_id
from pyserve.http.errors import NotFound
from pyserve.http.generate import Delta, generate
from pyserve.http.idempotency import Idempotency
from pyserve.http.limits import KeyLimits
from pyserve.http.prepare import prepare_job
from pyserve.http.render import Collector
from pyserve.http.routes.common import context, json, query_integer, query_number
from pyserve.http.schema import JobRequest
from pyserve.http.shapes import JobList, JobView
from pyserve.http.state import ServerState
from pyserve.http.validate import parse
from pyserve.jobs.job import Job, JobState
from pyserve.jobs.runner import JobResult, JobRunner, Progress

_HEARTBEAT_S = 15.0
_MAX_WAIT_S = 300.0


class GenerationExecutor:
    """Runs a job as the generation that its body asks for."""

    def __init__(
        self, state: ServerState, limits: KeyLimits, clock: Callable[[], float] = time.time
    ) -> None:
        self._state = state
        self._limits = limits
        self._clock = clock  # the one that jobs are dated on

    async def run(self, job: Job, progress: Progress) -> JobResult:
        """See :class:`~pyserve.jobs.runner.Executor`."""
        key = self._state.keys.named(job.owner)
        body, _ = parse(job.request, JobRequest)
        age_s = max(0.0, self._clock() - job.created_at)
        arrival_s = self._state.engine.now() - age_s
        work, renderer = await prepare_job(self._state, key, body, arrival_s=arrival_s)
        collected = Collector(sum(spec.n for spec in work.specs))
        tokens = 0

        async def emit(deltas: list[Delta]) -> None:
            nonlocal tokens
            collected.add(deltas)
            tokens += sum(len(delta.tokens) for delta in deltas)
            for delta in deltas:
                news = {
                    "index": delta.index,
                    "text": delta.text,
                    "finish_reason": delta.finish_reason,
                }
                await progress.event("delta", msgspec.json.encode(news), tokens)

        with self._limits.hold(key, work.most_tokens) as lease:
            outcome = await generate(
                self._state, work, emit, admitted=progress.admitted, started=progress.started
            )
            lease.used(outcome.usage.total_tokens)
        answer = msgspec.to_builtins(renderer.whole(collected, outcome))
        return JobResult(answer, outcome.usage.completion_tokens, outcome.timings.batch_size)


class JobRoutes:
    """The jobs family: two raw endpoints that make work, and a blueprint for the rest."""

    def __init__(self, state: ServerState, runner: JobRunner, idempotency: Idempotency) -> None:
        self._state = state
        self._runner = runner
        self._idempotency = idempotency

    def endpoints(self) -> Mapping[str, Endpoint]:
        """The POST endpoints by path."""
        return {"/submit": self._submit, "/v1/jobs": self._submit}

    async def _submit(
        self, context: RequestContext, _receive: Receive, responder: Responder
    ) -> None:
        await self._idempotency.once(context, responder, self._accept)

    async def _accept(self, context: RequestContext, responder: Responder) -> None:
        body, ignored = parse(context.body, JobRequest)
        context.ignored(ignored)
        job = Job(
            id=new_id("job"),
            owner=context.key.name,
            request=context.body,
            priority=body.priority or 0,
            created_at=self._runner.now,
            metadata=body.metadata,
        )
        await self._runner.submit(job)
        context.log["job"] = job.id
        location = f"/v1/jobs/{job.id}".encode("ascii")
        answer = msgspec.json.encode(await self._view(job))
        await responder.json(202, answer, [(b"location", location)])

    def blueprint(self) -> Blueprint:
        """Everything but submitting."""
        routes = Blueprint("jobs", __name__)

        @routes.get("/v1/jobs")
        async def list_jobs() -> Response:
            return json(await self._page())

        @routes.get("/v1/jobs/<job_id>")
        async def get_job(job_id: str) -> Response:
            await self._own(job_id)
            wait_s = query_number("wait", 0.0, 0.0, _MAX_WAIT_S)
            await self._runner.wait(job_id, wait_s)
            return json(await self._view(await self._own(job_id)))

        @routes.delete("/v1/jobs/<job_id>")
        async def cancel_job(job_id: str) -> Response:
            await self._own(job_id)
            await self._runner.cancel(job_id)
            return json(await self._view(await self._own(job_id)))

        @routes.get("/v1/jobs/<job_id>/events")
        async def job_events(job_id: str) -> Response:
            await self._own(job_id)
            after = _last_event_id(request.headers.get("Last-Event-ID"))
            response = Response(self._events(job_id, after), content_type="text/event-stream")
            response.timeout = None
            response.headers["Cache-Control"] = "no-cache"
            return response

        return routes

    async def _own(self, job_id: str) -> Job:
        job = await self._runner.store.get(job_id)
        if job is None or job.owner != context().key.name:
            raise NotFound(f"no such job: {job_id}")
        return job

    async def _events(self, job_id: str, after: int) -> AsyncIterator[bytes]:
        """Server-sent events with the event's number as id; a comment keeps a quiet stream alive."""
        over = False
        while not over:
            events, over = await self._runner.next_events(job_id, after, _HEARTBEAT_S)
            out = [
                b"id: %d\nevent: %b\ndata: %b\n\n" % (e.number, e.kind.encode(), e.data)
                for e in events
            ]
            after = events[-1].number if events else after
            if out or not over:
                yield b"".join(out) or b": waiting\n\n"

    async def _page(self) -> JobList:
        limit = query_integer("limit", 20, 1, 100)
        after = request.args.get("after")
        cursor = None if after is None else await self._runner.store.get(after)
        if after is not None and (cursor is None or cursor.owner != context().key.name):
            raise InvalidRequest("no such job, or not any more", param="after")
        name = request.args.get("status") or request.args.get("state")
        if name is not None and name not in list(JobState):
            raise InvalidRequest(f"status must be one of {', '.join(JobState)}", param="status")
        jobs, more = await self._runner.store.page(
            context().key.name,
            state=None if name is None else JobState(name),
            after=after,
            limit=limit,
        )
        views = [await self._view(job, positioned=False) for job in jobs]
        first, last = (views[0].id, views[-1].id) if views else (None, None)
        return JobList(data=views, has_more=more, first_id=first, last_id=last)

    async def _view(self, job: Job, *, positioned: bool = True) -> JobView:
        queued = positioned and job.state is JobState.QUEUED
        return JobView(
            request_id=job.id,
            id=job.id,
            status=job.state.value,
            priority=job.priority,
            position=await self._runner.store.position(job) if queued else None,
            created_at=job.created_at,
            started_at=job.started_at,
            finished_at=job.finished_at,
            output_tokens=job.output_tokens,
            batch_size=job.batch_size,
            metadata=None if job.metadata is None else dict(job.metadata),
            result=None if job.result is None else dict(job.result),
            error=None if job.error is None else dict(job.error),
        )


def _last_event_id(value: str | None) -> int:
    if value is None:
        return 0
    if not (value.isascii() and value.isdigit() and len(value) <= 12):
        raise InvalidRequest("Last-Event-ID must be a number", param="Last-Event-ID")
    return int(value)
