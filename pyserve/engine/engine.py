"""The engine's public face: open it, ask it for requests, read its statistics.

A request is a scope. ``async with engine.request(spec) as stream`` admits it, or raises what the client
should be told; leaving the scope, for whatever reason, gives back all that it holds at the next step
boundary. Everything here runs on the Trio thread; the step loop may run on a thread of its own.
"""

from __future__ import annotations

import gc
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from typing import Literal

import trio

from pyserve.backends.base import Backend, ModelInfo
from pyserve.core.admission import Admission, AdmissionStatistics, Load
from pyserve.core.config import SchedulerConfig
from pyserve.core.events import Failed
from pyserve.core.spec import RequestSpec
from pyserve.engine.commands import Cancel, Handover, StopChoice, Submit
from pyserve.engine.driver import Driver, EngineCrashed
from pyserve.engine.inline import InlineDriver
from pyserve.engine.lag import LoopLag
from pyserve.engine.loop import LoopStatistics, StepLoop
from pyserve.engine.register import Entry, Register
from pyserve.engine.stream import RequestMetrics, RequestStream
from pyserve.engine.thread import ThreadDriver
from pyserve.errors import Cancelled, InvalidRequest, RequestError, Unavailable

__all__ = [
    "Engine",
    "EngineConfig",
    "EngineStatistics",
    "RequestMetrics",
    "RequestStream",
    "open_engine",
]


_ANSWER_S = 0.1  # from an owner's leaving until its client has the answer, after a crash


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """How an engine is set up; what a step may hold is in ``scheduler`` (which, where it names no end-of-text
    tokens, gets the model's).

    ``prefix_cache``: keep the blocks of computed prompts and outputs for requests that begin the same.
    ``intake_capacity``: requests that may wait for the intake task (it never computes, so a handful).
    ``stall_s``: not ready when work is at hand and no step has ended for so long. ``lag_interval_s``: how
    often the Trio loop's lag is sampled (None: never; a mock clock wants never). ``freeze_gc``: move what
    is loaded out of the garbage collector's sight, which otherwise pauses up to 100 ms. ``check``: verify
    every invariant after every step (tests).
    """

    scheduler: SchedulerConfig
    prefix_cache: bool = True
    intake_capacity: int = 64
    stall_s: float = 60.0
    lag_interval_s: float | None = 0.02
    freeze_gc: bool = True
    crash_grace_s: float = 1.0
    check: bool = False


@dataclass(frozen=True, slots=True)
class EngineStatistics:
    """A snapshot. ``loop`` is as of the last step boundary, the rest as of now; times in seconds.

    ``open_requests`` are held by the engine for whatever reason; of them ``unstarted_requests`` (with
    ``unstarted_tokens`` prompt tokens) have not been scheduled yet and ``closing_requests`` have lost
    their owner and wait for the boundary. Counters only grow.
    """

    open_requests: int
    unstarted_requests: int
    unstarted_tokens: int
    closing_requests: int
    accepted_total: int
    rejected_total: int
    finished_total: int
    failed_total: int
    abandoned_total: int
    prompt_tokens_total: int
    cached_tokens_total: int
    output_tokens_total: int
    pending_handovers: int
    loop_lag_p50_s: float
    loop_lag_p99_s: float
    admission: AdmissionStatistics
    loop: LoopStatistics


