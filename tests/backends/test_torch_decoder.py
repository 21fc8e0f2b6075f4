"""The torch decoder against the native one, for every architecture; on CUDA too where there is a device."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from pyserve.backends.base import Backend, SamplingBackend
from pyserve.backends.torch_decoder import TorchBackend
from pyserve.errors import ModelError
from tests.backends.torch_harness import Rig, Source, logits_of, native, on_torch, source_of
from tests.model.harness import MODELS


@pytest.mark.parametrize("name", sorted(MODELS))
def test_float32_logits_and_hidden_states_are_the_native_decoders(name: str, device: str) -> None:
    expected = logits_of(Rig(native(name)))
    actual = logits_of(Rig(on_torch(name, device)))
    assert expected.std() > 0.1
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["llama", "gemma3", "gpt2"])
def test_bfloat16_logits_are_near_the_native_decoders(name: str, device: str) -> None:
    """On CUDA this is torch's paged attention, in captured graphs."""
    block_size = 256 if device == "cuda" else 16
    expected = logits_of(Rig(native(name, "bfloat16"), block_size, 8))
    actual = logits_of(Rig(on_torch(name, device, "bfloat16"), block_size, 8))
    correlation = torch.corrcoef(torch.stack([actual, expected]))[0, 1]
    assert correlation > 0.998


def test_info_says_what_is_loaded() -> None:
    backend = on_torch("llama")
    assert isinstance(backend, Backend)
    assert isinstance(backend, SamplingBackend)
    info, parameters = backend.info, source_of("llama").num_parameters
    assert (info.name, info.vocab_size, info.dtype) == ("tiny", 101, "float32")
    assert info.weight_bytes == 4 * parameters
    assert info.kv_bytes_per_token == 2 * 3 * 2 * 16 * 4


def test_weights_that_do_not_fit_are_named() -> None:
    source = source_of("llama")
    without = [w for w in source.weights if w[0] != "layers.1.k.weight"]
    extra = ("layers.9.q.weight", torch.zeros(2, 2))
    with pytest.raises(ModelError, match=r"layers\.1\.k\.weight.*layers\.9\.q\.weight"):
        TorchBackend(Source(source.config, [*without, extra]), device="cpu")
    wrong = [(source.weights[0][0], torch.zeros(3, 5)), *source.weights[1:]]
    with pytest.raises(ModelError, match=r"shape \[3, 5\], expected \[101, 48\]"):
        TorchBackend(Source(source.config, wrong), device="cpu")


def test_cuda_where_there_is_none_says_so() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a CUDA device")
    with pytest.raises(RuntimeError, match="CUDA"):
        TorchBackend(source_of("llama"), device="cuda")


def test_unknown_dtype_is_refused() -> None:
    with pytest.raises(ValueError, match="dtype"):
        TorchBackend(source_of("llama"), device="cpu", dtype="float16")


def test_closed_backend_raises() -> None:
    backend = on_torch("llama")
    backend.close()
    backend.close()
    with pytest.raises(RuntimeError, match="closed"):
        backend.allocate(4, 16)


def test_steps_out_of_range_are_refused_before_anything_is_written() -> None:
    rig = Rig(on_torch("gpt2"))
    row = rig.add([1, 2, 3])
    rig.step([row], [3])
    short = replace(source_of("gpt2").config, vocab_size=2)
    rig.backend._decoder.config = short  # type: ignore[attr-defined]
    rig.pool.append(torch.tensor([row], dtype=torch.int32), torch.tensor([7], dtype=torch.int32))
    with pytest.raises(ValueError, match=r"input_ids hold 7 to 7"):
        rig.step([row], [1])
