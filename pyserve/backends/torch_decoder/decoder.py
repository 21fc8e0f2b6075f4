"""The forward pass: the layers of csrc/model/decoder.cpp on torch tensors, on any device.

The residual stream is float32, whatever the compute type is, as in the native decoder.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

import pyserve._C  # noqa: F401  (registers torch.ops.pyserve)
from pyserve.backends.torch_decoder.attention import (
    Sequences,
    has_varlen,
    plain_attention,
    varlen_attention,
)
from pyserve.backends.torch_decoder.weights import Layer, Linear, Norm, Weights
from pyserve.models.config import DecoderConfig, RopeConfig

_ACTIVATIONS = {"silu": 0, "gelu_tanh": 1}


@dataclass(frozen=True, slots=True)
class Pages:
    """The KV cache: ``keys`` and ``values`` of each layer, ``[blocks, block_size, kv_heads, head_dim]``."""

    keys: tuple[Tensor, ...]
    values: tuple[Tensor, ...]

    @property
    def block_size(self) -> int:
        """Tokens a page holds."""
        return int(self.keys[0].shape[1])


class TorchDecoder:
    """Weights on a device, and the steps through them."""

    def __init__(
        self, config: DecoderConfig, weights: Weights, device: torch.device, dtype: torch.dtype
    ) -> None:
        self.config = config
        self.weights = weights
        self.device = device
        self.dtype = dtype
        self.uses_varlen = has_varlen(device, dtype, config.head_dim)
        self._attend = varlen_attention if self.uses_varlen else plain_attention
        self._ropes = [_rope_table(r, config.context_length, device) for r in config.ropes]

    def allocate(self, num_blocks: int, block_size: int) -> Pages:
        """Empty pages for so many blocks, in the compute type."""
        shape = (num_blocks, block_size, self.config.num_kv_heads, self.config.head_dim)

        def pages() -> tuple[Tensor, ...]:
            return tuple(
                torch.zeros(shape, dtype=self.dtype, device=self.device)
                for _ in range(self.config.num_layers)
            )

        return Pages(pages(), pages())

    def forward(self, input_ids: Tensor, at: Sequences, pages: Pages) -> Tensor:
        """Writes the KV of all T tokens; returns the residual stream, float32 ``[T, hidden_size]``."""
        tokens = len(input_ids)
        positions, slots = torch.ops.pyserve.locate(
            at.cu_seqlens, at.context_lens, at.block_table, pages.block_size, tokens
        )
        residual = self._embed(input_ids, positions)
        addend: Tensor | None = None
        for i, layer in enumerate(self.weights.layers):
            normed = self._normalize(residual, addend, layer.attn_norm)
            addend = self._attention(i, normed, positions, slots, at, pages)
            addend = self._post_normalize(addend, layer.attn_post_norm)
            normed = self._normalize(residual, addend, layer.mlp_norm)
            addend = self._post_normalize(self._mlp(layer, normed), layer.mlp_post_norm)
        return residual if addend is None else residual.add_(addend)

    def logits(self, residual: Tensor) -> Tensor:
        """float32 ``[rows, vocab_size]`` of the rows of a residual stream."""
        normed = self._normalize(residual.contiguous(), None, self.weights.final_norm)
        return Linear(self.weights.head, None)(normed).float()

    def hidden(self, residual: Tensor) -> Tensor:
        """float32 ``[rows, hidden_size]``: the same rows after the final norm."""
        norm = self.weights.final_norm
        return self._normalize(residual.contiguous(), None, norm, dtype=torch.float32)

    def _embed(self, input_ids: Tensor, positions: Tensor) -> Tensor:
        embedded = torch.nn.functional.embedding(input_ids, self.weights.embed).float()
        if self.config.embedding_scale != 1.0:
            embedded *= self.config.embedding_scale
        if self.weights.positions is not None:
            embedded += torch.nn.functional.embedding(positions, self.weights.positions)
        return embedded

    def _normalize(
        self, x: Tensor, addend: Tensor | None, norm: Norm, dtype: torch.dtype | None = None
    ) -> Tensor:
        """Adds ``addend`` to ``x``, in place, and norms the sum."""
        normed: Tensor = torch.ops.pyserve.normalize(
            x, addend, norm.weight, norm.bias, self.config.norm_eps, dtype or self.dtype
        )
        return normed

    def _post_normalize(self, sublayer: Tensor, norm: Norm | None) -> Tensor:
        return sublayer if norm is None else self._normalize(sublayer, None, norm)

    def _attention(
        self, i: int, x: Tensor, positions: Tensor, slots: Tensor, at: Sequences, pages: Pages
    ) -> Tensor:
        config, layer = self.config, self.weights.layers[i]
        keys, values = pages.keys[i], pages.values[i]
        rope = config.layer_rope[i]
        qkv = layer.qkv(x)
        torch.ops.pyserve.place_heads(
            qkv,
            keys,
            values,
            positions,
            slots,
            None if rope < 0 else self._ropes[rope],
            layer.q_norm,
            layer.k_norm,
            config.norm_eps,
            config.num_heads,
        )
        queries = qkv[:, : config.q_size].view(-1, config.num_heads, config.head_dim)
        attended = torch.empty(queries.shape, dtype=qkv.dtype, device=qkv.device)
        scale, window = config.attention_scale, config.layer_window[i]
        self._attend(attended, queries, keys, values, at, scale, window)
        return layer.o(attended.flatten(1))

    def _mlp(self, layer: Layer, x: Tensor) -> Tensor:
        kind = _ACTIVATIONS[self.config.activation]
        inner = torch.ops.pyserve.activate(layer.gate_up(x), self.config.gated_mlp, kind)
        return layer.down(inner)


def _rope_table(rope: RopeConfig, positions: int, device: torch.device) -> Tensor:
    """float32 ``[positions, head_dim]``: cosines, then sines, of angles rounded to float32 as in the native
    decoder."""
    at = torch.arange(positions, dtype=torch.float32)
    angles = (at[:, None] * torch.tensor(rope.inv_freq, dtype=torch.float32)).double()
    table = torch.cat([angles.cos(), angles.sin()], dim=1).float()
    return (table * rope.attention_factor).to(device)