class Engine:
    """A running engine; made by :func:`open_engine`. Everything here belongs to the Trio thread."""

    def __init__(self, loop: StepLoop, driver: Driver, config: EngineConfig) -> None:
        self._loop = loop
        self._driver = driver
        self._config = config
        self._admission = Admission(config.scheduler)
        self._lag = LoopLag(config.lag_interval_s or 0.02)
        self._register = Register()
        self._draining = False
        self._stopped: RequestError | None = None
        self._busy_since_s = driver.now()
        self._owners = 0
        self._no_owners = trio.Event()
        self._submissions, self._intake = trio.open_memory_channel[Entry](config.intake_capacity)

    @property
    def info(self) -> ModelInfo:
        """What the back-end has loaded."""
        return self._loop.backend.info

    @property
    def config(self) -> EngineConfig:
        """What it was opened with."""
        return self._config

    @property
    def draining(self) -> bool:
        """True from :meth:`begin_drain` on: nothing new is admitted."""
        return self._draining

    @property
    def ready(self) -> bool:
        """True while it admits requests and its steps make progress."""
        return not self._draining and self._stopped is None and not self._stalled()

    def now(self) -> float:
        """The engine's clock in seconds, the one that ``RequestSpec.deadline_s`` is on."""
        return self._driver.now()

    def load(self) -> Load:
        """What admission looks at: what waits and runs, and how fast it goes."""
        scheduler = self._loop.statistics.scheduler
        speeds = scheduler.steptime
        return Load(
            waiting_requests=self._register.unstarted_requests,
            waiting_tokens=self._register.unstarted_tokens,
            prompt_token_s=speeds.prompt_token_s(
                scheduler.decode_sequences, self._config.scheduler.max_prefill_s
            ),
            slot_s=scheduler.slot_s,
        )

    def statistics(self) -> EngineStatistics:
        """A snapshot of everything there is to know; cheap enough for every scrape."""
        register, count = self._register, self._register.count
        return EngineStatistics(
            open_requests=len(register),
            unstarted_requests=register.unstarted_requests,
            unstarted_tokens=register.unstarted_tokens,
            closing_requests=register.closing,
            accepted_total=count.accepted,
            rejected_total=count.rejected,
            finished_total=count.finished,
            failed_total=count.failed,
            abandoned_total=count.abandoned,
            prompt_tokens_total=count.prompt_tokens,
            cached_tokens_total=count.cached_tokens,
            output_tokens_total=count.output_tokens,
            pending_handovers=self._driver.pending_handovers,
            loop_lag_p50_s=self._lag.quantile(0.5),
            loop_lag_p99_s=self._lag.quantile(0.99),
            admission=self._admission.statistics(),
            loop=self._loop.statistics,
        )

    @asynccontextmanager
    async def request(self, spec: RequestSpec) -> AsyncIterator[RequestStream]:
        """Admits one request and yields its stream; leaving the scope cancels whatever is left of it.

        Raises, before anything is held: :class:`~pyserve.errors.Unavailable` while draining or stopped,
        :class:`~pyserve.errors.InvalidRequest` for an id that is in use, and what
        :meth:`~pyserve.core.admission.Admission.admit` raises.
        """
        entry = self._admit(spec)
        self._owners += 1
        try:
            with suppress(trio.BrokenResourceError, trio.ClosedResourceError):
                await self._submissions.send(entry)  # fails once stopped: the stream knows by then
            yield entry.stream
        finally:
            self._owners -= 1
            self._no_owners.set()
            self._leave(entry)

    def begin_drain(self) -> None:
        """Admits nothing from now on; what is open goes on. Idempotent."""
        self._draining = True

    async def drained(self, timeout_s: float) -> bool:
        """Waits until nothing is open any more; False where ``timeout_s`` was not enough."""
        with trio.move_on_after(timeout_s):
            while self._register:
                await self._register.empty.wait()
        return not self._register

    def cancel_all(self, error: RequestError) -> None:
        """Ends every open request with ``error`` at the next step boundary."""
        for entry in self._register:
            if entry.submitted:
                self._driver.post([Cancel(entry.stream.request_id, error)])
            else:
                self._register.route(Failed(entry.stream.request_id, error), self.now())

    # What open_engine() runs.

    async def run_driver(
        self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED
    ) -> None:
        """Steps until cancelled. A crash fails every stream, lets the owners say so, and is raised."""
        try:
            await self._driver.run(self._deliver, task_status=task_status)
        except EngineCrashed:
            self.stop(Unavailable("the engine has stopped after an internal error"))
            # Shielded: the end of the body must not take the place of the crash.
            with trio.move_on_after(self._config.crash_grace_s, shield=True):
                while self._owners:
                    self._no_owners = trio.Event()
                    await self._no_owners.wait()
                await trio.sleep(_ANSWER_S)
            raise

    async def run_intake(self) -> None:
        """Passes submissions on to the step loop, all that are there at once, until :meth:`stop`."""
        async for first in self._intake:
            entries = [first]
            with suppress(trio.WouldBlock, trio.EndOfChannel):
                while True:
                    entries.append(self._intake.receive_nowait())
            fresh = [entry for entry in entries if not entry.stream.ended and not entry.closing]
            for entry in fresh:
                entry.submitted = True
            self._driver.post(Submit(e.stream.spec, e.stream.arrival_s) for e in fresh)

    async def run_lag(self) -> None:
        """Samples how late this loop's timers fire, until cancelled."""
        await self._lag.run()

    def stop(self, error: RequestError) -> None:
        """Ends every stream with ``error`` and admits nothing any more. The driver must have ended or be
        about to. Idempotent.
        """
        if self._stopped is not None:
            return
        self._stopped = error
        self._submissions.close()
        for entry in self._register:
            self._register.route(Failed(entry.stream.request_id, error), self.now())

    # Between a request's owner and the register.

    def _admit(self, spec: RequestSpec) -> Entry:
        try:
            if self._stopped is not None:
                raise Unavailable(self._stopped.message, retry_after_s=5.0)
            if self._draining:
                raise Unavailable("the server is shutting down", retry_after_s=5.0)
            if spec.request_id in self._register:
                raise InvalidRequest(
                    f"request id {spec.request_id!r} is in use", param="request_id"
                )
            now = self.now()
            self._admission.admit(spec, now, self.load())
        except RequestError:
            self._register.count.rejected += 1
            raise
        if not self._register:
            self._busy_since_s = now
        return self._register.add(RequestStream(spec, now, self._stop_choice))

    def _leave(self, entry: Entry) -> None:
        """The owner has left: cancels, unless the request has ended."""
        if entry.stream.ended:
            return
        entry.closing = True
        if entry.submitted:
            self._driver.post([Cancel(entry.stream.request_id)])
        else:
            self._register.route(
                Failed(entry.stream.request_id, Cancelled("cancelled")), self.now()
            )

    def _deliver(self, handover: Handover) -> None:
        if self._stopped is None:
            for event in handover.events:
                self._register.route(event, handover.at_s)

    def _stop_choice(self, request_id: str, index: int) -> None:
        self._driver.post([StopChoice(request_id, index)])

    def _stalled(self) -> bool:
        if not self._register:
            return False
        last_s = max(self._busy_since_s, self._loop.statistics.last_boundary_s)
        return self.now() - last_s > self._config.stall_s


