"""The scheduler: which sequences advance in the next step, and what a step's outcome means for them.

Sans-IO: reads no clock, waits for nothing, computes nothing; ``now`` (seconds) is an argument and decisions
are returned as frozen messages. One step at a time: plan(), then complete() with what the step gave, and
only in between those two, at the *boundary*, does anything begin, move or end. So cancel() and
stop_choice() mark, and the next plan() does it.

    scheduler.submit(spec, now)
    plan = scheduler.plan(now)          # plan.events happened already
    events = scheduler.complete(plan, run(plan), now)
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from heapq import heapify, heappop, heappush

from pyserve._C import BlockPool, PoolStatistics
from pyserve.core.admission import check_fits
from pyserve.core.config import SchedulerConfig
from pyserve.core.events import ChoiceFinished, Event, FinishReason
from pyserve.core.ledger import Ledger, Sampler
from pyserve.core.outcome import Settler
from pyserve.core.selection import Selector
from pyserve.core.sequence import Request, Sequence
from pyserve.core.spec import RequestSpec
from pyserve.core.state import Signal, State
from pyserve.core.step import Plan, StepOutcome
from pyserve.core.steptime import TRUST_AFTER, Speed, StepTime, StepTimeStatistics
from pyserve.core.waiting import WaitingStatistics
from pyserve.core.window import BatchWindow, WindowStatistics
from pyserve.errors import Cancelled, DeadlineExceeded, InvalidRequest, RequestError

DECODES_LOOKED_AT = 4  # one of so many

__all__ = ["Plan", "Scheduler", "SchedulerStatistics", "StepOutcome"]


@dataclass(frozen=True, slots=True)
class SchedulerStatistics:
    """A snapshot. Sequences unless it says requests; totals only grow.

    ``slot_s``: seconds until one of a full batch has all its tokens; 0 while the batch has room.
    """

    open_requests: int
    waiting_sequences: int
    prefill_sequences: int
    decode_sequences: int
    steps_total: int
    preemptions_total: int
    prefill_tokens_total: int
    output_tokens_total: int
    finished_total: int
    cancelled_total: int
    failed_total: int
    expired_total: int
    last_batch_sequences: int
    last_batch_tokens: int
    slot_s: float
    line: WaitingStatistics
    window: WindowStatistics
    steptime: StepTimeStatistics
    pool: PoolStatistics


class Scheduler:
    """See the module. ``pool`` has ``config.num_blocks`` blocks and is its own; ``sampler`` is told of rows.

    ``check``: verify every invariant at the end of every plan() and complete().
    """

    def __init__(
        self, config: SchedulerConfig, pool: BlockPool, sampler: Sampler, *, check: bool = False
    ) -> None:
        if (pool.num_blocks, pool.block_size) != (config.num_blocks, config.block_size):
            raise ValueError("the pool's blocks are not those of the configuration")
        self.config = config
        self._pool = pool
        self._ledger = Ledger(config, pool, sampler)
        self._steptime = StepTime()
        self._selector = Selector(self._ledger, self._steptime)
        self._settler = Settler(self._ledger)
        self._window = BatchWindow(config.window_min_s, config.window_max_s)
        self._deadlines: list[tuple[float, int, Request]] = []
        self._leaving: dict[str, RequestError] = {}
        self._stopped: list[Sequence] = []
        self._plan: Plan | None = None  # the one that is being computed
        self._chosen: list[tuple[Sequence, int]] = []
        self._busy = False  # the last plan had something to run
        self._steps = 0
        self._last = Plan()
        self._prefill_speed, self._output_speed = Speed(), Speed()
        self._check = check

    def submit(self, spec: RequestSpec, now: float) -> None:
        """A new request joins the line; ``now`` is its arrival. Never refuses for load.

        Raises :class:`~pyserve.errors.InvalidRequest` where it can never be served (too long for the context
        or the pool, among others), and for an id that is in use.
        """
        check_fits(spec, self.config)
        if spec.request_id in self._ledger.requests:
            raise InvalidRequest(f"request id {spec.request_id!r} is in use", param="request_id")
        request = self._ledger.open(spec, now)
        if spec.deadline_s is not None:
            heappush(self._deadlines, (spec.deadline_s, request.number, request))

    def cancel(self, request_id: str, error: RequestError | None = None) -> None:
        """The request ends at the next boundary with ``error`` (default: Cancelled). Unknown ids: nothing.

        If it finishes by itself before that, it has finished. The first error given is the one that counts.
        """
        if request_id in self._ledger.requests:
            self._leaving.setdefault(request_id, error or Cancelled("cancelled"))

    def stop_choice(self, request_id: str, index: int) -> None:
        """Choice ``index`` finishes with reason "stop" at the next boundary; nothing if it is not there."""
        request = self._ledger.requests.get(request_id)
        if request is None or not 0 <= index < len(request.sequences):
            return
        sequence = request.sequences[index]
        if not sequence.state.final and not sequence.stopped:
            sequence.stopped = True
            self._stopped.append(sequence)

    @property
    def idle(self) -> bool:
        """Whether no request is open."""
        return not self._ledger.requests

    def plan(self, now: float) -> Plan:
        """Ends what must end at this boundary, and chooses the next step. See :class:`Plan`.

        Raises RuntimeError while the last step has not been completed.
        """
        if self._plan is not None:
            raise RuntimeError("the last step has not been completed")
        events = self._end_marked()
        for request, error in self._due(now):
            events.append(self._ledger.abort(request, Signal.EXPIRE, error))
        idle_until = self._idle_until(now)
        if idle_until is None and (self._ledger.running or len(self._ledger.line)):
            plan, self._chosen = self._selector.select(now, events)
            if not plan:
                raise RuntimeError("nobody can advance, though there is work")
            self._plan = self._last = plan
        else:
            plan = Plan(events=tuple(events), idle_until=idle_until)
        self._busy = bool(plan)
        if self._check:
            self.check()
        return plan

    def complete(self, plan: Plan, outcome: StepOutcome, now: float) -> tuple[Event, ...]:
        """Takes in what the step gave; returns its events, in order for each request.

        What the step gave a request whose deadline passed meanwhile came too late, and it expires.

        Raises RuntimeError for a plan that is not the last one, or an outcome that does not fit it.
        """
        if plan is not self._plan:
            raise RuntimeError("this plan is not the one under way")
        events = self._settler.settle(plan, self._chosen, outcome, self._due(now))
        self._plan = None
        self._chosen = []
        self._steps += 1
        if self._check:
            self.check()
        return events

    def adjust_seconds(self, plan: Plan, seconds: float) -> None:
        """The step of ``plan`` took ``seconds``: the step-time model and the speeds learn from it.

        The model from every step with prefill in it, but only from some of those that only decode: they
        are many and much the same.
        """
        if plan.prefill_tokens or self._steps <= TRUST_AFTER or not self._steps % DECODES_LOOKED_AT:
            self._steptime.observe(
                plan.prefill_tokens, plan.decode_sequences, plan.attended_tokens, seconds
            )
        if plan.prefill_tokens:
            self._prefill_speed.add(plan.prefill_tokens, seconds)
        if plan.decode_sequences:
            self._output_speed.add(plan.decode_sequences, seconds)

    def statistics(self) -> SchedulerStatistics:
        """A snapshot; costs as much as the batch is large, whatever waits."""
        ledger, settler = self._ledger, self._settler
        base, prefill, decode, attended = self._steptime.coefficients
        decoding = sum(s.state is State.DECODE for s in ledger.running)
        return SchedulerStatistics(
            open_requests=len(ledger.requests),
            waiting_sequences=len(ledger.line),
            prefill_sequences=len(ledger.running) - decoding,
            decode_sequences=decoding,
            steps_total=self._steps,
            preemptions_total=ledger.preemptions,
            prefill_tokens_total=settler.prefill_tokens,
            output_tokens_total=settler.output_tokens,
            finished_total=ledger.ended[State.FINISHED],
            cancelled_total=ledger.ended[State.CANCELLED],
            failed_total=ledger.ended[State.FAILED],
            expired_total=ledger.ended[State.EXPIRED],
            last_batch_sequences=len(self._last.rows),
            last_batch_tokens=self._last.prefill_tokens + self._last.decode_sequences,
            slot_s=self._slot_s(decoding),
            line=ledger.line.statistics(),
            window=self._window.statistics(),
            steptime=StepTimeStatistics(
                base_s=base,
                prefill_token_s=prefill,
                decode_sequence_s=decode,
                attended_token_s=attended,
                steps=self._steptime.steps,
                prefill_tokens_per_s=self._prefill_speed.per_s,
                output_tokens_per_s=self._output_speed.per_s,
            ),
            pool=self._pool.statistics(),
        )

    def check(self) -> None:
        """Counts everything again, here and in the pool; raises RuntimeError naming what is broken."""
        self._ledger.check()
        timed = {r.number for r in self._ledger.requests.values() if r.spec.deadline_s is not None}
        if not timed <= {number for _, number, _ in self._deadlines}:
            raise RuntimeError("a deadline is not watched")

    def _slot_s(self, decoding: int) -> float:
        running = self._ledger.running
        if len(running) < self.config.max_batch_requests:
            return 0.0
        step_s = self._steptime.predict(0, decoding, sum(s.length for s in running))
        return step_s * min(max(s.most_outputs, 1) for s in running)

    def _end_marked(self) -> list[Event]:
        """Ends what has been cancelled or stopped."""
        events: list[Event] = []
        leaving, self._leaving = self._leaving, {}
        for request_id, error in leaving.items():
            request = self._ledger.requests.get(request_id)
            if request is not None:
                events.append(self._ledger.abort(request, Signal.CANCEL, error))
        stopped, self._stopped = self._stopped, []
        for sequence in stopped:
            if not sequence.state.final:
                events += self._stop(sequence)
        return events

    def _stop(self, sequence: Sequence) -> list[Event]:
        request = sequence.request
        if not sequence.index and not request.forked:
            self._ledger.fork(request)  # the others must not wait for it
        request_id = request.spec.request_id
        finished = ChoiceFinished(request_id, sequence.index, FinishReason.STOP)
        return [finished, *self._ledger.finish_choice(sequence)]

    def _due(self, now: float) -> list[tuple[Request, RequestError]]:
        """Those that have reached their deadline, in line or running, with what they shall be told."""
        due: list[tuple[Request, RequestError]] = []
        while self._deadlines and (self._deadlines[0][0] <= now or not self._deadlines[0][2].live):
            _, _, request = heappop(self._deadlines)
            if request.live:
                where = "while it ran" if request.started else "before it could start"
                error = DeadlineExceeded(f"timeout_ms ran out {where}", param="timeout_ms")
                due.append((request, error))
        if len(self._deadlines) > 64 + 2 * len(self._ledger.requests):
            self._deadlines = [item for item in self._deadlines if item[2].live]
            heapify(self._deadlines)
        return due

    def _idle_until(self, now: float) -> float | None:
        """When the batch window closes, if an idle engine shall wait for company; None to go on now."""
        line = self._ledger.line
        if self._busy or self._ledger.running or self._ledger.holders or not len(line):
            self._window.close()
            return None
        fill = max(
            len(line) / self.config.max_batch_requests, line.tokens / self.config.max_batch_tokens
        )
        due_s = self._deadlines[0][0] if self._deadlines else math.inf
        return self._window.wait_until(now, fill, due_s)
