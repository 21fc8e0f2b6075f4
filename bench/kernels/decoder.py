"""Speed of whole forward passes on random weights in SmolLM2-135M's shape.

python bench/kernels/decoder.py [--threads N] [--isa avx512] [--dtype float32] [--weights Q4_1]
    [--kv-dtype bfloat16] [--context 128]
"""

from __future__ import annotations

import argparse
import time

import torch
from linear import BLOCK_BYTES, random_blocks

from pyserve._C import Decoder, get_num_threads, set_num_threads
from pyserve.models.config import DecoderConfig, RopeConfig

LAYERS, BLOCK = 30, 16
CONFIG = DecoderConfig(
    architecture="llama",
    vocab_size=49152,
    hidden_size=576,
    num_layers=LAYERS,
    num_heads=9,
    num_kv_heads=3,
    head_dim=64,
    intermediate_size=1536,
    context_length=8192,
    norm="rms",
    norm_eps=1e-5,
    activation="silu",
    gated_mlp=True,
    qk_norm=False,
    post_norms=False,
    attention_scale=0.125,
    embedding_scale=1.0,
    layer_window=(0,) * LAYERS,
    layer_rope=(0,) * LAYERS,
    ropes=(RopeConfig(tuple(1e5 ** (-i / 32) for i in range(32))),),
    learned_positions=False,
    tie_embeddings=True,
    bos_token_id=None,
    eos_token_ids=(),
)


def load_random(decoder: Decoder, weights: str) -> None:
    """Fills every weight with small random numbers; ``weights`` is "dense" or a GGUF type of the layers.

    With the latter, embedding and head are Q8_0, as in the default model.
    """
    c = CONFIG

    def load(name: str, out: int, depth: int, kind: str) -> None:
        if weights == "dense":
            decoder.load(name, torch.randn(out, depth) * 0.02)
        else:
            decoder.load_blocks(name, kind, random_blocks(kind, out, depth))

    load("embed.weight", c.vocab_size, c.hidden_size, "Q8_0")
    decoder.load("final_norm.weight", torch.ones(c.hidden_size))
    for i in range(c.num_layers):
        for name, out, depth in (
            ("q", c.q_size, c.hidden_size),
            ("k", c.kv_size, c.hidden_size),
            ("v", c.kv_size, c.hidden_size),
            ("o", c.hidden_size, c.q_size),
            ("gate", c.intermediate_size, c.hidden_size),
            ("up", c.intermediate_size, c.hidden_size),
            ("down", c.hidden_size, c.intermediate_size),
        ):
            load(f"layers.{i}.{name}.weight", out, depth, weights)
        for name in ("attn_norm", "mlp_norm"):
            decoder.load(f"layers.{i}.{name}.weight", torch.ones(c.hidden_size))
    decoder.seal()


def step_seconds(
    decoder: Decoder, sequences: int, take: int, context: int, clock: int, budget_s: float = 2.0
) -> float:
    """Fastest step of ``take`` tokens for each sequence, ``context`` long afterwards."""

    def ints(values: list[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32)

    width = (context + BLOCK - 1) // BLOCK
    table = torch.arange(sequences * width, dtype=torch.int32).reshape(sequences, width)
    positions = list(range(context - take, context)) * sequences
    slots = [s * width * BLOCK + p for s in range(sequences) for p in positions[:take]]
    inputs = [
        ints([i * 37 % CONFIG.vocab_size for i in range(sequences * take)]),
        ints(positions),
        ints([take * s for s in range(sequences + 1)]),
        ints([context] * sequences),
        ints(slots),
        table,
        ints([take * (s + 1) - 1 for s in range(sequences)]),
        ints([]),
    ]
    best = float("inf")
    end = time.perf_counter() + budget_s
    while time.perf_counter() < end:
        start = time.clock_gettime(clock)
        decoder.forward(*inputs)
        best = min(best, time.clock_gettime(clock) - start)
    return best


def main() -> None:
    """Prints decode steps at growing concurrency, then prefill."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=get_num_threads())
    parser.add_argument("--isa", default="")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--kv-dtype", default="float32", choices=["float32", "bfloat16", "int8"])
    parser.add_argument("--weights", default="dense", choices=["dense", *BLOCK_BYTES])
    parser.add_argument("--context", type=int, default=128)
    args = parser.parse_args()
    set_num_threads(args.threads)
    # With one thread its own time tells what the kernels take, whatever else the machine runs.
    clock = time.CLOCK_THREAD_CPUTIME_ID if args.threads == 1 else time.CLOCK_MONOTONIC
    decoder = Decoder(CONFIG.as_dict(), args.dtype, args.isa)
    load_random(decoder, args.weights)
    decoder.allocate_kv(64 * (args.context // BLOCK + 33), BLOCK, args.kv_dtype)
    print(
        f"{decoder.isa}, {args.weights} weights, {args.dtype}, {args.threads} threads, context {args.context}"
    )
    one = 0.0
    for sequences in (1, 4, 16, 64):
        seconds = step_seconds(decoder, sequences, 1, args.context, clock)
        one = one or seconds
        print(
            f"decode {sequences:3}: {seconds * 1e3:7.2f} ms, {sequences / seconds:7.1f} tokens/s,"
            f" {sequences * one / seconds:5.2f} x one by one"
        )
    for take in (64, 512):
        seconds = step_seconds(decoder, 1, take, take, clock)
        print(f"prefill {take}: {seconds * 1e3:7.2f} ms, {take / seconds:7.1f} tokens/s")


if __name__ == "__main__":
    main()
