"""From a checkpoint on disk to logits that agree with transformers: the whole way, for every architecture."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers

from pyserve._C import Decoder
from pyserve.models.checkpoint import Checkpoint
from pyserve.models.load import open_checkpoint
from tests.model.harness import MODELS, Row, Runner, random_model, random_tokens, reference_logits
from tests.models.gguf_writing import write_model

PROMPTS = (
    "The capital of France is",
    "def fibonacci(n):\n    if n < 2:\n        return n\n    return",
    "Wer reitet so spät durch Nacht und Wind? 东方红 太阳升 🙂",
)


def decoder_of(checkpoint: Checkpoint) -> Decoder:
    decoder = Decoder(checkpoint.config.as_dict(), "float32")
    for name, tensor in checkpoint.tensors():
        decoder.load(name, tensor)
    decoder.seal()
    return decoder


def assert_agrees(
    checkpoint: Checkpoint, model: transformers.PreTrainedModel, tokens: list[int]
) -> None:
    actual = Runner(decoder_of(checkpoint)).run(Row(tokens), [len(tokens) // 2, 1])
    expected = reference_logits(model, tokens)
    error = (actual - expected).abs().max() / expected.abs().max()
    assert error < 1e-4, f"relative error {error:.2e}"


@pytest.mark.parametrize("name", MODELS)
def test_huggingface_directory_agrees(name: str, tmp_path: Path) -> None:
    model = random_model(name)
    model.save_pretrained(tmp_path)
    assert_agrees(open_checkpoint(str(tmp_path)), model, random_tokens(61))


@pytest.mark.parametrize(
    ("name", "architecture"),
    [("llama", "llama"), ("qwen2", "qwen2"), ("qwen3", "qwen3"), ("gpt2", "gpt2")],
)
def test_gguf_file_agrees(name: str, architecture: str, tmp_path: Path) -> None:
    model = random_model(name)
    path = write_model(tmp_path / "model.gguf", model, architecture)
    assert_agrees(open_checkpoint(str(path)), model, random_tokens(61))


def test_gguf_mistral_window_agrees(tmp_path: Path) -> None:
    model = random_model("mistral")
    metadata = {"attention.sliding_window": 19}
    path = write_model(tmp_path / "model.gguf", model, "llama", metadata=metadata)
    assert_agrees(open_checkpoint(str(path)), model, random_tokens(61))


def test_gguf_llama3_scaling_comes_from_its_tensor(tmp_path: Path) -> None:
    model = random_model("llama3")
    plain = random_model("llama").model.rotary_emb.inv_freq
    factors = plain / model.model.rotary_emb.inv_freq
    path = write_model(tmp_path / "model.gguf", model, "llama", rope_factors=factors)
    assert_agrees(open_checkpoint(str(path)), model, random_tokens(61))


def test_gguf_gemma3_agrees(tmp_path: Path) -> None:
    model = random_model("gemma3")
    model.config.query_pre_attn_scalar = model.config.head_dim
    for layer in model.model.layers:
        layer.self_attn.scaling = model.config.head_dim**-0.5
    metadata = {"attention.sliding_window": 13, "attention.sliding_window_pattern": 2}
    path = write_model(tmp_path / "model.gguf", model, "gemma3", metadata=metadata)
    assert_agrees(open_checkpoint(str(path)), model, random_tokens(61))


@pytest.fixture(scope="module")
def default() -> Checkpoint:
    return open_checkpoint(None)


@pytest.fixture(scope="module")
def default_in_transformers(default: Checkpoint) -> transformers.PreTrainedModel:
    """The default model in transformers, from the same dequantised weights."""
    config = default.config
    model = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=config.vocab_size,
            hidden_size=config.hidden_size,
            num_hidden_layers=config.num_layers,
            num_attention_heads=config.num_heads,
            num_key_value_heads=config.num_kv_heads,
            intermediate_size=config.intermediate_size,
            max_position_embeddings=config.context_length,
            rms_norm_eps=config.norm_eps,
            rope_parameters={"rope_type": "default", "rope_theta": 100000.0},
            tie_word_embeddings=True,
        )
    ).eval()
    names = {"attn_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm"}
    names |= {x: f"self_attn.{x}_proj" for x in "qkvo"}
    names |= {x: f"mlp.{x}_proj" for x in ("gate", "up", "down")}
    state = {}
    for name, tensor in default.tensors():
        match name.split("."):
            case ["layers", index, module, "weight"]:
                state[f"model.layers.{index}.{names[module]}.weight"] = tensor
            case ["embed", _]:
                state["model.embed_tokens.weight"] = state["lm_head.weight"] = tensor
            case _:
                state["model.norm.weight"] = tensor
    model.load_state_dict(state)
    return model


@pytest.fixture(scope="module")
def default_runner(default: Checkpoint) -> Runner:
    return Runner(decoder_of(default))


@pytest.mark.parametrize("prompt", PROMPTS)
def test_default_model_agrees_on_real_prompts(
    prompt: str,
    default: Checkpoint,
    default_in_transformers: transformers.PreTrainedModel,
    default_runner: Runner,
) -> None:
    tokens = default.tokenizer.encode(prompt)
    actual = default_runner.run(Row(tokens), [])
    expected = reference_logits(default_in_transformers, tokens)
    assert (actual - expected).abs().max() / expected.abs().max() < 1e-4
    assert torch.equal(actual.argmax(-1), expected.argmax(-1))


def test_default_model_knows_the_capital_of_france(
    default: Checkpoint, default_runner: Runner
) -> None:
    tokens = default.tokenizer.encode(PROMPTS[0])
    next_token = int(default_runner.run(Row(tokens), [])[-1].argmax())
    assert default.tokenizer.decode([next_token]) == " Paris"
