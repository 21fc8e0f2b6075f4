"""Who is where, and what they hold: the one place where requests begin, move and end.

Mutable state: the open requests; the running sequences in rank order; the waiting line; the *holders*, which
wait but own KV blocks (left over from a preemption, or matched); and which sequence has which pool row.
Every other sequence of an open request is one that waits for its prompt to be computed by the first.
"""

from __future__ import annotations

from array import array
from bisect import insort
from collections.abc import Sequence as Tokens
from typing import Protocol

import torch

from pyserve._C import BlockPool
from pyserve.core.config import SchedulerConfig
from pyserve.core.events import Event, Failed, Finished, Started
from pyserve.core.sequence import Request, Sequence
from pyserve.core.spec import RequestSpec, Task
from pyserve.core.state import Signal, State
from pyserve.core.waiting import WaitingLine
from pyserve.errors import RequestError


class Sampler(Protocol):
    """What the ledger needs of a ``_C.SamplerState``: per-row sampling parameters."""

    def set(
        self,
        row: int,
        *,
        temperature: float,
        top_p: float,
        top_k: int,
        min_p: float,
        frequency_penalty: float,
        presence_penalty: float,
        repetition_penalty: float,
        seed: int,
        min_tokens: int,
        banned_until_min: Tokens[int],
        logit_bias: Tokens[tuple[int, float]],
        logprobs: int,
    ) -> None:
        """Sets a row's parameters; ``logprobs`` -1 for none."""

    def clear(self, row: int) -> None:
        """Forgets a row."""


