"""Gemma 3, the text part: local and global layers, norms before and after, scaled embeddings.

Hugging Face stores each norm weight as its difference from one, GGUF as it is applied; here it is always
as applied.
"""

from __future__ import annotations

from torch import Tensor

from pyserve.errors import ModelError
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
from pyserve.models.architectures.llama import (
    GGUF_MLP_RULES,
    GGUF_OUTER_RULES,
    HF_LAYER_RULES,
)
from pyserve.models.architectures.qwen import GGUF_QK_NORM_RULES, HF_QK_NORM_RULES
from pyserve.models.architectures.weights import Rule, both
from pyserve.models.config import DecoderConfig, RopeConfig
from pyserve.models.fields import Fields
from pyserve.models.rope import make_rope

_GLOBAL, _LOCAL = 0, 1  # indices into DecoderConfig.ropes
_GLOBAL_THETA, _LOCAL_THETA = 1_000_000.0, 10_000.0
_PATTERN = 6  # every sixth layer is global
_LAYERS_OF_27B = 62  # the one size whose attention scale GGUF metadata does not tell


def _shape(
    *,
    vocab_size: int,
    hidden_size: int,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    intermediate_size: int,
    context_length: int,
    norm_eps: float,
    attention_scale: float,
    windows: tuple[int, ...],
    is_local: tuple[bool, ...],
    ropes: tuple[RopeConfig, RopeConfig],
    tie_embeddings: bool,
    bos_token_id: int | None,
    eos_token_ids: tuple[int, ...],
) -> DecoderConfig:
    return DecoderConfig(
        architecture="gemma3",
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        num_layers=len(windows),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        intermediate_size=intermediate_size,
        context_length=context_length,
        norm="rms",
        norm_eps=norm_eps,
        activation="gelu_tanh",
        gated_mlp=True,
        qk_norm=True,
        post_norms=True,
        attention_scale=attention_scale,
        embedding_scale=hidden_size**0.5,
        layer_window=windows,
        layer_rope=tuple(_LOCAL if local else _GLOBAL for local in is_local),
        ropes=ropes,
        learned_positions=False,
        tie_embeddings=tie_embeddings,
        bos_token_id=bos_token_id,
        eos_token_ids=eos_token_ids,
    )


def _text_fields(fields: Fields) -> Fields:
    """The language model's own settings, also where they are nested beside a vision model's."""
    nested = fields.mapping("text_config")
    if nested is None:
        return fields
    outer = ("eos_token_id", "bos_token_id", "generation_eos_token_id", "tie_word_embeddings")
    merged = {key: fields.raw(key) for key in outer if fields.has(key)}
    return Fields({**nested, **merged}, fields.where)


def _is_local(fields: Fields, num_layers: int) -> tuple[bool, ...]:
    types = fields.strings("layer_types")
    if types is not None:
        return tuple(kind == "sliding_attention" for kind in types)
    pattern = fields.integer("sliding_window_pattern", _PATTERN)
    if pattern <= 0:
        raise ModelError(f"{fields.where}: sliding_window_pattern is {pattern}")
    return tuple((i + 1) % pattern != 0 for i in range(num_layers))


def _ropes(fields: Fields, head_dim: int, context_length: int) -> tuple[RopeConfig, RopeConfig]:
    """(global, local), from transformers 5's ``rope_parameters`` per layer type or from the older keys."""
    nested = Fields(fields.mapping("rope_parameters") or {}, fields.where)
    older = (
        (fields.mapping("rope_scaling"), fields.number("rope_theta", _GLOBAL_THETA)),
        (None, fields.number("rope_local_base_freq", _LOCAL_THETA)),
    )
    made = []
    for kind, (scaling, theta) in zip(("full_attention", "sliding_attention"), older, strict=True):
        own = nested.mapping(kind) or {}
        made.append(
            make_rope(
                head_dim,
                Fields(own, fields.where).number("rope_theta", theta),
                {**own, **(scaling or {})},
                context_length=context_length,
                where=fields.where,
            )
        )
    return made[0], made[1]


def _config(outer: Fields) -> DecoderConfig:
    fields = _text_fields(outer)
    refuse_unless(fields, "hidden_activation", "gelu_pytorch_tanh", "gelu_pytorch_tanh")
    for key in ("final_logit_softcapping", "attn_logit_softcapping"):
        refuse_unless(fields, key, None, None)
    refuse_unless(fields, "use_bidirectional_attention", False, False)
    num_layers = fields.num_layers("num_hidden_layers", 26)
    hidden_size = fields.integer("hidden_size", 2304)
    head_dim = fields.head_dim("head_dim", 256)
    context_length = fields.integer("max_position_embeddings", 131072)
    is_local = _is_local(fields, num_layers)
    window = fields.integer("sliding_window", 4096)
    return _shape(
        vocab_size=fields.integer("vocab_size", 262208),
        hidden_size=hidden_size,
        num_heads=fields.integer("num_attention_heads", 8),
        num_kv_heads=fields.integer("num_key_value_heads", 4),
        head_dim=head_dim,
        intermediate_size=fields.integer("intermediate_size", 9216),
        context_length=context_length,
        norm_eps=fields.number("rms_norm_eps", 1e-6),
        attention_scale=fields.integer("query_pre_attn_scalar", 256) ** -0.5,
        windows=tuple(window if local else 0 for local in is_local),
        is_local=is_local,
        ropes=_ropes(fields, head_dim, context_length),
        tie_embeddings=fields.flag("tie_word_embeddings", True),
        bos_token_id=first_of(fields.token_ids("bos_token_id")),
        eos_token_ids=end_of_text(fields),
    )


