"""One step's arithmetic: pack, forward, sample; and by halves where the whole of it will not go.

A forward that raises says nothing about which sequence is to blame, so the step is run again in two
halves, and so on until the culprit is alone. The others lose time and nothing else: nothing counts as
computed before the step is complete, KV slots are written again with the same bits, and random numbers
are keyed by position, not by attempt.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

import torch
from torch import Tensor

from pyserve import _C
from pyserve.backends.base import Backend, SamplingBackend
from pyserve.core.step import NO_ROWS, Sampled, StepOutcome
from pyserve.errors import RequestError, StepFailed


@dataclass(slots=True)
class StepResult:
    """A step's outcome, collected part by part. ``forwards`` counts attempts: 1 where all went well."""

    sampled: list[Sampled] = field(default_factory=list)
    hidden: dict[int, Tensor] = field(default_factory=dict)
    failed: dict[int, RequestError] = field(default_factory=dict)
    forwards: int = 0

    @property
    def outcome(self) -> StepOutcome:
        """What the scheduler is told."""
        return StepOutcome(self.sampled, self.hidden, self.failed)


class StepRunner:
    """Runs steps on a back-end. Owns the packing buffers, borrows pool and sampler state."""

    def __init__(
        self,
        backend: Backend,
        pool: _C.BlockPool,
        sampler: _C.SamplerState,
        buffers: _C.StepBuffers,
    ) -> None:
        self._backend = backend
        self._pool = pool
        self._sampler = sampler
        self._buffers = buffers
        self._draw = backend.sample if isinstance(backend, SamplingBackend) else _C.sample

    def run(self, rows: Tensor, takes: Tensor, embeds: Collection[int]) -> StepResult:
        """Advances ``rows`` int32 ``[S]`` by ``takes`` int32 ``[S]`` tokens each, as far as they can.

        ``embeds``: rows whose hidden state is wanted instead of a token. Never raises for what the
        back-end does; what the pool or the packing raises is a bug and does.
        """
        result = StepResult()
        self._run(rows, takes, embeds, result)
        return result

    def _run(
        self, rows: Tensor, takes: Tensor, embeds: Collection[int], result: StepResult
    ) -> None:
        packed = _C.pack(self._pool, rows, takes, self._buffers)
        reached, hidden_rows, is_embed = rows, NO_ROWS, None
        if len(packed.sample_seq) < len(rows):
            reached = rows[packed.sample_seq.long()]
        if embeds:
            is_embed = torch.tensor([row in embeds for row in reached.tolist()], dtype=torch.bool)
            hidden_rows = packed.logit_rows[is_embed]
        result.forwards += 1
        error: Exception | None = None
        try:
            output = self._backend.forward(packed, hidden_rows)
        except Exception as caught:
            error = caught
        # Outside of the handler, or each half's error would drag the whole's along.
        if error is not None:
            self._halve(rows, takes, embeds, result, error)
            return
        logits = output.logits
        if is_embed is not None:
            result.hidden.update(zip(reached[is_embed].tolist(), output.hidden, strict=True))
            logits, reached = logits[~is_embed], reached[~is_embed]
        if len(reached):
            self._sample(logits, reached, result)

    def _halve(
        self,
        rows: Tensor,
        takes: Tensor,
        embeds: Collection[int],
        result: StepResult,
        error: Exception,
    ) -> None:
        if len(rows) == 1:
            failure = StepFailed("the model failed on this request")
            failure.__cause__ = error
            result.failed[int(rows[0])] = failure
            return
        half = len(rows) // 2
        self._run(rows[:half], takes[:half], embeds, result)
        self._run(rows[half:], takes[half:], embeds, result)

    def _sample(self, logits: Tensor, rows: Tensor, result: StepResult) -> None:
        try:
            drawn = self._draw(logits, self._pool, self._sampler, rows)
        except _C.SampleError as error:
            for index, reason in error.failed.items():
                result.failed[int(rows[index])] = StepFailed(f"no token can be drawn: {reason}")
            good = [i for i in range(len(rows)) if i not in error.failed]
            if good:
                self._sample(logits[good], rows[good], result)
            return
        result.sampled.append(Sampled(rows, *drawn))
