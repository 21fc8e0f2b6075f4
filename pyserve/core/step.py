"""What passes between the scheduler and whoever runs its steps: a plan out, an outcome back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from pyserve.core.events import Event
from pyserve.errors import RequestError

NO_ROWS = torch.empty(0, dtype=torch.int32)


@dataclass(frozen=True, slots=True, eq=False)
class Plan:
    """What the next step computes: sequence ``rows[s]`` advances by ``takes[s]`` tokens, int32 ``[S]`` both.

    ``embeds`` are the rows of which the hidden state of their last token is wanted, once they reach it,
    instead of a sampled token. ``events`` happened at this boundary already, whatever the step does.
    Where S is 0 there is nothing to run: complete() must not be called; plan again after the next
    command, or at ``idle_until`` (engine clock, seconds) if that is not None.
    ``prefill_tokens``, ``decode_sequences`` and ``attended_tokens`` (pairs of a new token and one that
    it attends to) are what the step-time model reckons with.
    """

    rows: Tensor = NO_ROWS
    takes: Tensor = NO_ROWS
    embeds: frozenset[int] = frozenset()
    events: tuple[Event, ...] = ()
    idle_until: float | None = None
    prefill_tokens: int = 0
    decode_sequences: int = 0
    attended_tokens: int = 0

    def __bool__(self) -> bool:
        """Whether there is anything to run."""
        return len(self.rows) > 0


@dataclass(frozen=True, slots=True, eq=False)
class Sampled:
    """Tokens of R rows, from ``_C.sample``: ``rows`` int32 ``[R]``, ``tokens`` int32 ``[R]``, ``logprobs``
    float32 ``[R]``; ``top_ids`` int32 and ``top_logprobs`` float32 ``[R, K]``, K at least what each row asks
    for.
    """

    rows: Tensor
    tokens: Tensor
    logprobs: Tensor
    top_ids: Tensor
    top_logprobs: Tensor


@dataclass(frozen=True, slots=True, eq=False)
class StepOutcome:
    """What a step gave. Each row of the plan that reached its last known token is in exactly one place:
    one part of ``sampled``, ``hidden`` (row -> float32 ``[hidden_size]``) for embeddings, or ``failed``; rows
    that did not reach it are in ``failed`` or nowhere.
    """

    sampled: Sequence[Sampled] = ()
    hidden: Mapping[int, Tensor] = field(default_factory=dict)
    failed: Mapping[int, RequestError] = field(default_factory=dict)
