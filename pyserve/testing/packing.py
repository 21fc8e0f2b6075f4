"""Steps packed by hand, for testing a back-end without a scheduler."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

NO_ROWS = torch.empty(0, dtype=torch.int32)


@dataclass(slots=True)
class HandPackedStep:
    """A :class:`~pyserve.backends.base.PackedStep` whose tensors are its own, to change at will."""

    input_ids: Tensor
    positions: Tensor
    cu_seqlens: Tensor
    context_lens: Tensor
    slot_mapping: Tensor
    block_table: Tensor
    sample_seq: Tensor
    logit_rows: Tensor


def pack_by_hand(
    *shares: tuple[Sequence[int], int, Sequence[int]], block_size: int
) -> HandPackedStep:
    """Packs a step; each share is a sequence's new tokens, how many came before them, and its blocks.

    Logits are wanted for every sequence's last token. Block tables are padded with block 0.
    """
    ids: list[int] = []
    positions: list[int] = []
    slots: list[int] = []
    starts = [0]
    lengths = []
    for tokens, before, blocks in shares:
        where = range(before, before + len(tokens))
        ids.extend(tokens)
        positions.extend(where)
        slots.extend(blocks[p // block_size] * block_size + p % block_size for p in where)
        starts.append(len(ids))
        lengths.append(before + len(tokens))
    width = max(len(blocks) for _, _, blocks in shares)
    table = [[*blocks, *[0] * (width - len(blocks))] for _, _, blocks in shares]
    return HandPackedStep(
        input_ids=_int32(ids),
        positions=_int32(positions),
        cu_seqlens=_int32(starts),
        context_lens=_int32(lengths),
        slot_mapping=_int32(slots),
        block_table=_int32(table),
        sample_seq=_int32(range(len(shares))),
        logit_rows=_int32([end - 1 for end in starts[1:]]),
    )


def _int32(values: Sequence[int] | Sequence[list[int]]) -> Tensor:
    return torch.tensor(list(values), dtype=torch.int32)
