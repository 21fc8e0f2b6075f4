"""Paged attention agrees with a plain twin for every shape, KV type and instruction set; a token's result
has the same bits however the step is made up."""

from __future__ import annotations

import random
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from pyserve._C import PagedAttention, get_num_threads, set_num_threads, supported_isas
from tests.kernels.quant_twin import inverse_step

ISAS = st.sampled_from(supported_isas())
KV_DTYPES = ["float32", "bfloat16", "int8"]


def as_int8(x: Tensor) -> Tensor:
    """``[..., head_dim]`` rounded to 255 steps by its greatest magnitude."""
    top = x.abs().amax(-1, keepdim=True)
    return (x * inverse_step(top)).round() * (top / 127)


def twin(q: Tensor, keys: Tensor, values: Tensor, window: int, kv_dtype: str, isa: str) -> Tensor:
    """The last ``len(q)`` tokens ``[T, heads, head_dim]`` against keys ``[L, kv_heads, head_dim]``."""
    if on_tiles(kv_dtype, isa):
        q = q.bfloat16()
    if kv_dtype == "bfloat16":
        keys, values = keys.bfloat16(), values.bfloat16()
    elif kv_dtype == "int8":
        q, keys, values = map(as_int8, (q, keys, values))
    group = q.shape[1] // keys.shape[1]
    keys, values = (x.double().repeat_interleave(group, 1).transpose(0, 1) for x in (keys, values))
    scores = q.double().transpose(0, 1) @ keys.transpose(1, 2)
    position = torch.arange(len(keys[0]) - len(q), len(keys[0])).unsqueeze(1)
    other = torch.arange(len(keys[0]))
    hidden = (other > position) | ((other <= position - window) if window else torch.tensor(False))
    weights = scores.masked_fill(hidden, float("-inf")).softmax(-1)
    return (weights @ values).transpose(0, 1).float()


def on_tiles(kv_dtype: str, isa: str) -> bool:
    """Whether queries and weights are rounded to bfloat16."""
    return kv_dtype == "bfloat16" and isa == "amx"


def assert_agrees(
    out: Tensor, q: Tensor, keys: Tensor, values: Tensor, window: int, kv_dtype: str, isa: str
) -> None:
    """``out`` is :func:`twin`'s, but for the rounding of sums.

    Tiles round weights to 8 bits, half a step being 2^-9 of one. They are divided by the sum of what they
    were rounded to, so an output is off by no more than that part of the way to the farthest value, which
    is at most twice the greatest.
    """
    expected = twin(q, keys, values, window, kv_dtype, isa)
    if on_tiles(kv_dtype, isa):
        torch.testing.assert_close(
            out, expected, rtol=0, atol=1.1 * 2**-8 * values.abs().max().item()
        )
    else:
        torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-5)


@dataclass
class Case:
    """Sequences with their KV in scattered blocks, and queries for all of their tokens."""

    op: PagedAttention
    lengths: list[int]
    keys: list[Tensor]
    values: list[Tensor]
    queries: list[Tensor]
    table: Tensor

    def attend(self, takes: list[int], ends: list[int], window: int = 0) -> list[Tensor]:
        """Outputs for the ``takes[i]`` tokens before ``ends[i]`` of each sequence in one step."""
        pieces = [
            q[end - take : end] for q, take, end in zip(self.queries, takes, ends, strict=True)
        ]
        cu = torch.tensor([0, *takes]).cumsum(0).int()
        out = self.op.attend(torch.cat(pieces), cu, torch.tensor(ends).int(), self.table, window)
        return list(out.split(takes))


