"""Random submits, cancels, stops, steps and waits: whatever happens, every accepted request gets exactly one
end, survivors say what they would have said alone, and nothing stays behind.

The harness checks every invariant of scheduler and pool after every plan and every completed step, and that
no event follows an end.
"""

from __future__ import annotations

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    initialize,
    invariant,
    multiple,
    precondition,
    rule,
)

from pyserve.core.spec import RequestSpec, Task
from pyserve.core.step import Plan
from pyserve.errors import Cancelled, DeadlineExceeded, InvalidRequest, StepFailed
from tests.core.harness import World, make_spec

POISON = 999_999
PREFIX = tuple(range(50, 62))


class SchedulerMachine(RuleBasedStateMachine):
    requests = Bundle("requests")

    @initialize(
        num_blocks=st.sampled_from([12, 16, 24, 64]),
        max_batch_requests=st.integers(1, 6),
        max_batch_tokens=st.sampled_from([6, 9, 32]),
        prefix_cache=st.booleans(),
        window_s=st.sampled_from([0.0, 0.004]),
        headroom_tokens=st.sampled_from([0, 8, 64]),
        max_prefill_s=st.sampled_from([1e-6, 0.01, 1.0]),
    )
    def begin(self, window_s: float, **config: object) -> None:
        self.world = World(window_max_s=window_s, **config)  # type: ignore[arg-type]
        self.world.poison = {POISON}
        self.under_way: Plan | None = None
        self.touched: set[str] = set()

    @rule(
        target=requests,
        shared=st.integers(0, 12),
        own=st.integers(1, 20),
        max_tokens=st.integers(1, 16),
        n=st.sampled_from([1, 1, 1, 2, 4]),
        priority=st.integers(-1, 2),
        tenant=st.sampled_from(["", "a", "b"]),
        salt=st.integers(0, 1),
        timeout_s=st.one_of(st.none(), st.floats(0.001, 0.5)),
        embed=st.sampled_from([False] * 5 + [True]),
        poison=st.sampled_from([False] * 9 + [True]),
    )
    def submit(
        self,
        shared: int,
        own: int,
        n: int,
        salt: int,
        timeout_s: float | None,
        embed: bool,
        poison: bool,
        **fields: object,
    ) -> object:
        prompt = [*PREFIX[:shared], *range(100 * own, 100 * own + own)]
        if poison:
            prompt[-1] = POISON
        spec = make_spec(
            tuple(prompt),
            n=1 if embed else n,
            cache_salt=salt,
            task=Task.EMBED if embed else Task.GENERATE,
            deadline_s=None if timeout_s is None else self.world.now + timeout_s,
            **fields,
        )
        try:
            self.world.submit(spec)
        except InvalidRequest:
            assert len(prompt) + spec.sampling.max_tokens > self.world.config.max_sequence_tokens
            return multiple()
        return spec

    @rule(spec=requests)
    def cancel(self, spec: RequestSpec) -> None:
        self.touched.add(spec.request_id)
        self.world.scheduler.cancel(spec.request_id)

    @rule(spec=requests, index=st.integers(0, 3))
    def stop(self, spec: RequestSpec, index: int) -> None:
        self.touched.add(spec.request_id)
        self.world.scheduler.stop_choice(spec.request_id, index)

    @rule(seconds=st.floats(0, 0.3))
    def wait(self, seconds: float) -> None:
        self.world.now += seconds

    @precondition(lambda self: self.under_way is None)
    @rule(steps=st.integers(1, 6))
    def step(self, steps: int) -> None:
        for _ in range(steps):
            self.world.step()

    @precondition(lambda self: self.under_way is None)
    @rule()
    def plan(self) -> None:
        self.under_way = self.world.plan() or None

    @precondition(lambda self: self.under_way is not None)
    @rule()
    def complete(self) -> None:
        plan, self.under_way = self.under_way, None
        assert plan is not None
        self.world.now += 0.01
        outcome = self.world.compute(plan)
        self.world.route(self.world.scheduler.complete(plan, outcome, self.world.now))

    @invariant()
    def bounded(self) -> None:
        if hasattr(self, "world") and self.world.plans:
            plan, config = self.world.plans[-1], self.world.config
            assert len(plan.rows) <= config.max_batch_requests
            assert int(plan.takes.sum()) <= config.max_batch_tokens

    def teardown(self) -> None:
        if not hasattr(self, "world"):
            return
        if self.under_way is not None:
            self.complete()
        self.world.run()
        self.world.assert_nothing_held()
        for request_id, spec in self.world.specs.items():
            self.judge(request_id, spec)

    def judge(self, request_id: str, spec: RequestSpec) -> None:
        result = self.world.results[request_id]
        assert result.ended
        if result.error is None:
            if request_id not in self.touched:
                self.world.assert_complete(spec)
        elif isinstance(result.error, StepFailed):
            assert POISON in spec.prompt
        elif isinstance(result.error, DeadlineExceeded):
            assert spec.deadline_s is not None
        else:
            assert isinstance(result.error, Cancelled)
            assert request_id in self.touched
        for index, tokens in result.tokens.items():
            assert tokens == self.world.expected(spec, index)[: len(tokens)]


SchedulerMachine.TestCase.settings = settings(
    max_examples=60,
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
TestScheduler = SchedulerMachine.TestCase
