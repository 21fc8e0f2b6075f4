"""The scheduler with the extension's own sampler: rows and parameters mean the same on both sides."""

from __future__ import annotations

import torch

from pyserve import _C
from pyserve.core.config import SchedulerConfig
from pyserve.core.events import ChoiceFinished, Event, FinishReason, Token
from pyserve.core.scheduler import Scheduler
from pyserve.core.spec import RequestSpec
from pyserve.core.step import Plan, Sampled, StepOutcome
from tests.core.harness import make_spec

VOCABULARY = 50
EOS = 7


def run(spec: RequestSpec) -> list[Event]:
    """Runs one request on logits that prefer EOS at every position, by a little."""
    config = SchedulerConfig(
        num_blocks=64, block_size=4, context_length=128, window_max_s=0.0, eos_token_ids=(EOS,)
    )
    pool, sampler = _C.BlockPool(64, 4, True), _C.SamplerState()
    scheduler = Scheduler(config, pool, sampler, check=True)
    scheduler.submit(spec, 0.0)
    events: list[Event] = []
    while not scheduler.idle:
        plan = scheduler.plan(0.0)
        events += plan.events
        events += scheduler.complete(plan, sample(pool, sampler, plan), 0.0)
    return events


def sample(pool: _C.BlockPool, sampler: _C.SamplerState, plan: Plan) -> StepOutcome:
    computed = [pool.computed(row) for row in plan.rows.tolist()]
    reached = [
        row
        for row, take, done in zip(plan.rows.tolist(), plan.takes.tolist(), computed, strict=True)
        if done + take == pool.length(row)
    ]
    rows = torch.tensor(reached, dtype=torch.int32)
    logits = torch.zeros(len(reached), VOCABULARY)
    logits[:, EOS] = 0.5
    return StepOutcome([Sampled(rows, *_C.sample(logits, pool, sampler, rows))])


def test_min_tokens_hold_off_the_end_of_sequence() -> None:
    prompt = (1, 2, 3, 4, 5, 6)
    events = run(make_spec(prompt, max_tokens=30, temperature=0.0, min_tokens=4))
    tokens = [e.token for e in events if isinstance(e, Token)]
    assert len(tokens) == 5
    assert EOS not in tokens[:4]
    assert tokens[4] == EOS
    reasons = [e.reason for e in events if isinstance(e, ChoiceFinished)]
    assert reasons == [FinishReason.STOP]


def test_parameters_reach_the_sampler() -> None:
    spec = make_spec(
        (1, 2, 3),
        n=2,
        max_tokens=5,
        temperature=0.9,
        top_p=0.95,
        top_k=20,
        min_p=0.01,
        frequency_penalty=0.5,
        presence_penalty=0.5,
        repetition_penalty=1.1,
        seed=2**64 - 1,
        logit_bias=((9, 100.0),),
        logprobs=3,
        ignore_eos=True,
    )
    tokens = [e for e in run(spec) if isinstance(e, Token)]
    assert [e.token for e in tokens] == [9] * 10
    assert all(e.logprobs is not None and len(e.logprobs.top) == 3 for e in tokens)
