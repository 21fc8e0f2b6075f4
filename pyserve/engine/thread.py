"""The step loop on a thread of its own, running freely, at most two hand-overs ahead of Trio.

Mutable state shared between the two threads, all of it under one condition: the inbox of commands, the
count of hand-overs not yet consumed, and the request to stop. Nothing else crosses: the loop, its
scheduler and its back-end belong to the thread while it lives. One ``run_sync_soon`` a step, never one a
token; and never a daemon thread: torch aborts the process when a daemon dies inside it.

On the Trio side a hand-over is delivered a slice at a time, with a turn of Trio's loop in between: a step
wakes as many tasks as it has sequences, and all in one turn they would hold up timers and sockets.
"""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable

import trio

from pyserve import _C
from pyserve.core.events import Event
from pyserve.engine.commands import Command, Handover
from pyserve.engine.driver import EngineCrashed
from pyserve.engine.loop import StepLoop

MAX_PENDING_HANDOVERS = 2
SLICE_EVENTS = 16  # delivered in one turn of Trio's loop


class ThreadDriver:
    """See :class:`~pyserve.engine.driver.Driver`. Time is ``time.monotonic()``."""

    # Set by run(), read by both threads, never changed afterwards.
    _token: trio.lowlevel.TrioToken
    _deliver: Callable[[Handover], None]
    _failed: trio.Event

    def __init__(self, loop: StepLoop) -> None:
        self._loop = loop
        self._changed = threading.Condition()
        self._inbox: list[Command] = []
        self._pending = 0
        self._arrived: deque[Handover] = deque()  # Trio thread only: what is left to deliver
        self._stopping = False
        self._error: BaseException | None = None

    @property
    def pending_handovers(self) -> int:
        """0 to :data:`MAX_PENDING_HANDOVERS`."""
        return self._pending

    def now(self) -> float:
        """The monotonic clock."""
        return time.monotonic()

    def post(self, commands: Iterable[Command]) -> None:
        """Queues for the next boundary and wakes the thread."""
        with self._changed:
            self._inbox.extend(commands)
            self._changed.notify()

    async def run(
        self,
        deliver: Callable[[Handover], None],
        *,
        task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED,
    ) -> None:
        """Starts the thread, waits until it fails or we are cancelled, and joins it."""
        self._token = trio.lowlevel.current_trio_token()
        self._deliver = deliver
        self._failed = trio.Event()
        thread = threading.Thread(target=self._main, name="pyserve-engine")
        thread.start()
        try:
            task_status.started()
            await self._failed.wait()
        finally:
            with self._changed:
                self._stopping = True
                self._changed.notify()
            with trio.CancelScope(shield=True):
                await trio.to_thread.run_sync(thread.join)
        raise EngineCrashed("the engine's step loop failed") from self._error

    # On the engine thread.

    def _main(self) -> None:
        with contextlib.suppress(trio.RunFinishedError):  # Trio is gone: nobody is left to tell
            try:
                self._run()
            except trio.RunFinishedError:
                raise
            except BaseException as error:
                self._error = error
                self._token.run_sync_soon(self._failed.set)

    def _run(self) -> None:
        idle_until_s = math.inf
        while (commands := self._wait(idle_until_s)) is not None:
            with _C.Range("step"):
                idle_until_s = self._step(commands)

    def _step(self, commands: list[Command]) -> float:
        """One turn; returns until when there is nothing more to do."""
        boundary = self._loop.begin(commands, self.now())
        events = boundary.events
        if boundary.plan is not None:
            started_s = self.now()
            outcome = self._loop.compute(boundary.plan)
            now = self.now()
            events += self._loop.complete(boundary.plan, outcome, now, now - started_s)
        with _C.Range("hand_over"):
            self._hand_over(events)
        return boundary.idle_until_s

    def _wait(self, idle_until_s: float) -> list[Command] | None:
        """Blocks while idle or too far ahead; returns the inbox, or None to stop."""
        with self._changed:
            while not self._stopping:
                if self._pending >= MAX_PENDING_HANDOVERS:
                    self._changed.wait()
                    continue
                remaining_s = idle_until_s - self.now()
                if self._inbox or remaining_s <= 0:
                    commands, self._inbox = self._inbox, []
                    return commands
                self._changed.wait(min(remaining_s, threading.TIMEOUT_MAX))
            return None

    def _hand_over(self, events: tuple[Event, ...]) -> None:
        if not events:
            return
        with self._changed:
            self._pending += 1
        self._token.run_sync_soon(self._consume, Handover(self.now(), events))

    # Back on the Trio thread. An exception that left here would take down Trio itself, so none may.

    def _consume(self, handover: Handover) -> None:
        self._arrived.append(handover)
        if len(self._arrived) == 1:  # else a slice of an earlier one is on its way
            self._deliver_slice()

    def _deliver_slice(self) -> None:
        handover = self._arrived.popleft()
        events, rest = handover.events[:SLICE_EVENTS], handover.events[SLICE_EVENTS:]
        try:
            self._deliver(Handover(handover.at_s, events))
        except BaseException as error:
            self._error = error
            self._failed.set()
        if rest:
            self._arrived.appendleft(Handover(handover.at_s, rest))
        else:
            with self._changed:
                self._pending -= 1
                self._changed.notify()
        if self._arrived:
            with contextlib.suppress(trio.RunFinishedError):  # nobody is left to deliver to
                self._token.run_sync_soon(self._deliver_slice)
