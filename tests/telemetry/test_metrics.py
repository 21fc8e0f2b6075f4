from __future__ import annotations

import math

from prometheus_client.parser import text_string_to_metric_families

from pyserve.telemetry.metrics import HistogramSample, Metrics, RequestObservation, Sample

SEEN = RequestObservation(
    prompt_tokens=3,
    output_tokens=5,
    n=1,
    max_tokens=16,
    queue_s=0.1,
    prefill_s=0.2,
    ttft_s=0.3,
    total_s=0.7,
    finish_reasons=("stop",),
)
# anchors of the ecosystem: names that existing dashboards ask for, as vLLM writes them
HISTOGRAMS = (
    "time_to_first_token_seconds",
    "inter_token_latency_seconds",
    "request_time_per_output_token_seconds",
    "e2e_request_latency_seconds",
    "request_queue_time_seconds",
    "request_prefill_time_seconds",
    "request_decode_time_seconds",
    "request_inference_time_seconds",
    "request_prompt_tokens",
    "request_generation_tokens",
    "request_params_n",
    "request_params_max_tokens",
)


def samples(metrics: Metrics) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    families = text_string_to_metric_families(metrics.render().decode())
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in families
        for sample in family.samples
    }


def test_every_histogram_has_its_vllm_alias_with_the_same_numbers() -> None:
    metrics = Metrics("m")
    metrics.request_ended(SEEN)
    metrics.token_gap(0.1)
    found = samples(metrics)
    for name in HISTOGRAMS:
        native = found[f"pyserve_{name}_sum", ()]
        assert native > 0
        assert found[f"vllm:{name}_sum", (("model_name", "m"),)] == native
        assert found[f"vllm:{name}_count", (("model_name", "m"),)] == 1
    assert abs(found["pyserve_request_decode_time_seconds_sum", ()] - 0.4) < 1e-9
    assert abs(found["pyserve_request_time_per_output_token_seconds_sum", ()] - 0.1) < 1e-9


def test_success_counts_choices_by_reason() -> None:
    metrics = Metrics("m")
    metrics.request_ended(SEEN)
    metrics.request_broken("abort")
    found = samples(metrics)
    labels = (("finished_reason", "stop"), ("model_name", "m"))
    assert found["vllm:request_success_total", labels] == 1
    assert found["pyserve_request_success_total", (("finished_reason", "abort"),)] == 1


def test_sources_are_asked_at_every_scrape() -> None:
    metrics = Metrics("m")
    value = 1.0
    metrics.add_source(
        lambda: [
            Sample("gauge", "pyserve_a", "a", value, alias="vllm:a"),
            Sample("counter", "pyserve_b", "b", value, (("k", "v"),)),
            Sample("info", "pyserve_c", "c", 1, (("size", "16"),), alias="vllm:c"),
        ]
    )
    assert samples(metrics)["vllm:a", (("model_name", "m"),)] == 1
    value = 2.0
    found = samples(metrics)
    assert found["pyserve_a", ()] == 2
    assert found["pyserve_b_total", (("k", "v"),)] == 2
    assert found["vllm:c_info", (("model_name", "m"), ("size", "16"))] == 1


def test_aliases_can_be_off() -> None:
    metrics = Metrics("m", vllm_aliases=False)
    metrics.request_ended(SEEN)
    metrics.add_source(lambda: [Sample("gauge", "pyserve_a", "a", 1, alias="vllm:a")])
    assert b"vllm:" not in metrics.render()


def test_unusual_methods_do_not_multiply_series() -> None:
    metrics = Metrics("m")
    for method in ("BREW", "FROB"):
        metrics.http_request(method, 405)
    labels = (("method", "other"), ("status", "405"))
    assert samples(metrics)["pyserve_http_requests_total", labels] == 2


def test_engine_histogram_is_cumulative_and_has_its_alias() -> None:
    metrics = Metrics("m")
    sample = HistogramSample(
        "pyserve_h", "h", (1.0, 2.0, math.inf), (3, 0, 2), 30, "vllm:iteration_tokens_total"
    )
    metrics.add_source(lambda: [sample])
    found = samples(metrics)
    for name, labels in (("pyserve_h", ()), (sample.alias, (("model_name", "m"),))):
        for bound, count in (("1.0", 3), ("2.0", 3), ("+Inf", 5)):
            assert found[f"{name}_bucket", tuple(sorted((*labels, ("le", bound))))] == count
        assert found[f"{name}_count", labels] == 5
        assert found[f"{name}_sum", labels] == 30
