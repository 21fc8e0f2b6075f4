"""Speed of paged attention alone: ms a layer and % of what memory or arithmetic allow.

python bench/kernels/attention.py [--threads N] [--isa avx512,amx] [--kv float32,bfloat16,int8] [--model NAME]

Several instruction sets are timed in turns on the same keys. Decode steps are one token of each of some
sequences; prefill is one sequence's chunk behind what is cached of it. Keys and values of as many layers as
a model has, or as fill 256 MB, are gone through in turn, so that they come from memory as in a step.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import asdict

import torch
from limit import Limits, Work, attention_work, best_seconds, measure_limits

from pyserve._C import PagedAttention, set_num_threads

# Query heads, kv heads, head_dim, layers.
MODELS = {
    "SmolLM2-135M": (9, 3, 64, 30),
    "Qwen2.5-0.5B": (14, 2, 64, 24),
    "Llama-3.2-1B": (32, 8, 64, 16),
}
DECODE = [(batch, context) for batch in (1, 16, 64) for context in (128, 256, 1024, 4096)]
PREFILL = [(take, cached) for take in (64, 512) for cached in (0, 512, 3584)]
KV_BYTES = {"float32": 4, "bfloat16": 2, "int8": 1}
BLOCK = 16
MOST_BYTES = 256 << 20


class Layers:
    """Layers of ``batch`` sequences of ``context`` tokens whose blocks lie scattered."""

    def __init__(
        self, model: str, batch: int, context: int, kv: str, isa: str, gen: torch.Generator
    ) -> None:
        self.heads, self.kv_heads, self.head_dim, layers = MODELS[model]
        blocks = batch * -(-context // BLOCK)
        bytes_ = 2 * blocks * BLOCK * self.kv_heads * self.head_dim * KV_BYTES[kv]
        self.table = torch.randperm(blocks, generator=gen).int().view(batch, -1)
        self.ops = [
            PagedAttention(self.heads, self.kv_heads, self.head_dim, blocks, BLOCK, kv, isa)
            for _ in range(max(1, min(layers, MOST_BYTES // bytes_)))
        ]
        self.batch, self.context = batch, context
        keys, values = torch.randn(2, context, self.kv_heads, self.head_dim, generator=gen)
        position = torch.arange(context)
        for op in self.ops:
            for row in self.table:
                op.write((row[position // BLOCK] * BLOCK + position % BLOCK).int(), keys, values)

    def seconds(self, take: int) -> float:
        """A layer's, for the last ``take`` tokens of each sequence."""
        q = torch.randn(self.batch * take, self.heads, self.head_dim) * self.head_dim**-0.5
        ends = torch.arange(self.batch + 1, dtype=torch.int32) * take
        contexts = torch.full((self.batch,), self.context, dtype=torch.int32)
        step = [(op, q, ends, contexts, self.table) for op in self.ops]
        return best_seconds(lambda: [op.attend(*inputs) for op, *inputs in step]) / len(self.ops)

    def work(self, take: int, kv: str, *, tiles: bool) -> Work:
        """What that cannot do without."""
        shape = (self.heads, self.kv_heads, self.head_dim, KV_BYTES[kv])
        one = attention_work(take, self.context, *shape, tiles=tiles)
        return Work(**{name: self.batch * amount for name, amount in asdict(one).items()})


def cases() -> Iterator[tuple[str, int, int, int]]:
    """Name, sequences, tokens each, context."""
    for batch, context in DECODE:
        yield "decode", batch, 1, context
    for take, cached in PREFILL:
        yield "prefill", 1, take, cached + take


def main() -> None:
    """Prints one line for each KV type and case, with a column pair for each instruction set."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--isa", default="")
    parser.add_argument("--kv", default="float32,bfloat16,int8")
    parser.add_argument("--model", default="SmolLM2-135M", choices=list(MODELS))
    args = parser.parse_args()
    set_num_threads(args.threads)
    isas = args.isa.split(",")
    limits: list[Limits] = [measure_limits(isa=isa) for isa in isas]
    for isa, limit in zip(isas, limits, strict=True):
        print(f"limits of {isa or 'the best'}: {limit}")
    print("kv       case    seqs  new context |" + "".join(f"{isa:>9} ms %lim." for isa in isas))
    for kv in args.kv.split(","):
        for name, batch, take, context in cases():
            line = f"{kv:8} {name:7} {batch:4} {take:4} {context:7} |"
            for isa, limit in zip(isas, limits, strict=True):
                layers = Layers(
                    args.model, batch, context, kv, isa, torch.Generator().manual_seed(0)
                )
                seconds = layers.seconds(take)
                work = layers.work(take, kv, tiles=limit.tile_operations > 0)
                percent = limit.percent(work, seconds)
                line += f" {seconds * 1e3:11.3f} {percent:5.0f}"
            print(line, flush=True)


if __name__ == "__main__":
    main()
