"""select, behaviour by behaviour, and against its Python twin on random pools."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pyserve._C import BlockPool, Limits, Selection, select

from .twin import Candidate, TwinPool, twin_select

NO_LIMIT = Limits(1000, 1000)


def ints(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def add(pool: BlockPool, length: int, computed: int = 0, salt: int = 0) -> int:
    """A row of ``length`` tokens, ``computed`` of them done."""
    row = pool.add(torch.arange(length, dtype=torch.int32), length, salt, 0)
    assert pool.reserve(row, computed)
    pool.advance(ints(row), ints(computed))
    return row


def choose(pool: BlockPool, *candidates: Candidate, limits: Limits = NO_LIMIT) -> Selection:
    selection = select(
        pool,
        ints(*[c.row for c in candidates]),
        ints(*[c.want for c in candidates]),
        torch.tensor([c.running for c in candidates], dtype=torch.uint8),
        ints(*[c.need_free for c in candidates]),
        limits,
    )
    pool.check()
    take = selection.take.tolist()
    assert selection.used_tokens == sum(take)
    assert selection.used_requests == sum(t > 0 for t in take)
    for candidate, tokens in zip(candidates, take, strict=True):
        blocks = len(pool.blocks(candidate.row)) * pool.block_size
        assert tokens == 0 or pool.computed(candidate.row) + tokens <= blocks
    return selection


def running(row: int, want: int) -> Candidate:
    return Candidate(row, want, running=True)


def waiting(row: int, want: int, need_free: int = 0) -> Candidate:
    return Candidate(row, want, running=False, need_free=need_free)


def test_decode_goes_before_better_ranked_prefill() -> None:
    pool = BlockPool(16, 4, False)
    prefill, decode = add(pool, 12, 4), add(pool, 6, 5)
    selection = choose(pool, running(prefill, 8), running(decode, 1), limits=Limits(4, 8))
    assert selection.take.tolist() == [3, 1]


def test_prefill_budget_binds_prefill_only() -> None:
    pool = BlockPool(16, 4, False)
    rows = [add(pool, 12, 4), add(pool, 6, 5), add(pool, 8)]
    candidates = running(rows[0], 8), running(rows[1], 1), waiting(rows[2], 8)
    assert choose(pool, *candidates, limits=Limits(64, 8, 3)).take.tolist() == [3, 1, 0]
    assert choose(pool, *candidates, limits=Limits(64, 8, 10)).take.tolist() == [8, 1, 2]


def test_request_budget_counts_rows_that_advance() -> None:
    pool = BlockPool(16, 4, False)
    rows = [add(pool, 4, 3) for _ in range(3)]
    selection = choose(pool, *[running(row, 1) for row in rows], limits=Limits(64, 2))
    assert selection.take.tolist() == [1, 1, 0]
    assert selection.preempted == []


def test_first_waiting_row_that_does_not_fit_closes_the_door() -> None:
    pool = BlockPool(8, 4, False)
    rows = [add(pool, 4, 3), add(pool, 40), add(pool, 4)]
    selection = choose(pool, running(rows[0], 1), waiting(rows[1], 40), waiting(rows[2], 4))
    assert selection.take.tolist() == [1, 0, 0]
    assert pool.blocks(rows[1]) == []


def test_need_free_holds_a_waiting_row_back_although_its_chunk_fits() -> None:
    pool = BlockPool(8, 4, False)
    rows = [add(pool, 4, 3), add(pool, 16)]
    assert choose(pool, running(rows[0], 1), waiting(rows[1], 4, 8)).take.tolist() == [1, 0]
    assert choose(pool, running(rows[0], 1), waiting(rows[1], 4, 7)).take.tolist() == [1, 4]


def test_lacking_row_takes_only_the_tail_blocks_it_needs_from_the_worst_rank() -> None:
    pool = BlockPool(6, 4, False)
    best, middle, worst = add(pool, 9, 8), add(pool, 6, 5), add(pool, 8, 7)
    selection = choose(pool, running(best, 1), running(middle, 1), running(worst, 1))
    assert selection.take.tolist() == [1, 1, 0]
    assert selection.preempted == [(2, 1)]
    assert pool.computed(worst) == 4


def test_waiting_owner_loses_blocks_before_any_running_row() -> None:
    pool = BlockPool(4, 4, False)
    best, worst, held = add(pool, 5, 4), add(pool, 4, 3), add(pool, 9, 8)
    selection = choose(pool, running(best, 1), running(worst, 1), waiting(held, 1))
    assert selection.take.tolist() == [1, 1, 0]
    assert (selection.preempted, selection.trimmed) == ([], [(2, 1)])


def test_worst_row_preempts_itself_and_keeps_its_blocks() -> None:
    pool = BlockPool(3, 4, False)
    best, worst = add(pool, 7, 6), add(pool, 5, 4)
    selection = choose(pool, running(best, 1), running(worst, 1))
    assert selection.take.tolist() == [1, 0]
    assert selection.preempted == [(1, 1)]
    assert pool.computed(worst) == 4


def test_nobody_is_admitted_in_a_step_that_preempts() -> None:
    pool = BlockPool(3, 4, False)
    rows = [add(pool, 7, 6), add(pool, 5, 4), add(pool, 9)]
    selection = choose(pool, running(rows[0], 1), running(rows[1], 1), waiting(rows[2], 1))
    assert selection.take.tolist() == [1, 0, 0]


def test_victim_gives_its_budget_back() -> None:
    pool = BlockPool(4, 4, False)
    best, worst, other = add(pool, 16, 8), add(pool, 8, 7), add(pool, 1)
    selection = choose(pool, running(best, 8), running(worst, 1), limits=Limits(8, 8))
    assert selection.take.tolist() == [7, 0]
    assert selection.preempted == [(1, 0)]
    assert selection.used_tokens == 7
    pool.release(other)


def test_blocks_shared_with_the_row_in_need_are_no_help_and_are_spared() -> None:
    pool = BlockPool(4, 2, True)
    best = add(pool, 4, 4)
    sharing = pool.add(torch.arange(5, dtype=torch.int32), 5, 0, 0)
    assert pool.match(sharing) == 4
    other = add(pool, 4, 3, salt=1)
    pool.append(ints(best), ints(9))
    selection = choose(pool, running(best, 1), running(other, 1), waiting(sharing, 1))
    assert selection.take.tolist() == [1, 0, 0]
    assert selection.preempted == [(1, 1)]
    assert selection.trimmed == []


def test_lone_waiting_row_advances_although_others_hold_every_block() -> None:
    pool = BlockPool(4, 4, False)
    holder, new = add(pool, 17, 16), add(pool, 16)
    selection = choose(pool, waiting(new, 16, 4), waiting(holder, 1, 1))
    assert selection.take.tolist() == [16, 0]
    assert selection.trimmed == [(1, 0)]


def test_wrong_candidates_raise() -> None:
    pool = BlockPool(4, 4, False)
    row, other = add(pool, 4), add(pool, 4)
    with pytest.raises(ValueError, match="twice"):
        choose(pool, running(row, 1), running(row, 1))
    with pytest.raises(ValueError, match="before waiting"):
        choose(pool, waiting(row, 1), running(other, 1))
    with pytest.raises(ValueError, match="not live"):
        choose(pool, running(99, 1))
    with pytest.raises(ValueError, match="negative"):
        choose(pool, running(row, -1))
    with pytest.raises(ValueError, match="length"):
        select(pool, ints(row), ints(), torch.ones(1, dtype=torch.uint8), ints(0), NO_LIMIT)


@st.composite
def pools(draw: Any) -> tuple[BlockPool, TwinPool, list[Candidate]]:
    """A pool in some reachable state, its twin, and candidates over all its rows."""
    size, blocks = draw(st.integers(1, 4)), draw(st.integers(1, 14))
    cache = draw(st.booleans())
    pool, twin = BlockPool(blocks, size, cache), TwinPool(blocks, size, cache)
    candidates = []
    states = draw(st.lists(st.booleans(), min_size=1, max_size=8))
    for is_running in sorted(states, reverse=True):
        tokens = draw(st.lists(st.integers(0, 1), min_size=1, max_size=16))
        row = pool.add(torch.tensor(tokens, dtype=torch.int32), len(tokens), 0, 0)
        twin.add(row, tokens, len(tokens), 0, 0)
        if draw(st.booleans()):
            pool.match(row)
            twin.adopt(row, pool.blocks(row))
        take = draw(st.integers(0, len(tokens) - 1 - pool.computed(row)))
        if is_running or draw(st.booleans()):
            goal = pool.computed(row) + take
            if pool.reserve(row, goal):
                twin.reserve(row, goal)
                pool.advance(ints(row), ints(take))
                twin.advance(row, take)
        want = draw(st.sampled_from([0, 1, 1, 2, 5, 16]))
        if is_running and draw(st.booleans()):
            want = len(tokens) - pool.computed(row)
        candidates.append(Candidate(row, want, is_running, draw(st.integers(0, blocks))))
    return pool, twin, candidates


@settings(max_examples=300, deadline=None)
@given(pools(), st.integers(0, 24), st.integers(0, 8), st.integers(-1, 12))
def test_agrees_with_twin(
    state: tuple[BlockPool, TwinPool, list[Candidate]], tokens: int, requests: int, prefill: int
) -> None:
    pool, twin, candidates = state
    selection = choose(pool, *candidates, limits=Limits(tokens, requests, prefill))
    expected = twin_select(
        twin,
        candidates,
        token_budget=tokens,
        request_budget=requests,
        prefill_budget=prefill,
    )
    assert selection.take.tolist() == expected.take
    assert selection.preempted == expected.preempted
    assert selection.trimmed == expected.trimmed
    for candidate in candidates:
        assert pool.blocks(candidate.row) == twin.rows[candidate.row].blocks
        assert pool.computed(candidate.row) == twin.rows[candidate.row].computed


@settings(max_examples=300, deadline=None)
@given(pools(), st.integers(1, 24))
def test_somebody_advances_if_the_best_fits_the_pool_alone(
    state: tuple[BlockPool, TwinPool, list[Candidate]], tokens: int
) -> None:
    pool, _, candidates = state
    best = candidates[0].row
    fits = pool.length(best) <= pool.num_blocks * pool.block_size
    if not fits or candidates[0].want == 0:
        return
    assert choose(pool, *candidates, limits=Limits(tokens, 8)).used_tokens > 0
