"""Writes transformers models as GGUF files, with the changes that llama.cpp's converter makes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import torch
import transformers

from tests.model.harness import config_of, weights_of

OUTER = {
    "embed": "token_embd",
    "positions": "position_embd",
    "final_norm": "output_norm",
    "lm_head": "output",
}
LAYER = {
    "attn_norm": "attn_norm",
    "q": "attn_q",
    "k": "attn_k",
    "v": "attn_v",
    "o": "attn_output",
    "q_norm": "attn_q_norm",
    "k_norm": "attn_k_norm",
    "attn_post_norm": "post_attention_norm",
    "mlp_norm": "ffn_norm",
    "gate": "ffn_gate",
    "up": "ffn_up",
    "down": "ffn_down",
    "mlp_post_norm": "post_ffw_norm",
}


def gguf_name(canonical: str) -> str:
    """What a GGUF file calls a canonical weight."""
    *head, module, part = canonical.split(".")
    if not head:
        return f"{OUTER[module]}.{part}"
    return f"blk.{head[1]}.{LAYER[module]}.{part}"


def interleave(tensor: torch.Tensor, heads: int) -> torch.Tensor:
    """``permute`` of convert_hf_to_gguf.py."""
    rows = tensor.shape[0]
    halves = tensor.reshape(heads, 2, rows // heads // 2, *tensor.shape[1:])
    return halves.swapaxes(1, 2).reshape(tensor.shape)


def write_model(
    path: Path,
    model: transformers.PreTrainedModel,
    architecture: str,
    *,
    metadata: dict[str, Any] | None = None,
    rope_factors: torch.Tensor | None = None,
    quantization: gguf.GGMLQuantizationType | None = None,
) -> Path:
    """Writes ``model`` in float32, its matrices in ``quantization`` where that is given.

    ``metadata`` adds or replaces integer and float keys.
    """
    config = config_of(model)
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_block_count(config.num_layers)
    writer.add_context_length(config.context_length)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_heads)
    if architecture == "gpt2":
        writer.add_layer_norm_eps(config.norm_eps)
    else:
        writer.add_head_count_kv(config.num_kv_heads)
        writer.add_key_length(config.head_dim)
        writer.add_value_length(config.head_dim)
        writer.add_layer_norm_rms_eps(config.norm_eps)
    for key, value in (metadata or {}).items():
        add = writer.add_uint32 if isinstance(value, int) else writer.add_float32
        (writer.add_string if isinstance(value, str) else add)(f"{architecture}.{key}", value)
    weights = dict(weights_of(model))
    if config.tie_embeddings:
        weights.pop("lm_head.weight", None)
    if architecture == "llama":
        for name in weights:
            heads = {"q": config.num_heads, "k": config.num_kv_heads}.get(name.split(".")[-2])
            if heads is not None:
                weights[name] = interleave(weights[name], heads)
    named = {gguf_name(name): tensor for name, tensor in weights.items()}
    if architecture == "gpt2":
        for i in range(config.num_layers):
            for part in ("weight", "bias"):
                pieces = [named.pop(f"blk.{i}.attn_{x}.{part}") for x in "qkv"]
                named[f"blk.{i}.attn_qkv.{part}"] = torch.cat(pieces)
    if rope_factors is not None:
        named["rope_freqs.weight"] = rope_factors
    for name, tensor in named.items():
        values = tensor.contiguous().numpy()
        if quantization is None or values.ndim != 2 or name == "position_embd.weight":
            writer.add_tensor(name, values)
        else:
            blocks = gguf.quants.quantize(values, quantization)
            writer.add_tensor(name, blocks, raw_dtype=quantization)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
