"""Who is let in, and what the others are told."""

from __future__ import annotations

import math

import pytest

from pyserve.core.admission import Admission, Load
from pyserve.core.config import SchedulerConfig
from pyserve.errors import ContextLengthExceeded, DeadlineExceeded, InvalidRequest, QueueFull
from tests.core.harness import make_spec

CONFIG = SchedulerConfig(
    num_blocks=64,
    block_size=16,
    context_length=1000,
    max_waiting_requests=10,
    max_waiting_tokens=500,
)


def refusal(load: Load, **fields: object) -> QueueFull:
    with pytest.raises(QueueFull) as caught:
        Admission(CONFIG).admit(make_spec(100, **fields), 0.0, load)
    return caught.value


def test_request_is_admitted_below_the_limits() -> None:
    admission = Admission(CONFIG)
    admission.admit(make_spec(100), 0.0, Load(waiting_requests=9, waiting_tokens=400))
    assert admission.statistics().admitted == 1


def test_line_full_by_count_says_when_a_place_is_free() -> None:
    error = refusal(Load(waiting_requests=12, waiting_tokens=240, prompt_token_s=0.1))
    assert "10 requests" in error.message
    assert error.retry_after_s == 6.0  # three must start first


def test_line_full_by_tokens_says_when_they_are_computed() -> None:
    error = refusal(Load(waiting_requests=3, waiting_tokens=480, prompt_token_s=0.1))
    assert "500 prompt tokens" in error.message
    assert error.retry_after_s == 8.0


def test_retry_after_is_never_absent_nor_absurd() -> None:
    assert refusal(Load(waiting_requests=10)).retry_after_s == 1.0
    slow = Load(waiting_requests=10, waiting_tokens=100, prompt_token_s=1e3)
    assert refusal(slow).retry_after_s == 600.0


def test_full_batch_must_lose_one_before_the_line_moves() -> None:
    load = Load(waiting_requests=10, waiting_tokens=200, prompt_token_s=0.1, slot_s=5.0)
    assert refusal(load).retry_after_s == 7.0


def test_prompt_longer_than_the_token_limit_may_wait_alone() -> None:
    Admission(CONFIG).admit(make_spec(900), 0.0, Load())
    with pytest.raises(QueueFull):
        Admission(CONFIG).admit(make_spec(900), 0.0, Load(waiting_requests=1, waiting_tokens=1))


def test_deadline_that_has_passed_is_refused_not_clamped() -> None:
    with pytest.raises(DeadlineExceeded, match="passed already"):
        Admission(CONFIG).admit(make_spec(5, deadline_s=9.0), 9.0, Load())


def test_deadline_that_cannot_be_met_at_the_measured_speed_is_refused() -> None:
    load = Load(waiting_requests=3, waiting_tokens=400, prompt_token_s=0.01)
    admission = Admission(CONFIG)
    with pytest.raises(DeadlineExceeded, match=r"about 5\.0 s") as caught:
        admission.admit(make_spec(100, deadline_s=4.0), 0.0, load)
    assert caught.value.retry_after_s == 1.0
    admission.admit(make_spec(100, deadline_s=6.0), 0.0, load)
    admission.admit(make_spec(100, deadline_s=4.0, priority=1), 0.0, load)  # may overtake
    assert (admission.statistics().admitted, admission.statistics().refused_deadline) == (2, 1)


def test_deadline_is_not_judged_before_anything_is_measured() -> None:
    Admission(CONFIG).admit(
        make_spec(100, deadline_s=0.1), 0.0, Load(waiting_requests=5, waiting_tokens=300)
    )


def test_too_long_is_refused_whatever_the_load() -> None:
    admission = Admission(CONFIG)
    with pytest.raises(ContextLengthExceeded) as caught:
        admission.admit(make_spec(1000), 0.0, Load())
    assert caught.value.param == "prompt"
    with pytest.raises(ContextLengthExceeded) as caught:
        admission.admit(make_spec(500, max_tokens=501), 0.0, Load())
    assert caught.value.param == "max_tokens"
    assert admission.statistics().refused_invalid == 2


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -1.0),
        ("temperature", math.nan),
        ("temperature", 1e39),
        ("top_p", 1.5),
        ("top_k", -1),
        ("min_p", -0.1),
        ("frequency_penalty", math.inf),
        ("presence_penalty", math.nan),
        ("repetition_penalty", 0.0),
        ("repetition_penalty", 1e-300),
        ("repetition_penalty", 1e300),
        ("min_tokens", -1),
        ("logprobs", -1),
        ("stop_token_ids", (-1,)),
        ("logit_bias", ((-1, 1.0),)),
        ("logit_bias", ((1, math.inf),)),
    ],
)
def test_what_the_sampler_would_refuse_is_refused_at_the_door(field: str, value: object) -> None:
    spec = make_spec(10, **{field: value})
    with pytest.raises(InvalidRequest) as caught:
        Admission(CONFIG).admit(spec, 0.0, Load())
    assert caught.value.param == field
