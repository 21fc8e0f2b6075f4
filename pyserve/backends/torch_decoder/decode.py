"""Decode steps at padded sizes, on CUDA each captured as a graph; and the next one started ahead.

A step of one token a sequence is padded to the next of :data:`SIZES`, so that its tensors lie where the
graph of that size expects them. On the CPU the same padded step runs eagerly, which is how it is tested.

When a step's tokens have been drawn, the next step can start before the engine asks for it: the device
knows the tokens, and everything else goes up by one. It runs while the engine routes, plans and packs.
If the step that the engine then asks for is the one that was started (compared in full: tokens, lengths,
blocks) or some rows of it, its logits are there. If not, it is forgotten: what it wrote are slots that lie
beyond every sequence's context, and whoever gets such a slot writes it again before it is read.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from pyserve.backends.base import PackedStep
from pyserve.backends.torch_decoder.attention import Sequences
from pyserve.backends.torch_decoder.decoder import Pages, TorchDecoder
from pyserve.backends.torch_decoder.staging import Staging, decode_words, pad_decode, split_decode

SIZES = (1, 2, 4, 8, 16, 32, 64)


class _Padded:
    """The fixed tensors of one size, and its graph once there is one."""

    def __init__(
        self, size: int, width: int, block_size: int, scratch_block: int, device: torch.device
    ) -> None:
        self.size = size
        self.staging = Staging(device, decode_words(size, width))
        self.input_ids, lengths, table = split_decode(self.staging.device_words, size, width)
        lengths.fill_(1)  # padding all of it, until a step comes
        table.fill_(scratch_block)
        starts = torch.arange(size + 1, dtype=torch.int32, device=device)
        self.sequences = Sequences(starts, lengths, table, 1, width * block_size)
        self.graph: torch.cuda.CUDAGraph | None = None
        self.logits = torch.empty(0)


@dataclass(frozen=True, slots=True)
class _Inputs:
    """A decode step on the host, as it was run: int32 ``[S]``, ``[S]`` and ``[S, B]``."""

    input_ids: Tensor
    context_lens: Tensor
    block_table: Tensor


@dataclass(frozen=True, slots=True)
class _Run:
    padded: _Padded
    inputs: _Inputs

    @property
    def logits(self) -> Tensor:
        return self.padded.logits[: len(self.inputs.input_ids)]


@dataclass(frozen=True, slots=True)
class DecodeStatistics:
    """Steps run at a padded size; started ahead; and, of those, asked for."""

    steps: int = 0
    ahead: int = 0
    ahead_used: int = 0


class PaddedDecode:
    """Decode steps of a decoder. ``pages`` end with a scratch block, ``max_blocks`` a sequence's most."""

    def __init__(self, decoder: TorchDecoder, pages: Pages, max_blocks: int) -> None:
        self._statistics = DecodeStatistics()
        self._decoder = decoder
        self._pages = pages
        self._width = max_blocks
        self._scratch = len(pages.keys[0]) - 1
        self._padded: dict[int, _Padded] = {}
        self._last: _Run | None = None
        self._ahead: _Run | None = None
        self._pool: Any = None

    def fits(self, packed: PackedStep) -> bool:
        """Whether the step takes one token of each sequence and wants all logits, and is not too large."""
        rows = len(packed.context_lens)
        is_decode = len(packed.input_ids) == rows == len(packed.logit_rows)
        return is_decode and 0 < rows <= SIZES[-1] and packed.block_table.shape[1] <= self._width

    def run(self, packed: PackedStep) -> Tensor:
        """Logits float32 ``[S, vocab_size]`` on the device, valid until the next step."""
        self._count(steps=1)
        if (logits := self._started_ahead(packed)) is not None:
            return logits
        rows = len(packed.context_lens)
        size = next(size for size in SIZES if size >= rows)
        padded = self._of_size(size)
        words = decode_words(size, self._width)
        pad_decode(padded.staging.host(words), packed, size, self._width, self._scratch)
        padded.staging.send(words)
        self._compute(padded)
        kept = (t.clone() for t in (packed.input_ids, packed.context_lens, packed.block_table))
        self._last = _Run(padded, _Inputs(*kept))
        return self._last.logits

    def statistics(self) -> DecodeStatistics:
        """So far."""
        return self._statistics

    def capture(self) -> None:
        """Captures the graphs of all sizes, the largest first, so that no step waits for it."""
        if self._decoder.uses_varlen:
            for size in reversed(SIZES):
                self._capture(self._of_size(size))

    def forget(self) -> None:
        """Another kind of step comes: nothing started ahead is of use."""
        self._last = self._ahead = None

    def start_ahead(self, logits: Tensor, drawn: Tensor, tokens: Tensor) -> None:
        """Starts the step that follows from ``drawn`` int32 ``[S]`` (on the device; ``tokens`` on the host),
        if ``logits`` are the last step's and every sequence's next slot is known."""
        last, self._last = self._last, None
        if last is None or logits.shape != last.logits.shape:
            return
        if logits.data_ptr() != last.logits.data_ptr():
            return
        lengths = last.inputs.context_lens
        is_full = bool((lengths % self._pages.block_size == 0).any())
        if is_full or int(lengths.max()) >= self._decoder.config.context_length:
            return
        padded = last.padded
        torch.ops.pyserve.feed_forward(drawn, padded.input_ids, padded.sequences.context_lens)
        self._compute(padded)
        self._ahead = _Run(padded, _Inputs(tokens.clone(), lengths + 1, last.inputs.block_table))
        self._count(ahead=1)

    def _count(self, **more: int) -> None:
        counts = {name: getattr(self._statistics, name) + by for name, by in more.items()}
        self._statistics = replace(self._statistics, **counts)

    def _started_ahead(self, packed: PackedStep) -> Tensor | None:
        ahead, self._ahead = self._ahead, None
        if ahead is None:
            return None
        rows = _rows_of(ahead.inputs, packed, self._pages.block_size)
        if rows is None:
            return None
        self._count(ahead_used=1)
        if rows == list(range(len(ahead.inputs.input_ids))):
            self._last = ahead
            return ahead.logits
        self._last = None
        return ahead.logits[torch.tensor(rows, device=ahead.logits.device)]

    def _of_size(self, size: int) -> _Padded:
        if size not in self._padded:
            self._padded[size] = _Padded(
                size, self._width, self._pages.block_size, self._scratch, self._decoder.device
            )
        return self._padded[size]

    def _compute(self, padded: _Padded) -> None:
        if (
            not self._decoder.uses_varlen
        ):  # nothing that a graph could hold: it waits for the device
            padded.logits = self._forward(padded)
            return
        if padded.graph is None:
            self._capture(padded)
        assert padded.graph is not None
        padded.graph.replay()

    def _forward(self, padded: _Padded) -> Tensor:
        residual = self._decoder.forward(padded.input_ids, padded.sequences, self._pages)
        return self._decoder.logits(residual)

    def _capture(self, padded: _Padded) -> None:
        """Runs the step once, so that libraries set themselves up, and then records it."""
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            self._forward(padded)
        torch.cuda.current_stream().wait_stream(stream)
        padded.graph = torch.cuda.CUDAGraph()
        if self._pool is None:  # one for all sizes: only one of them runs at a time
            self._pool = torch.cuda.graph_pool_handle()
        with torch.cuda.graph(padded.graph, pool=self._pool):
            padded.logits = self._forward(padded)


def _rows_of(ran: _Inputs, packed: PackedStep, block_size: int) -> list[int] | None:
    """Where each sequence of ``packed`` is among those that ran; None unless all of them are, to the bit."""
    where = {key: row for row, key in enumerate(_keys(ran, block_size))}
    asked = _Inputs(packed.input_ids, packed.context_lens, packed.block_table)
    rows = [where.get(key, -1) for key in _keys(asked, block_size)]
    return None if -1 in rows else rows


def _keys(step: _Inputs, block_size: int) -> list[tuple[int, ...]]:
    """Everything that a sequence's logits depend on beside the KV itself: token, length and own blocks."""
    columns = (step.input_ids, step.context_lens, step.block_table)
    return [
        (token, length, *blocks[: -(-length // block_size)])
        for token, length, blocks in zip(*(c.tolist() for c in columns), strict=True)
    ]
