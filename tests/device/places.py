"""Where bodies of kernels run: by one thread a row, by several that stand in for lanes, or on CUDA."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from pyserve import _C

CUDA = pytest.param("cuda", marks=pytest.mark.gpu)


@contextmanager
def at_place(place: str) -> Iterator[str]:
    """The device of "cpu", "cpu by 5 lanes" or "cuda"; skips where that is not there."""
    kind, _, lanes = place.partition(" by ")
    if kind == "cuda" and not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    _C.emulate_lanes(int(lanes.split()[0]) if lanes else 1)
    try:
        yield kind
    finally:
        _C.emulate_lanes(1)
