"""What GGUF metadata says alike for every architecture: rotary positions, head size."""

from __future__ import annotations

import torch

from pyserve.errors import ModelError
from pyserve.models.architectures.base import GGUFHeader
from pyserve.models.config import RopeConfig
from pyserve.models.fields import Fields
from pyserve.models.rope import make_rope


def gguf_head_dim(fields: Fields, num_heads: int) -> int:
    """The size of a head; keys, values and rotary positions must agree on it."""
    head_dim = fields.head_dim(
        "attention.key_length", fields.integer("embedding_length") // max(1, num_heads)
    )
    for key in ("attention.value_length", "rope.dimension_count"):
        if fields.head_dim(key, head_dim) != head_dim:
            raise ModelError(
                f"{fields.where}: {key} differs from the head size {head_dim}; not supported"
            )
    return head_dim


def gguf_rope(header: GGUFHeader, head_dim: int, default_theta: float = 10000.0) -> RopeConfig:
    """The rotary embedding, scaled as ``rope.scaling.*`` and the rope_freqs tensor say."""
    fields = header.fields
    kind = fields.text("rope.scaling.type", "none")
    factor = fields.number("rope.scaling.factor", fields.number("rope.scale_linear", 1.0))
    scaling: dict[str, object] = {"rope_type": kind, "factor": factor}
    if kind == "none":
        scaling["rope_type"] = "default"
    for ours, theirs in (
        ("original_max_position_embeddings", "original_context_length"),
        ("beta_fast", "yarn_beta_fast"),
        ("beta_slow", "yarn_beta_slow"),
    ):
        scaling[ours] = fields.raw(f"rope.scaling.{theirs}")
    rope = make_rope(
        head_dim,
        fields.number("rope.freq_base", default_theta),
        scaling,
        context_length=fields.integer("context_length"),
        where=fields.where,
    )
    if header.rope_factors is None:
        return rope
    if len(header.rope_factors) != len(rope.inv_freq) or 0 in header.rope_factors:
        raise ModelError(f"{fields.where}: rope_freqs.weight does not fit the head size {head_dim}")
    scaled = torch.tensor(rope.inv_freq) / torch.tensor(header.rope_factors)
    return RopeConfig(tuple(scaled.tolist()), rope.attention_factor)
