"""Batch invariance on the default model, through the block pool: greedy tokens and the bits of their logits
are the same alone, in company, chunked, preempted and resumed, and with the prompt from the prefix cache."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
import torch
from torch import Tensor

from pyserve._C import BlockPool, StepBuffers, pack
from pyserve.backends.native import NativeBackend
from pyserve.models.load import open_checkpoint
from tests.model.harness import random_tokens

OUTPUT = 10
PROMPT = random_tokens(45, seed=1, vocab=49000)


@pytest.fixture(scope="module")
def backend() -> Iterable[NativeBackend]:
    backend = NativeBackend(open_checkpoint(None))
    yield backend
    backend.close()


def ints(values: Iterable[int]) -> Tensor:
    return torch.tensor(list(values), dtype=torch.int32)


class Engine:
    """A pool and a back-end: steps by hand, greedy tokens appended."""

    def __init__(self, backend: NativeBackend) -> None:
        self.backend = backend
        backend.allocate(256, 16)
        self.pool = BlockPool(256, 16, True)
        self.buffers = StepBuffers(1024, 64, 32)
        self.logits: dict[int, list[Tensor]] = {}

    def add(self, prompt: list[int]) -> int:
        row = self.pool.add(ints(prompt), len(prompt), 0, 0)
        self.logits[row] = []
        return row

    def step(self, work: dict[int, int]) -> None:
        """Advances each row by at most that many tokens; at its end a row grows by its next one."""
        takes = {
            row: min(take, self.pool.length(row) - self.pool.computed(row))
            for row, take in work.items()
        }
        for row, take in takes.items():
            assert self.pool.reserve(row, self.pool.computed(row) + take)
        rows = list(takes)
        packed = pack(self.pool, ints(rows), ints(takes.values()), self.buffers)
        sampled = [rows[i] for i in packed.sample_seq.tolist()]
        logits = self.backend.forward(packed, ints([])).logits
        self.pool.advance(ints(rows), ints(takes.values()))
        if sampled:
            self.pool.append(ints(sampled), logits.argmax(dim=1).int())
        for row, line in zip(sampled, logits, strict=True):
            self.logits[row].append(line)

    def finish(self, row: int, take: int = 1024) -> Tensor:
        """Runs the row alone to its end; ``[OUTPUT, vocab]`` logits."""
        while len(self.logits[row]) < OUTPUT:
            self.step({row: take})
        return torch.stack(self.logits[row])


@pytest.fixture(scope="module")
def expected(backend: NativeBackend) -> Tensor:
    engine = Engine(backend)
    return engine.finish(engine.add(PROMPT))


def assert_same_bits(actual: Tensor, expected: Tensor) -> None:
    assert torch.equal(actual.view(torch.int32), expected.view(torch.int32))


@pytest.mark.parametrize("take", [1, 7, 16, 31, 44])
def test_chunked(backend: NativeBackend, expected: Tensor, take: int) -> None:
    engine = Engine(backend)
    assert_same_bits(engine.finish(engine.add(PROMPT), take), expected)


@pytest.mark.parametrize("others", [1, 3, 11, 32])
def test_among_others(backend: NativeBackend, expected: Tensor, others: int) -> None:
    engine = Engine(backend)
    company = [
        engine.add(random_tokens(5 + 3 * i, seed=50 + i, vocab=49000)) for i in range(others)
    ]
    engine.step(dict.fromkeys(company[: others // 2], 9))
    row = engine.add(PROMPT)
    while len(engine.logits[row]) < OUTPUT:
        engine.step({**dict.fromkeys(company, 3), row: 20})
    assert_same_bits(torch.stack(engine.logits[row]), expected)


@pytest.mark.parametrize("kept_blocks", [0, 1, 3])
def test_preempted_and_resumed(backend: NativeBackend, expected: Tensor, kept_blocks: int) -> None:
    engine = Engine(backend)
    row, other = engine.add(PROMPT), engine.add(PROMPT[::-1])
    for _ in range(5):
        engine.step({row: 1024, other: 1024})
    engine.pool.trim(row, kept_blocks)
    engine.finish(other)
    assert_same_bits(engine.finish(row), expected)


def test_prefix_from_the_cache(backend: NativeBackend, expected: Tensor) -> None:
    engine = Engine(backend)
    engine.finish(engine.add(PROMPT))
    row = engine.add(PROMPT)
    assert engine.pool.match(row) == 32
    assert_same_bits(engine.finish(row), expected)
