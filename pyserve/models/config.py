"""The shape of a decoder-only model, in the words that the compiled forward pass understands.

Every architecture that pyserve supports is one :class:`DecoderConfig`: checkpoint readers translate theirs
into it, together with canonical weight names (listed on the class).
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Literal


@dataclass(frozen=True)
class RopeConfig:
    """One rotary embedding: element ``i`` pairs with element ``i + head_dim / 2`` (NEOX layout), always.

    ``inv_freq`` holds ``head_dim / 2`` angular frequencies, in radians per position, any context scaling
    (linear, Llama 3, YaRN) already applied; ``attention_factor`` multiplies cos and sin (YaRN).
    """

    inv_freq: tuple[float, ...]
    attention_factor: float = 1.0


@dataclass(frozen=True)
class DecoderConfig:
    """A decoder's shape and variations.

    Linear weights are ``[out, in]``. Names: ``embed.weight``, ``positions.weight`` (with
    ``learned_positions``), ``layers.{i}.attn_norm.{weight,bias}``, ``layers.{i}.{q,k,v,o}.{weight,bias}``,
    ``layers.{i}.{q_norm,k_norm}.weight`` (with ``qk_norm``; ``[head_dim]``),
    ``layers.{i}.attn_post_norm.weight`` and ``layers.{i}.mlp_post_norm.weight`` (with ``post_norms``),
    ``layers.{i}.mlp_norm.{weight,bias}``, ``layers.{i}.{gate,up,down}.{weight,bias}`` (``gate`` with
    ``gated_mlp``), ``final_norm.{weight,bias}``, ``lm_head.weight`` (without ``tie_embeddings``). Biases of
    linear layers are optional; norms have one exactly when ``norm`` is "layer".

    ``layer_window[i]`` is 0 for full attention, else w: key j is visible to query i iff ``i - w < j <= i``.
    ``layer_rope[i]`` indexes ``ropes``, -1 means none. Norm weights are applied as they are (Gemma's
    ``1 + w`` is folded in when the checkpoint is read). ``context_length`` is in tokens.

    Raises ValueError when the fields do not fit together.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    context_length: int
    norm: Literal["rms", "layer"]
    norm_eps: float
    activation: Literal["silu", "gelu_tanh"]
    gated_mlp: bool
    qk_norm: bool
    post_norms: bool
    attention_scale: float
    embedding_scale: float
    layer_window: tuple[int, ...]
    layer_rope: tuple[int, ...]
    ropes: tuple[RopeConfig, ...]
    learned_positions: bool
    tie_embeddings: bool
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]

    def __post_init__(self) -> None:
        for name in (
            "vocab_size",
            "hidden_size",
            "num_layers",
            "num_heads",
            "num_kv_heads",
            "head_dim",
            "intermediate_size",
            "context_length",
        ):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name} must be positive, got {getattr(self, name)}")
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_heads {self.num_heads} is not a multiple of num_kv_heads {self.num_kv_heads}"
            )
        if len(self.layer_window) != self.num_layers or len(self.layer_rope) != self.num_layers:
            raise ValueError("layer_window and layer_rope need one entry per layer")
        if any(w < 0 for w in self.layer_window):
            raise ValueError("a layer_window is negative")
        if any(not -1 <= r < len(self.ropes) for r in self.layer_rope):
            raise ValueError("a layer_rope names a rope that is not in ropes")
        if any(2 * len(rope.inv_freq) != self.head_dim for rope in self.ropes):
            raise ValueError(f"inv_freq needs head_dim / 2 = {self.head_dim / 2} entries")

    @property
    def q_size(self) -> int:
        """Width of all query heads together."""
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Width of all key (or value) heads together."""
        return self.num_kv_heads * self.head_dim

    def kv_bytes_per_token(self, element_size: int, scale_size: int = 0) -> int:
        """Bytes that one token's keys and values take in all layers, at ``element_size`` bytes each, and
        ``scale_size`` more for each head's keys, and values."""
        heads = 2 * self.num_layers * self.num_kv_heads
        return heads * (self.head_dim * element_size + scale_size)

    def as_dict(self) -> dict[str, object]:
        """Plain dict of every field, nested ropes too: what ``pyserve._C.Decoder`` takes."""
        return asdict(self)
