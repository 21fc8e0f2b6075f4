"""The forward pass agrees with transformers in float32, for every architecture."""

import pytest
import torch

from pyserve._C import supported_isas
from tests.model.harness import (
    MODELS,
    Row,
    Runner,
    build_decoder,
    random_model,
    random_tokens,
    reference_logits,
)


def assert_close(actual: torch.Tensor, expected: torch.Tensor, relative: float = 1e-4) -> None:
    error = (actual - expected).abs().max() / expected.abs().max()
    assert error < relative, f"relative error {error:.2e}"


@pytest.mark.parametrize("isa", supported_isas())
@pytest.mark.parametrize("name", MODELS)
def test_prefill_agrees(name: str, isa: str) -> None:
    model = random_model(name)
    tokens = random_tokens(83)
    actual = Runner(build_decoder(model, isa=isa)).run(Row(tokens), [])
    assert_close(actual, reference_logits(model, tokens))


@pytest.mark.parametrize("name", MODELS)
def test_chunked_prefill_then_decode_agrees(name: str) -> None:
    model = random_model(name, seed=1)
    tokens = random_tokens(70, seed=1)
    chunks = [1, 7, 16, 17, 20, *[1] * 9]
    actual = Runner(build_decoder(model), block_size=8).run(Row(tokens), chunks)
    assert_close(actual, reference_logits(model, tokens))


@pytest.mark.parametrize("name", ["llama", "mistral", "gemma3"])
@pytest.mark.parametrize("block_size", [1, 3, 16, 32])
def test_any_block_size_agrees(name: str, block_size: int) -> None:
    model = random_model(name, seed=2)
    tokens = random_tokens(40, seed=2)
    actual = Runner(build_decoder(model), block_size=block_size).run(Row(tokens), [29])
    assert_close(actual, reference_logits(model, tokens))


@pytest.mark.parametrize("name", ["llama", "mistral", "gemma3", "gpt2"])
def test_context_of_many_attention_spans_agrees(name: str) -> None:
    model = random_model(name, seed=3)
    if name != "gpt2":
        model.config.max_position_embeddings = 2048
    length = 512 if name == "gpt2" else 1300
    tokens = random_tokens(length, seed=3)
    actual = Runner(build_decoder(model)).run(Row(tokens), [200, 200, 1, 111])
    assert_close(actual, reference_logits(model, tokens))


@pytest.mark.parametrize("window", [1, 5, 40, 600])
def test_windows_shorter_and_longer_than_the_context_agree(window: int) -> None:
    model = random_model("mistral", seed=4)
    model.config.sliding_window = window
    for layer in model.model.layers:
        layer.self_attn.sliding_window = window
    tokens = random_tokens(100, seed=4)
    actual = Runner(build_decoder(model)).run(Row(tokens), [33, 1, 1, 30])
    assert_close(actual, reference_logits(model, tokens))


@pytest.mark.parametrize("name", MODELS)
def test_bfloat16_is_near_float32_with_the_same_weights(name: str) -> None:
    model = random_model(name, seed=5)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.bfloat16().float())
    tokens = random_tokens(60, seed=5)
    actual = Runner(build_decoder(model, dtype="bfloat16")).run(Row(tokens), [30, 1])
    assert_close(actual, reference_logits(model, tokens), relative=3e-2)


@pytest.mark.parametrize("isa", supported_isas())
@pytest.mark.parametrize(("kv_dtype", "relative"), [("bfloat16", 0.05), ("int8", 0.15)])
@pytest.mark.parametrize("name", MODELS)
def test_compact_keys_and_values_are_near_float32(
    name: str, kv_dtype: str, relative: float, isa: str
) -> None:
    model = random_model(name, seed=6)
    tokens = random_tokens(90, seed=6)
    decoder = build_decoder(model, kv_dtype=kv_dtype, isa=isa)
    for block_size in (16, 5):
        actual = Runner(decoder, block_size=block_size).run(Row(tokens), [40, 1])
        assert_close(actual, reference_logits(model, tokens), relative=relative)


def test_mixed_batch_agrees() -> None:
    model = random_model("qwen2", seed=6)
    runner = Runner(build_decoder(model))
    rows = [Row(random_tokens(20 + 9 * i, seed=i)) for i in range(5)]
    first = runner.step([(row, 10) for row in rows])
    rest = runner.step([(row, len(row.tokens) - 10) for row in rows])
    for row, *pieces in zip(rows, first, rest, strict=True):
        assert_close(torch.cat(pieces), reference_logits(model, row.tokens))
