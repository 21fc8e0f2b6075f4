"""The adaptive batch window: how long an idle engine waits for company before it starts a batch.

It never delays a busy engine, nor a batch that is full already. Each batch that starts from idle teaches
it: one that filled above 80 % shows that requests come fast enough, and the window shrinks; one that did
not, that waiting longer may help, and it grows.
"""

from __future__ import annotations

from dataclasses import dataclass

SHRINK, GROW, FULL = 0.95, 1.1, 0.8
FIRST_GROWTH = 1 / 64  # of the maximum: 0 times 1.1 would stay 0


@dataclass(frozen=True, slots=True)
class WindowStatistics:
    """``window_s`` is the present length; ``last_fill`` (0 to 1) that of the last batch from idle."""

    window_s: float
    last_fill: float
    batches: int


class BatchWindow:
    """Between ``minimum_s`` and ``maximum_s`` seconds; starts at the minimum."""

    def __init__(self, minimum_s: float, maximum_s: float) -> None:
        self._minimum_s = minimum_s
        self._maximum_s = maximum_s
        self._length_s = minimum_s
        self._opened_s: float | None = None
        self._last_fill = 0.0
        self._batches = 0

    def wait_until(self, now: float, fill: float, due_s: float) -> float | None:
        """Asked while the engine is idle and someone waits: when to ask again, or None to start now.

        ``fill`` is how full the batch would be (1: it can hold no more), ``due_s`` the first deadline.
        """
        if self._opened_s is None:
            self._opened_s = now
        closes_s = self._opened_s + self._length_s
        if fill < 1 and now < closes_s < due_s:
            return closes_s
        self._opened_s = None
        self._adapt(min(fill, 1.0))
        return None

    def close(self) -> None:
        """The engine is busy, or nobody waits any more."""
        self._opened_s = None

    def statistics(self) -> WindowStatistics:
        """A snapshot."""
        return WindowStatistics(self._length_s, self._last_fill, self._batches)

    def _adapt(self, fill: float) -> None:
        self._batches += 1
        self._last_fill = fill
        if fill > FULL:
            length_s = self._length_s * SHRINK
        else:
            length_s = max(self._length_s * GROW, self._maximum_s * FIRST_GROWTH)
        self._length_s = min(max(length_s, self._minimum_s), self._maximum_s)
