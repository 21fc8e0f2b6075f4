"""The engine's statistics as metrics, and as the few numbers of ``/health``."""

from __future__ import annotations

from collections.abc import Iterator

from pyserve.core.scheduler import SchedulerStatistics
from pyserve.engine.engine import Engine, EngineStatistics
from pyserve.telemetry.load import LoadSnapshot
from pyserve.telemetry.metrics import HistogramSample, Sample


def load_snapshot(engine: Engine) -> LoadSnapshot:
    """How busy ``engine`` is now."""
    seen = engine.statistics()
    pool = seen.loop.scheduler.pool
    config = engine.config.scheduler
    return LoadSnapshot(
        requests_running=seen.open_requests - seen.unstarted_requests,
        requests_waiting=seen.unstarted_requests,
        tokens_waiting=seen.unstarted_tokens,
        kv_cache_usage_ratio=pool.owned / pool.num_blocks,
        throttled=seen.unstarted_requests >= config.max_waiting_requests
        or seen.unstarted_tokens >= config.max_waiting_tokens,
    )


def engine_samples(engine: Engine) -> Iterator[Sample | HistogramSample]:
    """Everything the engine knows about itself, for one scrape."""
    seen = engine.statistics()
    yield from _load(load_snapshot(engine))
    yield from _waiting_by_reason(seen)
    yield from _requests(seen)
    yield from _scheduler(seen.loop.scheduler)
    yield from _loop(seen)
    yield from _pool(engine, seen.loop.scheduler)


def _gauge(name: str, text: str, value: float, alias: str | None = None, **labels: str) -> Sample:
    return Sample("gauge", f"pyserve_{name}", text, value, tuple(labels.items()), alias)


def _counter(name: str, text: str, value: float, alias: str | None = None, **labels: str) -> Sample:
    return Sample("counter", f"pyserve_{name}", text, value, tuple(labels.items()), alias)


def _load(load: LoadSnapshot) -> Iterator[Sample]:
    running, waiting = load.requests_running, load.requests_waiting
    yield _gauge("requests_running", "Requests in the batch", running, "vllm:num_requests_running")
    yield _gauge(
        "requests_waiting", "Requests not scheduled yet", waiting, "vllm:num_requests_waiting"
    )
    yield _gauge(
        "tokens_waiting",
        "Prompt tokens of requests not scheduled yet",
        load.tokens_waiting,
        "vllm:num_tokens_waiting",
    )
    yield _gauge(
        "kv_cache_usage_ratio",
        "Owned share of the KV blocks; cached and free ones count as free",
        load.kv_cache_usage_ratio,
        "vllm:kv_cache_usage_perc",
    )
    yield _gauge("throttled", "1 while new requests are being refused", load.throttled)


def _waiting_by_reason(seen: EngineStatistics) -> Iterator[Sample]:
    """Who waits though nothing runs is held back by the batch window ("deferred"), else by capacity."""
    scheduler = seen.loop.scheduler
    running = scheduler.prefill_sequences + scheduler.decode_sequences
    held_back = 0 if running else seen.unstarted_requests
    for reason, count in (
        ("capacity", seen.unstarted_requests - held_back),
        ("deferred", held_back),
    ):
        yield _gauge(
            "requests_waiting_by_reason",
            "Requests not scheduled yet: for lack of capacity, or deferred by the batch window",
            count,
            "vllm:num_requests_waiting_by_reason",
            reason=reason,
        )


def _requests(seen: EngineStatistics) -> Iterator[Sample]:
    prompt, output = seen.prompt_tokens_total, seen.output_tokens_total
    rejected = seen.rejected_total
    yield _counter("prompt_tokens", "Prompt tokens accepted", prompt, "vllm:prompt_tokens")
    yield _counter("output_tokens", "Tokens generated", output, "vllm:generation_tokens")
    yield _counter("requests_accepted", "Requests admitted", seen.accepted_total)
    yield _counter("requests_rejected", "Requests refused", rejected, "vllm:admission_rejections")
    refused = seen.admission
    reasons = (
        ("invalid", refused.refused_invalid),
        ("full", refused.refused_full),
        ("deadline", refused.refused_deadline),
    )
    for reason, count in (*reasons, ("unavailable", rejected - sum(n for _, n in reasons))):
        text = "Requests refused, by reason; unavailable: draining, stopped, or an id in use"
        yield _counter("requests_refused_by_reason", text, count, reason=reason)
    yield _counter("requests_finished", "Requests that ended well", seen.finished_total)
    yield _counter("requests_failed", "Requests that ended in an error", seen.failed_total)
    yield _counter("requests_abandoned", "Requests whose owner left", seen.abandoned_total)
    yield _gauge(
        "requests_closing", "Requests whose owner left, not released yet", seen.closing_requests
    )


