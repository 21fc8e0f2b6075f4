"""A decoder whose weights stay quantised: right, mixed per tensor, and batch-invariant like any other."""

from __future__ import annotations

import pytest
import torch
import transformers

from pyserve._C import Decoder, set_num_threads, supported_isas
from tests.kernels.quant_twin import dequantize_weight, quantize_weight
from tests.model.harness import (
    Row,
    Runner,
    alone,
    assert_same_bits,
    config_of,
    in_company,
    random_model,
    random_tokens,
    weights_of,
)

LINEAR = ("q", "k", "v", "o", "gate", "up", "down", "embed", "lm_head")
MIXED = {"q": "Q4_1", "k": "Q8_0", "gate": "Q4_0", "down": "Q8_0", "embed": "Q8_0"}
"""What is not here stays dense: parts of merged products, and products of their own."""


def small_llama() -> transformers.PreTrainedModel:
    """The harness's "blocks": every matrix a whole number of blocks wide."""
    return random_model("blocks")


def build(types: dict[str, str], isa: str = "", *, dequantized: bool = False) -> Decoder:
    """Weights in ``types`` by their layer's name kept, or in float32 with the same values."""
    model = small_llama()
    decoder = Decoder(config_of(model).as_dict(), "float32", isa)
    for name, tensor in weights_of(model):
        kind = types.get(name.split(".")[-2]) if name.endswith("weight") else None
        if kind is None:
            decoder.load(name, tensor)
            continue
        blocks = quantize_weight(tensor, kind)
        if dequantized:
            decoder.load(name, dequantize_weight(blocks, kind))
        else:
            decoder.load_blocks(name, kind, blocks)
    decoder.seal()
    return decoder


ALL = {kind: dict.fromkeys(LINEAR, kind) for kind in ("Q8_0", "Q4_0", "Q4_1")} | {"mixed": MIXED}
VARIANTS = [
    pytest.param((kind, isa), id=f"{kind}-{isa}") for isa in supported_isas() for kind in ALL
]


@pytest.fixture(params=VARIANTS)
def decoder(request: pytest.FixtureRequest) -> Decoder:
    kind, isa = request.param
    return build(ALL[kind], isa)


@pytest.mark.parametrize("isa", supported_isas())
@pytest.mark.parametrize("kind", ALL)
def test_logits_are_near_those_of_the_same_weights_in_float32(kind: str, isa: str) -> None:
    tokens = random_tokens(60)
    actual = alone(build(ALL[kind], isa), tokens)
    expected = alone(build(ALL[kind], isa, dequantized=True), tokens)
    assert (actual - expected).norm() / expected.norm() < 0.12


def test_any_chunking_gives_the_same_bits(decoder: Decoder) -> None:
    tokens = random_tokens(75)
    expected = alone(decoder, tokens)
    for boundary in (1, 12, 13, 17, 48, 74):
        assert_same_bits(Runner(decoder, seed=boundary).run(Row(tokens), [boundary]), expected)
    assert_same_bits(Runner(decoder).run(Row(tokens), [1] * len(tokens)), expected)


@pytest.mark.parametrize("others", [1, 7, 12, 32])
def test_company_does_not_change_bits(decoder: Decoder, others: int) -> None:
    tokens = random_tokens(50, seed=3)
    assert_same_bits(in_company(decoder, tokens, others), alone(decoder, tokens))


def test_threads_do_not_change_bits(decoder: Decoder, restored_threads: None) -> None:
    tokens = random_tokens(300, seed=4)
    set_num_threads(1)
    expected = Runner(decoder).run(Row(tokens), [250])
    for threads in (2, 3):
        set_num_threads(threads)
        assert_same_bits(Runner(decoder).run(Row(tokens), [250]), expected)


def test_a_weight_that_is_not_a_matrix_product_is_refused() -> None:
    decoder = Decoder(config_of(small_llama()).as_dict())
    blocks = quantize_weight(torch.randn(1, 96), "Q8_0")
    with pytest.raises(ValueError, match="final_norm"):
        decoder.load_blocks("final_norm.weight", "Q8_0", blocks)
    with pytest.raises(ValueError, match=r"layers\.0\.q\.weight has shape \[1, 96\]"):
        decoder.load_blocks("layers.0.q.weight", "Q8_0", blocks)
