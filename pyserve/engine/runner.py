"""One step's arithmetic: pack, forward, sample; and by halves where the whole of it will not go.

A forward that raises says nothing about which sequence is to blame, so the step is run again in two
halves, and so on until the culprit is alone. The others lose time and nothing else: nothing counts as
computed before the step is complete, KV slots are written again with the same bits, and random numbers
are keyed by position, not by attempt.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from pyserve import _C
from pyserve.backends.base import Backend
from pyserve.errors import RequestError, StepFailed


@dataclass(slots=True)
class StepResult:
    """What a step computed, parts in the order in which they ran.

    Each part of ``sampled`` is ``(rows, tokens, logprobs, top_ids, top_logprobs)`` as ``_C.sample`` gives
    them; each of ``hidden`` is ``(row, values)``. ``failed`` rows are in neither. ``forwards`` counts
    attempts: 1 where all went well.
    """

    sampled: list[tuple[Tensor, ...]] = field(default_factory=list)
    hidden: list[tuple[int, Tensor]] = field(default_factory=list)
    failed: dict[int, RequestError] = field(default_factory=dict)
    forwards: int = 0
