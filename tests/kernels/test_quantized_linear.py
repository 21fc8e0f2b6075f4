"""Products with weights that stay quantised: exact within a block, and each row's bits its own."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from pyserve._C import Linear, get_num_threads, set_num_threads, stored_formats, supported_isas
from tests.kernels.quant_twin import (
    TYPES,
    dequantize_weight,
    product,
    quantize_weight,
    tolerance,
)

ISAS = supported_isas()


@pytest.fixture
def restored_threads() -> Iterator[None]:
    before = get_num_threads()
    yield
    set_num_threads(before)


def random_pair(rows: int, out: int, depth: int, kind: str, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Activations with outliers, and a weight's blocks."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, depth, generator=generator)
    x[:, ::37] *= 30
    return x, quantize_weight(torch.randn(out, depth, generator=generator), kind)


def assert_same_bits(actual: Tensor, expected: Tensor) -> None:
    assert torch.equal(actual.view(torch.int32), expected.view(torch.int32))


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("kind", TYPES)
@pytest.mark.parametrize("depth", [32, 96, 576, 1536])
@pytest.mark.parametrize("out", [1, 15, 16, 33, 100])
def test_agrees_with_exact_arithmetic(out: int, depth: int, kind: str, isa: str) -> None:
    x, blocks = random_pair(29, out, depth, kind)
    actual = Linear.from_blocks(kind, blocks, isa).apply(x)
    weight = dequantize_weight(blocks, kind)
    expected = product(x, weight, isa)
    torch.testing.assert_close(actual.double(), expected, rtol=1e-6, atol=tolerance(x, weight, isa))
    error = (actual.double() - expected).abs().mean()
    assert error <= 0.02 * expected.abs().mean()


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("kind", TYPES)
@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_the_greatest_integers_do_not_saturate(sign: float, kind: str, isa: str) -> None:
    scale = torch.tensor([1.0]).half().view(torch.uint8)
    header = torch.cat([scale, torch.zeros(2, dtype=torch.uint8)]) if "_1" in kind else scale
    for byte in (0x00, 0x80, 0x7F, 0xFF):
        size = {"Q8_0": 32, "Q5_1": 20}.get(kind, 16)
        integers = torch.full((size,), byte, dtype=torch.uint8)
        blocks = torch.cat([header, integers]).repeat(16, 3)
        x = torch.full((5, 96), sign)
        x[1, ::2] *= -1
        actual = Linear.from_blocks(kind, blocks, isa).apply(x)
        expected = product(x, dequantize_weight(blocks, kind), isa)
        torch.testing.assert_close(actual.double(), expected, rtol=1e-6, atol=1e-3)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("kind", TYPES)
def test_rows_are_read_as_dequantised(kind: str, isa: str) -> None:
    _, blocks = random_pair(1, 37, 96, kind)
    linear = Linear.from_blocks(kind, blocks, isa)
    expected = dequantize_weight(blocks, kind)
    for row in range(37):
        assert torch.equal(linear.read_row(row), expected[row])


@settings(max_examples=60, deadline=None)
@given(
    rows=st.integers(1, 220),
    out=st.integers(1, 80),
    depth=st.sampled_from([32, 64, 576]),
    kind=st.sampled_from(TYPES),
    isa=st.sampled_from(ISAS),
    row=st.integers(0, 219),
)
def test_a_row_has_the_same_bits_among_any_number_of_rows(
    rows: int, out: int, depth: int, kind: str, isa: str, row: int
) -> None:
    x, blocks = random_pair(rows, out, depth, kind, seed=rows * 1000 + out)
    linear = Linear.from_blocks(kind, blocks, isa)
    row %= rows
    assert_same_bits(linear.apply(x)[row], linear.apply(x[row : row + 1].contiguous())[0])


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("kind", TYPES)
def test_every_share_of_rows_into_tiles_gives_the_same_bits(kind: str, isa: str) -> None:
    x, blocks = random_pair(27, 70, 96, kind)
    linear = Linear.from_blocks(kind, blocks, isa)
    alone = torch.cat([linear.apply(x[row : row + 1]) for row in range(27)])
    for rows in range(2, 28):
        assert_same_bits(linear.apply(x[:rows]), alone[:rows])


@pytest.mark.skipif("avx512" not in ISAS, reason="needs two instruction sets with fused products")
@pytest.mark.parametrize("kind", TYPES)
def test_instruction_sets_with_fused_products_give_the_same_bits(kind: str) -> None:
    x, blocks = random_pair(31, 50, 576, kind)
    results = [Linear.from_blocks(kind, blocks, isa).apply(x) for isa in ("avx2", "avx512")]
    assert_same_bits(*results)


@pytest.mark.parametrize("kind", TYPES)
def test_threads_do_not_change_bits(kind: str, restored_threads: None) -> None:
    x, blocks = random_pair(230, 100, 576, kind)
    linear = Linear.from_blocks(kind, blocks)
    set_num_threads(1)
    expected = linear.apply(x)
    for threads in (2, 3):
        set_num_threads(threads)
        assert_same_bits(linear.apply(x), expected)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("kind", TYPES)
def test_infinities_and_nan_spoil_their_whole_row_and_no_other(kind: str, isa: str) -> None:
    x, blocks = random_pair(15, 40, 96, kind)
    linear = Linear.from_blocks(kind, blocks, isa)
    clean = linear.apply(x)
    x[3, 4] = float("nan")
    x[5, 70] = float("-inf")
    actual = linear.apply(x)
    # 8 bits have no infinity: its row is NaN there.
    bad = ~actual.isfinite() if isa == "amx" else actual.isnan()
    assert bad.any(dim=1).nonzero().flatten().tolist() == [3, 5]
    assert bad[[3, 5]].all()
    kept = [r for r in range(15) if r not in (3, 5)]
    assert_same_bits(actual[kept], clean[kept])


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("kind", TYPES)
def test_zeros_and_tiny_numbers_give_finite_results(kind: str, isa: str) -> None:
    _, blocks = random_pair(1, 20, 64, kind)
    x = torch.zeros(3, 64)
    x[1] = 1e-42
    x[2, :32] = 1e-20
    actual = Linear.from_blocks(kind, blocks, isa).apply(x)
    assert (actual[:2] == 0).all()
    weight = dequantize_weight(blocks, kind)
    expected = product(x, weight, isa)
    torch.testing.assert_close(
        actual.double(), expected, rtol=1e-5, atol=max(1e-25, tolerance(x, weight, isa))
    )


@pytest.mark.parametrize("kind", TYPES)
def test_memory_is_that_of_the_blocks(kind: str) -> None:
    _, blocks = random_pair(1, 160, 576, kind)
    kept_bytes = stored_formats()[kind][1] * 160 * 576 // 32
    assert kept_bytes == blocks.nbytes or kind == "Q5_1"
    assert kept_bytes <= Linear.from_blocks(kind, blocks).bytes <= 1.02 * kept_bytes


def test_wrong_blocks_are_refused() -> None:
    _, blocks = random_pair(1, 4, 64, "Q4_1")
    with pytest.raises(ValueError, match="no kernels for weights in IQ2_XS"):
        Linear.from_blocks("IQ2_XS", blocks)
    with pytest.raises(ValueError, match="whole number of Q8_0"):
        Linear.from_blocks("Q8_0", blocks)
    with pytest.raises(ValueError, match="uint8"):
        Linear.from_blocks("Q4_1", blocks.float())
    with pytest.raises(ValueError, match="row 4 of 4"):
        Linear.from_blocks("Q4_1", blocks).read_row(4)
