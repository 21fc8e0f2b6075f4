"""One step's choice: gathers candidates in rank order, lets the extension select, and moves who must move.

The work grows with the batch, not with the line: from the line come only as many as there may be room for,
and the first that does not fit.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import torch

from pyserve import _C
from pyserve.core.events import Event
from pyserve.core.ledger import Ledger
from pyserve.core.pace import PrefillPace, Room
from pyserve.core.sequence import Sequence
from pyserve.core.spec import Task
from pyserve.core.step import Plan
from pyserve.core.steptime import StepTime


@dataclass(slots=True)
class _Candidates:
    """What goes to select: the running, then those popped from the line, then the other holders."""

    sequences: list[Sequence]
    want: list[int] = field(default_factory=list)
    need_free: list[int] = field(default_factory=list)
    popped: list[Sequence] = field(default_factory=list)
    prefill_budget: int = -1


@dataclass(slots=True)
class _Steady:
    """A batch in which everybody decodes: it can be run again as it is while nobody comes or goes.

    ``attended_tokens`` are the last step's; each further one attends to one more for each sequence.
    """

    changes: int
    chosen: list[tuple[Sequence, int]]
    plan: Plan
    attended_tokens: int
    lowest_priority: int


class Selector:
    """Borrows the ledger and the step-time model."""

    def __init__(self, ledger: Ledger, steptime: StepTime) -> None:
        self._ledger = ledger
        self._config = ledger.config
        self._pace = PrefillPace(ledger.config, steptime)
        self._staged: Sequence | None = None  # the head of the line that found no room last time
        self._steady: _Steady | None = None

    def select(
        self, now: float, events: Iterable[Event] = ()
    ) -> tuple[Plan, list[tuple[Sequence, int]]]:
        """The next step, and its sequences with what each takes. Empty where nobody is there to run.

        ``events`` happened before, and are the plan's first.
        """
        steady = self._steady
        if steady is not None and (plan := self._again(steady, now, events)) is not None:
            return plan, steady.chosen
        self._make_way(now)
        found = self._gather(now)
        running = len(self._ledger.running)
        selection = _C.select(
            self._ledger.pool,
            _ints([s.row for s in found.sequences]),  # type: ignore[misc]
            _ints(found.want),
            _running_flags(running, len(found.sequences)),
            _ints(found.need_free),
            _C.Limits(
                self._config.max_batch_tokens,
                self._config.max_batch_requests,
                found.prefill_budget,
            ),
        )
        taken = list(zip(found.sequences, selection.take.tolist(), strict=True))
        for index, kept_blocks in selection.preempted:
            self._ledger.preempt(found.sequences[index], kept_blocks)
        for index, kept_blocks in selection.trimmed:
            self._ledger.trim(found.sequences[index], kept_blocks)
        admitted = self._settle_popped(taken[running : running + len(found.popped)], now)
        chosen = [(sequence, take) for sequence, take in taken if take]
        plan = _plan(chosen, (*events, *admitted))
        self._note_steady(plan, chosen)
        return plan, chosen

    def _note_steady(self, plan: Plan, chosen: list[tuple[Sequence, int]]) -> None:
        """The next step may be this one once more, if everybody who runs decodes in it."""
        self._steady = None
        if chosen and not plan.prefill_tokens and len(chosen) == len(self._ledger.running):
            lowest = min(sequence.request.spec.priority for sequence, _ in chosen)
            self._steady = _Steady(self._ledger.changes, chosen, plan, plan.attended_tokens, lowest)

    def _again(self, steady: _Steady, now: float, events: Iterable[Event]) -> Plan | None:
        """The last step once more, by the shortest way: most steps are such. None where it will not do."""
        ledger = self._ledger
        if steady.changes != ledger.changes or self._staged is not None:
            return None
        if len(ledger.line):
            if len(ledger.running) < self._config.max_batch_requests:
                return None
            head = ledger.line.peek(now)
            if head is not None and head.request.spec.priority > steady.lowest_priority:
                return None
        rows = steady.plan.rows
        if not ledger.pool.reserve_all(rows):
            return None
        steady.attended_tokens += len(steady.chosen)
        return Plan(
            rows=rows,
            takes=steady.plan.takes,
            events=tuple(events),
            decode_sequences=len(steady.chosen),
            attended_tokens=steady.attended_tokens,
        )

    def _gather(self, now: float) -> _Candidates:
        running = self._ledger.running
        found = _Candidates(list(running))
        remaining = [s.length - s.computed for s in running]
        decoding = remaining.count(1)
        prefill_left = self._config.max_batch_tokens - decoding
        room = Room(prefill_left)
        if decoding:
            room = self._pace.room(running, remaining, prefill_left)
            found.prefill_budget = room.tokens
        found.want = [
            1 if tokens == 1 else room.take(tokens, sequence.admitted_tokens)
            for sequence, tokens in zip(running, remaining, strict=True)
        ]
        found.need_free = [0] * len(running)
        available, promised = self._ledger.pool.available_blocks, 0
        size = self._config.block_size
        for sequence, tokens, take in zip(running, remaining, found.want, strict=True):
            computed = sequence.computed
            now_blocks = -(-(computed + take) // size)
            available -= now_blocks - -(-computed // size)
            if tokens > 1:
                promised += -(-sequence.length // size) - now_blocks
        self._gather_waiting(found, now, room, available, promised)
        return found

    def _gather_waiting(
        self, found: _Candidates, now: float, room: Room, available: int, promised: int
    ) -> None:
        """Pops who may be admitted: until slots, tokens or blocks run out, as far as can be foretold.

        ``available`` blocks are left when all running ones have got theirs; ``promised`` ones are needed by
        prompts that are under way.
        """
        ledger, config = self._ledger, self._config
        size, watermark = config.block_size, config.watermark_blocks
        slots = config.max_batch_requests - len(ledger.running)
        while slots > 0 and room.left > 0 and (sequence := ledger.line.pop(now)) is not None:
            ledger.stage(sequence)
            if not sequence.admitted and not sequence.index:
                sequence.charged = sequence.remaining
                ledger.line.charge(sequence, sequence.charged)
            take = room.take(sequence.remaining, sequence.remaining, least=1)
            held = sequence.held_blocks
            whole = max(-(-(sequence.length + self._headroom(sequence)) // size), held)
            need_free = whole - held + promised + watermark
            found.popped.append(sequence)
            found.want.append(take)
            found.need_free.append(need_free)
            if need_free > available:
                available += self._reclaim(sequence, need_free - available, found.popped)
                if need_free > available:
                    break
            chunk = max(-(-(sequence.computed + take) // size), held)
            available -= chunk - held
            promised += whole - chunk
            slots -= 1
        if self._staged is not None and self._staged not in found.popped:
            self._unstage(self._staged)
        self._staged = None
        rest = sorted(ledger.holders.difference(found.popped), key=lambda s: s.rank)
        found.sequences += found.popped + rest
        found.want += [0] * len(rest)
        found.need_free += [0] * len(rest)

    def _make_way(self, now: float) -> None:
        """Where the batch, or memory, has no room for the head of the line: one of lower priority makes way.

        One a step; it keeps its blocks as long as nobody needs them, so coming back costs little. Equals
        never make way for each other: that would be only churn.
        """
        ledger = self._ledger
        full = len(ledger.running) >= self._config.max_batch_requests
        if not (ledger.running and (full or self._staged is not None)):
            return
        head = ledger.line.peek(now)
        if head is None:
            return
        victim = max(ledger.running, key=lambda s: (-s.request.spec.priority, s.rank))
        lower = victim.request.spec.priority < head.request.spec.priority
        if lower and victim.rank > head.rank:
            assert victim.row is not None
            ledger.preempt(victim, len(ledger.pool.blocks(victim.row)))

    def _reclaim(self, sequence: Sequence, lacking: int, popped: list[Sequence]) -> int:
        """Takes up to ``lacking`` blocks from holders that rank below ``sequence``; returns how many."""
        ledger, pool = self._ledger, self._ledger.pool
        before = pool.available_blocks
        holders = ledger.holders.difference(popped)
        for holder in sorted(holders, key=lambda s: s.rank, reverse=True):
            missing = lacking - (pool.available_blocks - before)
            if holder.rank < sequence.rank or missing <= 0:
                break
            assert holder.row is not None
            kept_blocks = max(0, holder.held_blocks - missing)
            pool.trim(holder.row, kept_blocks)
            ledger.trim(holder, kept_blocks)
        return pool.available_blocks - before

    def _settle_popped(self, popped: list[tuple[Sequence, int]], now: float) -> list[Event]:
        """Admits those who take something; the others go back in line."""
        events: list[Event] = []
        for sequence, take in popped:
            if take:
                if (started := self._ledger.admit(sequence, now)) is not None:
                    events.append(started)
                continue
            if sequence.charged and not sequence.admitted:
                self._ledger.line.charge(sequence, -sequence.charged)
                sequence.charged = 0.0
            self._ledger.line.push(sequence)
            if sequence.admitted:
                continue
            if self._staged is None:
                self._staged = sequence
            else:
                self._unstage(sequence)
        return events

    def _unstage(self, sequence: Sequence) -> None:
        if sequence.row is not None and not sequence.admitted:
            self._ledger.unstage(sequence)

    def _headroom(self, sequence: Sequence) -> int:
        """Output tokens that must find room too: for one that was squeezed out before, some."""
        if not sequence.admitted:
            return 0
        return min(self._config.headroom_tokens, max(sequence.most_outputs - 1, 0))


def _plan(chosen: list[tuple[Sequence, int]], events: tuple[Event, ...]) -> Plan:
    prefill = decode = attended = 0
    embeds = []
    for sequence, take in chosen:
        computed = sequence.computed
        if take == 1 and sequence.length - computed == 1:
            decode += 1
            attended += computed + 1
        else:
            prefill += take
            attended += take * computed + take * (take + 1) // 2
        if sequence.request.spec.task is Task.EMBED:
            embeds.append(sequence.row)
    return Plan(
        rows=_ints([s.row for s, _ in chosen]),  # type: ignore[misc]
        takes=_ints([take for _, take in chosen]),
        embeds=frozenset(row for row in embeds if row is not None),
        events=events,
        prefill_tokens=prefill,
        decode_sequences=decode,
        attended_tokens=attended,
    )


def _ints(values: list[int]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def _running_flags(running: int, total: int) -> torch.Tensor:
    flags = torch.zeros(total, dtype=torch.uint8)
    flags[:running] = 1
    return flags
