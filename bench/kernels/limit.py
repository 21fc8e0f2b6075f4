"""What the benches of single kernels share: the fastest of many calls, and how near it is to the limit.

limits = measure_limits()
work = Work(memory_bytes=weights.bytes, int_operations=2 * rows * out * depth)
print(f"{limits.percent(work, best_seconds(call)):.0f} % of limit")
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

from pyserve.bench.limits import Limits, Work, measure_limits

__all__ = ["Limits", "Work", "attention_work", "best_seconds", "linear_work", "measure_limits"]

DENSE = ("float32", "bfloat16")
"""Types of weights whose products are in float32 without tiles; the others' are in 8 bits."""


def best_seconds(call: Callable[[], object], budget_s: float = 0.3) -> float:
    """The fastest of as many calls as fit ``budget_s``, after one that warms up."""
    call()
    best = float("inf")
    end = time.perf_counter() + budget_s
    while (start := time.perf_counter()) < end:
        call()
        best = min(best, time.perf_counter() - start)
    return best


def linear_work(
    rows: int, out: int, depth: int, weights: str, weight_bytes: int, *, tiles: bool
) -> Work:
    """A product of float32 ``[rows, depth]`` with weights ``[out, depth]`` that come from memory.

    With ``tiles`` all weights but float32 are multiplied as tiles of bfloat16.
    """
    kind = "tile" if tiles and weights != "float32" else "float" if weights in DENSE else "int"
    return replace(
        Work(memory_bytes=weight_bytes, cached_bytes=4 * rows * (out + depth)),
        **{f"{kind}_operations": 2.0 * rows * out * depth},
    )


def attention_work(
    take: int, context: int, heads: int, kv_heads: int, head_dim: int, kv_bytes: int, *, tiles: bool
) -> Work:
    """The last ``take`` tokens of one sequence of ``context`` against all before them; keys and values of
    ``kv_bytes`` a number come from memory once. With ``tiles`` those of bfloat16 are multiplied as tiles."""
    pairs = take * (context - take) + take * (take + 1) / 2
    kind = "tile" if tiles and kv_bytes == 2 else "float"
    return replace(
        Work(
            memory_bytes=2 * context * kv_heads * head_dim * kv_bytes,
            cached_bytes=2 * take * heads * head_dim * 4,
        ),
        **{f"{kind}_operations": 4 * pairs * heads * head_dim},
    )