def make_case(
    lengths: list[int], heads: int, kv_heads: int, dim: int, block: int, kv_dtype: str, isa: str
) -> Case:
    torch.manual_seed(sum(lengths))
    width = max(-(-length // block) for length in lengths)
    op = PagedAttention(heads, kv_heads, dim, width * len(lengths), block, kv_dtype, isa)
    blocks = random.Random(0).sample(range(width * len(lengths)), width * len(lengths))
    table = torch.tensor(blocks, dtype=torch.int32).reshape(len(lengths), width)
    case = Case(op, lengths, [], [], [], table)
    for length, row in zip(lengths, table, strict=True):
        keys, values = torch.randn(2, length, kv_heads, dim)
        position = torch.arange(length)
        op.write((row[position // block] * block + position % block).int(), keys, values)
        case.keys.append(keys)
        case.values.append(values)
        case.queries.append(torch.randn(length, heads, dim) * dim**-0.5)
    return case


@settings(max_examples=60, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 90), min_size=1, max_size=4),
    kv_heads=st.integers(1, 3),
    group=st.integers(1, 9),
    dim=st.sampled_from([4, 6, 16, 40, 64, 80, 128]),
    block=st.sampled_from([1, 4, 16, 20, 64]),
    window=st.sampled_from([0, 1, 7, 50]),
    kv_dtype=st.sampled_from(KV_DTYPES),
    isa=ISAS,
    seed=st.integers(0, 99),
)
def test_agrees_with_its_twin(
    lengths: list[int], kv_heads: int, group: int, dim: int, block: int, window: int, kv_dtype: str,
    isa: str, seed: int,
) -> None:  # fmt: skip
    case = make_case(lengths, group * kv_heads, kv_heads, dim, block, kv_dtype, isa)
    rng = random.Random(seed)
    takes = [rng.choice([1, rng.randint(1, length), length]) for length in lengths]
    for i, out in enumerate(case.attend(takes, lengths, window)):
        queries = case.queries[i][lengths[i] - takes[i] :]
        assert_agrees(out, queries, case.keys[i], case.values[i], window, kv_dtype, isa)


@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
@pytest.mark.parametrize("isa", supported_isas())
def test_long_contexts_agree_and_have_one_set_of_bits(isa: str, kv_dtype: str) -> None:
    lengths = [1100, 40, 513]
    case = make_case(lengths, 6, 2, 32, 16, kv_dtype, isa)
    before = get_num_threads()
    try:
        set_num_threads(1)
        together = case.attend([60, 1, 1], lengths, window=0)
        for i, take in enumerate([60, 1, 1]):
            queries = case.queries[i][-take:]
            assert_agrees(together[i], queries, case.keys[i], case.values[i], 0, kv_dtype, isa)
        for threads in (2, 3):  # one sequence's spans are shared out
            set_num_threads(threads)
            for i, take in enumerate([60, 1, 1]):
                takes = [0, 0, 0]
                for back in range(take, 0, -7):
                    takes[i] = min(7, back)
                    ends = list(lengths)
                    ends[i] = lengths[i] - back + takes[i]
                    part = case.attend(takes, ends)[i]
                    start = take - back
                    assert torch.equal(part, together[i][start : start + takes[i]])
    finally:
        set_num_threads(before)


def test_int8_results_are_the_same_numbers_on_every_instruction_set() -> None:
    results = [
        make_case([70, 33], 6, 2, 64, 16, "int8", isa).attend([70, 1], [70, 33])
        for isa in supported_isas()
    ]
    for other in results[1:]:
        for a, b in zip(results[0], other, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
@pytest.mark.parametrize("isa", supported_isas())
@pytest.mark.parametrize("block", [4, 16, 20, 64])
def test_what_an_earlier_owner_left_in_a_block_is_not_seen(
    isa: str, kv_dtype: str, block: int
) -> None:
    case = make_case([45], 6, 2, 40, block, kv_dtype, isa)
    before = case.attend([45], [45])[0]
    slots = torch.arange(case.table.numel() * block).int()
    bad = torch.full((len(slots), 2, 40), float("nan"))
    case.op.write(slots, bad, bad)
    position = torch.arange(45)
    slots = case.table[0][position // block] * block + position % block
    case.op.write(slots.int(), case.keys[0], case.values[0])
    assert torch.equal(case.attend([45], [45])[0], before)
    one_by_one = [case.attend([1], [end])[0] for end in range(1, 46)]
    assert torch.equal(torch.cat(one_by_one), before)
