"""The packed matrix product: right to rounding, and each row's bits its own."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pyserve._C import Linear, supported_isas

DEPTHS = [1, 3, 64, 255, 256, 257, 700]


@pytest.mark.parametrize("isa", supported_isas())
@pytest.mark.parametrize("depth", DEPTHS)
@pytest.mark.parametrize("out", [1, 7, 8, 31, 32, 33, 100])
def test_agrees_with_float64(out: int, depth: int, isa: str) -> None:
    torch.manual_seed(0)
    weight = torch.randn(out, depth)
    x = torch.randn(29, depth)
    expected = x.double() @ weight.double().T
    actual = Linear(weight, "float32", isa).apply(x)
    torch.testing.assert_close(actual.double(), expected, rtol=1e-5, atol=1e-5 * depth**0.5)


@pytest.mark.parametrize("isa", supported_isas())
def test_bfloat16_weights_are_rounded_and_products_are_not(isa: str) -> None:
    torch.manual_seed(1)
    weight = torch.randn(70, 300)
    x = torch.randn(5, 300)
    rounded = x.bfloat16() if isa == "amx" else x  # tiles take both sides in bfloat16
    expected = rounded.double() @ weight.bfloat16().double().T
    actual = Linear(weight, "bfloat16", isa).apply(x)
    torch.testing.assert_close(actual.double(), expected, rtol=1e-5, atol=2e-4)


def test_the_result_goes_to_memory_that_is_there() -> None:
    linear, x, out = Linear(torch.randn(40, 64)), torch.randn(3, 64), torch.zeros(3, 40)
    assert linear.apply(x, out).data_ptr() == out.data_ptr()
    assert torch.equal(out, linear.apply(x))
    for wrong in (torch.zeros(3, 41), torch.zeros(3, 40).double(), torch.zeros(40, 3).T):
        with pytest.raises(ValueError, match="out"):
            linear.apply(x, wrong)


@settings(max_examples=60, deadline=None)
@given(
    rows=st.integers(1, 220),
    out=st.integers(1, 80),
    depth=st.sampled_from(DEPTHS),
    dtype=st.sampled_from(["float32", "bfloat16"]),
    isa=st.sampled_from(supported_isas()),
    row=st.integers(0, 219),
)
def test_a_row_has_the_same_bits_among_any_number_of_rows(
    rows: int, out: int, depth: int, dtype: str, isa: str, row: int
) -> None:
    generator = torch.Generator().manual_seed(rows * 1000 + out)
    linear = Linear(torch.randn(out, depth, generator=generator), dtype, isa)
    x = torch.randn(rows, depth, generator=generator)
    row %= rows
    together = linear.apply(x)[row]
    alone = linear.apply(x[row : row + 1].contiguous())[0]
    assert torch.equal(together.view(torch.int32), alone.view(torch.int32))


def test_infinities_and_nan_stay_in_their_row() -> None:
    linear = Linear(torch.randn(40, 20))
    x = torch.randn(15, 20)
    x[3, 4] = float("nan")
    x[5, 6] = float("inf")
    bad = (~linear.apply(x).isfinite()).any(dim=1)
    assert bad.nonzero().flatten().tolist() == [3, 5]


def test_wrong_inputs_are_refused() -> None:
    linear = Linear(torch.randn(4, 6))
    with pytest.raises(ValueError, match="rows, 6"):
        linear.apply(torch.randn(2, 5))
    with pytest.raises(ValueError, match="contiguous"):
        linear.apply(torch.randn(6, 2).T)
    with pytest.raises(ValueError, match="out, in"):
        Linear(torch.randn(4))
