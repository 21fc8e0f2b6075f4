"""A scheduler with a scripted model under it, and the few things one does with both in tests."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Any

import torch

from pyserve import _C
from pyserve.core.config import SchedulerConfig
from pyserve.core.events import (
    ChoiceFinished,
    Embedding,
    Event,
    Failed,
    Finished,
    FinishReason,
    Started,
    Token,
)
from pyserve.core.scheduler import Plan, Scheduler
from pyserve.core.spec import RequestSpec, SamplingParams, Task
from pyserve.core.step import Sampled, StepOutcome
from pyserve.errors import RequestError, StepFailed

_ids = itertools.count()
_SPEC = frozenset(RequestSpec.__dataclass_fields__) - {"sampling", "prompt"}
EOS = 2


def make_spec(prompt: int | tuple[int, ...] = 5, **fields: Any) -> RequestSpec:
    """A request with a fresh id and prompt (or one of so many tokens of its own); 4 output tokens."""
    scheduling = {name: fields.pop(name) for name in list(fields) if name in _SPEC}
    number = next(_ids)
    scheduling.setdefault("request_id", f"r{number}")
    if isinstance(prompt, int):
        prompt = tuple(1000 + (number * 7919 + i) % 50_000 for i in range(prompt))
    return RequestSpec(
        prompt=prompt, sampling=SamplingParams(**{"max_tokens": 4, **fields}), **scheduling
    )


class FakeSampler:
    """Rows and their parameters; a row set twice or cleared unset is an error."""

    def __init__(self) -> None:
        self.rows: dict[int, dict[str, Any]] = {}

    def set(self, row: int, **params: Any) -> None:
        assert row not in self.rows
        self.rows[row] = params

    def clear(self, row: int) -> None:
        del self.rows[row]


def scripted_token(tokens: list[int], seed: int) -> int:
    """What the scripted model says after ``tokens``: every one of them matters, and so does the seed."""
    value = seed
    for token in tokens:
        value = (value * 1_000_003 + token) % 2_147_483_647
    return 10 + value % 900


@dataclass
class Result:
    """What came of one request."""

    tokens: dict[int, list[int]] = field(default_factory=dict)
    reasons: dict[int, FinishReason] = field(default_factory=dict)
    events: list[Event] = field(default_factory=list)
    started: Started | None = None
    embedding: tuple[float, ...] | None = None
    finished: bool = False
    error: RequestError | None = None

    @property
    def ended(self) -> bool:
        return self.finished or self.error is not None

    def add(self, event: Event) -> None:
        assert not self.ended, f"{event} after the end"
        self.events.append(event)
        match event:
            case Started():
                assert self.started is None
                self.started = event
            case Token():
                assert self.started is not None
                assert event.index not in self.reasons, "a token after its choice finished"
                self.tokens.setdefault(event.index, []).append(event.token)
            case ChoiceFinished():
                assert event.index not in self.reasons
                self.reasons[event.index] = event.reason
            case Embedding():
                self.embedding = event.values
            case Finished():
                self.finished = True
            case Failed():
                self.error = event.error


class World:
    """Scheduler, pool, sampler, scripted model, and everybody's results. Every invariant is checked."""

    def __init__(self, *, prefix_cache: bool = True, check: bool = True, **config: Any) -> None:
        small: dict[str, Any] = {
            "num_blocks": 64,
            "block_size": 4,
            "context_length": 128,
            "max_batch_tokens": 32,
            "max_batch_requests": 8,
            "window_max_s": 0.0,
            "eos_token_ids": (EOS,),
        }
        self.config = SchedulerConfig(**{**small, **config})
        self.pool = _C.BlockPool(self.config.num_blocks, self.config.block_size, prefix_cache)
        self.sampler = FakeSampler()
        self.scheduler = Scheduler(self.config, self.pool, self.sampler, check=check)
        self.results: dict[str, Result] = {}
        self.specs: dict[str, RequestSpec] = {}
        self.now = 0.0
        self.plans: list[Plan] = []
        self.poison: set[int] = set()
        self.say: Callable[[list[int], int], int] = scripted_token

    def submit(self, spec: RequestSpec) -> Result:
        self.scheduler.submit(spec, self.now)
        self.specs[spec.request_id] = spec
        return self.results.setdefault(spec.request_id, Result())

    def plan(self) -> Plan:
        plan = self.scheduler.plan(self.now)
        self.route(plan.events)
        return plan

    def step(self, seconds: float = 0.01) -> Plan:
        """One step, if there is anything to run; it takes ``seconds``."""
        plan = self.plan()
        self.now += seconds
        if plan:
            self.plans.append(plan)
            self.route(self.scheduler.complete(plan, self.compute(plan), self.now))
            self.scheduler.adjust_seconds(plan, seconds)
        return plan

    def run(self, most: int = 10_000, seconds: float = 0.01) -> None:
        """Steps until no request is open."""
        for _ in range(most):
            if self.scheduler.idle:
                self.plan()
                return
            self.step(seconds)
        raise AssertionError(f"not done after {most} steps")

    def compute(self, plan: Plan, skip: Collection[int] = ()) -> StepOutcome:
        """What the scripted model and sampler make of a plan."""
        rows, tokens = [], []
        hidden: dict[int, torch.Tensor] = {}
        failed: dict[int, RequestError] = {}
        for row, take in zip(plan.rows.tolist(), plan.takes.tolist(), strict=True):
            known = self.pool.tokens(row).tolist()
            assert len(self.pool.blocks(row)) * self.config.block_size >= (
                self.pool.computed(row) + take
            )
            if self.poison.intersection(known):
                failed[row] = StepFailed("poison")
            elif self.pool.computed(row) + take < len(known) or row in skip:
                continue
            elif row in plan.embeds:
                hidden[row] = torch.tensor([float(sum(known)), 1.0])
            else:
                rows.append(row)
                tokens.append(self.say(known, self.sampler.rows[row]["seed"]))
        return StepOutcome(sampled(rows, tokens), hidden, failed)

    def route(self, events: tuple[Event, ...]) -> None:
        for event in events:
            self.results[event.request_id].add(event)

    def expected(self, spec: RequestSpec, index: int = 0) -> list[int]:
        """What the model says to a request that runs alone."""
        tokens, seed = list(spec.prompt), spec.seed_for(index)
        for _ in range(spec.sampling.max_tokens):
            tokens.append(self.say(tokens, seed))
        return tokens[len(spec.prompt) :]

    def assert_nothing_held(self) -> None:
        statistics = self.pool.statistics()
        assert (statistics.rows, statistics.owned) == (0, 0)
        assert statistics.free + statistics.cached == self.config.num_blocks
        assert self.sampler.rows == {}
        assert self.scheduler.idle
        found = self.scheduler.statistics()
        assert (found.open_requests, found.waiting_sequences, found.line.waiting_tokens) == (
            0,
            0,
            0,
        )

    def assert_complete(self, spec: RequestSpec) -> None:
        """The request finished, and every choice says what it would have said alone."""
        result = self.results[spec.request_id]
        assert result.finished, result.error
        if spec.task is Task.EMBED:
            assert result.embedding == (float(sum(spec.prompt)), 1.0)
            return
        for index in range(spec.n):
            assert result.tokens[index] == self.expected(spec, index)
            assert result.reasons[index] is FinishReason.LENGTH


def sampled(rows: list[int], tokens: list[int]) -> list[Sampled]:
    """One part with two top alternatives for each row, the token itself first."""
    if not rows:
        return []
    ids = torch.tensor([[token, token + 1] for token in tokens], dtype=torch.int32)
    logprobs = torch.full((len(rows),), -0.5)
    return [
        Sampled(
            torch.tensor(rows, dtype=torch.int32),
            torch.tensor(tokens, dtype=torch.int32),
            logprobs,
            ids,
            torch.stack([logprobs, logprobs - 1], dim=1),
        )
    ]


__all__ = [
    "EOS",
    "FakeSampler",
    "FinishReason",
    "Result",
    "SamplingParams",
    "Task",
    "World",
    "make_spec",
    "sampled",
    "scripted_token",
]
