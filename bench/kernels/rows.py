"""Norms, rotary, activation, quantising and sampling alone, in sizes of real models, on one thread.

python bench/kernels/rows.py [--isa avx512] [--rows 1,16,64,512] [--seconds 0.05]

They read and write activations, which lie in the core's own cache: that is their limit, and nobody's time
but the step's.
"""

from __future__ import annotations

import argparse

import torch
from limit import Limits, Work, best_seconds, measure_limits

from pyserve._C import BlockPool, SamplerState, sample, set_num_threads, time_rows

# Width of the residual stream, of the MLP, and of queries and keys together.
MODELS = {
    "SmolLM2-135M": (576, 1536, 768),
    "Qwen2.5-0.5B": (896, 4864, 1024),
    "Llama-3.2-1B": (2048, 8192, 2560),
}
VOCABULARIES = {"SmolLM2-135M": 49152, "Llama-3.2-1B": 128256}
# Op: which of those widths, bytes read and written a float of it, operations a float.
OPS = {
    "rms_norm": (0, 8, 4),
    "layer_norm": (0, 8, 7),
    "add": (0, 12, 1),
    "quantize": (0, 4 + 44 / 32, 4),
    "silu_mul": (1, 12, 20),
    "gelu_mul": (1, 12, 22),
    "rotate": (2, 8, 3.5),
}


def show(name: str, op: str, rows: int, seconds: float, limits: Limits, work: Work) -> None:
    bytes_ = work.cached_bytes + work.memory_bytes
    print(
        f"{name:14} {op:12} {rows:4} | {seconds * 1e6:9.2f} {seconds / rows * 1e9:9.0f}"
        f" {bytes_ / seconds / 1e9:7.1f} {limits.percent(work, seconds):7.0f}"
    )


def sampling(rows: int, vocabulary: int, temperature: float, top_p: float) -> float:
    """Seconds for one token of each of ``rows`` rows of logits."""
    pool, state = BlockPool(4, 16, False), SamplerState()
    ids = [pool.add(torch.zeros(2, dtype=torch.int32), 2, 0, 0) for _ in range(rows)]
    for row in ids:
        state.set(row, temperature=temperature, top_p=top_p, seed=row)
    logits = torch.randn(rows, vocabulary) * 2
    which = torch.tensor(ids, dtype=torch.int32)
    return best_seconds(lambda: sample(logits, pool, state, which), 0.1)


def main() -> None:
    """Prints one line for each op, model and number of rows."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--isa", default="")
    parser.add_argument("--rows", default="1,16,64,512")
    parser.add_argument("--seconds", type=float, default=0.05)
    args = parser.parse_args()
    numbers = [int(number) for number in args.rows.split(",")]
    set_num_threads(1)
    limits = measure_limits(isa=args.isa)
    print(f"limits: {limits}")
    print(f"{'model':14} {'op':12} rows |        us    ns/row    GB/s % limit")
    for name, widths in MODELS.items():
        for op, (which, bytes_, operations) in OPS.items():
            for rows in numbers:
                floats = rows * widths[which]
                work = Work(cached_bytes=floats * bytes_, float_operations=floats * operations)
                seconds = time_rows(op, rows, widths[which], args.seconds, args.isa)
                show(name, op, rows, seconds, limits, work)
    for name, vocabulary in VOCABULARIES.items():
        for op, temperature, top_p in (("greedy", 0, 1), ("draw", 0.8, 1), ("top-p", 0.8, 0.95)):
            for rows in [number for number in numbers if number <= 64]:
                work = Work(memory_bytes=4 * rows * vocabulary, float_operations=rows * vocabulary)
                show(name, op, rows, sampling(rows, vocabulary, temperature, top_p), limits, work)


if __name__ == "__main__":
    main()
