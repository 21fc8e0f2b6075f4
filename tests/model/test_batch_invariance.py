"""A sequence's logits are the same bits whoever shares the step, however its tokens are cut into steps and
wherever its blocks lie, on every instruction set and with any number of threads."""

import random

import pytest
import torch

from pyserve._C import Decoder, set_num_threads, supported_isas
from tests.model.harness import (
    Row,
    Runner,
    alone,
    assert_same_bits,
    build_decoder,
    in_company,
    random_model,
    random_tokens,
)

VARIANTS = [
    pytest.param((name, dtype, kv_dtype, isa), id=f"{name}-{dtype}-{kv_dtype}-{isa}")
    for isa in supported_isas()
    for name, dtype, kv_dtype in [
        ("llama", "float32", "float32"),
        ("llama", "float32", "int8"),
        ("wide", "float32", "bfloat16"),
        ("wide", "bfloat16", "int8"),
        ("mistral", "bfloat16", "bfloat16"),
        ("gemma3", "float32", "int8"),
        ("gpt2", "float32", "float32"),
    ]
]


@pytest.fixture(params=VARIANTS)
def decoder(request: pytest.FixtureRequest) -> Decoder:
    name, dtype, kv_dtype, isa = request.param
    return build_decoder(random_model(name), dtype=dtype, kv_dtype=kv_dtype, isa=isa)


def test_any_chunking_gives_the_same_bits(decoder: Decoder) -> None:
    tokens = random_tokens(75)
    expected = alone(decoder, tokens)
    for boundary in (1, 2, 5, 15, 16, 17, 31, 48, 64, 74):
        actual = Runner(decoder, seed=boundary).run(Row(tokens), [boundary])
        assert_same_bits(actual, expected)
    rng = random.Random(1)
    for seed in range(6):
        chunks: list[int] = []
        while (left := len(tokens) - sum(chunks)) > 0:
            chunks.append(rng.randint(1, min(left, 20)))
        assert_same_bits(Runner(decoder, seed=seed).run(Row(tokens), chunks), expected)


def test_decoding_token_by_token_gives_the_bits_of_prefill(decoder: Decoder) -> None:
    tokens = random_tokens(40, seed=2)
    actual = Runner(decoder).run(Row(tokens), [1] * len(tokens))
    assert_same_bits(actual, alone(decoder, tokens))


@pytest.mark.parametrize("others", [1, 2, 3, 7, 12, 13, 20, 32])
def test_company_does_not_change_bits(decoder: Decoder, others: int) -> None:
    tokens = random_tokens(50, seed=3)
    assert_same_bits(in_company(decoder, tokens, others), alone(decoder, tokens))


def test_threads_do_not_change_bits(decoder: Decoder, restored_threads: None) -> None:
    tokens = random_tokens(90, seed=4)
    set_num_threads(1)
    expected = Runner(decoder).run(Row(tokens), [60])
    for threads in (2, 3):
        set_num_threads(threads)
        assert_same_bits(Runner(decoder).run(Row(tokens), [60]), expected)


@pytest.mark.parametrize("kv_dtype", ["float32", "bfloat16", "int8"])
@pytest.mark.parametrize("name", ["llama", "mistral"])
@pytest.mark.parametrize("isa", supported_isas())
def test_long_context_gives_the_same_bits_in_any_chunks(
    name: str, isa: str, kv_dtype: str, restored_threads: None
) -> None:
    decoder = build_decoder(random_model(name), kv_dtype=kv_dtype, isa=isa)
    tokens = random_tokens(1300, seed=5)
    set_num_threads(1)
    expected = alone(decoder, tokens)
    for threads, chunks in enumerate(([511, 1, 1, 300], [100] * 12, [1024, 200, 1, 1]), 1):
        set_num_threads(threads)  # from two on, one sequence's spans are shared out
        assert_same_bits(Runner(decoder).run(Row(tokens), chunks), expected)


@pytest.mark.parametrize("kv_dtype", ["float32", "bfloat16", "int8"])
@pytest.mark.parametrize("block_size", [1, 5, 16, 24, 64, 256])
def test_chunks_do_not_change_bits_with_any_block_size(block_size: int, kv_dtype: str) -> None:
    decoder = build_decoder(random_model("mistral"), kv_dtype=kv_dtype)
    tokens = random_tokens(600, seed=7)
    blocks = 700 // block_size + 1
    first = Runner(decoder, num_blocks=blocks, block_size=block_size).run(Row(tokens), [150, 1])
    again = Runner(decoder, num_blocks=blocks, block_size=block_size, seed=1)
    assert_same_bits(again.run(Row(tokens), [1, 77, 300]), first)


def test_a_row_of_nan_stays_in_its_own_sequence() -> None:
    model = random_model("llama")
    with torch.no_grad():
        model.model.embed_tokens.weight[7] = float("nan")
    decoder = build_decoder(model)
    tokens = [t for t in random_tokens(60, seed=6) if t != 7]
    expected = alone(decoder, tokens)
    runner = Runner(decoder, num_blocks=8)
    poisoned = Row([1, 2, 7, 3] * 8)
    assert runner.run(poisoned, [20]).isnan().any()
    runner.free.extend(poisoned.blocks)  # its blocks are used again, NaN still in them
    assert_same_bits(runner.run(Row(tokens), [30]), expected)
