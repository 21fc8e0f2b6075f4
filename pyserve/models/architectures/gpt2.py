"""GPT-2: layer norm with bias, learned positions, one fused q-k-v projection, plain GELU."""

from __future__ import annotations

import torch
from torch import Tensor

from pyserve.models.architectures.base import (
    Architecture,
    GGUFFormat,
    GGUFHeader,
    HuggingFaceFormat,
    end_of_text,
    first_of,
    refuse_unless,
)
from pyserve.models.architectures.llama import GGUF_OUTER_RULES
from pyserve.models.architectures.weights import Rule, both
from pyserve.models.config import DecoderConfig
from pyserve.models.fields import Fields


def _shape(
    *,
    vocab_size: int,
    hidden_size: int,
    num_layers: int,
    num_heads: int,
    intermediate_size: int,
    context_length: int,
    norm_eps: float,
    attention_scale: float,
    tie_embeddings: bool,
    bos_token_id: int | None,
    eos_token_ids: tuple[int, ...],
) -> DecoderConfig:
    return DecoderConfig(
        architecture="gpt2",
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_heads,
        head_dim=hidden_size // max(1, num_heads),
        intermediate_size=intermediate_size,
        context_length=context_length,
        norm="layer",
        norm_eps=norm_eps,
        activation="gelu_tanh",
        gated_mlp=False,
        qk_norm=False,
        post_norms=False,
        attention_scale=attention_scale,
        embedding_scale=1.0,
        layer_window=(0,) * num_layers,
        layer_rope=(-1,) * num_layers,
        ropes=(),
        learned_positions=True,
        tie_embeddings=tie_embeddings,
        bos_token_id=bos_token_id,
        eos_token_ids=eos_token_ids,
    )


def _config(fields: Fields) -> DecoderConfig:
    # Two names for the same function; any other is refused.
    if fields.raw("activation_function") != "gelu_pytorch_tanh":
        refuse_unless(fields, "activation_function", "gelu_new", "gelu_new")
    for key in ("scale_attn_by_inverse_layer_idx", "add_cross_attention"):
        refuse_unless(fields, key, False, False)
    hidden_size = fields.integer("n_embd", 768)
    num_heads = fields.integer("n_head", 12)
    scaled = fields.flag("scale_attn_weights", True)
    return _shape(
        vocab_size=fields.integer("vocab_size", 50257),
        hidden_size=hidden_size,
        num_layers=fields.num_layers("n_layer", 12),
        num_heads=num_heads,
        intermediate_size=fields.integer("n_inner", 4 * hidden_size),
        context_length=fields.integer("n_positions", 1024),
        norm_eps=fields.number("layer_norm_epsilon", 1e-5),
        attention_scale=(hidden_size // max(1, num_heads)) ** -0.5 if scaled else 1.0,
        tie_embeddings=fields.flag("tie_word_embeddings", True),
        bos_token_id=first_of(fields.token_ids("bos_token_id")),
        eos_token_ids=end_of_text(fields),
    )


def _gguf_config(header: GGUFHeader) -> DecoderConfig:
    fields = header.fields
    hidden_size = fields.integer("embedding_length")
    num_heads = fields.integer("attention.head_count")
    return _shape(
        vocab_size=header.vocab_size,
        hidden_size=hidden_size,
        num_layers=fields.num_layers("block_count"),
        num_heads=num_heads,
        intermediate_size=fields.integer("feed_forward_length"),
        context_length=fields.integer("context_length"),
        norm_eps=fields.number("attention.layer_norm_epsilon"),
        attention_scale=(hidden_size // max(1, num_heads)) ** -0.5,
        tie_embeddings=header.tied,
        bos_token_id=header.bos_token_id,
        eos_token_ids=header.eos_token_ids,
    )


def _transposed(tensor: Tensor, _: DecoderConfig) -> list[Tensor]:
    """transformers' Conv1D keeps ``[in, out]``."""
    return [tensor.t().contiguous()]


def _split(tensor: Tensor, config: DecoderConfig) -> list[Tensor]:
    return [part.contiguous() for part in torch.split(tensor, config.hidden_size, dim=0)]


def _transposed_split(tensor: Tensor, config: DecoderConfig) -> list[Tensor]:
    return _split(tensor.t(), config)


def _fused(part: str) -> tuple[str, ...]:
    return tuple(f"layers.{{i}}.{name}.{part}" for name in ("q", "k", "v"))


_HF_RULES: tuple[Rule, ...] = (
    Rule("wte.weight", ("embed.weight",)),
    Rule("wpe.weight", ("positions.weight",)),
    *both("ln_f", "final_norm"),
    Rule("lm_head.weight", ("lm_head.weight",)),
    *both("h.{i}.ln_1", "layers.{i}.attn_norm"),
    Rule("h.{i}.attn.c_attn.weight", _fused("weight"), _transposed_split),
    Rule("h.{i}.attn.c_attn.bias", _fused("bias"), _split),
    Rule("h.{i}.attn.c_proj.weight", ("layers.{i}.o.weight",), _transposed),
    Rule("h.{i}.attn.c_proj.bias", ("layers.{i}.o.bias",)),
    *both("h.{i}.ln_2", "layers.{i}.mlp_norm"),
    Rule("h.{i}.mlp.c_fc.weight", ("layers.{i}.up.weight",), _transposed),
    Rule("h.{i}.mlp.c_fc.bias", ("layers.{i}.up.bias",)),
    Rule("h.{i}.mlp.c_proj.weight", ("layers.{i}.down.weight",), _transposed),
    Rule("h.{i}.mlp.c_proj.bias", ("layers.{i}.down.bias",)),
)
_GGUF_RULES: tuple[Rule, ...] = (
    *GGUF_OUTER_RULES,
    Rule("position_embd.weight", ("positions.weight",)),
    *both("blk.{i}.attn_norm", "layers.{i}.attn_norm"),
    Rule("blk.{i}.attn_qkv.weight", _fused("weight"), _split),
    Rule("blk.{i}.attn_qkv.bias", _fused("bias"), _split),
    *both("blk.{i}.attn_output", "layers.{i}.o"),
    *both("blk.{i}.ffn_norm", "layers.{i}.mlp_norm"),
    *both("blk.{i}.ffn_up", "layers.{i}.up"),
    *both("blk.{i}.ffn_down", "layers.{i}.down"),
)

GPT2 = Architecture(
    title="GPT-2",
    huggingface=HuggingFaceFormat(
        ("gpt2",),
        _config,
        _HF_RULES,
        prefixes=("transformer.",),
        ignored=r"^h\.\d+\.attn\.(masked_)?bias$",
    ),
    gguf=GGUFFormat(("gpt2",), _gguf_config, _GGUF_RULES),
)
