"""The step loop as a Trio task: for scripted back-ends, load models and tests under a mock clock.

A step computes synchronously (a scripted one takes microseconds) and then *lasts* as long as the back-end
says it would have, on Trio's clock, so that requests arrive, leave and expire while it runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import trio

from pyserve.backends.base import SimulatedBackend
from pyserve.core.events import Event
from pyserve.core.step import Plan
from pyserve.engine.commands import Command, Handover
from pyserve.engine.driver import EngineCrashed
from pyserve.engine.loop import StepLoop


class InlineDriver:
    """See :class:`~pyserve.engine.driver.Driver`. Time is ``trio.current_time()``."""

    def __init__(self, loop: StepLoop) -> None:
        self._loop = loop
        self._inbox: list[Command] = []
        self._wakeup = trio.Event()

    @property
    def pending_handovers(self) -> int:
        """Always 0: hand-overs are delivered in place."""
        return 0

    def now(self) -> float:
        """Trio's clock."""
        return trio.current_time()

    def post(self, commands: Iterable[Command]) -> None:
        """Queues for the next boundary."""
        self._inbox.extend(commands)
        self._wakeup.set()

    async def run(
        self,
        deliver: Callable[[Handover], None],
        *,
        task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED,
    ) -> None:
        """Steps until cancelled."""
        task_status.started()
        while True:
            await trio.lowlevel.checkpoint()
            try:
                await self._step(deliver)
            except Exception as error:
                raise EngineCrashed("the engine's step loop failed") from error

    async def _step(self, deliver: Callable[[Handover], None]) -> None:
        self._wakeup = trio.Event()
        commands, self._inbox = self._inbox, []
        boundary = self._loop.begin(commands, self.now())
        events = boundary.events
        if boundary.plan is not None:
            events += await self._compute(boundary.plan)
        else:
            self._loop.publish(self.now())
        if events:
            deliver(Handover(self.now(), events))
        if boundary.plan is None:
            with trio.move_on_at(boundary.idle_until_s):
                await self._wakeup.wait()

    async def _compute(self, plan: Plan) -> tuple[Event, ...]:
        started_s = self.now()
        outcome = self._loop.compute(plan)
        backend = self._loop.backend
        if isinstance(backend, SimulatedBackend):
            await trio.sleep(backend.take_step_seconds())
        now = self.now()
        events = self._loop.complete(plan, outcome, now)
        self._loop.record(plan, outcome, now, now - started_s)
        return events
