"""Speed of the packed matrix product beside torch's: GFLOP/s (with integers: GOP/s), GB/s of weights,
and % of what memory or arithmetic allow.

python bench/kernels/linear.py [--threads N] [--isa avx512] [--weights float32|bfloat16|Q8_0|Q4_0|Q4_1]

torch's column is its float32 product, or bfloat16 beside ours in bfloat16.
"""

from __future__ import annotations

import argparse

import torch
from limit import Limits, best_seconds, linear_work, measure_limits

from pyserve._C import Linear, set_num_threads

# (out, in) of SmolLM2-135M's layers (qkv, o, gate+up, down), and of its head.
SHAPES = [(960, 576), (576, 576), (3072, 576), (576, 1536), (49152, 576)]
ROWS = [1, 4, 16, 64, 256, 512]
BLOCK_BYTES = {"Q8_0": 34, "Q4_0": 18, "Q4_1": 20}


def random_blocks(kind: str, out: int, depth: int) -> torch.Tensor:
    """Any integers under small scales, uint8 ``[out, bytes]``."""
    blocks = torch.randint(0, 256, (out, depth // 32, BLOCK_BYTES[kind]), dtype=torch.uint8)
    halves = 2 if kind == "Q4_1" else 1
    scales = torch.randn(out, depth // 32, halves).mul_(0.002).half()
    blocks[:, :, : 2 * halves] = scales.view(torch.uint8).view(out, depth // 32, 2 * halves)
    return blocks.view(out, -1)


def pack(weight: torch.Tensor, weights: str, isa: str) -> Linear:
    """``weight`` in the compute type, or random blocks of its shape."""
    if weights in BLOCK_BYTES:
        return Linear.from_blocks(weights, random_blocks(weights, *weight.shape), isa)
    return Linear(weight, weights, isa)


def compare(out: int, depth: int, rows: int, weights: str, isa: str, limits: Limits) -> str:
    """One line: ours and torch's on weights that every call streams from memory."""
    copies = max(1, (192 << 20) // (4 * out * depth))
    plain = [torch.randn(out, depth) for _ in range(copies)]
    packed = [pack(w, weights, isa) for w in plain]
    plain = [w.to(torch.bfloat16 if weights == "bfloat16" else torch.float32) for w in plain]
    x = torch.randn(rows, depth)
    y = x.to(plain[0].dtype)
    ours = best_seconds(lambda: [p.apply(x) for p in packed]) / copies
    theirs = best_seconds(lambda: [torch.nn.functional.linear(y, w) for w in plain]) / copies
    flops = 2 * rows * out * depth
    percent = limits.percent(linear_work(rows, out, depth, weights, packed[0].bytes), ours)
    return (
        f"{out:5} {depth:5} {rows:4} | {ours * 1e6:8.1f} {flops / ours / 1e9:8.1f}"
        f" {packed[0].bytes / ours / 1e9:6.1f} {percent:5.0f}"
        f" | {theirs * 1e6:8.1f} {flops / theirs / 1e9:8.1f}"
    )


def main() -> None:
    """Prints one line for each shape and number of rows."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--isa", default="")
    parser.add_argument(
        "--weights", default="float32", choices=["float32", "bfloat16", *BLOCK_BYTES]
    )
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    set_num_threads(args.threads)
    limits = measure_limits(isa=args.isa)
    print(f"limits: {limits}")
    print("  out    in rows |  ours us  GFLOP/s   GB/s %lim. | torch us  GFLOP/s")
    for out, depth in SHAPES:
        for rows in ROWS:
            print(compare(out, depth, rows, args.weights, args.isa, limits))


if __name__ == "__main__":
    main()
