"""Bounded stores as metrics: what each holds, what it may hold, what it let go."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from pyserve.telemetry.metrics import Sample


@dataclass(frozen=True, slots=True)
class StoreStatistics:
    """What a store holds and what it may hold; sizes in bytes."""

    entries: int
    max_entries: int
    bytes: int
    max_bytes: int
    evicted_total: int


def store_samples(jobs: StoreStatistics, idempotency: StoreStatistics) -> Iterator[Sample]:
    """Both stores of one server, for one scrape."""
    for name, seen in (("jobs", jobs), ("idempotency", idempotency)):
        label = (("store", name),)
        yield Sample("gauge", "pyserve_store_entries", "Entries held", seen.entries, label)
        yield Sample("gauge", "pyserve_store_entries_limit", "At most", seen.max_entries, label)
        yield Sample("gauge", "pyserve_store_bytes", "Bytes held", seen.bytes, label)
        yield Sample("gauge", "pyserve_store_bytes_limit", "At most", seen.max_bytes, label)
        yield Sample(
            "counter", "pyserve_store_evictions", "Entries let go", seen.evicted_total, label
        )
