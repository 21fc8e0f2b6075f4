"""What back-ends that run a checkpoint's weights ask of it, and say of it."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Protocol

from torch import Tensor

from pyserve.backends.base import ModelInfo
from pyserve.models.config import DecoderConfig
from pyserve.models.source import QuantizedTensor


class WeightSource(Protocol):
    """What a checkpoint must offer to be run: its shape and its weights under canonical names."""

    @property
    def name(self) -> str:
        """What clients call the model."""

    @property
    def config(self) -> DecoderConfig:
        """The decoder's shape."""

    @property
    def quantization(self) -> str:
        """How the weights are stored on disk ("Q4_1", "BF16", "F32", ...)."""

    @property
    def num_parameters(self) -> int:
        """Parameters, tied ones counted once."""

    def tensors(self, keep: Collection[str] = ()) -> Iterator[tuple[str, Tensor | QuantizedTensor]]:
        """Canonical name and floating-point tensor of every weight, one at a time.

        Matrices that are stored in a type which ``keep`` names may come as they are stored.
        """


def source_info(
    source: WeightSource,
    *,
    dtype: str,
    weight_bytes: int,
    kv_bytes_per_token: int,
    kv_dtype: str,
    kept_quantized: tuple[str, ...] = (),
) -> ModelInfo:
    """The checkpoint as it has been loaded."""
    config = source.config
    return ModelInfo(
        name=source.name,
        vocab_size=config.vocab_size,
        context_length=config.context_length,
        hidden_size=config.hidden_size,
        eos_token_ids=config.eos_token_ids,
        dtype=dtype,
        quantization=source.quantization,
        num_parameters=source.num_parameters,
        weight_bytes=weight_bytes,
        kv_bytes_per_token=kv_bytes_per_token,
        kept_quantized=kept_quantized,
        kv_dtype=kv_dtype,
    )
