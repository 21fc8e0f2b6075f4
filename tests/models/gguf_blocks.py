"""Random blocks of GGUF's quantised types."""

from __future__ import annotations

import numpy as np

from pyserve.models.dequantize import FORMATS

_WITH_MINIMUM = ("Q4_1", "Q5_1", "Q4_K", "Q5_K")
_SCALES = {"Q6_K": (208,), "Q3_K": (108,), "Q2_K": (80, 82)} | dict.fromkeys(_WITH_MINIMUM, (0, 2))


def random_blocks(name: str, blocks: int, seed: int = 0, scale: float = 3.0) -> np.ndarray:
    """Random bytes, but for half-precision scales of about ``scale``: uint8 ``[blocks, block_bytes]``."""
    rng = np.random.default_rng(seed)
    fmt = next(fmt for fmt in FORMATS.values() if fmt.name == name)
    data = rng.integers(0, 256, (blocks, fmt.block_bytes), dtype=np.uint8)
    for offset in _SCALES.get(name, (0,)):
        halves = rng.normal(0, scale, (blocks, 1)).astype(np.float16)
        data[:, offset : offset + 2] = halves.view(np.uint8)
    return data
