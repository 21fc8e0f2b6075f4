"""What the benches of single kernels share: the fastest of many calls, and how near it is to the limit.

limits = measure_limits()
work = Work(memory_bytes=weights.bytes, int_operations=2 * rows * out * depth)
print(f"{limits.percent(work, best_seconds(call)):.0f} % of limit")
"""

from __future__ import annotations

import time
from collections.abc import Callable

from pyserve.bench.limits import Limits, Work, measure_limits

__all__ = ["Limits", "Work", "attention_work", "best_seconds", "linear_work", "measure_limits"]

BITS = {"float32": 32, "bfloat16": 16}
"""Types of weights whose products are in float32; the others' are in 8 bits."""


def best_seconds(call: Callable[[], object], budget_s: float = 0.3) -> float:
    """The fastest of as many calls as fit ``budget_s``, after one that warms up."""
    call()
    best = float("inf")
    end = time.perf_counter() + budget_s
    while (start := time.perf_counter()) < end:
        call()
        best = min(best, time.perf_counter() - start)
    return best


def linear_work(rows: int, out: int, depth: int, weights: str, weight_bytes: int) -> Work:
    """A product of float32 ``[rows, depth]`` with weights ``[out, depth]`` that come from memory."""
    operations = 2.0 * rows * out * depth
    floats = weights in BITS
    return Work(
        memory_bytes=weight_bytes,
        cached_bytes=4 * rows * (out + depth),
        float_operations=operations if floats else 0,
        int_operations=0 if floats else operations,
    )


def attention_work(
    take: int, context: int, heads: int, kv_heads: int, head_dim: int, kv_bytes: int
) -> Work:
    """The last ``take`` tokens of one sequence of ``context`` against all before them; keys and values of
    ``kv_bytes`` a number come from memory once."""
    pairs = take * (context - take) + take * (take + 1) / 2
    return Work(
        memory_bytes=2 * context * kv_heads * head_dim * kv_bytes,
        cached_bytes=2 * take * heads * head_dim * 4,
        float_operations=4 * pairs * heads * head_dim,
    )
