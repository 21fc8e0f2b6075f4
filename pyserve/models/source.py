"""What every checkpoint format offers: tensors by the name that the file gives them."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """What a file's header says of a tensor: ``shape`` rows first, ``dtype`` as the format spells it."""

    shape: tuple[int, ...]
    dtype: str
    num_bytes: int

    @property
    def num_elements(self) -> int:
        """How many numbers it holds."""
        return math.prod(self.shape)


BLOCK_ELEMENTS = 32
"""Neighbours along a row that share a scale in every type that the kernels multiply with."""
PLAIN_TYPES = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}


@dataclass(frozen=True, slots=True)
class QuantizedTensor:
    """A matrix that is quantised in memory: ``blocks`` uint8 ``[rows, bytes of a row]`` in the blocks of a
    GGUF type ("Q4_1"), or in a plain one ("BF16") that is going to be rounded to 8 bits.
    """

    type: str
    shape: tuple[int, ...]
    blocks: Tensor

    @property
    def nbytes(self) -> int:
        """Bytes as stored."""
        return self.blocks.nbytes

    @classmethod
    def of(cls, tensor: Tensor) -> QuantizedTensor:
        """A plain matrix; its rows must be a multiple of :data:`BLOCK_ELEMENTS` long."""
        shape = (tensor.shape[0], tensor.shape[1])
        return cls(PLAIN_TYPES[tensor.dtype], shape, tensor.contiguous().view(torch.uint8))


class TensorSource(Protocol):
    """Where weights are read from."""

    def stored(self, name: str) -> StoredTensor:
        """The header's word on a tensor; reads nothing."""

    def load(self, name: str) -> Tensor:
        """The tensor in float32, float16 or bfloat16 (perhaps a view of the file: read only)."""

    def load_blocks(self, name: str) -> Tensor:
        """A quantised matrix as the file has it: uint8 ``[rows, bytes of a row's blocks]``, read only.

        Raises ValueError for a tensor that is not quantised.
        """

    def release(self, name: str) -> None:
        """The tensor has been read: memory that only holds the file's bytes may go."""


@dataclass(frozen=True, slots=True)
class StoredSummary:
    """Some tensors together; ``dtype`` is the one that holds most of the elements."""

    num_parameters: int
    num_bytes: int
    dtype: str


def summarize(tensors: Iterable[StoredTensor]) -> StoredSummary:
    """Adds up what the headers say."""
    elements: Counter[str] = Counter()
    num_bytes = 0
    for tensor in tensors:
        elements[tensor.dtype] += tensor.num_elements
        num_bytes += tensor.num_bytes
    dtype = elements.most_common(1)[0][0] if elements else "F32"
    return StoredSummary(elements.total(), num_bytes, dtype)