@asynccontextmanager
async def open_engine(
    backend: Backend, config: EngineConfig, *, driver: Literal["thread", "inline"] = "thread"
) -> AsyncIterator[Engine]:
    """Allocates the KV cache, starts the step loop and yields the engine; owns ``backend`` from now on.

    ``driver``: "thread" for real models; "inline" steps in a Trio task, for scripted back-ends and mock
    clocks. On the way out every stream still open gets an error, the running step ends, the thread is
    joined and the back-end closed. A crash of the loop cancels the body and is raised out of here, in an
    exception group. Raises what ``backend.allocate`` raises.
    """
    try:
        if driver == "thread":
            loop = await trio.to_thread.run_sync(_make_loop, backend, config)
        else:
            loop = _make_loop(backend, config)
        turn: Driver = ThreadDriver(loop) if driver == "thread" else InlineDriver(loop)
        engine = Engine(loop, turn, config)
        async with trio.open_nursery() as nursery:
            try:
                await nursery.start(engine.run_driver)
                nursery.start_soon(engine.run_intake)
                if config.lag_interval_s is not None:
                    nursery.start_soon(engine.run_lag)
                with _frozen_gc(config.freeze_gc):
                    yield engine
            finally:
                engine.stop(Unavailable("the server is shutting down"))
                nursery.cancel_scope.cancel()
    finally:
        backend.close()


def _make_loop(backend: Backend, config: EngineConfig) -> StepLoop:
    return StepLoop(backend, config.scheduler, prefix_cache=config.prefix_cache, check=config.check)


@contextmanager
def _frozen_gc(wanted: bool) -> Iterator[None]:
    if wanted:
        gc.collect()
        gc.freeze()
    try:
        yield
    finally:
        if wanted:
            gc.unfreeze()
