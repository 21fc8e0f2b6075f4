"""The native back-end: a checkpoint in, packed steps through."""

import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from pyserve._C import BlockPool, StepBuffers, pack
from pyserve.backends.base import Backend
from pyserve.backends.native import NativeBackend, default_dtype
from pyserve.errors import ModelError
from tests.backends.memory_source import Source
from tests.model.harness import (
    config_of,
    random_model,
    random_tokens,
    reference_logits,
    weights_of,
)


@pytest.fixture
def model() -> object:
    return random_model("llama")


@pytest.fixture
def source(model: torch.nn.Module) -> Source:
    config = replace(config_of(model), eos_token_ids=(7,))
    return Source(config, list(weights_of(model)))


def ints(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def test_info_says_what_is_loaded(source: Source) -> None:
    backend = NativeBackend(source, dtype="float32")
    assert isinstance(backend, Backend)
    info = backend.info
    assert (info.name, info.vocab_size, info.dtype) == ("tiny", 101, "float32")
    assert info.eos_token_ids == (7,)
    assert info.weight_bytes >= 4 * info.num_parameters
    assert info.kv_bytes_per_token == 2 * 3 * 2 * 16 * 4
    backend.allocate(10, 16)
    assert backend.kv_bytes == 160 * info.kv_bytes_per_token
    assert default_dtype("F32") in ("float32", "bfloat16")
    assert default_dtype("BF16") == "bfloat16"  # loses nothing, whatever the processor has


@pytest.mark.parametrize(
    ("dtype", "kv_dtype", "stored", "bytes_per_token"),
    [
        (None, None, "bfloat16", 2 * 3 * 2 * 16 * 2),
        ("float32", None, "float32", 2 * 3 * 2 * 16 * 4),
        ("bfloat16", None, "bfloat16", 2 * 3 * 2 * 16 * 2),
        ("float32", "int8", "int8", 2 * 3 * 2 * (16 + 4)),
    ],
)
def test_keys_and_values_are_stored_as_asked(
    source: Source, dtype: str | None, kv_dtype: str | None, stored: str, bytes_per_token: int
) -> None:
    backend = NativeBackend(source, dtype=dtype, kv_dtype=kv_dtype)
    assert (backend.info.kv_dtype, backend.info.kv_bytes_per_token) == (stored, bytes_per_token)
    backend.allocate(10, 16)
    assert backend.kv_bytes == 160 * bytes_per_token


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def write_block(backend: NativeBackend, block: int) -> Tensor:
    """Logits of sixteen tokens whose keys and values go there."""
    one = ints(*range(16))
    table = ints(block).reshape(1, 1)
    step = (one, one, ints(0, 16), ints(16), one + block * 16, table, ints(15), ints())
    return backend._open.forward(*step)[0]


def test_memory_of_keys_and_values_is_taken_block_by_block_and_given_back() -> None:
    backend = NativeBackend(
        Source(config_of(model := random_model("llama")), list(weights_of(model)))
    )
    before = resident()
    backend.allocate(1 << 16, 16)  # 384 MiB
    assert backend.kv_bytes > 380 << 20
    for first in (0, 60_000):  # two blocks, at both ends of the pool
        write_block(backend, first)
    assert resident() - before < 32 << 20
    backend.allocate(1, 16)
    assert resident() - before < 16 << 20


def test_prefaulting_takes_all_memory_beside_the_work_and_stops_when_told() -> None:
    source = Source(config_of(model := random_model("llama")), list(weights_of(model)))
    lazy, backend = NativeBackend(source), NativeBackend(source, prefault=True)
    lazy.allocate(1, 16)
    before = resident()
    backend.allocate(1 << 14, 16)  # 96 MiB
    logits = write_block(backend, 3)
    backend.await_memory()
    assert resident() - before > backend.kv_bytes
    assert torch.equal(write_block(lazy, 0), logits)
    assert torch.equal(write_block(backend, 3), logits)
    backend.allocate(1 << 20, 16)  # 6 GiB
    backend.allocate(1, 16)
    backend.await_memory()
    assert resident() - before < 64 << 20


def test_packed_steps_give_the_models_logits_and_hidden_states(
    source: Source, model: torch.nn.Module
) -> None:
    backend = NativeBackend(source, dtype="float32")
    backend.allocate(32, 16)
    pool = BlockPool(32, 16, True)
    buffers = StepBuffers(64, 4, 8)
    tokens = [random_tokens(40, seed=1), random_tokens(13, seed=2)]
    rows = ints(*(pool.add(ints(*t), len(t), 0, 0) for t in tokens))
    with torch.no_grad():
        states = [model.model(torch.tensor([t])).last_hidden_state[0] for t in tokens]
    for takes, finished in ((ints(25, 13), [1]), (ints(15, 0), [0])):
        active = takes > 0
        for row, take in zip(rows[active].tolist(), takes[active].tolist(), strict=True):
            assert pool.reserve(row, pool.computed(row) + take)
        packed = pack(pool, rows[active], takes[active], buffers)
        out = backend.forward(packed, packed.logit_rows.clone())
        pool.advance(rows[active], takes[active])
        for i, sequence in enumerate(finished):
            expected = reference_logits(model, tokens[sequence])[-1]
            torch.testing.assert_close(out.logits[i], expected, rtol=1e-3, atol=1e-3)
            torch.testing.assert_close(out.hidden[i], states[sequence][-1], rtol=1e-3, atol=1e-3)


def test_missing_and_unexpected_weights_are_named(source: Source) -> None:
    source.weights = [w for w in source.weights if w[0] != "layers.1.k.weight"]
    source.weights.append(("layers.9.q.weight", torch.zeros(2, 2)))
    with pytest.raises(ModelError, match=r"layers\.1\.k\.weight.*layers\.9\.q\.weight"):
        NativeBackend(source)


def test_wrong_shape_is_named(source: Source) -> None:
    source.weights[0] = (source.weights[0][0], torch.zeros(3, 5))
    with pytest.raises(ModelError, match=r"shape \[3, 5\], expected \[101, 48\]"):
        NativeBackend(source)


def test_unknown_dtype_is_refused(source: Source) -> None:
    with pytest.raises(ValueError, match="dtype"):
        NativeBackend(source, dtype="float16")


def test_unknown_kv_dtype_is_refused(source: Source) -> None:
    with pytest.raises(ValueError, match="kv_dtype"):
        NativeBackend(source, kv_dtype="int4")


def test_closed_backend_raises(source: Source) -> None:
    backend = NativeBackend(source)
    backend.close()
    backend.close()
    with pytest.raises(RuntimeError, match="closed"):
        backend.allocate(4, 16)
