"""The step loop, one step at a time: plan, compute, complete. Synchronous; a driver turns the crank.

It owns the scheduler, the block pool, the sampler's state and the back-end, and everything that a step
changes. Only ``statistics`` may be read from elsewhere: it is replaced, never changed.
"""

from __future__ import annotations

import logging
import math
from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import ClassVar

from pyserve import _C
from pyserve.backends.base import Backend
from pyserve.core.config import SchedulerConfig
from pyserve.core.events import Event, Failed
from pyserve.core.scheduler import Scheduler, SchedulerStatistics
from pyserve.core.step import Plan
from pyserve.engine.commands import Cancel, Command, StopChoice, Submit
from pyserve.engine.runner import StepResult, StepRunner
from pyserve.errors import RequestError, StepFailed

log = logging.getLogger(__name__)


PUBLISH_S = 0.05  # while steps follow each other, statistics are no older than this and a step


@dataclass(frozen=True, slots=True)
class StepTokens:
    """A histogram: ``counts[i]`` steps held at most ``BOUNDS[i]`` tokens and more than the bound before."""

    BOUNDS: ClassVar[tuple[float, ...]] = (*(2.0**power for power in range(15)), math.inf)
    counts: tuple[int, ...] = (0,) * 16
    total: int = 0


@dataclass(frozen=True, slots=True)
class LoopStatistics:
    """As of a step boundary, ``last_boundary_s`` on the engine's clock: the last one where nothing runs,
    else one of the last :data:`PUBLISH_S`.

    ``forwards`` counts attempts, more than ``steps`` where steps were run by halves;
    ``failed_rows`` sequences that failed alone. ``step_tokens``: how many tokens the steps held, all of
    them. ``last_step_s`` is how long the last step took.
    """

    forwards: int
    failed_rows: int
    step_tokens: StepTokens
    last_step_s: float
    last_boundary_s: float
    scheduler: SchedulerStatistics

    @property
    def steps(self) -> int:
        """Steps completed since the start."""
        return self.scheduler.steps_total

    @property
    def pool(self) -> _C.PoolStatistics:
        """The block pool's."""
        return self.scheduler.pool


@dataclass(frozen=True, slots=True)
class Boundary:
    """What to do next: compute ``plan``; or, where there is none, wait for commands or ``idle_until_s``."""

    plan: Plan | None
    events: tuple[Event, ...]
    idle_until_s: float


class StepLoop:
    """Made by whoever opens the engine; then belongs to its driver."""

    def __init__(
        self,
        backend: Backend,
        config: SchedulerConfig,
        *,
        prefix_cache: bool = True,
        check: bool = False,
    ) -> None:
        if not config.eos_token_ids:
            config = replace(config, eos_token_ids=backend.info.eos_token_ids)
        backend.allocate(config.num_blocks, config.block_size)
        self.backend = backend
        pool = _C.BlockPool(config.num_blocks, config.block_size, prefix_cache)
        sampler = _C.SamplerState()
        self.scheduler = Scheduler(config, pool, sampler, check=check)
        blocks_per_sequence = -(-config.context_length // config.block_size)
        buffers = _C.StepBuffers(
            config.max_batch_tokens, config.max_batch_requests, blocks_per_sequence
        )
        self._runner = StepRunner(backend, pool, sampler, buffers)
        self._publish_s = 0.0 if check else PUBLISH_S
        self._forwards = self._failed_rows = self._tokens = 0
        self._token_counts = [0] * len(StepTokens.BOUNDS)
        self._last_step_s = 0.0
        self.statistics = self._snapshot(-math.inf)

    def begin(self, commands: Iterable[Command], now: float) -> Boundary:
        """A step boundary: applies commands in order, releases what has ended, plans the next step."""
        refused: list[Event] = []
        for command in commands:
            match command:
                case Submit(spec, arrival_s):
                    try:
                        self.scheduler.submit(spec, arrival_s)
                    except RequestError as error:
                        refused.append(Failed(spec.request_id, error))
                case Cancel(request_id, error):
                    self.scheduler.cancel(request_id, error)
                case StopChoice(request_id, index):
                    self.scheduler.stop_choice(request_id, index)
        with _C.Range("plan"):
            plan = self.scheduler.plan(now)
        events = (*refused, *plan.events)
        if plan:
            return Boundary(plan, events, now)
        if plan.idle_until is None and not self.scheduler.idle:
            raise RuntimeError(
                "requests are open, but there is neither a step to run nor a time to wait for"
            )
        return Boundary(None, events, math.inf if plan.idle_until is None else plan.idle_until)

    def compute(self, plan: Plan) -> StepResult:
        """Runs the planned step on the back-end: the long part, for which the GIL is released."""
        return self._runner.run(plan.rows, plan.takes, plan.embeds)

    def complete(self, plan: Plan, result: StepResult, now: float) -> tuple[Event, ...]:
        """Files what was computed and releases what has finished."""
        with _C.Range("route"):
            events = self.scheduler.complete(plan, result.outcome, now)
        if result.failed:
            _log_failures(events)
        return events

    def record(self, plan: Plan, result: StepResult, now: float, seconds: float) -> None:
        """Learns from a completed step, which took ``seconds``. Nothing of the next one hangs on it, so it
        may wait until that has been planned.
        """
        if result.forwards == 1:  # time spent on halves says nothing about the model
            self.scheduler.adjust_seconds(plan, seconds)
        tokens = plan.prefill_tokens + plan.decode_sequences
        self._forwards += result.forwards
        self._failed_rows += len(result.failed)
        self._tokens += tokens
        self._token_counts[bisect_left(StepTokens.BOUNDS, tokens)] += 1
        self._last_step_s = seconds
        if now - self.statistics.last_boundary_s >= self._publish_s:
            self.publish(now)

    def publish(self, now: float) -> None:
        """Renews the statistics: drivers do so before they wait."""
        self.statistics = self._snapshot(now)

    def _snapshot(self, now: float) -> LoopStatistics:
        return LoopStatistics(
            forwards=self._forwards,
            failed_rows=self._failed_rows,
            step_tokens=StepTokens(tuple(self._token_counts), self._tokens),
            last_step_s=self._last_step_s,
            last_boundary_s=now,
            scheduler=self.scheduler.statistics(),
        )


def _log_failures(events: Iterable[Event]) -> None:
    for event in events:
        if isinstance(event, Failed) and isinstance(event.error, StepFailed):
            log.error(
                "request %s failed in the model", event.request_id, exc_info=event.error.__cause__
            )
