"""Speed of the packed matrix product beside torch's: GFLOP/s, and GB/s of weights at one row.

python bench/kernels/linear.py [--threads N] [--isa avx512] [--dtype float32]
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import torch

from pyserve._C import Linear, set_num_threads

# (out, in) of SmolLM2-135M's layers (qkv, o, gate+up, down), and of its head.
SHAPES = [(960, 576), (576, 576), (3072, 576), (576, 1536), (49152, 576)]
ROWS = [1, 4, 16, 64, 256]


def best_seconds(call: Callable[[], object], budget_s: float = 0.3) -> float:
    """The fastest of as many calls as fit ``budget_s``."""
    call()
    best = float("inf")
    end = time.perf_counter() + budget_s
    while (start := time.perf_counter()) < end:
        call()
        best = min(best, time.perf_counter() - start)
    return best


def compare(out: int, depth: int, rows: int, dtype: str, isa: str) -> str:
    """One line: ours and torch's on weights that every call streams from memory."""
    copies = max(1, (96 << 20) // (4 * out * depth))
    plain = [torch.randn(out, depth) for _ in range(copies)]
    packed = [Linear(w, dtype, isa) for w in plain]
    plain = [w.to(getattr(torch, dtype)) for w in plain]
    x = torch.randn(rows, depth)
    y = x.to(plain[0].dtype)
    ours = best_seconds(lambda: [p.apply(x) for p in packed]) / copies
    theirs = best_seconds(lambda: [torch.nn.functional.linear(y, w) for w in plain]) / copies
    flops = 2 * rows * out * depth
    return (
        f"{out:5} {depth:5} {rows:4} | {ours * 1e6:8.1f} {flops / ours / 1e9:8.1f}"
        f" {packed[0].bytes / ours / 1e9:6.1f} | {theirs * 1e6:8.1f} {flops / theirs / 1e9:8.1f}"
    )


def main() -> None:
    """Prints one line for each shape and number of rows."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--isa", default="")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    set_num_threads(args.threads)
    print("  out    in rows |  ours us  GFLOP/s   GB/s | torch us  GFLOP/s")
    for out, depth in SHAPES:
        for rows in ROWS:
            print(compare(out, depth, rows, args.dtype, args.isa))


if __name__ == "__main__":
    main()
