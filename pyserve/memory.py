"""How much memory is free, and how many KV blocks that gives.

What is free is the least of the system's own figure and what the control group (a container's limit) leaves.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from pyserve.config_values import format_size
from pyserve.errors import PyserveError

DEFAULT_SHARE = (
    0.5  # of what is free: weights are loaded by then, activations and the rest are small
)
DEFAULT_CAP_BYTES = 4 << 30  # memory that nobody asked for should not be taken


class NotEnoughMemory(PyserveError):
    """The KV cache that was asked for, or the least one, does not fit."""


@dataclass(frozen=True, slots=True)
class KvPlan:
    """``num_blocks`` of ``block_size`` tokens; one sequence may have ``context_length`` tokens."""

    num_blocks: int
    block_size: int
    block_bytes: int
    context_length: int

    @property
    def bytes(self) -> int:
        """All blocks together."""
        return self.num_blocks * self.block_bytes


def plan_kv(
    *,
    bytes_per_token: int,
    block_size: int,
    context_length: int,
    max_sequences: int,
    wanted_bytes: int | None,
    free_bytes: int | None = None,
    default_bytes: int | None = None,
) -> KvPlan:
    """Blocks for ``wanted_bytes``; where that is None for ``default_bytes``, or for half of what is free, at
    most 4 GiB, and no more than ``max_sequences`` whole contexts can use. ``context_length`` shrinks to what
    the blocks hold.

    Raises :class:`NotEnoughMemory` where ``wanted_bytes`` is more than is free, or no block fits.
    """
    free_bytes = available_memory() if free_bytes is None else free_bytes
    block_bytes = bytes_per_token * block_size
    if wanted_bytes is None:
        useful = max_sequences * -(-context_length // block_size) * block_bytes
        if default_bytes is None:
            default_bytes = min(int(free_bytes * DEFAULT_SHARE), DEFAULT_CAP_BYTES)
        budget = min(default_bytes, useful)
    elif wanted_bytes > free_bytes:
        raise NotEnoughMemory(
            f"kv_memory: {format_size(wanted_bytes)} was asked for, but {format_size(free_bytes)} is free"
        )
    else:
        budget = wanted_bytes
    num_blocks = budget // block_bytes
    if num_blocks < 2:
        raise NotEnoughMemory(
            f"kv_memory: {format_size(budget)} is less than two blocks of {format_size(block_bytes)}"
            f" ({block_size} tokens); set kv_memory higher or block_size lower"
        )
    return KvPlan(num_blocks, block_size, block_bytes, min(context_length, num_blocks * block_size))


def available_memory(root: Path = Path("/")) -> int:
    """Bytes that can be taken without swapping; half of all memory where the system does not say."""
    system = _meminfo(root / "proc/meminfo")
    limits = [
        _difference(root / folder / limit, root / folder / used)
        for folder, limit, used in (
            ("sys/fs/cgroup", "memory.max", "memory.current"),
            ("sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes"),
        )
    ]
    return max(0, min([system, *(limit for limit in limits if limit is not None)]))


def _meminfo(path: Path) -> int:
    try:
        for line in path.read_text(encoding="ascii").splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2


def _difference(limit: Path, used: Path) -> int | None:
    try:
        return int(limit.read_text(encoding="ascii")) - int(used.read_text(encoding="ascii"))
    except (OSError, ValueError):  # no such group, or "max": no limit
        return None
