"""The ops between matrix products, against torch's own arithmetic, by one lane and by many.

On the CPU the bodies of the CUDA kernels run: by one thread a row, or by several threads that stand in for
a block's lanes. On CUDA, where there is a device, the kernels themselves.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from tests.device.places import CUDA, at_place

ops = torch.ops.pyserve
PLACES = ["cpu", "cpu by 4 lanes", "cpu by 7 lanes", CUDA]


@pytest.fixture(params=PLACES)
def device(request: pytest.FixtureRequest) -> Iterator[str]:
    with at_place(request.param) as kind:
        yield kind


def random(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("size", [1, 5, 48, 515])
def test_normalize_adds_and_norms(
    device: str, dtype: torch.dtype, with_bias: bool, size: int
) -> None:
    torch.manual_seed(size)
    x, addend = random(3, size), random(3, size, dtype=dtype)
    weight, bias = random(size), random(size) if with_bias else None
    total = x + addend.float()
    if bias is None:
        expected = torch.nn.functional.rms_norm(total, (size,), weight, 1e-5)
    else:
        expected = torch.nn.functional.layer_norm(total, (size,), weight, bias, 1e-5)
    there = x.to(device)
    there_bias = None if bias is None else bias.to(device)
    out = ops.normalize(there, addend.to(device), weight.to(device), there_bias, 1e-5, dtype)
    assert out.dtype == dtype
    torch.testing.assert_close(there.cpu(), total)
    tolerance = 1e-5 if dtype == torch.float32 else 1e-2
    torch.testing.assert_close(out.float().cpu(), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("gated", [False, True])
def test_activate(device: str, dtype: torch.dtype, gated: bool) -> None:
    torch.manual_seed(0)
    x = (3 * random(5, 30)).to(dtype)
    for kind, function in enumerate((torch.nn.functional.silu, _gelu)):
        gate = x.float()[:, :15] if gated else x.float()
        expected = function(gate) * (x.float()[:, 15:] if gated else 1)
        actual = ops.activate(x.to(device), gated, kind)
        assert actual.dtype == dtype
        tolerance = 1e-5 if dtype == torch.float32 else 1e-2
        torch.testing.assert_close(actual.float().cpu(), expected, rtol=tolerance, atol=tolerance)


def _gelu(x: Tensor) -> Tensor:
    return torch.nn.functional.gelu(x, approximate="tanh")


def twin_place_heads(
    heads: Tensor, positions: Tensor, rope: Tensor | None, norm: Tensor | None
) -> Tensor:
    """float32 ``[T, N, D]`` normed and rotated."""
    half = heads.shape[-1] // 2
    if norm is not None:
        heads = torch.nn.functional.rms_norm(heads, (2 * half,), norm, 1e-6)
    if rope is None:
        return heads
    cosine, sine = rope[positions.long()][:, None].split(half, dim=-1)
    a, b = heads.split(half, dim=-1)
    return torch.cat([a * cosine - b * sine, b * cosine + a * sine], dim=-1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("with_rope", [False, True])
@pytest.mark.parametrize("with_norm", [False, True])
def test_place_heads_norms_rotates_and_writes_pages(
    device: str, dtype: torch.dtype, with_rope: bool, with_norm: bool
) -> None:
    torch.manual_seed(1)
    tokens, heads, kv_heads, dim, block_size = 5, 6, 2, 24, 4
    qkv = random(tokens, (heads + 2 * kv_heads) * dim, dtype=dtype)
    positions = torch.tensor([7, 8, 0, 1, 30], dtype=torch.int32)
    slots = torch.tensor([3, 12, 0, 1, 9], dtype=torch.int32)
    rope = random(32, dim) if with_rope else None
    norms = [random(dim), random(dim)] if with_norm else [None, None]
    pages = [random(4, block_size, kv_heads, dim, dtype=dtype) for _ in range(2)]
    expected_pages = [page.clone() for page in pages]
    parts = qkv.float().view(tokens, -1, dim).split([heads, kv_heads, kv_heads], dim=1)
    queries = twin_place_heads(parts[0], positions, rope, norms[0])
    keys = twin_place_heads(parts[1], positions, rope, norms[1])
    for page, new in zip(expected_pages, (keys, parts[2]), strict=True):
        page.view(-1, kv_heads, dim)[slots.long()] = new.to(dtype)

    there = qkv.to(device)
    pages_there = [page.to(device) for page in pages]
    optional = [None if t is None else t.to(device) for t in (rope, *norms)]
    ops.place_heads(
        there, *pages_there, positions.to(device), slots.to(device), *optional, 1e-6, heads
    )
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    actual = there.float().cpu().view(tokens, -1, dim)[:, :heads]
    torch.testing.assert_close(actual, queries, rtol=tolerance, atol=tolerance)
    for page, expected in zip(pages_there, expected_pages, strict=True):
        torch.testing.assert_close(page.cpu(), expected, rtol=tolerance, atol=tolerance)


def test_feed_forward_leaves_padding_alone(device: str) -> None:
    ids, lengths = (torch.tensor([9, 9, 9], dtype=torch.int32, device=device) for _ in range(2))
    ops.feed_forward(torch.tensor([5, 6], dtype=torch.int32, device=device), ids, lengths)
    assert ids.tolist() == [5, 6, 9]
    assert lengths.tolist() == [10, 10, 9]


def test_arguments_that_do_not_fit_raise() -> None:
    x = torch.zeros(2, 8)
    with pytest.raises(ValueError, match="weight"):
        ops.normalize(x, None, torch.ones(7), None, 1e-5, torch.float32)
    with pytest.raises(ValueError, match="float32 or bfloat16"):
        ops.normalize(x.double(), None, torch.ones(8), None, 1e-5, torch.float32)
    with pytest.raises(ValueError, match="contiguous"):
        ops.activate(torch.zeros(8, 2).t(), False, 0)
    pages = torch.zeros(1, 4, 1, 2)
    ints = torch.zeros(2, dtype=torch.int32)
    with pytest.raises(ValueError, match=r"qkv \[T"):
        ops.place_heads(x, pages, pages, ints, ints, None, None, None, 1e-5, 1)