def _gguf_config(header: GGUFHeader) -> DecoderConfig:
    fields = header.fields
    if fields.number("final_logit_softcapping", 0.0) != 0.0:
        raise ModelError(f"{fields.where}: final_logit_softcapping is not supported")
    num_layers = fields.num_layers("block_count")
    hidden_size = fields.integer("embedding_length")
    num_heads = fields.integer("attention.head_count")
    head_dim = gguf_head_dim(fields, num_heads)
    window = fields.integer("attention.sliding_window", 0)
    is_local = _gguf_is_local(fields, num_layers) if window else (False,) * num_layers
    scaled_width = hidden_size // num_heads if num_layers == _LAYERS_OF_27B else head_dim
    local_theta = fields.number("rope.freq_base_swa", _LOCAL_THETA)
    context_length = fields.integer("context_length")
    local_rope = make_rope(head_dim, local_theta, context_length=context_length, where=fields.where)
    return _shape(
        vocab_size=header.vocab_size,
        hidden_size=hidden_size,
        num_heads=num_heads,
        num_kv_heads=fields.integer("attention.head_count_kv", num_heads),
        head_dim=head_dim,
        intermediate_size=fields.integer("feed_forward_length"),
        context_length=context_length,
        norm_eps=fields.number("attention.layer_norm_rms_epsilon"),
        attention_scale=scaled_width**-0.5,
        windows=tuple(window if local else 0 for local in is_local),
        is_local=is_local,
        ropes=(gguf_rope(header, head_dim, default_theta=_GLOBAL_THETA), local_rope),
        tie_embeddings=header.tied,
        bos_token_id=header.bos_token_id,
        eos_token_ids=header.eos_token_ids,
    )


def _gguf_is_local(fields: Fields, num_layers: int) -> tuple[bool, ...]:
    pattern = fields.raw("attention.sliding_window_pattern", _PATTERN)
    if isinstance(pattern, list):
        return tuple(bool(local) for local in pattern)
    if not isinstance(pattern, int) or pattern <= 0:
        raise ModelError(f"{fields.where}: attention.sliding_window_pattern is {pattern!r}")
    return tuple((i + 1) % pattern != 0 for i in range(num_layers))


def _one_plus(tensor: Tensor, _: DecoderConfig) -> list[Tensor]:
    """In float32, as transformers applies it: 1 + w in bfloat16 would lose most of w."""
    return [1.0 + tensor.float()]


_RENAMED_NORMS = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "attn_post_norm",
    "pre_feedforward_layernorm": "mlp_norm",
    "post_feedforward_layernorm": "mlp_post_norm",
    "self_attn.q_norm": "q_norm",
    "self_attn.k_norm": "k_norm",
}
_HF_RULES: tuple[Rule, ...] = (
    Rule("embed_tokens.weight", ("embed.weight",)),
    Rule("norm.weight", ("final_norm.weight",), _one_plus),
    Rule("lm_head.weight", ("lm_head.weight",)),
    *(
        Rule(f"layers.{{i}}.{theirs}.weight", (f"layers.{{i}}.{ours}.weight",), _one_plus)
        for theirs, ours in _RENAMED_NORMS.items()
    ),
    *(rule for rule in (*HF_LAYER_RULES, *HF_QK_NORM_RULES) if "norm" not in rule.source),
)
_GGUF_RULES: tuple[Rule, ...] = (
    *GGUF_OUTER_RULES,
    Rule("blk.{i}.attn_norm.weight", ("layers.{i}.attn_norm.weight",)),
    *both("blk.{i}.attn_q", "layers.{i}.q"),
    *both("blk.{i}.attn_k", "layers.{i}.k"),
    *both("blk.{i}.attn_v", "layers.{i}.v"),
    *both("blk.{i}.attn_output", "layers.{i}.o"),
    *GGUF_QK_NORM_RULES,
    Rule("blk.{i}.post_attention_norm.weight", ("layers.{i}.attn_post_norm.weight",)),
    Rule("blk.{i}.ffn_norm.weight", ("layers.{i}.mlp_norm.weight",)),
    *GGUF_MLP_RULES,
    Rule("blk.{i}.post_ffw_norm.weight", ("layers.{i}.mlp_post_norm.weight",)),
)

GEMMA3 = Architecture(
    title="Gemma 3",
    huggingface=HuggingFaceFormat(
        ("gemma3_text", "gemma3"),
        _config,
        _HF_RULES,
        prefixes=("model.language_model.", "language_model.model.", "language_model.", "model."),
        ignored=r"rotary_emb\.inv_freq$|^vision_tower\.|^multi_modal_projector\.",
    ),
    gguf=GGUFFormat(("gemma3",), _gguf_config, _GGUF_RULES),
)
