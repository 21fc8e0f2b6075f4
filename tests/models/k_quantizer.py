"""Plain quantisers for GGUF's K types, which the ``gguf`` package only reads: by extremes, no search."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]
Bytes = NDArray[np.uint8]


def quantize_k(values: Floats, kind: str) -> Bytes:
    """``values [rows, columns]`` in "Q4_K" or "Q6_K": uint8 ``[rows, bytes]``; columns a multiple of 256."""
    blocks = {"Q4_K": _q4_k, "Q6_K": _q6_k}[kind](values.reshape(-1, 256))
    return blocks.reshape(values.shape[0], -1)


def _half(x: Floats) -> tuple[Bytes, Floats]:
    """float16 bytes ``[n, 2]``, and the numbers that they are."""
    half = x.astype(np.float16)
    return half.view(np.uint8).reshape(-1, 2), half.astype(np.float32)


def _ratio(x: Floats, y: Floats) -> Floats:
    return np.divide(x, y, out=np.zeros(np.broadcast(x, y).shape, np.float32), where=y != 0)


def _q6_k(blocks: Floats) -> Bytes:
    groups = blocks.reshape(-1, 16, 16)
    steps = np.abs(groups).max(-1) / 31
    d_bytes, d = _half(steps.max(-1, keepdims=True) / 127)
    scales = np.round(_ratio(steps, d)).clip(0, 127)
    q = np.round(_ratio(groups, (d * scales)[:, :, None])).clip(-32, 31).astype(np.int8) + 32
    q = q.astype(np.uint8).reshape(-1, 2, 4, 32)  # half, quarter, element
    low = np.concatenate(
        [q[:, :, 0] & 15 | q[:, :, 2] << 4, q[:, :, 1] & 15 | q[:, :, 3] << 4], axis=-1
    )
    high = sum((q[:, :, j] >> 4) << 2 * j for j in range(4))
    parts = (low, high, scales.astype(np.int8).view(np.uint8), d_bytes)
    return np.concatenate([np.asarray(part).reshape(len(blocks), -1) for part in parts], axis=1)


def _q4_k(blocks: Floats) -> Bytes:
    groups = blocks.reshape(-1, 8, 32)
    least = np.minimum(groups.min(-1), 0)
    steps = (groups.max(-1) - least) / 15
    d_bytes, d = _half(steps.max(-1, keepdims=True) / 63)
    m_bytes, d_minimum = _half((-least).max(-1, keepdims=True) / 63)
    scales = np.round(_ratio(steps, d)).clip(0, 63).astype(np.uint8)
    minima = np.round(_ratio(-least, d_minimum)).clip(0, 63).astype(np.uint8)
    shifted = groups + (d_minimum * minima)[:, :, None]
    q = np.round(_ratio(shifted, (d * scales)[:, :, None])).clip(0, 15).astype(np.uint8)
    packed = q.reshape(-1, 4, 2, 32)
    first = scales[:, :4] | (scales[:, 4:] >> 4) << 6
    second = minima[:, :4] | (minima[:, 4:] >> 4) << 6
    third = scales[:, 4:] & 15 | (minima[:, 4:] & 15) << 4
    integers = (packed[:, :, 0] | packed[:, :, 1] << 4).reshape(len(blocks), -1)
    return np.concatenate([d_bytes, m_bytes, first, second, third, integers], axis=1)
