"""An opened checkpoint: its configuration, and its weights under canonical names, one at a time."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from pyserve.models.architectures.weights import PlannedWeight
from pyserve.models.config import DecoderConfig
from pyserve.models.source import (
    BLOCK_ELEMENTS,
    QuantizedTensor,
    StoredSummary,
    TensorSource,
    summarize,
)

if TYPE_CHECKING:
    from pyserve.models.tokenizer import Tokenizer

NOTHING: Mapping[str, float] = MappingProxyType({})
PLAIN = ("F64", "F32", "F16", "BF16")
"""Types that are no blocks, as safetensors and GGUF call them."""


@dataclass(frozen=True)
class Checkpoint:
    """A model ready to be loaded.

    ``name`` is what the API calls it. Opening a checkpoint reads headers only: weights are read by
    :meth:`tensors`, the tokenizer when it is first asked for. Raises ModelError where the shape of a stored
    weight does not fit ``config``.
    """

    name: str
    path: Path
    config: DecoderConfig
    weights: tuple[PlannedWeight, ...]
    source: TensorSource
    make_tokenizer: Callable[[], Tokenizer]

    def __post_init__(self) -> None:
        for weight in self.weights:  # on the meta device: shapes without numbers
            shape = self.source.stored(weight.key).shape
            for _ in weight.apply(torch.empty(shape, device="meta"), self.config, str(self.path)):
                pass

    @property
    def architecture(self) -> str:
        """The decoder family, "llama" for example."""
        return self.config.architecture

    @cached_property
    def stored(self) -> StoredSummary:
        """The weights as they are stored."""
        return summarize(self.source.stored(weight.key) for weight in self.weights)

    @property
    def quantization(self) -> str:
        """The stored type of most of the weights: "Q4_1", "BF16", "F32"."""
        return self.stored.dtype

    @property
    def num_parameters(self) -> int:
        """Numbers in the weights; tied embeddings count once."""
        return self.stored.num_parameters

    def weight_bytes(self, element_bytes: int, keep: Mapping[str, float] = NOTHING) -> int:
        """Memory of the weights at ``element_bytes`` a number, but for matrices stored in a type that
        ``keep`` names, with the bytes of an element when quantised. Reads headers only.
        """
        total = 0.0
        for weight in self.weights:
            stored = self.source.stored(weight.key)
            kept = keep.get(stored.dtype) if weight.is_linear else None
            parts = weight.apply(
                torch.empty(stored.shape, device="meta"), self.config, str(self.path)
            )
            for _, part in parts:
                quantised = kept is not None and part.shape[-1] % BLOCK_ELEMENTS == 0
                total += part.numel() * (kept if kept and quantised else element_bytes)
        return round(total)

    def tensors(self, keep: Collection[str] = ()) -> Iterator[tuple[str, Tensor | QuantizedTensor]]:
        """Every weight as (canonical name, tensor in float32, float16 or bfloat16), each read when asked for.

        Matrices stored in a type that ``keep`` names ("Q4_1", "BF16") come as they are stored instead, but
        for those in a plain type whose rows are no whole number of blocks.

        Names and shapes are those of :class:`~pyserve.models.config.DecoderConfig`. A tensor may be a view
        of the mapped file: copy what is kept. Raises ModelError where the file cannot be read any more.
        """
        where = str(self.path)
        for weight in self.weights:
            stored = self.source.stored(weight.key)
            if stored.dtype not in keep or not weight.is_linear:
                yield from weight.apply(self.source.load(weight.key), self.config, where)
            elif stored.dtype in PLAIN:
                for name, part in weight.apply(self.source.load(weight.key), self.config, where):
                    whole = part.shape[-1] % BLOCK_ELEMENTS == 0
                    yield name, QuantizedTensor.of(part) if whole else part
            else:
                blocks = self.source.load_blocks(weight.key)
                tensor = QuantizedTensor(stored.dtype, stored.shape, blocks)
                yield from weight.apply_blocks(tensor, self.config, where)
            self.source.release(weight.key)

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The checkpoint's tokenizer, with its chat template. Raises ModelError where there is none."""
        return self.make_tokenizer()
