"""What the scheduler does with requests, one behaviour each, on a scripted model."""

from __future__ import annotations

import pytest

from pyserve.core.events import FinishReason, Token
from pyserve.core.spec import Task
from pyserve.core.step import StepOutcome
from pyserve.errors import Cancelled, ContextLengthExceeded, DeadlineExceeded, InvalidRequest
from tests.core.harness import EOS, World, make_spec


def test_request_gives_its_tokens_and_leaves_nothing_behind() -> None:
    world = World()
    spec = make_spec(5, max_tokens=6)
    result = world.submit(spec)
    world.run()
    world.assert_complete(spec)
    assert result.started is not None
    world.assert_nothing_held()
    assert len(world.plans) == 6


def test_long_prompt_is_prefilled_in_chunks() -> None:
    world = World()
    spec = make_spec(90, max_tokens=2)
    world.submit(spec)
    world.run()
    assert [plan.takes.tolist() for plan in world.plans] == [[32], [32], [26], [1]]
    world.assert_complete(spec)


def test_decode_comes_before_prefill_and_both_share_a_step() -> None:
    world = World()
    first = make_spec(4, max_tokens=20)
    world.submit(first)
    world.step()
    world.submit(make_spec(100, priority=100))
    plan = world.step()
    assert plan.decode_sequences == 1
    assert plan.prefill_tokens > 0
    assert len(world.results[first.request_id].tokens[0]) == 2


@pytest.mark.parametrize("n", [2, 5])
def test_choices_share_the_blocks_of_their_prompt(n: int) -> None:
    world = World(prefix_cache=False)
    spec = make_spec(18, n=n, max_tokens=5)
    world.submit(spec)
    world.step()
    plan = world.step()
    # The first decodes; each other one computes the tail of the prompt that fills no block.
    assert plan.takes.tolist() == [1] + [2] * (n - 1)
    world.run()
    world.assert_complete(spec)
    world.assert_nothing_held()


def test_more_choices_than_places_still_all_arrive() -> None:
    world = World(max_batch_requests=2)
    spec = make_spec(10, n=7)
    world.submit(spec)
    world.run()
    world.assert_complete(spec)
    world.assert_nothing_held()


def test_first_choice_may_end_before_the_others_begin() -> None:
    world = World(max_batch_requests=1)
    spec = make_spec(10, n=3, max_tokens=1)
    world.submit(spec)
    world.run()
    world.assert_complete(spec)


def test_shared_prefix_is_not_computed_again() -> None:
    world = World()
    prompt = tuple(range(100, 121))
    world.submit(make_spec(prompt))
    world.run()
    again = world.submit(make_spec(prompt))
    plan = world.step()
    assert plan.takes.tolist() == [1]
    assert again.started is not None
    assert again.started.cached_tokens == 20


def test_prefixes_of_different_salts_are_kept_apart() -> None:
    world = World()
    prompt = tuple(range(100, 121))
    world.submit(make_spec(prompt, cache_salt=1))
    world.run()
    other = world.submit(make_spec(prompt, cache_salt=2))
    world.run()
    assert other.started is not None
    assert other.started.cached_tokens == 0


def test_eos_ends_a_choice_with_stop() -> None:
    world = World()
    world.say = lambda tokens, _: EOS if len(tokens) == 7 else 9
    result = world.submit(make_spec(5, max_tokens=50))
    world.run()
    assert result.tokens == {0: [9, 9, EOS]}
    assert result.reasons == {0: FinishReason.STOP}


def test_ignore_eos_goes_on_to_the_length() -> None:
    world = World()
    world.say = lambda tokens, _: EOS
    result = world.submit(make_spec(5, max_tokens=6, ignore_eos=True))
    world.run()
    assert result.tokens == {0: [EOS] * 6}
    assert result.reasons == {0: FinishReason.LENGTH}


def test_stop_token_ids_end_a_choice_even_with_ignore_eos() -> None:
    world = World()
    world.say = lambda tokens, _: 77 if len(tokens) == 6 else EOS
    result = world.submit(make_spec(5, max_tokens=9, ignore_eos=True, stop_token_ids=(77,)))
    world.run()
    assert result.tokens == {0: [EOS, 77]}
    assert result.reasons == {0: FinishReason.STOP}


def test_min_tokens_outlast_a_stop_token_and_ban_it_in_the_sampler() -> None:
    world = World()
    world.say = lambda tokens, _: EOS
    result = world.submit(make_spec(5, max_tokens=9, min_tokens=3, stop_token_ids=(77,)))
    world.step()
    (params,) = world.sampler.rows.values()
    assert params["banned_until_min"] == [EOS, 77]
    assert params["min_tokens"] == 3
    world.run()
    assert result.tokens == {0: [EOS] * 3}


