"""How late the Trio loop runs its timers: the one number that tells whether the model starves the server."""

from __future__ import annotations

import time
from collections import deque

import trio


class LoopLag:
    """Sleeps again and again and keeps by how much each wake-up was late (the last ``samples`` of them)."""

    def __init__(self, interval_s: float = 0.02, samples: int = 1500) -> None:
        self._interval_s = interval_s
        self._late_s: deque[float] = deque(maxlen=samples)

    async def run(self) -> None:
        """Samples until cancelled. Real time: not for use under a mock clock."""
        while True:
            before = time.perf_counter()
            await trio.sleep(self._interval_s)
            self.record(time.perf_counter() - before - self._interval_s)

    def record(self, late_s: float) -> None:
        """Files one sample, in seconds."""
        self._late_s.append(max(0.0, late_s))

    @property
    def samples(self) -> int:
        """How many are held."""
        return len(self._late_s)

    def quantile(self, q: float) -> float:
        """The q-quantile (0 to 1) of the recent samples in seconds; 0.0 while there are none."""
        if not self._late_s:
            return 0.0
        ordered = sorted(self._late_s)
        return ordered[min(len(ordered) - 1, int(q * len(ordered)))]