class Ledger:
    """Moves sequences between line, batch and end, with their blocks and sampler rows."""

    def __init__(self, config: SchedulerConfig, pool: BlockPool, sampler: Sampler) -> None:
        self.config = config
        self.pool = pool
        self.line = WaitingLine(config.ageing_s)
        self.requests: dict[str, Request] = {}
        self.running: list[Sequence] = []
        self.holders: set[Sequence] = set()
        self.by_row: dict[int, Sequence] = {}
        self.changes = 0  # of who runs, ever
        self.preemptions = 0
        self.ended = dict.fromkeys((s for s in State if s.final), 0)
        self._sampler = sampler
        self._sampler_rows: set[int] = set()
        self._opened = 0

    def open(self, spec: RequestSpec, now: float) -> Request:
        """A new request; its first sequence joins the line."""
        request = Request.of(
            spec,
            now,
            self._opened,
            ageing_s=self.config.ageing_s,
            eos_token_ids=self.config.eos_token_ids,
        )
        self._opened += 1
        self.requests[spec.request_id] = request
        self.line.push(request.sequences[0])
        return request

    def fork(self, request: Request) -> None:
        """The prompt is computed: the other sequences, which share it, join the line."""
        request.forked = True
        for sequence in request.sequences[1:]:
            if not sequence.state.final:
                self.line.push(sequence)

    def stage(self, sequence: Sequence) -> None:
        """Gives a sequence that may be admitted a row, and the blocks that can be had without computing."""
        request, pool = sequence.request, self.pool
        spec = request.spec
        if sequence.row is None:
            tenant = self.line.tenant(spec.tenant, spec.weight).number
            prompt = torch.frombuffer(array("i", spec.prompt), dtype=torch.int32)
            sequence.row = pool.add(prompt, len(spec.prompt), spec.cache_salt, tenant)
            self.by_row[sequence.row] = sequence
        if sequence.looked_up:
            return
        sequence.looked_up = True
        sibling = self._furthest_sibling(sequence)
        if sibling is not None and not sequence.outputs:
            sequence.computed = pool.fork(sibling, sequence.row)
        else:
            sequence.computed = pool.match(sequence.row)
        sequence.held_blocks = sequence.computed // self.config.block_size
        if sequence.held_blocks:
            self.holders.add(sequence)

    def unstage(self, sequence: Sequence) -> None:
        """Takes that back from one that has never run; what it matched can be found again."""
        self._release(sequence)
        sequence.computed = 0
        sequence.looked_up = False

    def admit(self, sequence: Sequence, now: float) -> Started | None:
        """Out of the line (popped already), into the batch. The request's first is an event."""
        request = sequence.request
        sequence.signal(Signal.ADMIT)
        sequence.held_blocks = 0
        self.holders.discard(sequence)
        insort(self.running, sequence, key=lambda s: s.rank)
        self.changes += 1
        self.line.run(sequence, 1)
        if not sequence.admitted and request.spec.task is Task.GENERATE:
            self._set_sampler(sequence)
        sequence.admitted = True
        sequence.admitted_tokens = sequence.remaining
        if request.started:
            return None
        request.started = True
        queue_s = max(0.0, now - request.arrival_s)
        return Started(request.spec.request_id, queue_s, sequence.computed)

    def preempt(self, sequence: Sequence, kept_blocks: int) -> None:
        """Back to its place in line, with the ``kept_blocks`` that nobody needed yet."""
        sequence.signal(Signal.PREEMPT)
        self._stop_running(sequence)
        self.preemptions += 1
        sequence.lose_blocks(kept_blocks, self.config.block_size)
        if kept_blocks:
            self.holders.add(sequence)
        self.line.push(sequence)

    def trim(self, sequence: Sequence, kept_blocks: int) -> None:
        """A waiting sequence has lost blocks."""
        sequence.lose_blocks(kept_blocks, self.config.block_size)
        if not kept_blocks:
            self.holders.discard(sequence)

    def end(self, sequence: Sequence, signal: Signal) -> None:
        """Over: out of wherever it is, and everything it held is free."""
        was = sequence.state
        sequence.signal(signal)
        if was.running:
            self._stop_running(sequence)
        elif sequence.in_line:
            self.line.remove(sequence)
        if sequence.row is not None:
            self._release(sequence)
        self.ended[sequence.state] += 1
        sequence.request.live -= 1

    def finish_choice(self, sequence: Sequence) -> list[Event]:
        """One choice is complete; the request too if it was the last."""
        request = sequence.request
        self.end(sequence, Signal.FINISH)
        if request.live:
            return []
        del self.requests[request.spec.request_id]
        return [Finished(request.spec.request_id)]

    def abort(self, request: Request, signal: Signal, error: RequestError) -> Failed:
        """The request ends in ``error``, with all its sequences that still live."""
        for sequence in request.sequences:
            if not sequence.state.final:
                self.end(sequence, signal)
        del self.requests[request.spec.request_id]
        return Failed(request.spec.request_id, error)

    def check(self) -> None:
        """Counts everything again; raises RuntimeError naming the first invariant that is broken."""
        self.pool.check()
        live = [s for r in self.requests.values() for s in r.sequences if not s.state.final]
        running = [s for s in live if s.state.running]
        unforked = {s for s in live if s.index and not s.request.forked}
        waiting = [s for s in live if s.state is State.WAITING and s not in unforked]
        _require(
            self.running == sorted(running, key=lambda s: s.rank),
            "the batch does not hold exactly the running sequences, in rank order",
        )
        self.line.check(waiting, running)
        _require(
            all(
                r.live == sum(not s.state.final for s in r.sequences) > 0
                for r in self.requests.values()
            ),
            "a request is open without a live sequence, or miscounts them",
        )
        rows = {s.row: s for s in live if s.row is not None}
        _require(rows == self.by_row, "rows and live sequences differ")
        _require(self.pool.statistics().rows == len(rows), "the pool has rows of nobody")
        admitted = {s.row for s in live if s.admitted and s.request.spec.task is Task.GENERATE}
        _require(self._sampler_rows == admitted, "sampler rows and admitted sequences differ")
        self._check_blocks(rows)

    def _check_blocks(self, rows: dict[int, Sequence]) -> None:
        pool = self.pool
        tenants: dict[str, int] = {}
        holders: set[Sequence] = set()
        for row, sequence in rows.items():
            spec, blocks = sequence.request.spec, len(pool.blocks(row))
            known = (sequence.length, sequence.computed)
            _require(
                known == (pool.length(row), pool.computed(row)) and sequence.remaining > 0,
                f"row {row} is at {pool.length(row), pool.computed(row)}, not at {known}",
            )
            _require(sequence.length == len(spec.prompt) + sequence.outputs, f"row {row} miscounts")
            tenants[spec.tenant] = tenants.get(spec.tenant, 0) + blocks
            if not sequence.state.running:
                _require(sequence.held_blocks == blocks, f"row {row} miscounts its blocks")
                holders.update({sequence} if blocks else ())
        _require(holders == self.holders, "holders and waiting owners of blocks differ")
        for name, blocks in tenants.items():
            number = self.line.tenant(name, 1.0).number
            _require(pool.tenant_blocks(number) == blocks, f"tenant {name!r} miscounts its blocks")

    def _furthest_sibling(self, sequence: Sequence) -> int | None:
        """The row of the sequence of the same request that has computed most of the prompt."""
        siblings = sequence.request.sequences
        if len(siblings) == 1:
            return None
        rows = [(s.computed, s.row) for s in siblings if s is not sequence and s.row is not None]
        computed, row = max(rows, default=(0, None))
        return row if computed else None

    def _stop_running(self, sequence: Sequence) -> None:
        self.running.remove(sequence)
        self.changes += 1
        self.line.run(sequence, -1)

    def _release(self, sequence: Sequence) -> None:
        assert sequence.row is not None
        row, sequence.row = sequence.row, None
        self.pool.release(row)
        del self.by_row[row]
        self.holders.discard(sequence)
        sequence.held_blocks = 0
        if row in self._sampler_rows:
            self._sampler_rows.remove(row)
            self._sampler.clear(row)

    def _set_sampler(self, sequence: Sequence) -> None:
        assert sequence.row is not None
        request = sequence.request
        params = request.spec.sampling
        self._sampler_rows.add(sequence.row)
        self._sampler.set(
            sequence.row,
            temperature=params.temperature,
            top_p=params.top_p,
            top_k=params.top_k,
            min_p=params.min_p,
            frequency_penalty=params.frequency_penalty,
            presence_penalty=params.presence_penalty,
            repetition_penalty=params.repetition_penalty,
            seed=request.spec.seed_for(sequence.index),
            min_tokens=params.min_tokens,
            banned_until_min=sorted(request.stop_tokens),
            logit_bias=params.logit_bias,
            logprobs=-1 if params.logprobs is None else params.logprobs,
        )


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise RuntimeError(message)
