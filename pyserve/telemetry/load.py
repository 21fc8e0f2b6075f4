"""How busy the engine is, in the few numbers that health checks and dashboards need."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class LoadSnapshot:
    """Requests in and before the batch, prompt tokens waiting, and the share of KV blocks owned (0 to 1).

    Cached blocks that nobody owns count as free. ``throttled``: new requests are being refused now.
    """

    requests_running: int
    requests_waiting: int
    tokens_waiting: int
    kv_cache_usage_ratio: float
    throttled: bool
