"""From GGML's block formats to numbers, bit for bit what the ``gguf`` package computes.

A quantised row is a run of blocks; each block holds one or two half-precision scales and the packed
integers of 32 elements (256 for the K formats). Layouts are those of ggml-common.h; every product and sum
below is rounded once to float32, in the order of the reference, so no fused multiply-add.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

_CHUNK_ELEMENTS = (1 << 15) - 256
"""Elements dequantised at a time. The temporaries stay in cache, and each operation is just too small for
torch to share between threads, whose barriers cost more than the work where other processes run too."""


@dataclass(frozen=True)
class BlockFormat:
    """One tensor type of a GGUF file: ``block_size`` elements take ``block_bytes`` bytes.

    ``unpack`` fills float32 ``out [n, block_size]`` from uint8 ``blocks [n, block_bytes]``; None for the
    plain types, which are read as ``dtype`` without any conversion.
    """

    name: str
    block_size: int
    block_bytes: int
    dtype: torch.dtype = torch.float32
    unpack: Callable[[Tensor, Tensor], None] | None = None


def dequantize(data: Tensor, fmt: BlockFormat) -> Tensor:
    """The flat tensor that ``data`` (uint8, whole blocks) stands for.

    Quantised formats give a new float32 tensor; plain ones a view of ``data`` in their own dtype.
    Raises ValueError where ``data`` is not a whole number of blocks.
    """
    if data.numel() % fmt.block_bytes:
        raise ValueError(f"{data.numel()} bytes are no whole number of {fmt.name} blocks")
    if fmt.unpack is None:
        return data.view(fmt.dtype)
    blocks = data.view(-1, fmt.block_bytes)
    out = torch.empty(blocks.shape[0], fmt.block_size, dtype=torch.float32)
    step = max(1, _CHUNK_ELEMENTS // fmt.block_size)
    for start in range(0, blocks.shape[0], step):
        fmt.unpack(blocks[start : start + step], out[start : start + step])
    return out.view(-1)


def _half(blocks: Tensor, offset: int) -> Tensor:
    """The float16 at byte ``offset`` of each block, as float32 ``[n, 1]``."""
    return blocks[:, offset : offset + 2].contiguous().view(torch.float16).float()


def _nibbles(packed: Tensor, out: Tensor) -> None:
    """Low halves of ``packed [n, k]`` into the first k columns of ``out``, high halves into the rest."""
    k = packed.shape[1]
    out[:, :k].copy_(packed & 0x0F)
    out[:, k:].copy_(packed >> 4)


def _add_fifth_bit(packed: Tensor, out: Tensor) -> None:
    """Adds 16 to element j of ``out [n, 32]`` where bit j of the little-endian ``packed [n, 4]`` is set."""
    shifts = torch.arange(8, dtype=torch.uint8)
    bits = (packed.unsqueeze(2) >> shifts) & 1
    out.add_(bits.view(-1, 32) << 4)


def _unpack_q8_0(blocks: Tensor, out: Tensor) -> None:
    out.copy_(blocks[:, 2:].view(torch.int8)).mul_(_half(blocks, 0))


def _unpack_q4_0(blocks: Tensor, out: Tensor) -> None:
    _nibbles(blocks[:, 2:], out)
    out.sub_(8).mul_(_half(blocks, 0))


def _unpack_q4_1(blocks: Tensor, out: Tensor) -> None:
    _nibbles(blocks[:, 4:], out)
    out.mul_(_half(blocks, 0)).add_(_half(blocks, 2))


def _unpack_q5_0(blocks: Tensor, out: Tensor) -> None:
    _nibbles(blocks[:, 6:], out)
    _add_fifth_bit(blocks[:, 2:6], out)
    out.sub_(16).mul_(_half(blocks, 0))


def _unpack_q5_1(blocks: Tensor, out: Tensor) -> None:
    _nibbles(blocks[:, 8:], out)
    _add_fifth_bit(blocks[:, 4:8], out)
    out.mul_(_half(blocks, 0)).add_(_half(blocks, 2))


def _k_scales(packed: Tensor) -> tuple[Tensor, Tensor]:
    """The eight 6-bit scales and minima that Q4_K and Q5_K pack in 12 bytes; float32 ``[n, 8]`` each."""
    scale, minimum, high = packed[:, 0:4], packed[:, 4:8], packed[:, 8:12]
    scales = torch.cat([scale & 0x3F, (high & 0x0F) | ((scale >> 2) & 0x30)], dim=1)
    minima = torch.cat([minimum & 0x3F, (high >> 4) | ((minimum >> 2) & 0x30)], dim=1)
    return scales.float(), minima.float()


def _scale_k(blocks: Tensor, quants: Tensor, out: Tensor) -> None:
    """``d * scale * q - dmin * minimum`` for each of the eight groups of 32 in a super-block."""
    scales, minima = _k_scales(blocks[:, 4:16])
    groups = out.view(-1, 8, 32)
    groups.copy_(quants.reshape(-1, 8, 32)).mul_((_half(blocks, 0) * scales).unsqueeze(2))
    groups.sub_((_half(blocks, 2) * minima).unsqueeze(2))


def _low_nibbles(packed: Tensor, width: int) -> Tensor:
    """4-bit values, for each ``width`` bytes the low halves before the high ones: ``[n, -1, 2, width]``."""
    shifts = torch.tensor([0, 4], dtype=torch.uint8).view(2, 1)
    return (packed.reshape(packed.shape[0], -1, 1, width) >> shifts) & 0x0F


def _unpack_q4_k(blocks: Tensor, out: Tensor) -> None:
    _scale_k(blocks, _low_nibbles(blocks[:, 16:], 32), out)


def _unpack_q5_k(blocks: Tensor, out: Tensor) -> None:
    low = _low_nibbles(blocks[:, 48:], 32).view(-1, 8, 32)
    shifts = torch.arange(8, dtype=torch.uint8).view(8, 1)
    high = (blocks[:, 16:48].unsqueeze(1) >> shifts) & 1
    _scale_k(blocks, low | (high << 4), out)


def _unpack_q6_k(blocks: Tensor, out: Tensor) -> None:
    low = _low_nibbles(blocks[:, :128], 64).view(-1, 8, 32)
    shifts = torch.arange(0, 8, 2, dtype=torch.uint8).view(4, 1)
    high = (blocks[:, 128:192].reshape(-1, 2, 1, 32) >> shifts) & 3
    scales = _half(blocks, 208) * blocks[:, 192:208].view(torch.int8).float()
    out.copy_((low | (high.view(-1, 8, 32) << 4)).view(-1, 256)).sub_(32)
    out.view(-1, 16, 16).mul_(scales.unsqueeze(2))


def _pairs_of_bits(packed: Tensor) -> Tensor:
    """2-bit values of ``packed [n, 64]``: each 32 bytes hold four groups of 32; ``[n, 8, 32]``."""
    shifts = torch.arange(0, 8, 2, dtype=torch.uint8).view(4, 1)
    return ((packed.reshape(-1, 2, 1, 32) >> shifts) & 3).view(-1, 8, 32)


def _unpack_q2_k(blocks: Tensor, out: Tensor) -> None:
    scales = blocks[:, :16]
    steps = _half(blocks, 80) * (scales & 0x0F).float()
    minima = _half(blocks, 82) * (scales >> 4).float()
    out.copy_(_pairs_of_bits(blocks[:, 16:80]).view(-1, 256))
    out.view(-1, 16, 16).mul_(steps.unsqueeze(2)).sub_(minima.unsqueeze(2))


def _unpack_q3_k(blocks: Tensor, out: Tensor) -> None:
    shifts = torch.arange(8, dtype=torch.uint8).view(8, 1)
    high = (blocks[:, :32].unsqueeze(1) >> shifts) & 1
    low = _low_nibbles(blocks[:, 96:104], 8).view(-1, 16)
    shifts = torch.arange(0, 8, 2, dtype=torch.uint8).view(4, 1)
    top = ((blocks[:, 104:108].unsqueeze(1) >> shifts) & 3).view(-1, 16)
    steps = _half(blocks, 108) * ((low | (top << 4)).float() - 32)
    out.copy_((_pairs_of_bits(blocks[:, 32:96]) | (high << 2)).view(-1, 256)).sub_(4)
    out.view(-1, 16, 16).mul_(steps.unsqueeze(2))


_NON_LINEAR = torch.tensor(
    [-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113],
    dtype=torch.float32,
)  # fmt: skip


def _unpack_iq4_nl(blocks: Tensor, out: Tensor) -> None:
    values = _low_nibbles(blocks[:, 2:], 16).view(-1, 32).int()
    out.copy_(_NON_LINEAR[values]).mul_(_half(blocks, 0))


def _unpack_iq4_xs(blocks: Tensor, out: Tensor) -> None:
    low = _low_nibbles(blocks[:, 4:8], 1).view(-1, 8)
    shifts = torch.arange(0, 8, 2, dtype=torch.uint8)
    high = ((blocks[:, 2:4].unsqueeze(2) >> shifts) & 3).view(-1, 8)
    steps = _half(blocks, 0) * ((low | (high << 4)).float() - 32)
    values = _low_nibbles(blocks[:, 8:], 16).view(-1, 256).int()
    out.copy_(_NON_LINEAR[values])
    out.view(-1, 8, 32).mul_(steps.unsqueeze(2))


FORMATS: Mapping[int, BlockFormat] = {
    0: BlockFormat("F32", 1, 4, torch.float32),
    1: BlockFormat("F16", 1, 2, torch.float16),
    2: BlockFormat("Q4_0", 32, 18, unpack=_unpack_q4_0),
    3: BlockFormat("Q4_1", 32, 20, unpack=_unpack_q4_1),
    6: BlockFormat("Q5_0", 32, 22, unpack=_unpack_q5_0),
    7: BlockFormat("Q5_1", 32, 24, unpack=_unpack_q5_1),
    8: BlockFormat("Q8_0", 32, 34, unpack=_unpack_q8_0),
    10: BlockFormat("Q2_K", 256, 84, unpack=_unpack_q2_k),
    11: BlockFormat("Q3_K", 256, 110, unpack=_unpack_q3_k),
    12: BlockFormat("Q4_K", 256, 144, unpack=_unpack_q4_k),
    13: BlockFormat("Q5_K", 256, 176, unpack=_unpack_q5_k),
    14: BlockFormat("Q6_K", 256, 210, unpack=_unpack_q6_k),
    20: BlockFormat("IQ4_NL", 32, 18, unpack=_unpack_iq4_nl),
    23: BlockFormat("IQ4_XS", 256, 136, unpack=_unpack_iq4_xs),
    30: BlockFormat("BF16", 1, 2, torch.bfloat16),
}
"""By ggml's type number. Everything that is not here is refused by name where the name is known."""

UNSUPPORTED: Mapping[int, str] = {
    9: "Q8_1", 15: "Q8_K", 16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S", 21: "IQ3_S",
    22: "IQ2_S", 24: "I8", 25: "I16", 26: "I32", 27: "I64", 28: "F64",
    29: "IQ1_M", 34: "TQ1_0", 35: "TQ2_0", 39: "MXFP4",
}  # fmt: skip
