"""What 8-bit activations cost on the default model: quantised weights kept against the same weights in
float32, on real English. docs/performance.md has the figures; the bounds here leave them some room."""

from __future__ import annotations

import math
from collections.abc import Collection

import pytest
import torch
from torch import Tensor

from pyserve._C import Decoder
from pyserve.backends.native import KEPT_QUANTIZED, NativeBackend
from pyserve.bench.workload import english
from pyserve.models.checkpoint import Checkpoint
from pyserve.models.load import open_checkpoint
from pyserve.models.source import QuantizedTensor
from tests.kernels.quant_twin import dequantize_weight, quantize_weight
from tests.model.harness import Row, Runner
from tests.models.k_quantizer import quantize_k

WINDOWS, LENGTH = 4, 256


@pytest.fixture(scope="module")
def checkpoint() -> Checkpoint:
    return open_checkpoint(None)


def decoder_of(checkpoint: Checkpoint, keep: Collection[str]) -> Decoder:
    decoder = Decoder(checkpoint.config.as_dict(), "float32")
    for name, tensor in checkpoint.tensors(keep):
        if isinstance(tensor, QuantizedTensor):
            decoder.load_blocks(name, tensor.type, tensor.blocks)
        else:
            decoder.load(name, tensor)
    decoder.seal()
    return decoder


def windows(checkpoint: Checkpoint) -> list[list[int]]:
    """Stretches of the text from all over it, a text's first token before each."""
    tokens = checkpoint.tokenizer.encode(english())
    step = (len(tokens) - LENGTH) // WINDOWS
    return [tokens[:1] + tokens[i * step : i * step + LENGTH - 1] for i in range(WINDOWS)]


def log_probabilities(decoder: Decoder, tokens: list[int]) -> Tensor:
    return Runner(decoder).run(Row(tokens), []).double().log_softmax(-1)


def compare(
    checkpoint: Checkpoint, plain: Decoder, kept: Decoder, count: int = WINDOWS
) -> dict[str, float]:
    """Top-1 agreement, mean KL divergence (nats), and perplexities of both."""
    same, divergences, losses = [], [], []
    for tokens in windows(checkpoint)[:count]:
        p, q = log_probabilities(plain, tokens), log_probabilities(kept, tokens)
        same.append((p.argmax(-1) == q.argmax(-1)).double())
        divergences.append((p.exp() * (p - q)).sum(-1))
        following = torch.tensor(tokens[1:]).unsqueeze(1)
        losses.append([-x[:-1].gather(1, following).mean().item() for x in (p, q)])
    means = torch.tensor(losses).mean(0)
    return {
        "top1": torch.cat(same).mean().item(),
        "kl": torch.cat(divergences).mean().item(),
        "perplexity": math.exp(means[0]),
        "perplexity_kept": math.exp(means[1]),
    }


MIXED = {
    "embed": "F32", "q": "Q5_0", "k": "Q4_1", "v": "Q8_0", "o": "Q5_1", "gate": "Q5_1", "up": "Q5_0",
}  # fmt: skip
"""What every third layer's matrices become; "down", in rows of 1536, is Q4_K and Q6_K in turns."""


def in_other_types(checkpoint: Checkpoint) -> tuple[Decoder, Decoder]:
    """The default model in a mixture of types: dequantised to float32, and kept; the head by ``--quantize``.

    Two layers of three stay dense: numpy quantises slowly.
    """
    decoders = tuple(Decoder(checkpoint.config.as_dict(), "float32") for _ in range(2))
    plain, kept = decoders
    for name, tensor in checkpoint.tensors():
        module, layer = name.split(".")[-2], int(name.split(".")[1]) if "layers" in name else 0
        kind = MIXED.get(module) if layer % 3 == 0 else None
        if module == "down" and layer % 3 == 0:
            kind = ("Q4_K", "Q6_K")[layer % 2]
            blocks = torch.from_numpy(quantize_k(tensor.numpy(), kind))
        elif kind == "F32":
            blocks = tensor.view(torch.uint8)
        elif kind is not None:
            blocks = quantize_weight(tensor, kind)
        if kind is None:
            kept.load(name, tensor)
        else:
            kept.load_blocks(name, kind, blocks)
        is_stored = kind is not None and kind != "F32"
        plain.load(name, dequantize_weight(blocks, kind) if is_stored else tensor)
    for decoder in decoders:
        decoder.seal()
    return plain, kept


@pytest.fixture(scope="module", params=["as shipped", "in other types"])
def compared(request: pytest.FixtureRequest, checkpoint: Checkpoint) -> dict[str, float]:
    if request.param == "in other types":
        return compare(checkpoint, *in_other_types(checkpoint), WINDOWS // 2)
    return compare(checkpoint, decoder_of(checkpoint, ()), decoder_of(checkpoint, KEPT_QUANTIZED))


def test_most_likely_tokens_agree(compared: dict[str, float]) -> None:
    assert compared["top1"] > 0.95, compared


def test_distributions_are_close(compared: dict[str, float]) -> None:
    assert compared["kl"] < 0.006, compared


def test_perplexity_hardly_differs(compared: dict[str, float]) -> None:
    assert abs(compared["perplexity_kept"] / compared["perplexity"] - 1) < 0.02, compared


def test_weights_take_little_more_than_on_disk(checkpoint: Checkpoint) -> None:
    backend = NativeBackend(checkpoint)
    assert backend.info.kept_quantized == ("Q4_1", "Q8_0")
    assert backend.info.weights == f"Q4_1 and Q8_0, the rest {backend.info.dtype}"
    assert backend.info.weight_bytes < 1.02 * checkpoint.stored.num_bytes
    backend.close()
