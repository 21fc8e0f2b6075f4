"""Which device is chosen, and what is loaded for it; CUDA itself is played by the CPU."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest
import torch

from pyserve import extension, loading
from pyserve.backends import cuda, torch_decoder
from pyserve.backends.native import NativeBackend
from pyserve.backends.torch_decoder import TorchBackend
from pyserve.config import Settings, load_configuration
from pyserve.errors import ModelError
from tests.backends.torch_harness import source_of

SETTINGS = Settings(context_length=400)


def machine(monkeypatch: pytest.MonkeyPatch, *, device: bool, built: str | None) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: device)
    build = extension.BuildInfo(torch="2.13.0", cuda=built)
    monkeypatch.setattr(extension, "build_info", lambda: build)


def test_auto_takes_cuda_where_there_is_all_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    for device, built, expected in (
        (True, "13.0", "cuda"),
        (True, None, "cpu"),
        (False, "13.0", "cpu"),
    ):
        machine(monkeypatch, device=device, built=built)
        assert cuda.choose_device("auto") == expected
        assert cuda.choose_device("cpu") == "cpu"


def test_cuda_asked_for_and_absent_says_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    machine(monkeypatch, device=False, built="13.0")
    with pytest.raises(ModelError, match=r"device: cuda was asked for.*no CUDA device"):
        cuda.choose_device("cuda")
    machine(monkeypatch, device=True, built=None)
    with pytest.raises(ModelError, match=r"device: cuda was asked for.*PYSERVE_CUDA=1"):
        cuda.choose_device("cuda")


def test_device_is_an_option() -> None:
    assert load_configuration({"device": "cuda"}, environ={}).settings.device == "cuda"
    assert Settings().device == "auto"


@pytest.fixture
def checkpoint(monkeypatch: pytest.MonkeyPatch) -> None:
    source = source_of("llama")
    tokenizer = SimpleNamespace(tokenizer=None, architecture="llama", **vars(source))
    tokenizer.tensors, tokenizer.num_parameters = source.tensors, source.num_parameters
    monkeypatch.setattr(loading, "open_checkpoint", lambda ref: tokenizer)


def test_cpu_gets_the_native_backend_and_small_blocks(checkpoint: None) -> None:
    loaded = loading.load_model(replace(SETTINGS, device="cpu"))
    assert isinstance(loaded.backend, NativeBackend)
    assert loaded.kv.block_size == 16


def test_cuda_gets_the_torch_backend_its_blocks_and_its_memory(
    checkpoint: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine(monkeypatch, device=True, built="13.0")
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a GPU")
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (10 << 20, 20 << 20))
    monkeypatch.setattr(torch_decoder, "TorchBackend", partial(TorchBackend, device="cpu"))
    loaded = loading.load_model(SETTINGS)
    assert isinstance(loaded.backend, TorchBackend)
    assert loaded.isa == "a GPU"
    assert loaded.kv.block_size == 256
    assert loaded.kv.num_blocks == (9 << 20) // loaded.kv.block_bytes
    few = loading.load_model(replace(SETTINGS, block_size=128))
    assert few.kv.block_size == 128
