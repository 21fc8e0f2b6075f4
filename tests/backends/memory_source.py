"""A model's weights without a file."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass

from torch import Tensor

from pyserve.models.config import DecoderConfig


@dataclass
class Source:
    """A checkpoint in memory."""

    config: DecoderConfig
    weights: list[tuple[str, Tensor]]
    name: str = "tiny"
    quantization: str = "none"

    @property
    def num_parameters(self) -> int:
        return sum(t.numel() for _, t in self.weights)

    def tensors(self, keep: Collection[str] = ()) -> Iterator[tuple[str, Tensor]]:
        yield from self.weights
