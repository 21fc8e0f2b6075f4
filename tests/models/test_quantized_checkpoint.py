"""A checkpoint hands its matrices over as they are stored where it is asked to."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

import gguf
import pytest
import torch

from pyserve.backends.native import KEPT_QUANTIZED, NativeBackend
from pyserve.errors import ModelError
from pyserve.models.checkpoint import NOTHING, Checkpoint
from pyserve.models.load import open_checkpoint
from pyserve.models.source import QuantizedTensor
from tests.kernels.quant_twin import dequantize_weight
from tests.model.harness import random_model
from tests.models.gguf_writing import write_model


def kept_and_dequantized(checkpoint: Checkpoint, keep: Collection[str]) -> list[str]:
    """The kept types, once every kept matrix was found to hold what its dequantised form does."""
    plain = dict(checkpoint.tensors())
    types = []
    kept = dict(checkpoint.tensors(keep))
    assert kept.keys() == plain.keys()
    for name, tensor in kept.items():
        if isinstance(tensor, QuantizedTensor):
            assert tensor.shape == plain[name].shape
            assert torch.equal(dequantize_weight(tensor.blocks, tensor.type), plain[name]), name
            types.append(tensor.type)
        else:
            assert torch.equal(tensor, plain[name]), name
    return types


def test_the_default_model_keeps_every_matrix() -> None:
    checkpoint = open_checkpoint(None)
    types = kept_and_dequantized(checkpoint, KEPT_QUANTIZED)
    assert len(types) == 1 + 7 * checkpoint.config.num_layers
    assert set(types) == {"Q4_1", "Q8_0"}


def test_memory_is_told_from_the_headers() -> None:
    checkpoint = open_checkpoint(None)
    for keep in (KEPT_QUANTIZED, NOTHING):
        loaded = sum(tensor.nbytes for _, tensor in checkpoint.tensors(keep))
        assert checkpoint.weight_bytes(4, keep) == loaded


def test_only_the_types_asked_for_are_kept() -> None:
    types = kept_and_dequantized(open_checkpoint(None), ("Q8_0",))
    assert set(types) == {"Q8_0"}
    assert kept_and_dequantized(open_checkpoint(None), ("Q6_K",)) == []


@pytest.mark.parametrize(("name", "architecture"), [("blocks", "llama"), ("gpt2", "gpt2")])
def test_reordered_and_split_rows_stay_whole(name: str, architecture: str, tmp_path: Path) -> None:
    """Llama's queries and keys are un-interleaved, GPT-2's fused projection is cut: by rows."""
    quantization = gguf.GGMLQuantizationType.Q4_0
    path = write_model(
        tmp_path / "model.gguf", random_model(name), architecture, quantization=quantization
    )
    checkpoint = open_checkpoint(str(path))
    types = kept_and_dequantized(checkpoint, KEPT_QUANTIZED)
    assert len(types) == {"blocks": 3 * 7 + 2, "gpt2": 3 * 6 + 1}[name]
    backend = NativeBackend(checkpoint)
    assert backend.info.kept_quantized == ("Q4_0",)


def test_an_explicit_dtype_dequantises() -> None:
    backend = NativeBackend(open_checkpoint(None), dtype="float32")
    assert backend.info.kept_quantized == ()
    assert backend.info.weights == "float32"
    assert backend.info.weight_bytes > 500e6
    backend.close()


def test_a_matrix_of_another_shape_is_refused() -> None:
    checkpoint = open_checkpoint(None)
    weight = next(w for w in checkpoint.weights if w.targets == ("layers.0.k.weight",))
    blocks = torch.zeros(96, 360, dtype=torch.uint8)
    with pytest.raises(ModelError, match=r"shape \[96, 576\].*asks for \[192, 576\]"):
        list(weight.apply_blocks(QuantizedTensor("Q4_1", (96, 576), blocks), checkpoint.config, ""))
