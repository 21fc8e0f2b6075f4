"""KV memory: from what is free, within bounds, and never less than can be used."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pyserve.memory import DEFAULT_CAP_BYTES, NotEnoughMemory, available_memory, plan_kv

MIB = 1 << 20


def plan(**changes):
    given = {
        "bytes_per_token": 1024, "block_size": 16, "context_length": 2048, "max_sequences": 8,
        "wanted_bytes": None, "free_bytes": 1024 * MIB,
    }  # fmt: skip
    return plan_kv(**(given | changes))


def test_default_is_half_of_what_is_free() -> None:
    assert plan(free_bytes=8 * MIB).bytes == 4 * MIB


def test_default_takes_no_more_than_the_sequences_can_use() -> None:
    assert plan().num_blocks == 8 * 2048 // 16


def test_default_has_a_cap() -> None:
    huge = plan(context_length=1 << 20, max_sequences=64, free_bytes=1 << 40)
    assert huge.bytes == DEFAULT_CAP_BYTES


def test_wanted_memory_is_taken_as_it_is() -> None:
    assert plan(wanted_bytes=100 * MIB).bytes == 100 * MIB


def test_context_shrinks_to_what_the_blocks_hold() -> None:
    assert plan(wanted_bytes=MIB).context_length == 1024
    assert plan(wanted_bytes=2 * MIB).context_length == 2048


@pytest.mark.parametrize("changes", [{"wanted_bytes": 2048 * MIB}, {"wanted_bytes": 16384}])
def test_memory_that_cannot_do_names_the_option(changes) -> None:
    with pytest.raises(NotEnoughMemory, match="kv_memory"):
        plan(**changes)


@given(st.integers(1, 1 << 20), st.integers(1, 256), st.integers(1, 1 << 17), st.integers(1, 512))
def test_plan_stays_within_budget(per_token, block_size, context_length, sequences) -> None:
    free = 1 << 32
    try:
        made = plan_kv(
            bytes_per_token=per_token,
            block_size=block_size,
            context_length=context_length,
            max_sequences=sequences,
            wanted_bytes=None,
            free_bytes=free,
        )
    except NotEnoughMemory:
        return
    assert made.bytes <= free // 2
    assert 0 < made.context_length <= made.num_blocks * block_size


def system(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def test_container_limit_counts_where_it_is_lower(tmp_path: Path) -> None:
    files = {
        "proc/meminfo": "MemTotal: 9 kB\nMemAvailable:    8192 kB\n",
        "sys/fs/cgroup/memory.max": "5000000\n",
        "sys/fs/cgroup/memory.current": "1000000\n",
    }
    assert available_memory(system(tmp_path, files)) == 4_000_000


def test_group_without_limit_leaves_the_systems_figure(tmp_path: Path) -> None:
    files = {
        "proc/meminfo": "MemAvailable: 8192 kB\n",
        "sys/fs/cgroup/memory.max": "max\n",
        "sys/fs/cgroup/memory.current": "1\n",
    }
    assert available_memory(system(tmp_path, files)) == 8192 * 1024


def test_system_that_does_not_say_still_gives_a_figure(tmp_path: Path) -> None:
    assert available_memory(tmp_path) > 0
