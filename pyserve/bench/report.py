"""Figures of a run in the definitions, the names and the order of ``vllm bench serve``.

What is ours alone is under ``pyserve_*``: rejected (429, 503), expired (504) and cancelled requests, which
vLLM counts as failed, the share of *offered* requests that met the goodput limits, and CPU shares.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from pyserve.bench.load import LoadResult, Pace
from pyserve.bench.stream import Outcome
from pyserve.bench.workloads import POISON

PERCENTILES = (50, 90, 95, 99)


@dataclass(frozen=True, slots=True)
class Description:
    """What was run, for the head of the file."""

    date: str
    model: str
    tokenizer: str
    label: str | None = None
    metadata: Mapping[str, str] = field(default_factory=dict)
    goodput_ms: Mapping[str, float] = field(default_factory=dict)


def fate(outcome: Outcome) -> str:
    """``completed``, ``left``, ``rejected``, ``expired``, ``cancelled``, ``refused`` or ``failed``.

    ``refused``: bad on purpose, and answered so.
    """
    if outcome.left:
        return "left"
    if outcome.ok:
        return "completed"
    if outcome.group == POISON and outcome.status in (400, 422):
        return "refused"
    if outcome.status in (429, 503):
        return "rejected"
    if outcome.status == 504 or outcome.code == "deadline_exceeded":
        return "expired"
    if outcome.status == 499 or outcome.code == "cancelled":
        return "cancelled"
    return "failed"


def report(
    result: LoadResult, pace: Pace, about: Description, *, detailed: bool = False
) -> dict[str, Any]:
    """The result as a dict ready for JSON, keys in vLLM's order."""
    done = [outcome for outcome in result.outcomes if outcome.ok]
    fates = Counter(map(fate, result.outcomes))
    good = sum(_good(outcome, about.goodput_ms) for outcome in done)
    prompt_tokens = sum(outcome.prompt_tokens for outcome in done)
    output_tokens = sum(outcome.output_tokens for outcome in done)
    duration_s = result.duration_s
    figures: dict[str, Any] = {
        "date": about.date,
        "endpoint_type": "openai",
        "backend": "openai",
        "label": about.label,
        "model_id": about.model,
        "tokenizer_id": about.tokenizer,
        "num_prompts": len(result.outcomes),
        **about.metadata,
        "request_rate": pace.rate if pace.rate != float("inf") else "inf",
        "burstiness": pace.burstiness,
        "max_concurrency": pace.concurrency,
        "duration": duration_s,
        "completed": len(done),
        "failed": fates["failed"],
        "total_input_tokens": prompt_tokens,
        "total_output_tokens": output_tokens,
        "request_throughput": len(done) / duration_s,
        "request_goodput": good / duration_s if about.goodput_ms else None,
        "output_throughput": output_tokens / duration_s,
        "total_token_throughput": (prompt_tokens + output_tokens) / duration_s,
    }
    if detailed:
        figures |= _details(result.outcomes)
    figures["max_output_tokens_per_s"] = _peak_tokens(done)
    figures["max_concurrent_requests"] = _peak_requests(done)
    for name, values_s in _latencies(done).items():
        figures |= _summary(name, values_s)
    return figures | {
        "pyserve_rejected": fates["rejected"],
        "pyserve_expired": fates["expired"],
        "pyserve_cancelled": fates["cancelled"],
        "pyserve_left": fates["left"],
        "pyserve_refused": fates["refused"],
        "pyserve_groups": _groups(result.outcomes),
        "pyserve_goodput_ratio": good / len(result.outcomes) if about.goodput_ms else None,
        "pyserve_max_itl_ms": 1e3 * max((gap for o in done for gap in o.itl_s), default=0.0),
        "pyserve_client_cpu_share": result.client_cpu_share,
        "pyserve_machine_cpu_share": result.machine_cpu_share,
    }


def _good(outcome: Outcome, limits_ms: Mapping[str, float]) -> bool:
    measured = {"ttft": outcome.ttft_s, "tpot": outcome.tpot_s, "e2el": outcome.latency_s}
    return all(1e3 * measured[name] <= limit for name, limit in limits_ms.items())


def _groups(outcomes: Sequence[Outcome]) -> dict[str, dict[str, Any]]:
    """Of each group of the workload: its fates, its share of all output tokens, its median latencies."""
    total = sum(outcome.output_tokens for outcome in outcomes if outcome.ok)
    groups = {}
    for name in sorted({outcome.group for outcome in outcomes} - {""}):
        mine = [outcome for outcome in outcomes if outcome.group == name]
        done = [outcome for outcome in mine if outcome.ok]
        tokens = sum(outcome.output_tokens for outcome in done)
        groups[name] = {
            "offered": len(mine),
            **Counter(map(fate, mine)),
            "output_tokens": tokens,
            "output_share": tokens / total if total else 0.0,
            **{
                f"median_{key}_ms": 1e3 * float(np.median(values_s)) if values_s else None
                for key, values_s in _latencies(done).items()
            },
        }
    return groups


def _latencies(done: Sequence[Outcome]) -> dict[str, list[float]]:
    return {
        "ttft": [outcome.ttft_s for outcome in done],
        "tpot": [outcome.tpot_s for outcome in done if outcome.output_tokens > 1],
        "itl": [gap for outcome in done for gap in outcome.itl_s],
        "e2el": [outcome.latency_s for outcome in done],
    }


def _summary(name: str, values_s: Sequence[float]) -> dict[str, float]:
    values_ms = np.asarray(values_s or [0.0]) * 1e3
    return {
        f"mean_{name}_ms": float(values_ms.mean()),
        f"median_{name}_ms": float(np.median(values_ms)),
        f"std_{name}_ms": float(values_ms.std()),
        **{f"p{p}_{name}_ms": float(np.percentile(values_ms, p)) for p in PERCENTILES},
    }


def _details(outcomes: Iterable[Outcome]) -> dict[str, list[Any]]:
    rows = list(outcomes)
    return {
        "input_lens": [row.prompt_tokens for row in rows],
        "output_lens": [row.output_tokens for row in rows],
        "ttfts": [row.ttft_s for row in rows],
        "itls": [row.itl_s for row in rows],
        "latencies": [row.latency_s for row in rows],
        "start_times": [row.start_s for row in rows],
        "queue_times": [row.queue_s for row in rows],
        "generated_texts": [row.text for row in rows],
        "errors": [row.error for row in rows],
        "server_queue_times": [row.server.get("queue_time_ms") for row in rows],
        "server_ttfts": [row.server.get("time_to_first_token_ms") for row in rows],
    }


def _peak_tokens(done: Sequence[Outcome]) -> float:
    """Most content chunks that arrived in one second (of a grid from the first start)."""
    if not done:
        return 0.0
    origin = min(outcome.start_s for outcome in done)
    seconds: Counter[int] = Counter()
    for outcome in done:
        at = outcome.start_s + outcome.ttft_s
        seconds[int(at - origin)] += 1
        for gap in outcome.itl_s:
            at += gap
            seconds[int(at - origin)] += 1
    return float(max(seconds.values()))


def _peak_requests(done: Sequence[Outcome]) -> int:
    changes = [(outcome.start_s, 1) for outcome in done]
    changes += [(outcome.start_s + outcome.latency_s, -1) for outcome in done]
    running = peak = 0
    for _, change in sorted(changes):
        running += change
        peak = max(peak, running)
    return peak
