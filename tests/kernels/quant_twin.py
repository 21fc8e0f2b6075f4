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


def product(x: Tensor, blocks: Tensor, kind: str) -> Tensor:
    """What the kernels compute up to the rounding of their float32 sums over blocks."""
    return quantize_activations(x) @ dequantize_weight(blocks, kind).double().T
