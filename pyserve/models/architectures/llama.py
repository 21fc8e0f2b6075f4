"""Llama 2 and 3, SmolLM2, Mistral: RMS norm, rotary positions, grouped queries, gated SiLU."""

from __future__ import annotations

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
from pyserve.models.architectures.gguf_common import gguf_head_dim, gguf_rope
from pyserve.models.architectures.weights import Rule, both
from pyserve.models.config import DecoderConfig, RopeConfig
from pyserve.models.fields import Fields
from pyserve.models.rope import rope_from_config


def llama_shape(
    *,
    architecture: str,
    vocab_size: int,
    hidden_size: int,
    num_layers: int,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    intermediate_size: int,
    context_length: int,
    norm_eps: float,
    windows: tuple[int, ...],
    rope: RopeConfig,
    tie_embeddings: bool,
    bos_token_id: int | None,
    eos_token_ids: tuple[int, ...],
    qk_norm: bool = False,
) -> DecoderConfig:
    """The configuration that the Llama and Qwen families share but for these fields."""
    return DecoderConfig(
        architecture=architecture,
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        intermediate_size=intermediate_size,
        context_length=context_length,
        norm="rms",
        norm_eps=norm_eps,
        activation="silu",
        gated_mlp=True,
        qk_norm=qk_norm,
        post_norms=False,
        attention_scale=head_dim**-0.5,
        embedding_scale=1.0,
        layer_window=windows,
        layer_rope=(0,) * num_layers,
        ropes=(rope,),
        learned_positions=False,
        tie_embeddings=tie_embeddings,
        bos_token_id=bos_token_id,
        eos_token_ids=eos_token_ids,
    )


