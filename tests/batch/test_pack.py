"""pack against a plain Python twin, on random steps."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pyserve._C import BlockPool, StepBuffers, pack


def ints(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


@st.composite
def steps(draw: Any) -> tuple[BlockPool, list[int], list[int]]:
    """A pool and who of it advances by how many tokens."""
    size = draw(st.integers(1, 5))
    pool = BlockPool(200, size, draw(st.booleans()))
    rows, takes = [], []
    for _ in range(draw(st.integers(0, 6))):
        tokens = draw(st.lists(st.integers(0, 99), min_size=1, max_size=20))
        row = pool.add(ints(*tokens), len(tokens), 0, 0)
        done = draw(st.integers(0, len(tokens) - 1))
        take = draw(st.integers(1, len(tokens) - done))
        spare = draw(st.integers(0, 3)) * size  # a table may be longer than the step needs
        assert pool.reserve(row, done + take + spare)
        pool.advance(ints(row), ints(done))
        rows.append(row)
        takes.append(take)
    return pool, rows, takes


def twin_pack(pool: BlockPool, rows: list[int], takes: list[int]) -> dict[str, list[Any]]:
    out: dict[str, list[Any]] = {"cu_seqlens": [0]}
    tables = []
    for s, (row, take) in enumerate(zip(rows, takes, strict=True)):
        end = pool.computed(row) + take
        where = range(pool.computed(row), end)
        blocks = pool.blocks(row)
        size = pool.block_size
        out.setdefault("input_ids", []).extend(pool.tokens(row).tolist()[i] for i in where)
        out.setdefault("positions", []).extend(where)
        out.setdefault("slot_mapping", []).extend(
            blocks[i // size] * size + i % size for i in where
        )
        out["cu_seqlens"].append(len(out["input_ids"]))
        out.setdefault("context_lens", []).append(end)
        tables.append(blocks[: -(-end // size)])
        if end == pool.length(row):
            out.setdefault("sample_seq", []).append(s)
            out.setdefault("logit_rows", []).append(len(out["input_ids"]) - 1)
    width = max(map(len, tables), default=0)
    out["block_table"] = [t + [0] * (width - len(t)) for t in tables]
    return out


@settings(max_examples=150, deadline=None)
@given(steps(), st.booleans())
def test_agrees_with_twin(step: tuple[BlockPool, list[int], list[int]], dirty: bool) -> None:
    pool, rows, takes = step
    buffers = StepBuffers(200, 8, 40)
    if dirty:  # what an earlier step left behind does not matter
        pack(pool, ints(*rows), ints(*takes), buffers).block_table.fill_(-7)
    packed = pack(pool, ints(*rows), ints(*takes), buffers)
    expected = twin_pack(pool, rows, takes)
    for name in (
        "input_ids",
        "positions",
        "cu_seqlens",
        "context_lens",
        "slot_mapping",
        "block_table",
        "sample_seq",
        "logit_rows",
    ):
        tensor: torch.Tensor = getattr(packed, name)
        assert tensor.dtype == torch.int32
        assert tensor.is_contiguous()
        assert tensor.tolist() == expected.get(name, []), name
    assert packed.block_table.dim() == 2


def test_views_share_the_buffers() -> None:
    pool = BlockPool(4, 4, False)
    row = pool.add(ints(1, 2, 3), 3, 0, 0)
    pool.reserve(row, 3)
    buffers = StepBuffers(8, 2, 2)
    first = pack(pool, ints(row), ints(3), buffers)
    second = pack(pool, ints(row), ints(2), buffers)
    assert first.input_ids.data_ptr() == second.input_ids.data_ptr()
    assert (first.logit_rows.tolist(), second.logit_rows.tolist()) == ([2], [])


def test_wrong_steps_raise() -> None:
    pool = BlockPool(8, 2, False)
    row = pool.add(ints(1, 2, 3, 4, 5), 5, 0, 0)
    buffers = StepBuffers(4, 1, 2)
    with pytest.raises(ValueError, match="blocks"):
        pack(pool, ints(row), ints(1), buffers)
    pool.reserve(row, 6)
    for take in (0, -1, 6):
        with pytest.raises(ValueError, match="cannot take"):
            pack(pool, ints(row), ints(take), buffers)
    with pytest.raises(ValueError, match="does not fit"):
        pack(pool, ints(row), ints(5), buffers)
    with pytest.raises(ValueError, match="does not fit"):
        pack(pool, ints(row, row), ints(1, 1), buffers)
    with pytest.raises(ValueError, match="length"):
        pack(pool, ints(row), ints(), buffers)
    with pytest.raises(ValueError, match="not live"):
        pack(pool, ints(5), ints(1), buffers)
    with pytest.raises(ValueError, match="positive"):
        StepBuffers(0, 1, 1)
