"""Running the same batch again takes a short way; it must choose what the long way would have chosen."""

from __future__ import annotations

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from pyserve.core.selection import Selector
from pyserve.core.step import Plan
from tests.core.harness import World, make_spec


class LongWay(Selector):
    """Forgets every step."""

    def _note_steady(self, *_: object) -> None:
        pass


def worlds(**config: Any) -> tuple[World, World]:
    short, long = World(**config), World(**config)
    scheduler = long.scheduler
    scheduler._selector = LongWay(scheduler._ledger, scheduler._steptime)
    return short, long


def content(plan: Plan) -> tuple[object, ...]:
    return (
        # Those who have just been admitted stand last, and by rank in the next long way: all the same.
        sorted(zip(plan.rows.tolist(), plan.takes.tolist(), strict=True)),
        plan.embeds,
        plan.events,
        plan.prefill_tokens,
        plan.decode_sequences,
        plan.attended_tokens,
    )


def test_a_batch_that_stays_is_run_again_as_it_was() -> None:
    world = World()
    for _ in range(3):
        world.submit(make_spec(4, max_tokens=8))
    world.step()
    plans = [world.step() for _ in range(6)]
    assert all(plan.rows is plans[0].rows for plan in plans[1:])
    assert [plan.attended_tokens - plans[0].attended_tokens for plan in plans] == [
        0, 3, 6, 9, 12, 15,
    ]  # fmt: skip


def test_who_arrives_above_a_full_batch_is_not_kept_waiting() -> None:
    world = World(max_batch_requests=2)
    for _ in range(2):
        world.submit(make_spec(4, max_tokens=30))
    for _ in range(4):
        world.step()
    world.submit(make_spec(4, max_tokens=2))
    assert world.step().rows is world.step().rows
    urgent = make_spec(4, max_tokens=2, priority=1)
    world.submit(urgent)
    world.run(seconds=0.001)
    assert world.results[urgent.request_id].finished


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(1, 20), st.integers(1, 12), st.integers(0, 1), st.integers(0, 9)),
        min_size=1,
        max_size=12,
    ),
    st.integers(10, 40),
)
def test_same_plans_as_by_the_long_way(
    arrivals: list[tuple[int, int, int, int]], num_blocks: int
) -> None:
    both = worlds(num_blocks=num_blocks, max_batch_requests=4)
    specs = [
        (make_spec(prompt, max_tokens=outputs, priority=priority), at)
        for prompt, outputs, priority, at in arrivals
    ]
    for step in range(400):
        for world in both:
            for spec, at in specs:
                if at * 3 == step:
                    world.submit(spec)
        short, long = (world.step() for world in both)
        assert content(short) == content(long)
        if step > 30 and both[0].scheduler.idle:
            break
    for spec, _ in specs:
        both[0].assert_complete(spec)
