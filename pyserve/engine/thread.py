"""The step loop on a thread of its own, running freely, at most two hand-overs ahead of Trio.

Mutable state shared between the two threads, all of it under one condition: the inbox of commands, the
count of hand-overs not yet consumed, and the request to stop. Nothing else crosses: the loop, its
scheduler and its back-end belong to the thread while it lives. Trio is woken once a step, never once a
token; and never a daemon thread: torch aborts the process when a daemon dies inside it.

Between two steps the processor idles, so only what the next step needs is done there. What the last one
gave is handed over when the next has been planned, by a call that keeps the interpreter: Trio wakes up and
gets it when the forward pass lets go of it, not before.

On the Trio side a hand-over is delivered a slice at a time, with a turn of Trio's loop in between: a step
wakes as many tasks as it has sequences, and all in one turn they would hold up timers and sockets.
"""

from __future__ import annotations

import contextlib
import math
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import trio

from pyserve import _C
from pyserve.core.events import Event
from pyserve.core.step import Plan
from pyserve.engine.commands import Command, Handover
from pyserve.engine.driver import EngineCrashed
from pyserve.engine.loop import StepLoop
from pyserve.engine.runner import StepResult

MAX_PENDING_HANDOVERS = 2
SLICE_EVENTS = 16  # delivered in one turn of Trio's loop


@dataclass(slots=True)
class _Ended:
    """A completed step: all of it that the next one did not have to wait for."""

    plan: Plan
    result: StepResult
    events: tuple[Event, ...]
    at_s: float
    seconds: float


class ThreadDriver:
    """See :class:`~pyserve.engine.driver.Driver`. Time is ``time.monotonic()``."""

    _wake_fd: int  # set by run(), never changed afterwards

    def __init__(self, loop: StepLoop) -> None:
        self._loop = loop
        self._changed = threading.Condition()
        self._inbox: list[Command] = []
        self._pending = 0
        self._arrived: deque[Handover] = deque()  # appended to by the thread, popped by Trio
        self._ended: _Ended | None = None  # engine thread only: a step not handed over yet
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
        reader, writer = socket.socketpair()
        with reader, writer:
            reader.setblocking(False)
            writer.setblocking(False)
            self._wake_fd = writer.fileno()
            thread = threading.Thread(target=self._main, name="pyserve-engine")
            thread.start()
            try:
                task_status.started()
                await self._deliver_all(reader, deliver)
            except Exception as error:
                self._error = error
            finally:
                with self._changed:
                    self._stopping = True
                    self._changed.notify()
                with trio.CancelScope(shield=True):
                    await trio.to_thread.run_sync(thread.join)
        raise EngineCrashed("the engine's step loop failed") from self._error

    async def _deliver_all(
        self, reader: socket.socket, deliver: Callable[[Handover], None]
    ) -> None:
        """Delivers until the thread has failed and everything from before that is delivered."""
        while self._error is None or self._arrived:
            if not self._arrived:
                await trio.lowlevel.wait_readable(reader)
                with contextlib.suppress(BlockingIOError):
                    reader.recv(4096)
            while self._arrived:
                handover = self._arrived.popleft()
                for start in range(0, len(handover.events), SLICE_EVENTS):
                    events = handover.events[start : start + SLICE_EVENTS]
                    deliver(Handover(handover.at_s, events))
                    await trio.lowlevel.checkpoint()
                with self._changed:
                    self._pending -= 1
                    self._changed.notify()

    # On the engine thread.

    def _main(self) -> None:
        try:
            self._run()
        except BaseException as error:
            self._error = error
            _C.wake(self._wake_fd)

    def _run(self) -> None:
        idle_until_s = math.inf
        while (commands := self._wait(idle_until_s)) is not None:
            with _C.Range("step"):
                idle_until_s = self._step(commands)

    def _step(self, commands: list[Command]) -> float:
        """One turn; returns until when there is nothing more to do."""
        now = self.now()
        boundary = self._loop.begin(commands, now)
        plan = boundary.plan
        events = (*self._record(), *boundary.events)
        if plan is None:
            self._loop.publish(now)
        self._hand_over(events, now)
        if plan is not None:
            started_s = self.now()
            result = self._loop.compute(plan)
            now = self.now()
            events = self._loop.complete(plan, result, now)
            self._ended = _Ended(plan, result, events, now, now - started_s)
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

    def _record(self) -> tuple[Event, ...]:
        """What the last step gave, if it has not been handed over yet; the books are kept now too."""
        ended, self._ended = self._ended, None
        if ended is None:
            return ()
        self._loop.record(ended.plan, ended.result, ended.at_s, ended.seconds)
        return ended.events

    def _hand_over(self, events: tuple[Event, ...], at_s: float) -> None:
        if not events:
            return
        with _C.Range("hand_over"):
            with self._changed:
                self._pending += 1
            self._arrived.append(Handover(at_s, events))
            _C.wake(self._wake_fd)
