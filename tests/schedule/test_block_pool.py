"""BlockPool, behaviour by behaviour; ``test_block_pool_stateful`` compares it with its twin at random."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from pyserve._C import BlockPool


def ints(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def add(
    pool: BlockPool, tokens: list[int], prompt_len: int = 0, salt: int = 0, tenant: int = 0
) -> int:
    return pool.add(ints(*tokens), prompt_len or len(tokens), salt, tenant)


def run_all(pool: BlockPool, row: int) -> None:
    """Computes everything the row has."""
    assert pool.reserve(row, pool.length(row))
    pool.advance(ints(row), ints(pool.length(row) - pool.computed(row)))
    pool.check()


def test_row_keeps_what_it_was_given() -> None:
    pool = BlockPool(8, 4, True)
    row = add(pool, [5, 6, 7], prompt_len=2)
    pool.append(ints(row), ints(9))
    assert pool.tokens(row).tolist() == [5, 6, 7, 9]
    assert (pool.length(row), pool.prompt_len(row), pool.computed(row)) == (4, 2, 0)
    assert pool.blocks(row) == []


def test_match_finds_full_blocks_and_leaves_the_last_token_to_compute() -> None:
    pool = BlockPool(8, 4, True)
    tokens = list(range(8))
    first = add(pool, tokens)
    run_all(pool, first)
    second, longer = add(pool, tokens), add(pool, [*tokens, 8])
    assert pool.match(second) == 4
    assert pool.match(longer) == 8
    assert pool.blocks(second) == pool.blocks(first)[:1]
    assert pool.blocks(longer) == pool.blocks(first)
    assert pool.statistics().prefix_hits == 12
    pool.check()


def test_match_after_release_brings_blocks_back_from_the_free_list() -> None:
    pool = BlockPool(4, 4, True)
    first = add(pool, list(range(9)))
    run_all(pool, first)
    blocks = pool.blocks(first)
    pool.release(first)
    statistics = pool.statistics()
    assert (statistics.free, statistics.cached, statistics.owned) == (2, 2, 0)
    again = add(pool, list(range(9)))
    assert pool.match(again) == 8
    assert pool.blocks(again) == blocks[:2]


def test_different_salt_or_different_beginning_shares_nothing() -> None:
    pool = BlockPool(8, 2, True)
    run_all(pool, add(pool, [1, 2, 3, 4], salt=1))
    assert pool.match(add(pool, [1, 2, 3, 4, 5], salt=2)) == 0
    assert pool.match(add(pool, [9, 2, 3, 4, 5], salt=1)) == 0
    assert pool.match(add(pool, [1, 2, 3, 4, 5], salt=1)) == 4


def test_without_prefix_cache_nothing_matches_and_fork_still_shares() -> None:
    pool = BlockPool(8, 2, False)
    parent = add(pool, [1, 2, 3, 4, 5])
    run_all(pool, parent)
    child = add(pool, [1, 2, 3, 4, 5])
    assert pool.match(child) == 0
    assert pool.fork(parent, child) == 4
    assert pool.blocks(child) == pool.blocks(parent)[:2]
    pool.release(parent)
    pool.check()
    assert pool.statistics().owned == 2


def test_fork_shares_only_the_common_prompt() -> None:
    pool = BlockPool(8, 2, True)
    parent = add(pool, [1, 2, 3, 4, 5, 6], prompt_len=4)
    run_all(pool, parent)
    assert pool.fork(parent, add(pool, [1, 2, 3, 4, 5, 6], prompt_len=6)) == 4
    assert pool.fork(parent, add(pool, [1, 2, 9, 4, 5])) == 2
    assert pool.fork(parent, add(pool, [1, 2, 3, 4])) == 2


def test_trim_keeps_a_prefix_and_lowers_computed() -> None:
    pool = BlockPool(8, 4, True)
    row = add(pool, list(range(11)))
    run_all(pool, row)
    kept = pool.blocks(row)[:1]
    pool.trim(row, 1)
    pool.check()
    assert pool.blocks(row) == kept
    assert pool.computed(row) == 4
    run_all(pool, row)


def test_least_recently_released_prefix_is_evicted_first_and_tails_before_heads() -> None:
    pool = BlockPool(4, 2, True)
    old, new = add(pool, [1, 2, 3, 4]), add(pool, [5, 6, 7, 8])
    run_all(pool, old)
    run_all(pool, new)
    pool.release(old)
    pool.release(new)
    assert pool.reserve(add(pool, [9]), 2)
    assert pool.statistics().evictions == 1
    probe = add(pool, [1, 2, 3, 4, 0])
    assert pool.match(probe) == 2
    assert pool.match(add(pool, [5, 6, 7, 8, 0])) == 4


def test_reserve_that_does_not_fit_changes_nothing() -> None:
    pool = BlockPool(2, 4, True)
    row = add(pool, [1])
    assert not pool.reserve(row, 9)
    assert pool.available_blocks == 2
    assert pool.reserve(row, 8)


def test_tenants_are_counted_by_table_entries() -> None:
    pool = BlockPool(8, 2, True)
    first = add(pool, [1, 2, 3], tenant=7)
    run_all(pool, first)
    second = add(pool, [1, 2, 3], tenant=8)
    pool.match(second)
    assert (pool.tenant_blocks(7), pool.tenant_blocks(8), pool.tenant_blocks(9)) == (2, 1, 0)
    pool.release(first)
    assert pool.tenant_blocks(7) == 0
    pool.check()


def test_release_twice_raises() -> None:
    pool = BlockPool(2, 2, True)
    row = add(pool, [1])
    pool.release(row)
    with pytest.raises(ValueError, match="not live"):
        pool.release(row)
    with pytest.raises(ValueError, match="not live"):
        pool.length(row)


def test_wrong_calls_raise_and_change_nothing() -> None:
    pool = BlockPool(4, 2, True)
    row = add(pool, [1, 2, 3])
    with pytest.raises(ValueError, match="beyond"):
        pool.advance(ints(row), ints(1))
    pool.reserve(row, 3)
    with pytest.raises(ValueError, match="beyond"):
        pool.advance(ints(row), ints(4))
    with pytest.raises(ValueError, match="beyond"):
        pool.advance(ints(row, row), ints(2, 2))
    with pytest.raises(ValueError, match="owns blocks"):
        pool.match(row)
    with pytest.raises(ValueError, match="owns blocks"):
        pool.fork(add(pool, [1]), row)
    with pytest.raises(ValueError, match="salts"):
        pool.fork(row, add(pool, [1], salt=1))
    with pytest.raises(ValueError, match="prompt_len"):
        pool.add(ints(1), 2, 0, 0)
    with pytest.raises(ValueError, match="prompt_len"):
        pool.add(ints(), 0, 0, 0)
    with pytest.raises(ValueError, match="negative"):
        pool.append(ints(row), ints(-1))
    with pytest.raises(ValueError, match="tokens must be a contiguous"):
        pool.add(torch.tensor([1, 2]), 2, 0, 0)
    with pytest.raises(ValueError, match="positive"):
        BlockPool(0, 16, True)
    with pytest.raises(ValueError, match="32 bits"):
        BlockPool(2**31 - 1, 16, True)
    pool.check()
