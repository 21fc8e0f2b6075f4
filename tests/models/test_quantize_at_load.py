"""``--quantize int8``: matrices in floating point become 8-bit ones while they are read."""

from __future__ import annotations

from pathlib import Path

import gguf
import pytest
import torch

from pyserve.backends.native import QUANTIZE, NativeBackend
from pyserve.errors import ModelError
from pyserve.models.load import open_checkpoint
from pyserve.models.source import QuantizedTensor
from tests.kernels.quant_twin import dequantize_weight, quantize_weight
from tests.model.harness import random_model
from tests.models.gguf_writing import write_model

INT8 = QUANTIZE["int8"]


def saved(name: str, path: Path, dtype: torch.dtype) -> str:
    random_model(name).to(dtype).save_pretrained(path)
    return str(path)


@pytest.mark.parametrize(
    ("dtype", "stored"),
    [
        (torch.float32, "F32"),
        (torch.bfloat16, "BF16"),
        (torch.float16, "F16"),
        (torch.float64, "F64"),
    ],
)
@pytest.mark.parametrize("name", ["blocks", "gpt2"])
def test_matrices_are_handed_over_as_stored(
    name: str, dtype: torch.dtype, stored: str, tmp_path: Path
) -> None:
    """GPT-2's are turned round first."""
    checkpoint = open_checkpoint(saved(name, tmp_path, dtype))
    assert checkpoint.quantization == stored
    plain = dict(checkpoint.tensors())
    for key, tensor in checkpoint.tensors(INT8):
        if isinstance(tensor, QuantizedTensor):
            assert tensor.type == ("F32" if stored == "F64" else stored)
            assert torch.equal(tensor.blocks.view(plain[key].dtype), plain[key])
            assert tensor.shape == tuple(plain[key].shape)
        else:
            assert plain[key].ndim == 1 or key == "positions.weight"
    backend = NativeBackend(checkpoint, quantize="int8")
    assert backend.info.kept_quantized == ("int8",)
    assert backend.info.weights == f"int8, the rest {backend.info.dtype}"


def test_memory_is_told_from_the_headers(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(saved("blocks", tmp_path, torch.bfloat16))
    info = NativeBackend(checkpoint, dtype="float32", quantize="int8").info
    assert info.weight_bytes == pytest.approx(
        checkpoint.weight_bytes(4, INT8), rel=0.05
    )  # panels are padded


def test_floats_of_a_gguf_file_become_8_bits_and_the_rest_stays(tmp_path: Path) -> None:
    path = write_model(
        tmp_path / "model.gguf",
        random_model("blocks"),
        "llama",
        quantization=gguf.GGMLQuantizationType.BF16,
    )
    checkpoint = open_checkpoint(str(path))
    assert NativeBackend(checkpoint, quantize="int8").info.kept_quantized == ("int8",)
    default = open_checkpoint(None)
    with pytest.raises(ModelError, match=r"quantize: SmolLM2.*became int8; stored is Q4_1"):
        NativeBackend(default, quantize="int8")


def test_what_is_quantised_is_the_reference(tmp_path: Path) -> None:
    """The same logits as from a file that was quantised beforehand, to the bit."""
    from pyserve._C import Decoder
    from tests.model.harness import alone, assert_same_bits, random_tokens

    checkpoint = open_checkpoint(saved("blocks", tmp_path, torch.float32))
    before, at_load = (Decoder(checkpoint.config.as_dict()) for _ in range(2))
    for name, tensor in checkpoint.tensors(INT8):
        if isinstance(tensor, QuantizedTensor):
            at_load.load_blocks(name, tensor.type, tensor.blocks)
            blocks = quantize_weight(tensor.blocks.view(torch.float32), "Q8_0")
            assert dequantize_weight(blocks, "Q8_0").shape == tensor.shape
            before.load_blocks(name, "Q8_0", blocks)
        else:
            at_load.load(name, tensor)
            before.load(name, tensor)
    before.seal()
    at_load.seal()
    tokens = random_tokens(40)
    assert_same_bits(alone(at_load, tokens), alone(before, tokens))


def test_rows_that_are_no_whole_blocks_stay_dense(tmp_path: Path) -> None:
    """Hidden size 48: only what multiplies the 96 of the MLP can be quantised."""
    checkpoint = open_checkpoint(saved("llama", tmp_path, torch.float32))
    shapes = {name: tuple(t.shape) for name, t in checkpoint.tensors()}
    quantised = {n for n, t in checkpoint.tensors(INT8) if isinstance(t, QuantizedTensor)}
    expected = {n for n, s in shapes.items() if len(s) == 2 and s[1] % 32 == 0}
    assert quantised == expected
    loaded = sum(
        t.shape[0] * t.shape[1] * 34 // 32 if isinstance(t, QuantizedTensor) else t.nbytes
        for _, t in checkpoint.tensors(INT8)
    )
    assert checkpoint.weight_bytes(4, INT8) == loaded