def test_logprobs_come_as_asked() -> None:
    world = World()
    none, chosen, top = (world.submit(make_spec(3, logprobs=k)) for k in (None, 0, 2))
    world.run()
    widths = []
    for result in (none, chosen, top):
        found = [e.logprobs for e in result.events if isinstance(e, Token)]
        widths.append({None if x is None else len(x.top) for x in found})
    assert widths == [{None}, {0}, {2}]


def test_each_choice_draws_with_its_own_seed() -> None:
    world = World()
    spec = make_spec(5, n=3, seed=41)
    world.submit(spec)
    world.step()
    world.step()
    seeds = {params["seed"] for params in world.sampler.rows.values()}
    assert seeds == {spec.seed_for(i) for i in range(3)}


def test_embedding_takes_one_pass_and_no_sampler_row() -> None:
    world = World()
    spec = make_spec(40, task=Task.EMBED)
    world.submit(spec)
    world.step()
    assert world.sampler.rows == {}
    world.run()
    world.assert_complete(spec)
    world.assert_nothing_held()


@pytest.mark.parametrize("steps", [0, 1, 2, 4, 5])
def test_cancel_at_any_point_frees_everything_by_the_next_boundary(steps: int) -> None:
    world = World()
    spec = make_spec(80, n=2, max_tokens=20)
    result = world.submit(spec)
    for _ in range(steps):
        world.step()
    world.scheduler.cancel(spec.request_id)
    plan = world.plan()
    assert not plan
    assert isinstance(result.error, Cancelled)
    world.assert_nothing_held()


def test_cancel_while_a_step_runs_waits_for_its_end() -> None:
    world = World()
    spec = make_spec(5)
    result = world.submit(spec)
    plan = world.plan()
    world.scheduler.cancel(spec.request_id)
    world.route(world.scheduler.complete(plan, world.compute(plan), world.now))
    assert result.error is None
    world.plan()
    assert isinstance(result.error, Cancelled)
    world.assert_nothing_held()


def test_cancel_with_an_error_ends_with_that_error_and_unknown_ids_are_nothing() -> None:
    world = World()
    spec = make_spec(5)
    result = world.submit(spec)
    error = Cancelled("shutting down")
    world.scheduler.cancel(spec.request_id, error)
    world.scheduler.cancel(spec.request_id)
    world.scheduler.cancel("nobody")
    world.plan()
    assert result.error is error


def test_stopped_choice_ends_with_stop_and_the_others_go_on() -> None:
    world = World()
    spec = make_spec(5, n=2, max_tokens=10)
    result = world.submit(spec)
    world.step()
    world.step()
    world.scheduler.stop_choice(spec.request_id, 0)
    world.scheduler.stop_choice(spec.request_id, 0)
    world.scheduler.stop_choice(spec.request_id, 7)
    world.run()
    assert result.reasons == {0: FinishReason.STOP, 1: FinishReason.LENGTH}
    assert len(result.tokens[0]) == 2
    assert result.tokens[1] == world.expected(spec, 1)
    world.assert_nothing_held()


def test_deadline_in_line_expires_without_running() -> None:
    world = World(max_batch_requests=1)
    world.submit(make_spec(5, max_tokens=50))
    world.step()
    late = world.submit(make_spec(5, deadline_s=0.1))
    world.run()
    assert isinstance(late.error, DeadlineExceeded)
    assert late.started is None


def test_deadline_while_running_ends_it() -> None:
    world = World()
    late = world.submit(make_spec(5, max_tokens=100, deadline_s=0.055))
    world.run()
    assert isinstance(late.error, DeadlineExceeded)
    assert 0 < len(late.tokens[0]) <= 6
    world.assert_nothing_held()


@pytest.mark.parametrize("task", [Task.GENERATE, Task.EMBED])
def test_what_a_step_gives_after_the_deadline_is_too_late(task: Task) -> None:
    world = World()
    late = make_spec(5, max_tokens=1, task=task, deadline_s=1.0)
    other = make_spec(5, max_tokens=2)
    results = [world.submit(spec) for spec in (late, other)]
    plan = world.plan()
    outcome = world.compute(plan)
    world.route(world.scheduler.complete(plan, outcome, 1.5))
    assert isinstance(results[0].error, DeadlineExceeded)
    assert results[0].tokens == {}
    assert results[0].embedding is None
    assert world.scheduler.statistics().expired_total == 1
    world.run()
    world.assert_complete(other)
    world.assert_nothing_held()


