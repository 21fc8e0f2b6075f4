"""config.json and weights of every architecture, as save_pretrained writes them and as older files do."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from pyserve.errors import ModelError
from pyserve.models.load import open_checkpoint
from tests.model.harness import MODELS, SHAPE, config_of, random_model, weights_of


def edit_config(directory: Path, **changes: Any) -> None:
    """Sets keys of config.json; None removes one."""
    path = directory / "config.json"
    config = json.loads(path.read_text()) | changes
    kept = {key: value for key, value in config.items() if value is not ...}
    path.write_text(json.dumps(kept))


@pytest.mark.parametrize("name", MODELS)
def test_canonical_weights_equal_the_model(name: str, tmp_path: Path) -> None:
    model = random_model(name)
    model.save_pretrained(tmp_path)
    checkpoint = open_checkpoint(str(tmp_path))
    loaded = dict(checkpoint.tensors())
    expected = dict(weights_of(model))
    if checkpoint.config.tie_embeddings:
        expected.pop("lm_head.weight", None)
    assert loaded.keys() == expected.keys()
    for key, tensor in expected.items():
        assert torch.equal(loaded[key], tensor), key
    assert checkpoint.num_parameters == sum(t.numel() for t in expected.values())
    assert checkpoint.quantization == "F32"


@pytest.mark.parametrize("name", MODELS)
def test_configuration_equals_the_model(name: str, tmp_path: Path) -> None:
    model = random_model(name)
    model.save_pretrained(tmp_path)
    actual, expected = open_checkpoint(str(tmp_path)).config.as_dict(), config_of(model).as_dict()
    for key in ("architecture", "bos_token_id", "eos_token_ids"):
        actual.pop(key)
        expected.pop(key)
    assert actual == expected


def test_shards_are_read_as_one(tmp_path: Path) -> None:
    model = random_model("llama")
    model.save_pretrained(tmp_path, max_shard_size="30KB")
    assert len(list(tmp_path.glob("model-*-of-*.safetensors"))) > 1
    loaded = dict(open_checkpoint(str(tmp_path)).tensors())
    for key, tensor in weights_of(model):
        assert torch.equal(loaded[key], tensor), key


def test_bfloat16_and_float16_keep_their_bits(tmp_path: Path) -> None:
    for dtype, name in ((torch.bfloat16, "BF16"), (torch.float16, "F16")):
        model = random_model("qwen2").to(dtype)
        model.save_pretrained(tmp_path)
        checkpoint = open_checkpoint(str(tmp_path))
        assert checkpoint.quantization == name
        loaded = dict(checkpoint.tensors())
        assert all(torch.equal(loaded[key], tensor) for key, tensor in weights_of(model))


def test_gemma_norms_are_folded_in_float32(tmp_path: Path) -> None:
    model = random_model("gemma3").to(torch.bfloat16)
    model.save_pretrained(tmp_path)
    norm = dict(open_checkpoint(str(tmp_path)).tensors())["final_norm.weight"]
    assert torch.equal(norm, 1.0 + model.model.norm.weight.detach().float())


ROPES = {
    "linear": {"rope_type": "linear", "factor": 4.0},
    "dynamic": {"rope_type": "dynamic", "factor": 2.0},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128},
    "yarn_tuned": {
        "rope_type": "yarn",
        "factor": 8.0,
        "original_max_position_embeddings": 64,
        "beta_fast": 20.0,
        "beta_slow": 2.0,
        "mscale": 0.8,
        "mscale_all_dim": 0.6,
        "truncate": False,
    },
}


@pytest.mark.parametrize("spelling", ["new", "old"])
@pytest.mark.parametrize("name", ROPES)
def test_rope_scaling_equals_transformers(name: str, spelling: str, tmp_path: Path) -> None:
    parameters = {**ROPES[name], "rope_theta": 50000.0}
    config = transformers.LlamaConfig(**SHAPE, rope_parameters=dict(parameters))
    model = transformers.LlamaForCausalLM(config)
    model.save_pretrained(tmp_path)
    if spelling == "old":
        theta = parameters.pop("rope_theta")
        parameters["type"] = parameters.pop("rope_type")
        edit_config(tmp_path, rope_parameters=..., rope_theta=theta, rope_scaling=parameters)
    (rope,) = open_checkpoint(str(tmp_path)).config.ropes
    rotary = model.model.rotary_emb
    assert rope.inv_freq == tuple(rotary.inv_freq.tolist())
    assert rope.attention_factor == pytest.approx(rotary.attention_scaling, rel=1e-12)


def test_older_gemma3_config_gives_the_same(tmp_path: Path) -> None:
    model = random_model("gemma3")
    model.save_pretrained(tmp_path)
    edit_config(
        tmp_path,
        rope_parameters=...,
        layer_types=...,
        sliding_window_pattern=2,
        rope_theta=500000.0,
        rope_local_base_freq=8000.0,
        rope_scaling={"rope_type": "linear", "factor": 8.0},
    )
    config = open_checkpoint(str(tmp_path)).config
    assert config.layer_window == (13, 0, 13)
    assert config.layer_rope == (1, 0, 1)
    assert config.ropes[0].inv_freq[0] == 1 / 8
    assert config.ropes[0].inv_freq[1] == pytest.approx(500000 ** (-2 / 24) / 8)
    assert config.ropes[1].inv_freq[1] == pytest.approx(8000 ** (-2 / 24))


@pytest.mark.parametrize("prefix", ["language_model.model.", "model.language_model."])
def test_gemma3_beside_a_vision_model_is_its_text_part(prefix: str, tmp_path: Path) -> None:
    model = random_model("gemma3")
    model.save_pretrained(tmp_path)
    text = json.loads((tmp_path / "config.json").read_text())
    outer = {"model_type": "gemma3", "text_config": text, "eos_token_id": [1, 106]}
    (tmp_path / "config.json").write_text(json.dumps(outer))
    tensors = load_file(tmp_path / "model.safetensors")
    renamed = {key.replace("model.", prefix, 1): tensor for key, tensor in tensors.items()}
    outside = "model." if prefix.startswith("model.") else ""
    renamed[f"{outside}vision_tower.post_layernorm.weight"] = torch.ones(3)
    save_file(renamed, tmp_path / "model.safetensors")
    checkpoint = open_checkpoint(str(tmp_path))
    loaded = dict(checkpoint.tensors())
    assert checkpoint.config.eos_token_ids == (1, 106)
    expected = {key: t for key, t in weights_of(model) if key != "lm_head.weight"}
    assert loaded.keys() == expected.keys()
    assert all(torch.equal(loaded[key], tensor) for key, tensor in expected.items())


@pytest.mark.parametrize(
    ("changes", "windows"),
    [
        ({}, (0, 0, 0)),
        ({"sliding_window": 9, "max_window_layers": 1}, (0, 0, 0)),
        ({"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1}, (0, 9, 9)),
        ({"use_sliding_window": True, "sliding_window": None}, (0, 0, 0)),
    ],
)
def test_qwen2_window_needs_use_sliding_window(
    changes: dict[str, Any], windows: tuple[int, ...], tmp_path: Path
) -> None:
    random_model("qwen2").save_pretrained(tmp_path)
    edit_config(tmp_path, layer_types=..., **changes)
    assert open_checkpoint(str(tmp_path)).config.layer_window == windows


def test_layer_types_say_which_layers_have_a_window(tmp_path: Path) -> None:
    random_model("qwen3").save_pretrained(tmp_path)
    kinds = ["sliding_attention", "full_attention", "sliding_attention"]
    edit_config(tmp_path, layer_types=kinds, use_sliding_window=True, sliding_window=5)
    assert open_checkpoint(str(tmp_path)).config.layer_window == (5, 0, 5)


def test_mistral_without_a_window(tmp_path: Path) -> None:
    random_model("mistral").save_pretrained(tmp_path)
    edit_config(tmp_path, sliding_window=None)
    assert open_checkpoint(str(tmp_path)).config.layer_window == (0, 0, 0)


def test_end_tokens_come_from_both_files(tmp_path: Path) -> None:
    random_model("llama").save_pretrained(tmp_path)
    edit_config(tmp_path, eos_token_id=2, bos_token_id=1)
    generation = {"eos_token_id": [7, 9]}
    (tmp_path / "generation_config.json").write_text(json.dumps(generation))
    config = open_checkpoint(str(tmp_path)).config
    assert config.eos_token_ids == (7, 9, 2)
    assert config.bos_token_id == 1


def test_older_gpt2_files_without_prefix_and_with_masks(tmp_path: Path) -> None:
    model = random_model("gpt2")
    model.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    renamed = {key.removeprefix("transformer."): tensor for key, tensor in tensors.items()}
    renamed["h.0.attn.bias"] = torch.ones(1, 1, 4, 4)
    renamed["h.0.attn.masked_bias"] = torch.tensor(-1e4)
    save_file(renamed, tmp_path / "model.safetensors")
    loaded = dict(open_checkpoint(str(tmp_path)).tensors())
    assert all(
        torch.equal(loaded[key], t) for key, t in weights_of(model) if key != "lm_head.weight"
    )


def test_unsupported_architecture_names_the_supported_ones(tmp_path: Path) -> None:
    random_model("llama").save_pretrained(tmp_path)
    edit_config(tmp_path, model_type="mamba")
    with pytest.raises(
        ModelError, match=r"'mamba'.*Llama, Mistral, Qwen2.*pyserve\[transformers\]"
    ):
        open_checkpoint(str(tmp_path))


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("llama", {"hidden_act": "relu"}, "hidden_act"),
        ("llama", {"rope_parameters": {"rope_type": "longrope"}}, "longrope"),
        (
            "llama",
            {"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}},
            "part of",
        ),
        ("llama", {"num_key_value_heads": 4}, "num_kv_heads"),
        ("llama", {"vocab_size": "many"}, "vocab_size should be an integer"),
        ("llama", {"hidden_size": ...}, "hidden_size is missing"),
        ("llama", {"quantization_config": {"quant_method": "gptq"}}, "gptq"),
        ("llama", {"num_hidden_layers": 4}, "lacks weights: layers.3"),
        ("llama", {"num_hidden_layers": 2}, "no place for: layers.2"),
        ("gemma3", {"final_logit_softcapping": 30.0}, "final_logit_softcapping"),
        ("gemma3", {"use_bidirectional_attention": True}, "use_bidirectional_attention"),
        ("gpt2", {"activation_function": "relu"}, "activation_function"),
        ("gpt2", {"scale_attn_by_inverse_layer_idx": True}, "inverse_layer_idx"),
    ],
)
def test_what_the_decoder_cannot_compute_is_refused(
    name: str, changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    random_model(name).save_pretrained(tmp_path)
    edit_config(tmp_path, **changes)
    with pytest.raises(ModelError, match=message):
        open_checkpoint(str(tmp_path))


def test_a_shape_that_does_not_fit_names_the_tensor(tmp_path: Path) -> None:
    random_model("llama").save_pretrained(tmp_path)
    edit_config(tmp_path, intermediate_size=90)
    with pytest.raises(ModelError, match=r"mlp\.gate_proj\.weight gives .* \[88, 48\]"):
        open_checkpoint(str(tmp_path))
