"""What becomes of each of GGUF's types: exactly the same numbers where the kernels have a type for them, else
numbers that are as near as is promised."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
import torch
from torch import Tensor

from pyserve._C import Linear, stored_formats, supported_isas
from pyserve.models.dequantize import FORMATS
from tests.kernels.quant_twin import dequantize_weight, product, quantize_weight, tolerance
from tests.models.gguf_blocks import random_blocks

EXACT = ("Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "IQ4_NL")
ROUNDED_SCALES = ("Q4_K", "Q5_K", "IQ4_XS")
REBLOCKED = ("Q2_K", "Q3_K", "Q6_K")
PLAIN = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
ROWS, DEPTH = 40, 512


def blocks_of(kind: str, scale: float = 0.01) -> Tensor:
    """A random weight ``[ROWS, DEPTH]``: uint8 ``[ROWS, bytes of a row]``."""
    elements = stored_formats()[kind][2]
    blocks = random_blocks(kind, ROWS * DEPTH // elements, scale=scale)
    return torch.from_numpy(blocks.reshape(ROWS, -1))


def kept(kind: str, blocks: Tensor) -> Tensor:
    """The numbers that the kernels multiply with, float32 ``[ROWS, DEPTH]``."""
    linear = Linear.from_blocks(kind, blocks)
    return torch.stack([linear.read_row(row) for row in range(ROWS)])


def test_the_table_has_every_type_that_files_are_read_in() -> None:
    assert set(stored_formats()) == {*EXACT, *ROUNDED_SCALES, *REBLOCKED, *PLAIN}
    by_name = {fmt.name: fmt for fmt in FORMATS.values()}
    assert by_name.keys() == stored_formats().keys()
    for name, (_, _, elements, size) in stored_formats().items():
        fmt = by_name[name]
        assert (elements, size) == (
            (fmt.block_size, fmt.block_bytes) if fmt.unpack else (32, 32 * fmt.block_bytes)
        )


@pytest.mark.parametrize("kind", EXACT)
def test_numbers_are_kept_exactly(kind: str) -> None:
    blocks = blocks_of(kind)
    assert torch.equal(kept(kind, blocks), dequantize_weight(blocks, kind))


@pytest.mark.parametrize("kind", ROUNDED_SCALES)
def test_scales_are_rounded_to_half_precision(kind: str) -> None:
    """By 2^-11 of a group's scale times an integer of at most 31 or 127, and of its minimum."""
    blocks = blocks_of(kind)
    expected = dequantize_weight(blocks, kind)
    difference = (kept(kind, blocks) - expected).abs().view(ROWS, -1, 32).amax(-1)
    groups = expected.view(ROWS, -1, 32)
    span, top = groups.amax(-1) - groups.amin(-1), groups.abs().amax(-1)
    assert (difference <= 2**-11 * (span + 2 * top) + 2**-25).all()


@pytest.mark.parametrize("kind", REBLOCKED)
def test_types_with_a_scale_for_16_are_blocked_anew(kind: str) -> None:
    blocks = blocks_of(kind)
    values = dequantize_weight(blocks, kind)
    expected = dequantize_weight(quantize_weight(values, "Q8_0"), "Q8_0")
    actual = kept(kind, blocks)
    assert torch.equal(actual, expected)
    difference = (actual - values).abs().view(ROWS, -1, 32).amax(-1)
    top = values.abs().view(ROWS, -1, 32).amax(-1)
    assert (difference <= 0.54 / 127 * top).all()


@pytest.mark.parametrize("kind", PLAIN)
def test_floats_are_rounded_as_by_the_reference(kind: str) -> None:
    generator = torch.Generator().manual_seed(1)
    values = torch.randn(ROWS, DEPTH, generator=generator) * 0.1
    values[3, 64:96] = 0
    values[4, :32] = torch.arange(-16, 16) / 4  # ties
    values[4, 0] = 127 / 2
    values[5, :32] = 1e-6  # a scale that is subnormal in half precision
    stored = values.to(PLAIN[kind])
    expected = dequantize_weight(quantize_weight(stored.float(), "Q8_0"), "Q8_0")
    assert torch.equal(kept(kind, stored.view(torch.uint8)), expected)


def test_a_weight_that_is_not_finite_spoils_its_block_alone() -> None:
    values = torch.ones(ROWS, DEPTH)
    values[2, 40], values[3, 100] = float("nan"), float("inf")
    spoilt = ~kept("F32", values.view(torch.uint8)).isfinite().view(ROWS, -1, 32)
    assert spoilt.any(-1).nonzero().tolist() == [[2, 1], [3, 3]]


@pytest.mark.parametrize("isa", supported_isas())
@pytest.mark.parametrize("kind", sorted(stored_formats().keys() - PLAIN.keys()))
def test_products_use_the_numbers_that_rows_are_read_as(kind: str, isa: str) -> None:
    """The embedding and a tied head are one weight."""
    blocks = blocks_of(kind)
    x = torch.randn(7, DEPTH, generator=torch.Generator().manual_seed(2))
    weight = kept(kind, blocks)
    expected = product(x, weight, isa)
    actual = Linear.from_blocks(kind, blocks, isa).apply(x).double()
    torch.testing.assert_close(actual, expected, rtol=1e-6, atol=tolerance(x, weight, isa))


def test_half_precision_is_rounded_as_numpy_does() -> None:
    """Scales of Q4_K are products that are rounded to float16: every rounding case, one a group."""
    rng = np.random.default_rng(4)
    blocks = random_blocks("Q4_K", 4096, seed=5, scale=1.0)
    halves = rng.integers(0, 1 << 16, 4096, dtype=np.uint16)
    halves[(halves & 0x7C00) == 0x7C00] = 1  # no infinity or NaN as stored
    blocks[:, 0:2] = halves.view(np.uint8).reshape(-1, 2)
    blocks[:, 2:4] = 0
    blocks[:, 16:] = 0x11  # every integer is 1: each group's scale is what is read
    with np.errstate(over="ignore"):
        expected = gguf.quants.dequantize(blocks, gguf.GGMLQuantizationType.Q4_K)
        expected = expected.astype(np.float16).astype(np.float32)
    linear = Linear.from_blocks("Q4_K", torch.from_numpy(blocks))
    actual = torch.stack([linear.read_row(row) for row in range(4096)]).numpy()
    assert np.array_equal(actual, expected)
