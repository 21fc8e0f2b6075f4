"""Qwen2 (and 2.5): Llama with biases on q, k, v. Qwen3: a norm on each query and key head instead."""

from __future__ import annotations

from functools import partial

from pyserve.models.architectures.base import (
    Architecture,
    GGUFFormat,
    HuggingFaceFormat,
)
from pyserve.models.architectures.llama import (
    GGUF_MLP_RULES,
    GGUF_OUTER_RULES,
    HF_RULES,
    llama_from_config,
    llama_from_gguf,
)
from pyserve.models.architectures.weights import Rule, both
from pyserve.models.config import DecoderConfig
from pyserve.models.fields import Fields

HF_QK_NORM_RULES: tuple[Rule, ...] = (
    Rule("layers.{i}.self_attn.q_norm.weight", ("layers.{i}.q_norm.weight",)),
    Rule("layers.{i}.self_attn.k_norm.weight", ("layers.{i}.k_norm.weight",)),
)
GGUF_QK_NORM_RULES: tuple[Rule, ...] = (
    Rule("blk.{i}.attn_q_norm.weight", ("layers.{i}.q_norm.weight",)),
    Rule("blk.{i}.attn_k_norm.weight", ("layers.{i}.k_norm.weight",)),
)
GGUF_RULES: tuple[Rule, ...] = (
    *GGUF_OUTER_RULES,
    Rule("blk.{i}.attn_norm.weight", ("layers.{i}.attn_norm.weight",)),
    *both("blk.{i}.attn_q", "layers.{i}.q"),
    *both("blk.{i}.attn_k", "layers.{i}.k"),
    *both("blk.{i}.attn_v", "layers.{i}.v"),
    *both("blk.{i}.attn_output", "layers.{i}.o"),
    Rule("blk.{i}.ffn_norm.weight", ("layers.{i}.mlp_norm.weight",)),
    *GGUF_MLP_RULES,
)


def _windows(fields: Fields) -> tuple[int, ...]:
    """``use_sliding_window`` decides; ``layer_types`` (or ``max_window_layers``: the first one) where."""
    num_layers = fields.num_layers("num_hidden_layers")
    if not fields.flag("use_sliding_window", False) or fields.is_null("sliding_window"):
        return (0,) * num_layers
    window = fields.integer("sliding_window", 4096)
    types = fields.strings("layer_types")
    if types is None:
        first = fields.integer("max_window_layers", 28)
        return tuple(window if i >= first else 0 for i in range(num_layers))
    return tuple(window if kind == "sliding_attention" else 0 for kind in types)


def _qwen2_config(fields: Fields) -> DecoderConfig:
    return llama_from_config(
        fields, architecture="qwen2", windows=_windows(fields), context_length=32768
    )


def _qwen3_config(fields: Fields) -> DecoderConfig:
    return llama_from_config(
        fields,
        architecture="qwen3",
        windows=_windows(fields),
        head_dim=128,
        context_length=32768,
        qk_norm=True,
    )


QWEN2 = Architecture(
    title="Qwen2",
    huggingface=HuggingFaceFormat(("qwen2",), _qwen2_config, HF_RULES),
    gguf=GGUFFormat(("qwen2",), partial(llama_from_gguf, architecture="qwen2"), GGUF_RULES),
)
QWEN3 = Architecture(
    title="Qwen3",
    huggingface=HuggingFaceFormat(("qwen3",), _qwen3_config, (*HF_RULES, *HF_QK_NORM_RULES)),
    gguf=GGUFFormat(
        ("qwen3",),
        partial(llama_from_gguf, architecture="qwen3", qk_norm=True),
        (*GGUF_RULES, *GGUF_QK_NORM_RULES),
    ),
)
