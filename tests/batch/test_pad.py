"""pad, unpad and locate against plain Python twins."""

from __future__ import annotations

from itertools import accumulate, pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from pyserve._C import BlockPool, StepBuffers, pack

ops = torch.ops.pyserve
DTYPES = [torch.float32, torch.bfloat16, torch.int32, torch.int64, torch.uint8, torch.bool]


def starts_of(lengths: list[int]) -> Tensor:
    return torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)


def twin_pad(flat: Tensor, cu_seqlens: Tensor, value: Any, width: int) -> Tensor:
    starts = cu_seqlens.tolist()
    rect = torch.full((len(starts) - 1, width, *flat.shape[1:]), value, dtype=flat.dtype)
    for row, (begin, end) in enumerate(pairwise(starts)):
        for column in range(end - begin):
            rect[row, column] = flat[begin + column]
    return rect


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.integers(0, 6), max_size=6),
    st.sampled_from(DTYPES),
    st.sampled_from([(), (1,), (3,), (2, 2), (0,)]),
    st.sampled_from([None, 6, 9]),
)
def test_pad_agrees_with_twin_and_unpad_is_the_way_back(
    lengths: list[int], dtype: torch.dtype, trailing: tuple[int, ...], max_len: int | None
) -> None:
    cu_seqlens = starts_of(lengths)
    flat = torch.randint(0, 100, (sum(lengths), *trailing)).to(dtype)
    rect = ops.pad(flat, cu_seqlens, 1, max_len=max_len)
    width = max(lengths, default=0) if max_len is None else max_len
    assert torch.equal(rect, twin_pad(flat, cu_seqlens, 1, width))
    assert rect.dtype == dtype
    back = ops.unpad(rect, cu_seqlens)
    assert back.dtype == dtype
    assert torch.equal(back, flat)


def test_pad_on_each_device(device: str) -> None:
    for dtype in DTYPES:
        for trailing in ((), (3,), (8,)):
            cu_seqlens = starts_of([3, 0, 5, 1])
            flat = torch.randint(0, 100, (9, *trailing)).to(dtype)
            rect = ops.pad(flat.to(device), cu_seqlens.to(device), 1)
            assert torch.equal(rect.cpu(), twin_pad(flat, cu_seqlens, 1, 5))
            back = ops.unpad(rect, cu_seqlens.to(device), num_tokens=9)
            assert torch.equal(back.cpu(), flat)


def test_strided_input_is_read_right() -> None:
    flat = torch.arange(12).reshape(2, 6).t()
    rect = ops.pad(flat, starts_of([2, 4]), -1)
    assert torch.equal(rect, twin_pad(flat, starts_of([2, 4]), -1, 4))
    assert torch.equal(
        ops.unpad(rect.transpose(0, 1).contiguous().transpose(0, 1), starts_of([2, 4])), flat
    )


def test_wrong_shapes_raise() -> None:
    flat = torch.zeros(4)
    for starts in ([0, 3], [1, 4], [0, 3, 2, 4]):
        with pytest.raises(ValueError, match="cu_seqlens"):
            ops.pad(flat, torch.tensor(starts, dtype=torch.int32))
    with pytest.raises(ValueError, match="longest"):
        ops.pad(flat, starts_of([4]), max_len=3)
    with pytest.raises(ValueError, match="cu_seqlens"):
        ops.pad(flat, torch.tensor([0, 4]))
    with pytest.raises(ValueError, match="wider"):
        ops.unpad(torch.zeros(1, 3), starts_of([4]))
    with pytest.raises(ValueError, match="one more element"):
        ops.unpad(torch.zeros(2, 3), starts_of([3]))


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 20), st.integers(0, 19)), min_size=1, max_size=6),
    st.integers(1, 5),
)
def test_locate_computes_what_pack_does(sequences: list[tuple[int, int]], block_size: int) -> None:
    pool = BlockPool(200, block_size, False)
    rows, takes = [], []
    for length, computed in sequences:
        done = min(computed, length - 1)
        row = pool.add(torch.zeros(length, dtype=torch.int32), length, 0, 0)
        pool.reserve(row, length)
        pool.advance(_ints(row), _ints(done))
        rows.append(row)
        takes.append(length - done)
    packed = pack(pool, _ints(*rows), _ints(*takes), StepBuffers(200, 8, 40))
    positions, slots = ops.locate(
        packed.cu_seqlens, packed.context_lens, packed.block_table, block_size, sum(takes)
    )
    assert torch.equal(positions, packed.positions)
    assert torch.equal(slots, packed.slot_mapping)


def test_locate_on_each_device(device: str) -> None:
    table = torch.tensor([[4, 2], [7, 0], [1, 3]], dtype=torch.int32)
    positions, slots = ops.locate(
        _ints(0, 2, 2, 5).to(device), _ints(5, 3, 8).to(device), table.to(device), 4, 5
    )
    assert positions.tolist() == [3, 4, 5, 6, 7]
    assert slots.tolist() == [19, 8, 13, 14, 15]


def test_locate_refuses_what_would_read_beyond_its_arrays() -> None:
    table = torch.zeros(1, 1, dtype=torch.int32)
    with pytest.raises(ValueError, match="sequence 0"):
        ops.locate(_ints(0, 1), _ints(5), table, 4, 1)
    with pytest.raises(ValueError, match="sequence 0"):
        ops.locate(_ints(0, 2), _ints(1), table, 4, 2)
    with pytest.raises(ValueError, match="num_tokens"):
        ops.locate(_ints(0, 2), _ints(2), table, 4, 3)


def _ints(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)