def llama_from_config(
    fields: Fields,
    *,
    architecture: str,
    windows: tuple[int, ...],
    head_dim: int | None = None,
    context_length: int = 2048,
    qk_norm: bool = False,
) -> DecoderConfig:
    """A config.json of the Llama or Qwen families; absent ``head_dim`` is ``hidden_size / heads``."""
    refuse_unless(fields, "hidden_act", "silu", "silu")
    hidden_size = fields.integer("hidden_size")
    num_heads = fields.integer("num_attention_heads")
    head_dim = fields.head_dim("head_dim", head_dim or hidden_size // max(1, num_heads))
    context_length = fields.integer("max_position_embeddings", context_length)
    return llama_shape(
        architecture=architecture,
        vocab_size=fields.integer("vocab_size"),
        hidden_size=hidden_size,
        num_layers=fields.num_layers("num_hidden_layers"),
        num_heads=num_heads,
        num_kv_heads=fields.integer("num_key_value_heads", num_heads),
        head_dim=head_dim,
        intermediate_size=fields.integer("intermediate_size"),
        context_length=context_length,
        norm_eps=fields.number("rms_norm_eps", 1e-6),
        windows=windows,
        rope=rope_from_config(fields, head_dim, context_length),
        tie_embeddings=fields.flag("tie_word_embeddings", False),
        bos_token_id=first_of(fields.token_ids("bos_token_id")),
        eos_token_ids=end_of_text(fields),
        qk_norm=qk_norm,
    )


def llama_from_gguf(
    header: GGUFHeader, *, architecture: str, qk_norm: bool = False
) -> DecoderConfig:
    """The same from GGUF metadata."""
    fields = header.fields
    num_layers = fields.num_layers("block_count")
    num_heads = fields.integer("attention.head_count")
    head_dim = gguf_head_dim(fields, num_heads)
    return llama_shape(
        architecture=architecture,
        vocab_size=header.vocab_size,
        hidden_size=fields.integer("embedding_length"),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=fields.integer("attention.head_count_kv", num_heads),
        head_dim=head_dim,
        intermediate_size=fields.integer("feed_forward_length"),
        context_length=fields.integer("context_length"),
        norm_eps=fields.number("attention.layer_norm_rms_epsilon"),
        windows=(fields.integer("attention.sliding_window", 0),) * num_layers,
        rope=gguf_rope(header, head_dim),
        tie_embeddings=header.tied,
        bos_token_id=header.bos_token_id,
        eos_token_ids=header.eos_token_ids,
        qk_norm=qk_norm,
    )


def _llama_config(fields: Fields) -> DecoderConfig:
    num_layers = fields.num_layers("num_hidden_layers")
    return llama_from_config(fields, architecture="llama", windows=(0,) * num_layers)


def _mistral_config(fields: Fields) -> DecoderConfig:
    # transformers: absent means 4096, null means no window.
    window = fields.integer("sliding_window", 0 if fields.is_null("sliding_window") else 4096)
    windows = (window,) * fields.num_layers("num_hidden_layers")
    return llama_from_config(fields, architecture="mistral", windows=windows, context_length=131072)


def _llama_gguf_config(header: GGUFHeader) -> DecoderConfig:
    refuse_unless(header.fields, "expert_count", 0, 0)
    return llama_from_gguf(header, architecture="llama")


def _half_rotation(tensor: Tensor, heads: int) -> list[Tensor]:
    """Undoes llama.cpp's interleaving of each head's rows, so that i pairs with i + head_dim / 2 again."""
    rows = tensor.shape[0]
    pairs = tensor.reshape(heads, rows // heads // 2, 2, *tensor.shape[1:])
    return [pairs.transpose(1, 2).reshape(tensor.shape)]


def _query_rows(tensor: Tensor, config: DecoderConfig) -> list[Tensor]:
    return _half_rotation(tensor, config.num_heads)


def _key_rows(tensor: Tensor, config: DecoderConfig) -> list[Tensor]:
    return _half_rotation(tensor, config.num_kv_heads)


HF_LAYER_RULES: tuple[Rule, ...] = (
    Rule("layers.{i}.input_layernorm.weight", ("layers.{i}.attn_norm.weight",)),
    *both("layers.{i}.self_attn.q_proj", "layers.{i}.q"),
    *both("layers.{i}.self_attn.k_proj", "layers.{i}.k"),
    *both("layers.{i}.self_attn.v_proj", "layers.{i}.v"),
    *both("layers.{i}.self_attn.o_proj", "layers.{i}.o"),
    Rule("layers.{i}.post_attention_layernorm.weight", ("layers.{i}.mlp_norm.weight",)),
    *both("layers.{i}.mlp.gate_proj", "layers.{i}.gate"),
    *both("layers.{i}.mlp.up_proj", "layers.{i}.up"),
    *both("layers.{i}.mlp.down_proj", "layers.{i}.down"),
)
HF_RULES: tuple[Rule, ...] = (
    Rule("embed_tokens.weight", ("embed.weight",)),
    Rule("norm.weight", ("final_norm.weight",)),
    Rule("lm_head.weight", ("lm_head.weight",)),
    *HF_LAYER_RULES,
)
GGUF_OUTER_RULES: tuple[Rule, ...] = (
    Rule("token_embd.weight", ("embed.weight",)),
    *both("output_norm", "final_norm"),
    Rule("output.weight", ("lm_head.weight",)),
)
GGUF_MLP_RULES: tuple[Rule, ...] = (
    *both("blk.{i}.ffn_gate", "layers.{i}.gate"),
    *both("blk.{i}.ffn_up", "layers.{i}.up"),
    *both("blk.{i}.ffn_down", "layers.{i}.down"),
)

LLAMA = Architecture(
    title="Llama",
    huggingface=HuggingFaceFormat(("llama",), _llama_config, HF_RULES),
    gguf=GGUFFormat(
        ("llama",),
        _llama_gguf_config,
        (
            *GGUF_OUTER_RULES,
            Rule("blk.{i}.attn_norm.weight", ("layers.{i}.attn_norm.weight",)),
            *both("blk.{i}.attn_q", "layers.{i}.q", _query_rows),
            *both("blk.{i}.attn_k", "layers.{i}.k", _key_rows),
            *both("blk.{i}.attn_v", "layers.{i}.v"),
            *both("blk.{i}.attn_output", "layers.{i}.o"),
            Rule("blk.{i}.ffn_norm.weight", ("layers.{i}.mlp_norm.weight",)),
            *GGUF_MLP_RULES,
        ),
    ),
)
# A GGUF of Mistral calls itself llama.
MISTRAL = Architecture(
    title="Mistral",
    huggingface=HuggingFaceFormat(("mistral",), _mistral_config, HF_RULES),
    gguf=GGUFFormat((), _llama_gguf_config, LLAMA.gguf.rules),
)
