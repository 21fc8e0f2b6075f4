"""The torch back-end and the native one on the same tiny random model, side by side."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache

import torch
from torch import Tensor

from pyserve._C import BlockPool, StepBuffers, pack
from pyserve.backends.base import Backend, ForwardOutput
from pyserve.backends.native import NativeBackend
from pyserve.backends.torch_decoder import TorchBackend
from tests.backends.memory_source import Source
from tests.model.harness import config_of, random_model, random_tokens, weights_of


@cache
def source_of(name: str) -> Source:
    model = random_model(name)
    return Source(config_of(model), list(weights_of(model)))


def native(name: str, dtype: str = "float32") -> NativeBackend:
    return NativeBackend(source_of(name), dtype=dtype)


def on_torch(name: str, device: str = "cpu", dtype: str = "float32") -> TorchBackend:
    return TorchBackend(source_of(name), device=device, dtype=dtype)


def ints(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


@dataclass
class Rig:
    """A back-end with a block pool; ``step`` advances sequences and returns what the back-end did."""

    backend: Backend
    block_size: int = 16
    num_blocks: int = 96
    pool: BlockPool = field(init=False)
    buffers: StepBuffers = field(init=False)

    def __post_init__(self) -> None:
        self.backend.allocate(self.num_blocks, self.block_size)
        self.pool = BlockPool(self.num_blocks, self.block_size, False)
        self.buffers = StepBuffers(1024, 64, self.num_blocks)

    def add(self, tokens: Sequence[int]) -> int:
        return self.pool.add(ints(*tokens), len(tokens), 0, 0)

    def step(
        self, rows: Sequence[int], takes: Sequence[int], hidden: bool = False
    ) -> ForwardOutput:
        for row, take in zip(rows, takes, strict=True):
            assert self.pool.reserve(row, self.pool.computed(row) + take)
        packed = pack(self.pool, ints(*rows), ints(*takes), self.buffers)
        nothing = torch.empty(0, dtype=torch.int32)
        out = self.backend.forward(packed, packed.logit_rows.clone() if hidden else nothing)
        self.pool.advance(ints(*rows), ints(*takes))
        return out


def mixed_steps(seed: int, lengths: Sequence[int]) -> list[list[tuple[int, int]]]:
    """Steps of (sequence, take): chunks of several sequences at a time until all are through, then a few
    of one token each."""
    rng = random.Random(seed)
    left = dict(enumerate(lengths))
    steps = []
    while left:
        chosen = rng.sample(sorted(left), rng.randint(1, len(left)))
        step = [(s, min(left[s], rng.choice([1, 2, 7, 19, 40]))) for s in chosen]
        steps.append(step)
        for s, take in step:
            left[s] -= take
            if left[s] == 0:
                del left[s]
    return steps


def logits_of(rig: Rig, seed: int = 0, decode: int = 6) -> Tensor:
    """The logits of three prompts fed in mixed chunks, then of decode steps with given tokens."""
    prompts = [random_tokens(n, seed=seed + i) for i, n in enumerate((50, 7, 33))]
    rows = [rig.add(prompt) for prompt in prompts]
    pieces = []
    for step in mixed_steps(seed, [len(p) for p in prompts]):
        out = rig.step([rows[s] for s, _ in step], [take for _, take in step], hidden=True)
        pieces += [out.logits.cpu(), out.hidden.cpu()]
    for i in range(decode):
        rig.pool.append(ints(*rows), ints(*random_tokens(len(rows), seed=1000 + i)))
        pieces.append(rig.step(rows, [1] * len(rows)).logits.cpu().clone())
    return torch.cat([piece.flatten() for piece in pieces])
