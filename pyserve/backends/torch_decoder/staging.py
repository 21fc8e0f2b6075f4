"""Steps on their way to the device: checked, laid out as one run of int32 words, copied at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from pyserve.backends.base import PackedStep
from pyserve.backends.torch_decoder.attention import Sequences
from pyserve.models.config import DecoderConfig


class Staging:
    """One host buffer, pinned for CUDA, and its counterpart on the device; grows as it must.

    The device's words are valid until the next :meth:`send`, in stream order.
    """

    def __init__(self, device: torch.device, words: int = 0) -> None:
        self._device = device
        self._pinned = device.type == "cuda"
        self._copied: torch.cuda.Event | None = None
        if self._pinned:
            self._copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._grow(words)

    def host(self, words: int) -> Tensor:
        """Room for that many words to write; waits until the last copy has left it."""
        if self._copied is not None:
            self._copied.synchronize()
        if words > len(self._host):
            self._grow(2 * words)
        return self._host[:words]

    def send(self, words: int) -> Tensor:
        """Starts the copy of what was written; returns the device's words."""
        there = self.device_words[:words]
        there.copy_(self._host[:words], non_blocking=True)
        if self._copied is not None:
            self._copied.record()
        return there

    def _grow(self, words: int) -> None:
        self._host = torch.zeros(words, dtype=torch.int32, pin_memory=self._pinned)
        self.device_words = torch.zeros(words, dtype=torch.int32, device=self._device)


@dataclass(frozen=True, slots=True)
class DeviceStep:
    """A step on the device; ``logit_rows`` and ``hidden_rows`` index its T tokens."""

    input_ids: Tensor
    sequences: Sequences
    logit_rows: Tensor
    hidden_rows: Tensor


def stage(staging: Staging, packed: PackedStep, hidden_rows: Tensor, block_size: int) -> DeviceStep:
    """Brings a step over in one copy. Positions and slots stay behind: the device finds them itself."""
    parts = (
        packed.input_ids,
        packed.cu_seqlens,
        packed.context_lens,
        packed.block_table,
        packed.logit_rows,
        hidden_rows,
    )
    sizes = [part.numel() for part in parts]
    torch.cat([part.flatten() for part in parts], out=staging.host(sum(sizes)))
    ids, starts, lengths, table, logit_rows, hidden = staging.send(sum(sizes)).split_with_sizes(
        sizes
    )
    table = table.view(packed.block_table.shape)
    queries = int(packed.cu_seqlens.diff().max()) if len(packed.context_lens) else 0
    context = table.shape[1] * block_size
    return DeviceStep(ids, Sequences(starts, lengths, table, queries, context), logit_rows, hidden)


def check_step(
    packed: PackedStep, hidden_rows: Tensor, config: DecoderConfig, num_blocks: int, block_size: int
) -> None:
    """Raises ValueError where the device would read or write beyond its arrays."""
    tokens, sequences = len(packed.input_ids), len(packed.context_lens)
    starts = packed.cu_seqlens
    if len(starts) != sequences + 1 or int(starts[0]) != 0 or int(starts[-1]) != tokens:
        raise ValueError("cu_seqlens must run from 0 to the number of tokens")
    if len(packed.block_table) != sequences:
        raise ValueError("context_lens and block_table differ in length")
    _check_range(packed.input_ids, 0, config.vocab_size, "input_ids")
    _check_range(packed.block_table, 0, num_blocks, "block_table")
    _check_range(packed.logit_rows, 0, tokens, "logit_rows")
    _check_range(hidden_rows, 0, tokens, "hidden_rows")
    takes = starts.diff()
    _check_range(takes, 0, tokens + 1, "tokens of a sequence")
    room = min(config.context_length, packed.block_table.shape[1] * block_size)
    _check_range(packed.context_lens, 0, room + 1, "context_lens")
    if sequences and bool((packed.context_lens < takes).any()):
        raise ValueError("a sequence has more tokens than context")


def _check_range(values: Tensor, low: int, high: int, name: str) -> None:
    if values.numel() == 0:
        return
    least, most = (int(v) for v in values.aminmax())
    if least < low or most >= high:
        raise ValueError(f"{name} hold {least} to {most}, outside [{low}, {high})")


def pad_decode(into: Tensor, packed: PackedStep, size: int, width: int, scratch_block: int) -> None:
    """Lays a step of one token a sequence out as :func:`split_decode` reads it, padded to ``size`` rows.

    A row of padding is a sequence of one token in the scratch block, which belongs to nobody.
    """
    ids, lengths, table = split_decode(into, size, width)
    rows, columns = packed.block_table.shape
    ids[:rows] = packed.input_ids
    ids[rows:] = 0
    lengths[:rows] = packed.context_lens
    lengths[rows:] = 1
    table[:rows, :columns] = packed.block_table
    table[:rows, columns:] = scratch_block
    table[rows:] = scratch_block


def split_decode(words: Tensor, size: int, width: int) -> Sequence[Tensor]:
    """``input_ids [size]``, ``context_lens [size]`` and ``block_table [size, width]`` of a padded step."""
    ids, lengths, table = words[: decode_words(size, width)].split_with_sizes(
        [size, size, size * width]
    )
    return ids, lengths, table.view(size, width)


def decode_words(size: int, width: int) -> int:
    """Words of a padded decode step."""
    return size * (2 + width)