def _scheduler(seen: SchedulerStatistics) -> Iterator[Sample]:
    for phase, count in (
        ("waiting", seen.waiting_sequences),
        ("prefill", seen.prefill_sequences),
        ("decode", seen.decode_sequences),
    ):
        yield _gauge("sequences", "Sequences by phase", count, phase=phase)
    yield _counter("steps", "Steps completed", seen.steps_total)
    yield _counter(
        "preemptions",
        "Sequences sent back to the line for lack of blocks",
        seen.preemptions_total,
        "vllm:num_preemptions",
    )
    yield _counter("prefill_tokens", "Prompt tokens computed", seen.prefill_tokens_total)
    yield _counter("requests_expired", "Requests whose deadline ran out", seen.expired_total)
    yield _gauge("batch_sequences", "Sequences in the last step", seen.last_batch_sequences)
    yield _gauge("batch_tokens", "Tokens in the last step", seen.last_batch_tokens)
    yield _gauge("batch_window_seconds", "The batch window now", seen.window.window_s)
    speed = seen.steptime
    for kind, value in (
        ("prefill", speed.prefill_tokens_per_s),
        ("output", speed.output_tokens_per_s),
    ):
        yield _gauge("tokens_per_second", "Measured speed of busy time", value, kind=kind)
    for tenant in seen.line.tenants:
        yield _gauge(
            "tenant_virtual_tokens",
            "Fair share's counter",
            tenant.virtual_tokens,
            tenant=tenant.name,
        )
        yield _gauge("tenant_waiting", "Sequences in line", tenant.waiting, tenant=tenant.name)
        yield _gauge("tenant_running", "Sequences running", tenant.running, tenant=tenant.name)


def _loop(seen: EngineStatistics) -> Iterator[Sample | HistogramSample]:
    loop = seen.loop
    yield HistogramSample(
        "pyserve_step_tokens",
        "Tokens in a step, prompt and output together",
        loop.step_tokens.BOUNDS,
        loop.step_tokens.counts,
        loop.step_tokens.total,
        "vllm:iteration_tokens_total",
    )
    yield _counter("forwards", "Forward passes, retries by halves included", loop.forwards)
    yield _counter("failed_rows", "Sequences that failed alone", loop.failed_rows)
    yield _gauge("last_step_seconds", "How long the last step took", loop.last_step_s)
    yield _gauge("pending_handovers", "Steps computed and not routed yet", seen.pending_handovers)
    lags = (("0.5", seen.loop_lag_p50_s), ("0.99", seen.loop_lag_p99_s))
    for quantile, lag in lags:
        text = "How late the event loop runs its tasks"
        yield _gauge("loop_lag_seconds", text, lag, quantile=quantile)


def _pool(engine: Engine, seen: SchedulerStatistics) -> Iterator[Sample]:
    pool = seen.pool
    for state, blocks in (("free", pool.free), ("cached", pool.cached), ("owned", pool.owned)):
        yield _gauge("kv_blocks", "KV blocks by state", blocks, state=state)
    yield _counter(
        "prefix_cache_queries",
        "Prompt tokens looked up in the prefix cache",
        pool.prefix_queries,
        "vllm:prefix_cache_queries",
    )
    yield _counter(
        "prefix_cache_hits",
        "Prompt tokens found in the prefix cache",
        pool.prefix_hits,
        "vllm:prefix_cache_hits",
    )
    yield _counter("kv_evictions", "Cached blocks given to somebody else", pool.evictions)
    config = engine.config
    labels = (
        ("block_size", str(config.scheduler.block_size)),
        ("num_gpu_blocks", str(config.scheduler.num_blocks)),
        ("enable_prefix_caching", str(config.prefix_cache)),
    )
    text, alias = "How the KV cache is set up", "vllm:cache_config"
    yield Sample("info", "pyserve_cache_config", text, 1, labels, alias)
