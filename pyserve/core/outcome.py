"""What a step's outcome means for its sequences: tokens, ends, failures, and the events that tell of them."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from pyserve.core.events import ChoiceFinished, Embedding, Event, FinishReason, Token, TokenLogprobs
from pyserve.core.ledger import Ledger
from pyserve.core.sequence import Request, Sequence
from pyserve.core.state import Signal, State
from pyserve.core.step import Plan, Sampled, StepOutcome
from pyserve.errors import RequestError

OUTPUT_COST = 2.0
"""What an output token counts for a tenant, where a prompt token counts 1 (as in the VTC paper)."""


class Settler:
    """Borrows the ledger; called once for each step that was run."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._ending: list[tuple[Sequence, FinishReason, int | None]] = []
        self.output_tokens = 0
        self.prefill_tokens = 0

    def settle(
        self,
        plan: Plan,
        chosen: list[tuple[Sequence, int]],
        outcome: StepOutcome,
        late: Iterable[tuple[Request, RequestError]] = (),
    ) -> tuple[Event, ...]:
        """Advances everybody who did not fail and is not ``late`` (those expire), and ends who is done.

        Raises RuntimeError, before anything has changed, where the outcome does not fit the plan.
        """
        plain = _is_plain(plan, outcome)
        if not plain:
            self._check(chosen, outcome)
        events: list[Event] = [
            self._ledger.abort(request, Signal.EXPIRE, error) for request, error in late
        ]
        if not plain:
            self._fail(outcome, events)
        self._advance(plan, chosen)
        self.prefill_tokens += plan.prefill_tokens
        for row, hidden in outcome.hidden.items():
            sequence = self._ledger.by_row.get(row)
            if sequence is None:  # too late
                continue
            values = tuple(hidden.tolist())
            events.append(Embedding(sequence.request.spec.request_id, values))
            events += self._ledger.finish_choice(sequence)
        for part in outcome.sampled:
            self._take_tokens(part, len(chosen), events)
        self._end(events)
        return tuple(events)

    def _check(self, chosen: list[tuple[Sequence, int]], outcome: StepOutcome) -> None:
        reached = {s.row for s, take in chosen if take == s.length - s.computed}
        rows = {s.row for s, _ in chosen}
        given = [row for part in outcome.sampled for row in part.rows.tolist()]
        given += outcome.hidden
        failed = outcome.failed.keys()
        unique = set(given)
        if len(unique) != len(given) or unique & failed or not failed <= rows:
            raise RuntimeError("the outcome names a row twice, or one that was not in the step")
        if unique != reached - failed:
            raise RuntimeError(
                f"the step reached the end of rows {sorted(map(str, reached - failed))},"
                f" the outcome is of {sorted(unique)}"
            )

    def _fail(self, outcome: StepOutcome, events: list[Event]) -> None:
        for row, error in outcome.failed.items():
            sequence = self._ledger.by_row.get(row)  # None: a sibling has failed too, or late
            if sequence is not None:
                events.append(self._ledger.abort(sequence.request, Signal.FAIL, error))

    def _advance(self, plan: Plan, chosen: list[tuple[Sequence, int]]) -> None:
        """Nothing counts that was computed for those who have just ended; all the rest does."""
        rows, takes = plan.rows, plan.takes
        if any(sequence.row is None for sequence, _ in chosen):
            chosen = [(sequence, take) for sequence, take in chosen if sequence.row is not None]
            rows = _ints([s.row for s, _ in chosen if s.row is not None])
            takes = _ints([take for _, take in chosen])
        self._ledger.pool.advance(rows, takes)
        for sequence, take in chosen:
            sequence.computed += take

    def _take_tokens(self, part: Sampled, batch_size: int, events: list[Event]) -> None:
        """Files one part's tokens, as events and with their sequences."""
        sequences = [*map(self._ledger.by_row.get, part.rows.tolist())]
        tokens: list[int] = part.tokens.tolist()
        logprobs: list[float] | None = None
        served: dict[str, int] = {}
        for i, (sequence, token) in enumerate(zip(sequences, tokens, strict=True)):
            if sequence is None:  # too late, or a sibling of one that failed
                continue
            request = sequence.request
            spec = request.spec
            found = None
            if spec.sampling.logprobs is not None:
                logprobs = part.logprobs.tolist() if logprobs is None else logprobs
                found = _logprobs(part, i, logprobs[i], spec.sampling.logprobs)
            events.append(Token(spec.request_id, sequence.index, token, found, batch_size))
            sequence.outputs += 1
            sequence.length += 1
            served[spec.tenant] = served.get(spec.tenant, 0) + 1
            self._judge(sequence, token)
            if sequence.state is State.PREFILL:
                sequence.signal(Signal.PREFILLED)
                if not request.forked:
                    self._ledger.fork(request)
        self.output_tokens += sum(served.values())
        self._ledger.line.serve(served, OUTPUT_COST)
        self._append(part, sequences)

    def _append(self, part: Sampled, sequences: list[Sequence | None]) -> None:
        """The tokens of those that are still there become known tokens of their rows."""
        rows, tokens = part.rows, part.tokens
        if None in sequences:
            here = torch.tensor([sequence is not None for sequence in sequences])
            rows, tokens = rows[here], tokens[here]
        if len(rows):
            self._ledger.pool.append(rows, tokens)

    def _judge(self, sequence: Sequence, token: int) -> None:
        """Notes whether the token was the sequence's last."""
        request = sequence.request
        sampling = request.spec.sampling
        if token in request.stop_tokens and sequence.outputs > sampling.min_tokens - 1:
            self._ending.append((sequence, FinishReason.STOP, token))
        elif (
            sequence.outputs >= sampling.max_tokens
            or sequence.length >= self._ledger.config.context_length
        ):
            self._ending.append((sequence, FinishReason.LENGTH, None))

    def _end(self, events: list[Event]) -> None:
        ending, self._ending = self._ending, []
        for sequence, reason, token in ending:
            request_id = sequence.request.spec.request_id
            events.append(ChoiceFinished(request_id, sequence.index, reason, token))
            events += self._ledger.finish_choice(sequence)


def _is_plain(plan: Plan, outcome: StepOutcome) -> bool:
    """Whether everybody decoded and got a token, which needs no closer look."""
    return (
        len(outcome.sampled) == 1
        and outcome.sampled[0].rows is plan.rows
        and not plan.prefill_tokens
        and not plan.embeds
        and not outcome.failed
        and not outcome.hidden
    )


def _logprobs(part: Sampled, index: int, logprob: float, most: int) -> TokenLogprobs:
    ids, logprobs = part.top_ids[index, :most].tolist(), part.top_logprobs[index, :most].tolist()
    return TokenLogprobs(logprob, tuple(zip(ids, logprobs, strict=True)))


def _ints(values: list[int]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)
