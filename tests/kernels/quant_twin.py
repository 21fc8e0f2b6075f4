"""Quantised weights in GGUF's blocks, and the product's plain twin: 8-bit activations, exact arithmetic."""

from __future__ import annotations

import gguf
import torch
from torch import Tensor

TYPES = ("Q8_0", "Q4_0", "Q4_1", "Q5_1")
"""One for each type of the kernels."""


def quantize_weight(weight: Tensor, kind: str) -> Tensor:
    """``weight [out, in]`` in the blocks of a GGUF type: uint8 ``[out, bytes]``, by the gguf package."""
    return torch.from_numpy(
        gguf.quants.quantize(weight.numpy(), gguf.GGMLQuantizationType[kind]).copy()
    )


def dequantize_weight(blocks: Tensor, kind: str) -> Tensor:
    """float32 ``[out, in]``, by the gguf package."""
    values = gguf.quants.dequantize(blocks.numpy(), gguf.GGMLQuantizationType[kind])
    return torch.from_numpy(values.copy())


def inverse_step(top: Tensor) -> Tensor:
    """127 / top, rounded once; torch's ``127 / top`` is 127 times the reciprocal, and often a bit off."""
    return torch.where(top < 1e-30, 0.0, torch.tensor(127.0) / top)


def quantize_activations(x: Tensor) -> Tensor:
    """``x [rows, in]`` as its 8-bit form stands for, float64: each block of 32 by its greatest magnitude."""
    blocks = x.view(x.shape[0], -1, 32)
    top = blocks.abs().amax(-1, keepdim=True)
    values = torch.round(blocks * inverse_step(top))  # ties to even
    return (values.double() * (top / 127.0).double()).view(x.shape)


def cut_weight(weight: Tensor) -> Tensor:
    """``weight`` as tiles hold it: made a little larger, then cut off after bfloat16's 8 bits; float64."""
    larger = (weight.double() * (1 + 0.75 / 256)).float()
    return (larger.view(torch.int32) & -65536).view(torch.float32).double()


def product(x: Tensor, weight: Tensor, isa: str) -> Tensor:
    """What the kernels compute of dequantised ``weight`` up to the rounding of their float32 sums, and
    with tiles up to that of a weight before it is cut off."""
    if isa == "amx":
        return x.bfloat16().double() @ cut_weight(weight).T
    return quantize_activations(x) @ weight.double().T


def tolerance(x: Tensor, weight: Tensor, isa: str) -> float:
    """Greatest absolute error of ``product``: with tiles, two weights of a sum a bit off."""
    if isa == "amx":
        return 2 * 2**-7 * float(weight.abs().max() * x.abs().max())
    return 2e-7 * product(x, weight, isa).abs().max().item() * x.shape[1] ** 0.5
