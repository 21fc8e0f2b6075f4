"""The scheduler's records: a request, and its sequences (one for each choice)."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from pyserve.core.spec import RequestSpec, Task
from pyserve.core.state import Signal, State, next_state

Rank = tuple[float, float, int, int]
"""Who goes first, ascending: aged priority, then deadline, then order of arrival, then choice."""


@dataclass(slots=True, eq=False)
class Sequence:
    """One choice of a request.

    Tokens ``[0, computed)`` of its ``length`` known ones have their KV in the pool's ``row`` (None while it
    has none). ``held_blocks``, kept up to date while waiting, are what it owns in line: left over from
    before a preemption, or matched. ``looked_up``: nothing more can be had without computing.
    ``admitted``: it has run before; ``admitted_tokens``: what it had to compute when it last began to.
    ``in_line``, ``line_tokens``: the waiting line's. ``stopped``: it shall end with "stop" at the next
    boundary. ``charged``: tokens its tenant was charged for its admission.
    """

    request: Request
    index: int
    rank: Rank
    length: int
    state: State = State.WAITING
    row: int | None = None
    computed: int = 0
    outputs: int = 0
    held_blocks: int = 0
    looked_up: bool = False
    admitted: bool = False
    admitted_tokens: int = 0
    in_line: bool = False
    line_tokens: int = 0
    stopped: bool = False
    charged: float = 0.0

    @property
    def remaining(self) -> int:
        """Known tokens that are not computed yet; at least 1 while it lives."""
        return self.length - self.computed

    @property
    def most_outputs(self) -> int:
        """How many more tokens may be sampled."""
        spec = self.request.spec
        return spec.sampling.max_tokens - self.outputs if spec.task is Task.GENERATE else 0

    def signal(self, signal: Signal) -> None:
        """Moves to the next state; raises :class:`~pyserve.core.state.IllegalTransition`."""
        self.state = next_state(self.state, signal)

    def lose_blocks(self, kept_blocks: int, block_size: int) -> None:
        """Its table was cut to ``kept_blocks``."""
        self.held_blocks = kept_blocks
        self.computed = min(self.computed, kept_blocks * block_size)
        self.looked_up = kept_blocks > 0


@dataclass(slots=True, eq=False)
class Request:
    """A request while it lives. ``live`` of its sequences are not over; ``started``: one has been admitted.

    Only sequence 0 joins the line at first; the others follow when it has computed the prompt they share
    (``forked``).
    """

    spec: RequestSpec
    arrival_s: float
    number: int
    stop_tokens: frozenset[int]
    sequences: list[Sequence] = field(default_factory=list)
    live: int = 0
    started: bool = False
    forked: bool = False

    @classmethod
    def of(
        cls,
        spec: RequestSpec,
        arrival_s: float,
        number: int,
        *,
        ageing_s: float,
        eos_token_ids: tuple[int, ...],
    ) -> Request:
        """A request with its sequences, all waiting, none in line yet. ``number`` counts arrivals."""
        sampling = spec.sampling
        eos = () if sampling.ignore_eos else eos_token_ids
        request = cls(spec, arrival_s, number, frozenset((*eos, *sampling.stop_token_ids)))
        # Ageing is static: everybody's rank rises equally fast, so the order in line never changes.
        aged = arrival_s - spec.priority * ageing_s
        deadline_s = math.inf if spec.deadline_s is None else spec.deadline_s
        for index in range(spec.n):
            rank = (aged, deadline_s, number, index)
            request.sequences.append(Sequence(request, index, rank, length=len(spec.prompt)))
        request.live = spec.n
        return request
