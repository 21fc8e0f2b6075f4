"""Thousands of requests that leave at random points: nothing leaks, and nobody else notices.

The engine checks every invariant of the block pool and the scheduler after every step; the scripted
back-end's tokens depend on every slot of a sequence's context, so a block given back too early, twice or to
the wrong sequence shows as a wrong token in some survivor.
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field
from functools import cache

import pytest
import trio

from pyserve.backends.scripted import ScriptedBackend, StepCost
from pyserve.core.events import Token
from pyserve.core.spec import RequestSpec, Task
from pyserve.engine.engine import Engine
from pyserve.errors import DeadlineExceeded, QueueFull, StepFailed
from pyserve.testing.clock import run_mocked
from pyserve.testing.engine import make_spec, open_scripted_engine
from pyserve.testing.scripted import expected_tokens

PREFIXES = [tuple(range(10 * k, 10 * k + 9)) for k in range(4)]
POISON, NAN = 991, 992  # beyond the vocabulary: never sampled


@dataclass
class Tally:
    """How the clients fared, and what the survivors said."""

    outcomes: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)


@cache
def solo(prompt: tuple[int, ...], count: int) -> tuple[int, ...]:
    return tuple(expected_tokens(prompt, count))


def random_spec(rng: random.Random, now: float) -> RequestSpec:
    prompt = [
        *rng.choice(PREFIXES)[: rng.randrange(10)],
        *rng.choices(range(90), k=rng.randint(1, 30)),
    ]
    if rng.random() < 0.02:
        prompt[rng.randrange(len(prompt))] = rng.choice([POISON, NAN])
    return make_spec(
        prompt,
        max_tokens=rng.randint(1, 16),
        n=rng.choice([1, 1, 1, 2, 3]),
        task=Task.EMBED if rng.random() < 0.05 else Task.GENERATE,
        priority=rng.choice([0, 0, 0, 5, -5]),
        tenant=rng.choice(["", "a", "b"]),
        deadline_s=now + rng.uniform(0.01, 2.0) if rng.random() < 0.1 else None,
    )


async def client(engine: Engine, rng: random.Random, tally: Tally) -> None:
    """One request that stays, or leaves: after a time, after some events, or at once."""
    await trio.sleep(rng.uniform(0, 10))
    spec = random_spec(rng, engine.now())
    if spec.task is Task.EMBED and spec.n > 1:
        return
    patience_s = rng.choice([0.0, rng.uniform(0, 0.05), rng.uniform(0, 1), 1e9])
    looks = rng.choice([0, 1, rng.randint(1, 10), 10**9, 10**9])
    try:
        with trio.move_on_after(patience_s):
            await read(engine, spec, rng, looks, tally)
            return
        tally.outcomes["left by time"] += 1
    except (DeadlineExceeded, StepFailed, QueueFull) as error:
        tally.outcomes[type(error).__name__] += 1


async def read(
    engine: Engine, spec: RequestSpec, rng: random.Random, looks: int, tally: Tally
) -> None:
    tokens: dict[int, list[int]] = {}
    stopped = None
    async with engine.request(spec) as stream:
        async for events in stream:
            for event in events:
                if isinstance(event, Token):
                    tokens.setdefault(event.index, []).append(event.token)
            looks -= 1
            if looks <= 0:
                tally.outcomes["left by choice"] += 1
                return
            if stopped is None and rng.random() < 0.02:
                stopped = rng.randrange(spec.n)
                stream.stop_choice(stopped)
    tally.outcomes["finished"] += 1
    for index, said in tokens.items():
        expected = solo(spec.prompt, spec.sampling.max_tokens)
        if index == stopped:
            expected = expected[: len(said)]
        if tuple(said) != expected:
            tally.wrong.append(f"{spec}: {said} is not {expected}")


async def fuzz(seed: int, clients: int, num_blocks: int) -> Tally:
    rng, tally = random.Random(seed), Tally()
    backend = ScriptedBackend(cost=StepCost(base_s=0.01), poison_tokens=[POISON], nan_tokens=[NAN])
    async with open_scripted_engine(
        backend, num_blocks=num_blocks, max_waiting_requests=64
    ) as engine:
        async with trio.open_nursery() as nursery:
            for _ in range(clients):
                nursery.start_soon(client, engine, random.Random(rng.random()), tally)
        assert await engine.drained(60.0)
        pool = engine.statistics().loop.scheduler.pool
        assert pool.owned == 0
        assert pool.free + pool.cached == pool.num_blocks
        assert engine.statistics().unstarted_tokens == 0
    return tally


@pytest.mark.parametrize(("seed", "num_blocks"), [(1, 64), (2, 24), (3, 16), (4, 200)])
def test_cancelling_at_random_points_leaks_nothing(seed: int, num_blocks: int) -> None:
    tally = run_mocked(fuzz, seed, 600, num_blocks)
    assert tally.wrong == []
    assert tally.outcomes["finished"] > 50
    assert tally.outcomes["left by time"] > 50
    assert tally.outcomes["left by choice"] > 50
