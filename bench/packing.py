"""What select and pack cost together, over request mixes: ``python bench/packing.py``.

The goal: under 300 us for 256 running and 10,000 waiting requests, growing with what is scheduled and not
with what waits. The waiting line passes only its head to select, as the scheduler does.
"""

from __future__ import annotations

import argparse
import statistics
import time
from dataclasses import dataclass

import torch
from torch import Tensor

from pyserve._C import BlockPool, Limits, StepBuffers, pack, select

BLOCK_SIZE = 16
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

    def step(self) -> tuple[float, int, int]:
        """Seconds for one select and pack; tokens and rows that they scheduled. The pool stays as it was."""
        begin = time.perf_counter()
        selection = select(
            self.pool, self.rows, self.want, self.running, self.need_free, self.limits
        )
        take = selection.take
        chosen = take.nonzero().flatten()
        packed = pack(self.pool, self.rows[chosen], take[chosen], self.buffers)
        seconds = time.perf_counter() - begin
        for row, blocks in self.owned.items():
            self.pool.trim(row, blocks)
        return seconds, packed.input_ids.numel(), chosen.numel()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=300)
    steps = parser.parse_args().steps
    torch.set_num_threads(1)
    print(f"{'mix':46} {'rows':>5} {'tokens':>6} {'median us':>10} {'p99 us':>8}")
    for mix in MIXES:
        load = Load(mix)
        runs = [load.step() for _ in range(steps)]
        microseconds = sorted(seconds * 1e6 for seconds, _, _ in runs)
        _, tokens, rows = runs[-1]
        p99 = microseconds[int(0.99 * (len(microseconds) - 1))]
        median = statistics.median(microseconds)
        print(f"{mix.name:46} {rows:5} {tokens:6} {median:10.1f} {p99:8.1f}")


if __name__ == "__main__":
    main()
