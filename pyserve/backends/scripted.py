"""A back-end without a model: tokens that follow from the context alone, steps that cost simulated time.

What a real model keeps in its KV cache is here the token ids themselves, one to a slot; what it computes
from the whole context is a hash of all of them, read back through the block table. So a wrong block, a
slot overwritten by another sequence, a prefix that is not the same prefix or a chunk left out changes the
tokens that come out, and a test that compares them notices. It is strict as well: a step whose positions,
slots and lengths do not fit together raises.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from pyserve.backends.base import ForwardOutput, ModelInfo, PackedStep

IntArray = npt.NDArray[np.int64]
HashArray = npt.NDArray[np.uint64]

_EMPTY = -1
_GOLDEN = np.uint64(0x9E37_79B9_7F4A_7C15)


@dataclass(frozen=True, slots=True)
class StepCost:
    """Seconds that a simulated step takes: a constant, and so much for each thing in it."""

    base_s: float = 0.010
    prefill_token_s: float = 0.0001
    decode_sequence_s: float = 0.0002
    context_token_s: float = 0.0


@dataclass(slots=True)
class ForwardCounters:
    """What has been asked of the back-end. ``failed`` forwards are among ``forwards``."""

    forwards: int = 0
    failed: int = 0
    tokens: int = 0
    sequences: int = 0
    max_sequences: int = 0
    max_tokens: int = 0


class ScriptedBackend:
    """Implements :class:`~pyserve.backends.base.Backend` and ``SimulatedBackend``.

    ``continuation`` names the token that follows a context (its ids, int64 ``[length]``), made the clear
    favourite of the logits; without it the favourite follows from the context's hash. A forward that
    is given a ``poison_tokens`` token raises RuntimeError; a sequence that holds one of ``nan_tokens`` gets
    a row of NaN. ``on_forward`` is called first in every forward (block there, raise there). ``sleep`` is
    what a step does with its duration: None only counts it, for the inline driver; ``time.sleep``
    makes a load model for the thread driver.
    """

    def __init__(
        self,
        *,
        vocab_size: int = 97,
        context_length: int = 4096,
        hidden_size: int = 8,
        eos_token_ids: Sequence[int] = (),
        cost: StepCost | None = None,
        continuation: Callable[[IntArray], int] | None = None,
        poison_tokens: Sequence[int] = (),
        nan_tokens: Sequence[int] = (),
        on_forward: Callable[[PackedStep], None] | None = None,
        sleep: Callable[[float], None] | None = None,
    ) -> None:
        self.counters = ForwardCounters()
        self.closed = False
        self._info = ModelInfo(
            name="scripted",
            vocab_size=vocab_size,
            context_length=context_length,
            hidden_size=hidden_size,
            eos_token_ids=tuple(eos_token_ids),
            dtype="float32",
            quantization="none",
            num_parameters=0,
            weight_bytes=0,
            kv_bytes_per_token=8,
        )
        self._cost = cost or StepCost()
        self._continuation = continuation
        self._poison = np.array(sorted(poison_tokens), np.int64)
        self._nan = np.array(sorted(nan_tokens), np.int64)
        self._on_forward = on_forward
        self._sleep = sleep
        self._step_s = 0.0
        self._block_size = 0
        self._cache: IntArray = np.empty(0, np.int64)

    @property
    def info(self) -> ModelInfo:
        """No model, honestly described."""
        return self._info

    def allocate(self, num_blocks: int, block_size: int) -> None:
        """Makes the cache of token ids."""
        self._block_size = block_size
        self._cache = np.full(num_blocks * block_size, _EMPTY, np.int64)

    def close(self) -> None:
        """Drops the cache."""
        self.closed = True
        self._cache = np.empty(0, np.int64)

    def take_step_seconds(self) -> float:
        """Simulated seconds since the last call."""
        seconds, self._step_s = self._step_s, 0.0
        return seconds

    def forward(self, packed: PackedStep, hidden_rows: Tensor) -> ForwardOutput:
        """See :class:`~pyserve.backends.base.Backend`. Raises RuntimeError for poison and broken steps."""
        self._charge(packed)
        if self._on_forward is not None:
            self._on_forward(packed)
        ids = _array(packed.input_ids)
        if np.isin(ids, self._poison).any():
            self.counters.failed += 1
            raise RuntimeError("a poison token is in the step")
        self._verify(packed)
        self._cache[_array(packed.slot_mapping)] = ids

        starts = _array(packed.cu_seqlens)
        contexts = {
            int(row): self._context(packed, int(np.searchsorted(starts, row, side="right")) - 1)
            for row in {*packed.logit_rows.tolist(), *hidden_rows.tolist()}
        }
        info = self._info
        logits = np.empty((len(packed.logit_rows), info.vocab_size), np.float32)
        for i, row in enumerate(packed.logit_rows.tolist()):
            logits[i] = self._logits(contexts[row])
        hidden = np.empty((len(hidden_rows), info.hidden_size), np.float32)
        for i, row in enumerate(hidden_rows.tolist()):
            hidden[i] = _noise(_hash(contexts[row]), info.hidden_size)
        return ForwardOutput(torch.from_numpy(logits), torch.from_numpy(hidden))

    def _charge(self, packed: PackedStep) -> None:
        """Counts the step and its simulated time, whether it then fails or not."""
        takes = np.diff(_array(packed.cu_seqlens))
        decodes = int((takes == 1).sum())
        cost, counters = self._cost, self.counters
        seconds = (
            cost.base_s
            + cost.prefill_token_s * float(takes.sum() - decodes)
            + cost.decode_sequence_s * decodes
            + cost.context_token_s * float(_array(packed.context_lens).sum())
        )
        self._step_s += seconds
        if self._sleep is not None:
            self._sleep(seconds)
        counters.forwards += 1
        counters.tokens += int(takes.sum())
        counters.sequences += len(takes)
        counters.max_sequences = max(counters.max_sequences, len(takes))
        counters.max_tokens = max(counters.max_tokens, int(takes.sum()))

    def _verify(self, packed: PackedStep) -> None:
        """Raises where the parts of the step contradict each other."""
        starts, lengths = _array(packed.cu_seqlens), _array(packed.context_lens)
        table = _array(packed.block_table)
        expected_positions, expected_slots = [], []
        for s, length in enumerate(lengths):
            positions = np.arange(length - (starts[s + 1] - starts[s]), length)
            blocks = table[s, positions // self._block_size]
            expected_positions.append(positions)
            expected_slots.append(blocks * self._block_size + positions % self._block_size)
        if not np.array_equal(np.concatenate(expected_positions), _array(packed.positions)):
            raise RuntimeError("positions do not end at the context lengths")
        slots = np.concatenate(expected_slots)
        if not np.array_equal(slots, _array(packed.slot_mapping)):
            raise RuntimeError("slots are not those of the block table")
        if len(np.unique(slots)) != len(slots):
            raise RuntimeError("two tokens of the step share a slot")

    def _context(self, packed: PackedStep, s: int) -> IntArray:
        """The ids of sequence ``s`` up to and with this step, read back from the cache."""
        positions = np.arange(int(packed.context_lens[s]))
        blocks = _array(packed.block_table[s])[positions // self._block_size]
        ids: IntArray = self._cache[blocks * self._block_size + positions % self._block_size]
        if (ids == _EMPTY).any():
            raise RuntimeError("a slot is read that was never written")
        return ids

    def _logits(self, context: IntArray) -> npt.NDArray[np.float32]:
        vocab_size = self._info.vocab_size
        if np.isin(context, self._nan).any():
            return np.full(vocab_size, np.nan, np.float32)
        logits = _noise(_hash(context), vocab_size)
        if self._continuation is not None:
            logits[self._continuation(context)] += 30.0
        return logits


def _array(tensor: Tensor) -> IntArray:
    return tensor.numpy().astype(np.int64)


def _mix(z: HashArray) -> HashArray:
    """splitmix64's finaliser, element by element (Steele et al. 2014)."""
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58_476D_1CE4_E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D0_49BB_1331_11EB)
    return z ^ (z >> np.uint64(31))


def _hash(context: IntArray) -> np.uint64:
    """64 bits of the whole context, order included."""
    index = np.arange(1, len(context) + 1, dtype=np.uint64)
    mixed = _mix(context.astype(np.uint64) + index * _GOLDEN)
    return np.uint64(_mix(np.array([mixed.sum(dtype=np.uint64)], np.uint64))[0])


def _noise(seed: np.uint64, size: int) -> npt.NDArray[np.float32]:
    """``size`` numbers in [-4, 4) that follow from ``seed``."""
    bits = _mix(seed + np.arange(1, size + 1, dtype=np.uint64) * _GOLDEN)
    return ((bits >> np.uint64(40)).astype(np.float64) * (8.0 / 2**24) - 4.0).astype(np.float32)