def test_poison_fails_alone_with_all_its_choices() -> None:
    world = World()
    world.poison = {666}
    good = [make_spec(6, n=2) for _ in range(3)]
    bad = make_spec((1, 666, 3), n=3)
    for spec in (good[0], bad, *good[1:]):
        world.submit(spec)
    world.run()
    for spec in good:
        world.assert_complete(spec)
    assert world.results[bad.request_id].error is not None
    world.assert_nothing_held()


def test_failure_of_one_choice_ends_its_request() -> None:
    world = World()
    spec = make_spec(6, n=3, max_tokens=9)
    result = world.submit(spec)
    world.step()
    world.step()
    world.poison = set(result.tokens[1])
    world.run()
    assert result.error is not None
    world.assert_nothing_held()


def test_higher_priority_runs_first_and_arrival_decides_inside() -> None:
    world = World(max_batch_requests=1)
    world.submit(make_spec(3, max_tokens=2))
    world.step()
    specs = [make_spec(3, priority=p) for p in (0, 1, 0, 5)]
    for spec in specs:
        world.submit(spec)
        world.now += 0.001
    world.run()
    started = sorted(specs, key=lambda s: world.results[s.request_id].started.queue_s)  # type: ignore[union-attr]
    assert started == [specs[i] for i in (3, 1, 0, 2)]


def test_higher_priority_takes_the_place_of_a_lower_one_that_loses_nothing() -> None:
    world = World(max_batch_requests=2)
    low = [make_spec(9, max_tokens=20) for _ in range(2)]
    for spec in low:
        world.submit(spec)
    world.step()
    world.step()
    high = make_spec(5, max_tokens=3, priority=1)
    world.submit(high)
    for _ in range(3):
        world.step()
    world.assert_complete(high)
    assert world.scheduler.statistics().preemptions_total == 1
    assert len(world.results[low[0].request_id].tokens[0]) == 5
    assert world.step().takes.tolist() == [1, 1]  # back, and nothing is computed again
    world.run()
    for spec in low:
        world.assert_complete(spec)


def test_higher_priority_takes_the_memory_of_lower_ones() -> None:
    world = World(num_blocks=20)
    low = [make_spec(16, max_tokens=20) for _ in range(4)]
    for spec in low:
        world.submit(spec)
    for _ in range(4):
        world.step()
    high = make_spec(40, max_tokens=2, priority=1)
    world.submit(high)
    for _ in range(8):
        world.step()
    world.assert_complete(high)
    assert not any(world.results[spec.request_id].ended for spec in low)
    world.run()
    for spec in low:
        world.assert_complete(spec)
    world.assert_nothing_held()


def test_equal_priorities_never_make_way_for_each_other() -> None:
    world = World(max_batch_requests=1)
    for _ in range(4):
        world.submit(make_spec(5))
    world.run()
    assert world.scheduler.statistics().preemptions_total == 0


def test_tenants_get_their_shares_of_a_busy_engine() -> None:
    world = World(max_batch_requests=4, check=False)
    for _ in range(150):
        world.submit(make_spec(8, max_tokens=6, tenant="a", weight=1.0))
        world.submit(make_spec(8, max_tokens=6, tenant="b", weight=2.0))
    for _ in range(300):
        world.step()
    done = {"a": 0, "b": 0}
    for request_id, spec in world.specs.items():
        done[spec.tenant] += world.results[request_id].finished
    assert done["b"] / done["a"] == pytest.approx(2, rel=0.1)


def test_embedding_as_large_as_the_pool_runs_and_a_larger_one_is_refused() -> None:
    world = World(num_blocks=8)
    spec = make_spec(32, task=Task.EMBED)
    world.submit(spec)
    world.run()
    world.assert_complete(spec)
    with pytest.raises(ContextLengthExceeded):
        world.submit(make_spec(33, task=Task.EMBED))


def test_squeezed_sequences_are_preempted_and_still_say_the_same() -> None:
    world = World(num_blocks=16)
    specs = [make_spec(8, max_tokens=24) for _ in range(6)]
    for spec in specs:
        world.submit(spec)
    world.run()
    assert world.scheduler.statistics().preemptions_total > 0
    for spec in specs:
        world.assert_complete(spec)
    world.assert_nothing_held()


def test_victim_is_not_readmitted_into_the_same_squeeze() -> None:
    world = World(num_blocks=24, headroom_tokens=1000)
    specs = [make_spec(8, max_tokens=40) for _ in range(6)]
    for spec in specs:
        world.submit(spec)
    world.run()
    for spec in specs:
        world.assert_complete(spec)
    # With room for two and with the whole remaining need as headroom, each is squeezed out once at most.
    assert world.scheduler.statistics().preemptions_total <= 4


