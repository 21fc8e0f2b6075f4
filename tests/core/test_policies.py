"""The small policies: state table, batch window, step-time model, configuration."""

from __future__ import annotations

import itertools
import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pyserve.core.config import SchedulerConfig
from pyserve.core.state import TRANSITIONS, IllegalTransition, Signal, State, next_state
from pyserve.core.steptime import StepTime
from pyserve.core.window import BatchWindow


def test_every_pair_of_state_and_signal_is_in_the_table_or_raises() -> None:
    for state, signal in itertools.product(State, Signal):
        if signal in TRANSITIONS[state]:
            assert next_state(state, signal) is TRANSITIONS[state][signal]
        else:
            with pytest.raises(IllegalTransition, match=f"{signal} cannot happen to a {state}"):
                next_state(state, signal)


def test_final_states_are_final_and_every_other_can_end_in_each_of_them() -> None:
    final = {state for state in State if state.final}
    assert final == {State.FINISHED, State.CANCELLED, State.FAILED, State.EXPIRED}
    for state in set(State) - final:
        assert final <= set(TRANSITIONS[state].values())


NEVER = 1e9


def test_window_closes_by_time_and_not_before() -> None:
    window = BatchWindow(0.01, 0.01)
    assert window.wait_until(5.0, 0.1, NEVER) == 5.01
    assert window.wait_until(5.005, 0.2, NEVER) == 5.01
    assert window.wait_until(5.01, 0.2, NEVER) is None
    assert window.wait_until(6.0, 0.1, NEVER) == 6.01


def test_window_closes_when_the_batch_is_full_or_a_deadline_is_near() -> None:
    window = BatchWindow(0.01, 0.01)
    assert window.wait_until(0.0, 1.0, NEVER) is None
    assert window.wait_until(0.0, 0.1, 0.009) is None


def batches(window: BatchWindow, fill: float, count: int) -> list[float]:
    lengths = []
    now = 0.0
    for _ in range(count):
        while (until := window.wait_until(now, fill, NEVER)) is not None:
            now = until
        lengths.append(window.statistics().window_s)
    return lengths


def test_window_shrinks_when_batches_fill_and_grows_when_they_do_not() -> None:
    window = BatchWindow(0.001, 0.1)
    grown = batches(window, 0.5, 10)
    assert all(b == pytest.approx(a * 1.1) for a, b in itertools.pairwise(grown[6:]))
    shrunk = batches(window, 0.9, 10)
    assert all(b == pytest.approx(a * 0.95) for a, b in itertools.pairwise(shrunk))


@given(st.lists(st.floats(0, 1), max_size=100), st.floats(0, 0.01), st.floats(0.01, 1))
def test_window_stays_within_its_bounds(fills: list[float], least: float, most: float) -> None:
    window = BatchWindow(least, most)
    for fill in fills:
        batches(window, fill, 1)
        assert least <= window.statistics().window_s <= most


def test_window_leaves_zero_and_reaches_its_maximum() -> None:
    window = BatchWindow(0.0, 0.005)
    lengths = batches(window, 0.1, 100)
    assert lengths[0] > 0
    assert lengths[-1] == 0.005


def test_window_of_zero_maximum_never_waits() -> None:
    window = BatchWindow(0.0, 0.0)
    assert batches(window, 0.0, 5) == [0.0] * 5


TRUTH = (2e-3, 4e-4, 1e-4, 3e-8)


def true_seconds(prefill: int, decode: int, attended: int) -> float:
    base, a, b, c = TRUTH
    return base + a * prefill + b * decode + c * attended


def steps(count: int, seed: int = 1) -> list[tuple[int, int, int]]:
    rng = random.Random(seed)
    found = []
    for _ in range(count):
        prefill = rng.choice([0, 0, rng.randint(1, 512)])
        decode = rng.randint(0, 64)
        attended = decode * rng.randint(10, 4000) + prefill * rng.randint(1, 4000)
        found.append((prefill, decode, attended))
    return found


def test_step_time_finds_the_true_costs() -> None:
    model = StepTime()
    for step in steps(400):
        model.observe(*step, true_seconds(*step))
    for step in steps(50, seed=2):
        assert model.predict(*step) == pytest.approx(true_seconds(*step), rel=0.02)


def test_step_time_is_not_led_astray_by_outliers() -> None:
    rng = random.Random(3)
    model = StepTime()
    for step in steps(600):
        slow = 50.0 if rng.random() < 0.03 else 1.0
        model.observe(*step, true_seconds(*step) * slow)
    predicted = sum(model.predict(*step) for step in steps(50, seed=2))
    assert predicted == pytest.approx(
        sum(true_seconds(*step) for step in steps(50, seed=2)), rel=0.1
    )


def test_step_time_follows_a_machine_that_becomes_slower() -> None:
    model = StepTime()
    for step in steps(300):
        model.observe(*step, true_seconds(*step))
    for step in steps(800, seed=4):
        model.observe(*step, 5 * true_seconds(*step))
    for step in steps(50, seed=2):
        assert model.predict(*step) == pytest.approx(5 * true_seconds(*step), rel=0.1)


@given(
    st.lists(
        st.tuples(st.integers(0, 512), st.integers(0, 64), st.integers(0, 10**6), st.floats(0, 10)),
        max_size=40,
    )
)
def test_step_time_is_never_negative(observed: list[tuple[int, int, int, float]]) -> None:
    model = StepTime()
    for step in observed:
        model.observe(*step)
        assert min(model.coefficients) >= 0
        assert model.prefill_within(0.1, 1000) > 0


def test_prefill_within_a_time_takes_that_time() -> None:
    model = StepTime()
    for step in steps(400):
        model.observe(*step, true_seconds(*step))
    base = model.predict(0, 0, 0)
    for context in (0, 1000, 30_000):
        tokens = model.prefill_within(0.1, context)
        attended = tokens * context + tokens * tokens / 2
        seconds = model.predict(tokens, 0, attended) - base  # type: ignore[arg-type]
        assert seconds == pytest.approx(0.1, rel=1e-6)


@pytest.mark.parametrize("seconds", [-1.0, float("nan"), float("inf")])
def test_step_time_refuses_what_is_no_time(seconds: float) -> None:
    with pytest.raises(ValueError, match="cannot take"):
        StepTime().observe(1, 1, 1, seconds)


@pytest.mark.parametrize(
    "wrong",
    [
        {"num_blocks": 0},
        {"ageing_s": 0.0},
        {"max_prefill_s": float("nan")},
        {"max_batch_requests": 600},
        {"window_min_s": 0.1, "window_max_s": 0.01},
        {"watermark": 1.0},
        {"headroom_tokens": -1},
    ],
)
def test_configuration_that_makes_no_sense_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        SchedulerConfig(**{"num_blocks": 10, "context_length": 100, **wrong})
