"""What this machine can do at best, measured in about a second, and how long that makes an op last.

Weights, keys and values and logits come from memory; activations fit the cores' own caches. Where everything
that a step reads fits the last-level cache, it comes from there, faster than from memory: so memory is
measured over as many bytes as the weights have. What still lies in a cache by chance (small models, one
op run again and again) can show more than 100 %.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Protocol

from pyserve import _C

MOST_MEMORY_BYTES = 256 << 20
CACHED_BYTES_PER_THREAD = 512 << 10


class Cost(Protocol):
    """What an op cannot do without, as ``_C.OpTime`` says it."""

    @property
    def memory_bytes(self) -> float:
        """Weights, keys and values, logits."""

    @property
    def cached_bytes(self) -> float:
        """Activations, read and written."""

    @property
    def float_operations(self) -> float:
        """float32; a multiply-add is two."""

    @property
    def int_operations(self) -> float:
        """8 bits; a multiply-add is two."""

    @property
    def tile_operations(self) -> float:
        """bfloat16 in tile registers; a multiply-add is two."""


@dataclass(frozen=True, slots=True)
class Work:
    """A :class:`Cost` that is reckoned by hand."""

    memory_bytes: float = 0.0
    cached_bytes: float = 0.0
    float_operations: float = 0.0
    int_operations: float = 0.0
    tile_operations: float = 0.0


@dataclass(frozen=True, slots=True)
class Limits:
    """Of all threads of the pool together, a second; ``tile_operations`` is 0 where there are no tiles."""

    memory_bytes: float
    cached_bytes: float
    float_operations: float
    int_operations: float
    tile_operations: float
    threads: int
    isa: str

    def parts_s(self, cost: Cost) -> dict[str, float]:
        """Seconds that each resource alone needs for it."""
        return {
            "memory": cost.memory_bytes / self.memory_bytes,
            "cache": cost.cached_bytes / self.cached_bytes,
            "arithmetic": cost.float_operations / self.float_operations
            + cost.int_operations / self.int_operations
            + (cost.tile_operations / self.tile_operations if cost.tile_operations else 0.0),
        }

    def seconds(self, cost: Cost) -> float:
        """The least time: that of the scarcest resource, as if the others were free meanwhile."""
        return max(self.parts_s(cost).values())

    def bound(self, cost: Cost) -> str:
        """What is scarcest: "memory", "cache" or "arithmetic"."""
        parts = self.parts_s(cost)
        return max(parts, key=lambda name: parts[name])

    def percent(self, cost: Cost, seconds: float) -> float:
        """100 where it took no longer than the limit."""
        return 100 * self.seconds(cost) / seconds if seconds > 0 else 0.0

    def as_dict(self) -> dict[str, float | int | str]:
        """For JSON."""
        return asdict(self)

    def __str__(self) -> str:
        return (
            f"{self.threads} threads, {self.isa}: memory {self.memory_bytes / 1e9:.1f} GB/s,"
            f" caches {self.cached_bytes / 1e9:.0f} GB/s, float32 {self.float_operations / 1e9:.0f} GFLOP/s,"
            f" int8 {self.int_operations / 1e9:.0f} GOP/s"
            + (f", tiles {self.tile_operations / 1e9:.0f} GFLOP/s" if self.tile_operations else "")
        )


def measure_limits(working_set_bytes: int = MOST_MEMORY_BYTES, isa: str = "") -> Limits:
    """Measured now, on the threads that a forward pass uses; keep the machine quiet meanwhile.

    ``working_set_bytes``: what a step reads anew each time. ``isa`` as for the decoder.
    """
    threads = _C.get_num_threads()
    memory = min(max(working_set_bytes, 1 << 20), MOST_MEMORY_BYTES)
    # Twice, in turns: what else runs for a moment should not spoil a figure.
    rounds = [
        (
            _C.measure_read(memory, 0.2, isa),
            _C.measure_read(CACHED_BYTES_PER_THREAD * threads, 0.1, isa),
            _C.measure_peak("float32", 0.1, isa),
            _C.measure_peak("int8", 0.1, isa),
            _C.measure_peak("tile", 0.1, isa),
        )
        for _ in range(2)
    ]
    memory_s, cached_s, float_s, int_s, tile_s = map(max, zip(*rounds, strict=True))
    isa = isa or _C.supported_isas()[-1]
    return Limits(memory_s, cached_s, float_s, int_s, tile_s, threads, isa)