def test_request_as_large_as_the_pool_runs() -> None:
    world = World(num_blocks=8)
    spec = make_spec(20, max_tokens=13)
    other = make_spec(8, max_tokens=8)
    world.submit(other)
    world.submit(spec)
    world.run()
    world.assert_complete(spec)
    world.assert_complete(other)


def test_what_can_never_fit_is_refused_at_submit() -> None:
    world = World(num_blocks=8)
    with pytest.raises(ContextLengthExceeded, match="KV cache"):
        world.submit(make_spec(20, max_tokens=14))
    with pytest.raises(ContextLengthExceeded, match="context"):
        World().submit(make_spec(120, max_tokens=9))
    for bad in (make_spec(()), make_spec(3, n=0), make_spec(3, max_tokens=0)):
        with pytest.raises(InvalidRequest):
            world.submit(bad)
    with pytest.raises(InvalidRequest, match="n must be 1"):
        world.submit(make_spec(3, n=2, task=Task.EMBED))
    assert world.scheduler.idle


def test_id_in_use_is_refused() -> None:
    world = World()
    world.submit(make_spec(3, request_id="same"))
    with pytest.raises(InvalidRequest, match="in use"):
        world.scheduler.submit(make_spec(3, request_id="same"), 0.0)


def test_idle_engine_waits_for_company_until_the_window_closes() -> None:
    world = World(window_min_s=0.005, window_max_s=0.005)
    world.submit(make_spec(3))
    plan = world.plan()
    assert not plan
    assert plan.idle_until == 0.005
    world.submit(make_spec(3))
    world.now = plan.idle_until
    assert len(world.step().rows) == 2


def test_busy_engine_is_never_delayed_by_the_window() -> None:
    world = World(window_min_s=1.0, window_max_s=1.0)
    world.submit(make_spec(3, max_tokens=1))
    world.now = world.plan().idle_until or 0.0
    plan = world.plan()
    world.submit(make_spec(3))  # comes while the only running one computes its last token
    world.route(world.scheduler.complete(plan, world.compute(plan), world.now))
    assert world.step()


def test_deadline_inside_the_window_closes_it() -> None:
    world = World(window_min_s=1.0, window_max_s=1.0)
    world.submit(make_spec(3, deadline_s=0.5))
    assert world.plan()


def test_plan_and_complete_alternate() -> None:
    world = World()
    world.submit(make_spec(3))
    plan = world.plan()
    with pytest.raises(RuntimeError, match="not been completed"):
        world.plan()
    outcome = world.compute(plan)
    world.route(world.scheduler.complete(plan, outcome, 0.0))
    with pytest.raises(RuntimeError, match="not the one"):
        world.scheduler.complete(plan, outcome, 0.0)


def test_outcome_that_does_not_fit_the_plan_changes_nothing() -> None:
    world = World()
    world.submit(make_spec(3))
    plan = world.plan()
    with pytest.raises(RuntimeError, match="the outcome is of"):
        world.scheduler.complete(plan, StepOutcome(), 0.0)
    world.scheduler.check()
    world.route(world.scheduler.complete(plan, world.compute(plan), 0.0))
    world.run()


def test_statistics_follow_what_happens() -> None:
    world = World(max_batch_requests=2)
    for _ in range(3):
        world.submit(make_spec(5))
    world.step()
    found = world.scheduler.statistics()
    assert (found.open_requests, found.waiting_sequences, found.decode_sequences) == (3, 1, 2)
    assert (found.prefill_tokens_total, found.output_tokens_total) == (10, 2)
    assert (found.last_batch_sequences, found.last_batch_tokens) == (2, 10)
    assert found.steptime.prefill_tokens_per_s == 1000
    world.run()
    found = world.scheduler.statistics()
    assert (found.finished_total, found.output_tokens_total) == (3, 12)


def test_only_as_many_as_there_is_room_for_are_touched_whatever_waits() -> None:
    world = World(check=False, max_batch_requests=4, num_blocks=20)
    for i in range(10_000):
        world.submit(make_spec(8, max_tokens=30, tenant=str(i % 100), priority=i % 3))
    for _ in range(40):
        world.step()
        # The running, those that were squeezed out, and the head of the line: nobody else has a row.
        preempted = world.scheduler.statistics().preemptions_total
        assert world.pool.statistics().rows <= 4 + 1 + preempted
    world.scheduler.check()
