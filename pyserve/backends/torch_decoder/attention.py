"""Causal attention of a step's queries over paged keys and values."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn_out

PAGE_MULTIPLE = 256
"""torch's paged kernel (FlashAttention 2) takes pages of a multiple of so many tokens."""


@dataclass(frozen=True, slots=True)
class Sequences:
    """Whose queries attend to what, all int32 on the device.

    Sequence s has queries ``[cu_seqlens[s], cu_seqlens[s + 1])``, the last of the ``context_lens[s]``
    positions that ``block_table[s]``'s pages hold. ``max_queries`` and ``max_context`` are upper bounds
    over the sequences.
    """

    cu_seqlens: Tensor
    context_lens: Tensor
    block_table: Tensor
    max_queries: int
    max_context: int


def has_varlen(device: torch.device, dtype: torch.dtype, head_dim: int) -> bool:
    """Whether torch's paged attention can run: else it is plain attention, sequence by sequence."""
    half = dtype in (torch.bfloat16, torch.float16)
    return device.type == "cuda" and half and head_dim % 8 == 0 and head_dim <= 256


def varlen_attention(
    out: Tensor, q: Tensor, keys: Tensor, values: Tensor, at: Sequences, scale: float, window: int
) -> None:
    """Attention by ``torch.nn.attention.varlen``; ``out`` and ``q [T, heads, dim]``, ``keys`` and ``values``
    ``[pages, page_size, kv_heads, dim]``. ``window`` 0 is full, else key j is visible iff ``i - w < j <= i``.

    Key lengths come from ``seqused_k``; the kernel wants a cumulative tensor for them all the same, and does
    not read it where there are pages. One split of the keys, always: their number would otherwise depend on
    the longest sequence of the batch, and with it the bits. The right bound of 0 stays for single queries
    too: without it torch 2.13 would regroup the heads in a copy of ``out``.
    """
    varlen_attn_out(
        out,
        q,
        keys,
        values,
        at.cu_seqlens,
        at.cu_seqlens,
        at.max_queries,
        at.max_context,
        scale=scale,
        window_size=(window - 1 if window else -1, 0),
        enable_gqa=True,
        seqused_k=at.context_lens,
        block_table=at.block_table,
        num_splits=1,
    )


def plain_attention(
    out: Tensor, q: Tensor, keys: Tensor, values: Tensor, at: Sequences, scale: float, window: int
) -> None:
    """The same on any device and dtype, sequence by sequence; waits for the device."""
    starts, lengths = at.cu_seqlens.tolist(), at.context_lens.tolist()
    page_size = keys.shape[1]
    for s, length in enumerate(lengths):
        begin, end = starts[s], starts[s + 1]
        if begin == end:
            continue
        pages = at.block_table[s, : -(-length // page_size)].long()
        k, v = (pool[pages].flatten(0, 1)[:length] for pool in (keys, values))
        key = torch.arange(length, device=q.device)
        position = key[length - (end - begin) :, None]
        visible = key <= position
        if window:
            visible &= key > position - window
        query_heads, key_heads, value_heads = (
            t.transpose(0, 1)[None] for t in (q[begin:end], k, v)
        )
        attended = torch.nn.functional.scaled_dot_product_attention(
            query_heads,
            key_heads,
            value_heads,
            attn_mask=visible,
            scale=scale,
            enable_gqa=True,
        )
        out[begin:end] = attended[0].transpose(0, 1)
