"""How much prefill goes beside running requests: on simulated time, with a model of known speed."""

from __future__ import annotations

from typing import Any

import pytest

from pyserve.core.spec import RequestSpec
from pyserve.core.step import Plan
from tests.core.harness import World, make_spec

BASE_S, PREFILL_S, DECODE_S, ATTENDED_S = 4e-3, 6e-4, 7e-4, 2e-7


class Paced(World):
    """Steps take what is in them; notes when each request got its tokens."""

    def __init__(self, **config: Any) -> None:
        wide = {
            "num_blocks": 1024,
            "block_size": 16,
            "context_length": 8192,
            "max_batch_tokens": 512,
            "max_batch_requests": 32,
        }
        super().__init__(check=False, **{**wide, **config})
        self.say = lambda tokens, seed: 10 + (len(tokens) + seed) % 7
        self.steps_s: list[float] = []

    def turn(self) -> Plan:
        plan = self.plan()
        seconds = (
            BASE_S
            + PREFILL_S * plan.prefill_tokens
            + DECODE_S * plan.decode_sequences
            + ATTENDED_S * plan.attended_tokens
        )
        self.steps_s.append(seconds)
        self.now += seconds
        self.route(self.scheduler.complete(plan, self.compute(plan), self.now))
        self.scheduler.adjust_seconds(plan, seconds)
        return plan

    def streams(self, count: int) -> float:
        """So many requests that decode for long; returns the usual step."""
        for _ in range(count):
            self.submit(make_spec(20, max_tokens=4000))
        for _ in range(40):
            self.turn()
        return self.steps_s[-1]

    def until_first_token(self, spec: RequestSpec) -> list[float]:
        """The steps that it takes from now, in seconds."""
        begin = len(self.steps_s)
        while not self.results[spec.request_id].tokens:
            self.turn()
        return self.steps_s[begin:]


@pytest.mark.parametrize("count", [1, 8, 16])
def test_long_prompt_at_most_doubles_the_gap_of_those_who_run(count: int) -> None:
    world = Paced()
    usual_s = world.streams(count)
    long = make_spec(4096, max_tokens=1)
    world.submit(long)
    steps_s = world.until_first_token(long)
    assert max(steps_s) <= 2 * usual_s
    alone_s = PREFILL_S * 4096 + ATTENDED_S * 4096**2 / 2
    assert sum(steps_s) < 3.5 * alone_s  # and it does not starve


def test_ordinary_prompts_share_what_prefill_may_take() -> None:
    world = Paced(max_prefill_s=0.1)
    usual_s = world.streams(8)
    specs = [make_spec(200, max_tokens=1) for _ in range(6)]
    for spec in specs:
        world.submit(spec)
    steps_s = world.until_first_token(specs[-1])
    assert usual_s + 0.07 < max(steps_s) < usual_s + 0.13
    assert len(steps_s) <= 1 + 1200 * PREFILL_S / 0.07


def test_ordinary_prompts_pass_a_long_one_by() -> None:
    world = Paced()
    world.streams(8)
    longs = [make_spec(4096, max_tokens=1) for _ in range(2)]
    for spec in longs:
        world.submit(spec)
    for _ in range(5):
        world.turn()
    short = make_spec(100, max_tokens=1)
    world.submit(short)
    assert len(world.until_first_token(short)) <= 2
    assert not any(world.results[spec.request_id].ended for spec in longs)


def test_long_prompt_goes_on_beside_an_endless_row_of_ordinary_ones() -> None:
    world = Paced()
    world.streams(4)
    long = make_spec(2048, max_tokens=1)
    world.submit(long)
    for _ in range(400):
        world.submit(make_spec(64, max_tokens=2))
        world.turn()
        if world.results[long.request_id].ended:
            return
    raise AssertionError("the long prompt starves")


def test_alone_a_long_prompt_takes_whole_steps() -> None:
    world = Paced()
    long = make_spec(4096, max_tokens=1)
    world.submit(long)
    assert len(world.until_first_token(long)) == 8
