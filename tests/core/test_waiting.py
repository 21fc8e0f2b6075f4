"""Order in the waiting line: priority and ageing inside a tenant, fair share and classes between tenants."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from pyserve.core import waiting
from pyserve.core.sequence import Request, Sequence
from pyserve.core.waiting import WaitingLine
from tests.core.harness import make_spec


class Line:
    """A waiting line with a clock, and requests made on the spot."""

    def __init__(self, ageing_s: float = 10.0) -> None:
        self.line = WaitingLine(ageing_s)
        self.ageing_s = ageing_s
        self.now = 0.0
        self.count = 0

    def add(self, prompt: int = 5, **fields: Any) -> Sequence:
        spec = make_spec(prompt, **fields)
        request = Request.of(spec, self.now, self.count, ageing_s=self.ageing_s, eos_token_ids=())
        self.count += 1
        self.line.push(request.sequences[0])
        return request.sequences[0]

    def serve(self) -> Sequence | None:
        """The next one is admitted, charged for its prompt, and over."""
        sequence = self.line.pop(self.now)
        if sequence is not None:
            self.line.charge(sequence, sequence.remaining)
            self.line.run(sequence, 1)
            self.line.run(sequence, -1)
        return sequence

    def order(self) -> list[Sequence]:
        served = []
        while (sequence := self.serve()) is not None:
            served.append(sequence)
        return served


def test_higher_priority_first_then_arrival() -> None:
    line = Line()
    a, b, c = line.add(), line.add(priority=3), line.add()
    d = line.add(priority=3)
    assert line.order() == [b, d, a, c]


def test_waiting_for_ageing_s_weighs_as_much_as_one_step_of_priority() -> None:
    line = Line(ageing_s=10)
    old = line.add(priority=0)
    line.now = 9.9
    high = line.add(priority=1)
    line.now = 10.1
    late = line.add(priority=1)
    assert line.order() == [high, old, late]


def test_nearer_deadline_first_among_equals() -> None:
    line = Line()
    a, b, c = line.add(), line.add(deadline_s=9.0), line.add(deadline_s=4.0)
    assert line.order() == [c, b, a]


def test_low_priority_is_served_in_the_end_under_a_flood_of_high() -> None:
    line = Line(ageing_s=10)
    low = line.add(priority=0)
    served = []
    while low not in served:
        line.add(priority=5)
        line.now += 1.0
        served.append(line.serve())
        assert line.now < 60
    assert line.now >= 50


def test_tenants_share_by_weight_whatever_each_asks() -> None:
    line = Line()
    for _ in range(400):
        line.add(10, tenant="light", weight=1.0)
        line.add(10, tenant="heavy", weight=3.0)
        line.add(40, tenant="long", weight=1.0)
    tokens: Counter[str] = Counter()
    for _ in range(200):
        sequence = line.serve()
        assert sequence is not None
        tokens[sequence.request.spec.tenant] += sequence.length
    assert abs(tokens["heavy"] / tokens["light"] - 3) < 0.3
    assert abs(tokens["long"] / tokens["light"] - 1) < 0.3


def test_flood_of_one_tenant_does_not_delay_another() -> None:
    line = Line()
    for _ in range(1000):
        line.add(tenant="flood")
    line.now = 100.0  # however old the flood has grown
    line.serve()
    polite = line.add(tenant="polite")
    assert polite in (line.serve(), line.serve())


def test_returning_tenant_has_saved_nothing_up() -> None:
    line = Line()
    line.add(tenant="idler")
    line.serve()
    for _ in range(200):
        line.add(10, tenant="worker")
    for _ in range(100):
        line.serve()
    for _ in range(100):
        line.add(10, tenant="idler")
    served = [line.serve() for _ in range(20)]
    assert 9 <= sum(s is not None and s.request.spec.tenant == "idler" for s in served) <= 11


def test_priority_class_goes_before_fair_share() -> None:
    line = Line()
    for _ in range(20):
        line.add(100, tenant="busy")
    for _ in range(10):
        line.serve()
    line.add(tenant="other")
    urgent = line.add(100, tenant="busy", priority=1)
    assert line.serve() is urgent


def test_ageing_between_tenants_lifts_into_the_top_class_and_fair_share_decides_there() -> None:
    line = Line(ageing_s=1.0)
    low = [line.add(tenant="low") for _ in range(10)]
    for i in range(40):
        line.add(tenant="high", priority=5)
        line.now = i * 0.1
    assert line.now < 5
    first = [line.serve() for _ in range(5)]
    assert not set(first) & set(low)
    line.now = 20.0
    later = [line.serve() for _ in range(10)]
    assert len(set(later) & set(low)) >= 5


def test_taking_back_a_charge_restores_the_order() -> None:
    line = Line()
    a = line.add(50, tenant="a")
    b = line.add(50, tenant="b")
    assert line.line.pop(0.0) is a
    line.line.charge(a, 50)
    line.line.charge(a, -50)
    line.line.push(a)
    assert line.order() == [a, b]


def test_removed_sequences_are_skipped_and_leave_no_trace() -> None:
    line = Line()
    sequences = [line.add() for _ in range(1000)]
    for sequence in sequences[:-1]:
        line.line.remove(sequence)
    (tenant,) = line.line._tenants.values()
    assert len(tenant.heap) <= 66
    assert len(line.line) == 1
    assert line.line.tokens == 5
    assert line.order() == [sequences[-1]]


def test_idle_tenants_are_forgotten_beyond_a_limit() -> None:
    line = Line()
    for i in range(waiting.MAX_IDLE_TENANTS + 100):
        line.add(tenant=str(i))
        line.serve()
    assert len(line.line._tenants) <= waiting.MAX_IDLE_TENANTS
    line.line.check([], [])


def test_entries_do_not_pile_up() -> None:
    line = Line()
    for i in range(2000):
        line.add(tenant=str(i % 3), priority=i % 2)
        sequence = line.line.pop(line.now)
        assert sequence is not None
        line.line.push(sequence)
        if i % 4 == 0:
            line.serve()
        line.now += 0.01
    sizes = [len(c.by_age) + len(c.by_virtual) for c in line.line._classes.values()]
    assert max(sizes) < 300


@given(st.integers(0, 2**32), st.integers(1, 5))
def test_random_use_keeps_the_counts_and_serves_everybody(seed: int, tenants: int) -> None:
    rng = random.Random(seed)
    line = Line(ageing_s=1.0)
    waiting_now: set[Sequence] = set()
    for _ in range(120):
        line.now += rng.random()
        match rng.randrange(4):
            case 0 | 1:
                waiting_now.add(
                    line.add(tenant=str(rng.randrange(tenants)), priority=rng.randrange(-2, 3))
                )
            case 2 if waiting_now:
                sequence = rng.choice(sorted(waiting_now, key=lambda s: s.rank))
                line.line.remove(sequence)
                waiting_now.remove(sequence)
            case _:
                served = line.serve()
                waiting_now.discard(served)  # type: ignore[arg-type]
        line.line.check(waiting_now, [])
    assert set(line.order()) == waiting_now
