"""The engine's statistics as metrics, and as the few numbers of ``/health``."""

from __future__ import annotations

from collections.abc import Iterator

from pyserve.engine.engine import Engine
from pyserve.telemetry.load import LoadSnapshot
from pyserve.telemetry.metrics import Sample


def load_snapshot(engine: Engine) -> LoadSnapshot:
    """How busy ``engine`` is now."""
    seen = engine.statistics()
    pool = seen.loop.pool
    config = engine.config.scheduler
    return LoadSnapshot(
        requests_running=seen.open_requests - seen.unstarted_requests,
        requests_waiting=seen.unstarted_requests,
        tokens_waiting=seen.unstarted_tokens,
        kv_cache_usage_ratio=pool.owned / pool.num_blocks,
        throttled=seen.unstarted_requests >= config.max_waiting_requests
        or seen.unstarted_tokens >= config.max_waiting_tokens,
    )


def engine_samples(engine: Engine) -> Iterator[Sample]:
    """Everything the engine knows about itself, for one scrape."""
    load = load_snapshot(engine)
    gauge, counter = "gauge", "counter"
    yield Sample(
        gauge,
        "pyserve_requests_running",
        "Requests in the batch",
        load.requests_running,
        alias="vllm:num_requests_running",
    )
    yield Sample(
        gauge,
        "pyserve_requests_waiting",
        "Requests not scheduled yet",
        load.requests_waiting,
        alias="vllm:num_requests_waiting",
    )
    yield Sample(
        gauge,
        "pyserve_tokens_waiting",
        "Prompt tokens not scheduled yet",
        load.tokens_waiting,
        alias="vllm:num_tokens_waiting",
    )
    yield Sample(
        gauge,
        "pyserve_kv_cache_usage_ratio",
        "Owned share of the KV blocks; cached and free ones count as free",
        load.kv_cache_usage_ratio,
        alias="vllm:kv_cache_usage_perc",
    )
    yield from _pool(engine)
    seen = engine.statistics()
    for name, text, value, alias in (
        ("prompt_tokens", "Prompt tokens accepted", seen.prompt_tokens_total, "vllm:prompt_tokens"),
        (
            "output_tokens",
            "Tokens generated",
            seen.output_tokens_total,
            "vllm:generation_tokens",
        ),
        ("requests_accepted", "Requests admitted", seen.accepted_total, None),
        (
            "requests_rejected",
            "Requests refused",
            seen.rejected_total,
            "vllm:admission_rejections",
        ),
        ("requests_finished", "Requests that ended well", seen.finished_total, None),
        ("requests_failed", "Requests that ended in an error", seen.failed_total, None),
        ("requests_abandoned", "Requests whose owner left", seen.abandoned_total, None),
        ("steps", "Steps completed", seen.loop.steps, None),
        ("forwards", "Forward passes, retries by halves included", seen.loop.forwards, None),
        ("failed_rows", "Sequences that failed alone", seen.loop.failed_rows, None),
    ):
        yield Sample(counter, f"pyserve_{name}", text, value, alias=alias)
    yield Sample(gauge, "pyserve_last_step_seconds", "The last step", seen.loop.last_step_s)
    yield Sample(
        gauge,
        "pyserve_pending_handovers",
        "Steps computed and not routed yet",
        seen.pending_handovers,
    )
    for quantile, value in (("0.5", seen.loop_lag_p50_s), ("0.99", seen.loop_lag_p99_s)):
        yield Sample(
            gauge,
            "pyserve_loop_lag_seconds",
            "How late the event loop runs",
            value,
            (("quantile", quantile),),
        )


def _pool(engine: Engine) -> Iterator[Sample]:
    pool = engine.statistics().loop.pool
    for state, blocks in (("free", pool.free), ("cached", pool.cached), ("owned", pool.owned)):
        yield Sample(
            "gauge", "pyserve_kv_blocks", "KV blocks by state", blocks, (("state", state),)
        )
    yield Sample(
        "counter",
        "pyserve_prefix_cache_queries",
        "Prompt tokens looked up in the prefix cache",
        pool.prefix_queries,
        alias="vllm:prefix_cache_queries",
    )
    yield Sample(
        "counter",
        "pyserve_prefix_cache_hits",
        "Prompt tokens found in the prefix cache",
        pool.prefix_hits,
        alias="vllm:prefix_cache_hits",
    )
    yield Sample("counter", "pyserve_kv_evictions", "Cached blocks given away", pool.evictions)
    config = engine.config.scheduler
    yield Sample(
        "info",
        "pyserve_cache_config",
        "How the KV cache is set up",
        1,
        (
            ("block_size", str(config.block_size)),
            ("num_gpu_blocks", str(config.num_blocks)),
            ("enable_prefix_caching", str(getattr(config, "prefix_cache", True))),
        ),
        alias="vllm:cache_config",
    )
