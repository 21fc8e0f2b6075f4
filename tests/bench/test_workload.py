"""Workloads repeat, and keep to the lengths and the rate that were asked for."""

from __future__ import annotations

import itertools
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pyserve.bench.workload import Span, arrival_times, english, random_work


def test_same_seed_gives_the_same_work_and_another_seed_other_work() -> None:
    tokens = list(range(5000))
    first = random_work(tokens, 8, Span(16, 512), Span(16, 256), seed=3)
    assert first == random_work(tokens, 8, Span(16, 512), Span(16, 256), seed=3)
    assert first != random_work(tokens, 8, Span(16, 512), Span(16, 256), seed=4)


@given(st.integers(1, 50), st.integers(0, 50), st.integers())
def test_prompts_are_windows_of_the_text_with_exact_lengths(low: int, more: int, seed: int) -> None:
    tokens = list(range(1000))
    for work in random_work(tokens, 5, Span(low, low + more), Span(7, 7), seed):
        assert low <= len(work.prompt) <= low + more
        assert work.prompt == tuple(range(work.prompt[0], work.prompt[0] + len(work.prompt)))
        assert work.output_tokens == 7


def test_text_shorter_than_a_prompt_is_refused() -> None:
    with pytest.raises(ValueError, match="5 tokens"):
        random_work(range(5), 1, Span(5, 5), Span(1, 1), 0)


def test_text_is_long_enough_for_distinct_prompts() -> None:
    assert len(english().split()) > 40_000


def test_infinite_rate_sends_all_at_once() -> None:
    assert list(arrival_times(3, float("inf"), 1.0, 0)) == [0.0, 0.0, 0.0]


@pytest.mark.parametrize("burstiness", [0.3, 1.0, 4.0])
def test_arrivals_have_the_rate_and_the_spread_that_were_asked_for(burstiness: float) -> None:
    times = list(arrival_times(20_000, 5.0, burstiness, 1))
    gaps = [b - a for a, b in itertools.pairwise(times)]
    mean = sum(gaps) / len(gaps)
    variance = sum((gap - mean) ** 2 for gap in gaps) / len(gaps)
    assert mean == pytest.approx(1 / 5.0, rel=0.06)
    assert variance == pytest.approx(mean**2 / burstiness, rel=0.12)


@pytest.mark.parametrize("text", ["0", "5:4", "x", "1:2:3", ""])
def test_bad_span_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"."):
        Span.parse(text)


def test_span_reads_what_it_shows() -> None:
    for text in ("7", "16:512"):
        assert str(Span.parse(text)) == text
    assert Span(3, 3).draw(random.Random(0)) == 3
