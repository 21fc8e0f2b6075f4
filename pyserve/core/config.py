"""How the scheduler is set up: what a step may hold, what may wait, and for how long."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    """Limits and policy; ``_s`` is seconds. Raises ValueError for values that make no sense together.

    ``num_blocks`` KV blocks of ``block_size`` tokens; ``context_length`` is the most tokens, prompt and
    output, of one sequence. A step holds up to ``max_batch_tokens`` tokens of ``max_batch_requests``
    sequences, and while anyone decodes no more prefill than ``max_prefill_s`` seconds of it.
    ``max_waiting_requests`` and ``max_waiting_tokens`` (prompt tokens) bound the line. ``ageing_s``: waiting
    so long weighs as much as one step of priority. ``window_min_s`` and ``window_max_s`` bound the batch
    window. ``watermark``: the share of the blocks that stays free when a waiting sequence is admitted;
    ``headroom_tokens``: output tokens that a preempted sequence must find room for, beyond what it had,
    before it is admitted again.
    """

    num_blocks: int
    context_length: int
    eos_token_ids: tuple[int, ...] = ()
    block_size: int = 16
    max_batch_tokens: int = 512
    max_batch_requests: int = 64
    max_waiting_requests: int = 1024
    max_waiting_tokens: int = 262_144
    ageing_s: float = 10.0
    window_min_s: float = 0.0
    window_max_s: float = 0.005
    max_prefill_s: float = 0.1
    watermark: float = 0.01
    headroom_tokens: int = 64

    def __post_init__(self) -> None:
        positive = (
            "num_blocks",
            "context_length",
            "block_size",
            "max_batch_tokens",
            "max_batch_requests",
            "max_waiting_requests",
            "max_waiting_tokens",
            "ageing_s",
            "max_prefill_s",
        )
        for name in positive:
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be positive, not {getattr(self, name)}")
        if self.max_batch_requests > self.max_batch_tokens:
            raise ValueError("max_batch_requests must not exceed max_batch_tokens")
        if not 0 <= self.window_min_s <= self.window_max_s:
            raise ValueError("0 <= window_min_s <= window_max_s must hold")
        if not 0 <= self.watermark < 1:
            raise ValueError(f"watermark must be in [0, 1), not {self.watermark}")
        if self.headroom_tokens < 0:
            raise ValueError(f"headroom_tokens must not be negative, not {self.headroom_tokens}")

    @property
    def watermark_blocks(self) -> int:
        """Blocks that stay free when a waiting sequence is admitted."""
        return math.ceil(self.watermark * self.num_blocks)

    @property
    def max_sequence_tokens(self) -> int:
        """The most tokens, prompt and output, that one sequence can ever have here.

        The last token needs no KV, so a pool of N slots carries a sequence of N + 1.
        """
        return min(self.context_length, self.num_blocks * self.block_size + 1)
