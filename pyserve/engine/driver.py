"""Who turns the crank of the step loop: the interface that the thread and the inline driver share."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Protocol

import trio

from pyserve.engine.commands import Command, Handover
from pyserve.errors import PyserveError


class EngineCrashed(PyserveError):
    """The step loop itself failed (not a request): the engine has stopped, ``__cause__`` says why."""


class Driver(Protocol):
    """Runs a :class:`~pyserve.engine.loop.StepLoop` until cancelled, and carries messages both ways."""

    def now(self) -> float:
        """The engine's clock, seconds; the same one that deadlines are given on. Any thread."""

    def post(self, commands: Iterable[Command]) -> None:
        """Queues commands for the next step boundary, in order, and wakes an idle loop. Never blocks.

        The queue is bounded by what the engine admits: a submit, at most ``n`` stops and a cancel for each
        open request. Trio thread only.
        """

    async def run(
        self,
        deliver: Callable[[Handover], None],
        *,
        task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED,
    ) -> None:
        """Steps until cancelled; gives every hand-over that has events to ``deliver`` on the Trio thread.

        Raises :class:`EngineCrashed` when the loop fails. When it returns or raises, no step is running.
        """

    @property
    def pending_handovers(self) -> int:
        """How many hand-overs Trio has not consumed yet."""
