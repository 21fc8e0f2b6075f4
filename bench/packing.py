"""What select, pack and pad cost, over request mixes: ``python bench/packing.py``.

The goal for select and pack together: under 300 us for 256 running and 10,000 waiting requests, growing with
what is scheduled and not with what waits. The waiting line passes only its head to select, as the scheduler
does. pad makes a rectangle of the packed tokens, and unpad takes it apart: what attention without ragged
inputs would need; here so that they can be compared.

Each is an NVTX range inside of "step", for ``nsys profile -t nvtx python bench/packing.py``.
"""

from __future__ import annotations

import argparse
import statistics
import time
from dataclasses import dataclass

import torch
from torch import Tensor

from pyserve._C import (
    BlockPool,
    Limits,
    Range,
    StepBuffers,
    pack,
    profile_start,
    profile_stop,
    select,
)

BLOCK_SIZE = 16
OPS = ("select", "pack", "pad", "unpad")
HEAD = 64  # candidates of the waiting line that one step looks at


@dataclass(frozen=True)
class Mix:
    """``running`` decode at ``context`` tokens, ``prefilling`` are in mid-prompt, ``waiting`` wait."""

    name: str
    running: int
    prefilling: int
    waiting: int
    context: int
    prompt: int
    token_budget: int


MIXES = [
    Mix("1 running, none waiting", 1, 0, 0, 512, 512, 512),
    Mix("64 running, none waiting", 64, 0, 0, 512, 512, 512),
    Mix("256 running, none waiting", 256, 0, 0, 512, 512, 512),
    Mix("256 running, 10,000 waiting", 256, 0, 10_000, 512, 512, 512),
    Mix("256 running, 10,000 waiting, 2,048 tokens", 256, 4, 10_000, 512, 512, 2048),
    Mix("64 running, 4 prompts of 512 among them", 64, 4, 0, 512, 512, 2048),
    Mix("256 running at 4,096 tokens, 10,000 waiting", 256, 4, 10_000, 4096, 512, 2048),
]


def ints(values: list[int]) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


class Load:
    """A pool in the state that a mix describes, and the candidates of its next step."""

    def __init__(self, mix: Mix) -> None:
        rows = mix.running + mix.prefilling
        blocks = rows * (mix.context // BLOCK_SIZE + 2) + 4 * mix.token_budget // BLOCK_SIZE
        self.pool = BlockPool(blocks, BLOCK_SIZE, True)
        running = [self._add(mix.context, mix.context - 1, i) for i in range(mix.running)]
        running += [
            self._add(mix.prompt, mix.prompt // 2, -i) for i in range(1, mix.prefilling + 1)
        ]
        waiting = [self._add(mix.prompt, 0, 10**6 + i) for i in range(mix.waiting)]
        head = waiting[:HEAD]
        self.rows = ints([*running, *head])
        self.want = ints([self.pool.length(r) - self.pool.computed(r) for r in [*running, *head]])
        self.running = torch.tensor([1] * len(running) + [0] * len(head), dtype=torch.uint8)
        self.need_free = ints([0] * len(running) + [mix.prompt // BLOCK_SIZE] * len(head))
        self.limits = Limits(mix.token_budget, 512)
        self.buffers = StepBuffers(mix.token_budget, 512, mix.context // BLOCK_SIZE + 2)
        self.owned = {row: len(self.pool.blocks(row)) for row in self.rows.tolist()}

    def _add(self, length: int, computed: int, salt: int) -> int:
        row = self.pool.add(torch.zeros(length, dtype=torch.int32), length, salt % 2**64, 0)
        self.pool.reserve(row, computed)
        self.pool.advance(ints([row]), ints([computed]))
        return row

    def step(self) -> Step:
        """One select, pack, pad and unpad. The pool stays as it was."""
        with Range("step"):
            begin = time.perf_counter()
            selection = select(
                self.pool, self.rows, self.want, self.running, self.need_free, self.limits
            )
            take = selection.take
            chosen = take.nonzero().flatten()
            packed = pack(self.pool, self.rows[chosen], take[chosen], self.buffers)
            together_s = time.perf_counter() - begin
            rectangle = torch.ops.pyserve.pad(packed.input_ids, packed.cu_seqlens)
            torch.ops.pyserve.unpad(rectangle, packed.cu_seqlens)
        for row, blocks in self.owned.items():
            self.pool.trim(row, blocks)
        return Step(together_s, packed.input_ids.numel(), chosen.numel(), rectangle.numel())


@dataclass(frozen=True)
class Step:
    """``together_s``: select and pack, and the indexing between; the rectangle has ``padded`` tokens."""

    together_s: float
    tokens: int
    rows: int
    padded: int


def measure(load: Load, steps: int) -> str:
    """Medians; the single ops from the extension's own timers, in every other step."""
    together_us = []
    parts_us: dict[str, list[float]] = {op: [] for op in OPS}
    for _ in range(steps):
        step = load.step()
        together_us.append(step.together_s * 1e6)
        profile_start()
        load.step()
        times = profile_stop()
        for op in OPS:
            parts_us[op].append(times[op].seconds * 1e6)
    together_us.sort()
    p99 = together_us[int(0.99 * (len(together_us) - 1))]
    parts = "".join(f" {statistics.median(parts_us[op]):8.1f}" for op in OPS)
    return (
        f"{step.rows:5} {step.tokens:6} {step.padded:7} {statistics.median(together_us):9.1f}"
        f" {p99:8.1f}{parts}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=300)
    steps = parser.parse_args().steps
    torch.set_num_threads(1)
    print("microseconds: medians, and p99 of select and pack together")
    print(
        f"{'mix':46} {'rows':>5} {'tokens':>6} {'padded':>7} {'together':>9} {'p99':>8}"
        + "".join(f" {op:>8}" for op in OPS)
    )
    for mix in MIXES:
        print(f"{mix.name:46} {measure(Load(mix), steps)}")


if __name__ == "__main__":
    main()
