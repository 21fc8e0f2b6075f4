"""Figures follow vLLM's definitions."""

from __future__ import annotations

import json

import pytest

from pyserve.bench.load import LoadResult, Pace
from pyserve.bench.report import Description, fate, report
from pyserve.bench.stream import Outcome

ABOUT = Description("20260101-000000", "tiny", "tiny", goodput_ms={"ttft": 150, "tpot": 60})


def outcome(**fields) -> Outcome:
    return Outcome(prompt_tokens=10, **fields)


def completed() -> list[Outcome]:
    return [
        outcome(start_s=5.0, ttft_s=0.1, latency_s=0.3, itl_s=[0.05, 0.15], output_tokens=5),
        outcome(start_s=5.2, ttft_s=0.2, latency_s=0.2, output_tokens=1),
    ]


def figures(outcomes: list[Outcome], **options) -> dict:
    return report(LoadResult(outcomes, 2.0, 0.1, None), Pace(4), ABOUT, **options)


def test_throughput_latencies_and_goodput() -> None:
    found = figures(completed())
    assert found["request_throughput"] == 1.0
    assert found["output_throughput"] == 3.0
    assert found["total_token_throughput"] == 13.0
    assert found["mean_ttft_ms"] == pytest.approx(150.0)
    assert found["mean_tpot_ms"] == pytest.approx(50.0), "an answer of one token has no TPOT"
    assert found["median_itl_ms"] == pytest.approx(100.0)
    assert found["median_e2el_ms"] == pytest.approx(250.0)
    assert found["request_goodput"] == 0.5
    assert found["pyserve_max_itl_ms"] == pytest.approx(150.0)
    assert found["max_concurrent_requests"] == 2
    assert found["max_output_tokens_per_s"] == 4.0


def test_refusals_are_counted_apart_and_leave_the_latencies_alone() -> None:
    refused = [
        outcome(status=429, error="full"),
        outcome(status=504, error="late"),
        outcome(status=200, code="cancelled", error="bye"),
        outcome(status=0, error="ConnectionResetError: "),
    ]
    assert [fate(o) for o in refused] == ["rejected", "expired", "cancelled", "failed"]
    found = figures(completed() + refused)
    assert (found["completed"], found["failed"], found["num_prompts"]) == (2, 1, 6)
    counted = [found[f"pyserve_{name}"] for name in ("rejected", "expired", "cancelled")]
    assert counted == [1, 1, 1]
    assert found["mean_ttft_ms"] == figures(completed())["mean_ttft_ms"]
    assert found["pyserve_goodput_ratio"] == pytest.approx(1 / 6)


def test_nothing_completed_is_still_a_report() -> None:
    found = figures([outcome(error="x")])
    assert found["output_throughput"] == 0.0
    assert found["p99_e2el_ms"] == 0.0


def test_keys_keep_vllms_order_and_lists_come_only_in_detail() -> None:
    keys = list(figures(completed()))
    head = ["date", "endpoint_type", "backend", "label", "model_id", "tokenizer_id", "num_prompts"]
    assert keys[: len(head)] == head
    assert "ttfts" not in keys
    detailed = figures(completed(), detailed=True)
    assert detailed["itls"] == [[0.05, 0.15], []]
    assert json.loads(json.dumps(detailed))["request_rate"] == "inf"
