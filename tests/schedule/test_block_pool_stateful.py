"""BlockPool against its Python twin, step by random step, with ``check()`` after every one."""

from __future__ import annotations

from typing import Any

import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from pyserve._C import BlockPool

from .twin import TwinPool


def ints(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


class PoolMachine(RuleBasedStateMachine):
    @initialize(blocks=st.integers(1, 12), size=st.integers(1, 4), cache=st.booleans())
    def start(self, blocks: int, size: int, cache: bool) -> None:
        self.pool = BlockPool(blocks, size, cache)
        self.twin = TwinPool(blocks, size, cache)

    def pick(self, data: Any) -> int:
        return int(data.draw(st.sampled_from(sorted(self.twin.rows))))

    @rule(
        tokens=st.lists(st.integers(0, 1), min_size=1, max_size=12),
        prompt=st.integers(1, 12),
        salt=st.sampled_from([0, 1, 2**64 - 1]),
        tenant=st.integers(0, 2),
    )
    def add(self, tokens: list[int], prompt: int, salt: int, tenant: int) -> None:
        prompt = min(prompt, len(tokens))
        row = self.pool.add(ints(*tokens), prompt, salt, tenant)
        self.twin.add(row, tokens, prompt, salt, tenant)

    @precondition(lambda self: self.twin.rows)
    @rule(data=st.data(), token=st.integers(0, 1))
    def append(self, data: Any, token: int) -> None:
        row = self.pick(data)
        self.pool.append(ints(row), ints(token))
        self.twin.append(row, token)

    @precondition(lambda self: self.twin.rows)
    @rule(data=st.data(), take=st.integers(1, 9))
    def advance(self, data: Any, take: int) -> None:
        row = self.pick(data)
        take = min(take, self.pool.length(row) - self.pool.computed(row))
        fits = self.pool.reserve(row, self.pool.computed(row) + take)
        assert fits == self.twin.reserve(row, self.twin.rows[row].computed + take)
        if fits:
            self.pool.advance(ints(row), ints(take))
            self.twin.advance(row, take)

    @precondition(lambda self: self.twin.rows)
    @rule(data=st.data())
    def match(self, data: Any) -> None:
        row = self.pick(data)
        if self.pool.blocks(row):
            return
        expected = self.twin.known_prefix(row) * self.pool.block_size
        assert self.pool.match(row) == expected
        self.twin.queries += self.pool.length(row) if self.twin.prefix_cache else 0
        self.twin.hits += expected
        self.twin.adopt(row, self.pool.blocks(row))

    @precondition(lambda self: len(self.twin.rows) > 1)
    @rule(data=st.data())
    def fork(self, data: Any) -> None:
        parent, child = self.pick(data), self.pick(data)
        a, b = self.twin.rows[parent], self.twin.rows[child]
        if b.blocks or a.salt != b.salt or parent == child:
            return
        pairs = zip(a.tokens[: a.prompt_len], b.tokens[: b.prompt_len], strict=False)
        common = next((i for i, (x, y) in enumerate(pairs) if x != y), None)
        common = min(a.prompt_len, b.prompt_len) if common is None else common
        blocks = min(common, a.computed, len(b.tokens) - 1) // self.pool.block_size
        assert self.pool.fork(parent, child) == blocks * self.pool.block_size
        assert self.pool.blocks(child) == a.blocks[:blocks]
        self.twin.adopt(child, a.blocks[:blocks])

    @precondition(lambda self: self.twin.rows)
    @rule(data=st.data())
    def reserve_all(self, data: Any) -> None:
        rows = data.draw(st.lists(st.sampled_from(sorted(self.twin.rows)), unique=True))
        fits = self.pool.reserve_all(torch.tensor(rows, dtype=torch.int32))
        assert fits == self.twin.reserve_all(rows)

    @precondition(lambda self: self.twin.rows)
    @rule(data=st.data(), keep=st.integers(0, 6))
    def trim(self, data: Any, keep: int) -> None:
        row = self.pick(data)
        self.pool.trim(row, keep)
        self.twin.trim(row, keep)

    @precondition(lambda self: self.twin.rows)
    @rule(data=st.data())
    def release(self, data: Any) -> None:
        row = self.pick(data)
        self.pool.release(row)
        self.twin.release(row)

    @invariant()
    def agree(self) -> None:
        if not hasattr(self, "pool"):
            return
        self.pool.check()
        for index, row in self.twin.rows.items():
            assert self.pool.blocks(index) == row.blocks
            assert self.pool.computed(index) == row.computed
            assert self.pool.tokens(index).tolist() == row.tokens
        statistics = self.pool.statistics()
        cached = sum(block in self.twin.content for block in self.twin.free)
        assert statistics.cached == cached
        assert (
            statistics.free == len(self.twin.free) - cached == self.pool.available_blocks - cached
        )
        assert statistics.evictions == self.twin.evictions
        assert statistics.rows == len(self.twin.rows)
        assert (statistics.prefix_queries, statistics.prefix_hits) == (
            self.twin.queries,
            self.twin.hits,
        )
        for tenant in range(3):
            assert self.pool.tenant_blocks(tenant) == self.twin.tenant_blocks(tenant)


PoolMachine.TestCase.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)
TestPool = PoolMachine.TestCase
