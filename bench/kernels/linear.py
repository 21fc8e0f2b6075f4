"""Speed of the packed matrix product beside torch's: GFLOP/s (with integers: GOP/s), GB/s of weights,
and % of what memory or arithmetic allow.

python bench/kernels/linear.py [--threads N] [--isa avx512] [--weights float32|bfloat16|Q8_0|Q4_0|Q4_1]
    [--model Llama-3.2-1B] [--rows 1,16,512]

torch's column is its float32 product, or bfloat16 beside ours in bfloat16.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch
from limit import Limits, best_seconds, linear_work, measure_limits

from pyserve._C import Linear, set_num_threads

# (out, in) of layers (qkv, o, gate+up, down), and of the head: of the larger model a quarter of it.
MODELS = {
    "SmolLM2-135M": [(960, 576), (576, 576), (3072, 576), (576, 1536), (49152, 576)],
    "Llama-3.2-1B": [(3072, 2048), (2048, 2048), (16384, 2048), (2048, 8192), (32064, 2048)],
}
ROWS = "1,2,4,8,16,32,64,128,256,512"
STREAMED_BYTES = 192 << 20
"""Of weights that calls take in turn, so that each streams its own from memory."""
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


def product(x: torch.Tensor, out: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """torch's."""
    return torch.mm(x, weight.t(), out=out)


def seconds_each(
    products: Sequence[Callable[[torch.Tensor, torch.Tensor], object]], x: torch.Tensor, out: int
) -> float:
    """Of one product, where all of them take turns; results go to the same memory."""
    y = torch.empty(len(x), out, dtype=x.dtype)
    return best_seconds(lambda: [product(x, y) for product in products]) / len(products)


def compare(
    out: int, depth: int, numbers: list[int], weights: str, isa: str, limits: Limits
) -> Iterator[str]:
    """A line for each number of rows: ours and torch's on weights that every call streams from memory."""
    some = torch.randn(out, depth)
    packed = [pack(some, weights, isa)]
    packed += [pack(some, weights, isa) for _ in range(STREAMED_BYTES // packed[0].bytes)]
    plain = [some.to(torch.bfloat16 if weights == "bfloat16" else torch.float32)]
    plain += [plain[0].clone() for _ in range(STREAMED_BYTES // plain[0].nbytes)]
    products = [partial(product, weight=weight) for weight in plain]
    tiles = limits.tile_operations > 0
    for rows in numbers:
        x = torch.randn(rows, depth)
        ours = seconds_each([weight.apply for weight in packed], x, out)
        theirs = seconds_each(products, x.to(plain[0].dtype), out)
        flops = 2 * rows * out * depth
        work = linear_work(rows, out, depth, weights, packed[0].bytes, tiles=tiles)
        yield (
            f"{out:5} {depth:5} {rows:4} | {ours * 1e6:8.1f} {flops / ours / 1e9:8.1f}"
            f" {packed[0].bytes / ours / 1e9:6.1f} {limits.percent(work, ours):5.0f}"
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
    parser.add_argument("--model", default="SmolLM2-135M", choices=list(MODELS))
    parser.add_argument("--rows", default=ROWS)
    args = parser.parse_args()
    numbers = [int(number) for number in args.rows.split(",")]
    torch.set_num_threads(args.threads)
    set_num_threads(args.threads)
    limits = measure_limits(isa=args.isa)
    print(f"limits: {limits}")
    print("  out    in rows |  ours us  GFLOP/s   GB/s %lim. | torch us  GFLOP/s")
    for out, depth in MODELS[args.model]:
        for line in compare(out, depth, numbers, args.weights, args.isa, limits):
            print(line, flush=True)


if __name__ == "__main__":
    main()
